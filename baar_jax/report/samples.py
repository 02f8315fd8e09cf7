"""Stored episodes -> per-task figures, over the tasks and seeds that all policies share."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from baar_jax.episode import SMALL, Episode
from baar_jax.report import frontier
from baar_jax.rollout.entries import Entry
from baar_jax.store import Store, summary

METRICS = ("score", "success")
SMALL_FAMILY, LARGE_FAMILY = "always-small", "always-large"
PRIVILEGED = ("oracle", "optimum")  # they see what no router may
PROGRESS_BINS = 10  # tenths of an episode's steps
# Episodes that ended in an error are left out, for all policies alike; more is not an evaluation.
LEFT_OUT_LIMIT = 0.05


@dataclasses.dataclass(frozen=True)
class Trial:
  """What the figures need of an episode; the texts are too many to hold at once.

  Attributes:
    models: of each step.
    small_tokens, large_tokens: completion tokens of the replies that were acted on.
    decisions: steps at which a router read the episode.
    proposal_tokens: completion tokens of a cascade's replies of SMALL that were not taken.
    judgements: steps at which a zero-shot router asked its judge.
    judge_tokens: completion tokens of the judge's answers.
    latency_s: seconds of the model calls, replayed ones at next to nothing.
    router_latency_s: seconds that the episode waited for its router or its judge.
    replayed: steps whose reply or proposal was not asked for again.
  """

  score: float
  success: bool
  cost_usd: float
  router_cost_usd: float
  spent_usd: float
  large_calls: int
  models: tuple[int, ...]
  small_tokens: int
  large_tokens: int
  decisions: int
  proposal_tokens: int
  judgements: int
  judge_tokens: int
  latency_s: float
  router_latency_s: float
  replayed: int

  @classmethod
  def of(cls, episode: Episode) -> "Trial":
    steps = summary(episode)
    return cls(
      episode.score,
      episode.success,
      episode.cost_usd,
      episode.router_cost_usd,
      episode.spent_usd,
      episode.large_calls,
      tuple(step.model for step in episode.steps),
      **{
        name: steps[name]
        for name in (
          "small_tokens",
          "large_tokens",
          "decisions",
          "proposal_tokens",
          "judgements",
          "judge_tokens",
          "latency_s",
          "router_latency_s",
          "replayed",
        )
      },
    )

  @property
  def steps(self) -> int:
    return len(self.models)


@dataclasses.dataclass(frozen=True)
class Sample:
  """An entry's trials by task, the same tasks and seeds for every entry."""

  entry: Entry
  trials: dict[str, list[Trial]]

  def mean_N(self, name: str) -> np.ndarray:
    """An attribute of Trial per task, averaged over seeds."""
    return np.array([sum(getattr(t, name) for t in ts) / len(ts) for ts in self.trials.values()])

  def mean(self, name: str) -> float:
    """Over tasks, of the mean over seeds."""
    return float(self.mean_N(name).mean())

  def large_share_by_progress(self) -> list[float | None]:
    """Share of LARGE among the decisions of each tenth of an episode; None where there are none."""
    large, decisions = np.zeros(PROGRESS_BINS), np.zeros(PROGRESS_BINS)
    for trial in (t for ts in self.trials.values() for t in ts):
      for step, model in enumerate(trial.models):
        tenth = PROGRESS_BINS * step // len(trial.models)
        decisions[tenth] += 1
        large[tenth] += model != SMALL
    return [float(some / all_) if all_ else None for some, all_ in zip(large, decisions)]


def load_samples(
  store: Store, entries: Sequence[Entry], seeds: int, tasks: int = 0
) -> tuple[list[Sample], list[str]]:
  """Each entry's trials on the keys that all entries have, and the keys that were left out.

  Args:
    tasks: the first so many of the test tasks; 0 is all.

  Raises:
    ValueError: a boundary is missing, or an entry's episodes are.
  """
  missing = {SMALL_FAMILY, LARGE_FAMILY} - {
    entry.family for entry in entries if entry.call_budget is None and entry.usd_budget is None
  }
  if missing:
    raise ValueError(f"no entry for {', '.join(sorted(missing))}: run --stage=evaluate first")
  known = store.tasks("test")
  wanted = [(task.id, seed) for task in known[: tasks or len(known)] for seed in range(seeds)]
  if not wanted:
    raise ValueError("there are no test tasks: run --stage=evaluate first")
  found: list[dict[tuple[str, int], Trial]] = []
  for entry in entries:
    keys = set(wanted) & store.keys(entry.policy)
    if len(keys) < (1 - LEFT_OUT_LIMIT) * len(wanted):
      raise ValueError(
        f"{entry.policy} has {len(keys)} of {len(wanted)} episodes: run --stage=evaluate first"
      )
    episodes = store.episodes(entry.policy)
    found.append(
      {(e.task_id, e.seed): Trial.of(e) for e in episodes if (e.task_id, e.seed) in keys}
    )
  common = [key for key in wanted if all(key in trials for trials in found)]
  left_out = [f"{task_id} seed {seed}" for task_id, seed in wanted if (task_id, seed) not in common]
  if not common:
    raise ValueError("no task and seed has an episode of every policy: run --stage=evaluate again")
  samples = []
  for entry, trials in zip(entries, found):
    by_task: dict[str, list[Trial]] = {}
    for key in common:
      by_task.setdefault(key[0], []).append(trials[key])
    samples.append(Sample(entry, by_task))
  return samples, left_out


def boundaries(samples: Sequence[Sample]) -> tuple[Sample, Sample]:
  """The samples of always-SMALL and always-LARGE, without a budget."""
  soft = {s.entry.family: s for s in samples if s.entry.call_budget is None}
  return soft[SMALL_FAMILY], soft[LARGE_FAMILY]


def gap_share(sample: Sample, samples: Sequence[Sample], name: str) -> float | None:
  """How far a mean is on the way from always-SMALL's to always-LARGE's; None if that is no rise."""
  low, high = (boundary.mean(name) for boundary in boundaries(samples))
  return (sample.mean(name) - low) / (high - low) if high > low else None


def gap_share_interval(
  sample: Sample, samples: Sequence[Sample], name: str, resamples: int
) -> list[float] | None:
  """95 % percentile bootstrap over tasks of `gap_share`, the same tasks for all three."""
  picks_BxN = frontier.resample(len(sample.trials), resamples)
  value_B, low_B, high_B = (
    s.mean_N(name)[picks_BxN].mean(axis=1) for s in (sample, *boundaries(samples))
  )
  usable_B = high_B > low_B
  gaps_B = (high_B - low_B)[usable_B]
  return _interval((value_B - low_B)[usable_B] / gaps_B, resamples)


def gain(one: Sample, other: Sample, metric: str, resamples: int) -> dict:
  """One policy's percent minus another's, with the paired 95 % bootstrap interval over tasks."""
  gain_N = 100 * (one.mean_N(metric) - other.mean_N(metric))
  return {
    "value": float(gain_N.mean()),
    "interval": list(frontier.bootstrap_interval(gain_N, resamples)),
  }


def picked_elsewhere(candidates: Sequence[Sample], metric: str) -> Sample:
  """One policy out of several: on each half of the tasks the one that does best on the other half.

  So no task has a say in what is measured on it (two-fold cross-validation). Of equals the first is
  taken. The entry is the first candidate's.
  """
  values_CxN = np.array([sample.mean_N(metric) for sample in candidates])
  half_N = halves(values_CxN.shape[1])
  sum_CxH = np.stack([values_CxN[:, half_N == half].sum(axis=1) for half in (0, 1)], axis=1)
  best_H = sum_CxH.round(9).argmax(axis=0)  # sums of floats differ by a hair where they tie
  trials = {
    task: candidates[best_H[1 - half]].trials[task]
    for task, half in zip(candidates[0].trials, half_N)
  }
  return Sample(candidates[0].entry, trials)


def halves(tasks: int) -> np.ndarray:
  """0 or 1 for each of so many tasks, drawn: their order may go through their types in turn."""
  return np.random.default_rng(0).permutation(tasks) % 2


def area(
  samples: Sequence[Sample], indices: Sequence[int], metric: str, resamples: int
) -> dict | None:
  """`frontier.area` of some policies with its interval; None where the boundaries have no area."""
  own, ends = _columns(samples, indices, metric), _columns(boundaries(samples), (0, 1), metric)
  value = _area(own, ends)
  if value is None:
    return None
  small, large = zip(*ends)
  interval = frontier.area_interval(*own, small, large, resamples)
  return {"value": value, "interval": list(interval) if np.isfinite(interval).all() else None}


def area_gain(
  samples: Sequence[Sample],
  indices: Sequence[int],
  others: Sequence[int],
  metric: str,
  resamples: int,
) -> dict | None:
  """Area of some policies minus that of others, the interval over the same resamples of tasks."""
  own, other = (_columns(samples, group, metric) for group in (indices, others))
  ends = _columns(boundaries(samples), (0, 1), metric)
  if _area(own, ends) is None:
    return None
  gains = []
  for picks_N in frontier.resample(ends[0].shape[1], resamples):
    areas = [_area(points, ends, picks_N) for points in (own, other)]
    if None not in areas:
      gains.append(areas[0] - areas[1])
  value = _area(own, ends) - _area(other, ends)
  return {"value": value, "interval": _interval(np.array(gains), resamples)}


def _columns(
  samples: Sequence[Sample], indices: Sequence[int], metric: str
) -> tuple[np.ndarray, np.ndarray]:
  """cost_PxN and score_PxN."""
  names = ("cost_usd", metric)
  return tuple(np.array([samples[i].mean_N(name) for i in indices]) for name in names)


def _area(points: tuple, ends: tuple, picks_N: slice | np.ndarray = slice(None)) -> float | None:
  """`frontier.area` over some tasks; None unless LARGE is both dearer and better on them."""
  (small_usd, large_usd), (small, large) = (v_PxN[:, picks_N].mean(axis=1) for v_PxN in ends)
  if large_usd <= small_usd or large <= small:
    return None
  cost_P, score_P = (v_PxN[:, picks_N].mean(axis=1) for v_PxN in points)
  return frontier.area(cost_P, score_P, (small_usd, small), (large_usd, large))


def _interval(values: np.ndarray, resamples: int) -> list[float] | None:
  """The middle of the usable resamples; None if too few are usable."""
  if len(values) < frontier.MIN_USABLE_SHARE * resamples:
    return None
  return list(frontier.percentiles(values))
