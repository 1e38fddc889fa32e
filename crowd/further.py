"""next.csv: which samples are worth another vote, the most worth first."""

from __future__ import annotations

import csv
import io

import torch
from torch import Tensor

from crowd.annotators import Votes

COLUMNS = "votes consensus confidence gain".split()
SMOOTH, LIKELY = 5.0, 20  # pseudo-votes a class; labels of a sample that are looked at
LEAST = 5e-7  # a smaller gain is none


def confusion(votes: Votes, q: Tensor) -> Tensor:
    """[C, C]: how often a vote says l where the truth is k, of all annotators; smoothed by one accuracy."""
    sample, _, label = votes.said.unbind(1)
    found = torch.zeros(votes.classes, votes.classes, dtype=torch.double)  # l, k
    found = found.index_add_(0, label, votes.times[:, None] * q[sample]).T
    rate = (found.diagonal().sum() + 1) / (found.sum() + 2)
    eye = torch.eye(votes.classes, dtype=torch.double)
    found = found + SMOOTH * (rate * eye + (1 - rate) / max(1, votes.classes - 1) * (1 - eye))
    return found / found.sum(1, keepdim=True)


def gain(q: Tensor, pi: Tensor) -> Tensor:
    """[N]: by how much one more vote is expected to raise the chance that the most probable label is right,
    sum_l max_k q_k pi[k, l] - max_k q_k: nothing where no vote could change the label."""
    found = []
    for part in q.split(max(1, 20_000_000 // (LIKELY * len(pi)))):
        top = part.topk(min(LIKELY, part.shape[1]), 1)
        after = (top.values[:, :, None] * pi[top.indices]).amax(1).sum(1)  # [n, k, l] -> [n]
        found.append(after - top.values[:, 0])
    return torch.cat(found).clamp_min(0)


def next_csv(
    votes: Votes, q: Tensor, names: list[str], classes: list[str], decided: Tensor | None = None, key: str = "file"
) -> str:
    """Only samples that another vote may change, and that nobody has decided on; key: what the names are."""
    worth, counts = gain(q, confusion(votes, q)), votes.counts().sum(1)
    worth = worth if decided is None else worth.masked_fill(decided.any(1), 0)
    sure, label = q.max(1)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([key, *COLUMNS])
    for i in worth.argsort(descending=True, stable=True).tolist():
        if worth[i] < LEAST:
            break
        said = [int(counts[i]), classes[int(label[i])], f"{float(sure[i]):.4f}", f"{float(worth[i]):.6f}"]
        table.writerow([names[i], *said])
    return text.getvalue()
