"""Test the scripted models: their error rates, and that replies repeat."""

import contextlib
import itertools
import random

import pytest

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env, Lapse, Oracle
from baar_jax.envs.sandbox.adapter import Sandbox
from baar_jax.envs.scienceworld.adapter import ScienceWorldErrors
from baar_jax.episode import LARGE, SMALL, CacheRule, Cost, Task, Usage
from baar_jax.llms.history import open_conversation, parse_action
from baar_jax.llms.prices import open_billing
from baar_jax.llms.scripted import Account, ScriptedPair
from baar_jax.rollout.budget import unlimited
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.rules import RulePolicy
from baar_jax.rollout.specs import Job, PolicySpec

ERRORS = ScienceWorldErrors()
IDS = [
  f"{name}/{i}"
  for name in ("find-plant", "power-component", "mix")
  for i in range(1000)
]
TASK = Task("t", "test", "Do it.", 40)


def critical(position):
  """Make the expert's view of a critical step."""
  return Oracle("focus on pot", position, critical=True, recovering=False)


def tasks_of(tier):
  """List the tasks of a tier: easy, hard or intractable."""
  return [task_id for task_id in IDS if ERRORS.tier(task_id) == tier]


@pytest.mark.parametrize(
  "names, shares",
  [
    ("find-plant lifespan-longest-lived", (0.56, 0.40, 0.04)),
    ("power-component chemistry-mix-paint-secondary-color", (0.18, 0.67, 0.15)),
    ("chemistry-mix-paint-tertiary-color test-conductivity", (0.10, 0.63, 0.27)),
  ],
)
def test_tiers_follow_the_prior_of_the_task_s_type(names, shares):
  for name in names.split():
    tiers = [ERRORS.tier(f"{name}/{i}") for i in range(4000)]
    counts = [tiers.count(tier) / 4000 for tier in ("easy", "hard", "intractable")]
    assert counts == pytest.approx(shares, abs=0.03)


@pytest.mark.parametrize(
  "tier, small, large",
  [("easy", 0.06, 0.04), ("hard", 0.12, 0.17), ("intractable", 0.12, 0.17)],
)
def test_routine_steps_and_recoveries_do_not_depend_on_knowledge(tier, small, large):
  task_id = tasks_of(tier)[0]
  routine = Oracle("look around", 3, False, False)
  recovery = Oracle("undo", 3, True, True)
  for spoiled in (False, True):
    lapses = []
    for oracle, model in itertools.product((routine, recovery), (SMALL, LARGE)):
      lapses.append(ERRORS.lapse(model, task_id, oracle, spoiled))
    assert lapses[:2] == [Lapse(0.14, 0.0), Lapse(0.05, 0.0)]
    assert lapses[2:] == [Lapse(small, 0.4), Lapse(large, 0.9)]


# The shares are about sigmoid(1.6 (hardness - ability)), of -3.84 and -9.92, of 2.56 and
# -3.52, and of 8.32 and 2.24. Hardness varies with a standard deviation of 0.5, so each share
# is a little nearer to one half.
@pytest.mark.parametrize(
  "tier, small, large",
  [("easy", 0.021, 0.0), ("hard", 0.928, 0.029), ("intractable", 1.0, 0.904)],
)
def test_the_share_of_unknown_steps_depends_on_the_tier(tier, small, large):
  steps = [(task_id, i) for task_id in tasks_of(tier)[:200] for i in range(20)]
  for model, rate, share in ((SMALL, 0.98, small), (LARGE, 0.95, large)):
    lapses = [ERRORS.lapse(model, task_id, critical(i), False) for task_id, i in steps]
    assert sum(x.rate == rate for x in lapses) / len(steps) == pytest.approx(
      share, abs=0.03
    )


def test_small_knows_no_more_than_large():
  """A spoiled step is harder for LARGE, if it knows the step."""
  for task_id in IDS:
    small, large = (ERRORS.lapse(n, task_id, critical(2), False) for n in range(2))
    knows = large.rate != 0.95
    assert knows or small.rate == 0.98
    later = ERRORS.lapse(LARGE, task_id, critical(2), True)
    assert later == (Lapse(0.6, 0.9) if knows else large)
    assert ERRORS.lapse(SMALL, task_id, critical(2), True) == small


class Room(Env):
  """An environment whose state never changes."""

  cache_rule = CacheRule(min_tokens=24, block_tokens=4, lifetime_s=2.5)
  system_prompt = "s" * 40
  code_actions = False
  oracle = staticmethod(lambda: critical(5))
  mistake = staticmethod(lambda kind, key: f"{kind} {key}")


def always(wrong, spoils=False):
  """Start two models that always err, with fixed rates of wrong actions."""
  errors = ScienceWorldErrors()
  errors.lapse = lambda *args: Lapse(0.25 if args[-1] else 1.0, wrong, spoils)
  errors.unknown_share = lambda *args: 0.25
  return agents(errors)


def agents(errors, seed=0):
  """Start the scripted agents of an episode."""
  pair = ScriptedPair(ModelsConfig(), Room, errors)
  return pair.start(Room(), TASK, seed, unlimited)


def test_replies_repeat_and_tokens_follow_from_the_text():
  messages = open_conversation(Room.system_prompt, TASK, "You see.")
  pairs = [agents(ERRORS, seed) for seed in (0, 0, 1)]
  first, again, other = (
    [a.reply(messages, i) for a in pair for i in range(30)] for pair in pairs
  )
  assert first == again != other
  # The system prompt of 40 characters has 10 tokens. "Task: Do it.\n\nYou see." has 22
  # characters, so it has 6 tokens.
  reply = first[0]
  assert reply.call.usage == Usage(16, 0, -(-len(reply.text) // 4))
  assert reply.text.startswith("Thought: ")


def test_prompt_caches_are_billed_by_hand():
  """The cache of Room has 24 tokens at least, in steps of 4, for 2.5 seconds."""
  spent = []

  @contextlib.contextmanager
  def reserve(bound_usd):
    cost = Cost()
    yield cost
    spent.append((bound_usd, cost.usd))

  billing = open_billing(ModelsConfig(), Room.cache_rule, Room.step_s)
  account = Account(billing, reserve)
  # Prompts of 20, 30, 40, ... tokens, each the start of the next.
  messages = [{"content": "s" * 80}]
  usages = []
  # A reply of 9 tokens takes SMALL 0.1 s. A step takes 1 s.
  for step, model in enumerate((SMALL, SMALL, SMALL, LARGE, SMALL)):
    usages.append(account.pay(model, messages, "r" * 36, step).usage)
    messages.append({"content": "o" * 40})
  assert usages == [
    Usage(20, 0, 9),
    Usage(30, 0, 9),  # The prompt before is shorter than the minimum.
    Usage(40, 28, 9),  # The prompt before has 30 tokens.
    Usage(50, 0, 9),  # SMALL's cache is of no use to LARGE.
    Usage(60, 40, 9),  # The last prompt of SMALL is 2.2125 s old.
  ]
  # SMALL costs $0.4, $0.1 and $1.6 per million tokens, LARGE $2, $0.5 and $8.
  assert spent[2] == pytest.approx((30.4e-6, (12 * 0.4 + 28 * 0.1 + 9 * 1.6) / 1e6))
  assert spent[3] == pytest.approx((172e-6, (50 * 2 + 9 * 8) / 1e6))
  # The first 30 tokens are the same, and 12 characters of the next 10 tokens.
  other = [*messages[:2], {"content": "o" * 12 + "x" * 28}]
  assert account.bill(LARGE, other, "", 4).usage == Usage(40, 32, 0)


def test_the_outlook_is_the_bill_in_the_sandbox():
  env = Sandbox(train_tasks=40)
  draw = random.Random(0)
  config = ModelsConfig()
  jobs = [Job(task, "profile", 0) for task in env.tasks("train")]
  policy = RulePolicy(PolicySpec("p"), lambda live, spec: draw.randrange(2))
  billing = open_billing(config, Sandbox.cache_rule, Sandbox.step_s)
  hits = 0
  for episode in run_episodes(jobs, policy, ScriptedPair(config, Sandbox), [env]):
    first = episode.steps[0].calls[0].usage.prompt_tokens
    for number, step in enumerate(episode.steps, 1):
      usage = step.calls[0].usage
      outlooks = billing.forecast_calls(episode.steps[:number], first, 25)
      outlook = outlooks[step.model]
      assert outlook.warm_tokens == usage.cached_tokens
      # All replies have 25 tokens.
      assert outlook.usd == pytest.approx(step.cost_usd, rel=1e-12)
      hits += usage.cached_tokens > 0
  assert hits > 100


def test_mistakes_and_spoiled_steps_enter_the_forecast():
  replies = [agent.reply([], 7) for wrong in (1.0, 0.0) for agent in always(wrong)]
  actions = [parse_action(reply.text) for reply in replies]
  assert actions == ["wrong t|0|7", "wrong t|0|7", "lost t|0|7", "hasty t|0|7"]
  small, large = always(wrong=0.0, spoils=True)
  assert large.prospect([], 0) == (1.0, 0.75, 0.0)
  small.reply([], 0)
  # The agents of an episode share what was spoiled.
  assert large.prospect([], 0).loss == 0.25
  small, large = always(wrong=0.5)
  # A wrong action, or one of 40 steps.
  assert large.prospect([], 0).loss == 0.5 + 0.5 / 40
  messages = [{"content": "s" * 400}]  # 100 tokens at $0.4 and $2 a million
  prospects = [agent.prospect(messages, 30) for agent in (small, large)]
  assert prospects == [(0.55, 0.75, pytest.approx(usd)) for usd in (4e-5, 2e-4)]
