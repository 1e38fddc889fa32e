"""The presets of train.py, a column a dataset, and how --help shows them.

Every default is the paper's (P), the released code's (C) or ours (O).
"""

from __future__ import annotations

import argparse

SOURCED = {  # the large runs: value, and where it is from: P the paper, C the released code, O ours
    "arch": ("resnet18", "P"),
    "epochs": (1000, "P"),
    "batch_size": (128, "C"),
    "lr": (0.01, "P"),
    "weight_decay": (1e-3, "C"),
    "crop": (0.2, "C"),  # smallest crop of a view
    "flip": (0.5, "C"),
    "image_size": (32, "C"),
    "proto_start": (1, "C"),  # first epoch in which PiCO's prototypes move its label weights; C: 100 on KMNIST
    "queue": (8192, "C"),
    "key_momentum": (0.999, "C"),
    "prototype_momentum": (0.99, "C"),
    "phi": ((0.95, 0.8), "C"),  # the share of PiCO's label weights that an epoch leaves, early and in the last one
    "classifier_loss": ("ce", "P"),  # PiCO's own; C: "sce" with IRNet on CIFAR-10 and KMNIST, "ce" without
    "window": (0, "C"),  # of the smoothed rule for e0; 0 is epochs/10, at least 10 (the least: O)
    "threads": (0, "O"),  # of a CPU; 0 is torch's choice
}
RELEASED = {name: value for name, (value, _) in SOURCED.items()}
# With --arch cnn or mlp, whatever the dataset (all O): small networks overfit in few epochs, but only under light
# augmentation. Short runs need a faster key encoder, and label weights that wait at first and decide in the end.
SMALL = RELEASED | dict(
    arch="cnn",
    epochs=40,
    batch_size=64,
    lr=0.02,
    crop=0.8,
    flip=0.0,
    image_size=0,
    queue=1024,
    key_momentum=0.99,
    phi=(0.99, 0.6),
)
PRESETS = {
    "digits": SMALL | dict(threads=1),  # a step of them is too little work for two threads
    "kmnist": RELEASED | dict(proto_start=100),  # C
    "fashion": RELEASED | dict(proto_start=100),  # O: as KMNIST
    "cifar10": RELEASED,
    "cifar100": RELEASED,
}
OWN = dict(min_votes=1, reliability=0.8, classes=None, feature_noise=0.1)  # of one's own data alone (all O)
# tau_epsilon of Eqs. 10-11 where f is PiCO's prototype softmax: {q: (eta=0.1, 0.2, 0.3)} (C). The nearest row and
# column serve other q and eta. Classifier softmax reaches +-1 instead of +-0.4 and has a value of its own (O).
TAU = {
    "cifar10": {0.1: (0.020, 0.016, 0.010), 0.3: (0.016, 0.010, 0.008), 0.5: (0.010, 0.008, 0.008)},
    "cifar100": {0.01: (0.004, 0.002, 0.002), 0.03: (0.002, 0.002, 0.002), 0.05: (0.002, 0.002, 0.002)},
    "kmnist": {0.1: (0.010, 0.010, 0.010), 0.3: (0.010, 0.010, 0.010), 0.5: (0.010, 0.010, 0.008)},
}
TAU_SMALL = 0.004  # O: prototypes of the small networks
TAU_CLASSIFIER = {0.1: 0.3, 0.3: 0.3, 0.5: 0.2}  # O: {q: tau}; larger sets share the probability among more labels


def default_tau(c: argparse.Namespace) -> float:
    if c.f == "classifier":
        return TAU_CLASSIFIER[min(TAU_CLASSIFIER, key=lambda value: abs(value - (c.q or 0.0)))]
    if c.arch != "resnet18":
        return TAU_SMALL
    table, q, eta = TAU.get(c.dataset, TAU["kmnist"]), c.q, c.eta
    if q is None:  # sets of one's own: the most cautious row
        q, eta = min(table), 0.1
    row = table[min(table, key=lambda value: abs(value - q))]
    return row[min(range(3), key=lambda i: abs((0.1, 0.2, 0.3)[i] - eta))]


def preset_table() -> str:
    """The presets for --help."""
    columns = PRESETS | {"cnn, mlp": SMALL}
    lines = [
        "defaults by dataset; with --arch cnn or mlp the last column. The letters say where the values of the",
        "large runs are from: P the paper, C the released code, O ours. Those of digits and of cnn, mlp are ours.",
        "One's own data: as digits, --threads too; resnet18 on them as on cifar10, on digits with 40 epochs.",
        "",
    ]
    lines.append(" " * 25 + "".join(name.rjust(11) for name in columns))
    for name, (_, source) in SOURCED.items():
        cells = [row[name] if name != "phi" else " ".join(map(str, row[name])) for row in columns.values()]
        lines.append(f"  {source} --{name.replace('_', '-'):19s}" + "".join(str(cell).rjust(11) for cell in cells))
    lines += [
        "",
        "--tau where f is pico's prototypes (C), for eta = 0.1, 0.2, 0.3; the nearest q and eta count:",
        "",
    ]
    lines += [
        f"  {name:9s} q = {q:<5} {', '.join(map(str, row))}" for name, t in TAU.items() for q, row in t.items()
    ]
    lines += [f"  cnn and mlp: {TAU_SMALL} (O); where f is the classifier: 0.3, from q = 0.4 on 0.2 (O)"]
    return "\n".join(lines)
