"""Configs: those that ship are valid, and what cannot work is refused by the field's name."""

import contextlib
import dataclasses
import importlib
import math
import operator
import pickle
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from baar_jax.checks import explain, validate
from baar_jax.config import Config, EnvConfig, ModelsConfig
from configs.sciworld import TRIOS

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[1] / "configs").glob("*.py"))
SETTINGS = ["sciworld-llama", *(f"sciworld-{setting}" for setting in TRIOS)] + [
  f"{name}-paper" for name in ("sciworld", "alfworld", "appworld")
]
SETTINGS += [f"reproduce-{setting}" for setting in ("alfworld", "appworld", "sandbox")]


@pytest.mark.parametrize("name", CONFIGS + SETTINGS)
def test_shipped_configs_are_valid(name):
  stem, *setting = name.split("-", 1)
  get_config = importlib.import_module(f"configs.{stem}").get_config
  config = get_config(*setting)
  validate(config)
  assert config.name == name  # so that two configs never share a directory
  if setting:
    assert (config.models.kind == "chat") == (setting[0] in ("paper", "llama"))
    with pytest.raises(ValueError, match="no setting 'other'"):
      get_config("other")


def test_the_paper_s_settings_are_the_defaults():
  c = Config()
  validate(c)
  assert (c.profile.trials, c.profile.easy_rate) == (5, 0.8)
  assert (c.references.samples, c.references.clone_large) == (20, False)
  assert (c.sft.hard_share, c.sft.batch_episodes, c.sft.learning_rates) == (0.7, 64, (2e-5,))
  assert (c.sft.warmup_share, c.sft.clip_norm) == (0.03, 1.0)
  assert c.bopo.lam == (0.1, 0.3, 0.5, 0.7, 0.9)
  assert (c.bopo.r_success, c.bopo.r_hard, c.bopo.group_size) == (1.0, 0.5, 8)
  assert (c.bopo.kl_beta, c.bopo.learning_rate) == (0.04, 1e-6)
  assert (c.bopo.ratio_level, c.bopo.clip_low, c.bopo.clip_high) == ("trajectory", None, None)
  assert (c.bopo.advantage_eps, c.bopo.advantage_clip) == (0.1, 5.0)
  assert (c.evaluate.seeds, c.evaluate.call_budgets) == (3, (5, 10, 15))


KEYS = "sk-secret", ("sk-secret",), ("AIza_secret",)  # in place of their variables
# Fields and values that one check refuses.
BAD = {
  "name": ("", "..", "a/b", "a b", "a\n", "../a", "-a", "\xe1", "$(a)", "a" * 101),
  "env env.kind": ("word", "chess.py"),
  "env.kind models.kind models.token_limit_field": ("poem",),
  "router.dtype router.view bopo.ratio_level": ("poem",),
  "env.short_tasks": (False,),  # the scripted models need solutions
  "models.names": ((1, 2), ("m", "m"), ("", "m")),
  "models": ("sk-secret",),
  "models.prices": ((1, 2), ((1, 1, 1), (1, 1)), ((1, 1, 1), (1, 1, 1, 1, 1))),
  "models.skills": ((0.5,), (0.0, 1.5), (0.0, 0.5, 1.0)),
  "models.base_urls": ((1,), ("http://",), ("https:///v1",), ("a:8000",), ("http://[::1/v1",)),
  "models.key_variables baselines.judge.key_variables": (("A", "B", "C"), "A KEY", *KEYS),
  "profile.trials references.samples evaluate.seeds": (1001,),  # the next purpose has these seeds
  "profile.robustness": ((2.5,), (3, 3), (1001,)),
  "value.prices": ((), (0.1, 0.1), (2.5,)),
  "bopo.lam": ((), (0.1, -0.1), (0.1, "much"), (0.1, 0.1000001)),
  "baselines.rivals": (("vanilla", "vanilla"), ("no-such",)),
  "baselines.ablations": (("no-reference", "no-reference"), ("no-such",)),
  "baselines.compared_lam": (0.2,),
  "baselines.judge.names": (("a", "b"),),
  "evaluate.random_p": ((0.5, 1.5), (0.5, 0.5)),
  "evaluate.thresholds": ((0.5,),),  # that is argmax, which every router has
  "evaluate.usd_budgets": ((0.1, 0.1),),
  "distributed.process": (1,),  # of one
  "router.vocab_size": (257,),  # 256 bytes and two decisions
  "router.num_heads": (3,),  # of 2 key-value heads
  "router.head_dim": (7,),
  "router.max_tokens": (567,),  # 2 x (96 + 20 + 2 x 44 of previews and 80 around them) = 568
}
SECRET = ["sk-secret@h", "h?key=sk-secret", "h#sk-secret", "user:sk-secret@h/v1", "h:sk-secret"]
BAD["models.base_urls"] += tuple((f"https://{rest}",) for rest in [*SECRET, "h:99999", "h:0"])
BAD["models.base_urls"] += tuple((f"http://{host}/v1",) for host in ("256.0.0.1", "a\0", "\uff41"))
BAD["models.base_urls"] += ("http://a", "http://b", "http://c"), ("http://h/v1\n",)
REFUSED = [(name, value) for names, bad in BAD.items() for name in names.split() for value in bad]
# Integers that may be 0; no other may.
ZERO = "env.processes models.retries baselines.judge.retries pretrain.epochs evaluate.tasks"
ZERO += " value.updates distributed.process distributed.fsdp evaluate.call_budgets seed"
ZERO += " serve.port serve.max_large_calls"
ZERO += " router.layers references.together"


def put(config, field, value):
  section, _, name = field.rpartition(".")
  part = operator.attrgetter(section)(config) if section else config
  assert hasattr(part, name)
  setattr(part, name, value)


def refusal(field, value) -> str:
  config = Config()
  router = config.router
  router.num_kv_heads, router.action_tokens, router.result_tokens = 2, 20, 44
  router.max_tokens = 568
  validate(config)
  put(config, field, value)
  with pytest.raises(ValueError) as error:
    validate(config)
  text = str(error.value)
  assert error.type is ValueError and text.startswith("--config.")
  assert "\n" not in text and "secret" not in text
  return text


@pytest.mark.parametrize("field, value", REFUSED)
def test_what_cannot_work_is_refused_by_name(field, value):
  text = refusal(field, value)
  shown = "not shown" if field.endswith(("variables", "urls", "models")) else repr(value)
  assert text.startswith(f"--config.{field} is {shown}")
  assert "; it must " in text or "; each entry must " in text


def fields(kind: str, section: object, prefix: str = "") -> dict:
  """The types of the fields that are numbers of a kind or tuples of these, by name."""
  named = {}
  for field in dataclasses.fields(section):
    value, name = getattr(section, field.name), f"{prefix}{field.name}"
    if dataclasses.is_dataclass(value):
      named |= fields(kind, value, f"{name}.")
    elif re.search(rf"\b{kind}\b", str(field.type)):
      named[name] = "tuple" in str(field.type)
  return named


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_no_float_is_unbounded(value):
  for name, is_tuple in fields("float", Config()).items():
    bad = (0.25, value) if is_tuple else value
    bad = ((value,) * 3, (0.0,) * 3) if name.endswith("prices") else bad
    assert refusal(name, bad).startswith(f"--config.{name} is "), name


def test_no_count_is_negative_or_fits_no_memory():
  for name, is_tuple in fields("int", Config()).items():
    for bad in [-1, 10**12, 10**400] + [0] * (name not in ZERO.split()):
      assert refusal(name, (bad,) if is_tuple else bad), name


def test_messages_say_what_a_value_must_be():
  assert refusal("sft.updates", 0).endswith(" is 0; it must be greater than 0")
  assert refusal("router.view", "poem").endswith("it must be one of transcript|paper")
  assert "each entry must be a valid number" in refusal("bopo.lam", (0.1, "much"))
  assert refusal("env.live_per_process", 10**12).endswith(" GB: make some smaller")
  assert "env.a is not shown" in refusal("env", {"a": 1})  # it may be a misspelt key_variables


ADDRESSES = ("http://one/v1", "http://two/v1"), ("http://one/v1", "http://one/v1/")
LAST = {"router.vocab_size": 258, "router.max_tokens": 472}  # 2 x (96 + 12 + 2 x 24 + 80)
LAST |= {"profile.easy_rate": 1.0, "sft.hard_share": 0.0, "bopo.lam": (0.0,), "bopo.group_size": 2}
LAST |= {"evaluate.call_budgets": (0,), "evaluate.random_p": (0.0, 1.0)}
NO_REFERENCE = {"baselines.ablations": ("no-reference",)}
TWO = {"distributed.processes": 2}
TOGETHER = [
  ({"env.kind": "appworld"}, "1 for AppWorld"),
  (NO_REFERENCE | {"bopo.reference_guided": False}, "without no-reference"),
  ({"router.weights": "w", "pretrain.epochs": 1}, "0 with --config.router.weights"),
  ({"references.samples": 1000}, "less than 1000"),  # its seeds are 1001, 1002, ...
  ({"bopo.updates": 41_667}, "at most 41666"),  # x 8 episodes x 3 batches of vanilla: a million
  ({"train_seeds": 4}, "at most --config.evaluate.seeds"),
  ({"models.kind": "chat", "models.names": ("m",)}, "two models"),
  (TWO, "coordinator is ''; it must be host:port of process 0"),
  ({"models.names": ("m", "m"), "models.base_urls": ADDRESSES[1]}, "different at one address"),
  ({"models.names": ("m", "m"), "models.base_urls": ADDRESSES[0]}, None),  # two models
  (TWO | {"distributed.coordinator": "localhost:80"}, None),
  (NO_REFERENCE | {"baselines.compared_lam": 0.3}, None),
  ({"models.key_variables": ("PATH", "")}, None),
  ({"models.key_variables": KEYS[2]}, "variables that are set, or ''$"),
  (LAST, None),
]


@pytest.mark.parametrize("fields, said", TOGETHER)
def test_fields_that_depend_on_each_other(fields, said):
  config = Config()
  for field, value in fields.items():
    put(config, field, value)
  with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
    validate(config)


def test_values_take_the_type_of_their_field():
  config = Config()
  config.bopo.lam, config.sft.updates, config.env.timeout_s = [1], "6", 60
  validate(config)
  assert (config.bopo.lam, config.sft.updates, config.env.timeout_s) == ((1.0,), 6, 60.0)
  copies = pickle.loads(pickle.dumps(config)), Config(**vars(config)), dataclasses.replace(config)
  assert all(dataclasses.asdict(other) == dataclasses.asdict(config) for other in copies)
  with pytest.raises(ValidationError, match="Unexpected keyword"):
    EnvConfig(task=3)


@pytest.mark.parametrize("key", KEYS[:2])
def test_a_key_in_place_of_its_variable_is_not_printed(key):
  wrongs = [((), {"key_variables": key}), (("chat", ("m",), (), (), key), {})]
  for wrong in [*wrongs, ((), {"key_varables": key}), ((), {"names": 3, "key_variables": key})]:
    with pytest.raises(ValidationError) as error:
      ModelsConfig(*wrong[0], **wrong[1])
    assert "secret" not in explain(error.value, "ModelsConfig") + str(error.value)
