"""labels.csv: what a run says of every training sample, the most suspicious first."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import irnet
from crowd.dataset import agreement
from data import Dataset

COLUMNS = "given after predicted probability margin flagged corrected_at added agreement truth split".split()


@dataclass
class Outcome:
    """What a run leaves of every training sample, on the host."""

    before: Tensor  # bool [N, C], the sets as they were given
    after: Tensor  # bool [N, C]
    corrected_at: Tensor  # [N], the epoch of the latest correction, or 0
    corrected_to: Tensor  # [N], the label that it moved in
    p: Tensor  # [N + M, C], the classifier's probabilities; the M samples set aside for scoring come last
    f: Tensor  # [N + M, C], the f of Eq. 4
    tau: float  # tau_epsilon of Eq. 10


def labels_csv(d: Dataset, end: Outcome) -> str:
    """By the margin tau (Eq. 4) under the set that was given. flagged: tau <= -tau_epsilon (Eq. 10) under it."""
    aside, given, after, truth, files = d.scored, end.before, end.after, d.labels, d.sample_names
    more = len(end.p) - len(given)
    if more:
        sets = aside.candidates[:more]
        given, after, truth = (
            torch.cat(pair) for pair in ((given, sets), (after, sets), (truth, aside.labels[:more]))
        )
        files = files + aside.files[:more]
    share = torch.full((len(end.p),), math.nan)
    if d.votes is not None:
        share = torch.cat([agreement(d), aside.agreement[:more]]) if more else agreement(d)
    at, to = (F.pad(t, (0, more)) for t in (end.corrected_at, end.corrected_to))
    tau = irnet.margin(end.f, given)
    columns = (given, after, *end.p.max(1), tau, tau <= -end.tau, at, to, share, truth)
    names = d.class_names

    def joined(row: list[bool]) -> str:
        return "|".join(name for name, inside in zip(names, row, strict=True) if inside)

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["row" if all(map(str.isdecimal, files)) else "file", *COLUMNS])
    for part in tau.argsort(stable=True).split(10_000):
        for i, S, new, sure, guess, margin, flagged, epoch, added, agreed, y in zip(
            part.tolist(), *(column[part].tolist() for column in columns), strict=True
        ):
            moved = [epoch, names[added]] if epoch else ["", ""]
            known = [f"{agreed:.3f}" if agreed == agreed else "", names[y] if y >= 0 else ""]
            values = [
                joined(S),
                joined(new),
                names[guess],
                f"{sure:.4f}",
                f"{margin:.6f}",
                "yes" if flagged else "no",
            ]
            table.writerow([files[i], *values, *moved, *known, "train" if i < len(end.before) else "score"])
    return text.getvalue()
