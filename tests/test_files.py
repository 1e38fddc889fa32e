"""More ways in: class folders, features as a CSV, other separators, spellings, unsure votes, pandas; and what used
to be read without a word."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import crowd
import data
import models
import train
from conftest import TOY, rows
from crowd.__main__ import main as crowd_main
from crowd.further import gain
from crowd.spelling import key, one_spelling
from crowd.votes import feature_notes
from harness import InputError, options
from test_crowd import drawing, features, read
from test_votes import loaded, pictures

# ------------------------------------------------------------------ class folders


def folders(*names: str) -> None:
    for k, name in enumerate(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing(k % 4, np.random.RandomState(k))).save(name)


def test_a_folder_of_class_folders_is_a_table_with_one_label_a_sample():
    folders(*(f"f/{name}/{k}.png" for name in ("dog", "Cat", "cow x") for k in range(4)), "f/cat/4.png")
    Path("f/dog/Thumbs.db").write_text("no image")
    Path("f/dog/.hidden").write_text("no image")
    d = crowd.load(Path("f"))
    assert d.classes == ["Cat", "cow x", "dog"] and d.num_classes == 3 and d.scored.single
    names = d.files + d.scored.files
    assert sorted(names) == sorted(str(p.relative_to("f")) for p in Path("f").rglob("*.png"))
    said = torch.cat([d.votes, d.scored.votes])
    want = {"dog": 2, "Cat": 0, "cat": 0, "cow x": 1}
    assert said.argmax(1).tolist() == [want[name.split("/")[0]] for name in names] and said.sum() == 13
    assert any("'cat' is read as 'Cat'" in note for note in d.notes) and any("1 files" in note for note in d.notes)
    assert options.configure(["--dataset", "f"], data.has_features, data.count).batch_size == 2
    assert train.main("--dataset f --base cc --epochs 1 --size 8 --out r".split()) == 0
    assert read("r/labels.csv")[0]["file"] in names and Path("r/review.html").read_text().count("<img") == 13


def test_train_and_test_folders_are_the_split():
    folders(*(f"f/{part}/{name}/{k}.png" for part in ("train", "test") for name in ("a", "b") for k in range(3)))
    d = crowd.load(Path("f"))
    assert d.scored is None and d.score == "test accuracy" and d.test_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert d.files == [f"train/{name}/{k}.png" for name in ("a", "b") for k in range(3)] and len(d.images) == 6
    assert data.count(Path("f")) == 6
    folders("g/a/0.png", "g/b/1.png")
    Path("g/a/0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"^g: 0.png: "):
        crowd.load(Path("g"))
    Path("g/votes.csv").write_text("file,label\n")
    with pytest.raises(InputError, match="name votes.csv in it"):
        crowd.load(Path("g"))
    Path("h/a").mkdir(parents=True)
    with pytest.raises(InputError, match="no image in any"):
        crowd.load(Path("h"))


# ------------------------------------------------------------------ tables


@pytest.mark.parametrize("mark", ["|", ";", ","])
def test_candidates_are_parted_by_a_bar_a_semicolon_or_a_comma(mark):
    pictures(*(f"{k}.png" for k in range(1, 6)))
    d = loaded(f'file,candidates\n1.png,"a{mark} b"\n2.png,b\n3.png,"c{mark}a{mark}b"\n4.png,a\n5.png,b\n')
    sets = dict(zip(d.files + d.scored.files, torch.cat([d.candidates, d.scored.candidates]).tolist(), strict=True))
    assert d.classes == ["a", "b", "c"]
    assert sets["1.png"] == [True, True, False] and sets["3.png"] == [True] * 3 and sets["2.png"][1]
    if mark != "|":  # where there is a bar, the others are parts of names; and so are those in --classes
        d = loaded(f'file,candidates\n1.png,"x{mark} y|b"\n2.png,b\n3.png,b\n4.png,b\n')
        assert d.classes == ["b", f"x{mark} y"]
        d = loaded(f'file,candidates\n1.png,"x{mark} y"\n2.png,b\n3.png,b\n', classes=["b", f"x{mark} y"])
        assert d.num_classes == 2


def test_labels_that_are_lists_are_refused_and_spellings_become_one():
    pictures(*(f"{k}.png" for k in range(6)))
    with pytest.raises(InputError, match=r"line 4: 'cat;dog' is several labels"):
        loaded("file,label\n0.png,cat\n1.png,dog\n2.png,cat;dog\n")
    votes = (
        "0.png,u,Cat\n0.png,u,cat\n1.png,u,cat\n2.png,u,dog\n3.png,u,caf\u00e9\n4.png,u,cafe\u0301\n5.png,u,dog\n"
    )
    d = loaded("file,annotator,label\n" + votes)
    assert d.classes == ["caf\u00e9", "cat", "dog"] and len(d.notes) == 2
    every = torch.cat([d.votes, d.scored.votes])
    assert every.sum() == 6 and every.max() == 1  # one person's Cat and cat are one vote
    assert loaded("file,label\n0.png,Cat\n1.png,cat\n2.png,cat\n", classes=["cat", "Cat"]).num_classes == 2


def test_one_spelling():
    called, notes = one_spelling({"1": 5, "1.0": 3, "01": 1, "2.0": 2, "10": 1}, None)
    assert called == {"1": "1", "1.0": "1", "01": "1", "2.0": "2", "10": "10"} and "'1.0', '01'" in notes[0]
    assert one_spelling({"01": 3, "02": 1}, None) == ({"01": "01", "02": "02"}, [])  # as they are
    assert one_spelling({"a": 3, "A": 1}, None) == ({"a": "a", "A": "A"}, [])  # letters are letters
    assert one_spelling({"cat": 3, "CAT": 9}, ["Cat"])[0] == {"Cat": "Cat", "cat": "Cat", "CAT": "Cat"}
    assert one_spelling({"cat": 3, "CAT": 9}, ["Cat", "cat"])[0]["CAT"] == "CAT"  # which one?
    assert one_spelling({"1.5": 1, "1": 1}, None)[1] == []


def test_unsure_votes_mean_nothing():
    pictures(*(f"{k}.png" for k in range(5)))
    text = "file,label\n0.png,a\n0.png,Unsure\n1.png,b\n2.png,unsure\n3.png,b\n4.png,a\n"
    d = loaded(text)
    assert d.num_classes == 3 and any("--unsure" in note for note in d.notes)
    d = loaded(text, unsure=["unsure", "dunno"])
    assert d.classes == ["a", "b"] and sorted(d.files + d.scored.files) == ["0.png", "1.png", "3.png", "4.png"]
    assert any("1 samples have no vote" in note for note in d.notes) and any("dunno" in note for note in d.notes)
    np.savez("own.npz", x_train=np.zeros((4, 8, 8), np.uint8), annotators=np.array([[0], [1], [0], [1]]))
    with pytest.raises(InputError, match="--unsure"):
        crowd.load(Path("own.npz"), unsure=["x"])


def test_features_as_a_table_train_the_mlp_as_arrays_do():
    x, y = features(60)
    said = np.where(np.random.RandomState(0).rand(60, 2) < 0.8, y[:, None], 0)
    lines = ["id,f0,who," + ",".join(f"n{k}" for k in range(10)) + ",annotator,label"]
    for i in range(60):
        values = ",".join(repr(float(v)) for v in x[i])
        lines += [f"s{i},{values},ann,c{said[i, 0]}", f"s{i}{',' * 12},bob,c{said[i, 1]}"]  # given once is enough
    Path("f.csv").write_text("\n".join(lines))
    names = np.array(sorted({f"c{k}" for k in said.flatten()}))
    np.savez(
        "f.npz", x_train=x, annotators=np.searchsorted(names, np.char.add("c", said.astype(str))), classes=names
    )
    table, arrays = crowd.load(Path("f.csv")), crowd.load(Path("f.npz"))
    assert table.features and torch.equal(table.images, arrays.images) and torch.equal(table.votes, arrays.votes)
    assert table.files == [f"s{name}" for name in arrays.files] and table.annotator_names == ["ann", "bob"]
    assert data.has_features(Path("f.csv")) and data.count(Path("f.csv")) == 60
    for file in ("f.csv", "f.npz"):
        assert train.main(["--dataset", file, "--base", "cc", "--epochs", "2", "--out", file[2:]]) == 0
    same = [[{k: row[k] for k in ("loss", "val", "test")} for row in rows(name)] for name in ("csv", "npz")]
    assert same[0] == same[1] and list(read("csv/labels.csv")[0])[0] == "id"
    assert Path("csv/next.csv").read_text().startswith("id,votes")  # one key in both
    assert "<img" not in Path("csv/review.html").read_text()
    for wrong, named in (("x", "'x' in column b"), ("", "''"), ("inf", "finite"), ("nan", "finite")):
        Path("w.csv").write_text(f"a,b,label\n1,2,u\n3,{wrong},v\n")
        with pytest.raises(InputError, match="line 3") as error:
            crowd.load(Path("w.csv"))
        assert named in str(error.value)
    Path("w.csv").write_text("id,a,label\n7,1,u\n7,2,v\n")
    with pytest.raises(InputError, match="line 3: other features"):
        crowd.load(Path("w.csv"))


# ------------------------------------------------------------------ what used to be silent


def test_notes_about_features():
    x = np.random.RandomState(0).randn(300, 4)
    assert feature_notes(x) == [] and feature_notes(x.astype(np.uint8)) == []
    x[:, 1] = 3
    x[:, 2] += 1e8  # single precision holds steps of 8 there
    x[17, 3] = 1e12
    constant, coarse, wild = feature_notes(x)
    assert "feature 1 " in constant and "feature 2 " in coarse and "feature 3 (from 0) of row 17 is 1e+12" in wild
    x, _ = features(80)
    x[:, 5] = 1
    np.savez("own.npz", x_train=x, annotators=1 + np.arange(80)[:, None] % 3)
    d = crowd.load(Path("own.npz"))
    assert len(d.notes) == 2 and "feature 5 " in d.notes[0] and "begin at 1" in d.notes[1]
    np.savez("own.npz", x_train=x, annotators=np.arange(80)[:, None] % 3, classes=np.array(list("abc")))
    assert len(crowd.load(Path("own.npz")).notes) == 1


def test_tests_by_votes_alone_are_not_called_test_accuracy(capsys):
    pictures(*(f"{k}.png" for k in range(8)))
    text = "file,label,split\n" + "".join(f"{k}.png,{'ab'[k % 2]},{'test' if k > 5 else ''}\n" for k in range(8))
    d = loaded(text)
    assert d.voted_tests == 2 and d.score == "score by the votes of the test samples"
    assert train.main("--dataset t/v.csv --base cc --epochs 1 --size 8 --batch-size 2 --out r".split()) == 0
    out = capsys.readouterr().out
    assert "by votes alone" in out and "score by votes" in out and "test accuracy" not in out


def test_small_data_have_smaller_batches_and_more_epochs(capsys):
    def of(n: int, *more: str):
        np.savez(
            "own.npz", x_train=np.zeros((n, 8, 8), np.uint8), candidates=np.eye(2, dtype=bool)[np.arange(n) % 2]
        )
        return options.configure(["--dataset", "own.npz", *more], data.has_features, data.count)

    assert (of(60).batch_size, of(60).epochs) == (8, 40) and (of(20).batch_size, of(20).epochs) == (4, 67)
    assert (of(5000).batch_size, of(5000).epochs) == (64, 40)
    assert (of(60, "--batch-size", "4", "--epochs", "3").batch_size, of(60, "--epochs", "3").epochs) == (4, 3)
    assert options.configure([]).batch_size == 64
    of(60)
    assert train.main("--dataset own.npz --base cc --epochs 1 --out r".split()) == 0  # as it came, no error


def test_a_model_of_features_takes_them_as_they_are():
    model = models.build("mlp", channels=5, size=1, num_classes=3, mean=[0.0] * 5, std=[1.0] * 5).eval()
    x = torch.randn(4, 5)
    assert torch.equal(model(x), model(x[:, :, None, None]))


def test_packed_files_of_torchvision_are_read_where_they_lie():
    rng = np.random.RandomState(0)
    want = {}
    Path("d/KMNIST/raw").mkdir(parents=True)
    for part, n in (("train", 30), ("t10k", 10)):
        x, y = rng.randint(256, size=(n, 28, 28)).astype(np.uint8), rng.randint(10, size=n).astype(np.uint8)
        want[part] = x, y
        for kind, a in (("images-idx3", x), ("labels-idx1", y)):
            head = bytes([0, 0, 8, a.ndim]) + struct.pack(f">{a.ndim}i", *a.shape)
            Path(f"d/KMNIST/raw/{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + a.tobytes()))
    before = sorted(Path("d").rglob("*"))
    d = data.load("kmnist", "d")
    assert np.array_equal(d.images[:, 0], want["train"][0]) and np.array_equal(d.labels, want["train"][1])
    assert np.array_equal(d.test_images[:, 0], want["t10k"][0]) and np.array_equal(d.test_labels, want["t10k"][1])
    assert sorted(Path("d").rglob("*")) == before  # nothing unpacked beside them
    Path("d/KMNIST/raw/train-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="train-labels"):
        data.load("kmnist", "d")


# ------------------------------------------------------------------ another vote, and pandas


def test_the_gain_of_another_vote_against_a_loop_and_worked_numbers():
    rng = np.random.RandomState(0)
    q, pi = rng.dirichlet([0.5] * 4, size=30), rng.dirichlet([1.0] * 4, size=4) + 2 * np.eye(4)
    pi /= pi.sum(1, keepdims=True)
    want = [sum(max(row[k] * pi[k, label] for k in range(4)) for label in range(4)) - max(row) for row in q]
    assert np.allclose(gain(torch.tensor(q), torch.tensor(pi)), np.maximum(want, 0), atol=1e-12)
    pi = torch.tensor([[0.8, 0.2], [0.2, 0.8]])  # a coin toss becomes right 8 times of 10, a sure one stays
    assert gain(torch.tensor([[0.5, 0.5], [0.9, 0.1]]), pi).tolist() == pytest.approx([0.3, 0.0])


def test_frames_in_and_out():
    pandas = pytest.importorskip("pandas")
    rng = np.random.RandomState(0)
    truth = rng.randint(3, size=300)
    skill = np.array([0.9, 0.9, 0.85, 0.35])
    said = np.where(rng.rand(300, 4) < skill, truth[:, None], rng.randint(3, size=(300, 4)))
    names = np.array(["ant", "bee", "cat"])
    wide = pandas.DataFrame(names[said], columns=["u", "v", "w", "x"], index=[f"s{i}" for i in range(300)])
    long = wide.rename_axis("file").reset_index().melt("file", var_name="Annotator", value_name="Label")
    one, two = crowd.consensus(wide), crowd.consensus(long)
    assert list(one.index) == list(wide.index) and one.equals(two.loc[one.index])
    right = {name: (one[name] == names[truth]).mean() for name in ("majority", "consensus")}
    assert right["consensus"] > right["majority"] and right["consensus"] > 0.93
    accuracy = one.attrs["annotators"]
    assert all(abs(accuracy[who] - (said[:, a] == truth).mean()) < 0.05 for a, who in enumerate("uvwx"))
    assert (one["p_majority_wrong"] + one["confidence"])[one["majority"] == one["consensus"]].round(6).eq(1).all()
    p = pandas.DataFrame(np.eye(3)[truth] * 0.9 + 0.1 / 3, index=wide.index, columns=names)
    assert (crowd.consensus(wide, p)["consensus"] == names[truth]).mean() > 0.98
    messy = pandas.DataFrame({"sample": [1, 1, 2, 3, 3], "label": ["Cat", "cat", "unsure", None, "dog"]})
    assert crowd.read(messy, unsure=["unsure"])["label"].tolist() == ["Cat", "Cat", "dog"]
    for wrong in (messy[["label"]], messy[:0]):
        with pytest.raises(InputError):
            crowd.consensus(wrong)
    from crowd.consensus import Consensus  # the module beside the function

    assert callable(crowd.consensus) and Consensus.__module__ == "crowd.consensus"


def test_frames_with_gaps_have_the_labels_of_those_without():
    """pandas keeps whole numbers with gaps as floats, and strings with gaps beside its own NA."""
    pandas = pytest.importorskip("pandas")
    labels = [[0, 1], [1, None], [1, 1]]
    whole = [("s0", "a", "0"), ("s0", "b", "1"), ("s1", "a", "1"), ("s2", "a", "1"), ("s2", "b", "1")]
    frame = pandas.DataFrame(labels, columns=["a", "b"], index=["s0", "s1", "s2"])
    p = pandas.DataFrame([[0.9, 0.1]] * 3, index=frame.index, columns=[0, 1])
    for wide in (frame, frame.astype("Int64"), frame.astype("Int64").astype("string")):
        assert sorted(crowd.read(wide).itertuples(index=False, name=None)) == whole
        assert list(crowd.consensus(wide, p).index) == ["s0", "s1", "s2"]


def test_a_wild_value_is_noted_in_few_samples_and_a_long_number_is_a_label():
    x = np.random.RandomState(0).rand(60, 3)
    x[3, 1] = 1e12
    assert any("row 3" in note and "feature 1" in note for note in feature_notes(x))
    assert key("7" * 5000 + ".0") == key("0" + "7" * 5000) and key("00") == key("0.0") == "0"


def test_arrays_of_one_class_and_odd_names_get_one_line(capsys):
    x = np.random.RandomState(0).rand(40, 3)
    for kind in ("candidates", "votes"):
        np.savez("one.npz", x_train=x, **{kind: np.ones((40, 1), int)})
        assert train.main(["--dataset", "one.npz"]) == 2 and "one column" in capsys.readouterr().err
    np.savez("two.npz", x_train=x, annotators=np.arange(80).reshape(40, 2) % 2)
    for names in (["a", "a"], ["a|b", "c"], ["a"]):
        assert train.main(["--dataset", "two.npz", "--classes", *names]) == 2
        assert "--classes" in capsys.readouterr().err


def test_the_review_of_a_named_dataset_does_not_take_a_folder_of_that_name():
    assert train.main([*TOY, "--base", "cc", "--epochs", "2", "--out", "r"]) == 0
    Path("digits/sub").mkdir(parents=True)
    assert crowd_main(["review", "r"]) == 0
