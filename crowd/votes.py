"""Reads one's own data: a CSV beside its images, an .npz, or a folder of .npy files. Every error names file and
row, nothing in a file is ever run, and what a file says it unpacks to is looked at first.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from crowd.annotators import columns
from crowd.images import decode
from harness import InputError, is_table

MOST_CLASSES = 10_000


@dataclass
class Given:
    """What a file holds, checked; a test set of its own or none."""

    x: Tensor  # uint8 [N, ch, H, W], or features, float [N, D, 1, 1]
    truth: Tensor  # int64 [N], -1 where unknown
    files: list[str]
    classes: list[str]
    candidates: Tensor | None = None  # bool [N, C]
    votes: Tensor | None = None  # int [N, C]
    annotators: Tensor | None = None  # int64 [N, A], class numbers, -1 for none
    names: list[str] | None = None  # of the annotators, a column each; who gave two labels to one sample has two
    x_test: Tensor | None = None
    y_test: Tensor | None = None


# ------------------------------------------------------------------ a CSV beside its images


@dataclass
class Sample:
    line: int  # the first of its rows
    votes: dict[str, int] = field(default_factory=dict)  # by label
    lines: dict[str, int] = field(default_factory=dict)  # where each label, and each of the columns below, stands
    heard: dict[tuple[str, str], int] = field(default_factory=dict)  # annotator and label: how often
    truth: str = ""
    split: str = ""


def table(path: Path, size: int, classes: list[str] | None) -> Given:
    """A row a vote (file, label, perhaps annotator) or a row a sample (file, candidates with | between the labels);
    truth and split (train or test) are optional, other columns are passed over."""
    samples, has_votes = _samples(path)
    # a truth that no annotator ever gave is a slip, but for test samples, which need no vote
    voted = {label for sample in samples.values() for label in sample.votes}
    voted |= {sample.truth for sample in samples.values() if sample.split == "test" and sample.truth}
    names = check_names(list(classes) if classes else _sorted_names(voted), f"the labels of {str(path)!r}")
    number = {name: k for k, name in enumerate(names)}
    votes = torch.zeros(len(samples), len(names), dtype=torch.int32)
    truth = torch.full((len(samples),), -1)
    for i, sample in enumerate(samples.values()):
        for label in (*sample.votes, *filter(None, [sample.truth])):
            if label not in number:
                known = "the names of --classes" if classes else "the labels that were given; --classes names more"
                raise _bad(path, sample.lines[label], f"{label!r} is not among {known}")
        for label, count in sample.votes.items():
            votes[i, number[label]] = count
        truth[i] = number.get(sample.truth, -1)
    files = list(samples)
    images = _images(path, {name: sample.line for name, sample in samples.items()}, size)

    tests = torch.tensor([sample.split == "test" for sample in samples.values()])
    given = Given(images, truth, files, names, None if has_votes else votes > 0, votes if has_votes else None)
    if has_votes:
        given.annotators, given.names = columns([sample.heard for sample in samples.values()], number)
    if not tests.any():
        return given
    if tests.all():
        raise InputError(f"{str(path)!r}: split is test in every row: there is nothing to train on")
    test, rest = tests.nonzero()[:, 0], (~tests).nonzero()[:, 0]
    label, second = truth[test], votes[test].topk(2, 1).values
    for i in ((label < 0) & (second[:, 0] == second[:, 1])).nonzero()[:, 0].tolist():
        line = samples[files[test[i]]].line
        raise _bad(path, line, "a test sample needs its truth, or one label with more votes than the others")
    given.x_test, given.y_test = images[test], torch.where(label < 0, votes[test].argmax(1), label)
    given.x, given.truth, given.files = images[rest], truth[rest], pick(files, rest)
    given.candidates = None if given.candidates is None else given.candidates[rest]
    given.votes = None if given.votes is None else given.votes[rest]
    given.annotators = None if given.annotators is None else given.annotators[rest]
    return given


def _samples(path: Path) -> tuple[dict[str, Sample], bool]:
    """By file, in the order of the table; and whether its rows are votes."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(path, content[: error.start].count(b"\n") + 1, "not UTF-8: save the table as UTF-8") from None
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
    skipped = re.match(r"(\s*\n|sep=.\r?\n)*", text)[0]  # blank lines, and what Excel may write above the header
    text, skipped = text[len(skipped) :], skipped.count("\n")
    first = text.split("\n", 1)[0]
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    samples: dict[str, Sample] = {}
    try:
        head = [name.strip().lower() for name in next(rows, [])]
        kinds = [name for name in ("label", "candidates") if name in head]
        known = [name for name in head if name in ("file", "label", "candidates", "annotator", "truth", "split")]
        if "file" not in head or len(kinds) != 1 or len(set(known)) < len(known):
            wanted = "file and label (a row a vote) or file and candidates (a row a sample), each once"
            raise _bad(path, skipped + 1, f"the columns must be {wanted}, not {', '.join(head) or 'none'}")
        for values in rows:
            if any(map(str.strip, values)):  # else a blank line
                _row(path, skipped + rows.line_num, head, values, kinds[0], samples)
    except csv.Error as error:
        raise _bad(path, skipped + rows.line_num, str(error)) from None
    if not samples:
        raise InputError(f"{str(path)!r} has no rows below its header")
    return samples, kinds == ["label"]


def _row(path: Path, line: int, head: list[str], values: list[str], kind: str, samples: dict[str, Sample]) -> None:
    if len(values) != len(head):
        raise _bad(path, line, f"{len(values)} values in a row, but {len(head)} columns")
    row = {name: value.strip() for name, value in zip(head, values, strict=True)}
    if not row["file"]:
        raise _bad(path, line, "no file is named")
    row["file"] = os.path.normpath(row["file"])  # ./a.png is a.png
    if kind == "candidates" and row["file"] in samples:
        raise _bad(path, line, f"{row['file']} stands in line {samples[row['file']].line} too")
    sample = samples.setdefault(row["file"], Sample(line))
    labels = row[kind].split("|") if kind == "candidates" else [row[kind]]
    if row.get("split", "").lower() == "test" and row.get("truth") and not row[kind]:
        labels = []  # a test sample needs no vote
    for label in map(str.strip, labels):
        if not label:
            raise _bad(path, line, "an empty set" if labels == [""] and kind == "candidates" else "an empty label")
        if "|" in label:
            raise _bad(path, line, f"a | in {label!r}: it stands between labels, in a column of candidates")
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
            raise _bad(path, line, f"{name} {value!r}, but {before!r} in line {where} of the same file")
        if value and not before:
            sample.lines[f"its {name}"] = line
            sample.lines.setdefault(value, line)
        setattr(sample, name, value or before)
    if sample.split not in ("", "train", "test"):
        raise _bad(path, line, f"split must be train or test, not {sample.split!r}")


def pick(names: list[str], index: Tensor) -> list[str]:
    return [names[i] for i in index.tolist()]


def _bad(path: Path, line: int, why: str) -> InputError:
    return InputError(f"{path}, line {line}: {why}")


def _sorted_names(labels: set[str]) -> list[str]:
    """Numbers by their value, names by the alphabet."""
    numbers = all(label.isdecimal() for label in labels)
    return sorted(labels, key=lambda label: (int(label) if numbers else 0, label))


def _inside(path: Path, folder: Path, name: str, line: int) -> Path:
    """The image's place; a table may not name what lies outside its folder."""
    try:
        place = (folder / name).resolve()
        there = place.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
        raise _bad(path, line, f"{name!r} is no name of a file") from None
    if not place.is_relative_to(folder):
        raise _bad(path, line, f"{name} lies outside the table's folder")
    if not there:
        raise _bad(path, line, f"there is no image {name}")
    return place


def _images(path: Path, line_of: dict[str, int], size: int) -> Tensor:
    """The files named, each with its line: uint8 [N, 3, size, size], or one channel where all are grey."""
    folder, lines = path.resolve().parent, list(line_of.values())
    places = [_inside(path, folder, name, line) for name, line in line_of.items()]
    x = torch.empty(len(places), 3, size, size, dtype=torch.uint8)

    def read(i: int) -> None:
        try:
            x[i] = decode(places[i], size)
        except Exception as error:  # a damaged image fails in many ways
            raise _bad(path, lines[i], f"{places[i].name}: {first_line(error)}") from None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(read, range(len(places))), 1):
            if sys.stderr.isatty() and (done % 100 == 0 or done == len(places)):
                end = "\n" if done == len(places) else ""
                print(f"\r\033[Kreading images: {done:,} of {len(places):,}", end=end, file=sys.stderr, flush=True)
    grey = all(bool((part == part[:, :1]).all()) for part in x.split(1000))
    return x[:, :1].contiguous() if grey else x


def named_images(path: Path, names: list[str], size: int) -> Tensor:
    """Those of a table's images, in this order."""
    lines = {name: sample.line for name, sample in _samples(path)[0].items()}
    for name in names:
        if name not in lines:
            raise InputError(f"{str(path)!r} has no row for {name}: is it the table that the run was trained on?")
    return _images(path, {name: lines[name] for name in names}, size)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------ arrays: an .npz, or a folder of .npy


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Nothing in them is ever run; the arrays of a folder stay on the disk until they are read (memory-mapped)."""
    try:
        if path.is_dir():
            arrays = {f.stem: np.load(f, mmap_mode="c", allow_pickle=False) for f in path.glob("*.npy")}
        else:
            if zipfile.is_zipfile(path):
                _fits_memory(path)
            with np.load(path, allow_pickle=False) as file:
                arrays = {key: file[key] for key in file.files}
    except Exception as error:  # a damaged file fails in many ways
        why = first_line(error)
        raise InputError(f"cannot read {str(path)!r} as plain arrays (.npz, or a folder of .npy): {why}") from None
    return {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}


def contents(path: Path, found: dict) -> str:
    """What was found in place of what was wanted."""
    if path.is_dir() and not found:
        tables = sorted(file.name for file in path.iterdir() if is_table(file))
        return f"it has no .npy file: name {' or '.join(tables[:3]) or 'the table or the images'} in it"
    return f"it has {', '.join(sorted(found)) or 'nothing'}"


def _fits_memory(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        need = sum(entry.file_size for entry in archive.infolist())
    with contextlib.suppress(AttributeError, ValueError):  # where the system does not tell
        if need > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise MemoryError(
                f"unpacked it has {need / 2**30:.0f} GiB, more than this machine; use a folder of .npy"
            )


def has_features(path: Path) -> bool:
    """Whether x_train is a table of features rather than images, by its header alone."""
    with contextlib.suppress(Exception):  # `load` says what is wrong
        if path.is_dir():
            return np.load(path / "x_train.npy", mmap_mode="r", allow_pickle=False).ndim == 2
        with zipfile.ZipFile(path) as archive, archive.open("x_train.npy") as file:
            header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
            return len(header[np.lib.format.read_magic(file)[0]](file)[0]) == 2
    return False


def arrays(path: Path, classes: list[str] | None) -> Given:
    """x_train, one of candidates, annotators and votes, and perhaps y_train, x_test with y_test, classes."""
    found, where = read_arrays(path), f"of {str(path)!r}"
    if "x_train" not in found or ("x_test" in found) != ("y_test" in found):
        wanted = "x_train" if "x_train" not in found else "y_test" if "x_test" in found else "x_test"
        raise InputError(f"{str(path)!r} lacks {wanted}; {contents(path, found)}")
    x, x_test = (as_input(found[k], f"{k} {where}") if k in found else None for k in ("x_train", "x_test"))
    kind, sets = _sets(found, where, len(x))
    labels = {}  # class numbers, by the array's name
    for name, of in (("y_train", x), ("y_test", x_test)):
        if name in found:
            labels[name] = _numbers(found[name], name, where, -1 if name == "y_train" else 0)
            if labels[name].shape != (len(of),):
                raise InputError(f"{name} {where} must be {len(of)} class numbers, one a sample")
    names = list(classes) if classes else _names(found.get("classes"), where)
    columns = sets.shape[1] if kind in ("candidates", "votes") else 0
    numbers = labels | ({"annotators": sets} if kind == "annotators" else {})
    if names is None:
        largest = max((int(a.max(initial=0)) + 1 for a in numbers.values()), default=0)
        names = [str(k) for k in range(columns or max(2, largest))]
    for name, a in numbers.items():
        over = (a >= len(names)).reshape(len(a), -1).any(1)
        if over.any():
            raise InputError(f"{name} {where}, row {over.argmax()}: a label beyond the {len(names)} classes")
    if columns and columns != len(names):
        raise InputError(f"{kind} {where} must be [{len(x)}, {len(names)}], a column a class")

    truth = torch.from_numpy(labels.get("y_train", np.full(len(x), -1)))
    given = Given(x, truth, [str(i) for i in range(len(x))], names)
    if x_test is not None:
        given.x_test, given.y_test = x_test, torch.from_numpy(labels["y_test"])
        if x_test.shape[1:] != x.shape[1:] or x_test.dtype != x.dtype:
            raise InputError(f"x_test {where} must be of the shape and type of x_train")
    if kind == "annotators":
        heard = torch.zeros(len(x), 1 + len(names), dtype=torch.int32)  # [N, 1 + C], none first
        one = torch.ones(sets.shape, dtype=torch.int32)
        given.votes = heard.scatter_add_(1, torch.from_numpy(sets) + 1, one)[:, 1:].contiguous()
        given.annotators, given.names = torch.from_numpy(sets), [str(a) for a in range(sets.shape[1])]
    elif kind == "votes":
        given.votes = torch.from_numpy(sets).int()
    elif kind == "candidates":
        given.candidates = torch.from_numpy(sets.astype(bool))
    counted = given.candidates if given.votes is None else given.votes
    if counted is not None and not counted.any(1).all():
        row = int((~counted.any(1)).int().argmax())
        raise InputError(f"{kind} {where}, row {row}: an empty set; give every sample at least one label")
    return given


def _sets(found: dict[str, np.ndarray], where: str, n: int) -> tuple[str | None, np.ndarray | None]:
    """Which of the three kinds there is, and its array."""
    kinds = [name for name in ("candidates", "annotators", "votes") if name in found]
    if not kinds:
        return None, None
    if len(kinds) > 1:
        raise InputError(f"{' and '.join(kinds)} {where}: keep one of them")
    kind, sets = kinds[0], found[kinds[0]]
    if sets.ndim != 2 or len(sets) != n or not sets.shape[1]:
        columns = "A" if kind == "annotators" else "C"
        raise InputError(f"{kind} {where} must be [{n}, {columns}], not {list(sets.shape)}")
    if kind != "candidates":
        return kind, _numbers(sets, kind, where, -1 if kind == "annotators" else 0)
    if sets.dtype.kind not in "biuf" or not np.isin(sets, (0, 1)).all():
        raise InputError(f"candidates {where} must be bool [N,C], not {sets.dtype}")
    return kind, sets


def as_input(x: np.ndarray, name: str) -> Tensor:
    """Images u8 [N,H,W] or [N,H,W,3] as [N, ch, H, W]; features, floats [N, D], as [N, D, 1, 1]."""
    if x.dtype.kind == "f" and x.ndim == 2 and min(x.shape) >= 1:
        features = torch.from_numpy(np.asarray(x, dtype=np.float32))
        wrong = ~features.isfinite().all(1)
        if wrong.any():
            raise InputError(f"{name}, row {int(wrong.int().argmax())}: a feature is not a finite number")
        return features[:, :, None, None]
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or x.shape[3:] not in ((), (3,)) or min(x.shape) < 1:
        shape = f"{x.dtype} {list(x.shape)}"
        raise InputError(
            f"{name} must be images, uint8 [N,H,W] or [N,H,W,3], or features, float [N,D], not {shape}"
        )
    images = torch.from_numpy(x)
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)


def _numbers(a: np.ndarray, name: str, where: str, lowest: int) -> np.ndarray:
    if a.dtype.kind not in "iu" or a.min(initial=0) < lowest or a.max(initial=0) >= 2**31:
        allowed = "from 0 on" if lowest == 0 else "from 0 on, or -1 for none"
        raise InputError(f"{name} {where} must be whole numbers {allowed}")
    if name != "votes" and a.max(initial=0) >= MOST_CLASSES:
        raise InputError(f"{name} {where} must be class numbers below {MOST_CLASSES:,}")
    return a.astype(np.int64)


def _names(classes: np.ndarray | None, where: str) -> list[str] | None:
    if classes is None:
        return None
    if classes.ndim != 1 or classes.dtype.kind not in "Uiu":
        raise InputError(f"classes {where} must be the classes' names")
    return check_names([str(name) for name in classes], f"classes {where}")


def check_names(names: list[str], what: str) -> list[str]:
    """The names of all classes."""
    if not 2 <= len(names) <= MOST_CLASSES or len(set(names)) < len(names):
        raise InputError(f"{what}: there must be from 2 to {MOST_CLASSES:,} classes, each once, not {len(names)}")
    for name in names:
        if not name.strip() or name != name.strip() or "|" in name:
            raise InputError(f"{what}: {name!r} is no name: neither empty, nor with spaces around it or a | in it")
    return names
