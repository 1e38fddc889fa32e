"""Caution with one's own data: how sure a correction must be, given how noisy the data may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import irnet


@torch.no_grad()
def safe_tau(logits: Tensor, f: Tensor, candidates: Tensor, eta: float, temperature: float, tau: float) -> float:
    """The smallest tau_epsilon, from `tau` on, with which at least half of the labels moved in would be right; inf
    where there is none. Real sets may have so little noise that most of what looks wrong is only difficult.

    From the held-out part: its logits and f of Eq. 4 [M, C], its sets, and the noise rate and temperature estimated
    on it. By the likelihood of irnet.estimate_noise, a label j outside S is the true one with probability
        eta |S|/(C-|S|) f_j / ((1 - eta) sum_{i in S} f_i + eta |S|/(C-|S|) sum_{i not in S} f_i)
    """
    if math.isnan(temperature):  # nothing is known of the noise
        return tau
    p, size = (logits / temperature).softmax(1), candidates.sum(1)
    noisy = eta * size / (candidates.shape[1] - size).clamp_min(1)
    total = (1 - eta) * (p * candidates).sum(1) + noisy * (p * ~candidates).sum(1)
    _, label = irnet.detect([f], candidates, tau)
    right = noisy * p.gather(1, label[:, None])[:, 0] / total.clamp_min(1e-12)
    margin, order = irnet.margin(f, candidates).sort()  # the surest corrections first
    mean = right[order].cumsum(0) / torch.arange(1, len(order) + 1, device=right.device)
    good = (mean >= 0.5) & (margin <= -tau) & margin.isfinite()
    if not good.any():
        return math.inf
    last = int(good.int().cumsum(0).argmax())  # with all those before it, still half of them right
    return tau if last + 1 == len(margin) or margin[last + 1] > -tau else -float(margin[last])
