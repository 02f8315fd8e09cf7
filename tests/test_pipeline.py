"""The whole pipeline on a tiny sandbox, as a user starts it: once through, killed, and stopped."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parents[1]
STAGE_SEEN = 240  # seconds to wait for what a run is about to do
# Compiling well takes longer here than everything that is compiled.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def command(runs, *flags):
  """main.py with the numbers of tiny.config; one episode at a time, so nothing hangs on timing."""
  return [sys.executable, "main.py", "--config=configs/sandbox.py", *tiny.flags(runs), *flags]


def start(runs, *flags):
  return subprocess.Popen(
    command(runs, *flags),
    cwd=ROOT,
    env=os.environ | QUICK,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def finish(process):
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  return out, err


def rows(runs, file="episodes.sqlite"):
  """Every stored episode by its key, as text."""
  path = Path(runs) / "tiny" / file
  if not path.exists():
    return {}
  db = sqlite3.connect(path)
  try:
    found = db.execute("SELECT policy, task_id, seed, episode FROM episodes").fetchall()
  except sqlite3.OperationalError:  # the tables are not made yet
    found = []
  finally:
    db.close()
  keys = [row[:3] for row in found]
  assert len(set(keys)) == len(keys)
  return dict(zip(keys, (row[3] for row in found)))


def results(runs):
  return json.loads((Path(runs) / "tiny" / "report" / "results.json").read_text())


def wait_for(process, seen):
  """Waits until `seen()`; whether the run was still going."""
  end = time.monotonic() + STAGE_SEEN
  while not seen():
    if process.poll() is not None:
      return False
    assert time.monotonic() < end
    time.sleep(0.01)
  return process.poll() is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An unbroken run: where it is, and what it said."""
  runs = tmp_path_factory.mktemp("whole")
  out, err = finish(start(runs))
  return runs, out, err


def test_a_run_ends_with_its_report(whole):
  runs, out, err = whole
  page = runs / "tiny" / "report" / "index.html"
  assert out.splitlines()[-1] == f"report: {page}"
  assert "image/png" in page.read_text() and "cripted" in page.read_text()
  assert "Traceback" not in err
  names = [policy["policy"] for policy in results(runs)["policies"]]
  assert "bopo(lam=0.1,update=2,threshold=0.5)" in names and "first-large(K=1)" in names
  for name in names:
    assert name in out  # the terminal's table
  stages = [json.loads(line) for line in (runs / "tiny" / "metrics.jsonl").open()]
  assert [(x["stage"], x["update"]) for x in stages if x["stage"] in ("sft", "bopo")] == [
    ("sft", 1),
    ("sft", 2),
    ("bopo", 1),
    ("bopo", 2),
  ]


def test_a_second_run_does_nothing_new(whole):
  runs, out, _ = whole
  before, metrics = rows(runs), (runs / "tiny" / "metrics.jsonl").read_text()
  figures = results(runs)
  again, _ = finish(start(runs))
  assert rows(runs) == before
  assert (runs / "tiny" / "metrics.jsonl").read_text() == metrics
  assert results(runs) == figures
  assert again == out


# (policy, episodes): the moment at which so many episodes of policies of that name are stored.
MOMENTS = [
  ("always-large", 3),  # the profile
  ("stratified", 4),  # the references
  ("bopo(lam=0.1)/", 3),  # rollouts of BoPO's first update
  ("oracle", 2),  # the evaluation
]


def stored(runs, prefix):
  return sum(key[0].startswith(prefix) for key in rows(runs))


def without_times(text):
  if text is None:  # the row refers to another policy's
    return None
  episode = json.loads(text)
  for step in episode["steps"]:
    del step["router_latency_s"]
    for call in step["calls"]:
      del call["latency_s"]
  return episode


def test_a_run_goes_on_where_it_was_killed(whole, tmp_path):
  kept = {}
  for policy, count in MOMENTS:
    process = start(tmp_path)
    reached = wait_for(process, lambda p=policy, c=count: stored(tmp_path, p) >= c)
    os.kill(process.pid, signal.SIGKILL)
    _, err = process.communicate()
    assert reached, err
    found = rows(tmp_path)
    assert kept.items() <= found.items()  # of what was there before, all is there and unchanged
    kept = found
  out, _ = finish(start(tmp_path))
  final = rows(tmp_path)
  assert kept.items() <= final.items()
  unbroken = rows(whole[0])
  assert final.keys() == unbroken.keys()
  for key in final:
    assert without_times(final[key]) == without_times(unbroken[key])
  assert results(tmp_path)["policies"] == results(whole[0])["policies"]
  assert out.splitlines()[-1].startswith("report: ")


def alive(group):
  """Processes of a group that have not ended."""
  found = []
  for stat in Path("/proc").glob("[0-9]*/stat"):
    try:
      fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
      continue
    if int(fields[2]) == group and fields[0] not in "XZ":
      found.append(int(stat.parent.name))
  return found


def test_ctrl_c_ends_a_run_cleanly(whole, tmp_path):
  # In a job in the background Ctrl-C is ignored, and a child would inherit that.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  process = start(tmp_path)
  signal.signal(signal.SIGINT, before)
  assert wait_for(process, lambda: stored(tmp_path, "always-small") >= 1)
  os.kill(process.pid, signal.SIGINT)
  out, err = process.communicate(timeout=60)
  assert process.returncode == 130, err
  assert "Traceback" not in err
  assert "stopped; the same command goes on from here" in err
  assert not alive(process.pid)  # it leads a process group of its own
  assert rows(tmp_path).items() and "report: " not in out


def test_paper_view(tmp_path):
  """Four steps are too few for any task, which a report has to bear as well."""
  flags = {
    "router.view": "paper",
    "env.max_steps": 4,
    "pretrain.epochs": 0,
    "router.max_tokens": 448,
  }
  flags |= {"sft.batch_episodes": 4, "sft.micro_episodes": 4, "evaluate.random_p": ()}
  out, _ = finish(start(tmp_path, *(f"--config.{name}={value}" for name, value in flags.items())))
  assert out.splitlines()[-1].startswith("report: ")
  assert results(tmp_path)["run"]["router"]["view"] == "paper"
  assert {p["success_percent"] for p in results(tmp_path)["policies"]} == {0.0}
