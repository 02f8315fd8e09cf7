"""Whole runs whose two models are a loopback stand-in with faults: what they cost, to the cent."""

import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from absl import flags
from standin import FAULTS, Lockpick, StandIn

import main
from baar_jax.llms import wire
from baar_jax.llms.calls import read_spent

ROOT = Path(__file__).parents[1]
PRICES = {"small": ("0.4", "0.1", "1.6"), "large": ("2", "0.5", "8")}
REFUSALS = ("429", "503", "502", "404", "400 content_filter", "429 insufficient_quota")
TASKS = {"train_tasks": 6, "dev_tasks": 2, "test_tasks": 3, "max_steps": 14}
KEY = "sk-hostile-0123456789abcdef"


def arguments(runs, server, stage="all", **settings) -> list[str]:
  """Of the command line; settings have __ for a dot."""
  values = {"env__max_steps": TASKS["max_steps"], "models__kind": "chat"}
  values |= {"models__names": "('small','large')", "models__max_completion_tokens": 60}
  values |= {
    "models__prices": "((0.4,0.1,1.6),(2.0,0.5,8.0))",
    "models__timeout_s": 10.0,
  }
  values |= {"models__base_urls": f"('{server.url}',)"} | settings
  own = [
    f"--config.{name.replace('__', '.')}={value}" for name, value in values.items()
  ]
  config = f"--config={ROOT / 'configs' / 'sandbox.py'}"
  return ["main.py", config, *tiny.flags(runs), *own, f"--stage={stage}"]


def run(*given, **settings) -> int:
  """The exit code of a command."""
  return main.main(main.parse(arguments(*given, **settings), flags.FlagValues()))


def query(runs, text):
  with contextlib.closing(sqlite3.connect(runs / "tiny" / "episodes.sqlite")) as db:
    return db.execute(text).fetchall()


def most_replies(runs):
  """Of one and the same request."""
  ((most,),) = query(
    runs, "SELECT max(n) FROM (SELECT count(reply) n FROM calls GROUP BY request)"
  )
  return most


def billed(server):
  return float(server.usd(PRICES))


def test_a_run_among_all_misbehaviours_ends_with_a_report_and_knows_what_it_paid(
  tmp_path, monkeypatch, capsys
):
  """Each twentieth request is met by the next one; what stops the run is one line, and the same
  command goes on. No answer that was billed is missing in the run's books at any stop."""
  monkeypatch.setenv("HOSTILE_KEY", KEY)
  monkeypatch.setattr(wire, "BACKOFF_S", 0.001)
  left, lines, budgets = [*FAULTS, *REFUSALS], [], (0.0005, 0.002)
  fault = lambda number, _: left.pop(0) if left and number % 20 == 7 else None  # noqa: E731
  server = StandIn(Lockpick(**TASKS), fault, retry_after="0", stall_s=0.6)
  settings = {"models__key_variables": "('HOSTILE_KEY',)", "models__timeout_s": 0.4}
  settings |= {"profile__trials": 9, "evaluate__usd_budgets": budgets}
  with server.running():
    while code := run(tmp_path, server, **settings):
      lines.append(capsys.readouterr().err.splitlines()[-1])
      assert code == 2 and lines[-1].startswith("error: ") and lines[-1].isprintable()
      assert len(lines) < len(FAULTS) + len(REFUSALS)
      assert billed(server) <= read_spent(tmp_path / "tiny", 2).at_most_usd + 1e-9
  assert not left, (
    f"{len(server.seen)} requests are too few for {len(left)} more misbehaviours"
  )
  known = read_spent(tmp_path / "tiny", 2).at_most_usd
  assert billed(server) <= known + 1e-9 < 3 * billed(server)
  ((recorded,),) = query(tmp_path, "SELECT count(*) FROM calls")
  assert recorded >= len(server.seen)  # also what had no time left to be sent
  assert most_replies(tmp_path) == 1
  results = json.loads((tmp_path / "tiny/report/results.json").read_text())
  ledger = results["ledger"]
  assert ledger["total_usd"] + ledger["presumed_usd"] - ledger[
    "router_usd"
  ] == pytest.approx(known)
  assert (
    f"{ledger['total_usd']:.6f}" in (tmp_path / "tiny/report/index.html").read_text()
  )
  rows = [row for row in results["policies"] if row["usd_budget"] is not None]
  assert {row["usd_budget"] for row in rows} == {*budgets}
  assert all(row["overruns"] == 0 and 0 < row["use_share"] <= 1 for row in rows)
  out, err = capsys.readouterr()
  files = [
    path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()
  ]
  said = "".join([*lines, out, err]).encode()
  assert not [text for text in [said, *files] if KEY[3:].encode() in text]


def test_neither_a_cap_nor_kill_9_loses_anything_or_pays_for_it_twice(
  tmp_path, monkeypatch, capsys
):
  """At a cap, and then without one at random moments. What was in flight counts at its worst."""
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  draw, kept, kills, code = random.Random(0), {}, 0, -signal.SIGKILL
  with StandIn(Lockpick(**TASKS), latency_s=lambda number: 0.004).running() as server:
    assert run(tmp_path, server, "profile", max_usd=0.006, env__live_per_process=3) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("stopped by --config.max_usd: a call may cost $")
    usd = read_spent(tmp_path / "tiny", 2).at_most_usd
    assert 0.003 < usd <= 0.006 and usd == pytest.approx(billed(server), rel=1e-9)
    given = arguments(tmp_path, server, "profile", env__live_per_process=4)
    while code == -signal.SIGKILL:
      goal = len(server.seen) + draw.randrange(20, 60)
      process = subprocess.Popen([sys.executable, *given], cwd=ROOT)
      while process.poll() is None and len(server.seen) < goal:
        time.sleep(draw.random() / 500)
      process.kill()
      code = process.wait()
      kills += code == -signal.SIGKILL
      stored = dict(
        query(tmp_path, "SELECT policy || task_id || seed, episode FROM episodes")
      )
      assert kept.items() <= stored.items()
      kept = stored
    assert (
      code == 0 and kills >= 3 and len(kept) == (6 + 2) * 2 * 2
    )  # train and dev tasks
    # Requests beside the recorded replies were in flight at a kill, and are recorded as open.
    kinds = dict(query(tmp_path, "SELECT kind, count(*) FROM calls GROUP BY kind"))
    assert kinds.keys() <= {"reply", "open"} and kinds.get("open", 0) <= 4 * kills
    assert kinds["reply"] <= len(server.seen) <= kinds["reply"] + kinds.get("open", 0)
    assert most_replies(tmp_path) == 1
    spent = read_spent(tmp_path / "tiny", 2)
    assert sum(spent.replies_usd) <= billed(server) <= spent.at_most_usd
