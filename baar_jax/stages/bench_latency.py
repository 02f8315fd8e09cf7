"""Live episodes that wait for stand-in models: wall time against what their latencies allow.

The stand-in is a loopback server for this bench alone, which says the same to every request after
a latency that was drawn before. The client, the file of calls and the rollout loop are real ones.
"""

import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from baar_jax.config import ModelsConfig
from baar_jax.envs.sandbox import Rules, Sandbox
from baar_jax.llms.calls import Calls
from baar_jax.llms.prices import Price
from baar_jax.rollout.live import Job
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import random_large
from baar_jax.stages.bench_figures import Figures
from baar_jax.stages.bench_subject import Subject

LIVE, STEPS = 64, 4  # all episodes live at once, all of the same length
MEDIAN_S, P99_S = 0.5, 5.0  # of a lognormal distribution
P99_SIGMAS = 2.3263  # a standard normal's 99th percentile
SEED = 0
REPLY = "Thought: I wait.\n\nAction: wait"


def waiting(subject: Subject, figures: Figures) -> None:
  """Episodes that do nothing but wait for replies, all live at once."""
  latency_s_BxS = draw_latencies(random.Random(SEED), LIVE, STEPS)
  wall_s = play(latency_s_BxS, subject.directory / "waiting.sqlite")
  figures.section(
    "Episodes that wait for stand-in models",
    f"latencies drawn once, lognormal with a median of {MEDIAN_S} s and a 99th percentile of "
    f"{P99_S} s; the real client and loop, whose first calls count; the stand-in is a server in "
    "this process",
  )
  figures.add("waiting_episodes", LIVE, "episodes, all live at once", "episodes")
  figures.add("waiting_calls", LIVE * STEPS, "  their calls", "calls")
  figures.add("waiting_wall_s", wall_s, "rollout loop", "s")
  bound_s = least_s(latency_s_BxS, LIVE)
  figures.add("waiting_bound_s", bound_s, "max(all latencies / live, longest episode)", "s")
  figures.add(
    "waiting_barrier_s", barrier_s(latency_s_BxS), "with a barrier per step, not run", "s"
  )
  for name in ("waiting_wall_s", "waiting_barrier_s"):
    figures.ratio(name, "waiting_bound_s", "{} x what the latencies allow")


def draw_latencies(draw: random.Random, episodes: int, steps: int) -> list[list[float]]:
  """latency_s_BxS: seconds of every call, known before any is made."""
  mu, sigma = math.log(MEDIAN_S), math.log(P99_S / MEDIAN_S) / P99_SIGMAS
  return [[draw.lognormvariate(mu, sigma) for _ in range(steps)] for _ in range(episodes)]


def least_s(latency_s_BxS: Sequence[Sequence[float]], live: int) -> float:
  """No schedule is faster: so many wait at a time, and an episode's calls follow each other."""
  each_s = [sum(latency_s_S) for latency_s_S in latency_s_BxS]
  return max(sum(each_s) / live, max(each_s))


def barrier_s(latency_s_BxS: Sequence[Sequence[float]]) -> float:
  """Seconds where every step of all episodes, equally long, begins when the slowest has ended."""
  return sum(max(latency_s_B) for latency_s_B in zip(*latency_s_BxS, strict=True))


def play(latency_s_BxS: Sequence[Sequence[float]], path: Path) -> float:
  """Seconds that the rollout loop takes for the episodes, each in an environment of its own.

  Args:
    path: of a new file of calls.

  Raises:
    RuntimeError: an episode ended early, so that the seconds say nothing.
  """
  from baar_jax.llms.chat import ChatPair  # scripted runs do without the client

  live, steps = len(latency_s_BxS), len(latency_s_BxS[0])
  # A lock that nobody opens: episodes end after their last step.
  envs = [Sandbox(1, 1, steps, Rules(attempts=steps + 1)) for _ in range(live)]
  jobs = [Job(envs[0].tasks("test")[0], seed) for seed in range(live)]
  with stand_in(latency_s_BxS) as url:
    config = ModelsConfig(
      "chat", base_urls=(url,), key_variables=("",), concurrency=live, retries=0
    )
    pair = ChatPair(config, (Price(1, 1, 1),) * 2, Calls(path))
    try:
      start = time.monotonic()
      episodes = list(run_episodes(jobs, random_large(0.5, "bench"), pair, envs))
      wall_s = time.monotonic() - start
    finally:
      pair.close()
  ends = {(episode.stop, len(episode.steps)) for episode in episodes}
  if ends != {("max_steps", steps)}:
    raise RuntimeError(f"episodes ended as {ends}, expected {steps} steps of each")
  return wall_s


@contextlib.contextmanager
def stand_in(latency_s_BxS: Sequence[Sequence[float]]) -> Iterator[str]:
  """A chat completions server's address; an episode's row is its seed."""

  class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept
    wbufsize = -1  # an answer is sent at once, not in pieces that wait for each other

    def log_message(self, *args):
      pass

    def do_POST(self):
      request = json.loads(self.rfile.read(int(self.headers["content-length"])))
      step = len(request["messages"]) // 2 - 1  # two more after each; two before the first
      time.sleep(latency_s_BxS[request["seed"]][step])
      message = {"role": "assistant", "content": REPLY}
      answer = {"id": "c1", "object": "chat.completion", "created": 1, "model": request["model"]}
      answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
      answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
      body = json.dumps(answer).encode()
      self.send_response(200)
      self.send_header("content-type", "application/json")
      self.send_header("content-length", str(len(body)))
      self.end_headers()
      self.wfile.write(body)

  class Server(ThreadingHTTPServer):
    request_queue_size = 128  # all episodes connect at once

  with Server(("127.0.0.1", 0), Handler) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
      yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
      server.shutdown()
      thread.join()
