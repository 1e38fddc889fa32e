"""The command line of train.py: options and their checks. The defaults are in presets.py; each has an option."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

import torch

import baselines
import models
import parallel
import votes
from data import InputError
from presets import OWN, PRESETS, RELEASED, SMALL, default_tau, preset_table

# ------------------------------------------------------------------ the command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line and exit 2."""
        if parallel.first():
            print(f"error: {message} (python {self.prog} --help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="train.py",
        description="Partial-label learning with noisy candidate sets: a base, and IRNet on top of it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=preset_table(),
        allow_abbrev=False,
    )
    g = p.add_argument_group("data")
    g.add_argument(
        "--dataset",
        default="digits",
        metavar="NAME",
        help="digits (embedded), kmnist, fashion, cifar10, cifar100; or one's own: a .csv beside its images, an "
        ".npz, or a folder of .npy files, see the README (default digits)",
    )
    g.add_argument(
        "--data", default="data", metavar="DIR", help="where torchvision's files are or go (default data)"
    )
    g.add_argument(
        "--q",
        type=float,
        metavar="Q",
        help="probability of each wrong label to be a candidate (default 0.3; cifar100 0.05)",
    )
    g.add_argument(
        "--eta", type=float, metavar="ETA", help="probability that the true label is missing (default 0.3)"
    )
    g.add_argument("--limit-train", type=int, metavar="N", help="only the first N training images")
    g.add_argument("--limit-test", type=int, metavar="N", help="only the first N test images")
    g.add_argument(
        "--data-device",
        default="device",
        choices=["device", "host"],
        help="where the images live; host: copied batch by batch, for data larger than the device (default device)",
    )
    g.add_argument(
        "--size",
        "--image-size",
        dest="image_size",
        type=int,
        metavar="N",
        help="resize the images to N x N; 0 leaves them (default below; one's own: files and oblong arrays to 32, "
        "square arrays not)",
    )
    g = p.add_argument_group("one's own data")
    g.add_argument(
        "--min-votes",
        type=int,
        metavar="K",
        help="a label is a candidate from K votes on (default 1); where none "
        "has so many, the most frequent ones are",
    )
    g.add_argument(
        "--reliability",
        type=float,
        metavar="R",
        help="without a test set, score on samples whose most frequent "
        "label has at least this share of the votes, at most a fifth of all (default 0.8)",
    )
    g.add_argument(
        "--classes", nargs="+", metavar="NAME", help="the names of all classes (default: the labels in the data)"
    )
    g.add_argument(
        "--feature-noise",
        type=float,
        metavar="X",
        help="Gaussian noise on features in place of augmentation, in "
        "their standard deviations; twice as much in a strong view (default 0.1)",
    )
    g = p.add_argument_group("method")
    g.add_argument("--base", default="pico", metavar="NAME", help=f"{', '.join(baselines.METHODS)} (default pico)")
    g.add_argument("--no-irnet", action="store_true", help="the base alone: e0 is looked for, nothing is corrected")
    g.add_argument(
        "--tau",
        type=float,
        metavar="T",
        help="tau_epsilon of Eqs. 10-11 (default: the table below; "
        "on one's own data stricter where the noise estimate asks for it)",
    )
    g.add_argument(
        "--views",
        default="w",
        choices=["none", "w", "s", "ww", "ws", "ss"],
        help="extra views of Eqs. 11-12, weak or strong: Table 5 (default w)",
    )
    g.add_argument("--swap", action="store_true", help="move the least probable candidate out: Table 7")
    g.add_argument(
        "--e0", default="auto", metavar="auto|N", help="the correction epoch: found, or given (default auto)"
    )
    g.add_argument(
        "--e0-rule",
        default="smoothed",
        choices=["smoothed", "paper"],
        help="the released rule on a smoothed curve, or Algorithm 1 as printed (default smoothed)",
    )
    g.add_argument("--window", type=int, metavar="N", help="of the smoothed rule; 0 is epochs/10, at least 10")
    g.add_argument(
        "--val",
        default="holdout",
        choices=["holdout", "test"],
        help="the curve that e0 is read from: how often a held-out prediction is a candidate, or test "
        "accuracy, which leaks (default holdout)",
    )
    g.add_argument(
        "--weights-after",
        default="value",
        choices=["value", "uniform", "1/C"],
        help="weight of a label moved in: f(label), uniform, 1/C (default value)",
    )
    g.add_argument(
        "--f",
        default="auto",
        choices=["auto", "prototype", "classifier"],
        help="f in Eq. 4 (default: prototypes for pico, the classifier elsewhere)",
    )
    g.add_argument("--classifier-loss", choices=["ce", "sce"], help="of pico: its own, or the release's SCE(6, 1)")
    g.add_argument(
        "--form",
        default="average",
        choices=["average", "soft_target"],
        help="mae, mse, sce on a set: the average over its labels, or the set as a soft target (default average)",
    )
    g.add_argument("--beta", type=float, metavar="B", help="lwc's weight of the non-candidates (default 1)")
    g.add_argument("--proto-start", type=int, metavar="E", help="pico: first epoch of prototype label weights")
    g.add_argument("--queue", type=int, metavar="N", help="pico: keys kept for contrast")
    g.add_argument("--key-momentum", type=float, metavar="M", help="pico: of the key encoder")
    g.add_argument("--phi", type=float, nargs=2, metavar=("A", "B"), help="pico: of the label weights, from A to B")
    g.add_argument("--prototype-momentum", type=float, metavar="M", help="pico: of the prototypes")
    g = p.add_argument_group("training")
    g.add_argument("--arch", choices=list(models.BACKBONES), help="backbone; cnn and mlp have presets of their own")
    g.add_argument("--epochs", type=int, metavar="N", help="passes over the training set")
    g.add_argument("--batch-size", type=int, metavar="N", help="samples a step")
    g.add_argument("--lr", type=float, metavar="LR", help="of SGD at the start of its cosine")
    g.add_argument("--weight-decay", type=float, metavar="WD", help="of SGD")
    g.add_argument("--crop", type=float, metavar="A", help="smallest area of a random crop, of 1")
    g.add_argument("--flip", type=float, metavar="P", help="probability of a horizontal flip")
    g.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    g.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="auto: the best there is (default)"
    )
    g.add_argument(
        "--amp",
        default="auto",
        choices=["auto", "bf16", "off"],
        help="bf16 in the networks; auto: on CUDA cards that have it (default auto)",
    )
    g.add_argument("--compile", action="store_true", help="torch.compile the networks and the augmentation")
    g.add_argument("--threads", type=int, metavar="N", help="of the CPU; 0 is torch's choice")
    g.add_argument(
        "--transductive-every",
        type=int,
        metavar="N",
        help="epochs between passes over the training set (default epochs/100, at least 1)",
    )
    g = p.add_argument_group("run")
    g.add_argument(
        "--snapshots",
        type=int,
        nargs="+",
        default=[],
        metavar="E",
        help="epochs after which margins and test features are kept, for Figs. 3, 7 and 8 (default none)",
    )
    g.add_argument("--out", metavar="DIR", help="folder of the run (default runs/<what it is>)")
    g.add_argument("--resume", action="store_true", help="go on with an interrupted run, exactly")
    g.add_argument("--overwrite", action="store_true", help="replace the run that the folder holds")
    g.add_argument(
        "--save-every",
        type=int,
        default=1,
        metavar="N",
        help="epochs between checkpoints on the disk; when stopped, the newest is written too (default 1)",
    )
    return p


def nearest(option: str, value: str, names: list[str], listed: bool = True) -> str:
    guess = difflib.get_close_matches(value, names, 1)
    choose = f"; choose {', '.join(names)}" if listed else ""
    return f"{option} {value}: unknown{choose}" + (f" (did you mean {guess[0]}?)" if guess else "")


def configure(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, filled up from the presets and checked."""
    p = parser()
    c, unknown = p.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        p.error(nearest("option", word, list(p._option_string_actions), listed=False))
    own = c.dataset not in PRESETS
    table = votes.is_table(Path(c.dataset))
    if own and not table and not c.dataset.lower().endswith(".npz") and not Path(c.dataset).is_dir():
        known = [*PRESETS, "a .csv or .tsv table", "an .npz", "a folder of .npy files"]
        raise InputError(nearest("--dataset", c.dataset, known))
    for name, value in OWN.items():
        if getattr(c, name) is None:
            setattr(c, name, value)
        elif not own:
            raise InputError(f"--{name.replace('_', '-')}: only with one's own data, not --dataset {c.dataset}")
    if c.base not in baselines.METHODS:
        raise InputError(nearest("--base", c.base, list(baselines.METHODS)))
    if c.base in baselines.WITHOUT_IRNET and not c.no_irnet:
        raise InputError(f"--base {c.base}: IRNet does not go on top of it; add --no-irnet")
    for name in ("classifier_loss", "proto_start", "queue", "key_momentum", "phi", "prototype_momentum"):
        if getattr(c, name) is not None and c.base not in baselines.PICO_FAMILY:
            raise InputError(f"--{name.replace('_', '-')}: only with --base pico and its kind, not {c.base}")
        if getattr(c, name) is not None and c.base == "pico+" and name in ("classifier_loss", "proto_start"):
            raise InputError(f"--{name.replace('_', '-')}: pico+ has its own")
    if c.beta is not None and c.base != "lwc":
        raise InputError(f"--beta: only with --base lwc, not {c.base}")
    c.beta = 1.0 if c.beta is None else c.beta
    preset = PRESETS.get(c.dataset, PRESETS["digits"])  # small networks on one's own data: as on digits
    if own:
        preset = (RELEASED if c.arch == "resnet18" else preset) | dict(image_size=32 if table else 0)
        if not table and votes.has_features(Path(c.dataset)):
            preset = preset | dict(arch="mlp")
    elif c.arch in ("cnn", "mlp"):
        preset = SMALL | dict(threads=preset["threads"])
    elif c.arch == "resnet18" and c.dataset == "digits":
        preset = RELEASED | dict(epochs=preset["epochs"], image_size=0)
    for name, value in preset.items():
        if getattr(c, name) is None:
            setattr(c, name, value)
    if not own:
        c.q = c.q if c.q is not None else 0.05 if c.dataset == "cifar100" else 0.3
        c.eta = c.eta if c.eta is not None else 0.3
    elif c.base == "alim" and c.eta is None:
        raise InputError(
            "--base alim: it needs to know the noise rate, as of sets of one's own nobody does; use another"
        )
    elif (c.q is None) != (c.eta is None):
        raise InputError("--q, --eta: give both, or neither where the file has candidate sets of its own")
    if c.f == "auto":
        c.f = "prototype" if c.base in baselines.PICO_FAMILY else "classifier"
    c.careful = (
        own and c.tau is None and not c.no_irnet
    )  # at e0 crowd.safe_tau may find that a stricter one is needed
    if c.tau is None:
        c.tau = default_tau(c)
    pico = c.base in baselines.PICO_FAMILY
    c.transductive_every = c.transductive_every or max(1, c.epochs // 100)
    for name, ok, fix in (
        ("q", c.q is None or 0 <= c.q < 1, "in [0, 1)"),
        ("eta", c.eta is None or 0 <= c.eta < 1, "in [0, 1)"),
        ("epochs", c.epochs >= 1, "at least 1"),
        ("batch_size", c.batch_size >= 2, "at least 2"),
        ("lr", 0 < c.lr <= 1e6, "above 0, at most 1e6"),
        ("weight_decay", 0 <= c.weight_decay <= 1e6, "from 0 to 1e6"),
        ("tau", 0 <= c.tau < 1, "in [0, 1)"),
        ("crop", 0 < c.crop <= 1, "in (0, 1]"),
        ("flip", 0 <= c.flip <= 1, "in [0, 1]"),
        ("window", c.window == 0 or c.window >= 3, "0 (epochs/10, at least 10) or at least 3"),
        ("limit_train", c.limit_train is None or c.limit_train >= 2, "at least 2"),
        ("min_votes", c.min_votes >= 1, "at least 1"),
        ("reliability", 0 < c.reliability <= 1, "in (0, 1]"),
        ("feature_noise", 0 <= c.feature_noise <= 10, "from 0 to 10"),
        ("limit_test", c.limit_test is None or c.limit_test >= 1, "at least 1"),
        (
            "image_size",
            c.image_size == 0 and not table or 8 <= c.image_size <= 1024,
            "from 8 to 1024" if table else "0 (as they are) or from 8 to 1024",
        ),
        ("seed", 0 <= c.seed < 2**63, "at least 0"),
        ("out", c.out != "", "a folder's name"),
        ("proto_start", c.proto_start >= 1, "at least 1"),
        ("phi", all(0 <= value <= 1 for value in c.phi), "two numbers in [0, 1]"),
        ("threads", 0 <= c.threads <= 1024, "from 0 to 1024"),
        ("beta", 0 <= c.beta <= 1e6, "from 0 to 1e6"),
        ("queue", not pico or c.batch_size <= c.queue <= 10**7, "from --batch-size to ten million"),
        ("key_momentum", 0 <= c.key_momentum < 1, "in [0, 1)"),
        ("prototype_momentum", 0 <= c.prototype_momentum < 1, "in [0, 1)"),
        ("transductive_every", c.transductive_every >= 1, "at least 1"),
        ("snapshots", all(1 <= e <= c.epochs for e in c.snapshots), f"epochs from 1 to {c.epochs}"),
        ("save_every", c.save_every >= 1, "at least 1"),
        ("f", c.f == "classifier" or pico, "classifier: only pico has prototypes"),
    ):
        if not ok:
            raise InputError(f"--{name.replace('_', '-')} {getattr(c, name)}: must be {fix}")
    if c.classes:
        votes.check_names(c.classes, "--classes")
    if c.resume and c.overwrite:
        raise InputError("--resume, --overwrite: one of them; --resume goes on, --overwrite begins again")
    if c.e0 != "auto" and not (c.e0.isdecimal() and len(c.e0) < 10 and 1 <= int(c.e0) <= c.epochs):
        raise InputError(f"--e0 {c.e0}: must be auto or an epoch from 1 to {c.epochs}")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if c.device == "auto":
        c.device = next(device for device in there if there[device])
    elif not there[c.device]:
        raise InputError(f"--device {c.device}: torch finds no such device here; use --device auto")
    return c


def recorded(c: argparse.Namespace) -> dict:
    """What config.json says of a run: all that may change its result."""
    aside = ("resume", "overwrite", "save_every", "snapshots", "out", "data", "data_device")
    return json.loads(json.dumps({key: value for key, value in vars(c).items() if key not in aside}))
