"""Stage baselines: trains the rivals of BoPO and its ablations, from what the run has stored."""

from baar_jax.config import compared_lam
from baar_jax.run import UNSTRATIFIED, Run
from baar_jax.stages import bopo, cascade, sft, single_turn, vanilla

TRAIN = {"cascade": cascade.main, "single-turn": single_turn.main, "vanilla": vanilla.main}


def main(run: Run) -> None:
  config = run.config.baselines
  if config.rivals or config.ablations:
    sft.load_sft(run)  # what is not trained yet is said before anything is run
  for rival in config.rivals:
    if rival in TRAIN:
      TRAIN[rival](run)
  for ablation in config.ablations:
    other = run.ablated(ablation)
    if ablation == UNSTRATIFIED:
      sft.main(other)
    bopo.train(other, compared_lam(run.config))
