"""bf16 on CPUs: who is asked whether there is any, what is computed in it, and a run that keeps it."""

import io
import json
from pathlib import Path

import pytest
import torch

import data
import irnet
import train
from conftest import SHORT, asks_the_processor, prepared, same_run, stopping_at
from crowd.model import Model
from harness import ranks

CPU = torch.device("cpu")


def forget(monkeypatch, *names):
    for name in names:
        monkeypatch.delattr(torch.cpu, name, raising=False)


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16", None])
def test_torch_is_asked_first(monkeypatch, name):
    found = dict(avx512_bf16=False, amx_bf16=False, avx512_f=True) | ({name: True} if name else {})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert asks_the_processor() is bool(name)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict(architecture="arm64"))  # knows no such words
    assert asks_the_processor() is False


@pytest.mark.parametrize("avx, amx", [(True, False), (False, True), (False, False)])
def test_an_older_torch_is_asked_by_other_names(monkeypatch, avx, amx):
    forget(monkeypatch, "get_capabilities")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    assert asks_the_processor() is (avx or amx)


@pytest.mark.parametrize("flags, has", [("avx512f avx512_bf16", True), ("amx_bf16", True), ("avx2 avx512f", False)])
def test_the_oldest_torch_leaves_it_to_linux(monkeypatch, flags, has):
    forget(monkeypatch, "get_capabilities", "_is_avx512_bf16_supported")
    text = f"processor\t: 0\nmodel name\t: avx512_bf16\nflags\t\t: fpu {flags} sse\n"
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(text) if path == "/proc/cpuinfo" else 1 / 0)
    assert asks_the_processor() is has


def test_where_nobody_knows_it_is_off(monkeypatch):
    def nothing(path):
        raise FileNotFoundError(path)

    forget(monkeypatch, "get_capabilities", "_is_avx512_bf16_supported")
    monkeypatch.setattr("builtins.open", nothing)
    assert asks_the_processor() is False


@pytest.mark.parametrize("has", [True, False])
def test_auto_follows_the_processor_on_a_cpu_alone(monkeypatch, has):
    monkeypatch.setattr(ranks, "processor_has_bf16", lambda: has)
    assert ranks.Precision("auto", CPU).name == ("bf16" if has else "off")
    assert ranks.Precision("auto", torch.device("mps")).name == "off"
    assert [ranks.Precision("auto", CPU, size).name for size in (1, 8, 27)] == ["off"] * 3  # too little to gain
    assert ranks.Precision("off", CPU).type is None and ranks.Precision("bf16", CPU).name == "bf16"


@pytest.mark.parametrize("base", ["proden", "pico"])
def test_the_networks_alone_are_in_bf16(monkeypatch, base):
    """Layers answer in bf16, in training, under the extra views and in evaluation; whatever follows is fp32."""
    monkeypatch.setattr(ranks, "processor_has_bf16", lambda: True)
    _, learner, samples = prepared([*SHORT, "--base", base, "--image-size", "28"])
    layers, modes, original = set(), set(), irnet.margin

    def layer(module, given, answer):
        layers.add(answer.dtype), modes.add((module.training, torch.is_grad_enabled()))

    for module in learner.network.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(layer)
    margins = []
    monkeypatch.setattr(irnet, "margin", lambda p, s: margins.append(p.dtype) or original(p, s))
    index, x = next(samples.batches(samples.pool, 32))
    loss, tau, _ = train.train_step(learner, index, x, samples.labels[index], correcting=True)
    seen = [loss, tau, learner.base.weights, *learner.network.state_dict().values()]
    seen += [state["momentum_buffer"] for state in learner.optimizer.state.values()]
    seen += [*train.probabilities(learner, samples.test_images), train.logits_of(learner, samples.test_images)]
    floats = {t.dtype for t in seen if torch.is_tensor(t) and t.is_floating_point()}
    assert layers == {torch.bfloat16} and floats == {torch.float32} == set(margins)
    assert {mode for mode, _ in modes} == {True, False} == {grad for _, grad in modes}


def test_a_run_is_resumed_in_the_precision_that_it_began_with(monkeypatch, capsys):
    """Begun where the processor has bf16, resumed where it has none: the undisturbed run to the last bit."""
    argv = [*SHORT, *"--base proden --epochs 4 --image-size 28 --arch narrow".split()]
    monkeypatch.setattr(ranks, "processor_has_bf16", lambda: True)
    assert train.main([*argv, "--out", "whole"]) == 0 and ", bf16" in capsys.readouterr().out
    stopping_at(monkeypatch, 14)
    assert train.main([*argv, "--out", "parts"]) == 143
    assert torch.load("parts/checkpoint.pt", weights_only=True)["precision"]["name"] == "bf16"
    monkeypatch.setattr(ranks, "processor_has_bf16", lambda: False)
    assert train.main([*argv, "--out", "parts", "--resume"]) == 0 and same_run("whole", "parts")
    assert train.main([*argv, "--out", "fp32"]) == 0 and not same_run("whole", "fp32")


def test_evaluation_follows():
    """The same network: other logits, by no more than bf16's rounding, 2^-9 of the largest a layer."""
    _, learner, samples = prepared([*SHORT, "--base", "cc"])
    full = train.logits_of(learner, samples.test_images)
    learner.precision = ranks.Precision("bf16", CPU)
    half = train.logits_of(learner, samples.test_images)
    off = (half - full).abs().max() / full.abs().max()
    assert 0 < off < 5 * 2**-8


def test_predicting_follows_and_off_stays_off(monkeypatch):
    """A finished run's classifier: its layers in bf16 where the processor has it, its probabilities in fp32."""
    x, found = data.load("digits", size=28, limit_test=100).test_images, {}
    for amp, has in (("auto", True), ("auto", False), ("off", True)):
        monkeypatch.setattr(ranks, "processor_has_bf16", lambda has=has: has)
        argv = [*SHORT, *f"--base cc --epochs 2 --arch narrow --image-size 28 --out {amp} --amp".split(), amp]
        if not found:
            assert train.main(argv) == 0  # one run, read by three
        config = json.loads(Path("auto/config.json").read_text())
        Path("auto/config.json").write_text(json.dumps(config | dict(amp=amp)))
        model, layers = Model(Path("auto")), set()
        for module in model.network.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.register_forward_hook(lambda m, given, answer, layers=layers: layers.add(answer.dtype))
        found[amp, has] = model(x)
        assert layers == {torch.bfloat16 if (amp, has) == ("auto", True) else torch.float32}
    half, full, off = found.values()
    assert half.dtype == torch.float32 and torch.equal(full, off)
    assert 0 < (half - full).abs().max() < 0.05
