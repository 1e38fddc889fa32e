"""report.html: what it draws is what the rows say, it asks for nothing from outside, and it has no empty axes."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from harness import report

VOID = {"meta", "link", "br"}


class Tree(HTMLParser):
    """All elements as (tag, attributes, text); fails on a tag that is closed in the wrong place or never."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[dict] = []
        self.all: list[dict] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {[element['tag'] for element in self.open]}"

    def handle_starttag(self, tag, attrs):
        element = dict(tag=tag, text="", **{"css": "", **{k.replace("class", "css"): v for k, v in attrs}})
        self.all.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def find(self, tag: str, css: str = "") -> list[dict]:
        return [e for e in self.all if e["tag"] == tag and set(css.split()) <= set(e["css"].split())]

    def words(self) -> str:
        return " ".join(e["text"] for e in self.find("body")).replace("\N{NO-BREAK SPACE}", " ")


def chart(html: str, title: str) -> Tree:
    """The one card with this title."""
    cards = re.findall(r'<section class="card">.*?</section>', html, re.S)
    (found,) = [card for card in cards if f"<h2>{title}" in card]
    return Tree(found)


def scale(tree: Tree, css: str, across: str, unit: str = "") -> tuple[float, float]:
    """(pixels at 0, pixels a unit) from the first and last number beside an axis."""
    ticks = [e for e in tree.find("text") if e["css"] == css and re.fullmatch(rf"[\d,.]+{unit}", e["text"])]
    values = [float(e["text"].removesuffix(unit).replace(",", "")) for e in ticks]
    places = [float(e[across]) for e in ticks]
    slope = (places[-1] - places[0]) / (values[-1] - values[0])
    return places[0] - slope * values[0], slope


def places(line: dict) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in line["points"].split()]


def run(epochs: int = 20, e0: int | None = 10, truth: bool = True, **changes) -> tuple[list[dict], dict]:
    """Rows and a summary as train.py writes them; 10 labels are moved in each epoch after e0, 9 of them right."""
    rows = []
    for epoch in range(1, epochs + 1):
        after = e0 is not None and epoch > e0
        row = dict(epoch=epoch, test=0.9 - 0.5 / epoch, val=0.7 - 0.3 / epoch, corrections=10 * after)
        row |= dict(noise_level=0.3 - 0.01 * max(0, epoch - (e0 or epoch)) / epochs if truth else None)
        row |= dict(correction_precision=0.9 if after and truth else None, e0=e0 if e0 and epoch >= e0 else None)
        rows.append(row)
    estimate = dict(eta=0.285, low=0.11, high=0.42, temperature=0.5) if e0 else None
    if e0:
        rows[e0 - 1]["noise_estimate"] = estimate
    moved = sum(row["corrections"] for row in rows)
    summary = dict(
        dataset="digits", base="pico", irnet=True, q=0.3, eta=0.3, seed=7, epochs=epochs, arch="cnn", e0=e0
    )
    summary |= dict(
        tau=0.3, best=0.875, last=0.8642, gap=0.0108, val_selected=0.85, transductive=0.8 if truth else None
    )
    summary |= dict(noise_before=0.3 if truth else None, noise_after=0.2951 if truth else None, corrections=moved)
    summary |= dict(noise_estimate=estimate, correction_precision=0.9 if moved and truth else None, seconds=12.3)
    return rows, summary | changes


def histogram(epoch: int, **counts) -> dict:
    return dict(epoch=epoch, low=-1.0, high=1.0, **counts)


BOTH = [
    histogram(10, clean=[0, 1, 3, 4], noisy=[5, 4, 1, 0]),
    histogram(20, clean=[0, 0, 1, 9], noisy=[2, 2, 0, 0]),
]
ALL = [histogram(10, all=[5, 5, 4, 4])]


@pytest.mark.parametrize("epochs, e0, truth", [(20, 10, True), (20, 10, False), (20, None, True), (1, None, False)])
def test_tags_balance_and_nothing_comes_from_outside(epochs, e0, truth):
    rows, summary = run(epochs, e0, truth)
    several = [dict(name="a", rows=rows, summary=summary), dict(name="b", rows=rows[:1], summary={})]
    for html in (report.page("x", rows, summary, {"lr": 0.1}, BOTH if truth else ALL), report.compare(several)):
        tree = Tree(html)
        assert not re.search(r"https?:|//|<script|@import|url\(", html)
        assert [e["href"] for e in tree.find("link")] == ["data:,"]
        assert all(e["role"] == "img" and e["aria-label"] for e in tree.find("svg") if "aria-hidden" not in e)
        assert not re.search(r"\b(nan|inf|None)\b", html)


@pytest.mark.parametrize("e0", [1, 10, 19, 20])
def test_e0_stands_at_its_epoch(e0):
    rows, summary = run(e0=e0)
    html = report.page("x", rows, summary, {}, [])
    for title in ("Test accuracy and", "Noise level"):
        tree = chart(html, title)
        zero, slope = scale(tree, "x", "x")
        (line,) = tree.find("line", "e0")
        assert line["x1"] == line["x2"]
        assert float(line["x1"]) == pytest.approx(zero + slope * e0, abs=0.2)
        assert f"e0 = {e0}" in [e["text"] for e in tree.find("text")]


def test_the_curve_is_where_the_numbers_are():
    rows, summary = run(e0=None)
    rows[13]["test"] = 0.97
    tree = chart(report.page("x", rows, summary, {}, []), "Test accuracy")
    (line,) = tree.find("polyline", "c0")
    x_zero, x_slope = scale(tree, "x", "x")
    y_zero, y_slope = scale(tree, "", "y", " %")
    top = min(places(line), key=lambda p: p[1])
    assert top[0] == pytest.approx(x_zero + 14 * x_slope, abs=0.2)
    for (x, y), row in zip(places(line), rows, strict=True):
        assert x == pytest.approx(x_zero + x_slope * row["epoch"], abs=0.2)
        assert y == pytest.approx(y_zero + y_slope * 100 * row["test"] - 4.5, abs=0.3)  # a number hangs 4.5 lower
    (ring,) = tree.find("circle")
    assert (float(ring["cx"]), float(ring["cy"])) == top


def test_the_validation_curve_is_dotted_after_e0():
    rows, summary = run(e0=12)
    tree = chart(report.page("x", rows, summary, {}, []), "Test accuracy")
    (before,), (after,) = tree.find("polyline", "c1 d1"), tree.find("polyline", "c1 d2")
    assert len(places(before)) == 12 and len(places(after)) == 9
    assert places(before)[-1] == places(after)[0]
    for row in rows:
        row["val"] = row["test"]  # --val test: one curve, and a word on it
    html = report.page("x", rows, summary, {}, [])
    assert not chart(html, "Test accuracy").find("polyline", "c1")
    assert "The validation curve is the test accuracy itself" in html


def test_bars_are_as_tall_as_the_labels_moved():
    rows, summary = run(e0=10)
    rows[14] |= dict(corrections=40, correction_precision=0.5)
    tree = chart(report.page("x", rows, summary, {}, []), "Labels moved in, per epoch")
    _, slope = scale(tree, "", "y")
    bars = tree.find("g")
    assert len(bars) == 10 and bars[4]["text"] == "epoch 15: 40 moved in, 20 right (50.00 %)"
    right, wrong = (
        [float(e["height"]) for e in tree.find("rect", css) if "y" in e and e["width"] != "14"]
        for css in ("f0", "f1")
    )
    assert right[4] == pytest.approx(-20 * slope, abs=0.1) == wrong[4]
    assert right[0] == pytest.approx(9 * wrong[0], abs=1)
    assert "130 labels moved in, 77.69 % of them right." in tree.find("p")[0]["text"].replace("\xa0", " ")


def test_histograms_are_shares_of_their_kind():
    tree = chart(report.page("x", *run(), {}, BOTH), "Margins")
    assert len(tree.find("path")) == 4
    clean, noisy = tree.find("path")[:2]
    tops = [[float(y) for y in re.findall(r"V([\d.]+)", e["d"])] for e in (clean, noisy)]
    bottom = tops[0][-1]
    assert (bottom - tops[0][3]) / (bottom - tops[0][1]) == pytest.approx((4 / 8) / (1 / 8), rel=0.02)
    assert (bottom - tops[1][0]) == pytest.approx(bottom - tops[0][3], abs=0.2)  # 5 of 10 and 4 of 8
    zero = {float(e["x1"]) for e in tree.find("line", "zero")}
    middle = [float(e["x"]) for e in tree.find("text", "x") if e["text"] == "0"]
    assert zero == set(middle) and len(tree.find("line", "zero")) == 2
    only = chart(report.page("x", *run(truth=False), {}, ALL), "Margins")
    assert len(only.find("path")) == 1 and "all samples" in only.find("li")[0]["text"]


def test_unknown_truth_shows_the_estimate_and_no_noise_level():
    html = report.page("x", *run(truth=False), {}, ALL)
    tree = chart(html, "Estimated noise")
    assert "<h2>Noise level" not in html and "right (" not in html
    assert "28.5 % (95 % interval 11.0 to 42.0)" in Tree(html).words()
    zero, slope = scale(tree, "x", "x", " %")
    (box,) = tree.find("rect")
    assert float(box["x"]) == pytest.approx(zero + 11 * slope, abs=0.2)
    assert float(box["width"]) == pytest.approx(31 * slope, abs=0.2)
    assert "how many right is not known" in html


def test_the_score_is_called_by_its_name():
    name = "score on set-aside samples"
    rows, summary = run(truth=False)
    several = [dict(name="a", rows=rows, summary=summary, score=name)]
    for html in (report.page("x", rows, summary, {}, ALL, score=name), report.compare(several)):
        assert "test accuracy" not in html.lower() and name in html
    for row in rows:
        row["val"] = row["test"]
    for some in (rows, rows[:1]):
        assert "test accuracy" not in report.page("x", some, summary, {}, [], score=name).lower()
    assert report.page("x", rows, summary, {}, []).lower().count("test accuracy") > 3


def test_text_is_escaped_and_more_is_not():
    bad = "<b>&\"'"
    rows, summary = run(dataset=bad, arch=bad)
    html = report.page(bad, rows, summary, {bad: bad}, BOTH, more="<h2>Mine</h2>", score=bad)
    html += report.compare([dict(name=bad, rows=rows, summary=summary, score=bad)])
    assert "<b>" not in html and "&lt;b&gt;&amp;" in html
    assert "on <b>&\"', seed 7" in Tree(html).words()
    assert html.index("<h2>Summary") < html.index("<h2>Mine</h2>") < html.index("<h2>Options that differ")


def test_heading_key_figures_and_options():
    words = Tree(report.page("mine", *run(), {"weight_decay": 0.01, "swap": True}, BOTH)).words()
    for expected in ("PiCO with IRNet on digits, seed 7", "86.42 %", "87.50 %", "1.08 points", "30.00 % → 29.51 %"):
        assert expected in words
    assert "100, 90.00 % right" in words and "--weight-decay0.01" in words and "--swapyes" in words
    words = Tree(report.page("mine", *run(irnet=False), {}, [])).words()
    assert "PiCO without IRNet" in words and "none: the preset as it is" in words


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(e0=None), "e0 was not found"),
        (dict(e0=20), "e0 is 20, the last epoch so far"),
        (dict(e0=None, irnet=False), "IRNet is off"),
    ],
)
def test_nothing_moved_says_why_and_draws_no_axes(changes, reason):
    tree = chart(report.page("x", *run(**changes), {}, []), "Labels moved in")
    assert reason in tree.find("p")[0]["text"] and not tree.find("svg")


def test_short_runs_say_what_is_missing():
    rows, summary = run(epochs=1, e0=None)
    rows[0]["val"] = 0.55
    tree = Tree(report.page("x", rows, summary, {}, []))
    assert not tree.find("svg")
    assert "Epoch 1: test accuracy 40.00 %, validation 55.00 %." in tree.words()
    assert "A curve needs two epochs." in tree.words() and "No margins were kept." in tree.words()
    assert "0 epochs, so nothing to draw" in Tree(report.page("x", [], {}, {}, [])).words()
    assert "Not written yet." in Tree(report.page("x", rows, {}, {}, [])).words()
    Tree(report.compare([]))
    flat = [dict(epoch=k, test=1.0, val=1.0, noise_level=0.0, corrections=0) for k in (1, 2)]
    empty = [histogram(1, clean=[0, 0], noisy=[0, 0]), histogram(2, clean=[1, 0], noisy=[0, 0])]
    html = report.page("x", flat, {"tau": math.nan}, {}, empty)
    assert len(Tree(html).find("polyline")) == 2
    assert "101 %" not in html


def test_a_long_run_stays_small_and_keeps_its_peak():
    rows, summary = run(epochs=1000, e0=400)
    for row in rows:
        row["test"] += 0.01 * math.sin(row["epoch"] ** 2)
    rows[700]["test"] = 0.99
    bins = [k % 7 for k in range(100)]
    html = report.page("x", rows, summary, {}, [histogram(e, clean=bins, noisy=bins) for e in (400, 1000)])
    assert len(html.encode()) < 150_000
    tree = chart(html, "Test accuracy")
    points = places(tree.find("polyline", "c0")[0])
    zero, slope = scale(tree, "x", "x")
    assert 250 < len(points) <= 310
    assert min(points, key=lambda p: p[1])[0] == pytest.approx(zero + 701 * slope, abs=0.2)
    moved = chart(html, "Labels moved in, per 10 epochs")
    assert len(moved.find("g")) == 60 and moved.find("g")[0]["text"].startswith("epoch 401 to 410: 100 moved in")


def test_ticks_are_round_and_cover_the_data():
    for low, high in [(0.412, 0.937), (0, 0.0031), (0.93, 0.9312), (0, 17), (-1, 1), (0, 123456)]:
        ticks = report.round_ticks(low, high, 5)
        step = ticks[1] - ticks[0]
        assert ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9 and 3 <= len(ticks) <= 8
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


def test_compare_draws_a_line_a_run_and_only_known_rows():
    known, unknown = run(e0=10), run(e0=12, truth=False)
    runs = [dict(name=name, rows=rows, summary=s) for name, (rows, s) in dict(one=known, two=unknown).items()]
    html = report.compare(runs)
    accuracy, noise = chart(html, "Test accuracy"), chart(html, "Noise level")
    assert [e["css"] for e in accuracy.find("polyline")] == ["line c0 d0", "line c1 d1"]
    assert [e["text"] for e in accuracy.find("li")] == ["one", "two"]
    assert [e["text"] for e in noise.find("li")] == ["one"]  # the other one's is not known
    zero, slope = scale(accuracy, "x", "x")
    rings = [float(e["cx"]) for e in accuracy.find("circle")]
    assert rings == [pytest.approx(zero + slope * e0, abs=0.2) for e0 in (10, 12)]
    heads = [e["text"] for e in Tree(html).find("th")]
    assert "noise before" in heads and "of them right" in heads
    assert "noise before" not in [e["text"] for e in Tree(report.compare(runs[1:])).find("th")]
    styles = {e["css"] for e in chart(report.compare([runs[0]] * 30), "Test accuracy").find("polyline")}
    assert len(styles) == 30
