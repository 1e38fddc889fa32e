"""The run's folder: configuration, rows, checkpoints, lock, resume. Whatever happens, no finished epoch is lost.

runs/<name>/ holds config.json, metrics.jsonl (a row an epoch), checkpoint.pt (the state after the last finished
epoch, the final model in the end), previous.pt (the one before it), and, when the run is done, summary.json,
candidates.npz, labels.csv, model.pt (the classifier alone) and report.html.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from harness import InputError, ranks
from harness.checkpoint import Damaged, copied, pack, unpack
from harness.ranks import say

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None

FILES = "checkpoint.pt previous.pt e0.pt summary.json candidates.npz metrics.jsonl config.json".split()
FILES += ["labels.csv", "annotators.csv", "next.csv", "review.html", "report.html", "model.pt"]


class Broken(Exception):
    """The run cannot go on; the message says why, and what is kept."""


class WriteError(Broken):
    """The folder cannot be written: disk full, folder gone. The checkpoint before is whole."""


class NotFinite(Broken):
    """A loss or a network that is not finite."""


class Stopped(Exception):
    """A signal asked for it."""


# ------------------------------------------------------------------ the folder


class Run:
    """One run's files. A folder that holds another run is never overwritten unasked, nor written by two."""

    def __init__(self, folder: Path, named: bool):
        self.folder, self.named = Path(folder), named  # named: by the user
        self.saved = 0  # epochs in the checkpoint on the disk
        self._waiting: tuple[int, dict] | None = None  # a later one that is not there yet
        self._damaged: list[Path] = []
        self._lock = self._fresh = None

        self.interrupt: Interrupt | None = None
        self.rows = 0  # finished epochs

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Whatever ended the run: what still waits is written, and how to go on is said."""
        asked = self.interrupt and self.interrupt.signal and (kind is Stopped or ranks.lost(error))
        try:
            if asked or kind is NotFinite:
                self.flush()
        finally:
            self.close()
        kept = f"epochs 1 to {self.rows} are kept" if self.rows else "no epoch was finished"
        if asked:
            say(f"stopped in epoch {self.rows + 1}; {kept} in {self.folder}")
            say(f"to go on: the same command with --resume --out {self.folder}")
        elif kind is NotFinite:
            kept = f"{kept} in {self.folder}" if self.rows else kept
            raise NotFinite(f"{error} of epoch {self.rows + 1}; {kept}: begin a new run, --lr lower") from None

    # ---- opening

    def look(self, config: dict, resume: bool, overwrite: bool) -> tuple[dict | None, bool]:
        """Before anything is loaded or written: finds the folder, and refuses what cannot go on. Returns the state
        to go on from (None where the run begins), and whether the run is finished."""
        try:
            if not resume:
                self._fresh = lambda: self._choose(overwrite, config.get("dataset", ""))
                self._fresh()
                return None, False
            self.folder = self._find(config)
            self._take_lock()
            state = self._newest()
            had = state["config"] if state else self._config(self.folder)
            if had is None:
                raise InputError(f"{self.folder / 'config.json'} cannot be read: start again with --overwrite")
            self._same(had, config)
            return state, self.saved == config["epochs"] and (self.folder / "summary.json").exists()
        except OSError as error:
            raise InputError(f"cannot read {self.folder}: {error.strerror}; name another with --out") from None

    @classmethod
    def of(cls, c, own: bool) -> Run:
        """The run that a configuration describes. One's own data may lie anywhere but where it writes."""
        name = f"{Path(c.dataset).stem}-{c.base}{'' if c.no_irnet else '-irnet'}"
        name += (f"-q{c.q:g}-eta{c.eta:g}" if c.q is not None else "") + f"-seed{c.seed}"
        run = cls(c.out or Path("runs") / name, named=c.out is not None)
        if own and Path(c.dataset).resolve() in [(run.folder / name).resolve() for name in (*FILES, ".")]:
            raise InputError(
                f"--out {run.folder}: the run would replace --dataset {c.dataset}; name another folder"
            )
        return run

    def _find(self, config: dict) -> Path:
        """The folder to go on with: as named, or of all that begin with the run's name the newest one that has this
        configuration, else the newest."""
        found, parent = [self.folder], self.folder.parent
        if not self.named and parent.is_dir():
            numbered = re.compile(re.escape(self.folder.name) + r"-\d+")
            found += [folder for folder in parent.iterdir() if numbered.fullmatch(folder.name)]
        needed = ("config.json", "checkpoint.pt", "previous.pt")
        found = [folder for folder in found if any((folder / name).exists() for name in needed)]
        if not found:
            raise InputError(f"--resume: there is no run in {self.folder}: start it without --resume")
        return max(found, key=lambda f: (self._differs(self._config(f) or {}, config) is None, f.stat().st_mtime))

    @staticmethod
    def _config(folder: Path) -> dict | None:
        try:
            config = json.loads((folder / "config.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return config if isinstance(config, dict) else None

    def _choose(self, overwrite: bool, dataset: str) -> None:
        """A folder without a run; where the user did not name one, the next free number is appended."""
        folder, number = self.folder, 2
        had = (self._config(folder) or {}).get("dataset", dataset)
        if overwrite and not self.named and Path(had).resolve() != Path(dataset).resolve():
            raise InputError(f"--overwrite: {folder} holds a run on {had}; name a folder with --out")
        while any((self.folder / name).exists() for name in FILES) and not overwrite:
            if self.named:
                raise InputError(f"--out {self.folder} holds a run: add --resume to go on with it, --overwrite to "
                                 "replace it, or name another folder")  # fmt: skip
            self.folder, number = folder.with_name(f"{folder.name}-{number}"), number + 1

    @staticmethod
    def _differs(had: dict, config: dict) -> str | None:
        """The first option that is not as it was; a run of an older version may not know them all."""
        return next((key for key, value in config.items() if had.get(key, value) != value), None)

    def _same(self, had: dict, config: dict) -> None:
        key = self._differs(had, config)
        if key:
            why = "give the same to resume"
            if key == "epochs":
                why = "the learning rate, phi and the window of e0 are laid out over all epochs: start a new run"
            option = f"--{key.replace('_', '-')} {config[key]}"
            raise InputError(f"{option}: the run in {self.folder} has {had.get(key)}; {why}")

    def _newest(self) -> dict | None:
        """The last checkpoint that is whole. Damaged ones are put aside when the run goes on (`begin`), so that
        they never replace a good one."""
        tried, self._damaged = [], []
        for path in (self.folder / "checkpoint.pt", self.folder / "previous.pt"):
            try:
                state = unpack(path.read_bytes())
                self.saved = len(json.loads(state["rows"]))
                if tried:
                    print(f"{tried[0]}; going on from {path} (epoch {self.saved})", file=sys.stderr)
                return state
            except FileNotFoundError:
                continue
            except Damaged as error:
                self._damaged.append(path)
                tried.append(f"{path}: {error}")
        if tried:
            raise InputError(f"--resume: {'; '.join(tried)}: no checkpoint is left, start again with --overwrite")
        return None

    def begin(self, config: dict, rows: list[dict]) -> None:
        """Everything is loaded: the folder becomes this run's. `config` is what `look` had, and what is known
        by now. Rows that no checkpoint knows are repeated."""
        try:
            while True:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._take_lock()
                locked = self.folder
                if self._fresh:
                    self._fresh()  # again, now that no one else can take it
                if self.folder == locked:
                    break
                self.close()
            for path in self._damaged:
                path.replace(path.with_suffix(".damaged"))
            if not rows:
                for path in [*map(self.folder.joinpath, FILES), *self.folder.glob("snapshot-*.npz")]:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror}; name another with --out") from None
        self._write("config.json", (json.dumps(config, indent=2) + "\n").encode())
        self._write("metrics.jsonl", "".join(map(_line, rows)).encode())
        self.rows = len(rows)

    def _take_lock(self) -> None:
        """Held until the process ends, however it ends."""
        if fcntl is None or self._lock:
            return
        try:
            self._lock = (self.folder / ".lock").open("a+")
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror}; name another with --out") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            who = self._lock.read().strip()
            self.close()
            raise InputError(
                f"{self.folder} is in use by process {who}: wait for it, or name another with --out"
            ) from None
        with contextlib.suppress(OSError):  # who it is, for the message above; a full disk need not know
            self._lock.truncate(0)
            self._lock.write(f"{os.getpid()}\n")
            self._lock.flush()

    def close(self) -> None:
        """Writes what still waits, and lets the folder go."""
        with contextlib.suppress(WriteError):
            self.flush()
        if self._lock:
            with contextlib.suppress(OSError):
                self._lock.close()
            self._lock = None

    def _still_ours(self) -> None:
        """The folder may have been moved away, and another run begun in its place."""
        if self._lock:
            ours, there = os.fstat(self._lock.fileno()), os.stat(self.folder / ".lock")
            if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
                raise OSError(errno.ESTALE, "another run has taken the folder")

    # ---- writing

    def _write(self, name: str, content) -> None:
        """Beside, flushed to the disk, then renamed: a file is the old one or the new one, never half of it."""
        path, part = self.folder / name, self.folder / (name + ".part")
        try:
            self._still_ours()
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if name == "checkpoint.pt" and path.exists():
                self._keep_as_previous(path)
            part.replace(path)
            if hasattr(os, "O_DIRECTORY"):  # the renaming itself, to the disk
                folder = os.open(self.folder, os.O_DIRECTORY)
                os.fsync(folder)
                os.close(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()  # it may be what fills the disk
            raise self._failed(name, error) from None

    def _keep_as_previous(self, path: Path) -> None:
        """A second name for the old checkpoint, so that there is one under the first name at every moment."""
        link, previous = path.with_suffix(".link"), path.with_name("previous.pt")
        try:
            link.unlink(missing_ok=True)
            os.link(path, link)
            link.replace(previous)
        except OSError:  # a file system without links
            path.replace(previous)

    def row(self, row: dict) -> None:
        """Only appended: what is lost here is in the checkpoint too."""
        try:
            self._still_ours()
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(_line(row))
            self.rows = row["epoch"]
        except OSError as error:
            raise self._failed("metrics.jsonl", error) from None

    def _failed(self, name: str, error: OSError) -> WriteError:
        kept = f"epoch {self.saved} is kept" if self.saved else "no epoch was kept"
        go_on = f"the same command with --resume --out {self.folder}" if self.saved else "start again"
        return WriteError(f"cannot write {self.folder / name}: {error.strerror}; {kept}: mend that, then {go_on}")

    def save(self, state: dict, epoch: int, now: bool) -> None:
        """Takes the state after `epoch`; on the disk `now`, or with a later one, or when the run is stopped: until
        then a copy of it waits, and costs no more than copying."""
        self._waiting = (epoch, state if now else copied(state))
        if now:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            epoch, state = self._waiting
            self._write("checkpoint.pt", pack(state))
            self.saved, self._waiting = epoch, None

    def keep(self, name: str) -> None:
        """The newest checkpoint under another name too."""
        self.flush()
        self._write(name, (self.folder / "checkpoint.pt").read_bytes())

    def snapshot(self, epoch: int, **tensors: torch.Tensor) -> None:
        arrays = {name: value.cpu().numpy() for name, value in tensors.items()}
        if ranks.first():
            self._write_arrays(f"snapshot-{epoch:04d}.npz", arrays)

    def _write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        self._write(name, buffer.getbuffer())

    def results(self, classifier: dict, **candidates: torch.Tensor) -> None:
        self._write_arrays("candidates.npz", {name: value.cpu().numpy() for name, value in candidates.items()})
        buffer = io.BytesIO()
        torch.save(classifier, buffer)
        self._write("model.pt", buffer.getbuffer())

    def text(self, name: str, content: str) -> None:
        self._write(name, content.encode("utf-8", "surrogateescape"))

    def page(self, name: str, make: Callable[[], str]) -> None:
        """A page about the results, which are written by now: it may fail, and then that is said. What cannot be
        written ends the run: --resume makes the page, as the run has no summary yet."""
        try:
            self.text(name, make())
        except WriteError:
            raise
        except Exception as error:
            why = (str(error).splitlines() or [""])[0]
            print(f"note: {name} was not made ({type(error).__name__}: {why})", file=sys.stderr)

    def finish(self, summary: dict) -> None:
        """What has it is finished."""
        self._write("summary.json", (json.dumps(plain(summary), indent=2) + "\n").encode())


def _line(row: dict) -> str:
    return json.dumps(plain(row)) + "\n"


def plain(row: dict) -> dict:
    """JSON has no nan: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


class Interrupt:
    """Ctrl-C and SIGTERM ask the loop to stop after the step; a second one stops at once."""

    def __init__(self):
        self.signal, self.at = 0, 0.0
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)  # the terminal was closed; ignored under nohup
        for number in numbers:
            signal.signal(number, self._asked)

    def check(self) -> None:
        if self.signal:
            raise Stopped

    def _asked(self, number, frame) -> None:
        if not self.signal:
            self.signal, self.at = number, time.monotonic()
            with contextlib.suppress(OSError):
                print("\nstopping after this step (once more: at once) ...", file=sys.stderr, flush=True)
        elif time.monotonic() - self.at > 2:  # schedulers send the same one to a job and its processes
            os._exit(128 + number)


def exit_status(error: BaseException, run: Run | None) -> int:
    """What ended the run, in a line and a number; what nobody foresaw is raised again."""
    if isinstance(error, InputError | Broken):
        say(f"error: {error}", sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    asked = run.interrupt.signal if run and run.interrupt else 0
    if isinstance(error, Stopped) or ranks.lost(error) and asked:  # or another rank was stopped a step earlier
        return 128 + asked
    if ranks.lost(error):
        print("error: another rank is gone; what rank 0 saved is kept: go on with --resume", file=sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        print("\nstopped before the first step; nothing was lost", file=sys.stderr)
        return 130
    raise error
