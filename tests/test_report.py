"""The page of a tiny run: well-formed, self-contained, honest about its models."""

import html.parser
import re

import pytest
from test_results import BOPO, ENTRIES, config, fill, profiles

from baar_jax.report import cells, results
from baar_jax.rollout.entries import Entry
from baar_jax.stages import report
from baar_jax.store import Store

VOID = {"meta", "br", "img", "link", "hr", "input"}
METRICS = [
  {"stage": stage, **lam, "update": update, "loss": 1 / update, "kl": 0.1}
  for stage, lam in (("sft", {}), ("bopo", {"lam": 0.3}), ("bopo", {"lam": 0.9}))
  for update in (1, 2, 3)
]


class Reader(html.parser.HTMLParser):
  """Checks that tags nest; collects attributes and visible text."""

  def __init__(self):
    super().__init__()
    self.open: list[str] = []
    self.attributes: list[tuple[str, str, str]] = []
    self.tags: list[str] = []
    self.text = ""

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, name, value or "") for name, value in attrs]
    if tag not in VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, name, value or "") for name, value in attrs]

  def handle_endtag(self, tag):
    assert self.open, f"</{tag}> closes nothing"
    assert self.open.pop() == tag

  def handle_data(self, data):
    if self.open and self.open[-1] != "style":
      self.text += data


def read(path) -> Reader:
  reader = Reader()
  reader.feed(path.read_text(encoding="utf-8"))
  reader.close()
  return reader


@pytest.fixture(scope="module")
def summary(tmp_path_factory) -> dict:
  store = Store(tmp_path_factory.mktemp("run") / "episodes.sqlite")
  fill(store)
  return results.summarize(store, ENTRIES, config(), profiles(), METRICS)


@pytest.fixture(scope="module")
def index(summary, tmp_path_factory):
  return report.write_report(summary, tmp_path_factory.mktemp("report") / "report")


def test_page_is_well_formed(index):
  reader = read(index)
  assert reader.open == []
  ids = [value for _, name, value in reader.attributes if name == "id"]
  assert len(ids) == len(set(ids))


def test_page_asks_for_nothing_from_outside(index):
  reader = read(index)
  assert "http" not in index.read_text(encoding="utf-8")
  assert not {"script", "link", "iframe"} & set(reader.tags)
  ids = {value for _, name, value in reader.attributes if name == "id"}
  for tag, name, value in reader.attributes:
    assert name not in ("src", "srcset"), tag
    if name == "href":
      assert value[:1] == "#" and value[1:] in ids, value
    for target in re.findall(r"url\(([^)]*)\)", value):
      assert target[:1] == "#" and target[1:] in ids, target


def test_every_figure_is_in_the_page_and_beside_it(index):
  names = {path.stem for path in index.parent.glob("*.png")}
  assert names == {
    *("frontier_score", "frontier_success", "hard_budget", "spend_dollars", "spend_large"),
    *("progress", "costs", "sft_loss", "sft_kl", "bopo_loss", "bopo_kl"),
  }
  text = index.read_text(encoding="utf-8")
  assert text.count('<svg role="img"') == len(names)
  for name in names:
    assert f'id="{name}-' in text
    assert (index.parent / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_page_says_what_stands_behind_it(index):
  text = read(index).text.replace("\u00a0", " ").replace("\u2011", "-")
  assert "BoPO recovers 100 % of the success gap" in text
  assert "for 12 % of their cost gap" in text
  assert "4 held-out tasks, 2 seeds, scripted models." in text
  assert '<span class="badge">scripted models</span>' in index.read_text(encoding="utf-8")
  assert "8 over K" in text  # the budgeted BoPO of the fixture overruns on purpose


def test_real_models_are_called_so(summary):
  run = summary["run"] | {"models": {"kind": "chat", "names": ["gpt-4.1-mini", "gpt-4.1"]}}
  host = {"name": "api.openai.com", "own": False}
  run["models"]["hosts"] = [host, host]
  assert cells.models_text(summary | {"run": run}) == "real models at api.openai.com"
  run["models"]["hosts"] = [host, {"name": "127.0.0.1", "own": True}]
  assert cells.models_text(summary | {"run": run}) == "models at api.openai.com and 127.0.0.1"


def test_text_is_escaped(summary, tmp_path):
  run = summary["run"] | {"name": "<b>run</b> & co"}
  path = report.write_report(summary | {"run": run}, tmp_path)
  assert "<b>run" not in path.read_text(encoding="utf-8")
  assert "<b>run</b> & co" in read(path).text


def test_without_training_budgets_or_bopo(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  small = results.summarize(store, ENTRIES[:3], config(), {}, [])
  path = report.write_report(small, tmp_path / "report")
  text = read(path).text
  assert "No BoPO router has been evaluated" in text
  assert "Training" not in text and "hard budget" not in text


def test_unknown_family_is_shown_by_its_name(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  entries = [*ENTRIES[:3], Entry("new <router>", BOPO, "bopo(lam=0.3)")]
  path = report.write_report(
    results.summarize(store, entries, config(), profiles(), []), tmp_path / "report"
  )
  assert "new <router>" in read(path).text
  assert "<router>" not in path.read_text(encoding="utf-8")


def test_terminal_table(summary):
  lines = report.terminal_table(summary).splitlines()
  # A header, the policies, three families' areas, and the ledger.
  assert len(lines) == 1 + len(ENTRIES) + 3 + 1
  assert lines[-1].startswith("spent by this run: $") and lines[-1].endswith("scripted models")
  assert lines[5].split() == ["first-large(K=2)", "55.0", "50.0", "12.00", "2.0", "100"]


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"stage": "sft", "update": 1}\n{"stage": "sf')
  assert report.read_metrics(tmp_path) == [{"stage": "sft", "update": 1}]
  assert report.read_metrics(tmp_path / "nowhere") == []


def test_exact_frontier_is_the_sandboxs_alone():
  sandbox = config()
  assert report.exact_frontier(sandbox) is None
  sandbox.env.kind, sandbox.env.max_steps = "sandbox", 18
  exact = report.exact_frontier(sandbox)
  assert exact["optimum"][0] == pytest.approx(exact["small"])  # the cheapest policy is SMALL
  assert exact["small"][0] < exact["large"][0]
