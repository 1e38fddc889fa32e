"""A Dataset from what votes.py has read: candidate sets out of votes, and samples set aside for scoring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import data
from crowd import votes
from data import Dataset
from harness import InputError

SIZE = 32  # of images from files, and of arrays of oblong ones


def load(
    path: Path, size: int = 0, min_votes: int = 1, reliability: float = 0.8, classes: list[str] | None = None
) -> Dataset:
    """size: images are resized to size x size; 0 leaves square arrays as they are. min_votes: a label is a
    candidate from so many votes on. reliability: without a test set, samples whose most frequent label has at
    least this share of the votes are set aside for scoring, as the paper does on RAF-DB (Section 4.1). classes:
    the names of all."""
    if votes.is_table(path):
        given = votes.table(path, size or SIZE, classes)
    else:
        given = votes.arrays(path, classes)
    candidates = given.candidates
    if given.votes is not None:
        # where no label has so many votes, the most frequent ones stay
        enough = given.votes.amax(1, keepdim=True).clamp_max(min_votes)
        candidates = (given.votes >= enough) & (given.votes > 0)
    elif min_votes > 1:
        raise InputError(f"--min-votes {min_votes}: {str(path)!r} has no votes to count")
    parts = (given.x, given.truth, given.x_test, given.y_test)
    d = Dataset(path.stem, *parts, len(given.classes), (), (), candidates, given.votes, given.files, given.classes)
    d.annotators, d.annotator_names = given.annotators, given.names
    if given.x_test is None:
        set_aside(d, path, reliability)
    if d.images.is_floating_point():
        d.images, d.test_images = d.images.to("cpu"), d.test_images.to("cpu")
        std = d.images.std(0).flatten()
        d.mean, d.std = tuple(d.images.mean(0).flatten().tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
        return d
    oblong = d.images.shape[-1] != d.images.shape[-2]
    data.cut(d, size or (SIZE if oblong else None))
    d.mean, d.std = data.statistics(d.images)
    return d


def agreement(d: Dataset) -> Tensor:
    """The share [N] of the votes that the most frequent label has; of a set without votes, 1/|S|."""
    counted = d.candidates if d.votes is None else d.votes
    return counted.amax(1) / counted.sum(1)


@dataclass
class Scored:
    """What labels.csv says of the samples set aside for scoring."""

    candidates: Tensor
    agreement: Tensor
    labels: Tensor
    votes: Tensor | None
    annotators: Tensor | None
    files: list[str]
    single: bool  # one label each, which nobody confirmed


def set_aside(d: Dataset, path: Path, reliability: float) -> None:
    """Without a test set, the samples on which the annotators agree most score the network: at most a fifth, always
    the same ones. Where their truth is not known, the most frequent label stands for it."""
    if d.candidates is None:
        raise InputError(f"{str(path)!r} has neither a test set nor candidates, annotators or votes")
    share, counted = agreement(d), d.candidates if d.votes is None else d.votes
    top = counted.int().topk(2, 1).values
    clear = (top[:, 0] > top[:, 1]) | (d.labels >= 0)  # among equals nobody knows which is right
    order = torch.randperm(len(share), generator=torch.Generator().manual_seed(0))
    order = order[(share * clear)[order].argsort(descending=True, stable=True)][: max(1, len(share) // 5)]
    chosen = order[clear[order] & (share[order] >= reliability)].sort().values
    if not len(chosen) or len(chosen) == len(share):
        most = float((share * clear).max())
        fix = "lower it, or add a test set" if most > 0 else "add a test set"
        raise InputError(
            f"--reliability {reliability:g}: no sample of {str(path)!r} has one label with that share of its "
            f"votes, to score the network on (the highest is {most:.2f}): {fix}"
        )
    rest = torch.ones(len(share), dtype=torch.bool).index_fill_(0, chosen, False)
    labels = d.labels[chosen]
    single = bool((counted[chosen].sum(1) == 1).all() and (labels < 0).any())
    aside = [None if kept is None else kept[chosen] for kept in (d.votes, d.annotators)]
    d.scored = Scored(d.candidates[chosen], share[chosen], labels, *aside, votes.pick(d.files, chosen), single)
    d.test_labels = torch.where(labels < 0, counted[chosen].int().argmax(1), labels)
    d.test_images, d.images = data.Rows(d.images, chosen), data.Rows(d.images, rest.argwhere()[:, 0])
    d.labels, d.candidates = d.labels[rest], d.candidates[rest]
    d.votes, d.annotators = (None if kept is None else kept[rest] for kept in (d.votes, d.annotators))
    d.files = votes.pick(d.files, rest.argwhere()[:, 0])
