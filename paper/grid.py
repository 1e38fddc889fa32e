"""The runs that a table or figure is made of: train.py commands, several at a time, stopped and gone on with."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data import has_features
from harness import InputError
from harness.checkpoint import Damaged, pack, unpack
from harness.options import SIX, configure, recorded

ROOT = Path(__file__).parent.parent
ETAS, QS = (0.1, 0.2, 0.3), (0.1, 0.3, 0.5)


@dataclass(frozen=True)
class Scale:
    """The size of the runs."""

    datasets: dict[str, tuple[float, ...]]  # by name: their q
    beside: dict[str, str]  # the paper's dataset to put beside each
    options: tuple[str, ...] = ()  # of every run
    etas: tuple[float, ...] = ETAS  # of Table 2
    bases: tuple[str, ...] = ("pico",)  # of Table 4
    thrice: tuple[str, ...] = ()  # bases that have all seeds where the others have the first alone; none: all


SCALES = {
    "digits": Scale({"digits": QS}, {"digits": "cifar10"}),
    "kmnist": Scale(
        {"kmnist": QS},
        {"kmnist": "kmnist"},
        ("--arch", "cnn", "--threads", "1", "--test-every", "1"),
        ETAS[2:],
        SIX,
        ("pico", "proden"),
    ),
    "paper": Scale(
        {"cifar10": QS, "cifar100": (0.01, 0.03, 0.05), "kmnist": QS},
        {"cifar10": "cifar10", "cifar100": "cifar100", "kmnist": "kmnist"},
        ("--test-every", "1"),  # best is over all epochs, as the paper's
    ),
}


class Grid:
    """The runs that a table or figure asks for, each a train.py command with a folder of its own."""

    def __init__(self, scale: str, seeds: list[int], out: Path, data: str, more: list[str], preset: str = "ours"):
        self.scale, self.seeds, self.data, self.preset = scale, seeds, data, preset
        self.folder = out / (scale if preset == "ours" else f"{scale}-{preset}")
        self.size = SCALES[scale]
        self.datasets, self.beside = self.size.datasets, self.size.beside
        self.options = [*self.size.options, *([] if preset == "ours" else ["--preset", preset]), *more]
        dataset, qs = next(iter(self.datasets.items()))
        c = configure(["--dataset", dataset, "--q", str(qs[1]), "--eta", "0.3", *self.options])
        self.epochs, self.tau = c.epochs, c.tau  # of the figures' runs: PiCO, the middle q
        self.jobs: dict[Path, list[str]] = {}
        self.first: list[Callable[[], None]] = []  # what the runs need, made before them

    def ask(
        self, dataset: str, base: str, irnet: bool, q: float | None, eta: float | None, seeds=None, **more
    ) -> list[Path]:
        """One run a seed -> their folders. `more`: further options, as in views="ww", swap=True."""
        folders, thrice = [], self.size.thrice
        for seed in seeds or (self.seeds if base in (thrice or [base]) else self.seeds[:1]):
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

    @staticmethod
    def finished(folder: Path) -> bool:
        return (folder / "summary.json").exists()

    def check(self) -> None:
        """Refuses to take finished runs of other options for those that are asked for."""
        for folder, argv in self.jobs.items():
            config = folder / "config.json"
            if self.finished(folder) and config.exists():
                had = json.loads(config.read_text())
                for key, value in recorded(configure(argv, has_features)).items():
                    if had.get(key, value) != value:
                        option = key.replace("_", "-")
                        raise InputError(
                            f"{folder} was run with --{option} {had[key]}, not {value}: give another --out"
                        )

    def run(self, at_once: int) -> list[Path]:
        """Runs what is not finished, `at_once` at a time; returns those that failed."""
        todo = [folder for folder in self.jobs if not self.finished(folder)]
        todo.sort(key=lambda folder: "--no-irnet" in self.jobs[folder])  # those begin where the others had e0
        print(f"{len(self.jobs)} runs, {len(self.jobs) - len(todo)} of them finished already")
        began, running, failed, done = time.monotonic(), {}, [], 0
        for make in self.first:
            make()
        before = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
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
        finally:
            signal.signal(signal.SIGTERM, before)

    def _branch(self, folder: Path) -> None:
        """A base alone is its run with IRNet until e0. Where that one is there, this one goes on from its e0."""
        twin = folder.with_name(folder.name.replace("-q", "-irnet-q", 1))
        try:
            had, state = json.loads((twin / "config.json").read_text()), unpack((twin / "e0.pt").read_bytes())
        except (OSError, ValueError, Damaged):
            return
        config = recorded(configure(self.jobs[folder], has_features))
        if {key for key, value in config.items() if had.get(key) != value} == {"no_irnet"}:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "checkpoint.pt").write_bytes(pack(state | dict(config=config)))
            (folder / "config.json").write_text(json.dumps(had | config))

    def _start(self, folder: Path) -> subprocess.Popen:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if "--no-irnet" in self.jobs[folder] and not (folder / "config.json").exists():
            self._branch(folder)
        argv = [sys.executable, str(ROOT / "train.py"), *self.jobs[folder], "--out", str(folder), "--keep-e0"]
        argv += ["--resume"] if (folder / "config.json").exists() else []
        with open(f"{folder}.log", "a") as log:
            return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)

    @staticmethod
    def _show(done: int, total: int, spent: float, folder: Path) -> None:
        left, filled = spent / done * (total - done), round(20 * done / total)
        bar = f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{total}, {left / 60:.0f} min left; {folder.name}"
        live = sys.stdout.isatty()
        print(f"\r\033[K{bar}" if live else bar, end="" if live and done < total else "\n", flush=True)


def lines_of(path: Path) -> list[dict]:
    """What a study has measured so far, a line each; a last one that was cut off counts as not measured."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    return [json.loads(line) for line in text.splitlines()]


def _list(value) -> list:
    return list(value) if isinstance(value, tuple | list) else [value]
