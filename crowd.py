"""One's own data: votes and candidate files in (read by votes.py), purified labels, their review and the model out.

python train.py --dataset mine.csv              trains; leaves labels.csv, review.html and model.pt
python crowd.py predict RUN FILES...            the model's labels for new images, or for an .npz, as CSV
python crowd.py review RUN                      review.html again, or of a run on any other dataset
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import resize, to_pil_image

import data
import images
import irnet
import models
import review
import votes
from data import Dataset, InputError
from options import Parser
from presets import PRESETS

SIZE = 32  # of images from files, and of arrays of oblong ones
COLUMNS = "given after predicted probability margin flagged corrected_at added agreement truth split".split()

# ------------------------------------------------------------------ in


def dataset(c: argparse.Namespace) -> Dataset:
    """What --dataset names, by its name or as one's own, with the limits of the command line."""
    if c.dataset in PRESETS:
        return data.load(c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test)
    d = load(Path(c.dataset), c.image_size, c.min_votes, c.reliability, c.classes)
    return data.cut(d, None, c.limit_train, c.limit_test)


def load(
    path: Path, size: int = 0, min_votes: int = 1, reliability: float = 0.8, classes: list[str] | None = None
) -> Dataset:
    """size: images are resized to size x size; 0 leaves square arrays as they are. min_votes: a label is a
    candidate from so many votes on. reliability: without a test set, samples whose most frequent label has at
    least this share of the votes are set aside for scoring, as the paper does on RAF-DB (Section 4.1). classes:
    the names of all."""
    if votes.is_table(path):
        given = votes.table(path, size or SIZE, classes)
    else:
        given = votes.arrays(path, classes)
    candidates = given.candidates
    if given.votes is not None:
        # where no label has so many votes, the most frequent ones stay
        enough = given.votes.amax(1, keepdim=True).clamp_max(min_votes)
        candidates = (given.votes >= enough) & (given.votes > 0)
    elif min_votes > 1:
        raise InputError(f"--min-votes {min_votes}: {str(path)!r} has no votes to count")
    parts = (given.x, given.truth, given.x_test, given.y_test)
    d = Dataset(path.stem, *parts, len(given.classes), (), (), candidates, given.votes, given.files, given.classes)
    if given.x_test is None:
        set_aside(d, path, reliability)
    if d.images.is_floating_point():
        std = d.images.std(0).flatten()
        d.mean, d.std = tuple(d.images.mean(0).flatten().tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
        return d
    oblong = d.images.shape[-1] != d.images.shape[-2]
    data.cut(d, size or (SIZE if oblong else None))
    d.mean, d.std = data.statistics(d.images)
    return d


def agreement(d: Dataset) -> Tensor:
    """The share [N] of the votes that the most frequent label has; of a set without votes, 1/|S|."""
    counted = d.candidates if d.votes is None else d.votes
    return counted.amax(1) / counted.sum(1)


@dataclass
class Scored:
    """What labels.csv says of the samples set aside for scoring."""

    candidates: Tensor
    agreement: Tensor
    labels: Tensor
    files: list[str]
    single: bool  # one label each, which nobody confirmed


def set_aside(d: Dataset, path: Path, reliability: float) -> None:
    """Without a test set, the samples on which the annotators agree most score the network: at most a fifth, always
    the same ones. Where their truth is not known, the most frequent label stands for it."""
    if d.candidates is None:
        raise InputError(f"{str(path)!r} has neither a test set nor candidates, annotators or votes")
    share, counted = agreement(d), d.candidates if d.votes is None else d.votes
    top = counted.int().topk(2, 1).values
    clear = (top[:, 0] > top[:, 1]) | (d.labels >= 0)  # among equals nobody knows which is right
    order = torch.randperm(len(share), generator=torch.Generator().manual_seed(0))
    order = order[(share * clear)[order].argsort(descending=True, stable=True)][: max(1, len(share) // 5)]
    chosen = order[clear[order] & (share[order] >= reliability)].sort().values
    if not len(chosen) or len(chosen) == len(share):
        most = float((share * clear).max())
        fix = "lower it, or add a test set" if most > 0 else "add a test set"
        raise InputError(
            f"--reliability {reliability:g}: no sample of {str(path)!r} has one label with that share of its "
            f"votes, to score the network on (the highest is {most:.2f}): {fix}"
        )
    rest = torch.ones(len(share), dtype=torch.bool).index_fill_(0, chosen, False)
    labels = d.labels[chosen]
    single = bool((counted[chosen].sum(1) == 1).all() and (labels < 0).any())
    d.scored = Scored(d.candidates[chosen], share[chosen], labels, votes.pick(d.files, chosen), single)
    d.test_images, d.test_labels = (
        d.images[chosen],
        torch.where(labels < 0, counted[chosen].int().argmax(1), labels),
    )
    d.images, d.labels, d.candidates = d.images[rest], d.labels[rest], d.candidates[rest]
    d.votes, d.files = None if d.votes is None else d.votes[rest], votes.pick(d.files, rest.argwhere()[:, 0])


# ------------------------------------------------------------------ caution


@torch.no_grad()
def safe_tau(logits: Tensor, f: Tensor, candidates: Tensor, eta: float, temperature: float, tau: float) -> float:
    """The smallest tau_epsilon, from `tau` on, with which at least half of the labels moved in would be right; inf
    where there is none. Real sets may have so little noise that most of what looks wrong is only difficult.

    From the held-out part: its logits and f of Eq. 4 [M, C], its sets, and the noise rate and temperature estimated
    on it. By the likelihood of irnet.estimate_noise, a label j outside S is the true one with probability
        eta |S|/(C-|S|) f_j / ((1 - eta) sum_{i in S} f_i + eta |S|/(C-|S|) sum_{i not in S} f_i)
    """
    p, size = (logits / temperature).softmax(1), candidates.sum(1)
    noisy = eta * size / (candidates.shape[1] - size).clamp_min(1)
    total = (1 - eta) * (p * candidates).sum(1) + noisy * (p * ~candidates).sum(1)
    _, label = irnet.detect([f], candidates, tau)
    right = noisy * p.gather(1, label[:, None])[:, 0] / total.clamp_min(1e-12)
    margin, order = irnet.margin(f, candidates).sort()  # the surest corrections first
    mean = right[order].cumsum(0) / torch.arange(1, len(order) + 1, device=right.device)
    good = (mean >= 0.5) & (margin <= -tau) & margin.isfinite()
    if not good.any():
        return math.inf
    last = int(good.int().cumsum(0).argmax())  # with all those before it, still half of them right
    return tau if last + 1 == len(margin) or margin[last + 1] > -tau else -float(margin[last])


# ------------------------------------------------------------------ out


def labels(s, p: Tensor, f: Tensor, tau_epsilon: float) -> bytes:
    """labels.csv, the most suspicious first: by the margin tau (Eq. 4) under the set that was given.

    p, f [N, C]: the classifier's probabilities and the f of Eq. 4 on the plain images of the training samples, and
    behind them of those that were set aside for scoring. flagged: tau <= -tau_epsilon (Eq. 10) under the set given.
    """
    d, aside = s.dataset, s.dataset.scored
    p, f, given, after = p.cpu(), f.cpu(), s.before, s.candidates.cpu()
    truth, files = d.labels, sample_names(d)
    more = len(p) - len(given)
    if more:
        sets = aside.candidates[:more]
        given, after, truth = (
            torch.cat(pair) for pair in ((given, sets), (after, sets), (truth, aside.labels[:more]))
        )
        files = files + aside.files[:more]
    share = torch.full((len(p),), math.nan)
    if d.votes is not None:
        share = torch.cat([agreement(d), aside.agreement[:more]]) if more else agreement(d)
    at, to = (F.pad(t.cpu(), (0, more)) for t in (s.refine.corrected_at, s.refine.corrected_to))
    tau = irnet.margin(f, given)
    columns = (given, after, *p.max(1), tau, tau <= -tau_epsilon, at, to, share, truth)
    names = class_names(d)

    def joined(row: list[bool]) -> str:
        return "|".join(name for name, inside in zip(names, row, strict=True) if inside)

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["row" if all(map(str.isdecimal, files)) else "file", *COLUMNS])
    for part in tau.argsort(stable=True).split(10_000):
        for i, S, new, sure, guess, margin, flagged, epoch, added, agreed, y in zip(
            part.tolist(), *(column[part].tolist() for column in columns), strict=True
        ):
            moved = [epoch, names[added]] if epoch else ["", ""]
            known = [f"{agreed:.3f}" if agreed == agreed else "", names[y] if y >= 0 else ""]
            values = [
                joined(S),
                joined(new),
                names[guess],
                f"{sure:.4f}",
                f"{margin:.6f}",
                "yes" if flagged else "no",
            ]
            table.writerow([files[i], *values, *moved, *known, "train" if i < len(s.before) else "score"])
    return text.getvalue().encode()


def sample_names(d: Dataset) -> list[str]:
    """Of the training samples: their files, else their rows."""
    return d.files or [str(i) for i in range(len(d.images))]


def class_names(d: Dataset) -> list[str]:
    return d.classes or [str(k) for k in range(d.num_classes)]


def classifier(network) -> dict[str, Tensor]:
    """The plain state_dict of what predicts: of PiCO's networks, the query encoder without its projection head."""
    encoder = getattr(network, "query", network)
    return {name: value.cpu() for name, value in encoder.state_dict().items() if not name.startswith("head.")}


class Model:
    """A finished run's classifier."""

    def __init__(self, folder: Path):
        try:
            self.config = json.loads((folder / "config.json").read_text())
            self.network = models.build(**self.config["network"])
            self.network.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        except FileNotFoundError as error:
            raise InputError(
                f"{folder} has no {Path(error.filename).name}: is it the folder of a finished run?"
            ) from None
        except Exception as error:
            why = votes.first_line(error)
            raise InputError(f"cannot read the model in {folder}: {why}") from None
        self.network.eval()
        self.classes = self.config["class_names"]

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
            return torch.cat([self.network(part).softmax(1) for part in x.split(500)])
        if x.shape[1] != shape["channels"]:
            luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
            x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else (x * luma).sum(1, keepdim=True).round().byte()
        side = [shape["size"]] * 2
        parts = (
            part if list(part.shape[2:]) == side else resize(part, side, antialias=True) for part in x.split(500)
        )
        return torch.cat([self.network(part.float() / 255).softmax(1) for part in parts])


# ------------------------------------------------------------------ the command line


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


def review_page(folder: Path, d: Dataset | None = None, path: str | None = None, root: str = "data") -> bytes:
    """review.html from labels.csv, the model and the data: the hundred most suspicious samples."""
    model = Model(folder)
    path = path or model.config["dataset"]
    try:
        with (folder / "labels.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
            key = next(iter(rows[0]))
    except (OSError, KeyError, IndexError, UnicodeDecodeError):
        raise InputError(
            f"{folder} has no labels.csv, or not as it was: is it the folder of a finished run?"
        ) from None
    rows, total, flagged = rows[:100], len(rows), sum(row["flagged"] == "yes" for row in rows)
    names = [row.pop(key) for row in rows]
    if d is None and votes.is_table(Path(path)):
        chosen = votes.named_images(Path(path), names, model.config["network"]["size"])
    else:
        if d is None:  # the run's data again, and no other
            d = dataset(argparse.Namespace(**model.config | dict(dataset=path, data=root)))
            if d.fingerprint() != model.config["fingerprint"]:
                raise InputError(f"{path} does not have the data that the run was trained on")
        n, files = len(d.images), sample_names(d) + (d.scored.files if d.scored else [])
        place = {name: i for i, name in enumerate(files)}
        numbers = [place[name] for name in names]
        chosen = torch.stack([d.images[i] if i < n else d.test_images[i - n] for i in numbers])
    for row, name, image, p in zip(rows, names, chosen, model(chosen), strict=True):
        row |= dict(name=name, image=None, large=votes.is_table(Path(path)))
        if row["large"]:  # the file itself, not what the network sees of it
            row["image"] = review.png(images.thumbnail(Path(path).resolve().parent / name, 160, image))
        elif not image.is_floating_point():
            row["image"] = review.png(to_pil_image(image))
        row["likely"] = [(model.classes[k], float(p[k])) for k in p.argsort(descending=True)[:4].tolist()]
    return review.page(rows, model.classes, folder.resolve().name, total, flagged).encode()


def main(argv: list[str] | None = None) -> int:
    parser = Parser("crowd.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="predict|review")
    p = commands.add_parser("predict", help="labels of new images, or of an .npz, as CSV")
    p.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    p.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILES",
        help="images; or .npz files, or folders of .npy files, with x (else x_test, else x_train)",
    )
    p.add_argument("--probabilities", action="store_true", help="a column a class too")
    p.add_argument("--out", type=Path, metavar="FILE", help="where the table goes (default: the terminal)")
    p = commands.add_parser("review", help="a page with the hundred most suspicious samples")
    p.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    p.add_argument("--dataset", metavar="PATH", help="the run's data, where they have been moved")
    p.add_argument("--data", default="data", metavar="DIR", help="where torchvision's files are (default data)")
    chosen = parser.parse_args(argv)
    try:
        if chosen.command == "review":
            page = review_page(chosen.run, None, chosen.dataset, chosen.data)
            (chosen.run / "review.html").write_bytes(page)
            print(f"written to {chosen.run / 'review.html'}")
            return 0
        text = predict(chosen.run, chosen.files, chosen.probabilities).encode("utf-8", "surrogateescape")
        if chosen.out:
            chosen.out.write_bytes(text)
            print(f"{len(text.splitlines()) - 1:,} labels written to {chosen.out}")
        else:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.buffer.write(text)
                sys.stdout.flush()
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
