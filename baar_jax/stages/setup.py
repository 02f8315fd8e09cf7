"""Stage setup: provides weights, an engine and tasks if they are missing."""

from pathlib import Path

from baar_jax.envs import table
from baar_jax.episode import SPLITS
from baar_jax.router import gguf
from baar_jax.router.weights import check_pretrained
from baar_jax.run import Run


def main(run: Run) -> None:
  """Convert the router's weights, install the environment's engine and generate tasks.

  What is there already stays.

  Raises:
    ValueError: something cannot be had, or does not work.
  """

  def say(line: str) -> None:
    run.print(f"setup: {line}")

  router = run.config.router
  if router.weights:
    place = gguf.set_up(router.weights)
    check_pretrained(router)
    if place != Path(router.weights):
      say(f"{router.weights} as a Hugging Face directory in {place}")
  c = run.config.env
  engine = table.load(c.kind).engine
  if engine is None:
    say(f"{c.kind} needs nothing more")
  else:
    sizes = [getattr(c, f"{split}_tasks") for split in SPLITS]
    engine.set_up(c.options.get("data", ""), sizes, say)
    run.tasks("train")  # shows whether they can be used
