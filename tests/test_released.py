"""--preset released against the release's own values: the table of where paper and release disagree (docs)."""

from pathlib import Path

import pytest
import torch

import irnet
import losses
import train
from conftest import TOY, prepared
from harness.options import configure
from paper.grid import Grid
from paper.tables import table2

RUN = ["--preset", "released", "--dataset", "cifar10", "--q", "0.3", "--eta", "0.3"]


def test_each_value_is_the_releases():
    c = configure(RUN)
    assert (c.f, c.strict, c.val, c.e0_rule, c.window) == ("prototype", True, "test", "smoothed", 0)
    assert (c.classifier_loss, c.weights_after, c.views, c.swap) == ("sce", "value", "w", False)
    assert (c.batch_size, c.lr, c.weight_decay, c.epochs) == (128, 0.01, 1e-3, 1000)
    assert (c.queue, c.key_momentum, c.prototype_momentum, c.phi) == (8192, 0.999, 0.99, (0.95, 0.8))
    assert (c.record_views, c.views_share, c.variant, c.form, c.proto_start) == (
        True,
        1.0,
        "released",
        "soft_target",
        1,
    )
    assert (c.arch, c.image_size, c.crop, c.flip, c.tau) == ("resnet18", 32, 0.2, 0.5, 0.008)


@pytest.mark.parametrize(
    ("argv", "loss"),
    [
        (["--dataset", "cifar10"], "sce"),
        (["--dataset", "kmnist"], "sce"),
        (["--dataset", "cifar100"], "ce"),
        (["--dataset", "cifar10", "--no-irnet"], "ce"),
        (["--dataset", "cifar10", "--classifier-loss", "ce"], "ce"),
    ],
)
def test_sce_comes_with_irnet_on_ten_classes_alone(argv, loss):
    assert configure(["--preset", "released", *argv]).classifier_loss == loss
    assert configure([a for a in argv if a != "released"]).classifier_loss == "ce"


def test_a_word_given_overrules_the_preset():
    c = configure([*RUN, "--val", "holdout", "--e0-rule", "paper", "--window", "50"])
    assert (c.val, c.e0_rule, c.window, c.strict) == ("holdout", "paper", 50, True)


def test_kmnist_waits_for_a_tenth_of_the_run():
    for argv, start in (([], 100), (["--epochs", "50"], 5), (["--epochs", "5"], 1), (["--proto-start", "7"], 7)):
        assert configure(["--dataset", "kmnist", *argv]).proto_start == start
    for arch, epochs, start in (("cnn", 40, 10), ("narrow", 12, 3), ("cnn", 2, 1)):  # shorter runs: a quarter
        argv = ["--dataset", "kmnist", "--arch", arch, "--epochs", str(epochs)]
        assert configure(argv).proto_start == start
    c = configure(["--dataset", "kmnist", "--arch", "cnn"])
    assert (c.epochs, c.proto_start, c.crop, c.window, c.lr) == (32, 8, 0.85, 3, 0.02)
    assert configure(["--arch", "cnn"]).proto_start == 1  # digits do not wait


@pytest.mark.parametrize(
    ("argv", "window"),
    [
        ([], 3),
        (["--e0-rule", "knee"], 3),
        (["--epochs", "100"], 0),  # the smoothed rule, by itself
        (["--e0-rule", "smoothed"], 0),
        (["--preset", "released"], 0),
        (["--e0-rule", "smoothed", "--window", "12"], 12),
    ],
)
def test_the_short_runs_window_is_the_knees_alone(argv, window):
    assert configure(["--dataset", "kmnist", "--arch", "cnn", *argv]).window == window


def test_the_rule_has_ten_differences_and_a_window_of_a_tenth():
    refine = irnet.IRNet(torch.ones(4, 3, dtype=torch.bool), 0.01, 1000, rule="smoothed", window=0)
    assert refine.epoch.window == 100
    for peak, fires in ((60, 118), (100, 157), (120, 176), (150, 206)):  # by the released code
        watch = irnet.CorrectionEpoch(100, "smoothed")
        curve = (0.2 + 0.7 * min(e, peak) / peak - 0.0002 * max(0, e - peak) for e in range(1, 400))
        assert next(e for e, value in enumerate(curve, 1) if watch.update(value)) == fires


def test_all_324_runs_of_table_2_are_configured():
    grid = Grid("paper", [0], Path("o"), "", [], "released")
    table2(grid)
    assert len(grid.jobs) == 324 and all(folder.parts[1] == "paper-released" for folder in grid.jobs)
    made = [configure(argv) for argv in grid.jobs.values()]
    assert {c.preset for c in made} == {"released"} and {c.e0_rule for c in made} == {"smoothed"}
    assert sum(c.classifier_loss == "sce" for c in made) == 2 * 9  # PiCO with IRNet on CIFAR-10 and KMNIST


def test_log_is_cc_and_rc_is_proden():
    torch.manual_seed(0)
    candidates = torch.rand(8, 5) < 0.5
    candidates[:, 0] = True
    logits, index = torch.randn(8, 5), torch.arange(8)
    assert torch.equal(
        losses.LOG(candidates, as_released=True).objective(logits, index), losses.cc(logits, candidates)
    )
    rc, proden = losses.RC(candidates, as_released=True), losses.PRODEN(candidates)
    for base in (rc, proden):
        base.after_step(None, [None], index, logits.softmax(1))  # no second look at a network
    assert torch.equal(rc.weights, proden.weights)


def test_equal_margins_are_not_enough():
    f, S = torch.tensor([[0.25, 0.75], [0.2, 0.8]]), torch.tensor([[True, False]] * 2)
    assert irnet.detect([f], S, 0.5)[0].tolist() == [True, True]
    assert irnet.detect([f], S, 0.5, strict=True)[0].tolist() == [False, True]


@pytest.mark.parametrize("correcting", [False, True])
def test_extra_views_are_recorded_in_every_epoch(correcting, monkeypatch):
    """Query and view are recorded, ours the query alone, before e0 too; the view sees newer prototypes."""
    import data

    argv = ["--preset", "released", "--limit-train", "64", "--batch-size", "32", "--device", "cpu"]
    seen = {}
    for name, more in (("released", []), ("ours", ["--preset", "ours", "--val", "test", "--tau", "0.004"])):
        learner, samples = train.prepare(configure([*argv, *more]), data.load("digits", limit_train=64))
        norm = next(m for m in learner.network.query.modules() if isinstance(m, torch.nn.BatchNorm2d))
        index = samples.pool[:32]
        used, f = [], learner.network.prototype_probabilities
        spy = lambda q, p, used=used, f=f: (used.append(p), f(q, p))[1]  # noqa: E731
        monkeypatch.setattr(learner.network, "prototype_probabilities", spy)
        train.train_step(learner, index, samples.images[index], samples.labels[index], correcting)
        seen[name] = int(norm.num_batches_tracked), [p is learner.network.prototypes for p in used]
    assert seen["released"] == (2, [False, True])
    assert seen["ours"] == (1, [False, False] if correcting else [False])


def test_e0_is_not_before_the_bases_own_first_epoch():
    _, learner, _ = prepared([*TOY, *"--base pico --proto-start 8 --epochs 24".split()])
    watch = learner.refine.epoch
    assert (watch.rule, watch.window, watch.since, watch.earliest) == ("knee", 3, 8, 8)
