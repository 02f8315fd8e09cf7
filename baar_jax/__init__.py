"""Budget-aware routing for LLM agents; `Router` decides without a server."""

import importlib


def __getattr__(name: str) -> type:
  """Loads the router, and JAX with it, only when it is asked for."""
  if name != "Router":
    raise AttributeError(f"module 'baar_jax' has no attribute {name!r}")
  return importlib.import_module("baar_jax.serve.router").Router
