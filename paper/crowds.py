"""What do votes become? Made-up annotators on digits, from their votes to labels.csv: `python -m paper crowds`

A cell is a crowd and a draw of it, of known truth, and a train.py run on its votes as on anyone's: how many labels
of `majority`, `predicted` and `consensus` are right, the test accuracy, and by how much `annotators.csv` is wrong
about any annotator at most. Runs share the folder <--out>/crowds; finished ones are not repeated.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path

import numpy as np

import data
from harness import InputError, Parser
from harness.options import configure
from paper import battery
from paper.grid import Grid

FEW = 600  # images of the crowd with a spammer
COLUMNS = ("majority", "predicted", "consensus")


def four_classes(y: np.ndarray, draw: int) -> np.ndarray:
    """Three annotators; four of the classes are hard, and each annotator mistakes them for others of their own."""
    rng = np.random.RandomState(1000 * draw + 11)
    said = np.where(rng.rand(len(y), 3) < 0.97, y[:, None], rng.randint(0, 10, (len(y), 3)))
    for k in rng.permutation(10)[:4]:
        for a in range(3):
            chance = np.full(10, 0.15 / 8)
            chance[k], chance[rng.choice(np.delete(np.arange(10), k))] = 0.35, 0.5
            said[y == k, a] = rng.choice(10, (y == k).sum(), p=chance)
    return said


def hard_samples(y: np.ndarray, draw: int) -> np.ndarray:
    """Three annotators who are seldom right on some of the images, whatever their class."""
    return battery.hard_and_easy(y, 10, 0.13, 1000 * draw + 11)


def spammer(y: np.ndarray, draw: int) -> np.ndarray:
    """Five annotators, the last of whom says anything."""
    rng = np.random.RandomState(1000 * draw + 11)
    right = rng.rand(len(y), 5) < (0.9, 0.85, 0.8, 0.75, 0.0)
    return np.where(right, y[:, None], rng.randint(0, 10, (len(y), 5)))


CROWDS = {"four-classes": four_classes, "hard-samples": hard_samples, "spammer": spammer}


def write(path: Path, crowd: str, draw: int) -> None:
    arrays = battery.arrays_of(data.load("digits"))
    if crowd == "spammer":
        arrays |= {name: arrays[name][:FEW] for name in ("x_train", "y_train")}
    np.savez(path, annotators=CROWDS[crowd](arrays["y_train"], draw), **arrays)


def measured(folder: Path, votes: Path) -> dict | None:
    """Shares of 1 of one finished run."""
    if not Grid.finished(folder):
        return None
    rows = list(csv.DictReader((folder / "labels.csv").open(encoding="utf-8")))
    found = {name: statistics.mean(row[name] == row["truth"] for row in rows) for name in COLUMNS}
    with np.load(votes) as file:
        truly = (file["annotators"] == file["y_train"][:, None]).mean(0)
    people = csv.DictReader((folder / "annotators.csv").open(encoding="utf-8"))
    found["error"] = max(abs(float(row["accuracy"]) - truly[int(row["annotator"])]) for row in people)
    found["missing"] = statistics.mean(row["truth"] not in row["given"].split("|") for row in rows)
    return found | dict(test=json.loads((folder / "summary.json").read_text())["last"])


def table(results: dict[str, list[dict]]):
    """Markdown: a row a crowd, a number a draw."""
    names = dict(missing="missing", majority="`majority`", predicted="`predicted`", consensus="`consensus`",
                 test="test", error="annotators, largest error")  # fmt: skip
    yield f"| crowd | {' | '.join(names.values())} |"
    yield "| --- " * (len(names) + 1) + "|"
    for crowd, cells in results.items():
        if cells:
            yield f"| {crowd} | {' | '.join(', '.join(f'{100 * c[name]:.1f}' for c in cells) for name in names)} |"


def main(argv: list[str]) -> int:
    parser = Parser("python -m paper crowds", description=__doc__.split("\n\n")[0])
    parser.add_argument("--crowds", nargs="+", default=list(CROWDS), choices=list(CROWDS))
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2], help="and seeds (default 0 1 2)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="at the same time; 0: only the table")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default reproduced)")
    parser.add_argument("--options", nargs="...", default=[], help="the rest goes to every train.py")
    chosen = parser.parse_args(argv)
    asked = {}
    try:
        grid = Grid("digits", [0], chosen.out, "", [])  # the options are for one's own data only
        grid.folder = chosen.out / "crowds"
        grid.folder.mkdir(parents=True, exist_ok=True)
        for crowd in chosen.crowds:
            for draw in chosen.draws:
                votes, folder = grid.folder / f"{crowd}-{draw}.npz", grid.folder / f"{crowd}-{draw}"
                if not votes.exists():
                    write(votes, crowd, draw)
                words = f"--seed {draw} --threads 1 --dataset"
                grid.jobs[folder] = [*words.split(), str(votes), *chosen.options]
                configure(grid.jobs[folder], data.has_features)  # a wrong option is refused here
                asked.setdefault(crowd, []).append((folder, votes))
        grid.check()
        failed = grid.run(chosen.jobs) if chosen.jobs > 0 else []
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = {crowd: [m for pair in pairs if (m := measured(*pair))] for crowd, pairs in asked.items()}
    text = "\n".join(table(results)) + "\n"
    (grid.folder / "crowds.md").write_text(text)
    print(f"\n{text}\nwritten to {grid.folder / 'crowds.md'}")
    return 1 if failed else 0
