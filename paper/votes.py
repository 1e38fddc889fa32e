"""What a sample's neighbours say of it by the sets that they were given (PALS). They are not fitted to its own set,
as f(x) is, so that both together say more than f(x) alone.

    voices = votes.Voices(features, sets)         # in each epoch anew
    winner = voices.winners()                     # the neighbours' label of every sample
    winner = voices.winners(missing, index)       # of some, once their own sets are heard as well
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import models

VOTERS = 10_000  # of more samples so many are drawn: else the votes would cost as much as the steps
LEAST = 0.01  # of the neighbours, that a label stands for: one of a hundred


def neighbours_of(samples: int, classes: int) -> int:
    """Two thirds of a class, from 15 to 100: large sets need many, and beyond the class all are wrong."""
    return max(1, min(samples - 1, 100, max(15, round(samples / classes / 1.5))))


@torch.no_grad()
def shares(near: models.Neighbours, candidates: Tensor, index: Tensor | None = None) -> Tensor:
    """[B, C]: how many of a sample's nearest have a label in their sets, of 1; itself has no vote. index: the
    samples that are asked about [B], all by default."""
    k = neighbours_of(len(near.others), candidates.shape[1])
    who, _ = near.nearest(k, index)
    return torch.cat([candidates[some].sum(1) for some in who.split(1024)]) / k  # [1024, k, C] at a time


def heard(share: Tensor, own: Tensor, usual: Tensor, missing: float | None) -> Tensor:
    """[B]: the most probable label by the neighbours' shares [B, C] and the samples' own sets S [B, C].

    A label stands for as many neighbours as have it in their sets beyond what is usual for it [C]. One outside S
    needs a missing truth, which `missing` of the samples have. The truth of the others may be any label in S, that
    of these any of the C - |S| outside, so that a label outside has the odds of estimate_noise's likelihood,
    missing / (1 - missing) |S| / (C - |S|). Where nobody knows (None) the neighbours decide alone.
    """
    if missing is None:
        return share.argmax(1)
    size = own.sum(1, keepdim=True)
    odds = missing / max(1 - missing, 1e-12) * size.clamp_min(1) / (own.shape[1] - size).clamp_min(1)  # [B, 1]
    beyond = (share - usual).clamp_min(LEAST)
    return torch.where(own, beyond, odds * beyond).argmax(1)


class Voices:
    """The votes of an epoch: features [N, D], sets [N, C]."""

    def __init__(self, features: Tensor, sets: Tensor, generator: Generator | None = None):
        n = len(sets)
        drawn = torch.randperm(n, generator=generator, device=sets.device)[:VOTERS] if n > VOTERS else None
        self.near, self.sets = models.Neighbours(F.normalize(features.float(), dim=1), drawn), sets
        self.usual = sets.float().mean(0)

    def winners(self, missing: float | None = None, index: Tensor | None = None) -> Tensor:
        """The label [B] of each of the samples index [B], all by default; missing: their own sets are heard."""
        share = shares(self.near, self.sets, index)
        return heard(share, self.sets if index is None else self.sets[index], self.usual, missing)
