"""Branches from one trunk: each ends as the train.py run of its options does; the command at toy size."""

import json

import pytest

import train
from conftest import TOY, summary
from paper import branches, tau
from paper.__main__ import main

SHORT = [*TOY, "--epochs", "9", "--e0", "6"]


@pytest.mark.parametrize(("choice", "known"), [("alone", 0), ("auto", 0), ("auto", 1.1), ("auto, plus", 0)])
def test_a_branch_ends_as_the_run_does(choice, known, monkeypatch):
    monkeypatch.setattr(tau, "KNOWN", known)  # so that the guard permits, or forbids
    words = ["--base", "proden", "--q", "0.3", "--eta", "0.3", "--seed", "4", *SHORT]
    more = branches.CHOICES[choice].split()
    got = branches.branch([*words, *more], branches.trunk(words))
    assert train.main([*words, *more, "--threads", "1", "--out", "run"]) == 0
    want = summary("run")
    assert (got["last"], got["moved"], got["noise_after"]) == tuple(
        want[key] for key in ("last", "corrections", "noise_after")
    )
    assert (got["moved"] > 0) == (choice != "alone" and known == 0)
    assert not got["moved"] or got["right"] == round(want["corrections"] * want["correction_precision"])


def test_the_command_goes_on_where_it_was_and_prints_the_best_tau(monkeypatch, capsys):
    monkeypatch.setattr(branches, "TAUS", dict(proden=(0.0, 0.9)))
    words = "branches --choices preset grid --bases proden --q 0.3 --eta 0.3 --seeds 3 --out o --options"
    assert main([*words.split(), *SHORT]) == 0
    first = capsys.readouterr().out
    lines = [json.loads(line) for line in open("o/branches.jsonl")]
    assert [line["choice"] for line in lines] == ["preset", "tau 0", "tau 0.9"]
    best = max(lines[1:], key=lambda line: line["last"])
    assert f"| {100 * best['last']:.1f} ({best['choice'][4:]}) |" in first and "seed 3, tau 0.9" in first
    assert main([*words.split(), *SHORT]) == 0
    again = capsys.readouterr().out
    assert "seed 3" not in again and again.strip() in first


def test_what_a_branch_cannot_do_is_refused_and_a_missing_e0_is_said(capsys):
    words = "branches --choices preset --bases proden --q 0.3 --eta 0.3 --seeds 3 --out o --options".split()
    for more in (["--open-set", "keep"], ["--val", "test"]):
        assert main([*words, *SHORT, *more]) == 2 and "branches: --open-set" in capsys.readouterr().err
    assert main([*words, *TOY, "--epochs", "2"]) == 0 and "seed 3: e0 was not found" in capsys.readouterr().out


def test_the_table_by_hand():
    line = dict(base="pico", q=0.3, eta=0.1)
    ends = {"auto": (0.9, 0.8), "tau 0": (0.7, 0.9), "tau 0.01": (0.95, 0.85)}
    lines = [
        line | dict(choice=name, last=last, seed=s) for name, row in ends.items() for s, last in enumerate(row)
    ]
    assert list(branches.table(lines))[2:] == ["| pico 0.3 0.1 | 2 | 85.0 ± 7.1 | 90.0 (0.01) |"]
