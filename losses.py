"""The partial-label losses (torch only: copy this file alone).

First pure functions of tensors, each with its formula: CC, RC and PRODEN (one weighted cross entropy), LOG, LWC,
PiCO's contrastive loss, and the robust MAE, MSE, SCE, GCE. All compute in fp32 whatever the input and return
the mean over the batch. Then the six bases: what each one optimises, and when it updates its label weights.

Notation: z = logits [B, C], p = softmax(z), S = candidates bool [B, C], w = weights [B, C], C classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# ------------------------------------------------------------------ losses of partial-label methods


def _log_inside(logits: Tensor, candidates: Tensor) -> Tensor:
    """log sum_{j in S} p_j [B], in log space; 0 on an empty set, which has nothing to say."""
    logits = logits.float()
    empty = ~candidates.any(1, keepdim=True)
    inside = logits.masked_fill(~(candidates | empty), -math.inf)
    return inside.logsumexp(1) - logits.logsumexp(1)


def cc(logits: Tensor, candidates: Tensor) -> Tensor:
    """CC: -log sum_{j in S} p_j."""
    return -_log_inside(logits, candidates).mean()


def log(logits: Tensor, candidates: Tensor) -> Tensor:
    """LOG: -(C-1)/(C-|S|) log sum_{j in S} p_j; a full set (0 times infinity) counts 0."""
    outside = (~candidates).sum(1)  # C - |S|
    factor = (candidates.shape[1] - 1) / outside.clamp_min(1)
    return -(factor * (outside > 0) * _log_inside(logits, candidates)).mean()


def weighted_ce(logits: Tensor, weights: Tensor) -> Tensor:
    """RC and PRODEN (and PiCO's classifier): -sum_j w_j log p_j."""
    return -(weights * logits.float().log_softmax(1)).sum(1).mean()


def lwc(logits: Tensor, candidates: Tensor, weights: Tensor, beta: float = 1.0) -> Tensor:
    """LWC: -sum_{j in S} w_j log p_j - beta sum_{j not in S} w_j log(1 - p_j), both logs guarded by 1e-8."""
    p = logits.float().softmax(1)
    inside = weights * -(p + 1e-8).log()
    outside = weights * -(1 - p + 1e-8).log()
    return torch.where(candidates, inside, beta * outside).sum(1).mean()


def supcon(
    query: Tensor,
    key: Tensor,
    queue: Tensor,
    labels: Tensor,
    queue_labels: Tensor,
    temperature: float = 0.07,
) -> Tensor:
    """PiCO's contrastive loss: -1/|P(i)| sum_{j in P(i)} log( exp(q_i.k_j/T) / sum_{a != i} exp(q_i.k_a/T) ).

    The contrast set is [query; key; queue]; P(i) holds all of it with i's label but i itself. i's own key is
    always positive. query, key [B, d] and queue [Q, d] have unit length; a queue label of -1 matches nothing.
    """
    log_prob, itself = log_contrast(query, key, queue, temperature)
    positive = (labels[:, None] == torch.cat([labels, labels, queue_labels])) & ~itself
    return -((log_prob * positive).sum(1) / positive.sum(1)).mean()


def log_contrast(query: Tensor, key: Tensor, queue: Tensor, temperature: float = 0.07) -> tuple[Tensor, Tensor]:
    """log( exp(q_i.k_j/T) / sum_{a != i} exp(q_i.k_a/T) ) over j in [query; key; queue], 0 where j is i itself, and
    where that is: both [B, 2B+Q]."""
    contrast = torch.cat([query.float(), key.float(), queue.float()])  # [2B+Q, d]
    itself = torch.eye(len(query), len(contrast), dtype=torch.bool, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        similarity = (query.float() @ contrast.T / temperature).masked_fill(itself, -math.inf)
    return similarity.log_softmax(1).masked_fill(itself, 0.0), itself


# ------------------------------------------------------------------ noise-robust losses (paper, Section 4.2)
# The paper writes them on the unknown one-hot y. "average" is sum_j w_j loss(p, e_j); "soft_target" puts w in
# place of y, as the release does. The paper's leading minus signs of MAE and MSE are misprints.


def _soft(form: str) -> bool:
    if form not in ("average", "soft_target"):
        raise ValueError(f"form must be 'average' or 'soft_target', not {form!r}")
    return form == "soft_target"


def mae(logits: Tensor, weights: Tensor, form: str = "average") -> Tensor:
    """MAE: sum_j w_j |p - e_j|_1 = 2 (1 - w.p); soft target: |p - w|_1."""
    p = logits.float().softmax(1)
    if _soft(form):
        return (p - weights).abs().sum(1).mean()
    return 2 * (weights.sum(1) - (weights * p).sum(1)).mean()


def mse(logits: Tensor, weights: Tensor, form: str = "average") -> Tensor:
    """MSE: sum_j w_j |p - e_j|^2 = |p|^2 - 2 w.p + 1; soft target: |p - w|^2."""
    p = logits.float().softmax(1)
    if _soft(form):
        return (p - weights).square().sum(1).mean()
    total = weights.sum(1)  # 1
    return (total * p.square().sum(1) - 2 * (weights * p).sum(1) + total).mean()


def sce(logits: Tensor, weights: Tensor, alpha: float = 6.0, beta: float = 1.0, form: str = "average") -> Tensor:
    """SCE: alpha CCE + beta RCE with log 0 = log 1e-4, i.e. RCE = -log(1e-4) (1 - w.p).

    Soft target: both halves with w clamped to [1e-4, 1] and p to at least 1e-7.
    """
    if _soft(form):
        p, w = logits.float().softmax(1).clamp_min(1e-7), weights.clamp(1e-4, 1)
        return (-alpha * (w * p.log()).sum(1) - beta * (p * w.log()).sum(1)).mean()
    p = logits.float().softmax(1)
    rce = -math.log(1e-4) * (weights.sum(1) - (weights * p).sum(1))
    return alpha * weighted_ce(logits, weights) + beta * rce.mean()


def gce(logits: Tensor, weights: Tensor, power: float = 0.7) -> Tensor:
    """GCE: sum_j w_j (1 - p_j^power) / power; both forms agree. p >= 1e-7 bounds the gradient."""
    p = logits.float().softmax(1).clamp_min(1e-7)
    return (weights * (1 - p.pow(power)) / power).sum(1).mean()


# ------------------------------------------------------------------ label weights


def uniform_weights(candidates: Tensor) -> Tensor:
    """w = S / |S|, the start of RC, PRODEN and PiCO."""
    return candidates / candidates.sum(1, keepdim=True).clamp_min(1)


def renormalised(probs: Tensor, candidates: Tensor, old: Tensor) -> Tensor:
    """RC, PRODEN: w = p S / sum(p S); the old weights where that sum is 0."""
    new = probs * candidates
    total = new.sum(1, keepdim=True)
    return torch.where(total > 0, new / total, old)


def lwc_weights(probs: Tensor, candidates: Tensor) -> Tensor:
    """LWC: two blocks, S and its complement, each p over its own sum (plus C 1e-8)."""
    inside, outside = probs * candidates, probs * ~candidates
    guard = 1e-8 * probs.shape[1]
    return inside / (inside.sum(1, keepdim=True) + guard) + outside / (outside.sum(1, keepdim=True) + guard)


# ------------------------------------------------------------------ the six bases
# A base sees the whole training set by index: candidates bool [N, C] is shared with IRNet, which edits it in
# place. It needs a network with network(x) -> logits and network.peek(x) -> logits without gradients or
# running statistics; PiCO's (models.PiCO) has embed, keys, enqueue and prototypes too.


class Base:
    """A base without label weights. loss() returns the loss and f(x), the probabilities that Eq. 4 reads."""

    views = "w"  # the views that loss() wants: w weak, s strong
    mixes = False  # whether it mixes the images of a batch
    starts = 1  # the first epoch in which it is itself
    weights: Tensor | None = None
    kept: tuple[str, ...] = ("weights",)  # what a checkpoint holds

    def __init__(self, candidates: Tensor):
        self.candidates = candidates

    def loss(self, network, views: list[Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
        logits = network(views[0])
        return self.objective(logits, index), logits.detach().float().softmax(1)

    def objective(self, logits: Tensor, index: Tensor) -> Tensor:
        raise NotImplementedError

    def probabilities(self, network, view: Tensor) -> Tensor:
        """f(z): what Eq. 4 reads, of images that are not trained on."""
        return network.peek(view).float().softmax(1)

    def look(self, network, view: Tensor, recorded: bool = False) -> Tensor:
        """f(z) of an extra view, for Eqs. 11 and 12, as loss() has seen f(x). recorded: batch normalisation by its
        recorded statistics, for views of a part of the batch."""
        return network.peek(view, recorded).float().softmax(1)

    def after_step(self, network, views: list[Tensor], index: Tensor, probs: Tensor) -> None:
        """Updates the label weights; probs is f(x) from before the step."""

    def begin_epoch(self, epoch: int, look) -> None:
        """Before an epoch; look(function) -> function(network, x) of all plain training images x, in batches."""

    def pool(self, index: Tensor) -> Tensor:
        """Those of the samples that the epoch trains on."""
        return index

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """What changes with the epochs."""

    def state_dict(self) -> dict:
        return {name: getattr(self, name) for name in self.kept if getattr(self, name) is not None}

    def load_state_dict(self, state: dict) -> None:
        for name, value in self.state_dict().items():
            if torch.is_tensor(value):
                value.copy_(state[name])  # in place: others hold the same tensors
            else:
                setattr(self, name, state[name])


class CC(Base):
    """Classifier-consistent (Feng et al., 2020b)."""

    def objective(self, logits, index):
        return cc(logits, self.candidates[index])


class LOG(Base):
    """The upper bound of complementary-label learning (Feng et al., 2020a). as_released: as CC."""

    def __init__(self, candidates, as_released: bool = False):
        super().__init__(candidates)
        self.function = cc if as_released else log

    def objective(self, logits, index):
        return self.function(logits, self.candidates[index])


class PRODEN(Base):
    """Progressive identification (Lv et al., 2020): w from the forward pass before the step."""

    def __init__(self, candidates):
        super().__init__(candidates)
        self.weights = uniform_weights(candidates)

    def objective(self, logits, index):
        return weighted_ce(logits, self.weights[index])

    def after_step(self, network, views, index, probs):
        self.weights[index] = renormalised(probs, self.candidates[index], self.weights[index])


class RC(PRODEN):
    """Risk-consistent (Feng et al., 2020b): PRODEN's loss, w from a second forward pass after the step.
    as_released: from the one before it, as PRODEN."""

    def __init__(self, candidates, as_released: bool = False):
        super().__init__(candidates)
        self.as_released = as_released

    def after_step(self, network, views, index, probs):
        probs = probs if self.as_released else self.probabilities(network, views[0])
        super().after_step(network, views, index, probs)


class LWC(Base):
    """Leveraged weighted loss (Wen et al., 2021): two blocks of w, from a second forward pass after the step."""

    def __init__(self, candidates, beta: float = 1.0):
        super().__init__(candidates)
        self.beta = beta
        self.weights = torch.full(candidates.shape, 1 / candidates.shape[1], device=candidates.device)

    def objective(self, logits, index):
        return lwc(logits, self.candidates[index], self.weights[index], self.beta)

    def after_step(self, network, views, index, probs):
        self.weights[index] = lwc_weights(self.probabilities(network, views[0]), self.candidates[index])


class PiCO(Base):
    """Contrastive disambiguation (Wang et al., 2022), in the order of the release."""

    views = "ws"
    kept = ("weights", "epoch", "phi")

    def __init__(
        self,
        candidates,
        proto_start: int = 1,
        classifier_loss: str = "ce",
        contrast: float = 0.5,
        phi: tuple[float, float] = (0.95, 0.8),
        f: str = "prototype",
    ):
        super().__init__(candidates)
        self.weights = uniform_weights(candidates)
        self.proto_start, self.contrast, self.f = proto_start, contrast, f
        self.starts = proto_start
        self.newest = False  # whether the extra views see the prototypes that x has moved, as in the release
        self.seen: Tensor | None = None  # the prototypes that f(x) has seen
        self.classifier_loss = {"ce": weighted_ce, "sce": self._sce}[classifier_loss]
        self.epoch, self.phi, self.phi_range = 1, 0.99, phi

    @staticmethod
    def _sce(logits, weights):
        return sce(logits, weights, 6.0, 1.0, form="soft_target")  # the release's classifier loss with IRNet

    def best(self, probs: Tensor, candidates: Tensor) -> Tensor:
        """argmax_{j in S} f_j."""
        return probs.masked_fill(~candidates, -math.inf).argmax(1)

    def prototype_probabilities(self, network, q: Tensor, prototypes: Tensor) -> Tensor:
        return network.prototype_probabilities(q, prototypes)

    def loss(self, network, views, index):
        candidates = self.candidates[index]
        logits, q = network.embed(views[0])  # [B, C], [B, d]
        with torch.no_grad():
            p, self.seen = logits.float().softmax(1), network.prototypes
            c = self.prototype_probabilities(network, q, self.seen)  # [B, C]
            pseudo = self.best(p, candidates)
            network.update_prototypes(q, pseudo)
            k = network.keys(views[1])  # after moving the key encoder
            if self.epoch >= self.proto_start:
                # w <- phi w + (1 - phi) onehot(argmax_{j in S} c_j), before the loss
                target = F.one_hot(self.best(c, candidates), c.shape[1])
                self.weights[index] = torch.lerp(target.float(), self.weights[index], self.phi)
        loss = self.classifier_loss(logits, self.weights[index]) + self.contrast * supcon(
            q, k, network.queue, pseudo, network.queue_labels
        )
        network.enqueue(k, pseudo)
        return loss, c if self.f == "prototype" else p

    def probabilities(self, network, view):
        return self._f(network, network.peek_embedding(view), network.prototypes)

    def look(self, network, view, recorded=False):
        prototypes = network.prototypes if self.newest else self.seen
        return self._f(network, network.peek_embedding(view, recorded), prototypes)

    def _f(self, network, seen: tuple[Tensor, Tensor], prototypes: Tensor) -> Tensor:
        logits, q = seen
        if self.f == "classifier":
            return logits.float().softmax(1)
        return self.prototype_probabilities(network, q, prototypes)

    def end_epoch(self, epoch, epochs):
        start, end = self.phi_range
        self.epoch, self.phi = epoch + 1, start + (end - start) * epoch / epochs


BASES = {"cc": CC, "rc": RC, "log": LOG, "proden": PRODEN, "lwc": LWC, "pico": PiCO}
