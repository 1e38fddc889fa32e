"""Where does the noise report hold? Seven ways in which true labels go missing, each with known truth.

A cell is a way, a rate and a seed. It is trained without correction until e0, where a run on one's own data makes
its noise report and decides whether to correct; what the report is made from is kept. Cells of the rates ENDS then
go on twice to the end, without and with correction, so that whatever the guard decides has its accuracy here. What
the folder has already is left out: `python -m paper noise-battery` may be stopped and started again.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch

import data
import irnet
import train
from crowd import caution, noise
from crowd.annotators import Votes
from harness import InputError, Parser, checkpoint
from harness.options import configure

ETAS = (0.0, 0.05, 0.1, 0.2, 0.3)
ENDS = (0.2,)
MORE: list[str] = []  # further options of every run


# ------------------------------------------------------------------ made-up labels: sets [N, C] or votes [N, A]


def joined(y: np.ndarray, chance: np.ndarray, rng) -> np.ndarray:
    """Sets with the truth in them: label j joins the set of a sample of class k with chance[k, j]."""
    sets = rng.rand(len(y), len(chance)) < chance[y]
    sets[np.arange(len(y)), y] = True
    return sets


def companions(classes: int, rng) -> np.ndarray:
    """[C, C]: three labels that often come with each class, and all the others seldom."""
    chance = np.full((classes, classes), 0.05)
    for k, row in enumerate(chance):
        row[rng.permutation(np.delete(np.arange(classes), k))[:3]] = 0.6
    return chance


def lost(y: np.ndarray, rate: np.ndarray, rng) -> np.ndarray:
    """The samples [N] whose truth goes missing; rate [C], a class."""
    return rng.rand(len(y)) < rate[y]


def paper_sets(y: np.ndarray, classes: int, eta: float, seed: int) -> np.ndarray:
    """As in the paper: the truth gives way to a random label that was no candidate."""
    return data.corrupt(torch.from_numpy(y), classes, 0.3, eta, torch.Generator().manual_seed(seed)).numpy()


def deleted(y, classes, eta, seed):
    """Random wrong candidates; the truth is deleted, where it is not alone."""
    rng = np.random.RandomState(seed)
    sets = joined(y, np.full((classes, classes), 0.3), rng)
    gone = lost(y, np.full(classes, eta), rng) & (sets.sum(1) > 1)
    sets[gone, y[gone]] = False
    return sets


def swapped(y, classes, eta, seed):
    """Random wrong candidates; the truth is swapped for any other label, which may be a candidate already."""
    rng = np.random.RandomState(seed)
    sets = joined(y, np.full((classes, classes), 0.3), rng)
    gone = lost(y, np.full(classes, eta), rng)
    sets[gone, (y[gone] + rng.randint(1, classes, gone.sum())) % classes] = True
    sets[gone, y[gone]] = False
    return sets


def by_class(y, classes, eta, seed):
    """Wrong candidates that go with the class; the truth is deleted, of some classes more often than of others."""
    rng = np.random.RandomState(seed)
    chance = companions(classes, rng)
    sets = joined(y, chance, rng)
    gone = lost(y, 2 * eta * rng.permutation(np.linspace(0, 1, classes)), rng)
    alone = gone & (sets.sum(1) == 1)
    sets[alone, chance[y[alone]].argmax(1)] = True
    sets[gone, y[gone]] = False
    return sets


def confusing(y, classes, eta, seed):
    """Three annotators, each with a confusion matrix, so strong that all three miss for eta of the samples."""
    rng = np.random.RandomState(seed)
    difficulty = rng.uniform(0.3, 1, classes)
    mistakes = np.stack([rng.dirichlet(np.full(classes - 1, 0.3), classes) for _ in range(3)])  # [A, C, C - 1]
    strength = solve(lambda s: np.mean(np.minimum(s * difficulty, 0.95)[y] ** 3), eta)
    wrong = rng.rand(len(y), 3) < np.minimum(strength * difficulty, 0.95)[y][:, None]
    what = np.stack([(rng.rand(len(y), 1) > m[y].cumsum(1)).sum(1).clip(0, classes - 2) for m in mistakes], 1)
    return np.where(wrong, what + (what >= y[:, None]), y[:, None])


def hard_and_easy(y, classes, eta, seed):
    """Three annotators, right with probability 0.97; on hard samples with 0.3. All wrong labels are as likely."""
    rng = np.random.RandomState(seed)
    hard = rng.rand(len(y), 1) < min(1.0, max(0.0, (eta - 0.03**3) / (0.7**3 - 0.03**3)))
    wrong = rng.rand(len(y), 3) > np.where(hard, 0.3, 0.97 if eta else 1.0)
    return np.where(wrong, (y[:, None] + rng.randint(1, classes, (len(y), 3))) % classes, y[:, None])


def solve(share, eta: float) -> float:
    """The strength from 0 to 3 at which share(strength) is eta."""
    low, high = 0.0, 3.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < eta else (low, middle)
    return low


def clean(y, classes, q, seed):
    """Nothing missing: random wrong candidates with chance q; those of a class where q is 1."""
    rng = np.random.RandomState(seed)
    return joined(y, companions(classes, rng) if q == 1 else np.full((classes, classes), q), rng)


WAYS = dict(paper=paper_sets, deleted=deleted, swapped=swapped, classes=by_class, annotators=confusing,
            hard=hard_and_easy, clean=clean)  # fmt: skip
RATES = dict.fromkeys(WAYS, ETAS) | dict(clean=(0.0, 0.1, 0.3, 0.5, 1.0))  # of clean: q


# ------------------------------------------------------------------ a cell


def arrays_of(d: data.Dataset) -> dict[str, np.ndarray]:
    """The images and true labels of a dataset, as one's own arrays have them."""
    parts = ("train", d.images, d.labels), ("test", d.test_images, d.test_labels)
    images = {f"x_{part}": x.permute(0, 2, 3, 1).squeeze(3).numpy() for part, x, _ in parts}
    return images | {f"y_{part}": y.numpy() for part, _, y in parts}


def made(way: str, rate: float, seed: int, folder: Path, words: str) -> list[str]:
    """Writes the cell's data and gives the options that train on it."""
    source = configure(words.split())
    d = data.load(source.dataset, source.data, source.image_size or None, source.limit_train, source.limit_test)
    y = d.labels.numpy()
    labels = WAYS[way](y, d.num_classes, rate, 1000 * seed + 7)
    kind = "candidates" if labels.dtype == bool else "annotators"
    np.savez(folder / "made.npz", **arrays_of(d), **{kind: labels})
    return ["--dataset", str(folder / "made.npz"), "--threads", "1", "--seed", str(seed), *MORE]


def begun(argv: list[str]):
    """The options of a run, its learner and its samples, before the first step."""
    c = configure(argv, data.has_features)
    torch.set_num_threads(1)
    dataset = data.load(c.dataset, c.data, c.image_size or None)
    return c, *train.prepare(c, dataset)


def to_e0(argv: list[str]) -> tuple[dict, dict]:
    """What a run knows at e0, and its state, to go on from."""
    c, learner, samples = begun(argv)
    row = dict(epoch=0, e0=None)
    while row["epoch"] < c.epochs and not row["e0"]:
        row, *_ = train.train_epoch(learner, samples, row["epoch"] + 1, c.epochs, c.lr, False)
        score = train.validation_score(
            train.logits_of(learner, samples.held_out_images()), samples.candidates[samples.held_out]
        )
        row["e0"] = row["epoch"] if learner.refine.end_epoch(score) else None
    found = known(learner, samples) | dict(epoch=row["epoch"], e0=row["e0"] or 0, tau=c.tau)
    found |= dict(candidates=samples.before.numpy(), truth=samples.dataset.labels.numpy())
    if samples.dataset.annotators is not None:
        found["annotators"] = samples.dataset.annotators.numpy()
    return found, checkpoint.state_of(learner, samples, "") | dict(rows="[]")


def to_the_end(argv: list[str], state: dict, epoch: int) -> dict:
    """Accuracy in the end, from this state after this epoch: base, without correction, and moved, with it."""
    c, learner, samples = begun(argv)
    found = {}
    for name, corrects in (("base", False), ("moved", True)):
        checkpoint.restore(copy.deepcopy(state), learner, samples, "")
        counts = np.zeros(2)
        for e in range(epoch + 1, c.epochs + 1):
            after, *_ = train.train_epoch(learner, samples, e, c.epochs, c.lr, corrects)
            if after["corrections"]:
                counts += after["corrections"] * np.array([1, after["correction_precision"]])
        found[name] = train.accuracy(learner, samples.test_images, samples.test_labels)
    return found | dict(corrections=counts[0], right=counts[1])


def known(learner, samples) -> dict:
    """Of every training sample: logits, f of Eq. 4, features; whether it is held out."""
    out = torch.zeros(len(samples.labels), dtype=torch.bool).index_fill_(0, samples.held_out.cpu(), True)
    return dict(
        logits=train.logits_of(learner, samples.images).cpu().numpy(),
        f=train.probabilities(learner, samples.images, "cpu")[1].numpy(),
        features=train.features_of(learner, samples.images).numpy(),
        held_out=out.numpy(),
    )


def run(
    seeds: list[int], folder: Path, ways: list[str], words: str = "--dataset digits", rates: tuple = ENDS
) -> list[Path]:
    """Trains what the folder has not yet, all to e0 first, these rates then to the end; gives all cells."""
    folder.mkdir(parents=True, exist_ok=True)
    images = folder / "images.txt"
    if images.exists() and images.read_text() != words:
        raise InputError(f"{folder} is of {images.read_text()}, not {words}: give another --out")
    images.write_text(words)
    cells = ((way, rate, seed) for seed, way in itertools.product(seeds, ways) for rate in RATES[way])
    every = {folder / f"{way}-{rate:g}-seed{seed}.npz": (way, rate, seed) for way, rate, seed in cells}
    for path, (way, rate, seed) in every.items():
        if not path.exists():
            began = time.monotonic()
            found, state = to_e0(made(way, rate, seed, folder, words))
            torch.save(state, path.with_suffix(".pt"))
            keep(path, found, began)
    for path, (way, rate, seed) in every.items():
        if rate in rates and way != "clean" and "base" not in (found := arrays(path)):
            began = time.monotonic()
            state = torch.load(path.with_suffix(".pt"), weights_only=True)
            ends = to_the_end(made(way, rate, seed, folder, words), state, int(found["epoch"]))
            keep(path, found | ends, began)
            path.with_suffix(".pt").unlink()
    return list(every)


def arrays(path: Path) -> dict:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file}


def keep(path: Path, found: dict, began: float) -> None:
    part = path.with_name("part.npz")
    np.savez(part, **found)
    part.rename(path)
    print(f"{path.stem}: {time.monotonic() - began:.0f} s", flush=True)


# ------------------------------------------------------------------ the table


def judged(path: Path) -> dict:
    """The report and the guard's decision on one cell, beside the truth."""
    d = {name: torch.from_numpy(array) for name, array in arrays(path).items()}
    sets, votes = d["candidates"], None
    if "annotators" in d:
        votes = Votes.of_columns(d["annotators"], torch.arange(d["annotators"].shape[1]), sets.shape[1])
    found = noise.report(d["logits"].softmax(1), sets, d["held_out"].nonzero()[:, 0], votes, d["features"])
    missing = irnet.noise_level(sets, d["truth"])
    permitted = caution.guard(found, float(d["tau"])) < float("inf")
    got = dict(truth=missing, found=found, covered=found.low <= missing <= found.high, permitted=permitted)
    if "base" in d:
        base, moved = float(d["base"]), float(d["moved"])
        got |= dict(base=base, moved=moved, guarded=moved if permitted else base)
    return got


def table(paths: list[Path]):
    """Markdown, a row a way."""
    yield "| way | cells | covered | mean error | width | correction permitted | base | guard | overruled |"
    yield "| --- " * 9 + "|"
    for way in WAYS:
        rows = [judged(path) for path in paths if path.stem.split("-")[0] == way and path.exists()]
        if not rows:
            continue
        error = 100 * np.mean([abs(row["found"].eta - row["truth"]) for row in rows])
        width = 100 * np.mean([row["found"].high - row["found"].low for row in rows])
        noisy = [row for row in rows if row["truth"] > 0]
        said = f"{sum(row['permitted'] for row in noisy)} of {len(noisy)} noisy"
        said += f", {sum(row['permitted'] for row in rows if not row['truth'])} of {len(rows) - len(noisy)} clean"
        ended = [row for row in rows if "base" in row]
        ends = [f"{100 * np.mean([row[key] for row in ended]):.1f}" if ended else "-"
                for key in ("base", "guarded", "moved")]  # fmt: skip
        covered = f"{sum(row['covered'] for row in rows)} of {len(rows)}"
        yield f"| {way} | {len(rows)} | {covered} | {error:.1f} | {width:.1f} | {said} | {' | '.join(ends)} |"


def main(argv: list[str]) -> int:
    parser = Parser("python -m paper noise-battery", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ways", nargs="+", default=list(RATES), choices=list(WAYS), help="(default all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default 0 1 2)")
    parser.add_argument("--ends", type=float, nargs="*", default=list(ENDS), help="rates that go to the end (0.2)")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default reproduced)")
    parser.add_argument("--options", nargs="...", default=[], help="the rest: whose images, as --dataset kmnist")
    chosen = parser.parse_args(argv)
    try:
        words = " ".join(chosen.options) or "--dataset digits"
        dataset = Path(configure(words.split()).dataset).stem
        folder = chosen.out / ("noise-battery" if dataset == "digits" else f"noise-battery-{dataset}")
        lines = list(table(run(chosen.seeds, folder, chosen.ways, words, tuple(chosen.ends))))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0
