"""Check that shipped configurations are valid, and wrong values are refused by name."""

import dataclasses
import importlib
import json
import math
import operator

import pytest
import tiny
from absl import flags

import main
from baar_jax.config import (
  BoPOConfig,
  Config,
  ProfileConfig,
  ReferencesConfig,
  SFTConfig,
)
from baar_jax.run import Run
from configs import code
from configs.reproduce import SETTINGS
from main import validate

CONFIGS = sorted(path.stem for path in (tiny.ROOT / "configs").glob("*.py"))
CONFIGS += [
  "alfworld-paper",
  "appworld-paper",
  "sciworld-llama",
  "sciworld-paper",
  *(f"reproduce-{name}" for name in SETTINGS if name),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_are_valid(name):
  stem, *setting = name.split("-", 1)
  get_config = importlib.import_module(f"configs.{stem}").get_config
  config = get_config(*setting)
  validate(config)
  assert config.name == name  # so that two configs never share a directory
  assert config.baselines.judge.prompt_cache == config.models.prompt_cache
  if setting:
    assert (config.models.kind == "chat") == (setting[0] in ("paper", "llama"))
    with pytest.raises(ValueError, match="has no setting 'other'"):
      get_config("other")


# Tasks to train and to test on, and the most steps.
PAPER_TASKS = {
  "sciworld": (2120, 200, 40),
  "alfworld": (2420, 200, 30),
  "appworld": (105, 168, 40),
}


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_paper_settings_have_the_papers_values(name):
  c = importlib.import_module(f"configs.{name}").get_config("paper")
  assert (c.env.train_tasks, c.env.test_tasks, c.env.max_steps) == PAPER_TASKS[name]
  assert c.models.names == ("gpt-4.1-mini", "gpt-4.1") and not c.models.prompt_cache
  assert c.profile == ProfileConfig(trials=5, robustness=(3, 10))
  assert c.references == ReferencesConfig(samples=20, plans=())
  sft = SFTConfig(batch_episodes=64, micro_episodes=8, learning_rate=2e-5)
  assert c.sft == sft
  bopo = BoPOConfig(
    lam=(0.3, 0.1, 0.5, 0.7, 0.9),
    r_hard=0.5,
    group_size=8,
    reference_guided=True,
    kl_beta=0.04,
    learning_rate=1e-6,
    last_rate=1,
  )
  assert c.bopo == bopo
  assert (c.evaluate.call_budgets, c.evaluate.seeds) == ((5, 10, 15), 3)
  assert c.train_seeds == 3
  assert c.router.weights == "weights/Qwen2.5-1.5B-Instruct" and c.value.updates == 0
  assert c.router.max_tokens == 2048 and len(c.baselines.rivals) == 4
  assert c.baselines.ablations == ("no-stratified", "no-reference", "no-hard-bonus")
  assert c.baselines.judge.names == ("gpt-5",)


# Keys that a user has written in place of the names of their variables.
KEYS = "sk-secret", ("sk-secret",), ("AIza_secret",)
# Fields, and values that each of them refuses.
BAD = {
  "name": ("..", "a/b", "a\n"),
  "env.kind router.view models.kind": ("poem", "poem.py"),
  "env.options": ({3: 1},),
  "models.names": (("", "m"),),
  "models.prices": (((1, 1, 1), (1, 1)), ((math.nan,) * 3,) * 2),
  "models.base_urls": (
    ("a:8000",),
    ("http://h/v1\n",),
    ("https://sk-secret@h",),
    ("https://h?key=sk-secret",),
    ("https://h:sk-secret",),
  ),
  "models models.key_variables baselines.judge.key_variables": KEYS,
  "profile.trials references.samples evaluate.seeds": (
    1001,
  ),  # the next purpose has these seeds
  "profile.robustness": ((2.5,), (45,)),
  "bopo.lam": ((), (0.1, -0.1)),
  "baselines.ablations": (("no-such",),),
  "sft.learning_rate bopo.r_hard": (math.nan, math.inf),
  "distributed.coordinator": ("here",),
}
REFUSED = [
  (name, value) for names, bad in BAD.items() for name in names.split() for value in bad
]


@pytest.mark.parametrize("field, value", REFUSED)
def test_a_wrong_value_is_refused_by_its_field(field, value):
  config = Config()
  validate(config)
  section, _, name = field.rpartition(".")
  part = operator.attrgetter(section)(config) if section else config
  assert hasattr(part, name)
  setattr(part, name, value)
  with pytest.raises(ValueError) as error:
    validate(config)
  text = str(error.value)
  assert error.type is ValueError and text.startswith(f"--config.{field}")
  assert "\n" not in text and "secret" not in text


def read(*arguments: str) -> Config:
  return main.parse(["main.py", *arguments], flags.FlagValues())[0]


def test_a_run_without_a_file_continues_with_its_configuration(tmp_path):
  """Flags change the stored configuration. --config takes that of a file."""
  stored = tiny.config(tmp_path, "mine", train_tasks=7)
  Run(stored).close()
  runs = f"--config.runs={tmp_path}"
  stored.seed = 3
  assert read(runs, "--config.name", "mine", "--config.seed=3") == stored
  usual = code.get_config().env
  assert read("--config=code.py", runs, "--config.name=mine").env == usual
  assert read(runs, "--config.name=other").env == usual
  assert read(runs).env == usual
  # The run is moved, and another command had two processes.
  fields = dataclasses.asdict(stored) | {"runs": "/gone"}
  fields["distributed"] |= {"processes": 2, "coordinator": "gone:1"}
  (tmp_path / "mine" / "config.json").write_text(json.dumps(fields))
  (tmp_path / "mine" / "episodes-1.sqlite").write_text("the second one's store")
  assert read(runs, "--config.name=mine") == stored
