"""Compute one logit per answer from the inputs of a step: the policy network.

On a CPU this network is the router in place of Qwen2 (our choice). It reads facts,
offers and words of the step, and the terms of time among those that the value heads
read (router/inputs.py). A gradient step takes milliseconds.

Unlike the value heads it is not told which model took the earlier steps. A reference
of a hard task calls LARGE with one probability k / N at every step. The earlier models
reveal this k, so they predict the next one best, and a router that sees them would call
the same model to the end and learn nothing about the steps.

Axes: B episodes, S decisions of an episode, N decisions, R live episodes, D features, I
inputs (features, terms, and a proposal in a cascade), W width of a layer, A answers.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.episode import Episode, Step, Task
from baar_jax.mesh import local_copy
from baar_jax.rollout.specs import Live
from baar_jax.router.inputs import (
  NO_STEP,
  Tracker,
  Trackers,
  Vocabulary,
  describe,
  track,
)

WIDTH = 64  # W, the width of both hidden layers
MOST_ENCODED = 4096  # episodes whose inputs are kept, so that a pass reads each once

# The weight and the bias of each layer.
Layers = Sequence[tuple[jax.Array, jax.Array]]


def apply_layers(layers: Layers, x_NxI: jax.Array, xp: ModuleType) -> jax.Array:
  """Apply a network, or E networks at once, with SiLU after all layers but the last.

  Args:
    layers: weight_IxW and bias_W of each layer; of E networks with the axis E first.
    x_NxI: the inputs.
    xp: the module of the arrays, `numpy` or `jax.numpy`.
  """
  *hidden, (weight_WxO, bias_O) = layers
  x_NxW = x_NxI
  for weight_IxW, bias_W in hidden:
    x_NxW = x_NxW @ weight_IxW + bias_W[..., None, :]
    # SiLU; with tanh it overflows for no number.
    x_NxW = x_NxW * (0.5 + 0.5 * xp.tanh(0.5 * x_NxW))
  return x_NxW @ weight_WxO + bias_O[..., None, :]


class PolicyNetwork(nnx.Module):
  """Compute logits by two layers of `WIDTH` with SiLU, and a linear layer.

  The linear layer starts at 0, so that all answers are equally probable at first.
  """

  def __init__(self, inputs: int, answers: int, seed: int) -> None:
    """Draw the weights of the hidden layers.

    Args:
      inputs: the number of inputs, I.
      answers: the number of logits, A.
      seed: the seed of the draws.
    """
    rngs = nnx.Rngs(seed)
    zeros = nnx.initializers.zeros
    self.first = nnx.Linear(inputs, WIDTH, rngs=rngs)
    self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.last = nnx.Linear(WIDTH, answers, kernel_init=zeros, rngs=rngs)

  @property
  def layers(self) -> Layers:
    """Return the layers in order."""
    linears = (self.first, self.second, self.last)
    return [(linear.kernel[...], linear.bias[...]) for linear in linears]

  def __call__(self, x_BxSxI: jax.Array) -> jax.Array:
    """Compute logits_BxSxA of standardised inputs, float32."""
    x_NxI = x_BxSxI.reshape(-1, x_BxSxI.shape[-1])
    logits_NxA = apply_layers(self.layers, x_NxI, jnp)
    return logits_NxA.reshape(*x_BxSxI.shape[:-1], -1)


@dataclasses.dataclass
class InputsEncoder:
  """Turn episodes into the arrays that a policy network reads.

  It is an `Encoder`, see learn/batches.py.

  Attributes:
    vocabulary: the statistics of stored episodes.
    answers: the number of answers between which the router decides.
    describe_draft: computes more inputs, from the tracker of an episode and the step
      that waits for its decision.
    encoded: the inputs of episodes that were encoded, by their keys in the store; at
      most `MOST_ENCODED`.
  """

  vocabulary: Vocabulary
  answers: int
  describe_draft: Callable[[Tracker, Step], Sequence[float]]
  encoded: dict[tuple, np.ndarray] = dataclasses.field(default_factory=dict)
  dtype = "float32"

  def build(self, seed: int) -> PolicyNetwork:
    """Build a network with random weights."""
    # Any step tells the number of inputs.
    x_SxI = self._read_steps(Task("", "train", "", 1), [NO_STEP])
    return PolicyNetwork(x_SxI.shape[1], self.answers, seed)

  def encode(self, task: Task, episode: Episode) -> list[np.ndarray]:
    """Compute the standardised inputs of an episode: one row, float32 x_SxI.

    An episode must not change after it was encoded, because the inputs are kept.
    """
    key = episode.policy, episode.key
    if key not in self.encoded:
      if len(self.encoded) == MOST_ENCODED:
        self.encoded.clear()
      self.encoded[key] = self._read_steps(task, episode.steps)
    return [self.encoded[key]]

  def measure(self, x_SxI: np.ndarray) -> tuple[int, int]:
    """Return the number of decisions of a row twice: it is its length, too."""
    return len(x_SxI), len(x_SxI)

  def pad(self, rows: Sequence[np.ndarray], count: int, decisions: int) -> np.ndarray:
    """Pad rows with 0 to float32 x_BxSxI.

    Args:
      rows: the rows of several results of `encode`.
      count: B.
      decisions: S.
    """
    x_BxSxI = np.zeros((count, decisions, rows[0].shape[1]), np.float32)
    for x_SxI, row_SxI in zip(x_BxSxI, rows):
      x_SxI[: len(row_SxI)] = row_SxI
    return x_BxSxI

  def forward(self, model: PolicyNetwork, x_BxSxI: jax.Array) -> jax.Array:
    """Compute float32 logits_BxSxA."""
    return model(x_BxSxI)

  def open_reader(self, model: PolicyNetwork, rows: int, mesh: Mesh) -> "InputsReader":
    """Open a reader of live episodes; any number of them may be live at once."""
    return InputsReader(self, model, mesh)

  def read(self, decisions: Iterable[tuple[Tracker, Step]]) -> np.ndarray:
    """Compute the standardised inputs of decisions, float32 x_NxI.

    Args:
      decisions: for each, its episode after the observation before it, and the step
        that waits for it.
    """
    features = []
    progress = []
    drafts = []
    for tracker, step in decisions:
      features.append(tracker.read())
      progress.append(tracker.progress)
      drafts.append(self.describe_draft(tracker, step))
    # A policy network learns for one cost weight and no cap, so only time varies here.
    terms_NxT = describe(np.float64(np.inf), np.float64(1), np.array(progress))
    return np.concatenate([features, terms_NxT, drafts], axis=1).astype(np.float32)

  def _read_steps(self, task: Task, steps: Sequence[Step]) -> np.ndarray:
    """Compute the standardised inputs x_SxI of all decisions of an episode."""
    tracker = Tracker(self.vocabulary, task, sees_models=False)
    return self.read((tracker, step) for step in track(tracker, steps))


class InputsReader(Trackers):
  """Compute a policy network's logits for live episodes, with NumPy."""

  def __init__(self, encoder: InputsEncoder, model: PolicyNetwork, mesh: Mesh) -> None:
    """Copy the network's weights, so that training may go on."""
    super().__init__(encoder.vocabulary, sees_models=False)
    self._encoder = encoder
    layers = local_copy(model.layers, mesh, jnp.float32)
    self._layers = jax.tree.map(np.asarray, layers)

  def read(self, ready: Sequence[Live]) -> tuple[np.ndarray, list[float]]:
    """Compute logits_RxA of R live episodes, and the dollars of each: none."""
    x_RxI = self._encoder.read((self.follow(live), live.history[-1]) for live in ready)
    logits_RxA = apply_layers(self._layers, x_RxI, np)
    return logits_RxA.astype(np.float64), [0.0] * len(ready)
