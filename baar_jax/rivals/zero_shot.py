"""Ask a judge, a language model, which model acts: the zero-shot router."""

import re
import time
from collections.abc import Callable, Generator

from baar_jax.config import RouterConfig
from baar_jax.episode import SMALL, Reply, Reserve, Task
from baar_jax.llms.history import Agent
from baar_jax.rollout.rules import Draft, Move, Policy, StepContext
from baar_jax.rollout.specs import Decision, Live, PolicySpec
from baar_jax.router.view import View, make_byte_tokenizer

# The limits of the judge's prompt, in bytes. They are about 4,096 tokens for the whole
# prompt, 256 for the description, 32 for an action and 64 for its result (our choice).
LIMITS = RouterConfig(
  view="paper",
  max_tokens=16_384,
  description_tokens=1024,
  action_tokens=128,
  result_tokens=256,
)


class ZeroShotPolicy(Policy):
  """Ask a judge (a language model) which model acts at each step.

  SMALL acts if the judge's answer names no model, or several (our choice). The prompt
  is one user turn of at most `LIMITS` bytes, because the judge's tokenizer is not
  public; the paper cuts at 2,000 tokens.
  """

  def __init__(
    self,
    spec: PolicySpec,
    judge: Callable[[Task, int, Reserve], Agent],
    models: int = 2,
  ):
    """Prepare the paper's prompt, which states the remaining budget.

    Args:
      spec: the policy's parameters.
      judge: makes the judge of an episode from its task, its seed and a
        function that reserves dollars.
      models: number of models.
    """
    super().__init__(spec)
    self._judge = judge
    # The judge of each live episode: its prompt cache lasts as long as the episode.
    self._judges: dict[Live, Agent] = {}
    self._view = View(LIMITS, make_byte_tokenizer(models), models)

  def act(self, context: StepContext) -> Generator[Draft, Decision, Move | None]:
    """Play a step with the model that the judge names.

    The judge is not asked if the budgets allow only one model.
    """
    # `act` must be a generator, but this policy never waits for other episodes. This
    # statement yields nothing.
    yield from ()
    decision = Decision(SMALL)
    if len(context.allowed) > 1:
      start_s = time.monotonic()
      answer = context.ask(lambda: self._ask_judge(context))
      if answer:
        latency_s = time.monotonic() - start_s
        model = self._read(answer.text)
        calls = answer.calls("judge")
        decision = Decision(model, latency_s=latency_s, calls=calls)
    return context.take(decision)

  def _ask_judge(self, context: StepContext) -> Reply:
    """Ask the judge which model should act next."""
    live = context.live
    tokens = self._view.live_window(live).tokens
    message = {"role": "user", "content": self._view.tokenizer.decode(tokens)}
    if live not in self._judges:
      judge = self._judge(live.task, live.job.seed, context.budgets.reserve)
      self._judges[live] = judge
    return self._judges[live].reply([message], context.number)

  def finish(self, live: Live) -> None:
    """Forget the judge of an episode that ended or starts again."""
    self._judges.pop(live, None)

  def _read(self, answer: str) -> int:
    """Return the model that the judge's answer names.

    Returns:
      The model's index; SMALL if the answer names no model, or several.
    """
    words = self._view.words
    named = set(re.findall(rf"\b({'|'.join(words)})\b", answer))
    return words.index(named.pop()) if len(named) == 1 else SMALL
