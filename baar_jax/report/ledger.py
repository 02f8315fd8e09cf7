"""The ledger: what a run's model calls and routing have cost, part by part."""

from collections.abc import Iterable

from baar_jax.episode import SMALL, Episode
from baar_jax.llms.calls import Spent

PARTS = ("small_usd", "large_usd", "proposals_usd", "judge_usd", "retries_usd", "router_usd")


def episode_parts(episode: Episode) -> dict[str, float]:
  """Dollars of an episode by part.

  Of two models or more, all but SMALL are "large". Proposals are those of a cascade's SMALL that
  were not taken; the judge is the model that a zero-shot router asks.
  """
  steps = episode.steps
  return {
    "small_usd": sum(step.cost_usd for step in steps if step.model == SMALL),
    "large_usd": sum(step.cost_usd for step in steps if step.model != SMALL),
    "proposals_usd": sum(step.proposal_usd for step in steps),
    "judge_usd": sum(step.judge_usd for step in steps),
    "retries_usd": sum(step.retry_usd for step in steps) + episode.lost_usd,
    "router_usd": sum(step.router_cost_usd for step in steps),
  }


def run_ledger(episodes: Iterable[Episode], spent: Spent | None, models: int) -> dict[str, float]:
  """Dollars of a run by part, and their sum.

  Episodes that another policy's stand for are left out, as nothing was run for them.

  Args:
    episodes: all of the run's.
    spent: on API models, by their own books, which also know of calls whose episode was lost and
      count a replayed reply once: `replies_usd` of SMALL, its proposals among them, of LARGE, and
      of the judge where there is one. None is for scripted models, whose calls are the episodes'.
    models: how many there are to route between; in the books the judge comes after them.

  Returns:
    PARTS, total_usd, presumed_usd (what may have been billed beyond it, at most) and replayed_usd
    (what the models' replies, proposals among them, would have cost again had they not been
    recorded; a judge's are not in it, as episodes do not say which of those were).
  """
  ledger = dict.fromkeys(PARTS, 0.0)
  presumed = replayed = proposed = 0.0
  for episode in episodes:
    if episode.reused:
      continue
    for part, usd in episode_parts(episode).items():
      ledger[part] += usd
    presumed += sum(step.presumed_usd for step in episode.steps)
    for step in episode.steps:
      replayed += step.cost_usd * step.replayed + step.proposal_usd * step.proposal_replayed
      proposed += step.proposal_usd * (not step.proposal_replayed)
  if spent is not None:
    ledger["proposals_usd"], ledger["judge_usd"] = proposed, sum(spent.replies_usd[models:])
    ledger["small_usd"] = spent.replies_usd[SMALL] - proposed
    ledger["large_usd"] = sum(spent.replies_usd[1:models])
    ledger["retries_usd"], presumed = spent.retries_usd, spent.presumed_usd
  total = sum(ledger.values())
  return ledger | {"total_usd": total, "presumed_usd": presumed, "replayed_usd": replayed}
