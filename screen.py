"""What the terminal shows: what is about to happen, a row an epoch, a live bar inside a long one, the result."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import baselines
import crowd
import irnet
import models
import parallel
from presets import PRESETS


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


def estimated(found: dict | None) -> str:
    if not found or found["eta"] is None:
        return "none"
    eta, low, high = (100 * found[key] for key in ("eta", "low", "high"))
    return f"{eta:.1f} % (95 % interval {low:.1f} to {high:.1f})"


class Screen:
    """One aligned row an epoch; inside a long epoch a bar with the time left (elsewhere a line a minute)."""

    HEAD = "epoch   loss    val   test  train  noise   |S|  phi_c  phi_n  bayes  moved  right  img/s"

    def __init__(self, epochs: int, steps: int, corrects: bool):
        self.stream = sys.stdout
        self.corrects = corrects
        self.live = self.stream.isatty() and parallel.first()
        self.epochs, self.steps = epochs, steps
        self.began = self.shown = time.monotonic()
        self.steps_done, self.headed = 0, False

    def say(self, line: str = "") -> None:
        if not parallel.first():
            return
        self._print(f"\r\033[K{line}" if self.live else line)

    def _print(self, text: str, end: str = "\n") -> None:
        with contextlib.suppress(OSError):  # a closed pipe or a full disk is no reason to stop a run
            print(text, end=end, file=self.stream, flush=True)

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
            self._print(f"\r\033[K[{'#' * filled}{'.' * (20 - filled)}] {text}", end="")
        else:
            self.say(text)

    def row(self, row: dict) -> None:
        if not self.headed or row["epoch"] % 20 == 1:
            self.say(self.HEAD)
            self.headed = True
        p, mark = per_cent, ""
        if row["e0"] == row["epoch"]:
            starts = self.corrects and row["epoch"] < self.epochs and row.get("tau") != math.inf
            mark = "  <- e0: correction starts" if starts else "  <- e0"
        self.say(
            f"{row['epoch']:5d} {row['loss']:6.3f} {p(row['val'])} {p(row['test'])} {p(row['transductive'])} "
            f"{p(row['noise_level'])} {row['set_size']:5.2f} {p(row['phi_c'])} {p(row['phi_n'])} "
            f"{p(row['bayes_error'])} {row['corrections']:6d} {p(row['correction_precision'])} "
            f"{row['images_per_second']:6.0f}{mark}"
        )
        if "noise_estimate" in row:
            self.say(f"      noise estimate {estimated(row['noise_estimate'])}, from the held-out part")
        if "tau" in row:
            noise = row["noise_estimate"]["high"]
            noise = "" if noise is None else f", were {100 * noise:.1f} % noisy"
            if row["tau"] == math.inf:
                self.say(f"      nothing is corrected: more labels moved in would be wrong than right{noise}")
            else:
                self.say(f"      tau {row['tau']:.4g}: half of the labels moved in, or more, would be right{noise}")
        self.shown = time.monotonic()

    def opening(self, c, s, folder: Path, done: int) -> None:
        """What is about to happen."""
        d, n = s.dataset, len(s.images)
        size, colour = d.images.shape[-1], "colour" if d.images.shape[1] == 3 else "grey"
        missing = "from how many the truth is missing is not known"
        if d.truth_known:
            asked = f" (asked for {100 * c.eta:g} %)" if c.eta is not None else ""
            missing = f"the truth is missing from {100 * irnet.noise_level(s.before, d.labels):.2f} %{asked}"
        elif (d.labels >= 0).any():
            missing = f"the truth is known of {100 * (d.labels >= 0).float().mean():.0f} %, too little to report by"
        sets = s.before.sum(1).float().mean()
        encoders = "two encoders" if c.base in (*baselines.PICO_FAMILY, "dividemix") else "one encoder"
        million = models.parameter_count(s.network) / 1e6
        precision = (", bf16" if s.bf16 else "") + (f", {parallel.size()} ranks" if parallel.size() > 1 else "")
        count = torch.get_num_threads()
        threads = f" ({count} thread{'s' * (count > 1)})" if c.device == "cpu" else ""
        rule = f"found by the {c.e0_rule} rule, window {s.refine.epoch.window}" if c.e0 == "auto" else c.e0
        curve = (
            "test accuracy, which leaks the test set; no noise estimate"
            if c.val == "test"
            else f"{len(s.held_out)} held-out samples"
        )
        what = "nothing is corrected" if c.no_irnet else f"tau {c.tau:g}, extra views {c.views}"
        base = baselines.title(c.base)
        self.say(f"{base} {'alone' if c.no_irnet else 'with IRNet'} on {d.name}, seed {c.seed}")
        kind = (
            f"samples of {d.images.shape[1]} features" if s.noise is not None else f"images, {size}x{size} {colour}"
        )
        why = (
            "one label each, not confirmed" if d.scored and d.scored.single else "the annotators agree on them most"
        )
        tests = "test" if d.scored is None else f"set-aside ({why})"
        self.say(f"  data     {n:,} training and {len(s.test_images):,} {tests} {kind}, {d.num_classes} classes")
        self.say(f"  labels   {sets:.2f} candidates a sample; {missing}")
        names = crowd.class_names(d)
        spelt = Counter(map(str.casefold, names))
        notes = {
            "classes": names if c.dataset not in PRESETS else [],
            "never a candidate": [n for n, ever in zip(names, s.before.any(0).tolist(), strict=True) if not ever],
            "the same but for capitals": [name for name in names if spelt[name.casefold()] > 1],
        }
        for note, some in notes.items():
            if some:
                self.say(f"           {note}: {' | '.join(some[:10])}{' ...' * (len(some) > 10)}")
        self.say(f"  network  {c.arch}, {encoders}, {million:.2f} M parameters, on {c.device}{threads}{precision}")
        self.say(f"  plan     {c.epochs} epochs of {self.steps} steps of {c.batch_size}; {what}")
        self.say(f"  e0       {rule}; the curve is from {curve}")
        if s.refine.epoch.earliest >= c.epochs and not c.no_irnet:
            self.say(
                "           too few epochs to find it, so nothing will be corrected: --e0 N or a smaller --window"
            )
        self.say(f"  files    {folder}" + (f"; going on after epoch {done}" if done else ""))
        self.say(
            "  columns  in per cent: val (see e0), test and train accuracy, samples whose truth is missing, hit"
        )
        self.say("           accuracies (Eqs. 7-8), Bayes error (Eq. 6); labels moved in, and how many were right")
        self.say()

    def stopped(self, epoch: int, folder: Path) -> None:
        kept = f"epochs 1 to {epoch - 1} are kept" if epoch > 1 else "no epoch was finished"
        self.say(f"stopped in epoch {epoch}; {kept} in {folder}")
        self.say(f"to go on: the same command with --resume --out {folder}")

    def closing(self, c, summary: dict, folder: Path) -> None:
        p = {key: 100 * value for key, value in summary.items() if isinstance(value, float)}
        self.say()
        self.say(f"test accuracy  last {p['last']:.2f} %, best {p['best']:.2f} %, gap {p['gap']:.2f} points")
        known, moved = not math.isnan(p["noise_before"]), summary["corrections"]
        if known:
            self.say(f"train accuracy {p['transductive']:.2f} % (over all classes, against the hidden truth)")
        level = f"{p['noise_before']:.2f} %" if known else "not known"
        if c.no_irnet:
            self.say(f"noise level    {level}, as it was")
        else:
            level += f" -> {p['noise_after']:.2f} %" if known else ""
            fixed = f"{moved:,} labels moved in" if moved else "nothing moved"
            fixed += f", {p['correction_precision']:.1f} % of them right" if moved and known else ""
            found = f"e0 = {summary['e0']}" if summary["e0"] else "e0 was not found"
            self.say(f"noise level    {level}; {found}; {fixed}")
        self.say(f"noise estimate {estimated(summary['noise_estimate'])}, without any true label")
        self.say(f"files          {folder}, in {duration(summary['seconds'])}")
