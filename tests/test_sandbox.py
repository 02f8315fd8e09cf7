"""The sandbox: what its levers do, and what it shows."""

from baar_jax.envs import sandbox
from baar_jax.envs.sandbox import BROKEN, Sandbox, build


def play(task_id):
  """Pulls the right lever at every lock until the episode ends: answers and score."""
  env, building, answers, lock, done = Sandbox(), build(task_id), [], 0, False
  assert env.reset(task_id).endswith("The sign is blank.")
  while not done:
    observation, done = env.step(f"pull {building.levers[lock][0]}")
    answers.append(observation)
    lock += "opened" in observation
  return answers, env.score()


def test_right_levers_open_all_but_a_broken_lock_and_the_sign_shows_from_the_second_lock_on():
  tasks = {BROKEN in build(task.id).hardness: task.id for task in Sandbox().tasks("train")}
  answers, score = play(tasks[False])
  assert len(answers) == 9 and score == 1.0
  assert answers[-1] == "It opened. The task has been done."
  sign = sandbox.SIGNS[build(tasks[False]).sign]
  assert all(answer.endswith(f"The sign is {sign}.") for answer in answers[:-1])
  broken = build(tasks[True]).hardness.index(BROKEN)
  assert broken >= sandbox.RULES.broken_from
  answers, score = play(tasks[True])
  assert [answer[:10] for answer in answers] == ["It opened."] * broken + ["It jammed."] * 3
  assert score == 0.0
