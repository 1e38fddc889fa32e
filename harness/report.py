"""report.html of a run: its curves, noise, moved labels, margins (Eq. 4) and options on one page; or several runs.
It asks for nothing from outside and has no script: inline SVG, light and dark, from a phone's width up. `rows` and
`summary` are those of metrics.jsonl and summary.json; what is None is not known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from html import escape

import harness

POINTS, BARS = 300, 100  # at most so many points a curve, and bars a chart
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "14 4", "5 2 1 2 1 2")  # d0 to d5, and the colours c0 to c5
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 400, 56, 388, 26, 210  # of a chart, in units of its viewBox
FRACTIONS = "last best val_selected transductive noise_before noise_after correction_precision".split()
MISSING = {"e0": "not found", "tau": "none: nothing is corrected", "q": "", "eta": ""}
Point, Rows = tuple[float, float], list[dict]

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#565d66;--grid:#dde0e4;
--c0:#0b5cad;--c1:#b84a00;--c2:#00705a;--c3:#8a3a86;--c4:#3d434b;--c5:#7a5f00}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--card:#1c2026;--ink:#e8eaed;--soft:#a9b0b9;--grid:#363c44;
--c0:#6cb4ff;--c1:#ff9d57;--c2:#45d6b0;--c3:#e79ae2;--c4:#d4d8dd;--c5:#e3c84a}}
*{box-sizing:border-box}body{margin:0 auto;padding:20px 16px 48px;max-width:1040px;background:var(--paper);
color:var(--ink);font:16px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}p{margin:0 0 8px}
h1{font-size:1.5rem;line-height:1.2;margin:0}h2{font-size:1.05rem;margin:28px 0 8px}.soft{color:var(--soft)}
dl{display:flex;flex-wrap:wrap;gap:12px 28px;margin:18px 0 22px}dt{color:var(--soft);font-size:.85rem}
dd{margin:0;font-size:1.2rem;font-weight:600}table{border-collapse:collapse;font-size:.92rem}
dd,td{font-variant-numeric:tabular-nums}th{font-weight:400;color:var(--soft)}thead th{color:var(--ink)}
th,td{text-align:left;vertical-align:top;padding:5px 20px 5px 0;border-bottom:1px solid var(--grid)}
.scroll{overflow-x:auto}.scroll td{white-space:nowrap}.scroll th{overflow-wrap:normal;min-width:7em}
.charts{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.card{background:var(--card);border-radius:10px;padding:14px 10px;min-width:0}.card h2{margin:0 0 8px}
.card p{font-size:.88rem;color:var(--soft);margin:8px 0 0}
.card>svg{display:block;width:100%;overflow:visible;font:13.5px system-ui,sans-serif}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 6px;padding:0;font-size:.85rem}
.legend svg{width:32px;height:10px;margin-right:6px}.card text{fill:var(--soft)}.card .ink{fill:var(--ink)}
.grid{stroke:var(--grid)}.mark{stroke:var(--ink);stroke-width:1.3}.tau{stroke:var(--soft);stroke-dasharray:3 3}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.area{stroke-width:1.6;fill-opacity:.2}.hollow{fill-opacity:.3}
.hit{fill:transparent}.hit:hover{fill:var(--ink);fill-opacity:.12}.ring{stroke-width:2;fill:var(--card)}
"""
for k, pattern in enumerate(DASHES):
    STYLE += f".c{k}{{stroke:var(--c{k})}}.f{k}{{fill:var(--c{k})}}.d{k}{{stroke-dasharray:{pattern}}}\n"


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
    if key in ("gap", "seconds"):
        return f"{100 * value:.2f} points" if key == "gap" else f"{value:,.0f} s"
    if key in FRACTIONS or key.endswith("_right"):
        return per_cent(value)
    return str(value) if not isinstance(value, float) else f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def title_of(key: str, score: str) -> str:
    """What a key of the summary is called."""
    special = {"last": f"{score}, last epoch", "best": f"{score}, best epoch", "gap": "best less last"}
    special |= {"val_selected": f"{score} where the validation curve is best", "corrections": "labels moved in"}
    special |= {"transductive": "train accuracy, by the hidden truth", "correction_precision": "of them right"}
    return special.get(key, key.replace("_", " "))


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
    power = 10.0 ** math.floor(math.log10(rough := (high - low) / count))
    step = max(next(power * k for k in (1, 2, 5, 10) if power * k >= 0.999 * rough), 1.0 if whole else 0.0)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [round(k * step, 10) for k in range(first, last + 1)]


class Axes:
    """From data to the chart's units. Ticks are round numbers; the y range ends on them, the x range is kept."""

    def __init__(self, x: Point, y: Point, whole=False, epochs=True, lines=5, top=TOP, bottom=BOTTOM, right=RIGHT):
        (self.x_low, self.x_high), (low, high) = x if x[0] < x[1] else (x[0] - 1, x[0] + 1), y
        if high - low < 1e-9:  # a flat line still needs a height: one label, or one per cent
            low, high = (low, low + 1) if whole else (low, low + 0.01) if low < 0.99 else (low - 0.01, low)
        self.y_ticks = round_ticks(low, high, lines, whole)
        self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]
        self.x_ticks = [
            t for t in round_ticks(self.x_low, self.x_high, 6, epochs) if self.x_low <= t <= self.x_high
        ]
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


def number(value: float, unit: str = "") -> str:
    """A number on an axis; with unit " %", a fraction in per cent."""
    return f"{round(100 * value if unit else value, 6):,}".removesuffix(".0").replace("-", "\N{MINUS SIGN}") + unit


def frame(a: Axes, y_unit: str = " %", x_unit: str = "", x_label: str = "epoch", e0: int | None = None) -> str:
    """Gridlines with their numbers, what the x axis is, and e0."""
    out = text((LEFT + a.right) / 2, a.bottom + 34, x_label)
    for value in a.y_ticks:
        out += tag("line", "", "grid", x1=LEFT, x2=a.right, y1=a.y(value), y2=a.y(value))
        out += text(LEFT - 6, a.y(value) + 4.5, number(value, y_unit), anchor="end")
    out += "".join(text(a.x(value), a.bottom + 17, number(value, x_unit), "x") for value in a.x_ticks)
    return out + (a.upright(e0, "mark e0", f"e0 = {e0}") if e0 else "")


def thin(points: list[Point], most: int = POINTS) -> list[Point]:
    """About `most` points: of each stretch the lowest and the highest, so that no peak is lost; and both ends."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    stretches = (sorted(points[i : i + size], key=lambda p: p[1]) for i in range(0, len(points), size))
    return sorted({points[0], points[-1]}.union(*((stretch[0], stretch[-1]) for stretch in stretches)))


def curve(a: Axes, points: list[Point], css: str, name: str, ring: int | None = None) -> str:
    """A line through the points, with a ring at the epoch `ring`."""
    title, places = tag("title", escape(name)), " ".join(f"{a.x(x):.1f},{a.y(y):.1f}" for x, y in thin(points))
    line = tag("polyline", title, f"line {css}", points=places) if len(points) > 1 else ""
    rings = (tag("circle", title, f"ring {css[:2]}", cx=a.x(x), cy=a.y(y), r=4) for x, y in points if x == ring)
    return line + "".join(rings)


def hover(a: Axes, rows: Rows, names: dict[str, str]) -> str:
    """Strips that tell the numbers of their epoch under the mouse. `names`: what the rows' keys are called."""
    every = math.ceil(len(rows) / BARS)
    out, size = "", dict(y=a.top, width=a.x(every) - a.x(0), height=a.bottom - a.top)
    for row in rows[every - 1 :: every]:
        numbers = [f"{name} {per_cent(row[key])}" for key, name in names.items() if known(row.get(key))]
        title = tag("title", escape(f"epoch {row['epoch']}: {', '.join(numbers)}"))
        out += tag("rect", title, "hit", x=a.x(row["epoch"] - every / 2), **size)
    return out


def card(title: str, note: str, label: str = "", body: str = "", legend: Iterable = (), height: int = 250) -> str:
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


def points_of(rows: Rows, key: str) -> list[Point]:
    return [(row["epoch"], row[key]) for row in rows if known(row.get(key))]


def over_epochs(rows: Rows, values: Iterable[float], zero: bool = False, **options: object) -> Axes:
    values, epochs = list(values), [row["epoch"] for row in rows]
    return Axes((min(epochs) - 0.5, max(epochs) + 0.5), (0 if zero else min(values), max(values)), **options)


def accuracy_chart(rows: Rows, e0: int | None, score: str) -> str:
    test, val = points_of(rows, "test"), points_of(rows, "val")
    val, same = ([], True) if test == val else (val, False)  # the same: --val test
    title = f"{score} and validation curve" if val else score
    if len(test) < 2:
        one = f"Epoch {test[0][0]}: {score} {per_cent(test[0][1])}" if test else f"No {score} is known"
        one += f", validation {per_cent(val[-1][1])}" if val else ""
        return card(title, f"{one}. A curve needs two epochs.")
    a, best = over_epochs(rows, [y for _, y in test + val]), max(test, key=lambda p: p[1])
    before, after = [p for p in val if p[0] <= (e0 or math.inf)], [p for p in val if e0 and p[0] >= e0]
    legend = [("c0", score)] + [("c1 d1", "validation")] * bool(val)
    legend += [("c1 d2", "after e0: trained on too")] * (len(after) > 1)
    note = f"The circle is the best epoch, {best[0]}: {per_cent(best[1])}. "
    note += "Validation: how often the prediction for a held-out sample is one of its candidates." if val else ""
    note += f"The validation curve is the {score} itself, so e0 was chosen by it." if same else ""
    body = frame(a, e0=e0) + curve(a, before, "c1 d1", "validation") + curve(a, after, "c1 d2", "validation")
    body += curve(a, test, "c0", score, best[0]) + hover(a, rows, {"test": score, "val": "validation"})
    label = f"{title} over the epochs: last {per_cent(test[-1][1])}, best {per_cent(best[1])} at epoch {best[0]}"
    return card(title, note, label, body, legend)


def noise_chart(rows: Rows, found: dict | None, e0: int | None) -> str:
    """The noise level where the truth is known; otherwise what was estimated without it."""
    level, estimate = points_of(rows, "noise_level"), estimated(found)
    if not level:
        return estimate_chart(found) if estimate else card("noise", "Not known: no truth, and no estimate either.")
    first, last = per_cent(level[0][1]), per_cent(level[-1][1])
    note = f"Samples whose true label is not a candidate: {first} at first, {last} in the end."
    note += f" Estimated without any true label: {estimate}." if estimate else ""
    if len(level) < 2:
        return card("noise level", f"Epoch {level[0][0]}: {first}. A curve needs two epochs.")
    a = over_epochs(rows, [y for _, y in level], zero=True)
    body = frame(a, e0=e0) + curve(a, level, "c0", "noise level") + hover(a, rows, {"noise_level": "noise level"})
    return card("noise level", note, f"Noise level over the epochs: from {first} to {last}", body)


def estimate_chart(found: dict) -> str:
    """A bar from the low to the high end of the interval, with the estimate on it."""
    a = Axes((0, max(0.1, 1.1 * found["high"])), (0, 1), epochs=False, lines=1, bottom=80)
    low, high, words = a.x(found["low"]), a.x(found["high"]), f"Estimated noise: {estimated(found)}"
    a.y_ticks.clear()
    body = frame(a, "", " %", "") + a.upright(found["eta"], "mark", per_cent(found["eta"], 1))
    body += tag("rect", "", "f0 c0 hollow", x=low, y=42, width=max(1.0, high - low), height=22)
    note = f"{words}, without any true label: samples whose true label is not a candidate, by the held-out part."
    return card("estimated noise", note, words, body, height=104)


def why_nothing(s: dict, last: int, e0: int | None) -> str:
    reasons = {
        "IRNet is off in this run.": s.get("irnet") is False,
        "e0 was not found, and nothing is corrected before it.": e0 is None,
        f"e0 is {e0}, the last epoch so far, and correction starts after it.": (e0 or 0) >= last,
        "The network is guessed to be right about too few samples.": "known" in s and not known(s.get("tau")),
        "The held-out samples do not show that any truth is missing.": "tau" in s and not known(s["tau"]),
        "No sample was predicted outside its candidates confidently enough (Eqs. 10 to 12).": True,
    }
    return next(reason for reason, holds in reasons.items() if holds)


def moved_chart(rows: Rows, summary: dict, e0: int | None) -> str:
    """Bars: right ones below, wrong ones on top where the truth is known. A bar of a long run is several epochs."""
    size = math.ceil(len(rows) / BARS)
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    counts = [sum(row.get("corrections") or 0 for row in group) for group in groups]
    if not sum(counts):
        return card("labels moved in", f"No label was moved. {why_nothing(summary, rows[-1]['epoch'], e0)}")
    truth = all(known(row.get("correction_precision")) for row in rows if row.get("corrections"))
    a, bars, all_right = over_epochs(rows, counts, zero=True, whole=True), "", 0
    for group, count in zip(groups, counts, strict=True):
        moved = [row for row in group if row.get("corrections")]
        right = round(sum(row["corrections"] * row["correction_precision"] for row in moved)) if truth else count
        all_right, first, last = all_right + right, group[0]["epoch"], group[-1]["epoch"]
        words = f"epoch {first}" + f" to {last}" * (first != last) + f": {count:,} moved in"
        words += f", {right:,} right ({per_cent(right / count)})" if truth and count else ""
        bar, place = tag("title", words), dict(x=a.x(first - 0.42), width=a.x(last + 0.42) - a.x(first - 0.42))
        for css, low, high in ("f0", 0, right), ("f1 c1 hollow", right, count):
            bar += tag("rect", "", css, **place, y=a.y(high), height=a.y(low) - a.y(high)) if low < high else ""
        bars += tag("g", bar) if count else ""
    note = f"{sum(counts):,} labels moved in, "
    note += f"{per_cent(all_right / sum(counts))} of them right." if truth else "how many right is not known."
    legend = [("f0", "right"), ("f1 c1 hollow", "wrong")] if truth else [("f0", "moved in")]
    title = "labels moved in, per epoch" if size == 1 else f"labels moved in, per {size} epochs"
    return card(title, note, note, frame(a, "", e0=e0) + bars, legend)


def margin_chart(margins: Rows, tau: float | None, e0: int | None, last: int) -> str:
    """Histograms of tau of Eq. 4 below each other over one x axis: at e0 and at the end."""
    kinds = [kind for kind in ("clean", "noisy", "all") if any(sum(m.get(kind) or []) for m in margins)]
    if not kinds:
        return card("margins tau (Eq. 4)", "No margins were kept.")
    styles = dict(clean="f0 c0 area", noisy="f1 c1 d1 area", all="f0 c0 area")
    x_range, body = (min(m["low"] for m in margins), max(m["high"] for m in margins)), ""
    for k, m in enumerate(margins):
        shares = {kind: [n / sum(m[kind]) for n in m[kind]] for kind in kinds if sum(m.get(kind) or [])}
        top, highest = TOP + 128 * k, max([n for share in shares.values() for n in share], default=1)
        a = Axes(x_range, (0, highest), epochs=False, lines=3, top=top, bottom=top + 80)
        body += frame(a, x_label="tau" if m is margins[-1] else "") + a.upright(0, "mark zero")
        body += a.upright(-tau, "tau", number(-tau)) if known(tau) else ""
        what = "e0" if m["epoch"] == e0 else "the last" if m["epoch"] == last else ""
        body += text(RIGHT, top - 8, f"epoch {m['epoch']}" + f" ({what})" * bool(what), "ink", "end")
        for kind, share in shares.items():
            wide = (m["high"] - m["low"]) / len(share)
            steps = (f"V{a.y(s):.1f}H{a.x(m['low'] + (i + 1) * wide):.1f}" for i, s in enumerate(share))
            body += tag("path", "", styles[kind], d=f"M{a.x(m['low']):.1f} {a.bottom}{''.join(steps)}V{a.bottom}")
    names = dict(clean="clean: the truth is a candidate", noisy="noisy: it is not", all="all samples")
    note = "Each kind in shares of itself. Below zero, a label outside the candidates is the most probable"
    note += f"; a sample at {number(-tau)} or below may be corrected (Eq. 10)." if known(tau) else "."
    label, legend = "Histograms of the margin tau", [(styles[kind], names[kind]) for kind in kinds]
    return card("margins tau (Eq. 4)", note, label, body, legend, TOP + 128 * len(margins))


def document(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>
"""


def table(pairs: Iterable[tuple[str, str]]) -> str:
    lines = (tag("tr", tag("th", escape(key), scope="row") + tag("td", escape(value))) for key, value in pairs)
    return tag("table", "".join(lines))


def key_figures(s: dict, found: dict | None, score: str) -> str:
    """The line below the heading: only what is known."""
    keys = {"last": f"{score}, last", "best": "best", "gap": "gap"}
    out = [(name, shown(key, s[key])) for key, name in keys.items() if known(s.get(key))]
    if known(s.get("noise_before")):
        levels = shown("noise_before", s["noise_before"]), shown("noise_after", s.get("noise_after"))
        out.append(("noise level", " \N{RIGHTWARDS ARROW} ".join(levels)))
    elif estimated(found):
        out.append(("noise, estimated (95 % interval)", estimated(found).replace("95 % interval ", "")))
    out += [("e0", shown("e0", s["e0"]))] if "e0" in s else []
    right = f", {per_cent(s['correction_precision'])} right" if known(s.get("correction_precision")) else ""
    out += [("labels moved in", f"{s['corrections']:,}{right}")] if known(s.get("corrections")) else []
    pairs = (tag("div", tag("dt", escape(key)) + tag("dd", escape(value))) for key, value in out)
    return tag("dl", "".join(pairs), "figures") if out else ""


def page(
    name: str, rows: Rows, summary: dict, changed: dict, margins: Rows, more: str = "", score: str = "test accuracy"
) -> str:
    """The report of one run -> HTML. `more` is HTML and is put in as it is, before the options."""
    s, title = summary, name
    if "base" in s:
        title = f"{harness.title(s['base'])} {'with' if s.get('irnet') else 'without'} IRNet"
        title += f" on {s.get('dataset')}, seed {s.get('seed')}"
    last = rows[-1]["epoch"] if rows else 0
    e0 = s.get("e0") or (rows[-1].get("e0") if rows else None)
    found = s.get("noise_estimate") or next((r["noise_estimate"] for r in rows if r.get("noise_estimate")), None)
    line = f"Run {name}: {last:,} epoch{'s' * (last != 1)}"
    line += f" of {s['epochs']:,}" if s.get("epochs", last) != last else "" if rows else ", so nothing to draw"
    body = tag("h1", escape(title)) + tag("p", escape(line), "soft") + key_figures(s, found, score)
    if rows:
        charts = accuracy_chart(rows, e0, score) + noise_chart(rows, found, e0) + moved_chart(rows, s, e0)
        body += tag("div", charts + margin_chart(margins, s.get("tau"), e0, last), "charts")
    facts = [(title_of(key, score), shown(key, value)) for key, value in s.items()]
    body += tag("h2", "Summary") + (table(pair for pair in facts if pair[1]) if s else tag("p", "Not written yet."))
    options = [(f"--{key.replace('_', '-')}", "none" if v is None else shown("", v)) for key, v in changed.items()]
    body += f"\n{more}\n" + tag("h2", "Options that differ from the preset")
    body += table(options) if options else tag("p", "none: the preset as it is")
    return document(f"{title} ({name})" if title != name else name, body)


def compare_chart(title: str, runs: Rows, key: str, whole: bool = False, zero: bool = True) -> str:
    """A line a run, with its name at its end where there is room; a circle marks e0."""
    curves = [(run, f"c{k % 6}", f"d{(k + k // 6) % 6}") for k, run in enumerate(runs)]
    curves = [(*some, points) for some in curves if len(points := points_of(some[0]["rows"], key)) > 1]
    values = [y for *_, points in curves for _, y in points]
    if not values or whole and not any(values):
        return card(title, "No label was moved." if values else "Not known, or not two epochs long.")
    a = over_epochs([row for run, *_ in curves for row in run["rows"]], values, zero, whole=whole)
    ends, longest = sorted(a.y(points[-1][1]) for *_, points in curves), max(len(run["name"]) for run, *_ in curves)
    room = longest <= 12 and all(low - high >= 14 for high, low in itertools.pairwise(ends))
    a.right = RIGHT - 8 * longest if room else RIGHT
    body = frame(a, "" if whole else " %")
    for run, colour, dash, points in curves:
        e0, (x, y) = run["summary"].get("e0"), points[-1]
        body += curve(a, points, f"{colour} {dash}", f"{run['name']}, e0 {shown('e0', e0)}", e0)
        body += text(a.x(x) + 6, a.y(y) + 4, run["name"], "ink", "start") if room else ""
    legend = [(f"{colour} {dash}", run["name"]) for run, colour, dash, _ in curves]
    label = f"{title} over the epochs: " + ", ".join(name for _, name in legend)
    return card(title, "", label, body, legend)


def compare(runs: Rows) -> str:
    """Several runs, each dict(name=, rows=, summary=) and perhaps score=, on one page -> HTML."""
    score = " / ".join(dict.fromkeys(run.get("score", "test accuracy") for run in runs))
    charts = compare_chart(score, runs, "test", zero=False) + compare_chart("noise level", runs, "noise_level")
    charts += compare_chart("labels moved in, per epoch", runs, "corrections", whole=True)
    heads = "".join(tag("th", escape(run["name"]), scope="col") for run in runs)
    lines = f"<thead><tr><td></td>{heads}</tr></thead>"
    for key in "last best gap e0 noise_before noise_after corrections correction_precision seconds".split():
        values = [run["summary"].get(key) for run in runs]
        if any(known(value) for value in values):
            cells = "".join(tag("td", escape(shown(key, value))) for value in values)
            lines += tag("tr", tag("th", escape(title_of(key, score)), scope="row") + cells)
    side = tag("div", tag("table", lines), "scroll", tabindex=0, role="region", aria_label="Summaries side by side")
    body = f'<h1>Runs compared</h1><p class="soft">{len(runs)} runs; on a line, the circle is e0.</p>'
    return document("Runs compared", f"{body}{tag('div', charts, 'charts')}<h2>Summaries</h2>{side}")
