"""The pages in a real browser: a silent console, nothing fetched, charts to be seen on a phone and in the dark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optrush.report import bench as report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

LOOK = """(() => {
  const root = document.scrollingElement;
  const charts = [...document.querySelectorAll("svg.chart")].map(s => {
    const box = s.getBoundingClientRect();
    const card = s.parentElement.getBoundingClientRect();
    const over = texts => texts.filter((a, i) => texts.some((b, j) => j > i && a.width && b.width &&
      a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)).length;
    const texts = [...s.querySelectorAll("text")].map(t => t.getBoundingClientRect());
    const out = texts.filter(t => t.width && (t.left < box.left - 1 || t.right > box.right + 1)).length;
    const fill = getComputedStyle(s.querySelector("text")).fill;
    const sizes = [...s.querySelectorAll("text")].map(t => parseFloat(getComputedStyle(t).fontSize));
    const letters = Math.min(...sizes);
    const said = s.getAttribute("role") == "img" && !!s.querySelector("title") && !!s.querySelector("desc");
    const inside = box.right <= card.right;
    return {width: box.width, height: box.height, out, over: over(texts), fill, letters, said, inside};
  });
  return {charts, wide: root.scrollWidth - root.clientWidth, paper: getComputedStyle(document.body).backgroundColor,
          ids: [...document.querySelectorAll("section[id]")].map(s => s.id)};
})()"""
CONSOLE = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


class Browser:
    """A headless Chromium, spoken to through a pipe (the DevTools protocol, messages end with a zero byte)."""

    def __init__(self, profile: Path) -> None:
        given_in, self.writes = os.pipe()
        self.reads, given_out = os.pipe()
        flags = (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-extensions", f"--user-data-dir={profile}",
            "--remote-debugging-pipe", "about:blank",
        )  # fmt: skip
        line = f'exec "$0" "$@" 3<&{given_in} 4>&{given_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, str(CHROMIUM), *flags],
            pass_fds=(given_in, given_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(given_in)
        os.close(given_out)
        self.buffer, self.count, self.events = b"", 0, list[dict[str, Any]]()
        self.session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command; events that come before it are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.count:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            read = os.read(self.reads, 1 << 20)
            assert read, "chromium has ended"
            self.buffer += read
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, dark: bool, height: int = 900) -> SimpleNamespace:
        """What stands there, what was fetched beside the page, what the console says."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Page.navigate", url=page.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())
        seen = self.ask("Runtime.evaluate", expression=LOOK, returnByValue=True)["result"]["value"]
        said = [e for e in self.events if e.get("method") in CONSOLE]
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        fetched = [u for u in asked if u != page.as_uri() and not u.startswith("data:")]
        return SimpleNamespace(**seen, console=said, fetched=fetched)

    def close(self) -> None:
        os.close(self.writes)
        self.process.terminate()
        self.process.wait(240)
        os.close(self.reads)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def _sound(seen: SimpleNamespace, charts: int) -> None:
    assert not seen.console
    assert not seen.fetched
    assert seen.wide <= 0, "the page itself scrolls sideways"
    assert len(seen.charts) >= charts
    for chart in seen.charts:
        assert chart["width"] > 180 and chart["height"] > 30
        assert not chart["out"], "letters are cut off at the chart's edge"
        assert not chart["over"], "letters lie on each other"
        assert chart["letters"] >= 10 and chart["said"] and chart["inside"]


def test_the_browser_tells(browser: Browser, tmp_path: Path) -> None:
    """What the other tests rule out is seen where it is there."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><script>console.error('said')</script><img src='http://127.0.0.1:9/x.png'>"
        "<p style='width: 900px'>wide</p>"
    )
    seen = browser.open(page, 400, dark=False)
    assert seen.console and seen.fetched == ["http://127.0.0.1:9/x.png"] and seen.wide > 0


@pytest.mark.parametrize("width", [390, 1440])
def test_a_ladder(browser: Browser, ladder: list[dict[str, Any]], bench: Callable[..., Path], width: int) -> None:
    for record in ladder:
        record["ceiling_s"] = {} if record["error"] else {"products": 0.27, "head": 0.08, "optimizer": 0.004}
    page = bench(ladder) / report.PAGE
    report.write_bench(page.parent)
    light, dark = browser.open(page, width, dark=False), browser.open(page, width, dark=True)
    for seen in (light, dark):
        _sound(seen, 7)
        assert "ceiling" in seen.ids
        assert seen.charts[0]["height"] > 400 and seen.charts[1]["height"] > 400
    assert light.paper != dark.paper
    assert light.charts[0]["fill"] != dark.charts[0]["fill"]


def test_a_script_in_a_name_stays_text(
    browser: Browser, ladder: list[dict[str, Any]], bench: Callable[..., Path]
) -> None:
    evil = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
    ladder[1] |= {"rung": evil, "ladder": evil, "error": evil, "changes": evil}
    page = bench(ladder) / report.PAGE
    report.write_bench(page.parent)
    _sound(browser.open(page, 400, dark=False), 6)
    title = browser.ask("Runtime.evaluate", expression="document.title", returnByValue=True)["result"]["value"]
    assert title.startswith("Ladder single-gpu, <script>document.title")


@pytest.mark.parametrize("width", [390, 1440])
def test_a_run_and_a_comparison(
    browser: Browser,
    ladder: list[dict[str, Any]],
    bench: Callable[..., Path],
    trained: Path,
    predicted: object,
    width: int,
) -> None:
    first, second = (
        bench(ladder, "first-machine"),
        bench([{**r, "device": "cpu"} for r in ladder[:5]], "second-machine"),
    )
    many = trained.parent / "many.html"
    report.write_run(trained)
    report.write_many([first, second, trained], many)
    _sound(browser.open(trained / report.PAGE, width, dark=True), 6)
    _sound(browser.open(many, width, dark=False), 1)
