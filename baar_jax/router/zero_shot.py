"""The zero-shot router: a strong model is asked which model acts next."""

import dataclasses
import re
import time
from collections.abc import Callable, Generator
from pathlib import Path

from baar_jax.config import RouterConfig
from baar_jax.episode import SMALL, Reply, Task
from baar_jax.llms.agent import Agent, Hold
from baar_jax.rollout.specs import Decision, PolicySpec
from baar_jax.rollout.turn import Policy, Turn
from baar_jax.router.view import View

# What a judge reads: more than a small router (our choice).
MAX_TOKENS = 4096
DESCRIPTION_TOKENS = 256
ACTION_TOKENS = 32
RESULT_TOKENS = 64


class ZeroShotPolicy(Policy):
  """Takes the model that a judge names; SMALL if it names none, or several."""

  def __init__(
    self,
    spec: PolicySpec,
    judge: Callable[[Task, int, Hold], Agent],
    config: RouterConfig,
    tokenizer: Path,
    models: int = 2,
  ):
    """Take a judge as `Pair.judge` makes it; it is shown the paper's prompt."""
    super().__init__(spec)
    self._judge = judge
    config = dataclasses.replace(
      config,
      view="paper",
      show_budget=True,
      max_tokens=MAX_TOKENS,
      description_tokens=DESCRIPTION_TOKENS,
      action_tokens=ACTION_TOKENS,
      result_tokens=RESULT_TOKENS,
    )
    self._view = View(config, tokenizer, models=models)

  def act(self, turn: Turn) -> Generator[None, Decision, Reply | None]:
    """Play a step: ask the judge if there is a choice, and take its model."""
    yield from ()  # it waits for no batch
    if len(turn.allowed) > 1:
      start_s = time.monotonic()
      answer = turn.ask(lambda: self._ask_judge(turn))
      if answer:
        turn.step.model = self._read(answer.text)
        turn.step.calls = answer.calls("judge")
        turn.step.router_latency_s = time.monotonic() - start_s
    return turn.take()

  def _ask_judge(self, turn: Turn) -> Reply:
    """Ask the judge about the next step."""
    live = turn.live
    tokens = self._view.live_window(live).tokens
    message = {"role": "user", "content": self._view.tokenizer.decode(tokens)}
    judge = self._judge(live.task, live.job.seed, turn.purse.hold)
    return judge.reply([message], turn.number)

  def _read(self, answer: str) -> int:
    """Return the only model that the answer names, else SMALL."""
    words = self._view.words
    named = set(re.findall(rf"\b({'|'.join(words)})\b", answer))
    return words.index(named.pop()) if len(named) == 1 else SMALL
