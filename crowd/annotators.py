"""Who said what: annotators as columns of a table, and annotators.csv, how far each can be trusted."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_CELLS = 2**28  # of samples times annotators
COLUMNS = "annotator votes accuracy low high agreement confusion times".split()


@dataclass
class Votes:
    """Who said what of which sample: a row of `said` is sample, annotator and label, counted `times`."""

    said: Tensor  # int64 [V, 3]
    times: Tensor  # double [V]
    samples: int
    annotators: int
    classes: int

    @classmethod
    def of_counts(cls, counts: Tensor) -> Votes:
        """Counts [N, C]: nobody knows whose, so all are one annotator's."""
        sample, label = counts.nonzero(as_tuple=True)
        said = torch.stack([sample, torch.zeros_like(sample), label], 1)
        return cls(said, counts[sample, label].double(), len(counts), 1, counts.shape[1])

    @classmethod
    def of_columns(cls, columns: Tensor, who: Tensor, classes: int) -> Votes:
        """Class numbers [N, A], -1 for none; who [A]: the annotator of each column, who may have several."""
        sample, column = (columns >= 0).nonzero(as_tuple=True)
        said = torch.stack([sample, who[column], columns[sample, column]], 1)
        times = torch.ones(len(said), dtype=torch.double)
        return cls(said, times, len(columns), int(who.max()) + 1, classes)

    def shared(self) -> Votes:
        """All votes as one annotator's."""
        return Votes(self.said * torch.tensor([1, 0, 1]), self.times, self.samples, 1, self.classes)

    def rows(self, index: Tensor) -> Votes:
        """Of these samples alone, numbered anew."""
        number = torch.full((self.samples,), -1).index_put_((index,), torch.arange(len(index)))
        keep = number[self.said[:, 0]] >= 0
        said = self.said[keep]
        said = torch.cat([number[said[:, :1]], said[:, 1:]], 1)
        return Votes(said, self.times[keep], len(index), self.annotators, self.classes)

    def counts(self) -> Tensor:
        """[N, C]."""
        found = torch.zeros(self.samples, self.classes, dtype=torch.double)
        return found.index_put_((self.said[:, 0], self.said[:, 2]), self.times, accumulate=True)


def columns(heard: list[dict], number: dict[str, int]) -> tuple[Tensor | None, list[str] | None]:
    """How often (annotator, label) was heard, a dictionary a sample -> class numbers [N, A], -1 for none, and the
    columns' names: a second one of a name has second labels of one sample. None where nobody is named, or where a
    huge table would be nearly empty."""
    place: dict[tuple[str, int], int] = {}  # annotator, and which of their labels of one sample
    cells = []  # sample, column, label
    for i, votes in enumerate(heard):
        seen: dict[str, int] = {}
        for (who, label), times in votes.items():
            for _ in range(times):
                seen[who] = seen.get(who, 0) + 1
                cells.append((i, place.setdefault((who, seen[who]), len(place)), number[label]))
    if not any(who for who, _ in place) or len(heard) * len(place) > MOST_CELLS:
        return None, None
    sample, column, label = torch.tensor(cells).unbind(1)
    found = torch.full((len(heard), len(place)), -1)
    return found.index_put_((sample, column), label), [who for who, _ in place]


def people(names: list[str]) -> tuple[list[str], Tensor]:
    """Each name once, and the number of every column's."""
    number: dict[str, int] = {}
    who = [number.setdefault(name, len(number)) for name in names]
    return list(number), torch.tensor(who)


def heard(counts: Tensor | None, columns: Tensor | None, names: list[str] | None, classes: int) -> Votes | None:
    """The votes of a Dataset: by the annotators' columns where they are known, else by the counts alone."""
    if counts is None or columns is None:
        return None if counts is None else Votes.of_counts(counts)
    return Votes.of_columns(columns, people(names)[1], classes)


def wilson(share: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of n."""
    middle, width = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * width) / (1 + z * z / n) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def annotators_csv(votes: Votes, q: Tensor, names: list[str], classes: list[str]) -> str:
    """The least accurate first. accuracy: how probably a vote is right, by q [N, C], and its 95 % interval;
    agreement: how often it is for the most probable label; confusion: what they most often say for what."""
    sample, who, label = votes.said.unbind(1)
    right = torch.zeros(votes.annotators, 3, dtype=torch.double)  # votes, right, agreeing
    same = (q.argmax(1)[sample] == label).double()
    right.index_add_(0, who, votes.times[:, None] * torch.stack([torch.ones_like(same), q[sample, label], same], 1))
    found = []
    for a, (n, hits, agreed) in enumerate(right.tolist()):
        if not n:
            continue
        mine = who == a
        table = torch.zeros(votes.classes, votes.classes, dtype=torch.double)  # label, truth
        table.index_add_(0, label[mine], votes.times[mine, None] * q[sample[mine]])
        times, at = table.fill_diagonal_(0).flatten().max(0)
        said, truth = divmod(int(at), votes.classes)
        low, high = wilson(min(1.0, hits / n), n)
        numbers = [f"{value:.4f}" for value in (hits / n, low, high, agreed / n)]
        mistake = [f"{classes[said]} for {classes[truth]}", f"{float(times):.1f}"] if times >= 0.5 else ["", ""]
        found.append((hits / n, [names[a] or "(no name)", int(n), *numbers, *mistake]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(COLUMNS)
    csv.writer(text, lineterminator="\n").writerows(row for _, row in sorted(found, key=lambda pair: pair[0]))
    return text.getvalue()
