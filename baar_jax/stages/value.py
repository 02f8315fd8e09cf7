"""Stage value: heads that know the budget and the price of a dollar, fitted to what is stored."""

from baar_jax.run import Run
from baar_jax.train.values import fit_values


def main(run: Run) -> None:
  if run.config.value.updates == 0:
    return
  run.require("references")
  for trained in run.trainings():
    fit_values(trained)
