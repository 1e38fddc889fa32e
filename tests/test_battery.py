"""The battery of noise: what it makes, and the real command at toy size."""

import numpy as np
import pytest

from paper import battery
from paper.__main__ import main

Y = np.random.RandomState(0).randint(10, size=20_000)


@pytest.mark.parametrize("way", battery.WAYS)
@pytest.mark.parametrize("eta", [0.0, 0.1, 0.3])
def test_the_rate_is_what_was_asked_for(way, eta):
    labels = battery.WAYS[way](Y, 10, eta, 3)
    inside = labels[np.arange(len(Y)), Y] if labels.dtype == bool else (labels == Y[:, None]).any(1)
    want = 0 if way == "clean" else eta
    assert (~inside).mean() == pytest.approx(want, abs=0.015 if want else 0)  # a set of the truth alone keeps it
    assert labels.any(1).all() if labels.dtype == bool else labels.min() >= 0 and labels.max() < 10


def test_companions_come_with_their_class_and_others_do_not():
    sets = battery.by_class(Y, 10, 0.2, 5)
    rates = np.array([sets[Y == k].mean(0) for k in range(10)])
    often = (rates > 0.5) & ~np.eye(10, dtype=bool)
    assert (often.sum(1) >= 3).all() and np.allclose(rates[often], 0.6, atol=0.08)
    missing = 1 - rates.diagonal()
    assert missing.min() < 0.01 and missing.max() == pytest.approx(0.4, abs=0.05)


def test_the_command_goes_on_where_it_was_and_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(battery, "RATES", dict(paper=(0.3,), annotators=(0.1,)))
    monkeypatch.setattr(battery, "ENDS", (0.3,))
    argv = [
        "noise-battery",
        "--seeds",
        "3",
        "--out",
        "o",
        "--options",
        "--limit-train",
        "300",
        "--limit-test",
        "60",
    ]
    monkeypatch.setattr(battery, "MORE", ["--epochs", "8", "--e0", "5", "--base", "proden"])
    assert main(argv) == 0
    first = capsys.readouterr().out
    lines = [line for line in first.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines[2:]] == ["paper", "annotators"] and "1 noisy" in lines[2]
    assert lines[2].count("| -") == 0 and lines[3].endswith("| - | - | - |")  # only 0.3 goes to the end
    assert main(argv) == 0
    again = capsys.readouterr().out
    assert "seed3" in first and "seed3" not in again and again in first
    assert main([*argv[:-4], "--limit-train", "200", "--limit-test", "60"]) == 2  # cells of other images
    assert "another --out" in capsys.readouterr().err
