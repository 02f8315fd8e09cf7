"""The report in a real browser: nothing logged, nothing fetched, nothing cut off, printable."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from test_report_families import everything

from baar_jax.stages import report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
  "--no-sandbox",  # as root there is none
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
)
PHONE, PAPER = (360, 740), (703, 1000)  # pixels; A4 between margins of 12 mm


@dataclasses.dataclass
class Visit:
  """What happened while a page was open.

  Attributes:
    errors: of its console, and of its scripts.
    requests: addresses that were asked for.
  """

  errors: list[str] = dataclasses.field(default_factory=list)
  requests: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="session")
def chromium():
  """A started browser; skips where Playwright or a Chromium is not installed."""
  sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
  found = next((path for name in NAMES if (path := shutil.which(name))), None)
  if found is None:
    pytest.skip(f"no browser is installed (looked for {', '.join(NAMES)})")
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
    yield browser
    browser.close()


def visit(browser, path: Path, width: int, height: int):
  """Opens a file at a viewport of this size; returns the page and its Visit."""
  page, seen = browser.new_page(viewport={"width": width, "height": height}), Visit()
  page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
  page.on("pageerror", lambda error: seen.errors.append(str(error)))
  page.on("request", lambda request: seen.requests.append(request.url))
  page.goto(path.as_uri())
  return page, seen


@pytest.fixture(scope="module")
def index(tmp_path_factory):
  directory = tmp_path_factory.mktemp("browser")
  return report.write_report(everything(directory), directory / "report")


def wide(page) -> bool:
  return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


@pytest.mark.parametrize("size", [PHONE, (1280, 900)])
def test_it_opens_quietly_and_fits(chromium, index, size):
  page, seen = visit(chromium, index, *size)
  page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
  assert not wide(page)
  assert seen.errors == []
  assert seen.requests == [index.as_uri()]
  page.close()


def test_it_prints_all_of_itself(chromium, index, tmp_path):
  page, seen = visit(chromium, index, *PAPER)
  page.emulate_media(media="print", color_scheme="dark")
  assert not wide(page)
  shown = "[...document.querySelectorAll('details p')].every(p => p.checkVisibility())"
  assert page.evaluate(shown)  # open on paper
  page.emulate_media(media="screen")
  assert not page.evaluate(shown)  # closed on the screen
  page.emulate_media(media="print", color_scheme="dark")
  ends = "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right)"
  assert max(page.evaluate(ends)) <= PAPER[0]
  assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
  pdf = page.pdf(path=tmp_path / "report.pdf", format="A4")
  assert pdf[:5] == b"%PDF-" and len(pdf) > 20_000
  assert seen.errors == []
  page.close()
