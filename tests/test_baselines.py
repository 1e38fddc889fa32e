"""The paper's other methods: worked numbers, loops written another way, the command line, exact resume."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import losses
import models
import train
from conftest import TOY, process, rows, run, same_run, stopping_at, summary
from harness.options import WITHOUT_IRNET
from paper import baselines

P, S = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[True, True, False]])
OTHERS = [name for name in baselines.METHODS if name not in losses.BASES]


class Fixed:
    """A network that always gives p."""

    def __init__(self, p):
        self.p = p

    def __call__(self, x):
        return self.p.log()

    peek = __call__


# ------------------------------------------------------------------ worked numbers


@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("mae", {}, 1.2),
        ("mae", dict(form="soft_target"), 0.4),
        ("mse", {}, 0.58),
        ("mse", dict(form="soft_target"), 0.08),
        ("gce", {}, 0.681369),
        ("sce", {}, 6 * 0.948560 + 5.526204),
        ("sce", dict(form="soft_target"), 8.088911),
    ],
)
def test_robust_losses_on_a_set(name, options, want):
    base = baselines.METHODS[name](S, **options)
    loss, f = base.loss(Fixed(P), [None], torch.tensor([0]))
    assert loss.item() == pytest.approx(want, abs=2e-5) and torch.allclose(f, P) and base.weights is None
    S2 = S.clone()
    base.candidates = S2
    S2[0, 2] = True  # what IRNet moves in counts at once
    assert base.loss(Fixed(P), [None], torch.tensor([0]))[0].item() != pytest.approx(want, abs=1e-3)


def test_plcr():
    base = baselines.PLCR(S.clone())
    index = torch.tensor([0])
    assert base.loss(Fixed(P), [None] * 3, index)[0].item() == pytest.approx(0.223143, abs=1e-6)  # the ramp is 0
    base.end_epoch(50, 1000)
    assert base.ramp == 0.5
    base.end_epoch(300, 1000)
    loss, _ = base.loss(Fixed(P), [None] * 3, index)
    assert loss.item() == pytest.approx(0.223143 + 3 * 0.255413, abs=1e-5)
    views = [torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.8, 0.1]]), torch.tensor([[0.2, 0.2, 0.6]])]
    base.loss(lambda view: view.log(), views, index)
    base.after_step(None, views, index, None)
    mean = [(0.5 * 0.1 * 0.2) ** (1 / 3), (0.3 * 0.8 * 0.2) ** (1 / 3)]
    want = torch.tensor([[mean[0] / sum(mean), mean[1] / sum(mean), 0.0]])
    assert torch.allclose(base.weights, want, atol=1e-6)
    hopeless = [torch.tensor([[0.0, 0.0, 2000.0]])] * 3  # the product underflows, its logarithm does not
    base.loss(lambda view: view, hopeless, index)
    base.after_step(None, hopeless, index, None)
    assert torch.allclose(base.weights, torch.tensor([[0.5, 0.5, 0.0]]))


def test_alim():
    f, s = torch.tensor([[0.24, 0.23, 0.28, 0.25]]), torch.tensor([[True, True, False, False]])
    base = baselines.ALIM(s, eta=0.5, start=0.5)
    assert base.best(f, s).tolist() == [0]
    base.allowed = 0.5
    assert base.best(f, s).tolist() == [0]  # (.24, .23, .14, .125)
    base.allowed = 0.9
    assert base.best(f, s).tolist() == [2]  # .252 > .24
    base.allowed, base.margins = 0.0, [torch.tensor([0.9, 3.0]), torch.tensor([0.857143, 0.2])]
    base.end_epoch(1, 10)
    assert base.allowed == 0.0  # too early
    base.margins = [torch.tensor([0.9, 3.0]), torch.tensor([0.857143, 0.2])]
    base.end_epoch(5, 10)
    assert base.allowed == pytest.approx(0.9)  # the third of four
    base.margins = [torch.tensor([7.0, 3.0])]
    base.end_epoch(6, 10)
    assert base.allowed == 1.0 and base.margins == []


def test_alim_margins_come_from_the_step():
    torch.manual_seed(0)
    net, s = pico(), torch.rand(10, 4) < 0.5
    s[:, 0] = True
    net.prototypes = F.normalize(torch.randn(4, 128), dim=1)
    base, index = baselines.ALIM(s), torch.arange(6)
    x = torch.rand(6, 1, 8, 8)
    with torch.no_grad(), models.running_statistics_frozen(net):
        q = net.query.embed(x)[1]
    c = (q @ net.prototypes.T / 0.07).softmax(1)
    base.loss(net, [x, x], index)
    want = [
        max([float(v) for v, inside in zip(c[i], s[i], strict=True) if inside])
        / max([float(v) for v, inside in zip(c[i], s[i], strict=True) if not inside] + [1e-9])
        for i in range(6)
        if not s[i].all()
    ]
    got = base.margins[0][~s[:6].all(1)]
    assert torch.allclose(got, torch.tensor(want), rtol=1e-3)


def test_one_candidate_is_any_of_them():
    s = torch.tensor([[True, False, True, True]]).expand(3000, 4)
    chosen = baselines.one_label(None, s, torch.Generator().manual_seed(0))
    count = torch.bincount(chosen, minlength=4)
    assert count[1] == 0 and (count[[0, 2, 3]] - 1000).abs().max() < 100


def test_picoplus_with_less_to_contrast_with_than_neighbours():
    argv = [*TOY, *"--base pico+ --no-irnet --queue 4 --batch-size 4 --epochs 9 --limit-train 40 --out r".split()]
    assert train.main(argv) == 0


def test_one_label_is_the_decided_one():
    votes = torch.tensor([[2, 1, 0], [2, 1, 0], [0, 1, 2]])
    decided = torch.tensor([[False, False, True], [False] * 3, [True, True, False]])  # one; nobody did; two
    sets = torch.where(decided.any(1, keepdim=True), decided, votes > 0)
    c = SimpleNamespace(
        dataset="own", base="supervised", epochs=4, queue=8, variant="published", eta=0.3, form="average"
    )
    for given, want in ((decided, [2, 0, 1]), (None, [0, 0, 2])):
        d = SimpleNamespace(votes=votes, decided=given)
        assert baselines.make(c, d, sets, {}, None, None).labels.tolist() == want


def test_supervised():
    base = baselines.Supervised(S, labels=torch.tensor([1]))
    assert base.loss(Fixed(P), [None], torch.tensor([0]))[0].item() == pytest.approx(-math.log(0.3), abs=1e-6)


# ------------------------------------------------------------------ PiCO+ against a loop over samples


def pico(queue=24):
    encoders = (models.Encoder("mlp", 1, 8, 4, embedding=128) for _ in range(2))
    return models.PiCO(*encoders, 4, 128, queue_size=queue)


@pytest.mark.parametrize("stage", ["before", "before, as released", "reliable", "neighbours"])
def test_pico_plus_against_a_loop(stage, monkeypatch):
    torch.manual_seed(1)
    b, k_near = 6, 3
    net, s = pico(), torch.rand(10, 4) < 0.5
    s[:, 0] = True
    net.prototypes = F.normalize(torch.randn(4, 128), dim=1)
    net.queue_labels = torch.randint(0, 4, (24,))
    base = baselines.PiCOPlus(s, queue_size=24, neighbours=k_near, start=2, as_released="as released" in stage)
    base.queue_reliable = torch.rand(24) < 0.5
    base.reliable = torch.rand(10) < 0.6
    base.epoch, base.phi = (1 if "before" in stage else 2), 0.9
    base.nearest = stage == "neighbours"
    index = torch.tensor([7, 2, 9, 0, 4, 5])
    rel = base.reliable[index].tolist()
    assert 0 < sum(rel) < b
    x, z = torch.rand(b, 1, 8, 8), torch.rand(b, 1, 8, 8)
    monkeypatch.setattr(baselines, "mixup", lambda x, t, g: (x, t))  # mixup has a test of its own
    with torch.no_grad(), models.running_statistics_frozen(net):
        logits, q = net.query.embed(x)
        k = net.key.embed(z)[1]
    p, log_p, mu, old_queue = logits.softmax(1), logits.log_softmax(1), net.prototypes, net.queue.clone()
    queue_labels, queue_rel = net.queue_labels.tolist(), base.queue_reliable.tolist()
    sets = [[j for j in range(4) if s[n, j]] for n in index.tolist()]
    inside = [max(js, key=lambda j, i=i: p[i, j].item()) for i, js in enumerate(sets)]
    pseudo = [inside[i] if rel[i] else int(p[i].argmax()) for i in range(b)]
    c, g = (q @ mu.T).softmax(1), (q @ mu.T / 0.07).softmax(1)
    w = losses.uniform_weights(s)[index]
    contrast, labels, known = torch.cat([q, k, old_queue]), pseudo + pseudo + queue_labels, rel + rel + queue_rel
    sim = (q @ contrast.T / 0.07).double()

    def log_prob(i, j):
        return float(sim[i, j] - torch.logsumexp(torch.cat([sim[i, :i], sim[i, i + 1 :]]), 0))

    if stage == "before":  # MoCo: its own key against all others
        want = float(-(w * log_p).sum(1).mean()) - 0.5 * np.mean([log_prob(i, b + i) for i in range(b)])
    elif stage == "before, as released":
        # MoCo: its own key against the queue alone, neither the batch's other keys nor its queries
        moco = [float(torch.logsumexp(torch.cat([sim[i, b + i, None], sim[i, 2 * b :]]), 0) - sim[i, b + i])
                for i in range(b)]  # fmt: skip
        want = float(-(w * log_p).sum(1).mean()) + 0.5 * np.mean(moco)
    else:
        best = [max(js, key=lambda j, i=i: c[i, j].item()) for i, js in enumerate(sets)]
        w = 0.9 * w + 0.1 * torch.eye(4)[best]
        target = [w[i] if rel[i] else g[i] for i in range(b)]
        ce = [float(-(target[i] * log_p[i]).sum()) for i in range(b)]
        first, second = [], []
        for i in range(b):
            others = [j for j in range(len(contrast)) if j != i]
            everything = [j for j in others if labels[j] == pseudo[i]]
            own = [b + i]
            if rel[i]:
                positive = set([j for j in everything if known[j]] + own)
            elif stage == "neighbours":
                near = sorted(others, key=lambda j, i=i: -float(sim[i, j]))[: k_near - 1]  # itself is one of k
                positive = set(near + own)
            else:
                positive = set(own)
            row = (0.5 if rel[i] else 0.1) if stage == "neighbours" else 1.0
            first.append(-row * np.mean([log_prob(i, j) for j in positive]))
            second.append(-np.mean([log_prob(i, j) for j in everything]))
        reliable_ce = np.mean([value for value, r in zip(ce, rel, strict=True) if r])
        other_ce = np.mean([value for value, r in zip(ce, rel, strict=True) if not r])
        want = np.mean(ce) + 2 * reliable_ce + 0.1 * other_ce + np.mean(first) + 0.1 * np.mean(second)
    want_mu = [mu[j].double().clone() for j in range(4)]
    for i in range(b):
        if rel[i]:
            want_mu[pseudo[i]] = 0.99 * want_mu[pseudo[i]] + 0.01 * q[i].double()
    loss, _ = base.loss(net, [x, z], index)
    assert loss.item() == pytest.approx(want, rel=1e-4)
    assert torch.allclose(net.prototypes, F.normalize(torch.stack(want_mu), dim=1).float(), atol=1e-5)
    assert torch.allclose(base.distance[index], -(q * mu[inside]).sum(1), atol=1e-5)
    assert base.queue_reliable[:b].tolist() == rel and net.queue_labels[:b].tolist() == pseudo
    assert torch.allclose(base.weights[index], w, atol=1e-6)


def test_pico_plus_keeps_the_nearest_as_reliable():
    base = baselines.PiCOPlus(torch.ones(10, 4, dtype=torch.bool), queue_size=8, start=3)
    base.distance = torch.arange(10.0).flip(0)
    base.end_epoch(1, 80)
    assert base.reliable.all() and not base.nearest
    base.end_epoch(2, 80)
    assert base.reliable.tolist() == [False] * 4 + [True] * 6
    base.end_epoch(10, 80)
    assert base.nearest
    base.distance[-5:] = math.inf  # not trained on yet: neither reliable nor counted
    base.end_epoch(11, 80)
    assert base.reliable.tolist() == [False] * 2 + [True] * 3 + [False] * 5
    fresh = baselines.PiCOPlus(torch.ones(10, 4, dtype=torch.bool), queue_size=8)
    assert fresh.distance.isinf().all()


# ------------------------------------------------------------------ DivideMix


def test_two_gaussians_find_a_known_mixture():
    g = torch.Generator().manual_seed(0)
    low, high = 0.2 + 0.05 * torch.randn(7000, generator=g), 0.7 + 0.1 * torch.randn(3000, generator=g)
    shares, means, variances, first = baselines.two_gaussians(torch.cat([high, low]), 100, 1e-9, 1e-6)
    assert torch.allclose(shares, torch.tensor([0.7, 0.3]).double(), atol=0.01)
    assert torch.allclose(means, torch.tensor([0.2, 0.7]).double(), atol=0.01)
    assert torch.allclose(variances.sqrt(), torch.tensor([0.05, 0.1]).double(), atol=0.01)
    assert first[:3000].mean() < 0.02 and first[3000:].mean() > 0.98
    constant = baselines.clean_probability(torch.ones(50))
    assert constant.isfinite().all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_gaussians_against_scikit_learn(seed):
    mixture = pytest.importorskip("sklearn.mixture")
    rng = np.random.RandomState(seed)
    x = np.concatenate([rng.gamma(1.0, 0.1, 700), rng.normal(0.6, 0.15, 300)])
    theirs = mixture.GaussianMixture(2, max_iter=200, tol=1e-7, reg_covar=5e-4, random_state=0).fit(x[:, None])
    order = theirs.means_[:, 0].argsort()
    shares, means, variances, first = baselines.two_gaussians(torch.tensor(x), 200, 1e-7, 5e-4)
    assert np.allclose(means, theirs.means_[order, 0], atol=2e-3)
    assert np.allclose(variances, theirs.covariances_[order, 0, 0], atol=2e-3)
    assert np.allclose(shares, theirs.weights_[order], atol=5e-3)
    assert np.allclose(first, theirs.predict_proba(x[:, None])[:, order[0]], atol=0.02)


def test_mixup_draws_from_beta():
    x = torch.tensor([[0.0], [1.0]])
    g = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(4000):
        mixed, target = baselines.mixup(x, x, g)
        assert torch.equal(mixed, target)
        value = mixed[1].item()  # 1 where the sample met itself, l where it met the other
        if value < 1:
            drawn.append(value)
    drawn = np.array(drawn)
    reference = np.random.RandomState(0).beta(4, 4, 100_000)
    reference = np.maximum(reference, 1 - reference)
    assert 1800 < len(drawn) < 2200 and drawn.min() >= 0.5
    assert drawn.mean() == pytest.approx(reference.mean(), abs=0.01) and drawn.std() == pytest.approx(
        reference.std(), abs=0.01
    )


def test_mixmatch_against_a_loop(monkeypatch):
    torch.manual_seed(0)
    b, classes = 5, 3
    one, two = (models.Encoder("mlp", 1, 8, classes) for _ in range(2))
    views = [torch.rand(b, 1, 8, 8), torch.rand(b, 1, 8, 8)]
    labels, w = torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0.9, 0.2, 0.7, 0.5, 0.99])
    base = baselines.DivideMix(torch.ones(b, classes, dtype=torch.bool), labels, epochs=300)
    base.epoch = 10 + 1 + 8  # half way up the ramp
    monkeypatch.setattr(baselines, "mixup", lambda x, t, g: (x, t))
    with torch.no_grad():
        mine = [one.peek(view).softmax(1) for view in views]
        two.eval()
        theirs = [two(view).softmax(1) for view in views]
        two.train()
        targets = []
        for i in range(b):
            own = [(float(mine[0][i, j]) + float(mine[1][i, j])) / 2 for j in range(classes)]
            if w[i] > 0.5:
                t = [float(w[i]) * (j == labels[i]) + (1 - float(w[i])) * own[j] for j in range(classes)]
            else:
                t = [(own[j] + (float(theirs[0][i, j]) + float(theirs[1][i, j])) / 2) / 2 for j in range(classes)]
            squared = [value**2 for value in t]
            targets.append([value / sum(squared) for value in squared])
        with models.running_statistics_frozen(one):
            p = one(torch.cat(views)).softmax(1)
    clean, noisy = [], []
    for i in range(2 * b):
        t = targets[i % b]
        if w[i % b] > 0.5:
            clean.append(-sum(t[j] * math.log(float(p[i, j])) for j in range(classes)))
        else:
            noisy.append(sum((float(p[i, j]) - t[j]) ** 2 for j in range(classes)) / classes)
    mean = p.mean(0).tolist()
    penalty = sum(1 / classes * math.log(1 / classes / m) for m in mean)
    want = np.mean(clean) + 25 * 0.5 * np.mean(noisy) + penalty
    got, _ = base._mixmatch(one, two, views, F.one_hot(labels, classes).float(), w)
    assert got.item() == pytest.approx(want, rel=1e-4)


def test_dividemix_trains_each_network_on_the_others_division():
    torch.manual_seed(0)
    net = models.Pair(*(models.Encoder("mlp", 1, 8, 4) for _ in range(2)))
    labels = torch.arange(8) % 4
    base = baselines.DivideMix(torch.ones(8, 4, dtype=torch.bool), labels, epochs=20)
    logits = {"one": torch.randn(8, 4), "two": torch.randn(8, 4)}
    both = SimpleNamespace(one=lambda x: logits["one"], two=lambda x: logits["two"])
    base.begin_epoch(5, lambda look: look(both, None))
    assert base.clean is None  # warm-up: the release's 10 epochs, at most a quarter of the run
    base.begin_epoch(6, lambda look: look(both, None))
    want = [
        baselines.clean_probability(F.cross_entropy(logits[n], labels, reduction="none")) for n in ("one", "two")
    ]
    assert torch.allclose(base.clean, torch.stack(want))
    seen = []
    base._mixmatch = lambda own, other, views, y, w: (
        seen.append((own, other, w)) or (torch.zeros(()), torch.zeros(()))
    )
    base.loss(net, [None, None], torch.arange(8))
    assert seen[0][0] is net.one and seen[0][1] is net.two and torch.equal(seen[0][2], base.clean[1])
    assert seen[1][0] is net.two and seen[1][1] is net.one and torch.equal(seen[1][2], base.clean[0])
    x = torch.rand(2, 1, 8, 8)
    assert torch.allclose(net(x), net.one(x) + net.two(x))


# ------------------------------------------------------------------ the command line


@pytest.mark.parametrize("base", OTHERS)
def test_every_method_trains_and_resumes_exactly(base, monkeypatch):
    epochs = "20" if base == "pals" else "5"  # it trains on a quarter of the samples
    argv = [*TOY, "--base", base, "--epochs", epochs, "--e0", "2", "--tau", "0"]
    argv += ["--no-irnet"] if base in WITHOUT_IRNET else []
    assert train.main([*argv, "--out", "whole"]) == 0
    corrected = summary("whole")["corrections"]
    assert corrected == 0 if base in WITHOUT_IRNET else corrected > 0
    for step, more in ((8, []), (13, ["--resume"])):
        stopping_at(monkeypatch, step)
        assert train.main([*argv, "--out", "parts", *more]) == 143
    child = process(run, [*argv, "--out", "parts", "--resume"])
    child.join(60)
    assert child.exitcode == 0 and same_run("whole", "parts")
    assert rows("whole")[-1]["loss"] != rows("whole")[0]["loss"]


@pytest.mark.parametrize("base", WITHOUT_IRNET)
def test_methods_with_an_answer_of_their_own_refuse_irnet(base, capsys):
    assert train.main([*TOY, "--base", base]) == 2
    assert "--no-irnet" in capsys.readouterr().err


def test_supervised_learns_the_annotators_majority():
    rng = np.random.RandomState(0)
    y = np.arange(160) % 4
    x = (rng.rand(160, 8, 8) * 60 + 60 * y[:, None, None]).astype(np.uint8)
    votes = np.stack([y, y, (y + 1) % 4], 1)
    np.savez("own.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40], annotators=votes)
    argv = "--dataset own.npz --arch mlp --batch-size 20 --epochs 15 --base supervised --no-irnet --out r".split()
    assert train.main(argv) == 0 and summary("r")["last"] > 0.95
