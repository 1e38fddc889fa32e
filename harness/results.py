"""What a finished run says: its summary, and report.html."""

from __future__ import annotations

import math
import statistics

from harness import options, report
from harness.folder import plain


def summarise(c, rows: list[dict], e0: int | None, tau: float, noise_before: float) -> dict:
    """summary.json; accuracies are fractions."""
    moved = sum(row["corrections"] for row in rows)
    right = sum(row["corrections"] * row["correction_precision"] for row in rows if row["corrections"])
    tau = rows[e0 - 1].get("next_tau", tau) if e0 else tau  # with --tau auto the one that it began with
    tau = tau if all(row.get("known_enough", True) for row in rows) else math.inf
    looked = [row for row in rows if not math.isnan(row["test"])]  # --test-every
    best, last = max(row["test"] for row in looked), rows[-1]["test"]
    # until e0 the held-out part, that `val` is from, was not trained on
    unseen = [row for row in looked if row["epoch"] <= (e0 or math.inf)] or looked
    # with --open-set, and with --tau auto: the latest
    latest = {key: row[key] for row in rows for key in ("outside", "known") if key in row}
    same = ("dataset", "base", "q", "eta", "seed", "epochs", "arch")
    known = {name: getattr(c, name) for name in same} | latest
    return known | dict(
        irnet=not c.no_irnet,
        e0=e0,
        tau=tau,
        best=best,
        last=last,
        gap=best - last,
        val_selected=max(unseen, key=lambda row: (row["val"], row["epoch"]))["test"],
        transductive=rows[-1]["transductive"],
        noise_before=noise_before,
        noise_after=rows[-1]["noise_level"],
        noise_estimate=next((row["noise_estimate"] for row in rows if "noise_estimate" in row), None),
        corrections=moved,
        correction_precision=right / moved if moved else math.nan,
        images_per_second=statistics.median(row["images_per_second"] for row in rows),
        seconds=sum(row["seconds"] for row in rows),
        cpu_seconds=sum(row.get("cpu_seconds", math.nan) for row in rows),  # of this process
    )


def report_page(
    c, name: str, rows: list[dict], summary: dict, histograms: list[dict], dataset, own: str = ""
) -> str:
    """report.html of the run; own: HTML about one's own labels."""
    margins = histograms
    if not dataset.truth_known:  # nobody knows which are noisy
        keys = ("epoch", "low", "high")
        both = [[a + b for a, b in zip(one["clean"], one["noisy"], strict=True)] for one in histograms]
        margins = [{k: one[k] for k in keys} | {"all": all_} for one, all_ in zip(histograms, both, strict=True)]
    more = dict(changed=options.changed(c, dataset.features), margins=margins, score=dataset.score, more=own)
    return report.page(name, [plain(row) for row in rows], plain(summary), **more)
