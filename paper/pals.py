"""PALS (2025), which came after IRNet: labels anew in every epoch from the neighbours' sets, and training on the
surest of each class alone. Two views, no queue, no second encoder.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import models
from losses import Base

NEIGHBOURS, TEMPERATURE = 15, 0.1  # k, and of the weights exp(z_i . z_n / T)
KEPT, SMOOTHING = 0.25, 0.5  # the share of each class that is trained on; of its labels
SURE = (0.45, 0.35)  # p from which a label outside the set is allowed, in the first and the last epoch


class PALS(Base):
    """For the original sets S, unit features z and probabilities p of all samples:

    vote_i = sum over the k nearest n of exp(z_i . z_n / T) S_n; the same once more with the votes' winners in place
    of S is the posterior. The label is its largest entry in S_i, or argmax p_i where p_i is sure of it. Of each
    class the quarter with the largest posterior is trained on, mixed (Beta(1, 1)), both views alike.
    """

    views = "ws"
    mixes = True
    kept = ("labels", "chosen", "sure")

    def __init__(self, candidates: Tensor, generator: Generator | None = None, epochs: int = 1):
        super().__init__(candidates)
        self.generator, self.epochs, self.sure = generator, epochs, SURE[0]
        self.labels = candidates.int().argmax(1)
        self.chosen = torch.ones(len(candidates), dtype=torch.bool, device=candidates.device)

    def begin_epoch(self, epoch, look):
        def both(network, x):
            return torch.cat([network(x).float().softmax(1), F.normalize(models.features(network, x), dim=1)], 1)

        seen, classes = look(both), self.candidates.shape[1]
        self.sure = SURE[0] + (SURE[1] - SURE[0]) * (epoch - 1) / max(1, self.epochs - 1)
        near, similar = models.Neighbours(seen[:, classes:]).nearest(NEIGHBOURS)
        self.labels[:], posterior = relabel(near, similar, self.candidates, seen[:, :classes], self.sure)
        self.chosen[:] = surest(self.labels, posterior, classes)

    def pool(self, index):
        return index[self.chosen[index]]

    def loss(self, network, views, index):
        other = torch.randperm(len(index), generator=self.generator, device=index.device)
        share = torch.rand((), generator=self.generator, device=index.device)  # Beta(1, 1), one a batch
        y = F.one_hot(self.labels[index], self.candidates.shape[1]).float()
        target = torch.lerp(y[other], y, share)
        logits = [network(torch.lerp(view[other], view, share)).float() for view in views]
        loss = sum(F.cross_entropy(z, target, label_smoothing=SMOOTHING) for z in logits)
        return loss, logits[0].detach().softmax(1)


def relabel(near: Tensor, similar: Tensor, candidates: Tensor, p: Tensor, sure: float) -> tuple[Tensor, Tensor]:
    """The labels [N], and the posterior [N] that each has."""
    weight = (similar / TEMPERATURE).exp()[:, :, None]  # [N, k, 1]
    winners = (weight * candidates[near]).sum(1).argmax(1)
    vote = (weight * F.one_hot(winners, candidates.shape[1])[near]).sum(1)
    posterior = vote / vote.sum(1, keepdim=True)
    top, label = p.max(1)
    allowed = candidates | (F.one_hot(label, p.shape[1]).bool() & (top > sure)[:, None])
    inside, found = posterior.masked_fill(~allowed, -1.0).max(1)
    return found, inside.clamp_min(0)


def surest(labels: Tensor, posterior: Tensor, classes: int) -> Tensor:
    """bool [N]: of every class the share with the largest posterior, the smallest -log of it; at least one."""
    order = posterior.argsort(descending=True, stable=True)
    place = (
        F.one_hot(labels[order], classes).cumsum(0).gather(1, labels[order, None])[:, 0]
    )  # 1, 2, ... in its class
    room = (KEPT * torch.bincount(labels, minlength=classes)).ceil()
    return torch.zeros_like(labels, dtype=torch.bool).index_put_((order,), place <= room[labels[order]])
