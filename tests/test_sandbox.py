"""The sandbox: what its levers do, what it shows, and how reliable that is."""

import numpy as np
import pytest

from baar_jax.envs import sandbox
from baar_jax.envs.sandbox import BROKEN, GREEN, PLAIN, Rules, Sandbox, build


def finished(env, task_id, lever):
  """Pulls the same of (right, jamming, ringing) at every lock until the episode ends."""
  env.reset(task_id)
  answers = []
  for lock in range(99):
    building = build(task_id)
    lock = min(sum("opened" in answer for answer, _ in answers), len(building.levers) - 1)
    answers.append(env.step(f"pull {building.levers[lock][lever]}"))
    if answers[-1][1]:
      return answers
  raise AssertionError("no end")


def find(env, wanted):
  return next(t.id for t in env.tasks("train") if wanted(build(t.id).hardness))


def test_tasks_are_fixed_by_their_id():
  env, other = Sandbox(train_tasks=5, test_tasks=3), Sandbox(train_tasks=9, test_tasks=3)
  assert env.tasks("train") == other.tasks("train")[:5]
  assert len(env.tasks("test")) == 3
  assert not {t.id for t in env.tasks("train")} & {t.id for t in env.tasks("test")}
  for split in ("dev", "nonsense"):
    with pytest.raises(ValueError, match="has no"):
      env.tasks(split)


def test_the_right_levers_open_a_building():
  env = Sandbox()
  answers = finished(env, find(env, lambda levels: BROKEN not in levels), lever=0)
  assert len(answers) == 9 and env.score() == 1.0
  assert answers[-1] == ("It opened. The task has been done.", True)


def test_an_alarm_is_fatal():
  env = Sandbox()
  assert finished(env, "train-0", lever=2) == [("It rang an alarm. The task has failed.", True)]
  assert env.score() == 0.0
  with pytest.raises(RuntimeError, match="reset"):
    env.step("pull A")


def test_three_jams_end_an_episode():
  env = Sandbox()
  answers = finished(env, "train-0", lever=1)
  assert [done for _, done in answers] == [False, False, True]
  assert answers[0][0].startswith("It jammed. Lock 1 looks") and env.score() == 0.0


def test_a_broken_lock_never_opens():
  env = Sandbox()
  task_id = find(env, lambda levels: BROKEN in levels)
  broken = build(task_id).hardness.index(BROKEN)
  answers = finished(env, task_id, lever=0)
  assert broken >= sandbox.RULES.broken_from
  assert [answer[:10] for answer, _ in answers] == ["It opened."] * broken + ["It jammed."] * 3


def test_the_sign_shows_from_the_second_lock_on():
  env = Sandbox()
  task_id = find(env, lambda levels: BROKEN not in levels)
  sign = sandbox.SIGNS[build(task_id).sign]
  assert env.reset(task_id).endswith("The sign is blank.")
  answers = [answer for answer, done in finished(env, task_id, lever=0) if not done]
  assert len(answers) == 8 and all(answer.endswith(f"The sign is {sign}.") for answer in answers)


def test_no_lever_gives_itself_away():
  levers = [lever for number in range(200) for lever in build(f"any-{number}").levers]
  for place in range(3):
    assert {lever[place] for lever in levers} == {"A", "B", "C"}


def test_nonsense_is_answered():
  env = Sandbox()
  env.reset("train-0")
  observation, done = env.step("open sesame")
  assert observation.startswith("No effect. Lock 1 looks") and not done


def test_needs_a_reset():
  for call in (Sandbox().oracle, Sandbox().oracle_action, lambda: Sandbox().step("pull A")):
    with pytest.raises(RuntimeError, match="reset"):
      call()


def test_rules_that_do_not_fit_are_errors():
  with pytest.raises(ValueError, match="fit together"):
    Rules(locks=5)


def test_warnings_are_as_reliable_as_stated():
  buildings = [build(f"any-{number}") for number in range(3000)]
  looks = [look for b in buildings for level, look in zip(b.hardness, b.looks) if level == PLAIN]
  assert looks.count("smooth") / len(looks) == pytest.approx(0.80, abs=0.01)
  fine = [b.sign == GREEN for b in buildings if BROKEN not in b.hardness]
  assert np.mean(fine) == pytest.approx(0.9, abs=0.02)
