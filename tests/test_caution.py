"""The caution that the estimated noise rate asks for on one's own sets."""

import numpy as np
import torch

import crowd
import data
import irnet
import train
from conftest import TIMES, rows, same_run, stopping_at, summary
from test_crowd import features, read


def test_safe_tau_keeps_expected_corrections_half_right_by_a_loop():
    g = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(300, 6, generator=g)
    sets = torch.rand(300, 6, generator=g) < 0.3
    sets[~sets.any(1), 0] = True
    f = (logits + torch.randn(300, 6, generator=g)).softmax(1)

    def expected(tau, eta):
        """The mean probability, over what tau would move in, to be right."""
        found = []
        for z, s, v in zip(logits.tolist(), sets.tolist(), f.tolist(), strict=True):
            if all(s) or max(x for x, c in zip(v, s, strict=True) if c) - max(
                x for x, c in zip(v, s, strict=True) if not c) > -tau:  # fmt: skip
                continue
            p = np.exp(z) / np.exp(z).sum()
            ratio = eta * sum(s) / (6 - sum(s))
            label = max((x, j) for j, (x, c) in enumerate(zip(v, s, strict=True)) if not c)[1]
            inside = sum(x for x, c in zip(p, s, strict=True) if c)
            found.append(ratio * p[label] / ((1 - eta) * inside + ratio * (1 - inside)))
        return np.mean(found) if found else None

    stricter = 0
    for eta, tau in ((0.2, 0.0), (0.35, 0.1), (0.5, 0.05)):
        safe = crowd.safe_tau(logits, f, sets, eta, 1.0, tau)
        assert tau <= safe < np.inf and expected(safe, eta) >= 0.5
        looser = [-m for m in irnet.margin(f, sets).tolist() if tau <= -m < safe - 1e-7]
        assert (safe == tau) == (not looser) and all(expected(t, eta) < 0.5 for t in looser)
        stricter += safe > tau
    assert stricter
    assert crowd.safe_tau(logits, f, sets, 0.9, 1.0, 0.05) == 0.05  # noise enough: as it was
    assert crowd.safe_tau(logits, f, sets, 0.0, 1.0, 0.05) == np.inf  # no noise: nothing


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
    difficult(0.05)
    argv = "--dataset t.npz --base cc --epochs 14 --e0 10".split()
    assert train.main([*argv, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        stopping_at(patch, 9 * 10 + 15)  # after e0
        assert train.main([*argv, "--out", "r"]) == 143
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("r", "whole")
    assert summary("r")["tau"] == summary("whole")["tau"] > 0.3 and summary("r")["corrections"]
