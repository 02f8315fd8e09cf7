"""Store sessions that another program recorded as episodes of a run.

python -m baar_serve.traces --config.name=mine --config.traces=FILE_OR_DIRECTORY
"""

import collections
import contextlib

from baar_jax.config import Config
from baar_jax.episode import Call, Episode, Step
from baar_jax.llms.prices import drop_version, prices_of
from baar_jax.rollout.jobs import BOUNDARIES, stratified_spec
from baar_jax.run import Run
from baar_serve.config import ServeConfig, open_run, run_command
from baar_serve.episodes import add_session
from baar_serve.logs import LoggedCall, read_logs


def load_file(config: ServeConfig) -> None:
  """Store the sessions of `--config.traces` in the run of `--config.name`.

  Raises:
    ValueError: no file is named, or it has a wrong record.
  """
  with contextlib.closing(open_run(config)) as run:
    store_file(config, run)


def store_file(config: ServeConfig, run: Run) -> None:
  """Store the sessions of `--config.traces` as episodes of a run, each session once.

  Raises:
    ValueError: a record or a session is wrong. Then no session is stored.
  """
  calls_by_session = collections.defaultdict(list)
  for call in read_logs(config):
    calls_by_session[call.session].append(call)
  sessions = []
  for id_, calls in calls_by_session.items():
    sessions.append(
      (f"import {id_}", read_session(id_, calls, run.config), calls[0].text)
    )
  new_count = sum(add_session(run.store, run.config, *found) for found in sessions)
  run.print(
    f"Imported {new_count} sessions; {len(sessions) - new_count} were already stored."
  )


def read_session(id_: str, calls: list[LoggedCall], config: Config) -> Episode:
  """Read a recorded session as an episode.

  The dollars are computed from the tokens at the configuration's prices; missing tokens
  are estimated. If SMALL alone or LARGE alone answered, the episode is a trial of that
  boundary policy. Any other session counts as a stratified sample, however its models
  were chosen (our choice).

  Args:
    id_: the session's id.
    calls: the session's calls, the first one first.

  Raises:
    ValueError: a call's model is unknown, or the score is missing or wrong.
  """
  names = config.models.names
  prices = prices_of(config.models)
  steps = []
  score = None
  for call in calls:
    name = call.model if call.model in names else drop_version(call.model)
    if name not in names:
      raise ValueError(
        f"Session {id_!r:.80} has the model {call.model!r:.80}. "
        "Set --config.models.names to the models of all sessions."
      )
    model = names.index(name)
    cost = Call(model, call.usage, prices[model].cost_usd(call.usage))
    steps.append(Step(call.observation, model, call.action, [cost]))
    if call.score is not None:
      score = call.score
  if not (isinstance(score, int | float) and 0 <= score <= 1):
    raise ValueError(
      f"Session {id_!r:.80} has the score {score}, not one from 0 to 1. "
      "Set --config.scores."
    )
  spec = stratified_spec(config)
  for boundary, model in zip(BOUNDARIES, (0, len(names) - 1)):
    if {step.model for step in steps} == {model}:
      spec = boundary
  return Episode(calls[-1].task, spec.key, "test", 0, steps, score, "done")


if __name__ == "__main__":
  run_command(load_file)
