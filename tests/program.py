"""Start main.py on a tiny sandbox, and read what its run has stored."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress

import tiny

# Compiling with optimisation would take longer than the compiled code runs.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def start(runs, *flags, config="examples/sandbox.py"):
  """Start main.py with the numbers of tiny.config, and one episode at a time."""
  command = [
    sys.executable,
    "main.py",
    f"--config={config}",
    *tiny.flags(runs, "--config.profile.robustness=(1,)", *flags),
  ]
  return subprocess.Popen(
    command,
    env=os.environ | QUICK,
    start_new_session=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=tiny.ROOT,
  )


def finish(process):
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0 and "Traceback" not in err, err
  return out


def rows(runs, file="episodes.sqlite"):
  """Read the text of every stored episode, by its key."""
  with closing(sqlite3.connect(f"file:{runs}/tiny/{file}?mode=ro", uri=True)) as db:
    stored = db.execute(
      "SELECT policy, task_id, purpose, trial, episode FROM episodes"
    ).fetchall()
  return {row[:4]: row[4] for row in stored}


def policies(runs):
  return {policy for policy, *_ in rows(runs)}


def metrics(runs):
  return (runs / "tiny" / "metrics.jsonl").read_text()


def updates(runs):
  """List (stage, update) of the lines of SFT and BoPO in metrics.jsonl."""
  lines = map(json.loads, metrics(runs).splitlines())
  return [
    (line["stage"], line["update"])
    for line in lines
    if line["stage"] in ("sft", "bopo")
  ]


def results(runs):
  return json.loads((runs / "tiny" / "report" / "results.json").read_text())


def interrupt(process, condition, number):
  """Send a signal when `condition()` is true, wait for the end, and return the output."""
  end = time.monotonic() + 240
  while time.monotonic() < end and process.poll() is None:
    with suppress(
      OSError, sqlite3.OperationalError
    ):  # there is no such file or table yet
      if condition():
        os.kill(process.pid, number)
        return process.communicate(timeout=60)
    time.sleep(0.01)
  raise AssertionError(process.communicate())
