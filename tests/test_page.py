"""The report's page: what it says, and hostile texts in all of its files."""

import copy
import dataclasses
import html.parser
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from browser import open_phone
from report_store import BOUNDARIES, EVERY, FEW, Played, config, figures

from baar_jax.config import ABLATIONS
from baar_jax.episode import Episode, Step
from baar_jax.report import page
from baar_jax.report.compare import FORECAST
from baar_jax.report.results import Results
from baar_jax.rollout.specs import Cap, PolicySpec


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
  """Of every family, and of a run with a forecast and lines of a training."""
  one = PolicySpec("conditioned")
  scores = (1.0, 1.0, 1.0, 0.0)
  played = [Played(one, "SSSL", scores), Played(one.under(Cap(1)), "SSSL", scores)]
  directory, settings = tmp_path_factory.mktemp("run"), config(robustness=(1,))
  settings.baselines.ablations = tuple(ABLATIONS)
  forecast = pd.DataFrame({"K = 1": [1.0, 0.9, 0.6, 0.1], "no cap": 0.5})
  forecast.set_axis([f"test-{i}" for i in range(4)]).to_csv(directory / FORECAST)
  lines = [
    {"stage": "sft", "learning_rate": 0.01, "update": u, "loss": 1 / u} for u in (1, 2)
  ]
  (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
  results = figures([*EVERY, *played], settings, directory)
  results.episodes[1].steps[2].observation = "x" * 900
  return results


@pytest.fixture(scope="module")
def index(results, tmp_path_factory) -> Path:
  return page.write(results, tmp_path_factory.mktemp("report") / "report")


class Reader(html.parser.HTMLParser):
  """Collects tags, attributes and visible text."""

  def __init__(self, text: str):
    super().__init__()
    self.tags, self.attributes, self.text = [], [], ""
    self.feed(text)
    self.text = re.sub(r"\s+", " ", self.text)  # no-break spaces too

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(name, value or "") for name, value in attrs]

  def handle_data(self, data):
    if self.tags[-1:] != ["style"]:
      self.text += data

  def check_that_it_asks_for_nothing(self):
    assert not {"script", "link", "iframe", "a", "form"} & set(self.tags)
    for name, value in self.attributes:
      assert (
        name not in ("href", "srcset")
        and not name.startswith("on")
        and "url(" not in value
      )
      assert name != "src" or value.startswith("data:image/png;base64,")


@pytest.fixture(scope="module")
def reader(index) -> Reader:
  return Reader(index.read_text(encoding="utf-8"))


def test_the_page_is_well_formed_asks_for_nothing_and_says(index, reader):
  reader.check_that_it_asks_for_nothing()
  names = {path.stem for path in index.parent.glob("*.png")}
  assert names == {"frontier_score", "frontier_success", "hard_budget", "training_sft"}
  for words in (
    "The router that knows its budget recovers 100 % of the success gap",
    "for 25 % of their cost gap",
    "scripted models gpt-4.1-mini and gpt-4.1 Environment",
    "BoPO 17 67 17",  # 4, 16 and 4 of its 24 dollars
    # (1 + .9 + .6 + .1) / 4, and (1 + 1 + 1 + 0) / 4; squares of 0, .1, .4 and .1
    "K = 1 65 [35, 98] 75 no cap 50 [50, 50] –",
    "10 0 1 60 100 1 95 100 2 By task and cap. Mean squared difference 0.045",
    "BoPO λ = 0.3 1 – 50.0 [0.0, 100.0]",
    "8 budget overruns",
  ):
    assert words in reader.text, words
  assert "x" * 300 in reader.text and "x" * 330 not in reader.text  # texts are cut


def test_a_run_without_a_gap(tmp_path):
  free = [Played(played.spec, "S", (1.0,)) for played in FEW if not played.spec.cap]
  results = figures(free)
  assert results.headline is None and results.policies.success_gap_share.isna().all()
  assert "There is no BoPO, or no gap" in page.write(results, tmp_path).read_text(
    encoding="utf-8"
  )
  assert page.write(
    figures(BOUNDARIES), tmp_path
  ).exists()  # nothing else has been played


WRONG = [{"update": 1}, [1], None, "x", {"stage": "sft", "update": "x"}, {"stage": [1]}]
WRONG += [{"stage": "../../x", "update": 1}, {"stage": "sft", "ablation": "$\\x$"}]
FILES = [("metrics.jsonl", json.dumps(line)) for line in WRONG]
FILES += [(FORECAST, text) for text in (",K = 1\ntest-0,x", "a,b\n1,2,3\n4", "")]


@pytest.mark.parametrize("name, text", FILES)
def test_a_file_of_the_run_that_cannot_be_read_is_named(tmp_path, name, text):
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=f"^{tmp_path / name} cannot be read: "):
    figures(FEW, directory=tmp_path)


HOSTILE = [
  "<script>alert(1)</script>",
  '"><img src=x onerror=alert(1)>',
  "</style></title><iframe src=//evil>",
  "{{ 7 * 7 }}{% include 'report.css' %}",
  "a\u202eevil\u2066\u200f\x1b[31m\x00\x07\x9b\ufeff\U000e0041\ud800",
  "\u2028",
  "[x](javascript:alert(1)) ![y](//evil/z.png) | *b* _c_ `d` # e ~f~ \\",
  "a\n| --- |\r\n# title\u2028b",
  r"\input{/etc/passwd} \write18{rm} $x$ %",
]
UNSEEN = re.compile(
  "[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ud800-\\udfff\\ufeff]"
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_texts_in_all_files(results, tmp_path, monkeypatch, text):
  """Texts of others' tasks and models, and a family's name, which no one else gives."""
  episode = Episode(
    text, text, 0, [Step(text, 1, text, logp=-0.5)], 1.0, f"error:{text}"
  )
  settings = copy.deepcopy(results.config)
  vars(settings)["name"], vars(settings.models)["names"] = text, (text, text)
  prices = {text: results.run.prices_usd_per_million["gpt-4.1"]}
  run = dataclasses.replace(
    results.run, environment=text, models=text, prices_usd_per_million=prices
  )
  changed = {"run": run, "config": settings, "episodes": [episode]}
  for name in ("policies", "frontiers", "hard_budget", "ablations"):
    changed[name] = getattr(results, name).replace({"family": {"single-turn": text}})
  monkeypatch.setattr(page, "draw_all", lambda _: {})
  page.write(dataclasses.replace(results, **changed), tmp_path)
  names = ("index.html", "hard_budget.md", "hard_budget.tex", "results.json")
  index, md, tex, data = (
    (tmp_path / name).read_text(encoding="utf-8") for name in names
  )
  assert json.loads(data) and not any(map(UNSEEN.search, (index, md, tex)))
  reader = Reader(index)
  reader.check_that_it_asks_for_nothing()
  shown = UNSEEN.sub("\ufffd", " ".join(text.split()))
  assert shown[:12] in reader.text
  assert {len(re.findall(r"(?<!\\)\|", line)) for line in md.splitlines()} == {6}
  assert "](" not in md and "<" not in md.replace(r"\<", "")
  assert not re.search(r"\\(input|write18)", tex) and tex.count(r"\\") == len(
    md.splitlines()
  )


def test_a_browser_opens_it_quietly_and_it_fits_a_phone(index):
  with open_phone() as (opened, errors, requests):
    opened.goto(index.as_uri())
    opened.evaluate(
      "document.querySelectorAll('details').forEach(d => { d.open = true })"
    )
    assert errors == []
    assert not opened.evaluate(
      "document.documentElement.scrollWidth > window.innerWidth"
    )
  assert [url for url in requests if not url.startswith("data:")] == [index.as_uri()]
