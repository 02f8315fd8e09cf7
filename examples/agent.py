"""An agent of OpenAI's client plays ScienceWorld through an endpoint that learns.

python -m examples.agent collect    # plays 50 tasks with SMALL, LARGE and mixes
python -m examples.agent train      # a router learns from these sessions
python -m examples.agent play       # it is served, and judged on other tasks

A number behind "collect" or "play" is that of the tasks.

The models behind the endpoint are stand-ins on this machine. They know the game's
solution and err at the rates of the scripted pair, so no key is needed.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import openai

from baar_jax.config import Config, EnvConfig, EvaluateConfig, ModelsConfig, ServeConfig
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.envs.scienceworld.errors import ScienceWorldErrors
from baar_jax.episode import Task
from baar_jax.llms.agent import NO_ACTION, extend, open_conversation, parse_action
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.rollout.budget import unlimited  # the endpoint keeps the books
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles
from configs import quickstart

# Ports.
ENDPOINT = 8800
UPSTREAM = 8801
DIRECTORY = Path("runs") / "agent"
PAIR = ScriptedPair(ModelsConfig().names, ScienceWorldErrors())
GAMES = {}  # agents by session


class Play(NamedTuple):
  """One session to be played."""

  task: Task
  model: str  # that the client asks for
  trial: int


def get_config() -> Config:
  """Return the configuration of the run."""
  c = quickstart.get_config()
  c.profile.trials = 3
  c.references.samples = 6
  c.value.prices = (0.1, 0.5, 1.0)
  return dataclasses.replace(
    c,
    name=DIRECTORY.name,
    env=EnvConfig("served"),
    models=ModelsConfig("chat", base_urls=(f"http://127.0.0.1:{UPSTREAM}/v1",)),
    evaluate=EvaluateConfig(seeds=3, random_p=(), call_budgets=(3, 6)),
    serve=ServeConfig(port=ENDPOINT, policy="small", record_text=True, max_sessions=16),
  )


def play(client: openai.OpenAI, env: Env, job: Play) -> None:
  """Play an episode: a ReAct loop whose calls name their session and its task."""
  task = job.task
  session = f"{job.model} {task.id} {job.trial}"
  observation = env.reset(task.id)
  GAMES[session] = PAIR.start(env, task, job.trial, unlimited)
  messages = open_conversation(env.system_prompt, task, observation)
  headers = {"x-session-id": session, "x-baar-task": task.id}
  done = False
  while not done and len(messages) < 2 + 2 * task.max_steps:
    headers["x-baar-score"] = str(env.score())
    completion = client.chat.completions.create(
      model=job.model, messages=messages, user=session, extra_headers=headers
    )
    reply = completion.choices[0].message.content
    action = parse_action(reply)
    observation = NO_ACTION
    if action:
      observation, done = env.step(action)
    extend(messages, reply, observation)
  path = f"/sessions/{quote(session, safe='')}/score"
  client.post(path, body={"score": env.score()}, cast_to=object)


class StandIn(BaseHTTPRequestHandler):
  """Answers as the scripted model would, in the game that `user` names."""

  def do_POST(self) -> None:
    """Answer a chat completion."""
    asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
    model = asked["model"]
    agent = GAMES[asked["user"]][PAIR.names.index(model)]
    reply = agent.reply(asked["messages"], step=len(asked["messages"]) // 2 - 1)
    message = dict(role="assistant", content=reply.text)
    answer = dict(
      id="1",
      object="chat.completion",
      created=0,
      model=model,
      choices=[dict(index=0, finish_reason="stop", message=message)],
      usage=dataclasses.asdict(reply.call.usage),
    )
    self.send_response(200)
    self.send_header("content-type", "application/json")
    self.end_headers()
    self.wfile.write(json.dumps(answer).encode())

  def log_message(self, *args: object) -> None:
    """Log nothing: a line for each call would be too much."""


def start(stage: str, *settings: str, **options: int) -> subprocess.Popen:
  """Start a stage of this run."""
  words = ["main.py", "--config=examples/agent.py", f"--stage={stage}", *settings]
  print("+ python", *words, flush=True)
  return subprocess.Popen([sys.executable, *words], **options)


def run(*stages: str) -> None:
  """Run stages; exit if one fails."""
  for stage in stages:
    code = start(stage).wait()
    if code:
      sys.exit(code)


def play_all(envs: Sequence[Env], plan: Iterable[Play], *settings: str) -> None:
  """Serve, and play, as many sessions at a time as there are environments."""
  client = openai.OpenAI(base_url=f"http://127.0.0.1:{ENDPOINT}/v1", api_key="-")
  server = start("serve", *settings, stdout=subprocess.PIPE)
  jobs = iter(plan)

  def play_share(env: Env) -> None:
    for job in jobs:  # all threads share them
      with contextlib.suppress(openai.ConflictError):  # it has its score already
        play(client, env, job)

  try:
    if not server.stdout.readline():
      sys.exit(server.wait())
    with ThreadPoolExecutor(len(envs)) as threads:
      list(threads.map(play_share, envs))
  finally:
    server.send_signal(signal.SIGINT)
    server.wait()


def list_plays(
  trials: Iterable[int], tasks: Sequence[Task], *models: str
) -> list[Play]:
  """List sessions: each task with each model, once for each trial."""
  return [Play(task, model, k) for k in trials for task in tasks for model in models]


def collect(c: Config, envs: Sequence[Env], tasks: Sequence[Task]) -> None:
  """Play what the router learns from."""
  trials = range(c.profile.trials)
  play_all(envs, list_plays(trials, tasks, "baar:small", "baar:large"))
  run("profile")
  with contextlib.closing(Store(DIRECTORY / "episodes.sqlite")) as store:
    profiles = load_profiles(store, c, "train", "dev")
  hard = [t for t in tasks if t.id in profiles and profiles[t.id].difficulty == "hard"]
  trials = range(1000, 1000 + c.references.samples)
  play_all(envs, list_plays(trials, hard, "baar:stratified"))


def judge(c: Config, envs: Sequence[Env]) -> None:
  """Play dev and test tasks with the router, and write the report."""
  with contextlib.closing(Store(DIRECTORY / "episodes.sqlite")) as store:
    dev = store.tasks("dev")
    test = store.tasks("test")
  seeds = c.evaluate.seeds
  models = [f"baar:price={price:g}" for price in c.value.prices]
  models += [f"baar:K={K}" for K in c.evaluate.call_budgets]
  plan = list_plays(range(seeds), test, *models)
  # SMALL and LARGE have played test tasks in `collect`, and dev tasks as often as a
  # profile needs.
  first = c.profile.trials
  trials = range(first, first + seeds)
  plan += list_plays(trials, dev, *models, "baar:small", "baar:large")
  play_all(envs, plan, "--config.serve.policy=router")
  run("evaluate", "report")


def main(stage: str = "", count: str = "50") -> None:
  """Run a stage of the example on `count` tasks."""
  if stage not in ("collect", "train", "play") or not count.isdecimal():
    print(__doc__, file=sys.stderr)
    sys.exit(2)
  if stage == "train":
    run("references", "pretrain", "value")
    return
  upstream = ThreadingHTTPServer(("127.0.0.1", UPSTREAM), StandIn)
  threading.Thread(target=upstream.serve_forever, daemon=True).start()
  c = get_config()
  sizes = dict(
    train_tasks=int(count),
    max_steps=c.env.max_steps,
    options={"gold_dir": str(DIRECTORY.parent / "gold")},
  )
  envs = open_envs("scienceworld", sizes, os.cpu_count(), live_per_process=4)
  if stage == "collect":
    collect(c, envs, envs[0].tasks("train"))
  else:
    judge(c, envs)


if __name__ == "__main__":
  main(*sys.argv[1:])
