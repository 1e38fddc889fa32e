"""The batched augmentations against torchvision's per-image functions."""

import math

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from torchvision.transforms import RandomResizedCrop

import augment as A
import data
from conftest import prepared

N = 24


@pytest.fixture(params=[3, 1], ids=["colour", "grey"])
def batch(request):
    """uint8 images of several kinds: noise, smooth, constant, two-valued."""
    g = torch.Generator().manual_seed(request.param)
    u8 = torch.randint(0, 256, (N, request.param, 16, 16), generator=g, dtype=torch.uint8)
    ramp = torch.linspace(40, 190, 16).view(1, 1, 1, 16).expand(8, request.param, 16, 16)
    u8[:8] = (ramp + 15 * torch.randn(ramp.shape, generator=g)).clamp(0, 255).byte()
    u8[8], u8[9], u8[10, :, :, :5] = 7, 0, 255
    return u8


def uniform(low, high, seed=0):
    return low + torch.rand(N, generator=torch.Generator().manual_seed(seed)) * (high - low)


def each(function, images, *values):
    """torchvision's function, an image at a time."""
    columns = [v.tolist() for v in values]
    return torch.stack([function(x, *row) for x, *row in zip(images, *columns, strict=True)])


def assert_close(got, want):
    assert got.shape == want.shape and (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("smallest", [0.2, 0.8])
def test_resized_crop_and_flip(batch, smallest):
    parameters = A.crop_parameters(N, 16, smallest, 0.5, torch.Generator().manual_seed(1), torch.device("cpu"))
    top, left, height, width, flipped = parameters

    def crop(x, top, left, height, width, flip):
        x = TF.resized_crop(x, int(top), int(left), int(height), int(width), [16, 16], antialias=True)
        return TF.hflip(x) if flip else x

    want = each(crop, batch.float() / 255, *parameters)
    assert_close(A.resized_crop(batch, *parameters), want)
    assert_close(A.resized_crop(batch.float() / 255, *parameters), want)  # floats as well
    assert 4 < flipped.sum() < 20


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        (A.brightness, TF.adjust_brightness, 0.05, 1.6),
        (A.contrast, TF.adjust_contrast, 0.05, 1.6),
        (A.saturation, TF.adjust_saturation, 0.05, 1.6),
        (A.sharpness, TF.adjust_sharpness, 0.05, 1.6),
        (A.solarize, TF.solarize, 0.0, 1.0),
    ],
    ids=["brightness", "contrast", "saturation", "sharpness", "solarize"],
)
def test_operations_with_a_factor(batch, ours, theirs, low, high):
    x, factor = batch.float() / 255, uniform(low, high)
    assert_close(ours(x, factor), each(theirs, x, factor))


def test_hue_and_grey():
    x = torch.rand(N, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    x[0], x[1, 0], x[2, 1] = 0.4, x[1, 1], x[2, 2]  # grey, two equal channels
    shift = uniform(-0.5, 0.5)
    assert_close(A.hue(x, shift), each(TF.adjust_hue, x, shift))
    assert_close(A.hue(x, 0 * shift), x)
    assert_close(A.to_grey(x), TF.rgb_to_grayscale(x))


def test_autocontrast_and_equalize(batch):
    x = batch.float() / 255
    assert_close(A.autocontrast(x), each(TF.autocontrast, x))
    assert_close(A.equalize(x), each(TF.equalize, batch).float() / 255)


def test_posterize(batch):
    bits = uniform(1, 9)
    want = each(lambda x, b: TF.posterize(x, int(b)), batch, bits).float() / 255
    assert_close(A.posterize(batch.float() / 255, bits), want)


def test_geometry(batch):
    x = batch.float() / 255
    angle, part = uniform(-30, 30, 1), uniform(-0.3, 0.3, 2)

    def shear(x, v, vertical):
        degrees = [0.0, math.degrees(math.atan(v))] if vertical else [math.degrees(math.atan(v)), 0.0]
        return TF.affine(x, 0.0, [0, 0], 1.0, degrees, center=[0, 0])

    def translate(x, v, vertical):
        return TF.affine(x, 0.0, [0, v * 16] if vertical else [v * 16, 0], 1.0, [0.0, 0.0])

    assert_close(A.affine(x, A.affine_matrix("rotate", angle)), each(TF.rotate, x, angle))
    for name, function, vertical in (
        ("shear_x", shear, False),
        ("shear_y", shear, True),
        ("translate_x", translate, False),
        ("translate_y", translate, True),
    ):
        want = each(lambda x, v, f=function, y=vertical: f(x, v, y), x, part)
        assert_close(A.affine(x, A.affine_matrix(name, part)), want)


def test_cutout(batch):
    x = batch.float() / 255
    fill = torch.tensor([125.0, 123.0, 114.0]).view(3, 1, 1) / 255
    fill = fill if x.shape[1] == 3 else TF.rgb_to_grayscale(fill)
    box = A.cutout_parameters(N, 16, torch.Generator().manual_seed(2), torch.device("cpu"))

    def erase(x, top, left, bottom, right):
        height, width = int(bottom - top), int(right - left)
        return TF.erase(x, int(top), int(left), height, width, fill) if height and width else x

    assert_close(A.cutout(x, *box), each(erase, x, *box))


def test_apply_operations_gives_each_share_its_operation(batch):
    """RandAugment's own table: the values as drawn, in the release's units."""
    x = batch.float() / 255
    value = {name: uniform(low, high, i) for i, (name, (low, high)) in enumerate(A.RANGES.items())}
    got = A.apply_operations(torch.cat([x] * 14), torch.stack(list(value.values()))).split(N)
    assert torch.equal(got[0], x)  # identity
    theirs = {
        "autocontrast": lambda x, u8, v: TF.autocontrast(x),
        "equalize": lambda x, u8, v: TF.equalize(u8).float() / 255,
        "posterize": lambda x, u8, v: TF.posterize(u8, int(v)).float() / 255,
        "solarize": lambda x, u8, v: TF.solarize(x, v / 255),
        "brightness": lambda x, u8, v: TF.adjust_brightness(x, v),
        "saturation": lambda x, u8, v: TF.adjust_saturation(x, v),
        "contrast": lambda x, u8, v: TF.adjust_contrast(x, v),
        "sharpness": lambda x, u8, v: TF.adjust_sharpness(x, v),
        "rotate": lambda x, u8, v: TF.rotate(x, v),
        "shear_x": lambda x, u8, v: TF.affine(x, 0, [0, 0], 1, [math.degrees(math.atan(v)), 0.0], center=[0, 0]),
        "shear_y": lambda x, u8, v: TF.affine(x, 0, [0, 0], 1, [0.0, math.degrees(math.atan(v))], center=[0, 0]),
        "translate_x": lambda x, u8, v: TF.affine(x, 0, [v * 16, 0], 1, [0.0, 0.0]),
        "translate_y": lambda x, u8, v: TF.affine(x, 0, [0, v * 16], 1, [0.0, 0.0]),
    }
    assert len(A.RANGES) == 14 and list(theirs) == list(A.RANGES)[1:]
    for (name, function), share in zip(theirs.items(), got[1:], strict=True):
        want = torch.stack([function(a, b, v) for a, b, v in zip(x, batch, value[name].tolist(), strict=True)])
        assert (share - want).abs().max() <= 1e-4, name


# ------------------------------------------------------------------ ranges, from the release, written out again


def test_crop_parameters_have_the_ranges_of_the_release():
    g = torch.Generator().manual_seed(0)
    top, left, height, width, flipped = A.crop_parameters(20_000, 32, 0.2, 0.5, g, torch.device("cpu"))
    area, ratio = height * width / 1024, width / height
    assert 0.17 < area.min() < 0.23 and area.max() == 1
    assert 0.70 < ratio.min() < 0.78 and 1.28 < ratio.max() < 1.43
    blank = torch.zeros(1, 32, 32)
    theirs = [RandomResizedCrop.get_params(blank, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    for ours, column in zip((top, left, height, width), zip(*theirs, strict=True), strict=True):
        want = torch.tensor(column).float()
        assert ours.mean().item() == pytest.approx(want.mean().item(), abs=0.5)
        assert ours.std().item() == pytest.approx(want.std().item(), abs=0.4)
    for start, length in ((top, height), (left, width)):
        assert start.min() == 0 and (start + length).max() == 32
        room = 32 - length
        assert (start / room)[room > 8].mean().item() == pytest.approx(0.5, abs=0.01)
    assert flipped.float().mean().item() == pytest.approx(0.5, abs=0.02)
    whole = A.crop_parameters(10, 32, 1.0, 0.0, g, torch.device("cpu"))
    assert (whole[2] >= 28).all() and not whole[4].any()


def test_jitter_parameters_have_the_ranges_of_the_release():
    order, factors = A.jitter_parameters(20_000, 0.8, torch.Generator().manual_seed(0), torch.device("cpu"), True)
    assert sorted(order) == ["brightness", "contrast", "hue", "saturation"]
    for name, (low, high) in {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.6, 1.4),
                              "hue": (-0.1, 0.1)}.items():  # fmt: skip
        spared = factors[name] == (low + high) / 2
        assert spared.float().mean().item() == pytest.approx(0.2, abs=0.02)
        f = factors[name][~spared]
        assert low <= f.min() < low + 0.01 and high - 0.01 < f.max() <= high
        assert f.mean().item() == pytest.approx((low + high) / 2, abs=0.01)
    orders = {tuple(A.jitter_parameters(2, 0.8, None, torch.device("cpu"), True)[0]) for _ in range(300)}
    assert len(orders) == 24


def test_randaugment_ranges_are_those_of_the_release():
    assert A.RANGES == {
        "identity": (0, 0), "autocontrast": (0, 0), "equalize": (0, 0), "posterize": (4, 8), "solarize": (0, 256),
        "brightness": (0.05, 0.95), "saturation": (0.05, 0.95), "contrast": (0.05, 0.95), "sharpness": (0.05, 0.95),
        "rotate": (-30, 30), "shear_x": (-0.3, 0.3), "shear_y": (-0.3, 0.3), "translate_x": (-0.3, 0.3),
        "translate_y": (-0.3, 0.3),
    }  # fmt: skip


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("n", [1, 13, 64])
def test_randaugment_gives_every_sample_every_operation(monkeypatch, n, times):
    """With operations that only write their number and value: uniform over 14 each time, whatever came before,
    within range, samples in place."""
    names = list(A.RANGES)

    def mark(x, values, out):
        out.copy_(x)
        for i, (part, value) in enumerate(zip(out.split(values.shape[1]), values, strict=True)):
            part[:, 0, 0, 0] = 14 * part[:, 0, 0, 0] + i  # the history in base 14
            part[:, 0, 0, 1] = value
        return out

    monkeypatch.setattr(A, "apply_operations", mark)
    x = torch.zeros(n, 1, 2, 2)
    x[:, 0, 1, 1] = torch.arange(n)
    rounds = (6000 if n > 1 else 3000) // n
    g = torch.Generator().manual_seed(0)
    seen = torch.stack([A.randaugment(x, g, times) for _ in range(rounds)])  # [rounds, n, 1, 2, 2]
    assert torch.equal(seen[..., 0, 1, 1], torch.arange(n).expand(rounds, n).float())
    history = seen[..., 0, 0, 0].long()
    which = history % 14
    for t in range(times):
        share = torch.bincount((history // 14**t % 14).flatten(), minlength=14) / which.numel()
        assert (share - 1 / 14).abs().max() < 0.016
    again = (which == history // 14 % 14).float().mean().item()
    assert times == 1 or abs(again - 1 / 14) < 0.02  # the last one does not depend on the one before
    for i, name in enumerate(names[1:], 1):
        low, high = A.RANGES[name]
        value = seen[..., 0, 0, 1][which == i]
        assert value.min() >= low and value.max() <= high
        assert (value.max() - value.min()) >= 0.9 * (high - low)


def test_cutout_parameters():
    top, left, bottom, right = A.cutout_parameters(
        20_000, 32, torch.Generator().manual_seed(0), torch.device("cpu")
    )
    for start, end in ((top, bottom), (left, right)):
        assert start.min() == 0 and end.max() == 33  # PIL's rectangle has its end too, and may leave the image
        side = end - start
        assert side.min() == 1 and 16 <= side.max() <= 17
        assert side.mean().item() == pytest.approx(8.5, abs=0.6)  # 1 + U(0, 16), cut at the right and lower edge


# ------------------------------------------------------------------ the whole views


@pytest.mark.parametrize("function", [data.weak, data.strong])
@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_random_by_sample_and_repeatable(function, channels):
    x = torch.randint(0, 256, (1, channels, 12, 12), dtype=torch.uint8).expand(20, -1, -1, -1)
    one = function(x, torch.Generator().manual_seed(0))
    again = function(x, torch.Generator().manual_seed(0))
    other = function(x, torch.Generator().manual_seed(1))
    assert one.dtype == torch.float32 and one.shape == x.shape and one.min() >= 0 and one.max() <= 1
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert len({tuple(v.flatten().tolist()) for v in one}) == 20  # the same image, twenty views


def test_weak_grey_and_colour():
    x = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    grey = data.weak(x, grey=1.0)
    assert_close(grey[:, :1].expand(-1, 3, -1, -1), grey)
    colour = data.weak(x, grey=0.0)
    assert not torch.allclose(colour[:, 0], colour[:, 1])


def test_weak_is_crop_then_jitter_in_the_drawn_order():
    """The whole weak view of each sample, redone an image at a time from the same draw."""
    x = torch.randint(0, 256, (N, 3, 16, 16), dtype=torch.uint8)
    got = data.weak(x, torch.Generator().manual_seed(3), crop=0.3, grey=0.0)
    g, cpu = torch.Generator().manual_seed(3), torch.device("cpu")
    crop = A.crop_parameters(N, 16, 0.3, 0.5, g, cpu)
    order, factors = A.jitter_parameters(N, 0.8, g, cpu, True)
    want = A.resized_crop(x, *crop)
    for name in order:
        want = each(getattr(TF, f"adjust_{name}"), want, factors[name])
    assert_close(got, want)


@pytest.mark.parametrize(("channels", "flip"), [(3, 0.5), (1, 0.0)])
def test_colour_images_are_mirrored_by_default_and_grey_ones_are_not(channels, flip):
    shape = (24, 8, 8, 3)[: 4 if channels == 3 else 3]
    x = np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)
    np.savez("own.npz", x_train=x, candidates=np.eye(4, dtype=bool)[np.arange(24) % 4])
    for argv, want in (([], flip), (["--flip", "0.25"], 0.25)):
        learner = prepared(["--dataset", "own.npz", "--batch-size", "4", *argv])[1]
        assert learner.views.strength["flip"] == want
