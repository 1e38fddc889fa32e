"""decisions.csv: what a person decided on the review page, as labels of the next run and as a check of this one.

A row a sample: file (or row, or id), label, decision. decision is accept, keep, choose or none ("none of these":
the sample is left out); a table without that column has labels alone. Other columns are passed over.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from crowd.files import bad, read_rows, rows_of
from crowd.spelling import key
from crowd.votes import Given
from harness import InputError, nearest

KINDS = ("accept", "keep", "choose", "none")


def read(path: Path, given: Given) -> tuple[dict[int, list[int]], list[bool]]:
    """Sample -> the classes decided on, none for "none of these"; and, where the page's proposal is kept beside a
    decision, whether it was right."""
    top, head, rows = read_rows(path)
    column = next((name for name in ("file", "row", "id") if name in head), None)
    if column is None or "label" not in head:
        raise bad(path, top, f"the columns must be file (or row, or id) and label, not {', '.join(head) or 'none'}")
    place = {name: i for i, name in enumerate(given.files)}
    number = {name: k for k, name in enumerate(given.classes)}
    folded = {key(name): k for k, name in enumerate(given.classes)}
    found, right = {}, []
    for line, row in rows:
        name, kind = row[column], row.get("decision", "").lower()
        name = name if name in place else os.path.normpath(name) if name else name
        if name not in place:
            raise bad(path, line, f"{row[column]!r} is no training sample of the data")
        if kind not in (*KINDS, ""):
            raise bad(path, line, nearest("decision", kind, list(KINDS)))
        labels = [label.strip() for label in row["label"].split("|")] if row["label"] else []
        if bool(labels) == (kind == "none"):
            raise bad(path, line, "a label, or the decision none; one of them")
        for label in labels:
            if label not in number and key(label) not in folded:
                raise bad(path, line, nearest("label", repr(label), given.classes))
        classes = sorted({number.get(label, folded.get(key(label))) for label in labels})
        if found.setdefault(place[name], classes) != classes:
            raise bad(path, line, f"another decision on {name} than in a row above")
        if row.get("proposed"):
            right.append(number.get(row["proposed"]) in classes)
    return found, right


def decide(given: Given, paths: list[str]) -> None:
    """Notes what was decided, and which samples are none of the classes. A later file overrules an earlier one."""
    found, right = {}, []
    for path in paths:
        more, proposals = read(Path(path), given)
        found, right = found | more, right + proposals
    if not found:
        raise InputError(f"--decisions {' '.join(paths)}: no decision in it")
    given.decided = torch.zeros(len(given.files), len(given.classes), dtype=torch.bool)
    for i, classes in found.items():
        given.decided[i, classes] = True
    gone = [i for i, classes in found.items() if not classes]
    given.decisions = dict(decisions=len(found), decisions_none=len(gone))
    if right:
        given.decisions["page_right"] = sum(right) / len(right)
    given.left_out = torch.zeros(len(given.files), dtype=torch.bool)
    given.left_out[gone] = True
    if given.left_out.all():
        raise InputError(f"--decisions {' '.join(paths)}: it leaves no sample to train on")


def score(labels_csv: str) -> dict[str, float]:
    """How often this run's own proposals, and the majority, are what was decided: from the columns of its table."""
    rows = [row for row in rows_of(labels_csv) if row.get("decided")]
    found = {}
    for name, column in (("proposals_right", "proposed"), ("majority_right", "majority")):
        said = [(row[column], row["decided"].split("|")) for row in rows if row[column]]
        found |= {name: sum(label in decided for label, decided in said) / len(said)} if said else {}
    return found
