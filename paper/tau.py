"""tau without a knob (`--tau auto`), which the paper leaves to the future. In three lines beside the plug-in's:

    eta, temperature, (low, high) = irnet.estimate_noise(logits, sets)    # at e0, of the held-out samples
    expected = irnet.expected_accuracy(logits, temperature)
    refine.tau = retuned(refine, margins, (low, high), expected)          # after each epoch from e0 on

How many: the sets of the held-out samples say how many true labels may be missing at the most, and labels are moved
in until as many samples are corrected, those of the smallest margins first. Which: where neighbours vote
(paper/plus.py) and wrong candidates came by chance, a missing truth must be more probable than one in the set.
Whether at all: they and the network must know something at e0.
"""

from __future__ import annotations

import math

from torch import Tensor

from harness import ranks
from irnet import INF, IRNet

KNOWN = 0.6  # of the samples


def left(margins: Tensor, missing: float) -> float:
    """Of these margins [B] the smallest pass Eq. 10, as many as the share of true labels that is still missing, and
    none above 0, where a candidate is more probable. inf: none is missing."""
    count = min(round(missing * len(margins)), len(margins))
    return min(1.0, max(0.0, -float(margins.float().kthvalue(count).values))) if count > 0 else INF


def retuned(
    refine: IRNet,
    margins: Tensor,
    missing: tuple[float, float],
    expected: float | None = None,
    by_chance: bool = True,
) -> float:
    """The tau of the next epoch, after one with these margins [B]. missing, of 1: the interval of how many samples
    lack their truth; nan or None: nobody knows. Once inf, always inf: all are corrected, or it is forbidden.
    expected: the accuracy that the network expects of itself at e0, for `guarded`. by_chance: whether wrong
    candidates came about by chance; else the odds of a label outside mean nothing: the neighbours decide alone."""
    low, high = missing
    if refine.tau == INF or high is None or math.isnan(high):
        return refine.tau
    refine.missing = (low + high) / 2 if by_chance else None  # for the neighbours' votes
    refine.expected = expected  # for whether to ask for them
    return left(margins, high - float((refine.corrected_at > 0).float().mean()))


def after_epoch(refine: IRNet, rows: list[dict], margins: Tensor) -> None:
    """In a run, from e0 on: sets the tau of the next epoch, and notes it in the last of the rows."""
    at_e0 = next(row for row in rows if "noise_estimate" in row)
    estimate, expected = at_e0["noise_estimate"], at_e0.get("expected")
    by_chance = "model" not in estimate  # a dataset with a name: its sets were made so
    if (
        estimate.get("model") == "random"
    ):  # the noise report's of one's own; it does not look where classes are many
        by_chance = estimate["fits"] and estimate.get("together") is not None
    missing = estimate["low"], estimate["high"]
    refine.tau = rows[-1]["next_tau"] = retuned(refine, margins, missing, expected, by_chance)


def guarded(refine, winner: Tensor, f: Tensor) -> dict:
    """Forbids all moves of a run where too little is known, by two guesses of how many samples the network is right
    about: on how many f [N, C] and the neighbours' winners [N] say the same, and how many of the held-out ones it
    expects to be right about. Their mean must reach KNOWN, or the first alone where nobody gave the second. Asked
    at e0; later f and the neighbours are fitted to the same sets. -> notes for the epoch's row.
    """
    agreed = float((winner == f.argmax(1)).float().mean())
    guess = agreed if refine.expected is None else (agreed + refine.expected) / 2
    known = ranks.from_first(lambda: guess)  # one answer for all
    refine.tau = refine.tau if known >= KNOWN else INF
    return dict(known=known, known_enough=known >= KNOWN)
