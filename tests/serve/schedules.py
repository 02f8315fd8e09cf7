"""Play random schedules of clients against an endpoint that is killed, and check its bill.

PYTHONPATH=.:tests python tests/serve/schedules.py 1000 [seed]   # odd: with last turns
"""

import asyncio
import multiprocessing
import random
import socket
import sqlite3
import sys
import tempfile
import time
from contextlib import closing, suppress
from fractions import Fraction

import httpx2
from standin import StandIn

from baar_jax.llms import provider
from baar_serve import __main__ as serve
from baar_serve import upstream as upstreams
from baar_serve.config import ServeConfig, UpstreamsConfig
from baar_serve.sessions import Sessions

AT_ONCE, TOLERANCE_USD = 40, 1e-9
FULL_SHARE = 0.02  # of the ledger's writes
# By path: the fields of the history and of the limit, and a mark at a stream's end.
FORMS = {
  "chat/completions": ("messages", "max_completion_tokens", "data: [DONE]"),
  "responses": ("input", "max_output_tokens", "event: response.completed"),
  "messages": ("messages", "max_tokens", "event: message_stop"),
}
PRICES = {"gpt-4.1-mini": (1.0, 0.5, 2.0), "gpt-4.1": (5.0, 2.0, 10.0)}
FAULTS = (
  "429",
  "500",
  "503",
  "drop",
  "stall",
  "malformed",
  "cut_stream",
  "unpriced",
  "empty",
)
WORDS = "Thought: I look around and go on, as before.\n\nAction: go"
# The exceptions at a client whose server was killed.
LOST = (httpx2.TransportError, httpx2.StreamError)


def serve_forever(config: ServeConfig) -> None:
  """Serve in a process of its own, whose disk is full at some of its writes."""
  provider.BACKOFF_S = 0.01
  upstreams.GROWTH = 1000
  execute = Sessions._execute
  draw = random.Random(str(time.time()))

  def execute_or_fail(sessions: Sessions, statements: list) -> int:
    if statements and draw.random() < FULL_SHARE:
      raise sqlite3.OperationalError("database or disk is full")
    return execute(sessions, statements)

  Sessions._execute = execute_or_fail
  serve.serve(config)


class Server:
  """The endpoint in a process of its own, which can be killed and started again."""

  def __init__(self, config: ServeConfig):
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
      config.port = free.getsockname()[1]
    self.url, self._config = f"http://127.0.0.1:{config.port}", config
    self._context = multiprocessing.get_context("forkserver")
    self._context.set_forkserver_preload(
      ["baar_serve.__main__", "baar_serve.app", "uvicorn"]
    )
    self.start()

  def start(self) -> None:
    args = (self._config,)
    self._process = self._context.Process(target=serve_forever, args=args, daemon=True)
    self._process.start()
    while self._process.is_alive():
      with suppress(httpx2.TransportError, httpx2.HTTPStatusError):
        return httpx2.get(f"{self.url}/health").raise_for_status()
      time.sleep(0.1)
    raise ChildProcessError("the endpoint does not start")

  @property
  def pid(self) -> int:
    return self._process.pid

  def restart(self) -> None:
    self.close()
    self.start()

  def close(self) -> None:
    self._process.kill()  # by SIGKILL
    self._process.join()


class Schedule:
  """One session with caps, and clients that call in parallel, retry and break off.

  Attributes:
    statuses: the HTTP statuses of all calls; see `_call`.
    replies: number of complete replies.
  """

  def __init__(self, seed: str, url: str):
    self.draw, self.id, self.url = random.Random(seed), f"session {seed}", url
    self.cap_usd = self.draw.choice(
      [None, *(self.draw.uniform(0, 0.02) for _ in range(3))]
    )
    self.cap_calls = self.draw.choice([None, 0, 1, 2, 4])
    caps = {"x-baar-max-usd": self.cap_usd, "x-baar-max-large-calls": self.cap_calls}
    self.headers = {name: str(cap) for name, cap in caps.items() if cap is not None}
    self.headers["x-session-id"] = self.id
    self.statuses, self.replies = set(), 0

  async def play(self, http: httpx2.AsyncClient) -> None:
    counts = [self.draw.randint(1, 4) for _ in range(self.draw.randint(1, 4))]
    await asyncio.gather(*(self._call_often(http, count) for count in counts))

  async def _call_often(self, http, count: int) -> None:
    draw, history = random.Random(self.draw.random()), []
    path = draw.choice([*FORMS])
    field, limit, _ = FORMS[path]
    headers = dict(self.headers)
    if draw.random() < 0.5:
      headers["x-baar-conversation"] = str(draw.random())
    for _ in range(count):
      text = f"Task: go.\n\n{draw.random()}" + "x" * draw.randint(1, 400)
      history.append({"role": "user", "content": text})
      body = {"model": "baar:random", field: list(history), "user": self.id}
      # A cap often has no room for the higher limit, so that it shrinks.
      most = draw.choice([draw.randint(1, 60), 5000])
      body |= {limit: most, "stream": draw.random() < 0.5}
      for _ in range(draw.randint(1, 3)):
        status = await self._call(http, path, body, headers, draw)
        self.statuses.add(status)
        if status == 200:
          break
        await asyncio.sleep(draw.random() * 0.2)
      history.append({"role": "assistant", "content": WORDS})

  async def _call(
    self, http, path: str, body: dict, headers: dict, draw: random.Random
  ) -> int | str:
    """Make a call; return its HTTP status.

    The status is "left" if the client gave up, and "lost" if the server was killed.
    """
    patience_s = draw.random() * 0.1 if draw.random() < 0.1 else 60.0
    chunks = draw.randint(0, 15) if draw.random() < 0.3 else 1000
    try:
      async with asyncio.timeout(patience_s):
        url = f"{self.url}/v1/{path}"
        async with http.stream("POST", url, json=body, headers=headers) as response:
          async for line in response.aiter_lines():
            chunks -= line.startswith("data:")
            if chunks < 0:
              return "left"
            self.replies += line == FORMS[path][2]
          self.replies += response.status_code == 200 and not body["stream"]
          return response.status_code
    except TimeoutError:
      return "left"
    except LOST:
      await asyncio.sleep(draw.random())
      return "lost"

  def check(self, billed_usd: Fraction) -> dict | None:
    """Check the dollars and calls of the session, and return it.

    Returns:
      The session as the server reports it; None if no call of it had arrived.
    """
    for _ in range(600):
      answer = httpx2.get(f"{self.url}/v1/sessions/{self.id}")
      session = answer.json()
      if not session.get("in_flight"):
        break
      time.sleep(0.05)
    if answer.status_code == 404:
      # No call had arrived before a kill, or before the clients gave up.
      assert not billed_usd and not self.replies, self.id
      return None
    spent_usd, context = session["spent_usd"], (self.id, float(billed_usd), session)
    assert (
      float(billed_usd) <= spent_usd + TOLERANCE_USD and not session["in_flight"]
    ), context
    steps = []
    for conversation in session["conversations"]:
      steps += conversation["steps"]
    # If the disk was full at a reply's end and the server was killed before the next
    # commit, the attempt is presumed, and its step is lost.
    presumed = sum(row["outcome"] == "presumed" for row in session["failures"])
    assert len(steps) + presumed >= self.replies, context
    allowed = {200, 402, 429, 500, 502, 503, 504, "left", "lost"}
    assert self.statuses <= allowed, self.statuses
    if self.cap_usd is not None:
      left_usd = session["left_usd"] + (session["last_turn_usd"] or 0.0)
      assert spent_usd <= self.cap_usd + TOLERANCE_USD, context
      assert abs(left_usd - max(0.0, self.cap_usd - spent_usd)) < TOLERANCE_USD, context
    if self.cap_calls is not None:
      large_steps = sum(step["model"] == "gpt-4.1" for step in steps)
      assert large_steps <= session["large_calls"] <= self.cap_calls, context
    # The remaining dollars are rounded when they are stored.
    return session | {"left_usd": None}


async def play_batch(
  schedules: list[Schedule], server: Server, upstream: StandIn, draw
) -> None:
  """Play schedules in parallel, and kill the server once, at the latest at the end."""
  last_call = len(upstream.seen) + draw.randint(1, 5 * len(schedules))
  async with httpx2.AsyncClient(
    timeout=None, limits=httpx2.Limits(max_connections=None)
  ) as http:
    playing = asyncio.gather(*(schedule.play(http) for schedule in schedules))
    while len(upstream.seen) < last_call and not playing.done():
      await asyncio.sleep(0.01)
    await asyncio.to_thread(server.restart)
    await playing


def run_schedules(count: int, seed: int, runs: str) -> dict:
  """Play random schedules against one endpoint.

  Args:
    count: number of schedules.
    seed: seed of all random choices.
    runs: directory of the run.

  Returns:
    The number of sessions and attempts, and the billed and the counted dollars.

  Raises:
    AssertionError: a session exceeds a cap, or its dollars do not cover the bill.
  """
  draw, faults, schedules = random.Random(seed), random.Random(seed), []
  models = UpstreamsConfig(
    names=(*PRICES,), prices=(*PRICES.values(),), timeout_s=3.0, retries=2
  )
  config = ServeConfig(
    name="s",
    runs=runs,
    models=models,
    policy="random",
    max_sessions=10,
    last_turn=seed % 2 == 1,
  )
  upstream = StandIn(WORDS, stall_s=4.0, chunk_s=0.01)
  upstream.fault = lambda number, request: (
    faults.choice(FAULTS) if faults.random() < 0.2 else None
  )
  upstream.latency_s = lambda number: faults.random() * 0.05
  models.base_urls = (upstream.url,)

  def check_all() -> list[dict | None]:
    return [schedule.check(upstream.usd(PRICES, schedule.id)) for schedule in schedules]

  with upstream.running(), closing(Server(config)) as server:
    for first in range(0, count, AT_ONCE):
      numbers = range(first, min(first + AT_ONCE, count))
      batch = [Schedule(f"{seed}-{number}", server.url) for number in numbers]
      asyncio.run(play_batch(batch, server, upstream, draw))
      schedules += batch
    # The answers of clients that left may still be made.
    sessions = []
    while sessions != check_all():
      sessions = check_all()
      time.sleep(models.timeout_s + 1)
    server.restart()
    assert check_all() == sessions
  with closing(sqlite3.connect(f"{runs}/s/episodes.sqlite")) as db:
    assert db.execute("SELECT count(*) FROM calls WHERE kind = 'open'").fetchone() == (
      0,
    )
    stored = [*filter(None, sessions)]
    assert db.execute("SELECT count(*) FROM purses").fetchone() == (len(stored),)
  counted_usd = sum(session["spent_usd"] for session in stored)
  dollars = {"billed_usd": float(upstream.usd(PRICES)), "counted_usd": counted_usd}
  return {"sessions": len(stored), "attempts": len(upstream.seen)} | dollars


if __name__ == "__main__":
  count, seed = map(int, (sys.argv[1:] + ["0"])[:2])
  with tempfile.TemporaryDirectory() as runs:
    print(run_schedules(count, seed, runs))
