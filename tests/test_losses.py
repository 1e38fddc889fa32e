"""Losses and the six bases against loops, worked numbers, and the released codes' answers (golden.json)."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import losses
import models
from test_irnet import random_case
from test_models import tiny_pico

GOLDEN = Path(__file__).with_name("golden.json")
# The worked vector: p = (.5, .3, .2), S = {0, 1}, w = (.5, .5, 0)
P3 = torch.tensor([[0.5, 0.3, 0.2]])
Z3, S3, W3 = P3.log(), torch.tensor([[True, True, False]]), torch.tensor([[0.5, 0.5, 0.0]])


# ------------------------------------------------------------------ losses


def test_losses_on_the_worked_vector():
    assert losses.cc(Z3, S3).item() == pytest.approx(0.223144, abs=1e-6)
    assert losses.log(Z3, S3).item() == pytest.approx(0.446287, abs=1e-6)
    assert losses.weighted_ce(Z3, W3).item() == pytest.approx(0.948560, abs=1e-6)
    assert torch.allclose(losses.renormalised(P3, S3, W3), torch.tensor([[0.625, 0.375, 0]]))
    start = torch.full((1, 3), 1 / 3)
    assert losses.lwc(Z3, S3, start, 0).item() == pytest.approx(0.632373, abs=1e-6)
    assert losses.lwc(Z3, S3, start, 1).item() == pytest.approx(0.632373 + 0.074381, abs=1e-6)
    assert losses.lwc(Z3, S3, start, 2).item() == pytest.approx(0.632373 + 2 * 0.074381, abs=1e-6)
    assert losses.mae(Z3, W3).item() == pytest.approx(1.2)
    assert losses.mae(Z3, W3, "soft_target").item() == pytest.approx(0.4)
    assert losses.mse(Z3, W3).item() == pytest.approx(0.58)
    assert losses.mse(Z3, W3, "soft_target").item() == pytest.approx(0.08)
    assert losses.gce(Z3, W3).item() == pytest.approx(0.681369, abs=1e-6)
    assert losses.sce(Z3, W3, form="soft_target").item() == pytest.approx(8.088911, abs=1e-5)
    assert losses.sce(Z3, W3, 0, 1).item() == pytest.approx(5.526204, abs=1e-5)
    assert losses.sce(Z3, W3, 6, 1).item() == pytest.approx(6 * 0.948560 + 5.526204, abs=1e-5)
    with pytest.raises(ValueError, match="form"):
        losses.mae(Z3, W3, "other")


@pytest.mark.parametrize("seed", range(3))
def test_losses_against_loops(seed):
    probs, candidates, _ = random_case(seed, batch=9)
    candidates[:, 0] = True  # no empty set here
    w = torch.rand(9, 6) * candidates
    w = w / w.sum(1, keepdim=True)
    c = 6
    want = dict.fromkeys(("cc", "log", "ce", "lwc", "mae", "mse", "gce"), 0.0)
    for f, s, v in zip(probs.tolist(), candidates.tolist(), w.tolist(), strict=True):
        inside = sum(f[j] for j in range(c) if s[j])
        want["cc"] -= math.log(inside) / 9
        want["log"] -= (c - 1) / (c - sum(s)) * math.log(inside) / 9 if not all(s) else 0
        want["ce"] -= sum(v[j] * math.log(f[j]) for j in range(c)) / 9
        for j in range(c):
            want["lwc"] -= 0.1 * (j + 1) * (math.log(f[j]) if s[j] else 2 * math.log(1 - f[j])) / 9
            one_hot = [float(k == j) for k in range(c)]
            want["mae"] += v[j] * sum(abs(f[k] - one_hot[k]) for k in range(c)) / 9
            want["mse"] += v[j] * sum((f[k] - one_hot[k]) ** 2 for k in range(c)) / 9
            want["gce"] += v[j] * (1 - f[j] ** 0.7) / 0.7 / 9
    z = probs.log()
    steps = torch.arange(1, 7).mul(0.1).expand(9, 6)
    got = dict(
        cc=losses.cc(z, candidates), log=losses.log(z, candidates), ce=losses.weighted_ce(z, w),
        lwc=losses.lwc(z, candidates, steps, 2), mae=losses.mae(z, w), mse=losses.mse(z, w), gce=losses.gce(z, w),
    )  # fmt: skip
    assert {k: v.item() for k, v in got.items()} == pytest.approx(want, rel=1e-4)


def test_losses_equal_the_released_codes():
    g = json.loads(GOLDEN.read_text())
    z, s, w, lw = (torch.tensor(g[k]) for k in ("logits", "candidates", "weights", "lwc_weights"))
    s, p = s.bool(), z.softmax(1)
    got = {
        "cc": losses.cc(z, s), "rc_proden": losses.weighted_ce(z, w), "log": losses.log(z, s),
        "lwc_beta1": losses.lwc(z, s, lw, 1), "lwc_beta2": losses.lwc(z, s, lw, 2),
        "mae_soft_target": losses.mae(z, w, "soft_target"), "mse_soft_target": losses.mse(z, w, "soft_target"),
        "sce_soft_target": losses.sce(z, w, 6, 1, "soft_target"), "gce_soft_target": losses.gce(z, w),
        "mae_average": losses.mae(z, w), "mse_average": losses.mse(z, w), "gce_average": losses.gce(z, w),
    }  # fmt: skip
    assert {k: v.item() for k, v in got.items()} == pytest.approx({k: g[k] for k in got}, rel=1e-5)
    assert torch.allclose(losses.renormalised(p, s, w), torch.tensor(g["rc_proden_new_weights"]), atol=1e-6)
    assert torch.allclose(losses.lwc_weights(p, s), torch.tensor(g["lwc_new_weights"]), atol=1e-6)
    c = {k: torch.tensor(v) for k, v in g["supcon"].items()}
    loss = losses.supcon(c["query"], c["key"], c["queue"], c["labels"], c["queue_labels"], 0.07)
    assert loss.item() == pytest.approx(g["supcon"]["loss"], rel=1e-5)


EXTREME = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0], [90.0, -90.0, -80.0]])
SETS = torch.tensor([[True, True, True], [True, False, False], [False, False, False], [False, True, True]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["cc", "log", "weighted_ce", "lwc", "mae", "mse", "sce", "gce"])
def test_losses_are_finite_at_the_edges(name, dtype):
    """Probabilities 0 and 1, a full set, an empty one, half precision; gradients too."""
    z = EXTREME.clone().to(dtype).requires_grad_()
    w = losses.uniform_weights(SETS)
    extra = {"cc": (SETS,), "log": (SETS,), "lwc": (SETS, torch.full((4, 3), 1 / 3))}.get(name, (w,))
    loss = getattr(losses, name)(z, *extra)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite() and z.grad.isfinite().all()
    one_class = getattr(losses, name)(torch.zeros(2, 1), *(e[:2, :1] for e in extra))
    assert one_class.isfinite()


def test_log_counts_a_full_set_zero_and_is_not_cc():
    full = torch.ones(1, 3, dtype=torch.bool)
    assert losses.log(Z3, full).item() == 0
    assert losses.log(Z3, S3).item() == pytest.approx(2 * losses.cc(Z3, S3).item())


def test_half_precision_inputs_are_computed_in_full():
    z = torch.randn(64, 10).bfloat16()
    s = torch.rand(64, 10) < 0.5
    assert losses.cc(z, s).item() == losses.cc(z.float(), s).item()
    q = F.normalize(torch.randn(4, 8), dim=1).bfloat16()
    y = torch.tensor([0, 1, 0, 1])
    got = losses.supcon(q, q, q, y, y)
    assert got.dtype == torch.float32 and got.item() == losses.supcon(q.float(), q.float(), q.float(), y, y).item()


def test_supcon_against_a_loop():
    g = torch.Generator().manual_seed(0)
    q, k, queue = (F.normalize(torch.randn(n, 5, generator=g), dim=1) for n in (4, 4, 7))
    y, queue_y = torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 1, -1, 2, -1, 1])
    everything, labels = torch.cat([q, k, queue]).tolist(), torch.cat([y, y, queue_y]).tolist()
    want = 0.0
    for i in range(4):
        e = [math.exp(np.dot(everything[i], other) / 0.07) for other in everything]
        positive = [a for a in range(len(e)) if labels[a] == labels[i] and a != i]
        assert 4 + i in positive  # its own key
        want -= sum(math.log(e[a] / (sum(e) - e[i])) for a in positive) / len(positive) / 4
    assert losses.supcon(q, k, queue, y, queue_y).item() == pytest.approx(want, rel=1e-5)


# ------------------------------------------------------------------ the six bases


class Lookup(nn.Module):
    """A network whose logits are its parameters: row i for image i. Knows how often it was asked."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.peeks = nn.Parameter(logits.clone()), 0

    def forward(self, index):
        return self.logits[index]

    def peek(self, index):
        self.peeks += 1
        return self.logits[index].detach()


@pytest.mark.parametrize("name", ["cc", "log", "rc", "proden", "lwc"])
def test_bases_loss_and_the_time_of_their_weights(name):
    """RC and LWC look again after the step, PRODEN does not, CC and LOG keep no weights: the six are six."""
    torch.manual_seed(0)
    z, s = torch.randn(5, 4), torch.rand(5, 4) < 0.5
    s[:, 0] = True
    net, base = Lookup(z), losses.BASES[name](s)
    index = torch.arange(5)
    start = {"lwc": torch.full((5, 4), 0.25)}.get(name, s / s.sum(1, keepdim=True))
    loss, f = base.loss(net, [index], index)
    want = {
        "cc": lambda: losses.cc(z, s),
        "log": lambda: losses.log(z, s),
        "lwc": lambda: losses.lwc(z, s, start, 1.0),
    }.get(name, lambda: losses.weighted_ce(z, start))()
    assert loss.item() == pytest.approx(want.item()) and torch.allclose(f, z.softmax(1))
    loss.backward()
    with torch.no_grad():
        net.logits -= 3 * net.logits.grad  # the step
    base.after_step(net, [index], index, f)
    now = net.logits.detach().softmax(1)
    weights = {
        "cc": None,
        "log": None,
        "proden": losses.renormalised(z.softmax(1), s, start),
        "rc": losses.renormalised(now, s, start),
        "lwc": losses.lwc_weights(now, s),
    }[name]
    assert net.peeks == (name in ("rc", "lwc"))
    assert base.weights is None if weights is None else torch.allclose(base.weights, weights)


def test_renormalised_keeps_the_old_weights_where_nothing_is_left():
    w = torch.tensor([[0.5, 0.5, 0.0]])
    assert torch.equal(losses.renormalised(torch.tensor([[0.0, 0.0, 1.0]]), S3, w), w)


@pytest.mark.parametrize("f", ["prototype", "classifier"])
def test_pico_step_against_the_order_of_the_release(f):
    torch.manual_seed(0)
    net, s = tiny_pico(), torch.rand(10, 4) < 0.5
    s[:, 0] = True
    net.prototypes = F.normalize(torch.randn(4, 128), dim=1)
    base = losses.PiCO(s, f=f)
    x, z = torch.rand(6, 1, 8, 8), torch.rand(6, 1, 8, 8)
    index = torch.tensor([7, 2, 9, 0, 4, 5])
    old, queue = net.prototypes.clone(), net.queue.clone()
    with torch.no_grad(), models.running_statistics_frozen(net):
        logits, q = net.query.embed(x)
        k = net.key.embed(z)[1]  # the key encoder is still a copy
    p, c = logits.softmax(1), (q @ old.T).softmax(1)
    pseudo = torch.tensor(
        [max(range(4), key=lambda j: p[i, j] if s[n, j] else -1) for i, n in enumerate(index.tolist())]
    )
    w = s[index] / s[index].sum(1, keepdim=True)
    best = [max(range(4), key=lambda j: c[i, j] if s[n, j] else -1) for i, n in enumerate(index.tolist())]
    w = 0.99 * w + 0.01 * torch.eye(4)[best]
    want = losses.weighted_ce(logits, w) + 0.5 * losses.supcon(q, k, queue, pseudo, torch.full((24,), -1))
    extra = base.probabilities(net, z)  # of an extra view: the same snapshot of the prototypes
    with torch.no_grad(), models.running_statistics_frozen(net):
        logits_z, q_z = net.query.embed(z)
    assert torch.allclose(extra, ((q_z @ old.T) if f == "prototype" else logits_z).softmax(1), atol=1e-6)
    loss, got = base.loss(net, [x, z], index)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert torch.allclose(got, c if f == "prototype" else p, atol=1e-6)
    assert torch.allclose(base.weights[index], w)  # before the loss
    assert torch.allclose(net.queue[:6], k, atol=1e-6) and torch.equal(net.queue_labels[:6], pseudo)
    assert not torch.allclose(net.prototypes, old)


def test_pico_schedule():
    base = losses.PiCO(torch.ones(4, 4, dtype=torch.bool), proto_start=3)
    assert base.phi == 0.99 and base.epoch == 1
    base.end_epoch(1, 10)
    assert base.phi == pytest.approx(0.95 - 0.15 / 10) and base.epoch == 2
    net, x, index = tiny_pico(), torch.rand(4, 1, 8, 8), torch.arange(4)
    base.loss(net, [x, x], index)
    assert torch.equal(base.weights, torch.full((4, 4), 0.25))  # before proto_start nothing moves
    base.end_epoch(2, 10)
    base.loss(net, [x, x], index)
    assert not torch.equal(base.weights, torch.full((4, 4), 0.25))
