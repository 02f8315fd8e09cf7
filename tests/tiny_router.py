"""Define a tiny text router: its tokenizer, settings, parameters and batches."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tiny
import tokenizers
from flax import nnx

from baar_jax.config import Config, EnvConfig, RouterConfig, SFTConfig
from baar_jax.learn.batches import ACTED, Batcher, Labels
from baar_jax.router.qwen2 import Qwen2, Qwen2Config
from baar_jax.router.reader import TextEncoder
from baar_jax.router.view import decision_tokens

TEXTS = [
  "task: find the plant",
  "\nstart: a hall",
  "\nstep 1 model:",
  " action: ",
  "\nresult: ",
  *("open the red door", "go to the kitchen", "you see a green lamp and a stove") * 3,
]
# The previews of texts have a few tokens.
ROUTER = RouterConfig(
  description_tokens=8, action_tokens=4, result_tokens=6, max_tokens=320
)
SHAPE = Qwen2Config(340, 16, 48, 2, 2, 1, 8)


# A byte-level tokenizer of at most 340 tokens, with one for each model.
TOKENIZER = tokenizers.ByteLevelBPETokenizer()
TOKENIZER.train_from_iterator(
  TEXTS,
  340,
  min_frequency=1,
  show_progress=False,
  special_tokens=decision_tokens(2),
)


@functools.cache
def make_view(**changes) -> TextEncoder:
  """Make a view with some settings of ROUTER changed."""
  return TextEncoder(dataclasses.replace(ROUTER, **changes), TOKENIZER)


VIEW = make_view()
# Episodes with 5, 1, 6, 2 and 4 decisions, of which one was forced.
EPISODES = [
  tiny.episode("plant-0", models=models, logps=(-0.3, -0.4, -0.5, -0.6, -0.7, -0.8))
  for models in ("SLSLL", "L", "SLLSSL", "LL", "LSSL")
]
EPISODES[2].steps[3].logp = None


def make_batcher(rows: int, labels: Labels = ACTED) -> Batcher:
  """Make a batcher whose micro-batches have `rows` rows."""
  config = Config(env=EnvConfig(max_steps=6), sft=SFTConfig(micro_episodes=rows))
  return Batcher(config, make_view(max_tokens=208), [tiny.TASK], labels)


def fill(build: Callable, seed: int = 0):
  """Fill the model that build() returns with parameters drawn by NumPy.

  Biases and norms are random too. Nothing is compiled to draw them.
  """
  graphdef, params = nnx.split(nnx.eval_shape(build))
  draw = np.random.default_rng(seed)
  noise = jax.tree.map(
    lambda x: jnp.asarray(0.3 * draw.normal(size=x.shape), x.dtype), params
  )
  return nnx.merge(graphdef, noise)


def draw_model(seed: int = 0) -> Qwen2:
  """Draw the parameters of the tiny text router."""
  return fill(lambda: Qwen2(SHAPE, nnx.Rngs(0)), seed)
