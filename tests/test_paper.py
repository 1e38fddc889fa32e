"""python -m paper at toy size: commands of the grid, tables with the paper's cells, resuming, figures, compare."""

import itertools
import json
import os
import re
import runpy
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import train
from conftest import ROOT, TOY, process, same_run, summary
from harness.options import configure
from paper import __main__ as paper
from paper import complexity, tables
from paper.grid import Grid

TINY = ["--options", *TOY, "--epochs", "3"]


def test_a_base_alone_goes_on_from_the_e0_of_its_run_with_irnet(monkeypatch):
    """Bit for bit the run from the beginning; where more than IRNet differs, nothing is taken over."""
    started = []
    monkeypatch.setattr("paper.grid.subprocess.Popen", lambda argv, **_: started.append(argv[2:]))
    grid = Grid("digits", [0], Path("o"), "", [*TOY, "--epochs", "4", "--e0", "2", "--tau", "0"])
    (alone,), (irnet,) = (grid.ask("digits", "pico", corrects, 0.3, 0.3) for corrects in (False, True))
    grid._start(irnet)
    assert train.main(started[0]) == 0 and (irnet / "e0.pt").exists()
    grid._start(alone)
    assert started[1][-1] == "--resume" and train.main(started[1]) == 0
    assert train.main([*grid.jobs[alone], "--out", "whole"]) == 0 and same_run("whole", alone)
    assert not same_run("whole", irnet)
    other = Grid("digits", [0], Path("o"), "", [*TOY, "--epochs", "4", "--e0", "2", "--tau", "0", "--lr", "0.01"])
    (alone,) = other.ask("digits", "pico", False, 0.3, 0.3)
    shutil.rmtree(alone)
    other._start(alone)
    assert "--resume" not in started[2] and not alone.exists()


def test_table_7_has_our_cells_and_the_papers(quick, capsys):
    assert paper.main(["table7", "--seeds", "0", "1", "--jobs", "2", "--out", "o", *TINY]) == 0
    text = Path("o/digits/table7.md").read_text()
    assert len(quick) == 12 and "0 min left" in capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("| swap")]
    assert "(91.5)" in rows[0] and "(84.2)" in rows[0]
    folders = [f"o/digits/pico-irnet-q0.1-eta0.3-swap-seed{seed}" for seed in (0, 1)]
    for key, row in zip(("best", "last"), rows, strict=True):
        values = [100 * summary(folder)[key] for folder in folders]
        assert f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" in row
    assert text.count("**") >= 12  # the best of every column is marked
    config = json.loads(Path(folders[0], "config.json").read_text())
    assert config["swap"] and config["q"] == 0.1 and config["eta"] == 0.3 and config["limit_train"] == 200
    # with other options: none of them is taken for what is asked
    assert paper.main(["table7", "--seeds", "0", "--out", "o", *TINY[:-1], "2"]) == 2
    assert "--epochs 3, not 2" in capsys.readouterr().err
    # again: nothing is repeated; a broken one alone is
    quick.clear()
    Path(folders[1], "summary.json").unlink()
    assert paper.main(["table7", "--seeds", "0", "1", "--out", "o", *TINY]) == 0
    assert quick == [Path(folders[1])] and Path("o/digits/table7.md").read_text() == text


def test_unequal_seeds_are_not_compared():
    """Three seeds alone, one with IRNet, which is below on the seed of both."""
    grid = Grid("digits", [0, 1, 2], Path("o"), "", [])
    lines = tables.table2(grid)
    alone, irnet = (grid.ask("digits", "cc", corrects, 0.1, 0.1) for corrects in (False, True))
    for folder, last in zip([*alone, irnet[0]], (0.90, 0.70, 0.75, 0.85), strict=True):
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(dict(last=last, best=last, gap=0.0)))
    text = "\n".join(lines())
    assert "in 0 of 0 cells" in text and "85.0" in text and "**" not in text
    for folder, last in zip(irnet[1:], (0.8, 0.9), strict=True):
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(dict(last=last, best=last, gap=0.0)))
    text = "\n".join(lines())
    assert "on best in 1 of 1 cells, on last in 1 of 1 cells" in text and "**85.0 ± 5.0**" in text


def test_the_noise_table_needs_a_held_out_part(capsys):
    assert paper.main(["noise", "--preset", "released", "--out", "o"]) == 2
    assert "holds nothing out" in capsys.readouterr().err
    assert paper.main(["noise", "--jobs", "0", "--out", "o"]) == 0  # of no finished run there is no mean
    assert "| - | - |" in (out := capsys.readouterr().out) and "nan" not in out


@pytest.mark.parametrize(("name", "runs"), [("table2", 324), ("table3", 63), ("table4", 18), ("table5", 54)])
def test_the_grids_have_the_papers_cells(name, runs):
    grid = Grid("digits", [0, 1, 2], Path("o"), "", [])
    lines = tables.TABLES[name](grid)
    assert len(grid.jobs) == runs and all(configure(argv) for argv in grid.jobs.values())
    for k, folder in enumerate(grid.jobs):  # made-up results: the k-th run has 50 + k / 100 per cent
        folder.mkdir(parents=True)
        last = 0.5 + k / 10_000
        (folder / "summary.json").write_text(json.dumps(dict(last=last, best=last + 0.01, gap=0.01)))
    text = "\n".join(lines())
    if name == "table2":
        assert text.count("in 54 of 54 cells") == 2 and text.count("|\n") >= 24
        first = statistics.mean(50 + k / 100 for k in range(3))
        assert f"| CC | no | {first + 1:.1f} ± 0.0 (89.2) |" in text  # the paper's are best ones
        assert f"| CC | no | {first:.1f} ± 0.0 |" in text  # last
    if name == "table3":
        best = [line for line in text.splitlines() if "**" in line]
        assert len(best) == 2 and all(line.startswith("| IRNet with PiCO") for line in best)
        assert "(86.2)" in best[0] and "(" not in best[1]
    if name == "table4":
        assert text.count("**1.0 ± 0.0**") == 6 and "(0.2)" in text and "(7.0)" in text


def test_no_jobs_show_the_table_of_what_is_finished(quick, capsys):
    grid = Grid("digits", [0], Path("o"), "", [])
    both = [grid.ask("digits", "cc", irnet, 0.1, 0.3)[0] for irnet in (False, True)]
    for folder, last in zip([*both, *grid.ask("digits", "rc", True, 0.5, 0.3)], (0.5, 0.75, 0.625), strict=True):
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(dict(last=last, best=last + 0.01, gap=0.01)))
    assert paper.main(["table2", "--seeds", "0", "--jobs", "0", "--out", "o"]) == 0 and not quick
    text = Path("o/digits/table2.md").read_text()
    assert "on best in 1 of 1 cells, on last in 1 of 1 cells" in text  # a lone run is above nothing
    alone, irnet, _, rc = text[text.index("### digits: last") :].splitlines()[4:8]
    assert alone.split(" | ")[4] == "50.0" and irnet.split(" | ")[4] == "**75.0**" and alone.count(" - ") == 8
    assert rc.endswith("| - | 62.5 |")
    assert paper.main(["table3", "--seeds", "0", "--jobs", "0", "--out", "o"]) == 0
    assert "**" not in Path("o/digits/table3.md").read_text()  # nothing is the best of nothing
    with pytest.raises(SystemExit):
        paper.main(["fig5", "--jobs", "0"])
    assert "fig5 is no table" in capsys.readouterr().err


def test_table_8_is_made_of_simulated_annotators(quick, capsys):
    assert paper.main(["table8", "--seeds", "0", "--jobs", "2", "--out", "o", *TINY]) == 0
    text = Path("o/digits/table8.md").read_text()
    assert len(quick) == 4 and "(64.44)" in text and "(77.15)" in text and text.count("**") == 4  # best and last
    with np.load("o/digits/annotated-digits.npz") as file:
        votes, y = file["annotators"], file["y_train"]
    assert votes.shape == (1437, 5) and 0.02 < (votes != y[:, None]).all(1).mean() < 0.1
    assert paper.main(["table8", "--scale", "paper", "--out", "o"]) == 2
    assert "votes.csv" in capsys.readouterr().err


def test_the_scale_of_the_paper_is_its_own_experiment():
    grid = Grid("paper", [0], Path("o"), "somewhere", [])
    tables.table2(grid)
    assert len(grid.jobs) == 3 * 6 * 9 * 2
    folder = Path("o/paper/cifar100-proden-irnet-q0.03-eta0.2-seed0")
    c = configure(grid.jobs[folder])
    assert (c.arch, c.epochs, c.dataset, c.data) == ("resnet18", 1000, "cifar100", "somewhere")


def test_the_scale_of_kmnist_has_three_seeds_for_two_bases_and_the_papers_cells():
    grid = Grid("kmnist", [0, 1, 2], Path("o"), "", [])
    lines = tables.table2(grid)
    assert len(grid.jobs) == 2 * 3 * (2 * 3 + 4)  # with and without IRNet, three q; PiCO and PRODEN thrice
    shared = set(grid.jobs)
    tables.table4(grid)
    assert set(grid.jobs) == shared  # the same runs
    c = configure(grid.jobs[Path("o/kmnist/cc-irnet-q0.5-eta0.3-seed0")])
    assert (c.arch, c.threads, c.eta, c.dataset) == ("cnn", 1, 0.3, "kmnist")
    for folder in shared:
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(dict(last=0.5, best=0.6, gap=0.1)))
    text = "\n".join(lines())
    row = next(line for line in text.splitlines() if line.startswith("| CC | no |"))
    printed = [cells[0] for cells in tables.PAPER["table2"]["kmnist"]["cc"]["alone"]]
    assert row == "| CC | no | " + " | ".join(f"60.0 ({printed[k]:.1f})" for k in (2, 5, 8)) + " |"  # eta 0.3


def test_the_results_page_says_what_was_measured():
    """The runs in paper/measured have today's options, and their rows in RESULTS.md their numbers."""
    grid, pairs = Grid("kmnist", [0], ROOT / "paper" / "measured", "", ["--device", "cpu"]), 0
    tables.table2(grid)
    grid.check()
    page = (ROOT / "paper" / "RESULTS.md").read_text().splitlines()
    for base, q in itertools.product(tables.SIX, (0.5, 0.3, 0.1)):
        (alone,), (irnet,) = (grid.ask("kmnist", base, corrects, q, 0.3) for corrects in (False, True))
        if not (grid.finished(alone) and grid.finished(irnet)):
            continue
        row = next(line for line in page if line.startswith(f"| {tables.title(base)} | {q:g} |"))
        shown = [cell.split(" (")[0].strip("* ") for cell in row.strip("| ").split(" | ")]
        a, b = summary(alone), summary(irnet)
        want = [f"{100 * run[key]:.1f}" for run in (a, b) for key in ("best", "last")]
        gains = [f"{100 * (b[key] - a[key]):+.1f}" for key in ("best", "last")]
        assert shown[2:] == [*want, *gains, str(b["e0"]), f"{100 * b['noise_after']:.2f}"]
        pairs += 1
    assert pairs >= 4


def test_table_6_agrees_with_the_paper():
    net = complexity.network()
    for views, theirs in tables.PAPER["table6"].items():
        assert complexity.macs(net, int(views)) == pytest.approx(theirs["macs"], rel=0.01)
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(23.01, rel=1e-3)
    device, ms, memory = complexity.cost(1, batch=4)
    assert ms > 0 and (memory is None) == (device != "cuda")
    by_hand = 0.5557  # of one pass of the CIFAR ResNet-18 in 10^9, counted layer by layer in the literature
    assert complexity.macs(net, 1) - complexity.macs(net, 0) == pytest.approx(by_hand, rel=0.005)


def test_a_failed_run_is_named_and_the_others_go_on(quick, monkeypatch, capsys):
    original = Grid.ask

    def ask(grid, *args, **more):
        folders = original(grid, *args, **more)
        for folder in folders:
            if "swap" in folder.name and "q0.3" in folder.name:
                grid.jobs[folder] = [*grid.jobs[folder], "--batch-size", "9999"]
        return folders

    monkeypatch.setattr(Grid, "ask", ask)
    assert paper.main(["table7", "--seeds", "0", "--jobs", "2", "--out", "o", *TINY]) == 1
    err = capsys.readouterr().err
    assert err.count("failed: ") == 1 and "q0.3-eta0.3-swap-seed0" in err and "1 runs failed" in err
    assert len(list(Path("o").rglob("summary.json"))) == 5 and not Path("o/digits/table7.md").exists()


def test_wrong_options_get_one_line(capsys):
    assert paper.main(["table7", "--out", "o", "--options", "--epochs", "0"]) == 2
    err = capsys.readouterr().err
    assert "--epochs" in err and err.count("\n") == 1 and not Path("o").exists()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["branches", "--q", "2"], "--q 2.0"),
        (["table5", "--scale", "kmnist"], "table5"),
        (["e0", "--scale", "paper"], "e0: it has settings"),
    ],
)
def test_what_cannot_be_gets_one_line(argv, named, capsys):
    assert paper.main([*argv, "--out", "o"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and named in said and said.count("\n") == 1


def test_e0_has_settings_of_its_own(capsys):
    with pytest.raises(SystemExit):
        paper.main(["e0", "--seeds", "5"])
    assert "settings of its own" in capsys.readouterr().err


def test_stopped_it_goes_on_where_it_was():
    argv = ["table7", "--seeds", "0", "--out", "o", "--options", *TOY, "--epochs", "400"]
    started = process(paper.main, argv)  # which starts train.py as always
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(Path("o").rglob("checkpoint.pt")):
        time.sleep(0.1)
    os.kill(started.pid, signal.SIGTERM)
    started.join(60)
    said = Path("log").read_text()
    assert started.exitcode == 130 and "the same command goes on" in said and "Traceback" not in said
    log = next(Path("o").rglob("*.log")).read_text()
    assert "epochs 1 to" in log and "are kept" in log


@pytest.mark.filterwarnings("ignore:.*paper.__main__.*:RuntimeWarning")
def test_python_m_paper_is_its_command_line(monkeypatch, capsys):
    for argv, code in ((["compare", "absent"], 2), (["list", "--out", "o"], 0)):
        monkeypatch.setattr(sys, "argv", ["paper", *argv])
        with pytest.raises(SystemExit) as stop:
            runpy.run_module("paper", run_name="__main__")
        assert stop.value.code == code
    out, err = capsys.readouterr()
    assert err.startswith("error: absent ") and "table2" in out and "fig8" in out
    assert not Path("o").exists()  # to list is not to make


@pytest.fixture
def copied(monkeypatch):
    """Every run of a grid is a copy of one: what is tested is the command and the picture."""
    more = ["--base", "cc", "--epochs", "3", "--e0", "1", "--snapshots", "1", "2", "3"]
    assert train.main([*TOY, *more, "--out", "one"]) == 0
    asked = []

    def copies(grid, at_once):
        for folder, argv in grid.jobs.items():
            asked.append(configure(argv))
            shutil.copytree("one", folder)
        return []

    monkeypatch.setattr(Grid, "run", copies)
    return asked


def drawn(name: str) -> None:
    pytest.importorskip("matplotlib")
    if name in ("fig7", "fig8"):
        pytest.importorskip("sklearn")
    assert paper.main([name, "--seeds", "0", "--jobs", "2", "--out", "o", *TINY, "--e0", "1"]) == 0
    picture = Path(f"o/digits/{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.parametrize("name", ["fig2", "fig3", "fig5", "fig8"])
def test_figures_are_drawn(name, quick):
    drawn(name)


@pytest.mark.parametrize(("name", "runs"), [("fig4", 18), ("fig6", 8), ("fig7", 8)])
def test_figures_of_many_runs_are_drawn(name, runs, copied):
    drawn(name)
    assert len(copied) == runs


def test_finished_runs_are_compared_on_one_page(capsys):
    argv = [*TOY, "--base", "cc", "--epochs", "2"]
    assert train.main([*argv, "--out", "a/one"]) == 0 and train.main([*argv, "--e0", "1", "--out", "a/two<&"]) == 0
    capsys.readouterr()
    assert paper.main(["compare", "a/one", "a/two<&/"]) == 0
    assert capsys.readouterr().out == "written to compare.html\n"
    page = Path("compare.html").read_text()
    for folder in ("a/one", "a/two<&"):
        assert f"{100 * summary(folder)['last']:.2f} %" in page
    assert ">one<" in page and "two&lt;&amp;" in page and "two<" not in page and "test accuracy" in page
    # the same name twice: both by their paths; --out; scores on samples set aside are called so
    shutil.copytree("a/one", "b/one")
    table, said = Path("b/one/labels.csv"), summary("b/one")
    assert said.pop("score") == "test accuracy"  # a run of an older version does not say it
    Path("b/one/summary.json").write_text(json.dumps(said))
    table.write_text(table.read_text().replace(",train\n", ",score\n", 1))
    assert paper.main(["compare", "--out", "p.html", "a/one", "b/one"]) == 0
    page = Path("p.html").read_text()
    assert "a/one" in page and "b/one" in page and "set-aside score" in page
    Path("b/one/summary.json").write_text(json.dumps(said | dict(score="score by the votes of the test samples")))
    assert paper.main(["compare", "--out", "p.html", "a/one", "b/one"]) == 0
    assert "score by the votes of the test samples" in Path("p.html").read_text()


def test_what_is_no_finished_run_is_not_compared(capsys):
    assert train.main([*TOY, "--base", "cc", "--epochs", "1", "--out", "r"]) == 0
    for name, content in (("unfinished", None), ("cut", '{"best": '), ("list", "[]")):
        shutil.copytree("r", name)
        Path(name, "summary.json").unlink()
        if content is not None:
            Path(name, "summary.json").write_text(content)
    shutil.copytree("r", "empty")
    Path("empty/metrics.jsonl").write_text("")
    shutil.copytree("r", "text")
    Path("text/metrics.jsonl").write_bytes(b"\xff 5\n")
    capsys.readouterr()
    for wrong in ("unfinished", "cut", "list", "empty", "text", "absent", "r/summary.json"):
        assert paper.main(["compare", "r", wrong]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"error: {wrong} ") and err.count("\n") == 1 and out == ""
    assert not Path("compare.html").exists()
    assert paper.main(["compare", "r", "--out", "absent/p.html"]) == 2
    assert "absent" in capsys.readouterr().err
    for argv in (["compare"], ["--jobs", "1", "compare"], ["table7", "r"]):
        with pytest.raises(SystemExit, match="2"):
            paper.main(argv)
        assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(paper.importlib.util, "find_spec", lambda name: None)
    assert paper.main(["fig7", "--out", "o"]) == 2
    err = capsys.readouterr().err
    assert "pip install matplotlib scikit-learn" in err and err.count("\n") == 1 and not Path("o").exists()


def test_snapshots_keep_margins_and_features():
    assert train.main([*TOY, "--base", "cc", "--epochs", "3", "--snapshots", "1", "3", "--out", "r"]) == 0
    assert sorted(path.name for path in Path("r").glob("snapshot*")) == ["snapshot-0001.npz", "snapshot-0003.npz"]
    with np.load("r/snapshot-0003.npz") as file:
        assert file["tau"].shape == file["noisy"].shape and file["features"].shape == (60, 256)
        assert file["labels"].shape == (60,) and 0 < file["noisy"].mean() < 1


def test_the_papers_numbers_are_its_own():
    """Where the paper is at hand, every number of paper.json stands in it."""
    source = ROOT.parent / "shared" / "paper.tex"
    if not source.exists():
        pytest.skip("needs ../shared/paper.tex")
    text = set(re.findall(r"\d+\.\d\d", source.read_text()))

    def numbers(value):
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                yield from numbers(part)
        elif isinstance(value, float):
            yield f"{value:.2f}"

    found = [number for table, value in tables.PAPER.items() if table != "note" for number in numbers(value)]
    assert len(found) > 400 and not set(found) - text
    assert os.path.getsize(ROOT / "paper/paper.json") < 20_000
