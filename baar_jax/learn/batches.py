"""Cut episodes into padded micro-batches, with labels of their decisions.

Axes: B episodes, S decisions of an episode, R rows of tokens, T tokens of a row, A
models, M tokens that follow a decision.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.router.view import View, Window

# Rows are padded to two lengths, or to four if a text may have more tokens than this.
LONG = 1024
NO_TOKEN = -1  # The number that pads `Batch.token_BxSxM`; it is not a token id.


class Batch(NamedTuple):
  """Store a padded micro-batch: some of the episodes of one gradient step.

  A gradient step adds up the losses of its micro-batches. In this sum, a mean over a
  micro-batch's episodes is multiplied by `episode_share`, and a mean over its decisions
  by `decision_share`.

  Attributes:
    tokens_RxT: int32, 0-padded; one row for each window of an episode's text.
    row_BxS: int32, the row of `tokens_RxT` with the decision.
    position_BxS: int32, the position of the decision in its row.
    action_BxS: int32, the index of the logit to learn: the chosen model or a label.
    logp_BxS: float32, the log-probability of the sampled model in nats; 0 if the
      decision was not sampled.
    mask_BxS: bool, True on decisions to learn from.
    adv_B: float32, one advantage per episode; 0 if the method has no advantages.
    ref_logits_BxSxA: float32, the SFT router's logits; None if the method does not use
      these logits. `Learner.fill` adds them.
    token_BxSxM: int32, the tokens that follow each decision, padded with `NO_TOKEN`;
      None if `Labels.outcomes` is False.
    episode_share: this batch's share of the gradient step's episodes; B counts the
      padding too.
    decision_share: this batch's share of the gradient step's masked decisions.
  """

  tokens_RxT: np.ndarray
  row_BxS: np.ndarray
  position_BxS: np.ndarray
  action_BxS: np.ndarray
  logp_BxS: np.ndarray
  mask_BxS: np.ndarray
  adv_B: np.ndarray
  ref_logits_BxSxA: jax.Array | None = None
  token_BxSxM: np.ndarray | None = None
  episode_share: np.float32 = np.float32(1)
  decision_share: np.float32 = np.float32(1)


class Sum(NamedTuple):
  """Keep a sum over a batch, with the count for its mean.

  Attributes:
    total: float32 scalar, the sum.
    count: the number of added values: real decisions, or episodes with the padding.
  """

  total: jax.Array
  count: jax.Array | int

  @property
  def mean(self) -> jax.Array:
    """Return the sum divided by the count; 0 if the count is 0."""
    return self.total / jnp.maximum(self.count, 1)


def sum_masked(value_BxS: jax.Array, mask_BxS: jax.Array) -> Sum:
  """Add up values over real decisions, and count these decisions.

  Args:
    value_BxS: float32; padding may have any value.
    mask_BxS: bool, True on real decisions.
  """
  return Sum(jnp.where(mask_BxS, value_BxS, 0.0).sum(), mask_BxS.sum())


class Term(NamedTuple):
  """Describe one term of a loss, computed on one micro-batch.

  The term adds weight * share * `values.mean` to the loss of the gradient step.

  Attributes:
    values: the sum over the batch, and the count for its mean.
    share: the batch's `decision_share` or `episode_share`.
    weight: the factor of this term in the loss.
  """

  values: Sum
  share: jax.Array | float
  weight: jax.Array | float = 1.0


def next_token_loss(logits_BxSxV: jax.Array, batch: Batch) -> dict[str, Term]:
  """Compute the loss of pretraining: cross-entropy of the tokens after each decision.

  The loss of a decision is the mean over its tokens, in nats. The loss of the batch is
  the mean over decisions that are followed by tokens.

  Args:
    logits_BxSxV: float32, one distribution per decision, shared by its M tokens.
    batch: a batch with `token_BxSxM`.

  Returns:
    The term "loss".
  """
  real_BxSxM = batch.token_BxSxM != NO_TOKEN
  token_BxSxM = jnp.where(real_BxSxM, batch.token_BxSxM, 0)
  logp_BxSxM = jnp.take_along_axis(
    jax.nn.log_softmax(logits_BxSxV), token_BxSxM, axis=2
  )
  logp_BxS = jnp.where(real_BxSxM, logp_BxSxM, 0.0).sum(axis=2)
  loss_BxS = -logp_BxS / jnp.maximum(real_BxSxM.sum(axis=2), 1)
  values = sum_masked(loss_BxS, batch.mask_BxS & real_BxSxM.any(axis=2))
  # `decision_share` counts all decisions, even those without tokens after them.
  values = values._replace(total=batch.decision_share * values.total)
  return {"loss": Term(values, share=1.0)}


# A loss maps (logits_BxSxA, batch) to its terms by name. The main term is "loss".
Loss = Callable[[jax.Array, Batch], dict[str, Term]]


class Labels(NamedTuple):
  """Label the decisions of an episode by a rule.

  Attributes:
    decide: maps an episode to one label per step: the index of the logit to learn, or
      None for a step to leave out.
    rewrite: changes an episode before it is read, given the number of models; None
      reads it as it is.
    answers: the number of answers between which the router decides; None is one for
      each model.
    outcomes: whether batches get the tokens that follow each decision.
  """

  decide: Callable[[Episode], Sequence[int | None]]
  rewrite: Callable[[Episode, int], Episode] | None = None
  answers: int | None = None
  outcomes: bool = False


def _decide_acted(episode: Episode) -> list[int]:
  """Label each step with the model that acted."""
  return [step.model for step in episode.steps]


def _decide_sampled(episode: Episode) -> list[int | None]:
  """Label each sampled step with the model that acted; leave out the others."""
  return [None if step.logp is None else step.model for step in episode.steps]


# The label of a step is the model that acted.
ACTED = Labels(_decide_acted)
# The label of a step is the sampled model. Steps that a budget forced are left out.
SAMPLED = Labels(_decide_sampled)
# Pretraining learns the tokens that follow each decision.
OUTCOMES = Labels(_decide_acted, outcomes=True)


class Shape(NamedTuple):
  """Set the padded sizes of a batch.

  Attributes:
    episodes: B.
    decisions: S, at least the steps of the longest episode.
    buckets: the row lengths that T is chosen from, ascending.
  """

  episodes: int
  decisions: int
  buckets: Sequence[int]


def make_batch(
  episodes: Sequence[Episode],
  windows: Sequence[Sequence[Window]],
  labels: Labels,
  shape: Shape,
  adv_B: Sequence[float] = (),
) -> Batch:
  """Pad episodes to one batch.

  Padding has no decisions to learn from: its mask is False.

  Args:
    episodes: at most `shape.episodes`.
    windows: the windows of each episode's text; each decision is in exactly one.
    labels: the rule that labels the decisions.
    shape: the sizes to pad to. R is `shape.episodes`, or the next power of two if there
      are more windows.
    adv_B: one advantage per episode; if empty, all advantages are 0.

  Returns:
    The batch. Its `episode_share` and `decision_share` are 1, as in a gradient step
      with this batch alone.
  """
  size = shape[:2]
  rows = [(b, window) for b, group in enumerate(windows) for window in group]
  longest = max(len(window.tokens) for _, window in rows)
  T = min(bucket for bucket in shape.buckets if bucket >= longest)
  R = shape.episodes
  if len(rows) > R:
    R = 1 << (len(rows) - 1).bit_length()
  batch = Batch(
    tokens_RxT=np.zeros((R, T), np.int32),
    row_BxS=np.zeros(size, np.int32),
    position_BxS=np.zeros(size, np.int32),
    action_BxS=np.zeros(size, np.int32),
    logp_BxS=np.zeros(size, np.float32),
    mask_BxS=np.zeros(size, bool),
    adv_B=np.zeros(shape.episodes, np.float32),
  )
  batch.adv_B[: len(adv_B)] = adv_B
  for row, (b, window) in enumerate(rows):
    batch.tokens_RxT[row, : len(window.tokens)] = window.tokens
    span = slice(window.first, window.first + len(window.positions))
    batch.row_BxS[b, span] = row
    batch.position_BxS[b, span] = window.positions
  for b, episode in enumerate(episodes):
    decisions = zip(episode.steps, labels.decide(episode))
    for s, (step, index) in enumerate(decisions):
      batch.action_BxS[b, s] = index or 0
      batch.logp_BxS[b, s] = step.logp or 0.0
      batch.mask_BxS[b, s] = index is not None
  return batch


@dataclasses.dataclass(frozen=True)
class Batcher:
  """Cut episodes into micro-batches with episodes of similar length.

  Attributes:
    config: the configuration; `sft.micro_episodes` is B.
    view: the view that turns an episode into tokens.
    tasks: the tasks of all episodes that will be cut.
    labels: the rule that labels the decisions.
  """

  config: Config
  view: View
  tasks: Iterable[Task]
  labels: Labels = ACTED

  def micro_batches(
    self, episodes: Sequence[Episode], adv_B: np.ndarray | None = None
  ) -> list[Batch]:
    """Make the micro-batches of one gradient step, and set their shares of the step.

    Args:
      episodes: the episodes of the gradient step.
      adv_B: one advantage per episode; None if the method has no advantages.
    """
    unshared = [batch for _, batch in self._cut(episodes, adv_B)]
    decisions = max(1, sum(batch.mask_BxS.sum() for batch in unshared))
    batches = []
    for batch in unshared:
      episode_share = np.float32(len(batch.mask_BxS) / len(episodes))
      decision_share = np.float32(batch.mask_BxS.sum() / decisions)
      batches.append(
        batch._replace(episode_share=episode_share, decision_share=decision_share)
      )
    return batches

  def compute(
    self, function: Callable[[Batch], jax.Array], episodes: Sequence[Episode]
  ) -> np.ndarray:
    """Compute a function at the labelled decisions of episodes.

    Args:
      function: maps a batch to an array [B, S, ...].

    Returns:
      An array [N, ...] over the N labelled decisions, in the order of the episodes.
    """
    values = {}
    for indices, batch in self._cut(episodes):
      for i, value_S, mask_S in zip(
        indices, np.asarray(function(batch)), batch.mask_BxS
      ):
        values[i] = value_S[mask_S]
    return np.concatenate([values[i] for i in range(len(episodes))])

  def _cut(
    self, episodes: Sequence[Episode], adv_B: np.ndarray | None = None
  ) -> Iterator[tuple[list[int], Batch]]:
    """Cut episodes into micro-batches, shortest episodes first.

    Yields:
      The indices of the batch's episodes, and the batch; both its shares are 1.
    """
    router = self.config.router
    size = self.config.sft.micro_episodes
    max_steps = self.config.env.max_steps
    task_of = {task.id: task for task in self.tasks}
    if self.labels.rewrite:
      models = len(self.view.words)
      episodes = [self.labels.rewrite(episode, models) for episode in episodes]
    # Rows are padded to few lengths, because each length is compiled once per loss.
    count = 4 if router.max_tokens > LONG else 2
    buckets = [router.max_tokens * part // count for part in range(1, count + 1)]
    windows = [self.view.episode_windows(task_of[e.task_id], e) for e in episodes]
    for indices in sort_by_length(windows, size):
      group = [episodes[i] for i in indices]
      # An episode that a client plays may have more steps than `env.max_steps`.
      # Rounding up to multiples keeps the number of compiled shapes small.
      longest = max(len(episode.steps) for episode in group)
      shape = Shape(size, -(-longest // max_steps) * max_steps, buckets)
      adv = () if adv_B is None else adv_B[indices]
      batch = make_batch(group, [windows[i] for i in indices], self.labels, shape, adv)
      if self.labels.outcomes:
        token_BxSxM = list_outcomes(self.view, group, shape)
        batch = batch._replace(token_BxSxM=token_BxSxM)
      yield indices, batch


def list_outcomes(view: View, episodes: Sequence[Episode], shape: Shape) -> np.ndarray:
  """Encode each step's action and result: the tokens that follow its decision.

  The result of an episode's last step is not stored, so this step has only padding.

  Returns:
    int32 token_BxSxM, padded with `NO_TOKEN`.
  """
  config = view.config
  width = config.action_tokens + config.result_tokens + 2 * len(view.cut_mark)
  token_BxSxM = np.full((*shape[:2], width), NO_TOKEN, np.int32)
  for b, episode in enumerate(episodes):
    for s, (step, next_step) in enumerate(zip(episode.steps, episode.steps[1:])):
      action = view.encode(step.action, config.action_tokens)
      tokens = action + view.encode(next_step.observation, config.result_tokens)
      token_BxSxM[b, s, : len(tokens)] = tokens
  return token_BxSxM


def sort_by_length(windows: Sequence[Sequence[Window]], size: int) -> list[list[int]]:
  """Group the indices of episodes by length, shortest first.

  Args:
    windows: the windows of each episode's text.
    size: the most windows of a group. An episode with more windows is a group of its
      own.
  """

  def length(i: int) -> int:
    return max(len(window.tokens) for window in windows[i])

  groups: list[list[int]] = []
  count = size  # As if a group were full, so that the first episode opens a new one.
  for i in sorted(range(len(windows)), key=length):
    count += len(windows[i])
    if count > size:
      groups.append([])
      count = len(windows[i])
    groups[-1].append(i)
  return groups


def draw_batches(
  pool: Sequence[Episode], size: int, seed: int | str, newest_first: bool = False
) -> Iterator[list[Episode]]:
  """Draw batches of episodes from a queue, without end.

  If the queue has too few episodes for a batch, the whole pool is appended in a new
  random order. So all episodes are drawn before one repeats.

  Args:
    pool: the episodes to draw from.
    size: the number of episodes in a batch.
    seed: the seed of the draws.
    newest_first: whether batches come from the end of the queue, the newest order. Then
      an episode may repeat although a few others were not drawn.

  Raises:
    ValueError: the pool is empty, and the size is not 0.
  """
  if size and not pool:
    raise ValueError(
      "there are no stored episodes to learn from: run --stage=references first"
    )
  draw = random.Random(seed)
  end = -1 if newest_first else 0
  queue: list[Episode] = []
  while True:
    while len(queue) < size:
      queue += draw.sample(pool, len(pool))
    yield [queue.pop(end) for _ in range(size)]
