"""metrics.jsonl -> training curves, a scorer's calibration, and how each method was trained."""

from collections.abc import Iterable, Mapping

import numpy as np

CURVE_STAGES = ("sft", "bopo", "vanilla", "cascade", "single-turn")


def training(metrics: Iterable[Mapping]) -> list[dict]:
  """Curves by stage, ablation and lam. A resumed run repeats updates: the later line wins."""
  curves: dict[tuple, dict[int, Mapping]] = {}
  for line in metrics:
    if line.get("stage") in CURVE_STAGES and "update" in line:
      kind = line["stage"], line.get("ablation"), line.get("lam")
      curves.setdefault(kind, {})[line["update"]] = line
  series = []
  for (stage, ablation, lam), by_update in curves.items():
    lines = [by_update[update] for update in sorted(by_update)]
    names = dict.fromkeys(name for line in lines for name in line)
    values = {
      name: [_number(line.get(name)) for line in lines]
      for name in names
      if name not in ("stage", "ablation", "lam", "update")
    }
    updates = [line["update"] for line in lines]
    kind = {"stage": stage, "ablation": ablation, "lam": lam}
    series.append({**kind, "update": updates, "values": values})
  return series


def calibration(metrics: Iterable[Mapping]) -> dict | None:
  """The last calibration of the cascade's scorer; None if none was noted.

  Returns:
    brier, base_rate (the Brier score of always saying it is base_rate * (1 - base_rate)), and
    bins of predicted (mean probability of failure), observed (rate of it) and count.
  """
  noted = [line for line in metrics if line.get("stage") == "cascade-calibration"]
  if not noted:
    return None
  return {name: noted[-1][name] for name in ("brier", "base_rate", "bins")}


def methods(metrics: Iterable[Mapping]) -> list[dict]:
  """How each family was trained and set, as its stage noted it; the latest note of one wins."""
  noted = {line["family"]: line for line in metrics if line.get("stage") == "method"}
  names = ("family", "training_episodes", "settings", "chosen")
  return [{name: line.get(name) for name in names} for line in noted.values()]


def _number(value) -> float | None:
  """A curve's value; None where a line has none that JSON can hold."""
  return float(value) if isinstance(value, int | float) and np.isfinite(value) else None
