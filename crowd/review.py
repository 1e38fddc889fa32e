"""review.html: suspicious samples as thumbnails, with the labels they came with and those they leave with. One page
that needs nothing else, not even a network.
"""

from __future__ import annotations

import base64
import csv
import html
import io
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

import data
from crowd import images, votes
from crowd.model import Model
from data import Dataset
from harness import InputError

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
set is more probable than any inside it. Consensus: what votes and network together make most probable. Margin: the
most probable label inside less the most probable outside (Eq. 4), by what the run corrects with, in PiCO its
prototypes; the bars are the classifier's, which may differ. All samples are in labels.csv.</p>
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
    facts += [(key, e(row[key].replace("|", ", "))) for key in ("votes", "consensus", "truth") if row.get(key)]
    if row["split"] == "score":
        facts.append(("set aside", "for scoring, so never corrected"))
    items = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in facts)
    touches = " ".join(str(number[label]) for label in sorted(touched) if label in number)
    return f'<article data-classes="{touches}">{image}<h2>{e(row["name"])}</h2><dl>{items}</dl></article>'


# ------------------------------------------------------------------ of a run


def review(table: str, d: Dataset, p: Tensor, path: str, name: str) -> str:
    """review.html of the run that has just ended: its labels.csv, its data, the probabilities [N + M, C] of the
    training samples and of those set aside for scoring, where its data are, its name."""
    rows, names, total, flagged = suspicious(table)
    chosen, numbers = named(d, names)
    return filled(rows, names, chosen, p[numbers], d.class_names, path, name, total, flagged)


def review_again(folder: Path, path: str | None = None, root: str = "data") -> str:
    """review.html of a finished run, from its files and its data; `path`: where they are now."""
    model = Model(folder)
    path = path or model.config["dataset"]
    try:
        rows, names, total, flagged = suspicious((folder / "labels.csv").read_text(encoding="utf-8"))
    except (OSError, KeyError, IndexError, UnicodeDecodeError):
        raise InputError(
            f"{folder} has no labels.csv, or not as it was: is it the folder of a finished run?"
        ) from None
    if votes.is_table(Path(path)):
        chosen = votes.named_images(Path(path), names, model.config["network"]["size"])
    else:
        c = model.config
        own = dict(min_votes=c["min_votes"], reliability=c["reliability"], classes=c["classes"])
        d = data.load(path, root, c["image_size"] or None, c["limit_train"], c["limit_test"], **own)
        if d.fingerprint() != c["fingerprint"]:  # the run's data, and no other
            raise InputError(f"{path} does not have the data that the run was trained on")
        chosen, _ = named(d, names)
    return filled(rows, names, chosen, model(chosen), model.classes, path, folder.resolve().name, total, flagged)


def suspicious(table: str) -> tuple[list[dict], list[str], int, int]:
    """The first hundred rows of labels.csv, their samples' names; of how many, and how many are flagged."""
    csv.field_size_limit(2**31 - 1)  # a set of ten thousand names is a long field
    rows = list(csv.DictReader(io.StringIO(table, newline="")))
    key, flagged = next(iter(rows[0])), sum(row["flagged"] == "yes" for row in rows)
    return rows[:100], [row.pop(key) for row in rows[:100]], len(rows), flagged


def named(d: Dataset, names: list[str]) -> tuple[Tensor, list[int]]:
    """The images of these samples, and their numbers."""
    n, files = len(d.images), d.sample_names + (d.scored.files if d.scored else [])
    place = {name: i for i, name in enumerate(files)}
    numbers = [place[name] for name in names]
    return torch.stack([d.images[i] if i < n else d.test_images[i - n] for i in numbers]), numbers


def filled(
    rows, names, chosen: Tensor, probs: Tensor, classes: list[str], path: str, name: str, total, flagged
) -> str:
    """The page of these rows, with pictures and probabilities."""
    for row, file, image, p in zip(rows, names, chosen, probs, strict=True):
        row |= dict(name=file, image=None, large=votes.is_table(Path(path)))
        if row["large"]:  # the file itself, not what the network sees of it
            row["image"] = png(images.thumbnail(Path(path).resolve().parent / file, 160, image))
        elif not image.is_floating_point():
            row["image"] = png(to_pil_image(image))
        row["likely"] = [(classes[k], float(p[k])) for k in p.argsort(descending=True)[:4].tolist()]
    return page(rows, classes, name, total, flagged)
