"""report.html of a run: its curves, noise, moved labels, margins (Eq. 4) and options on one page; or several runs.

Standard library only. The page asks for nothing from outside and has no script: inline SVG, light and dark, from
a phone's width up. `rows` and `summary` are those of metrics.jsonl and summary.json; what is None is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from html import escape

POINTS, BARS, COLOURS = 300, 100, 6  # at most so many points a curve, bars a chart; colours before they repeat
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 400, 56, 388, 26, 210  # of a chart, in units of its viewBox
BASES = {"pico": "PiCO", "pico+": "PiCO+", "supervised": "Supervised learning", "dividemix": "DivideMix"}
FRACTIONS = "last best val_selected transductive noise_before noise_after correction_precision".split()
MISSING = {"e0": "not found", "tau": "none: nothing is corrected", "q": "", "eta": ""}
Point = tuple[float, float]

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#565d66;--grid:#dde0e4;
--c0:#0b5cad;--c1:#b84a00;--c2:#00705a;--c3:#8a3a86;--c4:#3d434b;--c5:#7a5f00}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--card:#1c2026;--ink:#e8eaed;--soft:#a9b0b9;--grid:#363c44;
--c0:#6cb4ff;--c1:#ff9d57;--c2:#45d6b0;--c3:#e79ae2;--c4:#d4d8dd;--c5:#e3c84a}}
*{box-sizing:border-box}p{margin:0 0 8px}.soft{color:var(--soft)}
body{margin:0 auto;padding:20px 16px 48px;max-width:1040px;background:var(--paper);color:var(--ink);
font:16px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.2;margin:0}h2{font-size:1.05rem;margin:28px 0 8px}
.figures{display:flex;flex-wrap:wrap;gap:12px 28px;margin:18px 0 22px}.figures dt{color:var(--soft);font-size:.85rem}
.figures dd{margin:0;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.card{background:var(--card);border-radius:10px;padding:14px 12px;min-width:0}.card h2{margin:0 0 8px}
.card p{font-size:.88rem;color:var(--soft);margin:8px 0 0}
.card>svg{display:block;width:100%;height:auto;overflow:visible;font:13px system-ui,sans-serif}
ul.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 6px;padding:0;font-size:.85rem}
.legend svg{width:32px;height:10px;margin-right:6px}.card svg text{fill:var(--soft)}.card svg .ink{fill:var(--ink)}
.grid{stroke:var(--grid)}.mark{stroke:var(--ink);stroke-width:1.3}.tau{stroke:var(--soft);stroke-dasharray:3 3}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.area{stroke-width:1.6;fill-opacity:.2}
.hollow{fill-opacity:.3}.hit{fill:transparent}.hit:hover{fill:var(--ink);fill-opacity:.12}
.dot{stroke-width:2;fill:var(--card)}.d1{stroke-dasharray:7 3}.d2{stroke-dasharray:2 3}
.d3{stroke-dasharray:9 3 2 3}.d4{stroke-dasharray:14 4}.d5{stroke-dasharray:5 2 1 2 1 2}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:5px 20px 5px 0;border-bottom:1px solid var(--grid)}
th{font-weight:400;color:var(--soft)}thead th{color:var(--ink);font-weight:600}.scroll td{white-space:nowrap}
.scroll th{overflow-wrap:normal;min-width:7em}
""" + "".join(f".c{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}\n" for i in range(COLOURS))


# Numbers as the terminal shows them.


def known(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def per_cent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


def estimated(found: dict | None) -> str:
    """The noise estimate with its interval; empty where there is none."""
    if not found or not all(known(found.get(key)) for key in ("eta", "low", "high")):
        return ""
    return f"{per_cent(found['eta'], 1)} (95 % interval {100 * found['low']:.1f} to {100 * found['high']:.1f})"


def shown(key: str, value: object) -> str:
    """One value of the summary, or of the options; empty where it says nothing."""
    if key == "noise_estimate":
        return estimated(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return MISSING.get(key, "not known")
    if key == "seconds":
        return (
            f"{value:.0f} s"
            if value < 100
            else f"{value / 60:.0f} min"
            if value < 6000
            else f"{value / 3600:.1f} h"
        )
    if key in FRACTIONS:
        return per_cent(value)
    if not isinstance(value, float):
        return str(value)
    return {"gap": f"{100 * value:.2f} points", "images_per_second": f"{value:,.0f}"}.get(key, f"{value:g}")


def title_of(key: str, score: str) -> str:
    """What a key of the summary is called."""
    special = {"last": f"{score}, last epoch", "best": f"{score}, best epoch", "gap": "best less last"}
    special |= {"val_selected": f"{score} where the validation curve is best", "corrections": "labels moved in"}
    special |= {"transductive": "train accuracy, by the hidden truth", "correction_precision": "of them right"}
    return special.get(key, key.replace("_", " "))


# Axes and marks.


def tag(kind: str, inside: str = "", css: str = "", **attributes: object) -> str:
    """An element; numbers with one decimal, text escaped. `inside` is markup and stays as it is."""
    out = f'<{kind} class="{css}"' if css else f"<{kind}"
    for key, value in attributes.items():
        out += f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
    return f"{out}>{inside}</{kind}>"


def text(x: float, y: float, words: str, css: str = "", anchor: str = "middle") -> str:
    return tag("text", escape(words), css, x=x, y=y, text_anchor=anchor)


def round_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from at or below `low` to at or above `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= 0.999 * rough)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [round(k * step, 10) for k in range(first, last + 1)]


class Axes:
    """From data to the chart's units. Ticks are round numbers; the y range ends on them, the x range is as given."""

    def __init__(self, x: Point, y: Point, whole=False, epochs=True, lines=5, top=TOP, bottom=BOTTOM, right=RIGHT):
        (self.x_low, self.x_high), (low, high) = x, y
        if high - low < 1e-9:  # a flat line still needs a height: one label, or one per cent
            low, high = (low, low + 1) if whole else (low, low + 0.01) if low < 0.99 else (low - 0.01, low)
        self.y_ticks = round_ticks(low, high, lines, whole)
        self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]
        self.x_ticks = [t for t in round_ticks(*x, 6, whole=epochs) if self.x_low <= t <= self.x_high]
        self.top, self.bottom, self.right = top, bottom, right

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top)

    def upright(self, value: float, css: str, words: str = "") -> str:
        """A vertical line with words above it; nothing outside the axes."""
        if not self.x_low <= value <= self.x_high:
            return ""
        x, half = self.x(value), 3.5 * len(words)
        line = tag("line", "", css, x1=x, x2=x, y1=self.top - 4, y2=self.bottom)
        return line + text(min(max(x, LEFT + half), self.right - half), self.top - 8, words, "ink")


def tick_per_cent(value: float) -> str:
    return f"{round(100 * value, 6):g} %"


def tick_number(value: float) -> str:
    return f"{round(value, 6):,}".removesuffix(".0").replace("-", "\N{MINUS SIGN}")


def frame(a: Axes, y_tick: Callable, x_label: str = "epoch", x_tick: Callable = tick_number) -> str:
    """Gridlines with their numbers, and what the x axis is."""
    out = text((LEFT + a.right) / 2, a.bottom + 34, x_label)
    for value in a.y_ticks:
        out += tag("line", "", "grid", x1=LEFT, x2=a.right, y1=a.y(value), y2=a.y(value))
        out += text(LEFT - 6, a.y(value) + 4.5, y_tick(value), anchor="end")
    return out + "".join(text(a.x(value), a.bottom + 17, x_tick(value), "x") for value in a.x_ticks)


def thin(points: list[Point], most: int = POINTS) -> list[Point]:
    """At most about `most` points: of each stretch its lowest and highest, so that no peak is lost; and both ends."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = sorted(points[start : start + size], key=lambda p: p[1])
        kept |= {stretch[0], stretch[-1]}
    return sorted(kept)


def curve(a: Axes, points: list[Point], css: str, name: str) -> str:
    places = " ".join(f"{a.x(x):.1f},{a.y(y):.1f}" for x, y in thin(points))
    return tag("polyline", tag("title", escape(name)), f"line {css}", points=places) if len(points) > 1 else ""


def dot(a: Axes, point: Point, css: str, name: str) -> str:
    return tag("circle", tag("title", escape(name)), f"dot {css}", cx=a.x(point[0]), cy=a.y(point[1]), r=4)


def hover(a: Axes, rows: list[dict], names: dict[str, str]) -> str:
    """Strips that tell the numbers of their epoch under the mouse. `names`: what the keys of the rows are called."""
    every = math.ceil(len(rows) / BARS)
    out, wide = "", a.x(every) - a.x(0)
    for row in rows[every - 1 :: every]:
        numbers = [f"{name} {per_cent(row[key])}" for key, name in names.items() if known(row.get(key))]
        title = tag("title", escape(f"epoch {row['epoch']}: {', '.join(numbers)}"))
        out += tag(
            "rect", title, "hit", x=a.x(row["epoch"]) - wide / 2, y=a.top, width=wide, height=a.bottom - a.top
        )
    return out


def card(
    title: str,
    label: str = "",
    body: str = "",
    legend: Iterable[tuple[str, str]] = (),
    note: str = "",
    height: int = BOTTOM + 40,
) -> str:
    """A chart with its title, legend (of (classes, text): with f0 or f1 an area, otherwise a line) and note."""
    out, keys = tag("h2", escape(title[:1].upper() + title[1:])), ""
    for css, words in legend:
        area = tag("rect", "", css, x=9, y=0.5, width=14, height=9)
        mark = area if css[0] == "f" else tag("line", "", f"line {css}", x1=1, x2=31, y1=5, y2=5)
        keys += tag("li", tag("svg", mark, viewBox="0 0 32 10", aria_hidden="true") + escape(words))
    out += tag("ul", keys, "legend") if keys else ""
    out += tag("svg", body, role="img", aria_label=label, viewBox=f"0 0 {WIDTH} {height}") if body else ""
    note = escape(note).replace(" %", "\N{NO-BREAK SPACE}%")
    return tag("section", out + (tag("p", note) if note else ""), "card")


# The charts of one run.


def points_of(rows: list[dict], key: str) -> list[Point]:
    return [(row["epoch"], row[key]) for row in rows if known(row.get(key))]


def over_epochs(rows: list[dict], values: Iterable[float], zero: bool = False, **options: object) -> Axes:
    values, epochs = list(values), [row["epoch"] for row in rows]
    return Axes((min(epochs) - 0.5, max(epochs) + 0.5), (0 if zero else min(values), max(values)), **options)


def accuracy_chart(rows: list[dict], e0: int | None, score: str) -> str:
    test, val = points_of(rows, "test"), points_of(rows, "val")
    val, same = ([], True) if test == val else (val, False)  # the same: --val test
    title = f"{score} and validation curve" if val else score
    if len(test) < 2:
        one = f"Epoch {test[0][0]}: {score} {per_cent(test[0][1])}" if test else f"No {score} is known"
        one += f", validation {per_cent(val[-1][1])}" if val else ""
        return card(title, note=f"{one}. A curve needs two epochs.")
    a, best = over_epochs(rows, [y for _, y in test + val]), max(test, key=lambda p: p[1])
    before, after = [p for p in val if p[0] <= (e0 or math.inf)], [p for p in val if e0 and p[0] >= e0]
    legend = [("c0", score)] + [("c1 d1", "validation")] * bool(val)
    legend += [("c1 d2", "after e0: trained on too")] * (len(after) > 1)
    note = f"The circle is the best epoch, {best[0]}: {per_cent(best[1])}. "
    note += "Validation: how often the prediction for a held-out sample is one of its candidates." if val else ""
    note += f"The validation curve is the {score} itself, so e0 was chosen by it." if same else ""
    body = frame(a, tick_per_cent) + (a.upright(e0, "mark e0", f"e0 = {e0}") if e0 else "")
    body += (
        curve(a, before, "c1 d1", "validation")
        + curve(a, after, "c1 d2", "validation")
        + curve(a, test, "c0", score)
    )
    body += dot(a, best, "c0", "best") + hover(a, rows, {"test": score} | ({} if same else {"val": "validation"}))
    label = f"{title} over the epochs: last {per_cent(test[-1][1])}, best {per_cent(best[1])} at epoch {best[0]}"
    return card(title, label, body, legend, note)


def noise_chart(rows: list[dict], found: dict | None, e0: int | None) -> str:
    """The noise level where the truth is known; otherwise what was estimated without it."""
    level, estimate = points_of(rows, "noise_level"), estimated(found)
    if not level and estimate:
        return estimate_chart(found)
    if not level:
        return card("noise", note="Not known: there is no truth to count by, and no estimate was made.")
    first, last = per_cent(level[0][1]), per_cent(level[-1][1])
    note = f"Samples whose true label is not a candidate: {first} at first, {last} in the end."
    note += f" Estimated without any true label: {estimate}." if estimate else ""
    if len(level) < 2:
        return card("noise level", note=f"{note} A curve needs two epochs.")
    a = over_epochs(rows, [y for _, y in level], zero=True)
    body = frame(a, tick_per_cent) + (a.upright(e0, "mark e0", f"e0 = {e0}") if e0 else "")
    body += curve(a, level, "c0", "noise level") + hover(a, rows, {"noise_level": "noise level"})
    return card("noise level", f"Noise level over the epochs: from {first} to {last}", body, note=note)


def estimate_chart(found: dict) -> str:
    """A bar from the low to the high end of the interval, with the estimate on it."""
    a = Axes((0, max(0.1, 1.1 * found["high"])), (0, 1), epochs=False, lines=1, bottom=80)
    low, high, words = a.x(found["low"]), a.x(found["high"]), f"Estimated noise: {estimated(found)}"
    body = frame(a, lambda _: "", "", tick_per_cent) + a.upright(found["eta"], "mark", per_cent(found["eta"], 1))
    body += tag("rect", "", "f0 c0 hollow", x=low, y=42, width=max(1.0, high - low), height=22)
    note = (
        f"{words}, from held-out samples and without any true label: samples whose true label is not a candidate."
    )
    return card("estimated noise", words, body, note=note, height=104)


def why_nothing(summary: dict, last: int, e0: int | None) -> str:
    if summary.get("irnet") is False:
        return "IRNet is off in this run."
    if e0 is None:
        return "e0 was not found, and nothing is corrected before it."
    if e0 >= last:
        return f"e0 is {e0}, the last epoch so far, and correction starts after it."
    if "tau" in summary and not known(summary["tau"]):
        return "More labels moved in would have been wrong than right."
    return "No sample was predicted outside its candidates confidently enough (Eqs. 10 to 12)."


def moved_chart(rows: list[dict], summary: dict, e0: int | None) -> str:
    """Bars: right ones below, wrong ones on top where the truth is known. A bar of a long run is several epochs."""
    size = math.ceil(len(rows) / BARS)
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    counts = [sum(row.get("corrections") or 0 for row in group) for group in groups]
    if not sum(counts):
        return card("labels moved in", note=f"No label was moved. {why_nothing(summary, rows[-1]['epoch'], e0)}")
    truth = all(known(row.get("correction_precision")) for row in rows if row.get("corrections"))
    a, bars, all_right = over_epochs(rows, counts, zero=True, whole=True), "", 0
    for group, count in zip(groups, counts, strict=True):
        moved = [row for row in group if row.get("corrections")]
        right = round(sum(row["corrections"] * row["correction_precision"] for row in moved)) if truth else count
        all_right += right
        first, last = group[0]["epoch"], group[-1]["epoch"]
        words = f"epoch {first}" + f" to {last}" * (first != last) + f": {count:,} moved in"
        words += f", {right:,} right ({per_cent(right / count)})" if truth and count else ""
        place = dict(x=a.x(first - 0.42), width=a.x(last + 0.42) - a.x(first - 0.42))
        bar = tag("rect", "", "f0", **place, y=a.y(right), height=a.bottom - a.y(right)) if right else ""
        wrong = dict(y=a.y(count), height=a.y(right) - a.y(count))
        bar += tag("rect", "", "f1 c1 hollow", **place, **wrong) if count > right else ""
        bars += tag("g", tag("title", words) + bar) if count else ""
    note = f"{sum(counts):,} labels moved in, "
    note += (
        f"{per_cent(all_right / sum(counts))} of them right." if truth else "how many of them right is not known."
    )
    legend = [("f0", "right"), ("f1 c1 hollow", "wrong")] if truth else [("f0", "moved in")]
    title = "labels moved in, per epoch" if size == 1 else f"labels moved in, per {size} epochs"
    body = frame(a, tick_number) + (a.upright(e0, "mark e0", f"e0 = {e0}") if e0 else "") + bars
    return card(title, note, body, legend, note)


def margin_chart(margins: list[dict], tau: float | None, e0: int | None, last: int) -> str:
    """Histograms of tau of Eq. 4 below each other over one x axis: at e0 and at the end."""
    kinds = [kind for kind in ("clean", "noisy", "all") if any(sum(m.get(kind) or []) for m in margins)]
    if not kinds:
        return card("margins tau (Eq. 4)", note="No margins were kept.")
    styles = dict(clean="f0 c0 area", noisy="f1 c1 d1 area", all="f0 c0 area")
    x_range, body = (min(m["low"] for m in margins), max(m["high"] for m in margins)), ""
    for k, m in enumerate(margins):
        shares = {kind: [n / sum(m[kind]) for n in m[kind]] for kind in kinds if sum(m.get(kind) or [])}
        highest, top = max((max(share) for share in shares.values()), default=1), TOP + 122 * k
        a = Axes(x_range, (0, highest), epochs=False, lines=3, top=top, bottom=top + 80)
        body += frame(a, tick_per_cent, "tau" if m is margins[-1] else "") + a.upright(0, "mark zero")
        body += a.upright(-tau, "tau", tick_number(-tau)) if known(tau) else ""
        what = "e0" if m["epoch"] == e0 else "the last" if m["epoch"] == last else ""
        body += text(RIGHT, top - 8, f"epoch {m['epoch']}" + f" ({what})" * bool(what), "ink", "end")
        wide = (m["high"] - m["low"]) / len(next(iter(shares.values()), [0]))
        for kind, share in shares.items():
            steps = (f"V{a.y(s):.1f}H{a.x(m['low'] + (i + 1) * wide):.1f}" for i, s in enumerate(share))
            body += tag("path", "", styles[kind], d=f"M{a.x(m['low']):.1f} {a.bottom}{''.join(steps)}V{a.bottom}")
    names = dict(clean="clean: the truth is a candidate", noisy="noisy: it is not", all="all samples")
    note = f"Share of {'all samples' if kinds == ['all'] else 'its kind'} in each bin. Below zero, the network finds a "
    note += "label outside the candidates the most probable"
    note += f"; a sample at {tick_number(-tau)} or below may be corrected (Eq. 10)." if known(tau) else "."
    label = "Histograms of the margin tau at " + " and ".join(f"epoch {m['epoch']}" for m in margins)
    return card(
        "margins tau (Eq. 4)", label, body, [(styles[k], names[k]) for k in kinds], note, 26 + 122 * len(margins)
    )


# The pages.


def document(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>
<body>
{body}
</body></html>
"""


def table(pairs: Iterable[tuple[str, str]]) -> str:
    return tag(
        "table", "".join(tag("tr", tag("th", escape(k), scope="row") + tag("td", escape(v))) for k, v in pairs)
    )


def key_figures(s: dict, found: dict | None, score: str) -> str:
    """The line below the heading: only what is known."""
    out = [(score + ", last" if key == "last" else key, shown(key, s.get(key))) for key in ("last", "best", "gap")]
    out = [pair for pair in out if pair[1] != "not known"]
    if known(s.get("noise_before")) and known(s.get("noise_after")):
        out.append(
            ("noise level", f"{per_cent(s['noise_before'])} \N{RIGHTWARDS ARROW} {per_cent(s['noise_after'])}")
        )
    elif estimated(found):
        out.append(("noise, estimated", estimated(found)))
    out += [("e0", shown("e0", s["e0"]))] if "e0" in s else []
    if known(s.get("corrections")):
        right = f", {per_cent(s['correction_precision'])} right" if known(s.get("correction_precision")) else ""
        out.append(("labels moved in", f"{s['corrections']:,}{right}"))
    pairs = (tag("div", tag("dt", escape(key)) + tag("dd", escape(value))) for key, value in out)
    return tag("dl", "".join(pairs), "figures") if out else ""


def page(
    name: str,
    rows: list[dict],
    summary: dict,
    changed: dict,
    margins: list[dict],
    more: str = "",
    score: str = "test accuracy",
) -> str:
    """The report of one run -> HTML. `more` is HTML and is put in as it is, before the options."""
    s, title = summary, name
    if "base" in s and "dataset" in s:
        title = f"{BASES.get(s['base'], str(s['base']).upper())} {'with' if s.get('irnet') else 'without'} IRNet"
        title += f" on {s['dataset']}" + (f", seed {s['seed']}" if "seed" in s else "")
    last = rows[-1]["epoch"] if rows else 0
    e0 = s.get("e0") or (rows[-1].get("e0") if rows else None)
    found = s.get("noise_estimate") or next((r["noise_estimate"] for r in rows if r.get("noise_estimate")), None)
    line = f"Run {name}: {last:,} epochs" + (f" of {s['epochs']:,}" if s.get("epochs", last) != last else "")
    body = tag("h1", escape(title)) + tag("p", escape(line), "soft") + key_figures(s, found, score)
    if rows:
        charts = accuracy_chart(rows, e0, score) + noise_chart(rows, found, e0) + moved_chart(rows, s, e0)
        body += tag("div", charts + margin_chart(margins, s.get("tau"), e0, last), "charts")
    else:
        body += tag("p", "No epoch was finished: there is nothing to draw.")
    facts = [(title_of(key, score), shown(key, value)) for key, value in s.items()]
    body += tag("h2", "Summary") + (table(pair for pair in facts if pair[1]) if s else tag("p", "Not written yet."))
    options = [(f"--{key.replace('_', '-')}", "none" if v is None else shown("", v)) for key, v in changed.items()]
    body += f"\n{more}\n" + tag("h2", "Options that differ from the preset")
    body += table(options) if options else tag("p", "none: the preset as it is")
    return document(f"{title} ({name})" if title != name else name, body)


def compare_chart(title: str, runs: list[dict], key: str, whole: bool = False, zero: bool = True) -> str:
    """A line a run, with its name at its end where there is room; a circle marks e0."""
    curves = [(run, f"c{k % COLOURS}", f"d{(k + k // COLOURS) % COLOURS}") for k, run in enumerate(runs)]
    curves = [(*some, points) for some in curves if len(points := points_of(some[0]["rows"], key)) > 1]
    values = [y for *_, points in curves for _, y in points]
    if not any(values):
        return card(title, note="No label was moved." if whole and values else "Not known, or not two epochs long.")
    rows = [row for run, *_ in curves for row in run["rows"]]
    longest = max(len(run["name"]) for run, *_ in curves)
    a = over_epochs(rows, values, zero, whole=whole, right=RIGHT - 8 * longest if longest <= 12 else RIGHT)
    body, above = frame(a, tick_number if whole else tick_per_cent), -math.inf
    for run, colour, dash, points in sorted(curves, key=lambda some: -some[-1][-1][1]):
        e0, (x, y) = run["summary"].get("e0"), points[-1]
        body += curve(a, points, f"{colour} {dash}", run["name"])
        body += "".join(dot(a, p, colour, f"{run['name']}: e0 = {e0}") for p in points if p[0] == e0)
        if longest <= 12 and a.y(y) > above + 14:
            above = a.y(y)
            body += text(a.x(x) + 6, above + 4, run["name"], "ink", "start")
    legend = [(f"{colour} {dash}", run["name"]) for run, colour, dash, _ in curves]
    label = f"{title} over the epochs of " + ", ".join(run["name"] for run, *_ in curves)
    return card(title, label, body, legend, "A circle marks e0.")


def compare(runs: list[dict]) -> str:
    """Several runs, each dict(name=, rows=, summary=) and perhaps score=, on one page -> HTML."""
    score = " / ".join(dict.fromkeys(run.get("score", "test accuracy") for run in runs))
    charts = compare_chart(score, runs, "test", zero=False) + compare_chart("noise level", runs, "noise_level")
    charts += compare_chart("labels moved in, per epoch", runs, "corrections", whole=True)
    lines = tag("tr", "<td></td>" + "".join(tag("th", escape(run["name"]), scope="col") for run in runs))
    lines = tag("thead", lines)
    for key in "last best gap e0 noise_before noise_after corrections correction_precision seconds".split():
        values = [run["summary"].get(key) for run in runs]
        if any(known(value) for value in values):
            cells = "".join(tag("td", escape(shown(key, value))) for value in values)
            lines += tag("tr", tag("th", escape(title_of(key, score)), scope="row") + cells)
    side = tag("div", tag("table", lines), "scroll", tabindex=0, role="region", aria_label="Summaries side by side")
    title = f"{len(runs)} runs compared"
    return document(title, tag("h1", title) + "<br>" + tag("div", charts, "charts") + tag("h2", "Summaries") + side)
