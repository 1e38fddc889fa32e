"""The arena: methods x data x seeds, each a train.py run; who wins, by how much, for how many CPU-seconds.

A run counts by its accuracy after the last epoch, never by its best. Runs share the folder <--out>/arena: finished
ones are not repeated, stopped ones go on, so that any part (--methods, --cells, --seeds) may be run at any time.
"best tau" stands for the tau of a grid whose mean on the test set is highest: what no user can know, and so no
method, but a bar for one without a knob. It wins nothing here.

Methods differ in what an epoch costs. --equal METHOD then runs each of the others again, with as many epochs as
make its CPU-seconds those of METHOD, and the table is of these.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path

import numpy as np

import data
from harness import InputError, Parser, nearest
from paper import battery, tables
from paper.grid import Grid

TAUS = dict(proden=(0.0, 0.1, 0.2, 0.3, 0.5, 0.7), pico=(0.0, 0.002, 0.004, 0.01, 0.02, 0.04))
SMALL = "--limit-train 8000 --arch cnn --epochs 20 --test-every 20 --threads 1"  # the last epoch counts
CIFAR = Path("shared/data/cifar10n_12k.npz")  # beside the project; its annotators are not asked here

# name: train.py's options. A name with "best tau" stands for the grid.
METHODS = {
    "PRODEN": "--base proden --no-irnet",
    "PRODEN + IRNet": "--base proden",
    "PRODEN + IRNet, best tau": "--base proden",
    "PRODEN + IRNet, auto": "--base proden --tau auto",
    "PRODEN + IRNet plus": "--base proden --irnet plus",
    "PiCO": "--base pico --no-irnet",
    "PiCO + IRNet": "--base pico",
    "PiCO + IRNet, best tau": "--base pico",
    "PiCO + IRNet, auto": "--base pico --tau auto",
    "PiCO + IRNet plus": "--base pico --irnet plus",
    "PiCO+": "--base pico+ --no-irnet",
    "ALIM": "--base alim --no-irnet",
    "PALS": "--base pals --no-irnet",
}
CELLS = {
    **{f"digits-q{q}-eta{eta}": f"--dataset digits --q {q} --eta {eta}"
       for q, eta in itertools.product((0.3, 0.5), (0, 0.1, 0.3))},
    "digits-classes-eta0.2": "--dataset {folder}/classes-{seed}.npz --threads 1",
    **{f"{name}-q{q}-eta{eta}": f"--dataset {name} --q {q} --eta {eta} --image-size 14 --crop 0.8 {SMALL}"
       for name, q, eta in itertools.product(("kmnist", "fashion"), (0.3, 0.5), (0.05, 0.3))},
    "cifar-q0.3-eta0.3": f"--dataset {{folder}}/cifar.npz --q 0.3 --eta 0.3 --image-size 16 {SMALL}",
}  # fmt: skip


def class_dependent(path: Path, seed: int) -> None:
    """Digits with wrong candidates that go with the class, a fifth of the true labels deleted."""
    arrays = battery.arrays_of(data.load("digits"))
    np.savez(path, candidates=battery.by_class(arrays["y_train"], 10, 0.2, 1000 * seed + 7), **arrays)


def cifar(path: Path, source: Path) -> None:
    """CIFAR-10N's images and true labels, without its annotators."""
    try:
        with np.load(source, allow_pickle=False) as file:
            np.savez(path, **{name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")})
    except (OSError, KeyError):
        raise InputError(
            f"{source} is not there, or has no x_train, y_train, x_test, y_test: give --cifar FILE, or --cells "
            "without it"
        ) from None


# ------------------------------------------------------------------ runs


def seeds_of(cell: str, seeds: list[int] | None) -> list[int]:
    """Five on digits, three elsewhere."""
    return seeds or list(range(5 if cell.startswith("digits") else 3))


def short(name: str) -> str:
    return name.lower().replace(" + ", "-").replace(", ", "-").replace(" ", "-")


def ask(
    grid: Grid, method: str, cell: str, seeds: list[int], source: Path, epochs: int | None = None
) -> dict[str, list[Path]]:
    """The runs of a method on a cell, by name: one of each tau of the grid for "best tau", else one -> folders.
    epochs: in place of the preset's; 0: no run."""
    asked = {}
    base = METHODS[method].split()[1]
    if epochs == 0:
        return {}
    for tau in TAUS[base] if method.endswith("best tau") else [None]:
        name = short(method.removesuffix(", best tau")) + ("" if tau is None else f"-tau{tau:g}")
        name += "" if epochs is None else f"-epochs{epochs}"
        folders = []
        for seed in seeds:
            words = CELLS[cell].format(folder=grid.folder, seed=seed).split()
            if base == "alim" and "--eta" not in words:
                return {}  # it needs the noise rate
            argv = [*METHODS[method].split(), *words, *([] if tau is None else ["--tau", str(tau)]), *grid.options]
            argv += ["--seed", str(seed), *(["--data", grid.data] if grid.data else [])]
            argv += [] if epochs is None else ["--epochs", str(epochs), "--e0-rule", "knee"]  # as with the preset's
            path = Path(words[1])
            make = {"cla": lambda p, s: class_dependent(p, s), "cif": lambda p, s: cifar(p, source)}
            if path.parent == grid.folder and not path.exists():
                grid.first.append(lambda p=path, s=seed, m=make[path.name[:3]]: p.exists() or m(p, s))
            folders.append(grid.folder / f"{cell}-{name}-seed{seed}")
            grid.jobs[folders[-1]] = argv
        asked[name] = folders
    return asked


def equal_epochs(asked: dict[str, dict], cell: str, method: str, to: str) -> int | None:
    """As many as make a method's CPU-seconds on a cell those of another's; None: its own, as they are. 0: there are
    no runs to tell by."""
    mine, others = (measured(asked[name][cell]) for name in (method, to))
    if not mine or not others:
        return 0
    if method == to:
        return None
    config = next(f / "config.json" for f in itertools.chain(*asked[method][cell].values()) if Grid.finished(f))
    return max(1, round(json.loads(config.read_text())["epochs"] * others[1] / mine[1]))


# ------------------------------------------------------------------ the table


def measured(asked: dict[str, list[Path]]) -> tuple[list[float], float] | None:
    """Last accuracies in per cent of what is finished, and CPU-seconds a run; of a grid the best in the mean."""
    found = []
    for folders in asked.values():
        done = [json.loads((f / "summary.json").read_text()) for f in folders if Grid.finished(f)]
        if done:
            found.append(([100 * s["last"] for s in done], statistics.mean(s["cpu_seconds"] for s in done)))
    return max(found, key=lambda one: statistics.mean(one[0])) if found else None


def whole(asked: dict[str, list[Path]]) -> tuple[list[float], float] | None:
    """What was measured once all seeds, and all taus of a grid, are finished: fewer would seem sure."""
    return measured(asked) if all(Grid.finished(f) for f in itertools.chain(*asked.values())) else None


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table(results: dict[str, dict[str, tuple[list[float], float] | None]]):
    """Markdown. First: cells in which its mean is the highest; near: those in which it is first, or below the first
    by no more than the larger of both deviations. Mean and CPU-seconds: over the cells that all methods have."""
    cells = [cell for cell in CELLS if any(row.get(cell) for row in results.values())]
    shared = [cell for cell in cells if all(row.get(cell) for row in results.values() if any(row.values()))]
    first, near = ({name: 0 for name in results} for _ in range(2))
    for cell in cells:
        have = {name: row[cell][0] for name, row in results.items() if row.get(cell) and "best tau" not in name}
        if len(have) < 2:  # nobody to win against
            continue
        top = max(have, key=lambda name: statistics.mean(have[name]))
        first[top] += 1
        for name, values in have.items():
            behind = statistics.mean(have[top]) - statistics.mean(values)
            near[name] += behind <= max(deviation(have[top]), deviation(values))
    yield f"| method | {' | '.join(cells)} | mean | first | near | CPU-seconds |"
    yield "| --- " * (len(cells) + 5) + "|"
    for name, row in results.items():
        if not any(row.values()):
            continue
        shown = [tables.cell(r[0]) if (r := row.get(c)) else "-" for c in cells]
        mean = f"{statistics.mean(statistics.mean(row[c][0]) for c in shared):.2f}" if shared else "-"
        cost = f"{statistics.mean(row[c][1] for c in shared):.0f}" if shared else "-"
        wins = ["-", "-"] if "best tau" in name else [str(first[name]), str(near[name])]
        yield f"| {name} | {' | '.join([*shown, mean, *wins, cost])} |"


def main(argv: list[str]) -> int:
    parser = Parser("python -m paper arena", description="Methods x data x seeds, and a table.")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="M", help=", ".join(METHODS))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), metavar="C", help=", ".join(CELLS))
    parser.add_argument("--seeds", type=int, nargs="+", help="(default 0 to 4 on digits, 0 to 2 elsewhere)")
    parser.add_argument("--equal", metavar="M", help="each other method with the CPU-seconds of this one")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="at the same time; 0: only the table of the cells that have all seeds",
    )
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default reproduced)")
    parser.add_argument("--data", default="", metavar="DIR", help="as train.py's --data")
    parser.add_argument("--cifar", type=Path, default=Path("..") / CIFAR, help=f"(default ../{CIFAR})")
    parser.add_argument("--options", nargs="...", default=[], help="the rest goes to every train.py")
    chosen = parser.parse_args(argv)
    for given, names, flag in (
        (chosen.methods, METHODS, "--methods"),
        (chosen.cells, CELLS, "--cells"),
        ([chosen.equal] if chosen.equal else [], chosen.methods, "--equal"),
    ):
        for name in given:
            if name not in names:
                parser.error(nearest(flag, name, list(names)))
    try:
        grid = Grid("digits", [0], chosen.out, chosen.data, chosen.options)
        grid.folder = chosen.out / "arena"

        def all_runs(epochs) -> dict[str, dict]:
            return {m: {c: ask(grid, m, c, seeds_of(c, chosen.seeds), chosen.cifar, epochs(m, c))
                        for c in chosen.cells} for m in chosen.methods}  # fmt: skip

        grid.folder.mkdir(parents=True, exist_ok=True)
        asked = all_runs(lambda method, cell: None)
        grid.check()
        failed = grid.run(chosen.jobs) if chosen.jobs > 0 else []
        if chosen.equal:
            before, grid.jobs = asked, {}
            asked = all_runs(lambda method, cell: equal_epochs(before, cell, method, chosen.equal))
            grid.check()
            failed += grid.run(chosen.jobs) if chosen.jobs > 0 else []
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = {m: {c: whole(folders) for c, folders in row.items()} for m, row in asked.items()}
    text = "\n".join(table(results)) + "\n"
    path = grid.folder / ("arena-equal.md" if chosen.equal else "arena.md")
    path.write_text(text)
    print(f"\n{text}\nwritten to {path}")
    return 1 if failed else 0
