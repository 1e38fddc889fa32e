"""What networks say of samples that they were not trained on: one a part, trained on the others (`--folds K`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from data import Dataset
from harness.ranks import say, stream


def cross_fit(loop, c, dataset: Dataset, after_step: Callable[[int, int], None]) -> Tensor:
    """[N, C]. loop: train.py, whose functions these are. Each network is trained until its e0, without correction;
    its part, held out, finds e0 and the epoch that it is asked in."""
    n = len(dataset.images)
    part = torch.randperm(n, generator=torch.Generator().manual_seed(stream(c.seed, 3))) % c.folds
    found = torch.zeros(n, dataset.num_classes)
    with torch.random.fork_rng(devices=[]):
        for k in range(c.folds):
            learner, samples = loop.prepare(c, dataset)
            mine, others = ((part == k).nonzero()[:, 0], (part != k).nonzero()[:, 0])
            samples.held_out, samples.pool = mine.to(learner.device), others.to(learner.device)
            best = -1.0
            for epoch in range(1, c.epochs + 1):
                loop.train_epoch(learner, samples, epoch, c.epochs, c.lr, False, after_step)
                logits = loop.logits_of(learner, samples.held_out_images())
                score = loop.validation_score(logits, samples.candidates[samples.held_out])
                if score >= best:
                    best, found[mine] = score, logits.softmax(1).cpu()
                if learner.refine.end_epoch(score):
                    break
            inside = f"{100 * best:.1f} % predicted inside the sets"
            say(f"part {k + 1} of {c.folds}: {epoch} epochs on the others, {inside}")
    return found
