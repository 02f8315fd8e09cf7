"""Check the report's page, and that hostile texts stay texts in all of its files."""

import copy
import dataclasses
import html.parser
import json
import re
from pathlib import Path

import pytest
from browser import open_phone
from report_store import BOPO, BOUNDARIES, EVERY, FEW, Played, config, figures

from baar_jax.config import ABLATIONS
from baar_jax.episode import Episode, Step
from baar_jax.report import page, texts
from baar_jax.report.table import Results
from baar_jax.rivals.families import FAMILIES, list_specs
from baar_jax.rollout.specs import Cap, PolicySpec
from configs import reproduce


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
  """Compute results of every family, with training curves."""
  one = PolicySpec("conditioned")
  scores = (1.0, 1.0, 1.0, 0.0)
  played = [Played(one, "SSSL", scores), Played(one.under(Cap(1)), "SSSL", scores)]
  directory, settings = tmp_path_factory.mktemp("run"), config(robustness=(1,))
  settings.baselines.ablations = tuple(ABLATIONS)
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


LABELS = {
  "budget-conditioned router, cost weight 0.5, cap-blind, at most 3 LARGE calls": PolicySpec(
    "conditioned", update=9, cost_weight=0.5, blind=1, cap=Cap(3)
  ),
  "budget-conditioned router, cap-conditioned, cost weight 0, at most $0.02": PolicySpec(
    "conditioned",
    update=9,
    cost_weight=0.0,
    cap_conditioned=True,
    cap=Cap(usd=0.02),
  ),
  "budget-conditioned router, cost weight 1": PolicySpec(
    "conditioned", cost_weight=1.0, cap_conditioned=True
  ),
  "BoPO, λ 0.3, at most 1 LARGE call": BOPO.under(Cap(1)),
  "BoPO, λ 0.5": PolicySpec("bopo", lam=0.5, update=9, seeds=3, threshold=0.5),
  "BoSFT, LARGE from probability 0.25": PolicySpec("sft", threshold=0.25),
  "cascade, LARGE share 0.6 in training": PolicySpec("cascade", share=0.6),
  "random, LARGE with probability 0.5, at most 11 LARGE calls": PolicySpec(
    "random", p=0.5, cap=Cap(11)
  ),
  "always the intermediate model, model 2": PolicySpec("always", rank=2),
  "zero-shot router": PolicySpec("zero-shot", judge="gpt-5 a0b1c2"),
  "always-SMALL": PolicySpec("always-small"),
}


def test_labels_have_the_parameters_in_words():
  for label, spec in LABELS.items():
    assert texts.label_policy(spec, FAMILIES) == label


def test_two_policies_of_a_run_never_share_a_label():
  settings = reproduce.get_config()
  settings.models.names = ("gpt-4.1-nano", "gpt-4.1-mini", "gpt-4.1")
  settings.evaluate.usd_budgets = (0.02, 0.05)
  settings.evaluate.thresholds = (0.3,)
  listed = list_specs(settings)
  assert len({texts.label_policy(spec, FAMILIES) for spec in listed}) == len(listed)


def test_no_key_of_a_policy_is_on_the_page(results, index):
  keys = {key for key in results.dev.index if "(" in key}
  files = [*index.parent.glob("hard_budget.*"), index]
  shown = [path.read_bytes() for path in files]
  assert len(keys) > 9 and len(files) == 3
  data = json.loads((index.parent / "results.json").read_text())
  assert [row["label"] for row in data["policies"]][:2] == [
    "always-SMALL",
    "always-LARGE",
  ]
  assert not any(key.encode() in data for key in keys for data in shown)
  terminal = texts.terminal_table(results)
  assert not any(key in terminal for key in keys)


class Reader(html.parser.HTMLParser):
  """Collect the tags, attributes and visible text of a page."""

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

  def check_that_it_loads_nothing(self):
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


def test_the_page_loads_nothing_and_shows_the_results(index, reader):
  reader.check_that_it_loads_nothing()
  names = {path.stem for path in index.parent.glob("*.png")}
  assert names == {"frontier_score", "frontier_success", "hard_budget", "training_sft"}
  for words in (
    "LARGE calls per task. The difference is paired by task. scripted models gpt-4.1-mini",
    # (1/4) / 2 + 3/4; 1 + 1 + 1 + 0 and 1 + 1 + 0 + 0; 1 + .2 + 1 + 0
    "beats a random mix of both models in mean score: area 0.88 [",
    "1 75.0 – – 50.0 2 – – 55.0 – ",
    "BoPO 17 67 17",  # 4, 16 and 4 of its 24 dollars
    "BoPO, λ 0.3, at most 1 LARGE call 50.0 [0.0, 100.0]",
    "8 episodes exceeded their cap",
  ):
    assert words in reader.text, words
  assert "x" * 300 in reader.text and "x" * 330 not in reader.text  # texts are cut


def test_a_run_without_a_gap_has_no_headline(tmp_path):
  free = [Played(played.spec, "S", (1.0,)) for played in FEW if not played.spec.cap]
  for policies in (free, BOUNDARIES):
    text = page.write(figures(policies), tmp_path).read_text(encoding="utf-8")
    assert "BoPO was not evaluated, or LARGE has no higher" in text


WRONG = [
  {"update": 1},
  [1],
  None,
  "x",
  {"stage": "sft", "update": "x"},
  {"stage": [1]},
  {"stage": "../../x", "update": 1},
  {"stage": "sft", "ablation": "$\\x$"},
]


@pytest.mark.parametrize("line", WRONG)
def test_unreadable_training_curves_are_named(tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  path.write_text(json.dumps(line))
  with pytest.raises(ValueError, match=f"^{path} cannot be read: "):
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
def test_hostile_texts_stay_texts_in_all_files(results, tmp_path, monkeypatch, text):
  """Tasks and models may write such texts; a family's name is tried too."""
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
  names = ("index.html", "hard_budget.tex", "results.json")
  index, tex, data = ((tmp_path / name).read_text(encoding="utf-8") for name in names)
  assert json.loads(data) and not any(map(UNSEEN.search, (index, tex)))
  reader = Reader(index)
  reader.check_that_it_loads_nothing()
  shown = UNSEEN.sub("\ufffd", " ".join(text.split()))
  assert shown[:12] in reader.text
  # Two lines of titles, and a line per family; each ends in two backslashes.
  assert not re.search(r"\\(input|write18)", tex)
  assert tex.count(r"\\") == 2 + changed["hard_budget"].family.nunique()


def test_the_page_fits_a_phone_and_makes_no_request(index):
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
