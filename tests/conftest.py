"""Set up JAX on the CPU, and give all tests a tiny text router and its batches."""

import dataclasses
import os
import tempfile
from pathlib import Path

import hypothesis
import jax
import pytest
import tiny
from tiny_router import ROUTER, draw_model, make_tokenizer

from baar_jax.config import Config, EnvConfig, SFTConfig
from baar_jax.episode import Episode
from baar_jax.learn.batches import ACTED, Batcher, Labels
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.reader import TextEncoder
from baar_jax.router.view import View

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


@pytest.fixture(scope="session")
def view() -> View:
  """Return the view of the tiny text router."""
  return View(ROUTER, make_tokenizer())


@pytest.fixture(scope="session")
def tiny_model() -> Qwen2:
  """Return the tiny text router with random parameters."""
  return draw_model()


@pytest.fixture(scope="session")
def batcher(view):
  """Return a function that makes a batcher for the tiny text router."""

  def make(rows: int, labels: Labels = ACTED) -> Batcher:
    """Make micro-batches of `rows` rows."""
    router = dataclasses.replace(view.config, max_tokens=208)
    config = Config(env=EnvConfig(max_steps=6), sft=SFTConfig(micro_episodes=rows))
    encoder = TextEncoder(View(router, view.tokenizer))
    return Batcher(config, encoder, [tiny.TASK], labels)

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
