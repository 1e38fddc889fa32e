"""What the tests of whole runs share: toy runs, their files, processes that start at once."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are small, and other work on the machine must not slow them down

HERE = Path(__file__).parent
SHARED = HERE.parent / "shared" / "data"
TOY = ["--limit-train", "200", "--limit-test", "60", "--batch-size", "32", "--device", "cpu"]
TIMES = ("seconds", "images_per_second")


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
    """The rows but their times, candidate sets, weights, the states of optimiser and random numbers: every bit."""
    states = [torch.load(Path(folder) / "checkpoint.pt", weights_only=True) for folder in (one, two)]
    parts = [state["network"] | state["base"] | state["optimizer"]["state"] for state in states]
    a, b = (_flat(part | {"random": state["generator"]}) for part, state in zip(parts, states, strict=True))
    with np.load(Path(one) / "candidates.npz") as c, np.load(Path(two) / "candidates.npz") as d:
        sets = all(np.array_equal(c[k], d[k]) for k in c.files)
    weights = all(torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a)
    return untimed(one) == untimed(two) and sets and weights and set(a) == set(b)


def _flat(nested: dict, before: tuple = ()) -> dict:
    flat = {}
    for key, value in nested.items():
        flat |= _flat(value, (*before, key)) if isinstance(value, dict) else {(*before, key): value}
    return flat


def command(*argv, program=(sys.executable,), **options):
    """train.py as a person runs it."""
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options
    return subprocess.Popen([*program, str(HERE / "train.py"), *argv], **options)


class Bomb:
    """A pickle that leaves a trace if it is ever loaded."""

    def __reduce__(self):
        return (os.mkdir, ("exploded",))


# ------------------------------------------------------------------ processes that need not load torch again


def process(target, *args) -> multiprocessing.Process:
    """Started; forked from a server that has loaded torch and this project and has run nothing yet."""
    os.environ["PYTHONPATH"] = str(HERE)  # the server's own imports know no other path
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "conftest"])
    started = context.Process(target=_quietly, args=(target, os.getcwd(), *args))
    started.start()
    return started


def _quietly(target, folder, *args) -> None:
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    torch.set_num_threads(1)
    code = target(*args)
    sys.stdout.flush()
    os._exit(code or 0)


def run(argv, **environment) -> int:
    """One run of train.py, in such a process; RANK and WORLD_SIZE make it one of several."""
    import train

    os.environ.update(environment)
    return train.main(argv)
