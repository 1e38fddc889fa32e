"""The run's folder: exact resume, what is refused, damaged checkpoints, full disks, two processes."""

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import losses
import train
from conftest import SHORT, TOY, Bomb, killed_in_step, process, rows, run, same_run, stopping_at, summary
from harness import checkpoint, folder, options, results

FILES = [*SHORT, "--arch", "mlp"]  # where the training is not the point

# ------------------------------------------------------------------ exact resume


@pytest.mark.parametrize("base", list(losses.BASES))
def test_resume_ends_as_the_run_that_was_left_alone(base, monkeypatch, capsys):
    """Stopped before e0 and after it, always in the middle of an epoch of five or six steps."""
    argv = [*SHORT, "--base", base, "--epochs", "5"]
    assert train.main([*argv, "--out", "whole"]) == 0
    for step, more in ((8, []), (13, ["--resume"])):  # in epoch 2; then, from its beginning, in epoch 4
        stopping_at(monkeypatch, step)
        assert train.main([*argv, "--out", "parts", *more]) == 143
        assert "--resume" in capsys.readouterr().out
    assert [row["epoch"] for row in rows("parts")] == [1, 2, 3]
    assert train.main([*argv, "--out", "parts", "--resume"]) == 0
    assert same_run("whole", "parts")
    assert sum(row["corrections"] for row in rows("whole")) > 0


def test_a_finished_run_says_so_and_another_configuration_is_refused(capsys):
    argv = [*FILES, "--base", "cc", "--epochs", "2", "--out", "r"]
    assert train.main(argv) == 0
    files = {path.name: path.read_bytes() for path in Path("r").iterdir()}
    capsys.readouterr()
    assert train.main([*argv, "--resume"]) == 0 and "finished" in capsys.readouterr().out
    for option, value in (("--lr", "0.7"), ("--seed", "3"), ("--epochs", "9"), ("--base", "log"), ("--tau", "0.1")):
        changed = [*argv, option, value, "--resume"]
        assert train.main(changed) == 2
        err = capsys.readouterr().err
        assert option in err and value in err and err.count("\n") == 1
        assert option != "--epochs" or "laid out" in err
    assert {path.name: path.read_bytes() for path in Path("r").iterdir() if path.name != ".lock"} == {
        name: content for name, content in files.items() if name != ".lock"
    }
    Path("r/summary.json").unlink()  # killed between the last checkpoint and the results
    assert train.main([*argv, "--resume"]) == 0 and Path("r/summary.json").read_bytes() == files["summary.json"]


def test_resume_before_the_first_checkpoint_begins_again(monkeypatch):
    argv = [*FILES, "--base", "rc", "--epochs", "2"]
    stopping_at(monkeypatch, 2)
    assert train.main([*argv, "--out", "r"]) == 143 and not Path("r/checkpoint.pt").exists()
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and train.main([*argv, "--out", "whole"]) == 0
    assert same_run("r", "whole")


def test_resume_refuses_other_data(monkeypatch, capsys):
    x, y = np.zeros((100, 8, 8), np.uint8), np.arange(100) % 4
    arrays = dict(x_train=x, y_train=y, x_test=x, y_test=y)
    np.savez("own.npz", **arrays)
    argv = "--dataset own.npz --q 0.3 --eta 0.3 --arch mlp --batch-size 16 --out r".split()
    stopping_at(monkeypatch, 8)
    assert train.main([*argv, "--epochs", "3"]) == 143
    for changed in (dict(y_train=y[::-1]), dict(x_train=x + 1), dict(x_test=x + 1), dict(y_test=y[::-1])):
        np.savez("own.npz", **arrays | changed)
        assert train.main([*argv, "--epochs", "3", "--resume"]) == 2 and "data" in capsys.readouterr().err
    np.savez("own.npz", **arrays)
    assert train.main([*argv, "--epochs", "3", "--resume"]) == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_save_every_writes_rarely_but_loses_nothing_that_it_can_keep(signal_number, monkeypatch):
    argv = [*FILES, "--base", "lwc", "--epochs", "8", "--save-every", "3"]
    written = []
    original = folder.Run._write
    monkeypatch.setattr(folder.Run, "_write", lambda self, name, c: written.append(name) or original(self, name, c))
    assert train.main([*argv, "--out", "whole"]) == 0
    assert written.count("checkpoint.pt") == 3  # after epochs 3, 6 and 8
    child = process(killed_in_step, 5 + 5 + 6 + 6 + 3, signal_number, [*argv, "--out", "r"])  # in the fifth epoch
    child.join(60)
    assert child.exitcode == (143 if signal_number == signal.SIGTERM else -9)
    state = torch.load("r/checkpoint.pt", weights_only=True)
    assert len(json.loads(state["rows"])) == (4 if signal_number == signal.SIGTERM else 3)
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("r", "whole")


# ------------------------------------------------------------------ damaged checkpoints


def test_a_hundred_damaged_checkpoints_are_all_detected(capsys):
    """Single flipped bits and truncations anywhere: the previous checkpoint is taken, the damaged one put aside."""
    argv = [*FILES, "--base", "cc", "--epochs", "2", "--out", "r"]
    assert train.main(argv) == 0
    newest, previous = Path("r/checkpoint.pt").read_bytes(), Path("r/previous.pt").read_bytes()
    config = options.recorded(options.configure(argv))
    moments = random.Random(0)
    for trial in range(100):
        content = bytearray(newest)
        if trial % 2:
            content[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
        else:
            del content[moments.randrange(len(content)) :]
        Path("r/checkpoint.pt").write_bytes(content)
        Path("r/previous.pt").write_bytes(previous)
        again = folder.Run("r", named=True)
        state, finished = again.look(config, resume=True, overwrite=False)
        assert len(json.loads(state["rows"])) == 1 and not finished
        assert "checkpoint.pt" in capsys.readouterr().err
        again.begin(config, json.loads(state["rows"]))
        again.close()
        assert not Path("r/checkpoint.pt").exists() and Path("r/checkpoint.damaged").read_bytes() == content
    with pytest.raises(checkpoint.Damaged):
        checkpoint.unpack(newest[:10])
    assert len(json.loads(checkpoint.unpack(newest)["rows"])) == 2


@pytest.mark.parametrize("what", ["truncated", "flipped", "empty", "foreign", "pickle", "text"])
def test_resume_from_the_previous_checkpoint(what, monkeypatch, capsys):
    argv = [*FILES, "--base", "proden", "--epochs", "5"]
    assert train.main([*argv, "--out", "whole"]) == 0
    stopping_at(monkeypatch, 5 + 5 + 6 + 3)  # in the fourth epoch
    assert train.main([*argv, "--out", "r"]) == 143
    path = Path("r/checkpoint.pt")
    content = path.read_bytes()
    if what == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        bad = dict(truncated=content[:middle], flipped=flipped, empty=b"", text=b"hello" * 99)
        bad["pickle"] = pickle.dumps(Bomb())
        path.write_bytes(bad[what])
    capsys.readouterr()
    assert train.main([*argv, "--out", "r", "--resume"]) == 0
    said = capsys.readouterr()
    assert "checkpoint.pt" in said.err and "epoch 2" in said.err and said.err.count("\n") == 1
    assert same_run("whole", "r") and not Path("exploded").exists()
    for name in ("checkpoint.pt", "previous.pt"):
        (Path("r") / name).write_bytes(b"")
    for _ in range(2):  # and again: nothing is begun anew unasked
        assert train.main([*argv, "--out", "r", "--resume"]) == 2 and "--overwrite" in capsys.readouterr().err
    assert len(rows("r")) == 5


def test_killed_between_the_two_names_there_is_still_a_checkpoint(monkeypatch):
    """At every moment of a write a whole checkpoint has one of the two names."""
    argv = [*FILES, "--base", "cc", "--epochs", "3"]
    assert train.main([*argv, "--out", "whole"]) == 0
    for link in (os.link, None):  # with hard links, and on a file system without
        if link is None:
            monkeypatch.setattr(os, "link", lambda *args: (_ for _ in ()).throw(OSError(1, "no links here")))
        for moment in range(1, 7):  # 1 + 2 + 2 for the checkpoints, then the results
            shutil.rmtree("r", ignore_errors=True)
            with pytest.raises(Killed):
                killed_in_rename(monkeypatch, moment, [*argv, "--out", "r"])
            assert link is None or moment == 1 or Path("r/checkpoint.pt").exists()  # the newest keeps its name
            assert train.main([*argv, "--out", "r", "--resume"]) == 0
            assert same_run("whole", "r"), moment


class Killed(BaseException):
    pass


def killed_in_rename(monkeypatch, moment, argv) -> None:
    """As if the process died right before one of its renamings."""
    original, calls = Path.replace, []

    def patched(self, target):
        calls.append(1)
        if len(calls) == moment + 2:  # the first two are config.json and metrics.jsonl
            raise Killed
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", patched)
        patch.setattr(folder.Run, "close", lambda self: self._lock and self._lock.close())  # a dead process
        train.main(argv)


# ------------------------------------------------------------------ the disk


def limited(size: int, argv) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return train.main(argv)


def test_a_full_disk_keeps_the_previous_checkpoint(monkeypatch):
    argv = [*FILES, "--base", "log", "--epochs", "4"]
    assert train.main([*argv, "--out", "whole"]) == 0
    stopping_at(monkeypatch, 5 + 3)  # in the second epoch
    assert train.main([*argv, "--out", "r"]) == 143
    before = Path("r/checkpoint.pt").read_bytes()
    child = process(limited, len(before) // 2, [*argv, "--out", "r", "--resume"])
    child.join(60)
    log = Path("log").read_text()
    assert child.exitcode == 1 and "Traceback" not in log and "epoch 1 is kept" in log and "--resume" in log
    assert Path("r/checkpoint.pt").read_bytes() == before and not list(Path("r").glob("*.part"))
    assert train.main([*argv, "--out", "r", "--resume"]) == 0 and same_run("whole", "r")


def test_a_full_disk_at_the_start_of_a_resume_is_no_wrong_input(monkeypatch):
    argv = [*FILES, "--base", "log", "--epochs", "4", "--out", "r"]
    stopping_at(monkeypatch, 8)
    assert train.main(argv) == 143
    Path("r/.lock").unlink()
    child = process(limited, 400, [*argv, "--resume"])  # enough for the message, not for config.json
    child.join(60)
    log = Path("log").read_text()
    assert child.exitcode == 1 and "epoch 1 is kept" in log and "Traceback" not in log
    assert train.main([*argv, "--resume"]) == 0


def test_a_folder_that_vanishes_ends_the_run_with_a_line(monkeypatch, capsys):
    stopping_at(monkeypatch, 8, lambda: shutil.rmtree("r"))
    assert train.main([*FILES, "--base", "cc", "--epochs", "3", "--out", "r"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: cannot write") and err.count("\n") == 1


@pytest.mark.parametrize("out", ["file/r", "/proc/irnet", "readonly/r"])
def test_an_unwritable_folder_is_refused(out, capsys):
    Path("file").write_text("")
    Path("readonly").mkdir(0o500)
    if out.startswith("readonly") and os.access("readonly", os.W_OK):
        pytest.skip("root may write everywhere")
    assert train.main([*TOY, "--arch", "mlp", "--base", "cc", "--epochs", "1", "--out", out]) == 2
    err = capsys.readouterr().err
    assert "--out" in err and err.count("\n") == 1


# ------------------------------------------------------------------ whose folder it is


def test_two_processes_never_write_one_folder(capsys):
    argv = [*FILES, "--base", "cc", "--epochs", "3000", "--out", "r"]
    child = process(run, argv)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not Path("r/checkpoint.pt").exists():
        time.sleep(0.05)
    for more in (["--resume"], ["--overwrite"]):
        assert train.main([*argv, *more]) == 2
        err = capsys.readouterr().err
        assert f"in use by process {child.pid}" in err and err.count("\n") == 1
    child.kill()
    child.join()
    done = len(json.loads(torch.load("r/checkpoint.pt", weights_only=True)["rows"]))
    resumed = process(killed_in_step, 20, signal.SIGTERM, [*argv, "--resume"])  # a dead process holds no lock
    resumed.join(60)
    assert resumed.exitcode == 143 and len(rows("r")) > done


def test_a_folder_with_a_run_is_never_overwritten(capsys):
    argv = [*TOY, "--arch", "mlp", "--base", "cc", "--epochs", "1"]
    assert train.main([*argv, "--out", "r"]) == 0
    before = Path("r/metrics.jsonl").read_text()
    assert train.main([*argv, "--out", "r"]) == 2
    assert "--resume" in capsys.readouterr().err and Path("r/metrics.jsonl").read_text() == before
    assert train.main([*argv, "--out", "r", "--seed", "1", "--overwrite"]) == 0
    assert json.loads(Path("r/config.json").read_text())["seed"] == 1 and len(rows("r")) == 1
    assert train.main(argv) == 0 and train.main(argv) == 0  # names of its own are numbered
    assert len(list(Path("runs").iterdir())) == 2


def test_files_of_a_run_are_never_deleted_unasked(capsys):
    argv = [*FILES, "--base", "cc", "--epochs", "2", "--out", "r"]
    assert train.main(argv) == 0
    Path("r/config.json").unlink()
    assert train.main(argv) == 2 and "--resume" in capsys.readouterr().err
    assert train.main([*argv, "--resume"]) == 0 and Path("r/checkpoint.pt").exists()
    Path("mine").mkdir()
    arrays = dict(x_train=np.zeros((40, 8, 8), np.uint8), y_train=np.arange(40) % 2)
    arrays |= dict(x_test=arrays["x_train"], y_test=arrays["y_train"])
    np.savez("mine/candidates.npz", **arrays)
    own = "--dataset mine/candidates.npz --q 0.3 --eta 0.1 --arch mlp --batch-size 8 --epochs 1 --out mine".split()
    for more in ([], ["--overwrite"]):
        assert train.main([*own, *more]) == 2 and "--dataset" in capsys.readouterr().err
    with np.load("mine/candidates.npz") as file:
        assert "x_train" in file.files


def test_a_folder_that_another_run_has_taken_is_left_to_it(monkeypatch, capsys):
    def taken():
        Path("r").rename("moved")
        other = folder.Run("r", named=True)
        other.look({}, False, False)
        other.begin({"seed": 7}, [])
        keep.append(other)

    keep = []
    stopping_at(monkeypatch, 8, taken)
    assert train.main([*FILES, "--base", "cc", "--epochs", "3", "--out", "r"]) == 1
    assert "another run has taken the folder" in capsys.readouterr().err
    assert (
        json.loads(Path("r/config.json").read_text()) == {"seed": 7} and Path("r/metrics.jsonl").read_text() == ""
    )
    assert not Path("r/checkpoint.pt").exists()
    keep[0].close()


def test_a_checkpoint_of_an_older_version_goes_on_and_says_that_it_is_not_exact(monkeypatch, capsys):
    stopping_at(monkeypatch, 5 + 5 + 6 + 3)
    argv = [*FILES, "--base", "cc", "--epochs", "5"]
    assert train.main([*argv, "--out", "r"]) == 143
    path = Path("r/checkpoint.pt")
    state = checkpoint.unpack(path.read_bytes())
    del state["irnet_generator"]
    path.write_bytes(checkpoint.pack(state))
    capsys.readouterr()
    assert train.main([*argv, "--out", "r", "--resume"]) == 0
    assert "older version" in capsys.readouterr().out and len(rows("r")) == 5


def test_resume_finds_the_run_with_this_configuration(monkeypatch):
    for lr in ("0.02", "0.05"):  # both without --out: the second one is numbered
        stopping_at(monkeypatch, 8)
        assert train.main([*FILES, "--base", "cc", "--epochs", "3", "--lr", lr]) == 143
    assert train.main([*FILES, "--base", "cc", "--epochs", "3", "--lr", "0.02", "--resume"]) == 0
    finished = [path.parent.name for path in Path("runs").glob("*/summary.json")]
    assert len(finished) == 1 and not finished[0].endswith("-2")


# ------------------------------------------------------------------ the pages


def test_a_page_that_fails_is_said_and_the_run_is_finished(monkeypatch, capsys):
    monkeypatch.setattr(results, "report_page", lambda *args: 1 / 0)
    argv = [*FILES, "--base", "cc", "--epochs", "2", "--out", "r"]
    assert train.main(argv) == 0
    said = capsys.readouterr()
    assert said.err == "note: report.html was not made (ZeroDivisionError: division by zero)\n"
    assert "test accuracy" in said.out and not Path("r/report.html").exists() and summary("r")["epochs"] == 2
    assert train.main([*argv, "--resume"]) == 0 and "finished" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_ends_the_run_and_resume_makes_it(capsys):
    argv = [*FILES, "--base", "cc", "--epochs", "2", "--out", "r"]
    blocked = Path("r/report.html.part")
    blocked.mkdir(parents=True)  # stands for a full disk
    assert train.main(argv) == 1 and not Path("r/summary.json").exists()
    assert "with --resume" in capsys.readouterr().err
    blocked.rmdir()
    assert train.main([*argv, "--resume"]) == 0 and Path("r/report.html").exists()
    assert summary("r")["epochs"] == 2


def test_a_terminal_that_cannot_show_a_name_shows_it_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", stream)
    options.configure([])
    print("\u732b", file=stream, flush=True)
    assert stream.buffer.getvalue().strip() == b"\\u732b"
