"""An episode so far -> the text, and its tokens, that the router decides from."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from baar_jax.config import RouterConfig
from baar_jax.episode import DECISION_WORDS, SMALL, Episode, Step, Task
from baar_jax.rollout.live import Live
from baar_jax.router.tokenizer import Tokenizer

RECENT_STEPS = 10  # of the paper's hard-budget prompt

TASK = "task: "
START = "\nstart: "
STEP = "\nstep {number}{budget}"
MODEL = " model:"
BUDGET = "/{steps}, {left} large calls left,"
PROPOSAL = " proposal: "
DOLLARS = " ${left:.4f} left,"  # follows the budget of calls, or takes its place
ACTION = " action: "
RESULT = "\nresult: "

ROLE = "You choose which language model acts next in a task of many steps."
ROLE_HARD = "You choose, within a budget, which language model acts next in a task of many steps."
CHOICES = "\nSMALL is fast and cheap. BIG is strong and expensive, for steps that need reasoning."
HARD_LEFT = (
  "\nThe budget is strict: once it is spent, only SMALL is left. "
  "{left} BIG calls must last for up to {steps} steps; keep them for where they matter."
)
HARD_DOLLARS = (
  "\nThe budget is strict: a call that may not fit is not made. "
  "${left:.4f} must last for up to {steps} steps; keep it for where it matters."
)
HARD_SPENT = "\nThe budget is spent: only SMALL is left for up to {steps} steps."
ASK = "\nWhich model should act next, SMALL or BIG?\nDecision:"
ASK_SPENT = "\nThe answer has to be SMALL.\nDecision:"


@dataclasses.dataclass(frozen=True)
class Window:
  """One sequence that the router reads.

  Attributes:
    tokens: ids, among them the decisions before the last position.
    positions: where the decisions of steps `first`, `first` + 1, ... are predicted: the index of
      the token before each.
    first: the episode's step that the first position decides.
  """

  tokens: list[int]
  positions: list[int]
  first: int


@dataclasses.dataclass(frozen=True)
class _Excerpt:
  """What a view may show of an episode: an observation and perhaps a proposal per decision."""

  task: Task
  steps: Sequence[Step]
  observations: Sequence[str]
  proposals: Sequence[str | None]
  call_budget: int | None
  usd_budget: float | None

  def left(self, s: int) -> tuple[int | None, float | None]:
    """LARGE calls and dollars that are left before step s; None where there is no such budget."""
    calls, usd = self.call_budget, self.usd_budget
    if calls is not None:
      calls -= sum(step.model != SMALL for step in self.steps[:s])
    if usd is not None:
      usd = max(0.0, usd - sum(step.spent_usd for step in self.steps[:s]))
    return calls, usd


def text_pieces(task: Task, episode: Episode) -> Iterator[str]:
  """The texts that the views encode one by one, uncut, to train a tokenizer on."""
  yield from (TASK, task.description, START)
  left = 0
  for number, step in enumerate(episode.steps, 1):
    left = (left + 1) % task.max_steps
    for budget in ("", BUDGET.format(steps=task.max_steps, left=left)):
      yield STEP.format(number=number, budget=budget) + MODEL
    yield from (ACTION, step.action, RESULT, step.observation)
  yield from (ROLE, ROLE_HARD, CHOICES, HARD_LEFT, HARD_SPENT, ASK, ASK_SPENT)


class View:
  """Turns episodes into windows, in the same way for training and for live decisions.

  The text before a decision depends on nothing but what was visible then. A transcript of a longer
  episode extends that of a shorter one, so that a rollout can keep a KV cache.
  """

  def __init__(self, config: RouterConfig, directory: Path, proposals: bool = False):
    """Reads the directory's tokenizer; raises ValueError where `Tokenizer` does.

    Args:
      proposals: show what SMALL proposes before each decision, as a cascade's scorer reads it.
    """
    self.config = config
    self.tokenizer = Tokenizer(directory)
    self.decision_ids = self.tokenizer.decision_ids
    self._proposals = proposals

  def windows(
    self,
    task: Task,
    steps: Sequence[Step],
    observation: str | None,
    call_budget: int | None,
    usd_budget: float | None = None,
    proposal: str | None = None,
  ) -> list[Window]:
    """The sequences of an episode so far.

    Args:
      steps: those that are done.
      observation: what the agent sees now: the last window ends where the next decision is
        predicted. With None it ends where the decision of the last step is.
      call_budget: the cap on large calls, shown if the config says so; None is no cap.
      usd_budget: the cap on dollars, in the same way.
      proposal: SMALL's action for the next decision, shown if the view shows proposals.
    """
    observations = [step.observation for step in steps]
    # A proposal in whose place LARGE acted is not shown any more: the episodes that a scorer
    # learns from have none there.
    proposals = [step.proposal if step.model == SMALL else None for step in steps]
    if observation is not None:
      observations.append(observation)
      proposals.append(proposal)
    if not self._proposals:
      proposals = [None] * len(proposals)
    if not self.config.show_budget:
      call_budget = usd_budget = None
    excerpt = _Excerpt(task, steps, observations, proposals, call_budget, usd_budget)
    if self.config.view != "paper":
      return self._transcript(excerpt)
    blocks = [
      self._encode(f"\nStep {number} [Model: {DECISION_WORDS[step.model]}]")
      + self._result(step, result)
      for number, (step, result) in enumerate(zip(steps, observations[1:]), 1)
    ]
    return [self._prompt(excerpt, blocks, s) for s in range(len(observations))]

  def episode_windows(self, task: Task, episode: Episode) -> list[Window]:
    """The sequences of a finished episode, every decision in exactly one of them."""
    return self.windows(task, episode.steps, None, episode.call_budget, episode.usd_budget)

  def live_window(self, live: Live) -> Window:
    """The sequence at whose end the next decision of a live episode is predicted."""
    budgets = live.call_budget, live.usd_budget
    return self.windows(live.task, live.steps, live.observation, *budgets, live.proposed)[-1]

  def outcome(self, step: Step, result: str) -> list[int]:
    """The tokens of an action and its result, each cut as in a window, without markup."""
    c = self.config
    return self._encode((step.action, c.action_tokens), (result, c.result_tokens))

  def text(self, window: Window) -> str:
    """A window's text, for a model that reads text."""
    return self.tokenizer.decode(window.tokens)

  def _transcript(self, excerpt: _Excerpt) -> list[Window]:
    """One text that grows by whole steps; over the limit a new window keeps its newer half."""
    c, steps = self.config, excerpt.steps
    head = self._encode(TASK, (excerpt.task.description, c.description_tokens))
    start = self._encode(START, (excerpt.observations[0], c.result_tokens))
    asks = [self._ask(excerpt, s) for s in range(len(excerpt.observations))]
    answers = [
      [self.decision_ids[step.model], *self._result(step, result, proposal)]
      for step, result, proposal in zip(steps, excerpt.observations[1:], excerpt.proposals)
    ]
    blocks = [ask + answer for ask, answer in zip(asks, answers)]
    windows = [Window(head + start, [], 0)]
    for s, ask in enumerate(asks):
      new_tokens = answers[s - 1] + ask if s else ask
      if len(windows[-1].tokens) + len(new_tokens) <= c.max_tokens:
        windows[-1].tokens.extend(new_tokens)
      else:
        free = c.max_tokens // 2 - len(head) - len(ask)
        first = _first_block(blocks[:s], [free] * s)
        omitted = self._encode(f"\nsteps 1-{first} omitted")
        windows.append(Window(head + omitted + sum(blocks[first:s], []) + ask, [], s))
      windows[-1].positions.append(len(windows[-1].tokens) - 1)
    return windows

  def _ask(self, excerpt: _Excerpt, s: int) -> list[int]:
    """The line of a step up to its decision."""
    steps = excerpt.task.max_steps
    calls, usd = excerpt.left(s)
    budget = "" if calls is None else BUDGET.format(steps=steps, left=calls)
    if usd is not None:
      budget = (budget or f"/{steps},") + DOLLARS.format(left=usd)
    step = STEP.format(number=s + 1, budget=budget)
    if excerpt.proposals[s] is None:
      return self._encode(step + MODEL)
    return self._encode(step) + self._proposal(excerpt.proposals[s]) + self._encode(MODEL)

  def _prompt(self, excerpt: _Excerpt, blocks: list[list[int]], s: int) -> Window:
    """The paper's prompt for step s (appendix "Prompts"): its fields in its order, in our words.

    The paper has no budget of dollars; ours is worded as its budget of calls.
    """
    c, task = self.config, excerpt.task
    calls, usd = excerpt.left(s)
    steps_left = task.max_steps - s
    hard, spent = (calls, usd) != (None, None), calls is not None and calls <= 0
    role = ROLE_HARD if hard else ROLE
    head = self._encode(f"{role}\nTask: ", (task.description, c.description_tokens))
    if hard:
      budget = "\nBudget:"
      if calls is not None:
        limit = excerpt.call_budget
        budget += f" at most {limit} BIG calls, {limit - calls} used, {calls} left."
      if usd is not None:
        budget += f" at most ${excerpt.usd_budget:.4f}, ${usd:.4f} left."
      budget += f" Step {s + 1} of {task.max_steps}."
      head += self._encode("\nEnvironment: ", (excerpt.observations[0], c.result_tokens), budget)
    head += self._encode(CHOICES)
    if calls is not None:
      rule = HARD_SPENT if spent else HARD_LEFT
      head += self._encode(rule.format(left=calls, steps=steps_left))
    if usd is not None:
      head += self._encode(HARD_DOLLARS.format(left=usd, steps=steps_left))
    head += self._encode("\nPrevious steps:" if s else "\nPrevious steps: none")
    tail = self._proposal(excerpt.proposals[s]) + self._encode(ASK_SPENT if spent else ASK)
    omitted = [[], *(self._encode(f"\n(steps 1-{n} omitted)") for n in range(1, s + 1))]
    free = [c.max_tokens - len(head) - len(line) - len(tail) for line in omitted]
    first = _first_block(blocks[:s], free, oldest=max(0, s - RECENT_STEPS) if hard else 0)
    tokens = head + omitted[first] + sum(blocks[first:s], []) + tail
    return Window(tokens, [len(tokens) - 1], s)

  def _proposal(self, proposal: str | None) -> list[int]:
    if proposal is None:
      return []
    return self._encode(PROPOSAL, (proposal, self.config.action_tokens))

  def _result(self, step: Step, result: str, proposal: str | None = None) -> list[int]:
    """A step's action, unless it was taken as proposed and so stands there already; its result."""
    c = self.config
    taken = proposal is not None and step.model == SMALL
    action = [] if taken else self._encode(ACTION, (step.action, c.action_tokens))
    return action + self._encode(RESULT, (result, c.result_tokens))

  def _encode(self, *pieces: str | tuple[str, int]) -> list[int]:
    """Tokens of texts one after the other; (text, limit) is cut to a preview.

    Each is encoded for itself, so that the tokens of one do not depend on the next one.
    """
    tokens = []
    for piece in pieces:
      text, limit = (piece, None) if isinstance(piece, str) else piece
      tokens += self.tokenizer.encode(text, limit)
    return tokens


def _first_block(blocks: Sequence[list[int]], free: Sequence[int], oldest: int = 0) -> int:
  """The index from which on the newest blocks fit, at least `oldest`.

  Args:
    free: by index, how many tokens are free if the blocks from there on are kept.
  """
  size = 0
  for first in reversed(range(oldest, len(blocks))):
    size += len(blocks[first])
    if size > free[first]:
      return first + 1
  return oldest
