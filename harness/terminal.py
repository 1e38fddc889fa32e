"""What the terminal shows: what is about to happen, a row an epoch, a live bar inside a long one, the result."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from harness import ranks, title
from harness.options import PICO_FAMILY, PRESETS


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

    COLUMNS = {  # by the row's key: heading, width, whether only the hidden truth tells it
        "epoch": ("epoch", 5, False),
        "loss": ("loss", 6, False),
        "val": ("val", 6, False),
        "test": ("test", 6, False),
        "transductive": ("train", 6, True),
        "noise_level": ("noise", 6, True),
        "set_size": ("|S|", 5, False),
        "phi_c": ("phi_c", 6, True),
        "phi_n": ("phi_n", 6, True),
        "bayes_error": ("bayes", 6, True),
        "corrections": ("moved", 6, False),
        "correction_precision": ("right", 6, True),
        "images_per_second": ("img/s", 6, False),
    }

    def __init__(
        self, epochs: int, steps: int, corrects: bool, truth_known: bool = True, score: str = "test accuracy"
    ):
        self.stream = sys.stdout
        self.corrects, self.truth_known, self.score = corrects, truth_known, score
        self.live = self.stream.isatty() and ranks.first()
        self.epochs, self.steps = epochs, steps
        self.began = self.shown = time.monotonic()
        self.steps_done, self.headed = 0, False

    def say(self, line: str = "") -> None:
        if not ranks.first():
            return
        self._print(f"\r\033[K{line}" if self.live else line)

    def _print(self, text: str, end: str = "\n") -> None:
        with contextlib.suppress(OSError):  # a closed pipe or a full disk is no reason to stop a run
            print(text, end=end, file=self.stream, flush=True)

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Called after every step; shows something at most five times a second, and only in long epochs. In a file
        a first line after eight seconds, then one a minute."""
        now = time.monotonic()
        self.steps_done += 1
        if self.steps_done == 1:  # with all that comes before it: no measure of the others
            self.first = now
            return
        if now - self.shown < (0.2 if self.live else 8 if self.shown == self.began else 60):
            return
        self.shown = now
        pace = (now - self.first) / (self.steps_done - 1)
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
        """Only what is known: without the truth of the training samples some columns have no values."""
        columns = {k: v for k, v in self.COLUMNS.items() if self.truth_known or not v[2]}
        if not self.headed or row["epoch"] % 20 == 1:
            heads = {"test": "test" if self.score == "test accuracy" else "score"}
            self.say(" ".join(heads.get(key, head).rjust(width) for key, (head, width, _) in columns.items()))
            self.headed = True
        mark = ""
        if row["e0"] == row["epoch"]:
            starts = self.corrects and row["epoch"] < self.epochs and row.get("tau") != math.inf
            mark = "  <- e0: correction starts" if starts else "  <- e0"
        form = dict(epoch="d", loss=".3f", set_size=".2f", corrections="d", images_per_second=".0f")
        cells = [f"{row[k]:{form[k]}}" if k in form else per_cent(row[k]) for k in columns]
        self.say(" ".join(cell.rjust(columns[k][1]) for k, cell in zip(columns, cells, strict=True)) + mark)
        if "noise_estimate" in row:
            self.say(f"      noise estimate {estimated(row['noise_estimate'])}, from the held-out part")
        if "tau" in row:
            why = "the held-out sets are {} probable if their truth may be missing"
            if row["tau"] == math.inf:
                slight = "the held-out sets do not show beyond doubt that any truth is missing"
                fits = row["noise_estimate"].get("fits", True)
                self.say(f"      nothing is corrected: {why.format('not more') if fits else slight}")
            else:
                self.say(f"      labels are moved in, tau {row['tau']:.4g}: {why.format('more')}")
        if not row.get("known_enough", True):  # --tau auto
            few = f"the network is guessed to be right about only {100 * row['known']:.0f} % of the samples"
            self.say(f"      nothing is corrected after all: {few}")
        if row.get("noise_estimate", {}).get("fits") is False:
            self.say("      labels err together in a way that no model here explains: hence the wide interval")
        self.shown = time.monotonic()

    def opening(self, c, dataset, samples, learner, folder: Path, done: int) -> None:
        """What is about to happen."""
        d, count = dataset, torch.get_num_threads()
        million = sum(p.numel() for p in learner.network.parameters()) / 1e6
        encoders = "two encoders" if c.base in (*PICO_FAMILY, "dividemix") else "one encoder"
        threads = f" ({count} thread{'s' * (count > 1)})" if c.device == "cpu" else ""
        precision = ("" if learner.precision.name == "off" else f", {learner.precision.name}") + (
            f", {ranks.size()} ranks" if ranks.size() > 1 else ""
        )
        watched = learner.refine.epoch
        rule = f"found by the {watched.rule} rule, window {watched.window}" if c.e0 == "auto" else c.e0
        curve = f"{len(samples.held_out)} held-out samples"
        if c.val == "test":
            curve = "test accuracy, which leaks the test set; no noise estimate"
        tau = "auto" if c.tau_auto else f"{c.tau:g}"
        what = "nothing is corrected" if c.no_irnet else f"tau {tau}, extra views {c.views}"
        mode = "" if c.irnet == "paper" else f" ({c.irnet})"
        self.say(f"{title(c.base)} {'alone' if c.no_irnet else 'with IRNet' + mode} on {d.name}, seed {c.seed}")
        self.say(f"  data     {len(d.images):,} training and {self._data(d)}, {d.num_classes} classes")
        sets = samples.before.sum(1).float().mean()
        self.say(f"  labels   {sets:.2f} candidates a sample; {self._missing(d, samples.before, c.eta)}")
        for note, some in self._notes(d, samples.before, own=c.dataset not in PRESETS).items():
            if some:
                self.say(f"           {note}: {' | '.join(some[:10])}{' ...' * (len(some) > 10)}")
        for note in d.notes:
            self.say(f"  note     {note}")
        self.say(f"  network  {c.arch}, {encoders}, {million:.2f} M parameters, on {c.device}{threads}{precision}")
        self.say(f"  plan     {c.epochs} epochs of {self.steps} steps of {c.batch_size}; {what}")
        self.say(f"  e0       {rule}; the curve is from {curve}")
        if c.careful and c.val == "test":
            self.say(f"  note     with --val test the noise report's guard cannot look: tau stays {tau}")
        if watched.earliest >= c.epochs and not c.no_irnet:
            self.say("           too few epochs to find it, so nothing will be corrected: --e0 N, or more --epochs")
        if learner.base.starts > c.epochs:
            begins = f"{title(c.base)} only begins in epoch {learner.base.starts}"
            self.say(f"  note     {begins}, after the end of this run: more --epochs, or a smaller --proto-start")
        if c.device == "mps":
            self.say("  note     nobody has run this on MPS yet; compare with --device cpu")
        self.say(f"  files    {folder}" + (f"; going on after epoch {done}" if done else ""))
        if self.truth_known:
            self.say(
                "  columns  in per cent: val (see e0), test and train accuracy, samples whose truth is missing, hit"
            )
            self.say(
                "           accuracies (Eqs. 7-8), Bayes error (Eq. 6); labels moved in, and how many were right"
            )
        else:
            self.say(f"  columns  in per cent: val (see e0), {self.score}; mean size of a set; labels moved in")
        if samples.large:
            self.say("           a dash: not looked at in this epoch (--test-every, --transductive-every)")
        self.say()

    @staticmethod
    def _data(d) -> str:
        size, colour = d.images.shape[-1], "colour" if d.images.shape[1] == 3 else "grey"
        kind = f"samples of {d.images.shape[1]} features" if d.features else f"images, {size}x{size} {colour}"
        if d.voted_tests:
            kind += f" ({d.voted_tests:,} of them by votes alone, without their truth)"
        why = "the annotators agree on them most"
        why = "one label each, not confirmed" if d.scored and d.scored.single else why
        return f"{len(d.test_images):,} {'test' if d.scored is None else f'set-aside ({why})'} {kind}"

    @staticmethod
    def _missing(d, before: torch.Tensor, eta: float | None) -> str:
        if d.truth_known:
            asked = f" (asked for {100 * eta:g} %)" if eta is not None else ""
            missing = (~before.gather(1, d.labels[:, None])).float().mean()
            return f"the truth is missing from {100 * float(missing):.2f} %{asked}"
        if (d.labels >= 0).any():
            return f"the truth is known of {100 * (d.labels >= 0).float().mean():.0f} %, too little to report by"
        return "from how many the truth is missing is not known"

    @staticmethod
    def _notes(d, before: torch.Tensor, own: bool) -> dict[str, list[str]]:
        names = d.class_names
        spelt = Counter(map(str.casefold, names))
        return {
            "classes": names if own else [],
            "never a candidate": [n for n, ever in zip(names, before.any(0).tolist(), strict=True) if not ever],
            "the same but for capitals": [name for name in names if spelt[name.casefold()] > 1],
        }

    def closing(self, c, summary: dict, folder: Path) -> None:
        p = {key: 100 * value for key, value in summary.items() if isinstance(value, float)}
        self.say()
        names = {"test accuracy": "test accuracy ", "score on set-aside samples": "set-aside score"}
        name = names.get(self.score, "score by votes ")
        self.say(f"{name} last {p['last']:.2f} %, best {p['best']:.2f} %, gap {p['gap']:.2f} points")
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
        if "decisions" in summary:
            shares = {
                "page_right": "the page's proposals",
                "proposals_right": "this run's",
                "majority_right": "votes",
            }
            right = [f"{words} {p[key]:.1f} %" for key, words in shares.items() if key in p]
            none = f", {summary['decisions_none']} none of the classes" * bool(summary["decisions_none"])
            self.say(
                f"decisions      {summary['decisions']}{none}; right on them: {', '.join(right) or 'not known'}"
            )
        self.say(f"files          {folder}, in {duration(summary['seconds'])}")
