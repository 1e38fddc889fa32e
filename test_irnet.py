"""The method, the losses and the networks against oracles: loops, worked numbers, and the released codes' answers.

python -m pytest -q            all tests (test_augment.py: the views; test_train.py: the command line)
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import data
import irnet
import losses
import models

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "shared" / "golden.json"
INF = math.inf

# The worked vector: p = (.5, .3, .2), S = {0, 1}, w = (.5, .5, 0)
P3 = torch.tensor([[0.5, 0.3, 0.2]])
Z3, S3, W3 = P3.log(), torch.tensor([[True, True, False]]), torch.tensor([[0.5, 0.5, 0.0]])


def random_case(seed: int, batch: int = 17, classes: int = 6):
    """Probabilities, sets of every size from empty to full, labels."""
    g = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(batch, classes, generator=g)).softmax(1)
    candidates = torch.rand(batch, classes, generator=g) < torch.rand(batch, 1, generator=g)
    candidates[0], candidates[1] = True, False
    return probs, candidates, torch.randint(classes, (batch,), generator=g)


def loop_margin(f, s):
    """Eq. 4 for one sample, in plain Python."""
    inside = max([v for v, c in zip(f, s, strict=True) if c], default=-INF)
    outside = max([v for v, c in zip(f, s, strict=True) if not c], default=-INF)
    return inside - outside


def loop_outside(f, s):
    """argmax_{j not in S} f_j for one sample."""
    return max((v, -j) for j, (v, c) in enumerate(zip(f, s, strict=True)) if not c)[1] * -1


# ------------------------------------------------------------------ Eq. 4, Eqs. 10-12, correction


@pytest.mark.parametrize("seed", range(5))
def test_margin_is_eq_4(seed):
    probs, candidates, _ = random_case(seed, batch=30, classes=2 + seed)
    want = [loop_margin(f, s) for f, s in zip(probs.tolist(), candidates.tolist(), strict=True)]
    assert irnet.margin(probs, candidates).tolist() == pytest.approx(want)


def test_margin_at_the_edges():
    f = torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    assert irnet.margin(f, torch.tensor([[True, True], [False, False]])).tolist() == [INF, -INF]
    assert irnet.margin(torch.ones(2, 1), torch.tensor([[True], [False]])).tolist() == [INF, -INF]
    assert irnet.margin(f.bfloat16(), torch.tensor([[True, False]] * 2)).dtype == torch.float32
    assert irnet.margin(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0,)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_detect_is_eqs_10_to_12(seed, extra):
    probs, candidates, _ = random_case(seed, batch=200)
    g = torch.Generator().manual_seed(seed)
    views = [probs] + [(probs.log() + 0.7 * torch.randn(probs.shape, generator=g)).softmax(1) for _ in range(extra)]
    flagged, label = irnet.detect(views, candidates, 0.05)
    for i, s in enumerate(candidates.tolist()):
        if all(s):
            assert not flagged[i]
            continue
        fs = [view[i].tolist() for view in views]
        sure = all(loop_margin(f, s) <= -0.05 for f in fs)  # Eqs. 10, 11
        same = len({loop_outside(f, s) for f in fs}) == 1  # Eq. 12
        assert bool(flagged[i]) == (sure and same)
        assert int(label[i]) == loop_outside(fs[0], s)
    assert 5 < flagged.sum() < 150


def test_each_condition_decides_alone():
    s = torch.tensor([[True, False, False]])
    x = torch.tensor([[0.25, 0.5, 0.25]])  # tau = -0.25
    assert irnet.detect([x], s, 0.25)[0].item()  # Eq. 10 has <=, not <
    assert not irnet.detect([x], s, 0.26)[0].item()
    unsure = torch.tensor([[0.4, 0.45, 0.15]])  # the same label, tau = -0.05: Eq. 11 fails
    assert not irnet.detect([x, unsure], s, 0.25)[0].item()
    assert irnet.detect([x, unsure], s, 0.04)[0].item()
    other = torch.tensor([[0.1, 0.2, 0.7]])  # as sure, of another label: Eq. 12 fails
    assert not irnet.detect([x, other], s, 0.1)[0].item()
    flagged, label = irnet.detect([x, x], s, 0.1)
    assert flagged.item() and label.item() == 1


def test_full_sets_are_never_flagged():
    f = torch.rand(50, 4).softmax(1)
    assert not irnet.detect([f, f], torch.ones(50, 4, dtype=torch.bool), 0.0)[0].any()


@pytest.mark.parametrize("swap", [False, True])
def test_correct_and_reweight_worked_by_hand(swap):
    # C = 4, S = {0, 1}, f = (.24, .23, .28, .25), w = (.6, .4, 0, 0): tau = -.04, label 2 moves in, 1 out
    f, s = torch.tensor([[0.24, 0.23, 0.28, 0.25]]), torch.tensor([[True, True, False, False]])
    w = torch.tensor([[0.6, 0.4, 0.0, 0.0]])
    assert irnet.margin(f, s).item() == pytest.approx(-0.04)
    flagged, label = irnet.detect([f], s, 0.03)
    drop = irnet.least_likely(f, s) if swap else None
    new = irnet.correct(s, flagged, label, drop)
    assert new.tolist() == [[True, False, True, False]] if swap else [[True, True, True, False]]
    got = irnet.reweight(w, new, flagged, label, f[0, 2], drop)
    want = [[0.681818, 0, 0.318182, 0]] if swap else [[0.46875, 0.3125, 0.21875, 0]]
    assert torch.allclose(got, torch.tensor(want), atol=1e-6)
    if not swap:
        assert torch.allclose(irnet.reweight(w, new, flagged, label, 1 / 4), torch.tensor([[0.48, 0.32, 0.2, 0]]))
        uniform = irnet.reweight(w, new, flagged, label, None)
        assert torch.allclose(uniform, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0]]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("swap", [False, True])
def test_correction_invariants(seed, swap):
    probs, candidates, labels = random_case(seed, batch=300)
    clean = ~irnet.is_noisy(candidates, labels)
    flagged, label = irnet.detect([probs], candidates, 0.0)
    new = irnet.correct(candidates, flagged, label, irnet.least_likely(probs, candidates) if swap else None)
    growth = new.sum(1) - candidates.sum(1)
    assert growth[~flagged].eq(0).all() and torch.equal(new[~flagged], candidates[~flagged])
    some = flagged & candidates.any(1)
    assert growth[some].eq(0 if swap else 1).all() and growth[flagged & ~some].eq(1).all()
    assert new.gather(1, label[:, None])[flagged].all()
    if not swap:
        assert not irnet.is_noisy(new, labels)[clean].any()  # a clean sample's truth never leaves
    w = losses.uniform_weights(candidates)
    w = irnet.reweight(w, new, flagged, label, probs.gather(1, label[:, None])[:, 0],
                       irnet.least_likely(probs, candidates) if swap else None)  # fmt: skip
    assert torch.allclose(w.sum(1)[new.any(1)], torch.tensor(1.0)) and (w[~new] == 0).all()


def test_reweight_leaves_the_second_block_of_lwc():
    w = torch.tensor([[0.7, 0.3, 0.6, 0.4]])  # S = {0, 1} and its complement, each summing to 1
    s = torch.tensor([[True, True, True, False]])  # after 2 moved in
    got = irnet.reweight(w, s, torch.tensor([True]), torch.tensor([2]), torch.tensor([0.5]))
    assert torch.allclose(got, torch.tensor([[0.7 / 1.5, 0.3 / 1.5, 0.5 / 1.5, 0.4]]))


@pytest.mark.skipif(not GOLDEN.exists(), reason="needs ../shared/golden.json")
def test_correction_and_e0_equal_the_released_code():
    golden = json.loads(GOLDEN.read_text())
    g = {k: torch.tensor(v) for k, v in golden["correction"].items()}
    s = g["candidates"].bool()
    assert torch.allclose(irnet.margin(g["f_x"], s), g["margin"], atol=1e-6)
    flagged, label = irnet.detect([g["f_x"], g["f_z"]], s, g["tau"].item())
    assert torch.equal(flagged, g["flagged"])
    assert torch.equal(label[flagged], g["label"][flagged])
    value, drop = g["f_x"].gather(1, label[:, None])[:, 0], irnet.least_likely(g["f_x"], s)
    for prefix, out in (("new", None), ("swap", drop)):
        new = irnet.correct(s, flagged, label, out)
        assert torch.equal(new, g[f"{prefix}_candidates"].bool())
        got = irnet.reweight(g["weights"], new, flagged, label, value, out)
        assert torch.allclose(got, g[f"{prefix}_weights"], atol=1e-6)
    for case in golden["correction_epoch"]:
        for rule, key in (("smoothed", "released_rule_window_100"), ("paper", "paper_rule")):
            watch = irnet.CorrectionEpoch(window=100, rule=rule)
            assert [e for e, a in enumerate(case["curve"], 1) if watch.update(a)] == [case[key]]


# ------------------------------------------------------------------ e0


@pytest.mark.parametrize(
    ("peak", "smoothed", "paper"), [(60, 118, 70), (100, 157, 110), (120, 176, 130), (150, 206, 160)]
)
def test_correction_epoch_on_a_curve_with_known_answers(peak, smoothed, paper):
    curve = [0.2 + 0.7 * min(e, peak) / peak - 0.0002 * max(0, e - peak) for e in range(1, 401)]
    for rule, e0 in (("smoothed", smoothed), ("paper", paper)):
        watch = irnet.CorrectionEpoch(window=100, rule=rule)
        assert [e for e, a in enumerate(curve, 1) if watch.update(a)] == [e0]  # once, and never again
        assert watch.e0 == e0


@pytest.mark.parametrize("window", [2, 6, 10, 37, 100])
def test_smoothed_rule_against_the_running_average_written_out(window):
    rng = np.random.RandomState(window)
    curve = np.minimum(np.arange(300) / 120, 1) + rng.randn(300) * 0.05
    watch = irnet.CorrectionEpoch(window=window)
    found = next((e for e, a in enumerate(curve, 1) if watch.update(a)), None)
    half, steps = window // 2, max(1, window // 10)
    for n in range(window, 301):
        acc = curve[:n]
        average = [acc[max(0, t - half) : min(n - 1, t + half)].mean() for t in range(n)]
        if np.diff(average)[-steps:].mean() < 1e-6:
            break
    assert found == n


def test_correction_epoch_fixed_and_refused():
    watch = irnet.CorrectionEpoch(fixed=3)
    assert [watch.update(e) for e in range(5)] == [False, False, True, False, False]
    rising = irnet.CorrectionEpoch(window=10)
    assert not any(rising.update(e / 100) for e in range(100)) and rising.e0 is None
    with pytest.raises(ValueError, match="rule"):
        irnet.CorrectionEpoch(rule="guess")
    again = irnet.CorrectionEpoch(fixed=3)
    again.load_state_dict(watch.state_dict())
    assert again.e0 == 3 and again.curve == watch.curve


# ------------------------------------------------------------------ the plug-in


def test_readme_three_lines_in_a_loop_that_is_not_ours():
    """The README's own block: a plain nn.Linear on random features."""
    block = next(
        b for b in re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S) if "IRNet(" in b
    )
    marked = [line for line in block.splitlines() if "# <-" in line]
    assert len(marked) == 3, marked
    space: dict = {}
    exec(block, space)
    candidates, before, truth = space["candidates"], space["before"], space["truth"]
    assert irnet.noise_level(before, truth) > 0.25
    assert irnet.noise_level(candidates, truth) < 0.05
    assert space["refine"].e0 is not None


@pytest.mark.parametrize("after", ["value", "uniform", "1/C"])
def test_irnet_object_edits_in_place_and_remembers(after):
    candidates = torch.tensor([[True, False, False], [True, False, False], [True, True, True]])
    weights = losses.uniform_weights(candidates)
    refine = irnet.IRNet(candidates, tau=0.1, e0=2, weights_after=after)
    refine.end_epoch(0.5)
    assert not refine.started
    refine.end_epoch(0.5)
    assert refine.started and refine.e0 == 2
    f = torch.tensor([[0.2, 0.2, 0.6], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]])
    flagged, label = refine.correct(torch.tensor([0, 1, 2]), [f, f], weights)
    assert flagged.tolist() == [True, False, False] and label[0] == 2
    assert candidates.tolist() == [[True, False, True], [True, False, False], [True, True, True]]
    assert refine.corrected_at.tolist() == [3, 0, 0] and refine.corrected_to.tolist() == [2, -1, -1]
    share = {"value": 0.6, "uniform": 1.0, "1/C": 1 / 3}[after]
    assert weights[0].tolist() == pytest.approx([1 / (1 + share), 0, share / (1 + share)])
    other = irnet.IRNet(torch.zeros(3, 3, dtype=torch.bool), tau=0.1)
    other.load_state_dict(refine.state_dict())
    assert torch.equal(other.candidates, candidates) and other.e0 == 2
    with pytest.raises(ValueError, match="bool"):
        irnet.IRNet(torch.ones(3, 3), tau=0.1)


# ------------------------------------------------------------------ diagnostics, theorems


@pytest.mark.parametrize("bins", [10, 100])
def test_bayes_error_is_eq_6(bins):
    rng = np.random.RandomState(0)
    tau, noisy = rng.randn(4000) * 0.01, rng.rand(4000) < 0.3
    tau[~noisy] += 0.02
    edges = np.linspace(np.float32(tau.min()), np.float32(tau.max()), bins + 1)
    clean_part, noisy_part = (np.histogram(tau[m], edges)[0] / m.sum() for m in (~noisy, noisy))
    want = 0.5 * np.minimum(clean_part, noisy_part).sum()
    got = irnet.bayes_error(torch.tensor(tau), torch.tensor(noisy), bins)
    assert got == pytest.approx(want, abs=2e-3) and 0.1 < got < 0.2


def test_bayes_error_at_the_edges():
    noisy = torch.tensor([True, False])
    assert irnet.bayes_error(torch.tensor([-1.0, 1.0]), noisy) == 0
    assert irnet.bayes_error(torch.tensor([1.0, 1.0]), noisy) == 0.5
    assert irnet.bayes_error(torch.tensor([-1.0, INF]), noisy) == 0.5  # one finite value: one bin
    assert math.isnan(irnet.bayes_error(torch.tensor([-1.0, 1.0]), torch.tensor([False, False])))


def test_hit_accuracy_is_eqs_7_and_8():
    probs, candidates, labels = random_case(3, batch=400)
    clean, noisy = [], []
    for f, s, y in zip(probs.tolist(), candidates.tolist(), labels.tolist(), strict=True):
        if s[y]:
            clean.append(y == max(range(6), key=lambda j: f[j] if s[j] else -1))  # noqa: B023
        else:
            noisy.append(y == loop_outside(f, s))
    assert irnet.hit_accuracy(probs, candidates, labels) == pytest.approx((np.mean(clean), np.mean(noisy)))
    assert irnet.noise_level(candidates, labels) == pytest.approx(len(noisy) / 400)
    everything = torch.ones(400, 6, dtype=torch.bool)
    assert math.isnan(irnet.hit_accuracy(probs, everything, labels)[1])
    assert math.isnan(irnet.hit_accuracy(probs, ~everything, labels)[0])


def test_random_hit_accuracy_is_eq_9():
    assert irnet.random_hit_accuracy(10, 0.3) == pytest.approx(0.158730, abs=1e-6)  # the paper's 15.87


def test_theorems_with_worked_numbers():
    assert irnet.next_boundary(0.6, 0.1, 1, 2) == pytest.approx((0.593333, 0.596667), abs=1e-6)
    assert irnet.rounds_bounds(0.6, 0.1, 1, 2) == pytest.approx((97.3116, 97.7165), abs=1e-3)
    assert irnet.rounds_needed(0.6, 0.1, 1, 2) == 98
    # here the printed bound is not enough: 1.1^13 * 0.2 = 0.6905 < 0.7
    assert irnet.rounds_bounds(0.8, 0.3, 0.5, 1) == pytest.approx((12.5276, 13.1441), abs=1e-3)
    assert irnet.rounds_needed(0.8, 0.3, 0.5, 1) == 14
    assert irnet.smallest_start(0.1, 1, 0.2) == pytest.approx(0.433333, abs=1e-6)
    with pytest.raises(ValueError, match="eps < m"):
        irnet.rounds_needed(0.1, 0.2, 1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_rounds_needed_against_a_simulation_of_the_slowest_step(seed):
    rng = np.random.RandomState(seed)
    eps, alpha, level = rng.uniform(0.05, 0.3), rng.uniform(0.3, 2), rng.uniform(1, 3)
    m = start = rng.uniform(eps + 0.1, 0.95)
    rounds = 0
    while m >= eps:  # Theorem 1, its smallest allowed step
        m, rounds = 1 - (1 + eps / (6 * alpha * level)) * (1 - m), rounds + 1
    assert irnet.rounds_needed(start, eps, alpha, level) == rounds


# ------------------------------------------------------------------ losses


def test_losses_on_the_worked_vector():
    assert losses.cc(Z3, S3).item() == pytest.approx(0.223144, abs=1e-6)
    assert losses.log(Z3, S3).item() == pytest.approx(0.446287, abs=1e-6)
    assert losses.weighted_ce(Z3, W3).item() == pytest.approx(0.948560, abs=1e-6)
    assert torch.allclose(losses.renormalised(P3, S3, W3), torch.tensor([[0.625, 0.375, 0]]))
    start = torch.full((1, 3), 1 / 3)
    assert losses.lwc(Z3, S3, start, 0).item() == pytest.approx(0.632373, abs=1e-6)
    assert losses.lwc(Z3, S3, start, 1).item() == pytest.approx(0.632373 + 0.074381, abs=1e-6)
    assert losses.lwc(Z3, S3, start, 2).item() == pytest.approx(0.632373 + 2 * 0.074381, abs=1e-6)
    assert losses.mae(Z3, W3).item() == pytest.approx(1.2)
    assert losses.mae(Z3, W3, "soft_target").item() == pytest.approx(0.4)
    assert losses.mse(Z3, W3).item() == pytest.approx(0.58)
    assert losses.mse(Z3, W3, "soft_target").item() == pytest.approx(0.08)
    assert losses.gce(Z3, W3).item() == pytest.approx(0.681369, abs=1e-6)
    assert losses.sce(Z3, W3, form="soft_target").item() == pytest.approx(8.088911, abs=1e-5)
    assert losses.sce(Z3, W3, 0, 1).item() == pytest.approx(5.526204, abs=1e-5)
    assert losses.sce(Z3, W3, 6, 1).item() == pytest.approx(6 * 0.948560 + 5.526204, abs=1e-5)
    with pytest.raises(ValueError, match="form"):
        losses.mae(Z3, W3, "other")


@pytest.mark.parametrize("seed", range(3))
def test_losses_against_loops(seed):
    probs, candidates, _ = random_case(seed, batch=9)
    candidates[:, 0] = True  # no empty set here
    w = torch.rand(9, 6) * candidates
    w = w / w.sum(1, keepdim=True)
    c = 6
    want = dict.fromkeys(("cc", "log", "ce", "lwc", "mae", "mse", "gce"), 0.0)
    for f, s, v in zip(probs.tolist(), candidates.tolist(), w.tolist(), strict=True):
        inside = sum(f[j] for j in range(c) if s[j])
        want["cc"] -= math.log(inside) / 9
        want["log"] -= (c - 1) / (c - sum(s)) * math.log(inside) / 9 if not all(s) else 0
        want["ce"] -= sum(v[j] * math.log(f[j]) for j in range(c)) / 9
        for j in range(c):
            want["lwc"] -= 0.1 * (j + 1) * (math.log(f[j]) if s[j] else 2 * math.log(1 - f[j])) / 9
            one_hot = [float(k == j) for k in range(c)]
            want["mae"] += v[j] * sum(abs(f[k] - one_hot[k]) for k in range(c)) / 9
            want["mse"] += v[j] * sum((f[k] - one_hot[k]) ** 2 for k in range(c)) / 9
            want["gce"] += v[j] * (1 - f[j] ** 0.7) / 0.7 / 9
    z = probs.log()
    steps = torch.arange(1, 7).mul(0.1).expand(9, 6)
    got = dict(
        cc=losses.cc(z, candidates), log=losses.log(z, candidates), ce=losses.weighted_ce(z, w),
        lwc=losses.lwc(z, candidates, steps, 2), mae=losses.mae(z, w), mse=losses.mse(z, w), gce=losses.gce(z, w),
    )  # fmt: skip
    assert {k: v.item() for k, v in got.items()} == pytest.approx(want, rel=1e-4)


@pytest.mark.skipif(not GOLDEN.exists(), reason="needs ../shared/golden.json")
def test_losses_and_prototypes_equal_the_released_codes():
    g = json.loads(GOLDEN.read_text())
    z, s, w, lw = (torch.tensor(g[k]) for k in ("logits", "candidates", "weights", "lwc_weights"))
    s, p = s.bool(), z.softmax(1)
    got = {
        "cc": losses.cc(z, s), "rc_proden": losses.weighted_ce(z, w), "log": losses.log(z, s),
        "lwc_beta1": losses.lwc(z, s, lw, 1), "lwc_beta2": losses.lwc(z, s, lw, 2),
        "mae_soft_target": losses.mae(z, w, "soft_target"), "mse_soft_target": losses.mse(z, w, "soft_target"),
        "sce_soft_target": losses.sce(z, w, 6, 1, "soft_target"), "gce_soft_target": losses.gce(z, w),
        "mae_average": losses.mae(z, w), "mse_average": losses.mse(z, w), "gce_average": losses.gce(z, w),
    }  # fmt: skip
    assert {k: v.item() for k, v in got.items()} == pytest.approx({k: g[k] for k in got}, rel=1e-5)
    assert torch.allclose(losses.renormalised(p, s, w), torch.tensor(g["rc_proden_new_weights"]), atol=1e-6)
    assert torch.allclose(losses.lwc_weights(p, s), torch.tensor(g["lwc_new_weights"]), atol=1e-6)
    c = {k: torch.tensor(v) for k, v in g["supcon"].items()}
    loss = losses.supcon(c["query"], c["key"], c["queue"], c["labels"], c["queue_labels"], 0.07)
    assert loss.item() == pytest.approx(g["supcon"]["loss"], rel=1e-5)
    c = {k: torch.tensor(v) for k, v in g["prototypes"].items()}
    net = tiny_pico(prototype_momentum=g["prototypes"]["momentum"], classes=3, embedding=4)
    net.prototypes = c["before"]
    net.update_prototypes(c["features"], c["labels"])
    assert torch.allclose(net.prototypes, c["after"], atol=1e-6)


EXTREME = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0], [90.0, -90.0, -80.0]])
SETS = torch.tensor([[True, True, True], [True, False, False], [False, False, False], [False, True, True]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["cc", "log", "weighted_ce", "lwc", "mae", "mse", "sce", "gce"])
def test_losses_are_finite_at_the_edges(name, dtype):
    """Probabilities 0 and 1, a full set, an empty one, half precision; gradients too."""
    z = EXTREME.clone().to(dtype).requires_grad_()
    w = losses.uniform_weights(SETS)
    extra = {"cc": (SETS,), "log": (SETS,), "lwc": (SETS, torch.full((4, 3), 1 / 3))}.get(name, (w,))
    loss = getattr(losses, name)(z, *extra)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite() and z.grad.isfinite().all()
    one_class = getattr(losses, name)(torch.zeros(2, 1), *(e[:2, :1] for e in extra))
    assert one_class.isfinite()


def test_log_counts_a_full_set_zero_and_is_not_cc():
    full = torch.ones(1, 3, dtype=torch.bool)
    assert losses.log(Z3, full).item() == 0
    assert losses.log(Z3, S3).item() == pytest.approx(2 * losses.cc(Z3, S3).item())


def test_half_precision_inputs_are_computed_in_full():
    z = torch.randn(64, 10).bfloat16()
    s = torch.rand(64, 10) < 0.5
    assert losses.cc(z, s).item() == losses.cc(z.float(), s).item()
    q = F.normalize(torch.randn(4, 8), dim=1).bfloat16()
    y = torch.tensor([0, 1, 0, 1])
    got = losses.supcon(q, q, q, y, y)
    assert got.dtype == torch.float32 and got.item() == losses.supcon(q.float(), q.float(), q.float(), y, y).item()


def test_supcon_against_a_loop():
    g = torch.Generator().manual_seed(0)
    q, k, queue = (F.normalize(torch.randn(n, 5, generator=g), dim=1) for n in (4, 4, 7))
    y, queue_y = torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 1, -1, 2, -1, 1])
    everything, labels = torch.cat([q, k, queue]).tolist(), torch.cat([y, y, queue_y]).tolist()
    want = 0.0
    for i in range(4):
        e = [math.exp(np.dot(everything[i], other) / 0.07) for other in everything]
        positive = [a for a in range(len(e)) if labels[a] == labels[i] and a != i]
        assert 4 + i in positive  # its own key
        want -= sum(math.log(e[a] / (sum(e) - e[i])) for a in positive) / len(positive) / 4
    assert losses.supcon(q, k, queue, y, queue_y).item() == pytest.approx(want, rel=1e-5)


# ------------------------------------------------------------------ the six bases


class Lookup(nn.Module):
    """A network whose logits are its parameters: row i for image i. Knows how often it was asked."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.peeks = nn.Parameter(logits.clone()), 0

    def forward(self, index):
        return self.logits[index]

    def peek(self, index):
        self.peeks += 1
        return self.logits[index].detach()


@pytest.mark.parametrize("name", ["cc", "log", "rc", "proden", "lwc"])
def test_bases_loss_and_the_time_of_their_weights(name):
    """RC and LWC look again after the step, PRODEN does not, CC and LOG keep no weights: the six are six."""
    torch.manual_seed(0)
    z, s = torch.randn(5, 4), torch.rand(5, 4) < 0.5
    s[:, 0] = True
    net, base = Lookup(z), losses.BASES[name](s)
    index = torch.arange(5)
    start = {"lwc": torch.full((5, 4), 0.25)}.get(name, s / s.sum(1, keepdim=True))
    loss, f = base.loss(net, [index], index)
    want = {
        "cc": lambda: losses.cc(z, s),
        "log": lambda: losses.log(z, s),
        "lwc": lambda: losses.lwc(z, s, start, 1.0),
    }.get(name, lambda: losses.weighted_ce(z, start))()
    assert loss.item() == pytest.approx(want.item()) and torch.allclose(f, z.softmax(1))
    loss.backward()
    with torch.no_grad():
        net.logits -= 3 * net.logits.grad  # the step
    base.after_step(net, [index], index, f)
    now = net.logits.detach().softmax(1)
    weights = {
        "cc": None,
        "log": None,
        "proden": losses.renormalised(z.softmax(1), s, start),
        "rc": losses.renormalised(now, s, start),
        "lwc": losses.lwc_weights(now, s),
    }[name]
    assert net.peeks == (name in ("rc", "lwc"))
    assert base.weights is None if weights is None else torch.allclose(base.weights, weights)


def test_renormalised_keeps_the_old_weights_where_nothing_is_left():
    w = torch.tensor([[0.5, 0.5, 0.0]])
    assert torch.equal(losses.renormalised(torch.tensor([[0.0, 0.0, 1.0]]), S3, w), w)


def tiny_pico(classes=4, embedding=128, **options):
    torch.manual_seed(0)
    encoders = (models.Encoder("mlp", 1, 8, classes, embedding=embedding) for _ in range(2))
    return models.PiCO(*encoders, classes, embedding, **({"queue_size": 24} | options))


@pytest.mark.parametrize("f", ["prototype", "classifier"])
def test_pico_step_against_the_order_of_the_release(f):
    torch.manual_seed(0)
    net, s = tiny_pico(), torch.rand(10, 4) < 0.5
    s[:, 0] = True
    net.prototypes = F.normalize(torch.randn(4, 128), dim=1)
    base = losses.PiCO(s, f=f)
    x, z = torch.rand(6, 1, 8, 8), torch.rand(6, 1, 8, 8)
    index = torch.tensor([7, 2, 9, 0, 4, 5])
    old, queue = net.prototypes.clone(), net.queue.clone()
    with torch.no_grad(), models.running_statistics_frozen(net):
        logits, q = net.query.embed(x)
        k = net.key.embed(z)[1]  # the key encoder is still a copy
    p, c = logits.softmax(1), (q @ old.T).softmax(1)
    pseudo = torch.tensor(
        [max(range(4), key=lambda j: p[i, j] if s[n, j] else -1) for i, n in enumerate(index.tolist())]
    )
    w = s[index] / s[index].sum(1, keepdim=True)
    best = [max(range(4), key=lambda j: c[i, j] if s[n, j] else -1) for i, n in enumerate(index.tolist())]
    w = 0.99 * w + 0.01 * torch.eye(4)[best]
    want = losses.weighted_ce(logits, w) + 0.5 * losses.supcon(q, k, queue, pseudo, torch.full((24,), -1))
    loss, got = base.loss(net, [x, z], index)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert torch.allclose(got, c if f == "prototype" else p, atol=1e-6)
    assert torch.allclose(base.weights[index], w)  # before the loss
    assert torch.allclose(net.queue[:6], k, atol=1e-6) and torch.equal(net.queue_labels[:6], pseudo)
    assert not torch.allclose(net.prototypes, old)
    with torch.no_grad(), models.running_statistics_frozen(net):  # extra views: the same snapshot of prototypes
        logits, q = net.query.embed(z)
    want = (q @ old.T).softmax(1) if f == "prototype" else logits.softmax(1)
    assert torch.allclose(base.probabilities(net, z), want, atol=1e-6)


def test_pico_schedule():
    base = losses.PiCO(torch.ones(4, 4, dtype=torch.bool), proto_start=3)
    assert base.phi == 0.99 and base.epoch == 1
    base.end_epoch(1, 10)
    assert base.phi == pytest.approx(0.95 - 0.15 / 10) and base.epoch == 2
    net, x, index = tiny_pico(), torch.rand(4, 1, 8, 8), torch.arange(4)
    base.loss(net, [x, x], index)
    assert torch.equal(base.weights, torch.full((4, 4), 0.25))  # before proto_start nothing moves
    base.end_epoch(2, 10)
    base.loss(net, [x, x], index)
    assert not torch.equal(base.weights, torch.full((4, 4), 0.25))


# ------------------------------------------------------------------ networks


def test_two_encoders_have_the_parameters_of_table_6():
    net = models.build("resnet18", 3, 32, 10, pico={})
    assert models.parameter_count(net) == 23_004_564


@pytest.mark.parametrize("arch", list(models.BACKBONES))
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)])
def test_backbones_shapes_and_stem(arch, channels, size):
    net = models.build(arch, channels, size, 7, (0.5,) * channels, (0.2,) * channels, pico={"queue_size": 8})
    logits, q = net.embed(torch.rand(2, channels, size, size))
    assert logits.shape == (2, 7) and q.shape == (2, 128)
    assert torch.allclose(q.norm(dim=1), torch.ones(2))
    if arch == "resnet18":
        stem = net.query.backbone
        assert stem.conv1.weight.shape == (64, channels, 3, 3) and stem.conv1.stride == (1, 1)
        assert isinstance(stem.maxpool, nn.Identity)


def test_encoder_normalises_its_images():
    net = models.build("mlp", 3, 8, 4, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)).eval()
    x = torch.rand(5, 3, 8, 8)
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    assert torch.allclose(net(x), net.classifier(net.backbone((x - mean) / std)), atol=1e-6)


def test_peek_uses_the_batch_but_records_nothing():
    net = models.build("cnn", 1, 8, 4)
    x = torch.rand(16, 1, 8, 8)
    buffers = {k: v.clone() for k, v in net.named_buffers()}
    peeked = net.peek(x)
    assert not peeked.requires_grad
    assert all(torch.equal(v, buffers[k]) for k, v in net.named_buffers())
    assert torch.allclose(peeked, net(x), atol=1e-6)  # batch statistics; this call records them
    assert not torch.equal(net.backbone[2].running_mean, buffers["backbone.2.running_mean"])
    net.eval()
    assert torch.equal(net.peek(x), net(x))


@pytest.mark.parametrize("seed", range(5))
def test_prototypes_equal_the_update_one_after_the_other(seed):
    g = torch.Generator().manual_seed(seed)
    net = tiny_pico(classes=6, prototype_momentum=0.9)
    net.prototypes = F.normalize(torch.randn(6, 128, generator=g), dim=1)
    want = net.prototypes.clone()
    q = F.normalize(torch.randn(50, 128, generator=g), dim=1)
    labels = torch.randint(5, (50,), generator=g)  # class 5 gets none
    for vector, label in zip(q, labels, strict=True):
        want[label] = 0.9 * want[label] + 0.1 * vector
    want = F.normalize(want, dim=1)
    net.update_prototypes(q, labels)
    assert (net.prototypes - want).abs().max() < 1e-6


def test_key_encoder_follows_and_queue_goes_round():
    net = tiny_pico(key_momentum=0.9, queue_size=8)
    with torch.no_grad():
        for p in net.query.parameters():
            p.add_(1.0)
    before = [p.clone() for p in net.key.parameters()]
    net.keys(torch.rand(4, 1, 8, 8))
    for old, new, query in zip(before, net.key.parameters(), net.query.parameters(), strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * query, atol=1e-6)
    for start in (0, 5, 10):  # 5 at a time into 8 places
        net.enqueue(torch.arange(start, start + 5.0)[:, None].expand(5, 128), torch.arange(start, start + 5))
    assert net.queue_labels.tolist() == [8, 9, 10, 11, 12, 13, 14, 7] and net.pointer == 7
    assert net.queue[:, 0].tolist() == [8, 9, 10, 11, 12, 13, 14, 7]
    copy = tiny_pico(queue_size=8)
    copy.load_state_dict(net.state_dict())
    assert copy.pointer == 7


# ------------------------------------------------------------------ corruption and datasets


@pytest.mark.parametrize(("classes", "q", "eta"), [(10, 0.3, 0.3), (10, 0.5, 0.1), (100, 0.05, 0.2)])
def test_corrupt_has_the_rates_of_the_paper(classes, q, eta):
    n = 60_000
    y = torch.arange(n) % classes
    s = data.corrupt(y, classes, q, eta, torch.Generator().manual_seed(1))
    noisy = irnet.is_noisy(s, y)
    assert noisy.float().mean().item() == pytest.approx(eta * (1 - q ** (classes - 1)), abs=0.006)
    size = s.sum(1).float()
    for part in (noisy, ~noisy):  # |S| = 1 + (C-1) q either way: the flip keeps it
        assert size[part].mean().item() == pytest.approx(1 + (classes - 1) * q, rel=0.02)
    # without noise every wrong label is a candidate with probability q, whichever it is
    clean = data.corrupt(y, classes, q, 0.0, torch.Generator().manual_seed(2))
    assert not irnet.is_noisy(clean, y).any()
    offset = torch.stack([clean[torch.arange(n), (y + k) % classes].float().mean() for k in (1, 2, classes - 1)])
    assert (offset - q).abs().max() < 0.01


def test_corrupt_puts_the_intruder_anywhere_outside():
    """From the same draw with and without noise: one label out, one uniformly chosen non-candidate in."""
    y = torch.full((30_000,), 2)
    clean = data.corrupt(y, 5, 0.25, 0.0, torch.Generator().manual_seed(3))
    noisy = data.corrupt(y, 5, 0.25, 0.9, torch.Generator().manual_seed(3))
    flipped = irnet.is_noisy(noisy, y)
    assert torch.equal(noisy[~flipped], clean[~flipped])
    came = noisy[flipped] & ~clean[flipped]
    assert came.sum(1).eq(1).all() and torch.equal(noisy.sum(1), clean.sum(1))
    alone = clean[flipped].sum(1) == 1  # S = {2}: 0, 1, 3 and 4 are equally likely
    share = came[alone].float().mean(0)
    assert share[2] == 0 and (share[[0, 1, 3, 4]] - 0.25).abs().max() < 0.02


def test_corrupt_keeps_full_sets_clean_and_follows_its_seed():
    y = torch.zeros(1000, dtype=torch.long)
    s = data.corrupt(y, 3, 0.9, 0.9, torch.Generator().manual_seed(0))
    assert s.all(1).float().mean() > 0.7 and not irnet.is_noisy(s, y)[s.all(1)].any()
    again = data.corrupt(y, 3, 0.9, 0.9, torch.Generator().manual_seed(0))
    other = data.corrupt(y, 3, 0.9, 0.9, torch.Generator().manual_seed(1))
    assert torch.equal(s, again) and not torch.equal(s, other)
    assert data.corrupt(y, 1, 0.5, 0.5).all()  # one class


def test_digits_are_embedded():
    d = data.load("digits")
    assert d.images.shape == (1437, 1, 8, 8) and d.test_images.shape == (360, 1, 8, 8)
    assert d.images.dtype == torch.uint8 and d.images.max() == 255 and d.labels.unique().tolist() == list(range(10))
    small = data.load("digits", size=16, limit_train=50, limit_test=7)
    assert small.images.shape == (50, 1, 16, 16) and len(small.test_labels) == 7
    assert torch.equal(small.labels, d.labels[:50])


@pytest.mark.skipif(not (GOLDEN.parent / "data/KMNIST").exists(), reason="needs ../shared/data")
def test_kmnist_and_own_data_are_found():
    root = GOLDEN.parent / "data"
    d = data.load("kmnist", root, limit_test=100)
    assert d.images.shape == (60_000, 1, 28, 28) and len(d.test_images) == 100
    pixels = d.images.float() / 255
    assert pixels.mean().item() == pytest.approx(d.mean[0], abs=1e-3)
    assert pixels.std().item() == pytest.approx(d.std[0], abs=1e-3)
    own = data.load(str(root / "cifar10n_12k.npz"), limit_train=5000)
    assert own.images.shape == (5000, 3, 32, 32) and own.candidates.shape == (5000, 10)
    assert 0.01 < irnet.noise_level(own.candidates, own.labels) < 0.03


# ------------------------------------------------------------------ the README's tables


def test_readme_table_of_paper_and_code_is_true():
    """Every row names something in the paper, a file and a function: the function is there, and so is the name."""
    readme = (HERE / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| `(\w+\.py)` \| ([^|]+) \|$", readme, re.M)
    named = " ".join(what for what, _, _ in rows)
    for needed in ("Eq. 4", "Eq. 5", "Eq. 6", "Eq. 7", "Eq. 8", "Eq. 9", "Eq. 10", "Eq. 11", "Eq. 12", "Eq. 17",
                   "Theorem 1", "Theorem 2", "Alg. 1"):  # fmt: skip
        assert re.search(re.escape(needed) + r"(?!\d)", named), f"the table lacks {needed}"
    for what, file, functions in rows:
        source = (HERE / file).read_text()
        for name in re.findall(r"`([\w.]+)`", functions):
            found = re.search(rf"^\s*(def|class) {name.split('.')[-1]}\b", source, re.M)
            assert found, f"{file} has no {name} for {what}"
        for mention in re.findall(r"(?:Eq\.|Theorem|Table) \d+", what):
            assert re.search(rf"{mention}(?!\d)", source), f"{file} does not say {mention}"
