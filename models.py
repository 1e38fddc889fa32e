"""Networks: five backbones, the encoder around them, and PiCO's second encoder, queue and prototypes.

resnet18: torchvision's ResNet-18 with the CIFAR stem (3x3 first convolution, no max-pool), the paper's backbone;
two of them with heads are the 23.0 M parameters of Table 6. narrow: a residual network that a CPU trains on all of
KMNIST in minutes. cnn: three convolutions for small images on a CPU; wide: the same with twice the channels. mlp:
two hidden layers. Images are floats in [0, 1], in one channel where they are grey; an encoder normalises them
itself: a checkpoint is all one needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

# ------------------------------------------------------------------ backbones: images [B, ch, H, W] -> [B, width]


def resnet18(channels: int, size: int) -> tuple[nn.Module, int]:
    net = torchvision.models.resnet18(num_classes=1)
    net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool, net.fc = nn.Identity(), nn.Identity()
    return net, 512


def narrow(channels: int, size: int, width: int = 16, hidden: int = 512) -> tuple[nn.Module, int]:
    """A stem and two basic blocks, each halving the image, then a hidden layer in place of average pooling: it
    costs little, and with it so few convolutions can learn noise by heart, as the bases do in the paper."""

    def block(inputs: int, outputs: int) -> nn.Module:
        halve = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))
        return BasicBlock(inputs, outputs, stride=2, downsample=halve)

    stem = [nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
    flat = 4 * width * math.ceil(size / 8) ** 2
    top = [nn.Flatten(), nn.Linear(flat, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, block(width, 2 * width), block(2 * width, 4 * width), *top), hidden


def cnn(channels: int, size: int, width: int = 32) -> tuple[nn.Module, int]:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        # pooled before the rest: a quarter of the work
        return [convolution, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    flat = 4 * width * (size // 8) ** 2
    hidden = [nn.Flatten(), nn.Linear(flat, 256), nn.BatchNorm1d(256), nn.ReLU(inplace=True)]
    return nn.Sequential(
        *block(channels, width), *block(width, 2 * width), *block(2 * width, 4 * width), *hidden
    ), 256


def wide(channels: int, size: int) -> tuple[nn.Module, int]:
    return cnn(channels, size, width=64)


def mlp(channels: int, size: int) -> tuple[nn.Module, int]:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(nn.Flatten(), *layer(channels * size * size, 256), *layer(256, 256)), 256


BACKBONES = {"resnet18": resnet18, "narrow": narrow, "cnn": cnn, "wide": wide, "mlp": mlp}


# ------------------------------------------------------------------ the encoder: backbone, classifier, projection


class Encoder(nn.Module):
    """images [B, ch, H, W] in [0, 1] -> logits [B, C]; with a head also unit embeddings [B, d]."""

    def __init__(
        self,
        arch: str,
        channels: int,
        size: int,
        num_classes: int,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        embedding: int | None = None,
    ):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        self.records = False  # whether batch normalisation records extra views, as in the release
        self.backbone, width = BACKBONES[arch](channels, size)
        self.classifier = nn.Linear(width, num_classes)
        if embedding:  # PiCO's projection head: width-width-d
            self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, embedding))
        for weight in self.parameters():
            if weight.ndim == 4:  # convolutions are faster with the channels last, on CPUs by half
                weight.data = channels_last(weight.data)

    def features(self, images: Tensor) -> Tensor:
        images = images[:, :, None, None] if images.ndim == 2 else images  # features [B, D]
        return self.backbone(channels_last((images - self.mean) / self.std))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        return self.classifier(features), F.normalize(self.head(features).float(), dim=1)

    @torch.no_grad()
    def peek(self, images: Tensor, recorded: bool = False) -> Tensor:
        """The forward pass of an extra view: running statistics untouched."""
        with running_statistics_frozen(self, recorded):
            return self(images)


def channels_last(x: Tensor) -> Tensor:
    """One channel lies the same way in both formats: say which it is, or the first convolution answers in the other
    one, what follows is slow, and gradients do not lie as their weights do."""
    _, c, h, w = x.shape
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (c * h * w, 1, c * w, c))


@contextmanager
def running_statistics_frozen(module: nn.Module, recorded: bool = False):
    """In training mode batch normalisation still uses the batch's statistics, but does not record them; or uses the
    `recorded` ones, where the batch is only a part of one."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [] if getattr(module, "records", False) else norms
    training = module.training
    try:
        for norm in norms:
            norm.track_running_stats = recorded or not training  # evaluation keeps using what was recorded
            norm.training = training and not recorded
        yield
    finally:
        for norm in norms:
            norm.track_running_stats, norm.training = True, training


# ------------------------------------------------------------------ PiCO


class PiCO(nn.Module):
    """Query encoder, its moving average (the key encoder), a queue of keys, and a prototype a class."""

    def __init__(
        self,
        query: Encoder,
        key: Encoder,
        num_classes: int,
        embedding: int = 128,
        queue_size: int = 8192,
        key_momentum: float = 0.999,
        prototype_momentum: float = 0.99,
    ):
        super().__init__()
        self.query, self.key = query, key.requires_grad_(False)
        key.load_state_dict(query.state_dict())
        self.key_momentum, self.prototype_momentum = key_momentum, prototype_momentum
        self.register_buffer("queue", F.normalize(torch.randn(queue_size, embedding), dim=1))
        self.register_buffer("queue_labels", torch.full((queue_size,), -1))  # matches nothing until filled
        self.register_buffer("prototypes", torch.zeros(num_classes, embedding))  # f starts uniform
        self.pointer = 0

    def forward(self, images: Tensor) -> Tensor:
        return self.query(images)

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.query.embed(images)

    @torch.no_grad()
    def peek_embedding(self, images: Tensor, recorded: bool = False) -> tuple[Tensor, Tensor]:
        with running_statistics_frozen(self.query, recorded):
            return self.query.embed(images)

    def prototype_probabilities(self, q: Tensor, prototypes: Tensor, temperature: float = 1.0) -> Tensor:
        """softmax(q . prototypes), at temperature 1 the f of Eq. 4 for PiCO."""
        with torch.autocast(q.device.type, enabled=False):
            return (q.detach().float() @ prototypes.T / temperature).softmax(1)

    @torch.no_grad()
    def update_prototypes(self, q: Tensor, labels: Tensor, chosen: Tensor | None = None) -> None:
        """mu_c <- m mu_c + (1 - m) q_i for the batch's samples i of class c one after the other, then unit length.

        With n samples of class c in the batch that is m^n mu_c + (1 - m) sum_i m^(later samples of c) q_i.
        A new tensor: whoever holds the old prototypes keeps them. `chosen` [B]: those samples alone.
        """
        m = self.prototype_momentum
        member = F.one_hot(labels, len(self.prototypes)).float()  # [B, C]
        member = member if chosen is None else member * chosen[:, None]
        count = member.sum(0)  # [C]
        later = count - member.cumsum(0)  # [B, C], in each sample's own class
        share = (1 - m) * m**later * member  # [B, C]
        with torch.autocast(q.device.type, enabled=False):
            moved = (m**count)[:, None] * self.prototypes + share.T @ q.float()
        self.prototypes = F.normalize(moved, dim=1)

    @torch.no_grad()
    def keys(self, images: Tensor) -> Tensor:
        """Moves the key encoder towards the query encoder (parameters only), then embeds."""
        torch._foreach_lerp_(list(self.key.parameters()), list(self.query.parameters()), 1 - self.key_momentum)
        return self.key.embed(images)[1]

    @torch.no_grad()
    def enqueue(self, keys: Tensor, labels: Tensor) -> None:
        """The newest keys take the place of the oldest."""
        first = min(len(keys), len(self.queue) - self.pointer)
        for part, start in ((slice(0, first), self.pointer), (slice(first, len(keys)), 0)):
            size = len(keys[part])
            self.queue[start : start + size] = keys[part].to(self.queue.dtype)
            self.queue_labels[start : start + size] = labels[part]
        self.pointer = (self.pointer + len(keys)) % len(self.queue)

    def get_extra_state(self) -> dict:
        return {"pointer": self.pointer}

    def set_extra_state(self, state: dict) -> None:
        self.pointer = state["pointer"]


def build(
    arch: str,
    channels: int,
    size: int,
    num_classes: int,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
    pico: dict | None = None,
    pair: bool = False,
) -> Encoder | PiCO | Pair:
    """The network of a base: one encoder, PiCO's two (pico = its queue size and momenta), or a pair of them."""
    shape = (arch, channels, size, num_classes, mean, std)
    if pair:
        return Pair(Encoder(*shape), Encoder(*shape))
    if pico is None:
        return Encoder(*shape)
    return PiCO(Encoder(*shape, embedding=128), Encoder(*shape, embedding=128), num_classes, **pico)


class Pair(nn.Module):
    """Two encoders of their own, as DivideMix trains them; together their logits are summed."""

    def __init__(self, one: Encoder, two: Encoder):
        super().__init__()
        self.one, self.two = one, two

    def forward(self, images: Tensor) -> Tensor:
        return self.one(images) + self.two(images)

    def peek(self, images: Tensor, recorded: bool = False) -> Tensor:
        return self.one.peek(images, recorded) + self.two.peek(images, recorded)


def features(network: nn.Module, images: Tensor) -> Tensor:
    """The backbone's features [B, width] of the (first) encoder, for Figs. 7 and 8."""
    encoder = next((m for m in network.modules() if isinstance(m, Encoder)), None)
    if encoder is None:
        raise ValueError("features: the network has no models.Encoder in it; give a function of your own")
    return encoder.features(images).float()


MOST = 4_000_000  # similarities at a time, which a processor's cache still holds


class Neighbours:
    """The nearest others of samples with unit features z [N, D], among all or some of them."""

    def __init__(self, z: Tensor, among: Tensor | None = None):
        everyone = torch.arange(len(z), device=z.device)
        self.z, self.others = z, everyone if among is None else among
        self.columns = (z if among is None else z[among]).T
        self.place = torch.zeros_like(everyone)  # of each sample among the others
        self.away = z.new_zeros(
            len(z)
        )  # added there, so that nobody is nearest to itself; 0 where it is not among them
        self.place[self.others], self.away[self.others] = everyone[: len(self.others)], -4.0

    def nearest(self, k: int, of: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k nearest, or as many as there are, of the samples `of` [B], all by default: who [B, k], and how
        similar by cosine [B, k]."""
        of = torch.arange(len(self.z), device=self.z.device) if of is None else of
        k, who, similar = min(k, len(self.others) - 1), [], []
        for rows in of.split(max(1, MOST // len(self.others))):
            with torch.autocast(self.z.device.type, enabled=False):
                cosine = self.z[rows] @ self.columns
            cosine.scatter_add_(1, self.place[rows, None], self.away[rows, None])  # not itself
            values, index = cosine.topk(k, 1)
            who.append(self.others[index])
            similar.append(values)
        return torch.cat(who), torch.cat(similar)


def classifier_state(network: nn.Module) -> dict[str, Tensor]:
    """The plain state_dict of what predicts: of PiCO's networks, the query encoder without its projection head."""
    encoder = getattr(network, "query", network)
    return {name: value.cpu() for name, value in encoder.state_dict().items() if not name.startswith("head.")}


def record_views(network: nn.Module) -> None:
    """As the release: batch normalisation records the extra views too."""
    for encoder in network.modules():
        if isinstance(encoder, Encoder):
            encoder.records = True


def compile_backbones(network: nn.Module) -> None:
    for encoder in network.modules():
        if isinstance(encoder, Encoder):
            encoder.backbone.compile()


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
