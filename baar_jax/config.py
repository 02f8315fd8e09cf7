"""The configuration: one dataclass per concern, each bound beside its field, nested in Config."""

import dataclasses
import operator
import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

ENVS = ("sandbox", "scienceworld", "alfworld", "appworld")
RIVALS = ("zero-shot", "cascade", "single-turn", "vanilla")
# The part of BoPO that each ablation leaves out: (section, field, value).
ABLATIONS = {
  "no-stratified": ("references", "clone_large", True),
  "no-reference": ("bopo", "reference_guided", False),
  "no-hard-bonus": ("bopo", "r_hard", 0.0),
}
MARKUP_TOKENS = {"transcript": 80, "paper": 160}  # around the previews of one step, with budgets
SEEDS_BEFORE_BOPO = 1000  # seeds below belong to the profile and the references
JUDGE = {"names": ("gpt-5",), "temperature": 1.0, "max_completion_tokens": 2048}
# Entries of tuples.
Share = Annotated[float, Field(ge=0, le=1)]
Trials = Annotated[int, Field(gt=0, le=SEEDS_BEFORE_BOPO)]
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]
section = dataclass(config={"extra": "forbid", "hide_input_in_errors": True})  # may be keys


def address(url: str) -> str:
  """The same text. Raises ValueError where no HTTP client can be sent to it."""
  parts = urlsplit(url)
  if not re.match(r"(?i)https?://\S+$", url) or not parts.hostname or parts.port == 0:
    raise ValueError("no http(s)://host address")
  return url


@section
class EnvConfig:
  kind: str = "scienceworld"  # one of ENVS, or FILE.py:CLASS for an Env of the user's
  train_tasks: int = Field(96, gt=0)
  test_tasks: int = Field(60, gt=0)
  max_steps: int = Field(40, gt=0)
  processes: int = Field(0, ge=0)  # child processes; 0 is one per core
  live_per_process: int = Field(4, gt=0)  # episodes that share a process (and its JVM)
  timeout_s: float = Field(120.0, gt=0)  # of one call; a process that takes longer is replaced
  # The directory of ALFWorld's or AppWorld's data. "own" is what --stage=setup makes; "" is
  # $ALFWORLD_DATA or $APPWORLD_ROOT where set, else what setup downloaded, else what it made.
  data: str = ""
  train_split: str = ""  # a directory's or dataset's name, or a task list; "" is the usual one
  test_split: str = ""


@section
class ModelsConfig:
  kind: str = Field("scripted", pattern="^(scripted|chat)$")
  names: tuple[Annotated[str, Field(min_length=1)], ...] = ("gpt-4.1-mini", "gpt-4.1")
  # Per model (input, cached input, output[, cache write]), $ per million tokens; () is the list's.
  prices: tuple[Annotated[tuple[Dollars, ...], Field(min_length=3, max_length=4)], ...] = ()
  # For kind="chat", one for all models or one for each: endpoints of OpenAI's chat completions, ()
  # is OpenAI's own, and environment variables that hold their keys, "" where none is needed.
  base_urls: tuple[Annotated[str, AfterValidator(address)], ...] = ()
  key_variables: tuple[Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")], ...] = ()
  temperature: float = Field(0.7, ge=0, le=2)
  max_completion_tokens: int = Field(1024, gt=0)  # of one reply; budgets reserve them all
  token_limit_field: str = Field("max_completion_tokens", pattern="^max_(completion_)?tokens$")
  concurrency: int = Field(16, gt=0)  # calls of one model at a time
  timeout_s: float = Field(120.0, gt=0)  # until an answer begins, and again until it ends
  retries: int = Field(5, ge=0)  # of one reply, after its first attempt
  record: bool = True  # keep replies in the run's file, so that none is paid for twice


@section
class RouterConfig:  # its weights or shape (Qwen2's field names), and the text that it reads
  # A Hugging Face directory of a Qwen2 or Qwen2.5 with its shape and tokenizer; without one the
  # shape is as below, the weights are random, and a tokenizer is trained on the profile.
  weights: str = ""
  dtype: str = Field("float32", pattern="^(float32|bfloat16)$")  # parameters: float32
  vocab_size: int = Field(2048, ge=258)  # all bytes and the two decisions
  hidden_size: int = Field(64, gt=0)
  intermediate_size: int = Field(192, gt=0)
  num_layers: int = Field(2, gt=0)
  num_heads: int = Field(2, gt=0)
  num_kv_heads: int = Field(1, gt=0)
  head_dim: int = Field(32, gt=0, multiple_of=2)
  rope_theta: float = 10_000.0
  tie_word_embeddings: bool = True
  view: str = Field("transcript", pattern="^(transcript|paper)$")
  show_budget: bool = True  # write what is left of a call budget into the text
  max_tokens: int = 768  # of one sequence; the oldest whole steps of a longer one are left out
  buckets: int = Field(2, gt=0)  # row lengths that are compiled: equal parts of max_tokens
  description_tokens: int = Field(96, gt=0)  # previews: longer texts are cut, with a mark
  action_tokens: int = Field(12, gt=0)
  result_tokens: int = Field(24, gt=0)
  usd_per_million_tokens: float = 0.02  # price of router compute; reported in its own column


@section
class ProfileConfig:
  trials: int = Field(5, gt=0, le=SEEDS_BEFORE_BOPO)  # K of the paper, per boundary model
  robustness: tuple[Trials, ...] = ()  # other K
  easy_rate: float = Field(0.8, gt=0, le=1)


@section
class PretrainConfig:  # of a router from random weights, in place of Qwen2.5's (our choice)
  epochs: int = Field(0, ge=0)  # passes over stored training episodes; 0 leaves random weights
  batch_episodes: int = Field(32, gt=0)
  learning_rate: float = Field(3e-3, gt=0)


@section
class ReferencesConfig:
  samples: int = Field(20, gt=0, le=SEEDS_BEFORE_BOPO)  # N of the paper, per hard task
  clone_large: bool = False  # ablation: no stratified sampling


@section
class SFTConfig:
  updates: int = Field(150, gt=0)
  batch_episodes: int = Field(64, gt=0)
  micro_episodes: int = Field(16, gt=0)  # rows of one compiled gradient; accumulated to the batch
  hard_share: float = Field(0.7, ge=0, le=1)
  learning_rate: float = Field(2e-5, gt=0)
  warmup_share: float = 0.03
  # With an eps above most entries of the gradient their sizes count: less noise in short runs.
  adam_eps: float = Field(1e-8, gt=0)
  weight_decay: float = 0.01
  clip_norm: float = Field(1.0, gt=0)


@section
class BoPOConfig:
  # The weights of cost; each has its own router.
  lam: tuple[Annotated[float, Field(ge=0)], ...] = Field((0.1, 0.3, 0.5, 0.7, 0.9), min_length=1)
  r_success: float = 1.0
  r_hard: float = 0.5
  group_size: int = Field(8, ge=2)
  advantage_eps: float = Field(0.1, gt=0)
  advantage_clip: float = Field(5.0, gt=0)
  reference_guided: bool = True  # False is the ablation: the group's mean alone
  kl_beta: float = Field(0.04, ge=0)
  ratio_level: str = Field("trajectory", pattern="^(trajectory|decision)$")
  clip_low: float | None = None
  clip_high: float | None = None
  learning_rate: float = Field(1e-6, gt=0)
  adam_eps: float = Field(1e-8, gt=0)  # as for SFT
  clip_norm: float = Field(1.0, gt=0)
  updates: int = Field(100, gt=0)  # rollout batches
  tasks_per_update: int = Field(8, gt=0)
  epochs: int = Field(1, gt=0)  # passes over each rollout batch
  batch_episodes: int = Field(64, gt=0)  # of one gradient step


@section
class BaselinesConfig:  # what is trained and evaluated beside BoPO
  rivals: tuple[Annotated[str, Field(pattern=f"^({'|'.join(RIVALS)})$")], ...] = ()
  ablations: tuple[Annotated[str, Field(pattern=f"^({'|'.join(ABLATIONS)})$")], ...] = ()
  # The weight of cost at which ablations are trained and rivals compared; None is the first of lam.
  compared_lam: float | None = None
  updates: int = Field(150, gt=0)  # gradient steps of the cascade's scorer and the classifier
  # The model that a zero-shot router asks; in scripted runs a stand-in at this model's price.
  judge: ModelsConfig = Field(default_factory=lambda: ModelsConfig(**JUDGE))


@section
class EvaluateConfig:
  seeds: int = Field(3, gt=0)
  tasks: int = Field(0, ge=0)  # how many test tasks, from the first on; 0 is all
  random_p: tuple[Share, ...] = (0.25, 0.5, 0.75)
  # Extra points: LARGE where its probability is above a threshold, or above the threshold at which
  # LARGE has this share of the decisions in stored training episodes.
  thresholds: tuple[Share, ...] = ()
  shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
  budget_rules: bool = False  # use these points under hard budgets too; else argmax alone
  call_budgets: tuple[Annotated[int, Field(ge=0)], ...] = (5, 10, 15)
  usd_budgets: tuple[Annotated[float, Field(ge=0, lt=float("inf"))], ...] = ()  # B_max of a task
  bootstrap: int = Field(1000, gt=0)  # resamples of the tasks behind each interval


@section
class DistributedConfig:  # processes train one router, each on its share of the episodes
  processes: int = 1
  process: int = 0  # the number of this process, from 0
  coordinator: str = ""  # host:port of process 0
  fsdp: int = Field(0, ge=0)  # over how many devices parameters are split; 0 is all


@section
class Config:
  name: str = "quickstart"
  runs: str = "runs"  # the run's directory is <runs>/<name>
  seed: int = 0
  max_usd: float = Field(0.0, ge=0, lt=float("inf"))  # cap on all model calls; 0 is no cap
  dry_run: bool = False  # print what is still to be run and what it may cost, and run nothing
  env: EnvConfig = Field(default_factory=EnvConfig)
  models: ModelsConfig = Field(default_factory=ModelsConfig)
  router: RouterConfig = Field(default_factory=RouterConfig)
  profile: ProfileConfig = Field(default_factory=ProfileConfig)
  references: ReferencesConfig = Field(default_factory=ReferencesConfig)
  pretrain: PretrainConfig = Field(default_factory=PretrainConfig)
  sft: SFTConfig = Field(default_factory=SFTConfig)
  bopo: BoPOConfig = Field(default_factory=BoPOConfig)
  baselines: BaselinesConfig = Field(default_factory=BaselinesConfig)
  evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
  distributed: DistributedConfig = Field(default_factory=DistributedConfig)


def validate(config: Config) -> None:
  """Refuses what cannot work by ValueError: one line with the field, its value and what it must be.

  Values take their field's type: what a configuration file has assigned, nobody has checked yet.
  """
  try:
    vars(config).update(vars(TypeAdapter(Config).validate_python(dataclasses.asdict(config))))
  except ValidationError as error:
    raise ValueError(explain(error, "--config", config)) from None
  for name, works, must in _cross_checks(config):
    if not works:
      value = operator.attrgetter(name)(config)
      raise ValueError(f"--config.{name} is {value!r}; it must be {must}")


def check_setting(setting: str, *settings: str) -> None:
  """Raises ValueError unless a configuration file has this setting; "" is its usual one."""
  if setting not in ("", *settings):
    raise ValueError(f"no setting {setting!r}: use one of {', '.join(settings)}, or none")


def explain(error: ValidationError, prefix: str, config: object = None) -> str:
  """The first error in one line; its value is that of the whole field where `config` has it."""
  first = error.errors()[0]
  names = [part for part in first["loc"] if isinstance(part, str)]
  name = ".".join(names or map(str, first["loc"]))
  cause, _, must = first["msg"].partition(" should ")  # of pydantic: "Input should be ..."
  must = must or f"be valid: {cause.removeprefix('Value error, ')}"
  must = re.sub(r"^match pattern '\^\((.*)\)\$'", r"be one of \1", must)
  value = repr(operator.attrgetter(name)(config) if config else first["input"])
  if "key_variables" in name or not names:
    value = "not shown, for it may be a key and not the name of an environment variable"
  which = "each entry" if isinstance(first["loc"][-1], int) else "it"
  return f"{prefix}.{name} is {value}; {which} must {must}"


def compared_lam(c: Config) -> float:
  """The weight of cost that ablations are trained with, and at which rivals are compared."""
  return c.bopo.lam[0] if c.baselines.compared_lam is None else c.baselines.compared_lam


def ablate(config: Config, name: str) -> Config:
  """The configuration without one part of the method."""
  section, part, value = ABLATIONS[name]
  changed = dataclasses.replace(getattr(config, section), **{part: value})
  return dataclasses.replace(config, **{section: changed})


def _cross_checks(c: Config) -> Iterator[tuple[str, bool, str]]:
  """Checks beside those of single fields: a field, whether it works, and what it must be."""
  b, d, r = c.baselines, c.distributed, c.router
  yield "name", c.name not in ("", ".", "..") and "/" not in c.name, "a directory name"
  works = c.env.kind in ENVS or bool(re.fullmatch(r".+\.py:\w+", c.env.kind))
  yield "env.kind", works, f"one of {', '.join(ENVS)}, or FILE.py:CLASS"
  works = c.env.kind != "appworld" or c.env.live_per_process == 1
  yield "env.live_per_process", works, "1 for AppWorld, whose worlds need a process each"
  works = 0 <= d.process < d.processes
  yield "distributed.process", works, "at least 0 and below --config.distributed.processes"
  works = d.processes == 1 or bool(re.fullmatch(r".+:\d+", d.coordinator))
  yield "distributed.coordinator", works, "host:port of process 0"
  works = not r.weights or c.pretrain.epochs == 0
  yield "pretrain.epochs", works, "0 with --config.router.weights, which are pretrained"
  for section in ("profile", "bopo", "baselines", "evaluate"):
    for name, values in vars(getattr(c, section)).items():
      if isinstance(values, tuple):  # policies are told apart by these, written with six digits
        texts = {value if isinstance(value, str) else f"{value:g}" for value in values}
        yield f"{section}.{name}", len(texts) == len(values), "of different values"
  yield "evaluate.thresholds", 0.5 not in c.evaluate.thresholds, "without 0.5, which is argmax"
  works = b.compared_lam in (None, *c.bopo.lam)
  yield "baselines.compared_lam", works, f"one of --config.bopo.lam, {c.bopo.lam}"
  same = [name for name in b.ablations if ablate(c, name) == c]
  yield "baselines.ablations", not same, f"without {', '.join(same)}: that is left out anyway"
  works = c.models.kind != "chat" or len(c.models.names) == 2  # the router decides between two
  yield "models.names", works, "two models, the cheaper one first"
  yield "baselines.judge.names", len(b.judge.names) == 1, "one model"
  for name, models in (("models", c.models), ("baselines.judge", b.judge)):
    count, urls = len(models.names), [url.rstrip("/") for url in models.base_urls or ("",)]
    for key, values in (("base_urls", urls), ("key_variables", models.key_variables)):
      works = len(values) in (0, 1, count)
      yield f"{name}.{key}", works, f"for all models together or for each of the {count}"
    served = set(zip(models.names, urls * count if len(urls) == 1 else urls))
    yield f"{name}.names", len(served) == count, "different at one address"
  step = r.description_tokens + r.action_tokens + 2 * r.result_tokens + MARKUP_TOKENS[r.view]
  yield "router.max_tokens", r.max_tokens >= 2 * step, f"at least {2 * step} for these previews"
  works = r.num_heads % r.num_kv_heads == 0
  yield "router.num_heads", works, "a multiple of --config.router.num_kv_heads"
