"""The open-set experiment: AUROC against a loop, the data with strangers, the command."""

import json

import numpy as np
import pytest
import torch

from harness.options import configure
from paper import openset
from paper.__main__ import main


def test_auroc_is_the_chance_of_the_higher_score():
    g = torch.Generator().manual_seed(0)
    score, positive = torch.randint(6, (40,), generator=g).float(), torch.rand(40, generator=g) < 0.3
    pairs = [(a > b) + 0.5 * (a == b) for a in score[positive].tolist() for b in score[~positive].tolist()]
    assert openset.auroc(score, positive) == pytest.approx(sum(pairs) / len(pairs))
    assert openset.auroc(positive.float(), positive) == 1


@pytest.mark.parametrize("rate", openset.RATES)
def test_two_classes_are_withheld_and_left_in(rate):
    d, alien = openset.withheld(rate, 3)
    assert float(alien.float().mean()) == pytest.approx(rate, abs=0.005)
    assert d.num_classes == 8 and sorted(set(d.labels.tolist())) == list(range(8)) and d.test_labels.max() == 7
    assert len(d.test_images) < 360 and len(d.images) == len(alien)
    again, _ = openset.withheld(rate, 3)
    assert torch.equal(d.images, again.images) and torch.equal(d.labels, again.labels)


def test_cifar_is_grey_and_shrunk(tmp_path):
    colour = np.zeros((30, 32, 32, 3), np.uint8)
    colour[..., 1] = 200
    np.savez(tmp_path / "c.npz", x_train=colour)
    c = configure(["--dataset", "digits", "--limit-train", "50"])
    d, alien = openset.with_cifar(c, 0.2, 0, tmp_path / "c.npz")
    assert d.images.shape == (50, 1, 8, 8) and int(alien.sum()) == 10
    assert (d.images[alien] == d.images[alien][0, 0, 0, 0]).all() and int(
        d.images[alien].max()
    ) == 117  # 0.587 * 200


def test_worked_scores():
    logits, sets = torch.tensor([[2.0, 0.0, 0.0]] * 16 + [[0.0, 0.0, 0.0]]), torch.ones(17, 3, dtype=torch.bool)
    sets[:, 2] = False
    got = openset.scores(logits, torch.eye(17) + 0.1, sets)
    total = np.log(np.exp(2) + 2)
    assert got["l_S + l_N"][[0, 16]].tolist() == pytest.approx([total - 2 + total, 2 * np.log(3)], abs=1e-5)
    assert got["energy"][0] == pytest.approx(-total) and got["1 - max p"][16] == pytest.approx(2 / 3)


def test_rates_and_files_that_cannot_be_get_one_line(capsys):
    with pytest.raises(SystemExit):
        openset.main(["--rates", "0"])
    assert "above 0, below 1" in capsys.readouterr().err
    for more in (["--tau", "auto"], ["--irnet", "plus"]):
        assert main(["open-set", "--out", "o", "--options", "--epochs", "3", "--e0", "2", *more]) == 2
        assert "--tau auto" in capsys.readouterr().err


def test_the_command_goes_on_where_it_was(capsys):
    argv = ["open-set", *"--rates 0.2 --seeds 1 --out o --options --epochs 3 --e0 2".split()]
    assert main(argv) == 0
    first = capsys.readouterr().out
    line = json.loads(open("o/open-set.jsonl").read())
    assert line["e0"] == 2 and set(line["accuracy"]) == {"off", "keep", "drop"}
    assert all(0 <= line[at][name] <= 1 for at in ("at_e0", "at_end") for name in ("energy", "p_outside"))
    assert main(argv) == 0
    again = capsys.readouterr().out
    assert "seed 1" in first and "seed 1" not in again and again.strip() in first
