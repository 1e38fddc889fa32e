"""The paper's tables from finished runs, with its own cells beside ours (paper.json).

Each function asks a Grid for its runs and returns a function that, when they are done, gives the lines of
its Markdown.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import numpy as np

import data
import harness
import losses
from harness import InputError
from paper import complexity
from paper.grid import ETAS

PAPER = json.loads(Path(__file__).with_name("paper.json").read_text())
SIX = tuple(losses.BASES)
ROBUST = ("mae", "mse", "sce", "gce", "plcr", "pico+")
ROWS = {"irnet": "IRNet with PiCO", "supervised": "supervised learning"}
ROWS |= {"dividemix": "noisy label learning (DivideMix)"}


def title(name: str) -> str:
    return ROWS.get(name) or harness.title(name)


def summaries(folders: list[Path], key: str) -> list:
    """Of those that are finished."""
    return [json.loads(file.read_text())[key] for f in folders if (file := f / "summary.json").exists()]


def read(folders: list[Path], key: str) -> list[float]:
    """One number of the summaries, in per cent."""
    return [100 * value for value in summaries(folders, key)]


def mean(values: list[float]) -> float:
    return statistics.mean(values) if values else math.nan  # which is no higher than anything


def highest_of(values) -> float:
    return max((mean(each) for each in values if each), default=math.nan)


def same_seeds(some: list[Path], others: list[Path]) -> bool:
    """Whether two methods are finished for the same seeds: else their means are of unlike things."""
    one, two = ([(folder / "summary.json").exists() for folder in folders] for folders in (some, others))
    return one == two


def cell(values: list[float], bold: bool = False) -> str:
    if not values:
        return "-"
    text = f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
    return f"**{text}**" if bold else text


KINDS = ("best", "last")
BEST_AND_LAST = (
    "Best is the highest test accuracy of all epochs, as the paper prints it: a choice made by the test set. "
    "Last is the one after the last epoch."
)


def heading(key: str, what: str, theirs: str) -> str:
    """Whose numbers a block has, and of which kind."""
    return f"### {what}: {key}" + (f"; in brackets the paper's {theirs}, best too" if key == "best" else "") + "\n"


def beside(ours: str, theirs: float, key: str) -> str:
    """The paper prints the best alone (but for Table 4), so that nothing stands beside our last."""
    return f"{ours} ({theirs:.1f})" if key == "best" else ours


# ------------------------------------------------------------------ tables
# Each asks the grid for its runs and returns a function that, when they are done, gives the lines of its Markdown.


def settings(grid, dataset: str):
    return list(itertools.product(grid.datasets[dataset], grid.size.etas))


def table2(grid):
    """Six bases with and without IRNet."""
    asked = {
        (d, b, i, q, eta): grid.ask(d, b, i, q, eta)
        for d in grid.datasets
        for b in SIX
        for i in (False, True)
        for q, eta in settings(grid, d)
    }

    def lines():
        yield BEST_AND_LAST + "\n"
        better, total = dict.fromkeys(KINDS, 0), 0
        for d, key in itertools.product(grid.datasets, KINDS):
            yield heading(key, f"{d}", grid.beside[d])
            yield "| base | IRNet | " + " | ".join(f"q {q:g}, eta {eta:g}" for q, eta in settings(grid, d)) + " |"
            yield "| --- " * (2 + len(settings(grid, d))) + "|"
            printed = list(itertools.product(grid.datasets[d], ETAS))  # the paper's columns
            for b, irnet in itertools.product(SIX, (False, True)):
                cells = []
                for q, eta in settings(grid, d):
                    ours = {i: read(asked[d, b, i, q, eta], key) for i in (False, True)}
                    like = same_seeds(asked[d, b, True, q, eta], asked[d, b, False, q, eta])
                    wins = like and mean(ours[irnet]) > mean(ours[not irnet])
                    better[key] += irnet and wins
                    total += irnet and key == "best" and like and bool(ours[True])
                    theirs = PAPER["table2"][grid.beside[d]][b]["irnet" if irnet else "alone"]
                    theirs = theirs[printed.index((q, eta))][0]
                    cells.append(beside(cell(ours[irnet], wins), theirs, key))
                yield f"| {title(b)} | {'yes' if irnet else 'no'} | " + " | ".join(cells) + " |"
            yield ""
        counts = ", ".join(f"on {key} in {count} of {total} cells" for key, count in better.items())
        yield f"IRNet's mean accuracy is above its base's {counts}."

    return lines


def by_q(grid, table: str, rows: dict[str, dict], head: str):
    """A column a q at eta = 0.3, the best of each column marked; rows: {the paper's name: what to ask for}."""
    datasets = [d for d in grid.datasets if grid.beside[d] in PAPER[table]]
    asked = {
        (d, name, q): grid.ask(d, eta=0.3, q=q, **what)
        for d in datasets
        for name, what in rows.items()
        for q in grid.datasets[d]
    }

    def lines():
        yield BEST_AND_LAST + "\n"
        for d, key in itertools.product(datasets, KINDS):
            qs = grid.datasets[d]
            ours = {(name, q): read(asked[d, name, q], key) for name in rows for q in qs}
            highest = {q: highest_of(ours[name, q] for name in rows) for q in qs}
            yield heading(key, f"{d}, eta 0.3", grid.beside[d])
            yield f"| {head} | " + " | ".join(f"q {q:g}" for q in qs) + " |"
            yield "| --- " * (1 + len(qs)) + "|"
            for name in rows:
                theirs = PAPER[table][grid.beside[d]][name]
                cells = [
                    beside(cell(ours[name, q], mean(ours[name, q]) == highest[q]), theirs[k], key)
                    for k, q in enumerate(qs)
                ]
                yield f"| {title(name) if table == 'table3' else name} | " + " | ".join(cells) + " |"
            yield ""

    return lines


def table3(grid):
    """Noise-robust methods against IRNet with PiCO."""
    rows = {name: dict(base=name, irnet=False) for name in ROBUST} | {"irnet": dict(base="pico", irnet=True)}
    return by_q(grid, "table3", rows, "method")


def table4(grid):
    """Best and last accuracy, and the gap, with and without IRNet."""
    bases = grid.size.bases
    asked = {
        (d, q, b, i): grid.ask(d, b, i, q, 0.3)
        for d in grid.datasets
        for q in grid.datasets[d]
        for b in bases
        for i in (True, False)
    }

    def lines():
        yield "| dataset | base | q | with IRNet: best | last | gap | without: best | last | gap |"
        yield "| --- " * 9 + "|"
        for d, b in itertools.product(grid.datasets, bases):
            for k, q in enumerate(grid.datasets[d]):
                cells = []
                for irnet in (True, False):
                    best, last = PAPER["table4"][grid.beside[d]]["irnet" if irnet else "alone"][k]
                    for key, theirs in (("best", best), ("last", last), ("gap", best - last)):
                        beside = f" ({theirs:.1f})" if b == "pico" else ""
                        cells.append(cell(read(asked[d, q, b, irnet], key), key == "gap") + beside)
                yield f"| {d} | {title(b)} | {q:g} | " + " | ".join(cells) + " |"
        yield "\nIn brackets the paper's " + ", ".join(sorted({grid.beside[d] for d in grid.datasets})) + "."

    return lines


def table5(grid):
    """Extra views: their number and kind."""
    rows = {views: dict(base="pico", irnet=True) for views in ("none", "s", "w", "ss", "ws", "ww")}
    for views, what in rows.items():
        what |= {} if views == "w" else dict(views=views)
    return by_q(grid, "table5", rows, "extra views")


def table6(grid):
    """Multiply-accumulates, parameters, time and memory by the number of extra views."""

    def lines():
        yield from complexity.lines(PAPER["table6"])

    return lines


def table7(grid):
    """Swapping: the least probable candidate leaves when a label is moved in."""
    rows = {"swap": dict(base="pico", irnet=True, swap=True), "keep": dict(base="pico", irnet=True)}
    return by_q(grid, "table7", rows, "correction")


def table8(grid):
    """Learning from annotators: one label, one noisy label, a set, a noisy set."""
    path = crowd_file(grid)
    rows = {name: dict(base=name, irnet=False) for name in ("supervised", "dividemix", "pico")}
    rows["irnet"] = dict(base="pico", irnet=True)
    asked = {name: grid.ask(str(path), q=None, eta=None, **what) for name, what in rows.items()}

    def lines():
        yield BEST_AND_LAST + "\n"
        ours = {key: {name: read(folders, key) for name, folders in asked.items()} for key in KINDS}
        highest = {key: highest_of(values.values()) for key, values in ours.items()}
        yield f"Ours on {path.stem}, in brackets the paper's on RAF-DB.\n"
        yield "| method | best | last |"
        yield "| --- " * 3 + "|"
        for name in rows:
            values = {key: ours[key][name] for key in KINDS}
            cells = {key: cell(v, mean(v) == highest[key]) for key, v in values.items()}
            yield f"| {title(name)} | {cells['best']} ({PAPER['table8'][name]}) | {cells['last']} |"

    return lines


def crowd_file(grid) -> Path:
    """RAF-DB's votes where the user has them; on digits those of simulated annotators, made before the runs."""
    if grid.scale != "digits":
        path = Path(grid.data or ".") / "rafdb" / "votes.csv"
        if not path.exists():
            raise InputError(f"table8: there is no {path}; docs/own-labels.md shows how it is made of RAF-DB")
        return path
    path = grid.folder / "annotated-digits.npz"
    grid.first.append(lambda: annotate_digits(path))
    return path


def annotate_digits(path: Path) -> None:
    """Five annotators: right with probability 0.9 on 70 % of the images, with 0.3 on the others, so that all may be
    wrong."""
    if not path.exists():
        d, rng = data.load("digits"), np.random.RandomState(0)
        y = d.labels.numpy()
        skill = np.where(rng.rand(len(y), 1) < 0.7, 0.9, 0.3)
        wrong = (y[:, None] + rng.randint(1, 10, (len(y), 5))) % 10
        votes = np.where(rng.rand(len(y), 5) < skill, y[:, None], wrong)
        path.parent.mkdir(parents=True, exist_ok=True)
        images = dict(x_train=d.images[:, 0].numpy(), x_test=d.test_images[:, 0].numpy())
        np.savez(path, y_train=y, y_test=d.test_labels.numpy(), annotators=votes, **images)


def noise(grid):
    """The noise rate estimated without any true label, beside the truth."""
    if grid.preset == "released":
        raise InputError("noise: --preset released holds nothing out to estimate from")
    dataset, qs = next(iter(grid.datasets.items()))
    asked = {(q, eta): grid.ask(dataset, "pico", True, q, eta) for q in qs for eta in (0.0, *ETAS)}

    def lines():
        errors, covered = [], []
        yield "| q, eta | truly missing | estimated | 95 % intervals |"
        yield "| --- " * 4 + "|"
        for (q, eta), folders in asked.items():
            truth, found = read(folders, "noise_before"), summaries(folders, "noise_estimate")
            intervals = [(100 * each["low"], 100 * each["high"]) for each in found]
            estimated = [100 * each["eta"] for each in found]
            errors += [abs(a - b) for a, b in zip(estimated, truth, strict=True)]
            covered += [low <= y <= high for (low, high), y in zip(intervals, truth, strict=True)]
            shown = ", ".join(f"{low:.0f} to {high:.0f}" for low, high in intervals)
            yield f"| {q:g}, {eta:g} | {cell(truth)} | {cell(estimated)} | {shown} |"
        if not errors:
            return
        yield (
            f"\nOver {len(errors)} runs the mean absolute error is {mean(errors):.1f} points, the "
            f"largest {max(errors):.1f}; the interval covers the truth in {sum(covered)} of "
            f"{len(covered)}."
        )

    return lines


TABLES = dict(
    table2=table2,
    table3=table3,
    table4=table4,
    table5=table5,
    table6=table6,
    table7=table7,
    table8=table8,
    noise=noise,
)
