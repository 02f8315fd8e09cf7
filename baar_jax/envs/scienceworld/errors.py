"""The rates of error in ScienceWorld."""

from baar_jax.envs.errors import KnowledgeErrors


class ScienceWorldErrors(KnowledgeErrors):
  """How hard a task is depends on its type."""

  PRIORS = (
    ("find-|lifespan-", (0.56, 0.40, 0.04)),
    (
      "power-component|use-thermometer|paint-secondary|identify-life",
      (0.18, 0.67, 0.15),
    ),
    ("", (0.10, 0.63, 0.27)),
  )
