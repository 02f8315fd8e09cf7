"""Configure every method and ablation of the paper, without a key, on a CPU.

The models are two real ones, whose replies are recorded; :ablations are theirs, with
three training seeds instead of ten. :sciworld, :alfworld and :appworld have scripted
models. --config.models.prompt_cache=False bills the calls without prompt caches, as the
paper does.
"""

import dataclasses

from baar_jax import config
from configs import alfworld, appworld, code, quickstart, sciworld

# By setting: the configuration that it extends.
SETTINGS = {
  "": code,
  "ablations": code,
  "sciworld": quickstart,
  "alfworld": alfworld,
  "appworld": appworld,
}


def get_config(setting: str = "") -> config.Config:
  """Return the configuration that trains and evaluates all methods.

  Args:
    setting: "sciworld", "alfworld" or "appworld"; "" and "ablations" are
      configs/code.py.
  """
  config.check_setting(setting, *filter(None, SETTINGS))
  c = SETTINGS[setting].get_config()
  c.name = f"reproduce-{setting}" if setting else "reproduce"
  c.train_seeds = c.evaluate.seeds = 3
  c.bopo.updates = 100
  c.profile = config.ProfileConfig(robustness=(3, 10))
  c.references.samples = config.ReferencesConfig().samples
  c.value.cost_weights = config.ValueConfig().cost_weights
  if setting == "appworld":
    c.references.plans += (config.SamplePlan("steps", 20),)
  c.baselines = dataclasses.replace(
    c.baselines, rivals=sciworld.RIVALS, ablations=sciworld.ABLATIONS
  )
  # Every router is evaluated with the same rules: the more probable model acts, or
  # LARGE acts at one of these shares of the stored training decisions.
  c.evaluate.thresholds = ()
  c.evaluate.shares = (0.15, 0.3, 0.45, 0.6)
  c.evaluate.random_p = (0.5,)
  if SETTINGS[setting] is code:
    # Each training seed plays three trials of a ticket, which draw all recorded ones.
    c.train_seeds = 10
    c.evaluate.seeds = 30
    c.profile.robustness = ()  # New trials would draw the same recorded ones.
    c.bopo.updates = 200
    # A recording has no replies of a judge, so the zero-shot router is left out.
    c.baselines.rivals = ("escalate", *sciworld.RIVALS[1:])
    c.baselines.ablations = ()
  if setting == "ablations":
    c.train_seeds = 3
    c.evaluate.seeds = 9
    c.evaluate.call_budgets = ()  # Ablations are compared without a cap.
    c.baselines.rivals = ()
    c.baselines.ablations = sciworld.ABLATIONS
  if setting in ("sciworld", "alfworld"):
    # An episode takes a tenth of a second of a core, so there are fewer of each kind:
    # many tasks with few samples of each, whose gain on dev is within its error.
    c.profile.robustness = (3,)
    c.bopo.updates = 50
    c.evaluate.shares = (0.3, 0.45, 0.6)
    c.env.train_tasks = 240
    c.env.dev_tasks = 60
    c.env.test_tasks = 100
  if setting == "alfworld":
    # The paper has its ablations in ScienceWorld.
    c.baselines.ablations = ()
    c.bopo.updates = 30
    samples, steps, repeats = c.references.plans
    c.references.plans = (
      samples._replace(count=8),
      steps._replace(count=4),
      repeats._replace(count=4),
    )
  if setting == "sciworld":
    # No published table has any of these 100 test tasks, nor has configs/quickstart.py.
    c.env.options["skip_test_variations"] = 72
    c.references = config.ReferencesConfig(samples=8)
  return c
