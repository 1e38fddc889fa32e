"""The command line of train.py. Each option stands once, in the table below: parsing, checks, --help, config.json and
the presets all read it. A default of a large run is the paper's (P), the released code's (C) or ours (O).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import InputError, Parser

SIX = ("cc", "rc", "log", "proden", "lwc", "pico")
BASES = (*SIX, "mae", "mse", "sce", "gce", "plcr", "pico+", "alim", "supervised", "dividemix")
PICO_FAMILY = ("pico", "pico+", "alim")  # two encoders, a queue, prototypes
WITHOUT_IRNET = ("pico+", "alim", "supervised", "dividemix")  # noise has another answer there, or none
DATASETS = ("digits", "kmnist", "fashion", "cifar10", "cifar100")


@dataclass(frozen=True)
class Option:
    name: str  # as in config.json; with hyphens on the command line
    kind: type  # bool: given or not
    help: str
    default: object = None  # None: from the preset, or worked out in `fill`
    large: object = None  # the presets: ResNet-18 ...
    small: object = None  # ... and the small networks; None: as the large runs
    source: str = ""  # where `large` is from: P, C or O
    allowed: str = ""  # an interval, as in [0, 1)
    choices: tuple = ()
    count: object = None  # argparse's nargs
    show: str | tuple | None = None  # argparse's metavar
    bases: tuple = ()  # only with these
    own: bool = False  # only with one's own data
    kept: bool = True  # in config.json: it may change the result
    also: str = ""  # another spelling


def pico(name: str, kind: type, help: str, **more) -> Option:
    return Option(name, kind, f"pico: {help}", bases=PICO_FAMILY, **more)


def own(name: str, kind: type, help: str, default, **more) -> Option:
    return Option(name, kind, help, default, own=True, **more)


GROUPS = {
    "data": (
        Option("dataset", str, "digits (embedded), kmnist, fashion, cifar10, cifar100; or one's own: a .csv beside its "
               "images, an .npz, or a folder of .npy files, see docs/own-labels.md", "digits", show="NAME"),
        Option("data", str, "where torchvision's files are or go", "data", show="DIR", kept=False),
        Option("q", float, "probability of each wrong label to be a candidate (default 0.3; cifar100 0.05)",
               allowed="[0, 1)"),
        Option("eta", float, "probability that the true label is missing (default 0.3)", allowed="[0, 1)"),
        Option("limit_train", int, "only the first N training images", allowed="[2, inf)"),
        Option("limit_test", int, "only the first N test images", allowed="[1, inf)"),
        Option("data_device", str, "where the images live; host: copied batch by batch, for data larger than the "
               "device", "device", choices=("device", "host"), kept=False),
        Option("image_size", int, "resize the images to N x N; 0 leaves them (one's own: files and oblong arrays to "
               "32, square arrays not)", large=32, small=0, source="C", also="--size"),
    ),
    "one's own data": (
        own("min_votes", int, "a label is a candidate from K votes on (default 1); where none has so many, the most "
            "frequent ones are", 1, allowed="[1, inf)", show="K"),
        own("reliability", float, "without a test set, score on samples whose most frequent label has at least this "
            "share of the votes, at most a fifth of all (default 0.8)", 0.8, allowed="(0, 1]", show="R"),
        own("classes", str, "the names of all classes (default: the labels in the data)", None, count="+", show="NAME"),
        own("feature_noise", float, "Gaussian noise on features in place of augmentation, in their standard "
            "deviations; twice as much in a strong view (default 0.1)", 0.1, allowed="[0, 10]", show="X"),
    ),
    "method": (
        Option("base", str, ", ".join(BASES), "pico", show="NAME"),
        Option("no_irnet", bool, "the base alone: e0 is looked for, nothing is corrected", False),
        Option("tau", float, "tau_epsilon of Eqs. 10-11 (default: the table below; on one's own data stricter where "
               "the noise estimate asks for it)", allowed="[0, 1)", show="T"),
        Option("views", str, "extra views of Eqs. 11-12, weak or strong: Table 5", "w",
               choices=("none", "w", "s", "ww", "ws", "ss")),
        Option("swap", bool, "move the least probable candidate out: Table 7", False),
        Option("e0", str, "the correction epoch: found, or given", "auto", show="auto|N"),
        Option("e0_rule", str, "a rule on a smoothed curve, or Algorithm 1 as printed", "smoothed",
               choices=("smoothed", "paper")),
        Option("window", int, "of the smoothed rule; 0 is epochs/10, at least 10", large=0, source="C"),
        Option("val", str, "the curve that e0 is read from: how often a held-out prediction is a candidate, or test "
               "accuracy, which leaks", "holdout", choices=("holdout", "test")),
        Option("weights_after", str, "weight of a label moved in: f(label), uniform, 1/C", "value",
               choices=("value", "uniform", "1/C")),
        Option("f", str, "f in Eq. 4 (default: prototypes for pico, the classifier elsewhere)",
               choices=("auto", "prototype", "classifier")),
        pico("classifier_loss", str, "its own, or the release's SCE(6, 1)", large="ce", source="P",
             choices=("ce", "sce")),  # C: sce with IRNet on CIFAR-10 and KMNIST, ce without
        Option("form", str, "mae, mse, sce on a set: the average over its labels, or the set as a soft target",
               "average", choices=("average", "soft_target")),
        Option("beta", float, "lwc's weight of the non-candidates (default 1)", allowed="[0, 1e6]", bases=("lwc",)),
        pico("proto_start", int, "first epoch of prototype label weights", large=1, source="C",
             allowed="[1, inf)", show="E"),
        pico("queue", int, "keys kept for contrast", large=8192, small=1024, source="C"),
        pico("key_momentum", float, "of the key encoder", large=0.999, small=0.99, source="C", allowed="[0, 1)",
             show="M"),
        pico("phi", float, "of the label weights: the share that an epoch leaves, from A to B", large=(0.95, 0.8),
             small=(0.99, 0.6), source="C", allowed="[0, 1]", count=2, show=("A", "B")),
        pico("prototype_momentum", float, "of the prototypes", large=0.99, source="C", allowed="[0, 1)", show="M"),
    ),
    "training": (
        Option("arch", str, "backbone; cnn and mlp have presets of their own", large="resnet18", small="cnn",
               source="P", choices=("resnet18", "cnn", "mlp")),
        Option("epochs", int, "passes over the training set", large=1000, small=40, source="P", allowed="[1, inf)"),
        Option("batch_size", int, "samples a step", large=128, small=64, source="C", allowed="[2, inf)"),
        Option("lr", float, "of SGD at the start of its cosine", large=0.01, small=0.02, source="P",
               allowed="(0, 1e6]", show="LR"),
        Option("weight_decay", float, "of SGD", large=1e-3, source="C", allowed="[0, 1e6]", show="WD"),
        Option("crop", float, "smallest area of a random crop, of 1", large=0.2, small=0.8, source="C",
               allowed="(0, 1]", show="A"),
        Option("flip", float, "probability of a horizontal flip", large=0.5, small=0.0, source="C", allowed="[0, 1]",
               show="P"),
        Option("seed", int, "of everything random", 0, allowed="[0, 9223372036854775807]", show="SEED"),
        Option("device", str, "auto: the best there is", "auto", choices=("auto", "cpu", "cuda", "mps")),
        Option("amp", str, "bf16 in the networks; auto: on CUDA cards that have it", "auto",
               choices=("auto", "bf16", "off")),
        Option("compile", bool, "torch.compile the networks and the augmentation", False),
        Option("threads", int, "of the CPU; 0 is torch's choice", large=0, source="O", allowed="[0, 1024]"),
        Option("transductive_every", int, "epochs between passes over the training set (default epochs/100, at least "
               "1)", allowed="[1, inf)"),
    ),
    "run": (
        Option("snapshots", int, "epochs after which margins and test features are kept, for Figs. 3, 7 and 8",
               (), count="+", show="E", kept=False),
        Option("out", str, "folder of the run (default runs/<what it is>)", show="DIR", kept=False),
        Option("resume", bool, "go on with an interrupted run, exactly", False, kept=False),
        Option("overwrite", bool, "replace the run that the folder holds", False, kept=False),
        Option("save_every", int, "epochs between checkpoints on the disk; when stopped, the newest is written too", 1,
               allowed="[1, inf)", kept=False),
    ),
}  # fmt: skip
OPTIONS = {option.name: option for group in GROUPS.values() for option in group}
LARGE = {o.name: o.large for o in OPTIONS.values() if o.large is not None}
# The small networks (all O) overfit in few epochs, but only under light augmentation. Short runs need a faster key
# encoder, and label weights that wait at first and decide in the end.
SMALL = LARGE | {o.name: o.small for o in OPTIONS.values() if o.small is not None}
PRESETS = {
    "digits": SMALL | dict(threads=1),  # O: a step of them is too little work for two threads
    "kmnist": LARGE | dict(proto_start=100),  # C
    "fashion": LARGE | dict(proto_start=100),  # O: as KMNIST
    "cifar10": LARGE,
    "cifar100": LARGE,
}
# tau_epsilon of Eqs. 10-11 where f is PiCO's prototype softmax: {q: (eta=0.1, 0.2, 0.3)} (C). The nearest row and
# column serve other q and eta. Classifier softmax reaches +-1 instead of +-0.4 and has a value of its own (O).
TAU = {
    "cifar10": {0.1: (0.020, 0.016, 0.010), 0.3: (0.016, 0.010, 0.008), 0.5: (0.010, 0.008, 0.008)},
    "cifar100": {0.01: (0.004, 0.002, 0.002), 0.03: (0.002, 0.002, 0.002), 0.05: (0.002, 0.002, 0.002)},
    "kmnist": {0.1: (0.010, 0.010, 0.010), 0.3: (0.010, 0.010, 0.010), 0.5: (0.010, 0.010, 0.008)},
}
TAU_SMALL = 0.004  # O: prototypes of the small networks
TAU_CLASSIFIER = {0.1: 0.3, 0.3: 0.3, 0.5: 0.2}  # O: {q: tau}; larger sets share the probability among more labels


# ------------------------------------------------------------------ from the command line to the configuration


def configure(argv: list[str] | None = None, has_features: Callable[[Path], bool] = lambda path: False):
    """The command line, filled up from the presets and checked: a frozen object. has_features: whether one's own
    arrays are features rather than images."""
    given = {name: value for name, value in parse(argv).items() if value is not None}
    check_given(given)
    path, is_own = Path(given["dataset"]), given["dataset"] not in PRESETS
    c = fill(given, features=is_own and not is_table(path) and has_features(path))
    check(c)
    c["device"] = find_device(c["device"])
    return dataclasses.make_dataclass("Config", list(c), frozen=True)(**c)


def parse(argv: list[str] | None) -> dict:
    parser = Parser(
        prog="train.py",
        description="Partial-label learning with noisy candidate sets: a base, and IRNet on top of it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=preset_table(),
        allow_abbrev=False,
    )
    for title, group in GROUPS.items():
        group_of = parser.add_argument_group(title)
        for o in group:
            flags = [f"--{o.name.replace('_', '-')}", *filter(None, [o.also])]
            if o.kind is bool:
                group_of.add_argument(*flags, action="store_true", default=None, help=o.help)
                continue
            said = "" if o.default in (None, ()) or "(default" in o.help or o.own else f" (default {o.default})"
            show = o.show or (None if o.choices else "N" if o.kind is int else o.name[0].upper())
            more = dict(type=o.kind, nargs=o.count, metavar=show, choices=o.choices or None)
            group_of.add_argument(*flags, dest=o.name, help=(o.help + said).replace("%", "%%"), **more)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        parser.error(nearest("option", word, list(parser._option_string_actions), listed=False))
    return {"dataset": "digits", "base": "pico"} | {k: v for k, v in vars(found).items() if v is not None}


def nearest(option: str, value: str, names: list[str], listed: bool = True) -> str:
    guess = difflib.get_close_matches(value, names, 1)
    choose = f"; choose {', '.join(names)}" if listed else ""
    return f"{option} {value}: unknown{choose}" + (f" (did you mean {guess[0]}?)" if guess else "")


def is_table(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".tsv")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_given(given: dict) -> None:
    """What was given must be known, and go together."""
    dataset, base = given["dataset"], given["base"]
    is_own = dataset not in PRESETS
    if is_own and not is_table(Path(dataset)) and not dataset.lower().endswith(".npz") and not Path(dataset).is_dir():
        known = [*PRESETS, "a .csv or .tsv table", "an .npz", "a folder of .npy files"]
        raise InputError(nearest("--dataset", dataset, known))
    if base not in BASES:
        raise InputError(nearest("--base", base, list(BASES)))
    if base in WITHOUT_IRNET and not given.get("no_irnet"):
        raise InputError(f"--base {base}: IRNet does not go on top of it; add --no-irnet")
    for name in given:
        option = OPTIONS[name]
        if option.own and not is_own:
            raise InputError(f"{flag(name)}: only with one's own data, not --dataset {dataset}")
        if option.bases and base not in option.bases:
            kind = "pico and its kind" if option.bases == PICO_FAMILY else option.bases[0]
            raise InputError(f"{flag(name)}: only with --base {kind}, not {base}")
        if base == "pico+" and name in ("classifier_loss", "proto_start"):
            raise InputError(f"{flag(name)}: pico+ has its own")
    if is_own and base == "alim" and "eta" not in given:
        raise InputError(
            "--base alim: it needs to know the noise rate, as of sets of one's own nobody does; use another"
        )
    if is_own and ("q" in given) != ("eta" in given):
        raise InputError("--q, --eta: give both, or neither where the file has candidate sets of its own")
    if given.get("resume") and given.get("overwrite"):
        raise InputError("--resume, --overwrite: one of them; --resume goes on, --overwrite begins again")


def preset(given: dict, features: bool) -> dict:
    """The defaults by dataset and network."""
    dataset, arch = given["dataset"], given.get("arch")
    if dataset not in PRESETS:  # one's own: small networks as on digits
        base = LARGE if arch == "resnet18" else PRESETS["digits"]
        size = dict(image_size=32 if is_table(Path(dataset)) else 0)
        return base | size | (dict(arch="mlp") if features else {})
    if arch in ("cnn", "mlp"):
        return SMALL | dict(threads=PRESETS[dataset]["threads"])
    if arch == "resnet18" and dataset == "digits":
        return LARGE | dict(epochs=SMALL["epochs"], image_size=0)
    return PRESETS[dataset]


def fill(given: dict, features: bool = False) -> dict:
    """A value for every option: as given, else the preset's, else worked out."""
    c = {name: option.default for name, option in OPTIONS.items()} | preset(given, features) | given
    is_own, of_pico = c["dataset"] not in PRESETS, c["base"] in PICO_FAMILY
    if not is_own:
        c["q"] = c["q"] if c["q"] is not None else 0.05 if c["dataset"] == "cifar100" else 0.3
        c["eta"] = c["eta"] if c["eta"] is not None else 0.3
    c["beta"] = 1.0 if c["beta"] is None else c["beta"]
    if c["f"] in (None, "auto"):
        c["f"] = "prototype" if of_pico else "classifier"
    # on one's own data a stricter tau may be found at e0
    c["careful"] = is_own and c["tau"] is None and not c["no_irnet"]
    c["tau"] = default_tau(c) if c["tau"] is None else c["tau"]
    c["transductive_every"] = c["transductive_every"] or max(1, c["epochs"] // 100)
    return c


def default_tau(c: dict) -> float:
    q, eta = c["q"], c["eta"]
    if c["f"] == "classifier":
        return TAU_CLASSIFIER[min(TAU_CLASSIFIER, key=lambda value: abs(value - (q or 0.0)))]
    if c["arch"] != "resnet18":
        return TAU_SMALL
    table = TAU.get(c["dataset"], TAU["kmnist"])
    if q is None:  # sets of one's own: the most cautious row
        q, eta = min(table), 0.1
    row = table[min(table, key=lambda value: abs(value - q))]
    return row[min(range(3), key=lambda i: abs((0.1, 0.2, 0.3)[i] - eta))]


def check(c: dict) -> None:
    """Every value in its range."""
    table, epochs = is_table(Path(c["dataset"])), c["epochs"]
    special = {
        "window": (c["window"] == 0 or c["window"] >= 3, "0 (epochs/10, at least 10) or at least 3"),
        "image_size": (
            c["image_size"] == 0 and not table or 8 <= c["image_size"] <= 1024,
            "from 8 to 1024" if table else "0 (as they are) or from 8 to 1024",
        ),
        "out": (c["out"] != "", "a folder's name"),
        "queue": (
            c["base"] not in PICO_FAMILY or c["batch_size"] <= c["queue"] <= 10**7,
            "from --batch-size to ten million",
        ),
        "snapshots": (all(1 <= e <= epochs for e in c["snapshots"]), f"epochs from 1 to {epochs}"),
        "f": (c["f"] == "classifier" or c["base"] in PICO_FAMILY, "classifier: only pico has prototypes"),
        "e0": (
            c["e0"] == "auto" or c["e0"].isdecimal() and len(c["e0"]) < 10 and 1 <= int(c["e0"]) <= epochs,
            f"auto or an epoch from 1 to {epochs}",
        ),
    }
    for name, option in OPTIONS.items():
        values = c[name] if isinstance(c[name], list | tuple) else [c[name]]
        ok, fix = special.get(name, (all(inside(v, option.allowed) for v in values), wording(option.allowed)))
        if not ok:
            raise InputError(f"{flag(name)} {c[name]}: must be {fix}")


def inside(value, interval: str) -> bool:
    if not interval or value is None:
        return True
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def wording(interval: str) -> str:
    low, _, high = interval[1:-1].partition(", ")
    return f"at least {low}" if high == "inf" or len(high) > 9 else f"in {interval}"


def find_device(wanted: str) -> str:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(device for device in there if there[device])
    if not there[wanted]:
        raise InputError(f"--device {wanted}: torch finds no such device here; use --device auto")
    return wanted


# ------------------------------------------------------------------ what is said of it


def recorded(c) -> dict:
    """What config.json says of a run: all that may change its result."""
    return json.loads(json.dumps({k: v for k, v in vars(c).items() if k not in OPTIONS or OPTIONS[k].kept}))


def changed(c) -> dict:
    """The options that are not the preset's."""
    names = ("dataset", "base", "arch", "no_irnet", "q", "eta")
    plain = fill({name: getattr(c, name) for name in names if getattr(c, name) is not None})
    aside = (*names, "device", "seed", "careful")
    return {k: v for k, v in recorded(c).items() if k not in aside and v != json.loads(json.dumps(plain[k]))}


def preset_table() -> str:
    """The presets for --help."""
    columns = PRESETS | {"cnn, mlp": SMALL}
    lines = [
        "defaults by dataset; with --arch cnn or mlp the last column. The letters say where the values of the",
        "large runs are from: P the paper, C the released code, O ours. Those of digits and of cnn, mlp are ours.",
        "One's own data: as digits, --threads too; resnet18 on them as on cifar10, on digits with 40 epochs.",
        "",
        " " * 25 + "".join(name.rjust(11) for name in columns),
    ]
    for name in LARGE:
        cells = [" ".join(map(str, v)) if isinstance(v := row[name], tuple) else str(v) for row in columns.values()]
        lines.append(f"  {OPTIONS[name].source} {flag(name):21s}" + "".join(cell.rjust(11) for cell in cells))
    lines += ["", "--tau where f is pico's prototypes (C), for eta = 0.1, 0.2, 0.3; the nearest q and eta count:", ""]
    lines += [f"  {name:9s} q = {q:<5} {', '.join(map(str, row))}" for name, t in TAU.items() for q, row in t.items()]
    lines += [f"  cnn and mlp: {TAU_SMALL} (O); where f is the classifier: 0.3, from q = 0.4 on 0.2 (O)"]
    return "\n".join(lines)
