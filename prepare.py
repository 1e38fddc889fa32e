"""Everything before the first epoch (Alg. 1: initialise f): data, candidate sets, network, method, optimiser,
random numbers; and their state for a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

import augment
import baselines
import crowd
import data
import irnet
import models
import parallel
from data import InputError


class Setup:
    """What is trained on what."""

    def __init__(self, c: argparse.Namespace, dataset: data.Dataset | None = None):
        self.device = device = torch.device(c.device)
        if c.threads:
            torch.set_num_threads(c.threads)
        self.dataset = d = dataset or parallel.one_first(lambda: crowd.dataset(c))
        features = d.images.is_floating_point()
        if features and c.arch != "mlp":
            raise InputError(f"--arch {c.arch}: {c.dataset} has features, not images; use --arch mlp")

        if c.arch == "cnn" and d.images.shape[-1] < 8:
            raise InputError(f"--arch cnn: {c.dataset} has images below 8x8; use --arch mlp, or --image-size 8")

        # The candidate sets and the held-out part: the same for a seed on every device.
        seeded = torch.Generator().manual_seed(c.seed)
        self.before = candidate_sets(c, d, seeded)  # bool [N, C], as they were
        n = len(d.images)
        held = 0 if c.val == "test" else max(1, round(n * (0.1 if n < 5000 else 0.05)))
        if c.batch_size > n - held:
            raise InputError(f"--batch-size {c.batch_size} is more than the {n - held} training images: lower it")
        shuffled = torch.randperm(n, generator=seeded).to(device)
        self.held_out, self.pool = shuffled[:held], shuffled[held:]

        self.fingerprint = d.fingerprint()

        # Everything lives on the device once; images too many for it stay on the host, perhaps on its disk.
        self.on_host = c.data_device == "host"
        place = (lambda images: images) if self.on_host else (lambda images: images.to(device).contiguous())
        self.images, self.test_images = place(d.images), place(d.test_images)
        self.labels, self.test_labels = d.labels.clamp_min(0).to(device), d.test_labels.to(device)
        self.candidates = self.before.to(device, copy=True)  # edited in place by IRNet

        # Alg. 1: initialise f. torch's generator makes the weights; one on the device draws all the rest.
        torch.manual_seed(c.seed)
        self.generator = torch.Generator(device).manual_seed(c.seed)
        momenta = dict(key_momentum=c.key_momentum, prototype_momentum=c.prototype_momentum)
        pico = dict(queue_size=c.queue, **momenta) if c.base in baselines.PICO_FAMILY else None
        pair = c.base == "dividemix"
        self.shape = dict(
            arch=c.arch, channels=d.images.shape[1], size=d.images.shape[-1], num_classes=d.num_classes
        )
        self.shape |= dict(mean=d.mean, std=d.std, pair=pair)
        self.network = models.build(**self.shape, pico=pico).to(device)
        self.base = baselines.METHODS[c.base](self.candidates, **base_options(c, self, seeded))
        e0 = dict(rule=c.e0_rule, window=c.window, e0=None if c.e0 == "auto" else int(c.e0))
        after = dict(swap=c.swap, weights_after=c.weights_after)
        self.refine = irnet.IRNet(self.candidates, c.tau, c.epochs, **e0, **after)
        trained = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, c.lr, momentum=0.9, weight_decay=c.weight_decay, foreach=True)
        native = c.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.bf16 = c.amp == "bf16" or c.amp == "auto" and native
        if c.compile:
            augment.compile_operations()
            for encoder in self.network.modules():
                if isinstance(encoder, models.Encoder):
                    encoder.backbone.compile()
        if parallel.size() > 1:
            if pair:
                raise InputError("--base dividemix: its two networks train in one process only")
            self.network = parallel.Spread(self.network)
        self.augment = dict(crop=c.crop, flip=c.flip)
        # features have no crops: their views are the features with Gaussian noise
        self.noise = c.feature_noise * torch.tensor(d.std, device=device).view(1, -1, 1, 1) if features else None

    def autocast(self):
        """Weights are cast for every pass: a copy kept from one without gradients would get none in the next."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(index, images) of the mini-batches, on the device; from the host each is copied one batch ahead."""
        if not self.on_host:
            yield from ((index, self.images[index]) for index in order.split(size))
            return
        ahead = None
        for index, rows in zip(order.split(size), order.cpu().split(size), strict=True):
            images = self.images[rows]
            images = images.pin_memory() if self.device.type == "cuda" else images
            now, ahead = ahead, (index, images.to(self.device, non_blocking=True))
            if now is not None:
                yield now
        if ahead is not None:
            yield ahead

    def plain(self, x: Tensor) -> Tensor:
        """What the network takes, without augmentation: images in [0, 1], features as they are."""
        return x if self.noise is not None else x.float() / 255

    def view(self, kind: str, x: Tensor) -> Tensor:
        """A weak (w) or strong (s) view of uint8 images [B, ch, H, W], in [0, 1], or of features [B, D, 1, 1]."""
        if self.noise is not None:
            drawn = torch.randn(x.shape, generator=self.generator, device=x.device)
            return torch.addcmul(x, drawn, self.noise, value={"w": 1, "s": 2}[kind])
        return {"w": data.weak, "s": data.strong}[kind](x, self.generator, **self.augment)

    def state_dict(self) -> dict:
        parts = ("network", "optimizer", "base", "refine")
        randomness = dict(generator=self.generator.get_state(), torch_generator=torch.get_rng_state())
        data = dict(data=self.fingerprint, before=self.before, held_out=self.held_out, pool=self.pool)
        return {part: getattr(self, part).state_dict() for part in parts} | randomness | data

    def load_state_dict(self, state: dict) -> None:
        if state["data"] != self.fingerprint or not torch.equal(state["before"], self.before):
            raise InputError("--resume: the data are not those that the run began with")
        self.held_out, self.pool = state["held_out"].to(self.device), state["pool"].to(self.device)
        for part in ("network", "optimizer", "base", "refine"):
            getattr(self, part).load_state_dict(state[part])
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["torch_generator"].cpu())


def candidate_sets(c: argparse.Namespace, d: data.Dataset, generator: torch.Generator) -> Tensor:
    if d.candidates is not None:
        if c.q is not None or c.eta is not None:
            raise InputError(f"--q, --eta: {c.dataset} has candidate sets of its own; leave both out")
        return d.candidates
    if c.q is None:
        raise InputError(
            f"{c.dataset} has no candidates, annotators or votes: add them, or make some by --q and --eta"
        )
    if not d.truth_known:
        raise InputError(f"--q, --eta: sets are made from the truth, which {c.dataset} does not have (y_train)")
    candidates = data.corrupt(d.labels, d.num_classes, c.q, c.eta, generator)
    if c.eta > 0 and candidates.all():
        raise InputError(f"--q {c.q:g} fills every candidate set, so that none can be noisy: lower it, or --eta 0")
    return candidates


def base_options(c: argparse.Namespace, s: Setup, seeded: torch.Generator) -> dict:
    """What a method takes beside the candidate sets."""
    if c.base in baselines.PICO_FAMILY:
        pico = dict(proto_start=c.proto_start, classifier_loss=c.classifier_loss, phi=tuple(c.phi), f=c.f)
        start, near = (50, 5) if c.dataset == "cifar100" else (5, 16)  # as published
        plus = dict(start=max(2, baselines.warm_up(start, c.epochs)), neighbours=near)
        more = {"pico+": plus | dict(generator=s.generator, queue_size=c.queue), "alim": dict(eta=c.eta)}
        return pico | more.get(c.base, {})
    if c.base in ("supervised", "dividemix"):
        chosen = (
            s.dataset.votes.argmax(1) if s.dataset.votes is not None else baselines.one_candidate(s.before, seeded)
        )
        labels = dict(labels=chosen.to(s.device))
        return labels | (dict(generator=s.generator, epochs=c.epochs) if c.base == "dividemix" else {})
    forms = dict.fromkeys(("mae", "mse", "sce"), dict(form=c.form))
    return ({"lwc": dict(beta=c.beta)} | forms).get(c.base, {})
