"""Policies without training: a rule maps what is seen of an episode to a model."""

import random
from collections.abc import Generator

from baar_jax.episode import SMALL, Reply
from baar_jax.rollout.specs import Decision, Live, PolicySpec
from baar_jax.rollout.turn import Policy, Turn


def take_small(live: Live, spec: PolicySpec) -> int:
  """Take SMALL (paper: always-small)."""
  return SMALL


def take_large(live: Live, spec: PolicySpec) -> int:
  """Take LARGE (paper: always-large; under a cap on calls First-Large)."""
  return live.models - 1


def take_rank(live: Live, spec: PolicySpec) -> int:
  """Take the model of a rank, from 1 (our choice, for intermediate models)."""
  return spec.rank - 1


def take_randomly(live: Live, spec: PolicySpec) -> int:
  """Take a costlier model than SMALL with probability p, else SMALL."""
  return draw_model(live, spec.p)


def draw_model(live: Live, p: float) -> int:
  """Draw one of the models costlier than SMALL, evenly, with probability p, else SMALL.

  The draw depends on task, seed and step alone (our choice).
  """
  draw = random.Random(f"random|{live.task.id}|{live.job.seed}|{len(live.steps)}")
  return draw.choice(range(1, live.models)) if draw.random() < p else SMALL


def take_sampled(live: Live, spec: PolicySpec) -> int:
  """Take what the k-th stored sample of a task takes; the plans follow one another.

  Within a plan k counts from 1 to N. A sample of the paper's plan takes LARGE with
  probability k / N at each step. The other plans are our choice: LARGE until a clock
  is at k / (2 N) of the task's steps, or for even k from then on. The clock counts
  steps ("steps") or observations that are not new ("repeats"). So the values also
  learn what First-Large does, and giving up, and LARGE once an episode goes in circles.
  """
  k = live.job.trial
  for plan in spec.plans:
    if k <= plan.count:
      break
    k -= plan.count
  if plan.kind == "samples":
    return draw_model(live, k / plan.count)
  clock = len(live.steps)
  if plan.kind == "repeats":
    seen = [*(step.observation for step in live.steps), live.observation]
    clock = len(seen) - len(set(seen))
  is_early = clock < k / (2 * plan.count) * live.task.max_steps
  return draw_model(live, float(is_early == k % 2))


class PrivilegedPolicy(Policy):
  """Takes the model that gains most over SMALL, if a dollar costs `mu` of the task.

  It reads the scripted models' errors, which no router sees, one step ahead (our
  choice). The gain is SMALL's loss minus a model's, as far as that model knows the
  task: a task that it cannot do is given up.
  """

  def act(self, turn: Turn) -> Generator[None, Decision, Reply | None]:
    """Play a step with the model of the largest gain that the budgets allow."""
    yield from ()  # it waits for no batch
    if len(turn.allowed) > 1:
      turn.step.model = self._find_best(turn)
    return turn.take()

  def _find_best(self, turn: Turn) -> int:
    """Find the model that gains most over SMALL, else SMALL."""
    small = turn.agents[SMALL].prospect(turn.messages, turn.number)
    best = SMALL
    most = 0.0
    for model, player in enumerate(turn.agents[1:], 1):
      prospect = player.prospect(turn.messages, turn.number)
      gain = prospect.known_share * (small.loss - prospect.loss)
      gain -= self.spec.mu * (prospect.usd - small.usd)
      if gain > most:
        best = model
        most = gain
    return best
