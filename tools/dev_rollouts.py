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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags
from tqdm import tqdm

from baar_jax.config import Config
from baar_jax.envs import table
from baar_jax.envs.base import Env, Oracle
from baar_jax.envs.process import open_envs
from baar_jax.episode import SMALL, Episode, Step, Task
from baar_jax.mesh import one_device
from baar_jax.rollout.budget import CallBudget, DollarBudget
from baar_jax.rollout.loop import Pair, play_episode, run_episodes
from baar_jax.rollout.rules import Policy, Purse
from baar_jax.rollout.specs import Decision, Job, Live, PolicySpec
from baar_jax.router.head import States
from baar_jax.router.reader import StateReader
from baar_jax.run import env_arguments, open_pair
from baar_jax.store import Store, read_run
from baar_jax.train.checkpoint import RouterFiles
from baar_jax.train.families import FAMILIES, Loader, list_specs
from baar_jax.train.jobs import BOUNDARIES, CONDITIONED

DEV_TASKS = flags.DEFINE_integer("dev_tasks", 0, "Number of tasks from dev.")
TEST_TASKS = flags.DEFINE_integer("test_tasks", 0, "Number of tasks from test.")
# One episode is decided at a time, but the trials of a task keep their KV caches.
ROWS = 16
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


class Node(NamedTuple):
  """An episode after a sequence of decisions.

  Attributes:
    steps: the steps so far.
    observation: the newest observation.
    episode: the record of the episode; None before its end.
  """

  steps: list[Step]
  observation: str
  episode: Episode | None


class Game:
  """One trial of a task as a tree of decisions, which all policies share."""

  def __init__(self, env: TreeEnv, pair: Pair, job: Job):
    """Start without any decision."""
    self._env = env
    self._pair = pair
    self._job = job
    self._nodes: dict[tuple[int, ...], Node] = {}
    self._start()

  def play(self, policy: Policy) -> Episode:
    """Play an episode with a policy, and return its record."""
    spec = policy.spec
    models = ()
    node = self._nodes[models]
    while node.episode is None:
      live = Live(self._job, spec.cap, len(self._pair.names))
      live.steps = node.steps
      live.observation = node.observation
      model = SMALL
      if live.remaining_cap.calls is None or live.remaining_cap.calls > 0:
        [decision] = policy.choose([live])
        model = decision.model
      models = (*models, model)
      node = self._visit(models)
    return dataclasses.replace(
      node.episode, policy=spec.key, call_budget=spec.cap.calls
    )

  def _visit(self, models: tuple[int, ...]) -> Node:
    """Return the episode after these decisions; make the last one if it is new."""
    if models not in self._nodes:
      if self._models != models[:-1]:
        self._start()
        for model in models[:-1]:
          self._decide(model)
      self._decide(models[-1])
    return self._nodes[models]

  def _start(self) -> None:
    """Start the episode again, and play it to its first decision."""
    purse = Purse(CallBudget(None), DollarBudget(None))
    policy = Policy(PolicySpec("tree"))
    self._live = Live(self._job, models=len(self._pair.names))
    self._play = play_episode(self._live, self._env, self._pair, policy, purse)
    self._models = ()
    next(self._play)
    self._nodes[()] = Node([], self._live.observation, None)

  def _decide(self, model: int) -> None:
    """Play a step with a model."""
    episode = None
    try:
      self._play.send(Decision(model))
    except StopIteration as end:
      episode = end.value
    self._models = (*self._models, model)
    node = Node([*self._live.steps], self._live.observation, episode)
    self._nodes[self._models] = node


class Memory:
  """Remember what a reader has computed for one task's decisions."""

  def __init__(self, reader: StateReader):
    """Start without a decision."""
    self._reader = reader
    self._states = {}
    self._lives: dict[tuple[str, int], Live] = {}
    self._task_id = ""
    self.rows = reader.rows

  def read(self, ready: Sequence[Live]) -> tuple[States, list[int]]:
    """Return the states of one decision; see `StateReader.read`."""
    [live] = ready
    if live.task.id != self._task_id:
      self._states = {}
      self._task_id = live.task.id
      for earlier in self._lives.values():
        self._reader.forget(earlier)
      self._lives = {}
    key = live.job.seed, *(step.model for step in live.steps)
    if key not in self._states:
      self._states[key] = self._reader.read(ready)
      self._lives[live.key] = live
    return self._states[key]


@dataclasses.dataclass
class Player:
  """The policies of a run, with its models and its store."""

  files: RouterFiles
  pair: Pair
  store: Store
  specs: list[PolicySpec]
  policies: dict[tuple[str, int], Policy] = dataclasses.field(default_factory=dict)
  readers: dict[int, Memory] = dataclasses.field(default_factory=dict)

  def build(self, spec: PolicySpec, number: int) -> Policy:
    """Build the policy of one training seed, once."""
    key = spec.key, number
    if key not in self.policies:
      seed = self.files.config.seed + number
      config = dataclasses.replace(self.files.config, seed=seed)
      files = dataclasses.replace(self.files, config=config, training_seed=number)
      policy = Loader(files, ROWS, self.pair, self.store).build(spec)
      if spec.family == CONDITIONED:
        policy.reader = self.readers.setdefault(number, Memory(policy.reader))
      self.policies[key] = policy
    return self.policies[key]

  def play(self, tree: TreeEnv, task: Task) -> None:
    """Play and store the episodes of a task that are not stored yet."""
    config = self.files.config
    episodes = []
    for trial in range(config.evaluate.seeds):
      job = Job(task, "dev", trial)
      game = Game(tree, self.pair, job)
      for spec in self.specs:
        if job.key in self.store.keys(spec.key):
          continue
        policy = self.build(spec, trial % config.train_seeds)
        if type(policy).act is Policy.act:
          episodes.append(game.play(policy))
        else:
          episodes += run_episodes([job], policy, self.pair, [tree])
    self.store.add(*episodes)


def open_player(directory: Path, is_first: bool) -> Player:
  """Open a run, with its policies on value heads and, in the first run, its rules."""
  config = read_run(directory)
  store = Store(directory / "episodes.sqlite")
  specs = []
  for spec in list_specs(config):
    family = FAMILIES[spec.family]
    is_rule = is_first and not family.stage and not family.is_rival
    if spec in BOUNDARIES or spec.family == CONDITIONED or is_rule:
      specs.append(spec)
  pair = open_pair(config, directory / "episodes.sqlite")
  return Player(RouterFiles(directory, config, one_device()), pair, store, specs)


def list_tasks(config: Config, env: Env) -> list[Task]:
  """List the first tasks of dev and of test, all as dev tasks."""
  tasks = env.tasks("dev")
  if TEST_TASKS.value:
    for task in env.tasks("test"):
      tasks.append(dataclasses.replace(task, split="dev"))
  return tasks


def main(argv: list[str]) -> None:
  """Play all policies of all runs on the tasks of this part."""
  directories = [Path(name) for name in argv[1:]]
  players = [open_player(path, path == directories[0]) for path in directories]
  config = players[0].files.config
  arguments = env_arguments(config)
  if DEV_TASKS.value:
    sizes = {"dev_tasks": DEV_TASKS.value, "test_tasks": TEST_TASKS.value}
    arguments |= sizes
  if table.load(config.env.kind).needs_process:
    [env] = open_envs(config.env.kind, arguments, 1, 1, config.env.timeout_s)
  else:
    env = table.make(config.env.kind, **arguments)
  tree = TreeEnv(env)
  tasks = players[0].store.tasks("dev")
  if DEV_TASKS.value and len(tasks) != DEV_TASKS.value + TEST_TASKS.value:
    tasks = list_tasks(config, env)
  for player in players:
    player.store.put_tasks("dev", tasks)
  part, parts = map(int, PART.value.split("/"))
  try:
    for task in tqdm(tasks[part::parts]):
      for player in players:
        player.play(tree, task)
  finally:
    tree.close()


if __name__ == "__main__":
  app.run(main)
