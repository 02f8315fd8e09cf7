"""Make tickets of small functions, and a recording of their models, by hand."""

import itertools
from pathlib import Path

from baar_jax.config import Config, EnvConfig, ModelsConfig
from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import (
  FORMAT,
  Code,
  Node,
  Recording,
  hash_functions,
  hash_texts,
)
from baar_jax.episode import SPLITS
from baar_jax.llms.history import write_reply
from tools.record import write_recording

# The functions all add one. The second test is no equation.
ROW = (
  '{{"id": "{0}{1}", "split": "{0}", "text": "Add one ({0}, {1}).", "signature": '
  '"def f(x):", "shown": ["assert f(1) == 2"], "hidden": ["assert f(3) > 3"]}}\n'
)
# Dollars per million tokens of SMALL and of LARGE: input, cached input and output.
PRICES = (1.0, 0.5, 4.0), (10.0, 5.0, 40.0)
PATHS = ("0", "1", "00", "01", "10", "11")


def configure(tmp: Path) -> Config:
  """Configure a ticket of four functions for each split."""
  data = tmp / "functions.jsonl"
  data.write_text(
    "".join(ROW.format(*key) for key in itertools.product(SPLITS, "abcd"))
  )
  models = ModelsConfig(
    kind="recorded",
    recording=str(tmp / "recording.gz"),
    names=("small", "large"),
    prices=PRICES,
  )
  options = {"data": str(data), "trusted": True}
  env = EnvConfig("code", 1, 1, 1, 8, options=options)
  return Config(name="tiny", runs=str(tmp), env=env, models=models)


def record(config: Config, solved: set[tuple], trials: int = 1, **header) -> None:
  """Write a recording of all tries at all functions.

  The action of a node is its key. A prompt has 2,084 tokens, and a reply 10.

  Args:
    config: the configuration; see `configure`.
    solved: the keys of the nodes that solve their function.
    trials: the number of trials.
    header: replaced values of the header.
  """
  functions = make("code", config.env.options).functions
  nodes = {}
  for function, trial, path in itertools.product(functions, range(trials), PATHS):
    key = function.id, trial, path
    before = nodes.get((function.id, trial, path[:-1]))
    prompt = function.prompt(before.observation if before else "")
    action = " ".join(map(str, key))
    results = ["" if key in solved else "It gave 0."]
    nodes[key] = Node(
      *key,
      prompt=hash_texts(Code.system_prompt, prompt),
      reply=write_reply("", action, code=True),
      code=hash_texts(action),
      prompt_tokens=2084,
      completion_tokens=10,
      results=results,
      observation=function.describe_failure(results),
      seconds=0.5,
    )
  usual = {
    "format": FORMAT,
    "models": config.models.names,
    "functions": hash_functions(functions),
    "max_completion_tokens": 50,
  }
  recording = Recording(usual | header, nodes)
  write_recording(Path(config.models.recording), recording)
