"""Table 6: what a training sample costs by the number of extra views. ResNet-18, PiCO, 32x32, 10 classes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

import data
import models
import train
from harness.options import configure


def network() -> models.PiCO:
    return models.build("resnet18", 3, 32, 10, (0.5,) * 3, (0.5,) * 3, pico=dict(queue_size=8192))


def macs(net: models.PiCO, extra_views: int) -> float:
    """Multiply-accumulates of the forward passes of one sample (query, key, extra views), in 10^9."""
    x = torch.zeros(1, 3, 32, 32)
    net.eval()  # one image has no batch statistics; the passes are the same
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.embed(x)
        net.key.embed(x)
        for _ in range(extra_views):
            net.peek_embedding(x)
    return counter.get_total_flops() / 2 / 1e9


def cost(extra_views: int, batch: int = 128) -> tuple[str, float, float | None]:
    """A whole step after e0 on this machine: (device, ms a sample, GB at the most; None where nobody counts)."""
    images = torch.randint(256, (2 * batch, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(2 * batch) % 10
    dataset = data.Dataset("random", images, labels, images[:1], labels[:1], 10, (0.5,) * 3, (0.5,) * 3)
    argv = ["--dataset", "cifar10", "--batch-size", str(batch), "--views", "w" * extra_views or "none"]
    learner, samples = train.prepare(configure(argv), dataset)
    index, cuda = samples.pool[:batch], learner.device.type == "cuda"
    x, y = samples.images[index], samples.labels[index]
    finish = torch.cuda.synchronize if cuda else lambda: None
    times = []
    for _ in range(3):
        finish()
        began = time.perf_counter()
        train.train_step(learner, index, x, y, True)
        finish()
        times.append((time.perf_counter() - began) / batch * 1000)
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return learner.device.type, min(times[1:]), memory


def lines(paper: dict) -> Iterator[str]:
    net = network()
    million = models.parameter_count(net) / 1e6
    yield "In brackets the paper's, on its card.\n"
    yield "| extra views | MACs, G | parameters, M | ms a sample | GB |"
    yield "| --- " * 5 + "|"
    for views, theirs in paper.items():
        device, ms, memory = cost(int(views))
        gb = "not counted" if memory is None else f"{memory:.2f}"
        counted = f"{macs(net, int(views)):.2f} ({theirs['macs']}) | {million:.2f} ({theirs['parameters']})"
        yield f"| {views} | {counted} | {ms:.2f} on {device} ({theirs['ms']}) | {gb} ({theirs['gb']}) |"
