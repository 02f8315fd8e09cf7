"""Compute a router's logits on the devices of a mesh, and train the router there.

Axes: B episodes, S decisions of an episode, A answers.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from baar_jax.config import BoPOConfig, SFTConfig
from baar_jax.learn.batches import Batch, Encoder, Loss
from baar_jax.mesh import one_device, split_parameters, split_rows

# The weight decay of AdamW in SFT, and in BoPO (our choice).
SFT_WEIGHT_DECAY = 0.01
BOPO_WEIGHT_DECAY = 1e-4
B2 = 0.99  # The decay of AdamW's second moment (our choice).
CLIP_NORM = 1.0  # A gradient with a larger norm is scaled down to it (our choice).
WARMUP_SHARE = 0.03  # The share of SFT's updates in which the learning rate rises.


class ShardedRouter:
  """Shard the parameters of a router over the devices of a mesh.

  Attributes:
    mesh: the devices.
    params: the parameters, float32.
    logits: maps a batch to float32 logits_BxSxA. Every process gets the whole array.
  """

  def __init__(
    self,
    model: nnx.Module,
    encoder: Encoder,
    mesh: Mesh | None = None,
  ) -> None:
    """Move the parameters of a router onto the mesh.

    Args:
      model: the router.
      encoder: computes the router's logits from a batch.
      mesh: the devices; None is one device.
    """
    # Free the memory of earlier routers now. Each is in a reference cycle with its
    # compiled functions, so Python would free it much later.
    gc.collect()
    self.mesh = mesh or one_device()
    self._encoder = encoder
    self._graphdef, params = nnx.split(model)
    self.params = jax.device_put(params, split_parameters(params, self.mesh))
    self._replicated = NamedSharding(self.mesh, PartitionSpec())
    self.logits = self._compile(self._forward)

  @property
  def model(self) -> nnx.Module:
    """Return the router with its current parameters."""
    return nnx.merge(self._graphdef, self.params)

  def _compile(self, function: Callable) -> Callable[[Batch], jax.Array]:
    """Compile a function of (parameters, batch).

    Returns:
      A function of a batch that uses the current parameters.
    """
    return partial(self._run, jax.jit(function, out_shardings=self._replicated))

  def _run(self, compiled: Callable, batch: Batch, *more: nnx.State) -> Any:
    """Call a compiled function with the rows of a batch sharded over the mesh."""
    with jax.set_mesh(self.mesh):
      return compiled(self.params, split_rows(batch, self.mesh), *more)

  def _forward(self, params: nnx.State, batch: Batch) -> jax.Array:
    """Compute logits_BxSxA of a batch."""
    return self._encoder.forward(nnx.merge(self._graphdef, params), batch.inputs)


class Trainer(ShardedRouter):
  """Train a sharded router with one optimizer and one loss.

  Parameters and gradients are float32, whatever the dtype of the computation. A step
  holds 16 bytes for each parameter: its value, two moments, and the gradient.

  Attributes:
    optimizer_state: the state of the optimizer.
  """

  def __init__(
    self,
    model: nnx.Module,
    encoder: Encoder,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
  ) -> None:
    """Copy the parameters of a router, and initialise the optimizer.

    A gradient step overwrites (donates) the buffers of the trainer's parameters. So the
    trainer works on a copy, and `model` stays intact.

    Args:
      model: the router to start from.
      encoder: computes the router's logits from a batch.
      loss: the loss of a batch.
      optimizer: the optimizer.
      mesh: the devices; None is one device.
    """
    super().__init__(model, encoder, mesh)
    self.params = jax.tree.map(jnp.copy, self.params)
    self._loss = loss
    self._optimizer = optimizer
    replicated = self._replicated
    params_sharding = split_parameters(self.params, self.mesh)
    state = jax.eval_shape(optimizer.init, self.params)
    state_sharding = split_parameters(state, self.mesh)
    initialize = jax.jit(optimizer.init, out_shardings=state_sharding)
    self.optimizer_state = initialize(self.params)
    self._zeros = jax.jit(optax.tree.zeros_like, out_shardings=params_sharding)
    self._gradient = jax.jit(
      self._add_gradient,
      donate_argnums=2,
      out_shardings=(params_sharding, replicated),
    )
    self._figures = self._compile(self._evaluate)
    self._apply = jax.jit(
      self._apply_gradient,
      donate_argnums=(0, 1, 2),
      out_shardings=(params_sharding, state_sharding, replicated, params_sharding),
    )

  def step(self, batches: Sequence[Batch]) -> dict[str, float]:
    """Take one optimizer step on the sum of the losses of micro-batches.

    Every process takes the same step.

    Args:
      batches: the micro-batches of one gradient step.

    Returns:
      Metrics: the scalars of the loss, each added up over the micro-batches, and
      "gradient_norm", the norm before clipping.
    """
    gradient = self._zeros(self.params)
    figures = []
    for batch in batches:
      gradient, batch_figures = self._run(self._gradient, batch, gradient)
      figures.append(batch_figures)
    self.params, self.optimizer_state, norm, _ = self._apply(
      self.params, self.optimizer_state, gradient
    )
    totals = {name: sum(float(x[name]) for x in figures) for name in figures[0]}
    return totals | {"gradient_norm": float(norm)}

  def loss(self, batches: Sequence[Batch]) -> float:
    """Compute the sum of the losses of micro-batches, without a step.

    Every process gets the same value.
    """
    return sum(float(self._figures(batch)[0]) for batch in batches)

  def _evaluate(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, dict]:
    """Compute the loss of a batch, and all its scalars by name."""
    figures = self._loss(self._forward(params, batch), batch)
    return figures["loss"], figures

  def _add_gradient(
    self, params: nnx.State, batch: Batch, total: nnx.State
  ) -> tuple[nnx.State, dict]:
    """Add the gradient of a batch's loss to a total, in the memory of the total.

    The backward pass adds each layer's gradient as soon as it is known. So the gradient
    of all layers never exists beside the total.

    Returns:
      The new total, and the scalars of the loss by name.
    """
    evaluate = partial(self._evaluate, batch=batch)
    loss, backward, figures = jax.vjp(evaluate, params, has_aux=True)
    refs = jax.tree.map(jax.new_ref, total)
    backward.with_refs(refs)(jnp.ones_like(loss))
    return jax.tree.map(jax.freeze, refs), figures

  def _apply_gradient(
    self, params: nnx.State, state: optax.OptState, gradient: nnx.State
  ) -> tuple[nnx.State, optax.OptState, jax.Array, nnx.State]:
    """Clip the norm of a gradient, and apply the optimizer to it.

    Returns:
      The new parameters, the new state, the norm of the gradient before clipping, and
      the clipped gradient. It is returned so that it takes the memory of the gradient.
    """
    norm = optax.tree.norm(gradient)
    clip = optax.clip_by_global_norm(CLIP_NORM)
    gradient, _ = clip.update(gradient, optax.EmptyState())
    updates, state = self._optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, norm, gradient

  @property
  def state(self) -> dict:
    """Return the pytrees to save in a checkpoint, by name."""
    leaves = jax.tree.leaves(self.optimizer_state)
    return {"params": nnx.to_pure_dict(self.params), "optimizer": leaves}

  def load(self, state: Mapping) -> None:
    """Load the parameters and the optimizer's state from a saved `state`."""
    nnx.replace_by_pure_dict(self.params, state["params"])
    treedef = jax.tree.structure(self.optimizer_state)
    self.optimizer_state = jax.tree.unflatten(treedef, state["optimizer"])


def sft_optimizer(config: SFTConfig) -> optax.GradientTransformation:
  """Make the optimizer of SFT: AdamW with warm-up and cosine decay (paper: appendix).

  The rate rises linearly and then falls to 0. It starts above 0, so that the first
  update learns too (our choice).

  Args:
    config: supplies `updates` and `learning_rate`.
  """
  warmup = min(config.updates - 1, max(1, round(WARMUP_SHARE * config.updates)))
  first = config.learning_rate / (warmup + 1)
  schedule = optax.warmup_cosine_decay_schedule(
    first, config.learning_rate, warmup, config.updates
  )
  return optax.adamw(schedule, b2=B2, weight_decay=SFT_WEIGHT_DECAY)


def bopo_optimizer(config: BoPOConfig) -> optax.GradientTransformation:
  """Make the optimizer of BoPO: AdamW, whose rate may decay by a cosine.

  The paper mentions no decay (`bopo.last_rate=1`). The decay and the weight decay are
  our choices.

  Args:
    config: supplies `updates`, `learning_rate` and `last_rate`.
  """
  schedule = optax.cosine_decay_schedule(
    config.learning_rate, config.updates, config.last_rate
  )
  return optax.adamw(schedule, b2=B2, weight_decay=BOPO_WEIGHT_DECAY)
