"""Plan the sessions that a run still needs, to train a router and to judge it.

Every task is played by both boundary policies, a training task also by random mixes, a
validation task by the trained router with each cost weight, and a held-out test by the
router with the default one. So a task is played at most a few times, and the router is
compared with always-LARGE task by task.
"""

import collections
import random
from typing import NamedTuple

from baar_jax.conditioned.policy import ConditionedSpec
from baar_jax.config import Config
from baar_jax.episode import Task
from baar_jax.families.conditioned import HEADS, load_default
from baar_jax.families.table import FAMILIES
from baar_jax.llms.history import hash_text
from baar_jax.rollout.jobs import CONDITIONED
from baar_jax.run import Run
from baar_serve.desk import SelectedPolicy
from baar_serve.episodes import client_specs, name_task
from baar_serve.request import ROUTER

# The random mixes that a training task is played by, and how many (our choice).
MIX = SelectedPolicy("stratified")
MIXES = 2


class Need(NamedTuple):
  """A session that a run still needs.

  Attributes:
    selected: the policy that is to decide.
    trial: the number of earlier sessions of the task and the policy.
  """

  task: Task
  selected: SelectedPolicy
  trial: int

  @property
  def session(self) -> str:
    """Return the session's name, which is the same after a restart."""
    rule, weight = self.selected
    return f"{rule}-{weight}-{hash_text(self.task.id)[:12]}-{self.trial}"


def list_needs(run: Run, split: str) -> list[Need]:
  """List the next missing session of each task of a split and each policy.

  The run's stored sessions are the only state. Once the router is trained, training
  tasks need nothing more.
  """
  specs = client_specs(run.config)
  wanted = {SelectedPolicy(rule): specs[rule] for rule in ("small", "large")}
  if split == "train":
    if has_router(run):
      return []
    wanted[MIX] = specs[MIX.rule]
  elif has_router(run):
    for spec in list_router_specs(run.config):
      if split == "dev" or spec.cost_weight == load_default(run.files()):
        wanted[SelectedPolicy(ROUTER, spec.cost_weight)] = spec
  needs = []
  for selected, spec in wanted.items():
    played = collections.Counter(task_id for task_id, *_ in run.store.keys(spec.key))
    for task in run.store.tasks(split):
      trial = played[task.id]
      if trial < (MIXES if selected == MIX else 1):
        needs.append(Need(task, selected, trial))
  return needs


def assign(run: Run, task_id: str) -> SelectedPolicy:
  """Draw the policy for a new session from those that its task still needs.

  A task that needs nothing gets a random mix.

  Args:
    task_id: the name of the task; a new name becomes a new task.
  """
  task = name_task(run.store, task_id, "", run.config.env.max_steps)
  needs = list_needs(run, task.split)
  options = [need.selected for need in needs if need.task.id == task_id]
  return random.choice(options or [MIX])


def has_router(run: Run) -> bool:
  """Tell whether a run has a trained router."""
  return (run.files().checkpoints("value") / HEADS).exists()


def list_router_specs(config: Config) -> list[ConditionedSpec]:
  """Return the router's policies without a cap, one for each cost weight."""
  return [spec for spec in FAMILIES[CONDITIONED].points(config) if not spec.cap]
