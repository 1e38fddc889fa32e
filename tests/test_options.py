"""The command line: wrong ones get one line that names what is wrong, exit 2, nothing written; presets; --help."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import train
from harness import options

BAD = [
    (["--q", "1"], "--q"),
    (["--q", "-0.1"], "--q"),
    (["--q", "nan"], "--q"),
    (["--eta", "1.0"], "--eta"),
    (["--eta", "-1"], "--eta"),
    (["--q", "0.9999999", "--eta", "0.3", "--limit-train", "50", "--batch-size", "8"], "--q"),
    (["--base", "foo"], "--base"),
    (["--base", "prodn"], "proden"),
    (["--dataset", "kmist"], "kmnist"),
    (["--dataset", "kmnist", "--data", "nowhere"], "digits"),
    (["--dataset", "absent.npz"], "absent.npz"),
    (["--epochs", "0"], "--epochs"),
    (["--epochs", "-3"], "--epochs"),
    (["--epochs", "many"], "--epochs"),
    (["--batch-size", "5000"], "--batch-size"),
    (["--batch-size", "1"], "--batch-size"),
    (["--limit-train", "40"], "--batch-size"),
    (["--lr", "0"], "--lr"),
    (["--tau", "2"], "--tau"),
    (["--e0", "soon"], "--e0"),
    (["--e0", "61"], "--e0"),
    (["--views", "x"], "--views"),
    (["--crop", "0"], "--crop"),
    (["--f", "prototype", "--base", "cc"], "--f"),
    (["--queue", "10"], "--queue"),
    (["--beta", "1"], "--beta"),
    (["--beta", "-1", "--base", "lwc"], "--beta"),
    (["--classifier-loss", "sce", "--base", "rc"], "--classifier-loss"),
    (["--classifier-loss", "sce", "--base", "pico+", "--no-irnet"], "--classifier-loss"),
    (["--proto-start", "3", "--base", "pico+", "--no-irnet"], "--proto-start"),
    (["--phi", "0.9", "1.2"], "--phi"),
    (["--phi", "0.9"], "--phi"),
    (["--key-momentum", "1"], "--key-momentum"),
    (["--prototype-momentum", "-0.5"], "--prototype-momentum"),
    (["--proto-start", "-1"], "--proto-start"),
    (["--weight-decay", "-1"], "--weight-decay"),
    (["--weight-decay", "inf"], "--weight-decay"),
    (["--flip", "1.5"], "--flip"),
    (["--window", "2"], "--window"),
    (["--limit-test", "0"], "--limit-test"),
    (["--image-size", "4"], "--image-size"),
    (["--seed", "-1"], "--seed"),
    (["--seed", "x"], "--seed"),
    (["--seed", "99999999999999999999"], "--seed"),
    (["--threads", "-2"], "--threads"),
    (["--save-every", "0"], "--save-every"),
    (["--transductive-every", "-1"], "--transductive-every"),
    (["--out", ""], "--out"),
    (["--resume", "--overwrite"], "--overwrite"),
    (["--resume", "--out", "nowhere"], "nowhere"),
    (["--arch", "resnet81"], "resnet18"),
    (["--val", "train"], "holdout"),
    (["--epoch", "5"], "--epochs"),
    (["--batchsize=5"], "--batch-size"),
    (["--eta", "0.3", "0.4"], "0.4"),
    (["--dataset", "."], "x_train"),
    (["--dataset", "digits.csv"], "digits"),
    (["--e0", "0"], "--e0"),
    (["--lr", "nan"], "--lr"),
    (["--lr", "1e300"], "--lr"),
    (["--weight-decay", "1e300"], "--weight-decay"),
    (["--beta", "1e300", "--base", "lwc"], "--beta"),
    (["--e0", "9" * 5000], "--e0"),
    (["--out", "x" * 300], "--out"),
    (["--out", "x" * 300, "--resume"], "--out"),
    (["--base", "pico+"], "--no-irnet"),
    (["--lr", "1e999"], "--lr"),
    (["--tau", "nan"], "--tau"),
    (["--tau", "automatic"], "--tau"),
    (["--irnet", "plus", "--no-irnet"], "--irnet plus"),
    (["--irnet", "votes+back", "--swap"], "--swap"),
    (["--irnet", "mix", "--base", "cc"], "--irnet mix"),
    (["--tau", "auto", "--val", "test"], "--tau auto"),
    (["--tau", "auto", "--preset", "released"], "--tau auto"),
    (["--resume"], "--resume"),
    (["--nonsense"], "--nonsense"),
    (["--device", "cuda"], "--device"),
]


@pytest.mark.parametrize(("argv", "named"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_gets_one_line_and_exit_2(argv, named, capfd):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a card")
    try:
        code = train.main(argv)
    except SystemExit as stop:
        code = stop.code
    err = capfd.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and named in err, err
    assert list(Path().iterdir()) == []  # nothing written


# ------------------------------------------------------------------ right ones


def test_plus_has_no_knob():
    plus = options.configure(["--irnet", "plus"])
    assert plus.tau_auto and plus.tau == 0.0
    for more in (["--tau", "0.1"], ["--val", "test"]):  # given; or nothing to estimate the rate by
        c = options.configure(["--irnet", "plus", *more])
        assert not c.tau_auto and c.tau == (0.1 if "--tau" in more else 0.004)
    assert not options.configure([]).tau_auto and not options.configure(["--irnet", "votes"]).tau_auto


def test_presets_are_the_released_values():
    c = options.configure(["--dataset", "kmnist", "--q", "0.5", "--eta", "0.3", "--base", "pico"])
    got = (c.arch, c.epochs, c.batch_size, c.lr, c.weight_decay, c.crop, c.proto_start, c.queue, c.key_momentum)
    assert got == ("resnet18", 1000, 128, 0.01, 1e-3, 0.2, 100, 8192, 0.999)
    assert c.tau == 0.008 and c.views == "w" and c.val == "holdout"
    for dataset, q, eta, tau in (
        ("cifar10", 0.1, 0.1, 0.020),
        ("cifar10", 0.3, 0.2, 0.010),
        ("cifar10", 0.5, 0.3, 0.008),
        ("cifar100", 0.01, 0.1, 0.004),
        ("cifar100", 0.05, 0.3, 0.002),
        ("kmnist", 0.3, 0.3, 0.010),
    ):
        c = options.configure(["--dataset", dataset, "--q", str(q), "--eta", str(eta)])
        assert c.tau == tau, (dataset, q, eta)
    assert options.configure(["--dataset", "cifar100"]).proto_start == 1
    assert options.configure([]).arch == "cnn"


def test_a_configuration_is_frozen_and_what_is_recorded_of_it_is_json():
    c = options.configure([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.lr = 1.0
    again = dataclasses.replace(c, out="elsewhere", resume=True, lr=0.5)
    assert again.lr == 0.5 and c.lr != 0.5
    kept, changed = options.recorded(c), options.recorded(again)
    assert json.loads(json.dumps(kept)) == kept
    assert [name for name in kept if kept[name] != changed[name]] == ["lr"]  # where it writes changes no result
    assert not {"out", "resume", "overwrite", "save_every", "data", "snapshots"} & set(kept)


def test_what_was_changed_from_the_preset():
    assert options.changed(options.configure([])) == {}
    argv = [
        "--dataset",
        "cifar10",
        "--base",
        "proden",
        "--arch",
        "cnn",
        "--q",
        "0.5",
        "--eta",
        "0.1",
        "--seed",
        "3",
    ]
    assert options.changed(options.configure(argv)) == {}
    more = ["--lr", "0.5", "--views", "ws", "--epochs", "7"]
    assert options.changed(options.configure([*argv, *more])) == dict(lr=0.5, views="ws", epochs=7)


def test_what_was_changed_where_the_defaults_are_worked_out():
    config = options.configure(["--base", "proden", "--tau", "auto"])
    assert options.changed(config) == dict(irnet="votes", tau="auto")
    Path("own").mkdir()
    config = options.configure(["--dataset", "own"], lambda path: True, lambda path: 60)
    assert config.arch == "mlp" and config.batch_size == 8
    assert options.changed(config, features=True) == {} and "counted" not in options.recorded(config)


@pytest.mark.parametrize("name", ["fashion/", "./fashion"])
def test_a_folder_named_like_a_dataset_is_ones_own(name):
    Path("fashion").mkdir()
    config = options.configure(["--dataset", name], lambda path: True, lambda path: 60)
    assert config.arch == "mlp" and config.batch_size == 8


def test_size_is_another_spelling_of_image_size():
    assert (
        options.configure(["--size", "16"]).image_size == options.configure(["--image-size", "16"]).image_size == 16
    )


def test_help_shows_every_option_and_the_presets(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for name in """--dataset --data --q --eta --base --no-irnet --tau --views --swap --e0 --val --arch --epochs
        --batch-size --lr --weight-decay --seed --device --limit-train --limit-test --out --resume --compile
        --amp""".split():
        assert name in out, name
    for name in options.OPTIONS:
        assert options.flag(name) in out, name
    assert "cifar100" in out and "8192" in out and "0.008" in out


def test_a_base_may_be_written_as_the_pages_print_it():
    assert options.configure(["--base", "PRODEN"]).base == "proden"


def test_a_word_without_its_option_is_said_to_be_one(capsys):
    with pytest.raises(SystemExit):
        options.configure(["kmnist"])
    assert "kmnist: not expected here" in capsys.readouterr().err
