"""Set up JAX on the CPU, and define a tiny tokenizer, view and router for all tests."""

import dataclasses
import os
import tempfile
from functools import partial
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tokenizers
from flax import nnx

from baar_jax.config import Config, EnvConfig, RouterConfig, SFTConfig
from baar_jax.episode import Episode, Task
from baar_jax.learn.batches import ACTED, Batcher, Labels
from baar_jax.router.qwen2 import Qwen2, Qwen2Config
from baar_jax.router.reader import TextEncoder
from baar_jax.router.view import View, decision_tokens

jax.config.update("jax_platforms", os.environ.get("BAAR_JAX_TEST_PLATFORM", "cpu"))
# All tests, and the programs that they start, share one cache of compiled functions.
CACHE = str(Path(tempfile.gettempdir()) / "baar_jax_compiled")
CACHE = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", CACHE)
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
# Arrays with different numbers of axes are an error, so that a missing [:, None] does not
# broadcast silently.
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

TEXTS = [
  "task: find the plant",
  "\nstart: a hall",
  "\nstep 1 model:",
  " action: ",
  "\nresult: ",
  *("open the red door", "go to the kitchen", "you see a green lamp and a stove") * 3,
]


# The shape of the tiny text router.
SHAPE = Qwen2Config(340, 16, 48, 2, 2, 1, 8)


@pytest.fixture(scope="session")
def make_tokenizer():
  """Return a function that trains a byte-level tokenizer of at most 340 tokens."""

  def make(models: int = 2) -> tokenizers.ByteLevelBPETokenizer:
    """Train it with a decision token for each model."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    decisions = decision_tokens(models)
    tokenizer.train_from_iterator(
      TEXTS, 340, min_frequency=1, show_progress=False, special_tokens=decisions
    )
    return tokenizer

  return make


@pytest.fixture(scope="session")
def router_config() -> RouterConfig:
  """Return the settings of a tiny text router, with previews of a few tokens."""
  return RouterConfig(
    description_tokens=8, action_tokens=4, result_tokens=6, max_tokens=320
  )


@pytest.fixture(scope="session")
def view(router_config, make_tokenizer) -> View:
  """Return the view of the tiny text router."""
  return View(router_config, make_tokenizer())


@pytest.fixture(scope="session")
def filled():
  """Return a function that builds a model with all parameters drawn by NumPy.

  Biases and norms are random too. Nothing is compiled to draw them.
  """

  def fill(build, seed: int = 0):
    """Fill the model that build() returns."""
    graphdef, params = nnx.split(nnx.eval_shape(build))
    draw = np.random.default_rng(seed)
    noise = jax.tree.map(
      lambda x: jnp.asarray(0.3 * draw.normal(size=x.shape), x.dtype), params
    )
    return nnx.merge(graphdef, noise)

  return fill


@pytest.fixture(scope="session")
def draw_model(filled):
  """Return a function that draws a tiny text router from a seed."""
  return partial(filled, lambda: Qwen2(SHAPE, nnx.Rngs(0)))


@pytest.fixture(scope="session")
def tiny_model(draw_model) -> Qwen2:
  """Return the tiny text router with random parameters."""
  return draw_model()


@pytest.fixture(scope="session")
def make_task():
  """Return a function that makes a task."""

  def make(task_id: str = "plant-0", max_steps: int = 40) -> Task:
    return Task(task_id, "train", "find the plant", max_steps)

  return make


@pytest.fixture(scope="session")
def batcher(view, make_task):
  """Return a function that makes a batcher for the tiny text router."""

  def make(rows: int, labels: Labels = ACTED) -> Batcher:
    """Make micro-batches of `rows` rows."""
    router = dataclasses.replace(view.config, max_tokens=208)
    config = Config(env=EnvConfig(max_steps=6), sft=SFTConfig(micro_episodes=rows))
    encoder = TextEncoder(View(router, view.tokenizer))
    return Batcher(config, encoder, [make_task()], labels)

  return make


@pytest.fixture(scope="session")
def five_episodes() -> list[Episode]:
  """Return episodes with 5, 1, 6, 2 and 4 decisions, of which one was forced."""
  logps = [-0.3 - 0.1 * s for s in range(6)]
  result = []
  for models in ("SLSLL", "L", "SLLSSL", "LL", "LSSL"):
    result.append(tiny.episode("plant-0", models=models, logps=logps[: len(models)]))
  result[2].steps[3].logp = None
  return result
