"""Measure the seconds that the endpoint adds to calls, compared with direct calls.

A proxy that only passes calls on, with the endpoint's HTTP client, is measured, too:
what any server would add here. "direct" has the CPU of the clients. With 48 sessions, a
call takes 3.6 ms of the endpoint's CPU and 1.0 ms of the proxy's; httpx2 in place of
aiohttp adds 0.7 ms to both.

PYTHONPATH=.:tests:tests/serve python tools/load.py RUN [sessions=64] [steps=6] [reply_s=3.0]
"""

import asyncio
import functools
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import aiohttp
import httpx2
import numpy as np
import schedules
import uvicorn
from standin import StandIn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baar_serve import __main__ as serve
from baar_serve import client
from baar_serve.config import ServeConfig, UpstreamsConfig

START_S = 3.0  # seconds during which sessions begin


async def play(
  http, url: str, model: str, session: str, steps: int, seconds: list
) -> None:
  """Make the calls of a session one after another, and append the seconds of each."""
  messages = [{"role": "system", "content": "You act. " * 50}]
  messages.append(
    {"role": "user", "content": f"Task: open lock {session}\n\nA lamp is red."}
  )
  body = {"model": model, "messages": messages, "max_completion_tokens": 60}
  await asyncio.sleep(START_S * random.Random(session).random())
  for step in range(steps):
    start_s = time.perf_counter()
    headers, body["user"] = {"x-session-id": session}, f"{session} {step}"
    answer = await http.post(f"{url}/chat/completions", json=body, headers=headers)
    seconds.append(time.perf_counter() - start_s)
    reply = answer.raise_for_status().json()["choices"][0]["message"]
    messages += [
      reply,
      {"role": "user", "content": f"Lamp {step} is green. The door hums. " * 5},
    ]


async def measure(url: str, model: str, sessions: int, steps: int):
  """Return the seconds of all calls, seconds_NxS, and the calls per second."""
  seconds = [[] for _ in range(sessions)]
  async with httpx2.AsyncClient(
    timeout=600, limits=httpx2.Limits(max_connections=None)
  ) as http:
    start_s = time.perf_counter()
    playing = (
      play(http, url, model, f"s{i}", steps, seconds_S)
      for i, seconds_S in enumerate(seconds)
    )
    await asyncio.gather(*playing)
    rate = sessions * steps / (time.perf_counter() - start_s)
    return np.array(seconds), rate


def read_cpu_s(pid: int) -> float:
  """Read the seconds of CPU that a process has used, in the system and outside it."""
  fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pass_through(url: str, port: int) -> None:
  """Serve a proxy that passes each call on and does nothing else."""

  @functools.cache
  def open_client() -> aiohttp.ClientSession:
    """Open the client in the server's event loop."""
    return client.open_http(600, None)

  async def relay(request: Request) -> Response:
    body = await request.body()
    answer = await open_client().post(f"{url}/chat/completions", data=body)
    return Response(await answer.read(), answer.status)

  routes = [Route("/chat/completions", relay, methods=["POST"])]
  app = Starlette(routes=routes)
  uvicorn.run(app, port=port, log_level="warning", timeout_keep_alive=600)


def main(router: str, sessions="64", steps="6", reply_s="3.0") -> None:
  def answer(request: dict) -> str:
    """Reply after 0.5 to 1.5 times `reply_s`, depending on the request."""
    time.sleep(float(reply_s) * (0.5 + random.Random(request["user"]).random()))
    return schedules.WORDS

  size = (int(sessions), int(steps))
  # Each target has a stand-in of its own: one that has seen more prompts is slower.
  direct, relayed, routed = (StandIn(answer) for _ in range(3))
  forking = multiprocessing.get_context("fork")
  for models in (direct, relayed, routed):
    forking.Process(target=models.serve_forever, daemon=True).start()
  with closing(socket.create_server(("127.0.0.1", 0))) as free:
    port = free.getsockname()[1]
  proxy = forking.Process(target=pass_through, args=(relayed.url, port), daemon=True)
  proxy.start()
  with tempfile.TemporaryDirectory() as runs:
    upstreams = UpstreamsConfig(base_urls=(routed.url,))
    config = ServeConfig(runs=runs, router=router, max_usd=5.0, models=upstreams)
    schedules.serve_forever = serve.serve  # without a full disk
    with closing(schedules.Server(config)) as server:
      urls = {
        "direct": (direct.url, "gpt-4.1"),
        "proxy": (f"http://127.0.0.1:{port}", "gpt-4.1"),
        "endpoint": (f"{server.url}/v1", "baar"),
      }
      pids = {"direct": os.getpid(), "proxy": proxy.pid, "endpoint": server.pid}
      results = {}
      for name, target in urls.items():
        before_s = read_cpu_s(pids[name])
        results[name] = asyncio.run(measure(*target, *size))
        cpu_s = read_cpu_s(pids[name]) - before_s
        print(f"{name}: CPU of a call: {1e3 * cpu_s / (size[0] * size[1]):.2f} ms")
  direct_NxS, direct_rate = results.pop("direct")
  for name, (seconds_NxS, rate) in results.items():
    added_ms = 1e3 * (seconds_NxS - direct_NxS)
    print(f"{name}: rate, as a share of direct calls: {rate / direct_rate:.3f}")
    print(f"{name}: added to a call, median: {np.median(added_ms):.1f} ms")
    percentile_ms = np.quantile(added_ms, 0.99)
    print(f"{name}: added to a call, 99th percentile: {percentile_ms:.1f} ms")


if __name__ == "__main__":
  main(*sys.argv[1:])
