"""The configuration: one dataclass per concern, each bound beside its field, nested in Config."""

import dataclasses
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

SERVED = "served"  # the environment that clients of the endpoint play, or have played
# The part of BoPO that each ablation leaves out: (section, field, value).
ABLATIONS = {
  "no-stratified": ("references", "clone_large", True),
  "no-reference": ("bopo", "reference_guided", False),
  "no-hard-bonus": ("bopo", "r_hard", 0.0),
}
MARKUP_TOKENS = {
  "transcript": 80,
  "paper": 160,
}  # around the previews of one step, with budgets
VANILLA_BATCHES = 3  # vanilla RL rolls out at most so many times BoPO's batches
SEEDS = 1000  # how many seeds an episode's purpose has; see rollout/specs.py
ROLLOUT_RANGE = 1_000_000  # how many seeds the rollouts of a training seed have
JUDGE = {"names": ("gpt-5",), "temperature": 1.0, "max_completion_tokens": 2048}
# Entries of tuples.
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=100)]
MAX_PRICE = (
  2.0  # of a dollar, that the heads are trained for; see baar_jax/router/head.py
)
Price = Annotated[float, Field(ge=0, le=MAX_PRICE)]
Dollars = Annotated[float, Field(ge=0, le=1e9)]
# A user, a password, a query or a fragment may hold a key.
URL = r"^https?://([A-Za-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]+)?(/[A-Za-z0-9_.~/%-]*)?$"
Address = Annotated[str, Field(pattern=URL)]
Variable = Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")]
STRICT = {"extra": "forbid", "hide_input_in_errors": True, "allow_inf_nan": False}
section = dataclass(config=STRICT)
validator = model_validator(mode="after")


def require(works: bool, field: str, must: str) -> None:
  """Raise ValueError, which names the field and what it must be, unless it works."""
  if not works:
    raise ValueError(f"{field} must be {must}")


class OpenOptions(dict):
  """Options to which a flag can add one, which it reads as a text."""

  def __missing__(self, name: str) -> str:
    return self.setdefault(name, "")


@section
class EnvConfig:
  # One of ENVIRONMENTS in envs/table.py, or FILE.py:CLASS for an Env of the user's.
  kind: str = "scienceworld"
  train_tasks: int = Field(96, gt=0, le=10**6)
  dev_tasks: int = Field(34, gt=0, le=10**6)
  test_tasks: int = Field(60, gt=0, le=10**6)
  max_steps: int = Field(40, gt=0, le=10**6)
  processes: int = Field(0, ge=0, le=10**4)  # child processes; 0 is one per core
  live_per_process: int = Field(
    4, gt=0, le=10**4
  )  # episodes that share a process (and its JVM)
  timeout_s: float = Field(
    120.0, gt=0, le=1e6
  )  # of one call; a slower process is replaced
  # The environment's own: fields of the class Options in its adapter.py, which checks them.
  options: dict = Field(default_factory=dict)

  def __post_init__(self) -> None:
    self.options = OpenOptions(self.options)


@section
class ModelsConfig:
  kind: str = Field("scripted", pattern="^(scripted|chat)$")
  names: tuple[Annotated[str, Field(min_length=1)], ...] = ("gpt-4.1-mini", "gpt-4.1")
  # Per model (input, cached input, output[, cache write]), $ per million tokens; () is the list's.
  prices: tuple[
    Annotated[tuple[Dollars, ...], Field(min_length=3, max_length=4)], ...
  ] = ()
  # Of scripted models, from 0 (SMALL's rates of error) to 1 (LARGE's); () are equal steps by rank.
  skills: tuple[Share, ...] = ()
  # For kind="chat", one for all models or one for each: endpoints of OpenAI's chat completions, ()
  # is OpenAI's own, and environment variables that hold their keys, "" where none is needed.
  base_urls: tuple[Address, ...] = ()
  key_variables: tuple[Variable, ...] = ()
  temperature: float = Field(0.7, ge=0, le=2)
  max_completion_tokens: int = Field(
    1024, gt=0, le=10**7
  )  # of one reply; budgets reserve them all
  # The endpoints' wire form: a file of baar_jax/llms, such as chat_completions.
  wire: str = Field("chat_completions", pattern=r"^[a-z][a-z0-9_]*$")
  token_limit_field: str = Field(
    "max_completion_tokens", pattern="^max_(completion_)?tokens$"
  )
  concurrency: int = Field(16, gt=0, le=10**4)  # calls of one model at a time
  timeout_s: float = Field(120.0, gt=0, le=1e6)  # of an attempt, to its last byte
  retries: int = Field(5, ge=0, le=100)  # of one reply, after its first attempt
  max_failures: int = Field(
    100, gt=0, le=10**6
  )  # in a row (attempts, episodes) end the run

  @validator
  def _check(self) -> Self:
    for field in ("prices", "skills", "base_urls", "key_variables"):
      values = getattr(self, field)
      for_all = "all or " if field in ("base_urls", "key_variables") else ""
      works = len(values) in (0, len(self.names)) or for_all and len(values) == 1
      require(works, field, f"one for {for_all}each of the names, or ()")
    return self


@section
class RouterConfig:  # its weights or shape (Qwen2's field names), and the text that it reads
  # A Hugging Face directory of a Qwen2 or Qwen2.5 with its shape and tokenizer, or what setup makes
  # one of: "smollm2", or a GGUF file. Without weights the shape is as below, they are random, and a
  # tokenizer is trained on the profile.
  weights: str = ""
  layers: int = Field(
    0, ge=0, le=1000
  )  # of the weights, from the first on; 0 is all of them
  dtype: str = Field("float32", pattern="^(float32|bfloat16)$")  # parameters: float32
  vocab_size: int = Field(2048, ge=258, le=10**8)  # all bytes and the decisions
  hidden_size: int = Field(64, gt=0, le=10**6)
  intermediate_size: int = Field(192, gt=0, le=10**6)
  num_layers: int = Field(2, gt=0, le=1000)
  num_heads: int = Field(2, gt=0, le=10**4)
  num_kv_heads: int = Field(1, gt=0, le=10**4)
  head_dim: int = Field(32, gt=0, le=10**4, multiple_of=2)
  rope_theta: float = Field(10_000.0, ge=1, le=1e12)
  tie_word_embeddings: bool = True
  view: str = Field("transcript", pattern="^(transcript|paper)$")
  show_budget: bool = True  # write what is left of a call budget into the text
  # Of one sequence; the oldest whole steps of a longer one are left out.
  max_tokens: int = Field(768, gt=0, le=10**6)
  buckets: int = Field(
    2, gt=0, le=100
  )  # row lengths that are compiled: equal parts of max_tokens
  description_tokens: int = Field(
    96, gt=0, le=10**6
  )  # previews: longer texts are cut, with a mark
  action_tokens: int = Field(12, gt=0, le=10**6)
  result_tokens: int = Field(24, gt=0, le=10**6)
  # The price of router compute, which is reported in its own column.
  usd_per_million_tokens: float = Field(0.02, ge=0, le=1e9)

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
  trials: int = Field(5, gt=0, le=SEEDS)  # K of the paper, per boundary model
  robustness: tuple[Annotated[int, Field(gt=0, le=SEEDS)], ...] = ()  # other K
  easy_rate: float = Field(0.8, gt=0, le=1)


@section
class PretrainConfig:  # of a router from random weights, in place of Qwen2.5's (our choice)
  epochs: int = Field(
    0, ge=0, le=1000
  )  # over stored training episodes; 0 leaves random weights
  batch_episodes: int = Field(32, gt=0, le=10**6)
  learning_rate: float = Field(3e-3, gt=0, le=1)


class SamplePlan(NamedTuple):
  """Stored samples of a task; see `rollout.rules.take_sampled` for the kinds."""

  kind: Literal["samples", "together", "repeats"]
  count: Annotated[int, Field(gt=0, lt=SEEDS // 4)]
  all_tasks: bool = False  # of all profiled training tasks, not the hard ones alone


@section
class ReferencesConfig:
  samples: int = Field(20, gt=0, lt=SEEDS // 4)  # N of the paper, per hard task
  # Our choice: what pretraining and values learn from beside these, in this order.
  plans: tuple[SamplePlan, ...] = ()
  clone_large: bool = False  # ablation: no stratified sampling

  @validator
  def _check(self) -> Self:
    count = sum(plan.count for plan in self.plans)
    require(count < SEEDS, "plans", f"of fewer than {SEEDS} samples in all")
    return self


@section
class ValueConfig:  # of the router that knows its budget: heads behind a router that stays as it is
  updates: int = Field(
    0, ge=0, lt=10**6
  )  # gradient steps of every head; 0 leaves it out
  # Of which dev chooses, for each budget.
  prices: tuple[Price, ...] = Field((0.0, 0.1, 0.2, 0.5, 1.0), min_length=1)
  heads: int = Field(5, gt=0, le=100)  # which vote
  value_width: int = Field(64, gt=0, le=1000)
  advantage_width: int = Field(32, gt=0, le=1000)
  batch_decisions: int = Field(1024, gt=0, le=10**5)
  return_share: float = Field(
    0.3, ge=0, le=1
  )  # of the updates, that learn returns as they were
  learning_rate: float = Field(2e-3, gt=0, le=1)
  weight_decay: float = Field(0.3, ge=0, le=100)
  noise: float = Field(
    0.5, ge=0, le=100
  )  # on the hidden states, in units of their spread


@section
class SFTConfig:
  updates: int = Field(150, gt=0, lt=10**6)  # at most
  check_every: int = Field(
    5, gt=0, lt=10**6
  )  # updates between two measurements of the dev loss
  patience: int = Field(
    4, gt=0, lt=10**6
  )  # measurements without a new best that end a training
  batch_episodes: int = Field(64, gt=0, le=10**6)
  micro_episodes: int = Field(
    16, gt=0, le=10**5
  )  # rows of a compiled call, BoPO's and values' too
  hard_share: float = Field(0.7, ge=0, le=1)
  # All are tried, also for the scorer and the classifier, and the best on dev is kept.
  learning_rates: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
    (2e-5,), min_length=1
  )
  warmup_share: float = Field(0.03, ge=0, le=1)
  # With an eps above most entries of the gradient their sizes count: less noise in short runs.
  adam_eps: float = Field(1e-8, gt=0, le=1)
  weight_decay: float = Field(0.01, ge=0, le=1)
  clip_norm: float = Field(1.0, gt=0, le=1e6)


@section
class BoPOConfig:
  # The weights of cost; each has its own router.
  lam: tuple[Weight, ...] = Field((0.1, 0.3, 0.5, 0.7, 0.9), min_length=1)
  r_success: float = Field(1.0, ge=0, le=100)
  r_hard: float = Field(0.5, ge=0, le=100)
  group_size: int = Field(8, ge=2, le=10**5)
  advantage_eps: float = Field(0.1, gt=0, le=100)
  advantage_clip: float = Field(5.0, gt=0, le=1e6)
  reference_guided: bool = True  # False is the ablation: the group's mean alone
  kl_beta: float = Field(0.04, ge=0, le=100)
  ratio_level: str = Field("trajectory", pattern="^(trajectory|decision)$")
  clip_low: float | None = Field(None, ge=0, le=1)
  clip_high: float | None = Field(None, ge=0, le=1e6)
  learning_rate: float = Field(1e-6, gt=0, le=1)
  adam_eps: float = Field(1e-8, gt=0, le=1)  # as for SFT
  clip_norm: float = Field(1.0, gt=0, le=1e6)
  updates: int = Field(100, gt=0, lt=10**6)  # rollout batches
  tasks_per_update: int = Field(8, gt=0, le=10**5)
  epochs: int = Field(1, gt=0, le=1000)  # passes over each rollout batch
  batch_episodes: int = Field(64, gt=0, le=10**6)  # of one gradient step

  @validator
  def _check(self) -> Self:
    most = ROLLOUT_RANGE // (VANILLA_BATCHES * self.group_size)
    require(self.updates <= most, "updates", f"at most {most}, for each episode's seed")
    return self


@section
class BaselinesConfig:  # what is trained and evaluated beside BoPO
  rivals: tuple[str, ...] = ()  # of `train.families.RIVALS`
  ablations: tuple[
    Annotated[str, Field(pattern=f"^({'|'.join(ABLATIONS)})$")], ...
  ] = ()
  # The weight of cost at which ablations are trained and rivals compared; None is the first of lam.
  compared_lam: float | None = Field(None, ge=0, le=100)
  updates: int = Field(150, gt=0, lt=10**6)  # at most, of the scorer and the classifier
  # The model that a zero-shot router asks; in scripted runs a stand-in at this model's price.
  judge: ModelsConfig = Field(default_factory=lambda: ModelsConfig(**JUDGE))


@section
class EvaluateConfig:
  seeds: int = Field(3, gt=0, le=SEEDS)
  tasks: int = Field(
    0, ge=0, le=10**9
  )  # how many of dev and of test, from the first on; 0 is all
  random_p: tuple[Share, ...] = (0.25, 0.5, 0.75)
  # Extra points: LARGE where its probability is above a threshold, or above the threshold at which
  # LARGE has this share of the decisions in stored training episodes (of more models: Threshold).
  thresholds: tuple[Share, ...] = ()
  shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
  budget_rules: bool = (
    False  # use these points under hard budgets too; else argmax alone
  )
  call_budgets: tuple[Annotated[int, Field(ge=0, le=10**9)], ...] = (5, 10, 15)
  usd_budgets: tuple[Dollars, ...] = ()  # B_max of a task
  bootstrap: int = Field(
    1000, gt=0, le=10**5
  )  # resamples of the tasks behind each interval

  @validator
  def _check(self) -> Self:
    works = 0.5 not in self.thresholds
    require(works, "thresholds", "without 0.5, which is argmax")
    return self


@section
class DistributedConfig:  # processes train one router, each on its share of the episodes
  processes: int = Field(1, gt=0, le=10**4)
  process: int = Field(0, ge=0, le=10**4)  # the number of this process, from 0
  coordinator: str = Field("", pattern=r"^(.+:\d+)?$")  # host:port of process 0
  fsdp: int = Field(
    0, ge=0, le=10**6
  )  # over how many devices parameters are split; 0 is all

  @validator
  def _check(self) -> Self:
    works = self.process < self.processes
    require(works, "process", "below --config.distributed.processes")
    works = self.processes == 1 or self.coordinator
    require(works, "coordinator", "host:port of process 0")
    return self


@section
class ServeConfig:  # the endpoint of --stage=serve
  host: str = Field("127.0.0.1", min_length=1, max_length=253)  # any other needs a key
  port: int = Field(8000, ge=0, le=65535)  # 0 is any that is free
  # Who decides for the name "baar"; "sample" is the router whose sessions BoPO learns from next.
  policy: str = Field(
    "router", pattern="^(router|small|large|random|stratified|sample)$"
  )
  router: str = ""  # the directory of the run whose router it is; "" is this one
  # Of a session: the default, which a client can only lower. None is no cap.
  max_usd: float | None = Field(None, ge=0, le=1e9)
  max_large_calls: int | None = Field(None, ge=0, le=10**9)
  # Of max_usd, for a last call when nothing else fits.
  reserve_usd: float = Field(0.0, ge=0, le=1e9)
  route_by_cache: bool = (
    False  # a dearer model acts where its prompt cache makes it no dearer
  )
  fallback: bool = (
    False  # another model answers where all retries of the router's choice fail
  )
  record_text: bool = False  # store tasks, results and actions, which training needs
  key_variable: str = Field(
    "", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$"
  )  # of the clients' key
  cache_ttl_s: float = Field(
    300.0, ge=0, le=1e6
  )  # how long an endpoint's prompt cache stays warm
  max_sessions: int = Field(256, gt=0, le=10**5)  # in the router's cache
  max_body_mb: float = Field(16.0, gt=0, le=1000)


@section
class Config:
  name: str = Field("quickstart", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")
  runs: str = "runs"  # the run's directory is <runs>/<name>
  seed: int = Field(0, ge=0, le=10**9)
  train_seeds: int = Field(
    1, gt=0, le=100
  )  # everything that is trained is trained so many times
  max_usd: float = Field(0.0, ge=0, le=1e9)  # cap on all model calls; 0 is no cap
  traces: str = ""  # the file that --stage=import reads
  dry_run: bool = (
    False  # print what is still to be run and what it may cost, and run nothing
  )
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
      require(
        count in (2, 3), "models.names", "two or three models, the cheapest first"
      )
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
        if isinstance(values, tuple):  # they tell policies apart, with six digits
          texts = [v if isinstance(v, str) else f"{v:g}" for v in values]
          works = len({*texts}) == len(texts)
          require(works, f"{section}.{name}", "of different values")
    return self


def check_setting(setting: str, *settings: str) -> None:
  """Raises ValueError unless a configuration file has this setting; "" is its usual one."""
  if setting not in ("", *settings):
    raise ValueError(
      f"no setting {setting!r}: use one of {', '.join(settings)}, or none"
    )


def compared_lam(c: Config) -> float:
  """The weight of cost that ablations are trained with, and at which rivals are compared."""
  return c.bopo.lam[0] if c.baselines.compared_lam is None else c.baselines.compared_lam


def ablate(config: Config, name: str) -> Config:
  """The configuration without one part of the method."""
  section, part, value = ABLATIONS[name]
  changed = dataclasses.replace(getattr(config, section), **{part: value})
  return dataclasses.replace(config, **{section: changed})
