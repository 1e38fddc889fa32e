"""The method against oracles: loops, worked numbers, and the released code's answers.

`python -m pytest -q` runs this and all that is in tests/.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import irnet
import losses

HERE = Path(__file__).parent
GOLDEN = HERE / "tests" / "golden.json"
INF = math.inf


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
    assert new.tolist() == [[True, not swap, True, False]]
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


@pytest.mark.parametrize("window", [3, 6, 10, 37, 100])
def test_smoothed_rule_against_the_running_average_written_out(window):
    rng = np.random.RandomState(window)
    curve = np.minimum(np.arange(300) / 120, 1) + rng.randn(300) * 0.05
    watch = irnet.CorrectionEpoch(window=window)
    found = next((e for e, a in enumerate(curve, 1) if watch.update(a)), None)
    half, steps = window // 2, 10
    for n in range(max(window, 11), 301):
        acc = curve[:n]
        average = [acc[max(0, t - half) : min(n - 1, t + half)].mean() for t in range(n)]
        if np.diff(average)[-steps:].mean() < 1e-6:
            break
    assert found == n


@pytest.mark.parametrize("window", [3, 5, 8])
def test_knee_rule_against_its_sentence_and_a_worked_number(window):
    """In NumPy, on noisy curves; and on one that rises by halves: 0.5, 0.75, 0.875, ..."""
    for seed in range(20):
        rng = np.random.RandomState(seed)
        curve = 1 - np.exp(-np.arange(60) / rng.uniform(2, 40)) + rng.randn(60) * 0.03
        watch = irnet.CorrectionEpoch(window, "knee")
        found = next((e for e, a in enumerate(curve, 1) if watch.update(a)), None)

        def knee(e, curve=curve):
            now, before = np.split(curve[e - 2 * window : e], 2)[::-1]
            return now.mean() - before.mean() <= 0.3 * (now.mean() - curve[0]) or e >= 3 * window

        e = next(e for e in range(2 * window, 61) if knee(e))
        assert found == e
        for since in (2, e, e + 4, 3 * window + 5):  # the base is itself from then on
            late = irnet.CorrectionEpoch(window, "knee", since=since)
            fires = [n for n, a in enumerate(curve, 1) if late.update(a)]
            held = [n for n in range(max(2 * window, since), 61) if knee(n)]
            assert fires == held[:1]
    watch = irnet.CorrectionEpoch(3, "knee")
    # at 6 the means are 0.9635 and 0.7083: risen by 0.2552 of 0.4635, over three tenths; at 7 by 0.1276 of 0.4818
    assert [e for e in range(1, 20) if watch.update(1 - 0.5**e)] == [7]
    straight = irnet.CorrectionEpoch(5, "knee")  # no knee: half of its rise at 10, two fifths at 12, a third at 15
    assert [e for e in range(1, 40) if straight.update(e / 100)] == [15]


def test_correction_epoch_fixed_and_refused():
    watch = irnet.CorrectionEpoch(fixed=3)
    assert [watch.update(e) for e in range(5)] == [False, False, True, False, False]
    for window in (3, 4, 5, 10):
        rising = irnet.CorrectionEpoch(window)
        assert not any(rising.update(e / 100) for e in range(100)) and rising.e0 is None
    with pytest.raises(ValueError, match="at least 3"):  # two would find e0 = 2 on this curve, as on any other
        irnet.CorrectionEpoch(2)
    sets = torch.eye(3, dtype=torch.bool)
    made = [irnet.IRNet(sets, 0.1, epochs).epoch for epochs in (1000, 500, 100, 99, 40, 20, 5)]
    assert [one.window for one in made] == [100, 50, 10, 12, 5, 3, 3]
    assert [one.rule for one in made] == ["smoothed"] * 3 + ["knee"] * 4
    with pytest.raises(ValueError, match="rule"):
        irnet.CorrectionEpoch(rule="guess")
    again = irnet.CorrectionEpoch(fixed=3)
    again.load_state_dict(watch.state_dict())
    assert again.e0 == 3 and again.curve == watch.curve


# ------------------------------------------------------------------ the plug-in


def test_readme_three_lines_in_a_loop_that_is_not_ours():
    """The block of the README, or of docs/: a plain nn.Linear on random features."""
    text = "\n".join(path.read_text() for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))))
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "IRNet(" in b)
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


# ------------------------------------------------------------------ the table of paper and code


def test_table_of_paper_and_code_is_true():
    """Every row names something in the paper, a file and a function: the function is there, and so is the name."""
    text = (HERE / "docs" / "paper-and-code.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| `([\w/]+\.py)` \| ([^|]+) \|$", text, re.M)
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
