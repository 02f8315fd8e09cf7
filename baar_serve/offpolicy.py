"""Estimate what a router would score and cost, from sessions of random policies.

python -m baar_serve.offpolicy --config.name=mine

The estimate is doubly robust per decision (Jiang & Li 2016). Its values are linear in
what the value heads say at all cost weights, and in the facts of the step. They are
fitted to the same sessions by LSTD-Q (Lagoudakis & Parr 2003) with the traces of tree
backup (Precup et al. 2000).
Hardly a session agrees with a deterministic target to its end. So importance sampling
corrects the values up to the last decision with at least `LEAST_SIZE` effective
sessions (our choice), and later decisions count by the values.

Axes: N decisions, one session after another, in the order of the tasks; A models; D
inputs of a value; I inputs of all models' values; T tasks; S decisions of a session; V
the score and the dollars; R resamples of the tasks (index 0 is the unchanged data).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baar_jax.conditioned.fit import make_transitions
from baar_jax.conditioned.heads import estimate
from baar_jax.config import Config
from baar_jax.episode import SMALL, SPLITS
from baar_jax.families.conditioned import load_heads
from baar_jax.mesh import one_device
from baar_jax.report.frontier import interval
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.inputs import Tracker, describe, read_states
from baar_jax.run import RouterFiles, load_vocabulary
from baar_jax.store import Store, read_run
from baar_serve.config import ServeConfig, run_command
from baar_serve.episodes import client_specs
from baar_serve.plan import list_router_specs

STORE = "episodes.sqlite"
LEAST_SIZE = 10.0  # Fewer effective sessions correct nothing.
RESAMPLES = 200
RIDGE = 1e-3  # added to the diagonal of the fit of the values
TINY = 1e-300


class Sample(NamedTuple):
  """The decisions of random policies, as arrays.

  Attributes:
    task_N: int, the number of the task, from 0; ascending.
    place_N: int, the number of the decision in its session, from 0.
    chance_N: the behaviour's probability of the session's models up to this one.
    acted_NxA: 1 for the model that acted, else 0.
    reward_NxV: the gain of score and the dollars of the step.
    inputs_NxD: the inputs of the values.
  """

  task_N: np.ndarray
  place_N: np.ndarray
  chance_N: np.ndarray
  acted_NxA: np.ndarray
  reward_NxV: np.ndarray
  inputs_NxD: np.ndarray


class Means(NamedTuple):
  """The target's mean score and dollars over the tasks.

  Attributes:
    mean_RxV: the estimate of each resample.
    size_S: Kish's effective number of sessions at each decision, (sum w)^2 / sum w^2,
      with w the importance ratio up to this decision.
  """

  mean_RxV: np.ndarray
  size_S: np.ndarray


def pair(share_NxA: np.ndarray, inputs_NxD: np.ndarray) -> np.ndarray:
  """Spread the inputs over the models, by each model's share; returns [N, A * D]."""
  return (share_NxA[..., None] * inputs_NxD[:, None]).reshape(len(inputs_NxD), -1)


def estimate_means(sample: Sample, target_NxA: np.ndarray) -> Means:
  """Estimate the means of a target policy, and resample the tasks (Efron 1979).

  All tasks count alike, and so do the sessions of a task. With x the inputs of the
  model that acted and x' those that the target expects at the next decision, the fit
  solves sum z (reward + x' beta - x beta) = 0. The trace z is x, plus the trace of the
  decision before, times the target's probability of this model.

  Args:
    sample: the decisions.
    target_NxA: the target's probability of each model.
  """
  is_first_N = sample.place_N == 0
  acted_NxI = pair(sample.acted_NxA, sample.inputs_NxD)
  target_NxI = pair(target_NxA, sample.inputs_NxD)
  next_NxI = np.where(is_first_N[:, None], 0.0, target_NxI)
  change_NxI = acted_NxI - np.roll(next_NxI, -1, axis=0)
  trace_NxI = acted_NxI.copy()
  agree_N = (sample.acted_NxA * target_NxA).sum(axis=1)
  ratio_N = agree_N.copy()
  for n in np.flatnonzero(~is_first_N):
    trace_NxI[n] += agree_N[n] * trace_NxI[n - 1]
    ratio_N[n] *= ratio_N[n - 1]
  ratio_N /= sample.chance_N
  total_S = np.bincount(sample.place_N, ratio_N)
  size_S = total_S**2 / np.maximum(np.bincount(sample.place_N, ratio_N**2), TINY)
  is_corrected_S = np.minimum.accumulate(size_S) >= LEAST_SIZE
  weight_Nx1 = (ratio_N * is_corrected_S[sample.place_N])[:, None]
  # The estimate is lever @ beta + gain, summed over the decisions.
  lever_NxI = target_NxI * is_first_N[:, None] - weight_Nx1 * change_NxI
  gain_NxV = weight_Nx1 * sample.reward_NxV
  moments = []
  for task in range(sample.task_N[-1] + 1):
    rows = sample.task_N == task
    trace_IxN = trace_NxI[rows].T
    sums = trace_IxN @ change_NxI[rows], trace_IxN @ sample.reward_NxV[rows]
    sums += lever_NxI[rows].sum(axis=0), gain_NxV[rows].sum(axis=0)
    moments.append([x / is_first_N[rows].sum() for x in sums])
  tasks = len(moments)
  counts_RxT = np.random.default_rng(0).multinomial(
    tasks, np.full(tasks, 1 / tasks), RESAMPLES
  )
  count_RxT = np.vstack([np.ones(tasks), counts_RxT])
  matrix_RxIxI, right_RxIxV, lever_RxI, gain_RxV = (
    np.tensordot(count_RxT, np.array(x), 1) / tasks for x in zip(*moments)
  )
  matrix_RxIxI += RIDGE * np.eye(lever_RxI.shape[1])
  beta_RxIxV = np.linalg.solve(matrix_RxIxI, right_RxIxV)
  return Means((lever_RxI[:, None] @ beta_RxIxV)[:, 0] + gain_RxV, size_S)


def read_sample(
  files: RouterFiles, store: Store, mixes: Mapping[str, Sequence[float]]
) -> tuple[Sample, dict[PolicySpec, np.ndarray]]:
  """Read the sessions of random policies, and what a router decides in each of them.

  Tasks that the router has learned from are left out, and so are imported sessions,
  because nobody knows with which probabilities their models were drawn. Only the steps
  that this program served have a time.

  Args:
    files: the run whose router is estimated.
    store: the stored sessions.
    mixes: by policy, the probabilities of a model costlier than SMALL, of which each
      session draws one.

  Returns:
    The sessions; and target_NxA of each policy without a cap.

  Raises:
    ValueError: there are no value heads, or no session.
  """
  with contextlib.closing(Store(files.directory / STORE)) as trained:
    learned = {task.id for task in trained.tasks("train")}
  tasks = {task.id: task for split in SPLITS for task in store.tasks(split)}
  episodes = []
  for key in mixes:
    episodes += [
      found
      for found in store.episodes(key)
      if found.task_id not in learned and found.steps[0].started_s is not None
    ]
  if not episodes:
    raise ValueError(
      "No session of a random policy has a task that is new to the router. "
      "Play and score tasks with --config.policy=stratified."
    )
  episodes.sort(key=lambda episode: episode.task_id)
  heads = load_heads(files)
  vocabulary = load_vocabulary(files)
  states = read_states(vocabulary, tasks, episodes)
  tracker = Tracker(vocabulary, tasks[episodes[0].task_id])
  tracker.see("")
  data = make_transitions(states, episodes, 1.0)
  models = np.eye(len(files.config.models.names))
  chances = []
  ids = []
  for episode in episodes:
    p_Kx1 = np.array(mixes[episode.policy])[:, None]
    is_small_S = np.array([step.model == SMALL for step in episode.steps])
    p_KxS = np.where(is_small_S, 1 - p_Kx1, p_Kx1 / (len(models) - 1))
    chances += [*p_KxS.cumprod(axis=1).mean(axis=0)]
    ids += [episode.task_id] * len(episode.steps)
  inputs = []
  targets = {}
  for spec in list_router_specs(files.config):
    score_weight = 1 / (1 + np.float64(spec.cost_weight))
    terms_NxT = describe(np.float64(np.inf), score_weight, states.progress_NxP)
    value_N, advantage_NxA = estimate(heads, states.features_NxD, terms_NxT)
    targets[spec] = models[advantage_NxA.argmax(axis=1)]
    inputs += [value_N[:, None], advantage_NxA]
  sample = Sample(
    np.unique(ids, return_inverse=True)[1],
    states.progress_NxP[:, 0],
    np.array(chances),
    models[data.model_N],
    np.stack([data.gain_N, data.cost_N], axis=1),
    np.hstack([*inputs, terms_NxT, states.features_NxD[:, : len(tracker.facts)]]),
  )
  return sample, targets


def list_mixes(config: Config) -> dict[str, Sequence[float]]:
  """List, by random policy, the probabilities of which a session draws one.

  They are probabilities of a model costlier than SMALL.
  """
  specs = client_specs(config)
  stratified = specs["stratified"]
  count = stratified.plans[0].count
  strata = [k / count for k in range(1, count + 1)]
  return {specs["random"].key: [specs["random"].p], stratified.key: strata}


def estimate_router(files: RouterFiles, directory: Path) -> Iterator[dict]:
  """Estimate the budget-conditioned router at each cost weight, without a cap.

  Args:
    files: the run whose router is estimated.
    directory: the directory of the run with the sessions.

  Yields:
    A row of the page, with 95 % intervals.

  Raises:
    ValueError: see `read_sample`; or the sessions are too few.
  """
  with contextlib.closing(Store(directory / STORE)) as store:
    sample, targets = read_sample(files, store, list_mixes(read_run(directory)))
  for spec, target_NxA in targets.items():
    mean_RxV, size_S = estimate_means(sample, target_NxA)
    size = size_S[0]
    if size < LEAST_SIZE:
      raise ValueError(
        f"The sessions count as {size:.1f} effective ones, fewer than {LEAST_SIZE:g}. "
        "Play and score more with --config.policy=stratified."
      )
    yield (
      dict(policy=spec.key, sessions=(sample.place_N == 0).sum(), effective=size)
      | interval("score", mean_RxV[:, 0])
      | interval("usd", mean_RxV[:, 1])
    )


def list_estimates(files: RouterFiles, directory: Path, minute: float) -> list[dict]:
  """List the rows of `estimate_router`, or one row that says why there is none.

  Args:
    files: the run whose router is estimated.
    directory: the directory of the run with the sessions.
    minute: not used; a cache of the results has an entry for each minute.
  """
  try:
    return [*estimate_router(files, directory)]
  except ValueError as error:
    return [dict(estimate=str(error))]


def print_estimates(config: ServeConfig) -> None:
  """Print the estimates of the router from the sessions of a run.

  Raises:
    ValueError: see `estimate_router`.
  """
  directory = Path(config.runs) / config.name
  source = Path(config.router or directory)
  files = RouterFiles(source, read_run(source), one_device())
  for row in estimate_router(files, directory):
    print(*map("{}={}".format, row, row.values()))


if __name__ == "__main__":
  run_command(print_estimates)
