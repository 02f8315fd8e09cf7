"""The report in a real browser: nothing logged, nothing fetched, nothing cut off, printable."""

import pytest
from browser import chromium, visit  # noqa: F401  (a fixture)
from test_report_families import everything

from baar_jax import report

PHONE, PAPER = (360, 740), (703, 1000)  # pixels; A4 between margins of 12 mm


@pytest.fixture(scope="module")
def index(tmp_path_factory):
  directory = tmp_path_factory.mktemp("browser")
  return report.write_report(everything(directory), directory / "report")


def wide(page) -> bool:
  return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


@pytest.mark.parametrize("size", [PHONE, (1280, 900)])
def test_it_opens_quietly_and_fits(chromium, index, size):  # noqa: F811
  page, seen = visit(chromium, index, *size)
  page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
  assert not wide(page)
  assert seen.errors == []
  assert seen.requests == [index.as_uri()]
  page.close()


def test_it_prints_all_of_itself(chromium, index, tmp_path):  # noqa: F811
  page, seen = visit(chromium, index, *PAPER)
  page.emulate_media(media="print", color_scheme="dark")
  assert not wide(page)
  shown = "[...document.querySelectorAll('details p')].every(p => p.getBoundingClientRect().height)"
  assert page.evaluate(shown)  # closed on the screen, open on paper
  ends = "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right)"
  assert max(page.evaluate(ends)) <= PAPER[0]
  assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
  pdf = page.pdf(path=tmp_path / "report.pdf", format="A4")
  assert pdf[:5] == b"%PDF-" and len(pdf) > 20_000
  assert seen.errors == []
  page.close()
