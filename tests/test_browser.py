"""review.html in a real browser, by keys alone: ten decisions made, downloaded, read back. Chromium is driven over
its DevTools pipe, with the standard library."""

import csv
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from crowd.review import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CLASSES = ["cat, small", 'dog "big"', "cow"]
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Enter": 13, "Escape": 27, "Tab": 9}


class Browser:
    """Messages end with a zero byte: written to its descriptor 3, read from its 4."""

    def __init__(self, folder: Path):
        (read_by_it, write), (read, written_by_it) = os.pipe(), os.pipe()
        argv = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-zygote"]
        argv += [f"--user-data-dir={folder}/profile", "--remote-debugging-pipe", "about:blank"]

        def place():  # nothing of the parent's may lie at 3 and 4
            low, high = os.dup(read_by_it), os.dup(written_by_it)
            low, high = (os.dup2(fd, 10 + k) for k, fd in enumerate((low, high)))
            os.dup2(low, 3), os.dup2(high, 4)

        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(argv, preexec_fn=place, close_fds=False, **quiet)
        os.close(read_by_it), os.close(written_by_it)
        self.write, self.read, self.number, self.rest, self.session = write, read, 0, b"", None
        where = dict(behavior="allow", downloadPath=str(folder))
        self("Browser.setDownloadBehavior", **where)
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.messages = []
        self("Runtime.enable")

    def __call__(self, method: str, **parameters) -> dict:
        self.number += 1
        more = dict(sessionId=self.session) if self.session else {}
        os.write(
            self.write, json.dumps(dict(id=self.number, method=method, params=parameters, **more)).encode() + b"\0"
        )
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.read, 65536)
                assert part, "the browser has gone"
                self.rest += part
            text, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.messages.append(answer["params"])
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path) -> None:
        self("Page.enable")
        self("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def value(self, code: str):
        return self("Runtime.evaluate", expression=code, returnByValue=True)["result"].get("value")

    def until(self, code: str) -> None:
        end = time.monotonic() + 20
        while not self.value(code):
            assert time.monotonic() < end, code
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        for key in keys:
            text = dict(text="\r" if key == "Enter" else key) if len(key) == 1 or key == "Enter" else {}
            code = dict(key=key, windowsVirtualKeyCode=KEYS.get(key, ord(key[0].upper())))
            self("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self("Input.dispatchKeyEvent", type="keyUp", **code)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.read), os.close(self.write)


@pytest.fixture
def browser(tmp_path):
    if not CHROMIUM:
        pytest.skip("no Chromium")
    found = Browser(tmp_path)
    yield found
    found.close()


def made_up(n: int) -> str:
    """Two of three voted for the second class, the consensus is the first."""
    small, big, _ = CLASSES
    row = dict(given=f"{small}|{big}", after=f"{small}|{big}", predicted=small, probability="0.9", margin="-0.1",
               flagged="yes", corrected_at="", added="", truth="", split="train", majority=big, consensus=small,
               votes=f"{big}:2|{small}:1", large=False, image=None, likely=[(small, 0.9)])  # fmt: skip
    rows = [row | dict(name=f"im,age <{i}>.png") for i in range(n)]
    return page(rows, CLASSES, "toy", 500, 12)


def decided(path: Path) -> list[tuple[str, str]]:
    end = time.monotonic() + 20
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < end, "nothing was downloaded"
        time.sleep(0.02)
    rows = list(csv.DictReader(path.open(newline="")))
    assert list(rows[0]) == ["file", "decision", "label", "proposed", "given"]
    assert all(row["proposed"] == CLASSES[0] and row["given"] == CLASSES[1] for row in rows)
    assert [row["file"] for row in rows] == [f"im,age <{i}>.png" for i in range(len(rows))]
    return [(row["decision"], row["label"]) for row in rows]


def test_ten_decisions_by_keys_are_kept_downloaded_and_read_back(browser, tmp_path):
    small, big, cow = CLASSES
    Path("review.html").write_text(made_up(12))
    browser.open(Path("review.html"))
    assert browser.value("document.querySelector('#progress').value") == "0 of 12 decided, 12 shown"
    browser.press("a", "k", "3", "n")  # each moves on to the next
    browser.press("c", "ArrowDown", "ArrowDown", "Enter")  # from the list: the second class
    browser.press("n", "ArrowLeft", "u", "k")  # changed one's mind
    browser.press("ArrowRight", "ArrowLeft", "a", "k")
    assert browser.value("document.querySelector('#progress').value") == "8 of 12 decided, 12 shown"
    browser.open(Path("review.html"))  # as after a break: progress is kept, and goes on where it was
    assert browser.value("document.querySelector('#progress').value") == "8 of 12 decided, 12 shown"
    assert browser.value("document.querySelector('[aria-current]').dataset.name") == "im,age <8>.png"
    browser.press("a", "3", "d")
    want = [("accept", small), ("keep", big), ("choose", cow), ("none", ""), ("choose", big), ("keep", big)]
    want += [("accept", small), ("keep", big), ("accept", small), ("choose", cow)]
    assert decided(tmp_path / "decisions.csv") == want and browser.messages == []


def test_the_page_works_by_pointer_and_where_nothing_is_kept(browser, tmp_path):
    """Storage that fails; one button clicked twice is undone; decided ones can be hidden."""
    broken = "Object.defineProperty(window, 'localStorage', {get() { throw Error('no'); }});"
    Path("review.html").write_text(made_up(3).replace('"use strict";', broken))
    browser.open(Path("review.html"))
    click = "document.querySelectorAll('article')[{}].querySelector('[data-do={}]').click()"
    for card, what in ((0, "accept"), (1, "none"), (2, "keep"), (2, "keep")):
        browser.value(click.format(card, what))
    browser.value("document.querySelector('#open').click()")
    assert browser.value("document.querySelector('#progress').value").startswith("2 of 3 decided")
    assert browser.value("document.querySelector('#lost').hidden") is False
    browser.value("document.querySelector('#download').click()")
    assert decided(tmp_path / "decisions.csv") == [("accept", CLASSES[0]), ("none", "")] and not browser.messages
