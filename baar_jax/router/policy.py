"""A router as a policy: the trained one with its KV cache, and a strong model that is asked."""

import dataclasses
import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from baar_jax.config import RouterConfig
from baar_jax.episode import SMALL, Step
from baar_jax.mesh import local_copy, one_device
from baar_jax.rollout.policies import Decision, Live, Policy
from baar_jax.router.head import FACTS, Heads, count_calls_left, count_progress, describe, estimate
from baar_jax.router.qwen2 import Qwen2, check_finite, softmax
from baar_jax.router.view import View

NEW_TOKENS = (32, 64, 128, 256)  # bucket lengths of one cached call
ROWS = (1, 4, 16, 64)  # bucket sizes of its batch
# What a judge reads: more than a small router (our choice).
JUDGE_VIEW = dict(max_tokens=4096, description_tokens=256, action_tokens=32, result_tokens=64)
TINY = 1e-12  # of a probability


@dataclasses.dataclass
class Sample:
  """Samples the model, as training does; the draw depends on `key`, task, seed and step."""

  key: str

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    draw = random.Random(f"{self.key}|{live.task.id}|{live.job.seed}|{len(live.steps)}").random()
    return min(int(np.searchsorted(np.cumsum(p_A), draw, side="right")), len(p_A) - 1)


@dataclasses.dataclass
class Threshold:
  """Takes LARGE if its probability is at least `value`; 0.5 is argmax.

  Of more models it takes that of the largest log p - log(value / (1 - value)) * u, where u rises
  from 0 for the cheapest to 1 for the dearest (our choice), as it does of two.
  """

  value: float = 0.5
  usd_A: Sequence[float] = ()  # prices that u is by; where they do not rise it is by rank

  def pick(self, p_A: np.ndarray, live: Live) -> int:
    if len(p_A) == 2:
      return int(p_A[1] >= self.value)
    value, u_A = np.clip(self.value, TINY, 1 - TINY), self._scale(len(p_A))
    return int(np.argmax(np.log(p_A + TINY) - np.log(value / (1 - value)) * u_A))

  def switch_thresholds(self, p_NxA: np.ndarray) -> np.ndarray:
    """The largest value at which each of N decisions is not the cheapest's; of two, p(LARGE)."""
    if p_NxA.shape[1] == 2:
      return p_NxA[:, 1]
    logp_NxA, u_A = np.log(p_NxA + TINY), self._scale(p_NxA.shape[1])
    logit_N = ((logp_NxA[:, 1:] - logp_NxA[:, :1]) / u_A[None, 1:]).max(axis=1)
    return 1 / (1 + np.exp(-logit_N))

  def _scale(self, models: int) -> np.ndarray:
    rises = len(self.usd_A) == models and (np.diff(self.usd_A) > 0).all()
    usd_A = np.array(self.usd_A if rises else range(models))
    return (usd_A - usd_A[0]) / (usd_A[-1] - usd_A[0])


class RouterPolicy(Policy):
  """Decides for all ready episodes in one forward pass of their new tokens.

  Each live episode has a row of the KV cache, which is filled anew where the text does not extend
  what it holds: after a cut of the history, and in the paper's view.
  """

  def __init__(self, name, model: Qwen2, view: View, rule, rows: int, mesh: Mesh | None = None):
    """Copies the model to this process's first device; `rule` is a `Sample` or a `Threshold`."""
    self.name, self._view, self._rule = name, view, rule
    self._token_ids: tuple[int, ...] | None = tuple(view.logit_ids)  # None is hidden states
    dtype = jnp.dtype(view.config.dtype)
    self._graphdef, params = nnx.split(model)
    self._params = local_copy(params, mesh or one_device(), dtype)
    cache = model.make_cache(rows + 1, view.config.max_tokens, dtype)
    # It is bound to the device of the parameters from the start: a call's shape is compiled once.
    self._cache = jax.device_put(cache, jax.tree.leaves(self._params)[0].sharding)
    self._spare_row, self._free_rows = rows, list(range(rows))  # for live episodes; one pads
    self._held: dict[Live, tuple[int, list[int]]] = {}  # an episode's row, and the tokens in it

  def prepare(self, live: Live) -> None:
    """A cascade's router is shown what SMALL proposes; a decision for SMALL takes the proposal."""
    if self._view.proposals:
      live.propose(live.agents[SMALL].reply(live.messages, len(live.steps)))

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decisions for the ready episodes, in their order."""
    start_s = time.monotonic()
    output_RxC, new_tokens_R = self._read(ready)
    p_RxA = self._predict(output_RxC, ready)
    latency_s = time.monotonic() - start_s  # each episode waited for the whole batch
    decisions = []
    for live, p_A, new_tokens in zip(ready, p_RxA, new_tokens_R):
      choice = self._rule.pick(p_A, live)
      logp = float(np.log(max(p_A[choice], 1e-30)))  # a threshold of 0 may pick p = 0
      model = choice + live.proposer  # a cascade takes the proposal or goes on
      usd = new_tokens * (self._view.config.usd_per_million_tokens / 1e6)
      decisions.append(Decision(model, logp, usd, latency_s, p_A=tuple(map(float, p_A))))
    return decisions

  def finish(self, live: Live) -> None:
    if live in self._held:
      self._free_rows.append(self._held.pop(live)[0])

  def compile(self) -> None:
    """Compiles all shapes of a call, so that no decision waits for it."""
    for R, T in itertools.product(ROWS, NEW_TOKENS):
      self._feed([(self._spare_row, 0, [0] * T)] * R)

  def _predict(self, logits_RxA: np.ndarray, ready: Sequence[Live]) -> np.ndarray:
    """p_RxA, the probabilities of the models."""
    return softmax(logits_RxA, self.name)

  def _read(self, ready: Sequence[Live]) -> tuple[np.ndarray, list[int]]:
    """output_RxC (logits_RxA, for heads hidden_RxD) at each text's end; how many tokens are new."""
    fed, pending, output_of = [], [], {}  # pending: (row, first position, tokens) to be fed
    for live in ready:
      tokens = self._view.live_window(live).tokens
      row, held = self._held.get(live) or (self._free_rows.pop(), [])
      start = len(held) if tokens[: len(held)] == held and len(held) < len(tokens) else 0
      fed.append((row, tokens))
      pending.append((row, start, tokens[start:]))
      self._held[live] = row, []  # until they are fed: a failure leaves nothing to be trusted
    new_tokens_R = [len(tokens) for _, _, tokens in pending]
    while pending:
      pending.sort(key=lambda part: len(part[2]))
      batch, pending = pending[: ROWS[-1]], pending[ROWS[-1] :]
      output_RxC, T = self._feed(batch)
      output_of |= {part[0]: output_C for part, output_C in zip(batch, output_RxC)}
      pending += [(row, start + T, tokens[T:]) for row, start, tokens in batch if len(tokens) > T]
    self._held |= zip(ready, fed)
    return np.stack([output_of[row] for row, _ in fed]), new_tokens_R

  def _feed(self, batch: Sequence[tuple[int, int, list[int]]]) -> tuple[np.ndarray, int]:
    """Feeds (row, start, tokens) in one compiled call; returns output_RxC and its length T."""
    R = next(size for size in ROWS if len(batch) <= size)
    T = next((size for size in NEW_TOKENS if len(batch[-1][2]) <= size), NEW_TOKENS[-1])
    tokens_RxT = np.zeros((R, T), np.int32)
    start_R, last_R = np.zeros((2, R), np.int32)
    row_R = np.full(R, self._spare_row, np.int32)
    for r, (row, start, tokens) in enumerate(batch):
      chunk = tokens[:T]
      tokens_RxT[r, : len(chunk)] = chunk
      row_R[r], start_R[r], last_R[r] = row, start, len(chunk) - 1
    inputs = tokens_RxT, row_R, start_R, last_R, self._token_ids
    output_RxC, self._cache = _extend(self._graphdef, self._params, self._cache, *inputs)
    return np.asarray(output_RxC, np.float64), T


class ConditionedPolicy(RouterPolicy):
  """Takes the model of the largest value, by what is left and by the price of a dollar."""

  def __init__(self, name, model, view, heads: Heads, prices, rows, mesh=None, bold=None):
    """`prices` are as of `describe`; with `bold`, which is as of `estimate`, it decides as if there
    were no cap until that is spent."""
    super().__init__(name, model, view, Threshold(), rows, mesh)
    self._heads, self.prices, self._token_ids = heads, prices, None
    self._told, self._bold = bold is None, bold or 0.0

  def compile(self) -> None:
    super().compile()
    self._compare(np.zeros((1, len(self._heads.scale.mean_D))), np.zeros((1, FACTS)))

  def _predict(self, hidden_RxD: np.ndarray, ready: Sequence[Live]) -> np.ndarray:
    """p_RxA, one-hot: 1 for the model of the largest value."""
    check_finite(hidden_RxD, f"hidden states of {self.name}")
    rows = []
    for live in ready:
      caps = (live.call_budget.limit, live.dollar_budget.limit_usd) if self._told else (None, None)
      left = count_calls_left(self._heads, *caps, live.steps)
      price = min(self.prices) if live.price is None else live.price
      steps = [*live.steps, Step(live.observation, SMALL, "")]
      *_, progress = count_progress(live.task.max_steps, steps)
      rows.append((left, price, *progress))
    rows_RxC = np.array(rows, np.float64)
    facts_RxF = describe(*rows_RxC[:, :2].T, rows_RxC[:, 2:])
    advantage_RxA = self._compare(hidden_RxD, facts_RxF)
    return np.eye(advantage_RxA.shape[1])[advantage_RxA.argmax(axis=1)]

  def _compare(self, hidden_RxD: np.ndarray, facts_RxF: np.ndarray) -> np.ndarray:
    """advantage_RxA; with a row for all that may be live, so that one shape is compiled."""
    missing = self._spare_row - len(hidden_RxD)
    padded = [np.pad(x, ((0, missing), (0, 0))) for x in (hidden_RxD, facts_RxF)]
    return np.asarray(estimate(self._heads, *padded, self._bold)[1])[: len(hidden_RxD)]


class ZeroShotPolicy(Policy):
  """Does what a judge says; SMALL where its answer names no model, or several."""

  def __init__(self, name: str, judge: Callable, config: RouterConfig, tokenizer: Path, models=2):
    """`judge` is `Pair.judge`'s; it is shown the paper's prompt with its budget."""
    config = dataclasses.replace(config, view="paper", show_budget=True, **JUDGE_VIEW)
    self.name, self._judge, self._view = name, judge, View(config, tokenizer, models=models)

  def prepare(self, live: Live) -> None:
    prompt = self._view.tokenizer.decode(self._view.live_window(live).tokens)
    judge, start_s = self._judge(live.task, live.job.seed, live.hold), time.monotonic()
    reply = judge.reply([{"role": "user", "content": prompt}], len(live.steps))
    named = set(re.findall(rf"\b({'|'.join(self._view.words)})\b", reply.text))
    live.step.model = self._view.words.index(named.pop()) if len(named) == 1 else SMALL
    live.step.calls, live.step.router_latency_s = reply.calls("judge"), time.monotonic() - start_s

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    return [Decision(live.step.model) for live in ready]


@partial(jax.jit, static_argnums=(0, 7), donate_argnums=(2,))
def _extend(graphdef, params, cache, tokens_RxT, row_R, start_R, last_R, ids):
  """One forward pass of new tokens: logits_RxA of the ids, without ids hidden_RxD; the cache."""
  model = nnx.merge(graphdef, params)
  hidden_RxTxD, cache = model.extend(tokens_RxT, start_R, cache, row_R)
  hidden_RxD = hidden_RxTxD[jnp.arange(len(last_R)), last_R]
  return (hidden_RxD if ids is None else model.logits(hidden_RxD, np.array(ids))), cache
