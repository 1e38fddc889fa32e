"""Table 6: what a training sample costs by the number of extra views. ResNet-18, PiCO, 32x32, 10 classes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

import models


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


def lines(paper: dict) -> Iterator[str]:
    net = network()
    million = models.parameter_count(net) / 1e6
    yield "| extra views | MACs, G (paper) | parameters, M (paper) | ms a sample on its GPU (paper) | GB (paper) |"
    yield "| --- " * 5 + "|"
    for views, theirs in paper.items():
        own = f"{macs(net, int(views)):.2f} ({theirs['macs']}) | {million:.2f} ({theirs['parameters']})"
        yield (f"| {views} | {own} | not measured ({theirs['ms']}) | not measured ({theirs['gb']}) |")
