"""Every method and ablation of the paper beside BoPO, keyless on a CPU.

They run in ScienceWorld; :alfworld, :appworld or :sandbox is another environment.
"""

from baar_jax import config
from configs import alfworld, appworld, quickstart, sandbox, sciworld

# Each setting extends a configuration, and has its own bopo.lam and compared_lam.
SETTINGS = {
  "": (quickstart, (0.7,), 0.7),
  "alfworld": (alfworld, (0.1, 0.3, 0.5), 0.3),
  "appworld": (appworld, (0.1, 0.3), 0.1),
  "sandbox": (sandbox, (0.3,), 0.3),
}


def get_config(setting: str = "") -> config.Config:
  """Configure all methods in an environment; "" is ScienceWorld."""
  config.check_setting(setting, *filter(None, SETTINGS))
  module, lam, compared = SETTINGS[setting]
  c = module.get_config()
  c.name = f"reproduce-{setting}" if setting else "reproduce"
  c.train_seeds = c.evaluate.seeds = 3
  c.bopo.lam = lam
  c.profile.robustness = (3,)
  c.value.prices = config.ValueConfig().prices
  if setting != "alfworld":
    all_tasks = bool(c.references.plans)
    c.references.plans += (config.SamplePlan("steps", 20, all_tasks),)
  ablations = tuple(config.ABLATIONS)
  c.baselines = config.BaselinesConfig(sciworld.RIVALS, ablations, compared, updates=60)
  c.sft.learning_rates = (3e-3, 1e-2)
  if not setting:
    c.env.dev_tasks = 24
    c.env.test_tasks = 60
    c.evaluate.call_budgets = (3, 5, 10, 15)
  # All routers get the same points: argmax, and thresholds from training tasks.
  c.evaluate.thresholds = ()
  c.evaluate.shares = (0.3, 0.6)
  c.evaluate.random_p = (0.5,)
  c.evaluate.budget_rules = True
  return c
