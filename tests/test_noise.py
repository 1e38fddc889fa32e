"""The noise rate, estimated without a true label."""

from itertools import combinations

import numpy as np
import pytest
import torch

import data
import irnet
import train
from conftest import TOY, prepared, rows, summary


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
    eta, temperature, (low, high) = irnet.estimate_noise(logits, sets)

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

    def profiled(eta):
        return max(likelihood(eta, temperature * factor) for factor in np.geomspace(0.3, 4, 80))

    # the ends are outside of 95 %, by no more than a step
    for end, inwards in ((low, 0.006), (high, -0.006)):
        assert profiled(end) < best - 1.92 + 0.01 and profiled(end + inwards) > best - 1.92 - 0.01


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


def test_what_the_network_expects_of_itself_stands_beside_the_estimate():
    c, learner, samples = prepared([*TOY, "--e0", "1"])
    train.train_epoch(learner, samples, 1, 3, 0.1)
    row = dict(epoch=1)
    train.check_epoch(c, learner, samples, row)
    p = (train.logits_of(learner, samples.held_out_images()) / row["noise_estimate"]["temperature"]).exp()
    assert row["expected"] == pytest.approx((p.amax(1) / p.sum(1)).mean().item())  # softmax by hand
