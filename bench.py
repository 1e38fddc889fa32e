"""Speed as ratios: what a step costs beyond the networks' own passes, and what the augmentations save.

    python bench.py                    about five minutes on two CPU cores; prints a table, writes bench.json
    python bench.py --only epoch step  these parts alone (--help names them), written only with --out
    python bench.py --only compile     torch.compile, which takes minutes of its own and is not among the others
    python bench.py --only accuracy    time to 95 % on KMNIST: a quarter of an hour; --options --data DIR

Times vary with the machine and with what else it does, so none is printed. The two sides of every ratio run
turn and turn about; a row shows the median ratio and the smallest and largest one. Unless a row says otherwise they
are CPU seconds of one thread, on which other work of the machine has little influence.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torchvision import transforms

import augment
import data
import train
from harness import Parser, checkpoint, ranks
from harness.folder import Run
from harness.options import configure

Row = dict
NAMES = ("name", "ratio", "low", "high", "asked")  # of every row


def timed(run: Callable, calls: int, clock: Callable = time.process_time) -> float:
    began = clock()
    for _ in range(calls):
        run()
    return (clock() - began) / calls


def side_by_side(
    name: str, top: Callable, bottom: Callable, asked: str, repeats: int = 7, calls: int = 1,
    clock: Callable = time.process_time, **more,
) -> Row:  # fmt: skip
    """time(top) / time(bottom), measured alternately after one call of each to warm up."""
    top(), bottom()
    ratios = [timed(top, calls, clock) / timed(bottom, calls, clock) for _ in range(repeats)]
    return row_of(name, ratios, asked, **more)


def row_of(name: str, ratios: list[float], asked: str, **more) -> Row:
    return dict(name=name, ratio=statistics.median(ratios), low=min(ratios), high=max(ratios), asked=asked, **more)


def synthetic(n: int, classes: int, channels: int, size: int) -> data.Dataset:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8, generator=g)
    labels = torch.randint(0, classes, (n,), generator=g)
    normal = ((0.5,) * channels,) * 2
    return data.Dataset("synthetic", images, labels, images[:100], labels[:100], classes, *normal)


def prepare(base: str, arch: str, batch: int, dataset: data.Dataset, *more: str) -> tuple:
    """(learner, samples) of a configuration."""
    argv = ["--dataset", "cifar10", "--base", base, "--arch", arch, "--batch-size", str(batch), "--device", "cpu"]
    return train.prepare(configure([*argv, *more]), dataset)


def whole_step(learner: train.Learner, samples: data.Samples, index: torch.Tensor, correcting: bool) -> Callable:
    return lambda: train.train_step(learner, index, samples.images[index], samples.labels[index], correcting)


# ------------------------------------------------------------------ augmentation against PIL


def augmentation() -> Iterator[Row]:
    torch.set_num_threads(1)
    # Once a block of this size was freed, malloc keeps such blocks, as it does in a run from the first step on.
    torch.empty(24 << 20, dtype=torch.uint8)
    images = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    pictures = [transforms.functional.to_pil_image(image) for image in images]
    crop = [transforms.RandomResizedCrop(32, (0.2, 1.0)), transforms.RandomHorizontalFlip()]
    jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)
    weak = transforms.Compose([*crop, jitter, transforms.RandomGrayscale(0.2), transforms.ToTensor()])
    cutout = transforms.RandomErasing(1.0, (0.0001, 0.25), (1.0, 1.0), 0.5)
    strong = transforms.Compose([*crop, transforms.RandAugment(3), transforms.ToTensor(), cutout])
    for name, theirs, ours, asked in (
        ("weak augmentation, PIL / ours", weak, augment.weak, ">= 8"),
        ("strong augmentation, PIL / ours", strong, augment.strong, ">= 5"),
    ):
        yield side_by_side(name, lambda f=theirs: [f(x) for x in pictures], lambda f=ours: f(images), asked)


# ------------------------------------------------------------------ the step against the bare networks


def bare_passes(learner: train.Learner, images: torch.Tensor, extra_view: bool) -> Callable:
    """The same forward and backward passes on ready images, and nothing else."""
    x, network, pico = learner.views.view("w", images), learner.network, learner.base.views == "ws"

    def run() -> None:
        learner.optimizer.zero_grad(set_to_none=True)
        if extra_view:
            network.peek_embedding(x) if pico else network.peek(x)
        outputs = network.embed(x) if pico else (network(x),)
        sum(output.float().square().mean() for output in outputs).backward()
        if pico:
            with torch.no_grad():
                network.key.embed(x)

    return run


def step(base: str, arch: str, batch: int, shape: tuple[int, int], extra: bool, asked: str, **times) -> Row:
    torch.set_num_threads(1)
    learner, samples = prepare(base, arch, batch, synthetic(4 * batch, 10, *shape))
    index = samples.pool[:batch]
    name = f"bare networks / whole step, {arch}, {base}, batch {batch}, {'after e0' if extra else 'before e0'}"
    bare = bare_passes(learner, samples.images[index], extra)
    return side_by_side(name, bare, whole_step(learner, samples, index, extra), asked, **times)


def steps() -> Iterator[Row]:
    """After e0 the bare networks look at every sample again; the step only at those that may be corrected."""
    yield step("pico", "resnet18", 128, (3, 32), False, ">= 0.93", repeats=5)
    yield step("pico", "resnet18", 128, (3, 32), True, ">= 1.12", repeats=5)
    for base, arch, extra, asked in (
        ("proden", "cnn", False, ">= 0.75"), ("proden", "cnn", True, ">= 0.90"), ("pico", "cnn", True, ">= 0.90"),
        ("proden", "narrow", False, ""), ("proden", "narrow", True, ""), ("pico", "narrow", True, ""),
    ):  # fmt: skip
        yield step(base, arch, 128 if arch == "narrow" else 256, (1, 28), extra, asked, calls=3)
    for base, arch, batch, shape, asked in (
        ("pico", "resnet18", 128, (3, 32), ">= 1.15"), ("pico", "narrow", 128, (1, 28), ""),
    ):  # fmt: skip
        name = f"a step after e0, --views-all / the default share, {arch}, {base}, batch {batch}"
        yield variants(name, base, arch, batch, shape, True, ("--views-all",), (), asked)


def variants(name: str, base: str, arch: str, batch: int, shape: tuple, extra: bool, top, bottom, asked="") -> Row:
    """A step with some options against the same with others, one thread."""
    torch.set_num_threads(1)
    both = []
    for more in (top, bottom):
        learner, samples = prepare(base, arch, batch, synthetic(4 * batch, 10, *shape), *more)
        both.append(whole_step(learner, samples, samples.pool[:batch], extra))
    return side_by_side(name, *both, asked, 5, 1 if arch == "resnet18" else 5)


def precision() -> Iterator[Row]:
    """fp32 against bf16, where the processor multiplies bf16 itself."""
    for base, arch, batch, shape in (
        ("pico", "resnet18", 128, (3, 32)), ("proden", "cnn", 256, (1, 28)), ("proden", "narrow", 128, (1, 28)),
    ):  # fmt: skip
        for extra in (False, True) if ranks.processor_has_bf16() else ():
            name = f"fp32 / bf16, a step, {arch}, {base}, {'after' if extra else 'before'} e0, one thread"
            asked = ">= 1.8" if arch == "resnet18" else ""
            yield variants(name, base, arch, batch, shape, extra, ("--amp", "off"), ("--amp", "bf16"), asked)


def threads() -> Iterator[Row]:
    """What a second thread brings, by network and size of the images."""
    for arch, base, batch, shape in (
        ("mlp", "proden", 64, (1, 8)), ("cnn", "proden", 64, (1, 8)), ("cnn", "proden", 64, (1, 28)),
        ("narrow", "proden", 128, (1, 28)), ("narrow", "pico", 128, (1, 28)), ("cnn", "pico", 64, (3, 32)),
        ("resnet18", "proden", 64, (3, 32)),
    ):  # fmt: skip
        learner, samples = prepare(base, arch, batch, synthetic(4 * batch, 10, *shape))
        run = whole_step(learner, samples, samples.pool[:batch], False)

        def with_threads(count: int, run=run) -> Callable:
            return lambda: (torch.set_num_threads(count), run())

        name = f"a step by one thread / by two, {arch}, {base}, {shape[1]}x{shape[1]}"
        yield side_by_side(name, with_threads(1), with_threads(2), "", 5, 2, time.perf_counter)


def cpu_and_compiler() -> float:
    return sum(os.times()[:4])  # this process and those that it has waited for


def compiled() -> Iterator[Row]:
    """torch.compile on the CPU: what a step gains, and after how many steps its compilation has paid off."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that are not waited for
    for arch, base, batch, shape in (
        ("narrow", "proden", 128, (1, 28)), ("cnn", "proden", 64, (1, 28)), ("resnet18", "pico", 128, (3, 32)),
    ):  # fmt: skip
        plain = dict(vars(augment))
        made = [
            prepare(base, arch, batch, synthetic(4 * batch, 10, *shape), *more) for more in ((), ("--compile",))
        ]
        steps = [whole_step(learner, samples, samples.pool[:batch], False) for learner, samples in made]
        after = dict(vars(augment))  # --compile changes it for all
        top, bottom = (
            lambda f=f, ops=ops: (vars(augment).update(ops), f())
            for f, ops in zip(steps, (plain, after), strict=True)
        )
        for threads in sorted({1, THREADS}):
            torch.set_num_threads(threads)
            clock = time.process_time if threads == 1 else time.perf_counter
            first = timed(bottom, 1, cpu_and_compiler)  # for another number of threads anew
            name = f"a step / the same compiled, {arch}, {base}, {threads} thread{'s' * (threads > 1)}"
            row = side_by_side(name, top, bottom, "", 3, 1 if arch == "resnet18" else 10, clock)
            saved = timed(top, 1, clock) * (1 - 1 / row["ratio"])
            yield row | dict(steps_to_pay_off=first / saved if saved > 0 else float("inf"))
        vars(augment).update(plain)


# ------------------------------------------------------------------ an epoch, corruption, growth, memory


def epochs() -> Iterator[Row]:
    yield from (row for arch in ("cnn", "narrow") for row in epoch(arch))


def epoch(arch: str) -> Iterator[Row]:
    """All that an epoch does beside its steps: scores, the estimate, diagnostics, a row, the checkpoint."""
    torch.set_num_threads(1)
    d = synthetic(12_000, 10, 1, 28)  # a fifth of KMNIST
    d.test_images, d.test_labels = d.images[:2000], d.labels[:2000]
    argv = f"--dataset kmnist --base proden --arch {arch} --epochs 40 --e0 2 --device cpu --amp off"
    c = configure(argv.split())
    learner, samples = train.prepare(c, d)
    original, spent, shares, clock = train.train_step, [], [], time.process_time
    looks = timed(lambda: train.predict(learner, samples.images), 1) / c.epochs  # one in a run

    def timed_step(*args):
        began = clock()
        result = original(*args)
        spent.append(clock() - began)
        return result

    with tempfile.TemporaryDirectory() as folder:
        run, train.train_step = Run(folder, named=True), timed_step
        for number in range(1, 5):  # two before e0, two after
            spent.clear()
            began = clock()
            row, *_ = train.train_epoch(learner, samples, number, c.epochs, c.lr)
            train.check_epoch(c, learner, samples, row)
            run.save(checkpoint.state_of(learner, samples, "") | dict(config={}, rows="[]"), number, now=True)
            shares.append(1 - sum(spent) / (clock() - began + looks))
    train.train_step = original
    for when, some in (("before", shares[:2]), ("after", shares[2:])):
        yield row_of(
            f"share of an epoch of KMNIST that is no training step, {arch}, proden, {when} e0", some, "<= 0.05"
        )


def checkpoints() -> Iterator[Row]:
    """Networks, optimiser and label state to the disk, against an epoch of a fiftieth of KMNIST."""
    torch.set_num_threads(1)
    learner, samples = prepare("pico", "resnet18", 128, synthetic(10 * 128, 10, 1, 32), "--val", "test")
    wall = time.perf_counter  # the disk's time counts
    spent = timed(lambda: train.train_epoch(learner, samples, 1, epochs=2, lr=0.01), 1, wall)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, named=True)
        state = lambda: checkpoint.state_of(learner, samples, "") | dict(config={}, rows="[]")  # noqa: E731
        ratios = [timed(lambda: run.save(state(), 1, now=True), 1, wall) / spent for _ in range(3)]
    yield row_of("a checkpoint / an epoch of 1,280 images (KMNIST: 60,000), resnet18, pico", ratios, "<= 0.03")


RELEASED = 13  # images a CPU-second: the released code, ResNet-18, PiCO, correcting, one thread of an AMD EPYC


def accuracy(enough: float = 0.95) -> Iterator[Row]:
    """CPU seconds until the mean test accuracy of three epochs is above 95 %: all of KMNIST, one thread. The ratio
    is how many epochs the released code could have seen in that time."""
    torch.set_num_threads(1)
    c = configure(["--arch", "cnn", "--dataset", "kmnist", *"--device cpu --test-every 1".split(), *MORE])
    learner, samples = train.prepare(
        c, data.load(c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test)
    )
    began, seen = time.process_time(), []
    for number in range(1, c.epochs + 1):
        row, *_ = train.train_epoch(learner, samples, number, c.epochs, c.lr)
        train.check_epoch(c, learner, samples, row)
        seen.append(row["test"])
        if len(seen) > 2 and statistics.mean(seen[-3:]) > enough:
            break
    spent = time.process_time() - began
    never = "" if statistics.mean(seen[-3:]) > enough else " (never)"
    name = f"epochs of the released code until ours has {enough:.0%}{never}, KMNIST, q = eta = 0.3, pico with IRNet"
    more = dict(cpu_seconds=spent, epochs_of_ours=number, images_of_the_released=RELEASED * spent)
    yield row_of(name, [RELEASED * spent / len(samples.images)], "", **more)


def corruption() -> Iterator[Row]:
    torch.set_num_threads(1)
    labels = torch.randint(0, 100, (50_000,), generator=torch.Generator().manual_seed(0))

    def one_by_one() -> None:
        rng = np.random.RandomState(0)
        for y in labels.tolist():
            candidates = rng.rand(100) < 0.05
            candidates[y] = True
            if rng.rand() < 0.3:
                candidates[rng.choice(np.flatnonzero(~candidates))] = True
                candidates[y] = False

    name = "corrupt, a loop over samples / ours, 50,000 x 100"
    yield side_by_side(name, one_by_one, lambda: data.corrupt(labels, 100, 0.05, 0.3), "", repeats=3)


GROWTH = {10: (10**4, 10**5, 10**6), 100: (10**4, 10**6), 1000: (10**4, 10**6), 10_000: (10**3, 10**4)}  # C: N


def growth() -> Iterator[Row]:
    """The cost of a step, and the bytes a sample, as N grows: synthetic 8x8 images, the MLP, batch 256."""
    torch.set_num_threads(1)
    for classes, sizes in GROWTH.items():
        base = "proden" if classes <= 100 else "cc"  # label weights of 1,000 classes are 4 KB a sample
        made = {n: prepare(base, "mlp", 256, synthetic(n, classes, 1, 8), "--q", "0.01") for n in sizes}

        def run(n: int, made=made) -> Callable:
            learner, samples = made[n]
            orders = iter(samples.pool[torch.randperm(len(samples.pool))].repeat(30).split(256))
            return lambda: whole_step(learner, samples, next(orders), True)()

        small, bytes_small = run(sizes[0]), bytes_a_sample(*made[sizes[0]])
        for n in sizes[1:]:
            name = f"a step at N = {n:.0e} / at N = {sizes[0]:.0e}, {classes:,} classes, {base}".replace("e+0", "e")
            more = dict(bytes_a_sample=bytes_a_sample(*made[n]), bytes_a_sample_small=bytes_small)
            calls = 10 if classes < 10_000 else 1
            yield side_by_side(name, run(n), small, "<= 1.15", 9, calls, **more)


def bytes_a_sample(learner: train.Learner, samples: data.Samples) -> float:
    kept = (samples.images, samples.labels, samples.candidates, samples.pool, learner.base.weights)
    kept += (learner.refine.corrected_at, learner.refine.corrected_to)
    return sum(t.numel() * t.element_size() for t in kept if t is not None) / len(samples.images)


def memory() -> Iterator[Row]:
    """Peak resident memory of an epoch of KMNIST's size with the small CNN, against the images alone."""
    with tempfile.TemporaryDirectory() as folder:
        d = synthetic(70_000, 10, 1, 28)
        x, y = d.images[:, 0].numpy(), d.labels.numpy()
        np.savez(
            Path(folder) / "size.npz", x_train=x[:60_000], y_train=y[:60_000], x_test=x[60_000:], y_test=y[60_000:]
        )
        argv = "--arch cnn --base proden --q 0.3 --eta 0.3 --epochs 1 --device cpu --batch-size 256".split()
        argv += ["--dataset", f"{folder}/size.npz", "--out", f"{folder}/run"]
        peak, alone = peak_memory(f"train.main({argv})"), peak_memory("pass")
    name = "peak memory of an epoch of KMNIST's size, cnn / of importing torch and the project"
    images = 70_000 * 28 * 28
    yield row_of(name, [peak / alone], "", megabytes=peak / 2**20, megabytes_of_images=images / 2**20)


def peak_memory(statement: str) -> int:
    """Bytes resident at the most, in a process of its own. Linux counts a new program's own in VmHWM; ru_maxrss
    would begin with those of the process that started it."""
    look = "next((line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    code = f"import train; {statement}; print(int({look}.split()[1]) * 1024)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


SECTIONS = dict(
    augmentation=augmentation, step=steps, precision=precision, threads=threads, compile=compiled, epoch=epochs,
    checkpoint=checkpoints, corrupt=corruption, growth=growth, memory=memory, accuracy=accuracy,
)  # fmt: skip
LONG = ("compile", "accuracy")  # minutes of their own: only when asked for
MORE: list[str] = []  # options of train.py for `accuracy`
THREADS = torch.get_num_threads()


def main() -> int:
    parser = Parser("bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="these parts alone")
    parser.add_argument("--out", help="where the table goes as JSON (default bench.json; with --only nowhere)")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="accuracy: the rest to train.py")
    chosen = parser.parse_args()
    MORE[:] = chosen.options
    out = chosen.out or ("" if chosen.only else "bench.json")
    if not Path(out).parent.is_dir():
        parser.error(f"--out {out}: there is no such folder")
    rows = []
    print(f"torch {torch.__version__}, {THREADS} CPU threads\n\n{'ratio':>8} {'spread':>17} {'asked':>8}  what")
    for name in chosen.only or [name for name in SECTIONS if name not in LONG]:
        for row in SECTIONS[name]():
            rows.append(row)
            extra = "".join(f"  {key} {row[key]:.0f}" for key in row if key not in NAMES)
            spread = f"{row['low']:.3f} - {row['high']:.3f}"
            print(f"{row['ratio']:8.3f} {spread:>17} {row['asked']:>8}  {row['name']}{extra}", flush=True)
    if out:
        Path(out).write_text(json.dumps(dict(torch=torch.__version__, threads=THREADS, rows=rows), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
