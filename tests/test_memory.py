"""Large data: what stays on the disk, what evaluation takes, ten thousand classes to the last page."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import train
from conftest import process, rows, summary
from harness import folder
from harness.options import configure

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")


def anonymous() -> float:
    """Megabytes of this process that are no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def load_and_look() -> int:
    import crowd

    before = anonymous()
    d = crowd.load(Path("mine"))
    d.fingerprint()
    grown = anonymous() - before
    print(f"grown by {grown:.0f} MB for {len(d.images) + len(d.test_images)} images")
    return 0 if grown < 50 else 1


@needs_linux
def test_memory_mapped_images_stay_on_the_disk_without_a_test_set():
    """150 MB of images, of which a fifth is set aside for scoring."""
    Path("mine").mkdir()
    rng = np.random.RandomState(0)
    x = np.lib.format.open_memmap("mine/x_train.npy", "w+", np.uint8, (50_000, 32, 32, 3))
    x[:] = rng.randint(0, 256, (32, 32, 3), np.uint8)
    np.save("mine/annotators.npy", rng.randint(0, 3, (50_000, 2)))
    del x
    child = process(load_and_look)
    child.join(60)
    assert child.exitcode == 0, Path("log").read_text()


def test_rows_of_images_are_the_images_of_those_rows():
    images = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8)
    index = torch.tensor([3, 17, 4, 9, 11])
    some, want = data.Rows(images, index), images[index]
    assert len(some) == 5 and some.shape == want.shape and some.dtype == want.dtype
    assert torch.equal(some[2], want[2]) and torch.equal(some[torch.tensor([4, 0])], want[[4, 0]])
    assert torch.equal(some[1:4].to("cpu"), want[1:4]) and torch.equal(torch.cat(list(some.split(2))), want)
    whole = [data.Dataset("d", x, index, x, index, 20, (), ()).fingerprint() for x in (some, want)]
    assert whole[0] == whole[1] and data.statistics(some) == data.statistics(want)


def test_evaluation_takes_no_larger_batch_than_training():
    learner, samples = train.prepare(configure(["--batch-size", "48", "--device", "cpu"]), data.load("digits"))
    sizes = []
    train.evaluate(learner, lambda x: (sizes.append(len(x)), learner.network(x))[1], samples.test_images)
    assert max(sizes) == 48 and sum(sizes) == 360
    p, f = train.probabilities(learner, samples.test_images, "cpu")
    assert p.device.type == f.device.type == "cpu" and p.shape == (360, 10)


def test_ten_thousand_named_classes_reach_the_last_page():
    rng, n, classes = np.random.RandomState(0), 60, 10_000
    names = np.array([f"a rather long name of class number {k}" for k in range(classes)])
    sets = rng.rand(n, classes) < 0.5
    arrays = dict(x_train=rng.randint(0, 256, (n, 8, 8), np.uint8), candidates=sets, classes=names)
    np.savez("many.npz", **arrays, x_test=arrays["x_train"], y_test=np.arange(n))
    argv = "--dataset many.npz --arch mlp --base cc --epochs 2 --e0 1 --tau 0 --batch-size 16 --out r --device cpu"
    assert train.main(argv.split()) == 0
    assert summary("r")["epochs"] == 2 and len(rows("r")) == 2
    assert (Path("r") / "review.html").exists() and (Path("r") / "report.html").exists()
    assert len((Path("r") / "labels.csv").read_text().splitlines()) == n + 1


def test_a_page_that_fails_leaves_a_finished_run(monkeypatch, capsys):
    import crowd

    monkeypatch.setattr(crowd, "review", lambda *a: 1 / 0)
    rng = np.random.RandomState(0)
    np.savez("own.npz", x_train=rng.randint(0, 256, (80, 8, 8), np.uint8), annotators=rng.randint(0, 3, (80, 3)))
    assert train.main("--dataset own.npz --base cc --epochs 1 --batch-size 16 --out r --device cpu".split()) == 0
    err = capsys.readouterr().err
    assert "review.html was not made (ZeroDivisionError" in err and err.count("\n") == 1
    assert summary("r")["epochs"] == 1 and (Path("r") / "report.html").exists()
    assert (
        train.main("--dataset own.npz --base cc --epochs 1 --batch-size 16 --out r --device cpu --resume".split())
        == 0
    )


def test_a_state_that_waits_is_copied_and_not_packed(monkeypatch):
    packed = []
    original = folder.pack
    monkeypatch.setattr(folder, "pack", lambda state: packed.append(1) or original(state))
    run, weights = folder.Run("r", named=True), torch.zeros(3)
    Path("r").mkdir()
    for epoch in (1, 2, 3):
        weights += 1
        run.save(dict(network=dict(w=weights), rows="[]", config={}), epoch, now=False)
    weights += 1
    assert not packed
    run.flush()
    assert len(packed) == 1 and run.saved == 3
    assert torch.load("r/checkpoint.pt", weights_only=True)["network"]["w"].tolist() == [3, 3, 3]


def test_overwriting_removes_old_snapshots():
    argv = "--limit-train 64 --batch-size 16 --base cc --device cpu --out r --epochs 2".split()
    assert train.main([*argv, "--snapshots", "1", "2"]) == 0 and len(list(Path("r").glob("snapshot*"))) == 2
    assert train.main([*argv, "--overwrite"]) == 0 and not list(Path("r").glob("snapshot*"))
