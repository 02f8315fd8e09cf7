"""Test that each log format is read, and that the report's figures are right."""

import json
import shutil
from pathlib import Path

import pytest
from recorded import chat

from baar_jax.episode import Usage
from baar_jax.llms.prices import Price
from baar_serve import config, report
from baar_serve.logs.read import read_logs

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"


def read(path):
  return [*read_logs(config.ServeConfig(traces=str(path)), [])]


# Every file tells the same session of three calls.
@pytest.mark.parametrize(
  "name, session, has_usd",
  [
    ("chat.jsonl", "chat", False),
    ("litellm.jsonl", "trace", True),
    ("atif.json", "atif", True),
    ("fix.traj.json", str(GOLDEN / "fix.traj.json"), True),
    ("claude.jsonl", "claude", False),
    ("rollout-codex.jsonl", "rollout-codex", False),
  ],
)
def test_each_format_tells_the_same_session(name, session, has_usd):
  calls = read(GOLDEN / name)
  assert {(call.session, call.text) for call in calls} == {(session, "Fix it.")}
  actions = ['bash {"command": "ls"}', 'bash {"command": "cat b"}', "done"]
  assert [call.action for call in calls] == actions
  for call, observation in zip(calls, ("", "a.txt", "no b"), strict=True):
    # Codex and mini-SWE-agent frame an output; the time that it took is left out.
    told = call.observation.rpartition("utput>\n")[2].rpartition("Output:\n")[2]
    assert told.removesuffix("\n</output>") == observation
    assert "Wall time" not in call.observation
  written = 4 if session == "claude" else 0
  usages = [Usage(100, 0, 10), Usage(150, 80, 20, written), Usage(200, 150, 5)]
  assert [call.usage for call in calls] == usages
  # 3:04:05 on 2 January 2026 (UTC), and five seconds later each.
  assert [call.at_s - 1767323045 for call in calls] == [0, 5, 10]
  usd = [0.001, 0.002, 0.003] if has_usd else [None] * 3
  assert [call.usd for call in calls] == pytest.approx(usd)


def test_a_resumed_session_adds_only_what_is_new(tmp_path):
  for name in ("claude.jsonl", "claude_resumed.jsonl"):
    shutil.copy(GOLDEN / name, tmp_path)
  calls = read(tmp_path)
  assert [call.session for call in calls] == ["claude"] * 3 + ["claude_resumed"]
  assert (calls[-1].action, calls[-1].usage.completion_tokens) == ("more", 6)


def write(path, records):
  path.write_text("\n".join(json.dumps(record) for record in records))


def test_a_broken_file_is_one_line_and_others_are_read(tmp_path, capsys):
  (tmp_path / "deep").mkdir()
  write(tmp_path / "deep" / "a.jsonl", [*chat()])
  write(tmp_path / "b.jsonl", [*[record | {"session": "b"} for record in chat()], {}])
  for name in ("sessions-index.json", "agent.meta.json", "notes.txt"):
    (tmp_path / name).write_text("no log")
  settings = config.ServeConfig(
    name="x", runs=str(tmp_path / "runs"), traces=str(tmp_path)
  )
  scores = tmp_path.parent / "scores.json"
  write(scores, [{"a": 0.0, "fix": 1.0}])
  settings.scores = str(scores)
  report.report(settings)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith(f"{tmp_path}/b.jsonl, line 3: a field is missing or wrong")
  # Nothing but the page is written, so nothing binds a later run.
  files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
  assert [str(path) for path in files] == [lines[-1]]
  page = files[0].read_text()
  assert "b.jsonl, line 3" in page and '<td title="success_rate">0.5</td>' in page


def lines(session, results, **fields):
  """Write a chat line for each call, whose action is always "look"."""
  messages = [dict(role="user", content="x" * 40)]
  for result in results:
    messages = [*messages, dict(role="assistant", content="look")]
    yield dict(session=session, messages=messages, **fields)
    messages = [*messages, dict(role="user", content=result)]


def list_tables(path, *records):
  write(path, records)
  prices = {"own": Price(1.0, 0.1, 2.0), "claude-x": Price(10.0, 1.0, 20.0, 12.0)}
  rows = [*report.list_rows(read(path))]
  costs = report.price_rows(rows, prices)
  return report.list_tables(report.make_frame(rows)) | {"At list prices": costs}


def test_dollars_are_priced_with_each_models_own_cache(tmp_path):
  usage = dict(prompt_tokens=2000, completion_tokens=100, cached_tokens=500)
  fields = dict(model="p/own-2026-01-02", usage=usage, created=1767323045.0)
  tables = list_tables(tmp_path / "a.jsonl", *lines("s", ["1", "2"], **fields))
  (row,) = tables["By model"].to_dict("records")
  # Twice (1500 x 1 + 500 x 0.1 + 100 x 2) / 1e6 dollars.
  assert row["usd"] == pytest.approx(2 * 1750e-6) and row["model"] == "own"
  assert (row["sessions"], row["steps"], row["cached_share"]) == (1, 2, 0.25)
  assert tables["By day (UTC)"].day.tolist() == ["2026-01-02"]
  costs = tables["At list prices"].set_index("model").usd
  # The first call of own is cold; the second has 15 blocks of 128 tokens cached.
  assert costs["own"] == pytest.approx((2200 + 80 + 192 + 200) / 1e6)
  # Claude's first call writes all 2000 tokens, and the second reads them.
  assert costs["claude-x"] == pytest.approx((24_000 + 2000 + 2000 + 2000) / 1e6)


def test_missing_usage_is_estimated_by_characters(tmp_path):
  tables = list_tables(tmp_path / "a.jsonl", *lines("s", ["12345678"] * 2, model="own"))
  (row,) = tables["All sessions"].to_dict("records")
  # Task 10 and reply 1 token; then 10 + 1 + 2 and 1.
  assert (row["prompt_tokens"], row["completion_tokens"]) == (23, 2)
  assert (row["steps_with_estimated_tokens"], row["steps_without_a_price"]) == (2, 0)


def test_circles_begin_after_the_third_equal_result(tmp_path):
  fields = dict(model="unknown-model", cost_usd=0.5)
  equal = lines("loop", ["new", "no", "no", "no", "no"], **fields, score=0.0)
  fine = lines("fine", ["1", "2", "3", "4", "5"], **fields)
  tables = list_tables(tmp_path / "a.jsonl", *equal, *fine)
  (row,) = tables[
    "Sessions in circles: one action, one observation, three times"
  ].to_dict("records")
  # The calls 3 to 5 read "no"; call 5 is the first after the third.
  assert row == dict(log="loop", from_step=5, steps_after=1, after_usd=0.5, score=0.0)
  (total,) = tables["All sessions"].to_dict("records")
  assert (total["sessions_in_circles"], total["success_rate"]) == (1, 0.0)
