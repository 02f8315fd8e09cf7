"""Open a run: its directory, its stored episodes, and the files of its routers."""

import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh
from pydantic import TypeAdapter
from tqdm import tqdm

from baar_jax.config import RECORDED, STORED, Config
from baar_jax.envs import base, engines
from baar_jax.envs.code.adapter import read_functions, read_recording
from baar_jax.episode import SPLITS, Episode, Task
from baar_jax.learn.checkpoint import open_arrays, save_arrays
from baar_jax.llms.history import NO_ACTION, NO_CODE, open_conversation
from baar_jax.llms.offline import RecordedPair, ScriptedPair
from baar_jax.llms.prices import check_models, prices_of
from baar_jax.mesh import exchange, make_mesh
from baar_jax.paper.references import Profile, choose_references, profile_tasks
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.jobs import BOUNDARIES, SFT, exploration_specs, stratified_spec
from baar_jax.rollout.loop import Pair
from baar_jax.rollout.source import SelfPlay, Stored
from baar_jax.rollout.specs import (
  UNTRAINED,
  PolicySpec,
  Purpose,
)
from baar_jax.router.inputs import Vocabulary
from baar_jax.store import (
  CHANGEABLE,
  CONDITIONS,
  RESTORE,
  Calls,
  Store,
  differences,
  flatten,
  lock,
  read_config,
  read_spent,
)

VOCABULARY = "vocabulary.npz"  # The name of the file with the vocabulary.
# The part of the vocabulary that is stored as text: idf, new_idf, rarities, and the
# mean tokens of first prompts and of replies.
TEXTS = TypeAdapter(tuple[dict[str, float], float, dict[str, float], float, float])
# Settings of tqdm for a line a minute, in place of a bar that is drawn again and again.
LINES = dict(
  delay=60.0,
  mininterval=60.0,
  bar_format="{desc}: {n_fmt} of {total_fmt} {unit} in {elapsed}{postfix}\n",
)
# The ablation that trains its own SFT router, because it changes the references.
UNSTRATIFIED = "no-stratified"
# Fields of the configuration that may differ between the processes of one run.
OF_PROCESS = ("runs", "distributed.process", "env.processes", "env.live_per_process")


class Run:
  """A run's directory <runs>/<name>, with its environments and models.

  Several processes may share the directory. Each of them has its own store, and plays a
  share of the tasks. Each holds a lock, so that two commands do not spend the same
  dollars of --config.max_usd twice; the operating system frees the lock of a process
  that is killed.
  """

  def __init__(self, config: Config):
    """Open the run's directory and models. Create the directory if it is missing.

    Raises:
      ValueError: the directory or the models cannot be used.
    """
    check_models(config)
    self.config = config
    # Of several processes, only the main one prints, logs and lists the tasks.
    self.is_main = config.distributed.process == 0
    self.dir = Path(config.runs) / config.name
    stored_config = read_config(self.dir)
    self.mesh = _open_mesh(config)
    number = "" if self.is_main else f"-{config.distributed.process}"
    path = self.dir / f"episodes{number}.sqlite"
    self._lock = lock(self.dir / f"lock{number}")
    self.store = Store(path)
    self._check_config(stored_config)
    self.budget = _open_budget(config, self.dir, self.store)
    if config.env.kind == STORED:
      self.source = Stored(config, self.store)
    else:
      pair = open_pair(config, path)
      self.source = SelfPlay(config, pair, self.store, self.budget, self.progress)
    self.play = self.source.play
    # All runs of a user share JAX's compiled programs, which are in the user's cache.
    # They are not kept in a run's directory, because that may come from somebody else,
    # and compiled programs would be executed.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
      jax.config.update("jax_compilation_cache_dir", str(engines.cache() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

  def _check_config(self, stored: Config | None) -> None:
    """Compare this command's configuration with the stored one, then store it.

    Args:
      stored: the configuration in the run's directory; None in a new directory.

    Raises:
      ValueError: a field differs that stored results depend on, or the run has
        checkpoints and no tasks.
    """
    # As long as no tasks are stored, no result depends on the configuration, so any
    # field may change.
    if not self.store.tasks("train"):
      if (self.dir / "checkpoints").exists():
        raise ValueError(
          f"{self.dir} has checkpoints, and its store has no tasks: {RESTORE}"
        )
      if self.config.reuse:
        adopt_episodes(self.config, self.store)
      if self.is_main:
        text = json.dumps(read_conditions(self.config), indent=2)
        (self.dir / CONDITIONS).write_text(text)
    elif stored:
      changeable = CHANGEABLE
      if self.config.env.kind == STORED:
        # No result of a run that plays nothing depends on where its models are.
        changeable += ("models.base_urls.",)
      changes = differences(flatten(stored), flatten(self.config))
      for name, before, after in changes:
        if not f"{name}.".startswith(changeable):
          raise ValueError(
            f"{self.dir} has {name}={before!r}, this command has {after!r}: "
            f"set --config.{name} back, or choose another --config.name"
          )
      check_recording(self.config, self.dir)
    if self.is_main:
      path = self.dir / "config.tmp"
      path.write_text(json.dumps(dataclasses.asdict(self.config), indent=2))
      path.replace(path.with_suffix(".json"))

  def files(self, number: int = 0) -> "RouterFiles":
    """Locate the routers of one training seed.

    Args:
      number: the number of the training seed, from 0.
    """
    return RouterFiles(
      self.dir,
      self.config,
      self.mesh,
      number,
      rows=self.source.live_episodes,
      pair=self.source.pair,
      store=self.store,
    )

  def all_files(self) -> list["RouterFiles"]:
    """Locate the routers of each training seed.

    The trainings of different training seeds have their own directories and random
    numbers.
    """
    return [self.files(number) for number in range(self.config.train_seeds)]

  def tasks(self, split: str) -> list[Task]:
    """Return the tasks of a split. The first call lists the tasks of all splits.

    Every process must call this method, because the main process sends its tasks to the
    others.

    Raises:
      ValueError: a task is listed twice, or no task of this split is recorded.
    """
    if not self.store.tasks(split) and self.is_main:
      self.source.list_tasks(split)
    for name in SPLITS:
      listing = exchange([vars(task) for task in self.store.tasks(name)])[0]
      if not self.is_main:
        self.store.put_tasks(name, [Task(**fields) for fields in listing])
    return self.store.tasks(split)

  def print(self, text: str) -> None:
    """Print a line at once, for a program that may wait; only the main process does."""
    if self.is_main:
      print(text, flush=True)

  def progress(self, title: str, total: int, done: int, unit: str) -> tqdm:
    """Open a progress bar of the main process; without a terminal, a line a minute.

    Args:
      title: the text before the bar.
      total: the number of units at which the bar is full.
      done: the number of units at which the bar starts.
      unit: the unit's name in the bar, such as "ep" for episodes.
    """
    lines = {} if sys.stderr.isatty() else LINES
    hidden = not self.is_main
    return tqdm(
      desc=title, total=total, initial=done, unit=unit, disable=hidden, **lines
    )

  def require(self, stage: str) -> None:
    """Raise an error unless all processes have finished a stage.

    Raises:
      ValueError: a process has not finished the stage.
    """
    if not all(exchange(self.store.finished(stage))):
      raise ValueError(
        f"{self.dir} has not finished the stage {stage}: run --stage={stage} first"
      )

  def log(
    self,
    files: "RouterFiles",
    stage: str,
    update: int,
    metrics: Mapping[str, float],
    newest: str = "none",
    **values: float,
  ) -> None:
    """Append an update of a training to metrics.jsonl; only the main process writes.

    Args:
      files: the routers of the training seed.
      stage: the name of the training.
      update: the number of the update, from 1.
      metrics: values by name, equal in every process, so that every process stops.
      newest: the directory of the newest checkpoint, or "none".
      values: more values to log.

    Raises:
      ValueError: a metric is not finite.
    """
    bad_metrics = [
      f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value)
    ]
    if bad_metrics:
      problem = f"{stage} stopped: update {update} has {', '.join(bad_metrics)}"
      advice = "train again with a lower learning rate under another --config.name"
      raise ValueError(f"{problem}; last good checkpoint: {newest}; {advice}")
    if self.is_main:
      marks = {"train_seed": files.training_seed, "ablation": files.ablation}
      marks |= {"stage": stage, "update": update}
      with (self.dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(marks | values | metrics) + "\n")

  def close(self) -> None:
    """Close what gives the episodes, and the store, and free the lock."""
    self.source.close()
    self.store.close()
    self._lock.close()


@dataclasses.dataclass(frozen=True)
class RouterFiles:
  """Locate the routers of one training seed in the directory of a run.

  Attributes:
    directory: the directory of the run.
    config: the configuration of the run, and of the ablation.
    mesh: the devices that routers are loaded onto.
    training_seed: the number of the training seed, from 0.
    ablation: a key of `config.ABLATIONS`; "" is the complete method.
    rows: the most episodes that are live at once.
    pair: the models of the run; only a policy that asks a judge needs them.
    store: the stored episodes, for trainings and for policies with a `share`.
    kept: what `RouterFamily.open` has loaded last.
  """

  directory: Path
  config: Config
  mesh: Mesh | None
  training_seed: int = 0
  ablation: str = ""
  rows: int = 1
  pair: Pair | None = None
  store: Store | None = None
  kept: dict = dataclasses.field(default_factory=dict, compare=False)

  @property
  def seed(self) -> int:
    """Return the seed of this training's random numbers."""
    return self.config.seed + self.training_seed

  @property
  def tokenizer(self) -> Path:
    """Return the directory of the tokenizer."""
    return self.directory / "tokenizer"

  def checkpoints(self, family: str, lam: float | None = None) -> Path:
    """Return the directory of a router's checkpoints.

    Args:
      family: "value", "sft", "bopo", a rival or an ablation.
      lam: the cost weight of the training; None if the family has none.
    """
    name = family
    if family == SFT and self.ablation == UNSTRATIFIED:
      name = f"{SFT}-{self.ablation}"
    if lam is not None:
      name += f"-lam{lam:g}"
    if self.training_seed:
      name += f"-seed{self.training_seed}"
    return self.directory / "checkpoints" / name


def save_vocabulary(directory: Path, vocabulary: Vocabulary) -> None:
  """Write the vocabulary of the run in a directory."""
  directions_HxC, *texts, mean_D, spread_D = vocabulary
  arrays = directions_HxC, mean_D, spread_D, json.dumps(texts)
  save_arrays(directory / VOCABULARY, *arrays)


def load_vocabulary(files: RouterFiles) -> Vocabulary:
  """Load the statistics of stored episodes that a run has learned.

  Raises:
    ValueError: the file is missing or damaged.
  """
  with open_arrays(files.directory / VOCABULARY, "references") as arrays:
    directions_HxC, mean_D, spread_D, texts = arrays
    return Vocabulary(
      directions_HxC, *TEXTS.validate_json(texts.item()), mean_D, spread_D
    )


def load_profiles(
  store: Store,
  config: Config,
  *splits: str,
  purpose: Purpose = "profile",
  trials: Iterable[int] = (),
) -> dict[str, Profile]:
  """Load the profiles of the tasks of some splits.

  A task without a trial of both boundaries is left out.

  Args:
    splits: "train", "dev" or both.
    purpose: "profile" or "robustness"; the purpose of the trials to read.
    trials: the numbers of the trials to read per task and boundary; if empty, all of
      `profile.trials`.

  Returns:
    The profiles by task id, in the order of the tasks.

  Raises:
    ValueError: no task has these trials.
  """
  ids = [task.id for split in splits for task in store.tasks(split)]
  trials = trials or range(config.profile.trials)
  episodes = _load_trials(store, BOUNDARIES, purpose, trials, ids)
  profiles = profile_tasks(ids, episodes)
  if not profiles:
    raise ValueError(
      f"{config.runs}/{config.name} has no {purpose} trials: run --stage=profile first"
    )
  return profiles


def load_references(
  store: Store, config: Config, profiles: Mapping[str, Profile]
) -> dict[str, Episode]:
  """Load the reference trajectory tau* of each task with a profile.

  Returns:
    Episodes by task id.

  Raises:
    ValueError: a hard task has no stratified sample yet.
  """
  if config.references.clone_large:
    return choose_references(profiles, [])
  # The store sorts by trial, so samples come in order of k.
  stratified = store.episodes(stratified_spec(config).key)
  sampled = {episode.task_id for episode in stratified}
  missing = [id_ for id_, p in profiles.items() if p.hard and id_ not in sampled]
  if missing:
    problem = f"lacks references of {len(missing)} hard tasks: run --stage=references"
    raise ValueError(f"{config.runs}/{config.name} {problem}")
  return choose_references(profiles, stratified)


def load_value_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the episodes of training tasks that the value heads learn from.

  These are the first `profile.trials` trials of both boundaries, the stratified
  samples, and the exploration of hard and of other tasks (our choice). Without the
  exploration of others, only hard tasks would have episodes that mix the models. Then
  the heads would learn that a task with a mix of models is a task that can be solved.
  """
  samples = range(1, config.references.samples + 1)
  episodes = _load_samples(store, config, range(config.profile.trials), samples)
  for spec in exploration_specs(config):
    episodes += store.episodes(spec.key)
  return episodes


def load_threshold_episodes(store: Store, config: Config) -> list[Episode]:
  """Load the training episodes at whose decisions thresholds are computed.

  A threshold is a quantile of the router's p(LARGE) at the decisions of these episodes.
  The episodes are one trial of each boundary per task, and the stratified samples
  k = N/4, N/2 and 3N/4 (our choice).
  """
  quarters = {max(1, config.references.samples * quarter // 4) for quarter in (1, 2, 3)}
  return _load_samples(store, config, {0}, quarters)


def _load_samples(
  store: Store, config: Config, trials: Iterable[int], samples: Iterable[int]
) -> list[Episode]:
  """Load trials of both boundaries, and stratified samples, of all training tasks.

  Args:
    trials: the numbers of the trials, from 0.
    samples: the numbers k of the stratified samples, from 1.
  """
  train = [task.id for task in store.tasks("train")]
  boundaries = _load_trials(store, BOUNDARIES, "profile", trials, train)
  stratified = [stratified_spec(config)]
  return boundaries + _load_trials(store, stratified, "reference", samples, train)


def _load_trials(
  store: Store,
  specs: Iterable[PolicySpec],
  purpose: Purpose,
  numbers: Iterable[int],
  ids: Iterable[str],
) -> list[Episode]:
  """Load the stored trials of policies on tasks, and skip missing ones.

  Args:
    store: the stored episodes.
    specs: the policies, one after the other in the result.
    purpose: the purpose of the trials, such as "profile".
    numbers: the numbers of the trials.
    ids: the ids of the tasks.
  """
  keys = {*itertools.product(ids, [purpose], numbers)}
  episodes = []
  for spec in specs:
    episodes += store.episodes(spec.key, keys)
  return episodes


def read_conditions(config: Config) -> dict[str, object]:
  """Return what the episodes of an untrained policy depend on, beside the policy.

  Returns:
    Values as in JSON, by the names of settings: those of the environment and the
    models, today's prices, and the prompts.
  """
  conditions = {}
  for name, value in flatten(config).items():
    is_changeable = f"{name}.".startswith(CHANGEABLE)
    if name.startswith(("env.", "models.")) and not is_changeable:
      conditions[name] = value
  conditions["models.prices"] = prices_of(config.models)
  env = base.load(config.env.kind)
  prompt = getattr(env, "system_prompt", "")
  opening = open_conversation(prompt, Task("", "", "", 1), "")
  remark = NO_CODE if env.code_actions else NO_ACTION
  conditions["prompts"] = [*opening, remark]
  if config.models.kind == RECORDED:
    conditions["recording"] = read_recording(config.models.recording).digest
  return json.loads(json.dumps(conditions, default=vars))


def adopt_episodes(config: Config, store: Store) -> None:
  """Copy tasks and episodes from the run that --config.reuse names to a new store.

  The episodes are the trials and samples that no trained policy plays.

  Raises:
    ValueError: the other run has other conditions, or no episodes to copy.
  """
  store.adopt(Path(config.reuse), read_conditions(config), UNTRAINED)


def check_recording(config: Config, directory: Path) -> None:
  """Check that the recording is the one that a run's episodes were played with.

  Raises:
    ValueError: it is another one.
  """
  if config.models.kind == RECORDED:
    before = json.loads((directory / CONDITIONS).read_text()).get("recording")
    if before != read_recording(config.models.recording).digest:
      raise ValueError(
        f"{directory} was played with another state of the recording "
        f"{config.models.recording}: choose another --config.name"
      )


def open_pair(config: Config, path: Path) -> Pair:
  """Open the models that the router chooses from.

  Args:
    config: the run's configuration.
    path: the file of the run's store, in which the calls of API models are recorded.
  """
  models = config.models
  if models.kind == "scripted":
    return ScriptedPair(models, base.load(config.env.kind))
  if models.kind == RECORDED:
    return RecordedPair(models, read_functions(config.env.options.get("data", "")))
  # Other runs start faster without the client of API models.
  from baar_jax.llms.chat import ChatPair

  return ChatPair(models, Calls(path))


def _open_mesh(config: Config) -> Mesh:
  """Connect the run's processes, and return the mesh of all their devices.

  Raises:
    ValueError: the processes have different configurations.
  """
  distributed = config.distributed
  # JAX must connect the processes before anything else uses JAX.
  if distributed.processes > 1:
    jax.distributed.initialize(
      distributed.coordinator, distributed.processes, distributed.process
    )
  first, *others = exchange(flatten(config))
  for other in others:
    for name, *_ in differences(first, other):
      if name not in OF_PROCESS:
        raise ValueError(
          f"the processes have different --config.{name}: "
          "start all processes with the same value"
        )
  return make_mesh(distributed.fsdp)


def _open_budget(config: Config, directory: Path, store: Store) -> DollarBudget | None:
  """Open a budget with this process's share of the remaining dollars of the run.

  Returns:
    The budget; None if `--config.max_usd` is 0, which is no cap.
  """
  if not config.max_usd:
    return None
  if config.models.kind != "chat":
    episodes = store.table()
    spent_usd = episodes.spent_usd[~episodes.reused].sum()
  else:
    spent_usd = read_spent(directory).total()
  left_usd = max(0.0, config.max_usd - spent_usd)
  # The budget has the whole cap, so that messages state it. The shares of the other
  # processes count as spent.
  others_usd = left_usd - left_usd / config.distributed.processes
  return DollarBudget(config.max_usd, spent_usd + others_usd)
