"""Wrong command lines and files: one line that names what is wrong, exit 2, nothing written."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import crowd
import data
import train
from conftest import Bomb

BAD = [
    (["--q", "1"], "--q"),
    (["--q", "-0.1"], "--q"),
    (["--q", "nan"], "--q"),
    (["--eta", "1.0"], "--eta"),
    (["--eta", "-1"], "--eta"),
    (["--q", "0.9999999", "--eta", "0.3", "--limit-train", "50", "--batch-size", "8"], "--q"),
    (["--base", "foo"], "--base"),
    (["--base", "prodn"], "proden"),
    (["--dataset", "kmist"], "kmnist"),
    (["--dataset", "kmnist", "--data", "nowhere"], "digits"),
    (["--dataset", "absent.npz"], "absent.npz"),
    (["--epochs", "0"], "--epochs"),
    (["--epochs", "-3"], "--epochs"),
    (["--epochs", "many"], "--epochs"),
    (["--batch-size", "5000"], "--batch-size"),
    (["--batch-size", "1"], "--batch-size"),
    (["--limit-train", "40"], "--batch-size"),
    (["--lr", "0"], "--lr"),
    (["--tau", "2"], "--tau"),
    (["--e0", "soon"], "--e0"),
    (["--e0", "61"], "--e0"),
    (["--views", "x"], "--views"),
    (["--crop", "0"], "--crop"),
    (["--f", "prototype", "--base", "cc"], "--f"),
    (["--queue", "10"], "--queue"),
    (["--beta", "1"], "--beta"),
    (["--beta", "-1", "--base", "lwc"], "--beta"),
    (["--classifier-loss", "sce", "--base", "rc"], "--classifier-loss"),
    (["--classifier-loss", "sce", "--base", "pico+", "--no-irnet"], "--classifier-loss"),
    (["--proto-start", "3", "--base", "pico+", "--no-irnet"], "--proto-start"),
    (["--phi", "0.9", "1.2"], "--phi"),
    (["--phi", "0.9"], "--phi"),
    (["--key-momentum", "1"], "--key-momentum"),
    (["--prototype-momentum", "-0.5"], "--prototype-momentum"),
    (["--proto-start", "0"], "--proto-start"),
    (["--weight-decay", "-1"], "--weight-decay"),
    (["--weight-decay", "inf"], "--weight-decay"),
    (["--flip", "1.5"], "--flip"),
    (["--window", "2"], "--window"),
    (["--limit-test", "0"], "--limit-test"),
    (["--image-size", "4"], "--image-size"),
    (["--seed", "-1"], "--seed"),
    (["--seed", "x"], "--seed"),
    (["--threads", "-2"], "--threads"),
    (["--save-every", "0"], "--save-every"),
    (["--transductive-every", "-1"], "--transductive-every"),
    (["--out", ""], "--out"),
    (["--resume", "--overwrite"], "--overwrite"),
    (["--resume", "--out", "nowhere"], "nowhere"),
    (["--arch", "resnet81"], "resnet18"),
    (["--val", "train"], "holdout"),
    (["--epoch", "5"], "--epochs"),
    (["--batchsize=5"], "--batch-size"),
    (["--eta", "0.3", "0.4"], "0.4"),
    (["--dataset", "."], "x_train"),
    (["--dataset", "digits.csv"], "digits"),
    (["--e0", "0"], "--e0"),
    (["--lr", "nan"], "--lr"),
    (["--lr", "1e300"], "--lr"),
    (["--weight-decay", "1e300"], "--weight-decay"),
    (["--beta", "1e300", "--base", "lwc"], "--beta"),
    (["--e0", "9" * 5000], "--e0"),
    (["--out", "x" * 300], "--out"),
    (["--out", "x" * 300, "--resume"], "--out"),
    (["--base", "pico+"], "--no-irnet"),
    (["--lr", "1e999"], "--lr"),
    (["--tau", "nan"], "--tau"),
    (["--resume"], "--resume"),
    (["--nonsense"], "--nonsense"),
    (["--device", "cuda"], "--device"),
]


@pytest.mark.parametrize(("argv", "named"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_gets_one_line_and_exit_2(argv, named, capfd):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a card")
    try:
        code = train.main(argv)
    except SystemExit as stop:
        code = stop.code
    err = capfd.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and named in err, err
    assert list(Path().iterdir()) == []  # nothing written


X, Y = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 4
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
        except data.InputError as error:
            refused += 1
            assert "bad.npz" in str(error) and "\n" not in str(error)
    assert refused > 100


def test_a_world_without_torchrun_gets_one_line(capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert train.main([]) == 2
    err = capfd.readouterr().err
    assert "torchrun" in err and err.count("\n") == 1
