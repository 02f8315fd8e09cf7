"""Stage bench: how fast the router, its training and the rollout loop are on this machine."""

import copy
import dataclasses
import json
import math
import os
import random
import tempfile
import timeit
from functools import partial
from pathlib import Path

import jax
import numpy as np

from baar_jax.config import Config, RouterConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import Job, Live, Policy, random_rule
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.view import View, adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.router.weights import build_model, load_pretrained, weights_directory
from baar_jax.run import Run
from baar_jax.train.batches import SAMPLED, Batcher
from baar_jax.train.fit import Learner, Pending, update_policy
from baar_jax.train.losses import bopo_loss, sft_batch_loss
from baar_jax.train.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer

# The router that is measured, unless the run's router has weights; and the steps of an episode.
SHAPE = {"hidden_size": 512, "intermediate_size": 2752, "head_dim": 64, "num_layers": 8}
SHAPE |= {"num_heads": 8, "num_kv_heads": 2, "max_tokens": 1792, "buckets": 4}
ROUTER, STEPS = RouterConfig(**SHAPE, action_tokens=20, result_tokens=44), 20
DECISIONS = {  # the view, how many episodes are live, and whether the cache is lost at each step
  "cached_decision_ms": ("transcript", 1, False),
  "whole_decision_ms": ("transcript", 1, True),
  "paper_decision_ms": ("paper", 1, True),
  "cached_16_step_ms": ("transcript", 16, False),
}
AGAINST = dict.fromkeys(list(DECISIONS)[1:], "cached_decision_ms")  # whose multiple is printed
AGAINST["bopo_tokens_per_s"] = "sft_tokens_per_s"
SEED = 7_000_000  # of episodes that are measured and not stored


def main(run: Run) -> None:
  """Prints figures and saves report/bench.json; of the run's results nothing changes.

  The router, made or loaded, meets episodes of random letters that are longer than their previews.
  """
  if run.config.models.kind != "scripted":
    raise ValueError("--stage=bench plays scripted models alone: set --config.models.kind=scripted")
  run.print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}")
  c = run.config.router
  router = dataclasses.replace(c if c.weights else ROUTER, view="transcript")
  draw = random.Random(0)
  text = lambda: "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=1000))  # noqa: E731
  task, episodes = Task("bench", "test", text(), STEPS), []
  for _ in range(64):
    steps = [Step(text(), s % 2, text(), logp=math.log(0.5)) for s in range(STEPS)]
    episodes.append(Episode("bench", "bench", 0, steps, 1.0, "done"))
  with tempfile.TemporaryDirectory() as name:
    directory = Path(name)
    if c.weights:
      adopt_tokenizer(weights_directory(c.weights), directory)
    else:
      train_tokenizer(text_pieces(task, episodes[0]), router.vocab_size, directory)
    view = View(router, directory)
    model = load_pretrained(view) if c.weights else build_model(router, 0)
    figures = decide(model, view, directory, task, episodes)
  figures |= train(run.config, model, view, task, episodes) | play(run)
  for name, value in figures.items():
    first = AGAINST.get(name)
    ratio = f"  {value / figures[first]:.3g} x {first}" if first else ""
    run.print(f"{name:24}{value:>12,.4g}{ratio}")
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures, indent=2))


def decide(model, view: View, directory: Path, task: Task, episodes) -> dict[str, float]:
  """A step at which the router decides for all live episodes: from the cache, or with nothing left
  in it from the steps before."""
  figures = {}
  for name, (view_name, count, forget) in DECISIONS.items():
    shown = View(dataclasses.replace(view.config, view=view_name), directory)
    policy = RouterPolicy("bench", model, shown, Threshold(), count)
    for _ in range(2):  # the first time compiles
      lives, seconds = [Live(Job(task, 0), None) for _ in range(count)], []
      for s in range(STEPS):
        for live, episode in zip(lives, episodes):
          live.steps, live.observation = episode.steps[:s], episode.steps[s].observation
        seconds.append(timeit.timeit(partial(policy.choose, lives), number=1))
        for live in lives if forget or s + 1 == STEPS else ():
          policy.finish(live)
    figures[name] = 1e3 * float(np.mean(seconds))
  return figures


def train(c: Config, model, view: View, task: Task, episodes) -> dict[str, float]:
  """Gradient steps of SFT and BoPO as their stages make them, in real tokens: of one episode on a
  CPU, else of 64."""
  c = copy.deepcopy(c)
  c.router, c.env.max_steps, c.bopo.epochs = view.config, STEPS, 1
  count, c.sft.micro_episodes = (1, 1) if jax.default_backend() == "cpu" else (64, 16)
  c.bopo.batch_episodes = count
  placed = view.decision_ids, None, c.router.dtype
  batcher, episodes = Batcher(c, view, [task]), episodes[:count]
  trainer = Trainer(model, sft_batch_loss, sft_optimizer(c.sft, c.sft.learning_rates[0]), *placed)
  sft_s = timeit.repeat(lambda: trainer.step(batcher.micro_batches(episodes)), number=1, repeat=4)
  del trainer  # its parameters and its optimizer's state
  trainer = Trainer(model, partial(bopo_loss, c.bopo), bopo_optimizer(c.bopo), *placed)
  pending = Pending(episodes, np.linspace(-1, 1, count, dtype="float32"))
  batcher = dataclasses.replace(batcher, labels=SAMPLED)
  learner = Learner(c.bopo, trainer, batcher, ShardedRouter(model, *placed))
  bopo_s = timeit.repeat(partial(update_policy, learner, pending, c.seed), number=1, repeat=4)
  windows = [window for episode in episodes for window in view.episode_windows(task, episode)]
  tokens = sum(len(window.tokens) for window in windows)
  seconds = {"sft_tokens_per_s": sft_s, "bopo_tokens_per_s": bopo_s}
  return {name: tokens / min(times[1:]) for name, times in seconds.items()}  # the first compiles


def play(run: Run) -> dict[str, float]:
  """Episodes of the run's environment through the loop, with random routing."""
  tasks, envs = run.tasks("test")[:12], run.envs()
  policy = Policy("bench", lambda live: random_rule(live, 0.5))
  for seed in (SEED, SEED + 2):  # in the first round Java still compiles
    jobs, start_s = [Job(task, seed + i) for task in tasks for i in (0, 1)], timeit.default_timer()
    episodes = list(run_episodes(jobs, policy, run.pair, envs))
    loop_s = timeit.default_timer() - start_s
  return {"steps_per_s": sum(len(episode.steps) for episode in episodes) / loop_s}
