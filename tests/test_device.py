"""Whole training steps on a pretended device: real numbers, real backward(), and no card.

torch lets Python register a device. The one here, "pretended", keeps the numbers of its tensors on the CPU, out of
the host's reach: an operator gets there, runs on the CPU and comes back. Inside a training step it raises on
whatever a card would make the host wait for (a number read, a shape that depends on data, a copy that blocks) and
on a CPU tensor or a CPU generator among the device's own. So the same epochs, by the same seed, on the CPU and on
the pretended device prove three things of every method: that a step needs nothing from the host, that all of it
happens on the device, and that the device's code paths compute what the CPU's do, bit for bit.

It has no autocast, no streams, no kernels of its own and no second rank. torch registers a device for the whole
process, and before its first backward(): hence every test runs in a process of its own.
"""

import contextlib
import dataclasses
import re
import traceback
import types
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

import augment
import data
import irnet
import losses
import train
from conftest import process
from harness import checkpoint, options

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch before 2.9 does not let Python register a device",
)

# ------------------------------------------------------------------ the pretended device


class HostWaits(RuntimeError):
    """Where a card would make the host wait, without a word."""


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
        try:
            return run(operator, args, kwargs or {})
        except Exception:
            traceback.print_exc()  # in backward(), which has a thread of its own, an error may abort the process
            raise

    def __repr__(self):
        return f"Pretended({tuple(self.shape)}, {self.dtype})"

    def tolist(self):  # torch's own refuses subclasses
        return self.cpu().tolist()


Generator = torch.Generator


class DeviceGenerator(Generator):
    """torch has no generators for devices made in Python: one of the CPU, that says it is the device's."""

    device, known = property(lambda self: torch.device("pretended")), set()

    def __new__(cls, device="cpu"):
        if torch.device(device).type != "pretended":
            return Generator(device)
        self = super().__new__(cls)
        cls.known.add(self._cdata)  # kernels see another object of the same generator
        return self


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
    if operator._overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in given["indices"]):
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
    # as it is for cuda, whose copies need not block
    augment.constant = lambda values, device: torch.tensor(values, device="cpu").to(device, non_blocking=True)
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


# ------------------------------------------------------------------ two steps before e0 and two after it

BATCH, EPOCHS = 16, 2
ARGV = f"--limit-train 36 --limit-test 8 --batch-size {BATCH} --epochs {EPOCHS} --e0 1 --tau 0 --device cpu"


def grey(dataset: data.Dataset) -> data.Dataset:
    return dataset


def coloured(dataset: data.Dataset) -> data.Dataset:
    tint = torch.tensor([1.0, 0.7, 0.4]).view(3, 1, 1)
    images, test_images = ((x * tint).to(torch.uint8) for x in (dataset.images, dataset.test_images))
    mean, std = data.statistics(images)
    return dataclasses.replace(dataset, images=images, test_images=test_images, mean=mean, std=std)


def features(dataset: data.Dataset) -> data.Dataset:
    x, test_x = (x.flatten(1).float()[:, :, None, None] / 255 for x in (dataset.images, dataset.test_images))
    return dataclasses.replace(dataset, images=x, test_images=test_x, mean=(0.4,) * 64, std=(0.3,) * 64)


def prepared(device: str, argv: str, change=grey):
    c = dataclasses.replace(options.configure(f"{ARGV} --crop 0.2 --flip 0.5 {argv}".split()), device=device)
    dataset = change(data.load(c.dataset, limit_train=c.limit_train, limit_test=c.limit_test))
    return c, *train.prepare(c, dataset)


def learn(device: str, argv: str, change) -> dict:
    """Both epochs -> their rows, and all that a third one would depend on."""
    c, learner, samples = prepared(device, argv, change)
    rows = []
    for epoch in range(1, EPOCHS + 1):
        row, *_ = train.train_epoch(learner, samples, epoch, epochs=EPOCHS, lr=c.lr, corrects=not c.no_irnet)
        train.check_epoch(c, learner, samples, row)
        rows.append({name: value for name, value in row.items() if name != "images_per_second"})
    assert c.no_irnet or rows[-1]["corrections"] > 0
    state = checkpoint.state_of(learner, samples, "")
    for part in ("network", "base", "refine", "optimizer"):
        assert {t.device.type for t in pytree.tree_leaves(state[part]) if torch.is_tensor(t)} <= {device}, part
    return dict(rows=rows, state=checkpoint.copied(state))


@contextlib.contextmanager
def drawing(device: str):
    """What the host draws, it draws from torch's own generator beside a device's: here beside the CPU's too."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(augment, "_host_order", lambda n, generator: torch.randperm(n))
        yield


def compare(argv: str, change, prepare=lambda: None) -> None:
    """The same epochs, on the CPU and there: every bit."""
    register()
    prepare()
    found = []
    for device in ("cpu", "pretended"):
        with drawing(device):
            found.append(dict(pytree.tree_leaves_with_path(learn(device, argv, change))))
    here, there = found
    assert here.keys() == there.keys()
    equal = lambda a, b: torch.equal(a, b) if torch.is_tensor(a) else repr(a) == repr(b)  # noqa: E731
    differing = [pytree.keystr(k) for k in here if not equal(here[k], there[k])]
    assert not differing, f"differing: {differing}"


def apart(function, *args) -> tuple[int, str]:
    """In a process of its own -> its exit status and what it said."""
    child = process(function, *args)
    child.join()
    return child.exitcode, Path("log").read_text()


def caught(complaint: str, code: int, said: str) -> bool:
    errors = [line for line in said.splitlines() if re.match(r"[\w.]+(Error|Waits): ", line)]
    return code != 0 and any(complaint in line for line in errors)


CASES = {base: (f"--base {base}", coloured) for base in options.BASES}
CASES |= {
    "a share of the batch": ("--base proden --views ws --views-share 0.5", grey),
    "a share, by prototypes": ("--base pico --views s --views-share 0.5 --queue 24", grey),
    "as released": ("--base pico --preset released --classifier-loss sce --weights-after 1/C", grey),
    "swapped": ("--base lwc --views ws --swap --weights-after uniform", grey),
    "images on the host": ("--base rc --data-device host", grey),
    "features": ("--base proden --arch mlp --views ws", features),
    "resnet18": ("--base cc --arch resnet18", coloured),
}


@pytest.mark.parametrize("name", CASES)
def test_epochs_on_the_device_equal_those_on_the_cpu(name):
    argv, change = CASES[name]
    argv += " --no-irnet" if name in options.WITHOUT_IRNET else ""
    argv += " --queue 64" if name in options.PICO_FAMILY else ""
    code, said = apart(compare, argv, change)
    assert code == 0, said


def compare_part() -> None:
    register()
    images, found = torch.arange(BATCH * 3 * 64).view(BATCH, 3, 8, 8).to(torch.uint8), []
    for device in ("cpu", "pretended"):
        torch.manual_seed(0)
        x, generator = images.to(device), torch.Generator(device).manual_seed(0)
        with drawing(device):
            found.append(in_a_step(augment.strong)(x, generator, part=slice(4, 12)).cpu())
    assert torch.equal(*found)


def test_a_ranks_part_of_a_batch():
    code, said = apart(compare_part)
    assert code == 0, said


# ------------------------------------------------------------------ planted faults

PLANTS = {  # f [B, C], S [B, C] in a step, and what is said
    "item": (lambda f, s: f.sum().item(), "_local_scalar_dense"),
    "float": (lambda f, s: float(f.sum()), "_local_scalar_dense"),
    "bool": (lambda f, s: bool(s.all()), "_local_scalar_dense"),
    "equal": (lambda f, s: torch.equal(f, f), "the host waits for a number"),
    "nonzero": (lambda f, s: s.nonzero(), "nonzero"),
    "boolean index": (lambda f, s: f[s], "a mask for an index"),
    "boolean put": (lambda f, s: f.clone().index_put_((s[:, 0],), f[:1]), "a mask for an index"),
    "cpu": (lambda f, s: f.cpu(), "the host waits for a copy"),
    "tolist": (lambda f, s: f.tolist(), "the host waits for a copy"),
    "numpy": (lambda f, s: f.numpy(), "numpy() is not supported"),
    "numbers from the host": (lambda f, s: f * torch.tensor(0.5, device=f.device), "the host waits for a copy"),
    "a copy that blocks": (lambda f, s: torch.zeros(10).to(f.device), "the host waits for a copy"),
    "cpu tensor": (lambda f, s: f + torch.zeros(10), "on the same device"),
    "cpu index": (lambda f, s: f[torch.arange(3)], "on the same device"),
    "cpu generator": (lambda f, s: f.clone().uniform_(generator=torch.Generator()), "a generator of the device"),
}


def step_with(plant: str) -> None:
    register()
    original = irnet.hits
    irnet.hits = lambda f, s, y: (PLANTS[plant][0](f, s), original(f, s, y))[1]
    _, learner, samples = prepared("pretended", "--base proden")
    index, x = next(samples.batches(samples.pool, BATCH))
    train.train_step(learner, index, x, samples.labels[index], False)


@pytest.mark.parametrize("plant", PLANTS)
def test_the_device_catches_what_is_planted_in_a_step(plant):
    code, said = apart(step_with, plant)
    assert caught(PLANTS[plant][1], code, said), said


def read_in_backward() -> None:
    original = losses.weighted_ce

    def weighted_ce(logits, weights):
        logits.register_hook(lambda gradient: gradient * gradient.sum().item())
        return original(logits, weights)

    losses.weighted_ce = weighted_ce


def other_weights() -> None:
    """A last bit on the device alone."""
    original = losses.uniform_weights
    losses.uniform_weights = lambda s: original(s) * (1 + 2**-23 * (s.device.type == "pretended"))


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [(read_in_backward, "_local_scalar_dense"), (other_weights, "['state']['base']['weights']")],
)
def test_the_comparison_catches_what_is_planted(plant, complaint):
    code, said = apart(compare, "--base proden", grey, plant)
    assert caught(complaint, code, said), said
