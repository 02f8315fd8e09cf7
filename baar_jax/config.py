"""The configuration: nested dataclasses, with the bounds of each field beside it."""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

# Clients of the endpoint play this environment.
SERVED = "served"
# Each ablation switches off one part of BoPO: (section, field, value).
ABLATIONS = {
  "no-stratified": ("references", "clone_large", True),
  "no-reference": ("bopo", "reference_guided", False),
  "no-hard-bonus": ("bopo", "r_hard", 0.0),
}
# Each view surrounds the previews of one step, and the budgets, with these tokens.
MARKUP_TOKENS = {"transcript": 80, "paper": 160}
# Vanilla RL rolls out at most this multiple of BoPO's batches.
VANILLA_BATCHES = 3
# Each purpose of an episode has this number of seeds; see rollout/specs.py.
SEEDS = 1000
# The rollouts of each training seed have this number of seeds.
ROLLOUT_RANGE = 1_000_000
# The value heads are trained for cost weights up to this one; see router/head.py.
MAX_PRICE = 2.0
# These addresses hold no user, password, query or fragment, which may be a key.
URL = r"^https?://([A-Za-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]+)?(/[A-Za-z0-9_.~/%-]*)?$"
VARIABLE = r"^([A-Za-z_][A-Za-z0-9_]*)?$"
Share = Annotated[float, Field(ge=0, le=1)]
Dollars = Annotated[float, Field(ge=0, le=1e9)]
STRICT = {"extra": "forbid", "hide_input_in_errors": True, "allow_inf_nan": False}
section = dataclass(config=STRICT)
validator = model_validator(mode="after")


def positive(default: float, most: float = 1_000_000) -> Any:
  """Declare a number above 0 and at most `most`."""
  return Field(default, gt=0, le=most)


def not_negative(default: float | None, most: float = 1e9) -> Any:
  """Declare a number from 0 to `most`."""
  return Field(default, ge=0, le=most)


def require(works: bool, field: str, must: str) -> None:
  """Raise ValueError with the field and its rule unless it works."""
  if not works:
    raise ValueError(f"{field} must be {must}")


class OpenOptions(dict):
  """Take options from flags: a flag that names a new one sets it to a text."""

  def __missing__(self, name: str) -> str:
    return self.setdefault(name, "")


@section
class EnvConfig:
  """Configure the environment, its tasks and its processes.

  Attributes:
    kind: a name of ENVIRONMENTS in envs/table.py, or FILE.py:CLASS for your own Env.
    processes: Each child process serves some environments; 0 starts one process per
      core.
    live_per_process: These episodes share a process (and its JVM).
    timeout_s: A process is replaced if one call takes longer.
    options: The class Options in the environment's adapter.py declares and checks
      these.
  """

  kind: str = "scienceworld"
  train_tasks: int = positive(96)
  dev_tasks: int = positive(34)
  test_tasks: int = positive(60)
  max_steps: int = positive(40)
  processes: int = not_negative(0, 10**4)
  live_per_process: int = positive(4, 10**4)
  timeout_s: float = positive(120.0)
  options: dict = Field(default_factory=dict)

  def __post_init__(self) -> None:
    self.options = OpenOptions(self.options)


@section
class ModelsConfig:
  """Configure the models to route between, the cheapest first.

  Attributes:
    prices: A model's row is (input, cached input, output[, cache write]), in $ per
      million tokens. Without rows the list prices count.
    skills: A scripted model errs at SMALL's rates with skill 0 and at LARGE's with
      skill 1. Without skills the ranks are equally spaced.
    base_urls: With kind="chat" these are endpoints of OpenAI's chat completions, one
      for all models or one for each. Without any it is OpenAI's own.
    key_variables: These environment variables hold the endpoints' keys; "" needs no
      key.
    max_completion_tokens: Budgets reserve this number of tokens for each reply.
    wire: The endpoints' wire form is a file of baar_jax/llms, such as chat_completions.
    concurrency: Each model gets at most this number of calls at a time.
    timeout_s: An attempt fails unless its last byte comes in time.
    retries: A reply is tried again this number of times.
    max_failures: This number of failures in a row (attempts, episodes) ends the run.
  """

  kind: str = Field("scripted", pattern="^(scripted|chat)$")
  names: tuple[Annotated[str, Field(min_length=1)], ...] = ("gpt-4.1-mini", "gpt-4.1")
  prices: tuple[
    Annotated[tuple[Dollars, ...], Field(min_length=3, max_length=4)], ...
  ] = ()
  skills: tuple[Share, ...] = ()
  base_urls: tuple[Annotated[str, Field(pattern=URL)], ...] = ()
  key_variables: tuple[Annotated[str, Field(pattern=VARIABLE)], ...] = ()
  temperature: float = not_negative(0.7, 2)
  max_completion_tokens: int = positive(1024, 10**7)
  wire: str = Field("chat_completions", pattern=r"^[a-z][a-z0-9_]*$")
  token_limit_field: str = Field(
    "max_completion_tokens", pattern="^max_(completion_)?tokens$"
  )
  concurrency: int = positive(16, 10**4)
  timeout_s: float = positive(120.0)
  retries: int = not_negative(5, 100)
  max_failures: int = positive(100)

  @validator
  def _check(self) -> Self:
    count = len(self.names)
    for field in ("prices", "skills"):
      works = len(getattr(self, field)) in (0, count)
      require(works, field, "one for each of the names, or ()")
    for field in ("base_urls", "key_variables"):
      works = len(getattr(self, field)) in (0, 1, count)
      require(works, field, "one for all or each of the names, or ()")
    return self


@section
class RouterConfig:
  """Configure the router: its weights or shape (Qwen2's names), and its text.

  Attributes:
    weights: Weights are a Hugging Face directory of a Qwen2 or Qwen2.5, a GGUF file, or
      "smollm2"; they bring their shape and tokenizer. Without weights the router has
      the shape below and random parameters, and its tokenizer is trained on the
      profile.
    layers: The router keeps the first layers of the weights; 0 keeps all.
    dtype: Parameters are float32; the router computes in this type.
    vocab_size: All bytes and the decisions are in the vocabulary.
    show_budget: The text tells the router the rest of its call budget.
    max_tokens: A longer sequence loses its oldest whole steps.
    buckets: This number of row lengths is compiled: equal parts of max_tokens.
    description_tokens: Longer texts are cut to these previews, with a mark.
    usd_per_million_tokens: The report has a column for the router's own compute at this
      price.
  """

  weights: str = ""
  layers: int = not_negative(0, 1000)
  dtype: str = Field("float32", pattern="^(float32|bfloat16)$")
  vocab_size: int = Field(2048, ge=258, le=10**8)
  hidden_size: int = positive(64)
  intermediate_size: int = positive(192)
  num_layers: int = positive(2, 1000)
  num_heads: int = positive(2, 10**4)
  num_kv_heads: int = positive(1, 10**4)
  head_dim: int = Field(32, gt=0, le=10**4, multiple_of=2)
  rope_theta: float = Field(10_000.0, ge=1, le=1e12)
  tie_word_embeddings: bool = True
  view: str = Field("transcript", pattern="^(transcript|paper)$")
  show_budget: bool = True
  max_tokens: int = positive(768)
  buckets: int = positive(2, 100)
  description_tokens: int = positive(96)
  action_tokens: int = positive(12)
  result_tokens: int = positive(24)
  usd_per_million_tokens: float = not_negative(0.02)

  @validator
  def _check(self) -> Self:
    previews = self.description_tokens + self.action_tokens + 2 * self.result_tokens
    least = 2 * (previews + MARKUP_TOKENS[self.view])
    works = self.max_tokens >= least
    require(works, "max_tokens", f"at least {least} for these previews")
    works = self.num_heads % self.num_kv_heads == 0
    require(works, "num_heads", "a multiple of --config.router.num_kv_heads")
    return self


@section
class ProfileConfig:
  """Configure the trials that label the training tasks.

  Attributes:
    trials: Each boundary model plays each task this number of times (K of the paper).
    robustness: The report also labels the tasks with these K.
  """

  trials: int = positive(5, SEEDS)
  robustness: tuple[Annotated[int, Field(gt=0, le=SEEDS)], ...] = ()
  easy_rate: float = positive(0.8, 1)


@section
class PretrainConfig:
  """Configure the pretraining of random weights, in place of Qwen2.5's (our choice).

  Attributes:
    epochs: A router passes over the stored training episodes; 0 leaves its weights
      random.
  """

  epochs: int = not_negative(0, 1000)
  batch_episodes: int = positive(32)
  learning_rate: float = positive(3e-3, 1)


class SamplePlan(NamedTuple):
  """Stored samples of a task; see `rollout.rules.take_sampled` for the kinds.

  Attributes:
    all_tasks: The plan samples all profiled training tasks, not the hard ones alone.
  """

  kind: Literal["samples", "together", "repeats"]
  count: Annotated[int, Field(gt=0, lt=SEEDS // 4)]
  all_tasks: bool = False


@section
class ReferencesConfig:
  """Configure the stored samples that training learns from.

  Attributes:
    samples: Each hard task gets this number of samples (N of the paper).
    plans: Pretraining and value heads also learn from these, in this order (our
      choice).
    clone_large: This ablation leaves out stratified sampling.
  """

  samples: int = Field(20, gt=0, lt=SEEDS // 4)
  plans: tuple[SamplePlan, ...] = ()
  clone_large: bool = False

  @validator
  def _check(self) -> Self:
    kinds = [plan.kind for plan in self.plans]
    require(len(kinds) == len({*kinds}), "plans", "of different kinds")
    for plan in self.plans:
      works = plan.all_tasks or plan.kind != "samples"
      require(works, "plans", "of all tasks for samples: hard tasks have theirs")
    count = sum(plan.count for plan in self.plans)
    require(count < SEEDS, "plans", f"of fewer than {SEEDS} samples in all")
    return self


@section
class ValueConfig:
  """Configure the budget-conditioned router: value heads behind a frozen trunk.

  Attributes:
    updates: Every head takes this number of gradient steps; 0 leaves the router out.
    prices: For each budget dev chooses one of these cost weights.
    heads: The heads are an ensemble.
    return_share: The first share of the updates learns Monte-Carlo returns.
    noise: Noise on the hidden states is in units of their standard deviations.
  """

  updates: int = Field(0, ge=0, lt=10**6)
  prices: tuple[Annotated[float, Field(ge=0, le=MAX_PRICE)], ...] = Field(
    (0.0, 0.1, 0.2, 0.5, 1.0), min_length=1
  )
  heads: int = positive(5, 100)
  value_width: int = positive(64, 1000)
  advantage_width: int = positive(32, 1000)
  batch_decisions: int = positive(1024, 10**5)
  return_share: float = not_negative(0.3, 1)
  learning_rate: float = positive(2e-3, 1)
  weight_decay: float = not_negative(0.3, 100)
  noise: float = not_negative(0.5, 100)


@section
class SFTConfig:
  """Configure the supervised training of routers.

  Attributes:
    updates: A training ends after this number of updates at the latest.
    check_every: The dev loss is measured each time after this number of updates.
    patience: A training ends after this number of measurements without a new best.
    micro_episodes: A compiled call has this number of rows, also in BoPO and for value
      heads.
    learning_rates: All rates are tried, also for the scorer and the classifier. The
      best on dev stays.
    adam_eps: With an eps above most entries of the gradient, AdamW keeps their sizes.
      That means less noise in short runs.
  """

  updates: int = Field(150, gt=0, lt=10**6)
  check_every: int = Field(5, gt=0, lt=10**6)
  patience: int = Field(4, gt=0, lt=10**6)
  batch_episodes: int = positive(64)
  micro_episodes: int = positive(16, 10**5)
  hard_share: float = not_negative(0.7, 1)
  learning_rates: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
    (2e-5,), min_length=1
  )
  warmup_share: float = not_negative(0.03, 1)
  adam_eps: float = positive(1e-8, 1)
  weight_decay: float = not_negative(0.01, 1)
  clip_norm: float = positive(1.0)


@section
class BoPOConfig:
  """Configure the reinforcement learning of the paper.

  Attributes:
    lam: Each cost weight trains its own router.
    reference_guided: The ablation sets False: the group's mean alone is the baseline.
    adam_eps: see SFTConfig.
    updates: An update rolls out one batch of episodes.
    epochs: Training passes this number of times over each rollout batch.
    batch_episodes: A gradient step takes this number of episodes.
  """

  lam: tuple[Annotated[float, Field(ge=0, le=100)], ...] = Field(
    (0.1, 0.3, 0.5, 0.7, 0.9), min_length=1
  )
  r_success: float = not_negative(1.0, 100)
  r_hard: float = not_negative(0.5, 100)
  group_size: int = Field(8, ge=2, le=10**5)
  advantage_eps: float = positive(0.1, 100)
  advantage_clip: float = positive(5.0)
  reference_guided: bool = True
  kl_beta: float = not_negative(0.04, 100)
  ratio_level: str = Field("trajectory", pattern="^(trajectory|decision)$")
  clip_low: float | None = not_negative(None, 1)
  clip_high: float | None = not_negative(None, 1e6)
  learning_rate: float = positive(1e-6, 1)
  adam_eps: float = positive(1e-8, 1)
  clip_norm: float = positive(1.0)
  updates: int = Field(100, gt=0, lt=10**6)
  tasks_per_update: int = positive(8, 10**5)
  epochs: int = positive(1, 1000)
  batch_episodes: int = positive(64)

  @validator
  def _check(self) -> Self:
    most = ROLLOUT_RANGE // (VANILLA_BATCHES * self.group_size)
    require(self.updates <= most, "updates", f"at most {most}, for each episode's seed")
    return self


@section
class BaselinesConfig:
  """Configure the routers that are trained and evaluated beside BoPO.

  Attributes:
    rivals: These are names of rivals in `train/families.py`.
    compared_lam: Ablations are trained and rivals compared at this cost weight; None is
      the first of bopo.lam.
    updates: The scorer and the classifier take at most this number of updates.
    judge: A zero-shot router asks this model. Scripted runs have a stand-in at its
      price.
  """

  rivals: tuple[str, ...] = ()
  ablations: tuple[
    Annotated[str, Field(pattern=f"^({'|'.join(ABLATIONS)})$")], ...
  ] = ()
  compared_lam: float | None = not_negative(None, 100)
  updates: int = Field(150, gt=0, lt=10**6)
  judge: ModelsConfig = Field(
    default_factory=lambda: ModelsConfig(
      names=("gpt-5",), temperature=1.0, max_completion_tokens=2048
    )
  )


@section
class EvaluateConfig:
  """Configure the evaluated policies, budgets and seeds.

  Attributes:
    seeds: Each task is played with this number of evaluation seeds.
    tasks: The first tasks of dev and of test are evaluated; 0 takes all.
    thresholds: Each threshold adds a point: LARGE if its probability is above the
      threshold.
    shares: Each share adds the point at which LARGE has this share of the decisions in
      stored training episodes. `router.policy.Threshold` tells the case of more models.
    budget_rules: Hard budgets use these points too, not argmax alone.
    usd_budgets: Each of these caps the dollars of a task (B_max).
    bootstrap: Each interval takes this number of resamples of the tasks.
  """

  seeds: int = positive(3, SEEDS)
  tasks: int = not_negative(0)
  random_p: tuple[Share, ...] = (0.25, 0.5, 0.75)
  thresholds: tuple[Share, ...] = ()
  shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
  budget_rules: bool = False
  call_budgets: tuple[Annotated[int, Field(ge=0, le=10**9)], ...] = (5, 10, 15)
  usd_budgets: tuple[Dollars, ...] = ()
  bootstrap: int = positive(1000, 10**5)

  @validator
  def _check(self) -> Self:
    works = 0.5 not in self.thresholds
    require(works, "thresholds", "without 0.5, which is argmax")
    return self


@section
class DistributedConfig:
  """Configure the processes that train one router.

  Each plays its share of the episodes.

  Attributes:
    process: The number of this process counts from 0.
    coordinator: Process 0 listens at host:port.
    fsdp: This number of devices shares one copy of the parameters; 0 is all devices.
  """

  processes: int = positive(1, 10**4)
  process: int = not_negative(0, 10**4)
  coordinator: str = Field("", pattern=r"^(.+:\d+)?$")
  fsdp: int = not_negative(0, 10**6)

  @validator
  def _check(self) -> Self:
    works = self.process < self.processes
    require(works, "process", "below --config.distributed.processes")
    works = self.processes == 1 or self.coordinator
    require(works, "coordinator", "host:port of process 0")
    return self


@section
class ServeConfig:
  """Configure the endpoint of --stage=serve.

  Attributes:
    host: Any other host needs a key.
    port: 0 takes any free port.
    policy: This policy decides for the name "baar". "sample" is the router whose
      sessions BoPO learns from next.
    router: The router comes from this run's directory; "" is the run that serves.
    max_usd: These caps of a session are defaults, which a client can only lower; None
      is no cap.
    reserve_usd: This part of max_usd is for a last call when nothing else fits.
    route_by_cache: A costlier model acts if its prompt cache makes it no costlier.
    fallback: Another model answers if all retries of the router's choice fail.
    record_text: Training needs the stored texts of tasks, results and actions.
    key_variable: This environment variable holds the clients' key.
    cache_ttl_s: An endpoint's prompt cache stays warm this long.
    max_sessions: The router's cache has room for this number of sessions.
  """

  host: str = Field("127.0.0.1", min_length=1, max_length=253)
  port: int = not_negative(8000, 65535)
  policy: str = Field(
    "router", pattern="^(router|small|large|random|stratified|sample)$"
  )
  router: str = ""
  max_usd: float | None = not_negative(None)
  max_large_calls: int | None = not_negative(None, 10**9)
  reserve_usd: float = not_negative(0.0)
  route_by_cache: bool = False
  fallback: bool = False
  record_text: bool = False
  key_variable: str = Field("", pattern=VARIABLE)
  cache_ttl_s: float = not_negative(300.0, 1e6)
  max_sessions: int = positive(256, 10**5)
  max_body_mb: float = positive(16.0, 1000)


@section
class Config:
  """Configure a whole run.

  Attributes:
    runs: The run's directory is <runs>/<name>.
    train_seeds: Every training is repeated with this number of training seeds.
    max_usd: All model calls together may cost at most this; 0 is no cap.
    traces: --stage=import reads this file.
    dry_run: A dry run prints the remaining work and its expected cost, and runs
      nothing.
  """

  name: str = Field("quickstart", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")
  runs: str = "runs"
  seed: int = not_negative(0, 10**9)
  train_seeds: int = positive(1, 100)
  max_usd: float = not_negative(0.0)
  traces: str = ""
  dry_run: bool = False
  env: EnvConfig = Field(default_factory=EnvConfig)
  models: ModelsConfig = Field(default_factory=ModelsConfig)
  router: RouterConfig = Field(default_factory=RouterConfig)
  profile: ProfileConfig = Field(default_factory=ProfileConfig)
  references: ReferencesConfig = Field(default_factory=ReferencesConfig)
  pretrain: PretrainConfig = Field(default_factory=PretrainConfig)
  value: ValueConfig = Field(default_factory=ValueConfig)
  sft: SFTConfig = Field(default_factory=SFTConfig)
  bopo: BoPOConfig = Field(default_factory=BoPOConfig)
  baselines: BaselinesConfig = Field(default_factory=BaselinesConfig)
  evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
  serve: ServeConfig = Field(default_factory=ServeConfig)
  distributed: DistributedConfig = Field(default_factory=DistributedConfig)

  @validator
  def _check(self) -> Self:
    judge = self.baselines.judge
    count = len(self.models.names)
    if self.models.kind == "scripted":
      require(self.env.kind != SERVED, "models.kind", f"chat with env.kind={SERVED}")
      works = count in (2, 3)
      require(works, "models.names", "two or three models, the cheapest first")
    require(count > 1, "models.names", "two or more models, the cheapest first")
    require(len(judge.names) == 1, "baselines.judge.names", "one model")
    works = not self.router.weights or self.pretrain.epochs == 0
    must = "0 with --config.router.weights, which are pretrained"
    require(works, "pretrain.epochs", must)
    works = self.train_seeds <= self.evaluate.seeds
    must = "at most --config.evaluate.seeds, so that each router is evaluated"
    require(works, "train_seeds", must)
    works = self.baselines.compared_lam in (None, *self.bopo.lam)
    must = f"one of --config.bopo.lam, {self.bopo.lam}"
    require(works, "baselines.compared_lam", must)
    for section in ("profile", "value", "sft", "bopo", "baselines", "evaluate"):
      for name, values in vars(getattr(self, section)).items():
        if isinstance(values, tuple):
          # Keys of policies hold these values, with six digits.
          texts = {v if isinstance(v, str) else f"{v:g}" for v in values}
          works = len(texts) == len(values)
          require(works, f"{section}.{name}", "of different values")
    return self


def check_setting(setting: str, *settings: str) -> None:
  """Raise ValueError unless a configuration file has this setting; "" is the usual."""
  if setting not in ("", *settings):
    names = ", ".join(settings)
    raise ValueError(f"no setting {setting!r}: use one of {names}, or none")


def compared_lam(c: Config) -> float:
  """Find the cost weight of ablations, at which rivals are compared."""
  lam = c.baselines.compared_lam
  return c.bopo.lam[0] if lam is None else lam


def ablate(config: Config, name: str) -> Config:
  """Switch off one part of the method."""
  section, part, value = ABLATIONS[name]
  changed = dataclasses.replace(getattr(config, section), **{part: value})
  return dataclasses.replace(config, **{section: changed})
