"""metrics.jsonl -> training curves and a scorer's calibration."""

from collections.abc import Collection, Iterable, Mapping

import numpy as np

CURVE_STAGES = ("sft", "bopo", "vanilla", "cascade", "single-turn")
ALWAYS = ("sft", "bopo")  # trained in every run
LABELS = ("stage", "ablation", "lam", "update", "updates")


def training(metrics: Iterable[Mapping], families: Collection[str]) -> list[dict]:
  """Curves by stage, ablation and lam, of what is evaluated.

  A resumed run repeats updates: the later line wins. Lines that say of how many updates their
  training is are kept for the last number of a curve alone: another number is another training.

  Args:
    metrics: lines of metrics.jsonl.
    families: that are evaluated; SFT and BoPO stay without.
  """
  curves: dict[tuple, dict[int, Mapping]] = {}
  for line in metrics:
    if line.get("stage") in CURVE_STAGES and "update" in line:
      kind = line["stage"], line.get("ablation"), line.get("lam")
      if (kind[1] or kind[0]) not in (*ALWAYS, *families):
        continue
      curve = curves.setdefault(kind, {})
      if curve and next(iter(curve.values())).get("updates") != line.get("updates"):
        curve.clear()
      curve[line["update"]] = line
  series = []
  for (stage, ablation, lam), by_update in curves.items():
    lines = [by_update[update] for update in sorted(by_update)]
    names = dict.fromkeys(name for line in lines for name in line)
    values = {
      name: [_number(line.get(name)) for line in lines] for name in names if name not in LABELS
    }
    updates = [line["update"] for line in lines]
    kind = {"stage": stage, "ablation": ablation, "lam": lam}
    series.append({**kind, "update": updates, "values": values})
  return series


def calibration(metrics: Iterable[Mapping], families: Collection[str]) -> dict | None:
  """The last calibration of the cascade's scorer; None if none was noted or no cascade evaluated.

  Returns:
    brier, base_rate (the Brier score of always saying it is base_rate * (1 - base_rate)), and
    bins of predicted (mean probability of failure), observed (rate of it) and count.
  """
  noted = [line for line in metrics if line.get("stage") == "cascade-calibration"]
  if not noted or "cascade" not in families:
    return None
  return {name: noted[-1][name] for name in ("brier", "base_rate", "bins")}


def _number(value) -> float | None:
  """A curve's value; None where a line has none that JSON can hold."""
  return float(value) if isinstance(value, int | float) and np.isfinite(value) else None
