"""Declare the settings of a run with their bounds, and read them from flags."""

import contextlib
import dataclasses
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from absl import flags
from ml_collections import config_flags
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

STORED = "stored"  # The env.kind of a run whose episodes another program has stored.
RECORDED = "recorded"  # The models.kind of replies that were recorded once.
ZERO_SHOT = "zero-shot"  # The rival that asks its judge at every step.
# BoPO's ablations by name: the field that switches a part off or on, and its value.
ABLATIONS = {
  "no-stratified": ("references.clone_large", True),
  "no-reference": ("bopo.reference_guided", False),
  "no-hard-bonus": ("bopo.r_hard", 0.0),
}
# Largest number of tokens that each router.view adds to a step's texts.
MARKUP_TOKENS = {"transcript": 80, "paper": 176}
VANILLA_BATCHES = 3  # Most rollout batches of vanilla RL, for each of BoPO's.
SEEDS = 1000  # Seeds that each purpose of an episode has; see rollout/specs.py.
ROLLOUT_RANGE = 1_000_000  # Seeds for the rollouts of one training seed.
MAX_COST_WEIGHT = 2.0  # The largest one of value heads; see conditioned/heads.py.
CostWeight = Annotated[float, Field(ge=0, le=MAX_COST_WEIGHT)]
# Addresses with users, passwords or queries are refused: they may contain a key.
URL = r"^https?://([A-Za-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]+)?(/[A-Za-z0-9_.~/%-]*)?$"
VARIABLE = r"^([A-Za-z_][A-Za-z0-9_]*)?$"
Width = Annotated[int, Field(gt=0, le=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Dollars = Annotated[float, Field(ge=0, le=1e9)]
PriceRow = Annotated[tuple[Dollars, ...], Field(min_length=3, max_length=4)]
STRICT = {"extra": "forbid", "hide_input_in_errors": True, "allow_inf_nan": False}
section = dataclass(config=STRICT)
validator = model_validator(mode="after")


def positive(default: float, most: float = 1_000_000) -> Any:
  """Declare a field of a configuration whose value is above 0.

  Args:
    default: the field's default.
    most: the largest number that is accepted.
  """
  return Field(default, gt=0, le=most)


def not_negative(default: float | None, most: float = 1e9) -> Any:
  """Declare a field of a configuration whose value is at least 0.

  Args:
    default: the field's default; None declares a field that may stay unset.
    most: the largest number that is accepted.
  """
  return Field(default, ge=0, le=most)


def require(is_valid: bool, field: str, requirement: str) -> None:
  """Raise an error that names a field and its rule, unless the value is valid.

  Args:
    is_valid: whether the field's value satisfies the rule.
    field: the field's name, such as "bopo.lam".
    requirement: the rule, as the end of a sentence that begins with "must be".

  Raises:
    ValueError: the value breaks the rule; the message names the field and the rule.
  """
  if not is_valid:
    raise ValueError(f"{field} must be {requirement}")


class OpenOptions(dict):
  """Options by name, to which flags can add new names.

  A flag of the command line reads an option before it changes it, and keeps its type.
  So a missing option is first stored as an empty text.
  """

  def __missing__(self, name: str) -> str:
    """Store an empty text as the value of a missing option, and return it."""
    return self.setdefault(name, "")


@section
class EnvConfig:
  """Configure the environment, its tasks and its processes.

  Attributes:
    kind: Name of an environment in envs/base.py, or FILE.py:CLASS for an environment
      of your own.
    train_tasks: Number of training tasks.
    dev_tasks: Number of validation tasks, on which all choices are made.
    test_tasks: Number of held-out test tasks.
    max_steps: Number of steps after which an episode ends.
    processes: Number of child processes that play the environment; 0 is one per CPU
      core.
    live_per_process: Number of episodes that one process plays at the same time.
    timeout_s: Seconds that a call of an environment may take. After this time its
      process is replaced, and the episode has failed.
    options: Options of the environment by name. Its class Options in adapter.py
      declares them and their bounds.
  """

  kind: str = "scienceworld"
  train_tasks: int = positive(96)
  dev_tasks: int = positive(34)
  test_tasks: int = positive(60)
  max_steps: int = positive(40)
  processes: int = not_negative(0, 10_000)
  live_per_process: int = positive(4, 10_000)
  timeout_s: float = positive(120.0)
  options: dict = Field(default_factory=dict)

  def __post_init__(self) -> None:
    """Prepare `options`, so that flags can set options that the file does not set."""
    self.options = OpenOptions(self.options)

  @property
  def live_episodes(self) -> int:
    """Return the number of episodes that a process of the run plays at a time."""
    return (self.processes or os.cpu_count()) * self.live_per_process


@section
class ModelsConfig:
  """Configure the models that the router chooses from.

  Attributes:
    kind: "scripted" for programs with stated error rates, "chat" for API models at an
      upstream endpoint, "recorded" for the replies of a recording.
    names: Names of the models, the cheapest first.
    prices: One row per model in US dollars per million tokens: (input, cached input,
      output), and a fourth price for writing the cache if the model has one. () takes
      the list prices.
    prompt_cache: Whether the prompt cache lowers the method's dollars: those of API
      models by the provider's usage, those of scripted models by the rule of their
      family. False is the paper's setting: all prompt tokens have the price of input.
      What a provider bills for, with its cache, is counted apart by --config.max_usd.
    base_urls: Addresses of the upstream endpoints with kind="chat": one for all models,
      or one per model. () is OpenAI's endpoint.
    key_variables: Names of the environment variables with the upstream endpoints' keys:
      one for all models, or one per model. "" stands for an endpoint without a key.
    temperature: Sampling temperature of the models (our choice; the paper states none).
    max_completion_tokens: Largest number of tokens of a reply in a run that plays
      tasks. The worst case of a call assumes a reply of this length.
    reasoning_effort: Effort that models that reason are asked for, such as "low"; ""
      leaves it to the provider.
    token_limit_field: Name of the request's field that limits the tokens of a reply.
    timeout_s: Seconds within which the whole answer of an attempt must arrive, or the
      beginning of a stream. A slower attempt has failed.
    retries: Number of times that a failed attempt is repeated.
    recording: File of a recording, made by tools/record.py. It may be one of those in
      baar_jax/envs/code/.
  """

  kind: str = Field("scripted", pattern="^(scripted|chat|recorded)$")
  names: tuple[Annotated[str, Field(min_length=1)], ...] = ("gpt-4.1-mini", "gpt-4.1")
  prices: tuple[PriceRow, ...] = ()
  prompt_cache: bool = True
  base_urls: tuple[Annotated[str, Field(pattern=URL)], ...] = ()
  key_variables: tuple[Annotated[str, Field(pattern=VARIABLE)], ...] = ()
  temperature: float = not_negative(0.7, 2)
  max_completion_tokens: int = positive(1024, 10_000_000)
  reasoning_effort: str = ""
  token_limit_field: str = Field(
    "max_completion_tokens", pattern="^max_(completion_)?tokens$"
  )
  timeout_s: float = positive(120.0)
  retries: int = not_negative(5, 100)
  recording: str = "qwen2.5-coder.jsonl.gz"

  @validator
  def _check(self) -> Self:
    """Raise an error unless each tuple has as many values as there are models."""
    count = len(self.names)
    is_valid = len(self.prices) in (0, count)
    require(is_valid, "prices", "() or a value for each of the names")
    for field in ("base_urls", "key_variables"):
      is_valid = len(getattr(self, field)) in (0, 1, count)
      require(is_valid, field, "(), one value, or a value for each of the names")
    return self


@section
class RouterConfig:
  """Configure the router: its weights, and the text that it reads.

  Without weights, the router is a small network on inputs of a step (router/network.py)
  that has no settings.

  Attributes:
    weights: Pretrained weights: a Hugging Face directory of a Qwen2 or Qwen2.5; "" has
      none.
    dtype: Type of numbers that the router computes in. Parameters are float32.
    view: Text that the router reads: "transcript" is one growing text per episode,
      "paper" is a prompt with the paper's fields at every step.
    max_tokens: Largest number of tokens of a text. A longer text loses its oldest
      steps.
    description_tokens: Number of tokens to which the task's description is cut.
    action_tokens: Number of tokens to which an action is cut.
    result_tokens: Number of tokens to which an action's result is cut.
  """

  weights: str = ""
  dtype: str = Field("float32", pattern="^(float32|bfloat16)$")
  view: str = Field("transcript", pattern="^(transcript|paper)$")
  max_tokens: int = positive(768)
  description_tokens: int = positive(96)
  action_tokens: int = positive(12)
  result_tokens: int = positive(24)

  @validator
  def _check(self) -> Self:
    """Raise an error unless `max_tokens` holds the longest step."""
    previews = self.description_tokens + self.action_tokens + 2 * self.result_tokens
    least = 2 * (previews + MARKUP_TOKENS[self.view])
    remedy = "or lower description_tokens, action_tokens or result_tokens"
    require(self.max_tokens >= least, "max_tokens", f"at least {least}, {remedy}")
    return self


@section
class ProfileConfig:
  """Configure the trials that label the training and dev tasks.

  Attributes:
    trials: Number of episodes of each boundary policy per task (called K in the paper's
      taxonomy of difficulty).
    robustness: Numbers of new trials. Stage profile plays as many more trials of each
      boundary policy per training task, for each number. The report compares the
      difficulty by these new trials with that by `trials`.
  """

  trials: int = positive(5, SEEDS)
  # All numbers up to 44 together have 990 trials, fewer than SEEDS.
  robustness: tuple[Annotated[int, Field(gt=0, le=44)], ...] = ()


class SamplePlan(NamedTuple):
  """Plan additional samples per task, which are played and stored for training.

  Attributes:
    kind: Rule by which a sample picks its models: "samples", "steps" or "repeats"; see
      `take_sampled` in families/rules.py.
    count: Number of samples per task.
    all_tasks: Whether all training tasks with a profile get the samples. False gives
      them to hard training tasks only.
  """

  kind: Literal["samples", "steps", "repeats"]
  count: Annotated[int, Field(gt=0, lt=SEEDS // 4)]
  all_tasks: bool = False


@section
class ReferencesConfig:
  """Configure the stored samples that training learns from.

  Attributes:
    samples: Number of stratified samples per hard task (paper: N).
    plans: Additional samples for the value heads (our choice). Samples without
      `all_tasks` add nothing, because hard tasks have the samples above.
    clone_large: True takes always-LARGE's trials as references of hard tasks, without
      stratified samples (the ablation no-stratified).
  """

  samples: int = Field(20, gt=0, lt=SEEDS // 4)
  plans: tuple[SamplePlan, ...] = Field((), max_length=3)
  clone_large: bool = False


@section
class ValueConfig:
  """Configure the budget-conditioned router, an ensemble of value heads.

  Attributes:
    updates: Number of gradient steps of every head; 0 trains no budget-conditioned
      router.
    cost_weights: Cost weights with which the router is evaluated on dev: the units of
      score that one normalised dollar costs.
    capped_cost_weights: Cost weights with which it is evaluated under each cap.
    heads: Number of heads of the ensemble.
    widths: Widths of the two networks of a head: of the one that computes the value of
      a state, and of the one that computes the models' advantages.
    weight_decay: Weight decay of AdamW.
    noise: Standard deviation of the noise that is added to the inputs in training, as a
      multiple of their own standard deviation.
  """

  updates: int = not_negative(0, 999_999)
  cost_weights: tuple[CostWeight, ...] = Field((0.0, 0.1, 0.2, 0.5, 1.0), min_length=1)
  capped_cost_weights: tuple[CostWeight, ...] = Field((0.0, 1.0), min_length=1)
  heads: int = positive(5, 100)
  widths: tuple[Width, Width] = (64, 32)
  weight_decay: float = not_negative(0.3, 100)
  noise: float = not_negative(0.5, 100)


@section
class SFTConfig:
  """Configure the supervised training of routers (BoSFT).

  Attributes:
    updates: Largest number of gradient steps.
    check_every: Number of gradient steps between two measurements of the loss on dev.
    batch_episodes: Number of episodes per gradient step.
    micro_episodes: Number of rows of a compiled call, in all trainings (BoPO and value
      heads too). A smaller number needs less memory.
    learning_rate: Highest learning rate of the schedule, also for the cascade's scorer
      and the single-turn classifier.
  """

  updates: int = positive(150, 999_999)
  check_every: int = positive(5, 999_999)
  batch_episodes: int = positive(64)
  micro_episodes: int = positive(16, 100_000)
  learning_rate: float = positive(2e-5, 1)


@section
class BoPOConfig:
  """Configure BoPO, the paper's reinforcement learning.

  Attributes:
    lam: Weights of the normalised cost in the reward. A router is trained for each of
      them, and one of each ablation.
    r_hard: Additional reward of a success in a hard task (paper: 0.5).
    group_size: Number of episodes per task and update (paper: 8).
    advantage_eps: Number added to a group's standard deviation of rewards (our choice).
    advantage_clip: Largest absolute value of an advantage; larger ones are clipped (our
      choice).
    reference_guided: Whether the baseline is at least the reference's reward. False
      uses the group's mean reward only (the ablation no-reference).
    kl_beta: Weight of the KL divergence from the SFT router in the loss.
    learning_rate: Learning rate of AdamW.
    last_rate: Learning rate after the last gradient step, as a share of
      `learning_rate`. It falls to this share by a cosine; 1 is a constant rate.
    updates: Number of updates (our choice; the paper states none). Each plays one
      rollout batch and takes one gradient step on it.
    tasks_per_update: Number of tasks per rollout batch. We read the paper's batch of 64
      as 8 tasks with 8 episodes each.
    vanilla_learning_rate: Learning rate of the rival "vanilla". All its other settings
      are BoPO's.
  """

  lam: tuple[Annotated[float, Field(ge=0, le=100)], ...] = Field(
    (0.1, 0.3, 0.5, 0.7, 0.9), min_length=1
  )
  r_hard: float = not_negative(0.5, 100)
  # The largest group and the most updates fit the range of seeds: VANILLA_BATCHES x 100
  # x 3,000 is below ROLLOUT_RANGE.
  group_size: int = Field(8, ge=2, le=100)
  advantage_eps: float = positive(0.1, 100)
  advantage_clip: float = positive(5.0, 1e12)
  reference_guided: bool = True
  kl_beta: float = not_negative(0.04, 100)
  learning_rate: float = positive(1e-6, 1)
  last_rate: float = not_negative(1.0, 1)
  updates: int = positive(100, 3000)
  tasks_per_update: int = positive(8, 100_000)
  vanilla_learning_rate: float = positive(1e-6, 1)


@section
class BaselinesConfig:
  """Configure the rivals and ablations that are evaluated beside BoPO.

  Attributes:
    rivals: Names of rivals from families/table.py, such as "cascade".
    ablations: Names of ablations. Each ablation is BoPO without one part.
    judge: The judge: the model that the zero-shot router asks. If the models are
      scripted, a rule answers in its place, and costs the judge's price. The paper
      states neither its temperature nor its largest reply (our choice).
  """

  rivals: tuple[str, ...] = ()
  ablations: tuple[
    Annotated[str, Field(pattern=f"^({'|'.join(ABLATIONS)})$")], ...
  ] = ()
  judge: ModelsConfig = Field(
    default_factory=lambda: ModelsConfig(
      names=("gpt-5",), temperature=1.0, max_completion_tokens=2048
    )
  )


@section
class EvaluateConfig:
  """Configure the policies, caps and seeds of the evaluation.

  Attributes:
    seeds: Number of evaluation seeds per task.
    random_p: Probabilities of LARGE, one per random policy (our choice).
    thresholds: Thresholds, with one policy each; 0.5 is always one. LARGE is called if
      its probability reaches the threshold.
    shares: Shares of LARGE, with one policy each. The policy's threshold is the one at
      which it would have called LARGE in this share of the stored training decisions.
      For more than two models see `apply_threshold` in router/policy.py.
    call_budgets: Caps on the LARGE calls of a task (paper: K).
    usd_budgets: Caps on the US dollars of a task (paper: B_max).
  """

  seeds: int = positive(3, SEEDS)
  random_p: tuple[Share, ...] = (0.25, 0.5, 0.75)
  thresholds: tuple[Share, ...] = ()
  shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
  call_budgets: tuple[Annotated[int, Field(ge=0, le=10**9)], ...] = (5, 10, 15)
  usd_budgets: tuple[Dollars, ...] = ()


@section
class DistributedConfig:
  """Configure the processes that train one router together.

  Each process plays its share of the episodes.

  Attributes:
    processes: Number of processes.
    process: Number of this process, from 0.
    coordinator: Address HOST:PORT at which process 0 listens. "" leaves it to JAX,
      which reads JAX_COORDINATOR_ADDRESS or the cluster's own variables.
    fsdp: Number of devices among which one copy of the parameters is divided; 0 is all
      devices.
  """

  processes: int = positive(1, 10_000)
  process: int = not_negative(0, 10_000)
  coordinator: str = Field("", pattern=r"^(.+:\d+)?$")
  fsdp: int = not_negative(0, 1_000_000)

  @validator
  def _check(self) -> Self:
    """Raise an error unless the process has a valid number."""
    is_valid = self.process < self.processes
    require(is_valid, "process", "below --config.distributed.processes")
    return self


@section
class Config:
  """Configure a run.

  Attributes:
    name: Name of the run. Its directory is <runs>/<name>.
    runs: Directory that holds the directories of all runs.
    seed: First training seed, on which all random numbers of training depend.
    train_seeds: Number of training seeds. Every training is repeated with each of them.
    reuse: Directory of another run, whose tasks and whose episodes of untrained
      policies (profile, references, samples) a new run copies in place of playing them.
      Environment, models, prompts and prices must be the same; trainings may differ.
    max_usd: Cap on the US dollars that all model calls of the run are billed. 0 is no
      cap, which only models without a price may have.
    dry_run: Whether to print the remaining work with its expected cost, and run
      nothing.
  """

  name: str = Field("quickstart", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")
  runs: str = "runs"
  seed: int = not_negative(0, 10**9)
  train_seeds: int = positive(1, 100)
  reuse: str = ""
  max_usd: float = not_negative(0.0)
  dry_run: bool = False
  env: EnvConfig = Field(default_factory=EnvConfig)
  models: ModelsConfig = Field(default_factory=ModelsConfig)
  router: RouterConfig = Field(default_factory=RouterConfig)
  profile: ProfileConfig = Field(default_factory=ProfileConfig)
  references: ReferencesConfig = Field(default_factory=ReferencesConfig)
  value: ValueConfig = Field(default_factory=ValueConfig)
  sft: SFTConfig = Field(default_factory=SFTConfig)
  bopo: BoPOConfig = Field(default_factory=BoPOConfig)
  baselines: BaselinesConfig = Field(default_factory=BaselinesConfig)
  evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
  distributed: DistributedConfig = Field(default_factory=DistributedConfig)

  @validator
  def _check(self) -> Self:
    """Raise an error unless the settings of different sections fit together."""
    has_choice = len(self.models.names) > 1
    if self.models.kind == "scripted":
      require(self.env.kind != STORED, "models.kind", f"chat with env.kind={STORED}")
    if self.models.kind == RECORDED:
      require(self.env.kind == "code", "env.kind", "code with recorded models")
    require(has_choice, "models.names", "two or more models, the cheapest first")
    require(len(self.baselines.judge.names) == 1, "baselines.judge.names", "one model")
    is_valid = self.train_seeds <= self.evaluate.seeds
    requirement = "at most --config.evaluate.seeds, so that each router is evaluated"
    require(is_valid, "train_seeds", requirement)
    return self


def check_setting(setting: str, *settings: str) -> None:
  """Raise an error unless a configuration file has a setting.

  Args:
    setting: the text after the colon in --config=FILE.py:SETTING; "" without one.
    settings: the settings that the file has.

  Raises:
    ValueError: the file has no such setting.
  """
  if setting not in ("", *settings):
    names = ", ".join(settings)
    raise ValueError(f"the file has no setting {setting!r}: choose {names}, or none")


def ablate(config: Config, name: str) -> Config:
  """Return the configuration of an ablation: BoPO without one part.

  Args:
    config: the run's configuration, which stays as it is.
    name: one of ABLATIONS.
  """
  path, value = ABLATIONS[name]
  section, field = path.split(".")
  changed = dataclasses.replace(getattr(config, section), **{field: value})
  return dataclasses.replace(config, **{section: changed})


# The type of a configuration.
Settings = TypeVar("Settings")


def read_flags(
  argv: Sequence[str],
  usual: Settings,
  values: flags.FlagValues,
  load: Callable[[str], Settings] | None = None,
) -> Settings:
  """Read a configuration from a command line, and all other flags that are defined.

  Args:
    argv: the command line, the program's name first.
    usual: the configuration that the flags change.
    values: absl's flags.
    load: reads a configuration file (--config=FILE); None forbids such a file.

  Raises:
    ValueError: the command line is invalid; one line says what to correct.
  """
  try:
    config = config_flags.DEFINE_config_dataclass(
      "config", usual, "Configuration.", values, sys_argv=argv, parse_fn=load
    )
    if values(argv)[1:]:
      raise flags.Error(
        "an argument does not begin with --: write --FIELD=VALUE, and quote spaces"
      )
    names = [word.partition("=")[0].lstrip("-") for word in argv]
    for name in names:
      with contextlib.suppress(AttributeError):  # Not all words are fields.
        field = operator.attrgetter(name.removeprefix("config."))
        if names.count(name) > 1 and isinstance(field(config.value), tuple):
          raise flags.Error(f"--{name} is given twice: give all its values at once")
  except flags.Error as error:
    # A user may have written a key into the value of one of these fields, so their
    # values are not printed.
    text = re.sub(
      "(?s)(keys|key_variables?|base_urls|models|judge)=.*",
      r"\1 has a value that cannot be read",
      str(error),
    )
    raise ValueError(text) from None
  except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
    # If a flag has a wrong field or value, the library for flags raises one of these
    # exceptions.
    listing = f"{type(usual).__module__.replace('.', '/')}.py lists the fields"
    raise ValueError(f"{error.args[0]}; {listing}") from None
  return config.value


def check_values(config: Settings) -> None:
  """Check a configuration, and convert its values to the types of their fields.

  Values that a configuration file assigns are checked nowhere else.

  Raises:
    ValueError: a value is invalid; one line names the field and its rule.
  """
  try:
    text = json.dumps(config, default=vars)
    checked = TypeAdapter(type(config)).validate_json(text)
  except ValidationError as error:
    raise ValueError(explain(error, "--config")) from None
  except (TypeError, ValueError):
    raise ValueError(
      "a value of the configuration is no plain value: correct the file of --config"
    ) from None
  vars(config).update(vars(checked))


def check_variables(field: str, names: Sequence[str]) -> None:
  """Raise an error unless the environment variables that hold keys are set.

  So a key that is given in place of a variable's name is not stored.

  Args:
    field: the field of the configuration that has their names.
    names: the names; "" stands for no key.

  Raises:
    ValueError: a variable is not set.
  """
  if not {"", *os.environ}.issuperset(names):
    raise ValueError(
      f"--config.{field} must be the name of an environment variable that is set, or ''"
    )


def explain(error: ValidationError, prefix: str) -> str:
  """Describe the first error of a validation in one line.

  The value itself stays out of the text, because it may hold a key.

  Args:
    prefix: the name of the object that was checked, such as "--config".
  """
  first = error.errors(include_input=False)[0]
  field = ".".join(map(str, (prefix, *first["loc"])))
  # The validators of baar_jax/config.py raise ValueError.
  if first["type"] == "value_error":
    return f"{field}.{first['ctx']['error']}"
  return f"{field}: {first['msg']}"


def fail(error: Exception | str) -> int:
  """Print an error in one line. Return 2, the exit code after a user's mistake."""
  line = "".join(filter(str.isprintable, " ".join(str(error).split())))
  print(f"error: {line}", file=sys.stderr)
  return 2
