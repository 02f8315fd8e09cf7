"""Test recorded models, and policies that know more, against a hand-made recording."""

import functools
import itertools

import pytest
import tickets
from hand import HandCascade, HandPolicy, job

from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import Code, deal
from baar_jax.episode import Usage
from baar_jax.llms.recorded import draw_trial
from baar_jax.rivals.families import FAMILIES
from baar_jax.rivals.foresight import Chance, Foresight, find_best
from baar_jax.rollout.loop import Trial, run_episodes
from baar_jax.rollout.rules import RulePolicy
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.run import env_arguments, open_pair


def play(config, policy):
  """Play the first training ticket."""
  env = make("code", **env_arguments(config))
  pair = open_pair(config, None)
  (episode,) = run_episodes([Trial(policy, job("train-0"))], pair, [env])
  return episode


def list_ids(config):
  """List the functions of the first training ticket."""
  functions = make("code", config.env.options).functions
  return [function.id for function in deal(functions, "train-0")]


# The system prompt has 1,000 tokens, the prompt of a first try 23, and that of a second
# try 41. So of the 2,084 recorded tokens, a second try shares 1022 / 1041 with the first
# try of the same model. Other prompts share 1011 tokens: 1011 / 1023 of a first try, and
# 1011 / 1041 of a second. A cache has blocks of 128 tokens.
@pytest.mark.parametrize(
  "kind, cached, usd",
  [
    # SMALL has five calls and LARGE two:
    # 2356 x $1 + 8064 x $0.5 + 50 x $4 and 2248 x $10 + 1920 x $5 + 20 x $40
    (HandPolicy, [0, 0, 2048, 2048, 1920, 2048, 1920], 6588 + 32880),
    # SMALL's two rejected proposals have its prompts in the cache.
    # 2684 x $1 + 11904 x $0.5 + 70 x $4
    (HandCascade, [0, 0, 1920, 2048, 2048, 1920, 1920, 2048, 1920], 8916 + 32880),
  ],
)
def test_a_walk_gives_the_recorded_replies(tmp_path, monkeypatch, kind, cached, usd):
  """A second try after LARGE is node 10, also if SMALL proposed before LARGE."""
  monkeypatch.setattr(Code, "system_prompt", "s" * 4000)
  config = tickets.configure(tmp_path)
  ids = list_ids(config)
  solved = {(ids[0], 0, "10"), (ids[1], 0, "0"), (ids[2], 0, "01")}
  tickets.record(config, solved)
  episode = play(config, kind([], "LSSSLSS"))
  nodes = list(zip([0, 0, 1, 2, 2, 3, 3], "1 10 0 0 01 0 00".split()))
  actions = [step.action for step in episode.steps]
  assert actions == [f"{ids[place]} 0 {path}" for place, path in nodes]
  assert [step.score for step in episode.steps] == [0, 0.25, 0.5, 0.5, 0.75, 0.75, 0.75]
  calls = [call for step in episode.steps for call in step.calls]
  usages = [Usage(2084, tokens, 10) for tokens in cached]
  assert [call.usage for call in calls] == usages
  assert episode.cost_usd == pytest.approx(usd / 1e6)
  assert calls[-1].latency_s == 0.5


def test_three_trials_in_a_row_draw_each_recorded_one_once():
  orders = set()
  for first in range(3000, 3060, 3):
    order = tuple(draw_trial("t", "f", seed, 3) for seed in range(first, first + 3))
    assert sorted(order) == [0, 1, 2]
    orders.add(order)
  assert len(orders) == 6


USD = 0.04, 0.2


def know(solved, place, path):
  """Tell the outcome of a try to a clairvoyant."""
  return Chance((place, path) in solved, USD[int(path[-1])])


def pay(solved, choices, calls):
  """Compute score minus dollars of choices, one for each try at two functions."""
  choices = iter(choices)
  value = 0.0
  for place in range(2):
    path = ""
    while len(path) < 2 and (place, path) not in solved:
      model = next(choices)
      path += str(model)
      calls -= model
      value -= USD[model]
    value += 0.5 * ((place, path) in solved)
  return value if calls >= 0 else -1.0


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_clairvoyant_is_as_good_as_the_best_choices(calls):
  tries = [*itertools.product((0, 1), tickets.PATHS)]
  for count in range(4):
    for solved in itertools.combinations(tries, count):
      chances = functools.partial(know, solved)
      value, _ = find_best(chances, 2, 2, mu=1.0)(0, "", calls)
      values = [pay(solved, c, calls) for c in itertools.product((0, 1), repeat=4)]
      assert value == pytest.approx(max(values))


# With two equal functions and one call, LARGE at once gives
# 0.6 (0.5 + 0.14) + 0.4 (0.3 x 0.5 + 0.14) = 0.5, and SMALL first gives
# 0.2 (0.5 + 0.36) + 0.8 (0.1 x 0.5 + 0.36) = 0.5, so the cheaper one is taken.
# With two calls, LARGE at once gives 0.6 (0.5 + 0.36) + 0.4 (0.3 x 0.5 + 0.36).
@pytest.mark.parametrize(
  "calls, best", [(0, (0.28, 0)), (1, (0.5, 0)), (2, (0.72, 1))]
)
def test_chances_are_weighed_to_the_end_of_a_ticket(calls, best):
  chances = dict(zip(tickets.PATHS, (0.2, 0.6, 0.1, 0.5, 0.3, 0.4)))
  find = find_best(lambda _, path: Chance(chances[path], 1.0), 2, 2, mu=0.0)
  assert find(0, "", calls) == pytest.approx(best)


# No try solves the first function. "01" solves the second one in the two trials that
# are not drawn, "0" solves the third one in all trials, and "1" solves the last one in
# the drawn trial.
@pytest.mark.parametrize(
  "family, played",
  [
    ("clairvoyant", "SSSSSL"),
    # "01" at the second function: (1 + 1 + 2/9) / 3. Elsewhere LARGE adds below 0.1.
    ("knows-function", "SSSLSSS"),
    # The mean of "0" is 1/4, of "1" 1/12, of "01" 2/9 and of all others 0.
    ("schedule", "SLSSSSS"),
    ("escalate", "SLSSSSS"),
  ],
)
def test_one_large_call_is_spent_by_what_a_policy_knows(tmp_path, family, played):
  config = tickets.configure(tmp_path)
  solved = set()
  for function, drawn, other in zip(list_ids(config), ("", "", "0", "1"), ("", "01", "0", "")):
    for trial in range(3):
      is_drawn = trial == draw_trial("train-0", function, 0, 3)
      solved.add((function, trial, drawn if is_drawn else other))
  tickets.record(config, solved, 3)
  spec = PolicySpec(family, cap=Cap(calls=1))
  rule = FAMILIES[family].rule or Foresight(config).make_rule(spec)
  episode = play(config, RulePolicy(spec, rule))
  assert "".join("SL"[step.model] for step in episode.steps) == played
  assert episode.success == (family == "clairvoyant")
