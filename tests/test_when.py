"""The study of e0: a trunk and its branches at toy size, and its table on curves with known answers."""

import json
from pathlib import Path

import pytest

import train
from paper import when

CURVE = [0.2, 0.52, 0.7, 0.8, 0.85, 0.87, 0.88, 0.88, 0.88, 0.88, 0.87, 0.87, 0.86, 0.86, 0.85, 0.85, 0.84, 0.84]
CURVE += [0.83] * 2  # rises to epoch 7 of 20, then falls


def line(**ends) -> dict:
    curves = dict(coverage=CURVE, smoother=CURVE, changes=CURVE, test=CURVE)
    return dict(epochs=20, curves=curves, ends={key[1:]: value for key, value in ends.items()})


def test_accuracy_lies_between_the_fixed_epochs():
    one = line(e4=0.90, e8=0.98, e12=0.94)
    assert when.accuracy_after(one, 8) == pytest.approx(98) and when.accuracy_after(one, 6) == pytest.approx(94)
    assert when.accuracy_after(one, 2) == pytest.approx(90)  # before the first: the first
    assert when.accuracy_after(one, 16) == pytest.approx((94 + 83) / 2)  # the base's own end is at the last epoch
    assert when.accuracy_after(one, None) == pytest.approx(83)


def test_the_table_charges_a_rule_with_its_branch():
    """The knee of this curve is epoch 7: means of 3 are 0.867 and 0.673 there, risen by 0.193 of 0.667."""
    rows = {row.split(" | ")[0][2:]: row.split(" | ") for row in when.table([line(e4=0.90, e7=0.97, e12=0.99)])}
    _, error, lost, worst, more, none = rows["knee"]
    assert (error, lost, worst) == ("5.0", "2.00", "2.0") and none.startswith("0")
    blind = rows["blind: three tenths of the run"]  # epoch 6: between 4 and 7
    assert float(blind[2]) == pytest.approx(99 - (90 + 2 / 3 * 7), abs=0.01)


def test_a_trunk_is_left_and_come_back_to(monkeypatch, capsys):
    monkeypatch.setattr(when, "BRANCHES", {3: (1, 2)})
    toy = "--dataset digits --limit-train 200 --limit-test 60 --batch-size 32 --device cpu --tau 0"
    setting = dict(data=toy, base="proden", q=0.3, eta=0.3, seed=0, epochs=3)
    monkeypatch.setattr(when, "settings", lambda scale: iter([setting]))
    assert when.main(Path("o"), "") == 0
    said = capsys.readouterr().out
    (found,) = (json.loads(text) for text in Path("o/e0.jsonl").read_text().splitlines())
    assert set(found["ends"]) == {"1", "2"} and all(len(curve) == 3 for curve in found["curves"].values())
    fixed = ", ".join(f"{e0}: {100 * last:.2f}" for e0, last in found["ends"].items())
    assert "--tau 0, 1 curve\n" in said and f"e0 {fixed}; never: {100 * found['curves']['test'][-1]:.2f}" in said
    # a branch is the run whose e0 was given
    argv = [*toy.split(), *"--base proden --epochs 3 --e0 1 --threads 1 --out r".split()]
    assert train.main(argv) == 0
    assert json.loads(Path("r/summary.json").read_text())["last"] == pytest.approx(found["ends"]["1"])
    assert when.main(Path("o"), "") == 0  # nothing is repeated
    assert len(Path("o/e0.jsonl").read_text().splitlines()) == 1


def test_all_of_kmnist_has_five_fixed_epochs():
    (setting,) = when.settings("kmnist")
    assert setting["base"] == "pico" and "--limit-train" not in setting["data"]
    assert len(when.BRANCHES[setting["epochs"]]) == 5 and len(list(when.settings("digits"))) == 84
