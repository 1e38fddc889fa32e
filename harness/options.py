"""The command line of train.py. Each option stands once, in the table: parsing, checks, --help, config.json and the
presets all read it. A default of a large run is the paper's (P), the released code's (C) or ours (O).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import InputError, Parser, flag, is_table, nearest, ranks

SIX = ("cc", "rc", "log", "proden", "lwc", "pico")
BASES = (*SIX, "mae", "mse", "sce", "gce", "plcr", "pico+", "alim", "pals", "supervised", "dividemix")
PICO_FAMILY = ("pico", "pico+", "alim")  # two encoders, a queue, prototypes
WITHOUT_IRNET = ("pico+", "alim", "pals", "supervised", "dividemix")  # noise has another answer there, or none
WITHOUT_WEIGHTS = ("cc", "log", "mae", "mse", "sce", "gce")  # of labels: nothing to mix with --irnet plus
ARCHS, VALS, PLACES = ("resnet18", "narrow", "cnn", "wide", "mlp"), ("holdout", "test"), ("device", "host")
RULES, AMPS = ("auto", "smoothed", "knee", "paper"), ("auto", "bf16", "fp16", "off")
VARIANTS = ("published", "released")
OPEN_SETS = ("off", "keep", "drop")
WINDS = ("paper", "votes", "now", "back", "mix", "votes+back", "plus")  # IRNet as in the paper, or with more
FS, FORMS = ("auto", "prototype", "classifier"), ("average", "soft_target")


def number(text: str) -> float | str:
    """A number, or auto."""
    return text if text == "auto" else float(text)


@dataclass(frozen=True)
class Option:
    name: str  # as in config.json; with hyphens on the command line
    help: str
    default: object = None  # the same for all; None: from the preset, or worked out in `fill`
    allowed: str | tuple = ""  # an interval, as in [0, 1), or the choices
    type: type = None  # where no value tells it
    P: object = None  # the preset of the large runs (ResNet-18), by where it is from: the paper,
    C: object = None  # the released code,
    O: object = None  # or us  # noqa: E741
    small: object = None  # that of cnn, wide and mlp; None: as the large runs
    narrow: object = None  # that of narrow; None: as the small ones
    many: object = None  # theirs on the 60,000 images of KMNIST and Fashion; None: as the small ones
    count: object = None  # argparse's nargs
    kept: bool = True  # in config.json: it may change the result

    def __post_init__(self):
        source = next((letter for letter in "PCO" if getattr(self, letter) is not None), "")
        value = getattr(self, source) if source else self.default
        kind = self.type or type(value[0] if isinstance(value, tuple) else value)
        self.__dict__.update(source=source, large=value if source else None, type=kind)


GROUPS = {
    "data": (
        Option("dataset", "digits (embedded), kmnist, fashion, cifar10, cifar100; or one's own: a .csv beside its "
               "images, a folder of class folders, an .npz, a folder of .npy files: docs/own-labels.md", "digits"),
        Option("data", "folder where torchvision's files are or go", "data", kept=False),
        Option("q", "chance of a wrong label to be in the set (default 0.3; cifar100 0.05)", None, "[0, 1)", float),
        Option("eta", "chance of the true label to be missing (default 0.3)", None, "[0, 1)", float),
        Option("limit_train", "only the first N training images", None, "[2, inf)", int),
        Option("limit_test", "only the first N test images", None, "[1, inf)", int),
        Option("data_device", "where the images live; host: copied batch by batch", "device", PLACES, kept=False),
        Option("image_size", "resize to N x N; 0: not (one's own: files and oblong arrays to 32)", C=32, small=0),
    ),
    "one's own data": (
        Option("min_votes", "a label is a candidate from N votes on, or if none has more", 1, "[1, inf)"),
        Option("reliability", "without a test set: agreement of the samples to score on", 0.8, "(0, 1]"),
        Option("classes", "the names of all classes (default: the labels in the data)", type=str, count="+"),
        Option("unsure", "labels that mean nothing: such votes are left out", (), type=str, count="+"),
        Option("decisions", "decisions.csv of a review: labels that a person decided on", (), type=str, count="+"),
        Option("follow_votes", "pico, proden: label weights by how probable the votes are, not by the sets", False),
        Option("folds", "networks, each without one part of the samples, by which labels.csv judges it", 0),
        Option("feature_noise", "noise that augments features, in deviations; strong: twice", 0.1, "[0, 10]"),
    ),
    "method": (
        Option("preset", "released: the experiment as the authors' code has it", "ours", ("ours", "released")),
        Option("base", ", ".join(BASES), "pico"),
        Option("no_irnet", "the base alone: e0 is looked for, nothing is corrected", False),
        Option("tau", "tau_epsilon of Eqs. 10-11; auto: found by itself, from held-out sets and neighbours "
               "(default: the table below; plus: auto)", None, "[0, 1)", number),
        Option("irnet", "plus: with what came later; or a part of it; with --tau auto: votes. "
               "docs/beyond-the-paper.md", "paper", WINDS),
        Option("views", "extra views of Eqs. 11-12, weak or strong", "w", ("none", "w", "s", "ww", "ws", "ss")),
        Option("views_share", "share of a batch that is looked at under them, by margin", None, "(0, 1]", O=0.25),
        Option("views_all", "the whole batch is: --views-share 1", False),
        Option("record_views", "as released: extra views in all epochs, in the running statistics", False),
        Option("strict", "as released: < in Eqs. 10-11, not <=", False),
        Option("open_set", "samples of no class, found from e0 on: not corrected, or left out", "off", OPEN_SETS),
        Option("swap", "move the least probable candidate out: Table 7", False),
        Option("e0", "the correction epoch: auto (found), or its number", "auto"),
        Option("e0_rule", "smoothed (the release's), knee, paper; auto: knee under 100 epochs", "auto", RULES),
        Option("window", "of the rule; 0 is epochs/10, at least 10, and for the knee epochs/8", C=0, many=3),
        Option("val", "curve behind e0: held-out predictions in sets; test accuracy (leaks)", "holdout", VALS),
        Option("weights_after", "weight of a label moved in; value: f(label); uniform: as all in its set", "value",
               ("value", "uniform", "1/C")),
        Option("f", "f in Eq. 4; auto: prototypes for pico, else the classifier", "auto", FS),
        Option("form", "mae, mse, sce on a set: the mean over it, or the set as soft target", "average", FORMS),
        Option("variant", "released: log as cc, rc as proden, pico+ by its queue", VARIANTS[0], VARIANTS),
        Option("beta", "lwc: weight of the non-candidates", 1.0, "[0, 1e6]"),
    ),
    "pico and its kind": (
        Option("classifier_loss", "its own, or the release's SCE(6, 1)", None, ("ce", "sce"), P="ce"),
        Option("proto_start", "first epoch of prototype label weights; 0 is epochs/10, small nets' epochs/4", None,
               "[0, inf)", C=1),
        Option("queue", "keys kept for contrast", C=8192, small=1024),
        Option("key_momentum", "of the key encoder", None, "[0, 1)", C=0.999, small=0.99),
        Option("phi", "share of label weights kept, at first, at last", None, "[0, 1]", C=(0.95, 0.8), count=2,
               small=(0.99, 0.6), narrow=(0.95, 0.6)),
        Option("prototype_momentum", "of the prototypes", None, "[0, 1)", C=0.99),
    ),
    "training": (
        Option("arch", "backbone; the last four have their own presets", None, ARCHS, P="resnet18", small="cnn"),
        Option("epochs", "passes over the training set", None, "[1, inf)", P=1000, small=40, narrow=32,
               many=32),
        Option("batch_size", "samples a step", None, "[2, inf)", C=128, small=64, narrow=128),
        Option("lr", "of SGD at the start of its cosine", None, "(0, 1e6]", P=0.01, small=0.02, narrow=0.05),
        Option("weight_decay", "of SGD", None, "[0, 1e6]", C=1e-3, narrow=1e-4),
        Option("crop", "smallest area of a random crop, of 1", None, "(0, 1]", C=0.2, small=0.8, narrow=0.85,
               many=0.85),
        Option("flip", "probability of a horizontal flip; auto: 0.5 for colour images, 0 for grey", None, "[0, 1]",
               number, C=0.5, small="auto"),
        Option("seed", "of everything random", 0, "[0, 9223372036854775807]"),
        Option("device", "auto: cuda or cpu; mps only if named", "auto", ("auto", "cpu", "cuda", "mps")),
        Option("amp", "auto: bf16 where card or CPU (from 28x28 on) has it, else fp16 on a card", "auto", AMPS),
        Option("compile", "torch.compile the networks and the augmentation", False),
        Option("threads", "of the CPU; 0 is torch's choice", None, "[0, 1024]", O=0),
        Option("test_every", "epochs between looks at the test set; 0: 1, or 2 from 5,000 on", 0, "[0, inf)"),
        Option("transductive_every", "the same, all training samples; 0: 1, or last from 5,000 on", 0, "[0, inf)"),
    ),
    "run": (
        Option("snapshots", "epochs whose margins and test features are kept", (), type=int, count="+", kept=False),
        Option("out", "folder of the run (default runs/<what it is>)", type=str, kept=False),
        Option("resume", "go on with an interrupted run, exactly", False, kept=False),
        Option("overwrite", "replace the run that the folder holds", False, kept=False),
        Option("keep_e0", "keep the checkpoint of e0 as e0.pt: python -m paper goes on from it", False, kept=False),
        Option("save_every", "epochs between checkpoints; one more when stopped", 1, "[1, inf)", kept=False),
    ),
}  # fmt: skip
READING = ("min_votes", "reliability", "classes", "unsure", "decisions")  # what reading one's own data depends on
OWN, PICO = ({o.name for o in GROUPS[title]} for title in ("one's own data", "pico and its kind"))
OPTIONS = {option.name: option for group in GROUPS.values() for option in group}
LARGE = {o.name: o.large for o in OPTIONS.values() if o.large is not None}
# The small networks' (all O): light augmentation; short runs need a faster key encoder, and label weights that wait
SMALL = LARGE | {o.name: o.small for o in OPTIONS.values() if o.small is not None}
NARROW = SMALL | {o.name: o.narrow for o in OPTIONS.values() if o.narrow is not None} | dict(arch="narrow")
MANY = SMALL | {o.name: o.many for o in OPTIONS.values() if o.many is not None}
PRESETS = {
    "digits": SMALL | dict(threads=1),  # O: a step of them is too little work for two threads
    **dict.fromkeys(("kmnist", "fashion"), LARGE | dict(proto_start=0)),  # C: 100 of 1,000; fashion as KMNIST
    **dict.fromkeys(("cifar10", "cifar100"), LARGE),
}
RELEASED = dict(val="test", e0_rule="smoothed", strict=True, record_views=True, views_share=1.0, form="soft_target",
                variant="released")  # --preset released (all C); SCE with IRNet is in `fill`  # fmt: skip
# tau_epsilon of Eqs. 10-11 where f is PiCO's prototype softmax: {q: (eta=0.1, 0.2, 0.3)} (C). The nearest row and
# column serve other q and eta. Classifier softmax reaches +-1 instead of +-0.4 and has a value of its own (O).
TAU = {
    "cifar10": {0.1: (0.020, 0.016, 0.010), 0.3: (0.016, 0.010, 0.008), 0.5: (0.010, 0.008, 0.008)},
    "cifar100": {0.01: (0.004, 0.002, 0.002), 0.03: (0.002, 0.002, 0.002), 0.05: (0.002, 0.002, 0.002)},
    "kmnist": {0.1: (0.010, 0.010, 0.010), 0.3: (0.010, 0.010, 0.010), 0.5: (0.010, 0.010, 0.008)},
}
TAU_SMALL = 0.004  # O: prototypes of the small networks
TAU_CLASSIFIER = {0.1: 0.3, 0.3: 0.3, 0.5: 0.2}  # O: {q: tau}; larger sets share the probability among more labels


def configure(
    argv: list[str] | None = None,
    has_features: Callable[[Path], bool] = lambda path: False,
    count: Callable[[Path], int] = lambda path: 0,
):
    """The command line, filled up and checked: a frozen object. has_features(path): features rather than images?"""
    given = check_given(parse(argv))
    path = Path(given["dataset"])
    own = given["dataset"] not in PRESETS
    counted = count(path) if own else 0
    c = check(fill(given, features=own and has_features(path), samples=counted)) | dict(counted=counted)
    c["device"] = ranks.find_device(c["device"])
    return dataclasses.make_dataclass("Config", list(c), frozen=True)(**c)


def parse(argv: list[str] | None) -> dict:
    what = "Partial-label learning with noisy candidate sets: a base, and IRNet on top of it."
    form = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = Parser(prog="train.py", description=what, epilog=preset_table(), **form)
    for title, group in GROUPS.items():
        add = parser.add_argument_group(title).add_argument
        for o in group:
            flags = [flag(o.name), *(["--size"] if o.name == "image_size" else [])]
            said = "" if o.default in (None, (), False) or "(default" in o.help else f" (default {o.default})"
            choices = o.allowed if isinstance(o.allowed, tuple) else None
            show = None if choices else {int: "N", float: "X", number: "X", str: "NAME"}.get(o.type)
            show = dict(e0="N", out="DIR", data="DIR", decisions="FILE").get(o.name, show)
            more = dict(type=o.type, nargs=o.count, metavar=show, choices=choices)
            more = dict(action="store_true", default=None) if o.type is bool else more
            add(*flags, dest=o.name, help=o.help + said, **more)
    found, unknown = parser.parse_known_args(argv)
    if unknown and not unknown[0].startswith("-"):
        parser.error(f"{unknown[0]}: not expected here; a value follows its option, as in --dataset digits")
    if unknown:
        parser.error(nearest("option", unknown[0].split("=")[0], list(parser._option_string_actions), listed=False))
    given = {"dataset": "digits", "base": "pico"} | {k: v for k, v in vars(found).items() if v is not None}
    return given | dict(base=given["base"].lower())


def check_given(given: dict) -> dict:
    """What was given must be known, and go together."""
    dataset, base, path = given["dataset"], given["base"], Path(given["dataset"])
    is_own = dataset not in PRESETS
    if is_own and not (is_table(path) or path.suffix.lower() == ".npz" or path.is_dir()):
        known = [*PRESETS, "a .csv or .tsv table", "an .npz", "a folder of .npy files or of class folders"]
        raise InputError(nearest("--dataset", dataset, known))
    if base not in BASES:
        raise InputError(nearest("--base", base, list(BASES)))
    if base in WITHOUT_IRNET and not given.get("no_irnet"):
        raise InputError(f"--base {base}: IRNet does not go on top of it; add --no-irnet")
    for name in given:
        if name in OWN and not is_own:
            raise InputError(f"{flag(name)}: only with one's own data, not --dataset {dataset}")
        if name in PICO and base not in PICO_FAMILY or name == "beta" and base != "lwc":
            raise InputError(
                f"{flag(name)}: only with {'lwc' if name == 'beta' else 'pico and its kind'}, not {base}"
            )
        if base == "pico+" and name in ("classifier_loss", "proto_start"):
            raise InputError(f"{flag(name)}: pico+ has its own")
    if is_own and base == "alim" and "eta" not in given:
        raise InputError("--base alim: it needs the noise rate, which nobody knows of one's own sets; use another")
    if is_own and ("q" in given) != ("eta" in given):
        raise InputError("--q, --eta: give both, or neither where the file has candidate sets of its own")
    if given.get("irnet") == "mix" and base in WITHOUT_WEIGHTS:
        raise InputError(f"--irnet mix, --base {base}: it mixes label weights, and {base} has none")
    if "back" in given.get("irnet", "") and given.get("swap"):
        raise InputError(
            f"--irnet {given['irnet']}, --swap: one of them; a label that was moved out does not come back"
        )
    if given.get("irnet", "paper") != "paper" and given.get("no_irnet"):
        raise InputError(f"--irnet {given['irnet']}, --no-irnet: one of them")
    if given.get("resume") and given.get("overwrite"):
        raise InputError("--resume, --overwrite: one of them; --resume goes on, --overwrite begins again")
    return given


def preset(given: dict, features: bool, samples: int = 0) -> dict:
    """The defaults by dataset and network."""
    dataset, arch = given["dataset"], given.get("arch")
    by_arch = dict(resnet18=LARGE, narrow=NARROW).get(arch, SMALL)
    if dataset not in PRESETS:  # one's own
        size = dict(image_size=32 if is_table(Path(dataset)) else 0)
        return by_arch | size | (dict(arch="mlp", threads=1) if features else {}) | few(by_arch, samples)
    if arch and arch != "resnet18":
        by_size = MANY if dataset in ("kmnist", "fashion") and by_arch is SMALL else by_arch
        return by_size | {name: PRESETS[dataset][name] for name in ("threads", "proto_start")}
    if arch == "resnet18" and dataset == "digits":
        return LARGE | dict(epochs=SMALL["epochs"], image_size=0)
    return PRESETS[dataset]


def few(usual: dict, samples: int) -> dict:
    """Of few samples of one's own (O): batches of at most a quarter of them, and epochs until there are 200 steps,
    at most 200."""
    if not samples:
        return {}
    size = min(usual["batch_size"], 2 ** max(1, (samples // 4).bit_length() - 1))
    steps = max(1, 7 * samples // 10 // size)  # an epoch, without those set aside and held out
    return dict(batch_size=size, epochs=max(usual["epochs"], min(200, -(-200 // steps))))


def fill(given: dict, features: bool = False, samples: int = 0) -> dict:
    """A value for every option: as given, else the preset's, else worked out."""
    c = {name: option.default for name, option in OPTIONS.items()} | preset(given, features, samples)
    if given.get("preset") == "released":
        sce = given["base"] == "pico" and not given.get("no_irnet") and given["dataset"] != "cifar100"
        c |= RELEASED | (dict(classifier_loss="sce") if sce else {})
    c |= given
    is_own, of_pico = c["dataset"] not in PRESETS, c["base"] in PICO_FAMILY
    for name, value in (("q", 0.05 if c["dataset"] == "cifar100" else 0.3), ("eta", 0.3)):
        c[name] = value if c[name] is None and not is_own else c[name]
    c["f"] = {True: "prototype", False: "classifier"}[of_pico] if c["f"] == "auto" else c["f"]
    if c["tau"] is None and c["irnet"] == "plus" and c["val"] == "holdout":
        c["tau"] = "auto"  # it has no knob
    if c["tau"] == "auto" and c["val"] == "test":
        raise InputError("--tau auto: it needs the held-out part; --val holdout, or give a number")
    if c["tau"] == "auto" and "irnet" not in given and not c["no_irnet"]:
        c["irnet"] = "votes"  # f is fitted to each sample's own set; its neighbours' sets are not
    # at e0 a stricter one may be found
    c["careful"] = is_own and c["tau"] in (None, "auto") and not c["no_irnet"]
    c["tau_auto"] = c["tau"] == "auto" and not c["no_irnet"]
    c["tau"] = default_tau(c) if c["tau"] is None else 0.0 if c["tau"] == "auto" else c["tau"]
    if "window" not in given and (c["e0_rule"] in ("smoothed", "paper") or c["epochs"] >= 100):
        c["window"] = 0  # the presets' are of the knee
    c["proto_start"] = c["proto_start"] or max(1, c["epochs"] // (10 if c["arch"] == "resnet18" else 4))
    return c


def default_tau(c: dict) -> float:
    q, eta = c["q"], c["eta"]
    if c["f"] == "classifier" or c["arch"] != "resnet18":
        near = min(TAU_CLASSIFIER, key=lambda value: abs(value - (q or 0.0)))
        return TAU_CLASSIFIER[near] if c["f"] == "classifier" else TAU_SMALL
    table = TAU.get(c["dataset"], TAU["kmnist"])
    if q is None:  # sets of one's own: the most cautious row
        q, eta = min(table), 0.1
    row = table[min(table, key=lambda value: abs(value - q))]
    return row[min(range(3), key=lambda i: abs((0.1, 0.2, 0.3)[i] - eta))]


def check(c: dict) -> dict:
    """Every value in its range."""
    table, epochs, size = is_table(Path(c["dataset"])), c["epochs"], c["image_size"]
    e0 = c["e0"] == "auto" or c["e0"].isdecimal() and len(c["e0"]) < 10 and 1 <= int(c["e0"]) <= epochs
    sizes = "from 8 to 1024" if table else "0 (as they are) or from 8 to 1024"
    special = {
        "window": (c["window"] == 0 or c["window"] >= 3, "0 (a share of the epochs) or at least 3"),
        "image_size": (size == 0 and not table or 8 <= size <= 1024, sizes),
        "out": (c["out"] != "", "a folder's name"),
        "queue": (
            c["base"] not in PICO_FAMILY or c["batch_size"] <= c["queue"] <= 10**7,
            f"from --batch-size, {c['batch_size']}, to ten million",
        ),
        "folds": (c["folds"] == 0 or 2 <= c["folds"] <= 100, "0 (none) or from 2 to 100"),
        "snapshots": (all(1 <= e <= epochs for e in c["snapshots"]), f"epochs from 1 to {epochs}"),
        "f": (c["f"] == "classifier" or c["base"] in PICO_FAMILY, "classifier: only pico has prototypes"),
        "e0": (e0, f"auto or an epoch from 1 to {epochs}"),
    }
    for name, option in OPTIONS.items():
        values = c[name] if isinstance(c[name], list | tuple) else [c[name]]
        ok, fix = special.get(name, (all(inside(v, option.allowed) for v in values), f"in {option.allowed}"))
        if not ok:
            raise InputError(f"{flag(name)} {c[name]}: must be {fix}")
    return c


def inside(value, interval: str | tuple) -> bool:
    if not interval or isinstance(interval, tuple) or value in (None, "auto"):
        return True  # argparse has looked at choices, and at what may be auto
    low, high = (int(end) if end.strip().isdecimal() else float(end) for end in interval[1:-1].split(","))
    return low <= value <= high and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")


def recorded(c) -> dict:
    """What config.json says of a run: all that may change its result."""
    return json.loads(
        json.dumps(
            {
                k: v
                for k, v in vars(c).items()
                if k not in OPTIONS and k != "counted" or k in OPTIONS and OPTIONS[k].kept
            }
        )
    )


def changed(c, features: bool = False) -> dict:
    """The options that are not the preset's; features: whether one's own data are."""
    names = ("dataset", "base", "arch", "no_irnet", "q", "eta", "preset")
    plain = fill({name: getattr(c, name) for name in names if getattr(c, name) is not None}, features, c.counted)
    now = {k: v for k, v in recorded(c).items() if k not in (*names, "device", "seed", "careful", "tau_auto")}
    now |= dict(tau="auto") if c.tau_auto else {}  # what it is in the run changes with the epochs
    return {k: v for k, v in now.items() if v != json.loads(json.dumps(plain[k]))}


def preset_table() -> str:
    """The presets for --help."""
    columns = PRESETS | {"small (1)": MANY | dict(proto_start=0), "narrow": NARROW, "small (2)": SMALL}
    rows = {name: [str(column[name]).strip("()") for column in columns.values()] for name in LARGE}
    tau = [f"  {name:9s} q = {q:<5} {str(row)[1:-1]}" for name, t in TAU.items() for q, row in t.items()]
    return "\n".join([
        "defaults by dataset; with another --arch the last columns: small (1) is cnn, wide and mlp on kmnist and",
        "fashion, small (2) the same elsewhere and one's own data. The letters say where the values of the large",
        "runs are from: P the paper, C the released code, O ours, as all of digits and of the last columns.",
        "resnet18 on one's own data: as on cifar10; on digits with 40 epochs. On kmnist and fashion --proto-start",
        "is 0 with every network.\n",
        " " * 25 + "".join(name.rjust(11) for name in columns),
        *(f"  {OPTIONS[k].source} {flag(k):21s}" + "".join(v.rjust(11) for v in row) for k, row in rows.items()),
        "\n--tau where f is pico's prototypes (C), for eta = 0.1, 0.2, 0.3; the nearest q and eta count:\n",
        *tau,
        "  fashion, digits and one's own, resnet18: kmnist's rows; sets of one's own: 0.01",
        f"  small networks: {TAU_SMALL} (O); where f is the classifier: 0.3, from q = 0.4 on 0.2 (O)",
    ])  # fmt: skip
