"""Trains one partial-label base, with IRNet on top or without, on one dataset: Algorithm 1, top to bottom.

python train.py                                                  digits, embedded; under a minute on a laptop
python train.py --dataset kmnist --q 0.5 --eta 0.3 --base pico   the paper's experiment
python train.py --dataset cifar100 --q 0.05 --eta 0.3 --base proden --no-irnet
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import crowd
import irnet
import models
import parallel
from data import InputError
from options import configure, recorded
from prepare import Setup
from presets import PRESETS
from runs import Interrupt, Run, WriteError, plain
from screen import Screen

# what of a row only the hidden truth tells
NEED_TRUTH = ("phi_c", "phi_n", "bayes_error", "correction_precision", "transductive", "noise_level")

# ------------------------------------------------------------------ evaluation


@torch.no_grad()
def evaluate(s: Setup, function: Callable, images: Tensor) -> Tensor:
    """function(plain images or features) batch by batch, in evaluation mode; stays on the device."""
    s.network.eval()
    with s.autocast():
        found = [function(s.plain(part.to(s.device))) for part in images.split(500)]
    s.network.train()
    return torch.cat(found)


def predict(s: Setup, images: Tensor) -> Tensor:
    """argmax over all classes [N]."""
    return evaluate(s, lambda x: s.network(x).argmax(1), images)


def training_logits(s: Setup, name: str) -> Tensor:
    """[N, C] of one of several networks on the training images."""
    return evaluate(s, lambda x: getattr(s.network, name)(x).float(), s.images)


def test_features(s: Setup) -> Tensor:
    """The backbone's features of the test images [N, width], for Figs. 7 and 8."""
    encoder = next(m for m in s.network.modules() if isinstance(m, models.Encoder))
    return evaluate(s, lambda x: encoder.features(x).float(), s.test_images)


def final_probabilities(s: Setup, x: Tensor) -> Tensor:
    """[B, 2, C]: the classifier's, and the f of Eq. 4."""
    return torch.stack([s.network(x).float().softmax(1), s.base.probabilities(s.network, x)], 1)


def accuracy(s: Setup, images: Tensor, labels: Tensor) -> float:
    return float((predict(s, images) == labels).float().mean())


def held_out_logits(s: Setup) -> Tensor:
    """[M, C] of the part that is not trained on until e0."""
    return evaluate(s, lambda x: s.network(x).float(), held_out_images(s))


def held_out_images(s: Setup) -> Tensor:
    return s.images[s.held_out.to(s.images.device)]


def validation_score(s: Setup, logits: Tensor) -> float:
    """How often the prediction on the held-out part is a candidate: no true label is read. It rises and falls with
    accuracy, since a wrong prediction is a candidate only with probability q."""
    return float(s.candidates[s.held_out].gather(1, logits.argmax(1, keepdim=True)).float().mean())


def noise_estimate(s: Setup, logits: Tensor) -> dict:
    """The noise rate from the held-out part, without any true label."""
    eta, temperature, (low, high) = irnet.estimate_noise(logits, s.candidates[s.held_out])
    return plain(dict(eta=eta, low=low, high=high, temperature=temperature))


def careful_tau(s: Setup, c: argparse.Namespace, logits: Tensor, noise: dict) -> float:
    """On one's own data: tau, or a stricter one where even the largest noise rate not ruled out asks for it."""
    if noise["eta"] is None:
        return c.tau
    f = evaluate(s, lambda x: s.base.probabilities(s.network, x), held_out_images(s))
    return crowd.safe_tau(logits, f, s.candidates[s.held_out], noise["high"], noise["temperature"], c.tau)


# ------------------------------------------------------------------ Algorithm 1


def cosine(lr: float, epoch: int, epochs: int) -> float:
    """lr(e), e from 1: the released schedule, down to lr / 1000."""
    low = lr * 1e-3
    return low + (lr - low) * (1 + math.cos(math.pi * epoch / epochs)) / 2


def train_step(s: Setup, c: argparse.Namespace, index: Tensor, x: Tensor, correcting: bool) -> tuple[Tensor, ...]:
    """One mini-batch, index [B] and images x -> the loss, Eq. 4's tau [B], six counts. Reads nothing back."""
    labels = s.labels[index]
    views = [s.view(kind, x) for kind in s.base.views]
    augmented = [s.view(kind, x) for kind in c.views] if correcting and c.views != "none" else []  # A(x)
    with s.autocast():
        # f(z) for every z in A(x), once correcting; first, while the memory of f(x)'s gradients is still free
        f_z = [s.base.probabilities(s.network, z) for z in augmented]
        loss, f_x = s.base.loss(s.network, views, index)
    s.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # Alg. 1: train the predictive model f on B_t
    s.optimizer.step()
    with s.autocast():
        s.base.after_step(s.network, views, index, f_x)

    candidates = s.candidates[index]
    tau = irnet.margin(f_x, candidates)
    counts = irnet.hits(f_x, candidates, labels)  # the sums of Eqs. 7 and 8, for reporting
    corrections = counts.new_zeros(2)
    if correcting:  # Alg. 1: where Eqs. 10-12 hold, move the predicted label into S
        flagged, label = s.refine.correct(index, [f_x, *f_z], s.base.weights)
        corrections = torch.stack([flagged, flagged & (label == labels)]).sum(1)
    return loss.detach(), tau, torch.cat([counts, corrections])


def train_epoch(s: Setup, c: argparse.Namespace, epoch: int, screen: Screen, interrupt: Interrupt) -> dict | None:
    """Alg. 1: shuffle, then the mini-batches of one epoch -> its row so far; None if it was interrupted."""
    began = time.monotonic()
    for group in s.optimizer.param_groups:
        group["lr"] = cosine(c.lr, epoch, c.epochs)
    s.base.begin_epoch(epoch, lambda name: training_logits(s, name))
    correcting = s.refine.started and not c.no_irnet and s.refine.tau < math.inf  # Alg. 1's second loop
    pool = torch.cat([s.pool, s.held_out]) if s.refine.started else s.pool  # after e0 the held-out part joins
    order = pool[torch.randperm(len(pool), generator=s.generator, device=s.device)]
    steps = len(order) // c.batch_size  # T_max; what is left over has its turn in another epoch
    seen = order[: steps * c.batch_size]
    noisy = irnet.is_noisy(s.candidates[seen], s.labels[seen])  # as each is when it is seen
    taus, step_losses = [], []
    counts = torch.zeros(6, dtype=torch.long, device=s.device)
    for step, (index, x) in enumerate(s.batches(seen, c.batch_size), 1):
        loss, tau, count = train_step(s, c, index, x, correcting)
        taus.append(tau)
        step_losses.append(loss)
        counts += count
        screen.step(epoch, step, steps)
        if interrupt.signal:
            return None
        if step == steps or step % 100 == 0:  # a rare look: all the steps between wait for nothing
            finite = torch.stack(step_losses).isfinite()
            if not finite.all():
                return dict(not_finite=f"the loss is not finite in step {int(finite.int().argmin()) + 1}")
    values = [t.isfinite().all() for t in s.network.state_dict().values() if torch.is_tensor(t)]
    if not torch.stack(values).all():
        return dict(not_finite="the network is not finite after the last step")
    s.base.end_epoch(epoch, c.epochs)
    phi_c, phi_n = irnet.hit_ratios(counts[:4])  # the first read: the device has finished
    moved, right = counts[4:].tolist()
    s.margins = torch.cat(taus), noisy
    return dict(
        epoch=epoch,
        lr=cosine(c.lr, epoch, c.epochs),
        loss=float(torch.stack(step_losses).mean()),
        phi_c=phi_c,
        phi_n=phi_n,
        bayes_error=irnet.bayes_error(*s.margins),
        corrections=moved,
        correction_precision=right / moved if moved else math.nan,
        images_per_second=len(seen) / (time.monotonic() - began),
    )


def train(c: argparse.Namespace) -> int:
    name = f"{Path(c.dataset).stem}-{c.base}{'' if c.no_irnet else '-irnet'}"
    name += (f"-q{c.q:g}-eta{c.eta:g}" if c.q is not None else "") + f"-seed{c.seed}"
    config = recorded(c)
    run = Run(c.out or Path("runs") / name, named=c.out is not None)
    if c.dataset not in PRESETS and run.would_replace(Path(c.dataset)):
        raise InputError(f"--out {run.folder}: the run would replace --dataset {c.dataset}; name another folder")
    try:
        state, finished = parallel.from_first(lambda: run.look(config, c.resume, c.overwrite))
        if finished:
            say(f"{run.folder} is finished: summary.json has its results, candidates.npz its candidate sets")
            return 0
        s = Setup(c)
        rows = json.loads(state["rows"]) if state else []
        if state:
            s.load_state_dict(state)
        if not parallel.same_everywhere(s.candidates):
            raise InputError(f"--dataset {c.dataset}: the ranks do not see the same data")
        more = dict(network=s.shape, class_names=crowd.class_names(s.dataset), features=s.noise is not None)
        more |= dict(fingerprint=s.fingerprint)
        parallel.from_first(lambda: run.begin(config | more, rows))
        screen = Screen(c.epochs, len(s.pool) // c.batch_size, corrects=not c.no_irnet)
        screen.opening(c, s, run.folder, len(rows))
        interrupt = Interrupt()
        try:
            return epochs(s, c, config, run, rows, screen, interrupt)
        except RuntimeError as error:
            if not parallel.lost(error) or not interrupt.signal:
                raise
            run.flush()  # another rank was stopped a step earlier
            screen.stopped(len(rows) + 1, run.folder)
            return 128 + interrupt.signal
    finally:
        run.close()


def epochs(
    s: Setup, c: argparse.Namespace, config: dict, run: Run, rows: list[dict], screen: Screen, interrupt: Interrupt
) -> int:
    """Both loops of Algorithm 1, from the epoch after `rows` on -> the exit status."""
    for epoch in range(len(rows) + 1, c.epochs + 1):  # Alg. 1: for e = 1..E_max
        began = time.monotonic()
        row = train_epoch(s, c, epoch, screen, interrupt)
        if row is None or "not_finite" in row:
            run.flush()
            if row is None:
                screen.stopped(epoch, run.folder)
                return 128 + interrupt.signal
            kept = f"epochs 1 to {epoch - 1} are kept in {run.folder}" if epoch > 1 else "no epoch was finished"
            say(f"error: {row['not_finite']} of epoch {epoch}; {kept}: begin a new run, --lr lower", sys.stderr)
            return 1

        # Alg. 1: evaluate f, save the result in res[e], check the convergence condition.
        row["test"] = accuracy(s, s.test_images, s.test_labels)
        held_out = held_out_logits(s) if len(s.held_out) else None
        row["val"] = row["test"] if held_out is None else validation_score(s, held_out)
        unseen = not s.refine.started  # the held-out part, so far
        found = s.refine.end_epoch(row["val"])
        if held_out is not None and unseen and (found or epoch == c.epochs):
            row["noise_estimate"] = noise_estimate(s, held_out)
            if found and c.careful:
                row["tau"] = s.refine.tau = careful_tau(s, c, held_out, row["noise_estimate"])

        look = epoch % c.transductive_every == 0 or epoch == c.epochs
        row["transductive"] = accuracy(s, s.images, s.labels) if look else math.nan  # over all classes
        row["noise_level"] = irnet.noise_level(s.candidates, s.labels)
        row["set_size"] = float(s.candidates.sum(1).float().mean())
        row["e0"] = s.refine.e0
        row["seconds"] = time.monotonic() - began
        if not s.dataset.truth_known:
            row |= dict.fromkeys(NEED_TRUTH, math.nan)
        rows.append(row)
        if not parallel.same_everywhere(s.candidates):
            say(f"error: the candidate sets of the ranks differ after epoch {epoch}", sys.stderr)
            return 1
        if epoch in c.snapshots:
            seen = dict(zip(("tau", "noisy"), s.margins, strict=True)) | dict(features=test_features(s))
            run.snapshot(epoch, labels=s.test_labels, **seen)
        if parallel.first():
            run.row(row)
            everything = s.state_dict() | dict(config=config, rows=json.dumps(rows))
            run.save(everything, epoch, now=epoch % c.save_every == 0 or epoch == c.epochs)
        screen.row(row)

    summary = summarise(c, s, rows)
    both = functools.partial(final_probabilities, s)
    p_f = evaluate(s, both, s.images)
    if s.dataset.scored:
        p_f = torch.cat([p_f, evaluate(s, both, s.test_images)])
    if parallel.first():
        run.results(
            labels=crowd.labels(s, *p_f.unbind(1), c.tau),
            classifier=crowd.classifier(s.network),
            before=s.before.numpy(),
            after=s.candidates.cpu().numpy(),
            corrected_at=s.refine.corrected_at.cpu().numpy(),
            label=s.refine.corrected_to.cpu().numpy(),
            truth=s.dataset.labels.numpy(),
        )
        if c.dataset not in PRESETS:
            run.review(crowd.review_page(run.folder, s.dataset, c.dataset))
        run.finish(summary)
    screen.closing(c, summary, run.folder)
    return 0


def summarise(c: argparse.Namespace, s: Setup, rows: list[dict]) -> dict:
    moved = sum(row["corrections"] for row in rows)
    right = sum(row["corrections"] * row["correction_precision"] for row in rows if row["corrections"])
    seconds = sum(row["seconds"] for row in rows)
    best, last = max(row["test"] for row in rows), rows[-1]["test"]
    unseen = rows[: s.refine.e0]  # until then the held-out part, that `val` is from, was not trained on
    return dict(
        dataset=c.dataset,
        base=c.base,
        irnet=not c.no_irnet,
        q=c.q,
        eta=c.eta,
        seed=c.seed,
        epochs=c.epochs,
        arch=c.arch,
        e0=s.refine.e0,
        tau=s.refine.tau,
        best=best,
        last=last,
        gap=best - last,
        val_selected=max(unseen, key=lambda row: (row["val"], row["epoch"]))["test"],
        transductive=rows[-1]["transductive"],
        noise_before=irnet.noise_level(s.before, s.dataset.labels) if s.dataset.truth_known else math.nan,
        noise_after=rows[-1]["noise_level"],
        noise_estimate=next((row["noise_estimate"] for row in rows if "noise_estimate" in row), None),
        corrections=moved,
        correction_precision=right / moved if moved else math.nan,
        images_per_second=statistics.median(row["images_per_second"] for row in rows),
        seconds=seconds,
    )


def main(argv: list[str] | None = None) -> int:
    try:
        c = configure(argv)
        parallel.start(c.device, c.batch_size)
        return train(c)
    except (InputError, WriteError) as error:
        say(f"error: {error}", sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except RuntimeError as error:
        if not parallel.lost(error):
            raise
        print("error: another rank is gone; what rank 0 saved is kept: go on with --resume", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the first step
        print("\nstopped before the first step; nothing was lost", file=sys.stderr)
        return 130


def say(line: str, stream=None) -> None:
    if parallel.first():
        print(line, file=stream)


if __name__ == "__main__":
    parallel.leave(main())
