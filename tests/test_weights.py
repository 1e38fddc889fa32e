"""Votes in training: label weights by the votes' likelihood against loops, and the real command line."""

import numpy as np
import pytest
import torch

import losses
import train
from conftest import same_run, stopping_at, summary
from crowd import weights
from crowd.annotators import Votes
from crowd.consensus import SMOOTH
from test_crowd import features


def two_people(n: int = 60, c: int = 3, seed: int = 0):
    rng = np.random.RandomState(seed)
    truth = rng.randint(c, size=n)
    said = np.stack([np.where(rng.rand(n) < skill, truth, rng.randint(c, size=n)) for skill in (0.9, 0.5)], 1)
    votes = Votes.of_columns(torch.from_numpy(said), torch.arange(2), c)
    return truth, said, votes


def likelihood_by_a_loop(said, q):
    """prod_a pi_a[k, vote_a], over the largest; SMOOTH rows of all are added, to those SMOOTH of one accuracy."""
    c = q.shape[1]
    counts = np.zeros((2, c, c))
    for row, weight in zip(said, q / q.sum(1, keepdims=True), strict=True):
        for a, label in enumerate(row):
            counts[a, :, label] += weight
    pooled = counts.sum(0)
    rate = (np.trace(pooled) + 1) / (pooled.sum() + 2)
    pooled = pooled + SMOOTH * np.where(np.eye(c) > 0, rate, (1 - rate) / (c - 1))
    pi = counts + SMOOTH * pooled / pooled.sum(1, keepdims=True)
    pi = pi / pi.sum(2, keepdims=True)
    found = np.array([[pi[0, k, row[0]] * pi[1, k, row[1]] for k in range(c)] for row in said])
    return found / found.max(1, keepdims=True)


def test_weights_are_probabilities_times_the_votes_likelihood():
    truth, said, votes = two_people(600)
    base = weights.PRODEN(votes.counts() > 0)
    base.follow(votes)
    g = torch.Generator().manual_seed(0)
    index, probs = torch.tensor([4, 9, 17]), torch.rand(3, 3, generator=g)
    before = base.likelihood.double().numpy()
    base.after_step(None, [], index, probs)
    want = probs.numpy() * before[index]
    assert base.weights[index].numpy() == pytest.approx(want / want.sum(1, keepdims=True), rel=1e-5)
    base.end_epoch(1, 2)
    want = likelihood_by_a_loop(said, base.weights.double().numpy())
    assert base.likelihood.numpy() == pytest.approx(want, rel=1e-4)
    base.weights = torch.eye(3)[torch.from_numpy(truth)]  # once the network knows
    base.end_epoch(2, 2)
    split = said[:, 0] != said[:, 1]  # one against one: the better annotator counts more
    mine, theirs = (base.likelihood.numpy()[split, said[split, a]] for a in (0, 1))
    assert (mine > theirs).mean() > 0.9
    assert (base.likelihood[torch.from_numpy(~(votes.counts() > 0).numpy())] > 0).all()  # nothing is excluded


def test_a_label_moved_in_counts_as_much_as_the_best():
    _, said, votes = two_people()
    base = weights.PRODEN(votes.counts() > 0)
    base.follow(votes)
    row = int(np.flatnonzero(said[:, 0] == said[:, 1])[0])
    other = (int(said[row, 0]) + 1) % 3
    base.candidates[row, other] = True
    allowed = base.allowed(torch.tensor([row]))[0]
    assert allowed[other] == 1 == allowed[int(said[row, 0])] and allowed.sum() < 3


def test_pico_takes_the_label_that_network_and_votes_make_most_probable():
    _, _, votes = two_people()
    base = weights.PiCO(votes.counts() > 0)
    base.follow(votes)
    base.index = torch.arange(60)
    probs = torch.rand(60, 3, generator=torch.Generator().manual_seed(1))
    want = [max(range(3), key=lambda k: float(p[k] * w[k])) for p, w in zip(probs, base.likelihood, strict=True)]
    assert base.best(probs, base.candidates).tolist() == want
    even = weights.PiCO(torch.ones(60, 3, dtype=torch.bool))
    even.follow(votes)
    even.likelihood.fill_(1.0)
    even.index = base.index
    assert torch.equal(even.best(probs, even.candidates), losses.PiCO.best(even, probs, even.candidates))


@pytest.mark.parametrize("kind", [weights.PRODEN, weights.PiCO])
def test_what_a_person_decided_is_all_that_counts(kind):
    _, said, votes = two_people()
    decided = torch.zeros(60, 3, dtype=torch.bool)
    nobody = torch.tensor([next(k for k in range(3) if k not in row) for row in said[:5]])  # what nobody voted for
    decided[torch.arange(5), nobody] = True
    base = kind(torch.where(decided.any(1, keepdim=True), decided, votes.counts() > 0))
    base.follow(votes, decided)
    for _ in range(2):
        assert torch.equal(base.weights[:5], decided[:5].float())
        assert torch.equal(base.allowed(torch.arange(5)), decided[:5].float())
        base.end_epoch(1, 4)
    assert (base.allowed(torch.arange(5, 60)) > 0).all()


def test_weights_sum_to_one_again_where_a_label_was_moved_in():
    _, _, votes = two_people()
    base = weights.PRODEN(votes.counts() > 0)
    base.follow(votes)
    base.weights[3] *= 1.2
    ratio = base.weights[3] / base.weights[3].sum()
    base.end_epoch(1, 4)
    torch.testing.assert_close(base.weights.sum(1), torch.ones(60))
    torch.testing.assert_close(base.weights[3], ratio)


def crowd_file() -> None:
    x, y = features(400)
    rng = np.random.RandomState(3)
    said = np.where(rng.rand(400, 3) < (0.9, 0.6, 0.5), y[:, None], rng.randint(8, size=(400, 3)))
    np.savez("v.npz", x_train=x[:320], y_train=y[:320], annotators=said[:320], x_test=x[320:], y_test=y[320:])
    sets = np.eye(8, dtype=bool)[y[:320]]
    np.savez("s.npz", x_train=x[:320], y_train=y[:320], candidates=sets, x_test=x[320:], y_test=y[320:])


@pytest.mark.parametrize(("more", "said"), [([], True), (["--tau", "0.3"], False), (["--no-irnet"], False)])
def test_without_a_held_out_part_the_guard_says_that_it_cannot_look(more, said, capsys):
    crowd_file()
    assert train.main([*"--dataset v.npz --base cc --epochs 2 --e0 1 --val test --out r".split(), *more]) == 0
    assert ("guard cannot look" in capsys.readouterr().out) is said


@pytest.mark.parametrize("base", ["proden", "pico"])
def test_the_command_line_and_a_resumed_run(base, monkeypatch, capsys):
    crowd_file()
    argv = f"--dataset v.npz --base {base} --epochs 6 --e0 3 --tau 0.001 --follow-votes".split()
    assert train.main([*argv, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        stopping_at(patch, 4 * 3 + 2)
        assert train.main([*argv, "--out", "r"]) == 143
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("r", "whole")
    assert summary("r")["last"] > 0.5
    for more, why in (("--base cc", "not --base cc"), ("--dataset s.npz", "no votes")):
        capsys.readouterr()
        assert train.main([*argv, *more.split(), "--out", "bad"]) == 2
        assert why in capsys.readouterr().err
