"""Ask two models again for functions that SMALL failed, in the same conversation.

    python -m tools.anchor --out=FILE.jsonl.gz --config=configs/code.py \\
      --config.name=anchor --config.models.base_urls=... --config.max_usd=1

The flags are those of tools/record.py, and --out is the finished recording. Each model
reads SMALL's recorded first try and what went wrong as earlier turns; the recording has
its reply in a new conversation. After a stop the same command goes on.
"""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from absl import app
from tqdm import tqdm

from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import Function, hash_text, run_tests
from baar_jax.episode import SMALL, Task
from baar_jax.llms.chat import ChatAgent
from baar_jax.llms.history import extend, open_conversation, parse_action
from baar_jax.run import env_arguments
from tools import record

MOST = 120  # functions


def ask(recorder: record.Recorder, model: int, function: Function) -> dict:
  """Ask a model for another try in the conversation of SMALL's failed one.

  Returns:
    Whether the function is solved and whether the code is the failed one, in the same
    conversation, and in a new one as recorded.
  """
  nodes = recorder.recording.nodes
  failed = nodes[function.id, 0, f"{SMALL}"]
  anew = nodes[function.id, 0, f"{SMALL}{model}"]
  task = Task(f"{function.id} again by {model}", function.split, "", 2)
  agent = ChatAgent(recorder.pair.models[model], task, 0, recorder.reserve)
  prompt = function.prompt()
  messages = open_conversation(recorder.env.system_prompt, task, prompt, prompt)
  extend(messages, failed.reply, failed.observation)
  code = parse_action(agent.reply(messages, 1).text, code=True) or ""
  results = run_tests(code, function.tests, not recorder.env.options.trusted)
  return {
    "model": recorder.pair.names[model],
    "solved": not any(results),
    "solved anew": not anew.observation,
    "same code": hash_text(code) == failed.code,
    "same code anew": anew.code == failed.code,
  }


def main(argv: Sequence[str]) -> None:
  """Ask for what is missing, and print the shares of each model."""
  config, out, _, in_flight = argv
  env = make(config.env.kind, **env_arguments(config))
  recorder = record.Recorder(config, env, Path(out))
  nodes = recorder.recording.nodes
  failed = []
  for function in record.list_wanted(env):
    if nodes[function.id, 0, f"{SMALL}"].observation:
      failed.append(function)
  with recorder.open_pools(in_flight) as pools:
    rows = []
    for model, pool in enumerate(pools):
      again = functools.partial(ask, recorder, model)
      rows.append(pool.map(again, failed[:MOST]))
    total = len(rows) * len(failed[:MOST])
    table = pd.DataFrame(tqdm(itertools.chain(*rows), total=total, unit="reply"))
  print(table.groupby("model").agg(["mean", "count"]).to_string())


if __name__ == "__main__":
  app.run(main, flags_parser=record.parse)
