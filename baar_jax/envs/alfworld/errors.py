"""The rates of error in ALFWorld."""

from baar_jax.envs.errors import KnowledgeErrors


class ALFWorldErrors(KnowledgeErrors):
  """How hard a game is depends on its type of task; a model has to search there."""

  # Of the first 40 keys the one whose shares in 126 synthetic games are nearest PRIORS.
  DRAW = "tier 28"
  ROUTINE = (0.55, 0.45)
  UNKNOWN = (0.99, 0.97)
  SPOILED = 0.97
  PRIORS = (
    ("pick_and_place_simple", (0.64, 0.24, 0.12)),
    ("look_at_obj_in_light", (0.57, 0.23, 0.20)),
    ("pick_clean", (0.41, 0.23, 0.36)),
    ("pick_heat|pick_cool", (0.33, 0.22, 0.45)),
    ("pick_two", (0.20, 0.16, 0.64)),
  )
