"""What does not belong: samples whose truth is none of the classes (`--open-set`).

The network is asked through a sample's neighbours, not by the sample itself, to which it has been fitted: the
entropy of their mean prediction is the score. What it is worth is read from the sample's own set, which had no part
in it. Where the neighbours know the class, their label is in the set as often as anywhere; where they know nothing,
as often as a label drawn at random. p_outside says how far down that way the sets of such a score are.

So p_outside is the chance that what the network knows does not concern the sample. That is so of a sample of no
class, and of one whose class the network has not learnt yet: the sets do not tell these apart. Hence no rate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import models
from harness import InputError

NEIGHBOURS = 15
SURE = 0.5  # p_outside from which a sample counts as outside


@torch.no_grad()
def neighbours_say(features: Tensor, p: Tensor) -> Tensor:
    """[N, C]: the mean prediction of a sample's nearest others by cosine."""
    near, _ = models.Neighbours(F.normalize(features.float(), dim=1)).nearest(NEIGHBOURS)
    return torch.cat([p[some].mean(1) for some in near.split(1024)])  # [1024, k, C] at a time


def score(said: Tensor) -> Tensor:
    """[N]: its entropy, of 1."""
    return -torch.xlogy(said, said).sum(1) / torch.tensor(float(said.shape[1])).log()


def falling(y: list[float]) -> list[float]:
    """The falling sequence nearest to y in squares: neighbours that rise are put together."""
    blocks: list[tuple[float, int]] = []  # mean, length
    for value in y:
        mean, length = value, 1
        while blocks and blocks[-1][0] <= mean:
            before, many = blocks.pop()
            mean, length = (before * many + mean * length) / (many + length), many + length
        blocks.append((mean, length))
    return [mean for mean, length in blocks for _ in range(length)]


@torch.no_grad()
def outside(p: Tensor, features: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """p_outside [N] and the score [N] of all training samples; p [N, C]: the classifier's probabilities, candidates
    [N, C]: the sets as they were given."""
    said = neighbours_say(features, p.float())
    s = score(said)
    order = s.argsort(stable=True)
    inside = candidates.gather(1, said.argmax(1, keepdim=True))[order, 0].float()  # whether their label is in S
    known, chance = float(inside[: max(1, len(s) // 2)].mean()), float(candidates.float().mean())
    if known <= chance:
        return torch.zeros_like(s), s  # nothing is known of anybody
    fitted = torch.tensor(falling(inside.tolist()), device=s.device)
    return torch.zeros_like(s).index_put_((order,), ((known - fitted) / (known - chance)).clamp(0, 1)), s


# ------------------------------------------------------------------ in a run


def due(samples, epoch: int, e0: int | None, epochs: int) -> bool:
    """Whether to look for them after this epoch: at e0, about ten times more, and at the end. At e0 many are hard
    samples of a class: what a better network knows comes back. (Strangers that are trained on are fitted to their
    sets in time; most of what is left is right.)"""
    if samples.p_outside is None:
        return e0 is not None
    return (epoch - e0) % max(1, epochs // 10) == 0 or epoch == epochs


def look(loop, learner, samples, row: dict, epochs: int) -> None:
    """Notes p_outside of all training samples where it is due, and in the row how many count as outside. loop:
    train.py, whose functions these are."""
    if due(samples, row["epoch"], row["e0"], epochs):
        p, features = (function(learner, samples.images) for function in (loop.logits_of, loop.features_of))
        samples.p_outside, _ = outside(p.softmax(1), features.to(p.device), samples.before.to(p.device))
        row["outside"] = int((samples.p_outside >= SURE).sum())


def settle(samples, refine, pool: Tensor, drop: bool, batch_size: int) -> Tensor:
    """Nothing is moved into the sets of those outside, nor where a person has decided -> who is trained on."""
    found, decided = samples.p_outside >= SURE, samples.dataset.decided
    refine.fixed = found if decided is None else found | decided.any(1).to(found.device)
    left = pool[~found[pool]] if drop else pool
    if len(left) < batch_size:
        why = f"--open-set drop leaves {len(left)} samples, less than a batch of {batch_size}"
        raise InputError(f"{why}: lower --batch-size, or take --open-set keep")
    return left
