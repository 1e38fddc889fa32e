"""The consensus of votes and network against loops, peers where installed, and crowds whose truth is known."""

import importlib
import math
import time

import numpy as np
import pytest
import torch

from crowd.annotators import Votes, annotators_csv, columns, wilson
from crowd.consensus import consensus
from crowd.heads import Heads

module = importlib.import_module("crowd.consensus")  # crowd.consensus is the function that takes frames


def crowd_of(matrices: np.ndarray, n: int, seed: int = 0, missing: float = 0.0):
    """truth [n] and class numbers [n, A] of annotators with these confusion matrices [A, C, C], -1 for none."""
    rng = np.random.RandomState(seed)
    c = matrices.shape[1]
    truth = rng.randint(c, size=n)
    said = np.stack([(rng.rand(n, 1) > m[truth].cumsum(1)).sum(1).clip(0, c - 1) for m in matrices], 1)
    gone = rng.rand(*said.shape) < missing
    gone[np.arange(n), rng.randint(len(matrices), size=n)] = False  # one vote at the least
    return truth, np.where(gone, -1, said)


def even(accuracy: float, c: int) -> np.ndarray:
    return np.full((c, c), (1 - accuracy) / (c - 1)) + np.eye(c) * (accuracy - (1 - accuracy) / (c - 1))


def votes_of(said: np.ndarray, c: int) -> Votes:
    return Votes.of_columns(torch.from_numpy(said), torch.arange(said.shape[1]), c)


def network(truth: np.ndarray, c: int, strength: float, seed: int = 9) -> torch.Tensor:
    z = np.random.RandomState(seed).randn(len(truth), c) + strength * np.eye(c)[truth]
    return torch.from_numpy(z).softmax(1)


def right(q: torch.Tensor, truth: np.ndarray) -> float:
    return float((q.argmax(1).numpy() == truth).mean())


# ------------------------------------------------------------------ by a loop


def posterior_by_a_loop(said, log_prior, pi, rho):
    """q [N, C]; log_prior [N][C], pi [G][A][C][C], rho [G]."""
    found = []
    for row, prior in zip(said, log_prior, strict=True):
        q = []
        for k in range(len(prior)):
            total = 0.0
            for g in range(len(rho)):
                product = rho[g]
                for a, label in enumerate(row):
                    product *= pi[g][a][k][label] if label >= 0 else 1
                total += product
            q.append(math.exp(prior[k]) * total)
        found.append([value / sum(q) for value in q])
    return np.array(found)


def matrices_by_a_loop(said, q, annotators, s):
    """One difficulty: counts, plus s times the row of all, which has s times that of one accuracy for all."""
    c = q.shape[1]
    counts = np.zeros((annotators, c, c))
    for row, p in zip(said, q, strict=True):
        for a, label in enumerate(row):
            if label >= 0:
                for k in range(c):
                    counts[a, k, label] += p[k]
    pooled = counts.sum(0)
    rate = (np.trace(pooled) + 1) / (pooled.sum() + 2)
    for k in range(c):
        for j in range(c):
            pooled[k, j] += s * (rate if j == k else (1 - rate) / (c - 1))
        pooled[k] /= pooled[k].sum()
    if annotators > 1:
        counts += s * pooled
        return counts / counts.sum(2, keepdims=True)
    return pooled[None]


@pytest.mark.parametrize("with_network", [False, True])
def test_em_comes_to_rest_where_a_loop_does(with_network, monkeypatch):
    monkeypatch.setattr(module, "STILL", 1e-9)
    c, rounds = 3, 60
    truth, said = crowd_of(np.stack([even(a, c) for a in (0.9, 0.7, 0.5)]), 60, 1, missing=0.3)
    p = network(truth, c, 2.0) if with_network else None
    unseen = torch.ones(60, dtype=torch.bool)
    got = consensus(votes_of(said, c), p, unseen, models=("annotators",))
    counts = np.stack([(said == k).sum(1) for k in range(c)], 1) + 1e-2
    q = counts / counts.sum(1, keepdims=True)
    if with_network:
        q = q * p.numpy()
        q /= q.sum(1, keepdims=True)
    for _ in range(rounds):
        pi = matrices_by_a_loop(said, q, 3, 5.0)
        share = (q.sum(0) + 1) / (q.sum(0) + 1).sum()
        prior = np.tile(np.log(share), (len(q), 1))
        if with_network:
            prior = (p.log() / got.temperature).log_softmax(1).numpy()
        q = posterior_by_a_loop(said, prior, [pi], [1.0])
    assert np.abs(got.q.numpy() - q).max() < 1e-4 and np.abs(got.matrices[0].numpy() - pi).max() < 1e-4
    assert math.isnan(got.temperature) != with_network


def test_two_difficulties_weigh_the_votes_as_a_loop_does():
    c = 3
    truth, said = crowd_of(np.stack([even(0.7, c)] * 3), 60, 2)
    model = module.VoteModel(votes_of(said, c), 2)
    fit = module.expect_maximise(model, None, torch.zeros(60, dtype=torch.bool), rounds=3)
    pi, rho = fit.parameters.exp().numpy(), fit.weights.numpy()
    want = posterior_by_a_loop(said, np.tile(fit.prior.numpy(), (60, 1)), pi, rho)
    assert np.allclose(fit.joint.sum(1), want, atol=1e-12) and rho.sum() == pytest.approx(1)
    assert np.allclose(pi.sum(3), 1)
    terms = fit.terms(model, None)  # the likelihood that models are compared by
    by_hand = [
        sum(math.exp(fit.prior[k]) * rho[g] * math.prod(pi[g][a][k][label] for a, label in enumerate(row))
            for g in range(2) for k in range(c)) for row in said
    ]  # fmt: skip
    assert np.allclose(terms.flatten(1).logsumexp(1), np.log(by_hand))


def test_sets_without_votes_by_a_loop():
    rng = np.random.RandomState(3)
    c, n = 4, 50
    sets = rng.rand(n, c) < 0.4
    sets[~sets.any(1), 0] = True
    p = torch.from_numpy(rng.rand(n, c) + 0.05)
    p = p / p.sum(1, keepdim=True)
    model = module.SetModel(torch.from_numpy(sets))
    R = torch.from_numpy(rng.uniform(0.1, 0.9, (c, c)))
    for i, row in enumerate(model.evidence(R)[:, 0].tolist()):
        for k in range(c):
            factors = [R[k, j] if sets[i, j] else 1 - R[k, j] for j in range(c)]
            assert row[k] == pytest.approx(sum(math.log(f) for f in factors))
    got = model.maximise(p[:, None])
    q = p.numpy()
    inside = (sum(q[i, k] for i in range(n) for k in range(c) if sets[i, k]) + 1) / (n + 2)
    wrong = sum(q[i, k] for i in range(n) for k in range(c) for j in range(c) if j != k and sets[i, j])
    other = (wrong + 1) / (n * (c - 1) + 2)
    for k in range(c):
        for j in range(c):
            found = sum(q[i, k] for i in range(n) if sets[i, j]) + 5 * (inside if j == k else other)
            assert float(got[k, j]) == pytest.approx(found / (q[:, k].sum() + 5))


def test_the_temperature_is_that_of_the_likeliest_votes_on_unseen_samples():
    c, n = 5, 900
    truth, said = crowd_of(np.stack([even(0.7, c)] * 3), n, 4)
    z = network(truth, c, 2.5).log()
    z[:600] *= 6  # trained on: far too sure
    unseen = torch.arange(n) >= 600
    votes, p = votes_of(said, c), z.softmax(1)
    got = consensus(votes, p, unseen, models=("shared",))
    assert got.unseen and not consensus(votes, p, models=("shared",)).unseen
    pi = got.matrices[0, 0]

    def likelihood(t):
        prior = (p[600:].log() / t).softmax(1)
        each = torch.stack([pi[:, said[600:, a]].T for a in range(3)]).prod(0)
        return float((prior * each).sum(1).log().sum())

    assert 0.3 < got.temperature < 0.5  # 1 / 2.5: as the network is made
    near = [likelihood(got.temperature * step) for step in (0.9, 1, 1.1)]
    assert near[1] == max(near)
    assert right(got.q[600:], truth[600:]) > right(p[600:], truth[600:])


# ------------------------------------------------------------------ known crowds


def test_confusions_of_annotators_are_recovered():
    c = 5
    rng = np.random.RandomState(0)
    matrices = np.stack([0.7 * np.eye(c) + 0.3 * rng.dirichlet(np.ones(c) * 0.5, c) for _ in range(4)])
    truth, said = crowd_of(matrices, 4000, 5, missing=0.2)
    votes = votes_of(said, c)
    got = consensus(votes, network(truth, c, 3.0))
    assert got.model == "annotators" and np.abs(got.matrices[0].numpy() - matrices).max() < 0.06
    alone = consensus(votes, models=("annotators",))
    counts = votes.counts().numpy()
    assert right(got.q, truth) > right(alone.q, truth) >= (counts.argmax(1) == truth).mean()


def test_the_model_that_explains_held_out_votes_is_chosen():
    c, n = 6, 2500
    _, alike = crowd_of(np.stack([even(0.75, c)] * 3), n, 6)
    _, unlike = crowd_of(np.stack([even(a, c) for a in (0.95, 0.6, 0.2)]), n, 6)
    assert consensus(votes_of(alike, c)).model == "shared"
    assert consensus(votes_of(unlike, c)).model == "annotators"
    rng = np.random.RandomState(7)
    truth = rng.randint(c, size=n)
    skill = np.where(rng.rand(n, 1) < 0.4, 0.3, 0.97)
    hard = np.where(rng.rand(n, 3) < skill, truth[:, None], rng.randint(c, size=(n, 3)))
    p = network(truth, c, 4.0)
    got = consensus(votes_of(hard, c), p)
    assert got.model == "shared, two difficulties"
    assert right(got.q, truth) > right(consensus(votes_of(hard, c), p, models=("shared",)).q, truth)
    assert set(got.likelihood) == {
        "shared",
        "annotators",
        "shared, two difficulties",
        "annotators, two difficulties",
    }
    assert max(got.likelihood.values()) == got.likelihood[got.model]


def test_class_dependent_sets_show_what_is_missing():
    """Wrong candidates that go with the class, the truth missing for a fifth of one class and for nobody else."""
    rng = np.random.RandomState(8)
    c, n = 5, 3000
    truth = rng.randint(c, size=n)
    R = np.where(np.eye(c, k=1) + np.eye(c, k=1 - c) > 0, 0.7, 0.05) + np.eye(c) * 0.95
    R[2, 2] = 0.8
    sets = rng.rand(n, c) < R[truth]
    sets[~sets.any(1), 3] = True
    p = network(truth, c, 4.0)
    got = consensus(None, p, torch.ones(n, dtype=torch.bool), torch.from_numpy(sets))
    assert got.model == "sets" and np.abs(got.matrices.numpy() - R).max() < 0.06
    missing = 1 - (got.q.numpy() * sets).sum(1)
    assert missing.mean() == pytest.approx((~sets[np.arange(n), truth]).mean(), abs=0.01)
    assert right(got.q, truth) > right(p, truth)


# ------------------------------------------------------------------ odd votes


def test_odd_votes():
    one = consensus(votes_of(np.array([[1], [0], [1]]), 3))  # one annotator, a vote each
    assert one.model.startswith("shared") and one.q.argmax(1).tolist() == [1, 0, 1]
    single = consensus(votes_of(np.array([[2, -1, -1]]), 3), torch.tensor([[0.2, 0.2, 0.6]]))  # one vote at all
    assert single.q.argmax(1).tolist() == [2] and single.q.sum() == pytest.approx(1)
    agree = np.repeat(np.arange(40) % 3, 3).reshape(40, 3)  # all agree, and one class of four is never voted for
    for p in (None, torch.full((40, 4), 0.25)):
        got = consensus(votes_of(agree, 4), p)
        assert got.q.argmax(1).tolist() == agree[:, 0].tolist() and got.q.isfinite().all()
        assert float(got.q[:, 3].max()) < 0.1 and got.matrices.isfinite().all()
    sure = torch.eye(3)[torch.zeros(30, dtype=torch.long)]  # probabilities of 0 and 1
    got = consensus(votes_of(np.tile([1, 1, 2], (30, 1)), 3), sure)
    assert got.q.isfinite().all() and got.q.sum(1).allclose(torch.ones(30, dtype=torch.double))
    lone = torch.arange(60) == 3  # one unseen sample
    assert consensus(votes_of(np.tile([1, 0, 2], (60, 1)), 3), torch.full((60, 3), 1 / 3), lone).q.isfinite().all()


def test_counts_are_the_votes_of_one_shared_annotator():
    truth, said = crowd_of(np.stack([even(0.7, 4)] * 3), 200, 3, missing=0.2)
    votes = votes_of(said, 4)
    counted = Votes.of_counts(votes.counts().int())
    a, b = consensus(votes, models=("shared",)), consensus(counted, models=("shared",))
    assert a.q.allclose(b.q) and torch.equal(counted.counts(), votes.counts())


def test_two_labels_of_one_annotator_are_two_columns_of_one_name():
    heard = [
        {("ann", "a"): 1, ("ann", "b"): 1, ("bob", "b"): 1},
        {("bob", "a"): 1},
        {("", "b"): 2, ("ann", "b"): 1},
    ]
    found, names = columns(heard, {"a": 0, "b": 1})
    assert names == ["ann", "ann", "bob", "", ""]
    assert found.tolist() == [[0, 1, 1, -1, -1], [-1, -1, 0, -1, -1], [1, -1, -1, 1, 1]]
    assert columns([{("", "a"): 3}], {"a": 0}) == (None, None)


def test_ten_thousand_samples_take_less_than_two_seconds():
    truth, said = crowd_of(np.stack([even(a, 10) for a in (0.9, 0.8, 0.7)]), 10_000, 0)
    p, votes = network(truth, 10, 3.0).float(), votes_of(said, 10)
    began = time.process_time()
    got = consensus(votes, p, torch.arange(10_000) > 8000)
    assert time.process_time() - began < 2 and len(got.likelihood) == 4


# ------------------------------------------------------------------ annotators.csv


def test_annotators_are_told_apart_with_intervals():
    c = 4
    good, poor = even(0.95, c), even(0.8, c)
    poor[2] = [0.0, 0.6, 0.4, 0.0]  # says 1 for 2
    truth, said = crowd_of(np.stack([good, poor, even(0.25, c), even(0.85, c)]), 1500, 2)
    votes = votes_of(said, c)
    got = consensus(votes, network(truth, c, 3.0))
    text = annotators_csv(votes, got.q, ["ann", "bob", "spam", "eve"], ["cat", "dog", "cow", "ant"])
    head, *rows = [line.split(",") for line in text.splitlines()]
    assert head == "annotator votes accuracy low high agreement confusion times".split()
    assert [row[0] for row in rows] == ["spam", "bob", "eve", "ann"] and rows[1][6] == "dog for cow"
    for row in rows:
        a = ["ann", "bob", "spam", "eve"].index(row[0])
        accuracy, low, high, agreed = map(float, row[2:6])
        assert row[1] == "1500" and abs(accuracy - (said[:, a] == truth).mean()) < 0.02
        assert low < accuracy < high and agreed == pytest.approx(
            (got.q.argmax(1).numpy() == said[:, a]).mean(), abs=1e-4
        )


def test_wilsons_interval():
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)  # published
    assert wilson(1.0, 5)[1] == 1 and wilson(0.0, 5)[0] == 0 and wilson(1.0, 5)[0] > 0.5


# ------------------------------------------------------------------ peers, where they are installed


def test_dawid_and_skene_as_in_crowd_kit():
    crowdkit = pytest.importorskip("crowdkit.aggregation")
    pandas = pytest.importorskip("pandas")
    c = 5
    truth, said = crowd_of(np.stack([even(a, c) for a in (0.9, 0.7, 0.6, 0.3)]), 1000, 1)
    long = [(i, a, label) for i, row in enumerate(said) for a, label in enumerate(row)]
    theirs = crowdkit.DawidSkene(n_iter=100).fit_predict(
        pandas.DataFrame(long, columns=["task", "worker", "label"])
    )
    ours = consensus(votes_of(said, c), models=("annotators",)).q.argmax(1).numpy()
    assert (theirs.sort_index().to_numpy() == ours).mean() > 0.99
    assert (ours == truth).mean() > (theirs.sort_index().to_numpy() == truth).mean() - 0.005


def test_no_worse_than_cleanlabs_crowdlab():
    multi = pytest.importorskip("cleanlab.multiannotator")
    c = 5
    truth, said = crowd_of(np.stack([even(a, c) for a in (0.9, 0.7, 0.3)]), 1000, 1)
    p = network(truth, c, 2.5)
    theirs = multi.get_label_quality_multiannotator(said, p.numpy(), verbose=False)["label_quality"]
    ours = right(consensus(votes_of(said, c), p).q, truth)
    assert ours >= (theirs["consensus_label"].to_numpy() == truth).mean()


# ------------------------------------------------------------------ heads


def test_heads_are_ridge_regressions_fitted_without_the_samples_they_are_asked_about():
    g = torch.Generator().manual_seed(0)
    x, q = torch.randn(40, 3, generator=g).double(), torch.rand(40, 2, generator=g).double()
    heads = Heads(x)
    got = heads(q)
    scaled = torch.cat([(x - x.mean(0)) / x.std(0), torch.ones(40, 1)], 1).numpy()
    fold = (torch.randperm(40, generator=torch.Generator().manual_seed(0)) % 5).numpy()
    for i in range(40):
        inside = fold != fold[i]
        a = scaled[inside].T @ scaled[inside] + 0.1 * 40 * np.eye(4)
        want = scaled[i] @ np.linalg.solve(a, scaled[inside].T @ q.numpy()[inside])
        assert got[i].numpy() == pytest.approx(want)
    changed = q.clone()
    changed[0] = 5
    assert torch.equal(heads(changed)[0].float(), got[0].float())  # its own target says nothing of it


def test_heads_undo_what_a_network_has_learnt_by_heart():
    """Features that tell the classes apart, a network that repeats the votes: the heads find what is missing."""
    rng = np.random.RandomState(1)
    c, n = 5, 1500
    matrices = np.stack([even(0.95, c)] * 3)
    matrices[:, 2] = [0.0, 0.55, 0.45, 0.0, 0.0]  # all say 1 for 2
    truth, said = crowd_of(matrices, n, 3)
    votes = votes_of(said, c)
    features = torch.from_numpy(2.0 * rng.randn(c, 12)[truth] + rng.randn(n, 12))
    by_heart = (2 * votes.counts()).softmax(1)
    plain, better = consensus(votes, by_heart), consensus(votes, by_heart, features=features)
    assert right(better.q, truth) > 0.97 > right(plain.q, truth) + 0.03
    missing = float((better.q * (votes.counts() == 0)).sum(1).mean())
    assert missing == pytest.approx((said != truth[:, None]).all(1).mean(), abs=0.01)


def test_votes_alone_find_a_class_that_the_network_has_lost(monkeypatch):
    """Of class 0 three annotators say something else more often than not, each in a way of their own; the network
    takes it for another class. Its features still keep it apart."""
    c = 6
    matrices = np.stack([even(0.9, c)] * 3)
    for a, other in enumerate((1, 2, 1)):
        matrices[a, 0] = np.eye(c)[0] * 0.35 + np.eye(c)[other] * 0.65
    truth, said = crowd_of(matrices, 1200, seed=4)
    votes, rng = votes_of(said, c), np.random.RandomState(5)
    p = network(np.where(truth == 0, 1, truth), c, 6.0)
    features = torch.from_numpy(2.0 * rng.randn(c, 12)[truth] + rng.randn(len(truth), 12))
    found = consensus(votes, p, features=features)
    assert (found.q.argmax(1).numpy() == truth)[truth == 0].mean() > 0.9
    ends, settle = [], module.settle
    monkeypatch.setattr(module, "settle", lambda *args: ends.append(settle(*args)) or ends[-1])
    consensus(votes, p, features=features)
    assert len(ends) == 3 and ends[1][0] > ends[0][0] + 0.01  # the votes' own start is the likelier
