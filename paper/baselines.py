"""The paper's other methods, each a base like those of losses.py: MAE, MSE, SCE, GCE, PLCR and PiCO+ (Section 4.2),
supervised learning and DivideMix (Table 8), ALIM, its authors' next method, and PALS (pals.py).

MAE, MSE, SCE, GCE and PLCR also carry IRNet; the others have an answer to noise of their own, or none. A
schedule published in epochs is kept as a share of the run, but for warm-ups (`warm_up`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import losses
from losses import Base, PiCO, log_contrast, uniform_weights, weighted_ce
from paper.pals import PALS

# ------------------------------------------------------------------ noise-robust losses on sets


class Robust(Base):
    """MAE, MSE, SCE or GCE on the candidate set, with w = S/|S| throughout (Lv et al., 2023)."""

    def __init__(self, candidates: Tensor, function: Callable, **form):
        super().__init__(candidates)
        self.function, self.form = function, form

    def objective(self, logits, index):
        return self.function(logits, uniform_weights(self.candidates[index]), **self.form)


class Supervised(Base):
    """Cross entropy on one given label [N]: the annotators' dominant one, or one of the candidates."""

    def __init__(self, candidates: Tensor, labels: Tensor):
        super().__init__(candidates)
        self.labels = labels

    def objective(self, logits, index):
        return F.cross_entropy(logits.float(), self.labels[index])


# ------------------------------------------------------------------ PLCR


class PLCR(Base):
    """Consistency regularisation (Wu et al., 2022) over a weak and two strong views:

    L = lambda(e) sum_v KL(w || p_v) - sum_{j not in S} log(1 - p_0j); then w = S (p_0 p_1 p_2)^(1/3), normalised.
    lambda rises from 0 to 1 over the first tenth of the run (100 epochs of the paper's 1,000).
    """

    views = "wss"
    kept = ("weights", "ramp")

    def __init__(self, candidates: Tensor):
        super().__init__(candidates)
        self.weights = uniform_weights(candidates)
        self.ramp = 0.0

    def loss(self, network, views, index):
        logits = [network(view).float() for view in views]
        log_p = torch.stack([z.log_softmax(1) for z in logits])  # [3, B, C]
        w = self.weights[index]
        kl = (torch.xlogy(w, w) - w * log_p).sum((0, 2)).mean()
        p = logits[0].softmax(1)
        outside = -((1.0000001 - p).log() * ~self.candidates[index]).sum(1).mean()
        self.mean_log = log_p.detach().mean(0)  # from before the step
        return self.ramp * kl + outside, p.detach()

    def after_step(self, network, views, index, probs):
        inside = self.mean_log.masked_fill(~self.candidates[index], -math.inf)
        self.weights[index] = inside.softmax(1)  # in log space: no sum underflows

    def end_epoch(self, epoch, epochs):
        self.ramp = min(1.0, epoch / max(1, epochs // 10))


# ------------------------------------------------------------------ PiCO's successors


class PiCOPlus(PiCO):
    """PiCO+ (Wang et al., 2023): samples near their prototype count as reliable, the others are guessed at.

    Reliable: the `pure` share of smallest dist = -q . mu of the pseudo label. Prototypes follow the reliable alone.
    L = L_mixup + 2 CE_reliable(w) + 0.1 CE_other(g) + SupCon(reliable) + 0.1 SupCon(all),
    g = softmax(q . mu / 0.07). After an eighth of the run the other samples' positives are their k nearest, and the
    rows of the first SupCon weigh 0.5 (reliable) and 0.1. Until `start` CE(w) + 0.5 MoCo, which contrasts with the
    batch and the queue; as_released with the queue alone, which short runs do not survive.
    """

    kept = (*PiCO.kept, "distance", "reliable", "queue_reliable", "nearest")
    mixes = True

    def __init__(
        self,
        candidates,
        generator=None,
        queue_size=8192,
        pure=0.6,
        neighbours=16,
        start=5,
        as_released=False,
        **options,
    ):
        super().__init__(candidates, **options)
        n, device = len(candidates), candidates.device
        self.generator, self.pure, self.neighbours = generator, pure, neighbours
        self.start, self.nearest = max(1, start), False  # first epoch of reliability; whether neighbours count
        self.starts, self.as_released = self.start, as_released
        self.distance = torch.full((n,), math.inf, device=device)  # of those not yet trained on
        self.reliable = torch.ones(n, dtype=torch.bool, device=device)
        self.queue_reliable = torch.zeros(queue_size, dtype=torch.bool, device=device)

    def loss(self, network, views, index):
        candidates, reliable = self.candidates[index], self.reliable[index]
        logits, q = network.embed(views[0])
        with torch.no_grad():
            p, self.seen = logits.float().softmax(1), network.prototypes
            c = network.prototype_probabilities(q, network.prototypes)
            inside = self.best(p, candidates)
            self.distance[index] = -(q.float() * network.prototypes[inside]).sum(1)
            pseudo = torch.where(reliable, inside, p.argmax(1))
            guess = network.prototype_probabilities(q, network.prototypes, 0.07)
            network.update_prototypes(q, pseudo, reliable)
            k = network.keys(views[1])
        log_prob, itself = log_contrast(q, k, network.queue)
        own_key = itself.roll(len(q), 1)  # the column of i's own key
        if self.epoch < self.start:  # MoCo and cross entropy
            apart = moco(q, k, network.queue) if self.as_released else -(log_prob * own_key).sum(1).mean()
            loss = weighted_ce(logits, self.weights[index]) + 0.5 * apart
        else:
            with torch.no_grad():
                target = F.one_hot(self.best(c, candidates), c.shape[1]).float()
                self.weights[index] = torch.lerp(target, self.weights[index], self.phi)
                w = self.weights[index]
                everything = (pseudo[:, None] == torch.cat([pseudo, pseudo, network.queue_labels])) & ~itself
                columns = torch.cat([reliable, reliable, self.queue_reliable])
                positive = everything & reliable[:, None] & columns | own_key
                rows = torch.ones(len(q), device=q.device)
                if self.nearest:
                    # the release counts the sample itself among its k nearest, then leaves it out
                    most = min(self.neighbours - 1, log_prob.shape[1] - 1)
                    near = log_prob.masked_fill(itself, -math.inf).topk(most, 1).indices
                    near = torch.zeros_like(itself).scatter(1, near, True)
                    positive = torch.where(reliable[:, None], positive, near | own_key)
                    rows = torch.where(reliable, 0.5, 0.1)
                target = torch.where(reliable[:, None], w, guess)
                mixed, mixed_target = mixup(views[0], target, self.generator)
            each = -(target * logits.float().log_softmax(1)).sum(1)  # cross entropy with w or with the guess
            supcon = -(rows * (log_prob * positive).sum(1) / positive.sum(1)).mean()
            supcon_all = -((log_prob * everything).sum(1) / everything.sum(1)).mean()
            loss = weighted_ce(network.embed(mixed)[0], mixed_target) + supcon + 0.1 * supcon_all
            loss = loss + 2 * masked_mean(each, reliable) + 0.1 * masked_mean(each, ~reliable)
        at = (network.pointer + torch.arange(len(k), device=k.device)) % len(self.queue_reliable)
        self.queue_reliable[at] = reliable
        network.enqueue(k, pseudo)
        return loss, c if self.f == "prototype" else p

    def end_epoch(self, epoch, epochs):
        super().end_epoch(epoch, epochs)
        self.nearest = epoch + 1 > epochs / 8
        if self.epoch >= self.start:
            closest = self.distance.argsort()[: int(self.pure * self.distance.isfinite().sum())]
            self.reliable = torch.zeros_like(self.reliable).index_fill_(0, closest, True)


def moco(q: Tensor, k: Tensor, queue: Tensor, temperature: float = 0.07) -> Tensor:
    """-log( exp(q_i.k_i/T) / (exp(q_i.k_i/T) + sum_{a in queue} exp(q_i.k_a/T)) ), the mean over i."""
    with torch.autocast(q.device.type, enabled=False):
        q, k, keys = q.float(), k.float(), queue.float().clone()  # the queue moves on before the backward pass
        similarity = torch.cat([(q * k).sum(1, keepdim=True), q @ keys.T], 1) / temperature  # [B, 1+Q]
    return -similarity.log_softmax(1)[:, 0].mean()


class ALIM(PiCO):
    """ALIM (Xu et al., 2023): S stays, but non-candidates count lambda < 1: argmax over (S + lambda (1 - S)) f.

    After every epoch from `start` (a share of the run) on, lambda is the quantile eta (the noise rate) of the
    margins max_{j in S} f_j / max_{j not in S} f_j, at most 1. f is the prototype softmax at temperature 0.07.
    """

    kept = (*PiCO.kept, "allowed")

    def __init__(self, candidates, eta=0.3, start=0.08, **options):
        super().__init__(candidates, **options)
        self.eta, self.start, self.allowed = eta, start, 0.0
        self.margins: list[Tensor] = []

    def best(self, probs, candidates):
        return (probs * (candidates + self.allowed * ~candidates)).argmax(1)

    def loss(self, network, views, index):
        out = super().loss(network, views, index)
        inside, outside = (out[1] * mask for mask in (self.candidates[index], ~self.candidates[index]))
        self.margins.append(inside.amax(1) / (outside.amax(1) + 1e-9))
        return out

    def prototype_probabilities(self, network, q, prototypes):
        return network.prototype_probabilities(q, prototypes, 0.07)

    def end_epoch(self, epoch, epochs):
        super().end_epoch(epoch, epochs)
        if epoch >= self.start * epochs:
            margins = torch.cat(self.margins).sort().values
            self.allowed = min(1.0, float(margins[min(int(len(margins) * self.eta), len(margins) - 1)]))
        self.margins = []


# ------------------------------------------------------------------ DivideMix


class DivideMix(Base):
    """DivideMix (Li et al., 2020) on one label a sample: two networks, each trained on the other's division of the
    data into clean (labelled) and noisy (unlabelled) samples by a mixture of two Gaussians on the losses; MixMatch.

    Both networks take a step on every batch; the release trains them one after the other.
    """

    views = "ww"
    kept = ("labels",)
    unlabelled_weight, temperature = 25.0, 0.5

    def __init__(self, candidates: Tensor, labels: Tensor, generator: Generator | None = None, epochs=300, warm=10):
        super().__init__(candidates)
        self.labels, self.generator = labels, generator
        self.warm_up, self.ramp_length = warm_up(warm, epochs), warm_up(16, epochs)
        self.starts = self.warm_up + 1
        self.clean: Tensor | None = None  # [2, N]: the probability to be clean, by each network
        self.epoch = 1

    def begin_epoch(self, epoch: int, look: Callable) -> None:
        self.epoch = epoch
        if epoch <= self.warm_up:
            return
        seen = look(lambda network, x: torch.stack([network.one(x).float(), network.two(x).float()], 1))
        each = [F.cross_entropy(z, self.labels, reduction="none") for z in seen.unbind(1)]
        self.clean = torch.stack([clean_probability(loss) for loss in each])

    def loss(self, network, views, index):
        y = F.one_hot(self.labels[index], self.candidates.shape[1]).float()
        networks, total, guess = (network.one, network.two), 0.0, 0.0
        for own in (0, 1):
            if self.clean is None:
                logits = networks[own](views[0])
                total = total + weighted_ce(logits, y)
                guess = guess + logits.detach().float().softmax(1) / 2
                continue
            part, p = self._mixmatch(networks[own], networks[1 - own], views, y, self.clean[1 - own, index])
            total, guess = total + part, guess + p / 2
        return total, guess

    def _mixmatch(self, own, other, views, y, w):
        labelled = (w > 0.5)[:, None]
        with torch.no_grad():
            mine = torch.stack([own.peek(view).float().softmax(1) for view in views]).mean(0)
            other.eval()
            theirs = torch.stack([other(view).float().softmax(1) for view in views]).mean(0)
            other.train()
            kept = w[:, None] * y + (1 - w[:, None]) * mine
            target = sharpen(torch.where(labelled, kept, (mine + theirs) / 2), self.temperature)
            x, t = mixup(torch.cat(views), torch.cat([target, target]), self.generator)
        logits = own(x).float()
        p = logits.softmax(1)
        labelled = torch.cat([labelled, labelled])[:, 0]
        clean = masked_mean(-(t * logits.log_softmax(1)).sum(1), labelled)
        noisy = masked_mean((p - t).square().mean(1), ~labelled)
        mean = p.mean(0)
        penalty = -(mean.log().mean() + math.log(len(mean)))  # sum_c pi log(pi / mean), pi = 1/C
        ramp = min(1.0, max(0.0, (self.epoch - 1 - self.warm_up) / self.ramp_length))
        return clean + self.unlabelled_weight * ramp * noisy + penalty, mine


def clean_probability(loss: Tensor) -> Tensor:
    """The probability [N] of the component with the lower mean, over the losses scaled to [0, 1]."""
    scaled = (loss - loss.min()) / (loss.max() - loss.min()).clamp_min(1e-12)
    return two_gaussians(scaled.cpu())[3].float().to(loss.device)  # in double, which not every device has


def two_gaussians(
    x: Tensor, iterations: int = 10, tolerance: float = 1e-2, floor: float = 5e-4
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A mixture of two Gaussians on x [N] by EM, begun with two means: (shares, means, variances [2], the
    probability [N] of the first). The first has the lower mean; `floor` is added to the variances."""
    x = x.double()
    means = torch.stack([x.min(), x.max()])
    for _ in range(20):
        near = (x[:, None] - means).abs().argmin(1)
        member = F.one_hot(near, 2).double()
        means = (member * x[:, None]).sum(0) / member.sum(0).clamp_min(1)
    likelihood = -math.inf
    for _ in range(iterations + 1):
        count = member.sum(0) + 1e-12
        shares, means = count / len(x), (member * x[:, None]).sum(0) / count
        variances = (member * (x[:, None] - means).square()).sum(0) / count + floor
        log_density = -0.5 * ((x[:, None] - means).square() / variances + (2 * math.pi * variances).log())
        joint = log_density + shares.log()
        before, likelihood = likelihood, joint.logsumexp(1).mean()
        member = joint.softmax(1)
        if abs(likelihood - before) < tolerance:
            break
    order = means.argsort()
    return shares[order], means[order], variances[order], member[:, order[0]]


# ------------------------------------------------------------------ what several of them share


def warm_up(published: int, epochs: int) -> int:
    """As many epochs as were published, at most a quarter of the run: a share of a short run would be none, and
    what a network that has learnt nothing yet sorts, it sorts by chance."""
    return max(1, min(published, epochs // 4))


def mixup(x: Tensor, target: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """x and target mixed with those of another sample, l = max(l, 1 - l), l from Beta(4, 4): the fourth smallest of
    seven uniform numbers. One l a batch."""
    u = torch.rand(7, generator=generator, device=x.device).sort().values[3]
    u = torch.maximum(u, 1 - u)
    other = torch.randperm(len(x), generator=generator, device=x.device)
    return torch.lerp(x[other], x, u), torch.lerp(target[other], target, u)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """p^(1/T), normalised."""
    return (p.clamp_min(1e-12).log() / temperature).softmax(1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over mask; 0 where it is empty."""
    return (x * mask).sum() / mask.sum().clamp_min(1)


ROBUST = {"mae": losses.mae, "mse": losses.mse, "sce": losses.sce, "gce": losses.gce}
METHODS = losses.BASES | {name: functools.partial(Robust, function=loss) for name, loss in ROBUST.items()}
METHODS |= {"plcr": PLCR, "pico+": PiCOPlus, "alim": ALIM, "pals": PALS}
METHODS |= {"supervised": Supervised, "dividemix": DivideMix}


def make(c, dataset, candidates: Tensor, pico: dict, generator: Generator, seeded: Generator) -> Base:
    """The method that --base names, with its options; pico: those of PiCO; seeded: draws the same everywhere."""
    start, near, warm = (50, 5, 30) if c.dataset == "cifar100" else (5, 16, 10)  # as published
    plus = dict(start=max(2, warm_up(start, c.epochs)), neighbours=near, queue_size=c.queue, generator=generator)
    plus["as_released"] = c.variant == "released"
    options = {"pico+": pico | plus, "alim": pico | dict(eta=c.eta)}
    options |= dict.fromkeys(("mae", "mse", "sce"), dict(form=c.form))
    options["pals"] = dict(generator=generator, epochs=c.epochs)
    if c.base in ("supervised", "dividemix"):
        votes, decided = dataset.votes, dataset.decided
        if votes is not None and decided is not None:  # by a person: no other label counts
            votes = torch.where(decided.any(1, keepdim=True), decided * (votes + 1), votes)
        one = one_label(votes, candidates.cpu(), seeded).to(candidates.device)
        options = dict(supervised=dict(labels=one))
        options["dividemix"] = dict(labels=one, generator=generator, epochs=c.epochs, warm=warm)
    return METHODS[c.base](candidates, **options.get(c.base, {}))


def one_label(votes: Tensor | None, candidates: Tensor, generator: Generator | None = None) -> Tensor:
    """One label a sample [N], for methods that take no sets: the most frequent vote, else any of the candidates."""
    if votes is not None:
        return votes.argmax(1)
    return (torch.rand(candidates.shape, generator=generator, device=candidates.device) * candidates).argmax(1)
