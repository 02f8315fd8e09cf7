"""Check what the report's page shows, and that it loads nothing."""

import copy
import dataclasses
import html
import re
from pathlib import Path

import pytest
from report_store import BOUNDARIES, EVERY, FEW, Played, config, figures

from baar_jax.report import page
from baar_jax.report.compare import Results


@pytest.fixture(scope="module")
def results() -> Results:
  """Compute results of every family, with ablations."""
  settings = config()
  settings.baselines.judge.max_completion_tokens = 1
  return figures(EVERY, settings)


@pytest.fixture(scope="module")
def index(results, tmp_path_factory) -> Path:
  return page.write(results, tmp_path_factory.mktemp("report") / "report")


def read_text(text: str) -> str:
  """Return the visible words of a page, in one line."""
  body = text[text.index("<main>") :]
  return " ".join(html.unescape(re.sub("<[^>]*>", " ", body)).split())


def check_that_it_loads_nothing(text: str) -> None:
  assert not re.search(r"<(script|link|iframe|form|a)\b|<[^>]*(\son\w+=|url\()", text)
  assert set(re.findall('src="(.{15})', text)) <= {"data:image/png;"}


def test_the_page_shows_the_results(index):
  shown = read_text(index.read_text())
  # BoPO reaches LARGE's score for 1/8 of the way to its dollars: 1 - (1/8) / 2.
  claim = "The BoPO beats a random mix of both models in mean score: area 0.94 ["
  assert shown.startswith(claim)
  for words in (
    # By K: BoPO (1 + 1 + 0 + 0) / 4; First-Large (1 + .2 + 1 + 0) / 4.
    "K BoPO Over First-Large First-Large 1 50.0 – – 2 – – 55.0 ",
    "scripted models gpt-4.1-mini and gpt-4.1 in scienceworld",
    "BoPO, λ 0.3, at most 1 LARGE call 50.0 [0.0, 100.0]",
    "8 episodes exceeded their cap",
    "mean score no hard bonus 0 0.50 ",
  ):
    assert words in shown, words
  check_that_it_loads_nothing(index.read_text())
  names = {path.name for path in index.parent.iterdir()}
  pictures = {"frontier_score.png", "frontier_success.png"}
  assert names == pictures | {"index.html", "results.json"}


def test_a_run_without_a_gap_has_no_headline(tmp_path):
  free = [Played(played.spec, "S", (1.0,)) for played in FEW if not played.spec.cap]
  for policies in (free, BOUNDARIES):
    text = page.write(figures(policies), tmp_path).read_text()
    assert "BoPO was not evaluated, or LARGE has no higher" in text


def test_hostile_names_stay_texts(results, tmp_path):
  name = '"></title><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'
  settings = copy.deepcopy(results.config)
  vars(settings)["name"] = name
  settings.models.names = (name, name)
  changed = dataclasses.replace(results, config=settings)
  text = page.write(changed, tmp_path).read_text()
  check_that_it_loads_nothing(text)
  assert f"{name} and {name}" in read_text(text)
