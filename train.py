"""Trains one partial-label base, with IRNet on top or without, on one dataset: Algorithm 1, top to bottom.

python train.py                                                  digits, embedded; under a minute on a laptop
python train.py --dataset kmnist --q 0.5 --eta 0.3 --base pico   the paper's experiment
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import augment
import data
import irnet
import losses
import models
from harness import InputError, checkpoint, folder, options, ranks
from harness.ranks import say
from harness.terminal import Screen

NEED_TRUTH = ("phi_c", "phi_n", "bayes_error", "correction_precision", "transductive", "noise_level")  # hidden

# ------------------------------------------------------------------ Alg. 1: initialise f


@dataclass
class Learner:
    """What learns: f, the base that trains it, IRNet on top."""

    network: models.Encoder | models.PiCO | models.Pair | ranks.Spread
    shape: dict  # by which models.build makes it again
    base: losses.Base
    refine: irnet.IRNet
    optimizer: torch.optim.Optimizer
    views: data.ImageViews | data.FeatureViews
    augmented: data.ImageViews | data.FeatureViews  # A(x), by numbers of its own: looking leaves the base as it is
    extra: str  # the extra views of Eqs. 11 and 12: a letter each, w weak, s strong
    share: float  # of a batch, that is looked at under them: the samples of the smallest margins
    always: bool  # whether all are, in every epoch, as the release does
    batch_size: int
    device: torch.device
    precision: ranks.Precision  # of the networks' passes
    plus: bool = False  # whether IRNet has what paper/plus.py adds
    drops: bool = False  # whether samples of no class are left out


def prepare(c, dataset: data.Dataset) -> tuple[Learner, data.Samples]:
    """The training set and all that learns from it, the same for a seed."""
    device, n = torch.device(c.device), len(dataset.images)
    dataset.check(c.arch, c.dataset, c.folds)

    # The candidate sets and the held-out part are drawn on the host: the same on every device.
    seeded = torch.Generator().manual_seed(c.seed)
    before = data.candidate_sets(dataset, c.q, c.eta, seeded, c.dataset)
    held = 0 if c.val == "test" else max(1, round(n * (0.1 if n < 5000 else 0.05)))
    left = n - max(held, math.ceil(n / c.folds) if c.folds else 0)  # to train on, also without a part of --folds
    if c.batch_size > left:
        raise InputError(f"--batch-size {c.batch_size} is more than the {left} training images: lower it")
    samples = data.Samples(dataset, before, held, seeded, device, on_host=c.data_device == "host")

    # torch's generator makes the weights; on the device one draws for the base, one for IRNet.
    torch.manual_seed(ranks.stream(c.seed, 1))
    generator, own = (torch.Generator(device).manual_seed(ranks.stream(c.seed, k)) for k in (2, 4))
    shape = dict(arch=c.arch, pair=c.base == "dividemix") | dataset.shape
    queue = dict(queue_size=c.queue, key_momentum=c.key_momentum, prototype_momentum=c.prototype_momentum)
    network = models.build(**shape, pico=queue if c.base in options.PICO_FAMILY else None).to(device)
    base = make_base(c, dataset, samples.candidates, generator, seeded)
    e0 = dict(rule=c.e0_rule, window=c.window, e0=None if c.e0 == "auto" else int(c.e0), since=base.starts)
    fixed = None if dataset.decided is None else dataset.decided.any(1).to(device)  # what a person decided stays
    how = dict(swap=c.swap, weights_after=c.weights_after, strict=c.strict, fixed=fixed)
    refine = irnet.IRNet(samples.candidates, c.tau, c.epochs, **e0, **how)
    if c.irnet != "paper":
        from paper import plus

        refine = plus.make(c.irnet, base, c.tau_auto, own, samples.candidates, c.tau, c.epochs, **e0, **how)
    if c.record_views:
        models.record_views(network)
        base.newest = True
    precision = ranks.Precision(c.amp, device, dataset.images.shape[-1])
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, c.lr, 0.9, weight_decay=c.weight_decay, **precision.optimizer_options)
    torch.backends.cudnn.benchmark = True  # the shapes of a run's batches stay the same
    if c.compile:
        augment.compile_operations()
        models.compile_backbones(network)
    part = (lambda rows: slice(None)) if base.mixes else ranks.part
    flip = 0.5 * (dataset.images.shape[1] == 3) if c.flip == "auto" else c.flip
    views = [data.views_of(dataset, g, part, c.feature_noise, crop=c.crop, flip=flip) for g in (generator, own)]
    return Learner(
        ranks.spread(network, parts=not base.mixes), shape, base, refine, optimizer, *views,
        "" if c.views == "none" else c.views, 1.0 if c.views_all or c.record_views else c.views_share,
        c.record_views, c.batch_size, device, precision, c.irnet != "paper", c.open_set == "drop",
    ), samples  # fmt: skip


def make_base(c, dataset: data.Dataset, candidates: Tensor, generator, seeded) -> losses.Base:
    """One of the six, or one of the paper's other methods."""
    pico = dict(proto_start=c.proto_start, classifier_loss=c.classifier_loss, phi=tuple(c.phi), f=c.f)
    if c.base in losses.BASES:
        more = {"lwc": dict(beta=c.beta), "pico": pico}
        more |= dict.fromkeys(("log", "rc"), dict(as_released=c.variant == "released"))
        if c.follow_votes:
            from crowd import weights

            return weights.make(c.base, dataset, candidates, more.get(c.base, {}))
        return losses.BASES[c.base](candidates, **more.get(c.base, {}))
    from paper import baselines

    return baselines.make(c, dataset, candidates, pico, generator, seeded)


# ------------------------------------------------------------------ evaluation


@torch.no_grad()
def evaluate(learner: Learner, function: Callable, images: Tensor, place: str | None = None) -> Tensor:
    """function(plain images or features) batch by batch, in evaluation mode -> on `place`, else on the device."""
    learner.network.eval()
    with learner.precision.autocast():
        parts = (learner.views.plain(part.to(learner.device)) for part in images.split(learner.batch_size))
        found = [function(part).to(place or learner.device) for part in parts]
    learner.network.train()
    return torch.cat(found)


def predict(learner: Learner, images: Tensor) -> Tensor:
    """argmax over all classes [N]."""
    return evaluate(learner, lambda x: learner.network(x).argmax(1), images)


def accuracy(learner: Learner, images: Tensor, labels: Tensor) -> float:
    return float((predict(learner, images) == labels).float().mean())


def logits_of(learner: Learner, images: Tensor) -> Tensor:  # [N, C]
    return evaluate(learner, lambda x: learner.network(x).float(), images)


def probabilities(learner: Learner, images: Tensor, place: str | None = None) -> tuple[Tensor, Tensor]:
    """The classifier's [N, C], and the f of Eq. 4 [N, C]."""
    network, base = learner.network, learner.base
    both = lambda x: torch.stack([network(x).float().softmax(1), base.probabilities(network, x)], 1)  # noqa: E731
    return evaluate(learner, both, images, place).unbind(1)


def wants_features(d: data.Dataset) -> bool:
    """Whether heads on the features are asked about all samples: of votes, or of sets that are not too many."""
    return d.candidates is not None and (d.votes is not None or len(d.images) <= 200_000)


def features_of(learner: Learner, images: Tensor) -> Tensor:
    """The backbone's [N, D], on the host."""
    return evaluate(learner, lambda x: models.features(learner.network, x), images, "cpu")


def validation_score(logits: Tensor, candidates: Tensor) -> float:
    """How often the prediction on the held-out part is a candidate: no true label is read. It rises and falls with
    accuracy, since a wrong prediction is a candidate only with probability q."""
    return float(candidates.gather(1, logits.argmax(1, keepdim=True)).float().mean())


# ------------------------------------------------------------------ Algorithm 1


def cosine(lr: float, epoch: int, epochs: int) -> float:
    """lr(e), e from 1: the released schedule, down to lr / 1000."""
    low = lr * 1e-3
    return low + (lr - low) * (1 + math.cos(math.pi * epoch / epochs)) / 2


def train_step(learner: Learner, index: Tensor, x: Tensor, labels: Tensor, correcting: bool) -> tuple[Tensor, ...]:
    """One mini-batch, index [B] and images x -> the loss, Eq. 4's tau [B], six counts. Reads nothing back."""
    network, base, refine, optimizer = learner.network, learner.base, learner.refine, learner.optimizer
    views = [learner.views.view(kind, x) for kind in base.views]
    with learner.precision.autocast():
        loss, f_x = base.loss(network, views, index)
        if learner.plus:
            loss = loss + refine.mixed(network, views[0], base.weights, index)
    optimizer.zero_grad(set_to_none=True)
    learner.precision.backward(loss)  # Alg. 1: train the predictive model f on B_t
    candidates = refine.candidates[index]
    tau = irnet.margin(f_x, candidates)
    if correcting or learner.always:  # f(z) for every z in A(x), by the network that gave f(x)
        near, f_z = look_again(learner, x, tau)
    learner.precision.step(optimizer)
    with learner.precision.autocast():
        base.after_step(network, views, index, f_x)

    counts = irnet.hits(f_x, candidates, labels)  # the sums of Eqs. 7 and 8, for reporting
    corrections = counts.new_zeros(2)
    if correcting:  # Alg. 1: where Eqs. 10-12 hold, move the predicted label into S
        flagged, label = refine.correct(index[near], [f_x[near], *f_z], base.weights)
        corrections = torch.stack([flagged, flagged & (label == labels[near])]).sum(1)
    return loss.detach(), tau, torch.cat([counts, corrections])


def look_again(learner: Learner, x: Tensor, tau: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Who is looked at under augmentation, and f(z): the smallest margins can meet Eq. 10, the others later."""
    room = min(len(x), ranks.size() * math.ceil(learner.share * len(x) / ranks.size()))
    whole = room == len(x)
    near = torch.arange(len(x), device=x.device) if whole else tau.topk(room, largest=False).indices
    with torch.random.fork_rng(devices=()):  # beside a card the host draws too, from torch's own generator
        a_x = [learner.augmented.view(kind, x if whole else x[near]) for kind in learner.extra]  # A(x)
    with learner.precision.autocast():
        return near, [learner.base.look(learner.network, z, recorded=not whole) for z in a_x]


def train_epoch(
    learner: Learner, samples: data.Samples, epoch: int, epochs: int, lr: float, corrects: bool = True,
    after_step: Callable[[int, int], None] = lambda step, steps: None,
) -> tuple[dict, Tensor, Tensor]:  # fmt: skip
    """Alg. 1: shuffle, then the mini-batches of one epoch -> its row so far; the margins; whose set was noisy."""
    began, base, refine, network = time.monotonic(), learner.base, learner.refine, learner.network
    for group in learner.optimizer.param_groups:
        group["lr"] = cosine(lr, epoch, epochs)
    look = lambda function: evaluate(learner, lambda x: function(network, x), samples.images)  # noqa: E731
    base.begin_epoch(epoch, look)
    if refine.started and corrects and learner.plus:
        refine.begin_epoch(look, base.weights)
    correcting = refine.started and corrects and refine.tau < math.inf  # Alg. 1's second loop
    pool = torch.cat([samples.pool, samples.held_out]) if refine.started else samples.pool  # after e0 they join
    if samples.p_outside is not None:  # --open-set
        from crowd import outside

        pool = outside.settle(samples, refine, pool, learner.drops, learner.batch_size)
    wanted = base.pool(pool)
    pool = wanted if len(wanted) >= learner.batch_size else pool
    order = pool[torch.randperm(len(pool), generator=learner.views.generator, device=learner.device)]
    steps = len(order) // learner.batch_size  # T_max; what is left over has its turn in another epoch
    seen = order[: steps * learner.batch_size]
    noisy = irnet.is_noisy(samples.candidates[seen], samples.labels[seen])  # as each is when it is seen
    taus, step_losses = [], []
    counts = torch.zeros(6, dtype=torch.long, device=learner.device)
    for step, (index, x) in enumerate(samples.batches(seen, learner.batch_size), 1):
        loss, tau, count = train_step(learner, index, x, samples.labels[index], correcting)
        taus.append(tau)
        step_losses.append(loss)
        counts += count
        after_step(step, steps)
        if step == steps or step % 100 == 0:  # a rare look: all the steps between wait for nothing
            finite = torch.stack(step_losses).isfinite()
            if not finite.all():
                raise folder.NotFinite(f"the loss is not finite in step {int(finite.int().argmin()) + 1}")
    values = [t.isfinite().all() for t in network.state_dict().values() if torch.is_tensor(t)]
    if not torch.stack(values).all():
        raise folder.NotFinite("the network is not finite after the last step")
    base.end_epoch(epoch, epochs)
    phi_c, phi_n = irnet.hit_ratios(counts[:4])  # the first read: the device has finished
    moved, right = counts[4:].tolist()
    taus, precision = torch.cat(taus), right / moved if moved else math.nan
    rate, error = len(seen) / (time.monotonic() - began), irnet.bayes_error(taus, noisy)
    row = dict(epoch=epoch, lr=cosine(lr, epoch, epochs), loss=float(torch.stack(step_losses).mean()))
    row |= dict(phi_c=phi_c, phi_n=phi_n, bayes_error=error)
    row |= dict(corrections=moved, correction_precision=precision, images_per_second=rate)
    row |= refine.notes if learner.plus else {}
    return row, taus, noisy


def check_epoch(c, learner: Learner, samples: data.Samples, row: dict) -> None:
    """Alg. 1: evaluate f, save the result in res[e], check the convergence condition."""
    refine, epoch, held_out = learner.refine, row["epoch"], samples.candidates[samples.held_out]
    unseen = len(held_out) and not refine.started  # the held-out part, so far
    row["val"] = math.nan
    if unseen or len(held_out) and not samples.large:
        logits = logits_of(learner, samples.held_out_images())
        row["val"] = validation_score(logits, held_out)
    look = c.val == "test" or epoch % (c.test_every or 1 + samples.large) == 0 or epoch == c.epochs
    row["test"] = accuracy(learner, samples.test_images, samples.test_labels) if look else math.nan
    row["val"] = row["test"] if c.val == "test" else row["val"]
    found = refine.end_epoch(row["val"])
    if unseen and (found or epoch == c.epochs):
        eta, t, (low, high) = irnet.estimate_noise(logits, held_out)
        row["noise_estimate"] = folder.plain(dict(eta=eta, low=low, high=high, temperature=t))
        row["expected"] = irnet.expected_accuracy(logits, t)  # of the network by itself
        if c.dataset not in options.PRESETS:  # one's own: who knows how its labels came about?
            import crowd

            p, _ = probabilities(learner, samples.images, "cpu")
            features = features_of(learner, samples.images) if wants_features(samples.dataset) else None
            row |= crowd.look(samples, p, features, c.tau if found and c.careful else None)
            refine.tau = row.get("tau", refine.tau)
    look = epoch % (c.transductive_every or (c.epochs if samples.large else 1)) == 0 or epoch == c.epochs
    row["transductive"] = accuracy(learner, samples.images, samples.labels) if look else math.nan
    row["noise_level"] = irnet.noise_level(samples.candidates, samples.labels)
    row["set_size"] = float(samples.candidates.sum(1).float().mean())
    row["e0"] = refine.e0


def train(c, run: folder.Run) -> int:
    """Both loops of Algorithm 1 -> the exit status."""
    config = options.recorded(c)
    state, finished = ranks.from_first(lambda: run.look(config, c.resume, c.overwrite))
    if finished:
        say(f"{run.folder} is finished: summary.json has its results, candidates.npz its candidate sets")
        return 0
    torch.set_num_threads(c.threads or torch.get_num_threads())
    own = {name: getattr(c, name) for name in options.READING}
    source = (c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test)
    dataset = ranks.one_first(lambda: data.load(*source, **own))
    fingerprint = dataset.fingerprint()
    learner, samples = prepare(c, dataset)  # Alg. 1: initialise f
    rows, histograms = checkpoint.restore(state, learner, samples, fingerprint) if state else ([], [])
    if not ranks.same_everywhere(samples.candidates):
        raise InputError(f"--dataset {c.dataset}: the ranks do not see the same data")
    more = dict(network=learner.shape, class_names=dataset.class_names, features=dataset.features)
    ranks.from_first(lambda: run.begin(config | more | dict(fingerprint=fingerprint), rows))
    screen = Screen(c.epochs, len(samples.pool) // c.batch_size, not c.no_irnet, dataset.truth_known, dataset.score)
    screen.opening(c, dataset, samples, learner, run.folder, len(rows))
    interrupt = run.interrupt = folder.Interrupt()
    if c.folds:
        from crowd import folds

        stop = lambda step, steps: interrupt.check()  # noqa: E731
        samples.out = state["out"] if state else folds.cross_fit(sys.modules[__name__], c, dataset, stop)

    for epoch in range(len(rows) + 1, c.epochs + 1):  # Alg. 1: for e = 1..E_max
        began, worked = time.monotonic(), time.process_time()
        after_step = lambda step, steps, e=epoch: (screen.step(e, step, steps), interrupt.check())  # noqa: E731
        row, taus, noisy = train_epoch(learner, samples, epoch, c.epochs, c.lr, not c.no_irnet, after_step)
        check_epoch(c, learner, samples, row)
        if epoch in (row["e0"], c.epochs):
            histograms.append(dict(epoch=epoch) | irnet.margin_histogram(taus, noisy))  # Fig. 3
        if c.open_set != "off":
            from crowd import outside

            outside.look(sys.modules[__name__], learner, samples, row, c.epochs)
        if c.tau_auto and learner.refine.started:
            from paper import tau

            tau.after_epoch(learner.refine, [*rows, row], taus)
        row |= dict(seconds=time.monotonic() - began, cpu_seconds=time.process_time() - worked)
        row |= {} if dataset.truth_known else dict.fromkeys(NEED_TRUTH, math.nan)
        rows.append(row)
        if not ranks.same_everywhere(samples.candidates):
            raise folder.Broken(f"the candidate sets of the ranks differ after epoch {epoch}")
        if epoch in c.snapshots:
            features = features_of(learner, samples.test_images)
            run.snapshot(epoch, labels=samples.test_labels, tau=taus, noisy=noisy, features=features)
        if ranks.first():
            run.row(row)
            written = dict(config=config, rows=json.dumps(rows), histograms=json.dumps(histograms))
            state = checkpoint.state_of(learner, samples, fingerprint) | written | dict(out=samples.out)
            run.save(state, epoch, now=epoch % c.save_every == 0 or epoch == c.epochs)
            if c.keep_e0 and epoch == row["e0"]:
                run.keep("e0.pt")
        screen.row(row)

    finish(c, run, dataset, samples, learner, rows, histograms, screen)
    return 0


def finish(c, run, dataset, samples, learner: Learner, rows: list[dict], histograms: list[dict], screen) -> None:
    """The results of all samples, then the pages about them."""
    import crowd
    from harness import results

    refine, noise = learner.refine, irnet.noise_level(samples.before, samples.labels.cpu())
    summary = results.summarise(c, rows, refine.e0, refine.tau, noise if dataset.truth_known else math.nan)
    parts = [samples.images, samples.test_images][: 2 if dataset.scored else 1]  # those set aside are judged too
    p, f = map(torch.cat, zip(*(probabilities(learner, part, "cpu") for part in parts), strict=True))
    features = [features_of(learner, part) for part in parts] if wants_features(dataset) else []
    p_outside = None if samples.p_outside is None else samples.p_outside.cpu()
    if ranks.first():
        after = [t.cpu() for t in (samples.candidates, refine.corrected_at, refine.corrected_to)]
        kept = dict(zip(("after", "corrected_at", "label"), after, strict=True))
        run.results(models.classifier_state(learner.network), before=samples.before, truth=dataset.labels, **kept)
        end = crowd.Outcome(samples.before, *after, p, f, c.tau, features, samples.out, p_outside)
        tables = crowd.tables(dataset, end)
        for file, text in tables.items():
            run.text(file, text)
        summary |= (dataset.decisions or {}) | crowd.score(tables["labels.csv"]) | dict(score=dataset.score)
        name = run.folder.resolve().name
        if c.dataset not in options.PRESETS:
            run.page("review.html", lambda: crowd.review(tables["labels.csv"], dataset, p, c.dataset, name))
        own = lambda: crowd.part_of_report(tables)  # noqa: E731
        run.page("report.html", lambda: results.report_page(c, name, rows, summary, histograms, dataset, own()))
        run.finish(summary)
    screen.closing(c, summary, run.folder)


def main(argv: list[str] | None = None) -> int:
    run = None
    try:
        c = options.configure(argv, data.has_features, data.count)
        ranks.start(c.device, c.batch_size)
        with folder.Run.of(c, own=c.dataset not in options.PRESETS) as run:
            return train(c, run)
    except (Exception, KeyboardInterrupt) as error:
        return folder.exit_status(error, run)


if __name__ == "__main__":
    ranks.leave(main())
