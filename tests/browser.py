"""A headless Chromium for tests: what opening a page logs, asks for, and how wide it comes out."""

import dataclasses
import shutil
from pathlib import Path

import pytest

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
