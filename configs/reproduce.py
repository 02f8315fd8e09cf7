"""Every method and ablation of the paper beside BoPO, keyless on a CPU: in ScienceWorld, or with
:alfworld, :appworld or :sandbox there."""

from baar_jax import config
from configs import alfworld, appworld, quickstart, sandbox

LAM = {"": (0.5, 0.7, 0.9), "alfworld": (0.1, 0.3, 0.5), "appworld": (0.1, 0.3), "sandbox": (0.3,)}
ABLATED = {"": 0.7, "alfworld": 0.3, "appworld": 0.1, "sandbox": 0.3}


def get_config(setting: str = "") -> config.Config:
  settings = {"": quickstart, "alfworld": alfworld, "appworld": appworld, "sandbox": sandbox}
  if setting not in settings:
    raise ValueError(f"no setting {setting!r}: use one of {', '.join(filter(None, settings))}")
  c = settings[setting].get_config()
  c.name = f"reproduce-{setting}" if setting else "reproduce"
  c.bopo.lam = LAM[setting]
  c.profile.robustness = (3, 10)
  c.baselines = config.BaselinesConfig(
    rivals=config.RIVALS,
    ablations=tuple(config.ABLATIONS),
    compared_lam=ABLATED[setting],
    updates=24,
  )
  # All routers get the same points: argmax, and thresholds that training tasks have set.
  c.evaluate.thresholds, c.evaluate.shares = (), (0.2, 0.4, 0.6, 0.8)
  c.evaluate.random_p = (0.25, 0.5, 0.75)
  c.evaluate.budget_rules = True
  return c
