"""Reads one's own tables: a CSV beside its images, a CSV of features, a folder of class folders. Every error names
file and row, and nothing outside the folder is ever opened.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from crowd.annotators import columns
from crowd.images import SUFFIXES, decode
from crowd.spelling import in_order, key, lists, meaningless, one_spelling
from crowd.votes import Given, as_input, check_names, feature_notes, first_line
from harness import InputError, is_table

KNOWN = ("file", "id", "label", "candidates", "annotator", "truth", "split")


@dataclass
class Sample:
    line: int  # the first of its rows; 0 in a folder
    votes: dict[str, int] = field(default_factory=dict)  # by label
    lines: dict[str, int] = field(default_factory=dict)  # where each label, and each of the columns below, stands
    heard: dict[tuple[str, str], int] = field(default_factory=dict)  # annotator and label: how often
    truth: str = ""
    split: str = ""
    features: list[float] | None = None


def rows_of(table: str) -> list[dict]:
    """Of a table that a run has written, by its columns."""
    csv.field_size_limit(2**31 - 1)  # a set of ten thousand names is a long field
    return list(csv.DictReader(io.StringIO(table, newline="")))


def bad(path: Path, line: int, why: str) -> InputError:
    return InputError(f"{path}, line {line}: {why}" if line else f"{path}: {why}")


# ------------------------------------------------------------------ rows


def read_rows(path: Path) -> tuple[int, list[str], list[tuple[int, dict[str, str]]]]:
    """The header's line, its columns in small letters, and the rows, each with its line."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad(path, content[: error.start].count(b"\n") + 1, "not UTF-8: save the table as UTF-8") from None
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
    skipped = re.match(r"(\s*\n|sep=.\r?\n)*", text)[0]  # blank lines, and what Excel may write above the header
    text, skipped = text[len(skipped) :], skipped.count("\n")
    first = text.split("\n", 1)[0]
    rows, found = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True), []
    try:
        head = [name.strip().lower() for name in next(rows, [])]
        for values in rows:
            line = skipped + rows.line_num
            if not any(map(str.strip, values)):  # a blank line
                continue
            if len(values) != len(head):
                raise bad(path, line, f"{len(values)} values in a row, but {len(head)} columns")
            found.append((line, {name: value.strip() for name, value in zip(head, values, strict=True)}))
    except csv.Error as error:
        raise bad(path, skipped + rows.line_num, str(error)) from None
    return skipped + 1, head, found


def check_head(path: Path, line: int, head: list[str]) -> tuple[str, list[str]]:
    """label or candidates; the columns of features, none where the table names files."""
    kinds = [name for name in ("label", "candidates") if name in head]
    known = [name for name in head if name in KNOWN]
    numbers = [] if "file" in head else [name for name in head if name and name not in KNOWN]
    once = len(set(known)) == len(known) and len(set(numbers)) == len(numbers)
    if not ("file" in head or numbers) or len(kinds) != 1 or not once:
        wanted = "file and label (a row a vote) or file and candidates (a row a sample), each once"
        wanted += "; without file all other columns are features"
        raise bad(path, line, f"the columns must be {wanted}, not {', '.join(head) or 'none'}")
    return kinds[0], numbers


def samples_of(
    path: Path, classes: list[str] | None, unsure: Sequence[str]
) -> tuple[dict[str, Sample], str, bool, list[str]]:
    """By name, in the order of the table; label or candidates; whether they are features; lines to be said."""
    line, head, rows = read_rows(path)
    kind, numbers = check_head(path, line, head)
    if not rows:
        raise InputError(f"{str(path)!r} has no rows below its header")
    mark = separator([row[kind] for _, row in rows], classes) if kind == "candidates" else None
    parted = [[part.strip() for part in row[kind].split(mark)] if mark else [row[kind]] for _, row in rows]
    counts = Counter(label for labels in parted for label in labels if label)
    truths = Counter(row["truth"] for _, row in rows if row.get("truth"))
    called, notes = one_spelling(counts | {k: 0 for k in truths if k not in counts}, classes)
    several, nothing = lists(counts) if kind == "label" else {}, {key(name) for name in unsure}
    notes += [f"--unsure {name}: nobody voted so" for name in unsure if key(name) not in map(key, counts)]
    samples: dict[str, Sample] = {}
    for number, ((line, row), labels) in enumerate(zip(rows, parted, strict=True)):
        if row[kind] in several and row[kind] not in (classes or ()):
            raise bad(path, line, f"{row[kind]!r} is several labels: a row each, or a column of candidates")
        sample = _sample(path, line, row, kind, numbers, number, samples)
        if row.get("split", "").lower() == "test" and row.get("truth") and not row[kind]:
            labels = []  # a test sample needs no vote
        row["truth"] = called.get(row.get("truth", ""), row.get("truth", ""))
        _vote(path, line, row, kind, [called.get(label, label) for label in labels], nothing, sample)
    silent = [name for name, s in samples.items() if not s.votes and not (s.split == "test" and s.truth)]
    if silent:  # only with --unsure
        notes.append(f"{len(silent):,} samples have no vote but unsure ones and are left out")
    return {name: s for name, s in samples.items() if name not in set(silent)}, kind, bool(numbers), notes


def separator(cells: list[str], classes: list[str] | None) -> str | None:
    """What stands between candidates: | where there is one, else ; else , but for what the classes' names have."""
    return next((m for m in "|;," if any(m in c for c in cells) and not any(m in c for c in classes or ())), None)


def _sample(path, line: int, row: dict, kind: str, numbers: list[str], number: int, samples: dict) -> Sample:
    """The sample that a row is about."""
    if "file" in row and not row["file"]:
        raise bad(path, line, "no file is named")
    name = _name(row, number)
    if kind == "candidates" and name in samples:
        raise bad(path, line, f"{name} stands in line {samples[name].line} too")
    sample = samples.setdefault(name, Sample(line))
    if numbers and (sample.features is None or any(row[column] for column in numbers)):
        found = [_number(path, line, column, row[column]) for column in numbers]
        if sample.features not in (None, found):
            raise bad(path, line, f"other features than in line {sample.line}, which has the same id")
        sample.features = found
    return sample


def _name(row: dict, number: int) -> str:
    """Of a sample: its file, its id, or the row's own number."""
    return os.path.normpath(row["file"]) if "file" in row else row.get("id") or str(number)  # ./a.png is a.png


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise bad(path, line, f"{text!r} in column {column} is not a finite number, as a feature must be")
    return value


def _vote(path, line: int, row: dict, kind: str, labels: list[str], nothing: set[str], sample: Sample) -> None:
    for label in labels:
        if not label:
            raise bad(path, line, "an empty set" if labels == [""] and kind == "candidates" else "an empty label")
        if "|" in label:
            raise bad(path, line, f"a | in {label!r}: it stands between labels, in a column of candidates")
        if key(label) in nothing:
            continue
        vote = (row.get("annotator", ""), label)
        if kind == "candidates" or vote[0] and vote in sample.heard:  # the same vote twice is one
            sample.votes.setdefault(label, 1)
        else:
            sample.votes[label] = sample.votes.get(label, 0) + 1
            sample.heard[vote] = sample.heard.get(vote, 0) + 1
        sample.lines.setdefault(label, line)
    for name in ("truth", "split"):
        value, before = row.get(name, ""), getattr(sample, name)
        value = value.lower() if name == "split" else value
        if value and before and value != before:
            where = sample.lines[f"its {name}"]
            raise bad(path, line, f"{name} {value!r}, but {before!r} in line {where} of the same sample")
        if value and not before:
            sample.lines[f"its {name}"] = line
            sample.lines.setdefault(value, line)
        setattr(sample, name, value or before)
    if sample.split not in ("", "train", "test"):
        raise bad(path, line, f"split must be train or test, not {sample.split!r}")


# ------------------------------------------------------------------ what they hold


def table(path: Path, size: int, classes: list[str] | None, unsure: Sequence[str] = ()) -> Given:
    """A row a vote (file, label, perhaps annotator) or a row a sample (file, candidates); truth and split (train or
    test) are optional. Without file: id is optional, and all other columns are features."""
    samples, kind, features, notes = samples_of(path, classes, unsure)
    return _given(path, samples, kind == "label", features, size, classes, notes)


def folder(path: Path, size: int, classes: list[str] | None, unsure: Sequence[str] = ()) -> Given:
    """path/CLASS/IMAGE, or path/train/CLASS/IMAGE and path/test/CLASS/IMAGE: one label a sample."""
    samples, passed = _class_folders(path)
    called, notes = one_spelling(Counter(label for s in samples.values() for label in s.votes), classes)
    nothing = {key(name) for name in unsure}
    for name, sample in list(samples.items()):
        label = called[next(iter(sample.votes))]
        sample.votes, sample.heard, sample.lines = {label: 1}, {("", label): 1}, {label: 0}
        sample.truth = label if sample.split == "test" else ""
        if key(label) in nothing:
            del samples[name]
    if not samples:
        raise InputError(f"{str(path)!r} has no image in any of its folders")
    notes += [f"{passed:,} files of {path} are no images, by their names, and are passed over"] if passed else []
    return _given(path, samples, True, False, size, classes, notes)


def is_class_folder(path: Path) -> bool:
    """Folders inside, neither arrays nor a table, which would be what is meant."""
    inside = list(path.iterdir()) if path.is_dir() else []
    other = any(child.suffix == ".npy" or is_table(child) for child in inside)
    return not other and any(child.is_dir() for child in inside)


def _class_folders(path: Path) -> tuple[dict[str, Sample], int]:
    """By name, each with its folder as its only vote; and how many files are no images."""
    samples, passed = {}, 0
    inside = sorted(child for child in path.iterdir() if child.is_dir() and child.name[0] != ".")
    parts = {child.name: child for child in inside} if {c.name for c in inside} == {"train", "test"} else {"": path}
    for split, part in parts.items():
        for child in sorted(part.iterdir()):
            if not child.is_dir() or child.name[0] == ".":
                continue
            for file in sorted(child.iterdir()):
                if file.suffix.lower() in SUFFIXES:
                    name = file.relative_to(path).as_posix()
                    samples[name] = Sample(0, {child.name: 1}, split=split)
                else:
                    passed += file.name[0] != "."
    return samples, passed


def _given(path, samples: dict[str, Sample], has_votes, features, size, classes, notes: list[str]) -> Given:
    # a truth that no annotator ever gave is a slip, but for test samples, which need no vote
    voted = {label for sample in samples.values() for label in sample.votes}
    voted |= {sample.truth for sample in samples.values() if sample.split == "test" and sample.truth}
    names = check_names(list(classes) if classes else in_order(voted), f"the labels of {str(path)!r}")
    number = {name: k for k, name in enumerate(names)}
    votes = torch.zeros(len(samples), len(names), dtype=torch.int32)
    truth = torch.full((len(samples),), -1)
    for i, sample in enumerate(samples.values()):
        for label in (*sample.votes, *filter(None, [sample.truth])):
            if label not in number:
                known = "the names of --classes" if classes else "the labels that were given; --classes names more"
                raise bad(path, sample.lines[label], f"{label!r} is not among {known}")
        for label, count in sample.votes.items():
            votes[i, number[label]] = count
        truth[i] = number.get(sample.truth, -1)
    files = list(samples)
    if features:
        rows = torch.tensor([sample.features for sample in samples.values()], dtype=torch.double)
        images, notes = as_input(rows.numpy(), str(path)), notes + feature_notes(rows.numpy())
    else:
        images = _images(path, {name: sample.line for name, sample in samples.items()}, size)
    tests = torch.tensor([sample.split == "test" for sample in samples.values()])
    given = Given(images, truth, files, names, None if has_votes else votes > 0, votes if has_votes else None)
    given.notes = notes + meaningless(names)
    if has_votes:
        given.annotators, given.names = columns([sample.heard for sample in samples.values()], number)
    return _split(path, given, votes, tests, samples) if tests.any() else given


def _split(path: Path, given: Given, votes: Tensor, tests: Tensor, samples: dict[str, Sample]) -> Given:
    """The test samples out of the others."""
    if tests.all():
        raise InputError(f"{str(path)!r}: split is test in every row: there is nothing to train on")
    test, rest = tests.nonzero()[:, 0], (~tests).nonzero()[:, 0]
    label, second = given.truth[test], votes[test].topk(2, 1).values
    for i in ((label < 0) & (second[:, 0] == second[:, 1])).nonzero()[:, 0].tolist():
        line = samples[given.files[test[i]]].line
        raise bad(path, line, "a test sample needs its truth, or one label with more votes than the others")
    given.x_test, given.y_test = given.x[test], torch.where(label < 0, votes[test].argmax(1), label)
    given.voted_tests = int((label < 0).sum())
    x = given.x[rest]
    given.rows(rest).x = x
    return given


# ------------------------------------------------------------------ images


def home(path: Path) -> Path:
    """The folder that the samples' names are relative to."""
    return path.resolve() if path.is_dir() else path.resolve().parent


def has_images(path: Path) -> bool:
    """Whether the samples are files of images, for the pages to show."""
    return is_class_folder(path) or is_table(path) and not table_of_features(path)


def table_of_features(path: Path) -> bool:
    try:
        line, head, _ = read_rows(path)
        return bool(check_head(path, line, head)[1])
    except InputError:  # `table` says what is wrong
        return False


def count(path: Path) -> int:
    """How many samples there are to train on and to set aside."""
    if is_class_folder(path):
        return sum(sample.split != "test" for sample in _class_folders(path)[0].values())
    rows = [row for _, row in read_rows(path)[2]]
    tests = {_name(row, k) for k, row in enumerate(rows) if row.get("split", "").lower() == "test"}
    return len({_name(row, k) for k, row in enumerate(rows)} - tests)


def _inside(path: Path, place: Path, name: str, line: int) -> Path:
    """The image's place; a table may not name what lies outside its folder."""
    try:
        found = (place / name).resolve()
        there = found.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
        raise bad(path, line, f"{name!r} is no name of a file") from None
    if not found.is_relative_to(place):
        raise bad(path, line, f"{name} lies outside the table's folder")
    if not there:
        raise bad(path, line, f"there is no image {name}")
    return found


def _images(path: Path, line_of: dict[str, int], size: int) -> Tensor:
    """The files named, each with its line: uint8 [N, 3, size, size], or one channel where all are grey."""
    lines = list(line_of.values())
    places = [_inside(path, home(path), name, line) for name, line in line_of.items()]
    x = torch.empty(len(places), 3, size, size, dtype=torch.uint8)

    def read(i: int) -> None:
        try:
            x[i] = decode(places[i], size)
        except Exception as error:  # a damaged image fails in many ways
            raise bad(path, lines[i], f"{places[i].name}: {first_line(error)}") from None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(read, range(len(places))), 1):
            if sys.stderr.isatty() and (done % 100 == 0 or done == len(places)):
                end = "\n" if done == len(places) else ""
                print(f"\r\033[Kreading images: {done:,} of {len(places):,}", end=end, file=sys.stderr, flush=True)
    grey = all(bool((part == part[:, :1]).all()) for part in x.split(1000))
    return x[:, :1].contiguous() if grey else x


def named_images(path: Path, names: list[str], size: int) -> Tensor:
    """Those of the images, in this order."""
    if path.is_dir():
        return _images(path, dict.fromkeys(names, 0), size)
    lines = {_name(row, k): line for k, (line, row) in reversed(list(enumerate(read_rows(path)[2])))}
    for name in names:
        if name not in lines:
            raise InputError(f"{str(path)!r} has no row for {name}: is it the table that the run was trained on?")
    return _images(path, {name: lines[name] for name in names}, size)
