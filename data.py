"""Datasets, the corruption of their labels into noisy candidate sets (paper, Section 3.1), and the training set
as it lives on the device: its parts, its batches and their views.

Everything is loaded once, as uint8 images [N, ch, H, W] and labels [N]; grey images have one channel. One's own
data are read by crowd/; the augmentations are augment.py's, `weak` and `strong` are here by name too.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torchvision
from torch import Generator, Tensor
from torchvision.transforms.functional import resize

from augment import strong, weak
from harness import InputError

# ------------------------------------------------------------------ datasets


@dataclass
class Dataset:
    name: str
    images: Tensor  # uint8 [N, ch, H, W]; of one's own also features, float [N, D, 1, 1]
    labels: Tensor  # int64 [N], hidden truth: corruption and reporting only; -1 where nobody knows it
    test_images: Tensor
    test_labels: Tensor
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    candidates: Tensor | None = None  # bool [N, C] where the data brings its own sets
    votes: Tensor | None = None  # int [N, C], how many annotators gave each label
    files: list[str] | None = None  # the samples' names
    classes: list[str] | None = None  # the classes' names
    scored: object | None = None  # where the test set is a part set aside, its candidate sets (crowd.Scored)
    annotators: Tensor | None = None  # int64 [N, A], the label that each gave, -1 for none
    annotator_names: list[str] | None = None  # of the columns
    decided: Tensor | None = None  # bool [N, C], sets that a person decided on; an empty row: nobody has
    decisions: dict | None = None  # how many, for the summary
    voted_tests: int = 0  # test samples whose label is by their votes
    notes: list[str] = field(default_factory=list)  # lines about the data

    @property
    def truth_known(self) -> bool:
        return bool((self.labels >= 0).all())

    @property
    def features(self) -> bool:
        return self.images.is_floating_point()

    @property
    def shape(self) -> dict:
        """What a network must know of it."""
        sizes = dict(channels=self.images.shape[1], size=self.images.shape[-1], num_classes=self.num_classes)
        return sizes | dict(mean=self.mean, std=self.std)

    @property
    def class_names(self) -> list[str]:
        return self.classes or [str(k) for k in range(self.num_classes)]

    @property
    def sample_names(self) -> list[str]:
        """Of the training samples: their files, else their rows."""
        return self.files or [str(i) for i in range(len(self.images))]

    @property
    def score(self) -> str:
        """What the accuracy on `test_images` is."""
        by_votes = "score by the votes of the test samples" if self.voted_tests else "test accuracy"
        return by_votes if self.scored is None else "score on set-aside samples"

    def check(self, arch: str, name: str, folds: int = 0) -> None:
        """Whether a network of this kind can take it, and its samples so many parts."""
        if folds > len(self.images):
            raise InputError(f"--folds {folds}: there are only {len(self.images)} training samples")
        if self.features and arch != "mlp":
            raise InputError(f"--arch {arch}: {name} has features, not images; use --arch mlp")
        if arch in ("cnn", "wide") and self.images.shape[-1] < 8:
            raise InputError(f"--arch {arch}: {name} has images below 8x8; use --arch mlp, or --image-size 8")

    def fingerprint(self) -> str:
        """Of all labels and of as many images as 100 MB hold, to know the same data again."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (self.images, self.test_images, self.labels, self.test_labels):
            every = 1 + math.prod(tensor.shape) // 100_000_000
            digest.update(str(tuple(tensor.shape)).encode())
            rows = torch.arange(0, len(tensor), every)
            for some in rows.split(max(1, 2_000_000 // max(1, math.prod(tensor.shape[1:])))):  # a few megabytes
                digest.update(tensor[some].contiguous().numpy())
        return digest.hexdigest()

    @functools.cached_property
    def said(self) -> str:
        """Of what annotators said and a person decided, which a run depends on beside its sets."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (self.votes, self.annotators, self.decided):
            digest.update(b"none" if tensor is None else tensor.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()


TORCHVISION = {  # name: (class, classes, mean, std); released values, Fashion-MNIST's from its training images
    "kmnist": ("KMNIST", 10, (0.1918,), (0.3483,)),
    "fashion": ("FashionMNIST", 10, (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ("CIFAR100", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def load(
    name: str,
    root: str | Path = "data",
    size: int | None = None,
    limit_train: int | None = None,
    limit_test: int | None = None,
    **own,
) -> Dataset:
    """A dataset by name, or one's own by its path; `size` resizes, the limits keep the first N images. `own`: what
    crowd.load takes besides."""
    if name == "digits" or name in TORCHVISION:
        return cut(_digits() if name == "digits" else _torchvision(name, Path(root)), size, limit_train, limit_test)
    import crowd

    return cut(crowd.load(Path(name), size or 0, **own), None, limit_train, limit_test)


def has_features(path: Path) -> bool:
    """Whether one's own arrays are features rather than images."""
    import crowd

    return crowd.has_features(path)


def count(path: Path) -> int:
    """How many training samples one's own data have."""
    import crowd

    return crowd.count(path)


def cut(data: Dataset, size: int | None, limit_train: int | None = None, limit_test: int | None = None) -> Dataset:
    for part, limit in (("", limit_train), ("test_", limit_test)):
        images = getattr(data, part + "images")[:limit]
        if size is not None and images.shape[2:] != (size, size):
            images = resize(images if torch.is_tensor(images) else images.to("cpu"), [size, size], antialias=True)
        setattr(data, part + "images", images)
        setattr(data, part + "labels", getattr(data, part + "labels")[:limit])
    for name in ("candidates", "votes", "annotators", "decided", "files"):
        if getattr(data, name) is not None:
            setattr(data, name, getattr(data, name)[:limit_train])
    return data


def _digits() -> Dataset:
    """UCI optical digits (Alpaydin and Kaynak, CC BY 4.0): 1,437 to train, 360 to test, always the same ones."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        x, y = file["x"], file["y"]
    order = np.random.RandomState(0).permutation(len(x))
    x = torch.from_numpy(np.round(x[order] * (255 / 16)).astype(np.uint8))[:, None]
    y = torch.from_numpy(y[order]).long()
    return Dataset("digits", x[:1437], y[:1437], x[1437:], y[1437:], 10, *statistics(x[:1437]))


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the channels in [0, 1], over ten thousand images at the most."""
    enough = min(10_000, len(images), max(1, 50_000_000 // math.prod(images.shape[1:])))
    few = max(1, 400_000 // math.prod(images.shape[1:]))  # at a time: doubles are large
    count, total, squares = 0, 0.0, 0.0
    for some in torch.arange(enough).split(few):
        pixels = images[some].transpose(0, 1).flatten(1).double() / 255  # [ch, n H W]
        count, total = count + pixels.shape[1], total + pixels.sum(1)
        squares = squares + pixels.square().sum(1)
    mean = total / count
    deviation = ((squares - count * mean.square()) / max(1, count - 1)).clamp_min(0).sqrt()
    return tuple(mean.tolist()), tuple(deviation.clamp_min(1e-3).tolist())


class Rows:
    """Some rows of images that stay where they are, on the disk perhaps: read when they are asked for."""

    def __init__(self, images: Tensor, index: Tensor):
        self.images, self.index = images, index
        self.shape, self.dtype, self.device = (len(index), *images.shape[1:]), images.dtype, images.device

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows):
        if isinstance(rows, slice):
            return Rows(self.images, self.index[rows])
        return self.images[self.index[rows]]

    def split(self, size: int) -> Iterator[Tensor]:
        return (self.images[part] for part in self.index.split(size))

    def is_floating_point(self) -> bool:
        return self.images.is_floating_point()

    def to(self, device) -> Tensor:
        return self.images[self.index].to(device)


def _torchvision(name: str, root: Path) -> Dataset:
    cls, num_classes, mean, std = TORCHVISION[name]
    parts = []
    for train in (True, False):
        part = _find_or_download(getattr(torchvision.datasets, cls), root, train, name)
        images = torch.as_tensor(part.data)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)  # grey: one channel
        parts += [images, torch.as_tensor(part.targets).long()]
    return Dataset(name, *parts, num_classes, mean, std)


def _find_or_download(cls, root: Path, train: bool, name: str):
    with contextlib.suppress(RuntimeError):
        return cls(root, train=train, download=False)
    for folder in (root / cls.__name__ / "raw", root / cls.__name__):  # as they are downloaded, still packed
        part = "train" if train else "t10k"
        packed = [folder / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
        if all(path.is_file() for path in packed):
            return SimpleNamespace(**dict(zip(("data", "targets"), map(_unpacked, packed), strict=True)))
    existed = {p for p in (root, *root.rglob("*")) if p.exists()}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the bar stays, on stderr
            return cls(root, train=train, download=True)
    except (RuntimeError, OSError) as error:
        for path in sorted({root, *root.rglob("*")} - existed, reverse=True):  # leave no empty folders behind
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        folder = getattr(cls, "base_folder", f"{cls.__name__}/raw")
        raise InputError(
            f"{name} is not in {str(root)!r} and cannot be downloaded ({type(error).__name__}): put torchvision's "
            f"files into {str(root / folder)!r}, give another --data, or use --dataset digits, which needs none"
        ) from None


def _unpacked(path: Path) -> Tensor:
    """A file of bytes in the IDX format: two zeros, 8 for bytes, the number of sizes, the sizes, the bytes."""
    try:
        content = gzip.decompress(path.read_bytes())
        sizes = np.frombuffer(content, ">i4", content[3], 4)
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is no IDX file of bytes")
        return torch.from_numpy(np.frombuffer(content, np.uint8, -1, 4 + sizes.nbytes).reshape(sizes).copy())
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}") from None


# ------------------------------------------------------------------ corruption (paper, Section 3.1)


def corrupt(labels: Tensor, num_classes: int, q: float, eta: float, generator: Generator | None = None) -> Tensor:
    """Candidate sets bool [N, C]: every wrong label joins with probability q, then each sample turns noisy with
    probability eta: its true label gives way to a random non-candidate, so |S| stays. A full set stays clean."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=labels.device)

    y = labels.long()[:, None]  # [N, 1]
    candidates = (uniform(len(y), num_classes) < q).scatter_(1, y, True)
    count = (~candidates).cumsum(1, dtype=torch.int32)  # [N, C], non-candidates so far
    outside = count[:, -1:]  # [N, 1]
    noisy = (uniform(len(y), 1) < eta) & (outside > 0)
    # the k-th non-candidate, k uniform in 1..outside, stands where the count first reaches k
    k = (uniform(len(y), 1) * outside).int().minimum(outside - 1) + 1
    intruder = torch.searchsorted(count, k).clamp_max_(num_classes - 1)  # [N, 1]
    candidates.scatter_(1, y, ~noisy)
    return candidates.scatter_(1, intruder, candidates.gather(1, intruder) | noisy)


def candidate_sets(d: Dataset, q: float | None, eta: float | None, generator: Generator, name: str) -> Tensor:
    """bool [N, C]: those that the data brings, or such as q and eta make. name: of the data, for who gave it."""
    if d.candidates is not None:
        if q is not None or eta is not None:
            raise InputError(f"--q, --eta: {name} has candidate sets of its own; leave both out")
        return d.candidates
    if q is None:
        raise InputError(f"{name} has no candidates, annotators or votes: add them, or give --q and --eta")
    if not d.truth_known:
        raise InputError(f"--q, --eta: sets are made from the truth, which {name} does not have (y_train)")
    candidates = corrupt(d.labels, d.num_classes, q, eta, generator)
    if eta > 0 and candidates.all():
        raise InputError(f"--q {q:g} fills every candidate set, so that none can be noisy: lower it, or --eta 0")
    return candidates


# ------------------------------------------------------------------ on the device


class Samples:
    """Everything on the device, once: images, hidden labels, candidate sets, which are held out; the test set."""

    def __init__(self, d: Dataset, candidates: Tensor, held: int, generator: Generator, device, on_host=False):
        """Images too many for the device stay on the host, perhaps on its disk."""
        self.dataset, self.before = d, candidates  # bool [N, C], as they were
        self.out: Tensor | None = None  # [N, C], what networks say that were not trained on a sample: --folds
        self.candidates = candidates.to(device, copy=True)  # edited in place by IRNet
        self.labels = d.labels.clamp_min(0).to(device)  # for reporting only
        place = (lambda images: images) if on_host else (lambda images: images.to(device).contiguous())
        self.images, self.test_images = place(d.images), place(d.test_images)
        self.test_labels = d.test_labels.to(device)
        self.device, self.on_host = torch.device(device), on_host
        shuffled = torch.randperm(len(d.images), generator=generator).to(device)
        self.held_out, self.pool = shuffled[:held], shuffled[held:]
        self.p_outside: Tensor | None = None  # [N]: of no class, with --open-set from e0 on

    @property
    def large(self) -> bool:
        """So many that they are not looked at where nothing is decided."""
        return len(self.labels) >= 5000

    def held_out_images(self) -> Tensor:
        return self.images[self.held_out.to(self.images.device)]

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


class ImageViews:
    """What a network takes of uint8 images [B, ch, H, W]: floats in [0, 1]."""

    def __init__(self, generator: Generator | None = None, part=lambda rows: slice(None), **strength: float):
        self.generator, self.strength = generator, strength  # crop and flip
        self.part = part  # which rows of a batch to make views of

    def plain(self, x: Tensor) -> Tensor:
        return x.float() / 255

    def view(self, kind: str, x: Tensor) -> Tensor:
        """A weak (w) or strong (s) one."""
        return {"w": weak, "s": strong}[kind](x, self.generator, part=self.part(len(x)), **self.strength)


class FeatureViews:
    """Features [B, D, 1, 1] have no crops: their views are the features with Gaussian noise."""

    def __init__(self, generator: Generator, scale: float, std: tuple[float, ...], part=lambda rows: slice(None)):
        self.generator, self.part = generator, part
        self.deviation = scale * torch.tensor(std, device=generator.device).view(1, -1, 1, 1)  # of a weak view

    def plain(self, x: Tensor) -> Tensor:
        return x

    def view(self, kind: str, x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=self.generator, device=x.device)
        part = self.part(len(x))
        return torch.addcmul(x[part], drawn[part], self.deviation, value={"w": 1, "s": 2}[kind])


def views_of(d: Dataset, generator: Generator, part, noise: float, **strength: float) -> ImageViews | FeatureViews:
    """Those of a dataset, drawn by this generator."""
    return FeatureViews(generator, noise, d.std, part) if d.features else ImageViews(generator, part, **strength)
