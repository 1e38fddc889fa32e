"""The paper's tables and figures, each from one command.

    python reproduce.py list                        what there is, what each needs, how long it takes
    python reproduce.py table2                      at the size of a laptop: embedded digits, three seeds
    python reproduce.py table2 --scale paper        the paper's own experiment, for those who have the cards
    python reproduce.py fig5 --jobs 2 --seeds 0     two runs at a time

Each is a grid of train.py runs under --out, which tables and figures share. Finished runs are not repeated, broken
ones are resumed, so that it may be stopped and started again at any time. A table is written as Markdown with the
paper's cell beside ours, a figure as PNG.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from data import InputError
from figures import FIGURES
from options import configure

HERE = Path(__file__).parent
PAPER = json.loads((HERE / "paper.json").read_text())
SIX = ("cc", "rc", "log", "proden", "lwc", "pico")
ROBUST = ("mae", "mse", "sce", "gce", "plcr", "pico+")
NAMES = {"pico": "PiCO", "pico+": "PiCO+", "irnet": "IRNet with PiCO", "supervised": "supervised learning"}
NAMES |= {"dividemix": "noisy label learning (DivideMix)"}
ETAS = (0.1, 0.2, 0.3)
SCALES = {  # name: datasets, the paper's dataset to put beside them, options of every run
    "digits": ({"digits": (0.1, 0.3, 0.5)}, {"digits": "cifar10"}, []),
    "kmnist": ({"kmnist": (0.1, 0.3, 0.5)}, {"kmnist": "kmnist"}, ["--arch", "cnn"]),
    "paper": (
        {"cifar10": (0.1, 0.3, 0.5), "cifar100": (0.01, 0.03, 0.05), "kmnist": (0.1, 0.3, 0.5)},
        {"cifar10": "cifar10", "cifar100": "cifar100", "kmnist": "kmnist"},
        [],
    ),
}


def title(name: str) -> str:
    return NAMES.get(name, name.upper())


# ------------------------------------------------------------------ runs


class Grid:
    """The runs that a table or figure asks for, each a train.py command with a folder of its own."""

    def __init__(self, scale: str, seeds: list[int], out: Path, data: str, more: list[str]):
        self.scale, self.seeds, self.folder, self.data = scale, seeds, out / scale, data
        self.datasets, self.beside, self.options = SCALES[scale]
        self.options = [*self.options, *more]
        dataset, qs = next(iter(self.datasets.items()))
        c = configure(["--dataset", dataset, "--q", str(qs[1]), "--eta", "0.3", *self.options])
        self.epochs, self.tau = c.epochs, c.tau  # of the figures' runs: PiCO, the middle q
        self.jobs: dict[Path, list[str]] = {}

    def ask(
        self, dataset: str, base: str, irnet: bool, q: float | None, eta: float | None, seeds=None, **more
    ) -> list[Path]:
        """One run a seed -> their folders. `more`: further options, as in views="ww", swap=True."""
        folders = []
        for seed in seeds or self.seeds:
            name = f"{Path(dataset).stem}-" if len(self.datasets) > 1 or dataset not in self.datasets else ""
            name += f"{base}{'-irnet' if irnet else ''}"
            argv = ["--dataset", dataset, "--base", base, "--seed", str(seed), *self.options]
            if q is not None:
                name += f"-q{q:g}-eta{eta:g}"
                argv += ["--q", str(q), "--eta", str(eta)]
            argv += [] if irnet else ["--no-irnet"]
            argv += ["--data", self.data] if self.data else []
            for key, value in more.items():
                argv += [f"--{key.replace('_', '-')}", *([] if value is True else map(str, _list(value)))]
                name += f"-{key}" + ("" if value is True else "".join(f"-{part}" for part in _list(value)))
            folder = self.folder / f"{name}-seed{seed}"
            self.jobs[folder] = argv
            folders.append(folder)
        return folders

    def finished(self, folder: Path) -> bool:
        return (folder / "summary.json").exists()

    def run(self, at_once: int) -> list[Path]:
        """Runs what is not finished, `at_once` at a time; returns those that failed."""
        todo = [folder for folder in self.jobs if not self.finished(folder)]
        print(f"{len(self.jobs)} runs, {len(self.jobs) - len(todo)} of them finished already")
        began, running, failed, done = time.monotonic(), {}, [], 0
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        queue = iter(todo)
        try:
            while True:
                for folder in itertools.islice(queue, at_once - len(running)):
                    running[folder] = self._start(folder)
                if not running:
                    return failed
                time.sleep(0.2)
                for folder, process in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[folder]
                    done += 1
                    if process.returncode or not self.finished(folder):
                        failed.append(folder)
                        print(f"failed: {folder}; see {folder}.log", file=sys.stderr)
                    self._show(done, len(todo), time.monotonic() - began, folder)
        except KeyboardInterrupt:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
            print("\nstopped; finished epochs are kept: the same command goes on", file=sys.stderr)
            raise SystemExit(130) from None

    def _start(self, folder: Path) -> subprocess.Popen:
        folder.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, str(HERE / "train.py"), *self.jobs[folder], "--out", str(folder)]
        argv += ["--resume"] if (folder / "config.json").exists() else []
        with open(f"{folder}.log", "a") as log:
            return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)

    @staticmethod
    def _show(done: int, total: int, spent: float, folder: Path) -> None:
        left, filled = spent / done * (total - done), round(20 * done / total)
        bar = f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{total}, {left / 60:.0f} min left; {folder.name}"
        live = sys.stdout.isatty()
        print(f"\r\033[K{bar}" if live else bar, end="" if live and done < total else "\n", flush=True)


def _list(value) -> list:
    return list(value) if isinstance(value, tuple | list) else [value]


def read(folders: list[Path], key: str) -> list[float]:
    """One number of the summaries, in per cent."""
    return [100 * json.loads((folder / "summary.json").read_text())[key] for folder in folders]


def cell(values: list[float], bold: bool = False) -> str:
    text = f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
    return f"**{text}**" if bold else text


# ------------------------------------------------------------------ tables
# Each asks the grid for its runs and returns a function that, when they are done, gives the lines of its Markdown.


def settings(grid: Grid, dataset: str):
    return list(itertools.product(grid.datasets[dataset], ETAS))


def table2(grid: Grid):
    """Six bases with and without IRNet."""
    asked = {
        (d, b, i, q, eta): grid.ask(d, b, i, q, eta)
        for d in grid.datasets
        for b in SIX
        for i in (False, True)
        for q, eta in settings(grid, d)
    }

    def lines():
        total = better = 0
        for d in grid.datasets:
            yield f"### {d}; in brackets the paper's {grid.beside[d]}\n"
            yield "| base | IRNet | " + " | ".join(f"q {q:g}, eta {eta:g}" for q, eta in settings(grid, d)) + " |"
            yield "| --- " * 11 + "|"
            for b, irnet in itertools.product(SIX, (False, True)):
                cells = []
                for k, (q, eta) in enumerate(settings(grid, d)):
                    ours = {i: read(asked[d, b, i, q, eta], "last") for i in (False, True)}
                    wins = statistics.mean(ours[irnet]) > statistics.mean(ours[not irnet])
                    total, better = total + irnet, better + (irnet and wins)
                    theirs = PAPER["table2"][grid.beside[d]][b]["irnet" if irnet else "alone"][k][0]
                    cells.append(f"{cell(ours[irnet], wins)} ({theirs:.1f})")
                yield f"| {title(b)} | {'yes' if irnet else 'no'} | " + " | ".join(cells) + " |"
            yield ""
        yield f"IRNet's mean last accuracy is above its base's in {better} of {total} cells."

    return lines


def by_q(grid: Grid, table: str, rows: dict[str, dict], head: str):
    """A column a q at eta = 0.3, the best of each column marked; rows: {the paper's name: what to ask for}."""
    datasets = [d for d in grid.datasets if grid.beside[d] in PAPER[table]]
    asked = {
        (d, name, q): grid.ask(d, eta=0.3, q=q, **what)
        for d in datasets
        for name, what in rows.items()
        for q in grid.datasets[d]
    }

    def lines():
        for d in datasets:
            qs = grid.datasets[d]
            ours = {(name, q): read(asked[d, name, q], "last") for name in rows for q in qs}
            best = {q: max(statistics.mean(ours[name, q]) for name in rows) for q in qs}
            yield f"### {d}, eta 0.3; in brackets the paper's {grid.beside[d]}\n"
            yield f"| {head} | " + " | ".join(f"q {q:g}" for q in qs) + " |"
            yield "| --- " * (1 + len(qs)) + "|"
            for name in rows:
                theirs = PAPER[table][grid.beside[d]][name]
                cells = [
                    f"{cell(ours[name, q], statistics.mean(ours[name, q]) == best[q])} ({theirs[k]:.1f})"
                    for k, q in enumerate(qs)
                ]
                yield f"| {title(name) if table == 'table3' else name} | " + " | ".join(cells) + " |"
            yield ""

    return lines


def table3(grid: Grid):
    """Noise-robust methods against IRNet with PiCO."""
    rows = {name: dict(base=name, irnet=False) for name in ROBUST} | {"irnet": dict(base="pico", irnet=True)}
    return by_q(grid, "table3", rows, "method")


def table4(grid: Grid, bases: tuple[str, ...] = ("pico",)):
    """Best and last accuracy, and the gap, with and without IRNet."""
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


def table5(grid: Grid):
    """Extra views: their number and kind."""
    rows = {views: dict(base="pico", irnet=True) for views in ("none", "s", "w", "ss", "ws", "ww")}
    for views, what in rows.items():
        what |= {} if views == "w" else dict(views=views)
    return by_q(grid, "table5", rows, "extra views")


def table6(grid: Grid):
    """Multiply-accumulates, parameters, time and memory by the number of extra views."""

    def lines():
        import complexity

        yield from complexity.lines(PAPER["table6"])

    return lines


def table7(grid: Grid):
    """Swapping: the least probable candidate leaves when a label is moved in."""
    rows = {"swap": dict(base="pico", irnet=True, swap=True), "keep": dict(base="pico", irnet=True)}
    return by_q(grid, "table7", rows, "correction")


TABLES = dict(table2=table2, table3=table3, table4=table4, table5=table5, table6=table6, table7=table7)


# ------------------------------------------------------------------ the command line


def main(argv: list[str] | None = None) -> int:
    wanted = ["list", *TABLES, *FIGURES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=wanted, metavar="WHAT", help=", ".join(wanted))
    parser.add_argument("--scale", default="digits", choices=list(SCALES), help="size of the runs (default digits)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default 0 1 2)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default 1)")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default reproduced)")
    parser.add_argument("--data", default="", metavar="DIR", help="as train.py's --data")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="the rest goes to every train.py")
    chosen = parser.parse_args(argv)
    if chosen.jobs < 1 or not chosen.seeds:
        parser.error("--jobs and --seeds: at least one")
    if chosen.what == "list":
        show_list(chosen.scale, chosen.seeds, chosen.out)
        return 0
    if chosen.what in FIGURES and (missing := missing_packages(chosen.what)):
        print(f"error: {chosen.what} needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        grid = Grid(chosen.scale, chosen.seeds, chosen.out, chosen.data, chosen.options)
    except InputError as error:
        print(f"error: --options: {error}", file=sys.stderr)
        return 2
    make = (TABLES | FIGURES)[chosen.what](grid)
    failed = grid.run(chosen.jobs)
    if failed:
        print(f"error: {len(failed)} runs failed; the same command tries them again", file=sys.stderr)
        return 1
    grid.folder.mkdir(parents=True, exist_ok=True)
    if chosen.what in FIGURES:
        path = grid.folder / f"{chosen.what}.png"
        draw(make, path)
    else:
        text = f"## Table {chosen.what[5:]}: {TABLES[chosen.what].__doc__}\n\n" + "\n".join(make()) + "\n"
        path = grid.folder / f"{chosen.what}.md"
        path.write_text(text)
        print(f"\n{text}")
    print(f"written to {path}")
    return 0


def missing_packages(what: str) -> list[str]:
    needed = {"matplotlib": "matplotlib"} | ({"sklearn": "scikit-learn"} if what in ("fig7", "fig8") else {})
    return [package for module, package in needed.items() if importlib.util.find_spec(module) is None]


def draw(make, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=make.size, layout="constrained")
    make(figure)
    figure.savefig(path, dpi=120)


def show_list(scale: str, seeds: list[int], out: Path) -> None:
    cores = os.cpu_count()
    print(f"{'':9}{'runs':>5}{'finished':>10}   at --scale {scale}, seeds {', '.join(map(str, seeds))}")
    for name, table in (TABLES | FIGURES).items():
        grid = Grid(scale, seeds, out, "", [])
        table(grid)
        finished = [folder for folder in grid.jobs if grid.finished(folder)]
        print(f"{name:9}{len(grid.jobs):5d}{len(finished):10d}   {table.__doc__}")
    minutes = {"digits": "half a minute", "kmnist": "half an hour to an hour and a half", "paper": "days on a CPU"}
    print(f"\na run takes about {minutes[scale]}; this machine has {cores} cores: --jobs {cores}")


if __name__ == "__main__":
    raise SystemExit(main())
