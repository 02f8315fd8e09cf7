"""Gradient steps over micro-batches: what SFT and BoPO share."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.mesh import one_device, split_parameters, split_rows
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.train.batches import Batch, length_buckets, make_batch
from baar_jax.train.checkpoint import Checkpoints

# loss(logits_BxSxA, batch, extra) -> (loss, metrics): the batch's share of the loss, so that the
# shares of all micro-batches add up to the loss of the whole.
Loss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def decision_logits(model: Qwen2, batch, ids: tuple[int, ...] | None, dtype=jnp.float32):
  """logits_BxSxA, float32: hidden states are gathered at the decisions before the head.

  `ids` None gives the logits of the whole vocabulary there.
  """
  hidden_RxTxD = model(batch.tokens_RxT, dtype, remat=True)
  hidden_BxSxD = hidden_RxTxD[batch.row_BxS, batch.position_BxS]
  return model.logits(hidden_BxSxD, None if ids is None else np.array(ids))


class Scorer:
  """The decision logits of a router whose parameters lie on the devices of a mesh."""

  def __init__(self, model: Qwen2, ids: Sequence[int], mesh: Mesh | None, dtype: str):
    self._mesh, ids = mesh or one_device(), tuple(ids)
    graphdef, params = nnx.split(model)
    self._params = jax.device_put(params, split_parameters(params, self._mesh))

    def forward(params, batch):
      return decision_logits(nnx.merge(graphdef, params), batch, ids, jnp.dtype(dtype))

    self._logits = jax.jit(forward)
    self._whole_logits = jax.jit(forward, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

  def logits(self, batch: Batch) -> jax.Array:
    """logits_BxSxA, spread over the mesh."""
    with jax.set_mesh(self._mesh):
      return self._logits(self._params, split_rows(batch, self._mesh))

  def p_large(self, batch: Batch) -> np.ndarray:
    """The probability of LARGE at each decision, float64 [B, S]: all of it in every process."""
    with jax.set_mesh(self._mesh):
      logits = self._whole_logits(self._params, split_rows(batch, self._mesh))
    logits_BxSxA = np.asarray(logits.addressable_data(0), np.float64)
    weight_BxSxA = np.exp(logits_BxSxA - logits_BxSxA.max(axis=-1, keepdims=True))
    return weight_BxSxA[..., -1] / weight_BxSxA.sum(axis=-1)


class Trainer:
  """A router's parameters and optimizer, moved by one loss, over the devices of a mesh.

  Parameters and gradients are float32, whatever the computation is in.
  """

  def __init__(
    self,
    model: Qwen2,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    ids: Sequence[int] | None,
    mesh: Mesh | None = None,
    dtype: str = "float32",
  ):
    """Copies the model's parameters onto the mesh; None is one device. `dtype` is computed in."""
    self.mesh = mesh or one_device()
    self._dtype = jnp.dtype(dtype)
    self._graphdef, params = nnx.split(model)
    shardings = split_parameters(params, self.mesh)
    # A copy: its steps give their buffers away.
    self.params = jax.tree.map(jax.device_put, jax.tree.map(jnp.copy, params), shardings)
    self._optimizer = optimizer
    self._ids = None if ids is None else tuple(ids)
    places = split_parameters(jax.eval_shape(optimizer.init, self.params), self.mesh)
    self.optimizer_state = jax.jit(optimizer.init, out_shardings=places)(self.params)
    whole = NamedSharding(self.mesh, PartitionSpec())
    self._gradient = jax.jit(partial(self._micro_step, loss), out_shardings=(shardings, whole))
    self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
    self._logits = jax.jit(
      lambda params, batch: decision_logits(
        nnx.merge(self._graphdef, params), batch, self._ids, self._dtype
      )
    )
    self._apply = jax.jit(
      self._apply_gradient, donate_argnums=(0, 1), out_shardings=(shardings, places, whole)
    )

  @property
  def model(self) -> Qwen2:
    return nnx.merge(self._graphdef, self.params)

  @property
  def compiled(self) -> int:
    """How many shapes of micro-batches the gradient has been compiled for."""
    return self._gradient._cache_size()

  @property
  def state(self):
    """The pytrees that a checkpoint holds."""
    leaves = jax.tree.leaves(self.optimizer_state)
    return {"params": nnx.to_pure_dict(self.params), "optimizer": leaves}

  def load(self, state) -> None:
    """Takes over pytrees of the structure of `state`."""
    nnx.replace_by_pure_dict(self.params, state["params"])
    treedef = jax.tree.structure(self.optimizer_state)
    self.optimizer_state = jax.tree.unflatten(treedef, state["optimizer"])

  @property
  def rounds(self) -> bool:
    """Whether it computes so coarsely that the same forward made otherwise differs visibly."""
    return self._dtype != jnp.float32

  def logits(self, batch: Batch) -> jax.Array:
    """logits_BxSxA of the parameters as they are."""
    with jax.set_mesh(self.mesh):
      return self._logits(self.params, split_rows(batch, self.mesh))

  def step(self, parts: Sequence[tuple[Batch, object]]) -> dict[str, float]:
    """One optimizer step on the sum of the parts' losses.

    Args:
      parts: micro-batches, each with the extra argument of the loss; the same in every process.

    Returns:
      The loss's metrics, summed over the parts, and the norm of the gradient.
    """
    gradient, metrics = None, []
    with jax.set_mesh(self.mesh):
      for part in parts:
        more, values = self._gradient(self.params, *split_rows(part, self.mesh))
        gradient = more if gradient is None else self._add(gradient, more)
        del more  # or it would stay beside the next one
        metrics.append(values)
      self.params, self.optimizer_state, norm = self._apply(
        self.params, self.optimizer_state, gradient
      )
    totals = {name: sum(float(values[name]) for values in metrics) for name in metrics[0]}
    return totals | {"gradient_norm": float(norm)}

  def _micro_step(self, loss: Loss, params, batch, extra):
    def of(params):
      model = nnx.merge(self._graphdef, params)
      return loss(decision_logits(model, batch, self._ids, self._dtype), batch, extra)

    (_, metrics), gradient = jax.value_and_grad(of, has_aux=True)(params)
    return gradient, metrics

  def _apply_gradient(self, params, optimizer_state, gradient):
    updates, optimizer_state = self._optimizer.update(gradient, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, optax.tree.norm(gradient)


def clipped_adamw(
  learning_rate: optax.ScalarOrSchedule,
  clip_norm: float,
  eps: float = 1e-8,
  weight_decay: float = 1e-4,
) -> optax.GradientTransformation:
  """AdamW behind a clip of the gradient's global norm; b2 is for few updates (our choice)."""
  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    optax.adamw(learning_rate, b2=0.99, eps=eps, weight_decay=weight_decay),
  )


def warmup_cosine(learning_rate: float, warmup: int, updates: int) -> optax.Schedule:
  """Rises over the warm-up's updates, the first one included, and falls to 0 after the last."""
  return optax.warmup_cosine_decay_schedule(
    learning_rate / (warmup + 1), learning_rate, warmup_steps=warmup, decay_steps=updates
  )


def load_trained(directory: Path, updates: int, model: Qwen2, mesh: Mesh, stage: str) -> Qwen2:
  """The router that a stage left in a directory: of its checkpoint, the parameters alone.

  Args:
    model: of the same shape; its values are not used, it may be abstract.

  Raises:
    ValueError: the stage has not been run to its last update.
  """
  done = 0
  if directory.exists():
    checkpoints = Checkpoints(directory)
    try:
      done = checkpoints.update or 0
      if done == updates:
        graphdef, params = nnx.split(model)
        like = jax.tree.map(
          lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
          params,
          split_parameters(params, mesh),
        )
        found = checkpoints.restore({"params": nnx.to_pure_dict(like)})["params"]
        nnx.replace_by_pure_dict(like, found)
        return nnx.merge(graphdef, like)
    finally:
      checkpoints.close()
  raise ValueError(f"{directory} has {done} of {updates} updates: run --stage={stage} first")


@dataclasses.dataclass
class Batcher:
  """Cuts episodes into micro-batches of few shapes, short ones together."""

  config: Config
  view: View
  tasks: dict[str, Task]

  def micro_batches(
    self, episodes: Sequence[Episode], sampled_only: bool = False
  ) -> list[tuple[list[int], Batch]]:
    """Micro-batches of `sft.micro_episodes` rows.

    Returns:
      For each: the indices of its episodes, and the batch.
    """
    B = self.config.sft.micro_episodes
    windows = [self.view.episode_windows(self.tasks[e.task_id], e) for e in episodes]
    groups: list[list[int]] = []
    rows = B
    for i in sorted(range(len(episodes)), key=lambda i: max(len(w.tokens) for w in windows[i])):
      rows += len(windows[i])
      if rows > B:  # so that cut episodes, with a window more, bring no new shape
        groups.append([])
        rows = len(windows[i])
      groups[-1].append(i)
    micro = []
    for chosen in groups:
      batch = make_batch(
        [episodes[i] for i in chosen],
        [windows[i] for i in chosen],
        rows=B,
        decisions=self.config.env.max_steps,
        buckets=length_buckets(self.config.router.max_tokens, self.config.router.buckets),
        sampled_only=sampled_only,
      )
      micro.append((chosen, batch))
    return micro
