"""Configs: those that ship are valid, and what cannot work is refused by the field's name."""

import importlib.util
import math
from pathlib import Path

import pytest

from baar_jax.config import BaselinesConfig, Config, validate

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  validate(config)
  assert config.name == path.stem  # so that two configs never share a directory


@pytest.mark.parametrize(
  "name, setting",
  [(name, "paper") for name in ("sciworld", "alfworld", "appworld")]
  + [("reproduce", setting) for setting in ("alfworld", "appworld", "sandbox")],
)
def test_settings_of_shipped_configs_are_valid(name, setting):
  config = importlib.import_module(f"configs.{name}").get_config(setting)
  validate(config)
  assert config.name == f"{name}-{setting}"
  assert (config.models.kind == "chat") == (setting == "paper")
  with pytest.raises(ValueError, match="no setting 'other'"):
    importlib.import_module(f"configs.{name}").get_config("other")


@pytest.mark.parametrize(
  "ablations, lam, said",
  [
    (("no-reference", "no-reference"), None, "baselines.ablations"),
    (("no-such",), None, "baselines.ablations"),
    (("no-reference",), 0.2, "baselines.compared_lam"),
  ],
)
def test_ablations_that_cannot_be(ablations, lam, said):
  config = Config(baselines=BaselinesConfig((), ablations, lam))
  with pytest.raises(ValueError, match=said):
    validate(config)


def test_an_ablation_of_what_is_off_already():
  config = Config(baselines=BaselinesConfig((), ("no-reference",)))
  validate(config)
  config.bopo.reference_guided = False
  with pytest.raises(ValueError, match="without no-reference"):
    validate(config)


def test_the_paper_s_settings_are_the_defaults():
  c = Config()
  validate(c)
  assert (c.profile.trials, c.profile.easy_rate) == (5, 0.8)
  assert (c.references.samples, c.references.clone_large) == (20, False)
  assert (c.sft.hard_share, c.sft.batch_episodes, c.sft.learning_rate) == (0.7, 64, 2e-5)
  assert (c.sft.warmup_share, c.sft.clip_norm) == (0.03, 1.0)
  assert c.bopo.lam == (0.1, 0.3, 0.5, 0.7, 0.9)
  assert (c.bopo.r_success, c.bopo.r_hard, c.bopo.group_size) == (1.0, 0.5, 8)
  assert (c.bopo.kl_beta, c.bopo.learning_rate) == (0.04, 1e-6)
  assert (c.bopo.ratio_level, c.bopo.clip_low, c.bopo.clip_high) == ("trajectory", None, None)
  assert (c.bopo.advantage_eps, c.bopo.advantage_clip) == (0.1, 5.0)
  assert (c.evaluate.seeds, c.evaluate.call_budgets) == (3, (5, 10, 15))


BAD = [
  ("models.names", (1, 2)),
  ("models.names", ("m", "m")),
  ("models.base_urls", (1,)),
  ("models.base_urls", ("http://",)),
  ("models.base_urls", ("https:///v1",)),
  ("models.base_urls", ("http://localhost:99999/v1",)),
  ("models.base_urls", ("http://[::1/v1",)),
  ("models.token_limit_field", "limit"),
  ("name", ""),
  ("name", ".."),
  ("name", "a/b"),
  ("env.kind", "chess"),
  ("env.kind", "chess.py"),
  ("env.timeout_s", 0),
  ("env.train_tasks", 0),
  ("env.test_tasks", -1),
  ("env.max_steps", 0),
  ("env.processes", -1),
  ("env.live_per_process", 0),
  ("models.kind", "real"),
  ("models.base_urls", ("http://a/v1", "http://b/v1", "http://c/v1")),
  ("models.base_urls", ("a:8000",)),
  ("models.key_variables", ("A", "B", "C")),
  ("models.temperature", -0.1),
  ("models.max_completion_tokens", 0),
  ("models.concurrency", 0),
  ("models.timeout_s", 0),
  ("models.retries", -1),
  ("profile.robustness", (0,)),
  ("profile.robustness", (2.5,)),
  ("profile.robustness", (3, 3)),
  ("profile.robustness", (1001,)),
  ("max_usd", -1.0),
  ("max_usd", math.inf),
  ("evaluate.usd_budgets", (0.1, -0.1)),
  ("evaluate.usd_budgets", (0.1, 0.1)),
  ("router.view", "poem"),
  ("router.dtype", "float16"),
  ("router.buckets", 0),
  ("distributed.process", 1),  # of one
  ("distributed.process", -1),
  ("distributed.fsdp", -1),
  ("router.vocab_size", 257),  # 256 bytes and two decisions
  ("router.num_heads", 3),  # of 2 key-value heads
  ("router.head_dim", 7),
  ("router.hidden_size", 0),
  ("router.intermediate_size", 0),
  ("router.max_tokens", 471),
  ("router.result_tokens", 0),
  ("profile.trials", 0),
  ("profile.trials", 1001),  # the seeds of BoPO
  ("profile.easy_rate", 0.0),
  ("profile.easy_rate", 1.1),
  ("references.samples", 0),
  ("references.samples", 1001),
  ("sft.updates", 0),
  ("sft.hard_share", 1.5),
  ("sft.learning_rate", -1e-3),
  ("sft.adam_eps", 0.0),
  ("bopo.adam_eps", 0.0),
  ("sft.learning_rate", math.nan),
  ("bopo.lam", ()),
  ("bopo.lam", (0.1, -0.1)),
  ("bopo.lam", (math.nan,)),
  ("bopo.lam", (0.1, "much")),
  ("bopo.lam", (0.1, 0.1000001)),  # one directory for two routers
  ("bopo.group_size", 1),
  ("bopo.ratio_level", "token"),
  ("bopo.kl_beta", -0.1),
  ("bopo.advantage_eps", 0.0),
  ("bopo.advantage_clip", 0.0),
  ("bopo.epochs", 0),
  ("evaluate.seeds", 0),
  ("evaluate.bootstrap", 0),
  ("evaluate.random_p", (0.5, 1.5)),
  ("evaluate.random_p", (0.5, 0.5)),
  ("evaluate.thresholds", (0.5,)),  # that is argmax, which is there already
  ("evaluate.call_budgets", (1.5,)),
  ("evaluate.call_budgets", (-1,)),
]


@pytest.mark.parametrize("field, value", BAD)
def test_what_cannot_work_is_refused_by_name(field, value):
  config = Config()
  config.router.num_kv_heads = 2
  config.router.description_tokens, config.router.action_tokens = 96, 12
  config.router.result_tokens = 24
  validate(config)
  *sections, name = field.split(".")
  part = config
  for section in sections:
    part = getattr(part, section)
  assert hasattr(part, name)
  setattr(part, name, value)
  with pytest.raises(ValueError) as error:
    validate(config)
  text = str(error.value)
  assert text.startswith(f"--config.{field} is {value!r}; it must be ")
  assert "\n" not in text


def test_one_name_at_two_addresses_is_two_models():
  config = Config()
  config.models.names = ("m", "m")
  config.models.base_urls = ("http://one/v1", "http://two/v1")
  validate(config)
  config.models.base_urls = ("http://one/v1", "http://one/v1/")
  with pytest.raises(ValueError, match="--config.models.names .* different at one address"):
    validate(config)


@pytest.mark.parametrize("section", ["models", "judge"])
def test_a_key_in_place_of_its_variable_is_not_printed(section):
  config = Config()
  part = config.models if section == "models" else config.baselines.judge
  part.key_variables = ("sk-secret",)
  with pytest.raises(ValueError, match="key_variables is .* names of environment var") as error:
    validate(config)
  assert "secret" not in str(error.value)


@pytest.mark.parametrize(
  "section, field, value",
  [
    ("router", "vocab_size", 258),
    ("router", "max_tokens", 472),  # twice 96 + 12 + 2 * 24 tokens of previews and 80 around them
    ("profile", "easy_rate", 1.0),
    ("sft", "hard_share", 0.0),
    ("bopo", "lam", (0.0,)),
    ("bopo", "group_size", 2),
    ("evaluate", "call_budgets", (0,)),
    ("evaluate", "call_budgets", ()),
    ("evaluate", "random_p", (0.0, 1.0)),
  ],
)
def test_the_last_value_that_works(section, field, value):
  config = Config()
  setattr(getattr(config, section), field, value)
  validate(config)
