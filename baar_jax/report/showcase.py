"""A few episodes of BoPO, chosen by a rule, with all their steps."""

from collections.abc import Mapping, Sequence

import numpy as np

from baar_jax.episode import SMALL, Episode
from baar_jax.report.samples import Sample, Trial, boundaries
from baar_jax.store import Store

RULE = (
  "the first tasks of the evaluation's order, at their first seed: two hard ones on which it "
  "succeeds and always-SMALL fails, a hard one on which it fails, an easy and an intractable one"
)
TEXT_LIMIT = 320  # characters of an action or an observation


def choose(
  tasks: Sequence[str], difficulty: Mapping[str, str], own: Mapping, small: Mapping
) -> list[tuple[str, str]]:
  """The tasks of RULE that there are, each with why it was chosen.

  Args:
    tasks: ids in order.
    difficulty: of each.
    own, small: per task, whether the router and always-SMALL succeeded at the first seed.
  """
  hard = [task for task in tasks if difficulty[task] == "hard"]
  won = [task for task in hard if own[task] and not small[task]][:2]
  lost = [task for task in hard if not own[task]][:1]
  chosen = [(task, "hard, solved where always SMALL fails") for task in won]
  chosen += [(task, "hard, not solved") for task in lost]
  for kind in ("easy", "intractable"):
    chosen += [(task, kind) for task in tasks if difficulty[task] == kind][:1]
  return chosen


def showcase(
  store: Store,
  policies: Sequence[dict],
  samples: Sequence[Sample],
  best: Mapping | None,
  difficulty: Mapping[str, str],
) -> dict | None:
  """The chosen episodes of the headline's policy, else of BoPO's first; None without one.

  Returns:
    policy, parameters, rule, and episodes: why, task_id, seed, description, score, stop, cost_usd,
    small_score (always-SMALL's) and steps (see `_steps`).
  """
  soft = [i for i, p in enumerate(policies) if p["call_budget"] is None and p["family"] == "bopo"]
  if not soft:
    return None
  index = best["index"] if best else soft[0]
  own, small = samples[index], boundaries(samples)[0]
  first = [{task: ts[0].success for task, ts in s.trials.items()} for s in (own, small)]
  chosen = choose(list(own.trials), difficulty, *first)
  described = {task.id: task.description for task in store.tasks("test")}
  wanted = dict(chosen)
  found: dict[str, Episode] = {}
  for episode in store.episodes(own.entry.policy):  # by task and seed
    if episode.task_id in wanted and Trial.of(episode) == own.trials[episode.task_id][0]:
      found.setdefault(episode.task_id, episode)
  return {
    "policy": own.entry.policy,
    "parameters": dict(own.entry.parameters),
    "rule": RULE,
    "episodes": [
      {
        "why": why,
        "task_id": task,
        "seed": found[task].seed,
        "description": _cut(described[task]),
        "score": found[task].score,
        "small_score": small.trials[task][0].score,
        "stop": found[task].stop,
        "cost_usd": found[task].cost_usd,
        "steps": _steps(found[task]),
      }
      for task, why in chosen
    ],
  }


def _steps(episode: Episode) -> list[dict]:
  """Per step: model, p_large (the router's probability of LARGE, of two models; None where it was
  not asked), observation and action (cut), and the dollars and LARGE calls up to its end."""
  steps, cost_usd, large_calls = [], 0.0, 0
  for step in episode.steps:
    cost_usd += step.cost_usd
    large_calls += step.model != SMALL
    p_large = None
    if step.logp is not None:
      p_large = float(np.exp(step.logp))
      p_large = 1 - p_large if step.model == SMALL else p_large
    steps.append(
      {
        "model": step.model,
        "p_large": p_large,
        "observation": _cut(step.observation),
        "action": _cut(step.action),
        "cost_usd": cost_usd,
        "large_calls": large_calls,
      }
    )
  return steps


def _cut(text: str) -> str:
  text = " ".join(text.split())
  return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT].rstrip() + " …"
