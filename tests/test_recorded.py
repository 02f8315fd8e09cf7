"""Test recorded models, and policies that know more, against a hand-made recording."""

import functools
import itertools

import pytest
import tickets
from hand import HandCascade, job

from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import Code
from baar_jax.episode import Usage
from baar_jax.families.foresight import Chance, ForesightSpec, find_best
from baar_jax.families.table import FAMILIES
from baar_jax.llms.offline import draw_trial
from baar_jax.rollout.loop import Trial, run_episodes
from baar_jax.rollout.source import env_arguments
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.run import RouterFiles, open_pair


def play(config, policy):
  """Play the first training ticket: the functions a, d, c and b."""
  env = make("code", **env_arguments(config))
  pair = open_pair(config, None)
  assert not env.waits
  (ended,) = run_episodes([Trial(policy, job("train-0"))], pair, [env])
  return ended.episode


# The system prompt has 1,000 tokens, the prompt of a first try 23, and that of a second
# try 41. So of the 2,084 recorded tokens, a second try shares 1022 / 1041 with the first
# try of the same model. Other prompts share 1011 tokens: 1011 / 1023 of a first try, and
# 1011 / 1041 of a second. A cache has blocks of 128 tokens.
def test_a_walk_gives_the_recorded_replies(tmp_path, monkeypatch):
  """A second try after LARGE is node 10, although SMALL proposed before LARGE."""
  monkeypatch.setattr(Code, "system_prompt", "s" * 4000)
  config = tickets.configure(tmp_path)
  tickets.record(config, {("traina", 0, "10"), ("traind", 0, "0"), ("trainc", 0, "01")})
  episode = play(config, HandCascade([], "LSSSLSS"))
  assert " ".join(step.action for step in episode.steps) == (
    "traina 0 1 traina 0 10 traind 0 0 trainc 0 0 trainc 0 01 trainb 0 0 trainb 0 00"
  )
  calls = [call for step in episode.steps for call in step.calls]
  # SMALL proposes at each step, also before the two calls of LARGE.
  cached = [0, 0, 1920, 2048, 2048, 1920, 1920, 2048, 1920]
  assert [call.usage for call in calls] == [Usage(2084, count, 10) for count in cached]
  # SMALL: 2684 x $1 + 11904 x $0.5 + 70 x $4. LARGE: 2248 x $10 + 1920 x $5 + 20 x $40.
  assert episode.cost_usd == pytest.approx(0.008916 + 0.03288)


@pytest.mark.parametrize("step", [1, 10])
def test_three_trials_in_a_row_draw_each_recorded_one_once(step):
  """Training seed s of ten plays the trials s, s + 10 and s + 20."""
  orders = set()
  for name in "abcdefghijklmnopqrst":
    orders.add(tuple(draw_trial("t", name, 3000 + step * i, 3) for i in range(3)))
  assert orders == {*itertools.permutations(range(3))}


def pay(solved, choices, calls):
  """Compute score minus dollars of choices, one for each try at two functions."""
  choices = iter(choices)
  value = 0.0
  for place in (0, 1):
    path = ""
    while len(path) < 2 and (place, path) not in solved:
      model = next(choices)
      path += str(model)
      calls -= model
      value -= 0.2 if model else 0.04
    value += 0.5 * ((place, path) in solved)
  return value if calls >= 0 else -1.0


def test_a_clairvoyant_is_as_good_as_the_best_choices():
  tries = [*itertools.product((0, 1), tickets.PATHS)]
  choices = [*itertools.product((0, 1), repeat=4)]
  know = lambda solved, *key: Chance(key in solved, 0.2 if key[1][-1] == "1" else 0.04)  # noqa: E731
  for solved in itertools.combinations(tries, 3):
    best = find_best(functools.partial(know, solved), 2, 2, mu=1.0)
    for calls in range(3):
      value = max(pay(solved, models, calls) for models in choices)
      assert best(0, "", calls)[0] == pytest.approx(value)


# With two equal functions and one call, LARGE at once gives
# 0.6 (0.5 + 0.14) + 0.4 (0.3 x 0.5 + 0.14) = 0.5, and SMALL first gives
# 0.2 (0.5 + 0.36) + 0.8 (0.1 x 0.5 + 0.36) = 0.5, so the cheaper one is taken.
# With two calls, LARGE at once gives 0.6 (0.5 + 0.36) + 0.4 (0.3 x 0.5 + 0.36).
def test_chances_are_weighed_to_the_end_of_a_ticket():
  chances = dict(zip(tickets.PATHS, (0.2, 0.6, 0.1, 0.5, 0.3, 0.4)))
  best = find_best(lambda _, path: Chance(chances[path], 0.0), 2, 2, mu=0.0)
  assert [best(0, "", calls) for calls in range(3)] == [(0.28, 0), (0.5, 0), (0.72, 1)]


# No try solves function a. "01" solves d in the two trials that are not drawn, "0" solves
# c in all trials, and "1" solves b in the drawn trial.
@pytest.mark.parametrize(
  "family, played",
  [
    ("clairvoyant", "SSSSSL"),
    # "01" at d: (1 + 1 + 1/6) / 3. Elsewhere LARGE adds below 0.1.
    ("knows-function", "SSSLSSS"),
    # The mean of "0" is 1/4, of "1" 1/12, of "01" 1/6 and of all others 0.
    ("schedule", "SLSSSSS"),
    ("escalate", "SLSSSSS"),
  ],
)
def test_one_large_call_is_spent_by_what_a_policy_knows(tmp_path, family, played):
  config = tickets.configure(tmp_path)
  solved = {("trainb", draw_trial("train-0", "trainb", 0, 3), "1")}
  for trial in range(3):
    solved.add(("trainc", trial, "0"))
    if trial != draw_trial("train-0", "traind", 0, 3):
      solved.add(("traind", trial, "01"))
  tickets.record(config, solved, 3)
  Spec = PolicySpec if family == "escalate" else ForesightSpec
  spec = Spec(family, cap=Cap(calls=1))
  files = RouterFiles(tmp_path, config, mesh=None)
  episode = play(config, FAMILIES[family].open(spec, files))
  assert "".join("SL"[step.model] for step in episode.steps) == played
  assert episode.success == (family == "clairvoyant")
