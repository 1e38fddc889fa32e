"""One's own data: tables, arrays and features in; labels, review and model out; the noise rate without truth."""

import base64
import csv
import io
import json
import re
import struct
import zlib
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import crowd
import data
import images
import irnet
import models
import train
import votes
from conftest import TIMES, Bomb, command, rows, same_run, summary
from test_runs import stopping_at

NAMES = ("circle", "cross", "square", "stripes")


def drawing(kind: int, rng: np.random.RandomState, side: int = 24) -> np.ndarray:
    """One of four shapes, somewhere on a noisy ground."""
    y, x = np.mgrid[:side, :side]
    cy, cx, r = rng.uniform(9, 15), rng.uniform(9, 15), rng.uniform(5, 8)
    dy, dx = abs(y - cy), abs(x - cx)
    shape = [dy**2 + dx**2 < r**2, np.minimum(dy, dx) < 2, np.maximum(dy, dx) < r, (x // 3) % 2 == 0][kind]
    ground = rng.uniform(0, 60, (side, side, 3))
    return (ground + shape[:, :, None] * rng.uniform(90, 190, 3)).astype(np.uint8)


def made(n: int, folder: Path, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n drawings as PNG files, and votes.csv of three annotators: right with probability 0.9, on a quarter of the
    images with 0.3 -> (truth, votes [n, 3])."""
    rng = np.random.RandomState(seed)
    truth = rng.randint(4, size=n)
    skill = np.where(rng.rand(n, 1) < 0.25, 0.3, 0.9)
    said = np.where(rng.rand(n, 3) < skill, truth[:, None], rng.randint(4, size=(n, 3)))
    (folder / "images").mkdir(parents=True)
    lines = ["file,annotator,label"]
    for i in range(n):
        Image.fromarray(drawing(truth[i], rng)).save(folder / f"images/{i:03d}.png")
        lines += [f"images/{i:03d}.png,{who},{NAMES[label]}" for who, label in zip("abc", said[i], strict=True)]
    (folder / "votes.csv").write_text("\n".join(lines) + "\n")
    return truth, said


def read(path) -> list[dict]:
    return list(csv.DictReader(io.StringIO(Path(path).read_text())))


# ------------------------------------------------------------------ from files to labels, in one command


def test_from_images_and_votes_to_labels_and_review_in_one_command():
    """500 files, three annotators; the real command line."""
    truth, said = made(500, Path("mine"))
    child = command(*"--dataset mine/votes.csv --base proden --epochs 20 --threads 1 --out r".split())
    out, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    assert "set-aside" in out and "not known" in out and "noise estimate" in out
    table = read("r/labels.csv")
    assert len(table) == 500 and len({row["file"] for row in table}) == 500
    margins = [float(row["margin"]) for row in table]
    assert margins == sorted(margins)
    aside = [row for row in table if row["split"] == "score"]
    assert len(aside) == 100 and all(row["agreement"] == "1.000" for row in aside)
    for row in table:
        i = int(row["file"][7:10])
        given = {NAMES[k] for k in said[i]}
        assert set(row["given"].split("|")) == given <= set(row["after"].split("|")) and row["truth"] == ""
        assert float(row["agreement"]) == pytest.approx(max(np.bincount(said[i])) / 3, abs=1e-3)
        assert (row["added"] in row["after"].split("|")) if row["added"] else row["after"] == row["given"]
        assert (row["corrected_at"] == "") == (row["added"] == "")
    right = [row["predicted"] == NAMES[truth[int(row["file"][7:10])]] for row in table]
    assert np.mean(right) > 0.9
    noisy = [truth[int(row["file"][7:10])] not in said[int(row["file"][7:10])] for row in table]
    assert np.mean(noisy[:20]) > 5 * np.mean(noisy)  # suspicious first
    found = summary("r")
    assert found["noise_before"] is None and found["transductive"] is None and found["last"] > 0.9
    assert rows("r")[-1]["phi_c"] is None and found["noise_estimate"]["low"] <= np.mean(noisy)
    assert Path("r/review.html").stat().st_size < 3e6


def test_the_model_is_reloaded_in_two_lines_and_predicts_new_files(capsys):
    truth, _ = made(60, Path("mine"))
    argv = "--dataset mine/votes.csv --size 16 --base cc --batch-size 16 --epochs 3 --out r".split()
    assert train.main(argv) == 0
    model = models.build(**json.load(open("r/config.json"))["network"])
    model.load_state_dict(torch.load("r/model.pt", weights_only=True))
    model.eval()
    paths = [Path(f"mine/images/{i:03d}.png") for i in range(6)]
    small = [np.array(Image.open(path).resize((16, 16), Image.Resampling.BILINEAR)) for path in paths]
    with torch.no_grad():
        p = model(torch.tensor(np.stack(small)).permute(0, 3, 1, 2) / 255).softmax(1)
    capsys.readouterr()
    assert crowd.main(["predict", "r", *map(str, paths), "--probabilities"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    for row, path, want in zip(table, paths, p, strict=True):
        assert row["file"] == str(path) and row["label"] == NAMES[int(want.argmax())]
        assert float(row["probability"]) == pytest.approx(float(want.max()), abs=1e-3)
        assert [float(row[name]) for name in NAMES] == pytest.approx(want.tolist(), abs=1e-3)
    np.savez("new.npz", x=np.stack(small))
    assert crowd.main(["predict", "r", "new.npz", "--out", "p.csv"]) == 0
    assert [row["label"] for row in read("p.csv")] == [row["label"] for row in table]
    assert [row["file"] for row in read("p.csv")] == [f"new.npz:{i}" for i in range(6)]
    Path("text.png").write_text("no image")
    np.savez("flat.npz", x=np.zeros((3, 5), np.float32))
    capsys.readouterr()
    for files in (["text.png"], ["absent.png"], ["flat.npz"]):
        assert crowd.main(["predict", "r", *files]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1 and out == ""
    assert crowd.main(["predict", "mine", "text.png"]) == 2 and "config.json" in capsys.readouterr().err


# ------------------------------------------------------------------ tables


def pictures(*names: str, folder: str = "t", modes=("RGB",)) -> None:
    Path(folder).mkdir(exist_ok=True)
    for k, name in enumerate(names):
        image = Image.fromarray(drawing(k % 4, np.random.RandomState(k)))
        image.convert(modes[k % len(modes)]).save(f"{folder}/{name}")


def loaded(text: str, **options) -> data.Dataset:
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
    assert crowd.agreement(votes_).tolist() == pytest.approx([2 / 3, 1])
    twice = loaded("file,annotator,label,truth,split\n1.png,u,b,,\n1.png,u,b,,\n1.png,v,a,,\n"
                   "x.png,u,a,a,test\ny.png,u,b,b,test")  # fmt: skip
    assert twice.votes.tolist() == [[1, 1]]  # the same annotator twice is one vote
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


def test_reliable_samples_are_set_aside_where_there_is_no_test_set():
    rng = np.random.RandomState(0)
    x = rng.randint(256, size=(50, 8, 8)).astype(np.uint8)
    counts = rng.randint(1, 5, size=(50, 3))
    counts[:5] = [[8, 1, 1]] * 5  # 0.8
    counts[5:10] = [[0, 9, 0]] * 5  # 1.0
    np.savez("own.npz", x_train=x, votes=counts)
    d = crowd.load(Path("own.npz"))
    assert d.scored.files == [str(i) for i in range(10)]  # a fifth at most; here all that reach 0.8
    assert d.test_labels.tolist() == [0] * 5 + [1] * 5 and torch.equal(d.test_images[:, 0], torch.tensor(x[:10]))
    assert d.files == [str(i) for i in range(10, 50)] and len(d.images) == len(d.votes) == len(d.candidates) == 40
    assert crowd.load(Path("own.npz"), reliability=0.9).scored.files == [str(i) for i in range(5, 10)]
    counts[10:30] = [[0, 0, 5]] * 20
    np.savez("own.npz", x_train=x, votes=counts)
    one, two = crowd.load(Path("own.npz")), crowd.load(Path("own.npz"))
    assert len(one.scored.files) == 10 and set(one.scored.files) <= {str(i) for i in range(5, 30)}
    assert one.scored.files == two.scored.files
    for even in (np.ones((50, 3), int), np.array([[2, 2, 0]] * 50)):
        np.savez("even.npz", x_train=x, votes=even)
        with pytest.raises(data.InputError, match="--reliability.*add a test set"):
            crowd.load(Path("even.npz"), reliability=0.3)  # nobody knows which of two equals is right
    np.savez("few.npz", x_train=x[:3], votes=np.eye(3, dtype=int))
    assert len(crowd.load(Path("few.npz")).images) == 2


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


# ------------------------------------------------------------------ features


def features(n: int, seed: int = 0):
    """Eight Gaussian clouds in twelve dimensions of very different scale -> (x, truth)."""
    rng = np.random.RandomState(seed)
    truth, scale = rng.randint(8, size=n), 10.0 ** rng.uniform(-4, 4, size=12)
    return ((np.random.RandomState(99).randn(8, 12)[truth] * 1.5 + rng.randn(n, 12)) * scale).astype(
        np.float32
    ), truth


def test_tabular_data_are_learnt_by_the_mlp():
    x, y = features(900)
    sets = data.corrupt(torch.tensor(y), 8, 0.3, 0.3, torch.Generator().manual_seed(0)).numpy()
    np.savez("t.npz", x_train=x[:700], y_train=y[:700], x_test=x[700:], y_test=y[700:], candidates=sets[:700])
    last = {}
    for more in ([], ["--no-irnet"]):
        assert (
            train.main(["--dataset", "t.npz", "--base", "cc", "--tau", "0.3", "--out", "r" + "".join(more), *more])
            == 0
        )
        last[bool(more)] = summary("r" + "".join(more))["last"]
    assert summary("r")["arch"] == "mlp" and last[False] > 0.85 and last[False] > last[True] + 0.05
    assert summary("r")["noise_after"] < summary("r")["noise_before"] / 2
    assert "<img" not in Path("r/review.html").read_text()
    assert train.main("--dataset t.npz --base pico --epochs 2 --views ws --e0 1 --out p".split()) == 0
    assert crowd.main(["predict", "r", "t.npz", "--out", "p.csv"]) == 0  # its x_test
    right = [int(row["label"]) == label for row, label in zip(read("p.csv"), y[700:], strict=True)]
    assert np.mean(right) == pytest.approx(last[False])


def test_views_of_features_are_gaussian_noise_in_their_own_scale():
    x, y = features(4000)
    np.savez("t.npz", x_train=x, candidates=np.eye(8, dtype=bool)[y])
    s = train.Setup(train.configure("--dataset t.npz --feature-noise 0.25".split()))
    batch = s.images[:3000]
    for kind, factor in (("w", 0.25), ("s", 0.5)):
        noise = ((s.view(kind, batch) - batch) / s.images.std(0)).flatten(1)
        assert noise.std(0).tolist() == pytest.approx([factor] * 12, rel=0.06)
        assert noise.mean(0).abs().max() < 0.05
    assert torch.equal(s.plain(batch), batch)


# ------------------------------------------------------------------ the page


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]


def test_the_review_shows_what_labels_csv_says_and_asks_for_nothing_else():
    truth, _ = made(150, Path("mine"))
    text = Path("mine/votes.csv").read_text().replace("circle", "<b>&\"'circle")
    Path("mine/votes.csv").write_text(text)
    argv = "--dataset mine/votes.csv --size 8 --base proden --batch-size 16 --epochs 3 --e0 1 --out r".split()
    assert train.main(argv) == 0
    text, table = Path("r/review.html").read_text(), read("r/labels.csv")
    page = Page(text)
    assert page.tags.count("article") == page.tags.count("img") == 100 and page.tags.count("option") == 5
    assert all(address.startswith("data:") for address in page.addresses) and "http" not in text
    assert "<b>&\"'circle" not in text and "&lt;b&gt;&amp;&quot;&#x27;circle" in text
    shown = [row for row in table if row["split"] == "train"][:100]
    assert re.findall(r"<h2>(.*?)</h2>", text) == [row["file"] for row in shown]
    first = re.search(r'src="data:image/png;base64,(.*?)"', text)[1]
    thumbnail = np.array(Image.open(io.BytesIO(base64.b64decode(first))))
    assert np.array_equal(thumbnail, np.array(Image.open("mine/" + shown[0]["file"])))  # the file, not 8x8
    Path("r/review.html").unlink()
    assert crowd.main(["review", "r"]) == 0 and Path("r/review.html").read_text() == text
    Path("mine").rename("moved")
    assert crowd.main(["review", "r"]) == 2
    assert crowd.main(["review", "r", "--dataset", "moved/votes.csv"]) == 0
    assert Path("r/review.html").read_text() == text
    Path("link.csv").symlink_to("moved/votes.csv")
    assert crowd.main(["review", "r", "--dataset", "link.csv"]) == 0
    assert Path("r/review.html").read_text() == text
    assert crowd.main(["review", "moved"]) == 2
    Path("r/labels.csv").write_text("")
    assert crowd.main(["review", "r"]) == 2


def test_a_review_of_other_arrays_is_refused_and_a_lost_file_is_no_reason_to_fail(monkeypatch, capsys):
    x = np.random.RandomState(0).randint(256, size=(60, 8, 8)).astype(np.uint8)
    np.savez("own.npz", x_train=x, candidates=np.eye(3, dtype=bool)[np.arange(60) % 3])
    np.savez("other.npz", x_train=255 - x, candidates=np.eye(3, dtype=bool)[np.arange(60) % 3])
    assert train.main("--dataset own.npz --base cc --batch-size 8 --epochs 1 --out r".split()) == 0
    assert crowd.main(["review", "r"]) == 0 and crowd.main(["review", "r", "--dataset", "other.npz"]) == 2
    assert "other.npz" in capsys.readouterr().err
    made(40, Path("mine"))
    original = train.train_epoch

    def epoch(*args):
        Path("mine/images/000.png").unlink(missing_ok=True)
        return original(*args)

    monkeypatch.setattr(train, "train_epoch", epoch)
    assert train.main("--dataset mine/votes.csv --base cc --batch-size 8 --epochs 1 --out s".split()) == 0
    assert Path("s/review.html").exists()


def test_a_run_on_embedded_digits_has_labels_and_a_review_too():
    assert (
        train.main("--limit-train 200 --limit-test 60 --batch-size 32 --base cc --epochs 4 --e0 1 --out r".split())
        == 0
    )
    table = read("r/labels.csv")
    assert len(table) == 200 and {row["split"] for row in table} == {"train"} and table[0]["agreement"] == ""
    with np.load("r/candidates.npz") as file:
        for row in table:
            i = int(row["row"])
            assert row["given"] == "|".join(map(str, file["before"][i].nonzero()[0]))
            assert row["after"] == "|".join(map(str, file["after"][i].nonzero()[0]))
            assert (
                row["truth"] == str(file["truth"][i]) and int(row["corrected_at"] or 0) == file["corrected_at"][i]
            )
            assert row["added"] == (str(file["label"][i]) if file["corrected_at"][i] else "")
            assert (float(row["margin"]) <= -0.3) == (row["flagged"] == "yes")
    assert crowd.main(["review", "r"]) == 0


def test_the_most_suspicious_digits_are_noisy():
    """q = eta = 0.3: of the first 5 % of labels.csv, at least 95 % truly lack the truth."""
    assert train.main(["--base", "proden", "--epochs", "30", "--out", "r"]) == 0
    table = read("r/labels.csv")[: round(0.05 * 1437)]
    assert np.mean([row["truth"] not in row["given"].split("|") for row in table]) >= 0.95


# ------------------------------------------------------------------ the noise rate without a true label


def test_the_ratio_of_the_likelihood_by_counting_every_way():
    """P(S | y not in S) / P(S | y in S) = |S|/(C-|S|), over all sets of five labels, by the process itself."""
    classes, q = 5, 0.37
    clean, noisy = {}, {}
    for size in range(classes):
        for wrong in combinations(range(1, classes), size):  # y = 0
            made_ = frozenset((0, *wrong))
            p = q**size * (1 - q) ** (classes - 1 - size)
            clean[made_] = clean.get(made_, 0) + p
            outside = [j for j in range(classes) if j not in made_]
            for j in outside:
                turned = made_ - {0} | {j}
                noisy[turned] = noisy.get(turned, 0) + p / len(outside)
    for turned, p in noisy.items():
        size = len(turned)
        same = next(p for kept, p in clean.items() if len(kept) == size)
        assert p == pytest.approx(same * size / (classes - size))


@pytest.mark.parametrize(("q", "eta"), [(0.1, 0.0), (0.1, 0.2), (0.4, 0.3), (0.4, 0.6)])
def test_the_noise_rate_and_temperature_are_found_by_simulation(q, eta):
    found = []
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        logits = 2.5 * torch.randn(1200, 8, generator=g)
        y = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]  # f is P(y | x)
        rate, temperature, (low, high) = irnet.estimate_noise(3 * logits, data.corrupt(y, 8, q, eta, g))
        found.append((rate, temperature, low <= eta <= high))
        assert high - low < 0.2
    rate, temperature, covered = np.mean(found, 0)
    assert rate == pytest.approx(eta, abs=0.03) and temperature == pytest.approx(3, rel=0.15) and covered >= 0.75


def test_the_interval_covers_the_truth_on_small_samples_too():
    """24 samples, 5 % noise: often not one is noisy. The interval must not then be sure that there is none."""
    covered = []
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(24, 5, generator=g)
        y = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]
        _, _, (low, high) = irnet.estimate_noise(logits, data.corrupt(y, 5, 0.1, 0.05, g))
        covered.append(low <= 0.05 <= high)
    assert np.mean(covered) >= 0.9


def test_the_estimate_maximises_the_likelihood_written_as_a_loop():
    g = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(200, 4, generator=g)
    y = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]
    sets = data.corrupt(y, 4, 0.3, 0.2, g)
    sets[0], sets[1] = True, False  # full and empty sets say nothing
    eta, temperature, _ = irnet.estimate_noise(logits, sets)

    def likelihood(eta, temperature):
        total = 0.0
        for z, s in zip((logits.double() / temperature).tolist(), sets.tolist(), strict=True):
            if 0 < sum(s) < 4:
                f = np.exp(z) / np.exp(z).sum()
                inside, outside = f[np.array(s)].sum(), f[~np.array(s)].sum()
                total += np.log((1 - eta) * inside + eta * sum(s) / (4 - sum(s)) * outside)
        return total

    best = likelihood(eta, temperature)
    for other in (max(0, eta - 0.03), eta + 0.03):
        assert likelihood(other, temperature) < best
    for factor in (0.85, 1.18):
        assert likelihood(eta, temperature * factor) < best


def test_the_estimate_at_the_edges():
    nothing = irnet.estimate_noise(torch.randn(5, 3), torch.ones(5, 3, dtype=torch.bool))
    assert np.isnan([nothing[0], nothing[1], *nothing[2]]).all()
    sure = 50 * torch.eye(3)[torch.arange(90) % 3]
    assert irnet.estimate_noise(sure, sure > 0)[0] == 0.0
    assert irnet.estimate_noise(sure, ~(sure > 0))[0] == pytest.approx(0.99)


def test_every_run_estimates_its_noise_and_a_resumed_one_keeps_it(monkeypatch):
    argv = "--limit-train 400 --limit-test 60 --batch-size 32 --base cc --epochs 4 --e0 2".split()
    assert train.main([*argv, "--out", "r"]) == 0
    found = summary("r")["noise_estimate"]
    assert set(found) == {"eta", "low", "high", "temperature"} and found["low"] <= found["eta"] <= found["high"]
    assert ["noise_estimate" in row for row in rows("r")] == [
        False,
        True,
        False,
        False,
    ]  # at e0, before it is acted on
    assert train.main([*argv, "--out", "never", "--e0", "auto"]) == 0
    assert ["noise_estimate" in row for row in rows("never")] == [False] * 3 + [True]  # not found: at the end
    assert train.main([*argv, "--out", "leaks", "--val", "test"]) == 0
    assert summary("leaks")["noise_estimate"] is None  # nothing is held out


# ------------------------------------------------------------------ caution on real sets


def test_safe_tau_keeps_expected_corrections_half_right_by_a_loop():
    g = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(300, 6, generator=g)
    sets = torch.rand(300, 6, generator=g) < 0.3
    sets[~sets.any(1), 0] = True
    f = (logits + torch.randn(300, 6, generator=g)).softmax(1)

    def expected(tau, eta):
        """The mean probability, over what tau would move in, to be right."""
        found = []
        for z, s, v in zip(logits.tolist(), sets.tolist(), f.tolist(), strict=True):
            if all(s) or max(x for x, c in zip(v, s, strict=True) if c) - max(
                x for x, c in zip(v, s, strict=True) if not c) > -tau:  # fmt: skip
                continue
            p = np.exp(z) / np.exp(z).sum()
            ratio = eta * sum(s) / (6 - sum(s))
            label = max((x, j) for j, (x, c) in enumerate(zip(v, s, strict=True)) if not c)[1]
            inside = sum(x for x, c in zip(p, s, strict=True) if c)
            found.append(ratio * p[label] / ((1 - eta) * inside + ratio * (1 - inside)))
        return np.mean(found) if found else None

    stricter = 0
    for eta, tau in ((0.2, 0.0), (0.35, 0.1), (0.5, 0.05)):
        safe = crowd.safe_tau(logits, f, sets, eta, 1.0, tau)
        assert tau <= safe < np.inf and expected(safe, eta) >= 0.5
        looser = [-m for m in irnet.margin(f, sets).tolist() if tau <= -m < safe - 1e-7]
        assert (safe == tau) == (not looser) and all(expected(t, eta) < 0.5 for t in looser)
        stricter += safe > tau
    assert stricter
    assert crowd.safe_tau(logits, f, sets, 0.9, 1.0, 0.05) == 0.05  # noise enough: as it was
    assert crowd.safe_tau(logits, f, sets, 0.0, 1.0, 0.05) == np.inf  # no noise: nothing


def difficult(eta: float) -> None:
    """t.npz: features that cannot be told apart well, with little noise or none."""
    x, y = features(900)
    x += np.random.RandomState(1).randn(*x.shape).astype(np.float32) * x.std(0)
    sets = data.corrupt(torch.tensor(y), 8, 0.1, eta, torch.Generator().manual_seed(0)).numpy()
    np.savez("t.npz", x_train=x[:700], y_train=y[:700], x_test=x[700:], y_test=y[700:], candidates=sets[:700])


def test_clean_sets_of_ones_own_are_left_alone(capsys):
    difficult(0.0)
    argv = "--dataset t.npz --base cc --epochs 14 --e0 10".split()
    assert train.main([*argv, "--out", "careful"]) == 0
    assert "nothing is corrected" in capsys.readouterr().out
    assert train.main([*argv, "--out", "bold", "--tau", "0.3"]) == 0
    assert summary("careful")["corrections"] == 0 < summary("bold")["corrections"]
    assert summary("careful")["tau"] is None and summary("bold")["tau"] == 0.3
    assert summary("bold")["noise_after"] == 0  # there was nothing to find
    assert any(row["flagged"] == "yes" for row in read("careful/labels.csv"))  # suspicious all the same
    assert train.main([*argv, "--out", "alone", "--no-irnet"]) == 0
    strip = [
        [{k: v for k, v in row.items() if k not in (*TIMES, "tau")} for row in rows(r)]
        for r in ("careful", "alone")
    ]
    assert strip[0] == strip[1]  # nothing corrected: the base alone


def test_a_careful_run_resumes_with_its_tau(monkeypatch):
    difficult(0.05)
    argv = "--dataset t.npz --base cc --epochs 14 --e0 10".split()
    assert train.main([*argv, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        stopping_at(patch, 9 * 10 + 15)  # after e0
        assert train.main([*argv, "--out", "r"]) == 143
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("r", "whole")
    assert summary("r")["tau"] == summary("whole")["tau"] > 0.3 and summary("r")["corrections"]
