"""What do different choices after e0 make of the same run? `python -m paper branches`

A setting (base, q, eta, seed) is trained once to e0: the trunk. From its state every choice goes on to the last
epoch: a branch, which ends where the train.py run of that choice ends, to the last bit, for two thirds of its time
(with one's own data train.py asks the noise report besides).
So a threshold that no user can know (the best of a grid), --tau auto and the parts of --irnet plus are compared
with each other. Branches that the file has already are left out: it may be stopped and started again.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

import data
import irnet
import train
from harness import InputError, Parser, checkpoint
from harness.options import configure
from paper import tau
from paper.arena import TAUS
from paper.grid import lines_of
from paper.tables import cell

CHOICES = {
    "alone": "--no-irnet",
    "preset": "",
    "auto": "--tau auto",  # with the neighbours' votes
    "auto, paper": "--tau auto --irnet paper",
    **{name: f"--irnet {name}" for name in ("votes", "back", "mix", "votes+back")},
    **{f"auto, {name}": f"--tau auto --irnet {name}" for name in ("votes", "now", "mix", "votes+back", "plus")},
    "auto, no views": "--tau auto --views none",
    "grid": "",  # every tau of the grid
}


def choices_of(names: list[str], base: str) -> dict[str, list[str]]:
    """The options of each branch."""
    found = {name: CHOICES[name].split() for name in names if name != "grid"}
    taus = TAUS[base] if "grid" in names else ()
    return found | {f"tau {fixed:g}": ["--tau", str(fixed)] for fixed in taus}


def prepared(words: list[str]):
    c = configure([*words, "--threads", "1"])
    if c.open_set != "off" or c.val == "test":  # they act where a branch has no hands
        raise InputError("branches: --open-set and --val test do not go with it; run train.py")
    dataset = data.load(c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test)
    return c, *train.prepare(c, dataset)


def trunk(words: list[str]) -> dict:
    """The state at e0, with what --tau auto is made from; none if e0 is not found."""
    c, learner, samples = prepared(words)
    held_out = samples.candidates[samples.held_out]
    for epoch in range(1, c.epochs + 1):
        _, taus, _ = train.train_epoch(learner, samples, epoch, c.epochs, c.lr, False)
        logits = train.logits_of(learner, samples.held_out_images())
        if learner.refine.end_epoch(train.validation_score(logits, held_out)):
            _, temperature, missing = irnet.estimate_noise(logits, held_out)
            estimate = missing, irnet.expected_accuracy(logits, temperature)
            state = checkpoint.state_of(learner, samples, "") | dict(rows="[]")
            return dict(epoch=epoch, taus=taus, estimate=estimate, state=copy.deepcopy(state))
    return {}


def branch(words: list[str], begun: dict) -> dict:
    """From the trunk to the end -> last accuracy, corrections, CPU-seconds."""
    c, learner, samples = prepared(words)
    refine = learner.refine
    checkpoint.restore(copy.deepcopy(begun["state"]), learner, samples, "")
    refine.tau, taus, worked = c.tau, begun["taus"], time.process_time()
    counts = [0, 0.0]
    for epoch in range(begun["epoch"] + 1, c.epochs + 1):
        if c.tau_auto:
            refine.tau = tau.retuned(refine, taus, *begun["estimate"])
        row, taus, _ = train.train_epoch(learner, samples, epoch, c.epochs, c.lr, not c.no_irnet)
        refine.end_epoch(float("nan"))
        counts[0] += row["corrections"]
        counts[1] += row["corrections"] * row["correction_precision"] if row["corrections"] else 0
    last = train.accuracy(learner, samples.test_images, samples.test_labels)
    noise = irnet.noise_level(samples.candidates, samples.labels)
    spent = time.process_time() - worked
    return dict(last=last, moved=counts[0], right=round(counts[1]), noise_after=noise, cpu_seconds=spent)


def table(lines: list[dict]):
    """Markdown: a row a base and (q, eta), the mean over the seeds, per cent; the best fixed tau is in brackets."""
    names = list(dict.fromkeys(line["choice"] for line in lines if not line["choice"].startswith("tau ")))
    cells = list(dict.fromkeys((line["base"], line["q"], line["eta"]) for line in lines))
    yield f"| base, q, eta | seeds | {' | '.join(names)} | best tau |"
    yield "| --- " * (len(names) + 3) + "|"
    for base, q, eta in cells:
        of = [line for line in lines if (line["base"], line["q"], line["eta"]) == (base, q, eta)]
        ends = {}
        for line in of:
            ends.setdefault(line["choice"], []).append(100 * line["last"])
        fixed = {name: statistics.mean(values) for name, values in ends.items() if name.startswith("tau ")}
        best = max(fixed, key=fixed.get, default=None)
        shown = [cell(ends[n]) if n in ends else "-" for n in names]
        last = f"{fixed[best]:.1f} ({best[4:]})" if best else "-"
        yield f"| {base} {q:g} {eta:g} | {max(map(len, ends.values()))} | {' | '.join(shown)} | {last} |"


def main(argv: list[str]) -> int:
    parser = Parser("python -m paper branches", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--choices",
        nargs="+",
        default=["alone", "preset", "auto", "grid"],
        choices=list(CHOICES),
        help="what goes on after e0; quote names with a comma (default alone preset auto grid)",
    )
    parser.add_argument("--bases", nargs="+", default=list(TAUS), choices=list(TAUS), help="(default both)")
    parser.add_argument("--q", type=float, nargs="+", default=[0.3, 0.5], help="(default 0.3 0.5)")
    parser.add_argument("--eta", type=float, nargs="+", default=[0.0, 0.1, 0.3], help="(default 0 0.1 0.3)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14], help="(default 10 to 14)")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default reproduced)")
    parser.add_argument(
        "--options", nargs="...", default=[], help="the rest goes to every run, as --dataset kmnist"
    )
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "branches.jsonl"
    lines = lines_of(path)
    asked = []
    for seed, q, eta, base in itertools.product(chosen.seeds, chosen.q, chosen.eta, chosen.bases):
        setting = dict(base=base, q=q, eta=eta, seed=seed, options=" ".join(chosen.options))
        words = [*(f"--{name}={setting[name]}" for name in ("base", "q", "eta", "seed")), *chosen.options]
        begun = None
        for name, more in choices_of(chosen.choices, base).items():
            key = setting | dict(choice=name)
            line = next((line for line in lines if key.items() <= line.items()), None)
            if line is None:
                begun = trunk(words) if begun is None else begun
                if not begun:
                    print(f"{base} q {q:g} eta {eta:g} seed {seed}: e0 was not found; more --epochs", flush=True)
                    break
                line = key | dict(e0=begun["epoch"]) | branch([*words, *more], begun)
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{base} q {q:g} eta {eta:g} seed {seed}, {name}: {100 * line['last']:.1f}", flush=True)
            asked.append(line)
    text = "\n".join(table(asked)) + "\n"
    (chosen.out / "branches.md").write_text(text)
    print(f"\n{text}")
    return 0
