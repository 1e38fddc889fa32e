"""--open-set: the score and p_outside against loops and worked numbers, what a run does with them, the page."""

import csv
import math
from types import SimpleNamespace

import pytest
import torch

import irnet
import models
import train
from conftest import TOY, goes_on_as, rows, summary
from crowd import outside
from crowd.review import card
from harness import InputError


def test_the_neighbours_mean_prediction_and_its_entropy(monkeypatch):
    monkeypatch.setattr(models, "MOST", 7 * 30)  # seven at a time
    monkeypatch.setattr(outside, "NEIGHBOURS", 4)
    g = torch.Generator().manual_seed(1)
    z, p = torch.randn(30, 5, generator=g), torch.randn(30, 3, generator=g).softmax(1)
    said = outside.neighbours_say(3 * z, p)
    for i in range(30):
        cosine = [float(z[i] @ z[j] / z[i].norm() / z[j].norm()) if j != i else -9.0 for j in range(30)]
        near = sorted(range(30), key=lambda j: -cosine[j])[:4]
        want = [sum(float(p[j, k]) for j in near) / 4 for k in range(3)]
        assert said[i].tolist() == pytest.approx(want, abs=1e-6)
        assert float(outside.score(said)[i]) == pytest.approx(-sum(w * math.log(w, 3) for w in want), abs=1e-5)
    assert outside.score(torch.eye(3)).tolist() == [0, 0, 0]


def test_the_nearest_falling_sequence():
    assert outside.falling([3, 1, 2, 0]) == [3, 1.5, 1.5, 0]
    assert outside.falling([0, 1, 1, 0]) == pytest.approx([2 / 3] * 3 + [0])
    drawn = torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist()
    got = outside.falling(drawn)
    assert all(a >= b for a, b in zip(got, got[1:], strict=False)) and sum(got) == pytest.approx(sum(drawn))
    for i in range(50):  # the least-squares fit is the largest mean up to j of the smallest from i on
        want = min(max(sum(drawn[a:b]) / (b - a) for b in range(i + 1, 51)) for a in range(i + 1))
        assert got[i] == pytest.approx(want)


def made(n=600, open_=150, classes=5, seed=0):
    """Clusters of classes with sets around the truth, and one more with sets drawn at random."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    place = y.clone()
    place[:open_] = classes
    features = torch.eye(classes + 1)[place] + 0.1 * torch.randn(n, classes + 1, generator=g)
    p = (4 * torch.eye(classes)[y]).softmax(1)
    p[:open_] = torch.randn(open_, classes, generator=g).softmax(1)
    sets = torch.rand(n, classes, generator=g) < 0.3
    sets[torch.arange(n), y] = torch.rand(n, generator=g) > 0.2
    return p, features, sets, place == classes


def test_samples_of_no_class_are_found_and_others_are_not():
    p, features, sets, alien = made()
    found, score = outside.outside(p, features, sets)
    assert found[alien].mean() > 0.8 and found[~alien].mean() < 0.1
    assert float(score[alien].min()) > float(score[~alien].max())
    order = score.argsort(stable=True)
    assert (found[order].diff() >= 0).all() and 0 <= found.min() and found.max() <= 1
    p, features, sets, _ = made(open_=0)
    assert (outside.outside(p, features, sets)[0] >= outside.SURE).float().mean() < 0.02


def test_sets_that_say_nothing_say_nothing():
    p, features, sets, _ = made()
    assert outside.outside(p, features, torch.ones_like(sets))[0].max() == 0


def test_they_keep_their_sets_and_can_be_left_out():
    pool, decided = torch.arange(6), torch.zeros(6, 3, dtype=torch.bool)
    decided[1, 2] = True
    samples = SimpleNamespace(
        p_outside=torch.tensor([0.9, 0, 0, 0.5, 0.4, 0]), dataset=SimpleNamespace(decided=None)
    )
    refine = irnet.IRNet(torch.zeros(6, 3, dtype=torch.bool), 0.0, e0=1)
    assert outside.settle(samples, refine, pool, False, 6).tolist() == list(range(6))
    assert refine.fixed.tolist() == [True, False, False, True, False, False]
    samples.dataset.decided = decided
    assert outside.settle(samples, refine, pool, True, 4).tolist() == [1, 2, 4, 5]
    with pytest.raises(InputError, match="leaves 4 samples, less than a batch of 5"):
        outside.settle(samples, refine, pool, True, 5)
    assert refine.fixed.tolist() == [True, True, False, True, False, False]
    flagged, _ = refine.correct(pool, [torch.eye(3)[torch.zeros(6).long()]])
    assert flagged.tolist() == [False, False, True, False, True, True]


def test_when_they_are_looked_for():
    samples = SimpleNamespace(p_outside=None)
    assert not outside.due(samples, 3, None, 40) and outside.due(samples, 11, 11, 40)
    samples.p_outside = torch.zeros(1)
    again = [11, 15, 19, 23, 27, 31, 35, 39, 40]
    assert [e for e in range(11, 41) if outside.due(samples, e, 11, 40)] == again


def test_the_command_drops_them_writes_the_column_and_resumes(monkeypatch):
    more = "--base proden --q 0.1 --eta 0.2 --lr 0.05 --epochs 9 --e0 5 --tau 0 --open-set drop"
    argv = [*TOY, *more.split()]
    assert train.main([*argv, "--out", "whole"]) == 0
    got = rows("whole")
    assert ["outside" in row for row in got] == [False] * 4 + [True] * 5 and got[4]["outside"] > 0
    with open("whole/labels.csv", newline="") as file:
        table = list(csv.DictReader(file))
    found = [float(row["p_outside"]) >= 0.5 for row in table]
    assert sum(found) == got[-1]["outside"] == summary("whole")["outside"]
    assert goes_on_as("whole", argv, 8, monkeypatch)
    assert train.main([*argv[:-2], "--out", "without"]) == 0
    with open("without/labels.csv", newline="") as file:
        assert "p_outside" not in next(csv.reader(file))


def test_the_page_says_belongs_to_no_class():
    row = dict(name="a.png", given="cat", after="cat", predicted="dog", added="", corrected_at="", margin="-0.1")
    row |= dict(likely=[("dog", 0.5)], image=None, large=False, split="train", truth="", p_outside="0.7312")
    number = dict(cat=0, dog=1)
    assert "no class, with a chance of 73 %" in card(row, number, "")
    assert "no class" not in card(row | dict(p_outside="0.4"), number, "")
    assert "no class" not in card({k: v for k, v in row.items() if k != "p_outside"}, number, "")
