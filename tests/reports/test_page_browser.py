"""The page in a real browser, from a file, without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from startup_fsm.engines.faults import FAULTS
from startup_fsm.reading import read_starts
from startup_fsm.reports.page.budget_table import FORMULA, evaluate
from startup_fsm.reports.page.render import asset
from tests.reports.page_grid import grid
from tests.reports.page_starts import HUGE, LOG, hostile_start, page_of

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'startup-fsm[test]'")

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PANELS = ["verdict", "memory", "time", "checks", "ledger", "plan", "travel", "what-if", "events"]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class Opened:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, "offline": True, **options})
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        self.address = path.as_uri()
        self.page.goto(self.address)
        self.until("document.documentElement.dataset.ready !== undefined")

    def value(self, script: str) -> Any:
        """What a script gives in the page."""
        return self.page.evaluate(script)

    def until(self, condition: str) -> None:
        """Wait for a condition; what waits inside the page would need to evaluate text there, which it refuses."""
        deadline = time.monotonic() + 10
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(20)

    def texts(self, selector: str) -> list[str]:
        """Texts of all that a selector finds."""
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Open a page; afterwards nothing may have been said or asked for."""
    pages: list[Opened] = []

    def open_page(path: Path, **options: Any) -> Opened:
        pages.append(Opened(browser, path, **options))
        return pages[-1]

    yield open_page
    for each in pages:
        each.context.close()
        assert each.said == []
        assert [url for url in each.asked if url != each.address and not url.startswith("data:")] == []


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 8 ranks with 2,000 events each."""
    spec = importlib.util.spec_from_file_location("report_page", ROOT / "benchmarks" / "report_page.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    directory = tmp_path_factory.mktemp("eight")
    run = benchmark.written_start(directory, ranks=8, events=2_000)
    return drawn(run, directory / "report.html")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a start that came to ready."""
    return started(tmp_path_factory.mktemp("ready"))


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an imported log."""
    directory = tmp_path_factory.mktemp("logged")
    (directory / "vllm.log").write_text(LOG)
    return drawn(directory / "vllm.log", directory / "report.html")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """One call of the command line."""
    ran = [sys.executable, "-m", "startup_fsm", *words]
    # A start of another test in this process must not look like ours.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STARTUP_FSM_")}
    return subprocess.run(ran, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120, check=False)


def drawn(source: Path, page: Path) -> Path:
    """The report of a path."""
    said = command("report", str(source), "-o", str(page))
    assert said.returncode == 0, said.stderr
    return page


def started(directory: Path, *words: str) -> Path:
    """The page of a start of the reference engine."""
    command("demo", "--device", "sim", *words, "--runs", str(directory / "runs"))
    return drawn(directory / "runs", directory / "report.html")


def is_whole(opened: Opened) -> None:
    """All panels in order, each with its pictures, and nothing wider than the screen."""
    assert opened.value("[...document.querySelectorAll('main > section')].map((each) => each.id)") == PANELS
    widths = opened.value("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    empty = "[...document.querySelectorAll('.picture')].filter((each) => each.childElementCount === 0).length"
    assert opened.value(empty) == 0
    assert opened.page.locator("#verdict .outcome").first.inner_text()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_faults(fault: str, tmp_path: Path, opened: Callable[..., Opened]):
    """The page of each fault of the reference engine opens whole, on a desk and on a phone, light and dark."""
    page = started(tmp_path, "--fault", fault)
    for size, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
        is_whole(opened(page, viewport=size, color_scheme=scheme))


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["ready", "logged", "eight"])
def test_pages(name: str, scheme: str, size: Any, request: pytest.FixtureRequest, opened: Callable[..., Opened]):
    """A start that came to ready, an imported log and 8 ranks open whole as well."""
    is_whole(opened(request.getfixturevalue(name), viewport=size, color_scheme=scheme))


def test_soon_usable(eight: Path, opened: Callable[..., Opened]):
    """The page of 8 ranks with 2,000 events can be used within a second."""
    times = [int(opened(eight).value("document.documentElement.dataset.ready")) for _ in range(3)]

    assert min(times) < 1_000


def test_slider(ready: Path, opened: Callable[..., Opened]):
    """The slider moves by keys from stop to stop, says where it is, and the pictures follow."""
    page = opened(ready).page
    slider = page.locator("#slider")
    last = slider.get_attribute("aria-valuetext") or ""
    slider.focus()
    slider.press("Home")
    first = slider.get_attribute("aria-valuetext") or ""
    slider.press("ArrowRight")

    assert last.endswith("verify, left")
    assert first.endswith("seq 2: init_device, entered")
    assert (slider.get_attribute("aria-valuetext") or "").endswith("init_device, left")
    assert page.locator("#memory .state-row.now .name").text_content() == "init_device"
    assert page.locator("#plan .node.now").get_attribute("data-state") == "init_device"
    page.get_by_role("button", name="To the next edge").click()
    assert "load_weights, entered" in page.locator(".moment").inner_text()
    assert "stop 3 of" in page.locator("#travel").inner_text()


def test_frames_come_from_python(ready: Path, opened: Callable[..., Opened]):
    """What the slider shows is the frame that Python folded, byte by byte."""
    page = opened(ready)
    rank = orjson.loads(page.value("document.getElementById('report').textContent"))["ranks"][0]
    page.page.locator("#slider").fill("5")
    row = rank["memory"][rank["frames"][5][5]]
    sizes = dict(zip((name for name, _ in rank["accounts"]), row[4:], strict=False))
    shown = page.texts("#travel .two > div:first-child tbody tr")

    assert shown[0].split("\t")[:2] == ["outside torch", f"{sizes['outside torch'] / 2**20:,.2f} MiB"]
    assert shown[-1].split("\t")[:2] == ["free", f"{row[1] / 2**20:,.2f} MiB"]


def test_checks_can_be_filtered(ready: Path, opened: Callable[..., Opened]):
    """Rows stay that have all the words, the result and the state that were asked for."""
    page = opened(ready).page
    rows = page.locator("#checks tbody tr")
    count = rows.count()
    page.get_by_label("Filter").fill("POOL fresh")
    names = [text.strip() for text in rows.locator("th").all_inner_texts()]
    page.get_by_label("State", exact=True).select_option("teardown")

    assert count > 20
    assert names == ["pool_fresh", "pool_fresh"]
    assert page.locator("#checks .empty").inner_text() == "No row has all of that."
    page.get_by_label("Filter").fill("")
    assert {text.strip() for text in rows.locator("td:nth-child(2)").all_inner_texts()} == {"teardown"}


def test_events_can_be_searched(ready: Path, opened: Callable[..., Opened]):
    """A slash goes to the search; it finds lines with all the words, and says how many."""
    whole = opened(ready)
    page = whole.page
    page.locator("body").press("/")
    page.keyboard.type("graph_captured size 32")
    whole.until("document.querySelectorAll('#events tbody tr').length < 9")
    found = page.locator("#events tbody tr").all_inner_texts()

    # The two graphs of that size, and whatever took 32 ms.
    assert all("graph_captured" in text and "size" in text and "32" in text for text in found)
    meant = [place for place, text in enumerate(found) if "size 32 " in text]
    assert len(meant) == 2
    assert page.locator("#events .count").inner_text().startswith(f"{len(found)} of ")
    page.locator("#events tbody tr button").nth(meant[1]).click()
    assert "capture_graphs, graph of size 32" in page.locator(".moment").inner_text()
    page.locator("#events-from-here").click()
    assert "from seq" in page.locator("#events .count").inner_text()


def test_many_events(eight: Path, opened: Callable[..., Opened]):
    """A first screenful is shown, and more on request; a rank can be chosen."""
    whole = opened(eight)
    page = whole.page
    assert page.locator("#events tbody tr").count() == 200
    page.locator("#more-events").click()
    assert page.locator("#events tbody tr").count() == 400
    page.locator("#event-rank").select_option("3")
    whole.until("document.querySelector('#events .count').textContent.startsWith('1,99')")
    assert page.locator("#events tbody tr td").first.inner_text() == "rank 3"


def test_ranks(eight: Path, opened: Callable[..., Opened]):
    """Choosing a rank changes every picture that is about one."""
    page = opened(eight).page
    page.locator("#rank").select_option("5")

    assert "States of rank 5" in page.locator("#time").inner_text()
    assert "The way of rank 5" in page.locator("#plan").inner_text()
    assert page.locator("#time .lane.now .name").text_content() == "rank 5"
    assert page.locator("#travel tr.here th").inner_text() == "rank 5"
    assert page.locator("#what-if table").nth(1).locator("tbody tr").count() == 8


SHIPPED = """
(inputs) => {
  const report = JSON.parse(document.getElementById("report").textContent);
  SCRIPT
  return inputs.map(evaluate);
}
"""


def test_formula(ready: Path, opened: Callable[..., Opened]):
    """On a thousand points the page computes what Python computes, every step of it."""
    inputs = [each for _, each in grid()]
    page = opened(ready)
    script = asset("js/what_if.js")
    assert script in page.value("[...document.scripts].map((each) => each.textContent).join('')")
    computed = page.page.evaluate(SHIPPED.replace("SCRIPT", script), inputs)

    assert len(computed) == 1_000
    steps = [name for name, _, _ in FORMULA]
    for point, there in zip(inputs, computed, strict=True):
        here = evaluate(point)
        assert {name: there[name] for name in steps} == {name: here[name] for name in steps}


def test_what_if(ready: Path, opened: Callable[..., Opened]):
    """Other settings give other numbers, those of the formula, and the way back is one button."""
    page = opened(ready).page
    data = orjson.loads(page.evaluate("document.getElementById('report').textContent"))
    known = data["ranks"][0]["what_if"]
    result = page.locator("#wi-result")
    blocks = int(result.get_attribute("data-blocks") or 0)
    page.locator("#wi-share").fill("0.7")
    page.locator("#wi-graphs").select_option(str(len(known["choices"]) - 1))
    expected = evaluate(known["inputs"] | {"utilization": 0.7, "graphs": 0})

    assert blocks == evaluate(known["inputs"])["blocks"]
    assert int(result.get_attribute("data-blocks") or 0) == expected["blocks"]
    page.locator("#wi-longest").fill("90000000")
    assert "Does not fit" in result.inner_text()
    assert int(result.get_attribute("data-missing") or 0) > 0
    page.get_by_role("button", name="as it was").click()
    assert int(result.get_attribute("data-blocks") or 0) == blocks


def test_what_if_says_what_is_not_reserved(tmp_path: Path, opened: Callable[..., Opened]):
    """A start that fits on paper and reserves nothing for its graphs is not called right."""
    page = opened(started(tmp_path, "--fault", "graphs-not-reserved")).page

    assert "The graphs take" in page.locator("#wi-result .warning").inner_text()


def test_keyboard(ready: Path, opened: Callable[..., Opened]):
    """Tab goes through everything that can be used, in the order of the page, and each has a name and a ring."""
    page = opened(ready).page
    seen: list[str] = []
    for _ in range(400):
        page.keyboard.press("Tab")
        here = page.evaluate(
            """() => {
              const it = document.activeElement;
              if (it === document.body) return null;
              const name = it.getAttribute("aria-label") || it.labels?.[0]?.textContent || it.textContent;
              const ring = getComputedStyle(it).outlineStyle;
              return [it.closest("section")?.id || "", name.trim(), ring];
            }"""
        )
        if here is None:
            break
        panel, name, ring = here
        assert name, panel
        assert ring != "none", (panel, name)
        if panel and (not seen or seen[-1] != panel):
            seen.append(panel)

    assert seen == [panel for panel in PANELS if panel in seen]
    assert {"checks", "travel", "what-if", "events"} <= set(seen)


def test_skip_link(ready: Path, opened: Callable[..., Opened]):
    """The first thing that a keyboard comes to leads past the menu."""
    page = opened(ready).page
    page.keyboard.press("Tab")

    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"


def test_names(eight: Path, opened: Callable[..., Opened]):
    """Controls, tables, pictures and panels have names for screen readers, and headings are in order."""
    value = opened(eight).value
    nameless = """[...document.querySelectorAll("input, select, button, a")].filter((each) =>
      !(each.getAttribute("aria-label") || each.labels?.[0]?.textContent || each.textContent).trim()).length"""
    levels = value("[...document.querySelectorAll('h2, h3')].map((each) => Number(each.tagName[1]))")

    assert value(nameless) == 0
    assert value("document.querySelectorAll('table:not(:has(caption))').length") == 0
    assert value("document.querySelectorAll('.picture:not([role=img][aria-label])').length") == 0
    assert value("document.querySelectorAll('main > section:not([aria-labelledby])').length") == 0
    assert levels[0] == 2
    assert value("document.documentElement.lang") == "en"


def test_theme(ready: Path, opened: Callable[..., Opened]):
    """The page follows the system, and a button overrides it."""
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = opened(ready, color_scheme="light"), opened(ready, color_scheme="dark")
    bright, dim = light.value(background), dark.value(background)
    light.page.locator("#theme").click()
    light.page.locator("#theme").click()

    assert bright != dim
    assert light.page.locator("#theme").inner_text() == "theme: dark"
    assert light.value(background) == dim


def test_print(ready: Path, opened: Callable[..., Opened]):
    """On paper there are no controls, and the colours are those of paper."""
    page = opened(ready, color_scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")

    assert not page.locator("nav").is_visible()
    assert not page.locator("#slider").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")


def test_drawings_follow_the_width(ready: Path, opened: Callable[..., Opened]):
    """A picture is drawn again when the window changes, so that its letters stay legible."""
    whole = opened(ready)
    page = whole.page
    page.set_viewport_size(PHONE)
    whole.until("document.querySelector('#memory svg.drawing').getBoundingClientRect().width <= 390")
    smallest = page.evaluate(
        """Math.min(...[...document.querySelectorAll("svg.drawing text")].map((each) =>
          parseFloat(getComputedStyle(each).fontSize) * each.closest("svg").getBoundingClientRect().width
            / each.closest("svg").viewBox.baseVal.width))"""
    )

    assert smallest >= 11


@pytest.mark.parametrize("text", [None, HUGE], ids=["markup", "huge"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_hostile(text: str | None, size: Any, tmp_path: Path, opened: Callable[..., Opened]):
    """A hostile journal changes nothing: no script of it runs, no element of it exists, the layout holds."""
    start = hostile_start() if text is None else hostile_start(text=text)
    path = tmp_path / "hostile.html"
    path.write_text(page_of(start))
    page = opened(path, viewport=size)
    page.page.locator("#slider").press("Home")
    page.page.locator("#event-search").fill("script")
    is_whole(page)

    assert page.value("window.harmed") is None
    assert page.value("document.querySelectorAll('script').length") == 3
    foreign = "img, iframe, object, embed, form, base, svg [onload], [onerror], [style*=display]"
    assert page.value(f"document.querySelectorAll('{foreign}').length") == 0
    assert page.value("document.querySelectorAll('style').length") == 1
    assert page.value("getComputedStyle(document.body).display") == "block"
    if text is None:
        assert "<script>window.harmed" in page.value("document.getElementById('events').textContent")


def test_nothing_runs_that_is_not_ours(ready: Path, browser: Browser):
    """The policy itself holds: what a script of the page would add is refused."""
    page = Opened(browser, ready)
    page.value(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.harmed = 1";
          document.body.append(script);
          document.body.setAttribute("style", "display: none");
        }"""
    )
    reached = page.value("fetch('https://example.com').then(() => 'reached', () => 'refused')")
    page.context.close()

    assert reached == "refused"
    assert sum("Content Security Policy" in each for each in page.said) >= 3
    assert [url for url in page.asked if url.startswith("http")] == []


def test_same_words_as_the_doctor(logged: Path, opened: Callable[..., Opened]):
    """The page of a log says that its memory was printed and not read, and names no path."""
    text = opened(logged).page.locator("main").inner_text()

    assert "as the log printed it, no reading" in text
    assert "The log printed" in text
    assert str(logged.parent) not in text
    assert re.search(r"read from\s+vllm path-\d", text)
    assert read_starts(logged.parent / "vllm.log")[0].source == "vllm"
