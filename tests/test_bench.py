"""bench.py: a ratio is what it says, and time to accuracy at toy size."""

import pytest
import torch

import bench
from conftest import SHARED


def test_a_ratio_is_the_first_over_the_second():
    """A clock that each call moves on by its own cost."""
    now = [0.0]

    def costs(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    row = bench.side_by_side("name", costs(3.0), costs(2.0), ">= 1", repeats=3, calls=4, clock=lambda: now[0])
    assert row["ratio"] == row["low"] == row["high"] == pytest.approx(1.5)
    assert bench.row_of("", [1.0, 9.0, 2.0], "") == dict(name="", ratio=2.0, low=1.0, high=9.0, asked="")


@pytest.mark.skipif(not (SHARED / "KMNIST").exists(), reason="needs ../shared/data")
@pytest.mark.parametrize("enough, epochs", [(0.0, 3), (1.0, 4)])
def test_time_to_accuracy_stops_when_three_epochs_have_it(monkeypatch, enough, epochs):
    more = ["--data", str(SHARED), "--limit-train", "300", "--limit-test", "50", "--epochs", "4"]
    monkeypatch.setattr(bench, "MORE", more)
    threads = torch.get_num_threads()
    (row,) = bench.accuracy(enough)
    torch.set_num_threads(threads)
    assert row["epochs_of_ours"] == epochs and ("(never)" in row["name"]) == (enough == 1.0)
    assert row["ratio"] == pytest.approx(13 * row["cpu_seconds"] / 300) and row["cpu_seconds"] > 0
