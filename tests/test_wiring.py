"""Between the options, the method and a run's files: every option reaches where it acts, a row says what the files
give by a plain loop, evaluation is in evaluation mode, and e0 is where it should be."""

import csv
import dataclasses
import json
import math
import re
import signal
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import augment
import crowd
import data
import irnet
import losses
import models
import train
from conftest import prepared, rows, summary
from crowd.model import Model
from harness.results import summarise

TOY = "--limit-train 60 --limit-test 40 --batch-size 16 --epochs 3 --device cpu --amp off --arch cnn".split()


# ------------------------------------------------------------------ a finished run, by its files


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """PiCO, whose key encoder is another network than its query encoder, corrected in epochs 2 and 3."""
    folder = tmp_path_factory.mktemp("wiring") / "r"
    argv = [*TOY, *"--base pico --queue 40 --lr 0.1 --e0 1 --tau 0 --swap --transductive-every 2".split()]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert train.main([*argv, "--out", str(folder)]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


def state_of(folder) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def loaded(folder) -> models.Encoder:
    encoder = models.build(**json.loads((folder / "config.json").read_text())["network"])
    encoder.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return encoder


@torch.no_grad()
def logits_one_by_one(encoder, images) -> torch.Tensor:
    """A batch of one has no statistics to use but the recorded ones."""
    encoder.eval()
    each = [(image[None].float() / 255 - encoder.mean) / encoder.std for image in images]
    return torch.cat([encoder.classifier(encoder.backbone(x)) for x in each])


def test_model_pt_is_the_query_encoder_without_its_head(finished):
    model, network = torch.load(finished / "model.pt", weights_only=True), state_of(finished)["network"]
    query = {
        name: v for name, v in network.items() if name.startswith("query.") and not name.startswith("query.head")
    }
    assert {f"query.{name}" for name in model} == set(query)
    for name, value in model.items():
        assert torch.equal(value, query[f"query.{name}"]), name
    for name in ("backbone.0.weight", "backbone.2.running_mean", "classifier.weight"):
        assert not torch.allclose(model[name], network[f"key.{name}"], atol=1e-3), name  # the key's would be seen


def test_a_row_says_what_the_files_give_by_a_plain_loop(finished):
    d, state, encoder = data.load("digits", limit_train=60, limit_test=40), state_of(finished), loaded(finished)
    last = rows(finished)[-1]
    guess = logits_one_by_one(encoder, d.images).argmax(1).tolist()
    test_guess = logits_one_by_one(encoder, d.test_images).argmax(1).tolist()
    test = sum(a == b for a, b in zip(test_guess, d.test_labels.tolist(), strict=True)) / 40
    transductive = sum(a == b for a, b in zip(guess, d.labels.tolist(), strict=True)) / 60
    S, held_out = state["refine"]["candidates"], state["held_out"].tolist()
    assert abs(test - transductive) > 0.01 and len(held_out) == 6
    assert last["test"] == pytest.approx(test) and last["transductive"] == pytest.approx(transductive)
    assert last["val"] == pytest.approx(sum(bool(S[i, guess[i]]) for i in held_out) / 6)
    assert last["noise_level"] == pytest.approx(sum(not S[i, y] for i, y in enumerate(d.labels.tolist())) / 60)
    assert last["set_size"] == pytest.approx(int(S.sum()) / 60)
    assert [row["transductive"] is None for row in rows(finished)] == [True, False, False]  # every 2, and the last
    assert [row["e0"] for row in rows(finished)] == [1, 1, 1]
    got = summary(finished)
    moved = [(row["corrections"], row["correction_precision"] or 0) for row in rows(finished)]
    assert got["corrections"] == sum(n for n, _ in moved) > 0
    assert got["correction_precision"] == pytest.approx(sum(n * p for n, p in moved) / got["corrections"])
    assert got["best"] == max(row["test"] for row in rows(finished)) and got["last"] == last["test"]
    assert got["transductive"] == last["transductive"] and got["noise_after"] == last["noise_level"]


def test_the_files_agree_on_the_sets(finished):
    d, state = data.load("digits", limit_train=60), state_of(finished)
    with np.load(finished / "candidates.npz") as file:
        before, after, at, label, truth = (file[k] for k in ("before", "after", "corrected_at", "label", "truth"))
    assert np.array_equal(before, state["before"].numpy()) and np.array_equal(truth, d.labels.numpy())
    assert np.array_equal(after, state["refine"]["candidates"].numpy()) and (before != after).any()
    assert np.array_equal(at, state["refine"]["corrected_at"].numpy()) and set(at.tolist()) <= {0, 2, 3}
    assert np.array_equal(label, state["refine"]["corrected_to"].numpy())
    noise = 1 - before[np.arange(60), truth].mean()
    assert summary(finished)["noise_before"] == pytest.approx(noise) and summary(finished)["noise_after"] != noise
    assert [one["epoch"] for one in json.loads(state["histograms"])] == [1, 3]  # of e0 and of the end


def test_labels_csv_has_the_margin_of_f_and_the_classifiers_prediction(finished):
    """f is softmax(q . prototypes) in evaluation mode; the smallest margin to the sets as given comes first."""
    d, state = data.load("digits", limit_train=60), state_of(finished)
    network = models.build(
        **json.loads((finished / "config.json").read_text())["network"], pico=dict(queue_size=40)
    )
    network.load_state_dict(state["network"])
    network.eval()
    p = logits_one_by_one(network.query, d.images).softmax(1)
    with torch.no_grad():
        v = [network.query.head(network.query.features(x[None].float() / 255))[0] for x in d.images]
    f = torch.stack([(q / q.norm() @ network.prototypes.T).softmax(0) for q in v]).tolist()
    with (finished / "labels.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert sorted(int(row["row"]) for row in table) == list(range(60))
    for row in table:
        i = int(row["row"])
        S = {j for j in range(10) if state["before"][i, j]}
        out = set(range(10)) - S
        assert row["given"] == "|".join(map(str, sorted(S))) and row["predicted"] == str(int(p[i].argmax()))
        margin = max(f[i][j] for j in S) - max(f[i][j] for j in out) if out else math.inf
        assert float(row["margin"]) == pytest.approx(margin, abs=2e-4)
    assert [float(row["margin"]) for row in table] == sorted(float(row["margin"]) for row in table)


# ------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("base", ["cc", "pico"])
def test_evaluation_mode_and_back(base):
    """Logits and f depend on a sample alone, not on its batch; running statistics stay; training mode is back."""
    _, learner, samples = prepared([*TOY, "--base", base])
    network = learner.network
    train.train_epoch(learner, samples, 1, 3, 0.1)
    kept = {name: buffer.clone() for name, buffer in network.named_buffers()}
    own = logits_one_by_one(getattr(network, "query", network), samples.images)
    network.train()
    for size in (16, 7, 60):
        learner.batch_size = size
        torch.testing.assert_close(train.logits_of(learner, samples.images), own, atol=1e-4, rtol=1e-4)
        p, f = train.probabilities(learner, samples.images)
        torch.testing.assert_close(p, own.softmax(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(f[7], train.probabilities(learner, samples.images[7:8])[1][0])
        assert torch.equal(train.predict(learner, samples.images), own.argmax(1))
        right = [a == b for a, b in zip(own.argmax(1).tolist(), samples.labels.tolist(), strict=True)]
        assert train.accuracy(learner, samples.images, samples.labels) == pytest.approx(sum(right) / 60)
        assert all(module.training for module in network.modules())
    assert all(torch.equal(kept[name], buffer) for name, buffer in network.named_buffers())
    trained = network(samples.images.float() / 255).detach()
    assert float((trained - own).abs().max()) > 0.01  # training mode would be seen


def test_the_summary_of_rows_by_hand():
    c = prepared([*TOY, "--seed", "3"])[0]
    found = [(0.2, 0.5, 0, math.nan), (0.6, 0.7, 0, math.nan), (0.4, 0.7, 3, 1.0), (0.3, 0.9, 1, 0.0)]
    keys = ("test", "val", "corrections", "correction_precision")
    more = dict(transductive=0.25, noise_level=0.125, images_per_second=2.0, seconds=1.5)
    given = [dict(zip(keys, row, strict=True)) | more | dict(epoch=e) for e, row in enumerate(found, 1)]
    got = summarise(c, given, 3, 0.05, 0.5)
    assert (got["best"], got["last"], got["gap"]) == (0.6, 0.3, pytest.approx(0.3))
    assert got["val_selected"] == 0.4  # of the first three the best on what was not trained on, the later of two
    assert (got["corrections"], got["correction_precision"], got["seconds"]) == (4, 0.75, 6)
    assert (got["e0"], got["tau"], got["noise_before"], got["noise_after"], got["seed"]) == (3, 0.05, 0.5, 0.125, 3)


def test_caution_is_for_ones_own_data_and_reads_all_samples(monkeypatch):
    (c, learner, samples), called, row = prepared([*TOY, "--e0", "1"]), [], dict(epoch=1)
    assert c.careful is False
    train.train_epoch(learner, samples, 1, 3, 0.1)
    monkeypatch.setattr(crowd, "look", lambda *given: called.append(given) or dict(tau=0.077))
    monkeypatch.setattr(irnet, "estimate_noise", lambda *given: (0.2, 1.5, (0.1, 0.4)))
    train.check_epoch(c, learner, samples, row)  # digits
    assert not called and row["noise_estimate"] == dict(eta=0.2, low=0.1, high=0.4, temperature=1.5)
    for careful, tau in ((True, c.tau), (False, None)):
        learner.refine.epoch.e0, called, row, samples.dataset.candidates = None, [], dict(epoch=1), samples.before
        train.check_epoch(dataclasses.replace(c, dataset="t.npz", careful=careful), learner, samples, row)
        given, p, features, permitted = called[0]
        wanted = train.logits_of(learner, samples.images).softmax(1), train.features_of(learner, samples.images)
        torch.testing.assert_close((p, features), wanted)
        assert given is samples and permitted == tau and row["tau"] == learner.refine.tau == 0.077


# ------------------------------------------------------------------ one's own data


def test_own_rows_stay_beside_their_images(capsys):
    """Training and test rows in turn; a limit; what is asked of the annotators reaches the reader."""
    grey = [20 * i for i in range(10)]
    for i, value in enumerate(grey):
        Image.new("L", (8, 8), value).save(f"{i}.png")
    lines = [f"{i}.png,{'ab'[i % 2]},{'ab'[i % 2]},{'test' if i % 3 == 0 else 'train'}" for i in range(10)]
    Path("t.csv").write_text("\n".join(["file,label,truth,split", *lines]))
    d = data.load("t.csv", size=8, limit_train=5)
    assert (
        d.images[:, 0, 0, 0].tolist() == [20, 40, 80, 100, 140] and d.test_images[:, 0, 0, 0].tolist() == grey[::3]
    )
    assert d.files == ["1.png", "2.png", "4.png", "5.png", "7.png"] and d.labels.tolist() == [1, 0, 0, 1, 1]
    assert d.candidates.tolist() == [[y == 0, y == 1] for y in d.labels.tolist()] and d.votes.shape == (5, 2)
    votes = np.repeat([[9, 1], [1, 9]], 10, 0)
    np.savez("v.npz", x_train=np.zeros((20, 8, 8), np.uint8), votes=votes)
    argv = "--dataset v.npz --batch-size 4 --epochs 1 --device cpu".split()
    assert train.main([*argv, "--reliability", "0.95", "--out", "r"]) == 2
    assert "--reliability 0.95" in capsys.readouterr().err


def test_the_review_and_the_model_in_numbers(finished):
    """Bars from the largest on, the count of flagged ones; colour pictures as Pillow turns them grey."""
    d, table = data.load("digits", limit_train=60), (finished / "labels.csv").read_text()
    p = logits_one_by_one(loaded(finished), d.images).softmax(1)
    table = table.replace(",no,", ",yes,").replace(",yes,", ",no,", 7)
    page = crowd.review(table, d, p, "digits", "r")
    assert "of 60 samples, 53 of which are flagged" in page
    for card, row in zip(page.split("<article")[1:], csv.DictReader(table.splitlines()), strict=True):
        bars = [float(v) for v in re.findall(r'value="([0-9.]+)"', card)]
        assert bars == pytest.approx(sorted(p[int(row["row"])].tolist())[:-5:-1], abs=1e-4)
    colour = torch.randint(256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    grey = [np.array(Image.fromarray(x.permute(1, 2, 0).numpy()).convert("L")) for x in colour]
    model = Model(finished)
    torch.testing.assert_close(model(colour), model(torch.tensor(np.stack(grey))[:, None]), atol=0.002, rtol=0.02)


# ------------------------------------------------------------------ every option where it acts


def group(name):
    return lambda learner, samples: [g[name] for g in learner.optimizer.param_groups]


def records(learner, samples):
    encoders = [m.records for m in learner.network.modules() if isinstance(m, models.Encoder)]
    return [*encoders, learner.base.newest, learner.always]


OPTIONS = [
    ("--proto-start 3", "base.proto_start", 3),
    ("--classifier-loss ce", "base.classifier_loss", losses.weighted_ce),
    ("--classifier-loss sce", "base.classifier_loss", losses.PiCO._sce),
    ("--phi 0.7 0.2", "base.phi_range", (0.7, 0.2)),
    ("--f classifier", "base.f", "classifier"),
    ("--record-views", records, [True] * 4),
    ("", records, [False] * 4),
    ("--queue 77", "network.queue.shape", (77, 128)),
    ("--key-momentum 0.25", "network.key_momentum", 0.25),
    ("--prototype-momentum 0.35", "network.prototype_momentum", 0.35),
    ("--base lwc --beta 2.5", "base.beta", 2.5),
    ("--base log --variant released", "base.function", losses.cc),
    ("--base log --variant published", "base.function", losses.log),
    ("--base rc --variant released", "base.as_released", True),
    ("--base rc --variant published", "base.as_released", False),
    ("--base pico+ --no-irnet --variant released", "base.as_released", True),
    ("--base mae --form soft_target", "base.form", dict(form="soft_target")),
    ("--base sce --form average", "base.form", dict(form="average")),
    ("--crop 0.35 --flip 0.15", "views.strength", dict(crop=0.35, flip=0.15)),
    ("--weight-decay 0.07", group("weight_decay"), [0.07]),
    ("", group("momentum"), [0.9]),
    ("--tau 0.123", "refine.tau", 0.123),
    ("--swap", "refine.swap", True),
    ("", "refine.swap", False),
    ("--strict", "refine.strict", True),
    ("", "refine.strict", False),
    ("--weights-after uniform", "refine.weights_after", "uniform"),
    ("--weights-after 1/C", "refine.weights_after", "1/C"),
    ("--views ws", "extra", "ws"),
    ("--views none", "extra", ""),
    ("--views-share 0.4", "share", 0.4),
    ("--views-share 0.4 --views-all", "share", 1),
    ("--e0-rule smoothed", "refine.epoch.rule", "smoothed"),
    ("--e0-rule paper", "refine.epoch.rule", "paper"),
    ("--e0-rule smoothed --window 15", "refine.epoch.window", 15),
    ("--e0 2", "refine.epoch.fixed", 2),
    ("--batch-size 20", "batch_size", 20),
    ("--val test", lambda learner, samples: (len(samples.held_out), len(samples.pool)), (0, 60)),
    ("--data-device host", lambda learner, samples: samples.on_host, True),
    ("--q 0 --eta 0", lambda learner, samples: samples.before.sum(1).tolist(), [1] * 60),
    ("--q 0 --eta 0", lambda learner, samples: samples.before.int().argmax(1).equal(samples.labels), True),
    ("--q 0.95 --eta 0", lambda learner, samples: samples.before.sum() > 500, True),
    ("--eta 0.95", lambda learner, samples: irnet.noise_level(samples.before, samples.labels) > 0.8, True),
]


@pytest.mark.parametrize("argv, where, value", OPTIONS, ids=[f"{i}: {o[0]}" for i, o in enumerate(OPTIONS)])
def test_an_option_reaches_where_it_acts(argv, where, value):
    _, learner, samples = prepared([*TOY, *argv.split()])
    got = attrgetter(where)(learner) if isinstance(where, str) else where(learner, samples)
    assert got == value and (not isinstance(value, bool) or bool(got) is value)


def test_the_seed_reaches_the_sets_the_weights_and_the_draws():
    (_, a, one), (_, b, two) = (prepared([*TOY, "--seed", seed]) for seed in "12")
    assert not torch.equal(one.before, two.before) and not torch.equal(one.held_out, two.held_out)
    assert not torch.equal(a.network.query.classifier.weight, b.network.query.classifier.weight)
    assert len({tuple(v.generator.get_state().tolist()) for k in (a, b) for v in (k.views, k.augmented)}) == 4


def test_the_learning_rate_and_the_batch_are_those_given():
    """The schedule of a whole run, through train.main."""
    argv = [*TOY, *"--base cc --lr 0.07 --epochs 4 --batch-size 9 --val test --image-size 12 --out r".split()]
    assert train.main(argv) == 0
    want = [0.00007 + 0.06993 * (1 + math.cos(math.pi * e / 4)) / 2 for e in (1, 2, 3, 4)]
    assert [row["lr"] for row in rows("r")] == pytest.approx(want)
    assert None not in [row["transductive"] for row in rows("r")]  # few samples are looked at in every epoch
    state, config = state_of(Path("r")), json.loads(Path("r/config.json").read_text())
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(want[-1])
    steps = int(state["network"]["backbone.2.num_batches_tracked"])
    assert steps == 4 * (60 // 9) and config["network"]["size"] == 12


@pytest.mark.parametrize("kind", ["w", "s"])
def test_flip_mirrors_and_crop_cuts(kind):
    """A crop of all, and a flip always or never: the same views, mirrored (a strong one is bent after that)."""
    x, view = data.load("digits", limit_train=12).images, {}
    for crop, flip in ((1, 0), (1, 1), (0.2, 0)):
        _, learner, _ = prepared([*TOY, "--crop", str(crop), "--flip", str(flip)])
        state = learner.views.generator.get_state()
        view[crop, flip] = learner.views.view(kind, x)
        learner.views.generator.set_state(state)
        function = {"w": augment.weak, "s": augment.strong}[kind]
        assert torch.equal(view[crop, flip], function(x, learner.views.generator, crop=crop, flip=flip))
    if kind == "w":
        torch.testing.assert_close(view[1, 1], view[1, 0].flip(3))
    for crop, flip in ((1, 1), (0.2, 0)):
        assert float((view[crop, flip] - view[1, 0]).abs().mean()) > 0.01


@pytest.mark.parametrize("strict", [False, True])
def test_the_extra_views_see_the_prototypes_that_x_saw(strict):
    """In PiCO's first step they are all zero: every margin is 0, which meets <= -0 but not < -0, and the first
    label outside is the same in all views."""
    more = "--tau 0 --views ws --views-all" + " --strict" * strict
    _, learner, samples = prepared([*TOY, *more.split()])
    index = torch.arange(16)
    old = samples.candidates[index].clone()
    _, tau, counts = train.train_step(learner, index, samples.images[index], samples.labels[index], True)
    new = samples.candidates[index]
    assert tau.tolist() == [0.0] * 16 and int(counts[4]) == (0 if strict else 16)
    for before, after in zip(old.tolist(), new.tolist(), strict=True):
        assert after == (before if strict else [v or j == before.index(False) for j, v in enumerate(before)])


@pytest.mark.parametrize("form", ["average", "soft_target"])
def test_the_form_of_a_robust_loss(form):
    _, learner, samples = prepared([*TOY, "--base", "mae", "--form", form])
    z, index, total = torch.randn(5, 10, generator=torch.Generator().manual_seed(0)), torch.arange(5), 0.0
    for i, p in enumerate(z.softmax(1).tolist()):
        w = [float(v) / int(samples.candidates[i].sum()) for v in samples.candidates[i]]
        soft = sum(abs(a - b) for a, b in zip(p, w, strict=True))
        total += soft if form == "soft_target" else 2 * (1 - sum(a * b for a, b in zip(p, w, strict=True)))
    assert float(learner.base.objective(z, index)) == pytest.approx(total / 5, rel=1e-5)


# ------------------------------------------------------------------ e0


def first(curve, **rule) -> int | None:
    watch = irnet.CorrectionEpoch(**rule)
    return next((n for n, value in enumerate(curve, 1) if watch.update(value)), None)


@pytest.mark.parametrize(
    "peak, released, paper", [(60, 118, 70), (100, 157, 110), (120, 176, 130), (150, 206, 160)]
)
def test_e0_of_the_curve_with_known_answers(peak, released, paper):
    curve = [0.2 + 0.7 * min(e, peak) / peak - 0.0002 * max(0, e - peak) for e in range(1, 400)]
    assert first(curve, window=100, rule="smoothed") == released
    assert first(curve, window=100, rule="paper") == paper


def test_a_flat_curve_has_its_e0_as_soon_as_there_are_enough_epochs():
    for rule in (dict(window=100), dict(window=12), dict(window=10), dict(rule="paper")):
        earliest = 11 if "rule" in rule else max(11, rule["window"])  # ten differences need eleven values
        assert first([0.5] * 200, **dict(rule="smoothed") | rule) == earliest
    assert first([0.5] * 200, fixed=7) == 7


@pytest.mark.parametrize("window", [20, 40, 100])
def test_the_newest_value_does_not_count_in_the_released_rule(window):
    """A curve that fires at n does so whatever its value n is, and one that does not never does so for it."""
    g = torch.Generator().manual_seed(window)
    fired = []
    for slope in torch.linspace(-0.002, 0.002, 21).tolist():
        noise = (0.003 * torch.randn(window + 5, generator=g)).tolist()
        curve = [0.5 + slope * e + v for e, v in enumerate(noise)]
        n = first(curve, window=window, rule="smoothed") or len(curve)
        newest = (0.0, curve[n - 1], 1)
        found = {first([*curve[: n - 1], value], window=window, rule="smoothed") for value in newest}
        assert len(found) == 1, (slope, n)
        fired += found
    assert None in fired and len(set(fired)) > 1  # some rise to the end
