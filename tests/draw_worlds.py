"""Draw the frontiers of two runs side by side.

PYTHONPATH=. python tests/draw_worlds.py FILE.png RUN TITLE RUN TITLE

Each panel has a line per family, from always-SMALL through the policies of the family's
hull on dev to always-LARGE. All points are means over test tasks.
"""

import json
import sys
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baar_jax.train.families import FAMILIES
from baar_jax.train.jobs import BOUNDARY_KEYS

METRIC = "score_percent"
DRAWN = ("first-large", "conditioned", "sft", "bopo")


def draw(axes: Axes, run: str, title: str) -> None:
  """Draw the frontiers of one run."""
  results = json.loads((Path(run) / "report" / "results.json").read_text())
  policies = pd.DataFrame(results["policies"]).set_index("policy")
  small, large = BOUNDARY_KEYS
  ends = policies.loc[[small, large]]
  axes.plot(ends.cost_usd, ends[METRIC], "X--", color="#848b96")
  for row in results["frontiers"]:
    if row["metric"] == METRIC and row["family"] in DRAWN:
      line = policies.loc[[small, *row["policies"], large]]
      style = FAMILIES[row["family"]]
      look = {"color": style.color, "marker": style.marker, "label": style.label}
      axes.plot(line.cost_usd, line[METRIC], **look)
  axes.set(title=title, xlabel="dollars per task", xlim=(0, None))
  axes.locator_params(axis="x", nbins=5)


def main(file: str, *panels: str) -> None:
  """Draw a panel for each pair of a run's directory and a title."""
  figure = Figure(figsize=(9.0, 4.4), layout="constrained")
  axes = figure.subplots(1, len(panels) // 2, sharey=True, squeeze=False)[0]
  for ax, run, title in zip(axes, panels[::2], panels[1::2], strict=True):
    draw(ax, run, title)
  axes[0].set_ylabel("SR, %")
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside upper center", ncols=4)
  figure.savefig(file, dpi=110)


if __name__ == "__main__":
  main(*sys.argv[1:])
