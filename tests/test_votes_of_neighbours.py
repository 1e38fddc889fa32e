"""The neighbours' votes: who votes, and what becomes of them, against loops and by hand."""

import pytest
import torch

import models
from conftest import features_and_sets
from paper import votes


def test_the_neighbours_vote_with_their_sets_and_nobody_for_itself(monkeypatch):
    monkeypatch.setattr(models, "MOST", 7 * 40)  # seven at a time
    features, sets = features_and_sets()
    unit = [row / row.norm() for row in features]
    nearest = models.Neighbours(torch.nn.functional.normalize(features, dim=1))
    asked, shares = torch.tensor([7, 7, 39, 0]), votes.shares(nearest, sets)
    assert torch.equal(votes.shares(nearest, sets, asked), shares[asked])
    for i, share in enumerate(shares.tolist()):
        near = sorted((j for j in range(40) if j != i), key=lambda j: -float(unit[i] @ unit[j]))[:15]
        assert share == pytest.approx([sum(bool(sets[j, k]) for j in near) / 15 for k in range(4)])


def test_neighbours_among_some_against_a_loop(monkeypatch):
    """Of those who are asked nobody is a neighbour of itself; the others may have any of them."""
    monkeypatch.setattr(models, "MOST", 7 * 12)
    features, _ = features_and_sets()
    z = torch.nn.functional.normalize(features, dim=1)
    asked = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:12]
    for k in (1, 5, 20):
        for of in (torch.arange(40), torch.tensor([39, 0, 39, *asked[:3]])):
            who, similar = models.Neighbours(z, asked).nearest(k, of)
            for i, found, cosine in zip(of.tolist(), who.tolist(), similar.tolist(), strict=True):
                near = sorted((j for j in asked.tolist() if j != i), key=lambda j: -float(z[i] @ z[j]))[
                    : min(k, 11)
                ]
                assert found == near
                assert cosine == pytest.approx([float(z[i] @ z[j]) for j in near], abs=1e-6)


@pytest.mark.parametrize(
    ("n", "classes", "k"), [(1437, 10, 96), (8000, 10, 100), (60, 10, 15), (9, 3, 8), (900, 20, 30)]
)
def test_two_thirds_of_a_class_vote(n, classes, k):
    assert votes.neighbours_of(n, classes) == k


@pytest.mark.parametrize("missing", [0.0, 0.05, 0.2, 0.3, 0.34, 0.9, 1.0])
def test_the_own_set_is_heard_against_a_loop(missing):
    features, sets = features_and_sets(60)
    share = votes.shares(models.Neighbours(torch.nn.functional.normalize(features, dim=1)), sets)
    told = votes.heard(share, sets, sets.float().mean(0), missing).tolist()
    usual = sets.float().mean(0).tolist()
    for i in range(60):
        strength = [max(float(share[i, c]) - usual[c], 0.01) for c in range(4)]
        odds = 2 * missing / (1 - missing) if missing < 1 / 3 else None
        strength = [s if sets[i, c] else (odds or 0) * s for c, s in enumerate(strength)]
        strength = share[i].tolist() if missing >= 1 / 3 else strength  # the neighbours decide alone
        assert strength[told[i]] == pytest.approx(max(strength))
    assert torch.equal(votes.heard(share, sets, sets.float().mean(0), None), share.argmax(1))  # nobody knows
    inside = sets[torch.arange(60), told]
    assert inside.all() or missing > 0  # nothing is missing: never a label outside
    assert not inside.all() or missing < 0.2


def test_a_worked_number():
    """A label that 0.9 of the neighbours have, 0.4 more than usual, against one inside the set with 0.1 more: it is
    four times as strong, and wins from odds of a quarter on, of missing / (1 - missing) = 1/8, or one in nine."""
    share = torch.tensor([[0.6, 0.9]] + [[0.5, 0.5]] * 59)
    sets = torch.tensor([[True, False]] + [[True, False], [False, True]] * 29 + [[False, True]])
    assert votes.neighbours_of(60, 2) == 20 and sets.float().mean(0).tolist() == [0.5, 0.5]
    assert [int(votes.heard(share, sets, sets.float().mean(0), missing)[0]) for missing in (0.11, 0.112)] == [0, 1]
