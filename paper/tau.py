"""tau without a knob (`--tau auto`), which the paper leaves to the future. In two lines beside the plug-in's:

    eta, temperature, (low, high) = irnet.estimate_noise(logits, sets)    # at e0, of the held-out samples
    refine.tau = retuned(refine, margins, high)                           # after each epoch from e0 on

The sets of the held-out samples say how many true labels may be missing at the most, and labels are moved in until
as many samples are corrected, those of the smallest margins first.
"""

from __future__ import annotations

from torch import Tensor

from irnet import INF, IRNet


def left(margins: Tensor, missing: float) -> float:
    """Of these margins [B] the smallest pass Eq. 10, as many as the share of true labels that is still missing, and
    none above 0, where a candidate is more probable. inf: none is missing."""
    count = min(round(missing * len(margins)), len(margins))
    return min(1.0, max(0.0, -float(margins.float().kthvalue(count).values))) if count > 0 else INF


def retuned(refine: IRNet, margins: Tensor, missing: float | None) -> float:
    """The tau of the next epoch, after one with these margins [B]. missing, of 1: at the most so many samples lack
    their truth, None: nobody knows. Once inf, always inf: all are corrected, or it is forbidden."""
    if missing is None or refine.tau == INF:
        return refine.tau
    return left(margins, missing - float((refine.corrected_at > 0).float().mean()))


def after_epoch(refine: IRNet, rows: list[dict], margins: Tensor) -> None:
    """In a run, from e0 on: sets the tau of the next epoch, and notes it in the last of the rows."""
    missing = next(row["noise_estimate"]["high"] for row in rows if "noise_estimate" in row)
    refine.tau = rows[-1]["next_tau"] = retuned(refine, margins, missing)
