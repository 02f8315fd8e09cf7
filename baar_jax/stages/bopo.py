"""Stage bopo: the router improves on its own episodes, anchored to the boundaries (paper: BoPO)."""

from baar_jax.run import Run
from baar_jax.train.fit import fit_rollouts


def main(run: Run) -> None:
  run.require("references")
  for trained in run.trainings():
    for lam in run.config.bopo.lam:
      fit_rollouts(trained, "bopo", lam)
