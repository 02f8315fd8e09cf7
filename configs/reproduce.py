"""Every method and ablation of the paper beside BoPO, in the real ScienceWorld, on a CPU."""

from baar_jax import config
from configs import quickstart


def get_config() -> config.Config:
  c = quickstart.get_config()
  c.name = "reproduce"
  c.bopo.lam = (0.5, 0.7, 0.9)
  c.profile.robustness = (3, 10)
  c.baselines = config.BaselinesConfig(
    rivals=config.RIVALS, ablations=tuple(config.ABLATIONS), ablation_lam=0.7
  )
  # All methods get the same points: argmax, and thresholds that training tasks have set.
  c.evaluate = config.EvaluateConfig(
    random_p=(0.25, 0.5, 0.75), shares=(0.2, 0.4, 0.6), budget_rules=True
  )
  return c
