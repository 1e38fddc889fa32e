"""The noise report of one's own labels against enumeration, another implementation and known crowds."""

import itertools
import math

import numpy as np
import pytest
import torch

import data
import irnet
from crowd import noise
from crowd.annotators import Votes
from crowd.consensus import VoteModel, named


def network(y: torch.Tensor, classes: int, strength: float = 4.0, seed: int = 0) -> torch.Tensor:
    """Probabilities that are about right."""
    z = strength * torch.eye(classes)[y] + torch.randn(
        len(y), classes, generator=torch.Generator().manual_seed(seed)
    )
    return (z * strength).softmax(1)


def companions(y: torch.Tensor, classes: int, gone: float, seed: int = 0) -> torch.Tensor:
    """The next two classes are in the set with probability 0.6; the truth is deleted for a share."""
    g = torch.Generator().manual_seed(seed)
    chance = torch.full((classes, classes), 0.05)
    for k in range(classes):
        chance[k, [(k + 1) % classes, (k + 2) % classes]] = 0.6
    sets = torch.rand(len(y), classes, generator=g) < chance[y]
    lost = torch.rand(len(y), generator=g) < gone
    sets[torch.arange(len(y)), y] = ~lost
    sets[torch.arange(len(y)), (y + 1) % classes] |= ~sets.any(1)
    return sets


# ------------------------------------------------------------------ P(S | k) adds up to 1


def test_sets_by_class_add_up_with_the_truth_and_without():
    rates = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)).double() * 0.8 + 0.1
    every = torch.tensor(list(itertools.product((False, True), repeat=4)))[1:]
    inside, outside = noise.by_class(rates, every)
    for k in range(4):
        assert float(inside[:, k].exp().sum()) == pytest.approx(1)  # all sets with k in them
        assert float(outside[:, k].exp().sum()) == pytest.approx(1)  # all others, but for the empty one
    one = every.tolist().index([True, False, True, False])
    r = rates.tolist()
    assert float(inside[one, 0].exp()) == pytest.approx((1 - r[0][1]) * r[0][2] * (1 - r[0][3]))


@pytest.mark.parametrize("groups", [1, 2])
def test_votes_add_up_with_the_truth_and_without(groups):
    every = torch.tensor(list(itertools.product(range(3), repeat=2)))
    votes = Votes.of_columns(every, torch.arange(2), 3)
    pi = torch.rand(groups, 2, 3, 3, generator=torch.Generator().manual_seed(2)).double() + 0.1
    pi = pi / pi.sum(-1, keepdim=True)
    weights = torch.tensor([1.0]) if groups == 1 else torch.tensor([0.3, 0.7])
    inside, outside = noise.by_votes(VoteModel(votes, groups), pi.log(), weights.double(), votes.counts() > 0)
    for k in range(3):
        assert float(inside[:, k].exp().sum()) == pytest.approx(1)
        assert float(outside[:, k].exp().sum()) == pytest.approx(1)


def test_deleted_sets_add_up():
    """All sets of four labels in which any joins with 0.3: with the truth, and without it but not empty."""
    every = torch.tensor(list(itertools.product((False, True), repeat=4)))[1:]
    inside, outside = noise.deleted(every, 0.3)
    with_k = 0.3 ** (every.sum(1) - 1).double() * 0.7 ** (4 - every.sum(1)).double()
    for k in range(4):
        assert float((inside[:, k].exp() * with_k).sum()) == pytest.approx(1)
        assert float((outside[:, k].exp() * with_k).sum()) == pytest.approx(1)


def test_a_deleted_truth_is_told_from_a_swapped_one():
    g = torch.Generator().manual_seed(17)
    y = torch.randint(8, (4000,), generator=g)
    sets = data.corrupt(y, 8, 0.3, 0.0, g)
    gone = (torch.rand(4000, generator=g) < 0.3) & (sets.sum(1) > 1)
    sets[gone, y[gone]] = False
    p, truth = network(y, 8, 1.8), irnet.noise_level(sets, y)
    found = noise.report(p, sets, torch.arange(4000))
    alone = noise.profile(p.double().log(), *noise.at_random(sets))
    assert abs(found.eta - truth) < 0.015 < abs(alone[0] - truth) and found.gain > alone[-1]


def test_at_random_it_is_the_papers_estimate():
    g = torch.Generator().manual_seed(3)
    y = torch.randint(6, (300,), generator=g)
    p, sets = network(y, 6, 2.0), data.corrupt(y, 6, 0.3, 0.2, g)
    sets = sets[(sets.sum(1) < 6)]
    p = p[: len(sets)]
    eta, _, low, high, gain = noise.profile(p.double().log(), *noise.at_random(sets))
    want, _, (least, most) = irnet.estimate_noise(p.log(), sets)
    assert (eta, low, high) == pytest.approx((want, least, most), abs=0.011)  # fewer temperatures are tried
    assert (gain > noise.WITHIN) == (low > 0)


# ------------------------------------------------------------------ labels that come together


def test_pairs_by_a_loop_and_by_chance():
    y = torch.randint(8, (1500,), generator=torch.Generator().manual_seed(4))
    random, together = data.corrupt(y, 8, 0.3, 0.1, torch.Generator().manual_seed(5)), companions(y, 8, 0.1)
    count = [[sum(row[i] and row[j] for row in random.tolist()) * (i != j) for j in range(8)] for i in range(8)]
    assert noise.pairs(random).tolist() == count
    for sets in (random, together):
        assert torch.allclose(noise.by_chance(sets).sum(1), noise.pairs(sets).sum(1), rtol=0.05)
    assert noise.surprise(noise.pairs(random), noise.by_chance(random)) < noise.RANDOM
    assert noise.surprise(noise.pairs(together), noise.by_chance(together)) > 2 * noise.RANDOM
    truth = torch.eye(8)[y].double()
    rates = noise.class_rates(truth, together)
    assert noise.surprise(noise.pairs(together), noise.by_model(truth, rates)) < noise.FITS
    assert rates[0, 1] == pytest.approx(float(together[y == 0, 1].double().mean()), abs=0.02)


@pytest.mark.parametrize("gone", [0.0, 0.15])
def test_companions_of_a_class_do_not_hide_what_is_missing(gone):
    y = torch.randint(8, (2500,), generator=torch.Generator().manual_seed(6))
    sets, p, held = companions(y, 8, gone), network(y, 8), torch.arange(400)
    found, truth = noise.report(p, sets, held), irnet.noise_level(sets, y)
    assert found.model == "classes" and found.fits and found.low <= truth <= found.high
    assert abs(found.eta - truth) < 0.03 and (found.gain > 5) == (gone > 0)


def test_random_sets_are_taken_for_such():
    y = torch.randint(8, (2500,), generator=torch.Generator().manual_seed(7))
    sets = data.corrupt(y, 8, 0.3, 0.2, torch.Generator().manual_seed(8))
    found = noise.report(network(y, 8), sets, torch.arange(400))
    assert found.model == "random" and found.fits and found.low <= irnet.noise_level(sets, y) <= found.high
    full = noise.report(network(y, 8), torch.ones_like(sets), torch.arange(400))
    assert math.isnan(full.eta) and full.gain == 0  # nothing is known, nothing is moved


def test_a_class_that_loses_more_shows():
    y = torch.randint(4, (3000,), generator=torch.Generator().manual_seed(9))
    sets = data.corrupt(y, 4, 0.2, 0.0, torch.Generator().manual_seed(10))
    lost = (y == 2) & (torch.rand(3000, generator=torch.Generator().manual_seed(11)) < 0.4)
    sets[lost, 2] = False
    sets[lost, 3] = True
    found = noise.report(network(y, 4), sets, torch.arange(1000))
    assert max(range(4), key=found.classes.__getitem__) == 2 and found.classes[2] == pytest.approx(0.4, abs=0.08)
    assert all(found.classes[k] < 0.03 for k in (0, 1, 3))


# ------------------------------------------------------------------ all samples, by heads


def test_the_count_is_expected_as_often_as_it_is_drawn():
    """A prediction that is right with 0.8, sets by the paper's process: how often it is outside."""
    g = torch.Generator().manual_seed(12)
    y = torch.randint(6, (200_000,), generator=g)
    sets = data.corrupt(y, 6, 0.3, 0.2, g)
    other = (y + torch.randint(1, 6, y.shape, generator=g)) % 6
    first = torch.where(torch.rand(y.shape, generator=g) < 0.8, y, other)
    outside = 1 - float(sets.gather(1, first[:, None]).double().mean())
    count = noise.Count(outside, float(sets.double().sum(1).mean()), 6, 1000.0)
    likelihood = count.likelihood(torch.tensor([0.8, 0.9], dtype=torch.double))
    eta = float(noise.ETAS[likelihood[0].argmax()])
    assert eta == pytest.approx(irnet.noise_level(sets, y), abs=0.011)  # full sets stay clean
    assert float(noise.ETAS[likelihood[1].argmax()]) > eta + 0.03  # a better network: more is missing


def test_the_count_of_all_samples_tells_noise_from_a_poor_network():
    g = torch.Generator().manual_seed(13)
    y = torch.randint(8, (3000,), generator=g)
    x = torch.eye(8)[y] + 0.25 * torch.randn(3000, 8, generator=g)  # features, nearly apart
    sets, p, held = data.corrupt(y, 8, 0.3, 0.25, g), (6 * x).softmax(1), torch.arange(60)
    few, all_ = (noise.report(p, sets, held, None, features) for features in (None, x))
    truth = irnet.noise_level(sets, y)
    assert abs(all_.eta - truth) < 0.03 and all_.low <= truth <= all_.high
    assert all_.gain > few.gain > 0 and (all_.low, all_.high) == (few.low, few.high)
    clean = data.corrupt(y, 8, 0.3, 0.0, g)
    poor = (3 * (x + 0.5 * torch.randn(3000, 8, generator=g))).softmax(1)  # right for three of four
    assert noise.report(poor, clean, held, None, poor.log()).gain < 1.35


def test_columns_get_their_names_back():
    g = torch.Generator().manual_seed(14)
    p = (3 * torch.randn(200, 5, generator=g).double()).softmax(1)
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        assert torch.equal(named(p[:, order], p), p)


def test_heads_find_the_classes_where_the_network_has_lost_one():
    """A class whose truth is deleted for 0.45 of its samples, and there taken for the next by the network."""
    y = torch.randint(8, (1600,), generator=torch.Generator().manual_seed(15))
    sets, g = companions(y, 8, 0.05), torch.Generator().manual_seed(16)
    gone = (y == 3) & (torch.rand(1600, generator=g) < 0.45)
    sets[gone, 3] = False
    sets[gone, 4] |= ~sets[gone].any(1)
    x = torch.eye(8)[y] + 0.2 * torch.randn(1600, 8, generator=g)
    p = network(torch.where(gone, 4, y), 8)
    found, truth = noise.report(p, sets, torch.arange(160), None, x), irnet.noise_level(sets, y)
    assert found.model == "classes" and abs(found.eta - truth) < 0.04 and found.low <= truth <= found.high
    without = noise.report(p, sets, torch.arange(160))
    assert abs(without.eta - truth) > 0.04  # by the network alone


# ------------------------------------------------------------------ votes


def test_votes_of_people_who_confuse_classes_their_own_way():
    rng = np.random.RandomState(0)
    classes, n = 6, 2000
    y = rng.randint(classes, size=n)
    said = np.stack([np.where(rng.rand(n) < 0.45, (y + shift) % classes, y) for shift in (1, 2, 5)], 1)
    votes = Votes.of_columns(torch.from_numpy(said), torch.arange(3), classes)
    sets, truth = votes.counts() > 0, float((said != y[:, None]).all(1).mean())
    p = network(torch.from_numpy(y), classes)
    found = noise.report(p, sets, torch.arange(200), votes)
    assert found.model == "votes" and found.fits and found.low <= truth <= found.high
    assert abs(found.eta - truth) < 0.02 and found.high - found.low < 0.15


def test_where_most_votes_are_wrong_the_interval_is_wide():
    rng = np.random.RandomState(1)
    y = rng.randint(6, size=1500)
    said = np.stack([np.where(rng.rand(1500) < 0.75, (y + shift) % 6, y) for shift in (1, 1, 2)], 1)
    votes = Votes.of_columns(torch.from_numpy(said), torch.arange(3), 6)
    heart = torch.from_numpy(votes.counts().numpy() * 2).softmax(1)  # a network that repeats the votes
    found = noise.report(heart, votes.counts() > 0, torch.arange(150), votes)
    assert not found.fits or found.high > 0.3


def test_doubts_that_people_and_network_share():
    rng = np.random.RandomState(2)
    y = rng.randint(5, size=800)
    hard = rng.rand(800) < 0.5
    p = torch.from_numpy(np.where(hard[:, None], 1.0, 4.0) * np.eye(5)[y]).softmax(1)
    for share, want in (((0.4, 0.05), True), ((0.2, 0.2), False)):
        wrong = rng.rand(800, 3) < np.where(hard, *share)[:, None]
        said = np.where(wrong, (y[:, None] + rng.randint(1, 5, (800, 3))) % 5, y[:, None])
        counts = Votes.of_columns(torch.from_numpy(said), torch.arange(3), 5).counts()
        noisy = p + 0.01 * torch.rand(800, 5, generator=torch.Generator().manual_seed(1))
        assert noise.shared_doubt(noisy, counts) == want
