"""Check profiles, their robustness, and references against cases worked out by hand."""

import pytest
import tiny

from baar_jax.paper import references
from baar_jax.paper.references import Profile, choose_references, profile_tasks
from baar_jax.report import table
from baar_jax.rollout.jobs import BOUNDARY_KEYS

SMALL, LARGE = BOUNDARY_KEYS


def trials(outcomes, policy=SMALL, task_id="t"):
  """One episode per (score, dollars). The less it costs, the higher is its bill."""
  return [
    tiny.episode(task_id, policy, trial, "SL", score, usd, retry_usd=200 - 2 * usd)
    for trial, (score, usd) in enumerate(outcomes)
  ]


@pytest.mark.parametrize(
  "small, large, difficulty, small_usd, large_usd",
  [
    # Four of five are 80 %.
    (
      [(1, 1.0), (1, 2.0), (0, 99.0), (1, 3.0), (1, 4.0)],
      [(0, 9.0)],
      "easy",
      3.0,
      9.0,
    ),
    # A partial score is no success.
    ([(0.99, 1.0)], [(0.99, 5.0)], "intractable", 1.0, 5.0),
    # Three of four are 75 %. An even median is a mean. SMALL may cost more than LARGE.
    (
      [(1, 10.0), (1, 20.0), (1, 40.0), (0, 50.0)],
      [(1, 5.0), (0, 7.0)],
      "hard",
      30.0,
      6.0,
    ),
  ],
)
def test_a_profile_by_hand(small, large, difficulty, small_usd, large_usd):
  profile = references.make_profile(trials(small), trials(large))
  assert profile.difficulty == difficulty
  assert (profile.cost_small, profile.cost_large) == (small_usd, large_usd)


def test_a_normalised_dollar_is_the_mean_of_large():
  # (1 + 2 + 6) / 3, while the median is 2
  profiles = [Profile("hard", 0.5, usd, [], []) for usd in (1.0, 6.0, 2.0)]
  assert references.mean_large_usd(profiles) == 3.0


def profiles_of(**outcomes):
  """Profiles from marks of SMALL's and of LARGE's trials by task, such as "110 011"."""
  episodes = []
  for task_id, marks in outcomes.items():
    for policy, digits in zip(BOUNDARY_KEYS, marks.split()):
      episodes += trials([(int(digit), 1.0) for digit in digits], policy, task_id)
  return profile_tasks(outcomes, episodes)


# Of four trials, and of the first three: easy twice; intractable, then hard; hard, then easy; hard
# twice; too few, and hard.
BASE = profiles_of(
  always="1111 0000",
  late="0111 0001",
  early="1110 0001",
  helped="0000 1111",
  short="000 111",
)
# Of two new trials: hard, hard, intractable, hard, hard, and of a task without a base.
NEW = profiles_of(
  always="01 01",
  late="00 11",
  early="00 00",
  helped="00 01",
  short="00 11",
  strange="00 11",
)


@pytest.mark.parametrize(
  "base_trials, repeats, expected",
  [
    # Of "always", "late", "early" and "helped" two agree ("late" and "helped"). Hard are
    # {always, late, helped} and {late, early, helped}: two of four. None has three trials.
    (
      4,
      {2: NEW, 3: NEW},
      [[2, 4, 2 / 4, 3, 3, 2 / 4], [3, 0, None, 0, 0, None]],
    ),
    (4, {}, []),
  ],
)
def test_robustness_compares_new_trials(base_trials, repeats, expected):
  rows = table.measure_robustness(BASE, base_trials, repeats)
  # A share of nothing is NaN, which no number equals.
  figures = [[x if x == x else None for x in row] for row in rows.to_numpy()]
  assert figures == expected


def test_the_cheapest_episode_by_dollars_calls_steps_and_order():
  episodes = []
  for models, usd in ("LLL", 3.0), ("SL", 4.0), ("LS", 4.0), ("SLSS", 4.0), ("LL", 4.0):
    episodes.append(tiny.episode(models=models, cost_usd=usd, retry_usd=9 - 2 * usd))
  for best in range(5):
    left = [episodes[i] for i in (4, 0, 3, 1, 2) if i >= best]
    assert references.find_cheapest(left) is episodes[best]


def test_the_reference_of_each_difficulty():
  """Easy: SMALL's cheapest success. Hard: the cheapest stratified one, else LARGE's.
  Intractable: SMALL's cheapest trial."""
  episodes = trials([(0, 0.5)], SMALL, "h")
  episodes += trials([(0, 0.1), (1, 9.0), (1, 8.0)], LARGE, "h")
  episodes += trials([(1, 3.0), (1, 4.0), (0, 1.0), (1, 2.0), (1, 2.0)], SMALL, "e")
  episodes += trials([(0, 3.0), (0.9, 2.0)], SMALL, "i")
  episodes += trials([(1, 0.1)], LARGE, "e") + trials([(0, 0.1)], LARGE, "i")
  samples = trials([(0.99, 1.0), (1, 55.0), (1, 50.0), (1, 50.0)], "stratified", "h")
  profiles = profile_tasks("hei", episodes)
  rest = {"e": (SMALL, 3), "i": (SMALL, 1)}
  for stratified, h in ((samples, ("stratified", 2)), ([], (LARGE, 2))):
    chosen = choose_references(profiles, stratified).items()
    assert {id_: (e.policy, e.trial) for id_, e in chosen} == {"h": h} | rest
