"""A Dataset from what votes.py has read: candidate sets out of votes, and samples set aside for scoring."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import data
from crowd import files, votes
from crowd.decisions import decide
from data import Dataset
from harness import InputError, is_table

SIZE = 32  # of images from files, and of arrays of oblong ones


def load(
    path: Path,
    size: int = 0,
    min_votes: int = 1,
    reliability: float = 0.8,
    classes: list[str] | None = None,
    unsure: Sequence[str] = (),
    decisions: Sequence[str] = (),
) -> Dataset:
    """size: images are resized to size x size; 0 leaves square arrays as they are. min_votes: a label is a
    candidate from so many votes on. reliability: without a test set, samples whose most frequent label has at
    least this share of the votes are set aside for scoring, as the paper does on RAF-DB (Section 4.1). classes:
    the names of all. unsure: labels that mean nothing. decisions: files of a person's, see decisions.py."""
    if is_table(path) or files.is_class_folder(path):
        given = (files.table if is_table(path) else files.folder)(path, size or SIZE, classes, unsure or ())
    elif unsure:
        raise InputError(f"--unsure: only with tables and folders; in {str(path)!r} such votes are -1")
    else:
        given = votes.arrays(path, classes)
    if decisions:
        decide(given, list(decisions))
    candidates = given.candidates
    if given.votes is not None:
        # where no label has so many votes, the most frequent ones stay
        enough = given.votes.amax(1, keepdim=True).clamp_max(min_votes)
        candidates = (given.votes >= enough) & (given.votes > 0)
    elif min_votes > 1:
        raise InputError(f"--min-votes {min_votes}: {str(path)!r} has no votes to count")
    if decisions and candidates is None:
        raise InputError(f"--decisions: {str(path)!r} has no labels that a person could have looked at")
    parts = (given.x, given.truth, given.x_test, given.y_test)
    d = Dataset(path.stem, *parts, len(given.classes), (), (), candidates, given.votes, given.files, given.classes)
    d.annotators, d.annotator_names, d.notes = given.annotators, given.names, given.notes
    d.decided, d.decisions, d.voted_tests = given.decided, given.decisions, given.voted_tests
    every = list(given.files)
    if given.x_test is None:
        set_aside(d, path, reliability)
    if d.decided is not None:  # only now, so that the same samples are set aside as without
        apply(d, set(votes.pick(every, given.left_out.nonzero()[:, 0])))
    if d.images.is_floating_point():
        d.images, d.test_images = d.images.to("cpu"), d.test_images.to("cpu")
        std = d.images.std(0).flatten()
        d.mean, d.std = tuple(d.images.mean(0).flatten().tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
        return d
    oblong = d.images.shape[-1] != d.images.shape[-2]
    data.cut(d, size or (SIZE if oblong else None))
    d.mean, d.std = data.statistics(d.images)
    return d


def apply(d: Dataset, gone: set[str]) -> None:
    """Decisions: sets that a person decided on, and samples left out."""
    for part, x in ((d, "images"), *([(d.scored, "test_images")] if d.scored else [])):
        part.candidates = torch.where(part.decided.any(1, keepdim=True), part.decided, part.candidates)
        rest = torch.tensor([i for i, name in enumerate(part.files) if name not in gone], dtype=torch.long)
        for name in ("candidates", "labels", "votes", "annotators", "decided", "agreement"):
            if getattr(part, name, None) is not None:
                setattr(part, name, getattr(part, name)[rest])
        part.files = votes.pick(part.files, rest)
        setattr(d, x, data.Rows(getattr(d, x), rest))
        if part is not d:
            d.test_labels = d.test_labels[rest]
        if not len(rest):
            raise InputError("--decisions: it leaves no sample to train on, or none to score on")


def has_features(path: Path) -> bool:
    """Whether the samples are features rather than images."""
    return files.table_of_features(path) if is_table(path) else len(votes.shape_of(path)) == 2


def count(path: Path) -> int:
    """How many samples there are to train on and to set aside; 0 where it cannot be read, which `load` will say."""
    with contextlib.suppress(InputError, OSError):
        if is_table(path) or files.is_class_folder(path):
            return files.count(path)
        return next(iter(votes.shape_of(path)), 0)
    return 0


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
    decided: Tensor | None
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
    if d.decided is not None:  # what a person decided is the truth here
        one = (d.decided[chosen].sum(1) == 1) & (labels < 0)
        labels = torch.where(one, d.decided[chosen].int().argmax(1), labels)
    single = bool((counted[chosen].sum(1) == 1).all() and (labels < 0).any())
    aside = [None if kept is None else kept[chosen] for kept in (d.votes, d.annotators, d.decided)]
    d.scored = Scored(d.candidates[chosen], share[chosen], labels, *aside, votes.pick(d.files, chosen), single)
    d.test_labels = torch.where(labels < 0, counted[chosen].int().argmax(1), labels)
    d.test_images, d.images = data.Rows(d.images, chosen), data.Rows(d.images, rest.argwhere()[:, 0])
    d.labels, d.candidates = d.labels[rest], d.candidates[rest]
    kept = (d.votes, d.annotators, d.decided)
    d.votes, d.annotators, d.decided = (None if each is None else each[rest] for each in kept)
    d.files = votes.pick(d.files, rest.argwhere()[:, 0])
