"""Gradient steps: episodes -> padded batches -> a router's parameters, spread over a mesh."""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from baar_jax.config import BoPOConfig, Config, SFTConfig
from baar_jax.episode import Episode, Task
from baar_jax.mesh import one_device, split_parameters, split_rows
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View, Window

BOPO_WEIGHT_DECAY = 1e-4  # our choice
NO_TOKEN = -1  # padding of the tokens that follow a decision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A micro-batch: what a loss reads of a part of a gradient step's episodes.

  The losses of all parts add up to the step's: a mean over episodes counts by `episode_share`, one
  over decisions by `decision_share`.
  """

  tokens_RxT: np.ndarray  # int32, 0-padded; a row per transcript, or per step of the paper's view
  row_BxS: np.ndarray  # int32, where in tokens_RxT each decision is predicted
  position_BxS: np.ndarray  # int32, and at which position of that row
  action_BxS: np.ndarray  # int32, the model chosen, or what a label puts in its place
  logp_BxS: np.ndarray  # float32, its log-probability when it was sampled; 0 where none was
  mask_BxS: np.ndarray  # bool, the decisions to learn from
  adv_B: np.ndarray | None = None  # float32, the episodes' advantages, for a policy gradient
  ref_logits_BxSxA: jax.Array | None = None  # float32, the SFT router's logits, likewise
  token_BxSxM: np.ndarray | None = None  # int32, the M tokens after each decision: pretraining
  episode_share: float = np.float32(1)  # this part's B, with padding, over all episodes of the step
  decision_share: float = np.float32(1)  # its real decisions over all of them


# What is to be decided at each step of an episode: an index of a logit, or None for nothing.
Label = Callable[[Episode], list[int | None]]
# (logits_BxSxA, batch) -> the shares of the batch of a gradient step's "loss" and other figures.
Loss = Callable[[jax.Array, Batch], dict[str, jax.Array]]


def label_models(episode: Episode, sampled: bool = False) -> list[int | None]:
  """The models that acted; with `sampled` not those that a budget forced."""
  return [None if sampled and step.logp is None else step.model for step in episode.steps]


def label_failures(episode: Episode) -> list[int | None]:
  """Whether the episode fails, where a proposal was taken."""
  return [None if s.proposal is None else int(not episode.success) for s in episode.steps]


def make_batch(episodes, windows, labels_B, size, decisions, buckets, advantages=None) -> Batch:
  """Pads episodes to a batch of few shapes: T is a bucket, R is B or a power of two above it.

  B is `size`, of which missing episodes have no decisions; S is `decisions`, no less than any
  episode's steps. Each step is decided in exactly one of its episode's windows.
  """
  rows = [(b, window) for b, episode_windows in enumerate(windows) for window in episode_windows]
  longest = max(len(window.tokens) for _, window in rows)
  T = min(bucket for bucket in buckets if bucket >= longest)
  R = size if len(rows) <= size else 1 << (len(rows) - 1).bit_length()
  tokens_RxT = np.zeros((R, T), np.int32)
  row_BxS, position_BxS, action_BxS = np.zeros((3, size, decisions), np.int32)
  logp_BxS = np.zeros((size, decisions), np.float32)
  mask_BxS = np.zeros((size, decisions), bool)
  adv_B = np.zeros(size, np.float32)
  adv_B[: len(episodes)] = 0 if advantages is None else advantages
  for row, (b, window) in enumerate(rows):
    tokens_RxT[row, : len(window.tokens)] = window.tokens
    span = slice(window.first, window.first + len(window.positions))
    row_BxS[b, span] = row
    position_BxS[b, span] = window.positions
  for b, (episode, labels) in enumerate(zip(episodes, labels_B)):
    for s, (step, label) in enumerate(zip(episode.steps, labels)):
      action_BxS[b, s] = label or 0
      logp_BxS[b, s] = step.logp or 0.0
      mask_BxS[b, s] = label is not None
  return Batch(tokens_RxT, row_BxS, position_BxS, action_BxS, logp_BxS, mask_BxS, adv_B)


def add_proposals(episode: Episode, dearest: int) -> Episode:
  """The episode as a cascade would have seen it: all but the dearest proposed first."""
  steps = [
    dataclasses.replace(step, proposal=None if step.model == dearest else step.action)
    for step in episode.steps
  ]
  return dataclasses.replace(episode, steps=steps)


@dataclasses.dataclass(frozen=True)
class Batcher:
  """Cuts the episodes of a gradient step into micro-batches of few shapes, short ones together.

  Without a label the models that acted are to be decided, with advantages those that were sampled.
  With a cascade's view the episodes are shown as a cascade would have seen them, and whether each
  fails is to be decided.
  """

  config: Config  # a micro-batch holds up to `sft.micro_episodes`
  view: View
  tasks: Iterable[Task]  # those of all episodes
  outcomes: bool = False  # whether the batches have the tokens that follow each decision
  label: Label | None = None

  def micro_batches(self, episodes: Sequence[Episode], advantages=None) -> list[Batch]:
    """The batches of a gradient step."""
    batches = [batch for _, batch in self._cut(episodes, advantages)]
    decisions = max(1, sum(batch.mask_BxS.sum() for batch in batches))
    return [
      dataclasses.replace(
        batch,
        episode_share=np.float32(len(batch.mask_BxS) / len(episodes)),
        decision_share=np.float32(batch.mask_BxS.sum() / decisions),
      )
      for batch in batches
    ]

  def compute(self, function, episodes: Sequence[Episode]) -> np.ndarray:
    """What `function(batch)` [B, S, ...] is at the labelled decisions, in the episodes' order."""
    values = {}
    for indices, batch in self._cut(episodes):
      for i, value_S, mask_S in zip(indices, np.asarray(function(batch)), batch.mask_BxS):
        values[i] = value_S[mask_S]
    return np.concatenate([values[i] for i in range(len(episodes))])

  def _cut(self, episodes, advantages=None) -> Iterator[tuple[list[int], Batch]]:
    """Each micro-batch, without its shares, after the indices of its episodes."""
    c, task_of = self.config, {task.id: task for task in self.tasks}
    label = self.label or partial(label_models, sampled=advantages is not None)
    if self.view.proposals:
      dearest = len(self.view.words) - 1
      label, episodes = label_failures, [add_proposals(e, dearest) for e in episodes]
    parts = range(1, c.router.buckets + 1)  # each length costs a compilation per loss
    buckets = [c.router.max_tokens * part // c.router.buckets for part in parts]
    windows = [self.view.episode_windows(task_of[e.task_id], e) for e in episodes]
    for indices in sort_by_length(windows, c.sft.micro_episodes):
      group = [episodes[i] for i in indices]
      # A client's episode may be longer than the config has it: a multiple is one shape more.
      rounds = max(-(-len(e.steps) // c.env.max_steps) for e in group)
      shape = c.sft.micro_episodes, rounds * c.env.max_steps, buckets
      adv = None if advantages is None else advantages[indices]
      batch = make_batch(group, [windows[i] for i in indices], map(label, group), *shape, adv)
      if self.outcomes:
        token_BxSxM = list_outcomes(self.view, group, batch.mask_BxS.shape)
        batch = dataclasses.replace(batch, token_BxSxM=token_BxSxM)
      yield indices, batch


def list_outcomes(view: View, episodes: Sequence[Episode], shape: tuple[int, int]) -> np.ndarray:
  """token_BxSxM, of a batch of B x S: what follows each decision but an episode's last."""
  c = view.config
  width = c.action_tokens + c.result_tokens + 2 * len(view.cut_mark)
  token_BxSxM = np.full((*shape, width), NO_TOKEN, np.int32)
  for b, episode in enumerate(episodes):
    for s, (step, after) in enumerate(zip(episode.steps, episode.steps[1:])):
      action = view.encode(step.action, c.action_tokens)
      tokens = action + view.encode(after.observation, c.result_tokens)
      token_BxSxM[b, s, : len(tokens)] = tokens
  return token_BxSxM


def sort_by_length(windows: Sequence[Sequence[Window]], size: int) -> list[list[int]]:
  """Groups of indices of episodes, short ones together, with at most `size` windows."""
  groups: list[list[int]] = []
  count = size  # a full group, so that the first episode opens another
  for i in sorted(range(len(windows)), key=lambda i: max(len(w.tokens) for w in windows[i])):
    count += len(windows[i])
    if count > size:
      groups.append([])
      count = len(windows[i])
    groups[-1].append(i)
  return groups


class ShardedRouter:
  """A router whose parameters lie on the devices of a mesh: what it computes at decisions."""

  def __init__(self, model: Qwen2, token_ids, mesh: Mesh | None = None, dtype: str = "float32"):
    """Puts the parameters onto the mesh, None is one device, to compute in `dtype` with them.

    `token_ids` are those whose logits are computed; None is the whole vocabulary.
    """
    gc.collect()  # of routers that are done with: each is in a cycle with its compiled functions
    self.mesh = mesh or one_device()
    self._token_ids = None if token_ids is None else np.array(token_ids)
    self._dtype, self.low_precision = jnp.dtype(dtype), dtype != "float32"
    self._graphdef, params = nnx.split(model)
    self.params = jax.device_put(params, split_parameters(params, self.mesh))
    self._replicated = NamedSharding(self.mesh, PartitionSpec())
    # Both are whole in every process: the hidden states at decisions, and the logits there.
    self.hidden = partial(self._run, jax.jit(self._gather, out_shardings=self._replicated))
    self.logits = partial(self._run, jax.jit(self._forward, out_shardings=self._replicated))

  @property
  def model(self) -> Qwen2:
    return nnx.merge(self._graphdef, self.params)

  def _gather(self, params, batch: Batch):
    hidden_RxTxD = nnx.merge(self._graphdef, params)(batch.tokens_RxT, self._dtype)
    return hidden_RxTxD[batch.row_BxS, batch.position_BxS]

  def _forward(self, params, batch: Batch):
    hidden_BxSxD = self._gather(params, batch)  # at the decisions alone, before the head
    return nnx.merge(self._graphdef, params).logits(hidden_BxSxD, self._token_ids)

  def _run(self, compiled, batch: Batch):
    """What a compiled function computes of a batch with the parameters as they are."""
    with jax.set_mesh(self.mesh):
      return compiled(self.params, split_rows(batch, self.mesh))


class Trainer(ShardedRouter):
  """A router that learns by one loss; its parameters and gradients are float32."""

  def __init__(self, model: Qwen2, loss: Loss, optimizer, token_ids, mesh=None, dtype="float32"):
    """Copies the model's parameters: the buffers of the copy are given away by each step."""
    graphdef, params = nnx.split(model)
    super().__init__(nnx.merge(graphdef, jax.tree.map(jnp.copy, params)), token_ids, mesh, dtype)
    self._loss, self._optimizer, whole = loss, optimizer, self._replicated
    params_sharding = split_parameters(self.params, self.mesh)
    state_sharding = split_parameters(jax.eval_shape(optimizer.init, self.params), self.mesh)
    self.optimizer_state = jax.jit(optimizer.init, out_shardings=state_sharding)(self.params)
    gradient = jax.grad(self._evaluate, has_aux=True)
    self._gradient = jax.jit(gradient, out_shardings=(params_sharding, whole))
    self._evaluate_compiled = jax.jit(self._evaluate, out_shardings=whole)
    self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
    step_sharding = params_sharding, state_sharding, whole  # the last is of the gradient's norm
    self._apply = jax.jit(self._apply_gradient, donate_argnums=(0, 1), out_shardings=step_sharding)

  def step(self, batches: Sequence[Batch]) -> dict[str, float]:
    """One optimizer step on the sum of the batches' losses; the same in every process. Returns the
    sums of the loss's figures, and the norm of the gradient."""
    gradient, shares = None, []
    for batch in batches:
      addend, share = self._run(self._gradient, batch)
      gradient = addend if gradient is None else self._add(gradient, addend)
      del addend  # free this gradient before the next one is computed
      shares.append(share)
    stepped = self._apply(self.params, self.optimizer_state, gradient)
    self.params, self.optimizer_state, norm = stepped
    totals = {name: sum(float(share[name]) for share in shares) for name in shares[0]}
    return totals | {"gradient_norm": float(norm)}

  def loss(self, batches: Sequence[Batch]) -> float:
    """The sum of the batches' losses, without a step; the same in every process."""
    return sum(float(self._run(self._evaluate_compiled, batch)[0]) for batch in batches)

  def _evaluate(self, params, batch: Batch):
    figures = self._loss(self._forward(params, batch), batch)
    return figures["loss"], figures

  def _apply_gradient(self, params, optimizer_state, gradient):
    updates, optimizer_state = self._optimizer.update(gradient, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, optax.tree.norm(gradient)

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
