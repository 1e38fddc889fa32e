"""Faults of whole runs: kills, signals, a loss that is not finite, a terminal that is gone. No epoch is lost."""

import json
import math
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import train
from conftest import SHORT, TOY, command, process, rows, run, same_run, stopping_at


@pytest.mark.parametrize("base", ["lwc", "pico"])  # two blocks of label weights; a second encoder
def test_killed_at_random_moments_and_resumed_it_ends_the_same(base):
    """SIGKILL, four times a base, at any moment from the start of the process on."""
    argv = [*SHORT, "--base", base, "--epochs", "16", "--transductive-every", "16"]
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


def test_ctrl_c_leaves_no_traceback_and_says_how_to_go_on():
    person = command(*TOY, "--epochs", "5000", "--out", "r")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (Path("r/checkpoint.pt")).exists():
        time.sleep(0.2)
    person.send_signal(signal.SIGINT)
    out, err = person.communicate(timeout=60)
    assert person.returncode == 130 and "Traceback" not in out + err
    assert "--resume" in out and len(rows("r")) >= 1


@pytest.mark.parametrize("end", ["SIGHUP", "exception"])
def test_what_waits_is_written_however_the_run_ends(end, monkeypatch):
    argv = [*SHORT, "--base", "cc", "--epochs", "6", "--save-every", "100", "--out", "r"]
    if end == "exception":
        stopping_at(monkeypatch, 18, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.main(argv)
    else:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        stopping_at(monkeypatch, 18, lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert train.main(argv) == 129
    assert len(json.loads(torch.load("r/checkpoint.pt", weights_only=True)["rows"])) == 3


def test_under_nohup_a_closed_terminal_does_not_stop_a_run(monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopping_at(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert train.main([*SHORT, "--base", "cc", "--arch", "mlp", "--epochs", "2", "--out", "r"]) == 0


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
