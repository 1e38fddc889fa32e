"""The noise rate without a true label, and the caution that it asks for on real sets."""

from itertools import combinations

import numpy as np
import pytest
import torch

import crowd
import data
import irnet
import train
from conftest import TIMES, rows, same_run, summary
from test_crowd import features, read
from test_runs import stopping_at

# ------------------------------------------------------------------ the noise rate without a true label


def test_the_ratio_of_the_likelihood_by_counting_every_way():
    """P(S | y not in S) / P(S | y in S) = |S|/(C-|S|), over all sets of five labels, by the process itself."""
    classes, q = 5, 0.37
    clean, noisy = {}, {}
    for size in range(classes):
        for wrong in combinations(range(1, classes), size):  # y = 0
            made_ = frozenset((0, *wrong))
            p = q**size * (1 - q) ** (classes - 1 - size)
            clean[made_] = clean.get(made_, 0) + p
            outside = [j for j in range(classes) if j not in made_]
            for j in outside:
                turned = made_ - {0} | {j}
                noisy[turned] = noisy.get(turned, 0) + p / len(outside)
    for turned, p in noisy.items():
        size = len(turned)
        same = next(p for kept, p in clean.items() if len(kept) == size)
        assert p == pytest.approx(same * size / (classes - size))


@pytest.mark.parametrize(("q", "eta"), [(0.1, 0.0), (0.1, 0.2), (0.4, 0.3), (0.4, 0.6)])
def test_the_noise_rate_and_temperature_are_found_by_simulation(q, eta):
    found = []
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        logits = 2.5 * torch.randn(1200, 8, generator=g)
        y = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]  # f is P(y | x)
        rate, temperature, (low, high) = irnet.estimate_noise(3 * logits, data.corrupt(y, 8, q, eta, g))
        found.append((rate, temperature, low <= eta <= high))
        assert high - low < 0.2
    rate, temperature, covered = np.mean(found, 0)
    assert rate == pytest.approx(eta, abs=0.03) and temperature == pytest.approx(3, rel=0.15) and covered >= 0.75


def test_the_interval_covers_the_truth_on_small_samples_too():
    """24 samples, 5 % noise: often not one is noisy. The interval must not then be sure that there is none."""
    covered = []
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(24, 5, generator=g)
        y = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]
        _, _, (low, high) = irnet.estimate_noise(logits, data.corrupt(y, 5, 0.1, 0.05, g))
        covered.append(low <= 0.05 <= high)
    assert np.mean(covered) >= 0.9


def test_the_estimate_maximises_the_likelihood_written_as_a_loop():
    g = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(200, 4, generator=g)
    y = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]
    sets = data.corrupt(y, 4, 0.3, 0.2, g)
    sets[0], sets[1] = True, False  # full and empty sets say nothing
    eta, temperature, _ = irnet.estimate_noise(logits, sets)

    def likelihood(eta, temperature):
        total = 0.0
        for z, s in zip((logits.double() / temperature).tolist(), sets.tolist(), strict=True):
            if 0 < sum(s) < 4:
                f = np.exp(z) / np.exp(z).sum()
                inside, outside = f[np.array(s)].sum(), f[~np.array(s)].sum()
                total += np.log((1 - eta) * inside + eta * sum(s) / (4 - sum(s)) * outside)
        return total

    best = likelihood(eta, temperature)
    for other in (max(0, eta - 0.03), eta + 0.03):
        assert likelihood(other, temperature) < best
    for factor in (0.85, 1.18):
        assert likelihood(eta, temperature * factor) < best


def test_the_estimate_at_the_edges():
    nothing = irnet.estimate_noise(torch.randn(5, 3), torch.ones(5, 3, dtype=torch.bool))
    assert np.isnan([nothing[0], nothing[1], *nothing[2]]).all()
    sure = 50 * torch.eye(3)[torch.arange(90) % 3]
    assert irnet.estimate_noise(sure, sure > 0)[0] == 0.0
    assert irnet.estimate_noise(sure, ~(sure > 0))[0] == pytest.approx(0.99)


def test_every_run_estimates_its_noise_and_a_resumed_one_keeps_it(monkeypatch):
    argv = "--limit-train 400 --limit-test 60 --batch-size 32 --base cc --epochs 4 --e0 2".split()
    assert train.main([*argv, "--out", "r"]) == 0
    found = summary("r")["noise_estimate"]
    assert set(found) == {"eta", "low", "high", "temperature"} and found["low"] <= found["eta"] <= found["high"]
    assert ["noise_estimate" in row for row in rows("r")] == [
        False,
        True,
        False,
        False,
    ]  # at e0, before it is acted on
    assert train.main([*argv, "--out", "never", "--e0", "auto"]) == 0
    assert ["noise_estimate" in row for row in rows("never")] == [False] * 3 + [True]  # not found: at the end
    assert train.main([*argv, "--out", "leaks", "--val", "test"]) == 0
    assert summary("leaks")["noise_estimate"] is None  # nothing is held out


# ------------------------------------------------------------------ caution on real sets


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
