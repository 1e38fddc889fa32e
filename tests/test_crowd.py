"""One's own data: whole runs on tables, arrays and features; labels and model out."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import crowd
import data
import models
import train
from conftest import command, rows, summary
from crowd.__main__ import main
from harness import InputError

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
    child = command(*"--dataset mine/votes.csv --size 16 --base proden --epochs 20 --threads 1 --out r".split())
    out, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    assert "set-aside" in out and "not known" in out and "noise estimate" in out
    assert "set-aside score last" in out and "test accuracy" not in out  # nor what needs the truth:
    assert not any(name in out for name in ("phi_c", "bayes", "train accuracy"))
    table = read("r/labels.csv")
    assert len(table) == 500 and len({row["file"] for row in table}) == 500
    doubts = [float(row["p_majority_wrong"]) + float(row["p_missing"]) for row in table]
    assert all(a >= b - 3e-6 for a, b in zip(doubts, doubts[1:], strict=False))
    aside = [row for row in table if row["split"] == "score"]
    assert len(aside) == 100 and all(row["agreement"] == "1.000" for row in aside)
    for row in table:
        i = int(row["file"][7:10])
        given = {NAMES[k] for k in said[i]}
        assert set(row["given"].split("|")) == given <= set(row["after"].split("|")) and row["truth"] == ""
        assert float(row["agreement"]) == pytest.approx(max(np.bincount(said[i])) / 3, abs=1e-3)
        assert (row["added"] in row["after"].split("|")) if row["added"] else row["after"] == row["given"]
        assert (row["corrected_at"] == "") == (row["added"] == "")
        counts = np.bincount(said[i], minlength=4)
        heard = dict(part.split(":") for part in row["votes"].split("|"))
        assert heard == {NAMES[k]: str(n) for k, n in enumerate(counts) if n}
        assert row["majority"] == NAMES[counts.argmax()] and 0.25 <= float(row["confidence"]) <= 1
        if row["consensus"] == row["majority"]:
            assert float(row["confidence"]) == pytest.approx(1 - float(row["p_majority_wrong"]), abs=1e-4)
    right = {
        name: np.mean([row[name] == NAMES[truth[int(row["file"][7:10])]] for row in table])
        for name in ("predicted", "majority", "consensus")
    }
    assert right["predicted"] > 0.9 and right["consensus"] > max(0.95, right["majority"])
    assert list(table[0])[-7:] == "split majority consensus confidence p_majority_wrong p_missing votes".split()
    people = {row["annotator"]: row for row in read("r/annotators.csv")}
    assert set(people) == set("abc") and "consensus of network and votes" in out
    for a, name in enumerate("abc"):
        assert float(people[name]["accuracy"]) == pytest.approx((said[:, a] == truth).mean(), abs=0.03)
    noisy = [truth[int(row["file"][7:10])] not in said[int(row["file"][7:10])] for row in table]
    assert np.mean(noisy[:20]) > 5 * np.mean(noisy)  # suspicious first
    wrong = [row["majority"] != NAMES[truth[int(row["file"][7:10])]] for row in table]
    assert np.mean(wrong[:20]) > 0.9
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
    assert main(["predict", "r", *map(str, paths), "--probabilities"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    for row, path, want in zip(table, paths, p, strict=True):
        assert row["file"] == str(path) and row["label"] == NAMES[int(want.argmax())]
        assert float(row["probability"]) == pytest.approx(float(want.max()), abs=1e-3)
        assert [float(row[name]) for name in NAMES] == pytest.approx(want.tolist(), abs=1e-3)
    np.savez("new.npz", x=np.stack(small))
    assert main(["predict", "r", "new.npz", "--out", "p.csv"]) == 0
    assert [row["label"] for row in read("p.csv")] == [row["label"] for row in table]
    assert [row["file"] for row in read("p.csv")] == [f"new.npz:{i}" for i in range(6)]
    Path("text.png").write_text("no image")
    np.savez("flat.npz", x=np.zeros((3, 5), np.float32))
    capsys.readouterr()
    for file, why in (
        ("text.png", "text.png"),
        ("absent.png", ""),
        ("flat.npz", "not features"),
        ("mine", "votes.csv"),
    ):
        assert main(["predict", "r", file]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1 and out == "" and why in err
    for argv in ([], ["predict", "r"], ["check"]):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["predict", "mine", "text.png"]) == 2 and "config.json" in capsys.readouterr().err


def test_what_the_opening_says_of_ones_own_labels(capsys):
    """What a slip in the table would look like, before anything is trained on it."""
    truth, said = made(40, Path("mine"))
    lines = Path("mine/votes.csv").read_text().splitlines()

    def opening(*rows: str, head: str = "file,label") -> str:
        Path("mine/v.csv").write_text("\n".join([head, *rows]))
        assert train.main("--dataset mine/v.csv --size 8 --base cc --batch-size 8 --epochs 1".split()) == 0
        return capsys.readouterr().out

    files = [f"images/{i:03d}.png" for i in range(40)]
    out = opening(*(f"{file},{NAMES[label[0]]}" for file, label in zip(files, said, strict=True)))
    assert (
        "8 set-aside (one label each, not confirmed)" in out and "classes: circle | cross | square | stripes" in out
    )
    assert "capitals" not in out and "correction starts" not in out
    text = [line.replace(",a,", ",").replace(",b,", ",").replace(",c,", ",") for line in lines[1:]]
    out = opening(*text[:-1], text[-1].upper().replace("IMAGES", "images").replace("PNG", "png"))
    assert "the annotators agree on them most" in out and " is read as " in out
    known = [
        f"{file},{NAMES[y] if i % 2 else ''},circle|{NAMES[y]}"
        for i, (file, y) in enumerate(zip(files, truth, strict=True))
    ]
    out = opening(*known, head="file,truth,candidates")
    assert "the truth is known of" in out


def test_another_tables_run_is_not_overwritten_unless_its_folder_is_named(capsys):
    for folder in ("one", "two"):
        made(40, Path(folder))
    argv = "--size 8 --base cc --batch-size 8 --epochs 1 --dataset".split()
    assert train.main([*argv, "one/votes.csv"]) == 0
    before = read("runs/votes-cc-irnet-seed0/labels.csv")
    assert train.main([*argv, "two/votes.csv", "--overwrite"]) == 2
    assert "one/votes.csv" in capsys.readouterr().err and read("runs/votes-cc-irnet-seed0/labels.csv") == before
    assert train.main([*argv, "one/../one/votes.csv", "--overwrite"]) == 0
    assert train.main([*argv, "two/votes.csv", "--overwrite", "--out", "runs/votes-cc-irnet-seed0"]) == 0
    assert train.main([*argv, "one/votes.csv", "--size", "0"]) == 2 and "--image-size 0" in capsys.readouterr().err


def test_a_run_on_embedded_digits_has_labels_and_a_review_too():
    assert (
        train.main("--limit-train 200 --limit-test 60 --batch-size 32 --base cc --epochs 4 --e0 1 --out r".split())
        == 0
    )
    table = read("r/labels.csv")
    assert len(table) == 200 and {row["split"] for row in table} == {"train"} and table[0]["agreement"] == ""
    assert list(table[0])[-1] == "split" and not Path("r/annotators.csv").exists()  # made-up sets have no votes
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
    assert main(["review", "r"]) == 0


# ------------------------------------------------------------------ samples set aside for scoring


def test_reliable_samples_are_set_aside_where_there_is_no_test_set():
    rng = np.random.RandomState(0)
    x = rng.randint(256, size=(50, 8, 8)).astype(np.uint8)
    counts = rng.randint(1, 5, size=(50, 3))
    counts[:5] = [[8, 1, 1]] * 5  # 0.8
    counts[5:10] = [[0, 9, 0]] * 5  # 1.0
    np.savez("own.npz", x_train=x, votes=counts)
    d = crowd.load(Path("own.npz"))
    assert d.scored.files == [str(i) for i in range(10)]  # a fifth at most; here all that reach 0.8
    assert d.test_labels.tolist() == [0] * 5 + [1] * 5
    assert torch.equal(d.test_images.to("cpu")[:, 0], torch.tensor(x[:10]))
    assert d.files == [str(i) for i in range(10, 50)] and len(d.images) == len(d.votes) == len(d.candidates) == 40
    assert crowd.load(Path("own.npz"), reliability=0.9).scored.files == [str(i) for i in range(5, 10)]
    counts[10:30] = [[0, 0, 5]] * 20
    np.savez("own.npz", x_train=x, votes=counts)
    one, two = crowd.load(Path("own.npz")), crowd.load(Path("own.npz"))
    assert len(one.scored.files) == 10 and set(one.scored.files) <= {str(i) for i in range(5, 30)}
    assert one.scored.files == two.scored.files
    for even in (np.ones((50, 3), int), np.array([[2, 2, 0]] * 50)):
        np.savez("even.npz", x_train=x, votes=even)
        with pytest.raises(InputError, match="--reliability.*add a test set"):
            crowd.load(Path("even.npz"), reliability=0.3)  # nobody knows which of two equals is right
    np.savez("few.npz", x_train=x[:3], votes=np.eye(3, dtype=int))
    assert len(crowd.load(Path("few.npz")).images) == 2


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
        argv = ["--dataset", "t.npz", "--base", "cc", "--tau", "0.3", "--views-all", "--out", "r" + "".join(more)]
        assert train.main([*argv, *more]) == 0
        last[bool(more)] = summary("r" + "".join(more))["last"]
    assert summary("r")["arch"] == "mlp" and last[False] > 0.85 and last[False] > last[True] + 0.05
    assert summary("r")["noise_after"] < summary("r")["noise_before"] / 2
    assert "<img" not in Path("r/review.html").read_text() and not Path("r/annotators.csv").exists()
    table = read("r/labels.csv")  # sets without votes
    missing = [float(row["p_missing"]) for row in table]
    assert missing == sorted(missing, reverse=True) and {row["consensus"] + row["votes"] for row in table} == {""}
    noisy = [row["truth"] not in row["given"].split("|") for row in table]
    assert np.mean(noisy[:70]) > 0.95
    assert train.main("--dataset t.npz --base pico --epochs 2 --views ws --e0 1 --out p".split()) == 0
    assert main(["predict", "r", "t.npz", "--out", "p.csv"]) == 0  # its x_test
    right = [int(row["label"]) == label for row, label in zip(read("p.csv"), y[700:], strict=True)]
    assert np.mean(right) == pytest.approx(last[False])
