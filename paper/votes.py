"""What a sample's neighbours say of it by the sets that they were given (PALS). They are not fitted to its own set,
as f(x) is, so that both together say more than f(x) alone.

    share = votes.shares(features, sets)             # how many of the neighbours have each label as a candidate
    winner = votes.heard(share, sets, missing)       # the label, once the sample's own set is heard as well
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import models

WORTH = 2  # a missing label that stays away costs about as much as so many wrong ones that join
LEAST = 0.01  # of the neighbours, that a label stands for: one of a hundred


def neighbours_of(samples: int, classes: int) -> int:
    """Two thirds of a class, from 15 to 100: large sets need many, and beyond the class all are wrong."""
    return max(1, min(samples - 1, 100, max(15, round(samples / classes / 1.5))))


@torch.no_grad()
def shares(features: Tensor, candidates: Tensor, voters: Tensor | None = None) -> Tensor:
    """[N, C]: how many of a sample's nearest others by cosine have a label in their sets, of 1; itself has no vote.
    voters: the samples that have one, all by default."""
    k = neighbours_of(len(candidates) if voters is None else len(voters), candidates.shape[1])
    near, _ = models.neighbours(F.normalize(features.float(), dim=1), k, voters)
    return torch.cat([candidates[some].sum(1) for some in near.split(1024)]) / k  # [1024, k, C] at a time


def heard(share: Tensor, candidates: Tensor, missing: float) -> Tensor:
    """[N]: the most probable label by the neighbours' shares [N, C] and the sample's own set [N, C].

    A label stands for as many neighbours as have it in their sets beyond what is usual for it. One outside the set
    needs a missing truth, which at the most `missing` of the samples have: its odds are missing / (1 - missing),
    times WORTH. Once they are even, where a third or more may be missing, the neighbours decide alone.
    """
    odds = WORTH * missing / max(1 - missing, 1e-12)
    if odds >= 1:
        return share.argmax(1)
    beyond = (share - candidates.float().mean(0)).clamp_min(LEAST)
    return torch.where(candidates, beyond, odds * beyond).argmax(1)
