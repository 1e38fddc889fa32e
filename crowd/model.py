"""A finished run's classifier, and what it says of new images."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.functional import resize

import models
from crowd import images, votes
from harness import InputError, ranks


class Model:
    """A finished run's classifier."""

    def __init__(self, folder: Path):
        try:
            self.config = json.loads((folder / "config.json").read_text())
            self.network = models.build(**self.config["network"])
            self.network.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            self.classes = self.config["class_names"]
        except FileNotFoundError as error:
            raise InputError(
                f"{folder} has no {Path(error.filename).name}: is it the folder of a finished run?"
            ) from None
        except Exception as error:
            why = votes.first_line(error)
            raise InputError(f"cannot read the model in {folder}: {why}") from None
        self.network.eval()
        wanted = "off" if self.config.get("amp") == "off" else "auto"
        self.precision = ranks.Precision(wanted, torch.device("cpu"), self.config["network"]["size"])

    def probabilities(self, x: Tensor) -> Tensor:
        with self.precision.autocast():
            return self.network(x).float().softmax(1)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Probabilities [N, C] of uint8 images [N, 3 or 1, H, W] or features [N, D, 1, 1]."""
        shape = self.config["network"]
        features, floats = self.config["features"], x.is_floating_point()
        if floats != features or features and x.shape[1] != shape["channels"]:
            wanted = f"features [N, {shape['channels']}]" if features else "images"
            raise InputError(
                f"the model takes {wanted}, not {f'features {list(x.shape[:2])}' if floats else 'images'}"
            )
        if floats:
            return torch.cat([self.probabilities(part) for part in x.split(500)])
        if x.shape[1] != shape["channels"]:
            luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
            x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else (x * luma).sum(1, keepdim=True).round().byte()
        side = [shape["size"]] * 2
        parts = (
            part if list(part.shape[2:]) == side else resize(part, side, antialias=True) for part in x.split(500)
        )
        return torch.cat([self.probabilities(part.float() / 255) for part in parts])


def predict(folder: Path, files: list[Path], every: bool) -> str:
    """CSV: file, label, probability; for an .npz a row a sample, FILE:ROW."""
    model = Model(folder)
    found: list[tuple[str, Tensor]] = []
    for path in files:
        if path.suffix.lower() == ".npz" or path.is_dir():
            arrays = votes.read_arrays(path)
            name = next((name for name in ("x", "x_test", "x_train") if name in arrays), None)
            if name is None:
                raise InputError(f"{str(path)!r} lacks x (or x_test or x_train); {votes.contents(path, arrays)}")
            p = model(votes.as_input(arrays[name], f"{name} of {str(path)!r}"))
            found += [(f"{path}:{i}", row) for i, row in enumerate(p)]
            continue
        try:
            image = images.decode(path, model.config["network"]["size"])
        except Exception as error:
            raise InputError(f"{path}: {votes.first_line(error)}") from None
        found.append((str(path), model(image[None])[0]))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["file", "label", "probability", *(model.classes if every else [])])
    for name, p in found:
        more = [f"{value:.4f}" for value in p.tolist()] if every else []
        table.writerow([name, model.classes[int(p.argmax())], f"{float(p.max()):.4f}", *more])
    return text.getvalue()
