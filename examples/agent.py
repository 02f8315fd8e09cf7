"""Play ScienceWorld with an agent that calls models through this program's endpoint.

python -m examples.agent collect    # play 50 tasks with SMALL, LARGE and mixes
python -m examples.agent train      # train a router on these sessions
python -m examples.agent play       # serve the router, and evaluate it

"collect 300" and "play 300" use 300 tasks.

The agent uses OpenAI's Python client. The upstream models are scripted models behind a
small server on this machine, so no key is needed. They know the games' solutions, and
err at the rates of the default run's SMALL and LARGE.
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

from baar_jax.config import Config, EnvConfig, EvaluateConfig, ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.envs.scienceworld.adapter import ScienceWorld
from baar_jax.episode import Task
from baar_jax.llms.history import NO_ACTION, extend, open_conversation, parse_action
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.open import load_profiles
from baar_jax.rollout.budget import unlimited  # The endpoint checks the caps.
from baar_jax.store import Store
from configs import quickstart

# Ports of the endpoint, and of the server with the scripted models.
ENDPOINT = 8800
UPSTREAM = 8801
DIRECTORY = Path("runs") / "agent"
PAIR = ScriptedPair(ModelsConfig(), ScienceWorld)
# For each session: the scripted agents that play its game, one per model.
GAMES = {}


class Play(NamedTuple):
  """A session that is to be played.

  Attributes:
    task: the task of the session.
    model: the model name that the agent sends, such as "baar:large".
    trial: a number that makes the session's id unique among those of this task and
      model.
  """

  task: Task
  model: str
  trial: int


def get_config() -> Config:
  """Return the configuration of this example's run."""
  config = quickstart.get_config()
  config.profile.trials = 3
  config.references.samples = 6
  config.value.cost_weights = (0.1, 0.5, 1.0)
  return dataclasses.replace(
    config,
    name=DIRECTORY.name,
    env=EnvConfig("recorded"),
    models=ModelsConfig("chat", base_urls=(f"http://127.0.0.1:{UPSTREAM}/v1",)),
    evaluate=EvaluateConfig(seeds=3, random_p=(), call_budgets=(3, 6)),
  )


def play(client: openai.OpenAI, env: Env, job: Play) -> None:
  """Play a session with a ReAct agent, and send its score to the endpoint.

  The headers of each call name its session and its task. If an earlier command was
  interrupted, the session may have a score already. Then it is not played.
  """
  task = job.task
  session = f"{job.model} {task.id} {job.trial}"
  path = f"/sessions/{quote(session, safe='')}"
  with contextlib.suppress(openai.NotFoundError):
    (newest, *_) = client.get(path, cast_to=object)["conversations"]
    if newest["score"] is not None:
      return
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
  (newest, *_) = client.get(path, cast_to=object)["conversations"]
  client.post(
    f"{path}/score",
    body={"score": env.score(), "conversation": newest["id"]},
    cast_to=object,
  )


class StandIn(BaseHTTPRequestHandler):
  """A server that answers chat completions with the replies of scripted models.

  The field `user` of a request names the session.
  """

  def do_POST(self) -> None:
    """Answer a chat completion with the scripted model's next reply."""
    request = json.loads(self.rfile.read(int(self.headers["content-length"])))
    model = request["model"]
    agent = GAMES[request["user"]][PAIR.names.index(model)]
    reply = agent.reply(request["messages"], step=len(request["messages"]) // 2 - 1)
    answer = dict(
      id="1",
      object="chat.completion",
      created=0,
      model=model,
      choices=[
        dict(
          index=0,
          finish_reason="stop",
          message=dict(role="assistant", content=reply.text),
        )
      ],
      usage=dataclasses.asdict(reply.call.usage),
    )
    self.send_response(200)
    self.send_header("content-type", "application/json")
    self.end_headers()
    self.wfile.write(json.dumps(answer).encode())

  def log_message(self, *args: object) -> None:
    """Log nothing. The base class would print a line for each call."""


def start(*words: str, **options: int) -> subprocess.Popen:
  """Start a command of Python as a process of its own."""
  print("+ python", *words, flush=True)
  return subprocess.Popen([sys.executable, *words], **options)


def run(*stages: str) -> None:
  """Run stages of this example one after the other; exit if a stage fails."""
  for stage in stages:
    code = start("main.py", "--config=examples/agent.py", f"--stage={stage}").wait()
    if code:
      sys.exit(code)


def start_endpoint(policy: str) -> subprocess.Popen:
  """Start the endpoint with a policy; return when it is ready."""
  url = f"('http://127.0.0.1:{UPSTREAM}/v1',)"
  server = start(
    "-m",
    "baar_serve",
    f"--config.name={DIRECTORY.name}",
    f"--config.policy={policy}",
    f"--config.port={ENDPOINT}",
    f"--config.models.base_urls={url}",
    "--config.record_text=True",
    "--config.max_sessions=16",
    stdout=subprocess.PIPE,
  )
  # The first line says that the server starts, and the second one that it is ready.
  if not (server.stdout.readline() and server.stdout.readline()):
    sys.exit(server.wait())
  return server


def play_all(envs: Sequence[Env], plan: Iterable[Play], policy: str = "small") -> None:
  """Start the endpoint with a policy, and play the sessions of a plan through it.

  Each environment plays one session at a time.
  """
  client = openai.OpenAI(base_url=f"http://127.0.0.1:{ENDPOINT}/v1", api_key="-")
  server = start_endpoint(policy)
  jobs = iter(plan)

  def play_share(env: Env) -> None:
    """Play sessions in one environment until all have been played."""
    for job in jobs:  # The threads share this iterator, so each session is played once.
      play(client, env, job)

  try:
    with ThreadPoolExecutor(len(envs)) as threads:
      list(threads.map(play_share, envs))
  finally:
    server.send_signal(signal.SIGINT)
    server.wait()


def list_plays(
  trials: Iterable[int], tasks: Sequence[Task], *models: str
) -> list[Play]:
  """Plan a session for each combination of trial, task and model name."""
  return [Play(task, model, k) for k in trials for task in tasks for model in models]


def collect(config: Config, envs: Sequence[Env], tasks: Sequence[Task]) -> None:
  """Play the sessions that a router is trained on."""
  trials = range(config.profile.trials)
  run("setup")  # The run's directory has the settings of this file from now on.
  play_all(envs, list_plays(trials, tasks, "baar:small", "baar:large"))
  run("profile")
  with contextlib.closing(Store(DIRECTORY / "episodes.sqlite")) as store:
    profiles = load_profiles(store, config, "train", "dev")
  hard = [
    task
    for task in tasks
    if task.id in profiles and profiles[task.id].difficulty == "hard"
  ]
  trials = range(1000, 1000 + config.references.samples)
  play_all(envs, list_plays(trials, hard, "baar:stratified"))


def judge(config: Config, envs: Sequence[Env]) -> None:
  """Serve the trained router, play dev and test tasks with it, and write the report."""
  with contextlib.closing(Store(DIRECTORY / "episodes.sqlite")) as store:
    dev = store.tasks("dev")
    test = store.tasks("test")
  seeds = config.evaluate.seeds
  models = [f"baar:cost_weight={weight:g}" for weight in config.value.cost_weights]
  models += [f"baar:K={K}" for K in config.evaluate.call_budgets]
  plan = list_plays(range(seeds), test, *models)
  # SMALL and LARGE have played the test tasks in `collect`. Their sessions on dev are
  # trials of the profile, so the evaluation needs further sessions on dev.
  first = config.profile.trials
  trials = range(first, first + seeds)
  plan += list_plays(trials, dev, *models, "baar:small", "baar:large")
  play_all(envs, plan, "router")
  run("evaluate", "report")


def main(stage: str = "", count: str = "50") -> None:
  """Run one of the example's commands.

  Args:
    stage: "collect", "train" or "play".
    count: the number of training tasks.
  """
  if stage not in ("collect", "train", "play") or not count.isdecimal():
    print(__doc__, file=sys.stderr)
    sys.exit(2)
  if stage == "train":
    run("references", "value")
    return
  upstream = ThreadingHTTPServer(("127.0.0.1", UPSTREAM), StandIn)
  threading.Thread(target=upstream.serve_forever, daemon=True).start()
  config = get_config()
  sizes = dict(
    train_tasks=int(count),
    max_steps=config.env.max_steps,
    options={"gold_dir": str(DIRECTORY.parent / "gold")},
  )
  envs = open_envs("scienceworld", sizes, os.cpu_count(), live_per_process=4)
  if stage == "collect":
    collect(config, envs, envs[0].tasks("train"))
  else:
    judge(config, envs)


if __name__ == "__main__":
  main(*sys.argv[1:])
