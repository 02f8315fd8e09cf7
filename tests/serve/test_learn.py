"""Test that one command plays an agent, trains, and goes on after it was killed."""

import contextlib
import dataclasses
import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import httpx2
import pandas as pd
import pytest
import standin
from endpoint import REPLY, Client, assistant, user
from standin import StandIn

from baar_jax.config import ValueConfig
from baar_jax.families.conditioned import load_default
from baar_jax.rollout.jobs import ALWAYS_LARGE
from baar_serve.again import roll_back
from baar_serve.config import ServeConfig, UpstreamsConfig, open_run
from baar_serve.episodes import name_task
from baar_serve.learn import AgentCommand, learn, play_all
from baar_serve.rival import list_rival_needs
from baar_serve.routers import AGAIN, FILES, OLDER, exchange_routers, finish_exchange
from baar_serve.verdict import compare, find_default, judge
from configs import quickstart

# Cached tokens have the input's price, because the stand-in knows the prompts of earlier
# sessions, so that dollars would depend on the order of sessions.
PRICES = ((1.0, 1.0, 2.0), (5.0, 5.0, 10.0))
# An agent that calls twice, and fails hard tasks without LARGE. In some sessions, it
# kills the command that has started it.
AGENT = """
import json, os, sys, urllib.request
file, *kills = sys.argv[1:]
with open(file, "a+") as log:
  print(os.environ["BAAR_SESSION"], file=log, flush=True)
  end = log.tell()  # Later sessions may write at the same time.
  log.seek(0)
  number = log.read(end).count("\\n")
models, messages = [], [dict(role="user", content=os.environ["BAAR_TASK"])]
for _ in range(2):
  body = json.dumps(dict(model="gpt-4.1-mini", messages=messages)).encode()
  url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
  headers = {"content-type": "application/json"}
  with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
    answer = json.load(reply)
  if str(number) in kills:
    os.kill(os.getppid(), 9)
  models.append(answer["model"])
  messages += [answer["choices"][0]["message"], dict(role="user", content="Go on.")]
sys.exit("hard" in os.environ["BAAR_TASK"] and "large" not in models)
"""


@pytest.fixture
def start(tmp_path, upstream, monkeypatch):
  """start(name): make a run whose router is small; return its configuration."""
  config = quickstart.get_config()
  config.value = ValueConfig(30, cost_weights=(0.1, 1.0), heads=2, widths=(8, 8))
  monkeypatch.setattr(quickstart, "get_config", lambda: config)
  (tmp_path / "agent.py").write_text(AGENT)

  def start(name):
    models = UpstreamsConfig(
      names=("small", "large"), prices=PRICES, base_urls=(upstream.url,)
    )
    config = ServeConfig(
      name=name,
      runs=str(tmp_path),
      policy="collect",
      record_text=True,
      max_total_usd=100.0,
      models=models,
    )
    open_run(config).close()
    return config

  return start


def run_command(tmp_path, upstream, name, *kills):
  """Run the command until it ends by itself; return its starts and its sessions."""
  tasks = tmp_path / "tasks.txt"
  tasks.write_text(
    "\n".join(f"{kind} {n:>300}" for n in "abc" for kind in ("hard", "easy"))
  )
  log = tmp_path / f"{name}.log"
  words = [sys.executable, tmp_path / "agent.py", log, *kills]
  agent = " ".join(map(str, words))
  command = [sys.executable, "-m", "baar_serve.learn", f"--agent={agent}"]
  command += [f"--tasks={tasks}", "--max_usd=100", f"--config.runs={tmp_path}"]
  command += [f"--config.name={name}", f"--config.models.base_urls=('{upstream.url}',)"]
  command += ["--config.models.names=('small','large')"]
  command += [f"--config.models.prices={PRICES}"]
  codes = []
  while not codes or codes[-1] == -9:
    codes.append(subprocess.run(command, stdout=subprocess.PIPE).returncode)
  assert codes[-1] == 0
  return len(codes), len(log.read_text().splitlines())


def read_result(config):
  """Read the stored sessions and the default cost weight."""
  run = open_run(config)
  table = run.store.table()[
    ["policy", "task_id", "purpose", "trial", "score", "large_calls"]
  ]
  rows = sorted(table.itertuples(index=False))
  default = load_default(run.files())
  run.close()
  return rows, default


def test_a_killed_command_goes_on_to_the_same_result(start, tmp_path, upstream):
  """Of six tasks four are for training, and each is played four times. The other two
  are played by both boundaries, and by two routers or by one."""
  plain, killed = start("plain"), start("killed")
  assert run_command(tmp_path, upstream, "plain") == (1, 4 * 4 + 4 + 3)
  starts, sessions = run_command(tmp_path, upstream, "killed", 2, 18, 23)
  assert starts == 4 and sessions > 4 * 4 + 4 + 3
  assert read_result(killed) == read_result(plain)
  assert (tmp_path / "killed" / "report" / "index.html").exists()


@pytest.mark.parametrize(
  "count, script, problem",
  [
    (2, "true", "has 2 tasks, and --max_usd is 5. Write at least 5 different"),
    (5, "true", "has made no call, .* exit status is 0; see .*agent.log"),
    (5, "echo much > $BAAR_SCORE; {agent}", "has the score 'much.*, not a number"),
    (5, "echo 7 > $BAAR_SCORE; {agent}", "has no score: .*less than or equal to 1"),
    (6, "{agent}; true", "a failed model has stopped it"),
    (
      8,
      "sleep 60 & echo $! >> {tmp}/pids; wait",
      "took longer than --agent_timeout_s; see .*agent.log",
    ),
  ],
)
def test_what_cannot_be_scored_stops_the_command(
  start, tmp_path, upstream, count, script, problem
):
  """Of six tasks, the second calls fail."""
  if count == 6:
    upstream.fault = lambda _, request: "503" if request["messages"][2:] else None
  tasks = tmp_path / "tasks.txt"
  tasks.write_text("\n".join(map(str, range(count))))
  agent = f"{sys.executable} {tmp_path}/agent.py {tmp_path}/log"
  with pytest.raises(ValueError, match=problem):
    words = f"sh -c '{script.format(agent=agent, tmp=tmp_path)}'"
    learn(
      start("broken"),
      AgentCommand(words, timeout_s=2.0 if count == 8 else 30.0),
      str(tasks),
      5.0,
    )
  for pid in (tmp_path / "pids").read_text().split() if count == 8 else ():
    # A process that is killed may need time, and then waits for its new parent.
    state = Path(f"/proc/{pid}/stat")
    for _ in range(200):
      is_running = state.exists() and ") Z " not in state.read_text()
      time.sleep(0.05 * is_running)
    assert not is_running


def test_a_new_router_is_served_only_if_it_is_no_worse(
  start, tmp_path, upstream, monkeypatch
):
  """Of six tasks, the fourth is the test. The routers score 0.5, 0.4 and 0.6 in it."""
  scores = {}

  def play(run, url, agent, need):
    messages = [user(f"Play {need.task.id}.")]
    for _ in range(2):
      place = f"{url}/s/{need.session}/v1/chat/completions"
      httpx2.post(
        place, json={"model": "baar", "messages": messages}
      ).raise_for_status()
      messages += [assistant(REPLY), user("On.")]
    score = scores["router"] if need.selected.rule == "router" else 0.5
    body = {"score": score, "task": need.task.id}
    httpx2.post(f"{url}/v1/sessions/{need.session}/score", json=body)

  def again(words="", **changes):
    scores.update(changes)
    tasks.write_text("\n".join("abcdef" + words))
    learn(config, AgentCommand("play"), str(tasks), 100.0, True)

  def read():
    with contextlib.closing(open_run(config)) as run:
      return (
        run.config.value.updates,
        find_default(run).key,
        (run.dir / "older").exists(),
      )

  monkeypatch.setattr("baar_serve.learn.play_session", play)
  config = start("mine")
  tasks = tmp_path / "tasks.txt"
  with pytest.raises(ValueError, match="mine has no router with a verdict. Leave out"):
    again()
  scores["router"] = 0.5
  learn(config, AgentCommand("play"), str(tasks), 100.0)
  first = read()
  with (
    contextlib.closing(open_run(config)) as run,
    pytest.raises(ValueError, match="mine has no older router. Leave out --rollb"),
  ):
    roll_back(run)
  with pytest.raises(ValueError, match="mine has no new session: its router was trai"):
    again()
  again("g", router=0.4)
  assert read() == first
  again("gh", router=0.6)
  assert read() == (32, first[1].replace("30", "32"), True) and first[0] == 30
  with contextlib.closing(open_run(config)) as run:
    tests = run.store.tasks("test")
    assert [task.id for task in tests] == ["d"] and len(run.store.tasks("train")) == 6
    roll_back(run)
  assert read() == (30, first[1], True)
  # Without an agent, a server plays what is missing for clients.
  settings = dict(models={"prices": PRICES}, policy="collect", record_text=True)
  for played, missing in (("a", "dev"), ("bb", "test"), ("d", "")):
    with Client(tmp_path, upstream, "mine", **settings) as client:
      for number, task in enumerate(played):
        client.chat(f"{task}{number}", {"x-baar-task": task})
        client.score(0.5, f"{task}{number}")
    lacks = pytest.raises(ValueError, match=f"lacks episodes on {missing}")
    with lacks if missing else contextlib.nullcontext():
      learn(config, AgentCommand(""), "", 0.0, True)
  assert read()[0] == 33


@pytest.mark.parametrize("name", [AGAIN, OLDER])
@pytest.mark.parametrize("moves", range(7))
def test_a_killed_exchange_of_routers_is_finished(tmp_path, monkeypatch, name, moves):
  for directory, text in ((tmp_path, "one"), (tmp_path / name, "other")):
    directory.mkdir(exist_ok=True)
    for file in FILES:
      (directory / file).write_text(text)
  rename = Path.rename
  kill = mock.Mock(side_effect=[*[mock.DEFAULT] * moves, KeyboardInterrupt])
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(Path, "rename", lambda *paths: kill() and rename(*paths))
    exchange_routers(tmp_path, name)
  for _ in range(2):
    finish_exchange(tmp_path)
  for directory, text in ((tmp_path, "other"), (tmp_path / OLDER, "one")):
    assert [(directory / file).read_text() for file in FILES] == [text] * 3
  assert {path.name for path in tmp_path.iterdir()} == {*FILES, OLDER, "lock"}


@pytest.fixture
def rival(start, tmp_path, monkeypatch):
  """rival(fault): play the test of five tasks by another router; return the run."""
  with contextlib.ExitStack() as stack:

    def play(fault):
      other = stack.enter_context(StandIn(REPLY).running())
      other.fault = fault
      route = f"auto/1={other.url}"
      config = dataclasses.replace(start("mine"), rivals=(route,))
      run = stack.enter_context(contextlib.closing(open_run(config)))
      for name in "abcde":
        name_task(run.store, name, "", 9)
      agent = f"{sys.executable} {tmp_path}/agent.py {tmp_path}/log"
      command = AgentCommand(agent, tasks="abcde")
      play_all(config, run, list_rival_needs(run, route), command, route)
      return run, other, route

    yield play


def test_a_rival_plays_with_the_dollars_of_its_usage(rival, monkeypatch):
  monkeypatch.setitem(standin.FAULTS, "stated", standin.fault(usage={"cost": 0.002}))
  run, other, route = rival("stated")
  assert {request["model"] for request in other.seen} == {"auto/1"}
  (episode,) = run.store.episodes("rival-auto-1")
  assert (episode.task_id, episode.score) == ("d", 1.0)
  assert episode.cost_usd == pytest.approx(0.004) and run.budget.settled_usd == 0.004
  assert list_rival_needs(run, route) == []


@pytest.mark.parametrize("fault", ["unpriced", None])
def test_a_rival_whose_dollars_are_unknown_stops(rival, fault):
  """One has no usage, the other one a model without a price."""
  with pytest.raises(
    ValueError, match="The rival auto/1 reports no usage with a price"
  ):
    rival(fault)


def test_a_rival_that_does_not_answer_is_named(start, tmp_path):
  config = dataclasses.replace(start("mine"), rivals=("auto=http://127.0.0.1:9/v1",))
  with pytest.raises(ValueError, match="The rival auto=.* does not answer .ConnectErr"):
    learn(config, AgentCommand(""), "", 0.0)


@pytest.fixture
def turns(monkeypatch):
  """Let the options of tasks take turns, instead of draws."""
  turns = itertools.count()

  def pick(options):
    return options[next(turns) % len(options)]

  monkeypatch.setattr("random.choice", pick)


def test_collect_gives_a_session_what_its_task_still_needs(open_client, turns):
  """Tasks a and c are for training, b is a validation task. What has a score is no
  option any more."""
  client = open_client(policy="collect", record_text=True)

  def play(session, task):
    client.chat(session, {"x-baar-task": task})
    return client.session(session)["policy"]

  assert (play("1", "a"), play("2", "b")) == ("always-small", "always-large")
  mixed = play("3", "a")
  assert mixed.startswith("stratified")
  assert [play(name, "c") for name in "45"] == ["always-small", "always-large"]
  client.post("/v1/sessions/1/score", {"score": 1.0})
  assert [play(name, "a") for name in "67"] == [mixed, "always-large"]
  assert client.run.store.tasks("train")[0].description == "go out"


def test_collect_keeps_a_session_s_policy_after_a_restart(tmp_path, upstream, turns):
  for name in "ab":
    with Client(tmp_path, upstream, policy="collect", record_text=True) as client:
      client.chat("s", {"x-baar-conversation": name})
      found = [state["policy"] for state in client.session()["conversations"]]
  assert found == ["always-small"] * 2


@pytest.mark.parametrize(
  "count, score, verdict, figures",
  [
    (48, 1, "serve baar", "+0.000 ± 0.040"),
    (
      48,
      0,
      "serve baar:large",
      "-0.920 ± 0.087",
    ),
    (
      4,
      1,
      "not settled by 4 tests; 1305 more tasks would settle it",
      "+0.000 ± 0.333",
    ),
  ],
)
def test_few_equal_scores_do_not_settle_the_verdict(
  monkeypatch, count, score, verdict, figures
):
  """With two more tasks, the variance of N equal scores is 1 / (N + 2), so the half is
  2 / (N + 2). 6 (20 / 3)^2 = 266.7 tests would make 1 / 3 as narrow as 0.05: 261 more. If 46 of
  48 tasks are lost, the variance is 47 / 50 - 0.92^2."""
  keys = [ALWAYS_LARGE.key, "router"]
  rows = pd.DataFrame([[1] * count, [1, 1] + [score] * (count - 2)], keys)
  usd = pd.DataFrame({"cost_usd": [1, 2]}, keys)
  data = SimpleNamespace(per_task=lambda column: rows, mean=lambda columns: usd)
  monkeypatch.setattr("baar_serve.verdict.load_split", lambda *_: data)
  router = SimpleNamespace(key="router")
  monkeypatch.setattr("baar_serve.verdict.find_default", lambda run: router)
  run = SimpleNamespace(store=None, config=None)
  dollars = "$2.000000 a test and $1.000000"
  assert str(compare(run, router, ALWAYS_LARGE)) == f"score {figures}, {dollars}"
  assert judge(run) == (
    f"Verdict: {verdict}. The router's score against always-LARGE's: {figures}, "
    "corrected for few tasks."
  )
