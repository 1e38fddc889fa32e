"""Wrong files of one's own: one line with file and row, exit 2, nothing written."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import crowd
import data
import train
import votes
from conftest import Bomb
from test_crowd import pictures

# ------------------------------------------------------------------ wrong files


def png_of(width: int, height: int) -> bytes:
    """A small file that says it is a huge black image."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(width + 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


GOOD = "file,label\n" + "".join(f"{k}.png,{label}\n" for k, label in enumerate("abababab"))
TABLES = {  # what is wrong: (the table, what the line names)
    "a missing image": (GOOD + "gone.png,a\n", ("line 10", "gone.png")),
    "an unknown truth": ("file,label,truth\n0.png,a,a\n1.png,b,\n1.png,b,caat\n", ("line 4", "caat")),
    "a bar in a label": (GOOD + "1.png,a|b\n", ("line 10", "a|b")),
    "an empty set": ("file,candidates\n0.png,a|b\n1.png,\n", ("line 3", "empty set")),
    "an empty label": (GOOD + "1.png,\n", ("line 10", "empty label")),
    "an empty part of a set": ("file,candidates\n0.png,a||b\n", ("line 2", "empty label")),
    "a ragged row": (GOOD + "1.png,a,b\n", ("line 10", "3 values")),
    "a short row": (GOOD + "1.png\n", ("line 10", "1 values")),
    "a wrong encoding": (GOOD.encode() + "1.png,m\u00e4dchen\n".encode("latin-1"), ("line 10", "UTF-8")),
    "sixteen bits": (GOOD.encode("utf-16"), ("line 1", "UTF-8")),
    "a zip bomb of an image": (GOOD + "bomb.png,a\n", ("line 10", "bomb.png", "pixels")),
    "a larger bomb": (GOOD + "bombs.png,a\n", ("line 10", "bombs.png")),
    "text for an image": (GOOD + "text.png,a\n", ("line 10", "text.png")),
    "half an image": (GOOD + "half.png,a\n", ("line 10", "half.png")),
    "a path that leaves": (GOOD + "../outside.png,a\n", ("line 10", "outside")),
    "an absolute path": (GOOD + "{outside},a\n", ("line 10", "outside")),
    "a link that leaves": (GOOD + "link.png,a\n", ("line 10", "outside")),
    "a folder": (GOOD + ".,a\n", ("line 10", "no image")),
    "a name with a NUL": (GOOD + "a\0b.png,a\n", ("line 10",)),
    "no name": (GOOD + ",a\n", ("line 10", "no file")),
    "no name below Excel's first line": ("sep=,\r\n\n" + GOOD + ",a\n", ("line 12", "no file")),
    "no label column": ("file,class\n0.png,a\n", ("line 1", "label")),
    "both kinds": ("file,label,candidates\n0.png,a,a\n", ("line 1", "candidates")),
    "a column twice": ("file,label,label\n0.png,a,a\n", ("line 1", "once")),
    "a sample twice": ("file,candidates\n0.png,a\n0.png,b\n", ("line 3", "line 2")),
    "two truths": ("file,label,truth\n0.png,a,\n0.png,a,a\n0.png,a,b\n", ("line 4", "truth", "line 3")),
    "two splits": ("file,label,split\n0.png,a,train\n0.png,b,test\n", ("line 3", "split")),
    "another split": ("file,label,split\n0.png,a,dev\n", ("line 2", "dev")),
    "only tests": ("file,label,split\n0.png,a,test\n1.png,b,test\n", ("v.csv", "train on")),
    "a test in doubt": ("file,label,split\n0.png,a,\n1.png,b,test\n1.png,a,test\n", ("line 3", "truth")),
    "an open quote": (GOOD + '"1.png,a\n', ("line", "v.csv")),
    "one class": ("file,label\n0.png,a\n1.png,a\n", ("v.csv", "classes")),
    "only a header": ("file,label\n", ("v.csv", "no rows")),
    "nothing": ("", ("line 1", "none")),
}


@pytest.mark.parametrize("what", TABLES)
def test_wrong_tables_get_one_line_with_file_and_row(what, capfd):
    content, named = TABLES[what]
    pictures(*(f"{k}.png" for k in range(8)))
    Image.new("L", (9, 9)).save("outside.png")
    Path("t/link.png").symlink_to(Path("outside.png").resolve())
    Path("t/text.png").write_text("no image")
    Path("t/half.png").write_bytes(Path("t/0.png").read_bytes()[:300])
    Path("t/bomb.png").write_bytes(png_of(10_000, 9_500))  # Pillow warns
    Path("t/bombs.png").write_bytes(png_of(60_000, 60_000))  # Pillow refuses
    content = content if isinstance(content, bytes) else content.encode()
    Path("t/v.csv").write_bytes(content.replace(b"{outside}", str(Path("outside.png").resolve()).encode()))
    before = sorted(Path().rglob("*"))
    assert train.main(["--dataset", "t/v.csv", "--batch-size", "4"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "v.csv" in err, err
    assert all(name in err for name in named), err
    assert sorted(Path().rglob("*")) == before  # nothing written


X, Y4 = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 4
S = np.eye(4, dtype=bool)[Y4]
ARRAYS = {  # what is wrong: (arrays, options, what the line names)
    "a pickle inside": (dict(x_train=X, candidates=np.array([Bomb()] * 20, dtype=object)), [], ("plain",)),
    "two kinds of sets": (dict(x_train=X, candidates=S, votes=S.astype(int)), [], ("candidates and votes",)),
    "an empty row": (dict(x_train=X, votes=S * np.arange(20)[:, None]), [], ("votes", "row 0", "empty")),
    "nobody's labels": (dict(x_train=X, annotators=np.array([[0, 1]] * 19 + [[-1, -1]])), [], ("row 19", "empty")),
    "a label beyond the classes": (
        dict(x_train=X, annotators=np.arange(20)[:, None] % 4, classes=np.array(["a", "b", "c"])),
        [],
        ("annotators", "row 3"),
    ),
    "classes beyond the sets": (dict(x_train=X, candidates=S, classes=np.array(list("abc"))), [], ("candidates",)),
    "a class twice": (dict(x_train=X, candidates=S, classes=np.array(list("abca"))), [], ("classes",)),
    "a class without a name": (
        dict(x_train=X, candidates=S, classes=np.array(["a", "b", "", "d"])),
        [],
        ("classes",),
    ),
    "a bar in a class": (dict(x_train=X, candidates=S, classes=np.array(["a", "b", "c|d", "d"])), [], ("c|d",)),
    "a test set that is a number": (
        dict(x_train=X, candidates=S, x_test=np.uint8(5), y_test=Y4[:1]),
        [],
        ("x_test",),
    ),
    "an empty test set": (dict(x_train=X, candidates=S, x_test=X[:0], y_test=Y4[:0]), [], ("x_test",)),
    "a noise rate that nobody knows": (dict(x_train=X, candidates=S), ["--base", "alim", "--no-irnet"], ("alim",)),
    "a feature that is no number": (dict(x_train=np.full((20, 3), np.nan), candidates=S), [], ("row 0", "finite")),
    "features for a CNN": (dict(x_train=np.zeros((20, 3)), candidates=S), ["--arch", "cnn"], ("--arch", "mlp")),
    "neither test set nor sets": (dict(x_train=X), [], ("test set",)),
    "votes asked of sets": (dict(x_train=X, candidates=S), ["--min-votes", "2"], ("--min-votes",)),
    "--q beside sets": (dict(x_train=X, candidates=S), ["--q", "0.1", "--eta", "0.1"], ("--q",)),
    "sets of truths that nobody knows": (
        dict(x_train=X, y_train=np.arange(20) % 3 - 1, x_test=X, y_test=np.arange(20) % 3),
        ["--q", "0.1", "--eta", "0.1"],
        ("truth",),
    ),
}


@pytest.mark.parametrize("what", ARRAYS)
def test_wrong_arrays_get_one_line_with_their_row(what, capfd):
    arrays, argv, named = ARRAYS[what]
    np.savez("bad.npz", **arrays)
    assert train.main(["--dataset", "bad.npz", "--batch-size", "4", *argv]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert all(name in err for name in named), err
    assert "bad.npz" in err or "alim" in what or "--base" in argv, err
    assert [p.name for p in Path().iterdir()] == ["bad.npz"]


def test_an_archive_larger_than_the_memory_is_not_unpacked(monkeypatch):
    np.savez_compressed("bomb.npz", x_train=np.zeros((1000, 64, 64), np.uint8), candidates=np.eye(2)[[0] * 1000])
    asked = {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 4000}
    monkeypatch.setattr(votes.os, "sysconf", asked.__getitem__)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(data.InputError, match="memory|GiB"):
        crowd.load(Path("bomb.npz"))


@pytest.mark.parametrize(
    "argv", [["--min-votes", "2"], ["--reliability", "0.5"], ["--feature-noise", "1"], ["--classes", "a", "b"]]
)
def test_options_of_ones_own_data_are_refused_elsewhere(argv, capfd):
    assert train.main(argv) == 2 and argv[0] in capfd.readouterr().err
    assert train.main(["--dataset", "t.csv", "--min-votes", "0"]) == 2
