"""Define rivals: the cascade, the zero-shot router, and rules on the value heads."""

import dataclasses
import re
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np

from baar_jax.config import RouterConfig
from baar_jax.episode import SMALL, Reply, Reserve, Task
from baar_jax.llms.history import Agent, parse_action
from baar_jax.rollout.rules import Move, Policy, StepContext
from baar_jax.rollout.specs import Decision, Live, PolicySpec
from baar_jax.router.policy import RouterPolicy, Situation, pick_best
from baar_jax.router.view import View


class CascadePolicy(RouterPolicy):
  """Let SMALL propose an action; accept it, or ask the next costlier model.

  A trained router, the scorer, accepts or rejects each proposal. If SMALL's proposal is
  rejected, an intermediate model proposes next. The action of the costliest allowed
  model is taken without a decision.
  """

  def act(self, context: StepContext) -> Generator[None, Decision, Move | None]:
    """Play a step of the cascade, from SMALL's proposal to the accepted reply.

    The calls of the newest rejected proposal come first.

    Returns:
      The last decision, with the sums of all decisions of the step, and the reply; None
      if the episode's budgets are spent.
    """
    proposal = None
    total = Decision(SMALL)
    if len(context.allowed) > 1:
      small = context.agents[SMALL]
      proposal = context.ask(lambda: small.reply(context.messages, context.number))
    if proposal is None:
      return context.take(total)
    while True:
      action = parse_action(proposal.text, context.code_actions) or ""
      # The router reads the proposed action.
      context.live.proposal = action
      context.live.proposer = proposal.call.model
      decision = yield from context.decide()
      total = decision._replace(
        cost_usd=total.cost_usd + decision.cost_usd,
        latency_s=total.latency_s + decision.latency_s,
        calls=total.calls,
        proposal=action,
      )
      move = context.take(total, proposal)
      if move is None or move.reply is proposal:
        return move
      calls = [*proposal.calls("proposal"), *total.calls]
      total = move.decision._replace(calls=calls)
      if total.model == context.allowed[-1]:
        return Move(total, move.reply)
      proposal = move.reply
      affordable = context.affordable(total.model)
      context.allowed = [model for model in affordable if model >= total.model]

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Accept or reject the proposal of each waiting episode.

    Returns:
      A decision for each episode. The proposer's index accepts the proposal. The index
      of the next costlier model rejects it.
    """
    decisions = []
    for live, decision in zip(ready, super().choose(ready)):
      model = decision.model + live.proposer
      decisions.append(decision._replace(model=model))
    return decisions


# The limits of the judge's prompt, in tokens of the router's tokenizer. The judge reads
# longer prompts than a small router does (our choice).
MAX_TOKENS = 4096
DESCRIPTION_TOKENS = 256
ACTION_TOKENS = 32
RESULT_TOKENS = 64


class ZeroShotPolicy(Policy):
  """Ask a judge (a language model) which model acts at each step.

  SMALL acts if the judge's answer names no model, or several.
  """

  def __init__(
    self,
    spec: PolicySpec,
    judge: Callable[[Task, int, Reserve], Agent],
    config: RouterConfig,
    tokenizer: Path,
    models: int = 2,
  ):
    """Prepare the paper's prompt, which states the remaining budget.

    The configured view and its token limits are ignored.

    Args:
      spec: the policy's parameters.
      judge: makes the judge of an episode from its task, its seed and a
        function that reserves dollars.
      config: the router's settings.
      tokenizer: directory of a `tokenizer.json`.
      models: number of models.
    """
    super().__init__(spec)
    self._judge = judge
    # The judge of each live episode: its prompt cache lasts as long as the episode.
    self._judges: dict[Live, Agent] = {}
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

  def act(self, context: StepContext) -> Generator[None, Decision, Move | None]:
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


def escalate_once(advantage_A: np.ndarray, situation: Situation) -> int:
  """Pick the best model, but none cheaper than a model that has acted (SWE-Router).

  With two models SMALL acts until the value heads choose LARGE once, and then LARGE
  acts to the end (arXiv 2607.00053).
  """
  return max([pick_best(advantage_A, situation), *situation.models])


def stay_warm(advantage_A: np.ndarray, situation: Situation) -> int:
  """Stay with the last model unless a switch is worth its dollars (Weave, Plano).

  The last model acts unless another model's Q value is larger even without the value
  of the dollars of the switch. At the first step the model with the largest Q value
  acts.
  """
  if not situation.models:
    return pick_best(advantage_A, situation)
  last_model = situation.models[-1]
  value_A = advantage_A - situation.switch_A
  value_A[last_model] = advantage_A[last_model]
  best = pick_best(value_A, situation)
  return best if value_A[best] > value_A[last_model] else last_model
