"""Reads one's own arrays: an .npz, or a folder of .npy files (tables and folders of images: files.py). Every error
names file and row, nothing in a file is ever run, and what a file says it unpacks to is looked at first.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import data
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
    voted_tests: int = 0  # of them, whose label is by their votes
    notes: list[str] = field(default_factory=list)  # to be said before the run
    decided: Tensor | None = None  # bool [N, C], a person's decisions; an empty row: nobody decided
    left_out: Tensor | None = None  # bool [N], decided to be none of the classes
    decisions: dict | None = None  # how many of them, for the summary

    def rows(self, index: Tensor) -> Given:
        """Some of its samples; images may stay on the disk."""
        for name in ("truth", "candidates", "votes", "annotators"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[index])
        self.x, self.files = data.Rows(self.x, index), pick(self.files, index)
        return self


def pick(names: list[str], index: Tensor) -> list[str]:
    return [names[i] for i in index.tolist()]


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


def shape_of(path: Path) -> tuple[int, ...]:
    """Of x_train, by its header alone; empty where there is none."""
    with contextlib.suppress(Exception):  # `load` says what is wrong
        if path.is_dir():
            return np.load(path / "x_train.npy", mmap_mode="r", allow_pickle=False).shape
        with zipfile.ZipFile(path) as archive, archive.open("x_train.npy") as file:
            header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
            return header[np.lib.format.read_magic(file)[0]](file)[0]
    return ()


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
    names = check_names(list(classes), "--classes") if classes else _names(found.get("classes"), where)
    columns = sets.shape[1] if kind in ("candidates", "votes") else 0
    if columns == 1:
        raise InputError(f"{kind} {where} has one column: there must be two classes at least")
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

    notes = feature_notes(found["x_train"])
    lowest = min((int(a[a >= 0].min(initial=len(names))) for a in numbers.values()), default=0)
    if lowest == 1 and not classes and "classes" not in found and not columns:
        notes.append(
            "labels begin at 1, so that class 0 is empty: if they are numbered from 1, take 1 away from all"
        )
    truth = torch.from_numpy(labels.get("y_train", np.full(len(x), -1)))
    given = Given(x, truth, [str(i) for i in range(len(x))], names, notes=notes)
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


def feature_notes(x: np.ndarray) -> list[str]:
    """Lines about features [N, D] from which little will be learnt."""
    if x.dtype.kind != "f" or x.ndim != 2:
        return []
    x = np.asarray(x[:100_000], dtype=np.float64)
    middle = np.median(x, axis=0)  # low and high are values of the data: none between them and a wild one
    low, high = np.quantile(x, 0.01, axis=0, method="higher"), np.quantile(x, 0.99, axis=0, method="lower")
    far, spread, notes = np.abs(x - middle), high - low, []
    constant = np.flatnonzero(x.max(0) == x.min(0)).tolist()
    wild = np.flatnonzero(far.max(0) > 1e4 * np.where(spread > 0, spread, np.inf)).tolist()
    coarse = np.spacing(np.abs(x).max(0).astype(np.float32)) > 0.01 * spread
    coarse = [k for k in np.flatnonzero(coarse).tolist() if k not in (*constant, *wild) and spread[k] > 0]
    for found, why in (
        (constant, "the same in all samples: nothing can be learnt from it"),
        (coarse, "its values differ by less than single precision holds: take its mean away before"),
    ):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            notes.append(f"feature {', '.join(map(str, found[:5]))}{more} (from 0): {why}")
    for k in wild[:3]:
        row = int(far[:, k].argmax())
        usual = f"98 % lie between {low[k]:.3g} and {high[k]:.3g}"
        notes.append(
            f"feature {k} (from 0) of row {row} is {x[row, k]:.3g}, where {usual}: it rules mean and deviation"
        )
    return notes


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
