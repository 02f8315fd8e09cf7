"""Let cheaper models propose an action first, and a scorer accept it (FrugalGPT)."""

import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import ClassVar

import numpy as np

from baar_jax.episode import SMALL, Episode, Step
from baar_jax.families.family import Lesson, RouterFamily, divide
from baar_jax.learn.batches import Labels
from baar_jax.llms.history import parse_action
from baar_jax.rollout.jobs import stratified_spec
from baar_jax.rollout.policy import Move, StepContext
from baar_jax.rollout.specs import Decision, Live
from baar_jax.router.inputs import (
  BUCKETS,
  Tracker,
  find_buckets,
  find_pieces,
  find_words,
)
from baar_jax.router.policy import RouterPolicy
from baar_jax.run import RouterFiles, Run, load_profiles


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


def describe_proposal(tracker: Tracker, step: Step) -> np.ndarray:
  """Compute the inputs of a proposed action; all 0 without a proposal.

  They are the rank of the model that proposes it, how far its words are those of the
  task, how often it was tried, whether the observation offers it, and its words.

  Args:
    tracker: the episode, up to the observation of the step.
    step: the step with the proposal.
  """
  mark_H = np.zeros(BUCKETS)
  facts = np.zeros(4)
  if step.proposal is not None:
    proposal = step.proposal.lower()
    mark_H[list(find_buckets("last", proposal))] = 1.0
    facts[:] = (
      step.model,
      tracker.overlap(find_words(proposal)),
      min(tracker.actions[step.proposal], 4),
      proposal in find_pieces(tracker.observation),
    )
  return np.concatenate([facts, mark_H @ tracker.vocabulary.directions_HxC])


# The label of a step with a proposal is 1 if the episode fails, else 0. The answers are
# to take the proposal, and to ask the next costlier model.
FAILURES = Labels(_decide_failures, add_proposals, 2, describe_proposal)


class CascadePolicy(RouterPolicy):
  """Let SMALL propose an action; accept it, or ask the next costlier model.

  A trained router, the scorer, accepts or rejects each proposal. If SMALL's proposal is
  rejected, an intermediate model proposes next. The action of the costliest allowed
  model is taken without a decision. A rejected proposal is paid for, because it is
  billed (our choice).
  """

  def play(self, context: StepContext) -> Generator[None, Decision, Move | None]:
    """Get SMALL's proposal, then one of each model that is asked, until one is taken.

    The reply of the costliest allowed model is acted on without a decision.
    """
    live = context.live
    proposal = None
    if len(context.allowed) > 1:
      proposal = context.ask(context.agents[SMALL], context.messages)
    if proposal is None:
      return context.take(Decision(SMALL))
    total = Decision(SMALL)
    while True:
      action = parse_action(proposal.text, context.code_actions) or ""
      proposer = proposal.call.model
      live.draft = Step(live.observation, proposer, "", proposal=action)
      decision = yield from context.decide()
      total = decision._replace(
        cost_usd=total.cost_usd + decision.cost_usd,
        latency_s=total.latency_s + decision.latency_s,
        calls=total.calls,
        proposal=action,
      )
      move = context.take(total, proposal)
      if move.reply is proposal:
        return move
      move = move.pay(proposal, "proposal")
      total = move.decision
      if total.model == context.allowed[-1]:
        return move
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


class Cascade(RouterFamily):
  """The cascade, whose scorer learns whether an episode fails (FrugalGPT).

  The scorer asks the next model with the probability that the episode fails if the
  proposal is taken, uncalibrated (our choice; the paper's score is calibrated).
  """

  stage: ClassVar[str] = "baselines"
  labels: ClassVar[Labels] = FAILURES
  policy: ClassVar[type[RouterPolicy]] = CascadePolicy

  def prepare(self, run: Run, files: RouterFiles) -> Lesson:
    """Load the episodes that the scorer learns from.

    They are always-SMALL's trials, and the stratified samples in which another model
    than the costliest acted.
    """
    config = files.config
    profiles = load_profiles(run.store, config, "train", "dev")
    episodes = list(itertools.chain(*(p.small for p in profiles.values())))
    stratified = run.store.episodes(stratified_spec(config).key)
    episodes += [e for e in stratified if e.task_id in profiles]
    costliest = len(config.models.names) - 1
    scored = [e for e in episodes if any(s.model != costliest for s in e.steps)]
    return divide(files, self.name, FAILURES, scored)
