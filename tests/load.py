"""What the endpoint adds to a call, beside the same calls made directly, in one run.

PYTHONPATH=. python tests/load.py runs/quickstart [sessions=64] [steps=6] [reply_s=3.0]
"""

import asyncio
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import tempfile
import time

import httpx2
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

PORT, ROUNDS = 8811, 2
START_S = 3.0  # over which sessions begin
REPLY = "Thought: The next thing to do is this.\n\nAction: go to the kitchen"
USAGE = {"prompt_tokens": 300, "completion_tokens": 20, "total_tokens": 320}


def serve_models(latency_s: float) -> None:
  """Loopback models that take from half to one and a half times the latency, by the request."""

  async def answer(request):
    asked = await request.json()
    await asyncio.sleep(latency_s * (0.5 + random.Random(asked["user"]).random()))
    choice = {"index": 0, "message": {"role": "assistant", "content": REPLY}}
    return JSONResponse({"id": "1", "object": "chat.completion", "created": 1} | {
      "model": asked["model"], "choices": [choice | {"finish_reason": "stop"}], "usage": USAGE
    })  # fmt: skip

  route = Route("/v1/chat/completions", answer, methods=["POST"])
  uvicorn.run(Starlette(routes=[route]), port=PORT, log_level="warning")


async def play(http, url: str, model: str, session: str, steps: int, seconds: list) -> None:
  """A session's calls, one after another, and the seconds of each."""
  messages = [{"role": "system", "content": "You act. " * 50}]
  messages.append({"role": "user", "content": f"Task: open lock {session}\n\nA lamp is red."})
  await asyncio.sleep(START_S * random.Random(session).random())
  for step in range(steps):
    body = {"model": model, "messages": messages, "user": f"{session} {step}"}
    start_s = time.perf_counter()
    headers = {"x-session-id": session}
    answer = await http.post(f"{url}/chat/completions", json=body, headers=headers)
    seconds.append(time.perf_counter() - start_s)
    reply = answer.raise_for_status().json()["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": f"Lamp {step} is green. The door hums. " * 5}]


async def measure(url: str, model: str, name: str, sessions: int, steps: int):
  """seconds_NxS of all calls, and calls per second."""
  seconds = [[] for _ in range(sessions)]
  async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as http:
    start_s = time.perf_counter()
    playing = (play(http, url, model, f"{name} {i}", steps, own) for i, own in enumerate(seconds))
    await asyncio.gather(*playing)
    return np.array(seconds), sessions * steps / (time.perf_counter() - start_s)


def main(router: str, sessions="64", steps="6", latency_s="3.0") -> None:
  size, runs = (int(sessions), int(steps)), tempfile.TemporaryDirectory()
  models = multiprocessing.Process(target=serve_models, args=(float(latency_s),), daemon=True)
  models.start()
  direct, routed = (f"http://127.0.0.1:{port}/v1" for port in (PORT, PORT + 1))
  values = {"env.kind": "served", "models.kind": "chat", "models.base_urls": f"('{direct}',)"}
  values |= {"serve.port": PORT + 1, "serve.router": router, "serve.max_usd": 5.0}
  words = [f"--config.{name}={value}" for name, value in values.items()]
  command = [sys.executable, "main.py", "--stage=serve", f"--config.runs={runs.name}", *words]
  server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  print(server.stdout.readline().strip() or sys.exit(server.wait()))
  try:
    for number in range(ROUNDS):
      direct_NxS, direct_rate = asyncio.run(measure(direct, "gpt-4.1", f"s{number}", *size))
      routed_NxS, rate = asyncio.run(measure(routed, "baar", f"s{number}", *size))
      added_ms, took_s = 1e3 * (routed_NxS - direct_NxS), routed_NxS.sum(axis=1)
      row = {"sessions": size[0], "calls": routed_NxS.size, "share": rate / direct_rate}
      row |= {"added_ms_median": np.median(added_ms), "added_ms_p99": np.quantile(added_ms, 0.99)}
      row |= {"slowest_session_over_median": took_s.max() / np.median(took_s)}
      print(json.dumps({name: round(float(value), 3) for name, value in row.items()}))
  finally:
    server.send_signal(signal.SIGINT)
    server.wait()


if __name__ == "__main__":
  main(*sys.argv[1:])
