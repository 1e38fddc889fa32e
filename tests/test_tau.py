"""--tau auto: the threshold against a loop, what it does within an epoch, and the real command."""

import json
import math

import pytest
import torch

import irnet
import train
from conftest import TOY, goes_on_as, rows, summary
from harness import folder, options
from paper import tau


def by_loop(margins: list[float], missing: float) -> float:
    """The largest tau of all margins' that lets the wanted number pass, and no margin above 0."""
    wanted = min(round(missing * len(margins)), len(margins))
    if wanted < 1:
        return math.inf
    passing = [tau for tau in (-m for m in margins) if sum(m <= -tau for m in margins) >= wanted]
    return min(1.0, max(0.0, max(passing)))


@pytest.mark.parametrize("missing", [-0.1, 0.0, 0.004, 0.02, 0.3, 0.65, 1.0, 1.5])
def test_the_smallest_margins_pass_as_many_as_are_missing(missing):
    margins = 0.5 * torch.randn(150, generator=torch.Generator().manual_seed(1))
    margins[3], margins[5] = -math.inf, math.inf  # an empty and a full set
    found = tau.left(margins, missing)
    assert found == pytest.approx(by_loop(margins.tolist(), missing))
    if 0 < found < 1:
        assert int((margins <= -found).sum()) == round(missing * 150)


def test_a_worked_number():
    margins = torch.tensor([0.5, -0.25, 0.75, -0.5, 0.25, 0.5, 0.5, -0.125, 0.5, 0.5])
    assert [tau.left(margins, share) for share in (0.04, 0.1, 0.2, 0.3, 0.4)] == [
        math.inf,
        0.5,
        0.25,
        0.125,
        0,
    ]


def test_what_was_moved_in_is_no_longer_missing():
    refine = irnet.IRNet(torch.ones(10, 3, dtype=torch.bool), 0.0)
    refine.corrected_at[:2] = 4
    taus = torch.tensor([0.5] * 6 + [-0.5, -0.25, -0.125, -0.0625])
    assert tau.retuned(refine, taus, (0.1, 0.5)) == 0.125  # three of ten are left
    assert refine.missing == pytest.approx(0.3)
    tau.retuned(refine, taus, (0.1, 0.5), by_chance=False)
    assert refine.missing is None  # the neighbours decide alone
    refine.corrected_at[:6] = 4
    refine.tau = tau.retuned(refine, taus, (0.1, 0.5))
    assert refine.tau == math.inf
    refine.corrected_at[:] = 0
    assert tau.retuned(refine, taus, (0.1, 0.5)) == math.inf  # what was forbidden once stays so


@pytest.mark.parametrize(
    ("known", "missing"),
    [
        ({}, 0.2),  # a dataset with a name: made by chance
        (dict(model="random", fits=True, together=1.2), 0.2),
        (dict(model="random", fits=True, together=None), None),  # too many classes to look
        (dict(model="random", fits=False, together=9.0), None),
        (dict(model="classes", fits=True), None),
        (dict(model="votes", fits=True), None),
    ],
)
def test_own_sets_are_heard_where_wrong_candidates_came_by_chance(known, missing):
    refine = irnet.IRNet(torch.ones(10, 3, dtype=torch.bool), 0.0)
    rows = [{}, dict(noise_estimate=dict(low=0.1, high=0.3) | known, expected=0.7), {}]
    tau.after_epoch(refine, rows, torch.linspace(-0.5, 0.4, 10))
    assert refine.missing == (missing and pytest.approx(missing))
    assert refine.expected == 0.7 and refine.tau == rows[2]["next_tau"] == pytest.approx(0.3)


def test_nobody_knows_how_many_are_missing_from_full_sets():
    refine = irnet.IRNet(torch.ones(4, 3, dtype=torch.bool), 0.0)
    assert tau.retuned(refine, torch.zeros(4), (math.nan, math.nan)) == refine.tau == 0
    rows = [dict(noise_estimate=folder.plain(dict(eta=math.nan, low=math.nan, high=math.nan)))]  # as in a run
    tau.after_epoch(refine, rows, torch.zeros(4))
    assert rows[0]["next_tau"] == refine.tau == 0


@pytest.mark.parametrize(("base", "stopped"), [("proden", 10), ("pico", 9)])
def test_the_command_retunes_from_e0_on_and_resumes(base, stopped, monkeypatch):
    monkeypatch.setattr(tau, "KNOWN", 0.0)  # toy networks know little
    argv = [*TOY, "--base", base, "--epochs", "12", "--e0", "8", "--tau", "auto"]
    assert train.main([*argv, "--out", "whole"]) == 0
    got, c = rows("whole"), json.loads(open("whole/config.json").read())
    assert c["tau_auto"] and c["tau"] == 0
    assert ["next_tau" in row for row in got] == [epoch >= 8 for epoch in range(1, 13)]
    high, moved = got[7]["noise_estimate"]["high"], sum(row["corrections"] for row in got)
    assert 0 < moved and summary("whole")["tau"] == got[7]["next_tau"]
    spent = [row for row in got[7:] if row["next_tau"] is None]  # inf: nothing is missing any more
    assert all(row["corrections"] == 0 for row in got[got.index(spent[0]) + 1 :]) if spent else moved <= high * 200
    assert goes_on_as("whole", argv, stopped, monkeypatch)  # before 9: the guard is still to be asked


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (dict(base="proden", tau="auto"), "votes"),
        (dict(base="pico", tau="auto"), "votes"),
        (dict(base="pico", tau="auto", f="classifier"), "votes"),
        (dict(base="proden", tau="auto", irnet="paper"), "paper"),  # asked for
        (dict(base="proden", tau="auto", irnet="plus"), "plus"),
        (dict(base="proden", tau="auto", no_irnet=True), "paper"),
        (dict(base="proden", tau=0.1), "paper"),
        (dict(base="proden"), "paper"),
    ],
)
def test_without_a_knob_the_neighbours_must_agree(given, want):
    assert options.fill(dict(dataset="digits") | given)["irnet"] == want


def test_with_ones_own_data_the_guard_still_decides():
    given = dict(dataset="mine.npz", base="proden", tau="auto")
    c = options.fill(given)
    assert c["careful"] and c["tau_auto"] and c["tau"] == 0
    assert not options.fill(given | dict(no_irnet=True))["tau_auto"]
    assert not options.fill(given | dict(tau=0.1))["careful"]
