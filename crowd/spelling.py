"""Labels that people typed: one name however it is spelt, and votes that mean nothing."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MEANS_NOTHING = {"unsure", "not sure", "unclear", "uncertain", "unknown", "?", "??", "n/a", "na", "nan", "null"}
MEANS_NOTHING |= {"none", "skip", "skipped", "don't know", "dont know", "idk", "can't tell", "cannot tell"}


def plain(label: str) -> str:
    """As it looks: accents as one character each, runs of any spaces as one space."""
    return " ".join(unicodedata.normalize("NFC", label).split())


def key(label: str) -> str:
    """The same for all spellings of one label: 1, 1.0 and 01; Cat and cat. A single letter keeps its size."""
    label = plain(label)
    if re.fullmatch(r"[0-9]+(\.0*)?", label):
        return label.split(".")[0].lstrip("0") or "0"
    return label.casefold() if len(label) > 1 else label


def one_spelling(counts: dict[str, int], classes: list[str] | None) -> tuple[dict[str, str], list[str]]:
    """How often each label stands as it is spelt -> what it is to be called, and lines about what was changed. With
    the names of all classes, those: a label that is one of them stays."""
    groups: dict[str, list[str]] = {}
    for label in (*(classes or ()), *counts):
        groups.setdefault(key(label), []).append(label)
    numbers = not classes and all(name.isdecimal() for name in groups)
    numbers = numbers and any(len(set(map(plain, group))) > 1 for group in groups.values())
    called, notes = {}, []
    for name, group in groups.items():
        known = [label for label in dict.fromkeys(group) if label in (classes or ())]
        best = plain(max(group, key=lambda label: counts.get(label, 0)))
        best = name if numbers else known[0] if len(known) == 1 else best
        for label in group:
            called[label] = label if label in known or len(known) > 1 else best
        changed = [label for label in dict.fromkeys(group) if called[label] != label]
        if changed and len(set(group)) > 1:
            as_seen = repr if any(plain(label) != best for label in changed) else ascii
            notes.append(
                f"{', '.join(map(as_seen, changed))} is read as {as_seen(best)}; --classes keeps names apart"
            )
    return called, notes


def in_order(labels: Iterable[str]) -> list[str]:
    """Numbers by their value, names by the alphabet."""
    labels = set(labels)
    numbers = all(label.isdecimal() for label in labels)
    return sorted(labels, key=lambda label: (int(label) if numbers else 0, label))


def lists(labels: Iterable[str]) -> dict[str, list[str]]:
    """Labels that are several others with ; or , between them."""
    known, found = set(labels), {}
    for label in known:
        parts = [part.strip() for part in re.split("[;,]", label)]
        if len(parts) > 1 and known.issuperset(parts):
            found[label] = parts
    return found


def meaningless(classes: list[str]) -> list[str]:
    """Lines about classes that look as if they were none."""
    found = [name for name in classes if name.casefold() in MEANS_NOTHING]
    return [f"{name!r} is a class here; --unsure {name!r} leaves such votes out" for name in found]
