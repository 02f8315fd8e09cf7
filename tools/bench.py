"""Measure the speed of a router and its training.

    python -m tools.bench --config=configs/sciworld.py --config.router.weights=DIR

The flags are those of main.py. No run is opened, and no model is called. Without
--config.router.weights, the policy network is measured.
"""

import copy
import dataclasses
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from timeit import repeat, timeit
from typing import NamedTuple

import jax
import numpy as np
from absl import app
from flax import nnx

import main
from baar_jax.config import Config
from baar_jax.episode import Episode, Step, Task
from baar_jax.learn.batches import SAMPLED, Batcher, Encoder
from baar_jax.learn.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer
from baar_jax.mesh import one_device
from baar_jax.paper.bopo import Learner, RatedEpisode, update_policy
from baar_jax.paper.losses import bopo_loss, sft_batch_loss
from baar_jax.rollout.specs import Job, Live, PolicySpec
from baar_jax.router.inputs import learn_vocabulary
from baar_jax.router.network import InputsEncoder
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.reader import TextEncoder
from baar_jax.router.view import View, decision_tokens, read_tokenizer
from baar_jax.router.weights import load_pretrained

# Number of steps of each measured episode.
STEPS = 20
LETTERS = "abcdefghijklmnopqrstuvwxyz "
BENCH = PolicySpec("bench")


class Setting(NamedTuple):
  """A way to run the router's decisions, for which the time per step is measured.

  Attributes:
    name: the name of the measured figure, as it is printed and stored.
    live: the number of episodes that are decided in one batch.
    forget: whether the reader forgets its episodes after each step, so that it reads
      them again from the start.
    view: the text that a text router reads, "transcript" or "paper".
  """

  name: str
  live: int
  forget: bool = False
  view: str = "transcript"


CACHED = (Setting("cached_decision_ms", 1), Setting("cached_16_step_ms", 16))
# These are measured for text routers only.
WHOLE = (
  Setting("whole_decision_ms", 1, forget=True),
  Setting("paper_decision_ms", 1, forget=True, view="paper"),
)


class Subject(NamedTuple):
  """The router whose speed is measured, with a task and episodes.

  Attributes:
    model: the router.
    encoders: turn episodes into arrays, by the value of `--config.router.view`.
    task: the task of all episodes.
    episodes: episodes whose texts are random letters.
  """

  model: nnx.Module
  encoders: dict[str, Encoder]
  task: Task
  episodes: list[Episode]


def show(command: tuple[Config, str]) -> None:
  """Print all speeds of the router of a command line.

  Args:
    command: the configuration and an unused stage, as `main.parse` returns them.
  """
  config, _ = command
  main.validate(config)
  print(jax.devices()[0].device_kind)
  for name, value in measure(config).items():
    print(f"{name:24}{value:>12,.4g}")


def measure(config: Config) -> dict[str, float]:
  """Measure all speeds of a configuration's router, by the figures' names."""
  subject = make_subject(config)
  settings = CACHED + WHOLE if config.router.weights else CACHED
  figures = {setting.name: decide(subject, setting) for setting in settings}
  return figures | train(subject, config)


def make_subject(config: Config) -> Subject:
  """Build or load the router, and make episodes of random letters.

  Every task, observation and action is longer than the length to which a text router
  cuts it. So this router always reads as many tokens as possible.
  """
  draw = random.Random(0)

  def write() -> str:
    """Draw a text of random letters."""
    return "".join(draw.choices(LETTERS, k=1000))

  task = Task("bench", "test", write(), STEPS)
  episodes = []
  for seed in range(64):
    steps = [Step(write(), s % 2, write(), logp=math.log(0.5)) for s in range(STEPS)]
    episodes.append(Episode("bench", "bench", seed, steps, 1.0, "done"))
  models = len(config.models.names)
  if not config.router.weights:
    vocabulary = learn_vocabulary({"bench": task}, episodes)
    encoder = InputsEncoder(vocabulary, models)
    return Subject(encoder.build(0), {"transcript": encoder}, task, episodes)
  tokenizer = read_tokenizer(Path(config.router.weights))
  tokenizer.add_special_tokens(decision_tokens(models))
  encoders = {}
  for name in ("transcript", "paper"):
    router = dataclasses.replace(config.router, view=name)
    encoders[name] = TextEncoder(View(router, tokenizer, models))
  return Subject(load_pretrained(encoders["paper"].view), encoders, task, episodes)


def decide(subject: Subject, setting: Setting) -> float:
  """Measure the router's mean time for one batch of decisions.

  Returns:
    Milliseconds per step of all `setting.live` episodes.
  """
  encoder = subject.encoders[setting.view]
  reader = encoder.open_reader(subject.model, setting.live, one_device())
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
  """Measure the speed of gradient steps of SFT and BoPO, without the encoding.

  The unit is a token for text routers, and a decision for the policy network. Padding
  is not counted. A gradient step has 64 episodes, but one for text routers on a CPU.
  """
  encoder = subject.encoders["transcript"]
  is_text = bool(config.router.weights)
  count = 1 if is_text and jax.default_backend() == "cpu" else 64
  changed = copy.deepcopy(config)
  changed.env.max_steps = STEPS
  changed.sft.micro_episodes = min(count, 16)
  changed.bopo.epochs = 1
  episodes = subject.episodes[:count]
  batcher = Batcher(changed, encoder, [subject.task])

  unit = "decisions"
  size = count * STEPS
  if is_text:
    unit = "tokens"
    encoded = [encoder.encode(subject.task, episode) for episode in episodes]
    size = sum(len(window.tokens) for windows in encoded for window in windows)
  # JAX compiles during the first call, which is not measured. The fastest of three
  # further calls counts.

  def measure_s(step: Callable[[], object]) -> float:
    """Measure the fastest time of a step, in seconds."""
    return min(repeat(step, number=1, repeat=4)[1:])

  optimizer = sft_optimizer(changed.sft)
  trainer = Trainer(subject.model, encoder, sft_batch_loss, optimizer)
  sft_s = measure_s(lambda: trainer.step(batcher.micro_batches(episodes)))
  # This frees the memory of SFT's parameters and optimizer state before BoPO is
  # measured.
  del trainer
  loss = partial(bopo_loss, changed.bopo)
  trainer = Trainer(subject.model, encoder, loss, bopo_optimizer(changed.bopo, 1))
  anchor = ShardedRouter(subject.model, encoder)
  batcher = dataclasses.replace(batcher, labels=SAMPLED)
  learner = Learner(changed.bopo, trainer, batcher, anchor)
  advantages = np.linspace(-1, 1, count, dtype="float32")
  rated = [*map(RatedEpisode, episodes, advantages)]
  bopo_s = measure_s(partial(update_policy, learner, rated, 1))
  return {f"sft_{unit}_per_s": size / sft_s, f"bopo_{unit}_per_s": size / bopo_s}


if __name__ == "__main__":
  app.run(show, flags_parser=main.parse)
