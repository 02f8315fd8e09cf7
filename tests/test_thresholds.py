"""Thresholds from training episodes, by hand."""

import numpy as np
import pytest
import tiny

from baar_jax.router.build import build_model
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.stages import profile as taxonomy
from baar_jax.stages import references
from baar_jax.train.dataset import load_profiles, threshold_episodes
from baar_jax.train.thresholds import measure, threshold


@pytest.mark.parametrize("share, found", [(0.2, 0.8), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_threshold_is_a_quantile(share, found):
  assert threshold(np.linspace(0.0, 1.0, 11), share) == pytest.approx(found)


def test_they_come_from_training_tasks_alone(tmp_path):
  config = tiny.config(tmp_path)
  with tiny.compiled_once():
    run = Run(config)
    with pytest.raises(ValueError, match="run --stage=profile first"):
      threshold_episodes(run.store, run.config)
    taxonomy.main(run)
    references.main(run)
    episodes = threshold_episodes(run.store, run.config)
    hard = sum(p.difficulty == "hard" for p in load_profiles(run.store, run.config).values())
    # Of 3 stratified episodes the quarters are k = 1 (twice) and 2.
    assert len(episodes) == 6 + 6 + 2 * hard
    assert all(e.task_id.startswith("train") for e in episodes)
    model = build_model(config.router, seed=0)
    p_D = measure(run, model, View(config.router, run.tokenizer))
    assert len(p_D) == sum(len(e.steps) for e in episodes)
    assert ((p_D > 0) & (p_D < 1)).all()
    run.close()
