"""Open a page of a phone's size in an installed Chromium."""

import contextlib
import shutil

import pytest

BROWSERS = (
  "chromium",
  "chromium-browser",
  "google-chrome",
  "google-chrome-stable",
  "chrome",
)
FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-background-networking",
  "--disable-sync",
]


@contextlib.contextmanager
def open_phone():
  """Yield a page, the list of its errors and the list of the URLs that it requests.

  The lists grow while the page is open. Skip the test if Playwright or a browser is not
  installed.
  """
  sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
  )
  path = next(filter(None, map(shutil.which, BROWSERS)), None)
  if path is None:
    pytest.skip(f"no browser is installed (looked for {', '.join(BROWSERS)})")
  errors, requests = [], []
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    yield page, errors, requests
    browser.close()
