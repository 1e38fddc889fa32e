"""--folds: what is said of a sample comes from a network that was not trained on it."""

import numpy as np
import pytest
import torch

import train
from conftest import TIMES, rows, same_run, stopping_at, summary
from crowd import Outcome, folds, tables
from data import Dataset
from test_crowd import features, read


def crowd_file() -> None:
    x, y = features(400)
    rng = np.random.RandomState(3)
    said = np.where(rng.rand(400, 3) < (0.9, 0.6, 0.5), y[:, None], rng.randint(8, size=(400, 3)))
    np.savez("v.npz", x_train=x[:320], y_train=y[:320], annotators=said[:320], x_test=x[320:], y_test=y[320:])


def test_every_sample_is_asked_of_a_network_that_has_not_seen_it(monkeypatch):
    crowd_file()
    seen, asked, said = [], [], torch.zeros(320, dtype=torch.long)
    step, look = train.train_step, train.logits_of

    def noted(learner, index, *more):
        seen[-1].update(index.tolist())
        return step(learner, index, *more)

    prepare = train.prepare
    monkeypatch.setattr(train, "prepare", lambda *args: seen.append(set()) or prepare(*args))
    monkeypatch.setattr(train, "train_step", noted)
    monkeypatch.setattr(train, "logits_of", lambda learner, x: asked.append(len(x)) or look(learner, x))
    c = train.options.configure("--dataset v.npz --base cc --epochs 6 --e0 4 --folds 3 --seed 2".split(),
                                train.data.has_features)  # fmt: skip
    dataset = train.data.load(c.dataset, size=None)
    p = folds.cross_fit(train, c, dataset, lambda step, steps: None)
    assert (
        torch.allclose(p.sum(1), torch.ones(320)) and len(seen) == 3 and len(asked) == 3 * 4
    )  # to e0 and no further
    for mine in seen:
        said[[i for i in range(320) if i not in mine]] += 1
    assert (said >= 1).all() and (said == 1).double().mean() > 0.95  # what a batch leaves over may be unseen too
    assert float((p.argmax(1) == dataset.labels).double().mean()) > 0.6


def test_the_run_is_the_same_but_for_what_it_says(monkeypatch, capsys):
    crowd_file()
    argv = "--dataset v.npz --base cc --epochs 5 --e0 3".split()
    assert train.main([*argv, "--no-irnet", "--out", "without"]) == 0
    capsys.readouterr()
    assert train.main([*argv, "--no-irnet", "--folds", "2", "--out", "with"]) == 0
    assert "part 2 of 2" in capsys.readouterr().out
    left = (*TIMES, "noise_estimate")
    strip = [[{k: v for k, v in row.items() if k not in left} for row in rows(r)] for r in ("without", "with")]
    assert strip[0] == strip[1]
    one, two = ({r["row"]: r for r in read(f"{run}/labels.csv")} for run in ("without", "with"))
    assert all(one[i]["predicted"] == two[i]["predicted"] for i in one)
    assert any(one[i]["p_missing"] != two[i]["p_missing"] for i in one)
    assert summary("without")["noise_estimate"] != summary("with")["noise_estimate"]  # of all samples, not of 32
    with monkeypatch.context() as patch:
        stopping_at(patch, 12)
        assert train.main([*argv, "--folds", "2", "--out", "r"]) == 143
    assert train.main([*argv, "--folds", "2", "--out", "r", "--resume"]) == 0
    assert train.main([*argv, "--folds", "2", "--out", "whole"]) == 0 and same_run("r", "whole")


def test_more_folds_than_samples_get_one_line(capsys):
    x, y = features(30)
    np.savez("few.npz", x_train=x[:12], annotators=np.stack([y[:12]] * 3, 1), x_test=x[12:], y_test=y[12:])
    assert train.main("--dataset few.npz --base cc --folds 100 --out r".split()) == 2
    assert "only 12 training samples" in capsys.readouterr().err


@pytest.mark.parametrize("folds", ["1", "101", "-2"])
def test_a_number_of_folds_that_makes_no_sense(folds, capsys):
    crowd_file()
    assert train.main(["--dataset", "v.npz", "--folds", folds]) == 2
    assert "--folds" in capsys.readouterr().err


def test_the_tables_use_them():
    """Sets of one label each; a network by heart, and one that has not seen them and knows better."""
    y = torch.arange(60) % 3
    given = torch.where(torch.arange(60) < 6, (y + 1) % 3, y)
    sets = torch.nn.functional.one_hot(given, 3).bool()
    by_heart, out = ((8.0 * torch.nn.functional.one_hot(k, 3)).softmax(1) for k in (given, y))
    d = Dataset(
        "d", torch.zeros(60, 1, 1, 1), y, torch.zeros(1, 1, 1, 1), y[:1], 3, (0.0,), (1.0,), candidates=sets
    )
    nobody = torch.zeros(60, dtype=torch.long)
    text = tables(d, Outcome(sets, sets, nobody, nobody, by_heart, by_heart, 0.3, (), out))["labels.csv"]
    assert {int(line.split(",")[0]) for line in text.splitlines()[1:7]} == set(range(6))


def test_a_batch_larger_than_the_other_parts_gets_one_line(capsys):
    crowd_file()
    argv = "--dataset v.npz --base cc --epochs 2 --folds 2 --batch-size 161 --out r".split()
    assert train.main(argv) == 2 and "more than the 160 training images" in capsys.readouterr().err
