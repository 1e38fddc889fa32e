"""The run's folder and what the terminal shows: configuration, rows, checkpoint, results, a live bar.

runs/<name>/ holds config.json, metrics.jsonl (a row an epoch), checkpoint.pt (the state after the last finished
epoch, the final model in the end), and, when the run is done, summary.json and candidates.npz.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

import irnet
import models
from data import InputError

# ------------------------------------------------------------------ the folder


class Run:
    """One run's files. A folder that holds another run is never overwritten."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def fresh(cls, folder: Path, given: bool) -> Run:
        """A new folder; where the user did not name it, the next free number is appended to the name."""
        candidate, number = folder, 2
        while (candidate / "config.json").exists():
            if given:
                raise InputError(
                    f"--out {folder} holds a run: add --resume to go on with it, or name another folder"
                )
            candidate, number = folder.with_name(f"{folder.name}-{number}"), number + 1
        return cls(candidate)

    @classmethod
    def latest(cls, folder: Path, given: bool) -> Run:
        """The folder to resume: as given, or the newest of this name."""
        found = [folder] if given else [folder, *folder.parent.glob(f"{folder.name}-[0-9]*")]
        found = [f for f in found if (f / "checkpoint.pt").exists()]
        if not found:
            raise InputError(f"--resume: no checkpoint in {folder}: start it without --resume")
        return cls(max(found, key=lambda f: (f / "checkpoint.pt").stat().st_mtime))

    def start(self, config: dict) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("config.json", json.dumps(config, indent=2) + "\n")
            self._write("metrics.jsonl", "")
        except OSError as error:
            raise InputError(
                f"cannot write to {self.folder}: {error.strerror}; name another folder with --out"
            ) from None

    def _write(self, name: str, text: str) -> None:
        """Beside, then renamed: a file is the old one or the new one, never half of it."""
        part = self.folder / (name + ".part")
        part.write_text(text)
        part.replace(self.folder / name)

    def row(self, row: dict) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(_plain(row)) + "\n")

    def rewind(self, rows: list[dict]) -> None:
        """The rows that a checkpoint knows; later ones are repeated by the resumed run."""
        self._write("metrics.jsonl", "".join(json.dumps(_plain(row)) + "\n" for row in rows))

    def save(self, state: dict) -> None:
        part = self.folder / "checkpoint.pt.part"
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / "checkpoint.pt")

    def load(self, device: torch.device) -> dict:
        try:
            return torch.load(self.folder / "checkpoint.pt", map_location=device, weights_only=True)
        except Exception as error:  # whatever a foreign or damaged file makes of itself
            raise InputError(f"cannot read {self.folder / 'checkpoint.pt'}: {str(error).splitlines()[0]}") from None

    def resume(self, config: dict, setup) -> list[dict]:
        """Puts `setup` back to the end of the last finished epoch; returns the rows so far."""
        state = self.load(setup.device)
        for key, value in config.items():
            if state["config"].get(key) != value:
                option, had = "--" + key.replace("_", "-"), state["config"].get(key)
                raise InputError(
                    f"{option}: the run in {self.folder} has {had}, not {value}; give the same to resume"
                )
        rows = json.loads(state["rows"])
        if len(rows) >= config["epochs"]:
            raise InputError(f"--resume: {self.folder} is finished; its summary.json has the results")
        setup.load_state_dict(state)
        self.rewind(rows)
        return rows

    def finish(self, summary: dict, **candidates: np.ndarray) -> None:
        part = self.folder / "candidates.npz.part"
        with part.open("wb") as file:
            np.savez_compressed(file, **candidates)
        part.replace(self.folder / "candidates.npz")
        self._write("summary.json", json.dumps(_plain(summary), indent=2) + "\n")


def _plain(row: dict) -> dict:
    """JSON has no nan: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


class Interrupt:
    """Ctrl-C and SIGTERM ask the loop to stop after the step; a second one stops at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._asked)

    def _asked(self, number, frame) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        print("\nstopping after this step (once more: at once) ...", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the terminal


def per_cent(value: float | None) -> str:
    return "   -  " if value is None or not math.isfinite(value) else f"{100 * value:6.2f}"


def duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 100:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"


class Screen:
    """One aligned row an epoch; inside a long epoch a bar with the time left (elsewhere a line a minute)."""

    HEAD = "epoch   loss    val   test  train  noise   |S|  phi_c  phi_n  bayes  moved  right  img/s"

    def __init__(self, epochs: int, steps: int, corrects: bool):
        self.stream = sys.stdout
        self.mark = "  <- e0: correction starts" if corrects else "  <- e0"
        self.live = self.stream.isatty()
        self.epochs, self.steps = epochs, steps
        self.began = self.shown = time.monotonic()
        self.steps_done, self.headed = 0, False

    def say(self, line: str = "") -> None:
        print(f"\r\033[K{line}" if self.live else line, file=self.stream, flush=True)

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Called after every step; shows something at most ten times a second, and only in long epochs."""
        now = time.monotonic()
        self.steps_done += 1
        if now - self.shown < (0.2 if self.live else 8 if self.steps_done < 9 else 60):
            return
        self.shown = now
        pace = (now - self.began) / self.steps_done
        left = (self.epochs - epoch) * self.steps + steps - step
        text = (
            f"epoch {epoch}/{self.epochs}  step {step}/{steps}  {duration((steps - step) * pace)} left in it, "
            f"{duration(left * pace)} in all"
        )
        if self.live:
            filled = round(20 * step / steps)
            print(f"\r\033[K[{'#' * filled}{'.' * (20 - filled)}] {text}", end="", file=self.stream, flush=True)
        else:
            self.say(text)

    def row(self, row: dict) -> None:
        if not self.headed or row["epoch"] % 20 == 1:
            self.say(self.HEAD)
            self.headed = True
        p = per_cent
        self.say(
            f"{row['epoch']:5d} {row['loss']:6.3f} {p(row['val'])} {p(row['test'])} {p(row['transductive'])} "
            f"{p(row['noise_level'])} {row['set_size']:5.2f} {p(row['phi_c'])} {p(row['phi_n'])} "
            f"{p(row['bayes_error'])} {row['corrections']:6d} {p(row['correction_precision'])} "
            f"{row['images_per_second']:6.0f}" + (self.mark if row["e0"] == row["epoch"] else "")
        )
        self.shown = time.monotonic()

    def opening(self, c, s, folder: Path, done: int) -> None:
        """What is about to happen."""
        d, n = s.dataset, len(s.images)
        size, colour = d.images.shape[-1], "colour" if d.images.shape[1] == 3 else "grey"
        missing = 100 * irnet.noise_level(s.before, d.labels)
        asked = f" (asked for {100 * c.eta:g} %)" if c.eta is not None else ""
        sets = s.before.sum(1).float().mean()
        encoders = "two encoders" if c.base == "pico" else "one encoder"
        million = models.parameter_count(s.network) / 1e6
        precision = ", bf16" if s.bf16 else ""
        count = torch.get_num_threads()
        threads = f" ({count} thread{'s' * (count > 1)})" if c.device == "cpu" else ""
        rule = f"found by the {c.e0_rule} rule, window {s.refine.epoch.window}" if c.e0 == "auto" else c.e0
        curve = (
            "test accuracy, which leaks the test set" if c.val == "test" else f"{len(s.held_out)} held-out samples"
        )
        what = "nothing is corrected" if c.no_irnet else f"tau {c.tau:g}, extra views {c.views}"
        base = "PiCO" if c.base == "pico" else c.base.upper()
        self.say(f"{base} {'alone' if c.no_irnet else 'with IRNet'} on {d.name}, seed {c.seed}")
        self.say(f"  data     {n:,} training and {len(s.test_images):,} test images, {size}x{size} {colour}, "
                 f"{d.num_classes} classes")  # fmt: skip
        self.say(f"  labels   {sets:.2f} candidates a sample; the truth is missing from {missing:.2f} %{asked}")
        self.say(f"  network  {c.arch}, {encoders}, {million:.2f} M parameters, on {c.device}{threads}{precision}")
        self.say(f"  plan     {c.epochs} epochs of {self.steps} steps of {c.batch_size}; {what}")
        self.say(f"  e0       {rule}; the curve is from {curve}")
        self.say(f"  files    {folder}" + (f"; going on after epoch {done}" if done else ""))
        self.say(
            "  columns  in per cent: val (see e0), test and train accuracy, samples whose truth is missing, hit"
        )
        self.say("           accuracies (Eqs. 7-8), Bayes error (Eq. 6); labels moved in, and how many were right")
        self.say()

    def stopped(self, epoch: int, folder: Path) -> None:
        kept = f"epochs 1 to {epoch - 1} are kept" if epoch > 1 else "no epoch was finished"
        self.say(f"stopped in epoch {epoch}; {kept} in {folder}")
        if epoch > 1:
            self.say(f"to go on: the same command with --resume --out {folder}")

    def closing(self, c, summary: dict, folder: Path) -> None:
        p = {key: 100 * value for key, value in summary.items() if isinstance(value, float)}
        self.say()
        self.say(f"test accuracy  last {p['last']:.2f} %, best {p['best']:.2f} %, gap {p['gap']:.2f} points")
        self.say(f"train accuracy {p['transductive']:.2f} % (over all classes, against the hidden truth)")
        if c.no_irnet:
            self.say(f"noise level    {p['noise_before']:.2f} %, as it was")
        else:
            fixed = f"; {summary['corrections']:,} labels moved in" if summary["corrections"] else "; nothing moved"
            fixed += f", {p['correction_precision']:.1f} % of them right" if summary["corrections"] else ""
            found = f"e0 = {summary['e0']}" if summary["e0"] else "e0 was not found"
            self.say(f"noise level    {p['noise_before']:.2f} % -> {p['noise_after']:.2f} %; {found}{fixed}")
        self.say(f"files          {folder}, in {duration(summary['seconds'])}")
