"""Loads trained routers, one at a time, and what they say of stored episodes."""

import dataclasses

import numpy as np

from baar_jax.llms.pair import Pair
from baar_jax.rollout.specs import PolicySpec
from baar_jax.router.qwen2 import Qwen2, softmax
from baar_jax.router.view import View
from baar_jax.store import Store
from baar_jax.train.batches import ACTED, FAILURES, Batcher
from baar_jax.train.checkpoint import load_initial, load_router
from baar_jax.train.dataset import load_threshold_episodes
from baar_jax.train.trainer import ShardedRouter
from baar_jax.train.training import RouterFiles


@dataclasses.dataclass
class RouterLoader:
  """Loads trained routers; it keeps the one that was loaded last."""

  files: RouterFiles  # of the trained routers
  rows: int  # the most episodes that are live at once
  pair: Pair | None = None  # without it no policy that asks a judge can be built
  store: Store | None = None  # with the episodes that thresholds are quantiles of
  _loaded: tuple = ()  # family and weight of cost of the router that is kept
  _model: Qwen2 | None = None
  _p_NxA: np.ndarray | None = None

  def load(self, spec: PolicySpec) -> Qwen2:
    """Load the trained router of a policy, or the trunk of the value heads."""
    router = (spec.family, spec.lam)
    if router != self._loaded:
      self._p_NxA = None
      if spec.cost_weight is not None:
        self._model = load_initial(self.files, self.files.open_trunk_view())
      else:
        self._model = load_router(self.files, *router)
      self._loaded = router
    return self._model

  def predict_stored(self, view: View) -> np.ndarray:
    """Compute p_NxA of the loaded router at decisions of stored training episodes."""
    if self._p_NxA is None:
      config = self.files.config
      episodes = load_threshold_episodes(self.store, config)
      dtype = config.router.dtype
      router = ShardedRouter(self._model, view.logit_ids, self.files.mesh, dtype)
      labels = FAILURES if view.proposals else ACTED
      batcher = Batcher(config, view, self.store.tasks("train"), labels)
      logits_NxA = batcher.compute(router.logits, episodes)
      self._p_NxA = softmax(logits_NxA, "stored episodes")
    return self._p_NxA
