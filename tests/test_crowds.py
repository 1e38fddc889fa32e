"""Made-up crowds: what they are, and the real command at toy size."""

import csv

import numpy as np
import pytest

from conftest import summary
from paper import crowds
from paper.__main__ import main

Y = np.random.RandomState(0).randint(10, size=20_000)


def test_the_crowds_are_what_they_say():
    said = crowds.four_classes(Y, 3)
    right = np.array([[(said[k == Y, a] == k).mean() for a in range(3)] for k in range(10)])
    hard = right.mean(1) < 0.5
    assert hard.sum() == 4 and np.allclose(right[hard], 0.35, atol=0.04) and (right[~hard] > 0.95).all()
    assert (said != Y[:, None]).all(1).mean() == pytest.approx(0.4 * 0.65**3, abs=0.01)
    said = crowds.hard_samples(Y, 3)
    assert (said != Y[:, None]).all(1).mean() == pytest.approx(0.13, abs=0.01)
    right = (crowds.spammer(Y, 3) == Y[:, None]).mean(0)
    assert np.allclose(right, [0.91, 0.865, 0.82, 0.775, 0.1], atol=0.01)


def test_the_command_scores_every_column_against_the_truth_and_goes_on(monkeypatch, capsys, in_this_process):
    monkeypatch.setattr(crowds, "FEW", 300)
    argv = "crowds --crowds spammer --draws 3 --out o --options --epochs 3 --base proden --follow-votes".split()
    assert main(argv) == 0
    first = capsys.readouterr().out
    line = next(line for line in first.splitlines() if line.startswith("| spammer"))
    missing, majority, predicted, consensus, test, error = map(float, line.split("|")[2:8])
    with np.load("o/crowds/spammer-3.npz") as file:
        y, said = file["y_train"], file["annotators"]
    counts = (said[:, :, None] == np.arange(10)).sum(1)
    assert majority == pytest.approx(100 * (counts.argmax(1) == y).mean(), abs=0.06)
    assert missing == pytest.approx(100 * (counts[np.arange(len(y)), y] == 0).mean(), abs=0.06)
    rows = list(csv.DictReader(open("o/crowds/spammer-3/labels.csv")))
    for name, value in (("predicted", predicted), ("consensus", consensus)):
        assert value == pytest.approx(
            100 * np.mean([int(row[name]) == y[int(row["row"])] for row in rows]), abs=0.06
        )
    said_of = {int(row["annotator"]): float(row["accuracy"])
               for row in csv.DictReader(open("o/crowds/spammer-3/annotators.csv"))}  # fmt: skip
    errors = [abs(said_of[a] - (said[:, a] == y).mean()) for a in range(5)]
    assert error == pytest.approx(100 * max(errors), abs=0.06)
    assert test == pytest.approx(100 * summary("o/crowds/spammer-3")["last"], abs=0.06)
    assert main(argv) == 0
    again = capsys.readouterr().out
    assert line in again and "1 of them finished already" in again
    assert main([*argv, "--lr", "-1"]) == 2  # a wrong option is said before anything runs
