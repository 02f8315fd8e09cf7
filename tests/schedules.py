"""Random schedules of clients against an endpoint that is killed: what was billed, kept and lost.

PYTHONPATH=. python tests/schedules.py 1000 [seed]
"""

import asyncio
import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing, suppress
from fractions import Fraction

import httpx2
from standin import StandIn

from baar_jax.config import Config, EnvConfig, ModelsConfig, ServeConfig
from baar_jax.llms import endpoints
from baar_jax.run import Run
from baar_jax.stages import serve

AT_ONCE, TOLERANCE_USD = 40, 1e-9
PRICES = {"small": ("1", "0.5", "2"), "large": ("5", "2", "10")}
FAULTS = ("429", "500", "503", "drop", "stall", "malformed", "cut_stream", "unpriced", "empty")
WORDS = "Thought: I look around and go on, as before.\n\nAction: go"
LOST = httpx2.TransportError, httpx2.StreamError  # what a client sees of a server that was killed


class Upstream(StandIn):
  """Fails in a fifth of its calls, bills what it loses, and keeps each session's own dollars."""

  def __init__(self, seed: int):
    draw = random.Random(seed)
    super().__init__(
      lambda request: WORDS,
      lambda number, request: draw.choice(FAULTS) if draw.random() < 0.2 else None,
      latency_s=lambda number: draw.random() * 0.05,
      stall_s=4.0,
      bills_what_it_loses=True,
      chunk_s=0.01,
    )
    self.usd_of = defaultdict(Fraction)

  def bill(self, request, text, usable):
    usage = super().bill(request, text, usable)
    with self._lock:
      self.usd_of[request["user"]] += self.usd(PRICES, [(request["model"], usage, usable)])
    return usage


def serve_forever(runs: str, port: int, url: str) -> None:
  prices = tuple(tuple(map(float, price)) for price in PRICES.values())
  models = ModelsConfig("chat", tuple(PRICES), prices=prices, base_urls=(url,))
  models.timeout_s, models.retries = 3.0, 2
  served = ServeConfig(policy="random", port=port, max_sessions=10)
  endpoints.BACKOFF_S = 0.01
  env = EnvConfig("served")
  serve.main(Run(Config(name="s", runs=runs, env=env, models=models, serve=served)))


class Server:
  """The endpoint as a process of its own, which can be killed and started again."""

  def __init__(self, runs: str, url: str):
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
      port = free.getsockname()[1]
    self.url, self._args = f"http://127.0.0.1:{port}", (runs, port, url)
    self._context = multiprocessing.get_context("forkserver")
    self._context.set_forkserver_preload(["baar_jax.stages.serve", "baar_jax.serve.app", "uvicorn"])
    self.kills = -1
    self.restart()

  def restart(self) -> None:
    if self.kills >= 0:
      os.kill(self._process.pid, signal.SIGKILL)
      self._process.join()
    self.kills += 1
    self._process = self._context.Process(target=serve_forever, args=self._args, daemon=True)
    self._process.start()
    for _ in range(1200):
      with suppress(httpx2.TransportError):
        return httpx2.get(f"{self.url}/health").raise_for_status()
      time.sleep(0.1)
    raise TimeoutError("the endpoint does not start")

  def close(self) -> None:
    self._process.kill()
    self._process.join()


class Schedule:
  """One session: its caps, and clients that call at once, retry, give up and leave streams."""

  def __init__(self, seed: str, url: str):
    self.draw, self.id, self.url = random.Random(seed), f"session {seed}", url
    self.cap_usd = self.draw.choice([None, *(self.draw.uniform(0, 0.02) for _ in range(3))])
    self.cap_calls = self.draw.choice([None, 0, 1, 2, 4])
    self.headers = {"x-session-id": self.id}
    if self.cap_usd is not None:
      self.headers["x-baar-max-usd"] = str(self.cap_usd)
    if self.cap_calls is not None:
      self.headers["x-baar-max-large-calls"] = str(self.cap_calls)
    self.statuses, self.replies, self.unreported = Counter(), 0, 0  # replies: whole answers

  async def play(self, http: httpx2.AsyncClient) -> None:
    counts = [self.draw.randint(1, 4) for _ in range(self.draw.randint(1, 4))]
    await asyncio.gather(*(self._call_often(http, count) for count in counts))

  async def _call_often(self, http, count: int) -> None:
    draw, messages = random.Random(self.draw.random()), []
    for _ in range(count):
      messages.append({"role": "user", "content": "Task: go.\n\n" + "x" * draw.randint(1, 400)})
      body = {"model": "baar:random", "messages": list(messages), "user": self.id}
      body |= {"max_completion_tokens": draw.randint(1, 60), "stream": draw.random() < 0.5}
      for _ in range(draw.randint(1, 3)):  # a retry is a call like others
        status = await self._call(http, body, draw)
        self.statuses[status] += 1
        if status == 200:
          break
        await asyncio.sleep(draw.random() * 0.2)
      messages.append({"role": "assistant", "content": WORDS})

  async def _call(self, http, body: dict, draw: random.Random) -> int | str:
    """Its status; "left" where the client gave up, "lost" where the server was killed."""
    patience_s = draw.random() * 0.1 if draw.random() < 0.1 else 60.0
    chunks = draw.randint(0, 15) if draw.random() < 0.3 else 1000
    if draw.random() < 0.05:
      return await self._decide(http, body, draw)
    try:
      async with asyncio.timeout(patience_s):
        path = f"{self.url}/v1/chat/completions"
        async with http.stream("POST", path, json=body, headers=self.headers) as response:
          async for line in response.aiter_lines():
            chunks -= line.startswith("data:")
            if chunks < 0:
              return "left"
            self.replies += line.startswith('{"id":') or line == "data: [DONE]"
          return response.status_code
    except TimeoutError:
      return "left"
    except LOST:
      await asyncio.sleep(draw.random())
      return "lost"

  async def _decide(self, http, body: dict, draw: random.Random) -> int | str:
    """A call that the client makes itself and reports, as far as it learns of it."""
    path, usage = f"{self.url}/v1/decision", {"prompt_tokens": 5, "completion_tokens": 1}
    try:
      answer = await http.post(path, json=body, headers=self.headers)
    except LOST:
      self.unreported += 1
      return "lost"
    if answer.status_code == 200:
      report = {"decision_id": answer.json()["decision_id"], "usage": usage}
      await asyncio.sleep(draw.random() * 0.1)
      try:
        assert (await http.post(path, json=report)).status_code in (200, 404)  # 404 after a kill
      except LOST:
        self.unreported += 1
    return answer.status_code

  def check(self, session: dict, billed_usd: Fraction) -> None:
    """That the books of a session without a call in flight are in order."""
    spent_usd, cap_usd = session["spent_usd"], self.cap_usd
    assert float(billed_usd) <= spent_usd + TOLERANCE_USD, (self.id, float(billed_usd), session)
    assert session["in_flight"] <= self.unreported, (self.id, session)
    assert len(session["steps"]) >= self.replies, (self.id, session)
    assert {*self.statuses} <= {200, 429, 500, 502, 503, 504, "left", "lost"}, self.statuses
    if cap_usd is not None:
      assert spent_usd <= cap_usd + TOLERANCE_USD, (self.id, session)
      left_usd = max(0.0, cap_usd - spent_usd)
      kept_usd = abs(session["left_usd"] - left_usd)
      assert kept_usd < TOLERANCE_USD or session["in_flight"], (self.id, session)
    if self.cap_calls is not None:
      assert session["large_calls"] <= self.cap_calls, (self.id, session)
      assert sum(s["model"] == "large" for s in session["steps"]) <= self.cap_calls, session


async def play_batch(schedules: list[Schedule], server: Server, upstream: Upstream, draw) -> None:
  """All schedules at once; somewhere in the middle the server is killed, if they last as long."""
  last_call = len(upstream.seen) + draw.randint(1, 5 * len(schedules))

  async def kill():
    while len(upstream.seen) < last_call:
      await asyncio.sleep(0.01)
    await asyncio.to_thread(server.restart)

  killing = asyncio.create_task(kill())
  async with httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None)) as http:
    await asyncio.gather(*(schedule.play(http) for schedule in schedules))
    if len(upstream.seen) < last_call:
      killing.cancel()
    else:
      await killing
    for schedule in schedules:
      for _ in range(600):  # what clients have left may still be in flight
        answer = await http.get(f"{server.url}/v1/sessions/{schedule.id}")
        if answer.status_code == 404 or answer.json()["in_flight"] <= schedule.unreported:
          break
        await asyncio.sleep(0.05)
      schedule.last = answer.json() if answer.status_code == 200 else None
      if schedule.last:
        schedule.check(schedule.last, upstream.usd_of[schedule.id])
      else:  # it was killed before it knew of the session, or the clients had left
        assert not upstream.usd_of[schedule.id] and not schedule.replies, schedule.id


def run_schedules(count: int, seed: int, runs: str) -> dict:
  """Plays so many schedules and returns what happened. Raises AssertionError if one fails."""
  draw, schedules = random.Random(seed), []
  with Upstream(seed).running() as upstream, closing(Server(runs, upstream.url)) as server:
    for first in range(0, count, AT_ONCE):
      numbers = range(first, min(first + AT_ONCE, count))
      batch = [Schedule(f"{seed}-{number}", server.url) for number in numbers]
      asyncio.run(play_batch(batch, server, upstream, draw))
      schedules += batch
      print(f"{len(schedules)} schedules, {server.kills} kills", file=sys.stderr, flush=True)
    known = [schedule for schedule in schedules if schedule.last]
    for schedule in known:  # calls that clients had left may have been made since
      schedule.last = httpx2.get(f"{server.url}/v1/sessions/{schedule.id}").json()
      schedule.check(schedule.last, upstream.usd_of[schedule.id])
    server.restart()
    for schedule in known:
      found = httpx2.get(f"{server.url}/v1/sessions/{schedule.id}").json()
      same = found | {"left_usd": None} == schedule.last | {"left_usd": None}  # rounded when stored
      assert same or schedule.last["in_flight"], (found, schedule.last)
    kills = server.kills
  with closing(sqlite3.connect(f"{runs}/s/episodes.sqlite")) as db:
    assert db.execute("SELECT count(*) FROM calls WHERE kind = 'open'").fetchone() == (0,)
    assert db.execute("SELECT count(*) FROM sessions WHERE open > 0").fetchone() == (0,)
    ((sessions,),) = db.execute("SELECT count(*) FROM sessions").fetchall()
  assert sessions == sum(schedule.last is not None for schedule in schedules)
  return {
    "schedules": count,
    "kills": kills,
    "sessions": sessions,
    "attempts": len(upstream.seen),
    "billed_usd": float(sum(upstream.usd_of.values())),
    "counted_usd": sum(schedule.last["spent_usd"] for schedule in known),
  }


if __name__ == "__main__":
  count, seed = map(int, (sys.argv[1:] + ["0"])[:2])
  with tempfile.TemporaryDirectory() as runs:
    print(run_schedules(count, seed, runs))
