"""Weak (SimAugment) and strong (RandAugment) augmentation of whole batches (torch only: copy this file alone).

Images are uint8 or floats in [0, 1], square [B, ch, H, H], of three channels or one; views are floats in [0, 1].
Every sample gets random parameters of its own (`..._parameters`), and with these given every operation equals
torchvision's per-image one. All runs on the device of the images, and nothing is read back from it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

# ------------------------------------------------------------------ weak augmentation (SimAugment)


def weak(
    images: Tensor,
    generator: Generator | None = None,
    *,
    crop: float = 0.2,
    flip: float = 0.5,
    jitter: float = 0.8,
    grey: float = 0.2,
    part: slice = slice(None),
) -> Tensor:
    """Random resized crop of at least `crop` of the area, flip, colour jitter, grey scale; the rest are their
    probabilities. One channel has neither hue, saturation nor anything to turn grey. `part`: views of these rows
    alone, the same as in the views of all."""
    n, device = len(images), images.device
    box = crop_parameters(n, images.shape[-1], crop, flip, generator, device)
    x = resized_crop(images[part], *(value[part] for value in box))
    order, factors = jitter_parameters(n, jitter, generator, device, colour=x.shape[1] == 3)
    operations = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
    for name in order:
        x = operations[name](x, factors[name][part])
    if x.shape[1] == 3:
        chosen = torch.rand(n, 1, 1, 1, generator=generator, device=device)[part] < grey
        x = torch.lerp(x, to_grey(x), chosen.float())  # several times faster than torch.where on a CPU
    return x


def crop_parameters(
    n: int, size: int, smallest: float, flip: float, generator: Generator | None, device: torch.device
) -> tuple[Tensor, ...]:
    """torchvision's RandomResizedCrop for square images: (top, left, height, width, flipped), each [n]."""
    u = torch.rand(n, 23, generator=generator, device=device)
    area = size * size * (smallest + u[:, :10] * (1 - smallest))  # ten tries, [n, 10]
    ratio = (math.log(3 / 4) + u[:, 10:20] * (math.log(4 / 3) - math.log(3 / 4))).exp()
    width, height = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (width >= 1) & (width <= size) & (height >= 1) & (height <= size)
    first = fits.int().argmax(1, keepdim=True)
    found = fits.gather(1, first)[:, 0]  # else the whole image
    width = torch.where(found, width.gather(1, first)[:, 0], float(size))
    height = torch.where(found, height.gather(1, first)[:, 0], float(size))
    top = (u[:, 20] * (size - height + 1)).floor()
    left = (u[:, 21] * (size - width + 1)).floor()
    return top, left, height, width, u[:, 22] < flip


def resized_crop(
    images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flipped: Tensor
) -> Tensor:
    """Bilinear, to the same size, flipped where wanted. Interpolation is linear in rows and columns, so each
    sample is one matrix product a side: out = R x C^T with R, C the hat functions of the source positions."""
    b, ch, size, _ = images.shape
    pixel = torch.arange(size, device=images.device)

    def hats(start: Tensor, length: Tensor, reverse: Tensor | None = None) -> Tensor:
        at = (pixel + 0.5) * (length[:, None] / size) - 0.5  # [b, size], within the crop
        at = start[:, None] + at.clamp_min(0).minimum(length[:, None] - 1)
        if reverse is not None:
            at = torch.where(reverse[:, None], at.flip(1), at)
        return (1 - (at[:, :, None] - pixel).abs()).clamp_min_(0)  # [b, size out, size in]

    x = images.float() if images.is_floating_point() else images.float().div_(255)
    x = x.reshape(b, ch * size, size) @ hats(left, width, flipped).mT  # columns
    x = x.view(b, ch, size, size).transpose(1, 2).reshape(b, size, ch * size)
    return (hats(top, height) @ x).view(b, size, ch, size).transpose(1, 2)  # rows


def to_grey(x: Tensor) -> Tensor:
    """ITU-R 601 luma, [B, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return (0.2989 * x[:, 0:1]).add_(x[:, 1:2], alpha=0.587).add_(x[:, 2:3], alpha=0.114)


def blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """factor x + (1 - factor) other in [0, 1]; factor [B]."""
    return torch.lerp(other, x, factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    return (x * factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    return blend(x, to_grey(x.mean((2, 3), keepdim=True)), factor)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    return blend(x, to_grey(x), factor) if x.shape[1] == 3 else x


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turns the hue by `shift` [B] of a full circle, in the HSV hexagon: with c the distance of the largest channel
    to the smallest and h the hue in sixths, red is low + c clamp(|h - 3| - 1, 0, 1), green and blue are
    low + c clamp(2 - |h - 2|, 0, 1) and low + c clamp(2 - |h - 4|, 0, 1)."""
    r, g, b = x.unbind(1)  # [B, H, W]
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    c = high - low
    # h = (g - b)/c where red is the largest, else 2 + (b - r)/c where green is, else 4 + (r - g)/c
    scale = c.clamp_min(1e-12).reciprocal_()
    red, green = (high == r).float(), (high == g).float()
    h = torch.lerp((r - g).mul_(scale).add_(4), (b - r).mul_(scale).add_(2), green).lerp_((g - b).mul_(scale), red)
    h += 6 * shift.view(-1, 1, 1)
    h -= h.div(6).floor_().mul_(6)  # into [0, 6)
    shares = (h - 3).abs_().sub_(1), (h - 2).abs_().neg_().add_(2), (h - 4).abs_().neg_().add_(2)
    return torch.stack([torch.addcmul(low, c, share.clamp_(0, 1)) for share in shares], 1)


JITTER = {  # ColorJitter(0.4, 0.4, 0.4, 0.1): the ranges of its factors
    "brightness": (0.6, 1.4),
    "contrast": (0.6, 1.4),
    "saturation": (0.6, 1.4),
    "hue": (-0.1, 0.1),
}


def jitter_parameters(
    n: int, probability: float, generator: Generator | None, device: torch.device, colour: bool
) -> tuple[list[str], dict[str, Tensor]]:
    """The order of the operations, one a batch (drawn on the host), and a factor a sample; where a sample is
    spared, factors that change nothing."""
    names = list(JITTER) if colour else ["brightness", "contrast"]
    u = torch.rand(len(names) + 1, n, generator=generator, device=device)
    spared = u[-1] >= probability
    factors = {}
    for name, draw in zip(names, u, strict=False):
        low, high = JITTER[name]
        factors[name] = torch.where(spared, (low + high) / 2, low + draw * (high - low))
    return [names[i] for i in _host_order(len(names), generator).tolist()], factors


def _host_order(n: int, generator: Generator | None) -> Tensor:
    """A random order known to the host: from the given generator on a CPU, else from torch's own CPU one."""
    on_cpu = generator if generator is not None and generator.device.type == "cpu" else None
    return torch.randperm(n, generator=on_cpu, device="cpu")


# ------------------------------------------------------------------ strong augmentation (RandAugment and cutout)

RANGES = {  # the 14 operations of the release and the range of their value; the order groups what shares work
    "identity": (0, 0),
    "autocontrast": (0, 0),
    "equalize": (0, 0),
    "posterize": (4, 8),  # bits kept, rounded down
    "solarize": (0, 256),  # pixels at or above are inverted
    "brightness": (0.05, 0.95),
    "saturation": (0.05, 0.95),
    "contrast": (0.05, 0.95),
    "sharpness": (0.05, 0.95),
    "rotate": (-30, 30),  # degrees
    "shear_x": (-0.3, 0.3),
    "shear_y": (-0.3, 0.3),
    "translate_x": (-0.3, 0.3),  # of the size
    "translate_y": (-0.3, 0.3),
}


def strong(
    images: Tensor,
    generator: Generator | None = None,
    *,
    crop: float = 0.2,
    flip: float = 0.5,
    part: slice = slice(None),
) -> Tensor:
    """Random resized crop, flip, three operations of RandAugment, cutout. `part` as in `weak`."""
    n, size, device = len(images), images.shape[-1], images.device
    box = crop_parameters(n, size, crop, flip, generator, device)
    x = resized_crop(images[part], *(value[part] for value in box))
    x = randaugment(x, generator, 3) if part == slice(None) else randaugment_part(x, n, part, generator, 3)
    return cutout(x, *(value[part] for value in cutout_parameters(n, size, generator, device)))


def randaugment(x: Tensor, generator: Generator | None = None, times: int = 1) -> Tensor:
    """One of the 14 operations for every sample, each as probable, with a value of its own; `times` times.

    The batch, filled up to 14 equal shares, is shuffled and each operation gets one share: whatever the batch,
    no operation's share depends on the draw, so shapes are fixed, each runs once, and the host knows all sizes.
    """
    n, device = len(x), x.device
    share = -(-n // len(RANGES))
    rows = torch.arange(share * len(RANGES), device=device)
    low, high = (constant(end, device).view(-1, 1) for end in zip(*RANGES.values(), strict=True))
    x, row = x.contiguous(), rows[:n]  # sample i is x[row[i]]: put back into its order once, at the end
    shuffled, done = (x.new_empty(len(rows), *x.shape[1:]) for _ in range(2))  # fresh memory is slow on a CPU
    for _ in range(times):
        slot = _host_order(len(rows), generator).to(device, non_blocking=True)  # sample i's next row
        sample = torch.empty_like(slot).scatter_(0, slot, rows).clamp_max_(n - 1)
        u = torch.rand(len(RANGES), share, generator=generator, device=device)
        torch.index_select(x, 0, row[sample], out=shuffled)
        x, row = apply_operations(shuffled, low + u * (high - low), done), slot[:n]
    return x.index_select(0, row)


def randaugment_part(x: Tensor, n: int, part: slice, generator: Generator | None, times: int) -> Tensor:
    """`randaugment` of the rows `part` of a batch of n, of which only these, x, are at hand: the same draws, the
    same views. The host draws which operation a sample gets, so it knows how many get each."""
    share = -(-n // len(RANGES))
    low, high = (constant(end, x.device).repeat_interleave(share) for end in zip(*RANGES.values(), strict=True))
    for _ in range(times):
        slot = _host_order(share * len(RANGES), generator)[:n][part]  # of each sample, on the host
        u = torch.rand(len(RANGES), share, generator=generator, device=x.device).flatten()
        order, operation = slot.argsort(), slot.sort().values // share
        place, there, back = (t.to(x.device, non_blocking=True) for t in (slot[order], order, order.argsort()))
        sizes = torch.bincount(operation, minlength=len(RANGES)).tolist()
        done = apply_operations(x[there], (low + u * (high - low))[place], sizes=sizes)
        x = done[back]
    return x


def apply_operations(
    x: Tensor, values: Tensor, out: Tensor | None = None, sizes: list[int] | None = None
) -> Tensor:
    """The 14 operations on x [n, ch, H, H], each on its own share of the rows, with their values [n]; `sizes`: how
    many rows each gets (default: all as many)."""
    sizes = sizes or [len(x) // len(RANGES)] * len(RANGES)
    value, shares = dict(zip(RANGES, values.flatten().split(sizes), strict=True)), x.split(sizes)
    single = {
        "identity": lambda x, v: x,
        "autocontrast": lambda x, v: autocontrast(x),
        "equalize": lambda x, v: equalize(x),
        "posterize": posterize,
        "solarize": lambda x, v: solarize(x, v / 255),
        "brightness": brightness,
        "saturation": saturation,
        "contrast": contrast,
        "sharpness": sharpness,
    }
    done = [operation(part, value[name]) for (name, operation), part in zip(single.items(), shares, strict=False)]
    matrix = torch.cat([affine_matrix(name, value[name]) for name in RANGES if name not in single])
    return torch.cat([*done, affine(x[len(x) - len(matrix) :], matrix)], out=out)


def autocontrast(x: Tensor) -> Tensor:
    """Every channel stretched to [0, 1]; a constant one stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    flat = high <= low
    scale = torch.where(flat, 1.0, high - low).reciprocal()
    return ((x - torch.where(flat, 0.0, low)) * scale).clamp_(0, 1)


def equalize(x: Tensor) -> Tensor:
    """Every channel's histogram of 256 levels made flat, as PIL and torchvision do it."""
    b, ch, h, w = x.shape
    level = (x * 255).round().long().reshape(b * ch, h * w)
    histogram = torch.zeros(b * ch, 256, dtype=torch.long, device=x.device)
    histogram.scatter_add_(1, level, torch.ones_like(level))
    last = histogram.gather(1, level.amax(1, keepdim=True))  # pixels of the highest level
    step = (h * w - last) // 255  # [b ch, 1]
    table = (histogram.cumsum(1) - histogram + step // 2) // step.clamp_min(1)  # counts below each level
    out = torch.where(step > 0, table.clamp_max(255).gather(1, level), level)
    return (out / 255).view(b, ch, h, w)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """The upper `bits` (rounded down) of 8 kept."""
    step = (8 - bits.floor()).exp2().view(-1, 1, 1, 1)
    return ((x * 255).round() / step).floor() * (step / 255)


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    return torch.lerp(x, 1 - x, (x >= threshold.view(-1, 1, 1, 1)).float())


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by [[1,1,1],[1,5,1],[1,1,1]]/13, its border left as it is."""
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]  # the sum of 3x3, without a border
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = around.add_(x[:, :, 1:-1, 1:-1], alpha=4).div_(13)
    return blend(x, smooth, factor)


def affine_matrix(name: str, value: Tensor) -> Tensor:
    """[n, 2, 3]: from output to input positions, in [-1, 1] over a square image (top left is -1, -1)."""
    one, zero = torch.ones_like(value), torch.zeros_like(value)
    turn = value * (math.pi / 180)
    rows = {
        "rotate": (turn.cos(), -turn.sin(), zero, turn.sin(), turn.cos(), zero),  # about the centre
        "shear_x": (one, value, value, zero, one, zero),  # about the top left corner
        "shear_y": (one, zero, zero, value, one, value),
        "translate_x": (one, zero, -2 * value, zero, one, zero),
        "translate_y": (one, zero, zero, zero, one, -2 * value),
    }[name]
    return torch.stack(rows, 1).view(-1, 2, 3)


def affine(x: Tensor, matrix: Tensor) -> Tensor:
    """Nearest pixel, black outside."""
    size = x.shape[-1]
    at = (2 * torch.arange(size, device=x.device) + 1) / size - 1  # the pixels' centres in [-1, 1]
    along, down = matrix[:, :, 0:1] * at, matrix[:, :, 1:2] * at + matrix[:, :, 2:]  # [n, 2, size] each
    grid = along.mT[:, None] + down.mT[:, :, None]  # [n, size, size, 2]: F.affine_grid, ten times as fast
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def cutout_parameters(n: int, size: int, generator: Generator | None, device: torch.device) -> tuple[Tensor, ...]:
    """A square of side U(0, 0.5) size around a uniform centre: (top, left, bottom, right), each [n]. As the release
    draws it: PIL's rectangle has its last row and column too."""
    u = torch.rand(3, n, generator=generator, device=device)
    side = 0.5 * size * u[0]
    start = (u[1:] * size - side / 2).clamp_min(0).floor()  # [2, n]
    end = (start + side).clamp_max(size).floor() + 1
    return start[0], start[1], end[0], end[1]


def cutout(x: Tensor, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    """The rectangle filled with (125, 123, 114)."""
    pixel = torch.arange(x.shape[-1], device=x.device)
    rows = (pixel >= top[:, None]) & (pixel < bottom[:, None])  # [n, size]
    columns = (pixel >= left[:, None]) & (pixel < right[:, None])
    inside = (rows[:, :, None] & columns[:, None, :])[:, None].float()  # [n, 1, size, size]
    fill = constant((125.0, 123.0, 114.0), x.device).view(1, 3, 1, 1) / 255
    return torch.lerp(x, fill if x.shape[1] == 3 else to_grey(fill), inside)


def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers sent to the device; torch.tensor(values, device="cuda") would wait until it has them."""
    return torch.tensor(values, device="cpu").to(device, non_blocking=device.type == "cuda")


def compile_operations() -> None:
    """torch.compile for the larger operations; the draws stay outside, so the same seed gives the same views."""
    for name in ("resized_crop", "hue", "apply_operations", "cutout"):
        globals()[name] = torch.compile(globals()[name], dynamic=False)
