"""The cascade (FrugalGPT): a scorer takes a model's proposal or goes on to the next."""

import dataclasses
from collections.abc import Generator, Sequence

from baar_jax.episode import SMALL, Reply
from baar_jax.llms.agent import parse_action
from baar_jax.rollout.specs import Decision, Live
from baar_jax.rollout.turn import Turn
from baar_jax.router.policy import RouterPolicy


class CascadePolicy(RouterPolicy):
  """Takes a model's proposal, or has the next model propose; the costliest acts."""

  def act(self, turn: Turn) -> Generator[None, Decision, Reply | None]:
    """Play a step: ask from SMALL on, and decide about each proposal."""
    proposal = None
    if len(turn.allowed) > 1:
      small = turn.agents[SMALL]
      proposal = turn.ask(lambda: small.reply(turn.messages, turn.number))
    if proposal is None:
      return turn.take()
    while True:
      self._show(turn, proposal)
      yield from turn.decide()
      reply = turn.take(proposal)
      if reply is None or reply is proposal:
        return reply
      turn.step.calls = [*proposal.calls("proposal"), *turn.step.calls]
      if turn.step.model == turn.allowed[-1]:
        return reply
      proposal = reply
      turn.step.logp = None
      affordable = turn.affordable(paid=turn.step.model)
      turn.allowed = [other for other in affordable if other >= turn.step.model]

  def _show(self, turn: Turn, proposal: Reply) -> None:
    """Show the scorer the proposed action."""
    action = parse_action(proposal.text, turn.code_actions) or ""
    turn.step.proposal = action
    turn.live.proposal = action
    turn.live.proposer = proposal.call.model

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide 0, to take the proposal, or 1, to go on to the next model."""
    decisions = []
    for live, decision in zip(ready, super().choose(ready)):
      model = decision.model + live.proposer
      decisions.append(dataclasses.replace(decision, model=model))
    return decisions
