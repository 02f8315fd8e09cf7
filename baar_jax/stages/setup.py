"""Stage setup: brings what a run reads, if it is missing: weights, an engine, tasks."""

from baar_jax.config import Config
from baar_jax.envs import table
from baar_jax.episode import SPLITS
from baar_jax.router import gguf
from baar_jax.router.weights import check_pretrained
from baar_jax.run import Run


def bring(config: Config) -> None:
  """Convert the router's weights, install the engine and generate tasks.

  This comes before a Run is opened, which reads the weights.

  Raises:
    ValueError: something cannot be brought.
  """

  def say(line: str) -> None:
    if config.distributed.process == 0:
      print(f"setup: {line}", flush=True)

  weights = config.router.weights
  if weights:
    place = gguf.set_up(weights)
    check_pretrained(config.router)
    say(f"the router's weights are in {place}")
  c = config.env
  engine = table.load(c.kind).engine
  if engine is None:
    say(f"{c.kind} needs nothing more")
  else:
    sizes = [getattr(c, f"{split}_tasks") for split in SPLITS]
    engine.set_up(c.options.get("data", ""), sizes, say)


def main(run: Run) -> None:
  """List the tasks of an engine, to show whether they can be used."""
  if table.load(run.config.env.kind).engine is not None:
    run.tasks("train")
