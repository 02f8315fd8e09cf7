"""Test the calibration: its figures by hand, and the scripted models against reality."""

import pytest
import tiny

from baar_jax.episode import Step
from tools import calibrate


def episode(task_id, solved, results):
  """Make an episode; a step's letter "x" is an error of the action before."""
  played = tiny.episode(task_id, score=float(solved))
  texts = ["error" if letter == "x" else "good" for letter in results]
  played.steps = [Step(text, 0, f"go {i % 3}") for i, text in enumerate(texts)]
  return played


def test_failed_and_repeated_actions_are_counted_by_hand():
  # The actions are go 0, 1, 2, 0 and 1.
  failed, repeated = zip(*calibrate.list_flaws(episode("t", True, "x.x.x")))
  assert failed == (False, True, False, True)
  assert repeated == (False, False, False, True)


# Half of the tasks of each type are solved. In the last row the first action of the others
# fails.
@pytest.mark.parametrize("results, area", [("....", 0.5), (".x..", 1.0)])
def test_predictions_of_new_tasks_read_the_first_steps(results, area):
  episodes = []
  for i in range(40):
    solved = i % 4 < 2
    episodes.append(
      episode(f"{'ab'[i % 2]}/{i}", solved, "...." if solved else results)
    )
  assert calibrate.predict(episodes, 1, "[^/]+") == pytest.approx(area, abs=0.15)
