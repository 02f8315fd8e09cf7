"""Play policies on dev tasks, on one tree of decisions per task.

Usage: PYTHONPATH=. python tools/dev_rollouts.py RUN... [--dev_tasks=N] [--test_tasks=N]
[--part=I/N]

The runs need the stages up to `value`, the same environment and scripted models. An
environment is deterministic. So a step that one policy has taken is looked up when
another policy takes it, in the same task and after the same actions. The episodes are
stored in each run, as the stage evaluate would store them. `tests/dev_table.py`
compares them.

The dev tasks of the runs become the first `dev_tasks` of dev and the first `test_tasks`
of test. Use only test tasks that older tables have already shown. Several processes may
each play a part of the tasks at the same time.
"""

import dataclasses
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from baar_jax.config import ZERO_SHOT, Config
from baar_jax.envs import table
from baar_jax.envs.base import Env, Oracle
from baar_jax.envs.process import open_envs
from baar_jax.episode import Task
from baar_jax.mesh import one_device
from baar_jax.rollout.loop import Pair, run_episodes
from baar_jax.rollout.rules import Policy
from baar_jax.run import env_arguments, open_pair
from baar_jax.store import Store, read_run
from baar_jax.train.checkpoint import RouterFiles
from baar_jax.train.families import FAMILIES, Loader, list_specs
from baar_jax.train.jobs import BOUNDARIES, CONDITIONED, list_evaluation

DEV_TASKS = flags.DEFINE_integer("dev_tasks", 0, "Number of tasks from dev.")
TEST_TASKS = flags.DEFINE_integer("test_tasks", 0, "Number of tasks from test.")
PART = flags.DEFINE_string("part", "0/1", "Part I of N of the tasks to play.")


@dataclasses.dataclass(eq=False)
class State:
  """A state of the environment, reached by one sequence of actions.

  Attributes:
    observation: the observation in this state.
    done: whether the episode has ended.
    score: the score in this state.
    actions: the actions since the reset.
    children: the state after each action that was taken here.
    oracle: the expert's next action here; None until it is asked for.
    mistakes: the wrong actions here, by (kind, key).
  """

  observation: str
  done: bool
  score: float
  actions: list[str]
  children: dict[str, "State"] = dataclasses.field(default_factory=dict)
  oracle: Oracle | None = None
  mistakes: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)


class TreeEnv:
  """Remember all states of one task that any episode has reached."""

  def __init__(self, env: Env):
    """Wrap an environment, which this object alone may use from now on."""
    self._env = env
    self._task_id = ""
    self.system_prompt = env.system_prompt
    self.code_actions = env.code_actions
    self.scores_steps = env.scores_steps

  def reset(self, task_id: str) -> str:
    """Start a task from its beginning; another task's tree is forgotten."""
    if task_id != self._task_id:
      observation = self._env.reset(task_id)
      self._task_id = task_id
      self._root = self._real = State(observation, False, self._env.score(), [])
    self._node = self._root
    return self._node.observation

  def step(self, action: str) -> tuple[str, bool]:
    """Execute an action, or look up its result."""
    children = self._node.children
    if action not in children:
      self._catch_up()
      observation, done = self._env.step(action)
      actions = [*self._node.actions, action]
      children[action] = State(observation, done, self._env.score(), actions)
      self._real = children[action]
    self._node = children[action]
    return self._node.observation, self._node.done

  def score(self) -> float:
    """Return the score of the current state."""
    return self._node.score

  def oracle(self) -> Oracle:
    """Return the expert's next action."""
    if self._node.oracle is None:
      self._catch_up()
      self._node.oracle = self._env.oracle()
    return self._node.oracle

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong action in place of the expert's."""
    mistakes = self._node.mistakes
    if (kind, key) not in mistakes:
      self._catch_up()
      mistakes[kind, key] = self._env.mistake(kind, key)
    return mistakes[kind, key]

  def close(self) -> None:
    """Close the environment."""
    self._env.close()

  def _catch_up(self) -> None:
    """Bring the environment to the current state, by a reset if it is elsewhere."""
    done = self._real.actions
    wanted = self._node.actions
    if wanted[: len(done)] != done:
      self._env.reset(self._task_id)
      done = []
    for action in wanted[len(done) :]:
      self._env.step(action)
    self._real = self._node


@dataclasses.dataclass
class Player:
  """The policies of a run, with its models and its store.

  Attributes:
    policies: the policy of each training seed, by the policy's key.
  """

  config: Config
  pair: Pair
  store: Store
  policies: dict[str, list[Policy]]

  def play(self, tree: TreeEnv, task: Task) -> None:
    """Play and store the episodes of a task that are not stored yet."""
    episodes = []
    for key, policies in self.policies.items():
      stored = self.store.keys(key)
      for number, policy in enumerate(policies):
        jobs = list_evaluation(self.config, [task], "dev", number)
        missing = [job for job in jobs if job.key not in stored]
        episodes += run_episodes(missing, policy, self.pair, [tree])
    self.store.add(*episodes)


def open_player(directory: Path, is_first: bool) -> Player:
  """Open a run, with its policies on value heads and, in the first run, its rules."""
  config = read_run(directory)
  store = Store(directory / "episodes.sqlite")
  pair = open_pair(config, directory / "episodes.sqlite")
  loaders = []
  for number in range(config.train_seeds):
    seeded = dataclasses.replace(config, seed=config.seed + number)
    files = RouterFiles(directory, seeded, one_device(), number)
    loaders.append(Loader(files, 1, pair, store))
  policies = {}
  for spec in list_specs(config):
    family = FAMILIES[spec.family]
    is_rule = is_first and not family.stage and spec.family != ZERO_SHOT
    if spec in BOUNDARIES or spec.family == CONDITIONED or is_rule:
      policies[spec.key] = [loader.build(spec) for loader in loaders]
  return Player(config, pair, store, policies)


def main(argv: list[str]) -> None:
  """Play all policies of all runs on the tasks of this part."""
  directories = [Path(name) for name in argv[1:]]
  players = [open_player(path, path == directories[0]) for path in directories]
  first = players[0]
  arguments = env_arguments(first.config)
  tasks = first.store.tasks("dev")
  kind = first.config.env.kind
  is_new = DEV_TASKS.value and len(tasks) != DEV_TASKS.value + TEST_TASKS.value
  if is_new:
    arguments |= {"dev_tasks": DEV_TASKS.value, "test_tasks": TEST_TASKS.value}
  if table.load(kind).needs_process:
    [env] = open_envs(kind, arguments, 1, 1, first.config.env.timeout_s)
  else:
    env = table.make(kind, **arguments)
  if is_new:
    tasks = env.tasks("dev") + (env.tasks("test") if TEST_TASKS.value else [])
  for player in players:
    player.store.put_tasks("dev", tasks)
  tree = TreeEnv(env)
  part, parts = map(int, PART.value.split("/"))
  try:
    for task in tqdm(tasks[part::parts]):
      for player in players:
        player.play(tree, task)
  finally:
    tree.close()


if __name__ == "__main__":
  app.run(main)
