"""Check in three minutes what a GPU does with the text router, and measure its speed.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m tools.gpu_check

Each figure is printed, and stored in gpu_check.json, as soon as it is measured;
docs/reproduce.md explains the figures. `--small` takes a tiny router, for a CPU.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from timeit import default_timer, repeat

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import log_softmax

from baar_jax.episode import Episode, Step, Task
from baar_jax.learn.batches import SAMPLED, Batcher
from baar_jax.learn.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer
from baar_jax.paper.bopo import Learner, RatedEpisode
from baar_jax.paper.losses import bopo_loss, sft_batch_loss
from baar_jax.rollout.specs import Job, Live
from baar_jax.router.qwen2 import Qwen2, Qwen2Config
from baar_jax.router.reader import Reader, TextEncoder
from baar_jax.router.view import make_byte_tokenizer
from configs import sciworld

# On a GPU, the tests compare float32 without the GPU's usual rounding.
TESTS_ENV = {
  "BAAR_JAX_TEST_PLATFORM": "",  # JAX's own choice, in place of the CPU
  "JAX_DEFAULT_MATMUL_PRECISION": "highest",
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# The last of them runs all stages in examples/sandbox.py with a text router.
TESTS = (
  "tests/test_qwen2.py",
  "tests/test_weights.py",
  "tests/test_standin_runs.py::test_the_papers_setting_runs_with_a_text_router",
)
QWEN = Qwen2Config(151_936, 1536, 8960, 28, 12, 2, 128, tie_word_embeddings=True)
SMALL = Qwen2Config(340, 48, 40, 3, 6, 2, 8)
ROWS = 16  # the number of live episodes in one batch of decisions
TEXT = "abcdefghijklmnopqrstuvwxyz " * 40  # longer than any limit of tokens
TASK = Task("t", "test", TEXT, 40)
# An episode's transcript of so many steps nearly fills the 2,048 tokens.
STEPS = 12


def main(shape: Qwen2Config) -> None:
  """Print all figures of a router of this shape, and store them as JSON."""
  print(jax.devices()[0].device_kind)
  figures = {}
  for name, value in measure(shape):
    figures[name] = float(value)
    print(f"{name:28}{value:>12,.4g}", flush=True)
    Path("gpu_check.json").write_text(json.dumps(figures))


def measure(shape: Qwen2Config) -> Iterator[tuple[str, float]]:
  """Yield the name and the value of each figure, those of correctness first."""
  yield "tests_passed", pass_tests()
  side = 5 * shape.hidden_size
  x = jnp.ones((side, side), jnp.bfloat16)
  peak = 2 * side**3 / fastest_s(partial(jax.jit(jnp.matmul), x, x))
  yield "matmul_tflops", peak / 1e12
  model = Qwen2(shape, nnx.Rngs(0))
  transcript = make_batcher("transcript")
  yield from decide(model, transcript, 1)
  yield from decide(model, transcript, ROWS)
  weights = sum(x.size for x in jax.tree.leaves(nnx.state(model.layers)))
  del model  # A training makes its own one, and frees it, as the stages do.
  for name, speed in train(shape, transcript, make_episodes(8, STEPS)):
    yield f"{name}_tokens_per_s", speed
    # A token takes 6 operations per weight of the layers. Attention does not count, nor
    # does what the backward pass computes again.
    yield f"{name}_share_of_peak", 6 * weights * speed / peak
    yield f"{name}_peak_gb", peak_gb()
  longest = make_episodes(1, TASK.max_steps)
  yield "paper_tokens_per_s", next(train(shape, make_batcher("paper"), longest))[1]
  yield "paper_peak_gb", peak_gb()


def pass_tests() -> bool:
  """Run tests on the device, and tell whether all pass."""
  command = [sys.executable, "-m", "pytest", "-q", "-n0", *TESTS]
  return not subprocess.run(command, env=os.environ | TESTS_ENV).returncode


def fastest_s(call: partial) -> float:
  """Measure the fastest of three calls in seconds, after a call that compiles."""
  return min(repeat(lambda: jax.block_until_ready(call()), number=1, repeat=4)[1:])


def peak_gb() -> float:
  """Return the most memory of the device that was in use so far, in GB; 0 on a CPU."""
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9


def make_batcher(view: str) -> Batcher:
  """Make a batcher of the paper's setting, for a view whose tokens are bytes."""
  config = sciworld.get_config("paper")
  router = dataclasses.replace(config.router, view=view)
  return Batcher(config, TextEncoder(router, make_byte_tokenizer()), [TASK])


def make_episodes(count: int, steps: int) -> list[Episode]:
  """Make episodes of steps with long texts."""
  episodes = []
  for number in range(count):
    played = [Step(TEXT[number + s :], s % 2, TEXT, logp=-0.7) for s in range(steps)]
    episodes.append(Episode("t", "p", "test", number, played, 1.0, "done"))
  return episodes


def decide(model: Qwen2, batcher: Batcher, rows: int) -> Iterator[tuple[str, float]]:
  """Yield the mean time of a step's decisions of all episodes, in one batch.

  Then yield the largest difference of an episode's log-probability from that of a
  training pass: the logarithm of a ratio that should be 1.
  """
  episodes = make_episodes(rows, STEPS)
  reader = Reader(model, batcher.encoder, rows)
  # JAX compiles during the first pass. Only the second one is measured.
  for _ in range(2):
    seconds = 0.0
    logits = []
    for s in range(STEPS):
      lives = []
      for e in episodes:
        job = Job(TASK, "test", e.trial)
        lives.append(Live(job, steps=e.steps[:s], observation=e.steps[s].observation))
      start_s = default_timer()
      logits.append(reader.read(lives)[0])
      seconds += default_timer() - start_s
  yield f"decision_{rows}_ms", 1e3 * seconds / STEPS
  router = ShardedRouter(model, batcher.encoder)
  trained_NxA = batcher.compute(router.logits, episodes)
  live_NxA = jnp.concatenate(jnp.stack(logits, axis=1))
  gap_N = (log_softmax(trained_NxA) - log_softmax(live_NxA))[:, 0]
  yield f"log_ratio_{rows}", jnp.abs(gap_N.reshape(rows, -1).sum(axis=1)).max()


def train(
  shape: Qwen2Config, batcher: Batcher, episodes: list[Episode]
) -> Iterator[tuple[str, float]]:
  """Yield the tokens per second of a gradient step of BoSFT, then of BoPO.

  Padding does not count.
  """
  config = batcher.config
  encoder = batcher.encoder
  tokens = 0
  for episode in episodes:
    tokens += sum(len(window.tokens) for window in encoder.encode(TASK, episode))
  model = Qwen2(shape, nnx.Rngs(0))
  trainer = Trainer(model, encoder, sft_batch_loss, sft_optimizer(config.sft))
  del model
  yield (
    "sft",
    tokens / fastest_s(partial(trainer.step, batcher.micro_batches(episodes))),
  )
  # This frees the memory of SFT's parameters and optimizer state.
  del trainer
  loss = partial(bopo_loss, config.bopo)
  model = Qwen2(shape, nnx.Rngs(0))
  trainer = Trainer(model, encoder, loss, bopo_optimizer(config.bopo))
  batcher = dataclasses.replace(batcher, labels=SAMPLED)
  model = jax.tree.map(lambda x: x.astype(encoder.dtype), model)
  anchor = ShardedRouter(model, encoder)
  del model
  learner = Learner(config.bopo, trainer, batcher, anchor)
  rated = [RatedEpisode(episode, 1.0) for episode in episodes]
  yield "bopo", tokens / fastest_s(partial(learner.learn, rated))


if __name__ == "__main__":
  main(SMALL if "--small" in sys.argv else QWEN)
