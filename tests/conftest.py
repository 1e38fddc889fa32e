"""What the tests of whole runs share: toy runs, their files, processes that start at once."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

TESTS = Path(__file__).parent
ROOT = TESTS.parent
if str(ROOT) not in sys.path:  # `pytest` alone, without `python -m`
    sys.path.insert(0, str(ROOT))

from harness import ranks  # noqa: E402

# The tests compare runs to the last digits: fp32 on every processor, but where they ask for bf16
asks_the_processor, ranks.processor_has_bf16 = ranks.processor_has_bf16, lambda: False
torch.set_num_threads(1)  # the tests' tensors are small, and other work on the machine must not slow them down

SHARED = ROOT.parent / "shared" / "data"
TOY = ["--limit-train", "200", "--limit-test", "60", "--batch-size", "32", "--device", "cpu"]
SHORT = [*TOY, "--e0", "2", "--tau", "0"]
TIMES = ("seconds", "cpu_seconds", "images_per_second")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Runs write into a folder of their own, and signals are put back."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def untimed(folder) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows(folder)]


def summary(folder) -> dict:
    return json.loads((Path(folder) / "summary.json").read_text())


def same_run(one, two) -> bool:
    """The rows but their times, histograms, candidate sets, weights, the states of optimiser and random numbers:
    every bit."""
    states = [torch.load(Path(folder) / "checkpoint.pt", weights_only=True) for folder in (one, two)]
    parts = [state["network"] | state["base"] | state["optimizer"]["state"] for state in states]
    kept = [
        {key: state[key] for key in ("generator", "irnet_generator", "torch_generator", "histograms")}
        for state in states
    ]
    a, b = (_flat(part | more) for part, more in zip(parts, kept, strict=True))
    with np.load(Path(one) / "candidates.npz") as c, np.load(Path(two) / "candidates.npz") as d:
        sets = all(np.array_equal(c[k], d[k]) for k in c.files)
    weights = all(torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a)
    return untimed(one) == untimed(two) and sets and weights and set(a) == set(b)


def _flat(nested: dict, before: tuple = ()) -> dict:
    flat = {}
    for key, value in nested.items():
        flat |= _flat(value, (*before, key)) if isinstance(value, dict) else {(*before, key): value}
    return flat


def prepared(argv):
    """A command line -> its configuration, what learns, the samples."""
    import data
    import train
    from harness import options

    c = options.configure(argv, data.has_features)
    return c, *train.prepare(c, data.load(c.dataset, c.data, c.image_size or None, c.limit_train, c.limit_test))


def command(*argv, program=(sys.executable,), **options):
    """train.py as a person runs it."""
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options
    return subprocess.Popen([*program, str(ROOT / "train.py"), *argv], **options)


class Bomb:
    """A pickle that leaves a trace if it is ever loaded."""

    def __reduce__(self):
        return (os.mkdir, ("exploded",))


# ------------------------------------------------------------------ something happens in a step


def stopping_at(monkeypatch, step: int, do=lambda: os.kill(os.getpid(), signal.SIGTERM)) -> None:
    """Something happens in the given step of the next run; then the steps are as before."""
    import train

    original, calls = train.train_step, []

    def patched(*args):
        calls.append(1)
        if len(calls) == step:
            do()
            monkeypatch.setattr(train, "train_step", original)
        return original(*args)

    monkeypatch.setattr(train, "train_step", patched)


def killed_in_step(step, number, argv) -> int:
    import train

    stopping_at(pytest.MonkeyPatch(), step, lambda: os.kill(os.getpid(), number))
    return train.main(argv)


# ------------------------------------------------------------------ processes that need not load torch again


def process(target, *args) -> multiprocessing.Process:
    """Started; forked from a server that has loaded torch and this project and has run nothing yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "crowd", "paper.baselines", "conftest"])
    started = context.Process(target=_quietly, args=(target, os.getcwd(), *args))
    with pytest.MonkeyPatch.context() as patch:  # the server's own imports know no other path
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, TESTS))))
        started.start()
    return started


def _quietly(target, folder, *args) -> None:
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    torch.set_num_threads(1)
    code = target(*args)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code or 0)


def run(argv, **environment) -> int:
    """One run of train.py, in such a process; RANK and WORLD_SIZE make it one of several."""
    import train

    os.environ.update(environment)
    return train.main(argv)


def goes_on_as(whole, argv, epoch: int, monkeypatch) -> bool:
    """Whether the run, stopped before the epoch and resumed, ends as the one that was left alone."""
    import train

    original = train.train_epoch

    def stopped(*args):
        if args[2] == epoch:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_epoch", stopped)
        assert train.main([*argv, "--out", "halves"]) == 130
    return train.main([*argv, "--out", "halves", "--resume"]) == 0 and same_run(whole, "halves")


def features_and_sets(n=40, classes=4, seed=2):
    """Random features [N, 6] and candidate sets [N, C], none of them empty."""
    g = torch.Generator().manual_seed(seed)
    sets = torch.rand(n, classes, generator=g) < 0.4
    sets[torch.arange(n), torch.arange(n) % classes] = True
    return torch.randn(n, 6, generator=g), sets


class Started:
    """A run in a process that need not load torch again, with the face of a subprocess."""

    def __init__(self, argv):
        self.process, self.returncode = process(run, argv), None

    def poll(self):
        self.returncode = self.process.exitcode
        return self.returncode


@pytest.fixture
def quick(monkeypatch):
    """The runs of a Grid, each in such a process -> their folders."""
    from paper.grid import Grid

    started = []

    def start(grid, folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        started.append(folder)
        more = ["--resume"] if (folder / "config.json").exists() else []
        return Started([*grid.jobs[folder], "--out", str(folder.absolute()), *more])

    monkeypatch.setattr(Grid, "_start", start)
    return started


@pytest.fixture
def in_this_process(monkeypatch):
    """A grid's runs are made here, without other processes."""
    import train
    from paper.grid import Grid

    def start(grid, folder):
        code = train.main([*grid.jobs[folder], "--out", str(folder)])
        return SimpleNamespace(returncode=code, poll=lambda: code)

    monkeypatch.setattr(Grid, "_start", start)
