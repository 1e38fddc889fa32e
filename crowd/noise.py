"""How many samples lack their true label, in all and by class, from what a network says of samples not trained on.

    P(S | x) = (1 - eta) sum_{k in S} p_k(x) P(S | k, y in S)  +  eta sum_{k not in S} p_k(x) P(S | k, y not in S)

irnet.estimate_noise supposes that wrong candidates are drawn at random. People confuse the same classes, captions
name the same people: then P(S | k) goes by class, with R[k, j] how often j is in the set of a k. For votes it goes
by the annotators' matrices. Which pairs of labels come together more often than by chance is visible, and decides;
how well the chosen model explains the pairs says how far the interval may be trusted.

The held-out samples are few. So all samples are asked as well, by heads on the network's features that were not
fitted to them (crowd/heads.py). Features of a trained-on sample know its set a little: enough to spoil how probable
the labels behind the first are, too little to change the first. At random, therefore, only the number of first
labels outside their sets is taken from all samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crowd.annotators import Votes, wilson
from crowd.consensus import SETTLED, SLOPE, TURNS, SetModel, VoteModel, consensus, expect_maximise, named
from crowd.heads import HEADS, Heads

ETAS = torch.linspace(0, 0.99, 199, dtype=torch.double)
TEMPERATURES = 2 ** torch.linspace(-4, 3, 57, dtype=torch.double)
NEAR = 2 ** torch.linspace(-2, 1, 13, dtype=torch.double)  # of heads
WITHIN = 1.92  # log-likelihood: half of chi-square's 95 % at one degree of freedom
SMOOTH = 3.0  # pseudo-samples a class, with the rate of all classes
RANDOM, FITS = 2.0, 3.0  # chi-square of the pairs, a degree of freedom, up to which labels come together by chance;
# and up to which the classes explain it
KNOWS = 0.8  # accuracy from which a network can tell its own mistakes from those of the votes
MOST_CLASSES, ENOUGH, FEW = 500, 20_000, 3000  # with a matrix; the samples that it is estimated from, that eta is
WEIGHT = 3.0  # of the count of all samples, in held-out parts


@dataclass
class Report:
    """The noise of one's own labels."""

    eta: float
    low: float
    high: float
    temperature: float
    model: str  # random, classes or votes
    fits: bool = True  # whether the model can be trusted; else the interval is wide
    classes: list[float] = field(default_factory=list)  # the rate of each
    together: float = math.nan  # how far labels come together beyond chance: chi-square a degree of freedom
    gain: float = 0.0  # how much likelier (log) the held-out sets are if the truth may be outside them


# ------------------------------------------------------------------ P(S | k): log, [N, C]


def at_random(sets: Tensor) -> tuple[Tensor, Tensor]:
    """Section 3.1's process: inside 0, outside log |S|/(C-|S|), as irnet.estimate_noise has it."""
    size = sets.sum(1, keepdim=True).double()
    outside = (size / (sets.shape[1] - size).clamp_min(1)).log().expand(sets.shape)
    return _parts(torch.zeros_like(outside), outside, sets)


def deleted(sets: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Any label joins with this chance, and the truth is deleted instead of swapped: such sets are smaller. Outside
    r/(1-r), of the sets that are not empty."""
    r, others = min(max(rate, 1e-3), 1 - 1e-3), sets.shape[1] - 1
    outside = torch.full(sets.shape, math.log(r / (1 - r)) - math.log1p(-((1 - r) ** others)), dtype=torch.double)
    return _parts(torch.zeros_like(outside), outside, sets)


def by_class(rates: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
    """prod_{j != k} R[k, j]^S_j (1 - R[k, j])^(1 - S_j); without the truth at least one other label is there."""
    r, own = rates.clamp(1e-3, 1 - 1e-3), torch.eye(len(rates), dtype=torch.bool)
    absent = (1 - r).log().masked_fill(own, 0)
    found = sets.double() @ (r.log().masked_fill(own, 0) - absent).T + absent.sum(1)
    some = torch.log1p(-absent.sum(1).exp().clamp_max(1 - 1e-9))
    return _parts(found, found - some, sets)


def by_votes(model: VoteModel, log_pi: Tensor, weights: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
    """P(votes | k), divided by how probable it is that somebody, or nobody, of those who voted says k."""
    rho = weights.log()[:, None]
    found = (model.evidence(log_pi) + rho).logsumexp(1)  # [N, C]
    miss = torch.log1p(-log_pi.diagonal(dim1=2, dim2=3).exp().clamp_max(1 - 1e-9))  # [G, A, C]
    nobody = (model.evidence(miss[..., None].expand_as(log_pi)) + rho).logsumexp(1).clamp_max(-1e-9)
    return _parts(found - torch.log(-torch.expm1(nobody)), found - nobody, sets)


def _parts(inside: Tensor, outside: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
    none = torch.full_like(inside, -math.inf)
    return torch.where(sets, inside, none), torch.where(sets, none, outside)


def class_rates(p: Tensor, sets: Tensor) -> Tensor:
    """R [C, C] from p [N, C], smoothed by how often any label is in any set."""
    pooled = (sets.double().sum() + 1) / (sets.numel() + 2)
    return (p.T @ sets.double() + SMOOTH * pooled) / (p.sum(0)[:, None] + SMOOTH)


# ------------------------------------------------------------------ the rate


@dataclass
class Count:
    """Of all samples: the share whose first label, by heads, is outside the set."""

    outside: float
    size: float  # of the sets, in the mean
    classes: int
    weight: float  # how many samples it counts as

    def likelihood(self, accuracy: Tensor) -> Tensor:
        """log [len(accuracy), etas], where labels are random: a wrong first label is in the set by chance."""
        wrong, others = 1 - accuracy[:, None], self.classes - 1
        by_chance = (1 - ETAS) * (1 - (self.size - 1) / others) - ETAS * self.size / others
        expected = (ETAS + wrong * by_chance).clamp(1e-4, 1 - 1e-4)
        return self.weight * (self.outside * expected.log() + (1 - self.outside) * (1 - expected).log())


def profile(
    z: Tensor, inside: Tensor, outside: Tensor, count: Count | None = None, temperatures: Tensor = TEMPERATURES
) -> tuple[float, float, float, float, float]:
    """eta and T of the likeliest sets -> (eta, T, low, high, gain): the 95 % interval of the profile likelihood, as
    in irnet.estimate_noise, and how much likelier all is than with eta = 0. Of few samples many pairs are about as
    likely: more is missing, or the network is worse. The count tells them apart; the interval goes without it."""
    found, accuracy = [], []
    for temperature in temperatures:
        log_p = (z / temperature).log_softmax(1)
        accuracy.append(log_p.amax(1).exp().mean())
        a, b = ((log_p + part).logsumexp(1) for part in (inside, outside))
        most = torch.maximum(a, b)
        mixed = torch.lerp((a - most).exp(), (b - most).exp(), ETAS[:, None]).clamp_min(1e-300)
        found.append((mixed.log() + most).sum(1))  # [etas]
    both = torch.stack(found)  # [temperatures, etas]
    likelihood = both.amax(0)
    within = (likelihood >= likelihood.max() - WITHIN).nonzero()[:, 0]
    ends = ETAS[(within[0] - 1).clamp_min(0)], ETAS[(within[-1] + 1).clamp_max(len(ETAS) - 1)]  # a step outside
    both = both + count.likelihood(torch.stack(accuracy)) if count else both
    best, at = divmod(int(both.argmax()), len(ETAS))
    low, high, gain = min(ETAS[at], ends[0]), max(ETAS[at], ends[1]), both.max() - both[:, 0].max()
    return float(ETAS[at]), float(temperatures[best]), float(low), float(high), float(gain)


def posterior(z: Tensor, inside: Tensor, outside: Tensor, eta: float) -> Tensor:
    """How probable each label is, in the set or outside it: [N, 2, C]; z: logits at their temperature."""
    log_p = z.log_softmax(1)
    terms = (log_p + inside + math.log(1 - eta), log_p + outside + math.log(max(eta, 1e-12)))
    return torch.stack(terms, 1).flatten(1).softmax(1).view(len(z), 2, -1)


@dataclass
class Settled:
    """The class model, come to rest with heads."""

    q: Tensor  # [N, C]
    rates: Tensor  # R [C, C]
    eta: float
    low: float
    high: float
    gain: float
    likelihood: float


def settle(heads: Heads, q: Tensor, sets: Tensor) -> Settled:
    """By turns: heads fitted to q, eta and T of the likeliest sets, q again by these, R again by q."""
    rates, some = class_rates(q, sets), torch.arange(len(sets))[:FEW]
    for _ in range(TURNS):
        z, before = SLOPE * heads(q), q.argmax(1)
        inside, outside = by_class(rates, sets)
        eta, temperature, low, high, gain = profile(z[some], inside[some], outside[some], None, NEAR)
        z = z / temperature
        q = posterior(z, inside, outside, max(eta, 1e-3)).sum(1)
        rates = class_rates(q, sets)
        if (q.argmax(1) != before).double().mean() < SETTLED:
            break
    a, b = ((z.log_softmax(1) + part).logsumexp(1) for part in (inside, outside))
    likelihood = torch.logaddexp(a + math.log(1 - eta), b + math.log(max(eta, 1e-12))).mean()
    return Settled(q, rates, eta, low, high, gain, float(likelihood))


# ------------------------------------------------------------------ which labels come together


def pairs(sets: Tensor) -> Tensor:
    """How many sets hold both labels [C, C]; 0 on the diagonal."""
    s = sets.double()
    return (s.T @ s).fill_diagonal_(0)


def by_chance(sets: Tensor) -> Tensor:
    """The same where every label is as often in the sets as it is and sets are as large as they are, but labels
    otherwise know nothing of one another."""
    s, size = sets.double(), sets.sum(1).double()
    odds = s.sum(0) / (len(s) - s.sum(0)).clamp_min(0.5)
    expected = (odds[:, None] * odds).fill_diagonal_(0)
    total = (size * (size - 1)).sum()
    for _ in range(50):  # each label in as many pairs as it is
        row = (s * (size - 1)[:, None]).sum(0) / expected.sum(1).clamp_min(1e-12)
        expected = expected * (row[:, None] * row).clamp_min(0).sqrt()
    return expected * total / expected.sum().clamp_min(1e-12)


def by_model(p: Tensor, rates: Tensor) -> Tensor:
    """The same where a label joins by the class alone."""
    return (rates.T @ (p.sum(0)[:, None] * rates)).fill_diagonal_(0)


def come_together(sets: Tensor) -> bool:
    """Whether some labels are in one set more often than by chance."""
    return surprise(pairs(sets), by_chance(sets)) > RANDOM


def surprise(seen: Tensor, expected: Tensor) -> float:
    """Pearson's chi-square of the pairs, a degree of freedom: about 1 where only chance is at work."""
    upper = torch.triu(torch.ones_like(seen), 1).bool() & (expected > 1)
    if not upper.any():
        return 0.0
    return float(((seen - expected).square() / expected)[upper].mean())


# ------------------------------------------------------------------ the report


@torch.no_grad()
def report(
    p: Tensor, sets: Tensor, held: Tensor, votes: Votes | None = None, features: Tensor | None = None
) -> Report:
    """Of a run at e0. p [N, C]: the classifier's probabilities of all training samples; sets bool [N, C]; held [M]:
    the samples that were not trained on, by which everything is judged. features [N, D]: the network's, by which
    all samples are asked too."""
    z, out = p[held].double().clamp_min(1e-12).log(), sets[held]
    tells = (out.sum(1) > 0) & (out.sum(1) < sets.shape[1])  # a full set says nothing
    if not tells.any():
        return Report(math.nan, math.nan, math.nan, math.nan, "none", False)
    by = explain(p, sets, held, votes, features)
    inside, outside = by.inside, by.outside
    eta, temperature, low, high, gain = profile(z[tells], inside[tells], outside[tells], by.count)
    if (
        by.model == "random"
    ):  # was the truth swapped, or deleted? the likelier says how often, the interval is of both
        size = float(sets.sum(1).double().mean())
        other = deleted(out, (size - 1 + eta) / (sets.shape[1] - 1))
        found = profile(z[tells], *(part[tells] for part in other), by.count)
        ends = min(low, found[2]), max(high, found[3])
        if found[-1] > gain:
            (eta, temperature, *_, gain), (inside, outside) = found, other
        low, high = ends

    q = posterior(z / temperature, inside, outside, eta)  # [M, in or out, C]
    seen, missing = q[tells].sum((0, 1)), q[tells, 1].sum(0)
    if by.whole is not None:  # all samples say so, of which the held-out part is but a tenth
        eta, *ends, more = by.whole
        low, high, gain = min(low, ends[0]), max(high, ends[1]), max(gain, more)
    classes = ((missing + 10 * eta) / (seen + 10)).tolist()  # ten samples more with the rate of all
    if not (by.fits and by.knows):
        low, high = low if by.knows else 0.0, max(high, by.most)
        eta = eta if by.fits or by.whole else (low + high) / 2
    return Report(eta, low, high, temperature, by.model, by.fits and by.knows, classes, by.together, gain)


@dataclass
class Explained:
    """A model of the sets, and what it says of the held-out ones."""

    model: str
    inside: Tensor  # log P(S | k, k in S) [M, C]
    outside: Tensor
    most: float = 1.0  # how many may be missing, if it is not to be trusted
    whole: tuple[float, float, float, float] | None = None  # eta, low, high, gain: of all samples
    count: Count | None = None
    fits: bool = True  # whether it explains what is seen
    knows: bool = True  # whether the network knows the classes well enough
    together: float = math.nan  # how far labels come together beyond chance; not looked at where classes are many


def explain(p: Tensor, sets: Tensor, held: Tensor, votes: Votes | None, features: Tensor | None) -> Explained:
    out, classes = sets[held], sets.shape[1]
    unseen = torch.zeros(len(sets), dtype=torch.bool).index_fill_(0, held, True)
    if classes > MOST_CLASSES:
        return Explained("random", *at_random(out))
    together = surprise(pairs(sets), by_chance(sets))
    if votes is not None:
        return by_annotators(p, sets, held, unseen, votes, together, features)
    some = torch.cat([held, (~unseen).nonzero()[:ENOUGH, 0]])  # the held-out samples first
    p, sets = p[some].double(), sets[some]
    heads = Heads(features[some]) if features is not None and len(some) > HEADS else None
    if together <= RANDOM:
        return Explained("random", *at_random(out), count=counted(heads, p, sets, len(held)), together=together)
    # at the temperature that the random model finds, the network's probabilities are about right
    temperature = profile(p[: len(held)].clamp_min(1e-12).log(), *at_random(out))[1]
    q = (p.clamp_min(1e-12).log() / temperature).softmax(1)
    rates, whole, knows = class_rates(q[len(held) :], sets[len(held) :]), None, True
    if heads:  # from the network, and from the sets alone: where the network has lost a class, they have not
        alone = expect_maximise(SetModel(sets), None, torch.zeros(len(sets), dtype=torch.bool)).joint[:, 0]
        starts = (q, named(alone, q))
        found = max((settle(heads, start, sets) for start in starts), key=lambda each: each.likelihood)
        q, rates, whole = found.q, found.rates, (found.eta, found.low, found.high, found.gain)
        knows = float(q[: len(held)].gather(1, p[: len(held)].argmax(1, keepdim=True)).mean()) >= KNOWS
    # a class may as well be the label that comes with it most often
    most = float((q.mean(0) * (1 - rates.clone().fill_diagonal_(0).amax(1))).sum())
    fits = surprise(pairs(sets), by_model(q, rates)) <= FITS
    more = dict(whole=whole, fits=fits, knows=knows, together=together)
    return Explained("classes", *by_class(rates, out), most, **more)


def counted(heads: Heads | None, p: Tensor, sets: Tensor, held: int) -> Count | None:
    if heads is None:
        return None
    first = heads(p).argmax(1, keepdim=True)
    outside = 1 - float(sets.gather(1, first).double().mean())
    return Count(outside, float(sets.sum(1).double().mean()), sets.shape[1], WEIGHT * held)


def by_annotators(
    p: Tensor, sets: Tensor, held: Tensor, unseen: Tensor, votes: Votes, together: float, features: Tensor | None
) -> Explained:
    found = consensus(votes, p, unseen, sets, features=features)
    kind, *more = found.model.split(", ")
    model = VoteModel((votes if kind == "annotators" else votes.shared()).rows(held), 2 if more else 1)
    evidence = by_votes(model, found.matrices.log(), found.weights, sets[held])
    missing, (sample, _, label) = float((found.q * ~sets).sum(1).mean()), votes.said.unbind(1)
    right = float((votes.times * found.q[sample, label]).sum() / votes.times.sum())
    counts, by_themselves = votes.counts(), together <= RANDOM
    most = float(1 - found.q.gather(1, counts.argmax(1, keepdim=True)).mean())  # no vote right: the majority wrong
    fits = (right >= 0.5 or by_themselves) and not shared_doubt(p[held], counts[held])
    knows = float(found.q[held].gather(1, p[held].argmax(1, keepdim=True)).mean()) >= KNOWS
    whole = (missing, *wilson(missing, len(sets)), 0.0)
    return Explained("votes", *evidence, most, whole, fits=fits, knows=knows, together=together)


def shared_doubt(p: Tensor, counts: Tensor) -> bool:
    """Whether people disagree on what the network doubts: then they err together, and not by the class alone. Of
    samples with the same majority, those of the less sure half are compared with the others."""
    apart, sure, majority = 1 - counts.amax(1) / counts.sum(1).clamp_min(1), p.amax(1).double(), counts.argmax(1)
    difference = variance = 0.0
    for k in majority.unique():
        mine, own = apart[majority == k], sure[majority == k]
        less = own <= own.median()
        if len(mine) < 4 or less.all():
            continue
        n = 1 / (1 / less.sum() + 1 / (~less).sum())
        difference += n * (mine[less].mean() - mine[~less].mean())
        variance += n * mine.var()
    return bool(variance > 0 and difference / variance**0.5 > 3)
