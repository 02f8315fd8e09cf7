"""Export `Router`, which picks the model for each call of an LLM agent."""

import importlib


def __getattr__(name: str) -> type:
  """Import `Router` on its first use, because it imports JAX."""
  if name != "Router":
    raise AttributeError(f"module 'baar_jax' has no attribute {name!r}")
  return importlib.import_module("baar_jax.decide").Router
