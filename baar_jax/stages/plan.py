"""The dry run: which episodes a stage has still to run, and what their calls may cost."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from baar_jax.config import Config, compared_lam
from baar_jax.episode import SMALL, Episode, Usage
from baar_jax.llms import pair as models
from baar_jax.llms.prices import Price, prices_of
from baar_jax.rollout.entries import BOUNDARIES, entries, rollouts_name, stratified_name
from baar_jax.store import Store
from baar_jax.train.dataset import profile_tasks

# What is assumed where nothing is stored yet: least, expected, most.
STEPS_SHARE = (0.25, 0.6, 1.0)  # of env.max_steps
HARD_SHARE = (0.2, 0.4, 0.6)  # of the training tasks
JUDGE_PROMPT_TOKENS = (300, 1000, 2500)  # of a zero-shot router's question
JUDGE_TOKENS = (1, 200)  # of its answer; at the most all that it may say
FIRST_PROMPT_TOKENS, STEP_TOKENS, REPLY_TOKENS = 1000, 150, 60
ASSUMED = (
  f"assumed where nothing is stored: {STEPS_SHARE[0]:.0%} to {STEPS_SHARE[2]:.0%} of env.max_steps "
  f"(expected {STEPS_SHARE[1]:.0%}), prompts of {FIRST_PROMPT_TOKENS:,} tokens that grow by "
  f"{STEP_TOKENS} a step (cached at the least, else not), replies of {REPLY_TOKENS} tokens, "
  f"{HARD_SHARE[0]:.0%} to {HARD_SHARE[2]:.0%} of the training tasks hard, a zero-shot router's "
  f"questions of {JUDGE_PROMPT_TOKENS[0]} to {JUDGE_PROMPT_TOKENS[2]:,} tokens and its answers of "
  f"{JUDGE_TOKENS[0]} to all that they may have (expected {JUDGE_TOKENS[1]})"
)
Range = tuple[float, float, float]  # least, expected, most


@dataclasses.dataclass(frozen=True)
class Missing:
  """Episodes of one policy that are still to be run.

  Attributes:
    model: of all calls; None where a policy chooses.
    episodes: how many.
    usd_budget: what each may cost at most; None is no cap.
    family: of the evaluation's line; some rivals ask more than one model for a step.
  """

  stage: str
  policy: str
  model: int | None
  episodes: Range
  usd_budget: float | None = None
  family: str = ""


def main(config: Config, stages: Sequence[str]) -> None:
  """Prints what the stages have still to run; opens no environment and asks no model."""
  prices = prices_of(config.models.names, config.models.prices)
  path = Path(config.runs) / config.name / "episodes.sqlite"
  store = Store(path if path.exists() else ":memory:")
  print("dry run: nothing is run, nothing is spent; calls of the models, list prices")
  print("episodes that stand for other policies' too and recorded replies make it less")
  print(f"{'stage':<12}{'episodes':>10}{'calls':>10}{'$ expected':>12}   $ range")
  total = [0.0] * 5
  assumed = False
  for stage in stages:
    row = [0.0] * 5  # episodes, calls, and dollars: least, expected, most
    for part in missing(config, store, stage):
      calls, usd, known = per_episode(config, store, prices, part)
      assumed |= not known and part.episodes[2] > 0
      row[0] += part.episodes[1]
      row[1] += part.episodes[1] * calls
      row[2:] = (have + n * each for have, n, each in zip(row[2:], part.episodes, usd))
    print(_line(stage, row))
    total = [have + more for have, more in zip(total, row)]
  print(_line("in all", total))
  if assumed:
    print(ASSUMED)
  if config.models.kind == "scripted":
    print("scripted models: these are list-price dollars for text, and nobody is paid")
  elif path.exists():
    spent = models.spent(path.parent, config.models.names)
    print(f"spent so far: at most ${spent.at_most_usd:.4f}")
  store.close()


def missing(config: Config, store: Store, stage: str) -> Iterator[Missing]:
  """What a stage has still to run. Stages that call no model have nothing."""
  tasks = [task.id for task in store.tasks("train")]
  count = len(tasks) or config.env.train_tasks
  if stage == "profile":
    trials = max(config.profile.trials, *config.profile.robustness, 0)
    for model, policy in enumerate(BOUNDARIES):
      stored = _stored(store, policy, tasks)
      yield Missing(stage, policy, model, _exactly(count * trials - stored))
  elif stage == "references" and not config.references.clone_large:
    samples = config.references.samples
    policy = stratified_name(config)
    stored = _stored(store, policy, tasks)
    hard = tuple(share * count for share in HARD_SHARE)
    if store.finished("profile"):
      hard = _exactly(_hard(config, store, tasks))
    yield Missing(stage, policy, None, tuple(max(0.0, n * samples - stored) for n in hard))
  elif stage == "bopo":
    for lam in config.bopo.lam:
      yield from _rollouts(config, store, stage, "bopo", lam, count)
  elif stage == "baselines":
    for lam in config.bopo.lam if "vanilla" in config.baselines.rivals else ():
      yield from _rollouts(config, store, stage, "vanilla", lam, count)
    for ablation in config.baselines.ablations:
      lam = compared_lam(config)
      yield from _rollouts(config, store, stage, ablation, lam, count)
  elif stage == "evaluate":
    tests, seeds = [task.id for task in store.tasks("test")], config.evaluate.seeds
    for entry in entries(config):
      wanted = (config.evaluate.tasks or len(tests) or config.env.test_tasks) * seeds
      model = BOUNDARIES.index(entry.family) if entry.family in BOUNDARIES else None
      left = _exactly(wanted - _stored(store, entry.policy, tests))
      yield Missing(stage, entry.policy, model, left, entry.usd_budget, entry.family)


def _rollouts(
  config: Config, store: Store, stage: str, family: str, lam: float, tasks: int
) -> Iterator[Missing]:
  """What one router that learns from its own episodes has still to run."""
  c = config.bopo
  each = min(c.tasks_per_update, tasks) * c.group_size
  for update in range(1, c.updates + 1):
    policy = rollouts_name(family, lam, update)
    yield Missing(stage, policy, None, _exactly(each - len(store.keys(policy))))


def per_episode(
  config: Config, store: Store, prices: Sequence[Price], part: Missing
) -> tuple[float, Range, bool]:
  """Calls and dollars of one of its episodes, and whether stored episodes say so.

  Those of the same policy do, else those of the boundary that always takes its model, or, of a
  policy that chooses, those of both: it lies between them.
  """
  calls, usd, known = _uncapped(config, store, prices, part)
  if not store.keys(part.policy):
    more = _asked_beside(config, prices, part.family, calls)
    usd = tuple(each + extra for each, extra in zip(usd, more))
  cap = math.inf if part.usd_budget is None else part.usd_budget
  return calls, tuple(min(each, cap) for each in usd), known


def _uncapped(
  config: Config, store: Store, prices: Sequence[Price], part: Missing
) -> tuple[float, Range, bool]:
  ends = [store.episodes(name) for name in BOUNDARIES]
  own = store.episodes(part.policy) or (ends[part.model] if part.model is not None else [])
  if own:
    return _steps(own), _usd(own), True
  if part.model is None and all(ends):
    (least, small, _), (_, large, most) = map(_usd, ends)
    return _steps(ends[0] + ends[1]), (min(least, large), (small + large) / 2, most), True
  small, large = (
    [_assumed_usd(price, share * config.env.max_steps, share) for share in STEPS_SHARE]
    for price in (prices[SMALL], prices[-1])
  )
  calls = STEPS_SHARE[1] * config.env.max_steps
  if part.model is not None:
    return calls, tuple(small if part.model == SMALL else large), False
  return calls, (small[0], (small[1] + large[1]) / 2, large[2]), False


def _asked_beside(
  config: Config, prices: Sequence[Price], family: str, calls: float
) -> Sequence[float]:
  """Assumed dollars of an episode beside those of the models that act."""
  if family == "cascade":  # what SMALL proposes and LARGE does instead; none at the least
    return 0.0, *(_assumed_usd(prices[SMALL], calls, share) / 2 for share in STEPS_SHARE[1:])
  if family != "zero-shot":
    return 0.0, 0.0, 0.0
  judge = config.baselines.judge
  price = prices_of(judge.names, judge.prices)[0]
  tokens = zip(JUDGE_PROMPT_TOKENS, (*JUDGE_TOKENS, judge.max_completion_tokens))
  return [calls * price.cost_usd(Usage(prompt, 0, said)) for prompt, said in tokens]


def _assumed_usd(price: Price, steps: float, share: float) -> float:
  prompt = steps * FIRST_PROMPT_TOKENS + STEP_TOKENS * steps * max(0.0, steps - 1) / 2
  cached = prompt - steps * STEP_TOKENS if share == STEPS_SHARE[0] else 0
  usage = Usage(round(prompt), max(0, round(cached)), round(steps * REPLY_TOKENS))
  return price.cost_usd(usage)


def _usd(episodes: Sequence[Episode]) -> Range:
  """Mean dollars of an episode between the ends that leave out the cheapest and dearest tenth."""
  usd = sorted(e.spent_usd for e in episodes)
  tenth = len(usd) // 10
  return usd[tenth], statistics.fmean(usd), usd[-1 - tenth]


def _steps(episodes: Sequence[Episode]) -> float:
  return statistics.fmean(len(e.steps) for e in episodes)


def _stored(store: Store, policy: str, tasks: Sequence[str]) -> int:
  wanted = set(tasks)
  return sum(task_id in wanted for task_id, _ in store.keys(policy))


def _hard(config: Config, store: Store, tasks: Sequence[str]) -> int:
  trials = config.profile.trials
  known = ([e for e in store.episodes(name) if e.seed < trials] for name in BOUNDARIES)
  profiles = profile_tasks(*known, config.profile.easy_rate)
  return sum(profiles[task].difficulty == "hard" for task in tasks if task in profiles)


def _exactly(count: float) -> Range:
  return (max(0.0, count),) * 3


def _line(stage: str, row: Sequence[float]) -> str:
  episodes, calls, least, expected, most = row
  return (
    f"{stage:<12}{episodes:>10,.0f}{calls:>10,.0f}{expected:>12.4f}   {least:.4f} to {most:.4f}"
  )
