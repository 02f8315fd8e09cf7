"""Test that served and imported sessions become tasks and episodes of a run."""

import json

import pytest
import tiny
from recorded import atif, chat, load

from baar_jax.config import ModelsConfig
from baar_jax.run import Run
from baar_serve import traces
from baar_serve.config import ServeConfig
from baar_serve.episodes import add_session, name_task


@pytest.fixture
def run(tmp_path):
  config = tiny.config(tmp_path, kind="stored")
  prices, urls = ((1.0, 0.5, 2.0), (10.0, 5.0, 20.0)), ("http://127.0.0.1:9/v1",)
  config.models = ModelsConfig(
    "chat", ("small", "large"), prices=prices, base_urls=urls
  )
  config.profile.trials = 2
  config.profile.robustness = (1,)
  run = Run(config)
  yield run
  run.close()


def add(run, task_id, policy, text="do {}"):
  mark = f"{task_id} {policy} {len(run.store.keys(policy))}"
  episode = tiny.episode(task_id, policy)
  session = (run.store, run.config, mark, episode, text.format(task_id))
  assert [add_session(*session) for _ in range(2)] == [True, False]


def test_a_task_stays_in_the_split_of_its_first_session(run):
  for name in "abcdeffedcba":
    add(run, name, "always-small")
  # Without its text, task g would be a dev task, and h a train task.
  add(run, "g", "always-small", "do d")
  add(run, "h", "always-small", "do b")
  tasks = [
    [task.id for task in run.store.tasks(split)] for split in ("train", "dev", "test")
  ]
  assert tasks == [["a", "c", "e", "f"], ["b", "h"], ["d", "g"]]
  assert run.store.tasks("dev")[1].description == "do b"


@pytest.mark.parametrize(
  "task, policy, trials",
  [  # Task a is a train task, b a dev task and d a test task.
    ("a", "always-small", "profile 0 profile 1 robustness 0 rollout 0"),
    ("b", "always-large", "dev 0 dev 1 profile 0 profile 1"),
    ("d", "always-small", "test 0 test 1"),
    ("a", "bopo(lam=0.7)/1", "rollout 0 rollout 1"),
    ("a", "stratified(samples=3)", "reference 1 reference 2 reference 3 reference 4"),
  ],
)
def test_sessions_are_the_trials_that_stages_read(run, task, policy, trials):
  """Task b needs its evaluation first, and a training task its profile."""
  for name in "abcd":
    name_task(run.store, name, "", 9)
  purposes, numbers = trials.split()[::2], map(int, trials.split()[1::2])
  keys = [*zip([task] * len(purposes), purposes, numbers)]
  for _ in keys:
    add(run, task, policy)
  assert [episode.key for episode in run.store.episodes(policy)] == sorted(keys)


def test_chat_lines_are_an_episode_and_stored_once(run, capsys):
  for _ in range(2):
    load(run, chat())
  assert "Imported 0 sessions; 1 were already stored." in capsys.readouterr().out
  (episode,) = run.store.episodes("stratified(samples=3)")
  assert (*episode.key, episode.score) == ("fix", "reference", 1, 1.0)
  steps = [(step.observation, step.model, step.action) for step in episode.steps]
  assert steps == [("", 0, "act 0"), ("result 0", 1, "act 1")]
  # SMALL: (60 uncached x 1 + 40 cached x 0.5 + 10 completion x 2) / 1e6 dollars.
  # LARGE costs ten times as much.
  assert [step.cost_usd for step in episode.steps] == pytest.approx([100e-6, 1000e-6])
  assert [task.description for task in run.store.tasks("train")] == ["Fix it."]


def test_an_atif_trajectory_is_an_episode(run):
  load(run, [atif()], "trajectory.json")
  (episode,) = run.store.episodes("always-large")
  assert (episode.task_id, episode.score) == ("door", 0.5)
  steps = [(step.observation, step.action) for step in episode.steps]
  assert steps == [("", 'look {"at": "door"}'), ("It is open.", "done")]
  assert episode.steps[0].calls[0].usage.cached_tokens == 40


def test_steps_that_no_model_wrote_are_no_calls(run):
  record = atif()
  look, done = record["steps"][2:]
  copied = look | dict(is_copied_context=True)
  record["steps"][2:] = [copied, look, look | dict(llm_call_count=0), done]
  load(run, [record], "trajectory.json")
  (episode,) = run.store.episodes("always-large")
  steps = [(step.observation, step.action) for step in episode.steps]
  opened = "It is open."
  twice = f"{opened}\n{opened}"
  assert steps == [(opened, 'look {"at": "door"}'), (twice, "done")]


def test_half_of_a_last_line_is_left_out(run, capsys):
  path = run.dir / "traces.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in chat()) + '{"session":')
  traces.store_file(ServeConfig(traces=str(path)), run)
  out = capsys.readouterr().out
  assert "line 3: half of a line was left out" in out and "Imported 1 sessions" in out


def test_scores_replace_those_of_a_directorys_logs(run, tmp_path):
  scores = tmp_path / "scores.json"
  scores.write_text('{"b": 0.25, "fix": 0.75}')
  logs = tmp_path / "logs" / "deep"
  logs.mkdir(parents=True)
  (logs / "b.json").write_text(json.dumps(atif()))
  (logs / "notes.txt").write_text("no log")
  (logs / "a.jsonl").write_text("\n".join(map(json.dumps, chat())))
  traces.store_file(ServeConfig(traces=str(tmp_path / "logs"), scores=str(scores)), run)
  found = run.store.episodes("stratified(samples=3)") + run.store.episodes(
    "always-large"
  )
  assert [(e.task_id, e.score) for e in found] == [("fix", 0.75), ("door", 0.25)]


def test_a_file_with_one_error_is_refused_as_a_whole(run):
  with pytest.raises(ValueError, match="line 3: a field is missing or wrong"):
    load(run, [*chat(), "text"])
  assert not len(run.store.table())
