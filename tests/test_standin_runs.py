"""Test what whole runs pay, with a stand-in server as models that has faults."""

import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time

import program
import pytest
import qwen2_checkpoint as hf
import tiny
from absl import flags
from standin import FAULTS, Lockpick, StandIn

import main
from baar_jax.llms import provider
from baar_jax.store import read_spent

PRICES = {"small": ("0.4", "0.1", "1.6"), "large": ("2", "0.5", "8")}
REFUSALS = ("429", "503", "502", "404", "400 content_filter", "429 insufficient_quota")
TASKS = {"train_tasks": 6, "dev_tasks": 2, "test_tasks": 3, "max_steps": 14}
KEY = "sk-hostile-0123456789abcdef"


def arguments(
  runs, server, stage="all", file="examples/sandbox.py", **settings
) -> list[str]:
  """Write the arguments of a command; a setting has __ in place of a dot."""
  values = dict(
    env__max_steps=TASKS["max_steps"],
    models__kind="chat",
    models__names="('small','large')",
    models__max_completion_tokens=60,
    models__prices="((0.4,0.1,1.6),(2.0,0.5,8.0))",
    models__timeout_s=10.0,
    models__base_urls=f"('{server.url}',)",
    max_usd=9.0,
  )
  values |= settings
  options = [
    f"--config.{name.replace('__', '.')}={value}" for name, value in values.items()
  ]
  flags = tiny.flags(runs, *options)
  return ["main.py", f"--config={file}", f"--stage={stage}", *flags]


def run(*given, **settings) -> int:
  """Run a command; return its exit code."""
  return main.main(main.parse(arguments(*given, **settings), flags.FlagValues()))


def query(runs, text):
  """Query the run's SQLite file."""
  with contextlib.closing(sqlite3.connect(runs / "tiny" / "episodes.sqlite")) as db:
    return db.execute(text).fetchall()


def most_replies(runs):
  """Return the largest number of replies to one request."""
  ((count,),) = query(
    runs, "SELECT max(n) FROM (SELECT count(reply) n FROM calls GROUP BY request)"
  )
  return count


def billed(server):
  """Return the stand-in's bill in dollars."""
  return float(server.usd(PRICES))


def test_a_run_survives_all_faults_and_knows_its_bill(tmp_path, monkeypatch, capsys):
  """Each twentieth request meets the next fault.

  A fault that stops the run is reported in one line, and the same command continues the
  run. At each stop the recorded dollars are at least the bill.
  """
  monkeypatch.setenv("HOSTILE_KEY", KEY)
  monkeypatch.setattr(provider, "BACKOFF_S", 0.001)
  left = [*FAULTS, *REFUSALS]
  lines = []

  def fault(number, request):
    return left.pop(0) if left and number % 20 == 7 else None

  server = StandIn(Lockpick(**TASKS), fault=fault, retry_after="0", stall_s=0.6)
  settings = dict(
    models__key_variables="('HOSTILE_KEY',)", models__timeout_s=0.4, profile__trials=9
  )
  with server.running():
    while code := run(tmp_path, server, **settings):
      lines.append(capsys.readouterr().err.splitlines()[-1])
      assert code == 2 and lines[-1].startswith("error: ") and lines[-1].isprintable()
      assert len(lines) < len(FAULTS) + len(REFUSALS)
      assert billed(server) <= read_spent(tmp_path / "tiny").total() + 1e-9
  assert not left, f"{len(server.seen)} requests are too few for {left}"
  at_most_usd = read_spent(tmp_path / "tiny").total()
  assert billed(server) <= at_most_usd + 1e-9 < 3 * billed(server)
  assert most_replies(tmp_path) == 1
  texts = ["".join([*lines, *capsys.readouterr()]).encode()]
  for path in (tmp_path / "tiny").rglob("*"):
    texts += [path.read_bytes()] if path.is_file() else []
  assert not [text for text in texts if KEY[3:].encode() in text]


def test_the_papers_setting_runs_with_a_text_router(tmp_path):
  """The stand-in's prompt caches lower the bill, and not the method's dollars."""
  weights = hf.write(tmp_path / "weights", hf.SHAPES["grouped"], tokens=300)
  with StandIn(Lockpick(**TASKS)).running() as server:
    settings = dict(
      env__kind=tiny.SANDBOX,
      router__weights=weights,
      evaluate__shares=(),
      bopo__lam=(0.3, 0.9),
      train_seeds=1,
      baselines__rivals=(),
      baselines__ablations="('no-reference',)",
      value__updates=0,
    )
    assert run(tmp_path, server, file="appworld.py:paper", **settings) == 0
  sums = "SELECT sum(cost_usd), sum(spent_usd) FROM episodes"
  ((cost_usd, spent_usd),) = query(tmp_path, sums)
  spent = read_spent(tmp_path / "tiny")
  assert spent.total() == pytest.approx(billed(server))
  assert cost_usd > spent_usd > 0
  lines = program.metrics(tmp_path).splitlines()
  ratios = [json.loads(line).get("log_ratio", 0) for line in lines]
  assert 0 < max(ratios) < 1
  ablated = (
    "SELECT count(DISTINCT policy) FROM episodes WHERE policy LIKE 'no-ref%0.9%'"
  )
  assert query(tmp_path, ablated) > [(0,)]


def test_a_cap_and_kill_9_lose_nothing_and_pay_nothing_twice(
  tmp_path, monkeypatch, capsys
):
  """A cap stops the run first. Then it is killed at random moments.

  Calls in flight count at their worst case.
  """
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  draw, kept, kills, code = random.Random(0), {}, 0, -signal.SIGKILL
  with StandIn(Lockpick(**TASKS), latency_s=0.004).running() as server:
    assert run(tmp_path, server, "profile", max_usd=0.006, env__live_per_process=3) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("stopped by --config.max_usd: a call may cost $")
    usd = read_spent(tmp_path / "tiny").total()
    assert 0.003 < usd <= 0.006 and usd == pytest.approx(billed(server), rel=1e-9)
    given = arguments(tmp_path, server, "profile", env__live_per_process=4)
    while code == -signal.SIGKILL:
      goal = len(server.seen) + draw.randrange(10, 30)
      process = subprocess.Popen([sys.executable, *given], cwd=tiny.ROOT)
      while process.poll() is None and len(server.seen) < goal:
        time.sleep(draw.random() / 500)
      process.kill()
      code = process.wait()
      kills += code == -signal.SIGKILL
      stored = program.rows(tmp_path)
      assert kept.items() <= stored.items()
      kept = stored
    assert (
      code == 0 and kills >= 3 and len(kept) == (6 + 2) * 2 * 2
    )  # train and dev tasks
    assert most_replies(tmp_path) == 1
    spent = read_spent(tmp_path / "tiny")
    assert spent[0] + spent[1] <= billed(server) <= spent.total()
