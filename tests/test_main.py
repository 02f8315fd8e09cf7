"""Check that a wrong command line ends with one line of advice and exit code 2."""

import dataclasses
from pathlib import Path

import pytest
import tiny
from absl import flags

import main
from baar_jax.run import Run
from configs import quickstart

ROOT = Path(__file__).parents[1]
# Arguments, and texts that the error must contain.
WRONG = {
  "--stage=nonsense": "--stage=nonsense ... all|setup|profile|references|",
  "--config.sft.updates=many": "--config.sft.updates=many ... int",
  "--config.models.key_variables=('sk-secret',": "key_variables has a value that cannot be read",
  "--config.models=sk-secret": "config.models has a value that cannot be read",
  "--config.env.options={'short_tasks':True}": "set each option: --config.env.options.NAME=VALUE",
  "--config.value.prices=0.5": "Field prices not found ... baar_jax/config.py",
  "--config.env.cache_ttl_s=60": "Field cache_ttl_s not found ... baar_jax/config.py",
  "--config.references.plans=(('clusters',9),)": "plans.0.0: Input should be 'samples', 'steps'",
  "--config.router.weights=none --config.pretrain.epochs=0": "none/config.json",
  "--config.models.kind=chat --config.models.base_urls=('http://localhost:65536/v1',)": "Port out of range",
  "--config.models.names=('a','b') --config.models.names=('c','d')": "models.names is given twice",
  "-config.models.names=('a','b') --config.models.names=('c','d')": "--config.models.names is given twice",
  "--config.bopo.lam[0]=1": "lam[0]",
  "--config=configs/sandbox.py --config.runs=README.md": "Not a directory: 'README.md/sandbox'",
}
# Bodies of get_config, and texts that the error must contain.
BODIES = {
  "raise ValueError(f'no setting {setting!r}')": "no setting 'other'",
  "return Config(models=ModelsConfig(key_variables='sk-secret'))": "key_variables: Input should be",
  "return Config(models=ModelsConfig('chat', ('m',), (), (), 'sk-secret'))": "ModelsConfig.",
  "return Config(value=ValueConfig(prices=(0,)))": "file.py:other: ValueConfig.prices: Unexpected keyword argument",
  "c = Config(); c.sft.update = 5; return c": "Field update not found on dataclass SFTConfig; baar_jax/config.py",
  "o = []; o.append(o); c = Config(); c.bopo.lam = o; return c": "contains itsel",
  "c = Config(); c.bopo = c; return c": "contains itsel",
  "c = Config(); c.bopo.lam = DEEP; return c": "nested too deeply",
  "c = Config(); c.seed = type('X', (), {'__repr__': lambda x: 1 / 0})(); return c": "config.seed: Input",
  "return get_config(setting)": "file.py:other (RecursionError",
  "raise KeyboardInterrupt": "file.py:other (KeyboardInterrupt): correct",
  "raise SystemExit(0)": "file.py:other (SystemExit: 0): correct",
  "raise SystemExit('a\\n\\x1b[2J\\u202eb')": "SystemExit: a [2Jb",
}
CASES = [(arguments, "", expected) for arguments, expected in WRONG.items()]
CASES += [("--config=FILE:other", body, expected) for body, expected in BODIES.items()]


@pytest.mark.parametrize("arguments, body, expected", CASES)
def test_a_mistake_is_one_line(
  arguments, body, expected, tmp_path, monkeypatch, capsys
):
  """It ends the command with exit code 2; `expected` has parts of its line."""
  monkeypatch.chdir(ROOT)
  file = tmp_path / "file.py"
  file.write_text(
    "from functools import reduce\nfrom baar_jax.config import *\n"
    "DEEP = reduce(lambda value, _: (value,), range(10**5), ())\n"
    f"def get_config(setting=''):\n  {body}\n"
  )
  first, *others = arguments.replace("FILE", str(file)).split()
  command = ["main.py", first, f"--config.runs={tmp_path}/runs", *others]
  try:
    code = main.main(main.parse(command, flags.FlagValues()))
  except SystemExit as end:
    code = end.code
  out, err = capsys.readouterr()
  assert err.endswith("\n") and err[:-1].isprintable() and err.startswith("error: ")
  assert all(words in err for words in expected.split(" ... "))
  assert "sk-secret" not in err
  assert (code, out) == (2, "")


def test_a_run_without_a_file_continues_with_its_configuration(tmp_path):
  """Flags change the stored configuration. --config takes that of a file."""

  def read(*arguments):
    argv = ["main.py", *arguments, f"--config.runs={tmp_path}"]
    return main.parse(argv, flags.FlagValues())[0]

  tiny_run = tiny.config(tmp_path, "mine", train_tasks=7)
  Run(tiny_run).close()
  assert read("--config.name", "mine", "--config.seed=3") == dataclasses.replace(
    tiny_run, seed=3
  )
  usual = quickstart.get_config()
  for arguments in (
    ["--config=quickstart.py", "--config.name=mine"],
    ["--config.name=other"],
    [],
  ):
    assert read(*arguments).env == usual.env
