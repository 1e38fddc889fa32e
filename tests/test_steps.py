"""Step by step against a plain loop: train.prepare and train.train_epoch beside the same method written once more,
sample by sample and class by class, for each of the six bases with IRNet correcting. After every step all that it
may change is compared. All is in double precision here, so that rounding stays far below any fault."""

import copy
import math
from collections import deque

import pytest
import torch

import data
import train
from conftest import prepared

TRAIN, BATCH, EPOCHS, C = 30, 9, 3, 10  # 3 samples are held out; 3 steps before e0 = 1, 3 after it
LR, DECAY, CROP, FLIP = 0.05, 0.03, 0.9, 0.9
QUEUE, KEY, PROTOTYPE = 20, 0.9, 0.8  # the queue is no multiple of the batch
COMMON = f"--limit-train {TRAIN} --limit-test 9 --batch-size {BATCH} --epochs {EPOCHS} --e0 1 --arch cnn"
COMMON += f" --lr {LR} --weight-decay {DECAY} --crop {CROP} --flip {FLIP} --q 0.1 --eta 0.5 --device cpu --amp off"
OF_PICO = f"--queue {QUEUE} --key-momentum {KEY} --prototype-momentum {PROTOTYPE}"


# ------------------------------------------------------------------ formulas, of one sample: f, w lists; S a set


def softmax(z):
    return z.exp() / z.exp().sum()


def largest(f, among) -> int:
    """The first of the largest."""
    return max(sorted(among), key=lambda j: f[j])


def outside(S) -> set[int]:
    return set(range(C)) - S


def margin(f, S) -> float:
    """Eq. 4."""
    if len(S) == C:
        return math.inf
    return max(f[j] for j in S) - max(f[j] for j in outside(S))


def partial_loss(base, z, S, w, beta, released):
    p = softmax(z)
    if base in ("cc", "log"):
        factor = 1 if base == "cc" or released else (C - 1) / (C - len(S)) if len(S) < C else 0
        return -factor * torch.log(sum(p[j] for j in S))
    if base == "lwc":
        inside = sum(w[j] * -torch.log(p[j] + 1e-8) for j in S)
        return inside + beta * sum(w[j] * -torch.log(1 - p[j] + 1e-8) for j in outside(S))
    return sum(-w[j] * torch.log(p[j]) for j in range(C))


def sce_as_released(z, w):
    """6 CE + RCE, p at least 1e-7, w between 1e-4 and 1 in both."""
    p, total = softmax(z), 0.0
    for j in range(C):
        pj, wj = p[j].clamp(min=1e-7), min(max(w[j], 1e-4), 1.0)
        total = total - 6 * wj * torch.log(pj) - pj * math.log(wj)
    return total


def supcon(i, q, keys, labels, queue):
    """SupCon of sample i: all of the batch but i, all keys, the queue."""
    others = (
        [(q[a], labels[a]) for a in range(len(q)) if a != i] + list(zip(keys, labels, strict=True)) + list(queue)
    )
    scores = [(q[i] * v).sum() / 0.07 for v, _ in others]
    total = sum(torch.exp(s - 1 / 0.07) for s in scores).log() + 1 / 0.07
    positives = [s - total for s, (_, label) in zip(scores, others, strict=True) if label == labels[i]]
    return -sum(positives) / len(positives)


def corrected_weights(w, S, label, value, dropped, how):
    """w of a sample that was corrected; S is the new set."""
    w = list(w)
    if dropped is not None:
        w[dropped] = 0.0
    if how == "uniform":
        return [1 / len(S) if j in S else w[j] for j in range(C)]
    w[label] = value if how == "value" else 1 / C
    total = sum(w[j] for j in S)
    return [w[j] / total if j in S else w[j] for j in range(C)]


# ------------------------------------------------------------------ Algorithm 1


class Twin:
    """The same run. `more`: what the case gives on the command line."""

    def __init__(self, base, learner, samples, more):
        self.base, self.more, self.net = base, more, copy.deepcopy(learner.network)
        self.query = self.net.query if base == "pico" else self.net
        self.images, self.y = samples.images.clone(), samples.labels.tolist()
        self.pool, self.held = samples.pool.tolist(), samples.held_out.tolist()
        self.S = [{j for j in range(C) if row[j]} for row in samples.before.tolist()]
        start = {"lwc": lambda S: [1 / C] * C, "cc": None, "log": None}
        start = start.get(base, lambda S: [1 / len(S) if j in S else 0.0 for j in range(C)])
        self.w = [start(S) for S in self.S] if start else None
        self.at, self.to = [0] * TRAIN, [-1] * TRAIN
        self.momentum = {}
        self.views, self.augmented = (
            data.ImageViews(v.generator.clone_state(), crop=CROP, flip=FLIP)
            for v in (learner.views, learner.augmented)
        )
        if base == "pico":
            self.prototypes = [torch.zeros(128) for _ in range(C)]
            self.queue = deque((v, -1) for v in self.net.queue)
            self.phi = 0.99

    def begin_epoch(self, epoch):
        self.epoch, self.corrects = epoch, epoch > 1
        self.lr = LR / 1000 + (LR - LR / 1000) * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2
        pool = self.pool + (self.held if self.corrects else [])
        order = torch.randperm(len(pool), generator=self.views.generator).tolist()
        shuffled = [pool[k] for k in order]
        self.batches = [shuffled[s : s + BATCH] for s in range(0, len(pool) - BATCH + 1, BATCH)]

    def end_epoch(self):
        first, last = self.more.get("phi", (0.99, 0.6))
        self.phi = first + (last - first) * self.epoch / EPOCHS

    # ---- the networks' passes

    def features(self, encoder, x):
        return encoder.backbone((x - encoder.mean) / encoder.std)

    def embedded(self, encoder, x):
        h = self.features(encoder, x)
        v = encoder.head(h)
        return encoder.classifier(h), v / v.square().sum(1, keepdim=True).sqrt()

    def f(self, x, recorded=False):
        """f(z): batch statistics that leave no trace, or for a part of a batch the recorded ones."""
        kept = {name: buffer.clone() for name, buffer in self.query.named_buffers()}
        self.query.train(not recorded)
        with torch.no_grad():
            if self.base == "pico" and self.more.get("f") != "classifier":
                seen = self.prototypes if self.more.get("record_views") else self.seen
                f = [self.c(q, seen) for q in self.embedded(self.query, x)[1]]
            else:
                f = [softmax(z).tolist() for z in self.query.classifier(self.features(self.query, x))]
        self.query.train()
        if not self.more.get("record_views"):
            for name, buffer in self.query.named_buffers():
                buffer.copy_(kept[name])
        return f

    def c(self, q, prototypes):
        """Softmax of the prototypes' products, temperature 1."""
        e = [math.exp(float((q * p).sum())) for p in prototypes]
        return [v / sum(e) for v in e]

    # ---- a step

    def step(self):
        """-> index, loss, tau, the six counts."""
        index, more = self.batches.pop(0), self.more
        x = self.images[index]
        S = [self.S[i] for i in index]
        views = [self.views.view(kind, x) for kind in ("ws" if self.base == "pico" else "w")]
        loss, f = self.pico(views, index, S) if self.base == "pico" else self.plain(views[0], index, S)
        names, values = zip(*self.query.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, values)
        tau = [margin(f[b], S[b]) for b in range(BATCH)]
        near, f_z = list(range(BATCH)), []
        if self.corrects or more.get("record_views"):  # by the network and the prototypes that gave f
            room = math.ceil(more.get("views_share", 1) * BATCH)
            near = sorted(near, key=lambda b: tau[b])[:room] if room < BATCH else near
            f_z = [self.f(self.augmented.view(kind, x[near]), room < BATCH) for kind in more.get("views", "w")]
        with torch.no_grad():  # SGD
            for name, p, g in zip(names, values, gradients, strict=True):
                g = g + DECAY * p
                self.momentum[name] = 0.9 * self.momentum[name] + g if name in self.momentum else g
                p -= self.lr * self.momentum[name]
        self.update_weights(views[0], index, S, f)
        counts = self.count(index, S, f)
        self.looked = [index[b] for b in near], [[f[b] for b in near], *f_z]
        if self.corrects:
            for place, b in enumerate(near):
                moved, right = self.correct(index[b], S[b], f[b], [one[place] for one in f_z])
                counts[4], counts[5] = counts[4] + moved, counts[5] + right
        return index, float(loss.detach()), tau, counts

    def plain(self, x, index, S):
        z = self.query.classifier(self.features(self.query, x))
        more = self.more.get("beta", 1), self.more.get("released")
        each = [partial_loss(self.base, z[b], S[b], self.w and self.w[i], *more) for b, i in enumerate(index)]
        return sum(each) / BATCH, [softmax(row).tolist() for row in z.detach()]

    def pico(self, views, index, S):
        z, q = self.embedded(self.query, views[0])
        p = [softmax(row).tolist() for row in z.detach()]
        self.seen = self.prototypes  # before this batch moves them
        c = [self.c(row, self.seen) for row in q.detach()]
        labels = [largest(p[b], S[b]) for b in range(BATCH)]
        moved = list(self.prototypes)
        for label, row in zip(labels, q.detach(), strict=True):  # one after the other
            moved[label] = PROTOTYPE * moved[label] + (1 - PROTOTYPE) * row
        self.prototypes = [v / v.norm() if v.any() else v for v in moved]
        with torch.no_grad():
            for mine, its in zip(self.net.key.parameters(), self.query.parameters(), strict=True):
                mine.copy_(KEY * mine + (1 - KEY) * its)
            keys = self.embedded(self.net.key, views[1])[1]
        if self.epoch >= self.more.get("proto_start", 1):
            for b, i in enumerate(index):
                best = largest(c[b], S[b])
                self.w[i] = [self.phi * v + (1 - self.phi) * (j == best) for j, v in enumerate(self.w[i])]
        total = 0.0
        for b, i in enumerate(index):
            sce = self.more.get("classifier_loss") == "sce"
            own = sce_as_released(z[b], self.w[i]) if sce else partial_loss("ce", z[b], S[b], self.w[i], 0, False)
            total = total + own + 0.5 * supcon(b, q, keys, labels, self.queue)
        for key, label in zip(keys, labels, strict=True):
            self.queue.popleft()
            self.queue.append((key, label))
        return total / BATCH, p if self.more.get("f") == "classifier" else c

    def update_weights(self, x, index, S, f):
        if self.base in ("rc", "lwc") and not self.more.get("released"):
            f = self.f(x)  # once more, after the step
        for b, i in enumerate(index):
            inside, rest = sum(f[b][j] for j in S[b]), sum(f[b][j] for j in outside(S[b]))
            if self.base in ("rc", "proden"):
                self.w[i] = [f[b][j] / inside if j in S[b] else 0.0 for j in range(C)]
            if self.base == "lwc":
                guard = C * 1e-8
                self.w[i] = [f[b][j] / ((inside if j in S[b] else rest) + guard) for j in range(C)]

    def count(self, index, S, f):
        """Eqs. 7 and 8, on the sets that f was trained with."""
        counts = [0] * 6
        for b, i in enumerate(index):
            noisy = self.y[i] not in S[b]
            counts[2 * noisy] += largest(f[b], outside(S[b]) if noisy else S[b]) == self.y[i]
            counts[2 * noisy + 1] += 1
        return counts

    def correct(self, i, S, f, f_z):
        """Eqs. 10-12 for one sample -> whether it was corrected, and to the truth."""
        every, limit, strict = [f, *f_z], -self.more.get("tau", 0.0), self.more.get("strict")
        if len(S) == C or not all(
            margin(one, S) < limit or margin(one, S) == limit and not strict for one in every
        ):
            return False, False
        label = largest(f, outside(S))
        if any(largest(one, outside(S)) != label for one in f_z):
            return False, False
        dropped = min(sorted(S), key=lambda j: f[j]) if self.more.get("swap") else None
        self.S[i] = S - {dropped} | {label}
        self.at[i], self.to[i] = self.epoch, label
        if self.w:
            how = self.more.get("weights_after", "value")
            self.w[i] = corrected_weights(self.w[i], self.S[i], label, f[label], dropped, how)
        return True, label == self.y[i]


# ------------------------------------------------------------------ side by side


@pytest.fixture(autouse=True)
def double(monkeypatch):
    """Where the code says float, on purpose, it is double."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(got, wanted, what, tolerance=1e-9):
    got, wanted = torch.as_tensor(got), torch.as_tensor(wanted)
    assert got.shape == wanted.shape, what
    assert torch.equal(got.isinf(), wanted.isinf()), what
    off = (got - wanted).nan_to_num(0, 0, 0).abs() / wanted.abs().clamp(1, 1e9)
    assert float(off.max()) <= tolerance, f"{what}: off by {float(off.max()):.2g}"


def same_state(learner, samples, twin):
    network, base, refine = learner.network, learner.base, learner.refine
    theirs = dict(twin.net.state_dict())
    for name, value in network.state_dict().items():  # both encoders' parameters and running statistics
        if not name.startswith(("queue", "prototypes", "_extra")):
            close(value, theirs[name], name)
    if twin.base == "pico":
        oldest_first = (torch.arange(QUEUE) + network.pointer) % QUEUE
        close(network.queue[oldest_first], torch.stack([v for v, _ in twin.queue]), "queue")
        assert network.queue_labels[oldest_first].tolist() == [label for _, label in twin.queue]
        close(network.prototypes, torch.stack(twin.prototypes), "prototypes")
    if twin.w:
        close(base.weights, twin.w, "label weights")
    else:
        assert base.weights is None
    assert samples.candidates.tolist() == [[j in S for j in range(C)] for S in twin.S]
    assert refine.corrected_at.tolist() == twin.at and refine.corrected_to.tolist() == twin.to


def follow(base, argv, monkeypatch, **more):
    """Two epochs, e0 the first -> how many were corrected in the second, of how many."""
    argv += "" if "views_share" in more else " --views-all"
    argv = [*COMMON.split(), "--base", base, *argv.split(), *(OF_PICO.split() if base == "pico" else [])]
    _, learner, samples = prepared(argv if "tau" in more else [*argv, "--tau", "0"])
    twin, original, losses = Twin(base, learner, samples, more), train.train_step, []
    correct, looked = learner.refine.correct, []
    learner.refine.correct = lambda index, f, *more: (looked.append((index.tolist(), f)), correct(index, f, *more))[
        1
    ]

    def both(learner, index, x, labels, correcting):
        loss, tau, counts = original(learner, index, x, labels, correcting)
        wanted_index, wanted_loss, wanted_tau, wanted_counts = twin.step()
        assert index.tolist() == wanted_index and correcting == twin.corrects
        assert not loss.requires_grad
        close(loss, wanted_loss, "loss")
        close(tau, wanted_tau, "tau")
        if correcting:  # f of x and of every extra view, of the samples that were looked at
            index, f = looked.pop()
            assert index == twin.looked[0]
            close(torch.stack(list(f)), twin.looked[1], "f(x), f(z)")
        assert counts.tolist() == wanted_counts and not looked
        same_state(learner, samples, twin)
        losses.append(wanted_loss)
        everything.append(wanted_counts)
        return loss, tau, counts

    monkeypatch.setattr(train, "train_step", both)
    for epoch in (1, 2):
        everything = []
        twin.begin_epoch(epoch)
        row, taus, noisy = train.train_epoch(learner, samples, epoch, EPOCHS, LR)
        twin.end_epoch()
        learner.refine.end_epoch(0.5)
        hits, clean, found, lacking, moved, right = map(sum, zip(*everything, strict=True))
        assert row["epoch"] == epoch and row["lr"] == pytest.approx(twin.lr) and not twin.batches
        assert row["loss"] == pytest.approx(sum(losses[-3:]) / 3, rel=1e-5)
        assert row["phi_c"] == pytest.approx(hits / clean) and row["phi_n"] == pytest.approx(found / lacking)
        assert row["corrections"] == moved and len(taus) == len(noisy) == clean + lacking == 3 * BATCH
        assert row["correction_precision"] == pytest.approx(right / moved if moved else math.nan, nan_ok=True)
        assert int(noisy.sum()) == lacking
    return moved, 3 * BATCH


CASES = {
    "as it is": ("", {}),
    "swap, strict": ("--swap --strict", dict(swap=True, strict=True)),
    "uniform": ("--weights-after uniform", dict(weights_after="uniform")),
    "swap, 1/C": ("--swap --weights-after 1/C", dict(swap=True, weights_after="1/C")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("base", ["cc", "rc", "log", "proden", "lwc", "pico"])
def test_every_base_step_by_step(base, case, monkeypatch):
    argv, more = CASES[case]
    moved, seen = follow(base, argv, monkeypatch, **more)
    assert 0 < moved < seen  # some are corrected, and not all


@pytest.mark.parametrize("base, argv, more", [
    ("log", "--variant released", dict(released=True)),
    ("rc", "--variant released", dict(released=True)),
    ("lwc", "--beta 2.5", dict(beta=2.5)),
    ("proden", "--views none", dict(views="")),
    ("proden", "--views ww", dict(views="ww")),
    ("proden", "--tau 0.01", dict(tau=0.01)),
    ("proden", "--views-share 0.5 --views s", dict(views_share=0.5, views="s")),
    ("proden", "--views-share 0.5 --views none", dict(views_share=0.5, views="")),
    ("proden", "--record-views", dict(record_views=True)),
    ("pico", "--record-views --views ws", dict(record_views=True, views="ws")),
    ("pico", "--views-share 0.5", dict(views_share=0.5)),
    ("pico", "--classifier-loss sce --phi 0.9 0.3", dict(classifier_loss="sce", phi=(0.9, 0.3))),
    ("pico", "--proto-start 2", dict(proto_start=2)),
    ("pico", "--f classifier", dict(f="classifier")),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_options_step_by_step(base, argv, more, monkeypatch):
    moved, _ = follow(base, argv, monkeypatch, **more)
    assert moved > 0
