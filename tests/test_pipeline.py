"""Run the whole pipeline on a tiny sandbox from the command line, and interrupt it."""

import itertools
import os
import re
import shutil
import signal
from contextlib import closing

import pytest
from program import finish, interrupt, metrics, policies, results, rows, start, updates

from baar_jax import Router
from baar_jax.config import Config
from baar_jax.llms.history import extend, open_conversation, write_reply
from baar_jax.store import Store


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The directory and the output of a run without interruption."""
  runs = tmp_path_factory.mktemp("whole")
  return runs, finish(start(runs))


def test_a_run_ends_with_a_report_and_repeating_it_does_nothing(whole):
  runs, out = whole
  path = runs / "tiny" / "report" / "index.html"
  page = path.read_text()
  assert out.splitlines()[-1] == f"report: {path}"
  assert "image/png" in page and "cripted" in page
  for label in ("BoPO, λ 0.1", "First-Large"):
    assert f"\n{label}, at most 1 LARGE call " in out
  keys = {key for key in policies(runs) if "(" in key}
  assert keys and not any(key in out or key in page for key in keys)
  assert updates(runs) == [("sft", 1), ("sft", 2), ("bopo", 1), ("bopo", 2)]
  (stability,) = results(runs)["robustness"]
  assert (stability["trials"], stability["tasks"]) == (1, 6)
  before = rows(runs), metrics(runs), results(runs)
  # Only a training prints its dev loss, or what the heads learn from.
  once = re.compile("dev loss|value: learning from [0-9]+ stored decisions$")
  again = [line for line in out.splitlines() if not once.search(line)]
  assert finish(start(runs)).splitlines() == again
  assert (rows(runs), metrics(runs), results(runs)) == before


@pytest.mark.parametrize(
  "policy, left_out",
  [
    ("conditioned(update=20,cost_weight=0.5,K=1)", ""),
    ("bopo(lam=0.1,update=2,threshold=0.5,K=1)", "value"),
  ],
)
def test_a_router_in_python_decides_as_the_evaluation_did(
  whole, tmp_path, policy, left_out
):
  """It gets the input of clients: messages, and the calls that are left."""
  directory = tmp_path / "run"
  ignored = shutil.ignore_patterns(left_out)
  shutil.copytree(whole[0] / "tiny", directory, ignore=ignored)
  router = Router.load(directory)
  with closing(Store(directory / "episodes.sqlite")) as store:
    tasks = {task.id: task for task in store.tasks("dev")}
    episodes = [e for e in store.episodes(policy) if e.task_id in tasks]
  for episode in episodes:
    messages = open_conversation("Act.", tasks[episode.task_id], "")
    messages[-1]["content"] += episode.steps[0].observation
    left = 1
    for step, after in itertools.zip_longest(episode.steps, episode.steps[1:]):
      choice = router.decide(messages, left_large_calls=left, session=str(episode.key))
      assert choice.model == Config().models.names[step.model]
      assert choice.probabilities[choice.model] >= 0.5
      if after:
        extend(messages, write_reply("So.", step.action, False), after.observation)
      left -= step.model
  assert episodes


# One in each stage, and two in BoPO's.
MOMENTS = [
  lambda runs: "always-large" in policies(runs),
  lambda runs: "stratified(samples=3)" in policies(runs),
  lambda runs: '"sft"' in metrics(runs),
  lambda runs: "bopo(lam=0.1)/1" in policies(runs),
  lambda runs: any(runs.glob("tiny/checkpoints/bopo-*/*")),
  lambda runs: "first-large(K=1)" in policies(runs),
  lambda runs: any(runs.glob("tiny/report/*")),
]


def without_times(stored):
  """Drop latencies; an episode without text refers to another policy's."""
  latency = re.compile(r'latency_s":[^,}]*')
  return {key: latency.sub("", text or "") for key, text in stored.items()}


def test_a_killed_run_resumes_to_the_same_results(whole, tmp_path):
  kept = {}
  for moment in MOMENTS:
    interrupt(start(tmp_path), lambda moment=moment: moment(tmp_path), signal.SIGKILL)
    before = kept
    kept = rows(tmp_path)
    assert before.items() <= kept.items()  # all that was there is there, unchanged
  finish(start(tmp_path))
  final = rows(tmp_path)
  assert kept.items() <= final.items()
  assert without_times(final) == without_times(rows(whole[0]))
  assert results(tmp_path)["policies"] == results(whole[0])["policies"]


def test_ctrl_c_ends_a_run_cleanly(tmp_path):
  # A background job ignores Ctrl-C, and its child processes would inherit that.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  # These are more trials than it can play before the signal.
  process = start(tmp_path, "--config.profile.trials=1000")
  signal.signal(signal.SIGINT, before)
  out, err = interrupt(process, lambda: rows(tmp_path), signal.SIGINT)
  assert process.returncode == 130 and "Traceback" not in err, err
  assert "stopped; run the same command again to continue" in err
  assert "report: " not in out
  with pytest.raises(ProcessLookupError):  # its process group is empty now
    os.killpg(process.pid, 0)
