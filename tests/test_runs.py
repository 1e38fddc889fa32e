"""The run's folder: exact resume, what is refused, and when checkpoints are written."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import losses
import runs
import train
from conftest import TOY, process, rows, same_run

SHORT = [*TOY, "--e0", "2", "--tau", "0"]


def stopping_at(monkeypatch, step: int, do=lambda: os.kill(os.getpid(), signal.SIGTERM)) -> None:
    """Something happens in the given step of the next run; then the steps are as before."""
    original, calls = train.train_step, []

    def patched(*args):
        calls.append(1)
        if len(calls) == step:
            do()
            monkeypatch.setattr(train, "train_step", original)
        return original(*args)

    monkeypatch.setattr(train, "train_step", patched)


# ------------------------------------------------------------------ exact resume


@pytest.mark.parametrize("base", list(losses.BASES))
def test_resume_ends_as_the_run_that_was_left_alone(base, monkeypatch, capsys):
    """Stopped before e0 and after it, always in the middle of an epoch of five or six steps."""
    argv = [*SHORT, "--base", base, "--epochs", "5"]
    assert train.main([*argv, "--out", "whole"]) == 0
    for step, more in ((8, []), (13, ["--resume"])):  # in epoch 2; then, from its beginning, in epoch 4
        stopping_at(monkeypatch, step)
        assert train.main([*argv, "--out", "parts", *more]) == 143
        assert "--resume" in capsys.readouterr().out
    assert [row["epoch"] for row in rows("parts")] == [1, 2, 3]
    assert train.main([*argv, "--out", "parts", "--resume"]) == 0
    assert same_run("whole", "parts")
    assert sum(row["corrections"] for row in rows("whole")) > 0


def test_a_finished_run_says_so_and_another_configuration_is_refused(capsys):
    argv = [*SHORT, "--base", "cc", "--epochs", "2", "--out", "r"]
    assert train.main(argv) == 0
    files = {path.name: path.read_bytes() for path in Path("r").iterdir()}
    capsys.readouterr()
    assert train.main([*argv, "--resume"]) == 0 and "finished" in capsys.readouterr().out
    for option, value in (("--lr", "0.7"), ("--seed", "3"), ("--epochs", "9"), ("--base", "log"), ("--tau", "0.1")):
        changed = [*argv, option, value, "--resume"]
        assert train.main(changed) == 2
        err = capsys.readouterr().err
        assert option in err and value in err and err.count("\n") == 1
        assert option != "--epochs" or "laid out" in err
    assert {path.name: path.read_bytes() for path in Path("r").iterdir() if path.name != ".lock"} == {
        name: content for name, content in files.items() if name != ".lock"
    }
    Path("r/summary.json").unlink()  # killed between the last checkpoint and the results
    assert train.main([*argv, "--resume"]) == 0 and Path("r/summary.json").read_bytes() == files["summary.json"]


def test_resume_before_the_first_checkpoint_begins_again(monkeypatch):
    argv = [*SHORT, "--base", "rc", "--epochs", "2"]
    stopping_at(monkeypatch, 2)
    assert train.main([*argv, "--out", "r"]) == 143 and not Path("r/checkpoint.pt").exists()
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and train.main([*argv, "--out", "whole"]) == 0
    assert same_run("r", "whole")


def test_resume_refuses_other_data(monkeypatch, capsys):
    x, y = np.zeros((100, 8, 8), np.uint8), np.arange(100) % 4
    arrays = dict(x_train=x, y_train=y, x_test=x, y_test=y)
    np.savez("own.npz", **arrays)
    argv = "--dataset own.npz --q 0.3 --eta 0.3 --arch mlp --batch-size 16 --out r".split()
    stopping_at(monkeypatch, 8)
    assert train.main([*argv, "--epochs", "3"]) == 143
    for changed in (dict(y_train=y[::-1]), dict(x_train=x + 1), dict(x_test=x + 1), dict(y_test=y[::-1])):
        np.savez("own.npz", **arrays | changed)
        assert train.main([*argv, "--epochs", "3", "--resume"]) == 2 and "data" in capsys.readouterr().err
    np.savez("own.npz", **arrays)
    assert train.main([*argv, "--epochs", "3", "--resume"]) == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_save_every_writes_rarely_but_loses_nothing_that_it_can_keep(signal_number, monkeypatch):
    argv = [*SHORT, "--base", "lwc", "--epochs", "8", "--save-every", "3"]
    written = []
    original = runs.Run._write
    monkeypatch.setattr(runs.Run, "_write", lambda self, name, c: written.append(name) or original(self, name, c))
    assert train.main([*argv, "--out", "whole"]) == 0
    assert written.count("checkpoint.pt") == 3  # after epochs 3, 6 and 8
    child = process(killed_in_step, 5 + 5 + 6 + 6 + 3, signal_number, [*argv, "--out", "r"])  # in the fifth epoch
    child.join(60)
    assert child.exitcode == (143 if signal_number == signal.SIGTERM else -9)
    state = torch.load("r/checkpoint.pt", weights_only=True)
    assert len(json.loads(state["rows"])) == (4 if signal_number == signal.SIGTERM else 3)
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("r", "whole")


def killed_in_step(step, number, argv) -> int:
    stopping_at(pytest.MonkeyPatch(), step, lambda: os.kill(os.getpid(), number))
    return train.main(argv)
