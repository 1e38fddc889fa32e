"""Votes in training: PRODEN and PiCO whose label weights follow P(votes | k) instead of 1[k in S].

A set keeps who was voted for, not how often nor by whom. Here the network's f_k is weighed with
prod_a pi_a[k, vote_a] wherever the base asks whether k is a candidate: 2:1 votes count as 2:1, and a label that
nobody gave may be the truth where the annotators' matrices say so. The matrices are estimated anew from the label
weights after every epoch, as Dawid and Skene do.
"""

from __future__ import annotations

import torch
from torch import Tensor

import losses
from crowd.annotators import Votes
from crowd.caution import votes_of
from crowd.consensus import MOST, VoteModel
from data import Dataset
from harness import InputError


class Likelihood:
    """P(votes | k) [N, C], each row divided by its largest."""

    def __init__(self, votes: Votes):
        many = votes.annotators > MOST / votes.classes**2
        self.model = VoteModel(votes.shared() if many else votes)

    def of(self, q: Tensor) -> Tensor:
        """By the matrices that label weights q [N, C] stand for."""
        rows = q.cpu().double()
        rows = rows / rows.sum(1, keepdim=True).clamp_min(1e-12)
        found = self.model.evidence(self.model.maximise(rows[:, None]))[:, 0]
        return (found - found.amax(1, keepdim=True)).exp().to(q)

    def start(self, like: Tensor) -> Tensor:
        return self.of(self.model.start()[:, 0].to(like))


class Follows:
    """What both bases have: `likelihood` in place of the sets, and in it the labels that IRNet has moved in."""

    def follow(self, votes: Votes, decided: Tensor | None = None) -> None:
        """decided: bool [N, C], what a person decided on."""
        self.votes, self.given = Likelihood(votes), self.candidates.clone()
        self.sure = None if decided is None else decided.any(1, keepdim=True).to(self.given.device)
        self.likelihood = self.heard(self.votes.start(self.weights))
        self.weights = losses.uniform_weights(self.likelihood)

    def heard(self, likelihood: Tensor) -> Tensor:
        """Where a person decided, that alone counts."""
        return likelihood if self.sure is None else torch.where(self.sure, self.given.to(likelihood), likelihood)

    def allowed(self, index: Tensor) -> Tensor:
        """[B, C]; a label moved in counts as much as the best."""
        moved = self.candidates[index] & ~self.given[index]
        return torch.where(moved, 1.0, self.likelihood[index])

    def end_epoch(self, epoch: int, epochs: int) -> None:
        super().end_epoch(epoch, epochs)
        self.weights /= self.weights.sum(1, keepdim=True)  # more than 1 where IRNet moved a label into a set
        self.likelihood.copy_(self.heard(self.votes.of(self.weights)))


class PRODEN(Follows, losses.PRODEN):
    """w = p P(votes | k) / sum."""

    kept = ("weights", "likelihood", "given")

    def after_step(self, network, views, index, probs):
        self.weights[index] = losses.renormalised(probs, self.allowed(index), self.weights[index])


class PiCO(Follows, losses.PiCO):
    """argmax_k f_k P(votes | k), where PiCO has argmax_{k in S} f_k."""

    kept = (*losses.PiCO.kept, "likelihood", "given")

    def loss(self, network, views, index):
        self.index = index
        return super().loss(network, views, index)

    def best(self, probs, candidates):
        return (probs * self.allowed(self.index)).argmax(1)


BASES = {"proden": PRODEN, "pico": PiCO}


def make(name: str, dataset: Dataset, candidates: Tensor, more: dict) -> losses.Base:
    """The base of this name that follows the votes; `more`: what its constructor takes."""
    if name not in BASES:
        raise InputError(f"--follow-votes: only with {' and '.join(BASES)}, not --base {name}")
    votes = votes_of(dataset)
    if votes is None:
        raise InputError(f"--follow-votes: {dataset.name} has sets, no votes to follow")
    base = BASES[name](candidates, **more)
    base.follow(votes, dataset.decided)
    return base
