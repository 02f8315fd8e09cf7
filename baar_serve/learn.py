"""Play an agent's tasks, train a router on its sessions, and tell what it saves.

python -m baar_serve.learn --agent="python my_agent.py" --tasks=tasks.txt --max_usd=5
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

import httpx2
from absl import flags

from baar_jax.episode import SPLITS
from baar_jax.families.conditioned import save_default
from baar_jax.families.table import FAMILIES
from baar_jax.report.table import load_split
from baar_jax.rollout.jobs import BOUNDARIES, CONDITIONED
from baar_jax.router.inputs import learn_vocabulary
from baar_jax.run import Run, save_vocabulary
from baar_jax.stages import evaluate
from baar_jax.store import require_file
from baar_serve import again, rival
from baar_serve.__main__ import build, make_server
from baar_serve.app import App
from baar_serve.config import ServeConfig, open_run, run_command
from baar_serve.desk import COLLECT
from baar_serve.episodes import SPLIT_OF, client_specs, name_task
from baar_serve.plan import MIXES, Need, has_router, list_needs, list_router_specs
from baar_serve.rival import find_spec
from baar_serve.routers import CONFIG
from baar_serve.verdict import compare, find_default, judge

AT_ONCE = 4  # The number of sessions that are played at the same time.
# The keys of an agent that has none; the endpoint needs no key.
KEYS = {"OPENAI_API_KEY": "unused", "ANTHROPIC_API_KEY": "unused"}
# Seconds before each try to send a score; a session's last call may still be in flight.
WAITS_S = (0, 1, 10)
TIMEOUT_S = 3600.0  # The most seconds of a session, unless the user sets others.
# The process groups of the agents that run now.
GROUPS: set[int] = set()


class AgentCommand(NamedTuple):
  """How an agent plays tasks.

  Attributes:
    command: the command that plays the task in BAAR_TASK; "" plays nothing.
    timeout_s: the seconds after which it is ended.
    tasks: the names of the tasks.
  """

  command: str
  timeout_s: float = TIMEOUT_S
  tasks: Sequence[str] = ()


def learn(
  config: ServeConfig,
  agent: AgentCommand,
  path: str,
  max_usd: float,
  is_again: bool = False,
) -> None:
  """Play what is missing, train the router, choose its default, and report.

  The run's stored sessions are the only state, so a command that was killed goes on.

  Args:
    agent: the agent that plays the tasks.
    path: the file with a task on each line.
    max_usd: the most US dollars of all sessions together.
    is_again: whether to train a trained router again.

  Raises:
    ValueError: a flag is missing or wrong, a session cannot be scored, or `max_usd` is
      too low.
  """
  if agent.command:
    agent = agent._replace(tasks=read_tasks(Path(path), max_usd))
  for route in config.rivals:
    rival.check_answers(route)
  config = dataclasses.replace(
    config,
    policy=COLLECT,
    router="",
    record_text=True,
    max_usd=None,
    max_large_calls=None,
    max_total_usd=max_usd,
  )
  for split in SPLITS:
    with contextlib.closing(open_run(config)) as served:
      run = served
      for name in agent.tasks:
        name_task(run.store, name, "", run.config.env.max_steps)
      if is_again:
        run = again.begin(served)
      for _ in range(MIXES):
        play_all(config, served, list_needs(run, split), agent)
      if split == "train" and not has_router(run):
        fit(run, is_again)
      elif split == "dev":
        choose(run)
      elif split == "test":
        lines = []
        for route in config.rivals:
          needs = rival.list_rival_needs(run, route)
          play_all(config, served, needs, agent, route)
          lines.append(f"{route}: {compare(run, find_default(run), find_spec(route))}.")
        lines.append(judge(run))
        if is_again:
          lines.append(again.settle(served, run))
  with contextlib.closing(open_run(config)) as run:
    evaluate.report(run)
    run.print("\n".join(lines))


def read_tasks(path: Path, max_usd: float) -> list[str]:
  """Read the names of tasks, one on each line.

  Raises:
    ValueError: there are too few, or no dollars to play them.
  """
  names = re.findall(r"\S.*\S|\S", require_file(path).read_text())
  count = len({*names})
  if count < len(SPLIT_OF) or not max_usd:
    raise ValueError(
      f"{path} has {count} tasks, and --max_usd is {max_usd:g}. Write at "
      f"least {len(SPLIT_OF)} different tasks, one on each line, and set --max_usd "
      "above 0."
    )
  return names


def fit(run: Run, is_again: bool) -> None:
  """Train the router on the sessions of training tasks that have texts.

  Args:
    is_again: whether another router of the run was trained before.

  Raises:
    ValueError: it was trained on as many sessions.
  """
  tasks = {task.id: task for task in run.store.tasks("train")}
  keys = [spec.key for spec in client_specs(run.config).values()]
  episodes = []
  for key in dict.fromkeys([*keys, *run.store.table().policy]):
    for episode in run.store.episodes(key):
      has_texts = any(step.observation or step.action for step in episode.steps)
      if episode.task_id in tasks and has_texts:
        episodes.append(episode)
  mark = f"trained on {len(episodes)} sessions"
  if is_again and run.store.finished(mark):
    raise ValueError(
      f"{run.dir.parent} has no new session: its router was {mark}. Leave out --again."
    )
  run.dir.mkdir(exist_ok=True)
  settings = json.dumps(dataclasses.asdict(run.config), indent=2)
  (run.dir / CONFIG).write_text(settings)
  save_vocabulary(run.dir, learn_vocabulary(tasks, episodes))
  run.store.finish("references")
  FAMILIES[CONDITIONED].train(run, lambda *_: episodes)
  run.store.finish(mark)


def choose(run: Run) -> None:
  """Choose the router's default cost weight by the sessions of validation tasks."""
  specs = {spec.key: spec for spec in list_router_specs(run.config)}
  data = load_split(run.store, [*BOUNDARIES, *specs.values()], run.config, "dev")
  default = specs[evaluate.choose_default(data, [*specs])]
  save_default(run.files(), default.cost_weight)


@contextlib.contextmanager
def serving(app: App) -> Iterator[str]:
  """Serve an application in a thread, and yield its address, at a free port."""
  with socket.create_server(("127.0.0.1", 0)) as listener:
    server = make_server(app)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
      yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
      server.should_exit = True
      thread.join()


def play_all(
  config: ServeConfig,
  run: Run,
  needs: Sequence[Need],
  agent: AgentCommand,
  route: str = "",
) -> None:
  """Play and score the sessions of the agent's tasks, a few at once.

  A session that a killed command has left open is renamed, so that it is played from
  its beginning; its dollars stay in the ledger.

  Args:
    needs: the sessions.
    route: the rival that answers; "" are the models.

  Raises:
    ValueError: a session cannot be scored.
  """
  needs = [need for need in needs if need.task.id in agent.tasks]
  if not needs:
    return
  app = build(config, run)
  answering = rival.seat(app.exchange, route) if route else None
  rename = "UPDATE purses SET name = name || '-stopped-' || id WHERE name = ?"
  for need in needs:
    app.exchange.sessions.commit((rename, (need.session,)))
    app.desk.assigned[need.session] = need.selected
  with (
    serving(app) as url,
    ThreadPoolExecutor(AT_ONCE) as threads,
    run.progress(f"{needs[0].task.split} sessions", len(needs), 0, "played") as bar,
  ):

    def play(need: Need) -> None:
      """Play a session, whose dollars must be known."""
      try:
        play_session(run, url, agent, need)
      finally:
        if answering and answering.problem:
          raise ValueError(answering.problem)

    for _ in threads.map(play, needs):
      bar.set_postfix_str(f"${run.budget.settled_usd:.4f}", refresh=False)
      bar.update()


def play_session(run: Run, url: str, agent: AgentCommand, need: Need) -> None:
  """Play a session by the agent's command, and send its score to the endpoint.

  Args:
    url: the address of the endpoint.

  Raises:
    ValueError: the agent made no call or took too long, a call was refused, the last
      one failed, or there is no score.
  """
  name = need.session
  path = run.dir / "agent.log"
  with tempfile.TemporaryDirectory() as directory, path.open("a") as log:
    score_file = Path(directory, "score")
    variables = dict(
      BAAR_TASK=need.task.id,
      BAAR_SESSION=name,
      BAAR_TRIAL=str(need.trial),
      BAAR_SCORE=str(score_file),
      OPENAI_BASE_URL=f"{url}/s/{name}/v1",
      OPENAI_API_BASE=f"{url}/s/{name}/v1",
      ANTHROPIC_BASE_URL=f"{url}/s/{name}",
    )
    try:
      code = run_agent(agent, KEYS | os.environ | variables, log)
    except subprocess.TimeoutExpired:
      raise ValueError(
        f"Session {name} took longer than --agent_timeout_s; see {path}. Raise it, or "
        "correct the agent, and run the same command again."
      ) from None
    text = str(float(code == 0))
    if score_file.exists():
      text = score_file.read_text()
  session = httpx2.get(f"{url}/v1/sessions/{name}").json()
  # After an outage, the session's last attempt is a failed one.
  if session.get("refusals", 1) or session["changed_s"] in [
    failed["at_s"] for failed in session["failures"]
  ]:
    raise ValueError(
      f"Session {name} has made no call, or --max_usd or a failed model has stopped "
      f"it. The agent's exit status is {code}; see {path}. Then run the same command "
      "again."
    )
  try:
    body = {"score": float(text), "task": need.task.id}
  except ValueError:
    raise ValueError(f"{name} has the score {text!r:.40}, not a number.") from None
  for wait_s in WAITS_S:
    time.sleep(wait_s)
    answer = httpx2.post(f"{url}/v1/sessions/{name}/score", json=body)
    if answer.status_code != 409:
      break
  if answer.is_error:
    raise ValueError(f"{name} has no score: {answer.text}. See {path}.")


def run_agent(agent: AgentCommand, variables: Mapping[str, str], log: TextIO) -> int:
  """Run an agent in a process group of its own; return its exit status.

  Raises:
    TimeoutExpired: it took too long; the whole group is killed then.
  """
  words = shlex.split(agent.command)
  with subprocess.Popen(
    words,
    env=variables,
    stdin=subprocess.DEVNULL,
    stdout=log,
    stderr=log,
    process_group=0,
  ) as process:
    GROUPS.add(process.pid)
    try:
      return process.wait(agent.timeout_s)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      raise
    finally:
      GROUPS.remove(process.pid)


def stop(*_: object) -> None:
  """End the command and its agents at once, as Ctrl-C does with a single group."""
  for group in [*GROUPS]:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(group, signal.SIGINT)
  os._exit(130)


def command() -> None:
  """Run the command line."""
  flags.DEFINE_string("agent", "", "Command that plays the task in BAAR_TASK.")
  flags.DEFINE_float("agent_timeout_s", TIMEOUT_S, "Seconds of a session.", 0.0)
  flags.DEFINE_string("tasks", "", "File with a task on each line.")
  flags.DEFINE_bool("again", False, "Train a trained router again.")
  flags.DEFINE_bool("rollback", False, "Serve the router before the newest one.")
  flags.DEFINE_float("max_usd", 0.0, "Most US dollars of all sessions.", 0.0)
  values = flags.FLAGS

  def start(config: ServeConfig) -> None:
    """Learn with the flags of the command line."""
    signal.signal(signal.SIGINT, stop)
    agent = AgentCommand(values.agent, values.agent_timeout_s)
    if values.rollback:
      with contextlib.closing(open_run(config)) as run:
        again.roll_back(run)
      return
    learn(config, agent, values.tasks, values.max_usd, values.again)

  run_command(start)


if __name__ == "__main__":
  command()
