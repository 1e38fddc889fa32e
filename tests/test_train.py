"""Algorithm 1 at toy size: every base, same seed same run, own data, the effect itself."""

import csv
import math
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import augment
import data
import losses
import train
from conftest import SHARED, TOY, command, prepared, process, rows, run, same_run, stopping_at, summary, untimed
from harness import options
from paper import votes


@pytest.mark.parametrize("arch", ["cnn", "mlp"])
@pytest.mark.parametrize("base", list(losses.BASES))
def test_every_base_trains_corrects_and_leaves_its_files(base, arch, capsys):
    argv = [*TOY, "--base", base, "--arch", arch, "--epochs", "5", "--e0", "2", "--tau", "0", "--out", "r"]
    assert train.main(argv) == 0
    out = capsys.readouterr().out
    assert "e0: correction starts" in out and "noise level" in out and "last" in out
    got = summary("r")
    needed = """dataset base irnet q eta seed epochs arch e0 tau best last gap val_selected transductive
        noise_before noise_after corrections correction_precision images_per_second seconds""".split()
    assert set(needed) <= set(got)
    assert got["e0"] == 2 and got["base"] == base and got["corrections"] > 0
    assert got["gap"] == pytest.approx(got["best"] - got["last"]) and 0 <= got["last"] <= got["best"] <= 1
    with np.load("r/candidates.npz", allow_pickle=False) as file:
        before, after, at, label, truth = (file[k] for k in ("before", "after", "corrected_at", "label", "truth"))
    assert before.shape == after.shape == (200, 10) and before.dtype == after.dtype == bool
    assert (after >= before).all() and (after & ~before).sum() == got["corrections"]
    touched = (after & ~before).any(1)
    assert np.array_equal(touched, at > 0) and at[touched].min() >= 3  # nothing before the epoch after e0
    assert after[touched, label[touched]].all() and not before[touched, label[touched]].any()
    assert (label[~touched] == -1).all()
    assert got["noise_after"] == pytest.approx(1 - after[np.arange(200), truth].mean())
    assert [row["corrections"] for row in rows("r")][:2] == [0, 0]
    unseen = max(rows("r")[:2], key=lambda row: (row["val"], row["epoch"]))  # later the held-out part is trained on
    assert got["val_selected"] == unseen["test"]
    state = torch.load("r/checkpoint.pt", weights_only=True)
    assert np.array_equal(state["refine"]["candidates"].numpy(), after)


@pytest.mark.parametrize("views", ["none", "s", "ww", "ws", "ss"])
def test_the_extra_views_of_table_5(views):
    assert train.main([*TOY, "--epochs", "3", "--e0", "1", "--tau", "0", "--views", views, "--out", "r"]) == 0
    assert rows("r")[-1]["epoch"] == 3


def test_more_views_make_more_work_only_after_e0(monkeypatch):
    made = []
    for kind in ("weak", "strong"):
        original = getattr(data, kind)
        monkeypatch.setattr(data, kind, lambda x, *a, k=kind, f=original, **o: made.append(k) or f(x, *a, **o))
    argv = [*TOY, "--base", "proden", "--val", "test", "--epochs", "2", "--e0", "1", "--views", "ws", "--out", "r"]
    assert train.main(argv) == 0
    steps = 200 // 32
    assert made == ["weak"] * steps + ["weak", "weak", "strong"] * steps


@pytest.mark.parametrize("base", options.BASES)
def test_half_precision_trains_and_corrects(base, monkeypatch):
    """As on a card that has it: the networks alone are in bf16, before and after e0, and their weights learn."""
    kinds, original, steps = set(), data.weak, []
    monkeypatch.setattr(data, "weak", lambda *a, **o: kinds.add((v := original(*a, **o)).dtype) or v)
    step = train.train_step
    monkeypatch.setattr(train, "train_step", lambda s, *more: (step(s, *more), steps.append(gradients(s)))[0])
    argv = [*TOY, *"--limit-train 64 --amp bf16 --epochs 2 --e0 1 --tau 0 --base".split(), base]
    argv += ["--no-irnet"] if base in options.WITHOUT_IRNET else []
    assert train.main([*argv, "--views", "ws", "--out", "r"]) == 0
    assert kinds == {torch.float32} and len(steps) > 2 and all(steps)


def gradients(s) -> bool:
    return all(p.grad is not None and bool(p.grad.any()) for g in s.optimizer.param_groups for p in g["params"])


@pytest.mark.parametrize("base", options.BASES)
def test_every_base_trains_as_released(base):
    """Extra views in all epochs, where nothing is corrected too."""
    argv = [*TOY, "--arch", "mlp", "--epochs", "2", "--preset", "released", "--base", base, "--out", "r"]
    assert train.main([*argv, *["--no-irnet"] * (base in options.WITHOUT_IRNET)]) == 0


def test_swap_keeps_the_sizes_of_the_sets():
    assert train.main([*TOY, "--epochs", "4", "--e0", "1", "--tau", "0", "--swap", "--out", "r"]) == 0
    with np.load("r/candidates.npz") as file:
        assert np.array_equal(file["before"].sum(1), file["after"].sum(1))
    assert summary("r")["corrections"] > 0


def test_no_irnet_looks_for_e0_and_corrects_nothing():
    argv = [*TOY, "--base", "cc", "--epochs", "4", "--e0", "1", "--tau", "0"]
    assert train.main([*argv, "--no-irnet", "--out", "r"]) == 0
    got = summary("r")
    assert got["corrections"] == 0 and got["noise_after"] == got["noise_before"] and got["irnet"] is False
    assert got["e0"] == 1
    assert train.main([*argv, "--out", "with"]) == 0 and summary("with")["corrections"] > 0


@pytest.mark.parametrize("base, irnet", [("pico", "paper"), ("cc", "paper"), ("lwc", "votes"), ("proden", "back")])
@pytest.mark.parametrize("beside_a_card", [False, True])
def test_looking_without_moving_leaves_the_base_as_it_is(base, irnet, beside_a_card, monkeypatch):
    """IRNet draws its extra views by numbers of its own: what is moved is all that tells a run from its base.
    Beside a card the host draws from torch's own generator, of which there is one."""
    monkeypatch.setattr(votes, "VOTERS", 150)  # so that they are drawn
    if beside_a_card:
        monkeypatch.setattr(augment, "_host_order", lambda n, generator: torch.randperm(n))
    argv, ends = [*TOY, "--base", base, "--epochs", "5", "--e0", "2"], []
    for name, more in (("alone", ["--no-irnet"]), ("looks", ["--tau", "0.99", "--views", "ws", "--irnet", irnet])):
        assert train.main([*argv, *more, "--out", name]) == 0
        ends.append(torch.load(f"{name}/model.pt", weights_only=True))
    assert summary("looks")["corrections"] == 0 and summary("looks")["e0"] == 2
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert rows("looks")[-1]["loss"] == rows("alone")[-1]["loss"]


def test_a_run_too_short_for_e0_says_so_at_once(capsys):
    for more, said in (([], True), (["--e0", "1"], False), (["--no-irnet"], False)):
        argv = [*TOY, "--base", "cc", "--epochs", "2", *more, "--out", f"r{len(more)}{said}"]
        assert train.main(argv) == 0
        assert ("too few epochs to find it" in capsys.readouterr().out) is said, argv


@pytest.mark.parametrize("irnet", [[], ["--no-irnet"]], ids=["irnet", "no-irnet"])
def test_held_out_part_joins_after_e0(irnet, monkeypatch):
    original, seen = train.train_step, []
    monkeypatch.setattr(train, "train_step", lambda s, i, *more: seen.append(i.tolist()) or original(s, i, *more))
    argv = [*TOY, "--base", "cc", "--batch-size", "10", "--epochs", "3", "--e0", "1", *irnet]
    assert train.main([*argv, "--out", "r"]) == 0
    _, _, samples = prepared(argv)
    held_out, pool = set(samples.held_out.tolist()), set(samples.pool.tolist())
    assert len(held_out) == 20 and len(pool) == 180 and not held_out & pool
    first, second = (sorted(sum(part, [])) for part in (seen[:18], seen[18:38]))
    assert first == sorted(pool) and second == list(range(200))


def test_validation_score_reads_no_true_label():
    c, learner, samples = prepared([*TOY, "--base", "cc"])
    logits = train.logits_of(learner, samples.held_out_images())
    score = train.validation_score(logits, samples.candidates[samples.held_out])
    guess = train.predict(learner, samples.images[samples.held_out]).tolist()
    want = np.mean([samples.candidates[i, g].item() for i, g in zip(samples.held_out.tolist(), guess, strict=True)])
    assert score == pytest.approx(want)
    for labels in (samples.labels, torch.zeros_like(samples.labels)):  # for reporting only
        samples.labels, row = labels, dict(epoch=1)
        train.check_epoch(c, learner, samples, row)
        assert row["val"] == score


@pytest.mark.parametrize("val", ["holdout", "test"])
def test_large_data_are_looked_at_only_where_it_decides_something(val, monkeypatch):
    """5,000 samples: the held-out part until e0, the test set every second time unless e0 is found by it, all
    training samples at the end; always the test set after the last epoch."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (5000, 1, 8, 8), dtype=torch.uint8, generator=g), torch.arange(5000) % 10
    many = data.Dataset("many", x, y, x[:100], y[:100], 10, (0.5,), (0.5,))
    argv = "--base cc --arch mlp --epochs 5 --e0 2 --device cpu --val".split()
    c = options.configure([*argv, val])
    learner, samples = train.prepare(c, many)
    looks, original = [], train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda s, f, x, *a: looks.append(len(x)) or original(s, f, x, *a))
    made = [dict(epoch=epoch) for epoch in range(1, 6)]
    for row in made:
        train.check_epoch(c, learner, samples, row)
    leaks = val == "test"
    assert looks == ([100] * 5 + [5000] if leaks else [250, 250, 100, 100, 100, 5000])
    tested = [1, 2, 3, 4, 5] if leaks else [2, 4, 5]
    assert [row["epoch"] for row in made if math.isfinite(row["test"])] == tested
    known = [leaks or row["epoch"] <= 2 for row in made]
    assert [math.isfinite(row["val"]) for row in made] == known and made[-1]["e0"] == 2
    assert [math.isfinite(row["transductive"]) for row in made] == [False] * 4 + [True]


def test_the_test_set_is_looked_at_as_often_as_asked_and_resumed_so(monkeypatch):
    """--test-every 3 of 7 epochs, stopped on the way: the best of the epochs that were looked at."""
    argv = [*TOY, *"--base cc --epochs 7 --e0 4 --test-every 3".split()]
    assert train.main([*argv, "--out", "whole"]) == 0
    tested = {row["epoch"]: row["test"] for row in rows("whole") if row["test"] is not None}
    found = summary("whole")
    assert list(tested) == [3, 6, 7] and found["best"] == max(tested.values())
    assert found["last"] == tested[7] and found["val_selected"] == tested[3]  # the one until e0
    assert train.main([*argv, "--out", "each", "--test-every", "1"]) == 0
    every = {row["epoch"]: row["test"] for row in rows("each")}
    assert {epoch: every[epoch] for epoch in tested} == tested  # looking changes nothing
    stopping_at(monkeypatch, 20)
    assert train.main([*argv, "--out", "parts"]) == 143
    assert train.main([*argv, "--out", "parts", "--resume"]) == 0 and same_run("whole", "parts")


@pytest.mark.parametrize("base", list(losses.BASES))
def test_same_seed_same_rows_and_another_seed_others(base):
    argv = [*TOY, "--base", base, "--epochs", "4", "--e0", "2", "--tau", "0"]
    for folder, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert train.main([*argv, "--seed", seed, "--out", folder]) == 0
    assert untimed("a") == untimed("b")
    assert untimed("a") != untimed("c")


def test_cosine_schedule_of_the_release():
    assert train.cosine(0.01, 1, 1000) == pytest.approx(0.00999998, abs=1e-8)
    assert train.cosine(0.01, 500, 1000) == pytest.approx(0.005005)
    assert train.cosine(0.01, 1000, 1000) == pytest.approx(1e-5)


# ------------------------------------------------------------------ one's own data


def test_own_data_with_annotators(capsys):
    rng = np.random.RandomState(0)
    y = np.arange(120) % 3
    x = (rng.rand(120, 8, 8, 3) * 60 + 60 * y[:, None, None, None]).astype(np.uint8)
    votes = np.stack([y, y, np.where(rng.rand(120) < 0.5, y, (y + 1) % 3)], 1)
    np.savez("own.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30], annotators=votes)
    argv = ["--dataset", "own.npz", "--arch", "cnn", "--epochs", "2", "--batch-size", "20", "--out", "r"]
    assert train.main(argv) == 0
    assert summary("r")["q"] is None and summary("r")["noise_before"] == 0
    assert train.main([*argv, "--q", "0.1"]) == 2
    assert "candidate sets of its own" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["pico", "cc"])
def test_data_on_the_host_gives_the_same_run(base):
    """A folder of .npy files, memory-mapped and copied batch by batch, against the same data on the device."""
    d = data.load("digits", limit_train=200, limit_test=60)
    arrays = dict(x_train=d.images[:, 0], y_train=d.labels, x_test=d.test_images[:, 0], y_test=d.test_labels)
    Path("mine").mkdir()
    for name, value in arrays.items():
        np.save(f"mine/{name}.npy", value.numpy())
    argv = ["--base", base, *"--dataset mine --q 0.3 --eta 0.3 --arch cnn --batch-size 32 --device cpu".split()]
    argv += "--epochs 4 --e0 2 --tau 0".split()
    for place in ("device", "host"):
        assert train.main([*argv, "--data-device", place, "--out", place]) == 0
    assert untimed("device") == untimed("host")


# ------------------------------------------------------------------ as a person runs it


@pytest.mark.skipif(not (SHARED / "KMNIST").exists(), reason="needs ../shared/data")
def test_the_papers_experiment_starts_and_shows_the_time_left():
    """On one core, a sixteenth of the batch: a step is not the point."""
    argv = ["--dataset", "kmnist", "--data", str(SHARED), "--q", "0.5", "--eta", "0.3", "--base", "pico"]
    argv += ["--batch-size", "8", "--threads", "1"]
    began = time.monotonic()
    process = command(*argv, "--out", "r")
    seen = []
    for line in process.stdout:
        seen.append(line)
        if " left in it" in line:
            break
    took = time.monotonic() - began
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=90)
    text = "".join(seen)
    assert "60,000 training" in text and "resnet18" in text and "1000 epochs" in text and "23.0" in text
    assert took < 60 and process.returncode == 143 and "Traceback" not in err


def test_irnet_does_what_it_is_for():
    """Digits, q = eta = 0.3: the noise leaves the sets, accuracy stays up, and of the first 5 % of labels.csv, the
    most suspicious, at least 95 % truly lack the truth."""
    argv = ["--base", "proden", "--transductive-every", "40", "--device", "cpu"]
    without = process(run, [*argv, "--out", "without", "--no-irnet"])  # at the same time
    assert train.main([*argv, "--out", "with"]) == 0
    without.join(240)
    got, base_alone = summary("with"), summary("without")
    assert got["noise_before"] > 0.28 and got["noise_after"] < 0.06 and got["correction_precision"] > 0.85
    assert got["e0"] is not None and got["e0"] < 20
    assert got["last"] > 0.95 and got["last"] - base_alone["last"] > 0.08
    with open("with/labels.csv", newline="") as table:
        first = list(csv.DictReader(table))[: round(0.05 * 1437)]
    assert np.mean([row["truth"] not in row["given"].split("|") for row in first]) >= 0.95


def test_compile_gives_the_same_run_within_rounding():
    """Training and test set have one size, and nothing is held out: a graph less is half a minute less."""
    argv = [*TOY, *"--base proden --arch mlp --limit-test 200 --val test --epochs 3 --e0 1".split()]
    argv += ["--transductive-every", "3"]
    assert train.main([*argv, "--out", "plain"]) == 0
    child = process(
        run, [*argv, "--compile", "--out", "compiled"]
    )  # which compiles the modules' functions for good
    child.join(240)
    assert child.exitcode == 0, Path("log").read_text()
    for one, two in zip(rows("plain"), rows("compiled"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
        assert one["corrections"] == pytest.approx(two["corrections"], abs=2)
        assert one["test"] == pytest.approx(two["test"], abs=0.05)
