"""labels.csv: what a run says of every training sample, the most suspicious first; annotators.csv beside it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import irnet
from crowd import noise
from crowd.annotators import Votes, annotators_csv, heard, people
from crowd.consensus import Consensus, consensus
from crowd.dataset import agreement
from crowd.further import next_csv
from data import Dataset
from harness.ranks import say

COLUMNS = "given after predicted probability margin flagged corrected_at added agreement truth split".split()
OWN = "majority consensus confidence p_majority_wrong p_missing votes".split()  # of one's own sets
DECIDED = ["decided", "proposed"]  # with decisions; proposed: what votes and network say without them
MOST_CLASSES, FEW_CLASSES = (
    2000,
    200,
)  # with a matrix of how they are taken for one another; with heads, without votes


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
    features: Sequence[Tensor] = ()  # the backbone's: [N, D], then [M, D]; only of one's own data
    out: Tensor | None = None  # [N, C], what networks say that were not trained on a sample; with --folds
    outside: Tensor | None = None  # [N], the chance to be of no class; with --open-set


def tables(d: Dataset, end: Outcome) -> dict[str, str]:
    """labels.csv; of one's own data, where they have names or columns, annotators.csv too."""
    if d.candidates is None or d.num_classes > MOST_CLASSES:
        return {"labels.csv": labels_csv(d, end)}
    sets, votes = everybody(d, end)
    unseen = torch.arange(len(end.p)) >= len(end.before)
    asked, p = end.features and (votes or d.num_classes <= FEW_CLASSES), end.p
    if end.out is not None:  # nothing is asked of a network that has seen it
        asked, p, unseen = (), torch.cat([end.out, end.p[len(end.out) :]]), torch.ones_like(unseen)
    found = consensus(votes, p, unseen, sets, features=torch.cat(end.features) if asked else None)
    if votes:
        tell(found)
    by_class = not votes and d.num_classes <= FEW_CLASSES and noise.come_together(sets)
    decided = both(d, end, "decided", d.decided) if d.decided is not None else None
    proposed, q = (found.q if votes or by_class else end.p).argmax(1), found.q
    if decided is not None:  # a decision is what the label is, whatever the rest says
        known = decided.any(1)
        q = torch.where(known[:, None], decided * q.clamp_min(1e-12), q)
        found.q = q / q.sum(1, keepdim=True)
    written = {"labels.csv": labels_csv(d, end, found, votes, decided, proposed, by_class)}
    if votes:
        names = d.sample_names + (d.scored.files if len(end.p) > len(end.before) else [])
        written["next.csv"] = next_csv(votes, found.q, names, d.class_names, decided, kind_of(names, d.features))
    if d.annotators is not None:
        names, _ = people(d.annotator_names)
        written["annotators.csv"] = annotators_csv(votes, found.q, names, d.class_names)
    return written


def kind_of(names: list[str], features: bool) -> str:
    """What the samples' names are, the head of their column."""
    return "row" if all(map(str.isdecimal, names)) else "id" if features else "file"


def tell(found: Consensus) -> None:
    kinds = {"shared": "one matrix for all annotators", "annotators": "a matrix for each annotator"}
    kind, *more = found.model.split(", ")
    source = "samples not trained on" if found.unseen else "samples that the network has seen"
    how = ", ".join([kinds[kind], *more])
    say(f"consensus of network and votes: {how}; temperature {found.temperature:.2f}, from {source}")


def both(d: Dataset, end: Outcome, name: str, ours: Tensor) -> Tensor:
    """Of the training samples, then of those set aside for scoring."""
    more = len(end.p) - len(end.before)
    return torch.cat([ours, getattr(d.scored, name)[:more]]) if more else ours


def everybody(d: Dataset, end: Outcome) -> tuple[Tensor, Votes | None]:
    """The sets, and the votes where there are any: of the training samples, then of those set aside for scoring."""
    sets = both(d, end, "candidates", end.before)
    counts, columns = (
        None if ours is None else both(d, end, name, ours)
        for name, ours in (("votes", d.votes), ("annotators", d.annotators))
    )
    return sets, heard(counts, columns, d.annotator_names, d.num_classes)


def labels_csv(
    d: Dataset,
    end: Outcome,
    found: Consensus | None = None,
    votes: Votes | None = None,
    decided: Tensor | None = None,
    proposed: Tensor | None = None,
    by_class: bool = False,
) -> str:
    """By the margin tau (Eq. 4) under the set that was given; with a consensus, by how probably the majority is
    wrong or the truth missing; what a person has decided comes last. flagged: tau <= -tau_epsilon (Eq. 10)."""
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
    own, suspicion = agreed(found, votes, given, names, by_class) if found else (None, -tau)

    def joined(row: list[bool]) -> str:
        return "|".join(name for name, inside in zip(names, row, strict=True) if inside)

    if decided is not None:
        known = decided.any(1)
        suspicion = suspicion.masked_fill(known, -math.inf)
        own = [
            [*row, joined(S), names[label]] if sure else [*row, "", ""]
            for row, S, label, sure in zip(own, decided.tolist(), proposed.tolist(), known.tolist(), strict=True)
        ]

    last = [[]] * len(end.p)
    if end.outside is not None:  # nobody looked at those set aside
        last = [[f"{value:.4f}"] for value in end.outside.tolist()] + [[""]] * more
        suspicion = suspicion + F.pad(end.outside, (0, more)) if found else suspicion

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    head = [kind_of(files, d.features), *COLUMNS]
    own_columns = (OWN if found else []) + (DECIDED if decided is not None else [])
    table.writerow(head + own_columns + (["p_outside"] if end.outside is not None else []))
    for part in suspicion.argsort(stable=True, descending=True).split(10_000):
        for i, S, new, sure, guess, margin, flagged, epoch, added, agreed_, y in zip(
            part.tolist(), *(column[part].tolist() for column in columns), strict=True
        ):
            moved = [epoch, names[added]] if epoch else ["", ""]
            known = [f"{agreed_:.3f}" if agreed_ == agreed_ else "", names[y] if y >= 0 else ""]
            values = [
                joined(S),
                joined(new),
                names[guess],
                f"{sure:.4f}",
                f"{margin:.6f}",
                "yes" if flagged else "no",
            ]
            split = "train" if i < len(end.before) else "score"
            table.writerow([files[i], *values, *moved, *known, split, *(own[i] if own else []), *last[i]])
    return text.getvalue()


def majority_of(counts: Tensor) -> Tensor:
    """[N]; among equals the first."""
    return torch.from_numpy(counts.numpy().argmax(1))


def votes_text(counts: list[int], names: list[str]) -> str:
    """The most frequent first: cat:2|dog:1."""
    return "|".join(f"{names[k]}:{-n}" for n, k in sorted((-n, k) for k, n in enumerate(counts) if n))


def agreed(
    found: Consensus, votes: Votes | None, sets: Tensor, names: list[str], by_class: bool
) -> tuple[list[list[str]], Tensor]:
    """The columns OWN of every sample, and what the table is sorted by. by_class: the labels in a set go by the
    class; where they are random, as labels q is no better than the network, only as an order."""
    q = found.q
    missing = (q * ~sets).sum(1).clamp(0, 1)
    if votes is None:
        each = zip(*(x.tolist() for x in (*reversed(q.max(1)), missing)), strict=True)
        label = lambda k, sure: [names[k], f"{sure:.4f}"] if by_class else ["", ""]  # noqa: E731
        return [["", *label(k, sure), "", f"{m:.6f}", ""] for k, sure, m in each], missing
    counts, rows = votes.counts(), []
    majority = majority_of(counts)
    wrong = (1 - q.gather(1, majority[:, None])[:, 0]).clamp(0, 1)
    numbers = (majority, *reversed(q.max(1)), wrong, missing)
    for said, most, label, sure, w, m in zip(counts.int().tolist(), *(x.tolist() for x in numbers), strict=True):
        rows.append([names[most], names[label], f"{sure:.4f}", f"{w:.6f}", f"{m:.6f}", votes_text(said, names)])
    return rows, wrong + missing
