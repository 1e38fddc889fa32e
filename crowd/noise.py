"""How many samples lack their true label, in all and by class, from what a network says of samples not trained on.

    P(S | x) = (1 - eta) sum_{k in S} p_k(x) P(S | k, y in S)  +  eta sum_{k not in S} p_k(x) P(S | k, y not in S)

irnet.estimate_noise supposes that wrong candidates are drawn at random. People confuse the same classes, captions
name the same people: then P(S | k) goes by class, with R[k, j] how often j is in the set of a k. For votes it goes
by the annotators' matrices. Which pairs of labels come together more often than by chance is visible, and decides;
how well the chosen model explains the pairs says how far the interval may be trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crowd.annotators import Votes, wilson
from crowd.consensus import VoteModel, consensus

ETAS = torch.linspace(0, 0.99, 199, dtype=torch.double)
TEMPERATURES = 2 ** torch.linspace(-4, 3, 57, dtype=torch.double)
WITHIN = 1.92  # log-likelihood: half of chi-square's 95 % at one degree of freedom
SMOOTH = 3.0  # pseudo-samples a class, with the rate of all classes
RANDOM, FITS = 2.0, 3.0  # chi-square of the pairs, a degree of freedom, up to which labels come together by chance;
# and up to which the classes explain it
KNOWS = 0.8  # accuracy from which a network can tell its own mistakes from those of the votes
MOST_CLASSES, ENOUGH = 500, 20_000  # with a matrix; and the samples that it is estimated from


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


def profile(z: Tensor, inside: Tensor, outside: Tensor) -> tuple[float, float, float, float, float]:
    """eta and T of the likeliest sets -> (eta, T, low, high, gain): the 95 % interval of the profile likelihood, as
    in irnet.estimate_noise, and how much likelier the sets are than with eta = 0."""
    found = []
    for temperature in TEMPERATURES:
        log_p = (z / temperature).log_softmax(1)
        a, b = ((log_p + part).logsumexp(1) for part in (inside, outside))
        most = torch.maximum(a, b)
        mixed = torch.lerp((a - most).exp(), (b - most).exp(), ETAS[:, None]).clamp_min(1e-300)
        found.append((mixed.log() + most).sum(1))  # [etas]
    likelihood, best = torch.stack(found).max(0)
    at = int(likelihood.argmax())
    within = ETAS[likelihood >= likelihood[at] - WITHIN]
    gain = float(likelihood[at] - likelihood[0])
    return float(ETAS[at]), float(TEMPERATURES[best[at]]), float(within[0]), float(within[-1]), gain


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


def surprise(seen: Tensor, expected: Tensor) -> float:
    """Pearson's chi-square of the pairs, a degree of freedom: about 1 where only chance is at work."""
    upper = torch.triu(torch.ones_like(seen), 1).bool() & (expected > 1)
    if not upper.any():
        return 0.0
    return float(((seen - expected).square() / expected)[upper].mean())


# ------------------------------------------------------------------ the report


@torch.no_grad()
def report(p: Tensor, sets: Tensor, held: Tensor, votes: Votes | None = None) -> Report:
    """Of a run at e0. p [N, C]: the classifier's probabilities of all training samples; sets bool [N, C]; held [M]:
    the samples that were not trained on, by which everything is judged."""
    z, out = p[held].double().clamp_min(1e-12).log(), sets[held]
    tells = (out.sum(1) > 0) & (out.sum(1) < sets.shape[1])  # a full set says nothing
    if not tells.any():
        return Report(math.nan, math.nan, math.nan, math.nan, "none", False)
    by = explain(p, sets, held, votes)
    inside, outside = by.inside, by.outside
    eta, temperature, low, high, gain = profile(z[tells], inside[tells], outside[tells])

    log_p = (z / temperature).log_softmax(1)
    weight = torch.stack([log_p + inside + math.log(1 - eta), log_p + outside + math.log(max(eta, 1e-12))])
    q = weight.permute(1, 0, 2).flatten(1).softmax(1).view(-1, 2, sets.shape[1])  # [M, in or out, C]
    seen, missing = q[tells].sum((0, 1)), q[tells, 1].sum(0)
    classes = ((missing + 10 * eta) / (seen + 10)).tolist()  # ten samples more with the rate of all
    if by.whole is not None:  # all samples say so, of which the held-out part is but a tenth
        ends = wilson(by.whole, len(sets))
        eta, low, high = (eta + by.whole) / 2, min(low, ends[0]), max(high, ends[1])
    if not (by.fits and by.knows):
        low, high = low if by.knows else 0.0, max(high, by.most)
        eta = eta if by.fits else (low + high) / 2
    return Report(eta, low, high, temperature, by.model, by.fits and by.knows, classes, by.together, gain)


@dataclass
class Explained:
    """A model of the sets, and what it says of the held-out ones."""

    model: str
    inside: Tensor  # log P(S | k, k in S) [M, C]
    outside: Tensor
    most: float = 1.0  # how many may be missing, if it is not to be trusted
    whole: float | None = None  # of votes: how many are, among all samples
    fits: bool = True  # whether it explains what is seen
    knows: bool = True  # whether the network knows the classes well enough
    together: float = math.nan  # how far labels come together beyond chance; not looked at where classes are many


def explain(p: Tensor, sets: Tensor, held: Tensor, votes: Votes | None) -> Explained:
    out, classes = sets[held], sets.shape[1]
    unseen = torch.zeros(len(sets), dtype=torch.bool).index_fill_(0, held, True)
    if classes > MOST_CLASSES:
        return Explained("random", *at_random(out))
    together = surprise(pairs(sets), by_chance(sets))
    if votes is not None:
        return by_annotators(p, sets, held, unseen, votes, together)
    rest = (~unseen).nonzero()[:ENOUGH, 0]
    # at the temperature that the random model finds, the network's probabilities are about right
    temperature = profile(p[held].double().clamp_min(1e-12).log(), *at_random(out))[1]
    sharp = (p.double().clamp_min(1e-12).log() / temperature).softmax(1)
    if together <= RANDOM:
        return Explained("random", *at_random(out), together=together)
    rates, some = class_rates(sharp[rest], sets[rest]), sets[rest]
    # a class may as well be the label that comes with it most often
    most = float((sharp.mean(0) * (1 - rates.clone().fill_diagonal_(0).amax(1))).sum())
    fits = surprise(pairs(some), by_model(sharp[rest], rates)) <= FITS
    return Explained("classes", *by_class(rates, out), most, fits=fits, together=together)


def by_annotators(
    p: Tensor, sets: Tensor, held: Tensor, unseen: Tensor, votes: Votes, together: float
) -> Explained:
    found = consensus(votes, p, unseen, sets)
    kind, *more = found.model.split(", ")
    model = VoteModel((votes if kind == "annotators" else votes.shared()).rows(held), 2 if more else 1)
    evidence = by_votes(model, found.matrices.log(), found.weights, sets[held])
    whole, (sample, _, label) = float((found.q * ~sets).sum(1).mean()), votes.said.unbind(1)
    right = float((votes.times * found.q[sample, label]).sum() / votes.times.sum())
    counts, by_themselves = votes.counts(), together <= RANDOM
    most = float(1 - found.q.gather(1, counts.argmax(1, keepdim=True)).mean())  # no vote right: the majority wrong
    fits = (right >= 0.5 or by_themselves) and not shared_doubt(p[held], counts[held])
    knows = float(found.q[held].gather(1, p[held].argmax(1, keepdim=True)).mean()) >= KNOWS
    return Explained("votes", *evidence, most, whole, fits, knows, together)


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
