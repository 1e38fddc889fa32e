"""Two ranks on one CPU (gloo) against one process: the same steps, the same sets; a rank that dies; torchrun."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from conftest import SHORT, command, prepared, process, rows, same_run, summary
from harness import options, ranks


def several(target, *args, count: int = 2) -> list:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = dict(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return [process(as_rank, place | dict(RANK=str(r), LOCAL_RANK=str(r)), target, *args) for r in range(count)]


def as_rank(environment, target, *args) -> int:
    os.environ.update(environment)
    return target(*args)


def wait(started, seconds: float = 90) -> list[int]:
    for one in started:
        one.join(seconds)
    return [one.exitcode for one in started]


# ------------------------------------------------------------------ one step


def some_steps(argv, name) -> int:
    c = options.configure(argv)
    ranks.start(c.device, c.batch_size)
    _, s, samples = prepared(argv)
    index = samples.pool[: c.batch_size]
    batch = (index, samples.images[index], samples.labels[index])
    losses_seen = [float(train.train_step(s, *batch, True)[0]) for _ in range(2)]
    seen = dict(loss=losses_seen, network=s.network.state_dict(), base=s.base.state_dict())
    seen |= dict(candidates=samples.candidates, guess=train.predict(s, samples.images[:37]))
    torch.save(seen, f"{name}{ranks.rank()}.pt")
    return 0


@pytest.mark.parametrize("arch", ["cnn", "mlp"])
@pytest.mark.parametrize("base", [name for name in options.BASES if name != "dividemix"])
def test_two_ranks_take_the_steps_of_one_process(base, arch):
    """Losses, weights, running statistics, queue, prototypes, label weights, candidate sets; an uneven batch in
    evaluation too. Seed 1: no activation lies so near to 0 that rounding decides its ReLU."""
    argv = [*SHORT, "--base", base, "--arch", arch, "--seed", "1", "--lr", "0.001"]
    argv += ["--no-irnet"] if base in options.WITHOUT_IRNET else []
    assert some_steps(argv, "one") == 0
    assert wait(several(some_steps, argv, "two")) == [0, 0], Path("log").read_text()
    one, *both = (torch.load(f"{name}.pt", weights_only=True) for name in ("one0", "two0", "two1"))
    assert both[0]["loss"] == both[1]["loss"]
    assert torch.equal(both[0]["candidates"], both[1]["candidates"])
    for two in both:
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert torch.equal(one["candidates"], two["candidates"]) and torch.equal(one["guess"], two["guess"])
        for part in ("network", "base"):
            for name, value in one[part].items():
                if torch.is_tensor(value):
                    assert torch.allclose(value.float(), two[part][name].float(), rtol=1e-3, atol=1e-5), name
                else:
                    assert value == two[part][name], name


def test_two_ranks_take_the_steps_of_one_process_in_bf16_too():
    argv = [*SHORT, "--base", "pico", "--arch", "cnn", "--seed", "1", "--lr", "0.001", "--amp", "bf16"]
    assert some_steps(argv, "one") == 0
    assert wait(several(some_steps, argv, "two")) == [0, 0], Path("log").read_text()
    one, *both = (torch.load(f"{name}.pt", weights_only=True) for name in ("one0", "two0", "two1"))
    assert both[0]["loss"] == both[1]["loss"] == pytest.approx(one["loss"], rel=0.01)
    for name, value in one["network"].items():
        if "running" in name:
            assert both[0]["network"][name].dtype == torch.float32
            assert torch.allclose(value, both[0]["network"][name], rtol=0.02, atol=2e-3), name


# ------------------------------------------------------------------ whole runs


def watched(argv, name) -> int:
    """Notes the candidate sets of this rank after every epoch."""
    seen, original = [], ranks.same_everywhere

    def noting(candidates):
        seen.append(candidates.clone())
        return original(candidates)

    ranks.same_everywhere = noting
    code = train.main(argv)
    torch.save(torch.stack(seen), f"{name}-{os.environ['RANK']}.pt")
    return code


@pytest.mark.parametrize("base", ["pico", "lwc"])
def test_ranks_hold_the_same_sets_at_every_epoch_and_resume_with_another_number(base):
    argv = [*SHORT, "--base", base, "--epochs", "5", "--seed", "1"]
    assert wait(several(watched, [*argv, "--out", "two"], "sets")) == [0, 0], Path("log").read_text()
    one, two = (torch.load(f"sets-{r}.pt", weights_only=True) for r in (0, 1))
    assert len(one) == 6 and torch.equal(one, two) and not torch.equal(one[0], one[-1])
    assert train.main([*argv, "--out", "one"]) == 0
    with np.load("one/candidates.npz") as a, np.load("two/candidates.npz") as b:
        assert np.array_equal(a["before"], b["before"])
        assert (a["after"] != b["after"]).any(1).sum() <= 40  # of 200: rounding decided
    assert abs(summary("one")["last"] - summary("two")["last"]) < 0.1
    assert len(rows("two")) == 5 and rows("two")[0]["loss"] == pytest.approx(rows("one")[0]["loss"], rel=1e-3)

    # Two ranks for two epochs, then one process, then three ranks (a batch of 30 divides by all).
    argv = [*argv, "--batch-size", "30"]
    assert wait(several(stopped_in, 2, [*argv, "--out", "r"])) == [143, 143], Path("log").read_text()
    assert len(json.loads(torch.load("r/checkpoint.pt", weights_only=True)["rows"])) == 1
    one = process(stopped_in, 3, [*argv, "--out", "r", "--resume"])
    one.join(60)
    assert one.exitcode == 143
    assert wait(several(train.main, [*argv, "--out", "r", "--resume"], count=3)) == [0] * 3, Path("log").read_text()
    assert [row["epoch"] for row in rows("r")] == [1, 2, 3, 4, 5]


def stopped_in(epoch: int, argv) -> int:
    """SIGTERM in the middle of an epoch; a rank later or earlier than another by a step."""
    original = train.train_epoch

    def patched(s, samples, e, *more, **options):
        step = train.train_step
        calls = []

        def counted(*args):
            calls.append(1)
            if e == epoch and len(calls) == 2 + ranks.rank():
                os.kill(os.getpid(), signal.SIGTERM)
            return step(*args)

        train.train_step = counted
        try:
            return original(s, samples, e, *more, **options)
        finally:
            train.train_step = step

    train.train_epoch = patched
    return train.main(argv)


def dies_in(epoch: int, argv) -> int:
    original = train.train_epoch

    def patched(s, samples, e, *more, **options):
        if e == epoch and ranks.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(s, samples, e, *more, **options)

    train.train_epoch = patched
    return train.main(argv)


def test_a_rank_that_dies_ends_the_run_and_resume_goes_on():
    argv = [*SHORT, "--base", "proden", "--epochs", "5", "--save-every", "100", "--out", "r"]
    began = time.monotonic()
    assert wait(several(dies_in, 4, argv), 60) == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 60
    log = Path("log").read_text()
    assert "another rank is gone" in log and "--resume" in log and "Traceback" not in log
    assert len(json.loads(torch.load("r/checkpoint.pt", weights_only=True)["rows"])) == 3
    assert wait(several(train.main, [*argv, "--resume"])) == [0, 0], Path("log").read_text()
    assert wait(several(train.main, [*argv[:-1], "whole"])) == [0, 0]
    assert same_run("whole", "r")  # two ranks again: bit for bit


def differing(argv) -> int:
    original = train.train_epoch

    def patched(s, samples, *more, **options):
        row = original(s, samples, *more, **options)
        samples.candidates[7] ^= ranks.rank() == 1
        return row

    train.train_epoch = patched
    return train.main(argv)


def test_sets_that_differ_between_ranks_are_noticed():
    assert wait(several(differing, [*SHORT, "--base", "cc", "--epochs", "3", "--out", "r"])) == [1, 1]
    assert "differ after epoch 1" in Path("log").read_text() and not Path("r/checkpoint.pt").exists()


def test_bad_input_is_said_once(capfd):
    absent = ["--dataset", "absent.npz", "--batch-size", "32"]
    for argv, named in ((["--batch-size", "33"], "--batch-size"), (["--resume"], "--resume"), (absent, "absent")):
        Path("log").unlink(missing_ok=True)
        assert wait(several(train.main, argv)) == [2, 2]
        log = Path("log").read_text()
        assert log.count("error: ") == 1 and named in log and "Traceback" not in log


def test_torchrun():
    argv = [*SHORT, "--base", "cc", "--epochs", "3", "--out", "r"]
    program = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    started = command(*argv, program=program, env=os.environ | {"OMP_NUM_THREADS": "1"})
    out, err = started.communicate(timeout=120)
    assert started.returncode == 0, err
    assert "2 ranks" in out and out.count("test accuracy") == 1 and "Warning" not in err and len(rows("r")) == 3


def test_a_world_without_torchrun_gets_one_line(capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert train.main([]) == 2
    err = capfd.readouterr().err
    assert "torchrun" in err and err.count("\n") == 1
