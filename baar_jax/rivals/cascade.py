"""Let cheaper models propose an action first, and a scorer accept it (FrugalGPT)."""

import dataclasses
from collections.abc import Generator, Sequence

from baar_jax.episode import SMALL, Episode, Step
from baar_jax.learn.batches import Labels
from baar_jax.llms.history import parse_action
from baar_jax.paper.references import Trials
from baar_jax.rollout.rules import Draft, Move, StepContext
from baar_jax.rollout.specs import Decision, Live
from baar_jax.router.policy import RouterPolicy


def add_proposals(episode: Episode, models: int) -> Episode:
  """Mark the actions of all models but the costliest as proposals.

  The result is the episode as a cascade would have played it: each action of a cheaper
  model is a proposal that was taken.

  Args:
    episode: an episode that another policy has played.
    models: number of models; the actions of the costliest one are final.
  """
  steps = []
  for step in episode.steps:
    proposal = None if step.model == models - 1 else step.action
    steps.append(dataclasses.replace(step, proposal=proposal))
  return dataclasses.replace(episode, steps=steps)


def _decide_failures(episode: Episode) -> list[int | None]:
  """Label each step that has a proposal: 1 if the episode fails, else 0."""
  fails = int(not episode.success)
  return [None if step.proposal is None else fails for step in episode.steps]


# The label of a step with a proposal is 1 if the episode fails, else 0. The answers are
# to take the proposal, and to ask the next costlier model.
FAILURES = Labels(_decide_failures, add_proposals, answers=2)


def learn_scorer(trials: Trials) -> tuple[Labels, list[Episode]]:
  """Label the episodes that train the cascade's scorer (FrugalGPT).

  The scorer learns whether an episode fails if the proposal is taken. So it asks the
  next model with the probability of a failure, uncalibrated (our choice; the paper's
  score is calibrated).

  Returns:
    The labels, and the episodes: always-SMALL's trials, and the stratified samples in
    which another model than the costliest acted.
  """
  episodes, _ = trials.of_boundaries()
  episodes += [e for e in trials.stratified if e.task_id in trials.profiles]
  costliest = trials.models - 1
  scored = [e for e in episodes if any(s.model != costliest for s in e.steps)]
  return FAILURES, scored


class CascadePolicy(RouterPolicy):
  """Let SMALL propose an action; accept it, or ask the next costlier model.

  A trained router, the scorer, accepts or rejects each proposal. If SMALL's proposal is
  rejected, an intermediate model proposes next. The action of the costliest allowed
  model is taken without a decision. A rejected proposal is paid for, because it is
  billed (our choice).
  """

  def act(self, context: StepContext) -> Generator[Draft, Decision, Move | None]:
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
      observation = context.live.observation
      draft = Step(observation, proposal.call.model, "", proposal=action)
      decision = yield from context.decide(draft)
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
      model = decision.model + live.draft.model
      decisions.append(decision._replace(model=model))
    return decisions
