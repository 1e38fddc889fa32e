"""The house: who leans on whom, what a run loads, how long a file is, names that stand in two rooms."""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

import data
import losses
import models
from conftest import ROOT, TOY
from harness import options
from paper import baselines

AT_THE_ROOT = {"irnet", "losses", "augment", "models", "data", "train", "bench"}
ROOMS = {"harness", "crowd", "paper"}
OURS = AT_THE_ROOT | ROOMS | {"test_irnet", "conftest"}


@dataclass
class May:
    """What a module may import: `ours` and `others` anywhere, `inside` only in functions, where it is needed."""

    ours: set[str]
    others: set[str]
    inside: set[str] = frozenset()


ALONE = May(set(), {"torch"})
RULES = {
    "irnet": ALONE,
    "losses": ALONE,
    "augment": ALONE,
    "models": May(set(), {"torch", "torchvision"}),
    "data": May({"augment", "harness.InputError"}, {"torch", "torchvision", "numpy"}, {"crowd"}),
    "train": May(AT_THE_ROOT - {"train", "bench"} | {"harness"}, {"torch"}, {"crowd", "paper"}),
    "bench": May(AT_THE_ROOT | {"harness"}, {"torch", "torchvision", "numpy"}),
    "harness": May({"harness"}, {"torch", "numpy"}),
    "crowd": May(AT_THE_ROOT | {"harness", "crowd"}, {"torch", "torchvision", "numpy", "PIL"}),
    "paper": May(AT_THE_ROOT | ROOMS, {"torch", "torchvision", "numpy"}, {"matplotlib", "sklearn"}),
}


def imports(source: str) -> list[tuple[str, bool]]:
    """(what, whether inside a function) of every import; `from a import b` is a.b."""
    found = []

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, "imports are from the project's root"
                found.extend((f"{child.module}.{alias.name}", inside) for alias in child.names)
            walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(ast.parse(source), False)
    return found


def wrong(module: str, source: str) -> list[str]:
    """The imports that a module of the room may not have."""
    may, bad = RULES[module], []
    for what, inside in imports(source):
        room = what.split(".")[0]
        if room in sys.stdlib_module_names:
            continue
        allowed = may.ours | may.others | (may.inside if inside else set())
        if room not in allowed and what not in allowed:
            bad.append(what)
    return bad


FILES = sorted(path for folder in (ROOT, *(ROOT / room for room in ROOMS)) for path in folder.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_leans_on_what_it_may_not(path):
    module = path.stem if path.parent == ROOT else path.parent.name
    if module == "test_irnet":
        assert not ROOMS & {what.split(".")[0] for what, _ in imports(path.read_text())}
    else:
        assert wrong(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("irnet", "import losses"),
        ("losses", "from irnet import margin"),
        ("augment", "import torchvision"),
        ("models", "def f():\n    import data"),
        ("data", "import crowd"),
        ("data", "from crowd.votes import table"),
        ("data", "from harness import options"),
        ("data", "def f():\n    from paper import baselines"),
        ("harness", "def f():\n    import irnet"),
        ("harness", "import torchvision.datasets"),
        ("train", "import crowd"),
        ("train", "from paper import baselines"),
        ("train", "try:\n    import paper\nexcept ImportError:\n    pass"),
        ("crowd", "def f():\n    import paper.tables"),
        ("bench", "def f():\n    import paper.tables"),
        ("paper", "import matplotlib"),
    ],
)
def test_the_check_catches_what_is_planted(module, source):
    assert len(wrong(module, f"import math, json\nimport torch\n{source}")) == 1


def test_the_doors_are_doors():
    assert not wrong("data", "from harness import InputError\ndef load():\n    import crowd")
    assert not wrong("train", "from harness.ranks import say\ndef f():\n    from paper import baselines")


WATCH = """
import json, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
import train

def watched(*args, finish=train.finish):
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name != "__main__"}
    ours = [name for name, file in files.items() if file and root in Path(file).parents]
    Path("seen.json").write_text(json.dumps(dict(ours=ours, written=Path("r/labels.csv").exists())))
    return finish(*args)

train.finish = watched
sys.exit(train.main(sys.argv[2:]))
"""


def test_a_run_loads_neither_crowd_nor_paper_until_it_is_trained(tmp_path):
    argv = [*TOY, "--epochs", "2", "--e0", "1", "--out", "r"]
    done = subprocess.run([sys.executable, "-c", WATCH, str(ROOT), *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert not seen["written"] and (tmp_path / "r/labels.csv").exists()
    assert not [name for name in seen["ours"] if name.split(".")[0] in ("crowd", "paper")]
    assert {"irnet", "losses", "augment", "models", "data", "train"} <= set(seen["ours"])
    assert len(seen["ours"]) <= 12, seen["ours"]


def test_what_stands_at_eye_level():
    assert {path.stem for path in ROOT.glob("*.py")} == AT_THE_ROOT | {"test_irnet"}


def test_no_file_is_longer_than_a_sitting():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in ROOT.glob("**/*.py")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_names_that_stand_in_two_rooms_are_the_same():
    """harness imports nothing of ours, so that its table repeats the names."""
    assert list(options.BASES) == list(baselines.METHODS)
    assert list(options.SIX) == list(losses.BASES)
    assert set(options.PICO_FAMILY) | set(options.WITHOUT_IRNET) <= set(options.BASES)
    assert list(options.OPTIONS["arch"].allowed) == list(models.BACKBONES)
    assert list(options.PRESETS) == ["digits", *data.TORCHVISION]
