"""Stage setup: installs what an environment needs, and gets or makes its tasks."""

from baar_jax.envs import engines
from baar_jax.run import Run

# What makes tasks, run in the engine's own Python: MODULE DIRECTORY TRAIN_TASKS TEST_TASKS.
MAKERS = {"alfworld": "baar_jax.envs.alfworld_games", "appworld": "baar_jax.envs.appworld_tasks"}


def main(run: Run) -> None:
  """Installs the engine and sees to its data, each only where it is missing.

  Raises:
    ValueError: the installation failed, or the data that was named is not there.
  """
  c = run.config.env
  if c.kind not in engines.ENGINES:
    run.say(f"setup: {c.kind} needs nothing more")
    return
  engine = engines.ENGINES[c.kind]
  engines.install(c.kind)
  run.say(f"setup: {engine.title} {engine.version} in {engines.directory(c.kind)}")
  own = engines.own_data(c.kind)
  if engines.wants_own_data(c.kind, c.data):
    with engines.locked(own.name):
      sizes = (str(c.train_tasks), str(c.test_tasks))
      engines.run_module(c.kind, MAKERS[c.kind], str(own), *sizes)
  data = engines.data_of(c.kind, c.data)
  made = ", made by this project" if data == own else ""
  run.say(f"setup: its tasks in {data}{made}")
