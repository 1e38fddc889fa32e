"""The paper's tables and figures, each from one command.

    python -m paper list                        what there is, what each needs, how long it takes
    python -m paper table2                      at the size of a laptop: embedded digits, three seeds
    python -m paper table2 --scale paper        the paper's own experiment, for those who have the cards
    python -m paper fig5 --jobs 2 --seeds 0     two runs at a time

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
import subprocess
import sys
import time
from pathlib import Path

from data import has_features
from harness import InputError, Parser
from harness.options import configure, recorded
from paper.figures import FIGURES
from paper.tables import TABLES

ROOT = Path(__file__).parent.parent
SCALES = {  # name: datasets, the paper's dataset to put beside them, options of every run
    "digits": ({"digits": (0.1, 0.3, 0.5)}, {"digits": "cifar10"}, []),
    "kmnist": ({"kmnist": (0.1, 0.3, 0.5)}, {"kmnist": "kmnist"}, ["--arch", "cnn"]),
    "paper": (
        {"cifar10": (0.1, 0.3, 0.5), "cifar100": (0.01, 0.03, 0.05), "kmnist": (0.1, 0.3, 0.5)},
        {"cifar10": "cifar10", "cifar100": "cifar100", "kmnist": "kmnist"},
        [],
    ),
}


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
            if self.scale == "digits" and dataset not in self.datasets:
                argv += ["--arch", "cnn", "--threads", "1"]  # as digits has them
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

    def check(self) -> None:
        """Refuses to take finished runs of other options for those that are asked for."""
        for folder, argv in self.jobs.items():
            config = folder / "config.json"
            if self.finished(folder) and config.exists():
                had = json.loads(config.read_text())
                for key, value in recorded(configure(argv)).items():
                    if had.get(key, value) != value:
                        option = key.replace("_", "-")
                        raise InputError(
                            f"{folder} was run with --{option} {had[key]}, not {value}: give another --out"
                        )

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
        argv = [sys.executable, str(ROOT / "train.py"), *self.jobs[folder], "--out", str(folder)]
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


# ------------------------------------------------------------------ the command line


def main(argv: list[str] | None = None) -> int:
    wanted = ["list", *TABLES, *FIGURES]
    parser = Parser("-m paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        make = (TABLES | FIGURES)[chosen.what](grid)
        grid.check()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = grid.run(chosen.jobs)
    if failed:
        print(f"error: {len(failed)} runs failed; the same command tries them again", file=sys.stderr)
        return 1
    grid.folder.mkdir(parents=True, exist_ok=True)
    if chosen.what in FIGURES:
        path = grid.folder / f"{chosen.what}.png"
        draw(make, path)
    else:
        name = f"Table {chosen.what[5:]}" if chosen.what.startswith("table") else chosen.what.capitalize()
        text = f"## {name}: {TABLES[chosen.what].__doc__}\n\n" + "\n".join(make()) + "\n"
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
        try:
            table(grid)
        except InputError as error:
            print(f"{name:9}{'-':>5}{'-':>10}   {error}")
            continue
        finished = [folder for folder in grid.jobs if grid.finished(folder)]
        print(f"{name:9}{len(grid.jobs):5d}{len(finished):10d}   {table.__doc__}")
    minutes = {"digits": "half a minute", "kmnist": "half an hour to an hour and a half", "paper": "days on a CPU"}
    print(f"\na run takes about {minutes[scale]}; this machine has {cores} cores: --jobs {cores}")


if __name__ == "__main__":
    raise SystemExit(main())
