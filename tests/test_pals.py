"""PALS: neighbours, the two votes, the labels and the choice of samples, each against a loop; the loss by hand."""

import math

import pytest
import torch

import models
from paper import pals


@pytest.fixture
def made(monkeypatch):
    """Features, sets and probabilities of 60 samples."""
    monkeypatch.setattr(models, "MOST", 7 * 60)  # neighbours of seven at a time
    g = torch.Generator().manual_seed(3)
    z = torch.nn.functional.normalize(torch.randn(60, 5, generator=g), dim=1)
    candidates = torch.rand(60, 4, generator=g) < 0.4
    candidates[torch.arange(60), torch.arange(60) % 4] = True
    return z, candidates, (2 * torch.randn(60, 4, generator=g)).softmax(1)


def by_loops(z, candidates, p, sure):
    """Labels and posteriors, a sample, a neighbour and a class after the other."""
    n, c = candidates.shape
    near = []
    for i in range(n):
        others = sorted((j for j in range(n) if j != i), key=lambda j: -float(z[i] @ z[j]))[:15]
        near.append([(j, math.exp(float(z[i] @ z[j]) / 0.1)) for j in others])
    winner = []
    for i in range(n):
        votes = [sum(w for j, w in near[i] if candidates[j, k]) for k in range(c)]
        winner.append(votes.index(max(votes)))
    found = []
    for i in range(n):
        votes = [sum(w for j, w in near[i] if winner[j] == k) for k in range(c)]
        allowed = {k for k in range(c) if candidates[i, k]}
        if p[i].max() > sure:
            allowed.add(int(p[i].argmax()))
        label = max(sorted(allowed), key=lambda k: votes[k])
        found.append((label, votes[label] / sum(votes)))
    return found


@pytest.mark.parametrize("sure", [0.3, 1.0])
def test_labels_are_the_neighbours_votes_taken_twice(made, sure):
    z, candidates, p = made
    labels, posterior = pals.relabel(*models.Neighbours(z).nearest(pals.NEIGHBOURS), candidates, p, sure)
    want = by_loops(z, candidates, p, sure)
    assert labels.tolist() == [label for label, _ in want]
    assert posterior.tolist() == pytest.approx([value for _, value in want], abs=1e-5)
    outside = ~candidates.gather(1, labels[:, None])[:, 0]
    assert bool(outside.any()) == (sure < 1)  # beyond the set only where the network is sure


def test_a_quarter_of_each_class_is_trained_on_the_surest_first():
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 2])
    posterior = torch.tensor([0.1, 0.9, 0.3, 0.8, 0.2, 0.4, 0.5, 0.6, 0.7, 0.0])
    chosen = pals.surest(labels, posterior, 4)
    assert chosen.nonzero()[:, 0].tolist() == [1, 3, 8, 9]  # ceil(5/4), 4/4, ceil(1/4)


def test_an_epoch_begins_with_labels_from_the_original_sets_and_an_easier_threshold(made):
    z, candidates, p = made

    class Seen(torch.nn.Module):  # a network whose features and probabilities are known
        def forward(self, x):
            return p.log()

    monkey, base = Seen(), pals.PALS(candidates, epochs=5)
    before = models.features
    models.features = lambda network, x: 3 * z  # of any length
    try:
        for epoch, sure in ((1, 0.45), (3, 0.40), (5, 0.35)):
            base.begin_epoch(epoch, lambda look: look(monkey, None))
            want = by_loops(z, candidates, p, sure)
            assert base.sure == pytest.approx(sure) and base.labels.tolist() == [label for label, _ in want]
    finally:
        models.features = before
    index = torch.arange(10, 40)
    assert base.pool(index).tolist() == [i for i in range(10, 40) if base.chosen[i]]
    assert 15 <= int(base.chosen.sum()) <= 18  # a quarter of 60, rounded up in four classes


def test_loss_is_the_smoothed_cross_entropy_of_mixed_views():
    candidates = torch.eye(3, dtype=torch.bool)[[0, 1, 2, 1]]
    base = pals.PALS(candidates, torch.Generator().manual_seed(0))
    weight = torch.randn(6, 3)
    views = [torch.rand(4, 6), torch.rand(4, 6)]
    loss, f = base.loss(lambda x: x @ weight, views, torch.arange(4))
    g = torch.Generator().manual_seed(0)
    other, share = torch.randperm(4, generator=g), float(torch.rand((), generator=g))
    want = 0.0
    for view in views:
        for i in range(4):
            j = int(other[i])
            log_p = ((share * view[i] + (1 - share) * view[j]) @ weight).log_softmax(0)
            y = [share * candidates[i, k] + (1 - share) * candidates[j, k] for k in range(3)]
            want -= sum((0.5 * float(y[k]) + 0.5 / 3) * float(log_p[k]) for k in range(3)) / 4
    assert float(loss) == pytest.approx(want, rel=1e-5) and f.shape == (4, 3)
