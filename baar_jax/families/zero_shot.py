"""Ask a judge, a language model, which model acts: the zero-shot router."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence

from baar_jax.config import Config, RouterConfig
from baar_jax.episode import SMALL, Reserve, Task
from baar_jax.families.family import Family, play_each
from baar_jax.llms.history import Agent
from baar_jax.rollout.policy import Move, Policy, StepContext
from baar_jax.rollout.specs import Decision, Live, PolicySpec
from baar_jax.router.view import View, make_byte_tokenizer
from baar_jax.run import RouterFiles

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

  def play(self, context: StepContext) -> Generator[None, Decision, Move | None]:
    """Ask the judge before the decision, unless the budgets allow only one model."""
    live = context.live
    live.paid = None
    if len(context.allowed) > 1:
      tokens = self._view.live_window(live).tokens
      message = {"role": "user", "content": self._view.tokenizer.decode(tokens)}
      if live not in self._judges:
        judge = self._judge(live.task, live.job.seed, context.reserve)
        self._judges[live] = judge
      live.paid = context.ask(self._judges[live], [message])
    move = yield from super().play(context)
    if move and live.paid:
      move = move.pay(live.paid, "judge")
    return move

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Choose the models that the judges' answers name."""
    decisions = []
    for live in ready:
      model = self._read(live.paid.text)
      decisions.append(Decision(model, latency_s=live.paid.call.latency_s))
    return decisions

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


@dataclasses.dataclass(frozen=True)
class ZeroShotSpec(PolicySpec):
  """A policy of the zero-shot router.

  Attributes:
    judge: the model that it asks, with a digest of all settings that the judge's
      answers depend on.
  """

  judge: str


class ZeroShot(Family):
  """The zero-shot router, with the judge of the configuration."""

  def points(self, config: Config) -> Iterator[PolicySpec]:
    """Yield the policy without a cap, and under each cap."""
    judge = config.baselines.judge
    settings = (
      config.models.kind,
      judge.base_urls,
      judge.temperature,
      judge.max_completion_tokens,
      judge.reasoning_effort,
      judge.prices,
    )
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:6]
    name = f"{judge.names[0]} {digest}"
    return play_each(config, [ZeroShotSpec(self.name, name, cap_conditioned=True)])

  def open(self, spec: PolicySpec, files: RouterFiles) -> ZeroShotPolicy:
    """Prepare the judge."""
    judge = files.pair.judge(files.config.baselines.judge)
    return ZeroShotPolicy(spec, judge, len(files.config.models.names))
