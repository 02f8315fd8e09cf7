"""The rates of error in AppWorld."""

from baar_jax.envs.errors import KnowledgeErrors


class AppWorldErrors(KnowledgeErrors):
  """How hard a task is depends on its difficulty level, from 1 to 3."""

  HARDNESS = {"easy": -2.4, "hard": 0.3, "intractable": 5.2}
  KNOWN_EASY = (0.06, 0.04)
  KNOWN = (0.10, 0.08)
  KNOWN_WRONG = (0.4, 0.6)
  DECISIVE_SHARE = 0.7
  TOLD = ("login(", "page_index")
  TOLD_UNKNOWN = (0.6, 0.5)
  PRIORS = (
    ("^d1", (0.58, 0.30, 0.12)),
    ("^d2", (0.42, 0.32, 0.26)),
    ("^d3", (0.28, 0.29, 0.43)),
    ("", (0.42, 0.30, 0.28)),  # downloaded tasks, whose ids do not show their level
  )
