"""The arena: its table by hand, its data, the real command at toy size."""

import json

import numpy as np
import pytest

import data
from conftest import TOY, summary
from paper import arena
from paper.__main__ import main
from paper.grid import lines_of


def lines(results):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in arena.table(results)]


def test_the_table_by_hand(monkeypatch):
    monkeypatch.setattr(arena, "CELLS", dict(a="", b="", c=""))
    results = {
        "one": dict(a=([90.0, 92.0], 10.0), b=([80.0, 80.0], 30.0), c=None),
        "two": dict(a=([89.0, 91.0], 5.0), b=([70.0, 80.0], 5.0), c=([50.0], 20.0)),
        "two, best tau": dict(a=([99.0], 7.0), b=([99.0], 7.0), c=None),
        "none": dict(a=None, b=None, c=None),
    }
    head, _, *rows = lines(results)
    assert head == ["method", "a", "b", "c", "mean", "first", "near", "CPU-seconds"]
    # a: 91 and 90, both deviations sqrt(2); b: 80 and 75, deviations 0 and 7.1: near; c: one alone, no contest
    assert rows[0] == ["one", "91.0 ± 1.4", "80.0 ± 0.0", "-", "85.50", "2", "2", "20"]
    assert rows[1] == ["two", "90.0 ± 1.4", "75.0 ± 7.1", "50.0", "82.50", "0", "2", "5"]
    assert rows[2][-4:] == ["99.00", "-", "-", "7"] and len(rows) == 3  # the oracle wins nothing


def test_far_behind_is_not_near(monkeypatch):
    monkeypatch.setattr(arena, "CELLS", dict(a=""))
    *_, one, two = lines(dict(one=dict(a=([90.0, 92.0], 1.0)), two=dict(a=([89.0, 89.1], 1.0))))
    assert (one[3:5], two[3:5]) == (["1", "1"], ["0", "0"])


@pytest.mark.parametrize("cell", arena.CELLS)
def test_every_method_has_its_options_on_every_cell(cell):
    from harness.options import configure

    for words in arena.METHODS.values():
        if not ("alim" in words and "classes" in cell):  # ALIM needs the noise rate
            c = configure([*words.split(), *arena.CELLS[cell].format(folder="x", seed=3).split()])
            assert c.threads == 1 and c.arch == "cnn"


def test_the_best_tau_is_the_best_in_the_mean_of_all_seeds(tmp_path):
    asked = {}
    for name, lasts in dict(low=(0.9, 0.8), high=(0.88, 0.86)).items():
        asked[name] = [tmp_path / f"{name}{k}" for k in range(3)]  # the third is not finished
        for folder, last in zip(asked[name], lasts, strict=False):
            folder.mkdir()
            (folder / "summary.json").write_text(json.dumps(dict(last=last, best=1.0, cpu_seconds=4.0)))
    values, seconds = arena.measured(asked)
    assert values == pytest.approx([88, 86]) and seconds == 4
    assert arena.measured(dict(none=[tmp_path / "none"])) is None


def test_equal_seconds_by_hand(tmp_path):
    asked = {}
    for name, seconds in dict(slow=30.0, fast=12.0).items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(dict(last=0.5, cpu_seconds=seconds)))
        (folder / "config.json").write_text(json.dumps(dict(epochs=40)))
        asked[name] = dict(cell={name: [tmp_path / "not finished", folder]})
    asked["none"] = dict(cell={})
    assert arena.equal_epochs(asked, "cell", "fast", "slow") == 100
    assert arena.equal_epochs(asked, "cell", "slow", "fast") == 16
    assert arena.equal_epochs(asked, "cell", "slow", "slow") is None
    assert (
        arena.equal_epochs(asked, "cell", "none", "slow") == arena.equal_epochs(asked, "cell", "slow", "none") == 0
    )


def test_made_data_have_sets_by_class_or_none(tmp_path):
    arena.class_dependent(tmp_path / "classes.npz", 1)
    d = data.load(str(tmp_path / "classes.npz"))
    missing = ~d.candidates.gather(1, d.labels[:, None])[:, 0]
    assert 0.12 < float(missing.float().mean()) < 0.28 and len(d.images) == 1437
    image = np.zeros((4, 8, 8, 3), np.uint8)
    given = dict(x_train=image, y_train=np.arange(4) % 2, x_test=image, y_test=np.arange(4) % 2)
    np.savez(tmp_path / "votes.npz", annotators=np.zeros((4, 3), int), **given)
    arena.cifar(tmp_path / "cifar.npz", tmp_path / "votes.npz")
    d = data.load(str(tmp_path / "cifar.npz"))
    assert d.votes is None and d.candidates is None


def test_the_command_runs_what_is_missing_and_writes_its_table(monkeypatch, capsys, quick, in_this_process):
    monkeypatch.setattr(arena, "TAUS", dict(proden=(0.0, 0.9)))
    words = "--methods;PRODEN + IRNet;PRODEN + IRNet, best tau;--cells;digits-q0.3-eta0.3;--seeds;3;--out;o"
    argv = ["arena", *words.split(";"), "--options", *TOY, "--epochs", "3", "--e0", "1"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    folders = sorted(path.parent.name for path in (arena.Path("o") / "arena").glob("*/summary.json"))
    ends = ("-seed3", "-tau0-seed3", "-tau0.9-seed3")
    assert folders == [f"digits-q0.3-eta0.3-proden-irnet{end}" for end in ends]
    got = [summary(f"o/arena/{folder}") for folder in folders]
    assert [s["tau"] for s in got] == [0.3, 0.0, 0.9] and got[0]["cpu_seconds"] > 0
    best = max(got[1:], key=lambda s: s["last"])
    table = [line for line in out.splitlines() if line.startswith("| PRODEN")]
    assert f"| {100 * got[0]['last']:.1f} |" in table[0] and f"| {100 * best['last']:.1f} |" in table[1]
    equal = ["--equal", "PRODEN + IRNet", "--methods", "PRODEN", "PRODEN + IRNet"]
    argv[argv.index("--methods") : argv.index("--cells")] = equal
    assert main(argv) == 0 and "arena-equal.md" in capsys.readouterr().out  # PRODEN's own epochs, then equal ones
    of = summary("o/arena/digits-q0.3-eta0.3-proden-seed3")["cpu_seconds"]
    epochs = max(1, round(3 * got[0]["cpu_seconds"] / of))
    assert len(list(arena.Path("o/arena").glob(f"*-proden-epochs{epochs}-seed3/summary.json"))) == 1
    assert main([*argv[: argv.index("--options")], "--jobs", "0"]) == 2  # finished runs of other options
    assert "another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"), [(["--cells", "mnist"], "kmnist-q0.3"), (["--methods", "PICO"], "PiCO")]
)
def test_a_wrong_choice_gets_one_line(argv, named, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["arena", *argv])
    assert stop.value.code == 2 and named in capsys.readouterr().err


def test_a_cell_counts_once_all_its_seeds_are_finished(tmp_path):
    """One seed of two would be shown without a deviation, as if it were sure."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps(dict(last=0.5, cpu_seconds=3.0)))
    asked = dict(one=[tmp_path / "a", tmp_path / "b"])
    assert arena.whole(asked) is None and arena.measured(asked) == ([50.0], 3.0)
    (tmp_path / "b" / "summary.json").write_text(json.dumps(dict(last=0.75, cpu_seconds=5.0)))
    assert arena.whole(asked) == ([50.0, 75.0], 4.0)


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert lines_of(path) == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert lines_of(path) == [dict(a=1)] and path.read_text() == '{"a": 1}\n'
