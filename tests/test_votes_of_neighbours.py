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


def test_half_precision_around_it_changes_nothing():
    """A loop of one's own may wrap its step in autocast."""
    z = torch.nn.functional.normalize(features_and_sets()[0], dim=1)
    near = models.Neighbours(z)
    with torch.autocast("cpu", torch.bfloat16):
        who, similar = near.nearest(5)
    assert torch.equal(who, near.nearest(5)[0]) and torch.equal(similar, near.nearest(5)[1])


@pytest.mark.parametrize(
    ("n", "classes", "k"), [(1437, 10, 96), (8000, 10, 100), (60, 10, 15), (9, 3, 8), (900, 20, 30)]
)
def test_two_thirds_of_a_class_vote(n, classes, k):
    assert votes.neighbours_of(n, classes) == k


@pytest.mark.parametrize("missing", [0.0, 0.05, 0.3, 0.5, 1.0])
def test_the_own_set_is_heard_against_a_loop(missing):
    """Posteriors from what generates the sets: S has its truth with 1 - missing, and then any label of S may be it;
    else a label outside was taken out for one of S: |S| ways, and from each C - |S| labels to draw."""
    features, sets = features_and_sets(60)
    sets[0], sets[1] = True, False  # a full and an empty one
    share = votes.shares(models.Neighbours(torch.nn.functional.normalize(features, dim=1)), sets)
    usual = sets.float().mean(0)
    told = votes.heard(share, sets, usual, missing).tolist()
    for i in range(60):
        prior = [max(float(share[i, c] - usual[c]), 0.01) for c in range(4)]
        size = int(sets[i].sum())
        posterior = [
            p * ((1 - missing) if sets[i, c] else missing * max(size, 1) / (4 - size)) for c, p in enumerate(prior)
        ]
        assert posterior[told[i]] == pytest.approx(max(posterior))
    assert torch.equal(votes.heard(share, sets, usual, None), share.argmax(1))  # nobody knows
    inside = sets[torch.arange(60), told][2:]
    assert inside.all() or missing > 0  # nothing is missing: never a label outside
    assert not inside.all() or missing < 0.3
    assert sets[0, told[0]] and share[1, told[1]] - usual[told[1]] == (share[1] - usual).max()


def test_a_worked_number():
    """Of two labels 0.6 of the neighbours have the one in the set, 0.1 more than usual, and 0.9 the other, 0.4
    more: it is four times as probable by them, and the set has one of two labels. So it wins from missing = 0.2 on,
    where the set speaks four to one against it."""
    share, own, usual = torch.tensor([[0.6, 0.9]]), torch.tensor([[True, False]]), torch.tensor([0.5, 0.5])
    assert [int(votes.heard(share, own, usual, missing)[0]) for missing in (0.19, 0.21)] == [0, 1]
    share, own, usual = torch.ones(1, 5), torch.tensor([[True] + [False] * 4]), torch.tensor([0.9, 0.5, 0, 0, 0])
    # small sets speak louder: 0.1 beyond the usual against 1, but each of four labels outside has a quarter
    assert [int(votes.heard(share, own, usual, missing)[0]) for missing in (0.28, 0.29)] == [0, 2]
