"""The caution that the estimated noise rate asks for on one's own sets."""

import math

import numpy as np
import torch

import data
import train
from conftest import TIMES, rows, same_run, stopping_at, summary
from crowd import noise
from crowd.caution import BEYOND, guard
from test_crowd import features, read


def test_the_guard_asks_for_more_than_chance():
    """Half of chi-square's quantile of 95 % at one end is 2.71 / 2."""
    found = [noise.Report(0.1, 0.0, 0.5, 1.0, "random", gain=gain) for gain in (0.0, 1.3, 1.4, 50.0)]
    assert [guard(each, 0.3) for each in found] == [math.inf, math.inf, 0.3, 0.3]


def test_a_slight_rate_that_no_model_explains_permits_nothing():
    rates = (0.0, 0.007, 0.019, 0.02, 0.3)
    found = {fits: [noise.Report(eta, 0.0, 0.5, 1.0, "votes", fits, gain=50.0) for eta in rates] for fits in (0, 1)}
    assert [guard(each, 0.3) for each in found[0]] == [math.inf] * 3 + [0.3] * 2
    assert [guard(each, 0.3) for each in found[1]] == [0.3] * 5


def test_less_is_permitted_where_less_is_known():
    """The same noise, seen on ever fewer samples."""
    g = torch.Generator().manual_seed(2)
    y = torch.randint(6, (2000,), generator=g)
    p = (3 * torch.eye(6)[y] + torch.randn(2000, 6, generator=g)).softmax(1)
    sets = data.corrupt(y, 6, 0.2, 0.15, g)
    gains = [noise.report(p, sets, torch.arange(n)).gain for n in (5, 20, 80, 320)]
    assert gains == sorted(gains) and gains[0] < BEYOND < gains[-1]
    clean = data.corrupt(y, 6, 0.2, 0.0, g)
    assert all(guard(noise.report(p, clean, torch.arange(n)), 0.1) == math.inf for n in (5, 20, 80, 320, 2000))


def difficult(eta: float) -> None:
    """t.npz: features that cannot be told apart well, with little noise or none."""
    x, y = features(900)
    x += np.random.RandomState(1).randn(*x.shape).astype(np.float32) * x.std(0)
    sets = data.corrupt(torch.tensor(y), 8, 0.1, eta, torch.Generator().manual_seed(0)).numpy()
    np.savez("t.npz", x_train=x[:700], y_train=y[:700], x_test=x[700:], y_test=y[700:], candidates=sets[:700])


def test_clean_sets_of_ones_own_are_left_alone(capsys):
    difficult(0.0)
    argv = "--dataset t.npz --base cc --epochs 14 --e0 10".split()
    assert train.main([*argv, "--out", "careful"]) == 0
    assert "nothing is corrected" in capsys.readouterr().out
    assert train.main([*argv, "--out", "bold", "--tau", "0.3"]) == 0
    assert summary("careful")["corrections"] == 0 < summary("bold")["corrections"]
    assert summary("careful")["tau"] is None and summary("bold")["tau"] == 0.3
    assert summary("bold")["noise_after"] == 0  # there was nothing to find
    assert any(row["flagged"] == "yes" for row in read("careful/labels.csv"))  # suspicious all the same
    assert train.main([*argv, "--out", "alone", "--no-irnet"]) == 0
    strip = [
        [{k: v for k, v in row.items() if k not in (*TIMES, "tau")} for row in rows(r)]
        for r in ("careful", "alone")
    ]
    assert strip[0] == strip[1]  # nothing corrected: the base alone


def test_a_careful_run_resumes_with_its_tau(monkeypatch):
    difficult(0.3)
    argv = "--dataset t.npz --base cc --epochs 14 --e0 10".split()
    assert train.main([*argv, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        stopping_at(patch, 9 * 10 + 15)  # after e0
        assert train.main([*argv, "--out", "r"]) == 143
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("r", "whole")
    assert summary("r")["tau"] == summary("whole")["tau"] == 0.3 and summary("r")["corrections"]
