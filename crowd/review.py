"""review.html: suspicious samples as thumbnails, with the labels they came with and those they leave with, to be
decided on by keys or buttons; the decisions are downloaded. One page that needs nothing else, not even a network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

import data
from crowd import files, images
from crowd.model import Model
from crowd.outside import SURE
from data import Dataset
from harness import InputError
from harness.options import PRESETS, READING

HERE = Path(__file__).parent
FEW = 100  # classes to choose from in a list; more are typed


def png(picture) -> str:
    """A PIL image as the address of an <img>."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def page(rows: list[dict], classes: list[str], name: str, total: int, flagged: int, column: str = "file") -> str:
    """rows: those of labels.csv to show, each with its name, image (or None) and likely [(class, probability)]."""
    e, number = html.escape, {label: k for k, label in enumerate(classes)}
    options = "".join(f'<option value="{k}">{e(label)}</option>' for k, label in enumerate(classes))
    names = "".join(f"<option>{e(label)}</option>" for label in classes)
    cards = "\n".join(card(row, number, names if len(classes) <= FEW else "") for row in rows)
    known = json.dumps([name, classes, [row["name"] for row in rows]])
    digest = hashlib.blake2b(known.encode(), digest_size=12).hexdigest()  # progress is kept under it
    style, script = ((HERE / file).read_text(encoding="utf-8") for file in ("review.css", "review.js"))
    numbers = ", or by its number: " + ", ".join(f"{k} {label}" for k, label in enumerate(classes, 1))
    keys = f"""<kbd>a</kbd> accept the proposed label, <kbd>k</kbd> keep the given one, <kbd>c</kbd> choose another
(then <kbd>Enter</kbd>){e(numbers) if len(classes) < 10 else ""}, <kbd>n</kbd> none of these, <kbd>u</kbd> undo,
<kbd>&larr;</kbd> <kbd>&rarr;</kbd> move, <kbd>d</kbd> download"""
    return f"""<!doctype html>
<html lang="en" data-key="{digest}" data-column="{column}">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Review of {e(name)}</title>
<style>{style}</style>
<h1>Review of {e(name)}</h1>
<p>The {len(rows)} most suspicious of {total:,} samples, {flagged:,} of which are flagged: a label outside the given
set is more probable than any inside it. Proposed: what votes and network together make most probable; without
votes, the network alone. Margin: the most probable label inside less the most probable outside (Eq. 4), by what the
run corrects with, in PiCO its prototypes; the bars are the classifier's, which may differ. All samples are in
labels.csv.</p>
<p class="soft">Keys: {keys}. Then <code>python train.py --dataset ... --decisions decisions.csv</code>.</p>
<p id="lost" hidden>This browser keeps nothing for this page: download before you close it.</p>
<form><label>Class <select id="of-class"><option value="">all</option>{options}</select></label>
<label><input type="checkbox" id="open"> undecided only</label>
<button type="button" id="download">Download decisions.csv</button>
<output id="progress" aria-live="polite"></output></form>
<datalist id="names">{names if len(classes) > FEW else ""}</datalist>
<main>
{cards}
</main>
<script>{script}</script>
</html>
"""


def most_voted(row: dict) -> str:
    """The label that a sample came with: the most frequent one, or, where several are, these; a set as it is."""
    if not row.get("votes"):
        return row["given"]
    counts = [(label, int(n)) for label, n in (part.rsplit(":", 1) for part in row["votes"].split("|"))]
    return "|".join(label for label, n in counts if n == max(n for _, n in counts))


def card(row: dict, number: dict[str, int], names: str) -> str:
    e = html.escape
    given, after = row["given"].split("|"), row["after"].split("|")
    stay = set(after)  # perhaps thousands
    touched = {*given, *after, row["predicted"], row.get("consensus") or row["predicted"]}
    sizes = ' class="large"' if row["large"] else ""
    image = f'<img{sizes} src="{row["image"]}" alt="{e(row["name"])}">' if row["image"] else ""
    sets = "".join(f"<b>{e(label)}</b>" for label in given)
    facts = [("given", sets)]
    if row["added"]:
        facts.append(("added", f'<b class="new">{e(row["added"])}</b> in epoch {e(row["corrected_at"])}'))
    gone = [label for label in given if label not in stay]
    if gone:
        facts.append(("removed", "".join(f"<b>{e(label)}</b>" for label in gone)))
    likely = "<br>".join(
        f'<meter max="1" value="{p:.4f}"></meter> {100 * p:.1f} % {e(label)}' for label, p in row["likely"]
    )
    facts += [("probable", likely), ("margin", e(row["margin"]))]
    if row.get("votes"):
        heard = ", ".join(" × ".join(part.rsplit(":", 1)[::-1]) for part in row["votes"].split("|"))
        facts.append(("votes", e(heard)))
    facts += [(key, e(row[key].replace("|", ", "))) for key in ("consensus", "decided", "truth") if row.get(key)]
    if row.get("p_outside") and float(row["p_outside"]) >= SURE:
        facts.append(("belongs to", f"no class, with a chance of {100 * float(row['p_outside']):.0f} %"))
    if row["split"] == "score":
        facts.append(("set aside", "for scoring, so never corrected"))
    items = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in facts)
    touches = " ".join(str(number[label]) for label in sorted(touched) if label in number)
    proposed, kept = row.get("consensus") or row["predicted"], most_voted(row)
    about = dict(classes=touches, name=row["name"], proposed=proposed, kept=kept)
    about = " ".join(f'data-{key}="{e(value)}"' for key, value in about.items())
    return (
        f'<article {about} tabindex="-1" aria-label="{e(row["name"])}">{image}<h2>{e(row["name"])}</h2>'
        f"<dl>{items}</dl>{buttons(proposed, kept, names)}</article>"
    )


def buttons(proposed: str, kept: str, names: str) -> str:
    e, given = html.escape, kept.replace("|", " or ")
    keep = f'<button type="button" data-do="keep">keep {e(given)} <kbd>k</kbd></button>' if kept != proposed else ""
    choose = '<input class="choose" list="names" placeholder="another" aria-label="another class">'
    if names:
        choose = (
            f'<select class="choose" aria-label="another class"><option value="">another</option>{names}</select>'
        )
    return f"""<div class="decide"><button type="button" data-do="accept">accept {e(proposed)} <kbd>a</kbd></button>
{keep}<span>{choose} <kbd>c</kbd></span>
<button type="button" data-do="none">none of these <kbd>n</kbd></button></div>
<output class="verdict"></output>"""


# ------------------------------------------------------------------ of a run


def review(table: str, d: Dataset, p: Tensor, path: str, name: str) -> str:
    """review.html of the run that has just ended: its labels.csv, its data, the probabilities [N + M, C] of the
    training samples and of those set aside for scoring, where its data are, its name."""
    found = suspicious(table)
    chosen, numbers = named(d, found.names)
    return filled(found, chosen, p[numbers], d.class_names, path, name)


def review_again(folder: Path, path: str | None = None, root: str = "data") -> str:
    """review.html of a finished run, from its files and its data; `path`: where they are now."""
    model = Model(folder)
    path = path or model.config["dataset"]
    try:
        found = suspicious((folder / "labels.csv").read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, KeyError, IndexError, ValueError):
        raise InputError(
            f"{folder} has no labels.csv, or not as it was: is it the folder of a finished run?"
        ) from None
    if path not in PRESETS and files.has_images(Path(path)):
        chosen = files.named_images(Path(path), found.names, model.config["network"]["size"])
    else:
        c = model.config
        own = {name: c[name] for name in READING if name in c}
        d = data.load(path, root, c["image_size"] or None, c["limit_train"], c["limit_test"], **own)
        if d.fingerprint() != c["fingerprint"]:  # the run's data, and no other
            raise InputError(f"{path} does not have the data that the run was trained on")
        chosen, _ = named(d, found.names)
    return filled(found, chosen, model(chosen), model.classes, path, folder.resolve().name)


@dataclass
class Suspicious:
    """The first hundred rows of labels.csv, and of what."""

    rows: list[dict]
    names: list[str]  # of their samples
    column: str  # that these stand in
    total: int
    flagged: int


def suspicious(table: str) -> Suspicious:
    rows = files.rows_of(table)
    key, flagged = next(iter(rows[0])), sum(row["flagged"] == "yes" for row in rows)
    return Suspicious(rows[:100], [row.pop(key) for row in rows[:100]], key, len(rows), flagged)


def named(d: Dataset, names: list[str]) -> tuple[Tensor, list[int]]:
    """The images of these samples, and their numbers."""
    n, files = len(d.images), d.sample_names + (d.scored.files if d.scored else [])
    place = {name: i for i, name in enumerate(files)}
    numbers = [place[name] for name in names]
    return torch.stack([d.images[i] if i < n else d.test_images[i - n] for i in numbers]), numbers


def filled(found: Suspicious, chosen: Tensor, probs: Tensor, classes: list[str], path: str, name: str) -> str:
    """The page of these rows, with pictures and probabilities."""
    has_files = path not in PRESETS and files.has_images(Path(path))
    for row, file, image, p in zip(found.rows, found.names, chosen, probs, strict=True):
        row |= dict(name=file, image=None, large=has_files)
        if has_files:  # the file itself, not what the network sees of it
            row["image"] = png(images.thumbnail(files.home(Path(path)) / file, 160, image))
        elif not image.is_floating_point():
            row["image"] = png(to_pil_image(image))
        row["likely"] = [(classes[k], float(p[k])) for k in p.argsort(descending=True)[:4].tolist()]
    return page(found.rows, classes, name, found.total, found.flagged, found.column)
