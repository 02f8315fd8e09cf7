"""Play policies on dev tasks, on one tree of decisions per task and seed.

Usage: PYTHONPATH=. python tools/dev_rollouts.py RUN... [--dev_tasks=N] [--test_tasks=N]
[--part=I/N]

The runs need the stages up to `value`, the same environment and the same scripted
models. The tool plays the boundaries and the policies on value heads of each run, and
the rules of the first run. An episode depends on the task, the seed and the models that
act. So each sequence of models is played once for all policies of all runs. The
episodes are stored in each run, without the router's seconds and dollars.
`tests/dev_table.py` compares them. Policies with a cap on dollars are left out.

With `dev_tasks` the dev tasks of the runs become the first `dev_tasks` of dev and the
first `test_tasks` of test; without it they stay as they are. Use only test tasks that
older tables have already shown. Several processes may each play a part of the tasks at
the same time.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags
from tqdm import tqdm

from baar_jax.envs.base import Env
from baar_jax.envs.process import open_envs
from baar_jax.episode import SMALL, Episode
from baar_jax.mesh import one_device
from baar_jax.rollout.budget import CallBudget, DollarBudget
from baar_jax.rollout.loop import Pair, play_episode
from baar_jax.rollout.rules import Policy, PrivilegedPolicy, Purse
from baar_jax.rollout.specs import Decision, Job, Live, PolicySpec
from baar_jax.run import env_arguments, open_pair
from baar_jax.store import Store, read_run
from baar_jax.train.checkpoint import RouterFiles
from baar_jax.train.families import FAMILIES, Loader, list_specs
from baar_jax.train.jobs import BOUNDARIES, CONDITIONED, list_evaluation

DEV_TASKS = flags.DEFINE_integer("dev_tasks", 0, "Number of tasks from dev.")
TEST_TASKS = flags.DEFINE_integer("test_tasks", 0, "Number of tasks from test.")
PART = flags.DEFINE_string("part", "0/1", "Part I of N of the tasks to play.")


class Tree:
  """Play one trial of a task, once for each sequence of models."""

  def __init__(self, env: Env, pair: Pair, job: Job):
    """Set up a tree without episodes."""
    self._env = env
    self._pair = pair
    self._job = job
    # By the models that have acted: the live episode, or the record if it has ended.
    self._nodes: dict[tuple[int, ...], Live | Episode] = {}
    self._models: tuple[int, ...] | None = None  # those of the episode in `self._play`

  def visit(self, models: tuple[int, ...]) -> Live | Episode:
    """Return the episode in which these models have acted, one after another."""
    if models not in self._nodes:
      if self._models is None or self._models != models[:-1]:
        self._live = Live(self._job, models=len(self._pair.names))
        purse = Purse(CallBudget(None), DollarBudget(None))
        policy = Policy(PolicySpec("tree"))
        self._play = play_episode(self._live, self._env, self._pair, policy, purse)
        self._advance((), None)
      for count in range(len(self._models) + 1, len(models) + 1):
        self._advance(models[:count], Decision(models[count - 1]))
    return self._nodes[models]

  def _advance(self, models: tuple[int, ...], decision: Decision | None) -> None:
    """Play the current episode up to its next decision or its end."""
    self._models = models
    try:
      self._play.send(decision)
      node = dataclasses.replace(self._live, steps=[*self._live.steps])
    except StopIteration as end:
      node = end.value
      self._models = None
    self._nodes[models] = node


def play(tree: Tree, policy: Policy) -> Episode:
  """Return a policy's episode on a tree."""
  spec = policy.spec
  models = ()
  while isinstance(live := tree.visit(models), Live):
    model = SMALL
    if spec.cap.after(live.steps).calls != 0:
      [decision] = policy.choose([dataclasses.replace(live, cap=spec.cap)])
      model = decision.model
    models = (*models, model)
  policy.finish(tree.visit(()))
  return dataclasses.replace(live, policy=spec.key, call_budget=spec.cap.calls)


class Player(NamedTuple):
  """The policies of a run, with its store.

  Attributes:
    store: the store of the policies' episodes.
    trainings: the policies of each training seed.
  """

  store: Store
  trainings: Sequence[Sequence[Policy]]

  def play(self, tree: Tree, job: Job, number: int) -> None:
    """Play and store the episodes of a trial that are not stored yet.

    Args:
      tree: the tree of the trial.
      job: the trial.
      number: the training seed, from 0.
    """
    episodes = []
    for policy in self.trainings[number]:
      if job.key not in self.store.keys(policy.spec.key):
        episodes.append(play(tree, policy))
    self.store.add(*episodes)


def open_player(directory: Path, pair: Pair, has_rules: bool) -> Player:
  """Open a run's policies on value heads, and the boundaries.

  Args:
    directory: the run.
    pair: the models.
    has_rules: whether to open all rules.
  """
  config = read_run(directory)
  store = Store(directory / "episodes.sqlite")
  specs = []
  for spec in list_specs(config):
    family = FAMILIES[spec.family]
    is_rule = has_rules and not (family.stage or family.is_rival)
    is_played = spec in BOUNDARIES or spec.family == CONDITIONED or is_rule
    if is_played and spec.cap.usd is None:
      specs.append(spec)
  trainings = []
  for number in range(config.train_seeds):
    seeded = dataclasses.replace(config, seed=config.seed + number)
    files = RouterFiles(directory, seeded, one_device(), number)
    loader = Loader(files, 1, pair, store)
    policies = map(loader.build, specs)
    # The privileged rule does not wait for decisions, so a tree cannot play it.
    trainings.append([p for p in policies if not isinstance(p, PrivilegedPolicy)])
  return Player(store, trainings)


def main(argv: list[str]) -> None:
  """Play all policies of all runs on the tasks of this part."""
  directories = [Path(name) for name in argv[1:]]
  first = directories[0]
  config = read_run(first)
  pair = open_pair(config, first / "episodes.sqlite")
  players = [open_player(path, pair, path == first) for path in directories]
  tasks = players[0].store.tasks("dev")
  arguments = env_arguments(config)
  if DEV_TASKS.value:
    arguments |= {"dev_tasks": DEV_TASKS.value, "test_tasks": TEST_TASKS.value}
  [env] = open_envs(config.env.kind, arguments, 1, 1, config.env.timeout_s)
  if DEV_TASKS.value:
    tasks = env.tasks("dev")
    tasks += env.tasks("test") if TEST_TASKS.value else []
  for player in players:
    player.store.put_tasks("dev", tasks)
  part, parts = map(int, PART.value.split("/"))
  try:
    for task in tqdm(tasks[part::parts]):
      for number in range(config.train_seeds):
        for job in list_evaluation(config, [task], "dev", number):
          tree = Tree(env, pair, job)
          for player in players:
            player.play(tree, job, number)
  finally:
    env.close()


if __name__ == "__main__":
  app.run(main)
