"""Stage bench: how fast the router, its training and the rollout loop are on this machine."""

import copy
import dataclasses
import json
import math
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
import psutil

from baar_jax.config import Config, RouterConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import Job, Live, Policy, random_rule
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.view import View, adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.router.weights import build_model, load_pretrained, weights_directory
from baar_jax.run import Run
from baar_jax.train.batches import Batcher
from baar_jax.train.fit import update_policy
from baar_jax.train.losses import bopo_loss, sft_batch_loss
from baar_jax.train.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer

# The router that is measured, unless the run's router has weights; and the steps of an episode.
WIDTHS = {"hidden_size": 512, "intermediate_size": 2752, "head_dim": 64, "max_tokens": 1792}
COUNTS = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "buckets": 4}
ROUTER, STEPS = RouterConfig(**WIDTHS, **COUNTS, action_tokens=20, result_tokens=44), 20
# Figures of live decisions: the view, how many episodes are live, and whether the cache is lost.
DECISIONS = [("cached_decision_ms", "transcript", 1, False)]
DECISIONS += [("whole_decision_ms", "transcript", 1, True), ("paper_decision_ms", "paper", 1, True)]
DECISIONS += [("cached_16_step_ms", "transcript", 16, False)]
SEED = 7_000_000  # of episodes that are measured and not stored
Figure = tuple[str, float, str]  # a name that ends in its unit, a value, and a remark


def main(run: Run) -> None:
  """Prints a table and saves report/bench.json; of the run's results nothing changes."""
  if run.pair.kind != "scripted":
    raise ValueError("--stage=bench plays scripted models alone: set --config.models.kind=scripted")
  run.print(f"{jax.devices()[0].device_kind}, {psutil.cpu_count()} cores, jax {jax.__version__}")
  figures: dict[str, float] = {}
  with tempfile.TemporaryDirectory() as directory:
    for name, value, remark in measure_all(run, Path(directory)):
      figures[name] = value
      shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
      run.print(f"{name:24}{shown:>10}  {remark}".rstrip())
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures, indent=2))


def measure_all(run: Run, directory: Path) -> Iterator[Figure]:
  """The figures of a router, made or loaded, whose tokenizer is put into the directory, on episodes
  of random letters that are longer than their previews; then those of the rollout loop."""
  c, config = run.config.router, copy.deepcopy(run.config)
  config.router = dataclasses.replace(c if c.weights else ROUTER, view="transcript")
  config.env.max_steps, config.bopo.epochs = STEPS, 1
  cpu = jax.default_backend() == "cpu"
  config.bopo.batch_episodes, config.sft.micro_episodes = (1, 1) if cpu else (64, 16)
  draw = random.Random(0)
  text = lambda: "".join(draw.choices(string.ascii_lowercase + " ", k=1000))  # noqa: E731
  task, episodes = Task("bench", "test", text(), STEPS), []
  for _ in range(64):
    steps = [Step(text(), s % 2, text(), logp=math.log(0.5)) for s in range(STEPS)]
    episodes.append(Episode("bench", "bench", 0, steps, 1.0, "done"))
  if c.weights:
    adopt_tokenizer(weights_directory(c.weights), directory)
  else:
    train_tokenizer(text_pieces(task, episodes[0]), config.router.vocab_size, directory)
  view = View(config.router, directory)
  model = load_pretrained(view) if c.weights else build_model(config.router, 0)
  yield from decide(model, view, directory, task, episodes)
  yield from train(config, model, view, task, episodes[: config.bopo.batch_episodes])
  yield from play(run)


def time_s(call: Callable[[], object]) -> float:
  """Seconds until the call's arrays are ready."""
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def decide(model, view: View, directory: Path, task: Task, episodes) -> Iterator[Figure]:
  """A step at which the router decides for all live episodes: from the cache, or with nothing left
  in it from the steps before."""
  first_s = None
  for name, view_name, count, forget in DECISIONS:
    shown = View(dataclasses.replace(view.config, view=view_name), directory)
    policy = RouterPolicy("bench", model, shown, Threshold(), count)
    for _ in range(2):  # the first time compiles
      lives, seconds = [Live(Job(task, 0), None) for _ in range(count)], []
      for s in range(STEPS):
        for live, episode in zip(lives, episodes):
          live.steps, live.observation = episode.steps[:s], episode.steps[s].observation
        seconds.append(time_s(partial(policy.choose, lives)))
        for live in lives if forget or s + 1 == STEPS else ():
          policy.finish(live)
    mean_s = float(np.mean(seconds))
    first_s = first_s or mean_s
    yield name, 1e3 * mean_s, f"{view_name}, {count} live: {mean_s / first_s:.3g} x the first"


def train(c: Config, model, view: View, task: Task, episodes) -> Iterator[Figure]:
  """Gradient steps of SFT and BoPO as their stages make them, in real tokens."""
  placed = view.decision_ids, None, c.router.dtype
  batcher = Batcher(c, view, [task])
  trainer = Trainer(model, sft_batch_loss, sft_optimizer(c.sft, c.sft.learning_rates[0]), *placed)
  sft = lambda: trainer.step(batcher.micro_batches(episodes))  # noqa: E731
  sft_s = min([time_s(sft) for _ in range(4)][1:])  # the first compiles
  del trainer  # its parameters and its optimizer's state
  trainer = Trainer(model, partial(bopo_loss, c.bopo), bopo_optimizer(c.bopo), *placed)
  adv_B = np.linspace(-1, 1, len(episodes), dtype="float32")
  arguments = ShardedRouter(model, *placed), batcher, episodes, adv_B, c.bopo, c.seed
  bopo_s = min([time_s(partial(update_policy, trainer, *arguments)) for _ in range(4)][1:])
  windows = [window for episode in episodes for window in view.episode_windows(task, episode)]
  tokens = sum(len(window.tokens) for window in windows)
  yield "sft_tokens_per_s", tokens / sft_s, f"{len(episodes) / sft_s:.3g} episodes/s"
  yield "bopo_tokens_per_s", tokens / bopo_s, f"{sft_s / bopo_s:.3g} x SFT"


def play(run: Run) -> Iterator[Figure]:
  """Episodes of the run's environment through the loop."""
  tasks, envs = run.tasks("test")[:12], run.envs()
  policy = Policy("bench", lambda live: random_rule(live, 0.5))
  for seed in (SEED, SEED + 2):  # in the first round Java still compiles
    jobs, start = [Job(task, seed + i) for task in tasks for i in (0, 1)], time.perf_counter()
    episodes = list(run_episodes(jobs, policy, run.pair, envs))
    loop_s = time.perf_counter() - start
  steps = sum(len(episode.steps) for episode in episodes)
  yield "steps_per_s", steps / loop_s, f"{run.config.env.kind}: the loop, random routing"
