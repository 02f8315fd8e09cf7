"""Play test tickets with live models, and compare them with the recorded outcomes.

    python -m tools.live_check --recorded=runs/code --config=configs/code.py \\
      --config.name=live --config.env.test_tasks=24 --config.evaluate.seeds=1 \\
      --config.models.kind=chat --config.models.base_urls=... --config.max_usd=1 \\
      --config.env.processes=1 --config.env.live_per_process=8

The policies are always-LARGE, First-Large under the middle cap, and the default router
of the finished run that --recorded names, with its first training seed. The recorded
score of a ticket is the mean over this router's evaluation seeds. Brackets are 95 %
intervals over tickets.
"""

import contextlib
from pathlib import Path

import pandas as pd
from absl import app, flags, logging

import main
from baar_jax.config import Config, require
from baar_jax.families.table import list_specs, open_with
from baar_jax.flags import fail
from baar_jax.rollout.budget import CapReached
from baar_jax.rollout.jobs import ALWAYS_LARGE, FIRST_LARGE, list_evaluation
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.run import RouterFiles, Run
from baar_jax.stages.evaluate import choose_on_dev
from baar_jax.store import read_config
from tools.measure_recording import describe

RECORDED = flags.DEFINE_string("recorded", "runs/code", "Directory of the run.")


def play(
  run: Run, spec: PolicySpec, files: RouterFiles, tickets: list[str]
) -> pd.DataFrame:
  """Return a policy's mean score, dollars and LARGE calls at each ticket."""
  tasks = [task for task in run.tasks("test") if task.id in tickets]
  jobs = list_evaluation(run.config, tasks, "test")
  rows = []
  for episode in run.play(spec.key, {spec: jobs}, open_with(files)):
    rows.append((episode.task_id, episode.score, episode.cost_usd, episode.large_calls))
  columns = ["ticket", "score", "usd", "large"]
  return pd.DataFrame(rows, columns=columns).groupby("ticket").mean()


def check(live: Run, recorded: Run) -> None:
  """Play what is missing, and print live minus recorded for each policy."""
  config = recorded.config
  choice = choose_on_dev(recorded.store, list_specs(config), config)
  calls = config.evaluate.call_budgets
  first = PolicySpec(FIRST_LARGE, cap=Cap(calls=calls[len(calls) // 2]))
  tickets = [task.id for task in live.tasks("test")]
  for spec in (ALWAYS_LARGE, first, choice.default):
    tables = []
    for run in (live, recorded):
      tables.append(play(run, spec, recorded.files(), tickets))
    # A ticket whose live episode was left out counts nowhere.
    now, before = tables[0].align(tables[1], join="inner")
    shown = pd.DataFrame({"live": now.mean(), "recorded": before.mean()})
    differences = (now - before).apply(describe, digits=5)
    print(f"{spec.key}, {len(now)} tickets")
    print(shown.assign(difference=differences).to_string())


def start(command: tuple[Config, str]) -> int:
  """Open both runs and check; a mistake ends with one line."""
  logging.set_verbosity(logging.WARNING)
  config, _ = command
  directory = Path(RECORDED.value)
  try:
    main.validate(config)
    require(config.models.kind == "chat", "config.models.kind", "chat")
    require(config.max_usd > 0, "config.max_usd", "above 0")
    stored = read_config(directory)
    if not stored or not stored.value.updates or not stored.evaluate.call_budgets:
      raise ValueError(f"{directory} has no run with value heads and caps on calls")
    stored.runs = str(directory.parent)
    with (
      contextlib.closing(Run(config)) as live,
      contextlib.closing(Run(stored)) as recorded,
    ):
      check(live, recorded)
  except (ValueError, OSError, CapReached) as error:
    return fail(error)
  return 0


if __name__ == "__main__":
  app.run(start, flags_parser=main.parse)
