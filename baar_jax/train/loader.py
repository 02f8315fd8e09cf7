"""Loads trained routers, one at a time, and what they say of stored episodes."""

import dataclasses

import numpy as np

from baar_jax.llms.pair import Pair
from baar_jax.router.qwen2 import Qwen2, softmax
from baar_jax.router.view import View
from baar_jax.store import Store
from baar_jax.train.batches import ACTED, FAILURES, Batcher
from baar_jax.train.checkpoint import load_initial, load_router
from baar_jax.train.dataset import load_threshold_episodes
from baar_jax.train.trainer import ShardedRouter
from baar_jax.train.training import RouterFiles


@dataclasses.dataclass
class Loaded:
  """A router that is kept until another one is loaded."""

  family: str
  lam: float | None
  model: Qwen2
  p_NxA: np.ndarray | None = None  # at stored decisions, once they are read


@dataclasses.dataclass
class RouterLoader:
  """Loads trained routers; it keeps the one that was loaded last."""

  files: RouterFiles  # of the trained routers
  rows: int  # the most episodes that are live at once
  pair: Pair | None = None  # without it no policy that asks a judge can be built
  store: Store | None = None  # with the episodes that thresholds are quantiles of
  _loaded: Loaded | None = None

  def load(self, family: str, lam: float | None = None) -> Loaded:
    """Load a trained router, by its family and the cost weight of its training."""
    if self._loaded is None or (self._loaded.family, self._loaded.lam) != (family, lam):
      self._loaded = Loaded(family, lam, load_router(self.files, family, lam))
    return self._loaded

  def load_trunk(self, family: str) -> Qwen2:
    """Load the frozen trunk of a family's value heads."""
    if self._loaded is None or self._loaded.family != family:
      model = load_initial(self.files, self.files.open_trunk_view())
      self._loaded = Loaded(family, None, model)
    return self._loaded.model

  def predict_stored(self, loaded: Loaded, view: View) -> np.ndarray:
    """Compute a router's p_NxA at decisions of stored training episodes, once."""
    if loaded.p_NxA is None:
      config = self.files.config
      episodes = load_threshold_episodes(self.store, config)
      dtype = config.router.dtype
      router = ShardedRouter(loaded.model, view.logit_ids, self.files.mesh, dtype)
      labels = FAILURES if view.proposals else ACTED
      batcher = Batcher(config, view, self.store.tasks("train"), labels)
      logits_NxA = batcher.compute(router.logits, episodes)
      loaded.p_NxA = softmax(logits_NxA, "stored episodes")
    return loaded.p_NxA
