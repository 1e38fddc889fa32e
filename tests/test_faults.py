"""Faults: signals, damaged files, full disks, two processes, a bad loss, odd sequences. No epoch is lost."""

import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import options
import runs
import train
from conftest import TOY, Bomb, command, process, rows, run, same_run
from test_runs import SHORT, killed_in_step, stopping_at

# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("base", ["cc", "lwc", "pico"])  # no label weights, two blocks of them, a second encoder
def test_killed_at_random_moments_and_resumed_it_ends_the_same(base):
    """SIGKILL, four times a base, at any moment from the start of the process on."""
    argv = [*SHORT, "--base", base, "--epochs", "24", "--transductive-every", "24"]
    began = time.monotonic()
    whole = process(run, [*argv, "--out", "whole"])
    whole.join(120)
    took = time.monotonic() - began
    moments, kills = random.Random(base), 0
    for _ in range(60):
        more = ["--resume"] if Path("r/config.json").exists() else []
        child = process(run, [*argv, "--out", "r", *more])
        if kills < 4:
            child.join(moments.uniform(0.02, 0.24 * took))
            if child.exitcode is None:
                child.kill()
                kills += 1
        child.join(120)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL, Path("log").read_text()
    assert kills == 4 and Path("r/summary.json").exists()
    assert same_run("whole", "r")


def test_a_hundred_damaged_checkpoints_are_all_detected(capsys):
    """Single flipped bits and truncations anywhere: the previous checkpoint is taken, the damaged one put aside."""
    argv = [*SHORT, "--base", "cc", "--arch", "mlp", "--epochs", "2", "--out", "r"]
    assert train.main(argv) == 0
    newest, previous = Path("r/checkpoint.pt").read_bytes(), Path("r/previous.pt").read_bytes()
    config = options.recorded(options.configure(argv))
    moments = random.Random(0)
    for trial in range(100):
        content = bytearray(newest)
        if trial % 2:
            content[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
        else:
            del content[moments.randrange(len(content)) :]
        Path("r/checkpoint.pt").write_bytes(content)
        Path("r/previous.pt").write_bytes(previous)
        folder = runs.Run("r", named=True)
        state, finished = folder.look(config, resume=True, overwrite=False)
        assert len(json.loads(state["rows"])) == 1 and not finished
        assert "checkpoint.pt" in capsys.readouterr().err
        folder.begin(config, json.loads(state["rows"]))
        folder.close()
        assert not Path("r/checkpoint.pt").exists() and Path("r/checkpoint.damaged").read_bytes() == content
    with pytest.raises(runs.Damaged):
        runs.unpack(newest[:10])
    assert len(json.loads(runs.unpack(newest)["rows"])) == 2


@pytest.mark.parametrize("what", ["truncated", "flipped", "empty", "foreign", "pickle", "text"])
def test_resume_from_the_previous_checkpoint(what, monkeypatch, capsys):
    argv = [*SHORT, "--base", "proden", "--epochs", "5"]
    assert train.main([*argv, "--out", "whole"]) == 0
    stopping_at(monkeypatch, 5 + 5 + 6 + 3)  # in the fourth epoch
    assert train.main([*argv, "--out", "r"]) == 143
    path = Path("r/checkpoint.pt")
    content = path.read_bytes()
    if what == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        bad = dict(truncated=content[:middle], flipped=flipped, empty=b"", text=b"hello" * 99)
        bad["pickle"] = pickle.dumps(Bomb())
        path.write_bytes(bad[what])
    capsys.readouterr()
    assert train.main([*argv, "--out", "r", "--resume"]) == 0
    said = capsys.readouterr()
    assert "checkpoint.pt" in said.err and "epoch 2" in said.err and said.err.count("\n") == 1
    assert same_run("whole", "r") and not Path("exploded").exists()
    for name in ("checkpoint.pt", "previous.pt"):
        (Path("r") / name).write_bytes(b"")
    for _ in range(2):  # and again: nothing is begun anew unasked
        assert train.main([*argv, "--out", "r", "--resume"]) == 2 and "--overwrite" in capsys.readouterr().err
    assert len(rows("r")) == 5


def limited(size: int, argv) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return train.main(argv)


def test_a_full_disk_keeps_the_previous_checkpoint(monkeypatch):
    argv = [*SHORT, "--base", "log", "--epochs", "4"]
    assert train.main([*argv, "--out", "whole"]) == 0
    stopping_at(monkeypatch, 5 + 3)  # in the second epoch
    assert train.main([*argv, "--out", "r"]) == 143
    before = Path("r/checkpoint.pt").read_bytes()
    child = process(limited, len(before) // 2, [*argv, "--out", "r", "--resume"])
    child.join(60)
    log = Path("log").read_text()
    assert child.exitcode == 1 and "Traceback" not in log and "epoch 1 is kept" in log and "--resume" in log
    assert Path("r/checkpoint.pt").read_bytes() == before and not list(Path("r").glob("*.part"))
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("whole", "r")


def test_a_folder_that_vanishes_ends_the_run_with_a_line(monkeypatch, capsys):
    stopping_at(monkeypatch, 8, lambda: shutil.rmtree("r"))
    assert train.main([*SHORT, "--base", "cc", "--epochs", "3", "--out", "r"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: cannot write") and err.count("\n") == 1


@pytest.mark.parametrize("out", ["file/r", "/proc/irnet", "readonly/r"])
def test_an_unwritable_folder_is_refused(out, capsys):
    Path("file").write_text("")
    Path("readonly").mkdir(0o500)
    if out.startswith("readonly") and os.access("readonly", os.W_OK):
        pytest.skip("root may write everywhere")
    assert train.main([*TOY, "--base", "cc", "--epochs", "1", "--out", out]) == 2
    err = capsys.readouterr().err
    assert "--out" in err and err.count("\n") == 1


def test_two_processes_never_write_one_folder(capsys):
    argv = [*SHORT, "--base", "cc", "--epochs", "3000", "--out", "r"]
    child = process(run, argv)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not Path("r/checkpoint.pt").exists():
        time.sleep(0.05)
    for more in (["--resume"], ["--overwrite"]):
        assert train.main([*argv, *more]) == 2
        err = capsys.readouterr().err
        assert f"in use by process {child.pid}" in err and err.count("\n") == 1
    child.kill()
    child.join()
    done = len(json.loads(torch.load("r/checkpoint.pt", weights_only=True)["rows"]))
    resumed = process(killed_in_step, 20, signal.SIGTERM, [*argv, "--resume"])  # a dead process holds no lock
    resumed.join(60)
    assert resumed.exitcode == 143 and len(rows("r")) > done


def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch, capsys):
    original, calls = train.train_step, []

    def poisoned(*args):
        calls.append(1)
        loss, tau, counts = original(*args)
        return loss * (math.nan if len(calls) == 8 else 1), tau, counts

    monkeypatch.setattr(train, "train_step", poisoned)
    argv = [*TOY, "--base", "cc", "--epochs", "5", "--out", "r"]
    assert train.main(argv) == 1
    assert "not finite in step 3 of epoch 2" in capsys.readouterr().err
    assert len(rows("r")) == 1 and not Path("r/summary.json").exists()
    monkeypatch.setattr(train, "train_step", original)
    assert train.main([*argv[:-1], "whole"]) == 0 and train.main([*argv, "--resume"]) == 0
    assert same_run("whole", "r")


def test_weights_that_are_not_finite_after_the_last_step_are_not_saved(monkeypatch, capsys):
    """The loss of a step is from before it; what the last step did shows in the weights alone."""
    original, calls = train.train_step, []

    def poisoned(s, *args):
        calls.append(1)
        result = original(s, *args)
        if len(calls) == 10:
            next(s.network.parameters()).data[0] = math.inf
        return result

    monkeypatch.setattr(train, "train_step", poisoned)
    assert train.main([*TOY, "--base", "cc", "--epochs", "5", "--e0", "2", "--out", "r"]) == 1
    assert "after the last step of epoch 2; epochs 1 to 1" in capsys.readouterr().err
    assert len(rows("r")) == 1


def test_a_folder_with_a_run_is_never_overwritten(capsys):
    argv = [*TOY, "--base", "cc", "--epochs", "1"]
    assert train.main([*argv, "--out", "r"]) == 0
    before = Path("r/metrics.jsonl").read_text()
    assert train.main([*argv, "--out", "r"]) == 2
    assert "--resume" in capsys.readouterr().err and Path("r/metrics.jsonl").read_text() == before
    assert train.main([*argv, "--out", "r", "--seed", "1", "--overwrite"]) == 0
    assert json.loads(Path("r/config.json").read_text())["seed"] == 1 and len(rows("r")) == 1
    assert train.main(argv) == 0 and train.main(argv) == 0  # names of its own are numbered
    assert len(list(Path("runs").iterdir())) == 2


def test_ctrl_c_leaves_no_traceback_and_says_how_to_go_on():
    person = command(*TOY, "--epochs", "5000", "--out", "r")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (Path("r/checkpoint.pt")).exists():
        time.sleep(0.2)
    person.send_signal(signal.SIGINT)
    out, err = person.communicate(timeout=60)
    assert person.returncode == 130 and "Traceback" not in out + err
    assert "--resume" in out and len(rows("r")) >= 1


# ------------------------------------------------------------------ odd sequences


def test_killed_between_the_two_names_there_is_still_a_checkpoint(monkeypatch):
    """At every moment of a write a whole checkpoint has one of the two names."""
    argv = [*SHORT, "--base", "cc", "--epochs", "4"]
    assert train.main([*argv, "--out", "whole"]) == 0
    for link in (os.link, None):  # with hard links, and on a file system without
        if link is None:
            monkeypatch.setattr(os, "link", lambda *args: (_ for _ in ()).throw(OSError(1, "no links here")))
        for moment in range(1, 9):
            shutil.rmtree("r", ignore_errors=True)
            with pytest.raises(Killed):
                killed_in_rename(monkeypatch, moment, [*argv, "--out", "r"])
            assert link is None or moment == 1 or Path("r/checkpoint.pt").exists()  # the newest keeps its name
            assert train.main([*argv, "--out", "r", "--resume"]) == 0
            assert same_run("whole", "r"), moment


class Killed(BaseException):
    pass


def killed_in_rename(monkeypatch, moment, argv) -> None:
    """As if the process died right before one of its renamings."""
    original, calls = Path.replace, []

    def patched(self, target):
        calls.append(1)
        if len(calls) == moment + 2:  # the first two are config.json and metrics.jsonl
            raise Killed
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", patched)
        patch.setattr(runs.Run, "close", lambda self: self._lock and self._lock.close())  # a dead process
        train.main(argv)


def test_files_of_a_run_are_never_deleted_unasked(capsys):
    argv = [*SHORT, "--base", "cc", "--epochs", "2", "--out", "r"]
    assert train.main(argv) == 0
    Path("r/config.json").unlink()
    assert train.main(argv) == 2 and "--resume" in capsys.readouterr().err
    assert train.main([*argv, "--resume"]) == 0 and Path("r/checkpoint.pt").exists()
    Path("mine").mkdir()
    arrays = dict(x_train=np.zeros((40, 8, 8), np.uint8), y_train=np.arange(40) % 2)
    arrays |= dict(x_test=arrays["x_train"], y_test=arrays["y_train"])
    np.savez("mine/candidates.npz", **arrays)
    own = "--dataset mine/candidates.npz --q 0.3 --eta 0.1 --arch mlp --batch-size 8 --epochs 1 --out mine".split()
    for more in ([], ["--overwrite"]):
        assert train.main([*own, *more]) == 2 and "--dataset" in capsys.readouterr().err
    with np.load("mine/candidates.npz") as file:
        assert "x_train" in file.files


def test_a_folder_that_another_run_has_taken_is_left_to_it(monkeypatch, capsys):
    def taken():
        Path("r").rename("moved")
        other = runs.Run("r", named=True)
        other.look({}, False, False)
        other.begin({"seed": 7}, [])
        keep.append(other)

    keep = []
    stopping_at(monkeypatch, 8, taken)
    assert train.main([*SHORT, "--base", "cc", "--epochs", "3", "--out", "r"]) == 1
    assert "another run has taken the folder" in capsys.readouterr().err
    assert (
        json.loads(Path("r/config.json").read_text()) == {"seed": 7} and Path("r/metrics.jsonl").read_text() == ""
    )
    assert not Path("r/checkpoint.pt").exists()
    keep[0].close()


def test_resume_finds_the_run_with_this_configuration(monkeypatch):
    for lr in ("0.02", "0.05"):  # both without --out: the second one is numbered
        stopping_at(monkeypatch, 8)
        assert train.main([*SHORT, "--base", "cc", "--epochs", "3", "--lr", lr]) == 143
    assert train.main([*SHORT, "--base", "cc", "--epochs", "3", "--lr", "0.02", "--resume"]) == 0
    finished = [path.parent.name for path in Path("runs").glob("*/summary.json")]
    assert len(finished) == 1 and not finished[0].endswith("-2")


@pytest.mark.parametrize("end", ["SIGHUP", "exception"])
def test_what_waits_is_written_however_the_run_ends(end, monkeypatch):
    argv = [*SHORT, "--base", "cc", "--epochs", "6", "--save-every", "100", "--out", "r"]
    if end == "exception":
        stopping_at(monkeypatch, 18, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.main(argv)
    else:
        before = signal.getsignal(signal.SIGHUP)
        stopping_at(monkeypatch, 18, lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert train.main(argv) == 129
        signal.signal(signal.SIGHUP, before)
    assert len(json.loads(torch.load("r/checkpoint.pt", weights_only=True)["rows"])) == 3


def test_a_repeated_signal_at_once_is_the_same_request(monkeypatch):
    def twice():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping_at(monkeypatch, 8, twice)
    assert train.main([*SHORT, "--base", "cc", "--epochs", "6", "--save-every", "100", "--out", "r"]) == 143
    assert Path("r/checkpoint.pt").exists()


def test_a_terminal_that_is_gone_does_not_stop_a_run():
    with open("/dev/full", "w") as full:
        assert command(*SHORT, "--base", "cc", "--epochs", "2", "--out", "r", stdout=full).wait(60) == 0
    assert len(rows("r")) == 2


def test_a_full_disk_at_the_start_of_a_resume_is_no_wrong_input(monkeypatch):
    argv = [*SHORT, "--base", "log", "--epochs", "4", "--out", "r"]
    stopping_at(monkeypatch, 8)
    assert train.main(argv) == 143
    Path("r/.lock").unlink()
    child = process(limited, 400, [*argv, "--resume"])  # enough for the message, not for config.json
    child.join(60)
    log = Path("log").read_text()
    assert child.exitcode == 1 and "epoch 1 is kept" in log and "Traceback" not in log
    assert train.main([*argv, "--resume"]) == 0
