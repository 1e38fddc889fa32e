"""Which samples belong to no class? `python -m paper open-set`

Digits with two classes withheld: their samples are left in with the sets of a class drawn at random, so many that
they are 10, 20 or 40 % of all. KMNIST with CIFAR's images, grey and shrunk. A run goes to e0, is looked at, goes
on to its end with --open-set off, keep and drop: how well the scores find the strangers at e0 and at the end
(AUROC), and the accuracy on the known classes. Cells that the file has already are left out.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torchvision.transforms.functional import resize, rgb_to_grayscale

import data
import train
from crowd import outside
from harness import InputError, Parser, checkpoint
from harness.options import configure
from paper.arena import CIFAR
from paper.grid import lines_of

RATES = (0.1, 0.2, 0.4)
KMNIST = "--dataset kmnist --arch cnn --crop 0.8 --image-size 14 --limit-train 8000 --limit-test 2000 --epochs 20"


# ------------------------------------------------------------------ data with strangers


def withheld(rate: float, seed: int) -> tuple[data.Dataset, Tensor]:
    """Digits without two of their classes, whose samples are `rate` of all -> and which these are, bool [N]."""
    d, g = data.load("digits"), Generator().manual_seed(1000 + seed)
    gone = torch.randperm(10, generator=g)[:2]
    number = torch.full((10,), -1).index_put_(
        (torch.tensor([k for k in range(10) if k not in gone]),), torch.arange(8)
    )
    known, strange = (number[d.labels] >= 0).nonzero()[:, 0], (number[d.labels] < 0).nonzero()[:, 0]
    known, strange = (part[torch.randperm(len(part), generator=g)] for part in (known, strange))
    many = min(len(strange), round(rate / (1 - rate) * len(known)))
    known, strange = known[: round(many * (1 - rate) / rate)], strange[:many]
    test = number[d.test_labels] >= 0
    return mixed(
        d.images[known],
        number[d.labels[known]],
        d.images[strange],
        (d.test_images[test], number[d.test_labels[test]]),
        g,
    )


def with_cifar(c, rate: float, seed: int, source: Path) -> tuple[data.Dataset, Tensor]:
    """The first images of the dataset, and CIFAR's, grey and as small."""
    d, g = (
        data.load(c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test),
        Generator().manual_seed(seed),
    )
    try:
        with np.load(source, allow_pickle=False) as file:
            x = torch.from_numpy(file["x_train"])
    except (OSError, KeyError):
        raise InputError(f"{source} is not there, or has no x_train: give --cifar") from None
    many = round(rate * len(d.images))
    x = (x.permute(0, 3, 1, 2) if x.shape[-1] == 3 else x)[torch.randperm(len(x), generator=g)[:many]]
    x, n = resize(rgb_to_grayscale(x), list(d.images.shape[2:]), antialias=True), len(d.images) - many
    return mixed(d.images[:n], d.labels[:n], x, (d.test_images, d.test_labels), g)


def mixed(images: Tensor, labels: Tensor, strange: Tensor, test: tuple[Tensor, Tensor], g: Generator):
    """Shuffled; the label that a stranger's set is made from is drawn."""
    classes = int(labels.max()) + 1
    alien = torch.arange(len(images) + len(strange)) >= len(images)
    labels = torch.cat([labels, torch.randint(classes, (len(strange),), generator=g)])
    images, order = torch.cat([images, strange]), torch.randperm(len(alien), generator=g)
    d = data.Dataset("open set", images[order], labels[order], *test, classes, *data.statistics(images))
    return d, alien[order]


# ------------------------------------------------------------------ scores


def auroc(score: Tensor, positive: Tensor) -> float:
    """How often a positive has the higher score of two; ties count one half."""
    _, place, count = score.double().unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[place]  # the mean rank of equals
    n = int(positive.sum())
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * (len(score) - n)))


def scores(logits: Tensor, features: Tensor, candidates: Tensor) -> dict[str, Tensor]:
    """Each [N], large for strangers."""
    log_p, z = logits.float().log_softmax(1), F.normalize(features.float(), dim=1)
    inside, beyond = (-log_p.masked_fill(~mask, -math.inf).amax(1) for mask in (candidates, ~candidates))
    near = (z @ z.T).fill_diagonal_(-2.0).topk(outside.NEIGHBOURS, 1).values
    p, ours = outside.outside(log_p.exp(), features, candidates)
    return {
        "l_S + l_N": inside + beyond.nan_to_num(posinf=100.0),
        "energy": -logits.float().logsumexp(1),
        "1 - max p": 1 - log_p.exp().amax(1),
        "distance": -near.mean(1),
        "entropy of the neighbours' p (ours)": ours,
        "p_outside": p,
    }


# ------------------------------------------------------------------ a cell


def cell(words: list[str], d: data.Dataset, alien: Tensor) -> dict:
    """AUROC of every score at e0 and at the end, flags at e0, and the accuracy after each way to go on."""
    c = configure([*words, "--threads", "1"])
    if c.tau_auto:
        raise InputError("open-set: --tau auto and plus do not go with it; give --tau a number")
    learner, samples = train.prepare(c, d)

    def found() -> dict:
        logits = train.logits_of(learner, samples.images).cpu()
        each = scores(logits, train.features_of(learner, samples.images), samples.before)
        flagged = each["p_outside"] >= outside.SURE
        flags = dict(flagged=int(flagged.sum()), right=int((flagged & alien).sum()), of=int(alien.sum()))
        return {name: auroc(score, alien) for name, score in each.items()} | flags

    def go(epoch: int, corrects: bool) -> bool:
        row, *_ = train.train_epoch(learner, samples, epoch, c.epochs, c.lr, corrects)
        logits = train.logits_of(learner, samples.held_out_images())
        return learner.refine.end_epoch(train.validation_score(logits, samples.candidates[samples.held_out]))

    e0 = next((epoch for epoch in range(1, c.epochs + 1) if go(epoch, False)), None)
    if e0 is None:
        raise InputError("e0 was not found: more --epochs")
    state = copy.deepcopy(checkpoint.state_of(learner, samples, "") | dict(rows="[]"))
    result = dict(e0=e0, at_e0=found(), accuracy={})
    for way in ("off", "keep", "drop"):
        checkpoint.restore(copy.deepcopy(state), learner, samples, "")
        learner.drops, learner.refine.fixed = way == "drop", None
        for epoch in range(e0, c.epochs + 1):
            go(epoch, True) if epoch > e0 else None
            if way != "off":
                outside.look(train, learner, samples, dict(epoch=epoch, e0=e0), c.epochs)
        result["accuracy"][way] = train.accuracy(learner, samples.test_images, samples.test_labels)
        result |= dict(at_end=found()) if way == "off" else {}
        if way == "keep":
            flagged = samples.p_outside.cpu() >= outside.SURE
            result["kept"] = dict(flagged=int(flagged.sum()), right=int((flagged & alien).sum()))
    return result


def table(lines: list[dict]):
    """Markdown: a row a kind of data and rate, means over the seeds; AUROC at e0 / at the end."""
    names = [name for name in lines[0]["at_e0"] if name not in ("flagged", "right", "of")]
    more = ["flagged at e0, right, of", "at the end of keep", "off", "keep", "drop"]
    yield f"| data, strangers | seeds | {' | '.join([*names, *more])} |"
    yield "| --- " * (len(names) + 7) + "|"
    for kind, rate in dict.fromkeys((line["kind"], line["rate"]) for line in lines):
        of = [line for line in lines if (line["kind"], line["rate"]) == (kind, rate)]
        mean = lambda get: statistics.mean(get(line) for line in of)  # noqa: E731, B023
        both = [
            f"{mean(lambda r, n=n: r['at_e0'][n]):.3f} / {mean(lambda r, n=n: r['at_end'][n]):.3f}" for n in names
        ]
        flags = ", ".join(f"{mean(lambda r, k=k: r['at_e0'][k]):.0f}" for k in ("flagged", "right", "of"))
        ends = [f"{100 * mean(lambda r, w=w: r['accuracy'][w]):.1f}" for w in ("off", "keep", "drop")]
        kept = ", ".join(f"{mean(lambda r, k=k: r['kept'][k]):.0f}" for k in ("flagged", "right"))
        yield f"| {kind}, {100 * rate:g} % | {len(of)} | {' | '.join([*both, flags, kept, *ends])} |"


def main(argv: list[str]) -> int:
    parser = Parser("python -m paper open-set", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", default=["digits"], choices=["digits", "kmnist"], help="(default digits)"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), help="of strangers, above 0, below 1"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default 0 1 2)")
    parser.add_argument("--base", default="proden", help="(default proden)")
    parser.add_argument("--data", default="data", metavar="DIR", help="as train.py's --data")
    parser.add_argument("--cifar", type=Path, default=Path("..") / CIFAR, help=f"(default ../{CIFAR})")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default reproduced)")
    parser.add_argument("--options", nargs="...", default=[], help="the rest goes to every run")
    chosen = parser.parse_args(argv)
    if not all(0 < rate < 1 for rate in chosen.rates):
        parser.error("--rates: above 0, below 1")
    torch.set_num_threads(1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "open-set.jsonl"
    lines = lines_of(path)
    asked = []
    for seed, kind, rate in itertools.product(chosen.seeds, chosen.kinds, chosen.rates):
        key = dict(kind=kind, rate=rate, seed=seed, base=chosen.base, options=" ".join(chosen.options))
        line = next((line for line in lines if key.items() <= line.items()), None)
        if line is None:
            words = [
                "--base",
                chosen.base,
                "--q",
                "0.3",
                "--eta",
                "0.3",
                "--seed",
                str(seed),
                "--data",
                chosen.data,
            ]
            words += [*(KMNIST.split() if kind == "kmnist" else []), *chosen.options]
            made = (
                withheld(rate, seed) if kind == "digits" else with_cifar(configure(words), rate, seed, chosen.cifar)
            )
            line = key | cell(words, *made)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{kind}, {100 * rate:g} %, seed {seed}: {line['at_e0']['p_outside']:.3f} at e0", flush=True)
        asked.append(line)
    text = "\n".join(table(asked)) + "\n"
    (chosen.out / "open-set.md").write_text(text)
    print(f"\n{text}")
    return 0
