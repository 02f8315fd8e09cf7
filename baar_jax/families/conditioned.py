"""Train and open the budget-conditioned router, and store its value heads (ours)."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from baar_jax.conditioned.fit import fit_heads, make_transitions
from baar_jax.conditioned.heads import Heads, draw_heads
from baar_jax.conditioned.policy import (
  ConditionedPolicy,
  ConditionedSpec,
)
from baar_jax.config import Config
from baar_jax.episode import Episode
from baar_jax.families.family import Family, cap_each
from baar_jax.learn.checkpoint import open_arrays, save_arrays
from baar_jax.llms.prices import open_billing
from baar_jax.mesh import exchange
from baar_jax.paper.references import mean_large_usd, profile_tasks
from baar_jax.router.inputs import Trackers, follow_episodes, read_states
from baar_jax.run import RouterFiles, Run, load_value_episodes, load_vocabulary
from baar_jax.store import Store

HEADS = "value_heads.npz"  # The name of the file with the value heads.
DEFAULT = "default.npz"  # The name of the file with the default cost weight.
# Each of the two networks has three layers of weights and a bias.
LAYOUT = jax.tree.structure(Heads(value=[(0, 0)] * 3, advantage=[(0, 0)] * 3))
# Loads stored episodes of a configuration.
Load = Callable[[Store, Config], list[Episode]]


class Conditioned(Family):
  """The budget-conditioned router."""

  stage = "value"

  def points(self, config: Config) -> Iterator[ConditionedSpec]:
    """Yield a policy for each cost weight, if the router is trained.

    Under each cap there is a cap-conditioned and a cap-blind policy for each cost
    weight.
    """
    settings = config.value
    if settings.updates == 0:
      return
    for weight in settings.cost_weights:
      yield self._name(config, weight)
    for weight in settings.capped_cost_weights:
      variants = [self._name(config, weight, reads) for reads in (True, False)]
      yield from cap_each(config, variants)

  def _name(
    self, config: Config, cost_weight: float, reads_cap: bool = True
  ) -> ConditionedSpec:
    """Name a policy of the router without a cap."""
    seeds = config.train_seeds if config.train_seeds > 1 else None
    updates = config.value.updates
    return ConditionedSpec(
      self.name, updates, seeds, cost_weight, cap_conditioned=reads_cap
    )

  def open(self, spec: ConditionedSpec, files: RouterFiles) -> ConditionedPolicy:
    """Load the value heads."""
    config = files.config
    return ConditionedPolicy(
      spec,
      Trackers(load_vocabulary(files)),
      load_heads(files),
      open_billing(config.models),
      config.value.cost_weights,
    )

  def train(self, run: Run, load: Load = load_value_episodes) -> None:
    """Fit the value heads with each training seed.

    Args:
      run: the run.
      load: loads the episodes of training tasks to learn from.

    Raises:
      ValueError: a loss is not finite.
    """
    config = run.config.value
    tasks = {task.id: task for task in run.store.tasks("train")}
    models = len(run.config.models.names)
    for files in run.all_files():
      # All processes must agree: either all of them fit the heads, or none does.
      if all(exchange((files.checkpoints("value") / HEADS).exists())):
        continue
      episodes = load(run.store, run.config)
      unit_usd = mean_large_usd(profile_tasks(tasks, episodes).values())
      trackers = follow_episodes(load_vocabulary(files), tasks, episodes)
      states = read_states(trackers)
      data = make_transitions(states, episodes, unit_usd)
      features = states.features_NxD.shape[1]
      seed = files.seed
      heads = draw_heads(
        jax.random.key(seed), config.heads, config.widths, models, features
      )
      with run.progress("value", config.updates, 0, "update") as bar:
        for done, fitted, loss in fit_heads(heads, data, config, seed):
          run.log(files, "value", done, {"loss": loss})
          bar.update(done - bar.n)
          heads = fitted
      if run.is_main:
        save_heads(files, heads)
      exchange(None)  # Wait until the main process has written the file.


def save_heads(files: RouterFiles, heads: Heads) -> None:
  """Write the value heads of a training."""
  path = files.checkpoints("value") / HEADS
  save_arrays(path, *map(np.asarray, jax.tree.leaves(heads)))


def load_heads(files: RouterFiles) -> Heads:
  """Load the value heads of a training.

  Raises:
    ValueError: the file is missing or damaged.
  """
  with open_arrays(files.checkpoints("value") / HEADS, "value") as leaves:
    return jax.tree.unflatten(LAYOUT, leaves)


def save_default(files: RouterFiles, cost_weight: float) -> None:
  """Write the cost weight that the budget-conditioned router uses by default.

  The file is beside the value heads, and has one number (float64) as NumPy stores it.
  """
  path = files.checkpoints("value") / DEFAULT
  save_arrays(path, np.array(cost_weight))


def load_default(files: RouterFiles) -> float:
  """Load the default cost weight; without the file it is the smallest one.

  Raises:
    ValueError: the file is damaged.
  """
  path = files.checkpoints("value") / DEFAULT
  if not path.exists():
    return min(files.config.value.cost_weights)
  with open_arrays(path, "evaluate") as arrays:
    return float(np.array(*arrays))
