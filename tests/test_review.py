"""review.html: what it shows, what it asks for, and a run's data found again."""

import base64
import html
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

import train
from crowd.__main__ import main
from test_crowd import made, read


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]


def test_the_review_shows_what_labels_csv_says_and_asks_for_nothing_else():
    truth, _ = made(150, Path("mine"))
    text = Path("mine/votes.csv").read_text().replace("circle", "<b>&\"'circle")
    Path("mine/votes.csv").write_text(text)
    argv = "--dataset mine/votes.csv --size 8 --base proden --batch-size 16 --epochs 3 --e0 1 --out r".split()
    assert train.main(argv) == 0
    text, table = Path("r/review.html").read_text(), read("r/labels.csv")
    page = Page(text)
    assert page.tags.count("article") == page.tags.count("img") == 100 and page.tags.count("option") == 5 * 101
    assert all(address.startswith("data:") for address in page.addresses) and "http" not in text
    assert "<b>&\"'circle" not in text and "&lt;b&gt;&amp;&quot;&#x27;circle" in text
    shown = table[:100]
    aside = sum(row["split"] == "score" for row in shown)
    assert 0 < aside == text.count("for scoring, so never corrected")
    assert re.findall(r"<h2>(.*?)</h2>", text) == [row["file"] for row in shown]
    for card, row in zip(text.split("<article")[1:], shown, strict=True):
        heard = dict(part.rsplit(":", 1) for part in row["votes"].split("|"))
        assert all(f"{n} × {html.escape(label)}" in card for label, n in heard.items())
    first = re.search(r'src="data:image/png;base64,(.*?)"', text)[1]
    thumbnail = np.array(Image.open(io.BytesIO(base64.b64decode(first))))
    assert np.array_equal(thumbnail, np.array(Image.open("mine/" + shown[0]["file"])))  # the file, not 8x8
    Path("r/review.html").unlink()
    assert main(["review", "r"]) == 0 and Path("r/review.html").read_text() == text
    Path("mine").rename("moved")
    assert main(["review", "r"]) == 2
    assert main(["review", "r", "--dataset", "moved/votes.csv"]) == 0
    assert Path("r/review.html").read_text() == text
    Path("link.csv").symlink_to("moved/votes.csv")
    assert main(["review", "r", "--dataset", "link.csv"]) == 0
    assert Path("r/review.html").read_text() == text
    assert main(["review", "moved"]) == 2
    Path("r/labels.csv").write_text("")
    assert main(["review", "r"]) == 2


def test_a_review_of_other_arrays_is_refused_and_a_lost_file_is_no_reason_to_fail(monkeypatch, capsys):
    x = np.random.RandomState(0).randint(256, size=(60, 8, 8)).astype(np.uint8)
    np.savez("own.npz", x_train=x, candidates=np.eye(3, dtype=bool)[np.arange(60) % 3])
    np.savez("other.npz", x_train=255 - x, candidates=np.eye(3, dtype=bool)[np.arange(60) % 3])
    assert train.main("--dataset own.npz --base cc --batch-size 8 --epochs 1 --out r".split()) == 0
    assert main(["review", "r"]) == 0 and main(["review", "r", "--dataset", "other.npz"]) == 2
    assert "other.npz" in capsys.readouterr().err
    made(40, Path("mine"))
    original = train.train_epoch

    def epoch(*args, **more):
        Path("mine/images/000.png").unlink(missing_ok=True)
        return original(*args, **more)

    monkeypatch.setattr(train, "train_epoch", epoch)
    assert train.main("--dataset mine/votes.csv --base cc --batch-size 8 --epochs 1 --out s".split()) == 0
    assert Path("s/review.html").exists()
