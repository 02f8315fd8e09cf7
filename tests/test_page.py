"""The report's files: one rendered page, its tables in three formats, the terminal's lines."""

import html.parser
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from browser import open_phone
from report_store import BOPO, EVERY, FEW, config, entries, fill

from baar_jax.config import ABLATIONS
from baar_jax.episode import Episode, Step
from baar_jax.report import page, table, texts
from baar_jax.report.page import compute_results
from baar_jax.report.table import read_curves
from baar_jax.rollout.policies import Entry
from baar_jax.stages.report import read_forecast, terminal_table

VOID = {"meta", "br", "img", "link", "hr", "input"}


ROW = {"budget": "K = 1", "measured_share": 0.5, "forecast_share": 0.4}
ROW |= {"forecast_share_low": 0.3, "forecast_share_high": 0.45}
CURVES = pd.DataFrame({"stage": "sft", "training": "", "update": [1, 2]}).reindex(
  columns=["stage", "training", "update", *table.CURVES], fill_value=0.5
)
FIT = {"brier": 0.125, "bins": [{"predicted": 0.1, "observed": 0.2, "count": 30}]}


@pytest.fixture(scope="module")
def results() -> dict:
  """Of every family, and one more that has no name of its own."""
  policies = EVERY | {"newcomer": ("newcomer", {}, None, "SL", (1.0,) * 4)}
  settings = config(robustness=(1,))
  settings.baselines.ablations = tuple(ABLATIONS)
  forecast = {"rows": [ROW], "calibration": FIT}
  results = compute_results(
    fill(policies), entries(policies), settings, forecast=forecast, curves=CURVES
  )
  small, large = results["episodes"].episode.iloc[1].steps[2:]
  small.observation = "x" * 900
  small.logp, large.logp, large.action = math.log(0.2), math.log(0.75), ""
  return results


@pytest.fixture(scope="module")
def index(results, tmp_path_factory) -> Path:
  return page.write(results, tmp_path_factory.mktemp("report") / "report")


class Reader(html.parser.HTMLParser):
  """Checks that tags nest; collects tags, attributes and visible text."""

  def __init__(self, text: str):
    super().__init__()
    self.open, self.tags, self.attributes, self.text = [], [], [], ""
    self.feed(text)
    self.close()
    assert self.open == []
    self.text = re.sub(r"\s+", " ", self.text)  # no-break spaces too

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(name, value or "") for name, value in attrs]
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if "style" not in self.open:
      self.text += data

  def check_that_it_asks_for_nothing(self):
    assert not {"script", "link", "iframe", "a", "form"} & set(self.tags)
    for name, value in self.attributes:
      assert name not in ("href", "srcset") and not name.startswith("on") and "url(" not in value
      assert name != "src" or value.startswith("data:image/png;base64,")


@pytest.fixture(scope="module")
def reader(index) -> Reader:
  return Reader(index.read_text(encoding="utf-8"))


def rendered(results: dict) -> str:
  return Reader(page.render(results, {})).text


def test_the_page_is_well_formed_and_asks_for_nothing(index, reader):
  reader.check_that_it_asks_for_nothing()
  names = {path.stem for path in index.parent.glob("*.png")}
  expected = {"frontier_score", "frontier_success", "hard_budget", "ablations", "training_sft"}
  assert names == expected
  assert reader.tags.count("img") == len(names)


def test_the_page_says(reader):
  for words in (
    "BoPO recovers 100 % of the success gap",
    "for 12 % of their cost gap",
    "a rule on the same text stands in for the judge",
    "task mix 25 50 25 25 50 25",  # easy, hard and intractable tasks
    "BoPO 17 67 17 0 100 0",  # 4, 16 and 4 of its 24 dollars; LARGE for hard tasks alone
    "SMALL 25 50 25 – – –",  # always; it calls LARGE for none
    "gpt-4.1-mini, p = 0.20, $",
    "gpt-4.1, p = 0.75, $",
    "(no action in the reply)",
    "K = 1 40 [30, 45] 50",
    "10 20 30 By task and cap. Mean squared difference 0.125",
    "newcomer",
    "8 budget overruns",
  ):
    assert words in reader.text, words
  assert "x" * 300 in reader.text and "x" * 330 not in reader.text  # texts are cut


def test_a_stand_in_is_called_so_everywhere(results, reader):
  assert "zero-shot LLM" not in reader.text and reader.text.count("zero-shot (stand-in)") > 2
  assert "\nzero-shot (stand-in)  " in terminal_table(results)
  real = {"kind": "chat", "names": ["a", "b"], "hosts": ["api.openai.com", "127.0.0.1"]}
  run = results["run"] | {"stand_ins": [], "models": real}
  text = rendered(results | {"run": run})
  assert "zero-shot LLM" in text and "stand-in" not in text and "cripted" not in text
  assert "models at api.openai.com and 127.0.0.1" in text


def test_a_run_without_bopo_or_without_a_gap():
  few = {name: FEW[name] for name in ("always-small", "always-large", "random(p=0.5)")}
  text = rendered(compute_results(fill(few), entries(few), config()))
  assert "No BoPO router has been evaluated" in text
  assert "hard budget" not in text
  flat = {name: (*kind[:3], "S", (1.0,)) for name, kind in EVERY.items() if kind[2] is None}
  results = compute_results(fill(flat), entries(flat), config())
  assert results["policies"].success_gap_share.isna().all() and results["headline"] is None
  text = rendered(results)
  assert "there is no gap that a router could recover" in text


def test_the_hard_budget_as_markdown_and_latex(index):
  lines = (index.parent / "hard_budget.md").read_text(encoding="utf-8").splitlines()
  cells = [re.split(r" *\| *", line.strip("| ")) for line in lines]
  assert cells[0] == ["Family", "K = 1 SR", "K = 1 Use%", "K = 2 SR", "K = 2 Use%"]
  # What has no cap has no share of it; SMALL keeps every cap.
  small, large = ["30.0 [0.0, 80.0]", "0"], ["75.0 [50.0, 100.0]", "–"]
  assert cells[2] == ["always SMALL", *small, *small]
  assert cells[3] == ["always LARGE", *large, *large]
  assert ["single-turn", "25.0 [0.0, 75.0]", "100", "–", "–"] in cells
  tex = (index.parent / "hard_budget.tex").read_text(encoding="utf-8")
  assert r"single-turn & 25.0 [0.0, 75.0] & 100 & – & – \\" in tex
  assert r"\multicolumn{2}{c}{K = 1}" in tex and r"& SR & Use\% & SR & Use\% \\" in tex
  assert r"\toprule" in tex and r"\bottomrule" in tex


def test_a_star_only_where_the_lead_is_clear(results):
  for clear in (True, False):
    rows = results["hard_budget"].assign(lead_low=0.0)
    rows.loc[(rows.family == "bopo") & (rows.K == 1), "lead_low"] = 0.1 * clear
    table = texts.hard_budget(results | {"hard_budget": rows})
    assert (r"50.0 [0.0, 100.0] \*" in texts.to_markdown(table)) is clear


def test_numbers_and_settings_as_texts(results):
  nan = math.nan
  frame = pd.DataFrame({"area_gain": [-0.004, 0.25, nan], "area_gain_low": [-0.06, nan, nan]})
  frame = frame.assign(area_gain_high=[0.004, nan, nan], cost_gap_share=[0.5, 0.004, nan])
  router = {"lam": 0.3, "update": 12}
  rules = [router | {"threshold": 0.5}, router | {"threshold": 0.2}, {"share": 0.25}]
  frame = frame.assign(lam=[0.3, 1, nan], family=["bopo", "x", "sft"], parameters=rules)
  columns = ["area_gain", "cost_gap_share", "lam", "family", "parameters"]
  assert texts.as_texts(results, frame, columns).to_dict("list") == {
    "BoPO minus it": ["+0.00 [-0.06, +0.00]", "+0.25", "–"],  # nothing is minus zero
    "Cost gap, %": ["50", "0", "–"],
    "λ": ["0.3", "1", "–"],
    "Family": ["BoPO", "x", "SFT only"],
    "Parameters": ["λ = 0.3", "λ = 0.3, t = 0.2", "share 25 %"],
  }


def test_the_terminal_table():
  store = fill(FEW | {"bopo(usd=7)": ("bopo", BOPO, None, "SL", (1.0,) * 4)})
  lines = entries(FEW)
  lines.insert(2, Entry("bopo", BOPO, "bopo(usd=7)", usd_budget=7.0))
  lines = terminal_table(compute_results(store, lines, config())).splitlines()
  # A header, the policies, three families' areas, and the ledger.
  assert len(lines) == 1 + len(FEW) + 1 + 3 + 1
  assert lines[5].split() == ["first-large(K=2)", "55.0", "50.0", "12.00", "2.0", "100"]
  assert lines[7].split() == ["bopo(usd=7)", "100.0", "100.0", "6.00", "1.0", "86"]  # caps last
  assert lines[8].startswith("area of bopo: 0.938")
  assert lines[-1].startswith("spent by this run: $") and lines[-1].endswith("scripted models")


def test_a_forecast_that_cannot_be_read_is_named(tmp_path):
  path = tmp_path / "forecast.json"
  assert read_forecast(path) is None
  for text in ('{"rows": [', '{"rows": [{}]}', json.dumps({"rows": [ROW | {"budget": None}]})):
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path} cannot be read: run --stage=forecast again$"):
      read_forecast(path)
  path.write_text(json.dumps({"rows": [ROW], "calibration": FIT}))
  assert read_forecast(path) == {"rows": [ROW], "calibration": FIT}


def test_curves_are_of_the_first_training_seed_and_of_the_newest_lines(tmp_path):
  path = tmp_path / "metrics.jsonl"
  assert read_curves(path).empty
  lines = [{"stage": "sft", "learning_rate": 0.01, "update": u, "loss": 1 / u} for u in (1, 2)]
  lines += [{"stage": "bopo", "lam": 0.3, "update": 1, "reward": r} for r in (0.1, 0.2)]
  lines += [lines[0] | {"train_seed": 1}, {"stage": "stored-training", "updates": 2}]
  path.write_text("\n".join(['{"stage": "sft", "upd', *map(json.dumps, lines)]))  # cut by a kill
  curves = read_curves(path)
  rows = [("sft", "rate 0.01", 1, 1.0), ("sft", "rate 0.01", 2, 0.5)]
  assert [*curves[["stage", "training", "update", "loss"]].itertuples(index=False)][:2] == rows
  assert [*curves[curves.stage == "bopo"][["training", "reward"]].itertuples(index=False)] == [
    ("λ = 0.3", 0.2)
  ]
  figure = page.draw_training(curves[curves.stage == "sft"])
  assert [axes.get_title("left") for axes in figure.axes] == ["loss"]
  wrong = [{"update": 1}, [1], None, "x"]
  wrong += [{"stage": "sft", "update": "x"}, {"stage": "../../x", "update": 1}, {"stage": [1]}]
  wrong += [{"stage": "sft", "update": 1, "ablation": text} for text in ("$\\x$", {}, 1)]
  for line in wrong:
    path.write_text(json.dumps(line))
    with pytest.raises(ValueError, match=f"^line 1 of {path} cannot be read: remove it"):
      read_curves(path)


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
  steps = [Step(text, 1, text, logp=-0.5)]
  rows = results["episodes"].assign(text=text)
  rows["episode"] = [Episode(text, text, 0, steps, 1.0, f"error:{text}") for _ in rows.text]
  run = results["run"] | {"name": text, "environment": text, "stand_ins": []}
  run["models"] = {"kind": "chat", "names": [text, text], "hosts": [text, text]}
  run["prices_usd_per_million"] = {text: run["prices_usd_per_million"]["gpt-4.1"]}
  changed = {"run": run, "episodes": rows}
  for name in ("policies", "frontiers", "hard_budget", "ablations"):
    changed[name] = results[name].replace({"family": {"single-turn": text}})
  monkeypatch.setattr(page, "draw_all", lambda _: {})
  page.write(results | changed, tmp_path)
  names = ("index.html", "hard_budget.md", "hard_budget.tex", "results.json")
  index, md, tex, data = ((tmp_path / name).read_text(encoding="utf-8") for name in names)
  assert json.loads(data) and not any(map(UNSEEN.search, (index, md, tex)))
  reader = Reader(index)
  reader.check_that_it_asks_for_nothing()
  shown = UNSEEN.sub("\ufffd", " ".join(text.split()))
  assert shown[:12] in reader.text
  assert {len(re.findall(r"(?<!\\)\|", line)) for line in md.splitlines()} == {6}
  assert "](" not in md and "<" not in md.replace(r"\<", "")
  assert not re.search(r"\\(input|write18)", tex) and tex.count(r"\\") == len(md.splitlines())


def test_a_browser_opens_it_quietly_and_it_fits_a_phone(index):
  with open_phone() as (opened, errors, requests):
    opened.goto(index.as_uri())
    shown = "[...document.querySelectorAll('details p')].every(p => p.checkVisibility())"
    assert not opened.evaluate(shown)
    opened.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert opened.evaluate(shown) and errors == []
    assert not opened.evaluate("document.documentElement.scrollWidth > window.innerWidth")
  assert [url for url in requests if not url.startswith("data:")] == [index.as_uri()]
