"""The models to route between."""

from collections.abc import Callable, Sequence
from typing import Protocol

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import Task
from baar_jax.llms.agent import Agent, Hold
from baar_jax.llms.prices import Price


class Pair(Protocol):
  """The models to route between, cheapest first."""

  names: tuple[str, ...]
  prices: tuple[Price, ...]

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> Sequence[Agent]:
    """Start one agent for each model in an episode; `hold` pays for their calls."""

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Hold], Agent]:
    """Open a zero-shot router's model. Raises ValueError if it has no price."""

  def stop(self) -> None:
    """Stop calling: try no call again, and wait for none."""

  def close(self) -> None:
    """Close connections and files."""
