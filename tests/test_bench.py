"""The bench: its figures are all there, and it changes nothing of a run."""

import dataclasses
import json
import math
import types

import pytest
import tiny

from baar_jax.run import Run
from baar_jax.stages import bench

FIGURES = """
  cached_decision_ms whole_decision_ms paper_decision_ms cached_16_step_ms
  sft_tokens_per_s bopo_tokens_per_s steps_per_s
"""


def test_every_figure_is_there_and_nothing_of_the_run_changes(tmp_path, monkeypatch, router_config):
  router = dataclasses.replace(router_config, buckets=1)
  monkeypatch.setattr(bench, "ROUTER", router)
  monkeypatch.setattr(bench, "STEPS", 4)
  run = Run(tiny.config(tmp_path))
  lines = []
  run.print = lines.append
  bench.main(run)
  run.close()
  figures = json.loads((run.dir / "report" / "bench.json").read_text())
  assert list(figures) == FIGURES.split()
  for name, value in figures.items():
    assert math.isfinite(value) and value > 0, name
    assert any(line.startswith(name) for line in lines)
  assert [path.name for path in (run.dir / "report").iterdir()] == ["bench.json"]
  assert not (run.dir / "checkpoints").exists()


def test_api_models_are_not_paid_to_be_measured():
  run = types.SimpleNamespace(pair=types.SimpleNamespace(kind="chat"))
  with pytest.raises(ValueError, match="set --config.models.kind=scripted"):
    bench.main(run)
