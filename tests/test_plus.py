"""--irnet plus: votes, taking back and mixing, each against a loop or by hand; the real command."""

import math
from types import SimpleNamespace

import pytest
import torch

import models
import train
from conftest import TOY, features_and_sets, goes_on_as, prepared, rows, summary
from harness import options
from paper import baselines, plus, tau, votes


def test_of_many_samples_a_part_is_drawn_to_vote_anew_in_each_epoch(monkeypatch):
    monkeypatch.setattr(votes, "VOTERS", 20)
    features, sets = features_and_sets()
    refine = plus.Plus(sets, 0.1, 40, parts=("votes",), e0=1, generator=torch.Generator().manual_seed(3))
    refine.end_epoch(0.5)
    unit, g, drawn = [row / row.norm() for row in features], torch.Generator().manual_seed(3), []
    for _ in range(2):
        refine.begin_epoch(lambda function: features)
        drawn.append(torch.randperm(40, generator=g)[:20].tolist())
        some = torch.tensor([5, 0, 33])
        assert torch.equal(refine.voices.winners(), refine.voices.winners(index=torch.arange(40)))
        assert torch.equal(refine.voices.winners()[some], refine.voices.winners(index=some))
        for i, winner in enumerate(refine.voices.winners().tolist()):
            near = sorted((j for j in drawn[-1] if j != i), key=lambda j: -float(unit[i] @ unit[j]))[:15]
            counts = [sum(bool(sets[j, k]) for j in near) for k in range(4)]
            assert counts[winner] == max(counts)
    assert set(drawn[0]) != set(drawn[1])


def refined(parts, n=3):
    sets = torch.tensor([[True, True, False, False]] * n)
    refine = plus.Plus(sets, 0.1, 40, parts=parts, e0=1)
    refine.end_epoch(0.5)
    return refine


def test_once_it_is_known_how_many_are_missing_the_samples_own_set_is_heard_too(monkeypatch):
    share, index, asked = torch.eye(4)[[2, 3, 0]], torch.tensor([2, 0, 1]), []
    monkeypatch.setattr(votes, "shares", lambda near, sets, index: share)
    monkeypatch.setattr(votes, "heard", lambda *a: asked.append(a) or torch.tensor([1, 2, 3]))
    refine = refined(("votes",))
    for missing in (None, 0.1):
        tau.retuned(refine, torch.zeros(3), (missing, missing) if missing else (math.nan, math.nan), 0.7)
        refine.begin_epoch(lambda function: torch.zeros(3, 2))
        refine.before[0, 3] = True  # as it was given, by now
        refine.correct(index, [torch.full((3, 4), 0.25)] * 2)
        got, own, usual, told = asked.pop()
        assert got is share and torch.equal(own, refine.before[index]) and told == missing and not asked
        assert usual.tolist() == ([1, 1, 0, 0] if missing is None else [1, 1, 0, pytest.approx(1 / 3)])
    back = refined(("back",))
    back.missing = 0.2
    back.begin_epoch(lambda function: torch.zeros(3, 2))
    assert asked.pop()[3] == 0.2
    again = refined(("votes",))
    again.load_state_dict(refine.state_dict())
    assert (again.missing, again.expected) == (0.1, 0.7)
    again.load_state_dict({k: v for k, v in refine.state_dict().items() if k != "missing"})  # IRNet's own
    assert again.missing is None


def test_a_label_is_moved_in_only_where_the_neighbours_agree():
    f = torch.tensor([[0.1, 0.1, 0.7, 0.1]] * 3)
    for parts, want in ((("votes",), [False, False, True]), (("back",), [True, True, True])):
        refine = refined(parts)
        winner = torch.tensor([0, 3, 2])  # one inside, another outside, the same
        refine.voices = SimpleNamespace(winners=lambda missing, index, winner=winner: winner[index])
        flagged, label = refine.correct(torch.tensor([2, 1, 0]), [f, f])
        assert flagged.tolist() == want[::-1] and (label == 2).all()
        assert refine.candidates[:, 2].tolist() == want


def test_who_votes_with_which_sets(monkeypatch):
    given = []
    monkeypatch.setattr(votes, "shares", lambda near, sets, index: given.append(sets) or torch.ones(3, 4))
    for parts in (("votes",), ("now",), ("back",), ("mix",)):
        refine = refined(parts)
        refine.candidates[0, 2] = True  # corrected since
        refine.begin_epoch(lambda function: torch.zeros(3, 2))
        refine.candidates[1, 2] = True  # in this epoch, to be seen in the next
        refine.correct(torch.arange(3), [torch.full((3, 4), 0.25)] * 2)
    assert [sets[:2, 2].tolist() for sets in given] == [
        [False, False],
        [True, False],
        [False, False],
    ]  # mix: nobody


def test_the_neighbours_are_asked_in_each_epoch_and_not_before():
    f = torch.full((3, 4), 0.25)
    with pytest.raises(ValueError, match="begin_epoch comes before"):
        refined(("votes",)).correct(torch.arange(3), [f, f])
    refine = refined(("votes",))
    refine.tau = math.inf  # nothing is to be moved: nobody is asked
    refine.voices = object()
    refine.begin_epoch(None)
    assert refine.voices is None  # and nothing is kept
    assert not refine.correct(torch.arange(3), [f, f])[0].any()


@pytest.mark.parametrize(
    ("agreed", "expected", "later", "guarded", "want"),
    [
        *((5, None, 0, True, math.inf), (6, None, 0, True, 0.1)),  # nobody knows what the network expects
        *(
            (5, 0.75, 0, True, 0.1),
            (7, 0.75, 0, True, 0.1),
            (7, 0.25, 0, True, math.inf),
            (9, 0.0, 0, True, math.inf),
        ),
        *((0, 0.0, 1, True, 0.1), (0, 0.0, 0, False, 0.1)),  # it has been decided; it is not asked
    ],
)
def test_nothing_is_moved_where_too_little_is_known_at_e0(agreed, expected, later, guarded, want, monkeypatch):
    monkeypatch.setattr(votes, "shares", lambda near, sets, index: torch.eye(4)[[3] * 10])
    told = lambda share, own, usual, missing: share.argmax(1) if missing is None else torch.zeros(10).long()  # noqa: E731
    monkeypatch.setattr(votes, "heard", told)  # the own sets are heard after it
    refine = refined(("votes",), 10)
    refine.missing = 0.1
    refine.f, refine.expected = (lambda network, x: torch.eye(4)[x]) if guarded else None, expected
    for _ in range(later):  # then it has been decided
        refine.end_epoch(0.5)
    x = torch.tensor([3] * agreed + [1] * (10 - agreed))
    refine.begin_epoch(lambda function: x[:, None] if function is models.features else function(None, x))
    assert refine.tau == want
    known = agreed / 10 if expected is None else (agreed / 10 + expected) / 2
    noted = dict(known=pytest.approx(known), known_enough=want < 1)
    assert refine.notes == (noted if guarded and not later else {})


def test_what_the_neighbours_no_longer_vote_for_is_taken_back():
    refine, weights = refined(("back",)), torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3)
    f = torch.tensor([[0.1, 0.1, 0.7, 0.1]] * 3)
    refine.correct(torch.arange(2), [f[:2]], weights)
    kept = weights[1].clone()
    assert weights[0].tolist() == pytest.approx([0.5 / 1.7, 0.5 / 1.7, 0.7 / 1.7, 0])
    refine.take_back(torch.tensor([0, 2, 3]), weights)
    assert refine.candidates.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
    assert refine.corrected_at.tolist() == [0, 2, 0] and refine.corrected_to.tolist() == [-1, 2, -1]
    assert weights[0].tolist() == [0.5, 0.5, 0, 0] and torch.equal(weights[1], kept) and weights[2, 0] == 0.5


def test_mixing_is_ramped_up_after_e0():
    refine, weights = refined(("mix",)), torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0.5, 0.5, 0, 0]])
    matrix, x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.rand(3, 5)
    for epoch in (2, 5, 30):  # the ramp is 1/10, 4/10, 1
        refine.epoch.curve = [0.0] * (epoch - 1)
        refine.generator = torch.Generator().manual_seed(4)
        got = float(refine.mixed(lambda v: v @ matrix, x, weights, torch.tensor([0, 1, 2])))
        g = torch.Generator().manual_seed(4)
        share = sorted(torch.rand(7, generator=g).tolist())[3]
        share, want = max(share, 1 - share), 0.0
        for i, j in enumerate(torch.randperm(3, generator=g).tolist()):
            log_p = ((share * x[i] + (1 - share) * x[j]) @ matrix).log_softmax(0)
            want -= float(((share * weights[i] + (1 - share) * weights[j]) * log_p).sum()) / 3
        assert got == pytest.approx(min(1, (epoch - 1) / 10) * want, rel=1e-5)
    refine.epoch.e0 = None
    assert refine.mixed(None, x, weights, torch.arange(3)) == 0


@pytest.mark.parametrize("base", ["proden", "pico"])
def test_the_command_corrects_and_resumes(base, monkeypatch):
    argv = [*TOY, "--base", base, "--epochs", "9", "--e0", "6", "--tau", "0", "--irnet", "plus"]
    assert train.main([*argv, "--out", "whole"]) == 0
    assert sum(row["corrections"] for row in rows("whole")) > 0
    assert goes_on_as("whole", argv, 8, monkeypatch)


def test_in_a_run_it_gets_the_bases_weights_and_mixes_the_weak_view(monkeypatch):
    """Taking back edits the weights that the base trains with; the last of PiCO's views is a strong one."""
    _, learner, samples = prepared([*TOY, *"--base pico --e0 1 --irnet plus --tau 0".split()])
    seen, weak = [], []
    view, mixed, begin = learner.views.view, learner.refine.mixed, learner.refine.begin_epoch
    monkeypatch.setattr(learner.views, "view", lambda kind, x: weak.append((kind, got := view(kind, x))) or got)
    monkeypatch.setattr(learner.refine, "mixed", lambda n, x, *more: seen.append(x) or mixed(n, x, *more))
    monkeypatch.setattr(learner.refine, "begin_epoch", lambda look, w=None: seen.append(w) or begin(look, w))
    learner.refine.end_epoch(0.5)
    train.train_epoch(learner, samples, 2, 4, 0.02)
    assert seen[0] is learner.base.weights
    views = [x for kind, x in weak if kind == "w"]
    assert len(seen) - 1 == len(views) > 2 and all(a is b for a, b in zip(seen[1:], views, strict=True))


def test_the_command_says_why_nothing_is_corrected(monkeypatch, capsys):
    argv = [*TOY, *"--base proden --epochs 9 --e0 6 --irnet votes --tau".split()]
    monkeypatch.setattr(tau, "KNOWN", 1.1)
    assert train.main([*argv, "0", "--out", "given"]) == 0 and summary("given")["corrections"] > 0  # overrules it
    capsys.readouterr()
    assert train.main([*argv, "auto", "--out", "held"]) == 0
    got, end = rows("held"), summary("held")
    assert [row["corrections"] for row in got] == [0] * 9 and got[6]["known_enough"] is False
    assert end["tau"] is None and end["known"] == got[6]["known"]  # inf is null in JSON
    agreed = 2 * end["known"] - got[5]["expected"]  # of 200 samples: the other guess has been heard
    assert 200 * agreed == pytest.approx(round(200 * agreed), abs=1e-3) and 0 < got[5]["expected"] < 1
    why = (
        f"nothing is corrected after all: the network is guessed to be right about only {100 * end['known']:.0f} %"
    )
    assert capsys.readouterr().out.count(why) == 1
    assert "The network is guessed to be right about too few samples" in open("held/report.html").read()
    assert goes_on_as("held", [*argv, "auto"], 8, monkeypatch)


def test_a_network_of_ones_own_gives_its_features():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 4))
    sets, x = features_and_sets()[1], torch.randn(40, 6)
    refine = plus.Plus(sets, 0.1, 40, e0=1, features=lambda network, x: network(x))
    refine.end_epoch(0.5)
    refine.begin_epoch(lambda function: function(network, x))
    near = models.Neighbours(torch.nn.functional.normalize(network(x), dim=1))
    assert torch.equal(refine.voices.winners(), votes.shares(near, sets).argmax(1))
    with pytest.raises(ValueError, match="a function of your own"):
        models.features(network, x)


def test_what_is_mixed_sums_to_one():
    """LWC begins with w = 1/C everywhere."""
    refine, x = refined(("mix",)), torch.rand(3, 4)
    refine.generator = torch.Generator().manual_seed(4)
    lwc = float(refine.mixed(lambda v: v, x, torch.full((3, 4), 0.25), torch.arange(3)))
    refine.generator = torch.Generator().manual_seed(4)
    halves = torch.tensor([[0.5, 0.5, 0, 0]] * 3)
    assert lwc == pytest.approx(float(refine.mixed(lambda v: v, x, halves, torch.arange(3))))


def test_bases_without_label_weights_have_nothing_to_mix():
    sets = torch.ones(3, 2, dtype=torch.bool)
    for name in set(options.BASES) - set(options.WITHOUT_IRNET):
        base = baselines.METHODS[name](sets)
        assert (base.weights is None) == (name in options.WITHOUT_WEIGHTS), name
        refine = plus.make("plus", base, False, None, sets, 0.1)
        assert refine.parts == (("votes",) if base.weights is None else plus.PARTS)
        assert base.mixes == (base.weights is not None)


def test_parts_have_names():
    class Base:
        mixes, weights = False, torch.ones(3, 2)

    for name in options.WINDS[1:]:
        base = Base()
        refine = plus.make(name, base, False, None, torch.ones(3, 2, dtype=torch.bool), 0.1)
        assert set(refine.parts) == set(plus.PARTS if name == "plus" else name.split("+"))
        assert base.mixes == ("mix" in refine.parts)
