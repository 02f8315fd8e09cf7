"""How close 64 live episodes come to the least time that a stand-in's latencies allow.

python tests/latency.py: prints wall time over max(total latency / 64, longest episode). Latencies
are lognormal with a median of 0.5 s and a 99th percentile of 5 s, known before a run begins.
"""

import heapq
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lockpick import Lockpick  # noqa: E402
from standin import StandIn  # noqa: E402

LIVE, MAX_STEPS = 64, 18
EPISODES = (64, 768)  # one for each place, and many: the last ones leave places empty
MEDIAN_S, P99_S = 0.5, 5.0
SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263  # of a standard normal's 99th percentile


def serve() -> None:
  """The stand-in, in a process of its own; ends with its standard input."""
  draw = random.Random(0)
  latencies = [draw.lognormvariate(math.log(MEDIAN_S), SIGMA) for _ in range(100_000)]
  answer = Lockpick(max(EPISODES), 1, MAX_STEPS)
  with StandIn(answer, latency_s=latencies.__getitem__).running() as server:
    print(server.url, flush=True)
    sys.stdin.read()


def measure(url: str, directory: str, count: int) -> None:
  from baar_jax.calls import Calls
  from baar_jax.config import ModelsConfig
  from baar_jax.envs.sandbox import Sandbox
  from baar_jax.llms.chat import ChatPair
  from baar_jax.llms.prices import Price
  from baar_jax.policies import random_large
  from baar_jax.rollout import Job, run_episodes

  config = ModelsConfig(kind="chat", names=("small", "large"), base_urls=(url,), concurrency=LIVE)
  pair = ChatPair(config, (Price(1, 1, 1),) * 2, Calls(f"{directory}/{count}.sqlite"))
  envs = [Sandbox(count, 1, MAX_STEPS) for _ in range(LIVE)]
  jobs = [Job(task, 0) for task in envs[0].tasks("train")]
  start = time.monotonic()
  episodes = list(run_episodes(jobs, random_large(0.5, "latency"), pair, envs))
  wall_s = time.monotonic() - start
  pair.close()
  lasted_s = {e.task_id: sum(step.latency_s for step in e.steps) for e in episodes}
  each_s = list(lasted_s.values())
  bound_s = max(sum(each_s) / LIVE, max(each_s))
  places = [0.0] * LIVE  # what the same episodes take where each begins in the first free place
  for name in [job.task.id for job in jobs]:
    heapq.heappush(places, heapq.heappop(places) + lasted_s[name])
  print(
    f"{len(episodes)} episodes, {sum(len(e.steps) for e in episodes)} calls, {LIVE} live: "
    f"{wall_s:.1f} s, {wall_s / bound_s:.3f} x the bound of {bound_s:.1f} s, "
    f"{wall_s / max(places):.3f} x what these episodes take in this order"
  )


def main() -> None:
  with tempfile.TemporaryDirectory() as directory:
    server = subprocess.Popen(
      [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
      url = server.stdout.readline().strip()
      for count in EPISODES:
        measure(url, directory, count)
    finally:
      server.communicate()


if __name__ == "__main__":
  serve() if sys.argv[1:] == ["serve"] else main()
