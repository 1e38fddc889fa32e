"""Image files of any size and mode as tensors, and as thumbnails."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps  # torchvision brings it
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

SUFFIXES = frozenset(".png .jpg .jpeg .bmp .gif .webp .tif .tiff .ppm .pgm".split())  # of a folder's images
MOST_PIXELS = 50_000_000  # of an image, by its header; more is a mistake or an attack
# Pillow warns of images that are refused here, and refuses still larger ones by itself
warnings.filterwarnings("ignore", "Image size")


def open_image(path: Path, side: int):
    """An image of any size and mode, in RGB: turned as its camera says, on white where it is transparent. Of a
    large JPEG, one at least `side` pixels wide and high."""
    with Image.open(path) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}")
        image.draft(None, (2 * side, 2 * side))
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":  # 16 bits or more a pixel, or fractions
            deep = np.asarray(image, dtype=np.float64)
            scale = 1 / 257 if image.mode[0] == "I" else 255 if deep.max() <= 1 else 1
            image = Image.fromarray(np.clip(deep * scale, 0, 255).round().astype(np.uint8))
        elif "transparency" in image.info or image.mode[-1] in "Aa":
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")


def decode(path: Path, size: int) -> Tensor:
    """uint8 [3, size, size], squeezed to a square."""
    image = open_image(path, size).resize((size, size), 2)  # bilinear, over all pixels
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def thumbnail(path: Path, side: int, instead: Tensor):
    """An image of at most side x side, its shape kept; another one, uint8 [ch, H, W], where the file has gone."""
    try:
        image = open_image(path, side)
    except Exception:
        return to_pil_image(instead)
    image.thumbnail((side, side))
    return image
