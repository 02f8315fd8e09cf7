"""The ledger: what a run's model calls and routing have cost, part by part."""

import pandas

from baar_jax.episode import SMALL
from baar_jax.llms.calls import Spent

PARTS = ("small_usd", "large_usd", "proposals_usd", "judge_usd", "retries_usd", "router_usd")


def run_ledger(table: pandas.DataFrame, spent: Spent | None, models: int) -> dict[str, float]:
  """Dollars of a run by part, and their sum.

  Of two models or more, all but SMALL are "large". Proposals are those of a cascade's SMALL that
  were not taken; the judge is the model that a zero-shot router asks.

  Args:
    table: `Store.table` of all episodes. Those that equal another policy's do not count, as nothing
      was run for them.
    spent: on API models, the recorded calls, which also know of calls whose episode was lost and
      count a replayed reply once: `replies_usd` of SMALL, its proposals among them, of LARGE, and
      of the judge where there is one. None is for scripted models, whose calls are the episodes'.
    models: how many there are to route between; among the recorded calls the judge follows them.

  Returns:
    PARTS, total_usd, presumed_usd (what may have been billed beyond it, at most) and replayed_usd
    (what replayed acts and proposals would have cost again; a judge's replies are not in it).
  """
  columns = [*PARTS, "presumed_usd", "proposed_usd", "replayed_usd"]
  usd = table.loc[~table.reused, columns].sum()
  ledger = {part: float(usd[part]) for part in PARTS}
  presumed_usd = float(usd.presumed_usd)
  if spent is not None:
    ledger["proposals_usd"] = float(usd.proposed_usd)
    ledger["judge_usd"] = sum(spent.replies_usd[models:])
    ledger["small_usd"] = spent.replies_usd[SMALL] - ledger["proposals_usd"]
    ledger["large_usd"] = sum(spent.replies_usd[1:models])
    ledger["retries_usd"], presumed_usd = spent.retries_usd, spent.presumed_usd
  totals = {"total_usd": sum(ledger.values()), "presumed_usd": presumed_usd}
  return ledger | totals | {"replayed_usd": float(usd.replayed_usd)}
