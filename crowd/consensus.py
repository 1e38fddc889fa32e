"""The label that votes and network together make most probable, and how far to trust it and each annotator.

    q(k | x, votes) ~ softmax(z / T)_k  sum_g rho_g  prod_a pi_a^g[k, vote_a]

by EM: Dawid and Skene's model of annotators (1979) with a network's logits z for the class prior. pi_a[k, l] is how
often annotator a says l of a k. One difficulty g is theirs; the second has samples on which everybody errs more, so
that a vote on them tells less. For sets without votes P(S | k) = prod_j R[k, j]^S_j (1 - R[k, j])^(1 - S_j).

A network has learnt the votes' mistakes with the votes. So where its features are given, z is what a linear head on
them, fitted to q of other samples, says of a sample; then q again, and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crowd.annotators import Votes
from crowd.heads import HEADS, Heads

SMOOTH = 5.0  # pseudo-votes a row: an annotator's are as all vote, those of all as one accuracy for all classes
FOLDS, ENOUGH = 3, 2500  # of the cross-validation, and the samples that it looks at
TELLING, COLDEST, WARMEST = 1500, 1 / 8, 16.0  # samples that T is chosen by, at most; and between what
ROUNDS, STILL = 60, 1e-4  # of EM, at most; and the mean change of q below which it has come to rest
MOST = 20_000_000  # entries of all matrices together
SLOPE, TURNS, SETTLED = 8.0, 12, 2e-3  # how sure heads are; fitted so often, or until fewer labels change


class VoteModel:
    """P(votes | k, g) = prod_a pi_a^g[k, vote_a]."""

    def __init__(self, votes: Votes, difficulties: int = 1):
        self.votes, self.groups = votes, difficulties
        key = votes.said[:, 1] * votes.classes + votes.said[:, 2]
        at = torch.stack([votes.said[:, 0], key])
        size = (votes.samples, votes.annotators * votes.classes)
        self.matrix = torch.sparse_coo_tensor(at, votes.times, size, check_invariants=False).coalesce()  # [N, A C]
        self.turned = self.matrix.t().coalesce()

    def start(self) -> Tensor:
        """[N, G, C]: the shares of the votes; samples without agreement are rather difficult."""
        counts = self.votes.counts()
        share = (counts + 1e-2) / (counts + 1e-2).sum(1, keepdim=True)
        if self.groups == 1:
            return share[:, None]
        hard = 0.2 + 0.6 * (counts.amax(1) < counts.sum(1))
        return torch.stack([share * (1 - hard[:, None]), share * hard[:, None]], 1)

    def maximise(self, joint: Tensor) -> Tensor:
        """log pi [G, A, C, C] from q(g, k) [N, G, C]."""
        a, c, g = self.votes.annotators, self.votes.classes, self.groups
        found = (self.turned @ joint.flatten(1)).view(a, c, g, c).permute(2, 0, 3, 1)  # [G, A, k, l]
        pooled = found.sum(1, keepdim=True)
        right = pooled.diagonal(dim1=2, dim2=3).sum(-1)[..., None, None]  # [G, 1, 1, 1]
        rate = (right + 1) / (pooled.sum((2, 3), keepdim=True) + 2)
        eye = torch.eye(c, dtype=joint.dtype)
        coin = rate * eye + (1 - rate) / max(1, c - 1) * (1 - eye)  # one accuracy for all classes
        pooled = _rows(pooled + SMOOTH * coin)
        return _rows(found + SMOOTH * pooled).log() if a > 1 else pooled.log()

    def evidence(self, log_pi: Tensor) -> Tensor:
        """log P(votes | k, g) [N, G, C]."""
        c, g = self.votes.classes, self.groups
        return (self.matrix @ log_pi.permute(1, 3, 0, 2).reshape(-1, g * c)).view(-1, g, c)

    def rows(self, index: Tensor) -> VoteModel:
        return VoteModel(self.votes.rows(index), self.groups)


class SetModel:
    """P(S | k) = prod_j R[k, j]^S_j (1 - R[k, j])^(1 - S_j)."""

    groups = 1

    def __init__(self, candidates: Tensor):
        self.sets = candidates.double()

    def start(self) -> Tensor:
        """[N, 1, C]; the network is to say what is missing: what no set allows at first, none ever will."""
        return _rows(self.sets + 0.1)[:, None]

    def maximise(self, joint: Tensor) -> Tensor:
        """R [C, C]: row k from the samples that may be k, smoothed by one rate inside and one outside."""
        q = joint[:, 0]
        found, weight, c = q.T @ self.sets, q.sum(0)[:, None], q.shape[1]
        eye = torch.eye(c, dtype=q.dtype)
        inside = (found.diagonal().sum() + 1) / (weight.sum() + 2)
        other = ((found * (1 - eye)).sum() + 1) / (weight.sum() * (c - 1) + 2)
        return (found + SMOOTH * (inside * eye + other * (1 - eye))) / (weight + SMOOTH)

    def evidence(self, R: Tensor) -> Tensor:
        R = R.clamp(1e-9, 1 - 1e-9)
        return (self.sets @ (R / (1 - R)).log().T + (1 - R).log().sum(1))[:, None]

    def rows(self, index: Tensor) -> SetModel:
        return SetModel(self.sets[index])


def _rows(counts: Tensor) -> Tensor:
    return counts / counts.sum(-1, keepdim=True)


# ------------------------------------------------------------------ EM


@dataclass
class Fit:
    """EM come to rest."""

    joint: Tensor  # q(g, k) [N, G, C]
    parameters: Tensor  # log pi, or R
    weights: Tensor  # rho [G]
    prior: Tensor  # log, [C]; only without a network
    temperature: float = math.nan

    def terms(self, model, z: Tensor | None) -> Tensor:
        """log P(k, g, votes | x) [N, G, C]."""
        prior = self.prior if z is None else (z / self.temperature).log_softmax(1)[:, None]
        return prior + model.evidence(self.parameters) + self.weights.log()[:, None]


def expect_maximise(model, z: Tensor | None, unseen: Tensor, begin: Fit | None = None, rounds: int = ROUNDS) -> Fit:
    """unseen: bool [N]; T is chosen by the likelihood of the votes on these samples. Where there are none it is by
    all, and at least 1: of votes that it has learnt a network is too sure. With `begin`, T stays as it was."""
    joint, temperature = (begin.joint, begin.temperature) if begin else (model.start(), 1.0)
    known = bool(unseen.any())
    tells = (unseen if known else ~unseen).nonzero()[:TELLING, 0]
    if z is not None and not begin:
        joint = joint * z.softmax(1)[:, None]
        joint = joint / joint.sum((1, 2), keepdim=True)
    log_prior = None if z is None else (z / temperature).log_softmax(1)[:, None]
    for _ in range(rounds):
        share = joint.sum((0, 1))
        prior = ((share + 1) / (share + 1).sum()).log()
        weights = (joint.sum((0, 2)) + 1) / (len(joint) + model.groups)
        parameters = model.maximise(joint)
        evidence = model.evidence(parameters) + weights.log()[:, None]  # [N, G, C]
        if z is not None and not begin:
            before = temperature
            temperature = _warmer(z[tells], evidence[tells].logsumexp(1), temperature, COLDEST if known else 1.0)
            log_prior = log_prior if temperature == before else (z / temperature).log_softmax(1)[:, None]
        after = ((prior if z is None else log_prior) + evidence).flatten(1).softmax(1).view_as(joint)
        change, joint = (after - joint).abs().sum((1, 2)).mean(), after
        if change < STILL:
            break
    return Fit(joint, parameters, weights, prior, temperature if z is not None else math.nan)


def _warmer(z: Tensor, evidence: Tensor, temperature: float, lowest: float) -> float:
    """The temperature near this one under which the votes are most probable."""
    near = [min(max(temperature * step, lowest), WARMEST) for step in (1.0, 0.8, 0.96, 1.04, 1.25)]
    return max(near, key=lambda t: float(((z / t).log_softmax(1) + evidence).logsumexp(1).sum()))


# ------------------------------------------------------------------ which model


@dataclass
class Consensus:
    """What votes, or sets, and network say together."""

    q: Tensor  # [N, C]
    model: str  # the chosen one
    temperature: float  # nan without a network
    unseen: bool  # whether T is from samples that the network was not trained on
    likelihood: dict[str, float] = field(default_factory=dict)  # log, a sample, cross-validated: of each model
    matrices: Tensor | None = None  # pi [G, A, C, C]; R [C, C]
    weights: Tensor | None = None  # rho [G]


def consensus(
    votes: Votes | None,
    p: Tensor | None = None,
    unseen: Tensor | None = None,
    candidates: Tensor | None = None,
    models: tuple[str, ...] = (),
    features: Tensor | None = None,
) -> Consensus:
    """From votes, or without them from sets bool [N, C]; p [N, C]: a network's probabilities; unseen bool [N]: of
    which samples it was not trained on. models: those to choose from, by default all. features [N, D]: the
    network's, for heads that have not seen the votes they are asked about."""
    z = None if p is None else p.double().clamp_min(1e-12).log()
    n = votes.samples if votes else len(candidates)
    unseen = torch.zeros(n, dtype=torch.bool) if unseen is None else unseen
    make = _models(votes) if votes else {"sets": lambda: SetModel(candidates)}
    make = {name: make[name] for name in models or make if name in make}
    heads = Heads(features) if features is not None and n > HEADS else None
    if heads:  # from the network, and from the votes alone: the network may have lost a class
        plain = make[next((name for name in ("annotators", "shared") if name in make), next(iter(make)))]()
        starts = [expect_maximise(plain, each, unseen).joint for each in ([None] if z is None else [z, None])]
        if not votes and z is not None:
            starts[1] = named(starts[1][:, 0], p.double())[:, None]
        _, z = max((settle(plain, heads, start) for start in starts), key=lambda end: end[0])
        unseen = torch.zeros_like(unseen)
    found = {}
    if len(make) > 1:
        some = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:ENOUGH]
        part = (None if z is None else z[some], unseen[some])
        found = {name: held_out(model().rows(some), *part) for name, model in make.items()}
    name = simplest(found) if found else next(iter(make))
    model, fresh = make[name](), bool(unseen.any())
    fit = expect_maximise(model, z, unseen)
    if heads:
        fit = expect_maximise(model, settle(model, heads, fit.joint)[1], unseen)
    matrices = fit.parameters.exp() if votes else fit.parameters
    likelihood = {name: float(each.mean()) for name, each in found.items()}
    return Consensus(fit.joint.sum(1), name, fit.temperature, fresh, likelihood, matrices, fit.weights)


def named(q: Tensor, p: Tensor) -> Tensor:
    """q [N, C] with its columns in another order: sets alone find the classes, which is which the network says. The
    pair that goes together best comes first, and each column once."""
    match = (q.T @ p) / (q.sum(0)[:, None] * p.sum(0)).sqrt().clamp_min(1e-9)
    order = torch.empty(len(match), dtype=torch.long)
    for _ in range(len(match)):
        column, label = divmod(int(match.argmax()), len(match))
        order[label] = column
        match[column], match[:, label] = -1, -1
    return q[:, order]


def settle(model, heads: Heads, joint: Tensor) -> tuple[float, Tensor]:
    """By turns: heads fitted to q, then q by what they say -> how probable the votes are then (log, a sample), and
    the heads' logits."""
    nobody = torch.zeros(len(joint), dtype=torch.bool)
    for _ in range(TURNS):
        before = joint.sum(1)
        z = SLOPE * heads(before)
        fit = expect_maximise(model, z, nobody, rounds=8)
        joint = fit.joint
        if (joint.sum(1).argmax(1) != before.argmax(1)).double().mean() < SETTLED:
            break
    return float(fit.terms(model, z).flatten(1).logsumexp(1).mean()), z


def _models(votes: Votes) -> dict:
    """The simplest first."""
    shared = votes.shared()
    kinds = {"shared": lambda: VoteModel(shared), "shared, two difficulties": lambda: VoteModel(shared, 2)}
    if 1 < votes.annotators <= MOST / (2 * votes.classes**2):
        kinds["annotators"] = lambda: VoteModel(votes)
        kinds["annotators, two difficulties"] = lambda: VoteModel(votes, 2)
    return kinds


def simplest(found: dict[str, Tensor]) -> str:
    """The first that is not worse than the best by more than a standard error of their difference."""
    best = max(found.values(), key=lambda each: float(each.mean()))
    error = {name: float((best - each).std(correction=0)) / math.sqrt(len(each)) for name, each in found.items()}
    return next(name for name, each in found.items() if float((best - each).mean()) <= error[name])


def held_out(model, z: Tensor | None, unseen: Tensor) -> Tensor:
    """log P(votes) [N] of every sample, by matrices that were estimated from others."""
    n = len(unseen)
    whole = expect_maximise(model, z, unseen, rounds=20)
    found, fold = torch.zeros(n, dtype=torch.double), torch.arange(n) % FOLDS
    for k in range(FOLDS if n >= FOLDS else 0):
        inside, outside = ((fold != k).nonzero()[:, 0], (fold == k).nonzero()[:, 0])
        # from where the whole came to rest, and from there away from the samples left out
        begin = Fit(whole.joint[inside], whole.parameters, whole.weights, whole.prior, whole.temperature)
        fit = expect_maximise(model.rows(inside), None if z is None else z[inside], unseen[inside], begin, rounds=8)
        terms = fit.terms(model.rows(outside), None if z is None else z[outside])
        found[outside] = terms.flatten(1).logsumexp(1)
    return found
