"""Stage bench: how fast the router, its training and the rollout loop are here."""

import copy
import dataclasses
import json
import math
import os
import random
import tempfile
from functools import partial
from pathlib import Path
from timeit import default_timer, repeat, timeit
from typing import NamedTuple

import jax
import numpy as np

from baar_jax.config import Config, RouterConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.rules import take_randomly
from baar_jax.rollout.specs import Job, Live, PolicySpec
from baar_jax.rollout.turn import RulePolicy
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.tokenizer import adopt_tokenizer, train_tokenizer
from baar_jax.router.view import View, text_pieces
from baar_jax.router.weights import build_model, load_pretrained, weights_directory
from baar_jax.run import Run
from baar_jax.train.batches import SAMPLED, Batcher
from baar_jax.train.losses import RatedEpisode, bopo_loss, sft_batch_loss
from baar_jax.train.rollouts import Learner, update_policy
from baar_jax.train.trainer import (
  ShardedRouter,
  Trainer,
  bopo_optimizer,
  sft_optimizer,
)

# The router that is measured, unless the run's router has weights.
ROUTER = RouterConfig(
  hidden_size=512,
  intermediate_size=2752,
  head_dim=64,
  num_layers=8,
  num_heads=8,
  num_kv_heads=2,
  max_tokens=1792,
  buckets=4,
  action_tokens=20,
  result_tokens=44,
)
STEPS = 20  # of an episode
LETTERS = "abcdefghijklmnopqrstuvwxyz "
BENCH = PolicySpec("bench", p=0.5)
SEED = 7_000_000  # of episodes that are measured and not stored


class Setting(NamedTuple):
  """A way to decide that is measured."""

  name: str  # of its figure
  view: str
  live: int  # how many episodes are live
  forget: bool  # whether the cache is lost at each step


SETTINGS = (
  Setting("cached_decision_ms", "transcript", live=1, forget=False),
  Setting("whole_decision_ms", "transcript", live=1, forget=True),
  Setting("paper_decision_ms", "paper", live=1, forget=True),
  Setting("cached_16_step_ms", "transcript", live=16, forget=False),
)
AGAINST = {  # whose multiple is printed beside a figure
  "whole_decision_ms": "cached_decision_ms",
  "paper_decision_ms": "cached_decision_ms",
  "cached_16_step_ms": "cached_decision_ms",
  "bopo_tokens_per_s": "sft_tokens_per_s",
}


class Subject(NamedTuple):
  """The router that is measured, and the episodes that it meets."""

  model: Qwen2
  views: dict[str, View]  # by what `router.view` calls them
  task: Task
  episodes: list[Episode]


def main(run: Run) -> None:
  """Print figures and save report/bench.json; of the run's results nothing changes."""
  if run.config.models.kind != "scripted":
    raise ValueError(
      "--stage=bench plays scripted models alone: set --config.models.kind=scripted"
    )
  kind = jax.devices()[0].device_kind
  run.print(f"{kind}, {os.cpu_count()} cores, jax {jax.__version__}")
  subject = make_subject(run.config.router)
  figures = {setting.name: decide(subject, setting) for setting in SETTINGS}
  figures |= train(subject, run.config)
  figures["steps_per_s"] = play(run)
  for name, value in figures.items():
    line = f"{name:24}{value:>12,.4g}"
    if first := AGAINST.get(name):
      line += f"  {value / figures[first]:.3g} x {first}"
    run.print(line)
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures, indent=2))


def make_subject(config: RouterConfig) -> Subject:
  """Make or load the router; make episodes of random letters, longer than previews."""
  draw = random.Random(0)
  write = lambda: "".join(draw.choices(LETTERS, k=1000))  # noqa: E731
  task = Task("bench", "test", write(), STEPS)
  episodes = []
  for _ in range(64):
    steps = [Step(write(), s % 2, write(), logp=math.log(0.5)) for s in range(STEPS)]
    episodes.append(Episode("bench", "bench", 0, steps, 1.0, "done"))
  with tempfile.TemporaryDirectory() as name:
    directory = Path(name)
    if config.weights:
      adopt_tokenizer(weights_directory(config.weights), directory)
      model = load_pretrained(View(config, directory))
    else:
      config = ROUTER
      train_tokenizer(text_pieces(task, episodes[0]), config.vocab_size, directory)
      model = build_model(config, 0)
    transcript = View(dataclasses.replace(config, view="transcript"), directory)
    paper = View(dataclasses.replace(config, view="paper"), directory)
  return Subject(model, {"transcript": transcript, "paper": paper}, task, episodes)


def decide(subject: Subject, setting: Setting) -> float:
  """Measure a step at which the router decides for all live episodes, in ms."""
  view = subject.views[setting.view]
  policy = RouterPolicy(BENCH, subject.model, view, Threshold(), setting.live)
  for _ in range(2):  # the first time compiles
    lives = [Live(Job(subject.task, "test", n)) for n in range(setting.live)]
    seconds = []
    for s in range(STEPS):
      for live, episode in zip(lives, subject.episodes):
        live.steps = episode.steps[:s]
        live.observation = episode.steps[s].observation
      seconds.append(timeit(partial(policy.choose, lives), number=1))
      if setting.forget or s + 1 == STEPS:
        for live in lives:
          policy.finish(live)
  return 1e3 * float(np.mean(seconds))


def train(subject: Subject, config: Config) -> dict[str, float]:
  """Measure gradient steps of SFT and BoPO as their stages make them, in real tokens.

  They are of one episode on a CPU, else of 64.
  """
  view = subject.views["transcript"]
  count = 1 if jax.default_backend() == "cpu" else 64
  c = copy.deepcopy(config)
  c.router = view.config
  c.env.max_steps = STEPS
  c.sft.micro_episodes = min(count, 16)
  c.bopo.epochs = 1
  c.bopo.batch_episodes = count
  episodes = subject.episodes[:count]
  batcher = Batcher(c, view, [subject.task])
  settings = {"token_ids": view.decision_ids, "dtype": c.router.dtype}

  tokens = 0
  for episode in episodes:
    for window in view.episode_windows(subject.task, episode):
      tokens += len(window.tokens)
  # The first time compiles.
  measure_s = lambda step: min(repeat(step, number=1, repeat=4)[1:])  # noqa: E731
  optimizer = sft_optimizer(c.sft, c.sft.learning_rates[0])
  trainer = Trainer(subject.model, sft_batch_loss, optimizer, **settings)
  sft_s = measure_s(lambda: trainer.step(batcher.micro_batches(episodes)))
  del trainer  # its parameters and its optimizer's state
  loss = partial(bopo_loss, c.bopo)
  trainer = Trainer(subject.model, loss, bopo_optimizer(c.bopo), **settings)
  anchor = ShardedRouter(subject.model, **settings)
  batcher = dataclasses.replace(batcher, labels=SAMPLED)
  learner = Learner(c.bopo, trainer, batcher, anchor)
  advantages = np.linspace(-1, 1, count, dtype="float32")
  rated = [*map(RatedEpisode, episodes, advantages)]
  bopo_s = measure_s(partial(update_policy, learner, rated, c.seed))
  return {"sft_tokens_per_s": tokens / sft_s, "bopo_tokens_per_s": tokens / bopo_s}


def play(run: Run) -> float:
  """Measure the loop with episodes of the run's environment and random routing."""
  tasks = run.tasks("test")[:12]
  envs = run.envs()
  policy = RulePolicy(BENCH, take_randomly)
  for seed in (SEED, SEED + 2):  # in the first round Java still compiles
    jobs = [Job(task, "test", seed + i) for task in tasks for i in (0, 1)]
    start_s = default_timer()
    episodes = list(run_episodes(jobs, policy, run.pair, envs))
    loop_s = default_timer() - start_s
  steps = sum(len(episode.steps) for episode in episodes)
  return steps / loop_s
