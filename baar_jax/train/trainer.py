"""A router on the devices of a mesh, and its gradient steps."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from baar_jax.config import BoPOConfig, SFTConfig
from baar_jax.mesh import one_device, split_parameters, split_rows
from baar_jax.router.qwen2 import Qwen2
from baar_jax.train.batches import Batch, Loss

BOPO_WEIGHT_DECAY = 1e-4  # our choice


class ShardedRouter:
  """A router whose parameters lie on the devices of a mesh."""

  def __init__(
    self,
    model: Qwen2,
    token_ids: Sequence[int] | None,
    mesh: Mesh | None = None,
    dtype: str = "float32",
  ) -> None:
    """Put the parameters onto the mesh.

    Args:
      token_ids: the tokens whose logits are computed; None is the whole vocabulary.
      mesh: None is one device.
      dtype: of the computation.
    """
    gc.collect()  # earlier routers: each is in a cycle with its compiled functions
    self.mesh = mesh or one_device()
    self._token_ids = None if token_ids is None else np.array(token_ids)
    self._dtype = jnp.dtype(dtype)
    self.low_precision = dtype != "float32"
    self._graphdef, params = nnx.split(model)
    self.params = jax.device_put(params, split_parameters(params, self.mesh))
    self._replicated = NamedSharding(self.mesh, PartitionSpec())
    # Both are whole in every process: the hidden states at decisions, and the logits.
    self.hidden = self._compile(self._gather)
    self.logits = self._compile(self._forward)

  @property
  def model(self) -> Qwen2:
    """Return the router with its parameters as they are."""
    return nnx.merge(self._graphdef, self.params)

  def _compile(self, function: Callable) -> Callable[[Batch], jax.Array]:
    """Compile a function of the parameters as they are and a batch."""
    return partial(self._run, jax.jit(function, out_shardings=self._replicated))

  def _run(self, compiled: Callable, batch: Batch) -> jax.Array:
    """Call a compiled function with the batch's rows spread over the mesh."""
    with jax.set_mesh(self.mesh):
      return compiled(self.params, split_rows(batch, self.mesh))

  def _gather(self, params: nnx.State, batch: Batch) -> jax.Array:
    """Compute hidden_BxSxD at the decisions."""
    hidden_RxTxD = nnx.merge(self._graphdef, params)(batch.tokens_RxT, self._dtype)
    return hidden_RxTxD[batch.row_BxS, batch.position_BxS]

  def _forward(self, params: nnx.State, batch: Batch) -> jax.Array:
    """Compute logits_BxSxA: the head reads the decisions alone."""
    hidden_BxSxD = self._gather(params, batch)
    return nnx.merge(self._graphdef, params).logits(hidden_BxSxD, self._token_ids)


class Trainer(ShardedRouter):
  """A router that learns by one loss; its parameters and gradients are float32."""

  def __init__(
    self,
    model: Qwen2,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    token_ids: Sequence[int] | None,
    mesh: Mesh | None = None,
    dtype: str = "float32",
  ) -> None:
    """Copy the model's parameters: each step gives the buffers of the copy away."""
    graphdef, params = nnx.split(model)
    copy = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    super().__init__(copy, token_ids, mesh, dtype)
    self._loss = loss
    self._optimizer = optimizer
    whole = self._replicated
    params_sharding = split_parameters(self.params, self.mesh)
    state = jax.eval_shape(optimizer.init, self.params)
    state_sharding = split_parameters(state, self.mesh)
    initialize = jax.jit(optimizer.init, out_shardings=state_sharding)
    self.optimizer_state = initialize(self.params)
    gradient = jax.grad(self._evaluate, has_aux=True)
    self._gradient = jax.jit(gradient, out_shardings=(params_sharding, whole))
    self._figures = self._compile(self._evaluate)
    self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
    self._apply = jax.jit(
      self._apply_gradient,
      donate_argnums=(0, 1),
      out_shardings=(params_sharding, state_sharding, whole),
    )

  def step(self, batches: Sequence[Batch]) -> dict[str, float]:
    """Take one optimizer step on the sum of the batches' losses.

    It is the same in every process.

    Returns:
      The sums of the loss's figures, and the norm of the gradient.
    """
    gradient = None
    shares = []
    for batch in batches:
      addend, share = self._run(self._gradient, batch)
      gradient = addend if gradient is None else self._add(gradient, addend)
      del addend  # free this gradient before the next one is computed
      shares.append(share)
    self.params, self.optimizer_state, norm = self._apply(
      self.params, self.optimizer_state, gradient
    )
    totals = {name: sum(float(share[name]) for share in shares) for name in shares[0]}
    return totals | {"gradient_norm": float(norm)}

  def loss(self, batches: Sequence[Batch]) -> float:
    """Sum the batches' losses, without a step; the same in every process."""
    return sum(float(self._figures(batch)[0]) for batch in batches)

  def _evaluate(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, dict]:
    """Compute the batch's share of a gradient step's loss, and of its terms."""
    loss = 0.0
    figures = {}
    for name, term in self._loss(self._forward(params, batch), batch).items():
      mean = term.values.mean
      figures[name] = term.share * mean
      loss += term.weight * term.share * mean
    return loss, figures | {"loss": loss}

  def _apply_gradient(
    self, params: nnx.State, state: optax.OptState, gradient: nnx.State
  ) -> tuple[nnx.State, optax.OptState, jax.Array]:
    """Apply the optimizer; return parameters, state and the gradient's norm."""
    updates, state = self._optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, optax.tree.norm(gradient)

  @property
  def state(self) -> dict:
    """Return the pytrees that a checkpoint holds."""
    leaves = jax.tree.leaves(self.optimizer_state)
    return {"params": nnx.to_pure_dict(self.params), "optimizer": leaves}

  def load(self, state: Mapping) -> None:
    """Go on from a stored `state`."""
    nnx.replace_by_pure_dict(self.params, state["params"])
    treedef = jax.tree.structure(self.optimizer_state)
    self.optimizer_state = jax.tree.unflatten(treedef, state["optimizer"])


def sft_optimizer(
  config: SFTConfig, learning_rate: float
) -> optax.GradientTransformation:
  """Make AdamW with a warm-up that starts above 0, then a cosine decay to 0.

  The paper's appendix has it so.
  """
  warmup = min(config.updates - 1, max(1, round(config.warmup_share * config.updates)))
  first = learning_rate / (warmup + 1)
  schedule = optax.warmup_cosine_decay_schedule(
    first, learning_rate, warmup, config.updates
  )
  return _clip_adamw(schedule, config, config.weight_decay)


def bopo_optimizer(config: BoPOConfig) -> optax.GradientTransformation:
  """Make AdamW at a constant rate (paper: appendix; clipping is our choice)."""
  return _clip_adamw(config.learning_rate, config, BOPO_WEIGHT_DECAY)


def _clip_adamw(
  learning_rate: optax.ScalarOrSchedule,
  config: SFTConfig | BoPOConfig,
  weight_decay: float,
) -> optax.GradientTransformation:
  """Make AdamW behind a clip of the gradient's norm."""
  clip = optax.clip_by_global_norm(config.clip_norm)
  # b2 is our choice.
  adamw = optax.adamw(
    learning_rate, b2=0.99, eps=config.adam_eps, weight_decay=weight_decay
  )
  return optax.chain(clip, adamw)
