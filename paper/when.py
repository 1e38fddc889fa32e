"""When should correction begin? Curves of the bases alone, and what every fixed e0 makes of them.

A setting is trained once without correction, its held-out part never joining: the trunk. At a handful of epochs the
whole state is kept, and IRNet goes on from each of them to the last epoch: the branches. A rule is then given the
curve of the trunk and charged with the accuracy of the branch that its e0 stands for. Settings that the file has
already are left out, so that it may be stopped and started again: `python -m paper e0`, and with `--scale kmnist`
PiCO on all of KMNIST, q = 0.3.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import data
import irnet
import train
from harness import InputError, checkpoint
from harness.options import SIX, configure
from paper.grid import lines_of

GRID = ((0.1, 0.3), (0.3, 0.3), (0.5, 0.3), (0.3, 0.1))  # q, eta
# the fixed e0 by epochs of the run
BRANCHES = {20: (3, 6, 9, 13), 30: (4, 8, 12, 18), 32: (4, 8, 12, 16, 22), 40: (4, 8, 12, 17, 24)}
KMNIST = "--dataset kmnist --arch cnn --crop 0.8 --limit-train 8000 --limit-test 2000 --image-size 14"


def settings(scale: str) -> Iterator[dict]:
    """Every base in runs of 20, 30 and 40 epochs at a corner of the grid, a seed after the other; then KMNIST."""
    if scale == "kmnist":
        yield dict(data="--dataset kmnist --arch cnn", base="pico", q=0.3, eta=0.3, seed=0, epochs=32)
        return
    if scale != "digits":
        raise InputError(f"e0: it has settings at --scale digits and kmnist, none at {scale}")
    for seed, epochs in itertools.product((10, 11, 0, 1), (20, 30, 40)):
        for k, base in enumerate(SIX):
            q, eta = GRID[(k + seed + epochs // 10) % 4]
            yield dict(data="--dataset digits", base=base, q=q, eta=eta, seed=seed, epochs=epochs)
    for (k, base), q in itertools.product(enumerate(SIX), (0.3, 0.5)):
        yield dict(data=KMNIST, base=base, q=q, eta=0.3, seed=k % 3, epochs=20)


def run(setting: dict, root: str) -> dict:
    """The trunk and its branches -> the line of one setting."""
    words = [f"--{name}={setting[name]}" for name in ("base", "q", "eta", "seed", "epochs")]
    c = configure([*setting["data"].split(), *words, "--threads=1", *([f"--data={root}"] if root else [])])
    dataset = data.load(c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test)
    learner, samples = train.prepare(c, dataset)
    held_out, rows, states, before = samples.candidates[samples.held_out], [], {}, None
    for epoch in range(1, c.epochs + 1):
        train.train_epoch(learner, samples, epoch, c.epochs, c.lr)
        p = train.logits_of(learner, samples.held_out_images()).double().softmax(1)
        best, predicted = p.max(1)
        covered = held_out.gather(1, predicted[:, None])[:, 0].double()
        smoother = covered * best / (p * held_out).sum(1).clamp_min(1e-12)  # PLENCH's
        now = train.predict(learner, samples.images[samples.pool])
        changes = 1.0 if before is None else float((now != before).float().mean())
        row = dict(coverage=float(covered.mean()), smoother=float(smoother.mean()), changes=changes)
        rows.append(row | dict(test=train.accuracy(learner, samples.test_images, samples.test_labels)))
        before = now
        if epoch in BRANCHES[c.epochs]:
            state = checkpoint.state_of(learner, samples, "") | dict(rows="[]")
            states[epoch] = copy.deepcopy(state)
    ends = {}
    for e0, state in states.items():
        checkpoint.restore(state, learner, samples, "")
        learner.refine.epoch.e0 = e0
        for epoch in range(e0 + 1, c.epochs + 1):
            train.train_epoch(learner, samples, epoch, c.epochs, c.lr)
        ends[e0] = train.accuracy(learner, samples.test_images, samples.test_labels)
    return setting | dict(curves={key: [row[key] for row in rows] for key in rows[0]}, ends=ends)


# ------------------------------------------------------------------ rules: a curve and the epochs of the run -> e0


def watched(curve: list[float], watch: irnet.CorrectionEpoch) -> int | None:
    return next((n for n, value in enumerate(curve, 1) if watch.update(value)), None)


def one_difference(curve: list[float], epochs: int) -> int | None:
    """The release's average over ten epochs, but its last difference alone."""
    for n in range(10, len(curve) + 1):
        late, early = (np.mean(curve[max(0, t - 5) : min(n - 1, t + 5)]) for t in (n - 1, n - 2))
        if late - early < 1e-6:
            return n
    return None


def label_wave(curve: list[float], epochs: int) -> int | None:
    """The first local minimum of the moving average (3) of the share of predictions that changed."""
    means = [np.mean(curve[n - 3 : n]) for n in range(4, len(curve) + 1)]  # the first epoch has no changes
    return next((i + 4 for i in range(1, len(means)) if means[i] > means[i - 1]), None)


RULES = {
    "one difference of ten epochs' means": ("coverage", one_difference),
    "smoothed (the release's, ten differences)": ("coverage", lambda c, e: watched(c, irnet.CorrectionEpoch(10))),
    "paper": ("coverage", lambda c, e: watched(c, irnet.CorrectionEpoch(10, "paper"))),
    "Label Wave": ("changes", label_wave),
    "one difference, smoother coverage": ("smoother", one_difference),
    "knee": ("coverage", lambda c, e: watched(c, irnet.CorrectionEpoch.of(e, "knee"))),
    "knee, smoother coverage": ("smoother", lambda c, e: watched(c, irnet.CorrectionEpoch.of(e, "knee"))),
    "blind: three tenths of the run": ("coverage", lambda c, e: round(0.3 * e)),
}


def accuracy_after(line: dict, e0: int | None) -> float:
    """Last test accuracy in per cent with this e0, between the fixed ones on a straight line."""
    ends, alone = line["ends"], line["curves"]["test"][-1]
    at = [int(epoch) for epoch in ends] + [line["epochs"]]
    return 100 * (alone if e0 is None else float(np.interp(e0, at, [*ends.values(), alone])))


def table(lines: list[dict]) -> Iterator[str]:
    """Lost: the best of the fixed e0 less the rule's, in points of last test accuracy."""
    yield "| rule | error in epochs | lost, mean | worst | worst against the first row | not found |"
    yield "| --- " * 6 + "|"
    reference = None
    for name, (score, rule) in RULES.items():
        found = [rule(line["curves"][score], line["epochs"]) for line in lines]
        best = [max(line["ends"], key=line["ends"].get) for line in lines]
        lost = [
            100 * line["ends"][b] - accuracy_after(line, e0) for line, b, e0 in zip(lines, best, found, strict=True)
        ]
        error = [abs((e0 or line["epochs"]) - int(b)) for line, b, e0 in zip(lines, best, found, strict=True)]
        reference = reference or lost
        more = max(a - b for a, b in zip(lost, reference, strict=True))
        figures = (
            f"{np.mean(error):.1f} | {np.mean(lost):.2f} | {max(lost):.1f} | {more:+.1f} | {found.count(None)}"
        )
        yield f"| {name} | {figures} |"


def ends(line: dict) -> str:
    """What every fixed e0 of a curve ends at."""
    fixed = ", ".join(f"{e0}: {100 * last:.2f}" for e0, last in line["ends"].items())
    return f"e0 {fixed}; never: {100 * line['curves']['test'][-1]:.2f}"


def main(out: Path, root: str, scale: str = "digits") -> int:
    torch.set_num_threads(1)
    path = out / "e0.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    lines = lines_of(path)
    todo = [s for s in settings(scale) if not any(s.items() <= {k: line[k] for k in s}.items() for line in lines)]
    for number, setting in enumerate(todo, 1):
        print(f"{number} of {len(todo)}: {' '.join(map(str, setting.values()))}", flush=True)
        lines.append(run(setting, root))
        with path.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    for data_options in dict.fromkeys(line["data"] for line in lines):
        some = [line for line in lines if line["data"] == data_options]
        print(f"\n{data_options}, {len(some)} curve{'s' * (len(some) > 1)}\n", *table(some), sep="\n")
        if len(some) == 1:
            print(f"\nlast test accuracy, {ends(some[0])}")
    return 0
