"""Gradient steps: a router's parameters and optimizer, spread over the devices of a mesh."""

import gc
from collections.abc import Callable, Sequence
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
from baar_jax.train.batches import Batch

BOPO_WEIGHT_DECAY = 1e-4  # our choice

# loss(logits_BxSxA, batch) -> (loss, metrics): the batch's share of the loss of a gradient step, so
# that the shares of all its batches add up, and its share of figures for the log.
Loss = Callable[[jax.Array, Batch], tuple[jax.Array, dict[str, jax.Array]]]


class ShardedRouter:
  """A router whose parameters lie on the devices of a mesh: its logits at decisions."""

  def __init__(self, model: Qwen2, token_ids, mesh: Mesh | None = None, dtype: str = "float32"):
    """Puts the parameters onto the mesh (None is one device); the computation is in `dtype`.

    `token_ids` are the decisions' tokens; None gives the logits of the whole vocabulary.
    """
    gc.collect()  # of routers that are done with: each is in a cycle with its compiled functions
    self.mesh = mesh or one_device()
    self._token_ids = None if token_ids is None else np.array(token_ids)
    self._dtype, self.low_precision = jnp.dtype(dtype), dtype != "float32"
    self._graphdef, params = nnx.split(model)
    self.params = jax.device_put(params, split_parameters(params, self.mesh))
    self._replicated = NamedSharding(self.mesh, PartitionSpec())
    self._logits = jax.jit(self._forward, out_shardings=self._replicated)
    self._hidden = jax.jit(self._gather, out_shardings=self._replicated)

  def _forward(self, params, batch: Batch):
    """logits_BxSxA, float32: hidden states are gathered at the decisions before the head."""
    hidden_BxSxD = self._gather(params, batch)
    return nnx.merge(self._graphdef, params).logits(hidden_BxSxD, self._token_ids)

  def _gather(self, params, batch: Batch):
    hidden_RxTxD = nnx.merge(self._graphdef, params)(batch.tokens_RxT, self._dtype)
    return hidden_RxTxD[batch.row_BxS, batch.position_BxS]

  @property
  def model(self) -> Qwen2:
    return nnx.merge(self._graphdef, self.params)

  def logits(self, batch: Batch) -> jax.Array:
    """logits_BxSxA of the parameters as they are: all of it in every process."""
    with jax.set_mesh(self.mesh):
      return self._logits(self.params, split_rows(batch, self.mesh))

  def hidden(self, batch: Batch) -> np.ndarray:
    """The hidden state at each decision, float32 [B, S, D]: all of it in every process."""
    with jax.set_mesh(self.mesh):
      return np.asarray(self._hidden(self.params, split_rows(batch, self.mesh)), np.float32)


class Trainer(ShardedRouter):
  """A router that learns by one loss; its parameters and gradients are float32."""

  def __init__(self, model: Qwen2, loss: Loss, optimizer, token_ids, mesh=None, dtype="float32"):
    """Copies the model's parameters: the buffers of the copy are given away by each step."""
    graphdef, params = nnx.split(model)
    super().__init__(nnx.merge(graphdef, jax.tree.map(jnp.copy, params)), token_ids, mesh, dtype)
    self._loss, self._optimizer = loss, optimizer
    params_sharding = split_parameters(self.params, self.mesh)
    state_sharding = split_parameters(jax.eval_shape(optimizer.init, self.params), self.mesh)
    self.optimizer_state = jax.jit(optimizer.init, out_shardings=state_sharding)(self.params)
    gradient_sharding = params_sharding, self._replicated  # of the gradient, of the metrics
    gradient = jax.grad(self._evaluate, has_aux=True)
    self._gradient = jax.jit(gradient, out_shardings=gradient_sharding)
    self._losses = jax.jit(self._evaluate, out_shardings=self._replicated)
    self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
    step_sharding = params_sharding, state_sharding, self._replicated  # the last is of sizes
    self._apply = jax.jit(self._apply_gradient, donate_argnums=(0, 1), out_shardings=step_sharding)

  def step(self, batches: Sequence[Batch]) -> dict[str, float]:
    """One optimizer step on the sum of the batches' losses; the same in every process.

    Returns the loss's metrics, summed over the batches, the norm of the gradient, and the size of
    the largest parameter after the step.
    """
    gradient, metrics = None, []
    with jax.set_mesh(self.mesh):
      for batch in batches:
        addend, batch_metrics = self._gradient(self.params, split_rows(batch, self.mesh))
        gradient = addend if gradient is None else self._add(gradient, addend)
        del addend  # free this gradient before the next one is computed
        metrics.append(batch_metrics)
      self.params, self.optimizer_state, sizes = self._apply(
        self.params, self.optimizer_state, gradient
      )
    totals = {name: sum(float(shares[name]) for shares in metrics) for name in metrics[0]}
    return totals | {name: float(size) for name, size in sizes.items()}

  def loss(self, batches: Sequence[Batch]) -> float:
    """The sum of the batches' losses, without a step; the same in every process."""
    with jax.set_mesh(self.mesh):
      return sum(float(self._losses(self.params, split_rows(b, self.mesh))[0]) for b in batches)

  def _evaluate(self, params, batch: Batch):
    return self._loss(self._forward(params, batch), batch)

  def _apply_gradient(self, params, optimizer_state, gradient):
    updates, optimizer_state = self._optimizer.update(gradient, optimizer_state, params)
    params = optax.apply_updates(params, updates)
    sizes = {"gradient_norm": optax.tree.norm(gradient)}
    sizes["largest_parameter"] = optax.tree.norm(params, ord="inf")
    return params, optimizer_state, sizes

  @property
  def state(self) -> dict:
    """The pytrees that a checkpoint holds."""
    leaves = jax.tree.leaves(self.optimizer_state)
    return {"params": nnx.to_pure_dict(self.params), "optimizer": leaves}

  def load(self, state) -> None:
    """Continues from a stored `state`."""
    nnx.replace_by_pure_dict(self.params, state["params"])
    treedef = jax.tree.structure(self.optimizer_state)
    self.optimizer_state = jax.tree.unflatten(treedef, state["optimizer"])


def sft_optimizer(config: SFTConfig, learning_rate: float) -> optax.GradientTransformation:
  """AdamW with clipping, a warm-up that starts above 0, a cosine decay to 0 (paper: appendix)."""
  warmup = min(config.updates - 1, max(1, round(config.warmup_share * config.updates)))
  first = learning_rate / (warmup + 1)
  schedule = optax.warmup_cosine_decay_schedule(first, learning_rate, warmup, config.updates)
  return _clip_adamw(schedule, config, config.weight_decay)


def bopo_optimizer(config: BoPOConfig) -> optax.GradientTransformation:
  """AdamW with clipping at a constant learning rate (paper: appendix; clipping is our choice)."""
  return _clip_adamw(config.learning_rate, config, BOPO_WEIGHT_DECAY)


def _clip_adamw(learning_rate, config: SFTConfig | BoPOConfig, weight_decay: float):
  eps, clip = config.adam_eps, optax.clip_by_global_norm(config.clip_norm)
  adamw = optax.adamw(learning_rate, b2=0.99, eps=eps, weight_decay=weight_decay)  # b2: our choice
  return optax.chain(clip, adamw)
