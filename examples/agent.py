"""Play ScienceWorld with an agent that calls models through this program's endpoint.

python -m examples.agent

The command starts `python -m baar_serve.learn` with this file as the agent, which plays
40 tasks, trains a router, and tells what it saves. A command that was interrupted goes
on. The agent uses OpenAI's Python client.

The upstream models are scripted models behind a small server on this machine, so no key
is needed. They know the games' solutions, and err at the rates of SMALL and LARGE in
configs/quickstart.py. The same server has the games, so each agent's process starts at
once.
"""

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import openai

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.envs.scienceworld.adapter import ScienceWorld
from baar_jax.episode import Task
from baar_jax.llms.history import NO_ACTION, extend, open_conversation, parse_action
from baar_jax.llms.offline import ScriptedPair
from baar_jax.rollout.budget import unlimited  # The endpoint checks the caps.

DIRECTORY = Path("runs") / "agent"
TASKS = 40
MAX_STEPS = 30
PAIR = ScriptedPair(ModelsConfig(), ScienceWorld)


def play() -> None:
  """Play the task of this process's environment with a ReAct agent.

  A header of each call has the score so far, and the file BAAR_SCORE gets the last one.
  """
  session = os.environ["BAAR_SESSION"]

  trial = int(os.environ["BAAR_TRIAL"])

  def ask(action: str | None) -> dict:
    """Begin the game (""), take a step of it, or end it (None)."""
    body = dict(session=session, action=action, id=os.environ["BAAR_TASK"], trial=trial)
    return httpx2.post(os.environ["GAMES"], json=body, timeout=600).json()

  client = openai.OpenAI()
  game = ask("")
  task = Task(**game["task"])
  messages = open_conversation(game["system_prompt"], task, game["observation"])
  while not game["done"] and len(messages) < 2 + 2 * task.max_steps:
    completion = client.chat.completions.create(
      model="baar",
      messages=messages,
      user=session,
      extra_headers={"x-baar-score": str(game["score"])},
    )
    reply = completion.choices[0].message.content
    action = parse_action(reply)
    observation = NO_ACTION
    if action:
      game = ask(action)
      observation = game["observation"]
    extend(messages, reply, observation)
  ask(None)
  Path(os.environ["BAAR_SCORE"]).write_text(str(game["score"]))


class Games(ThreadingHTTPServer):
  """Serve games, and the scripted models that play them.

  Attributes:
    tasks: the tasks by their ids.
    games: each session's environment and its scripted agents, one per model.
    free: the environments that no session has.
  """

  def __init__(self, envs: list[Env], tasks: list[Task]):
    """Listen on a free port."""
    super().__init__(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server_address[1]}"
    self.tasks = {task.id: task for task in tasks}
    self.games = {}
    self.free = queue.SimpleQueue()
    for env in envs:
      self.free.put(env)
    threading.Thread(target=self.serve_forever, daemon=True).start()

  def step(self, session: str, action: str | None, id: str, trial: int) -> dict:
    """Begin a session's game (""), take a step of it, or end it (None).

    A session that is played again keeps its environment.
    """
    env, agents = self.games.pop(session, (None, None))
    if action is None:
      self.free.put(env)
      return {}
    done = False
    task = self.tasks[id]
    if action:
      observation, done = env.step(action)
    else:
      env = env or self.free.get()
      observation = env.reset(id)
      agents = PAIR.start(env, task, trial, unlimited)
    self.games[session] = (env, agents)
    return dict(
      observation=observation,
      done=done,
      score=env.score(),
      system_prompt=env.system_prompt,
      task=vars(task),
    )

  def reply(self, request: dict) -> dict:
    """Answer a chat completion with the scripted model's next reply.

    The field `user` of a request names the session.
    """
    model = request["model"]
    agent = self.games[request["user"]][1][PAIR.names.index(model)]
    reply = agent.reply(request["messages"], step=len(request["messages"]) // 2 - 1)
    message = dict(role="assistant", content=reply.text)
    return dict(
      id="1",
      object="chat.completion",
      created=0,
      model=model,
      choices=[dict(index=0, finish_reason="stop", message=message)],
      usage=dataclasses.asdict(reply.call.usage),
    )


class Handler(BaseHTTPRequestHandler):
  """Answer the requests to `Games`."""

  def do_POST(self) -> None:
    """Answer a chat completion, or take a step of a game."""
    request = json.loads(self.rfile.read(int(self.headers["content-length"])))
    games = self.server
    answer = games.step(**request) if self.path == "/game" else games.reply(request)
    self.send_response(200)
    self.send_header("content-type", "application/json")
    self.end_headers()
    self.wfile.write(json.dumps(answer).encode())

  def log_message(self, *args: object) -> None:
    """Log nothing. The base class would print a line for each call."""


def main() -> int:
  """Serve the games, and learn from an agent that plays them.

  Returns:
    The exit code of the command.
  """
  DIRECTORY.mkdir(parents=True, exist_ok=True)
  options = {"gold_dir": str(DIRECTORY.parent / "gold")}
  sizes = dict(train_tasks=TASKS, max_steps=MAX_STEPS, options=options)
  envs = open_envs("scienceworld", sizes, os.cpu_count(), live_per_process=4)
  games = Games(envs, envs[0].tasks("train"))
  file = DIRECTORY / "tasks.txt"
  file.write_text("\n".join(games.tasks))
  command = [
    *("-m", "baar_serve.learn", f"--agent={sys.executable} -m examples.agent"),
    *(f"--tasks={file}", "--max_usd=5", f"--config.name={DIRECTORY.name}"),
    f"--config.models.base_urls=('{games.url}/v1',)",
  ]
  print("+ python", *command, flush=True)
  variables = os.environ | {"GAMES": f"{games.url}/game", "OPENAI_API_KEY": "unused"}
  return subprocess.run([sys.executable, *command], env=variables).returncode


if __name__ == "__main__":
  if "BAAR_TASK" in os.environ:
    play()
  else:
    sys.exit(main())
