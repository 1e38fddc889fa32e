"""Any size, any set, any probabilities: no exception, no NaN, and what must always hold."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
import irnet
import losses

settings.register_profile(
    "irnet", max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.load_profile("irnet")

SEEDS = st.integers(0, 2**32)
SIZES = st.tuples(st.integers(1, 40), st.integers(2, 20))
SCALES = st.sampled_from([0.0, 1.0, 30.0, 1e4])  # of logits: uniform, usual, saturated, absurd


def sets(n: int, c: int, seed: int, empty: bool) -> torch.Tensor:
    """Candidate sets of every size from 0 or 1 to C."""
    g = torch.Generator().manual_seed(seed)
    candidates = torch.rand(n, c, generator=g) < torch.rand(n, 1, generator=g) * 1.2
    if not empty:
        candidates[torch.arange(n), torch.randint(c, (n,), generator=g)] = True
    return candidates


def logits_of(n: int, c: int, seed: int, scale: float) -> torch.Tensor:
    return torch.randn(n, c, generator=torch.Generator().manual_seed(seed + 1)) * scale


@given(st.integers(0, 60), st.integers(2, 20), st.floats(0, 0.999), st.floats(0, 0.999), SEEDS)
def test_corrupt(n, c, q, eta, seed):
    labels = torch.randint(c, (n,), generator=torch.Generator().manual_seed(seed))
    clean = data.corrupt(labels, c, q, 0.0, torch.Generator().manual_seed(seed))
    noisy = data.corrupt(labels, c, q, eta, torch.Generator().manual_seed(seed))
    assert clean.dtype == noisy.dtype == torch.bool and clean.shape == noisy.shape == (n, c)
    assert clean.gather(1, labels[:, None]).all()  # without noise the truth is always there
    assert torch.equal(clean.sum(1), noisy.sum(1)) and (noisy.sum(1) >= 1).all()  # noise keeps |S|
    gone = irnet.is_noisy(noisy, labels)
    assert torch.equal(noisy[~gone], clean[~gone])  # what is not noisy is untouched
    assert ((noisy ^ clean).sum(1)[gone] == 2).all()  # the truth out, one label in
    assert not (gone & clean.all(1)).any()  # a full set stays clean


@given(SIZES, SEEDS, SCALES, st.booleans())
def test_margin(size, seed, scale, empty):
    candidates, probs = sets(*size, seed, empty), logits_of(*size, seed, scale).softmax(1)
    tau = irnet.margin(probs, candidates)
    full, none = candidates.all(1), ~candidates.any(1)
    assert not tau.isnan().any() and (tau[full] == torch.inf).all() and (tau[none] == -torch.inf).all()
    assert (tau[~full & ~none].abs() <= 1).all()
    best_inside = candidates.gather(1, probs.argmax(1, keepdim=True))[:, 0]
    assert (tau[best_inside] >= 0).all() and (tau[~best_inside] <= 0).all()
    assert torch.equal(irnet.margin(probs, ~candidates), -tau)


@given(SIZES, SEEDS, SCALES, st.booleans(), st.floats(0, 0.999), st.integers(0, 3))
def test_detect(size, seed, scale, empty, tau, views):
    candidates = sets(*size, seed, empty)
    f = [logits_of(*size, seed + 10 * k, scale).softmax(1) for k in range(views + 1)]
    flagged, label = irnet.detect(f, candidates, tau)
    assert not flagged[candidates.all(1)].any()  # a full set has nothing to move in
    assert not candidates.gather(1, label[:, None])[:, 0][flagged].any()
    assert (irnet.margin(f[0], candidates)[flagged] <= -tau).all()
    more, _ = irnet.detect([*f, logits_of(*size, seed + 99, scale).softmax(1)], candidates, tau)
    stricter, _ = irnet.detect(f, candidates, min(0.9999, tau + 0.1))
    assert not (more & ~flagged).any() and not (stricter & ~flagged).any()  # more conditions never flag more


@given(SIZES, SEEDS, SCALES, st.booleans(), st.booleans(), st.sampled_from(["value", "uniform", "1/C"]))
def test_correct(size, seed, scale, empty, swap, weights_after):
    """Through the plug-in, on a random part of the data."""
    n, _ = size
    candidates = sets(*size, seed, empty and not swap)
    before, weights = candidates.clone(), losses.uniform_weights(candidates)
    old_weights = weights.clone()
    refine = irnet.IRNet(candidates, tau=0.0, epochs=10, e0=1, swap=swap, weights_after=weights_after)
    refine.end_epoch(0.5)
    g = torch.Generator().manual_seed(seed)
    index = torch.randperm(n, generator=g)[: 1 + int(torch.randint(n, (1,), generator=g))]
    f = logits_of(*size, seed, scale).softmax(1)[index]
    flagged, label = refine.correct(index, [f], weights)
    grown = candidates.sum(1) - before.sum(1)
    touched = torch.zeros(n, dtype=torch.bool).index_fill_(0, index[flagged], True)
    assert torch.equal(grown, torch.zeros(n, dtype=torch.long) if swap else touched.long())
    assert swap or (candidates >= before).all()  # nothing leaves, a clean sample's truth neither
    assert candidates[index[flagged], label[flagged]].all()
    assert torch.equal(candidates[~touched], before[~touched])
    assert torch.equal(weights[~touched], old_weights[~touched]) and not weights.isnan().any()
    assert torch.allclose((weights * candidates).sum(1)[touched], torch.ones(int(touched.sum())), atol=1e-5)
    assert (weights[touched] * ~candidates[touched]).abs().sum() == 0


@given(SIZES, SEEDS, SCALES)
def test_losses(size, seed, scale):
    candidates, w = sets(*size, seed, False), losses.uniform_weights(sets(*size, seed, False))
    assert torch.allclose(w.sum(1), torch.ones(size[0])) and not (w * ~candidates).any()
    for loss in (
        lambda z: losses.cc(z, candidates),
        lambda z: losses.log(z, candidates),
        lambda z: losses.weighted_ce(z, w),
        lambda z: losses.lwc(z, candidates, torch.full(size, 1 / size[1])),
        lambda z: losses.mae(z, w),
        lambda z: losses.mse(z, w),
        lambda z: losses.sce(z, w),
        lambda z: losses.sce(z, w, form="soft_target"),
        lambda z: losses.gce(z, w),
    ):
        logits = logits_of(*size, seed, scale).requires_grad_()
        value = loss(logits)
        value.backward()
        assert value.isfinite() and value >= -1e-5 and logits.grad.isfinite().all()


@given(SIZES, SEEDS, SCALES)
def test_label_weights(size, seed, scale):
    candidates, probs = sets(*size, seed, False), logits_of(*size, seed, scale).softmax(1)
    old = losses.uniform_weights(candidates)
    w = losses.renormalised(probs, candidates, old)
    assert torch.allclose(w.sum(1), torch.ones(size[0]), atol=1e-5) and not (w * ~candidates).any()
    w = losses.lwc_weights(probs, candidates)
    assert w.isfinite().all() and (w >= 0).all() and ((w * candidates).sum(1) <= 1 + 1e-5).all()


@given(st.integers(1, 12), st.integers(0, 20), st.integers(2, 6), SEEDS)
def test_supcon(n, queue, classes, seed):
    g = torch.Generator().manual_seed(seed)
    q, k, old = (torch.nn.functional.normalize(torch.randn(m, 8, generator=g), dim=1) for m in (n, n, queue))
    labels, old_labels = (
        torch.randint(classes, (n,), generator=g),
        torch.randint(-1, classes, (queue,), generator=g),
    )
    q.requires_grad_()
    loss = losses.supcon(q, k, old, labels, old_labels)
    loss.backward()
    assert loss.isfinite() and loss >= -1e-5 and q.grad.isfinite().all()
