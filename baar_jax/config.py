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
# Defaults that differ from those of their class.
JUDGE = {"names": ("gpt-5",), "temperature": 1.0, "max_completion_tokens": 2048}
BENCH_SHAPE = {"hidden_size": 512, "intermediate_size": 2752, "num_layers": 8, "num_heads": 8}
BENCH_SHAPE |= {"num_kv_heads": 2, "head_dim": 64, "rope_theta": 1e6}
BENCH_TEXTS = {"max_tokens": 1792, "buckets": 4, "action_tokens": 20, "result_tokens": 44}
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
  # For ALFWorld and AppWorld. The directory of the data: "own" is what --stage=setup makes; "" is
  # $ALFWORLD_DATA or $APPWORLD_ROOT where set, else what setup downloaded, else what it made.
  data: str = ""
  train_split: str = ""  # a directory's or dataset's name, or a task list; "" is the usual one
  test_split: str = ""


@section
class ModelsConfig:
  kind: str = Field("scripted", pattern="^(scripted|chat)$")
  names: tuple[Annotated[str, Field(min_length=1)], ...] = ("gpt-4.1-mini", "gpt-4.1")
  # Per model, the cheapest first, (input, cached input, output[, cache write]) in dollars per
  # million tokens; () takes the list prices of baar_jax/llms/prices.py.
  prices: tuple[tuple[float, ...], ...] = ()
  # For kind="chat": endpoints that speak OpenAI's chat completions, and environment variables that
  # hold their keys ("" needs none); one for all models or one for each. () is OpenAI's own.
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
  # A Hugging Face directory of a Qwen2 or Qwen2.5; it brings its shape and tokenizer. Without one
  # the router has the shape below, random weights, and a tokenizer trained on the profile.
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
  robustness: tuple[Annotated[int, Field(gt=0, le=SEEDS_BEFORE_BOPO)], ...] = ()  # other K
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
  # Adam makes equally large steps for entries of the gradient that are all noise. With an eps
  # above most entries their sizes count again, which suits a few hundred episodes.
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
  # The weight of cost that ablations are trained with, and at which a rival that has none is
  # compared with BoPO; None is the first of bopo.lam.
  compared_lam: float | None = None
  updates: int = Field(150, gt=0)  # gradient steps of the cascade's scorer and the classifier
  # The model that a zero-shot router asks; in scripted runs a stand-in at this model's price.
  judge: ModelsConfig = Field(default_factory=lambda: ModelsConfig(**JUDGE))


@section
class EvaluateConfig:
  seeds: int = Field(3, gt=0)
  tasks: int = Field(0, ge=0)  # how many test tasks, from the first on; 0 is all
  random_p: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 0.5, 0.75)
  # Extra points: LARGE where its probability is above a threshold, or above the threshold at which
  # LARGE has this share of the decisions in stored training episodes.
  thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
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
class BenchConfig:
  # The router that --stage=bench measures, unless the run's router has weights.
  router: RouterConfig = Field(default_factory=lambda: RouterConfig(**BENCH_SHAPE, **BENCH_TEXTS))
  steps: int = Field(20, ge=4)  # decisions of an episode; the first ones compile
  episodes: int = Field(0, ge=0)  # of a gradient step; 0 is 1 on a CPU, 64 elsewhere
  micro_episodes: int = Field(0, ge=0)  # of a compiled gradient; 0 is 1 on a CPU, 16 elsewhere


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
  bench: BenchConfig = Field(default_factory=BenchConfig)


def validate(config: Config) -> None:
  """Refuses what cannot work by ValueError: one line with the field, its value and what it must be.

  Values take their field's type: what a configuration file has assigned, nobody has checked yet.
  """
  try:
    vars(config).update(vars(TypeAdapter(Config).validate_python(dataclasses.asdict(config))))
  except ValidationError as error:
    raise ValueError(explain(error, "--config", config)) from None
  for fine, name, must in _cross_checks(config):
    if not fine:
      value = operator.attrgetter(name)(config)
      raise ValueError(f"--config.{name} is {value!r}; it must be {must}")


def explain(error: ValidationError, prefix: str, config: object = None) -> str:
  """The first error in one line; its value is that of the whole field where `config` has it."""
  first = error.errors()[0]
  names = [part for part in first["loc"] if isinstance(part, str)]
  name = ".".join(names or map(str, first["loc"]))
  subject, _, must = first["msg"].partition(" should ")  # of pydantic: "Input should be ..."
  must = must or f"be valid: {subject.removeprefix('Value error, ')}"
  must = re.sub(r"^match pattern '\^\((.*)\)\$'", r"be one of \1", must)
  which = "each entry" if isinstance(first["loc"][-1], int) else "it"
  value = repr(operator.attrgetter(name)(config) if config else first["input"])
  if "key_variables" in name or not names:
    value = "not shown, for it may be a key and not the name of an environment variable"
  return f"{prefix}.{name} is {value}; {which} must {must}"


def compared_lam(c: Config) -> float:
  """The weight of cost that ablations are trained with, and at which rivals are compared."""
  return c.bopo.lam[0] if c.baselines.compared_lam is None else c.baselines.compared_lam


def ablate(config: Config, name: str) -> Config:
  """The configuration without one part of the method."""
  section, part, value = ABLATIONS[name]
  changed = dataclasses.replace(getattr(config, section), **{part: value})
  return dataclasses.replace(config, **{section: changed})


def _cross_checks(c: Config) -> Iterator[tuple[bool, str, str]]:
  """Checks beside those of single fields: whether one is fine, its name, what it must be."""
  yield c.name not in ("", ".", "..") and "/" not in c.name, "name", "a directory name"
  fine = c.env.kind in ENVS or bool(re.fullmatch(r".+\.py:\w+", c.env.kind))
  yield fine, "env.kind", f"one of {', '.join(ENVS)}, or FILE.py:CLASS"
  fine = c.env.kind != "appworld" or c.env.live_per_process == 1
  yield fine, "env.live_per_process", "1 for AppWorld, whose worlds need a process each"
  fine = 0 <= c.distributed.process < c.distributed.processes
  yield fine, "distributed.process", "at least 0 and below --config.distributed.processes"
  fine = c.distributed.processes == 1 or bool(re.fullmatch(r".+:\d+", c.distributed.coordinator))
  yield fine, "distributed.coordinator", "host:port of process 0"
  fine = not c.router.weights or c.pretrain.epochs == 0
  yield fine, "pretrain.epochs", "0 with --config.router.weights, which are pretrained"
  for section in ("profile", "bopo", "baselines", "evaluate"):
    for name, values in vars(getattr(c, section)).items():
      if isinstance(values, tuple):  # policies are told apart by these, written with six digits
        texts = {value if isinstance(value, str) else f"{value:g}" for value in values}
        yield len(texts) == len(values), f"{section}.{name}", "of different values"
  yield 0.5 not in c.evaluate.thresholds, "evaluate.thresholds", "without 0.5, which is argmax"
  fine = c.baselines.compared_lam in (None, *c.bopo.lam)
  yield fine, "baselines.compared_lam", f"one of --config.bopo.lam, {c.bopo.lam}"
  same = [name for name in c.baselines.ablations if ablate(c, name) == c]
  yield not same, "baselines.ablations", f"without {', '.join(same)}: that is left out anyway"
  fine = c.models.kind != "chat" or len(c.models.names) == 2  # the router decides between two
  yield fine, "models.names", "two models, the cheaper one first"
  yield len(c.baselines.judge.names) == 1, "baselines.judge.names", "one model"
  for name, models in (("models", c.models), ("baselines.judge", c.baselines.judge)):
    count, urls = len(models.names), [url.rstrip("/") for url in models.base_urls or ("",)]
    for key, values in (("base_urls", urls), ("key_variables", models.key_variables)):
      fine = len(values) in (0, 1, count)
      yield fine, f"{name}.{key}", f"for all models together or for each of the {count}"
    served = set(zip(models.names, urls * count if len(urls) == 1 else urls))
    yield len(served) == count, f"{name}.names", "different at one address"
  for name, router in (("router", c.router), ("bench.router", c.bench.router)):
    previews = router.description_tokens + router.action_tokens + 2 * router.result_tokens
    least = 2 * (previews + MARKUP_TOKENS[router.view])
    yield router.max_tokens >= least, f"{name}.max_tokens", f"at least {least} for these previews"
    fine = router.num_heads % router.num_kv_heads == 0
    yield fine, f"{name}.num_heads", f"a multiple of --config.{name}.num_kv_heads"
