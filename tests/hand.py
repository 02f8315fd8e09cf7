"""Play by hand: environments, models, policies and live episodes with fixed events."""

import functools
import threading
from types import SimpleNamespace

from baar_jax.episode import Call, Reply, Step, Task, Usage
from baar_jax.families.cascade import CascadePolicy
from baar_jax.families.rules import RandomSpec
from baar_jax.families.table import FAMILIES
from baar_jax.rollout.jobs import RankSpec
from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import (
  Decision,
  Job,
  Live,
  PolicySpec,
  SampledSpec,
)

SMALL_USD = 0.00056  # 1000 tokens in at $0.40 and 100 out at $1.60 per million
LARGE_USD = 0.0028  # the same at $2.00 and $8.00
USD = SMALL_USD, LARGE_USD
TRIO_USD = *USD, 0.014  # a third model, five times as costly as LARGE
USAGE = Usage(1000, 0, 100)
NAMES = ("small", "large", "third")
JUDGE_USD = 0.5


def job(name: str = "t1", seed: int = 0, max_steps: int = 10) -> Job:
  """Make a trial of a task."""
  return Job(Task(name, "train", f"Do {name}.", max_steps), "profile", seed)


class HandEnv:
  """An environment that ends after `length` steps, with a score of 0.5.

  `fault` is called with each event. It may raise or wait.
  """

  system_prompt = "Act."
  code_actions = False
  opening = ""
  success_score = 1.0
  scores_steps = False
  waits = True

  def __init__(self, tape, length=2, fault=lambda call: None):
    self.tape = tape
    self.length = length
    self.fault = fault
    self.closed = threading.Event()
    self.close = self.closed.set

  def _note(self, call):
    self.tape.append(call)
    self.fault(call)

  def reset(self, task_id):
    self.steps = 0
    self._note(f"reset {task_id}")
    return "seen 0"

  def step(self, action):
    self._note(f"step {action}")
    self.steps += 1
    return f"seen {self.steps}", self.steps == self.length

  def score(self):
    self._note("score")
    return 0.5


class HandPair:
  """Models that reply "go <step>".

  Attributes:
    texts: other replies or errors, by step or by (step, model).
    bounds: the worst case of each model's call, by default its cost.
    shown: the messages of all calls.
  """

  def __init__(self, tape, texts=(), bounds=USD):
    self.names = NAMES[: len(bounds)]
    self.tape = tape
    self.texts = dict(texts)
    self.bounds = bounds
    self.shown = []
    self.stop = functools.partial(tape.append, "stop")

  def start(self, env, task, seed, reserve):
    self.tape.append(f"start {task.id} {seed}")
    agents = []
    for model, usd in enumerate(self.bounds):
      reply = functools.partial(self.reply, model, reserve)
      agents.append(SimpleNamespace(reply=reply, bound_usd=lambda *_, usd=usd: usd))
    return agents

  def reply(self, model, reserve, messages, step):
    with reserve(self.bounds[model]) as cost:
      cost.usd = TRIO_USD[model]
      self.tape.append(f"ask {NAMES[model]}")
      self.shown.append([dict(message) for message in messages])
      text = self.texts.get(step, f"Thought: now.\n\nAction: go {step}")
      text = self.texts.get((step, NAMES[model]), text)
      if isinstance(text, Exception):
        raise text
      return Reply(text, Call(model, USAGE, cost.usd))


class HandPolicy(Policy):
  """A policy with fixed decisions, such as "SLS" for three steps.

  The log-probability of a decision is minus its step. If `asks` is "judge", the policy
  asks a judge before each decision.
  """

  def __init__(self, tape, models="SLSLSLSLSL", asks=None):
    super().__init__(PolicySpec("by-hand"))
    self.tape = tape
    self.models = models
    self.asks = asks
    self.groups = []
    self.finished = []

  def play(self, context):
    answer = None
    if self.asks == "judge" and len(context.allowed) > 1:
      reply = functools.partial(self.judge, context.reserve)
      answer = context.ask(SimpleNamespace(reply=reply), [])
    move = yield from super().play(context)
    return move.pay(answer, "judge") if move and answer else move

  def judge(self, reserve, messages, step):
    with reserve(JUDGE_USD) as cost:
      cost.usd = JUDGE_USD
      self.tape.append("ask judge")
    return Reply("", Call(9, Usage(1, 0, 1), JUDGE_USD))

  def choose(self, ready):
    self.tape.append("choose")
    steps = [len(live.steps) for live in ready]
    self.groups.append([(live.task.id, len(live.steps)) for live in ready])
    return [Decision("SL".index(self.models[s]), -float(s), 1e-6) for s in steps]

  def finish(self, live):
    self.finished.append((live.task.id, live.job.seed, len(live.steps)))


class HandCascade(HandPolicy):
  """A policy with fixed decisions to which SMALL proposes first, as in a cascade."""

  play = CascadePolicy.play


SPECS = {"p": RandomSpec, "rank": RankSpec, "plans": SampledSpec}
SEEN = [Step(letter, 0, "") for letter in "abacabbbcc" * 400]


def live(task_id="t", trial=0, step=0, models=2, purpose="profile") -> Live:
  """Make an episode that waits for the decision of a step."""
  task = Task(task_id, "train", "do it", 10)
  steps, observation = SEEN[:step], SEEN[step].observation
  return Live(
    Job(task, purpose, trial), models=models, steps=steps, observation=observation
  )


def models(family, ready, **parameters):
  """List the models that a family's rule chooses for episodes."""
  Spec = PolicySpec
  for name in parameters:
    Spec = SPECS[name]
  policy = FAMILIES[family].open(Spec(family, **parameters), files=None)
  return [decision.model for decision in policy.choose(ready)]
