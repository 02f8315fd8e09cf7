"""The configuration: one plain dataclass per concern, nested in Config."""

import dataclasses
import math
import operator
import re
from collections.abc import Collection
from dataclasses import field
from urllib.parse import urlsplit

MODEL_KINDS = ("scripted", "chat")
ENVS = ("sandbox", "scienceworld", "alfworld", "appworld")
VIEWS = ("transcript", "paper")
DTYPES = ("float32", "bfloat16")
RATIO_LEVELS = ("trajectory", "decision")
TOKEN_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens")
RIVALS = ("zero-shot", "cascade", "single-turn", "vanilla")
# What of BoPO an ablation leaves out: (section, field, value).
ABLATIONS = {
  "no-stratified": ("references", "clone_large", True),
  "no-reference": ("bopo", "reference_guided", False),
  "no-hard-bonus": ("bopo", "r_hard", 0.0),
}
MARKUP_TOKENS = {"transcript": 80, "paper": 160}  # around the previews of one step, with budgets
SEEDS_BEFORE_BOPO = 1000  # for the profile and the references; rollouts have luck of their own
SMALLEST_VOCABULARY = 258  # every byte and the two decisions
POSITIVE = {
  "env": ("train_tasks", "test_tasks", "max_steps", "live_per_process", "timeout_s"),
  "router": (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "description_tokens",
    "action_tokens",
    "result_tokens",
    "buckets",
  ),
  "models": ("max_completion_tokens", "concurrency", "timeout_s"),
  "profile": ("trials",),
  "references": ("samples",),
  "pretrain": ("batch_episodes", "learning_rate"),
  "sft": (
    "updates",
    "batch_episodes",
    "micro_episodes",
    "learning_rate",
    "adam_eps",
    "clip_norm",
  ),
  "bopo": (
    "advantage_eps",
    "advantage_clip",
    "learning_rate",
    "adam_eps",
    "clip_norm",
    "updates",
    "tasks_per_update",
    "epochs",
    "batch_episodes",
  ),
  "baselines": ("updates",),
  "evaluate": ("seeds", "bootstrap"),
}
POSITIVE["bench.router"] = POSITIVE["router"]
POSITIVE["baselines.judge"] = POSITIVE["models"]
NOT_NEGATIVE = (
  ("env", "processes"),
  ("models", "retries"),
  ("bopo", "kl_beta"),
  ("evaluate", "tasks"),
  ("distributed", "fsdp"),
  ("bench", "episodes"),
  ("bench", "micro_episodes"),
)
# Settings of many values, each with a policy of its own: what a value must be.
LISTS = (
  ("bopo", "lam", lambda lam: lam >= 0, "numbers of at least 0"),
  ("profile", "robustness", lambda K: 1 <= K <= SEEDS_BEFORE_BOPO and K % 1 == 0, "whole trials"),
  ("evaluate", "random_p", lambda p: 0 <= p <= 1, "numbers in [0, 1]"),
  ("evaluate", "thresholds", lambda p: 0 <= p <= 1 and p != 0.5, "numbers in [0, 1] but 0.5"),
  ("evaluate", "shares", lambda share: 0 < share < 1, "numbers between 0 and 1"),
  ("evaluate", "call_budgets", lambda K: K >= 0 and K % 1 == 0, "whole numbers of at least 0"),
  ("evaluate", "usd_budgets", lambda usd: 0 <= usd < math.inf, "dollars"),
)


@dataclasses.dataclass
class EnvConfig:
  kind: str = "scienceworld"  # one of ENVS, or FILE.py:CLASS for an Env of one's own
  train_tasks: int = 96
  test_tasks: int = 60
  max_steps: int = 40
  processes: int = 0  # child processes; 0 is one per core
  live_per_process: int = 4  # episodes that share a process (and its JVM)
  timeout_s: float = 120.0  # of one call; over it the process is taken for hung and replaced
  # For ALFWorld and AppWorld. The directory of the data: "own" is what --stage=setup makes; "" is
  # $ALFWORLD_DATA or $APPWORLD_ROOT where set, else what setup downloaded, else what it made.
  data: str = ""
  train_split: str = ""  # a directory's or dataset's name, or a task list; "" is the usual one
  test_split: str = ""


@dataclasses.dataclass
class ModelsConfig:
  kind: str = "scripted"  # one of MODEL_KINDS
  names: tuple[str, ...] = ("gpt-4.1-mini", "gpt-4.1")  # cheapest first
  # Per model (input, cached input, output[, cache write]) in dollars per million tokens; () takes
  # the list prices of baar_jax/llms/prices.py.
  prices: tuple[tuple[float, ...], ...] = ()
  # For kind="chat": any endpoint that speaks OpenAI's chat completions. One address and one
  # variable for all models, or one for each; () is OpenAI's address, and its key there alone.
  base_urls: tuple[str, ...] = ()
  key_variables: tuple[str, ...] = ()  # environment variables that hold the keys; "" needs none
  temperature: float = 0.7
  max_completion_tokens: int = 1024  # of one reply; budgets reserve them all
  token_limit_field: str = "max_completion_tokens"  # its name there, one of TOKEN_LIMIT_FIELDS
  concurrency: int = 16  # calls of one model at a time
  timeout_s: float = 120.0  # until an answer begins, and again until it ends
  retries: int = 5  # of one reply, after its first attempt
  record: bool = True  # keep replies in the run's file, so that none is paid for twice


@dataclasses.dataclass
class RouterConfig:
  """The router's weights or shape (Qwen2's field names), and what it is shown."""

  # A Hugging Face directory of a Qwen2 or Qwen2.5; it brings its shape and tokenizer. Without one
  # the router has the shape below, random weights, and a tokenizer trained on the profile.
  weights: str = ""
  dtype: str = "float32"  # of the computation, one of DTYPES; parameters are float32
  vocab_size: int = 2048
  hidden_size: int = 64
  intermediate_size: int = 192
  num_layers: int = 2
  num_heads: int = 2
  num_kv_heads: int = 1
  head_dim: int = 32
  rope_theta: float = 10_000.0
  tie_word_embeddings: bool = True
  view: str = "transcript"  # one of VIEWS
  show_budget: bool = True  # write what is left of a call budget into the text
  max_tokens: int = 768  # of one sequence; over it the oldest whole steps go
  buckets: int = 2  # row lengths that are compiled: equal parts of max_tokens
  description_tokens: int = 96  # previews: longer texts are cut to this and marked as cut
  action_tokens: int = 12
  result_tokens: int = 24
  usd_per_million_tokens: float = 0.02  # price of router compute; in a column of its own


@dataclasses.dataclass
class ProfileConfig:
  trials: int = 5  # K of the paper, per boundary model
  robustness: tuple[int, ...] = ()  # other K, whose labels the report compares
  easy_rate: float = 0.8


@dataclasses.dataclass
class PretrainConfig:
  """For a router from random weights: what Qwen2.5's own pretraining stands for (our choice)."""

  epochs: int = 0  # passes over the stored training episodes; 0 leaves the weights random
  batch_episodes: int = 32
  learning_rate: float = 3e-3


@dataclasses.dataclass
class ReferencesConfig:
  samples: int = 20  # N of the paper, per hard task
  clone_large: bool = False  # ablation: no stratified sampling


@dataclasses.dataclass
class SFTConfig:
  updates: int = 150
  batch_episodes: int = 64
  micro_episodes: int = 16  # rows of one compiled gradient; accumulated to the batch
  hard_share: float = 0.7
  learning_rate: float = 2e-5
  warmup_share: float = 0.03
  # Adam gives an entry of the gradient that is all noise steps as large as any other. With an eps
  # above most entries their sizes count again, which is what a few hundred episodes can bear.
  adam_eps: float = 1e-8
  weight_decay: float = 0.01
  clip_norm: float = 1.0


@dataclasses.dataclass
class BoPOConfig:
  lam: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # one router each
  r_success: float = 1.0
  r_hard: float = 0.5
  group_size: int = 8
  advantage_eps: float = 0.1
  advantage_clip: float = 5.0
  reference_guided: bool = True  # False is the ablation: the group's mean alone
  kl_beta: float = 0.04
  ratio_level: str = "trajectory"
  clip_low: float | None = None
  clip_high: float | None = None
  learning_rate: float = 1e-6
  adam_eps: float = 1e-8  # as for SFT
  clip_norm: float = 1.0
  updates: int = 100  # rollout batches
  tasks_per_update: int = 8
  epochs: int = 1  # passes over each rollout batch
  batch_episodes: int = 64  # of one gradient step


@dataclasses.dataclass
class BaselinesConfig:
  """What is trained and evaluated beside BoPO."""

  rivals: tuple[str, ...] = ()  # of RIVALS
  ablations: tuple[str, ...] = ()  # of ABLATIONS
  # What they are trained with, and whose router stands for BoPO against a rival that has no lam;
  # None is the first of bopo.lam.
  compared_lam: float | None = None
  updates: int = 150  # gradient steps of the cascade's scorer and of the single-turn classifier
  # The one model that a zero-shot router asks, of the kind of `models`: scripted runs have a
  # stand-in, at this model's price. Its reasoning counts as completion.
  judge: ModelsConfig = field(
    default_factory=lambda: ModelsConfig(
      names=("gpt-5",), temperature=1.0, max_completion_tokens=2048
    )
  )


@dataclasses.dataclass
class EvaluateConfig:
  seeds: int = 3
  tasks: int = 0  # the first so many of the test tasks; 0 is all
  random_p: tuple[float, ...] = (0.25, 0.5, 0.75)
  thresholds: tuple[float, ...] = ()  # extra points: LARGE where its probability is above
  # Extra points: the threshold is set so that LARGE is chosen at this share of the decisions of
  # stored training episodes.
  shares: tuple[float, ...] = ()
  budget_rules: bool = False  # under hard budgets too; else only the more probable model
  call_budgets: tuple[int, ...] = (5, 10, 15)
  usd_budgets: tuple[float, ...] = ()  # B_max of a task
  bootstrap: int = 1000  # resamples of the tasks behind each interval


@dataclasses.dataclass
class DistributedConfig:
  """Processes that train one router together, each with its own share of the episodes."""

  processes: int = 1
  process: int = 0  # which of them this is, from 0
  coordinator: str = ""  # host:port of process 0
  fsdp: int = 0  # over how many devices parameters are split; 0 is all


@dataclasses.dataclass
class BenchConfig:
  """What --stage=bench measures: `router`, or the run's own one where that has weights."""

  router: RouterConfig = field(
    default_factory=lambda: RouterConfig(
      hidden_size=512,
      intermediate_size=2752,
      num_layers=8,
      num_heads=8,
      num_kv_heads=2,
      head_dim=64,
      rope_theta=1_000_000.0,
      max_tokens=1792,
      buckets=4,
      action_tokens=20,
      result_tokens=44,
    )
  )
  steps: int = 20  # decisions of an episode
  episodes: int = 0  # of a gradient step; 0 is 1 on a CPU, 64 elsewhere
  micro_episodes: int = 0  # rows of a compiled gradient; 0 is 1 on a CPU, 16 elsewhere


@dataclasses.dataclass
class Config:
  name: str = "quickstart"
  runs: str = "runs"  # the run's directory is <runs>/<name>
  seed: int = 0
  max_usd: float = 0.0  # cap on dollars of all model calls of the run; 0 is none
  dry_run: bool = False  # print what is still to be run and what it may cost, and run nothing
  env: EnvConfig = field(default_factory=EnvConfig)
  models: ModelsConfig = field(default_factory=ModelsConfig)
  router: RouterConfig = field(default_factory=RouterConfig)
  profile: ProfileConfig = field(default_factory=ProfileConfig)
  references: ReferencesConfig = field(default_factory=ReferencesConfig)
  pretrain: PretrainConfig = field(default_factory=PretrainConfig)
  sft: SFTConfig = field(default_factory=SFTConfig)
  bopo: BoPOConfig = field(default_factory=BoPOConfig)
  baselines: BaselinesConfig = field(default_factory=BaselinesConfig)
  evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
  distributed: DistributedConfig = field(default_factory=DistributedConfig)
  bench: BenchConfig = field(default_factory=BenchConfig)


def validate(config: Config) -> None:
  """Raises ValueError, in one line that names the field, where a config cannot work."""
  c = config
  checks = [
    (c.name not in ("", ".", "..") and "/" not in c.name, "name", c.name, "a directory name"),
    (
      c.env.kind in ENVS or bool(re.fullmatch(r".+\.py:\w+", c.env.kind)),
      "env.kind",
      c.env.kind,
      f"one of {', '.join(ENVS)}, or FILE.py:CLASS",
    ),
    (
      c.env.kind != "appworld" or c.env.live_per_process == 1,
      "env.live_per_process",
      c.env.live_per_process,
      "1 for AppWorld, whose worlds need a process each",
    ),
    (  # the router decides between two tokens, so far
      len(c.models.names) == 2 or c.models.kind != "chat",
      "models.names",
      c.models.names,
      "two models, the cheaper one first",
    ),
    *_models_checks("models", c.models),
    *_baselines_checks(c),
    *_router_checks("router", c.router),
    *_router_checks("bench.router", c.bench.router),
    (c.bench.steps >= 4, "bench.steps", c.bench.steps, "at least 4: the first ones compile"),
    (
      not c.router.weights or c.pretrain.epochs == 0,
      "pretrain.epochs",
      c.pretrain.epochs,
      "0 with --config.router.weights, which are pretrained",
    ),
    (
      0 <= c.distributed.process < c.distributed.processes,
      "distributed.process",
      c.distributed.process,
      "at least 0 and below --config.distributed.processes",
    ),
    (
      c.distributed.processes == 1 or bool(re.fullmatch(r".+:\d+", c.distributed.coordinator)),
      "distributed.coordinator",
      c.distributed.coordinator,
      "host:port of process 0",
    ),
    (0 <= c.max_usd < math.inf, "max_usd", c.max_usd, "dollars, or 0 for no cap"),
    (0 < c.profile.easy_rate <= 1, "profile.easy_rate", c.profile.easy_rate, "in (0, 1]"),
    (0 <= c.sft.hard_share <= 1, "sft.hard_share", c.sft.hard_share, "in [0, 1]"),
    (c.bopo.group_size >= 2, "bopo.group_size", c.bopo.group_size, "at least 2"),
    (len(c.bopo.lam) > 0, "bopo.lam", c.bopo.lam, "at least one weight"),
    (
      c.bopo.ratio_level in RATIO_LEVELS,
      "bopo.ratio_level",
      c.bopo.ratio_level,
      f"one of {', '.join(RATIO_LEVELS)}",
    ),
  ]
  for section, fields in POSITIVE.items():
    part = operator.attrgetter(section)(c)
    for name in fields:
      value = getattr(part, name)
      checks.append((value > 0, f"{section}.{name}", value, "above 0"))
  for section, name in (("profile", "trials"), ("references", "samples")):
    value = getattr(getattr(c, section), name)
    fine = value <= SEEDS_BEFORE_BOPO
    checks.append((fine, f"{section}.{name}", value, f"at most {SEEDS_BEFORE_BOPO}"))
  for section, name in NOT_NEGATIVE:
    value = getattr(getattr(c, section), name)
    checks.append((value >= 0, f"{section}.{name}", value, "at least 0"))
  for section, name, fits, wanted in LISTS:
    values = getattr(getattr(c, section), name)
    numbers = all(isinstance(value, int | float) for value in values)
    # Policies are told apart by their settings, which are written with six digits.
    different = numbers and len({f"{value:g}" for value in values}) == len(values)
    fine = different and all(map(fits, values))
    checks.append((fine, f"{section}.{name}", values, f"different {wanted}"))
  for fine, name, value, wanted in checks:
    if not fine:
      raise ValueError(f"--config.{name} is {value!r}; it must be {wanted}")


def compared_lam(config: Config) -> float:
  """The weight of cost that ablations are trained with, and rivals without one compared at."""
  lam = config.baselines.compared_lam
  return config.bopo.lam[0] if lam is None else lam


def _some(names: tuple[str, ...], known: Collection[str]) -> bool:
  return set(names) <= set(known) and len(set(names)) == len(names)


def ablate(config: Config, name: str) -> Config:
  """The configuration without one part of the method."""
  section, part, value = ABLATIONS[name]
  changed = dataclasses.replace(getattr(config, section), **{part: value})
  return dataclasses.replace(config, **{section: changed})


def _baselines_checks(config: Config) -> list[tuple]:
  """(fine, field, value, what it must be) of the baselines' settings."""
  c = config.baselines
  lam = c.compared_lam is None or c.compared_lam in config.bopo.lam
  known = set(c.ablations) <= set(ABLATIONS)
  same = [name for name in c.ablations if known and ablate(config, name) == config]
  checks = [
    (_some(c.rivals, RIVALS), "rivals", f"different ones of {', '.join(RIVALS)}"),
    (_some(c.ablations, ABLATIONS), "ablations", f"different ones of {', '.join(ABLATIONS)}"),
    (
      not same,
      "ablations",
      f"without {', '.join(same)}: that is left out anyway",
    ),
    (lam, "compared_lam", f"one of --config.bopo.lam, {config.bopo.lam}"),
  ]
  checks = [(ok, f"baselines.{key}", getattr(c, key), must) for ok, key, must in checks]
  one = (len(c.judge.names) == 1, "baselines.judge.names", c.judge.names, "one model")
  return [*checks, one, *_models_checks("baselines.judge", c.judge)]


def _models_checks(name: str, models: ModelsConfig) -> list[tuple]:
  """(fine, field, value, what it must be) of models' settings, in the field `name`."""
  each = f"for all models together or for each of the {len(models.names)}"
  counts = (0, 1, len(models.names))
  urls = [str(url).rstrip("/") for url in models.base_urls or ("",)]
  urls = urls if len(urls) == len(models.names) else urls[:1] * len(models.names)
  served = list(zip(map(str, models.names), urls))
  variables = all(re.fullmatch(r"([A-Za-z_]\w*)?", str(v), re.ASCII) for v in models.key_variables)
  limits = f"one of {', '.join(TOKEN_LIMIT_FIELDS)}"
  checks = [
    (models.kind in MODEL_KINDS, "kind", f"one of {', '.join(MODEL_KINDS)}"),
    (len(models.base_urls) in counts, "base_urls", f"addresses {each}"),
    (all(map(_address, models.base_urls)), "base_urls", "http(s)://host addresses"),
    (all(isinstance(model, str) and model for model in models.names), "names", "names of models"),
    (len(set(served)) == len(served), "names", "different at one address"),
    (len(models.key_variables) in counts, "key_variables", f"names of variables {each}"),
    (variables, "key_variables", "names of environment variables, not keys"),
    (models.token_limit_field in TOKEN_LIMIT_FIELDS, "token_limit_field", limits),
    (0 <= models.temperature <= 2, "temperature", "in [0, 2]"),
  ]
  # What is no name of a variable may be a key, which nobody should read.
  shown = dataclasses.asdict(models) | ({} if variables else {"key_variables": "something else"})
  return [(ok, f"{name}.{key}", shown[key], must) for ok, key, must in checks]


def _address(url: str) -> bool:
  """Whether this is an address that a client can be sent to."""
  try:
    parts = urlsplit(url)
    port = parts.port  # raises if it is none
  except (ValueError, AttributeError, TypeError):
    return False
  fine = parts.scheme in ("http", "https") and parts.hostname and not re.search(r"\s", url)
  return bool(fine) and port != 0


def _router_checks(name: str, router: RouterConfig) -> list[tuple]:
  """(fine, field, value, what it must be) of one router's settings, in the field `name`."""
  markup = MARKUP_TOKENS.get(router.view, 0)
  step_tokens = router.description_tokens + router.action_tokens + 2 * router.result_tokens
  least = 2 * (step_tokens + markup)
  shared = router.num_kv_heads > 0 and router.num_heads % router.num_kv_heads == 0
  heads = f"a multiple of --config.{name}.num_kv_heads"
  vocabulary = router.vocab_size >= SMALLEST_VOCABULARY
  checks = [
    (router.view in VIEWS, "view", f"one of {', '.join(VIEWS)}"),
    (router.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}"),
    (vocabulary, "vocab_size", f"at least {SMALLEST_VOCABULARY}"),
    (shared, "num_heads", heads),
    (router.head_dim % 2 == 0, "head_dim", "even"),
    (router.max_tokens >= least, "max_tokens", f"at least {least} for these previews"),
  ]
  return [(ok, f"{name}.{key}", getattr(router, key), must) for ok, key, must in checks]
