"""Whole training steps on a pretended device: real numbers, real backward(), and no card.

torch lets Python register a device. The one here, "pretended", keeps the numbers of its tensors on the CPU, out of
the host's reach: an operator gets there, runs on the CPU and comes back. Inside a training step it raises on
whatever a card would make the host wait for (a number read, a shape that depends on data, a copy that blocks) and
on a CPU tensor or a CPU generator among the device's own. So the same epochs, by the same seed, on the CPU and on
the pretended device prove three things of every method: that a step needs nothing from the host, that all of it
happens on the device, and that the device's code paths compute what the CPU's do, bit for bit.

It does not have autocast, streams or kernels of its own. torch registers a device for the whole process, and
before its first backward(): hence every test runs in a process of its own.
"""

import dataclasses
import types
from pathlib import Path

import pytest
import torch
from conftest import process
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

import augment
import data
import irnet
import train
from harness import checkpoint, options

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch before 2.9 does not let Python register a device",
)

# ------------------------------------------------------------------ the pretended device


class HostWaits(RuntimeError):
    """What a card would do too, but slowly."""


stepping = False  # whether the host must not wait, as in a training step
aten = torch.ops.aten
FACTORIES = (
    "empty.memory_format empty_strided arange arange.start arange.start_step eye eye.m full linspace ones zeros "
    "scalar_tensor rand rand.generator randn randn.generator randperm randperm.generator"
).split()


class Pretended(torch.Tensor):
    """A tensor of the device; `held` is where its numbers are."""

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        layout = dict(strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype)
        self = torch.Tensor._make_wrapper_subclass(cls, held.shape, device="pretended:0", **layout)
        self.held = held
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})

    def __repr__(self):
        return f"Pretended({tuple(self.shape)}, {self.dtype})"

    def tolist(self):  # torch's own refuses subclasses
        return self.cpu().tolist()


class DeviceGenerator(torch.Generator):
    """torch has no generators for devices made in Python: one of the CPU, that says it is the device's."""

    device, known = property(lambda self: torch.device("pretended")), set()

    def __new__(cls, device="cpu"):
        if torch.device(device).type != "pretended":
            return Generator(device)
        self = super().__new__(cls)
        cls.known.add(self._cdata)  # kernels see another object of the same generator
        return self


Generator = torch.Generator


def run(operator, args, kwargs):
    """One operator: its rules, then the CPU's kernel on what the tensors hold."""
    schema = operator._schema
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    target = torch.device(kwargs.get("device") or "pretended")
    copies = operator in (aten.copy_.default, aten._to_copy.default)
    if stepping:
        check(operator, given, target, copies)
    tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
    if not copies and any(not isinstance(t, Pretended) and t.ndim for t in tensors):
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, found pretended and cpu")
    if isinstance(generator := given.get("generator"), Generator) and generator._cdata not in DeviceGenerator.known:
        raise RuntimeError(f"{operator}: expected a generator of the device, found one of the CPU")
    cpu = dict(device=torch.device("cpu")) if "device" in kwargs else {}
    unwrap = lambda t: t.held if isinstance(t, Pretended) else t  # noqa: E731
    out = operator(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs) | cpu)
    changed = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if changed:  # in place, or into out=
        assert all(t.shape == unwrap(t).shape for t in pytree.tree_leaves(changed)), f"{operator} resizes"
        return changed[0] if len(schema.returns) == 1 else tuple(changed) if schema.returns else None
    if target.type == "cpu":
        return out
    return pytree.tree_map(lambda t: Pretended(t) if isinstance(t, torch.Tensor) else t, out)


def check(operator, given: dict, target: torch.device, copies: bool) -> None:
    """What would make the host wait."""
    masks = [i for i in given.get("indices") or () if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if operator._overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        if masks:
            raise HostWaits(f"{operator}: a mask for an index, the host waits for nonzero")
    elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags):
        raise HostWaits(f"{operator}: the host waits for a number")
    if copies:
        to_host = target.type == "cpu" or not isinstance(given["self"], Pretended) and "src" in given
        from_host = not isinstance(given.get("src", given["self"]), Pretended)
        if to_host or from_host and not given.get("non_blocking"):
            raise HostWaits(f"{operator}: the host waits for a copy")


def register() -> None:
    """torch knows the device from here on, and train.train_step is a step."""
    module = dict(is_available=True, is_initialized=True, device_count=1, current_device=0, _is_in_bad_fork=False)
    module = {name: lambda value=value: value for name, value in module.items()}
    module |= dict(manual_seed_all=lambda seed: None, get_amp_supported_dtype=lambda: [torch.bfloat16])
    backend_registration._setup_privateuseone_for_python_backend("pretended", types.SimpleNamespace(**module))
    library = register.library = torch.library.Library("aten", "IMPL")  # lasts as long as this object

    def kernel(name):
        operator = getattr(getattr(aten, name.split(".")[0]), name.partition(".")[2] or "default")
        return lambda *args, **kwargs: run(operator, args, kwargs)

    for name in FACTORIES:
        library.impl(name, kernel(name), "PrivateUse1")
    copy = lambda source, to, non_blocking=False: run(aten.copy_.default, (to, source, non_blocking), {})  # noqa: E731
    library.impl("_copy_from", copy, "PrivateUse1")  # torch.tensor(..., device="pretended")
    torch.Generator = DeviceGenerator
    train.train_step = in_a_step(train.train_step)


def in_a_step(function):
    def inside(*args, **kwargs):
        global stepping
        stepping = True
        try:
            return function(*args, **kwargs)
        finally:
            stepping = False

    return inside


# ------------------------------------------------------------------ epochs of two steps, in a process of their own

BATCH, EPOCHS = 16, 2
ARGV = ["--limit-train", "36", "--limit-test", "8", "--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--e0", "1"]
ARGV += ["--tau", "0", "--device", "cpu", "--crop", "0.2", "--flip", "0.5"]


def learn(device: str, argv: list[str], change=lambda dataset: dataset) -> tuple[dict, list[dict], set]:
    """Two steps before e0 and two after it -> all that the next epoch depends on, the rows, and on which devices
    the network is."""
    c = dataclasses.replace(options.configure([*ARGV, *argv]), device=device)
    dataset = change(data.load(c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test))
    learner, samples = train.prepare(c, dataset)
    rows, steps = [], []
    for epoch in range(1, EPOCHS + 1):
        row, *_ = train.train_epoch(learner, samples, epoch, EPOCHS, c.lr, corrects=not c.no_irnet)
        train.check_epoch(c, learner, samples, row)
        rows.append(row)
    state = checkpoint.copied(checkpoint.state_of(learner, samples, ""))
    return state, rows, {p.device.type for p in learner.network.parameters()}
