"""Reading one's own data: tables beside images, arrays; wrong ones get one line with file and row, exit 2, nothing
written."""

import pickle
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import crowd
import train
from conftest import Bomb
from crowd import images, votes
from crowd.dataset import agreement
from data import Dataset
from harness import InputError
from test_crowd import drawing

# ------------------------------------------------------------------ tables


def pictures(*names: str, folder: str = "t", modes=("RGB",)) -> None:
    Path(folder).mkdir(exist_ok=True)
    for k, name in enumerate(names):
        image = Image.fromarray(drawing(k % 4, np.random.RandomState(k)))
        image.convert(modes[k % len(modes)]).save(f"{folder}/{name}")


def loaded(text: str, **options) -> Dataset:
    Path("t/v.csv").write_text(text, encoding="utf-8")
    return crowd.load(Path("t/v.csv"), **options)


TESTS = "\nx.png,a,a,test\ny.png,b,b,test"


def test_a_row_a_vote_and_a_row_a_sample_give_the_same_sets():
    pictures("1.png", "2.png", "x.png", "y.png")
    head = "file,label,truth,split"
    votes_ = loaded(head + "\n1.png,b,a,\n1.png,a,,train\n1.png,b,,\n2.png,c,,train" + TESTS)
    sets = loaded("file,candidates,truth,split\n1.png,a|b,a,\n2.png, c ,,train" + TESTS)
    for d in (votes_, sets):
        assert d.classes == ["a", "b", "c"] and d.files == ["1.png", "2.png"] and d.scored is None
        assert d.candidates.tolist() == [[True, True, False], [False, False, True]]
        assert d.labels.tolist() == [0, -1] and d.test_labels.tolist() == [0, 1] and not d.truth_known
        assert d.images.shape == (2, 3, 32, 32) and d.test_images.shape == (2, 3, 32, 32)
    assert votes_.votes.tolist() == [[1, 2, 0], [0, 0, 1]] and sets.votes is None
    assert agreement(votes_).tolist() == pytest.approx([2 / 3, 1])
    twice = loaded("file,annotator,label,truth,split\n1.png,u,b,,\n1.png,u,b,,\n1.png,v,a,,\n"
                   "x.png,u,a,a,test\ny.png,u,b,b,test")  # fmt: skip
    assert twice.votes.tolist() == [[1, 1]]  # the same annotator twice is one vote
    assert twice.annotators.tolist() == [[1, 0]] and twice.annotator_names == ["u", "v"]
    assert votes_.annotators is None and sets.annotators is None
    nobody = loaded("file,annotator,label,split,,\n./1.png,,b,,,\n1.png,,b,,,\n ,,,,,\nt/../1.png,v,a,,,\n"
                    "x.png,u,a,test,,\ny.png,u,b,test,,")  # fmt: skip
    assert nobody.votes.tolist() == [[1, 2]] and nobody.files == [
        "1.png"
    ]  # without names two; one file, however spelt
    alone = loaded("file,label,truth,split\n1.png,a,,\n2.png,b,,\nx.png,,b,test\ny.png,,c,test")
    assert alone.test_labels.tolist() == [1, 2] and alone.classes == ["a", "b", "c"]  # tests need no vote


def test_min_votes_and_numbers_and_other_separators():
    pictures("1.png", "2.png", "3.png", "x.png", "y.png")
    lines = ["1.png;9", "1.png;9", "1.png;10", "2.png;2", "2.png;10", "3.png;2", "x.png;2", "y.png;9"]
    text = "\ufefffile;label;split\r\n" + "".join(f"{s};{'test' if s[0] in 'xy' else ''}\r\n" for s in lines)
    d = loaded(text, min_votes=2)
    assert d.classes == ["2", "9", "10"]  # by value
    assert d.candidates.tolist() == [[False, True, False], [True, False, True], [True, False, False]]
    assert loaded(text).candidates.tolist()[0] == [False, True, True]


def test_images_of_any_size_and_mode():
    modes = ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK")
    pictures("0.png", "1.png", "2.png", "3.png", "4.png", "5.png", "6.jpg", modes=modes)
    deep = np.arange(30 * 50, dtype=np.uint16).reshape(30, 50) * 43
    Image.fromarray(deep).save("t/7.png")
    Image.fromarray((deep / 65535).astype(np.float32)).save("t/8.tiff")
    Image.fromarray(deep // 300).save("t/11.png")  # dark, and stays so
    clear = Image.new("RGBA", (5, 9), (10, 20, 30, 0))
    clear.save("t/9.png")
    turned = Image.new("RGB", (40, 20), "red")
    turned.paste("blue", (0, 0, 20, 20))
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was held upright
    turned.save("t/10.png", exif=exif)
    read_ = {path.name: images.decode(path, 16) for path in Path("t").iterdir()}
    assert {tuple(x.shape) for x in read_.values()} == {(3, 16, 16)}
    exact = Image.fromarray(deep.astype(np.float32) / 257).resize((16, 16), Image.Resampling.BILINEAR)
    assert np.abs(np.array(exact) - read_["7.png"][0].numpy()).max() < 1
    assert (read_["7.png"].int() - read_["8.tiff"].int()).abs().max() <= 1
    assert read_["9.png"].min() == 255 and read_["11.png"].max() <= 1  # transparent: white
    assert read_["10.png"][2, 0].min() > 250 and read_["10.png"][0, -1].min() > 250  # blue above, red below
    want = np.array(Image.open("t/1.png").convert("RGB").resize((16, 16), Image.Resampling.BILINEAR))
    assert np.array_equal(read_["1.png"].permute(1, 2, 0), want)
    grey = loaded("file,candidates\n" + "".join(f"{k}.png,a|b\n" for k in (1, 2, 5)) + "7.png,b\n8.tiff,a\n")
    assert grey.images.shape[1] == 1  # kept grey
    mixed = loaded("file,candidates\n0.png,a|b\n1.png,b\n5.png,a\n6.jpg,a\n7.png,b\n")
    assert mixed.images.shape[1] == 3


# ------------------------------------------------------------------ wrong tables


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


# ------------------------------------------------------------------ wrong arrays

X, Y = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 4
S = np.eye(4, dtype=bool)[Y]
FILES = {  # what is wrong: the arrays that differ, and what the line names
    "lacks y_test": (dict(y_test=None), "y_test"),
    "float images": (dict(x_train=X.astype(np.float32)), "x_train"),
    "signed images": (dict(x_test=X.astype(np.int16)), "x_test"),
    "oblong images": (dict(x_train=X[:, :6]), "x_train"),
    "flat images": (dict(x_train=X.reshape(20, 64)), "x_train"),
    "two channels": (dict(x_train=np.stack([X, X], -1)), "x_train"),
    "no images": (dict(x_train=X[:0], y_train=Y[:0]), "x_train"),
    "test images of another size": (dict(x_test=np.zeros((20, 9, 9), np.uint8)), "x_test"),
    "labels below -1": (dict(y_train=Y - 2), "y_train"),
    "labels that are floats": (dict(y_train=Y / 2), "y_train"),
    "labels far too large": (dict(y_test=Y * 10**9), "y_test"),
    "fewer labels than images": (dict(y_train=Y[:19]), "y_train"),
    "labels in a table": (dict(y_train=np.eye(4, dtype=int)[Y]), "y_train"),
    "an empty set": (dict(candidates=np.eye(4, dtype=bool)[Y] & (np.arange(20) != 7)[:, None]), "empty"),
    "sets of floats": (dict(candidates=np.full((20, 4), 0.5)), "candidates"),
    "sets of another size": (dict(candidates=np.ones((19, 4), bool)), "candidates"),
    "sets with too few classes": (dict(candidates=np.ones((20, 3), bool)), "beyond the 3"),
    "sets in a row": (dict(candidates=np.ones(20, bool)), "candidates"),
    "annotators below 0": (dict(annotators=np.full((20, 3), -1)), "annotators"),
    "annotators that are floats": (dict(annotators=np.ones((20, 3))), "annotators"),
    "no annotators": (dict(annotators=np.ones((20, 0), int)), "annotators"),
    "sets of records": (dict(candidates=np.zeros((20, 4), [("a", int)])), "candidates"),
    "annotators in a row": (dict(annotators=Y), "annotators"),
    "fewer annotators' rows": (dict(annotators=np.ones((5, 3), int)), "annotators"),
    "objects": (dict(y_train=np.array([{}] * 20, dtype=object)), "bad.npz"),
    "neither sets nor --q": ({}, "--q"),
    "images too small for the CNN": (
        dict(x_train=X[:, :4, :4], x_test=X[:, :4, :4], candidates=np.eye(4)[Y]),
        "--arch",
    ),
}
ARRAY = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }".ljust(127) + b"\n12"


@pytest.mark.parametrize("what", [*FILES, "a pickle", "text", "an empty file", "one array"])
def test_bad_files_get_one_line_and_exit_2(what, capfd):
    arrays, named = FILES.get(what, ({}, "bad.npz"))
    arrays = dict(x_train=X, y_train=Y, x_test=X, y_test=Y) | arrays
    if what in FILES:
        np.savez("bad.npz", **{name: value for name, value in arrays.items() if value is not None})
    else:
        content = {
            "a pickle": pickle.dumps(Bomb()),
            "text": b"x,y\n1,2\n",
            "an empty file": b"",
            "one array": ARRAY,
        }[what]
        Path("bad.npz").write_bytes(content)
    assert train.main(["--dataset", "bad.npz", "--batch-size", "4", "--arch", "cnn"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "bad.npz" in err and named in err, err
    assert [p.name for p in Path().iterdir()] == ["bad.npz"]


def test_damaged_archives_get_one_line(capfd):
    """Random bytes of a compressed .npz changed: read as it was, or refused with one line."""
    moments = random.Random(0)
    np.savez_compressed("good.npz", x_train=X, y_train=Y, x_test=X, y_test=Y, candidates=np.eye(4, dtype=bool)[Y])
    good, refused = Path("good.npz").read_bytes(), 0
    for _ in range(300):
        content = bytearray(good)
        for _ in range(moments.randint(1, 3)):
            content[moments.randrange(len(content))] = moments.randrange(256)
        Path("bad.npz").write_bytes(content)
        try:
            crowd.load(Path("bad.npz"))
        except InputError as error:
            refused += 1
            assert "bad.npz" in str(error) and "\n" not in str(error)
    assert refused > 100


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
        dict(x_train=X, candidates=S, x_test=np.uint8(5), y_test=Y[:1]),
        [],
        ("x_test",),
    ),
    "an empty test set": (dict(x_train=X, candidates=S, x_test=X[:0], y_test=Y[:0]), [], ("x_test",)),
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
    with pytest.raises(InputError, match="memory|GiB"):
        crowd.load(Path("bomb.npz"))


@pytest.mark.parametrize(
    "argv", [["--min-votes", "2"], ["--reliability", "0.5"], ["--feature-noise", "1"], ["--classes", "a", "b"]]
)
def test_options_of_ones_own_data_are_refused_elsewhere(argv, capfd):
    assert train.main(argv) == 2 and argv[0] in capfd.readouterr().err
    assert train.main(["--dataset", "t.csv", "--min-votes", "0"]) == 2


def test_annotators_are_kept_from_reading_to_scoring():
    rng = np.random.RandomState(0)
    said = rng.randint(-1, 3, size=(40, 4))
    said[:8], said[8:, 0] = 2, 1  # eight agree
    np.savez("own.npz", x_train=rng.randint(256, size=(40, 8, 8)).astype(np.uint8), annotators=said)
    d = crowd.load(Path("own.npz"), classes=["a", "b", "c"])
    files = [*map(int, d.files), *map(int, d.scored.files)]
    assert d.annotator_names == list("0123") and sorted(files) == list(range(40)) and len(d.scored.files) == 8
    assert [*d.annotators.tolist(), *d.scored.annotators.tolist()] == said[files].tolist()
    assert d.scored.votes.tolist() == [[0, 0, 4]] * 8 or d.scored.votes.amax(1).tolist() == [
        max(np.bincount(said[i][said[i] >= 0])) for i in map(int, d.scored.files)
    ]
    pictures(*(f"{k}.png" for k in range(5)))
    rows = "0.png,ann,a\n0.png,ann,b\n0.png,bob,b\n1.png,bob,a\n2.png,,b\n2.png,,b\n2.png,bob,a\n3.png,ann,b\n"
    d = loaded("file,annotator,label,split\n" + rows.replace("\n", ",\n") + "4.png,eve,a,test\n")
    assert d.annotator_names == ["ann", "ann", "bob", "", "", "eve"] and d.files == [f"{k}.png" for k in range(4)]
    assert d.annotators.tolist() == [
        [0, 1, 1, -1, -1, -1], [-1, -1, 0, -1, -1, -1], [-1, -1, 0, 1, 1, -1], [1, -1, -1, -1, -1, -1]
    ]  # fmt: skip
