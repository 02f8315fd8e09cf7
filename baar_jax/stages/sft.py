"""Stage sft: the router imitates the decisions of the references (paper: BoSFT)."""

from baar_jax.run import Run
from baar_jax.train.fit import fit_sft


def main(run: Run) -> None:
  run.require("references")
  for trained in run.trainings():
    fit_sft(trained)
