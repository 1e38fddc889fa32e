"""IRNet, the paper's contribution and nothing else (torch only: copy this file alone).

Noisy sample detection (Eqs. 4, 10-12), label correction, the correction epoch e0 (Algorithm 1), the
diagnostics of Figs. 2, 3 and 5 (Eqs. 5-9), the bounds of Theorems 1 and 2, and `IRNet`, the plug-in. Beyond the
paper: `estimate_noise`, the noise rate of one's data without a true label.

Notation: f = probs [B, C], S = candidates bool [B, C], y = labels [B] (hidden truth, for reporting only).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INF = float("inf")


# ------------------------------------------------------------------ noisy sample detection, label correction


def margin(probs: Tensor, candidates: Tensor) -> Tensor:
    """Eq. 4: tau [B]; +inf on a full set, -inf on an empty one."""
    # Eq. 4: tau = max_{j in S} f_j(x) - max_{j not in S} f_j(x)
    probs = probs.float()  # tau lives near 0.002: half precision would round it away
    inside = probs.masked_fill(~candidates, -INF).amax(1)  # [B]
    outside = probs.masked_fill(candidates, -INF).amax(1)  # [B]
    return inside - outside


def detect(views: Sequence[Tensor], candidates: Tensor, tau: float, strict: bool = False) -> tuple[Tensor, Tensor]:
    """Eqs. 10-12 over views = [f(x), f(z_1), ..., f(z_K)] -> (flagged bool [B], label [B]).

    `label` is the most probable non-candidate label of x; it means nothing where S is full, and a full set
    (tau = +inf) is never flagged. An empty set (tau = -inf) asks only for the agreement of Eq. 12.
    """
    f = torch.stack([view.float() for view in views])  # [1+K, B, C]
    inside = f.masked_fill(~candidates, -INF).amax(2)  # [1+K, B]
    outside, best = f.masked_fill(candidates, -INF).max(2)  # [1+K, B], argmax_{j not in S} f_j
    margins = inside - outside
    # Eq. 10 for x, Eq. 11 for every z in A(x); strict as the release has them
    confident = (margins < -tau if strict else margins <= -tau).all(0)
    agreed = (best == best[0]).all(0)  # Eq. 12: the same non-candidate label everywhere
    return confident & agreed, best[0]


def least_likely(probs: Tensor, candidates: Tensor) -> Tensor:
    """argmin_{j in S} f_j(x) [B]: the label that swapping (Theorem 1, Table 7) moves out."""
    return probs.float().masked_fill(~candidates, INF).argmin(1)


def correct(candidates: Tensor, flagged: Tensor, label: Tensor, drop: Tensor | None = None) -> Tensor:
    """Algorithm 1, last line: S with `label` moved in where flagged, and `drop` moved out when swapping."""
    new = candidates
    if drop is not None:
        new = new.scatter(1, drop[:, None], False)
    new = new.scatter(1, label[:, None], True)
    return torch.where(flagged[:, None], new, candidates)


def reweight(
    weights: Tensor,
    candidates: Tensor,
    flagged: Tensor,
    label: Tensor,
    value: Tensor | float | None,
    drop: Tensor | None = None,
) -> Tensor:
    """The label weights w [B, C] of a base after a correction; `candidates` is the corrected S.

    w[label] = value, then S is renormalised to 1; the rest of w stays (LWC keeps a second block there).
    value = f_label(x) is the default of the release, 1/C its second choice, None means uniform on S.
    """
    new = weights if drop is None else weights.scatter(1, drop[:, None], 0.0)
    if value is None:
        new = torch.where(candidates, 1.0, new)
    else:
        entry = value.to(new.dtype).expand(len(new))[:, None] if torch.is_tensor(value) else value
        new = new.scatter(1, label[:, None], entry)
    total = (new * candidates).sum(1, keepdim=True)  # over the corrected S
    new = torch.where(candidates, new / total.clamp_min(1e-12), new)
    return torch.where(flagged[:, None], new, weights)


# ------------------------------------------------------------------ the correction epoch e0 (Algorithm 1)


class CorrectionEpoch:
    """Watches the validation curve; `update(accuracy)` returns True once, at e0. Accuracies are fractions.

    rule="smoothed": the release's, for long runs. The curve is averaged over `window` epochs (half on either side,
        the newest value left out), and e0 is the first epoch >= window at which the last ten steps of the average
        are below 1e-6 in the mean. The release has window=100 in 1,000 epochs.
    rule="knee": ours, for runs of less than 100 epochs, in which a smoothed peak comes too late. e0 is the first
        epoch at which the mean of the last `window` values is above that of the `window` before by no more than
        three tenths of its whole rise since the first epoch; 3 * window at the latest. Never before `since`, the
        first epoch in which the base is itself (PiCO's prototypes count).
    rule="paper": Algorithm 1 as printed, sum_{i=e-9..e} (res[i] - res[i-1]) < 1e-5, from epoch 11 on (res[0]
        does not exist).
    fixed=N: e0 = N, whatever the curve does (Fig. 6).
    """

    def __init__(self, window: int = 100, rule: str = "smoothed", fixed: int | None = None, since: int = 1):
        if rule not in ("smoothed", "knee", "paper"):
            raise ValueError(f"rule must be 'smoothed', 'knee' or 'paper', not {rule!r}")
        if window < 3:
            raise ValueError(f"window must be at least 3 epochs, not {window}")
        self.window, self.rule, self.fixed, self.since = window, rule, fixed, since
        earliest = dict(smoothed=max(window, 11), knee=max(2 * window, since), paper=11)[rule]
        self.earliest = fixed if fixed is not None else earliest
        self.curve: list[float] = []
        self.e0: int | None = None

    @classmethod
    def of(
        cls, epochs: int, rule: str = "auto", window: int = 0, fixed: int | None = None, since: int = 1
    ) -> CorrectionEpoch:
        """For a run of so many epochs. window=0: a tenth of them (at least 10), for the knee an eighth (3)."""
        rule = rule if rule != "auto" else "knee" if epochs < 100 else "smoothed"
        window = window or (max(3, round(epochs / 8)) if rule == "knee" else max(10, epochs // 10))
        return cls(window, rule, fixed, since)

    def update(self, accuracy: float) -> bool:
        self.curve.append(float(accuracy))
        if self.e0 is not None or not self._converged():
            return False
        self.e0 = len(self.curve)
        return True

    def _converged(self) -> bool:
        res, n, window = self.curve, len(self.curve), self.window
        if n < self.earliest or self.fixed is not None:
            return n >= self.earliest
        if self.rule == "paper":
            return res[-1] - res[-11] < 1e-5  # the sum telescopes

        def mean(start: int, end: int) -> float:
            return math.fsum(res[start:end]) / (end - start)

        if self.rule == "knee":
            now, before = mean(n - window, n), mean(n - 2 * window, n - window)
            return now - before <= 0.3 * (now - res[0]) or n >= 3 * window

        def smoothed(t: int) -> float:
            return mean(max(0, t - window // 2), min(n - 1, t + window // 2))

        return (smoothed(n - 1) - smoothed(n - 11)) / 10 < 1e-6  # ten differences telescope too

    def state_dict(self) -> dict:
        return {"curve": list(self.curve), "e0": self.e0}

    def load_state_dict(self, state: dict) -> None:
        self.curve, self.e0 = list(state["curve"]), state["e0"]


# ------------------------------------------------------------------ the plug-in


class IRNet:
    """Label correction inside anyone's loop, in three lines:

        refine = IRNet(candidates, tau=0.3, epochs=epochs)                    # before the loop
        if refine.started: refine.correct(index, [f_x, f_z], weights)         # in each step
        refine.end_epoch(validation_score)                                    # after each epoch

    `candidates` bool [N, C] is edited in place, and so is `weights` [N, C] where the base keeps label weights.
    f_x, f_z [B, C] are the probabilities of the batch and of one augmented view of it (any number of views), both
    from before the step. tau depends on f: about 0.3 for a classifier's softmax, 0.002 to 0.02 for the softmax over
    PiCO's prototypes. Runs of up to `epoch.earliest` epochs are too short to find e0: give it.
    """

    def __init__(
        self,
        candidates: Tensor,
        tau: float,
        epochs: int = 1000,
        *,
        rule: str = "auto",
        window: int = 0,
        e0: int | None = None,
        since: int = 1,
        swap: bool = False,
        weights_after: str = "value",
        strict: bool = False,
        fixed: Tensor | None = None,
    ):
        if candidates.dtype != torch.bool or candidates.ndim != 2:
            raise ValueError(f"candidates must be bool [N, C], not {candidates.dtype} {tuple(candidates.shape)}")
        if weights_after not in ("value", "uniform", "1/C"):
            raise ValueError(f"weights_after must be 'value', 'uniform' or '1/C', not {weights_after!r}")
        self.candidates, self.tau, self.strict = candidates, tau, strict
        self.swap, self.weights_after = swap, weights_after
        self.fixed = fixed  # bool [N], samples whose sets stay as they are
        self.epoch = CorrectionEpoch.of(epochs, rule, window, e0, since)
        n, device = len(candidates), candidates.device
        self.corrected_at = torch.zeros(n, dtype=torch.int32, device=device)  # epoch of the latest correction
        self.corrected_to = torch.full((n,), -1, dtype=torch.int32, device=device)  # the label it moved in

    @property
    def e0(self) -> int | None:
        return self.epoch.e0

    @property
    def started(self) -> bool:
        """True from the epoch after e0 on."""
        return self.epoch.e0 is not None

    @torch.no_grad()
    def correct(
        self, index: Tensor, views: Sequence[Tensor], weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 1's second loop for one batch: index [B], views = [f(x), f(z_1), ...] -> (flagged, label)."""
        old = self.candidates[index]
        flagged, label = detect(views, old, self.tau, self.strict)
        flagged = flagged if self.fixed is None else flagged & ~self.fixed[index]
        drop = least_likely(views[0], old) if self.swap else None
        new = correct(old, flagged, label, drop)
        self.candidates[index] = new
        now = len(self.epoch.curve) + 1
        self.corrected_at[index] = self.corrected_at[index].masked_fill(flagged, now)
        self.corrected_to[index] = torch.where(flagged, label.int(), self.corrected_to[index])
        if weights is not None:
            f_label = views[0].float().gather(1, label[:, None])[:, 0]
            value = {"value": f_label, "uniform": None, "1/C": 1 / old.shape[1]}[self.weights_after]
            weights[index] = reweight(weights[index], new, flagged, label, value, drop)
        return flagged, label

    def end_epoch(self, validation_score: float) -> bool:
        """Feeds the validation curve; True once, at e0. Correction starts with the next epoch."""
        return self.epoch.update(validation_score)

    def state_dict(self) -> dict:
        names = ("candidates", "corrected_at", "corrected_to")
        return {"epoch": self.epoch.state_dict(), "tau": self.tau} | {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict) -> None:
        self.epoch.load_state_dict(state["epoch"])
        self.tau = state["tau"]
        for name in ("candidates", "corrected_at", "corrected_to"):
            getattr(self, name).copy_(state[name])  # in place: others hold the same tensors


# ------------------------------------------------------------------ the noise rate, without any true label


@torch.no_grad()
def estimate_noise(logits: Tensor, candidates: Tensor) -> tuple[float, float, tuple[float, float]]:
    """eta = P(y not in S) from logits [N, C] of samples that were not trained on -> (eta, temperature T, (low,
    high)), the last a 95 % interval. eta and T maximise the likelihood of the candidate sets; nan where all sets
    are full.

    Section 3.1 makes a clean S out of y with probability g = q^(|S|-1) (1-q)^(C-|S|). A noisy S was S - {j} + {y},
    for one of the |S| labels j in it, each again with probability g, and j was drawn from C - |S| labels: together
    g |S|/(C-|S|). So q cancels, and with f = softmax(logits / T) for P(y | x)
        P(S | x) / g = (1 - eta) sum_{j in S} f_j + eta |S|/(C-|S|) sum_{j not in S} f_j
    A full set stays clean, whatever eta is, and says nothing.

    The interval has every eta whose likelihood, T at its best for it, is not far below the largest (chi-square),
    up to the next step of 0.005 outside: it is never too narrow for want of steps.
    A bootstrap would do on large samples; of a small one without a noisy set it makes [0, 0], sure without reason.
    """
    size, classes = candidates.sum(1), candidates.shape[1]
    tells = (size > 0) & (size < classes)
    z, inside = logits[tells].cpu().double(), candidates[tells].cpu()
    if not len(z):
        return math.nan, math.nan, (math.nan, math.nan)
    size = inside.sum(1)
    etas = torch.linspace(0, 0.99, 199, dtype=z.dtype)
    temperatures = 2 ** torch.linspace(-4, 3, 85, dtype=z.dtype)
    found = []
    for temperature in temperatures:
        f = (z / temperature).softmax(1)
        clean, noisy = (f * inside).sum(1), (f * ~inside).sum(1) * size / (classes - size)  # [N]
        found.append(torch.lerp(clean, noisy, etas[:, None]).clamp_min(1e-300).log().sum(1))  # [etas]
    likelihood, best = torch.stack(found).max(0)  # log, over T: [etas]
    at = likelihood.argmax()
    within = (likelihood >= likelihood[at] - 1.92).nonzero()[:, 0]  # half of 3.84: 95 %, one degree of freedom
    low, high = etas[(within[0] - 1).clamp_min(0)], etas[(within[-1] + 1).clamp_max(len(etas) - 1)]
    return float(etas[at]), float(temperatures[best[at]]), (float(low), float(high))


def expected_accuracy(logits: Tensor, temperature: float) -> float:
    """What a network expects of itself on those samples, at the T of estimate_noise: the mean of max_j f_j."""
    return float((logits / temperature).softmax(1).amax(1).mean())


# ------------------------------------------------------------------ diagnostics (need the hidden truth)


def is_noisy(candidates: Tensor, labels: Tensor) -> Tensor:
    """omega(x) = omega_2, i.e. y not in S(x): bool [B] (Eqs. 1-3)."""
    return ~candidates.gather(1, labels.long()[:, None])[:, 0]


def noise_level(candidates: Tensor, labels: Tensor) -> float:
    """P(y not in S(x)), the curve of Fig. 5."""
    return float(is_noisy(candidates, labels).float().mean())


def bayes_error(tau: Tensor, noisy: Tensor, bins: int = 100) -> float:
    """Eq. 6 with priors 1/2, histograms of `bins` equal bins on the pooled range; nan if a subset is empty."""
    noisy = noisy.bool()
    if not noisy.any() or noisy.all() or not tau.isfinite().any():
        return math.nan
    low, high, bin_of = _binned(tau, bins)
    density = [torch.bincount(bin_of[part], minlength=bins) / part.sum() for part in (~noisy, noisy)]
    # Eq. 5: in every bin the error is the smaller posterior; Eq. 6: summed, p(tau|omega_i) P(omega_i)
    return float(0.5 * torch.minimum(*density).sum())


def _binned(tau: Tensor, bins: int) -> tuple[float, float, Tensor]:
    """The pooled range, and each tau's bin in it [B]; infinities at the ends."""
    tau = tau.float()
    finite = tau[tau.isfinite()] if tau.isfinite().any() else tau.new_zeros(1)
    low, high = float(finite.min()), float(finite.max())
    width = (high - low) or 1.0
    return low, high, ((tau.clamp(low, high) - low) / width * bins).long().clamp(0, bins - 1)


def margin_histogram(tau: Tensor, noisy: Tensor, bins: int = 40) -> dict:
    """Fig. 3: how many clean and noisy samples have their tau in each of `bins` equal bins from low to high."""
    low, high, bin_of = _binned(tau, bins)
    counts = (torch.bincount(bin_of[part], minlength=bins).tolist() for part in (~noisy.bool(), noisy.bool()))
    return dict(zip(("low", "high", "clean", "noisy"), (low, high, *counts), strict=True))


def hits(probs: Tensor, candidates: Tensor, labels: Tensor) -> Tensor:
    """The sums of Eqs. 7 and 8, without a host read: [clean hits, clean samples, noisy hits, noisy samples]."""
    noisy, y = is_noisy(candidates, labels), labels.long()
    inside = probs.masked_fill(~candidates, -INF).argmax(1)  # argmax_{j in S} f_j(x)
    outside = probs.masked_fill(candidates, -INF).argmax(1)  # argmax_{j not in S} f_j(x)
    return torch.stack([~noisy & (inside == y), ~noisy, noisy & (outside == y), noisy]).sum(1)  # [4]


def hit_accuracy(probs: Tensor, candidates: Tensor, labels: Tensor) -> tuple[float, float]:
    """phi_c (Eq. 7) over the clean subset and phi_n (Eq. 8) over the noisy one; nan where it is empty."""
    return hit_ratios(hits(probs, candidates, labels))


def hit_ratios(counts: Tensor) -> tuple[float, float]:
    """phi_c and phi_n from the sums of `hits`."""
    clean_hits, clean, noisy_hits, noisy = counts.tolist()
    return clean_hits / clean if clean else math.nan, noisy_hits / noisy if noisy else math.nan


def random_hit_accuracy(num_classes: int, q: float) -> float:
    """Eq. 9: phi_n of a random non-candidate label."""
    return 1 / (num_classes - (1 + (num_classes - 1) * q))


# ------------------------------------------------------------------ the bounds of Theorems 1 and 2


def next_boundary(m: float, eps: float, alpha: float, l: float) -> tuple[float, float]:  # noqa: E741
    """Theorem 1 (Eq. 17): the range (low, high) of m_new for which L(m_new) is pure, given that L(m) is.

    The theorem also asks for eps < m_new: a range that reaches below eps has arrived.
    """
    _check_theory(m, eps, alpha, l)
    # Eq. 17: (1 + eps/(6 alpha l)) (1 - m) <= 1 - m_new <= (1 + eps/(3 alpha l)) (1 - m)
    return 1 - (1 + eps / (3 * alpha * l)) * (1 - m), 1 - (1 + eps / (6 * alpha * l)) * (1 - m)


def rounds_bounds(m: float, eps: float, alpha: float, l: float) -> tuple[float, float]:  # noqa: E741
    """Theorem 2: (printed, exact), the two lower bounds of R from m_init = m down to m_end = eps.

    The proof needs R log(1+x) > log((1-eps)/(1-m)), x = eps/(6 l alpha): the exact bound. The printed one puts
    x for log(1+x) < x, which makes it smaller, i.e. not sufficient.
    """
    _check_theory(m, eps, alpha, l)
    x, need = eps / (6 * l * alpha), math.log((1 - eps) / (1 - m))
    return need / x, need / math.log1p(x)


def rounds_needed(m: float, eps: float, alpha: float, l: float) -> int:  # noqa: E741
    """Theorem 2: the smallest number of rounds that suffices, from the exact bound."""
    return math.floor(rounds_bounds(m, eps, alpha, l)[1]) + 1


def smallest_start(eps: float, alpha: float, eta: float) -> float:
    """Theorem 2: m_init must lie above max(2 alpha eta + eps/3, eps)."""
    return max(2 * alpha * eta + eps / 3, eps)


def _check_theory(m: float, eps: float, alpha: float, l: float) -> None:  # noqa: E741
    if not 0 < eps < m < 1:
        raise ValueError(f"the theorems need 0 < eps < m < 1, not eps={eps}, m={m}")
    if alpha <= 0 or l < 1:
        raise ValueError(f"the theorems need alpha > 0 and l >= 1, not alpha={alpha}, l={l}")
