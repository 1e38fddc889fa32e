"""review.html: suspicious samples as thumbnails, with the labels they came with and those they leave with. One page
that needs nothing else, not even a network.
"""

from __future__ import annotations

import base64
import html
import io

STYLE = """
:root { color-scheme: light dark; --line: #8884; --in: #2b6cb0; --new: #c05621; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; }
p { margin: .2rem 0; }
form { position: sticky; top: 0; background: Canvas; padding: .6rem 0; border-bottom: 1px solid var(--line); }
select { font: inherit; max-width: 100%; }
main { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr));
    margin-top: 1rem; }
article { border: 1px solid var(--line); border-radius: .5rem; padding: .7rem; overflow-wrap: anywhere; }
article[hidden] { display: none; }
img { width: 8rem; height: 8rem; object-fit: contain; background: #8882; display: block;
    image-rendering: pixelated; }
img.large { image-rendering: auto; }
h2 { font-size: .95rem; margin: .5rem 0 .3rem; }
dl { display: grid; grid-template-columns: auto 1fr; gap: .1rem .6rem; margin: 0; }
dt { color: GrayText; }
dd { margin: 0; }
b { display: inline-block; border: 1px solid var(--in); color: var(--in); border-radius: .3rem; padding: 0 .3rem;
    margin: 0 .2rem .15rem 0; font-weight: 500; }
b.new { border-color: var(--new); color: var(--new); }
meter { width: 3.5rem; vertical-align: middle; }
"""
SCRIPT = """
const choice = document.querySelector("select"), cards = [...document.querySelectorAll("article")];
const count = document.querySelector("output");
function show() {
  let shown = 0;
  for (const card of cards) {
    card.hidden = choice.value !== "" && !card.dataset.classes.split(" ").includes(choice.value);
    shown += !card.hidden;
  }
  count.value = shown + " of " + cards.length + " shown";
}
choice.addEventListener("change", show);
show();
"""


def png(picture) -> str:
    """A PIL image as the address of an <img>."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def page(rows: list[dict], classes: list[str], name: str, total: int, flagged: int) -> str:
    """rows: those of labels.csv to show, each with its name, image (or None) and likely [(class, probability)]."""
    number = {label: k for k, label in enumerate(classes)}
    options = "".join(f'<option value="{k}">{html.escape(label)}</option>' for k, label in enumerate(classes))
    cards = "\n".join(card(row, number) for row in rows)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Review of {html.escape(name)}</title>
<style>{STYLE}</style>
<h1>Review of {html.escape(name)}</h1>
<p>The {len(rows)} most suspicious of {total:,} samples, {flagged:,} of which are flagged: a label outside the given
set is more probable than any inside it. Margin: the most probable label inside less the most probable outside (Eq.
4), by what the run corrects with, in PiCO its prototypes; the bars are the classifier's, which may differ. All
samples are in labels.csv.</p>
<form><label>Class <select><option value="">all</option>{options}</select></label> <output></output></form>
<main>
{cards}
</main>
<script>{SCRIPT}</script>
</html>
"""


def card(row: dict, number: dict[str, int]) -> str:
    e = html.escape
    given, after = row["given"].split("|"), row["after"].split("|")
    touched = {*given, *after, row["predicted"]}
    sizes = ' class="large"' if row["large"] else ""
    image = f'<img{sizes} src="{row["image"]}" alt="{e(row["name"])}">' if row["image"] else ""
    sets = "".join(f"<b>{e(label)}</b>" for label in given)
    facts = [("given", sets)]
    if row["added"]:
        facts.append(("added", f'<b class="new">{e(row["added"])}</b> in epoch {e(row["corrected_at"])}'))
    gone = [label for label in given if label not in after]
    if gone:
        facts.append(("removed", "".join(f"<b>{e(label)}</b>" for label in gone)))
    likely = "<br>".join(
        f'<meter max="1" value="{p:.4f}"></meter> {100 * p:.1f} % {e(label)}' for label, p in row["likely"]
    )
    facts += [("probable", likely), ("margin", e(row["margin"]))]
    facts += [(key, e(row[key])) for key in ("agreement", "truth") if row[key]]
    if row["split"] == "score":
        facts.append(("set aside", "for scoring, so never corrected"))
    items = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in facts)
    touches = " ".join(str(number[label]) for label in sorted(touched) if label in number)
    return f'<article data-classes="{touches}">{image}<h2>{e(row["name"])}</h2><dl>{items}</dl></article>'
