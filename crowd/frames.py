"""pandas in and out: crowd.read(frame) and crowd.consensus(frame). pandas is not imported: a frame brings its own.

`crowd.consensus` is this function; the module behind it is reached by `from crowd.consensus import ...`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from crowd.annotators import Votes, people
from crowd.consensus import consensus as of_votes
from crowd.further import confusion, gain
from crowd.labels import majority_of, votes_text
from crowd.spelling import in_order, key, one_spelling
from harness import InputError

SAMPLE = ("sample", "file", "id", "row", "task", "image")
WHO = ("annotator", "worker", "user")


def read(frame, unsure: Sequence[str] = (), classes: list[str] | None = None):
    """Votes as a frame with the columns sample, annotator, label, a row a vote: labels spelt in one way, the unsure
    and the empty ones left out. Takes such a frame (a column of SAMPLE, label, perhaps one of WHO), or one with a
    row a sample, its name in the index, and a column an annotator."""
    lower = {str(name).lower(): name for name in frame.columns}
    sample = next((lower[name] for name in SAMPLE if name in lower), None)
    if "label" in lower:
        if sample is None:
            raise InputError(f"a frame with label needs a column of samples: {', '.join(SAMPLE)}")
        who = next((lower[name] for name in WHO if name in lower), None)
        names = [""] * len(frame) if who is None else frame[who].tolist()
        there = frame[lower["label"]].notna().tolist()
        cells = list(zip(frame[sample].tolist(), names, frame[lower["label"]].tolist(), there, strict=True))
    else:
        wide = frame if sample is None else frame.set_index(sample)
        cells = [
            (name, who, label, there)
            for name, row, said in zip(
                wide.index.tolist(), wide.to_numpy().tolist(), wide.notna().to_numpy().tolist(), strict=True
            )
            for who, label, there in zip(wide.columns.tolist(), row, said, strict=True)
        ]
    cells = [(name, str(who), as_text(label)) for name, who, label, there in cells if there]
    nothing = {key(name) for name in unsure}
    called, _ = one_spelling(Counter(label for *_, label in cells if label), classes)
    cells = [(name, who, called[label]) for name, who, label in cells if label and key(label) not in nothing]
    if not cells:
        raise InputError("the frame has no votes")
    return type(frame)(cells, columns=["sample", "annotator", "label"])


def as_text(label) -> str:
    """Whole numbers without a point: columns with gaps are of floats in pandas."""
    return str(int(label) if isinstance(label, float) and label.is_integer() else label).strip()


def consensus(frame, probabilities=None, unsure: Sequence[str] = (), classes: list[str] | None = None):
    """A row a sample, by its name: majority, consensus, confidence, p_majority_wrong, p_missing, gain (of another
    vote) and votes. probabilities: a frame of a network's, out of sample: the samples' names in the index, a
    column a class. The annotators' accuracies are in .attrs["annotators"], the model in .attrs["model"]."""
    tidy = read(frame, unsure, classes)
    known = classes or (None if probabilities is None else [str(name) for name in probabilities.columns])
    labels = known or in_order(tidy["label"])
    number = {name: k for k, name in enumerate(labels)}
    strange = next((label for label in tidy["label"] if label not in number), None)
    if strange is not None or len(labels) < 2:
        raise InputError(f"{strange!r} is not among the classes" if strange else "there must be two classes")
    names, rows = people(tidy["sample"].tolist())
    who, columns = people(tidy["annotator"].tolist())
    said = torch.stack([rows, columns, torch.tensor([number[label] for label in tidy["label"]])], 1)
    said, times = said.unique(dim=0, return_counts=True)
    if who != [""]:  # the same vote of a person twice is one
        times = times.clamp_max(1)
    votes = Votes(said, times.double(), len(names), len(who), len(labels))
    p = None
    if probabilities is not None:
        missing = [name for name in names if name not in probabilities.index]
        if missing:
            raise InputError(f"there are no probabilities of {missing[0]!r}")
        p = torch.tensor(probabilities.loc[names].to_numpy().astype("float64"))
    unseen = None if p is None else torch.ones(len(names), dtype=torch.bool)
    found = of_votes(votes, p, unseen)
    q, counts = found.q, votes.counts()
    most, sets = majority_of(counts), counts > 0
    sure, label = q.max(1)
    table = {
        "majority": [labels[k] for k in most.tolist()],
        "consensus": [labels[k] for k in label.tolist()],
        "confidence": sure.tolist(),
        "p_majority_wrong": (1 - q.gather(1, most[:, None])[:, 0]).clamp(0, 1).tolist(),
        "p_missing": (q * ~sets).sum(1).clamp(0, 1).tolist(),
        "gain": gain(q, confusion(votes, q)).tolist(),
        "votes": [votes_text(row, labels) for row in counts.int().tolist()],
    }
    result = type(frame)(table, index=names)
    sample, person, given = votes.said.unbind(1)
    right = torch.zeros(len(who), dtype=torch.double).index_add_(0, person, votes.times * q[sample, given])
    total = torch.zeros(len(who), dtype=torch.double).index_add_(0, person, votes.times)
    result.attrs |= dict(model=found.model, annotators=dict(zip(who, (right / total).tolist(), strict=True)))
    return result
