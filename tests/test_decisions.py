"""decisions.csv: read, trained with, never overruled, scored against; wrong ones get one line."""

import json
from pathlib import Path

import numpy as np
import pytest

import crowd
import train
from conftest import same_run, stopping_at, summary
from test_crowd import features, read

RUN = "--dataset own.npz --base cc --batch-size 16 --epochs 4 --e0 1 --tau 0".split()
NAMES = [f"class {k}" for k in range(8)]


def voted(n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Features in eight clouds with three annotators' votes in own.npz -> (truth, votes [n, 3])."""
    x, truth = features(n)
    rng = np.random.RandomState(0)
    said = np.where(rng.rand(n, 3) < 0.7, truth[:, None], rng.randint(8, size=(n, 3)))
    np.savez("own.npz", x_train=x, annotators=said, classes=np.array(NAMES))
    return truth, said


def decisions(text: str) -> list[str]:
    Path("d.csv").write_text(text)
    return ["--decisions", "d.csv"]


def test_decisions_are_trained_with_never_overruled_and_scored():
    truth, said = voted()
    kept = crowd.load(Path("own.npz"))
    first, second, third, gone = kept.files[:4]
    aside = kept.scored.files[0]
    other = NAMES[(truth[int(second)] + 1) % 8]
    lines = ["row,decision,label,proposed,given", f"{first},accept,{NAMES[truth[int(first)]]},class 9,x"]
    lines += [f"{second},choose,{other},{other},x", f"{third},keep,CLASS 0|class 1,class 0,class 0|class 1"]
    lines += [f"{gone},none,,class 2,class 3", f"{aside},choose,{other},,"]
    assert train.main([*RUN, *decisions("\n".join(lines)), "--out", "r"]) == 0
    assert train.main([*RUN, "--out", "plain"]) == 0
    table = {row["row"]: row for row in read("r/labels.csv")}
    assert set(table) == set(kept.files + kept.scored.files) - {gone}
    want = {first: NAMES[truth[int(first)]], second: other, third: "class 0|class 1", aside: other}
    assert {name: row["decided"] for name, row in table.items() if row["decided"]} == want
    assert set(list(table)[-4:]) == set(want)  # nobody need look at them again
    for name, label in want.items():
        row = table[name]
        assert row["given"] == row["after"] == label and row["added"] == "" and row["consensus"] in label.split("|")
        assert row["p_missing"] == "0.000000" and row["proposed"] in NAMES
    moved = [row for row in table.values() if row["added"]]
    assert moved  # with tau 0, so that leaving the decided ones alone is no accident
    assert not {row["row"] for row in read("r/next.csv")} & set(want)
    with np.load("r/candidates.npz") as file:
        place = [name for name in kept.files if name != gone].index(second)
        assert file["before"][place].tolist() == file["after"][place].tolist() == [name == other for name in NAMES]
    found = summary("r")
    assert found["decisions"] == 5 and found["decisions_none"] == 1
    assert found["page_right"] == pytest.approx(2 / 4)  # of those with a proposal; none of these makes it wrong
    right = [table[name]["proposed"] in label.split("|") for name, label in want.items()]
    assert found["proposals_right"] == pytest.approx(np.mean(right))
    right = [table[name]["majority"] in label.split("|") for name, label in want.items()]
    assert found["majority_right"] == pytest.approx(np.mean(right))
    assert "decisions" not in summary("plain") and "decided" not in read("plain/labels.csv")[0]
    assert json.loads(Path("r/config.json").read_text())["decisions"] == ["d.csv"]
    one, two = (crowd.load(Path("own.npz"), decisions=files) for files in (["d.csv"], []))
    assert one.scored.files == two.scored.files and one.test_labels[0] == NAMES.index(other)  # the same set aside


def test_a_run_with_decisions_resumes_exactly_and_with_no_others(monkeypatch, capsys):
    truth, _ = voted()
    name = crowd.load(Path("own.npz")).files[0]
    argv = [*RUN, *decisions(f"row,label\n{name},class 3\n")]
    assert train.main([*argv, "--out", "whole"]) == 0
    stopping_at(monkeypatch, 9)
    assert train.main([*argv, "--out", "parts"]) == 143
    resumed = [*argv, "--out", "parts", "--resume"]
    decisions(f"row,label\n{name},class 4\n")
    assert train.main(resumed) == 2 and "data are not those" in capsys.readouterr().err
    decisions(f"row,label\n{name},class 3\n")
    assert train.main([*RUN, "--out", "parts", "--resume"]) == 2 and "--decisions" in capsys.readouterr().err
    assert train.main(resumed) == 0 and same_run("whole", "parts")


WRONG = {  # what is wrong: (the file, what the line names)
    "no label": ("row,decision\n0,accept\n", ("line 1", "label")),
    "an unknown sample": ("row,label\n0,class 1\n999,class 1\n", ("line 3", "999")),
    "an unknown class": ("row,label\n0,class 1\n1,clas 1\n", ("line 3", "clas 1")),
    "an unknown decision": ("row,decision,label\n0,acept,class 1\n", ("line 2", "acept", "accept")),
    "none with a label": ("row,decision,label\n0,none,class 1\n", ("line 2", "none")),
    "a label that is missing": ("row,decision,label\n0,accept,\n", ("line 2", "label")),
    "two decisions": ("row,label\n0,class 1\n0,class 2\n", ("line 3", "another decision")),
    "nothing": ("row,label\n", ("no decision",)),
    "a wrong encoding": ("row,label\n0,cl\u00e4ss\n".encode("latin-1"), ("line 2", "UTF-8")),
    "no file": (None, ("d.csv",)),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_decisions_get_one_line(what, capfd):
    voted(40)
    content, named = WRONG[what]
    if content is not None:
        Path("d.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(Path().iterdir())
    assert train.main([*RUN, "--decisions", "d.csv"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and all(name in err for name in named), err
    assert sorted(Path().iterdir()) == before


def test_a_later_file_overrules_an_earlier_one():
    voted(40)
    names = crowd.load(Path("own.npz")).files[:2]
    Path("a.csv").write_text(f"row,label\n{names[0]},class 1\n{names[1]},class 2\n")
    Path("b.csv").write_text(f"row;label\n{names[0]};class 5\n")
    d = crowd.load(Path("own.npz"), decisions=["a.csv", "b.csv"])
    assert d.candidates[:2].nonzero().tolist() == [[0, 5], [1, 2]]


def test_a_run_resumes_with_no_other_votes(monkeypatch, capsys):
    _, said = voted()
    stopping_at(monkeypatch, 9)
    assert train.main([*RUN, "--out", "r"]) == 143
    with np.load("own.npz") as file:
        np.savez("own.npz", **{**file, "annotators": said[:, ::-1].copy()})  # other annotators, the same sets
    assert train.main([*RUN, "--out", "r", "--resume"]) == 2
    assert "the votes or decisions are not those" in capsys.readouterr().err
    voted()
    assert train.main([*RUN, "--out", "r", "--resume"]) == 0
