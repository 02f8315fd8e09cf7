"""An agent of OpenAI's client plays ScienceWorld through the endpoint, whose router learns from it.

python -m examples.agent collect    # plays 50 tasks with SMALL, LARGE and mixes; "collect 300": 300
python -m examples.agent train      # a router learns from these sessions
python -m examples.agent play       # it is served, and judged on tasks that it has not learned from

The models behind the endpoint are stand-ins on this machine, which know the game's solution and err
at the rates of the scripted pair. So no key is needed.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import openai

from baar_jax.config import Config, EnvConfig, EvaluateConfig, ModelsConfig, ServeConfig
from baar_jax.envs.process import open_envs
from baar_jax.envs.scienceworld.errors import ScienceWorldErrors
from baar_jax.llms.agent import NO_ACTION, extend, open_conversation, parse_action
from baar_jax.llms.scripted import ScriptedPair
from baar_jax.rollout.budget import unlimited  # the endpoint keeps the books
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles
from configs import quickstart

ENDPOINT, UPSTREAM = 8800, 8801  # ports
DIRECTORY = Path("runs") / "agent"
PAIR, GAMES = ScriptedPair(ModelsConfig().names, ScienceWorldErrors()), {}  # agents by session


def get_config() -> Config:
  c = dataclasses.replace(quickstart.get_config(), name=DIRECTORY.name, env=EnvConfig("served"))
  c.models = ModelsConfig("chat", base_urls=(f"http://127.0.0.1:{UPSTREAM}/v1",))
  c.profile.trials, c.references.samples, c.value.prices = 3, 6, (0.1, 0.5, 1.0)
  c.evaluate = EvaluateConfig(seeds=3, random_p=(), call_budgets=(3, 6))
  c.serve = ServeConfig(port=ENDPOINT, policy="stratified", record_text=True, max_sessions=16)
  return c


def play(client: openai.OpenAI, env, task, model: str, trial: int) -> None:
  """An episode: a usual ReAct loop, whose calls name their session and its task."""
  session, observation = f"{model} {task.id} {trial}", env.reset(task.id)
  GAMES[session] = PAIR.start(env, task, trial, unlimited)
  messages, done = open_conversation(env.system_prompt, task, observation), False
  headers = {"x-session-id": session, "x-baar-task": task.id}
  while not done and len(messages) < 2 + 2 * task.max_steps:
    asked = {"model": model, "messages": messages, "user": session, "extra_headers": headers}
    headers["x-baar-score"] = str(env.score())
    reply = client.chat.completions.create(**asked).choices[0].message.content
    action = parse_action(reply)
    observation, done = env.step(action) if action else (NO_ACTION, False)
    extend(messages, reply, observation)
  path = f"/sessions/{quote(session, safe='')}/score"
  client.post(path, body={"score": env.score()}, cast_to=object)


class StandIn(BaseHTTPRequestHandler):
  """Answers a chat completion as the scripted model would, in the game that `user` names."""

  def do_POST(self):
    asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
    agent = GAMES[asked["user"]][PAIR.names.index(asked["model"])]
    reply = agent.reply(asked["messages"], step=len(asked["messages"]) // 2 - 1)
    message = {"role": "assistant", "content": reply.text}
    answer = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"]}
    answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
    answer["usage"] = dataclasses.asdict(reply.call.usage)
    self.send_response(200)
    self.send_header("content-type", "application/json")
    self.end_headers()
    self.wfile.write(json.dumps(answer).encode())

  def log_message(self, *args):
    """A line for each call would be too much."""


def start(stage: str, *settings: str, **options) -> subprocess.Popen:
  words = ["main.py", "--config=examples/agent.py", f"--stage={stage}", *settings]
  print("+ python", *words, flush=True)
  return subprocess.Popen([sys.executable, *words], **options)


def run(*stages: str) -> None:
  for code in (start(stage).wait() for stage in stages):
    if code:
      sys.exit(code)


def play_all(envs, plan, *settings: str) -> None:
  """Serves, and plays each (task, model, trial), as many at a time as there are environments."""
  client = openai.OpenAI(base_url=f"http://127.0.0.1:{ENDPOINT}/v1", api_key="-")
  server, jobs = start("serve", *settings, stdout=subprocess.PIPE), iter(plan)

  def play_share(env) -> None:
    for job in jobs:  # which all threads share
      with contextlib.suppress(openai.ConflictError):  # it has its score already
        play(client, env, *job)

  try:
    if not server.stdout.readline():
      sys.exit(server.wait())
    with ThreadPoolExecutor(len(envs)) as threads:
      list(threads.map(play_share, envs))
  finally:
    server.send_signal(signal.SIGINT)
    server.wait()


def collect(c: Config, envs, tasks) -> None:
  models, trials = ("baar:small", "baar:large"), range(c.profile.trials)
  play_all(envs, [(task, model, k) for k in trials for task in tasks for model in models])
  run("profile")
  with contextlib.closing(Store(DIRECTORY / "episodes.sqlite")) as store:
    profiles = load_profiles(store, c, "train", "dev")
  hard = {id_ for id_, profile in profiles.items() if profile.difficulty == "hard"}
  tasks, samples = [t for t in tasks if t.id in hard], range(1000, 1000 + c.references.samples)
  play_all(envs, [(task, "baar:stratified", seed) for seed in samples for task in tasks])


def judge(c: Config, envs) -> None:
  with contextlib.closing(Store(DIRECTORY / "episodes.sqlite")) as store:
    dev, test = store.tasks("dev"), store.tasks("test")
  seeds, models = range(c.evaluate.seeds), [f"baar:price={price:g}" for price in c.value.prices]
  # SMALL and LARGE have played test tasks in `collect`, and dev tasks as often as a profile needs.
  models += [f"baar:K={K}" for K in c.evaluate.call_budgets]
  plan = [(task, model, k) for k in seeds for task in test for model in models]
  models += ["baar:small", "baar:large"]
  plan += [(task, model, c.profile.trials + k) for k in seeds for task in dev for model in models]
  play_all(envs, plan, "--config.serve.policy=router")
  run("evaluate", "report")


def main(what: str = "", count: str = "50") -> None:
  c = get_config()
  if what not in ("collect", "train", "play") or not count.isdecimal():
    print(__doc__, file=sys.stderr)
    sys.exit(2)
  if what == "train":
    run("references", "pretrain", "value")
    return
  upstream = ThreadingHTTPServer(("127.0.0.1", UPSTREAM), StandIn)
  threading.Thread(target=upstream.serve_forever, daemon=True).start()
  sizes = {"train_tasks": int(count), "max_steps": c.env.max_steps}
  sizes["options"] = {"gold_dir": str(DIRECTORY.parent / "gold")}
  envs = open_envs("scienceworld", sizes, os.cpu_count(), live_per_process=4)
  if what == "collect":
    collect(c, envs, envs[0].tasks("train"))
  else:
    judge(c, envs)


if __name__ == "__main__":
  main(*sys.argv[1:])
