"""Measure the speed of the router and its training.

    python -m tools.bench --config=configs/sciworld.py

The flags are those of main.py. No run is opened, and no model is called. If
--config.router.weights is "", a router of the size ROUTER with random weights is
measured.
"""

import copy
import dataclasses
import math
import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from timeit import repeat, timeit
from typing import NamedTuple

import jax
import numpy as np
from absl import app

import main
from baar_jax.config import Config, RouterConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.learn.batches import SAMPLED, Batcher
from baar_jax.learn.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer
from baar_jax.paper.bopo import Learner, RatedEpisode, update_policy
from baar_jax.paper.losses import bopo_loss, sft_batch_loss
from baar_jax.rollout.specs import Job, Live, PolicySpec
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.reader import Reader
from baar_jax.router.view import View, adopt_tokenizer, text_pieces, train_tokenizer
from baar_jax.router.weights import build_model, load_pretrained

# Shape of the measured router. A run with --config.router.weights measures its own.
ROUTER = RouterConfig(
  hidden_size=512,
  num_layers=8,
  num_heads=8,
  max_tokens=1792,
  action_tokens=20,
  result_tokens=44,
)
# Number of steps of each measured episode.
STEPS = 20
LETTERS = "abcdefghijklmnopqrstuvwxyz "
BENCH = PolicySpec("bench")


class Setting(NamedTuple):
  """A way to run the router's decisions, for which the time per step is measured.

  Attributes:
    name: the name of the measured figure, as it is printed and stored.
    view: the text that the router reads, "transcript" or "paper".
    live: the number of episodes that are decided in one batch.
    forget: whether the KV cache is emptied after each step, so that the whole text is
      read again.
  """

  name: str
  view: str
  live: int
  forget: bool


SETTINGS = (
  Setting("cached_decision_ms", "transcript", live=1, forget=False),
  Setting("whole_decision_ms", "transcript", live=1, forget=True),
  Setting("paper_decision_ms", "paper", live=1, forget=True),
  Setting("cached_16_step_ms", "transcript", live=16, forget=False),
)


class Subject(NamedTuple):
  """The router whose speed is measured, with a task and episodes.

  Attributes:
    model: the router.
    views: the writers of the router's texts, by the value of `--config.router.view`.
    task: the task of all episodes.
    episodes: episodes whose texts are random letters.
  """

  model: Qwen2
  views: dict[str, View]
  task: Task
  episodes: list[Episode]


def show(command: tuple[Config, str]) -> None:
  """Print all speeds of the router of a command line.

  Args:
    command: the configuration and an unused stage, as `main.parse` returns them.
  """
  config, _ = command
  main.validate(config)
  kind = jax.devices()[0].device_kind
  print(f"{kind}, {os.cpu_count()} cores, jax {jax.__version__}")
  for name, value in measure(config).items():
    print(f"{name:24}{value:>12,.4g}")


def measure(config: Config) -> dict[str, float]:
  """Measure all speeds of a configuration's router, by the figures' names."""
  subject = make_subject(config.router)
  figures = {setting.name: decide(subject, setting) for setting in SETTINGS}
  return figures | train(subject, config)


def make_subject(config: RouterConfig) -> Subject:
  """Build or load the router, and make episodes of random letters.

  Every task, observation and action is longer than the length to which the router cuts
  it. So the router always reads as many tokens as possible.
  """
  draw = random.Random(0)

  def write() -> str:
    """Draw a text of random letters."""
    return "".join(draw.choices(LETTERS, k=1000))

  task = Task("bench", "test", write(), STEPS)
  episodes = []
  for _ in range(64):
    steps = [Step(write(), s % 2, write(), logp=math.log(0.5)) for s in range(STEPS)]
    episodes.append(Episode("bench", "bench", 0, steps, 1.0, "done"))
  with tempfile.TemporaryDirectory() as name:
    directory = Path(name)
    if config.weights:
      adopt_tokenizer(Path(config.weights), directory)
      model = load_pretrained(View(config, directory))
    else:
      config = ROUTER
      train_tokenizer(text_pieces(task, episodes[0]), config.vocab_size, directory)
      model = build_model(config, 0)
    transcript = View(dataclasses.replace(config, view="transcript"), directory)
    paper = View(dataclasses.replace(config, view="paper"), directory)
  return Subject(model, {"transcript": transcript, "paper": paper}, task, episodes)


def decide(subject: Subject, setting: Setting) -> float:
  """Measure the router's mean time for one batch of decisions.

  Returns:
    Milliseconds per step of all `setting.live` episodes.
  """
  view = subject.views[setting.view]
  reader = Reader(subject.model, view, view.logit_ids, setting.live)
  policy = RouterPolicy(BENCH, reader, Threshold())
  # JAX compiles during the first pass over the episodes' steps. Only the second pass is
  # measured.
  for _ in range(2):
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
  """Measure the tokens per second of gradient steps of SFT and BoPO.

  A gradient step has one episode on a CPU and 64 episodes on a GPU. Padding is not
  counted as tokens.
  """
  view = subject.views["transcript"]
  count = 1 if jax.default_backend() == "cpu" else 64
  changed = copy.deepcopy(config)
  changed.router = view.config
  changed.env.max_steps = STEPS
  changed.sft.micro_episodes = min(count, 16)
  changed.bopo.epochs = 1
  episodes = subject.episodes[:count]
  batcher = Batcher(changed, view, [subject.task])
  settings = {"token_ids": view.decision_ids, "dtype": changed.router.dtype}

  tokens = 0
  for episode in episodes:
    for window in view.episode_windows(subject.task, episode):
      tokens += len(window.tokens)
  # JAX compiles during the first call, which is not measured. The fastest of three
  # further calls counts.

  def measure_s(step: Callable[[], object]) -> float:
    """Measure the fastest time of a step, in seconds."""
    return min(repeat(step, number=1, repeat=4)[1:])

  optimizer = sft_optimizer(changed.sft)
  trainer = Trainer(subject.model, sft_batch_loss, optimizer, **settings)
  sft_s = measure_s(lambda: trainer.step(batcher.micro_batches(episodes)))
  # This frees the memory of SFT's parameters and optimizer state before BoPO is
  # measured.
  del trainer
  loss = partial(bopo_loss, changed.bopo)
  trainer = Trainer(subject.model, loss, bopo_optimizer(changed.bopo), **settings)
  anchor = ShardedRouter(subject.model, **settings)
  batcher = dataclasses.replace(batcher, labels=SAMPLED)
  learner = Learner(changed.bopo, trainer, batcher, anchor)
  advantages = np.linspace(-1, 1, count, dtype="float32")
  rated = [*map(RatedEpisode, episodes, advantages)]
  bopo_s = measure_s(partial(update_policy, learner, rated, 1))
  return {"sft_tokens_per_s": tokens / sft_s, "bopo_tokens_per_s": tokens / bopo_s}


if __name__ == "__main__":
  app.run(show, flags_parser=main.parse)
