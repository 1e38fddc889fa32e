"""The part of report.html about one's own labels, from the run's tables: noise by class, which classes are taken
for which, the annotators, what was moved. HTML without script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape

from crowd.files import rows_of
from crowd.spelling import in_order
from harness.report import tag

FEW, MOST = 12, 15  # classes in a matrix; rows of a list
STYLE = """<style>.own{margin-bottom:24px}.own td,.own th{white-space:nowrap;padding-right:14px}
.heat td{text-align:right;background:color-mix(in srgb,var(--c1) var(--v,0%),
transparent)}.heat .same{background:color-mix(in srgb,var(--c0) var(--v,0%),transparent)}</style>"""


def part_of_report(tables: dict[str, str]) -> str:
    """From labels.csv and annotators.csv; nothing for a named dataset, whose sets are made up."""
    rows = rows_of(tables["labels.csv"])
    if not rows or "p_missing" not in rows[0]:
        return ""
    body = noise(rows) + confused(rows)
    if "annotators.csv" in tables:
        body += annotators(rows_of(tables["annotators.csv"]))
    return STYLE + tag("h2", "Your labels") + body + moved(rows)


def grid(caption: str, head: Iterable[str], lines: Iterable[Iterable[str]], css: str = "") -> str:
    """A table that scrolls sideways by itself; the cells are text, or <td> already."""
    top = "".join(tag("th", escape(word), scope="col") for word in head)
    body = ""
    for first, *cells in lines:
        inside = "".join(c if c.startswith("<td") else tag("td", escape(c)) for c in cells)
        body += tag("tr", tag("th", escape(first), scope="row") + inside)
    inside = tag("table", tag("thead", tag("tr", top)) + tag("tbody", body), css)
    about = tag("p", escape(caption), "soft")
    return about + tag("div", inside, "scroll own", tabindex=0, role="region", aria_label=caption)


def per_cent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def noise(rows: list[dict]) -> str:
    """By the label that a sample has in the end."""
    votes, totals = bool(rows[0]["votes"]), {}
    for row in rows:
        sums = totals.setdefault(row["consensus"] or row["predicted"], [0, 0.0, 0.0])
        values = (1, float(row["p_majority_wrong"] or 0), float(row["p_missing"]))
        totals[row["consensus"] or row["predicted"]] = [a + b for a, b in zip(sums, values, strict=True)]
    worst = sorted(totals.items(), key=lambda item: -(item[1][1] + item[1][2]) / item[1][0])
    total = [sum(values) for values in zip(*totals.values(), strict=True)]
    lines = [
        [name, f"{n:,}", *([per_cent(wrong, n)] if votes else []), per_cent(missing, n)]
        for name, (n, wrong, missing) in [("all", total), *worst[:MOST]]
    ]
    more = f", the {MOST} noisiest of {len(worst)}" if len(worst) > MOST else ""
    said = "consensus" if any(row["consensus"] for row in rows) else "the network"
    caption = (
        f"Noise by class ({said} for the class{more}): the means of labels.csv's chances that the label given is "
        "wrong. They put the classes in order; the rate is the noise estimate"
    )
    return grid(caption, ["class", "samples", *(["majority wrong"] if votes else []), "truth not given"], lines)


def confused(rows: list[dict]) -> str:
    """What was said where the consensus is another label."""
    said, given = Counter(), Counter()
    for row in rows:
        for part in filter(None, row["votes"].split("|")):
            label, n = part.rsplit(":", 1)
            said[row["consensus"], label] += int(n)
            given[row["consensus"]] += int(n)
    names = in_order({name for pair in said for name in pair})
    if not names:
        return ""
    if len(names) > FEW:
        pairs = [(pair, n) for pair, n in said.most_common() if pair[0] != pair[1]][:MOST]
        lines = [[truth, label, f"{n:,}", per_cent(n, given[truth])] for (truth, label), n in pairs]
        caption = "Confusions: the most frequent wrong votes, and their share of all votes on that class"
        return grid(caption, ["consensus", "said", "votes", "share"], lines)

    def cell(truth: str, label: str) -> str:
        share = said[truth, label] / max(1, given[truth])
        words = f"{100 * share:.1f}" if said[truth, label] else ""
        return tag("td", words, "same" if truth == label else "", style=f"--v:{70 * min(1, share):.0f}%")

    lines = [[truth, *(cell(truth, label) for label in names)] for truth in names]
    caption = "Confusions: a row is the consensus, a column what was said, in per cent of the votes of the row"
    return grid(caption, ["", *names], lines, "heat")


def annotators(rows: list[dict]) -> str:
    lines = [
        [
            row["annotator"],
            f"{int(row['votes']):,}",
            "{:.1f} % ({:.1f} to {:.1f})".format(*(100 * float(row[key]) for key in ("accuracy", "low", "high"))),
            f"{100 * float(row['agreement']):.1f} %",
            f"{row['confusion']} ({float(row['times']):,.0f})" if row["confusion"] else "-",
        ]
        for row in rows[: 2 * MOST]
    ]
    more = f", the first {2 * MOST} of {len(rows)}" if len(rows) > 2 * MOST else ""
    head = ["annotator", "votes", "accuracy (95 %)", "agreement", "commonest mistake"]
    return grid(f"Annotators, the least accurate first{more}", head, lines)


def moved(rows: list[dict]) -> str:
    """Labels moved in, by what they were and what came."""
    pairs, right = Counter(), Counter()
    for row in rows:
        if row["added"]:
            pair = row["given"].replace("|", ", "), row["added"]
            pairs[pair] += 1
            right[pair] += row["consensus"] == row["added"]
    if not pairs:
        return tag("p", "No label was moved into a set.", "soft")
    votes = bool(rows[0]["votes"])
    lines = [
        [given, label, f"{n:,}", *([f"{right[given, label]:,}"] if votes else [])]
        for (given, label), n in pairs.most_common(MOST)
    ]
    caption = f"Labels moved in: {sum(pairs.values()):,} samples, the most frequent of {len(pairs):,} kinds"
    return grid(caption, ["given", "moved in", "samples", *(["also the consensus"] if votes else [])], lines)
