"""The bench: its figures are all there, and it changes nothing of a run."""

import dataclasses
import json
import math
import types

import pytest
import tiny

from baar_jax.router.qwen2 import Qwen2Config
from baar_jax.router.view import Window
from baar_jax.run import Run
from baar_jax.stages import bench

FIGURES = """
  cached_decision_ms whole_decision_ms paper_decision_ms cached_16_step_ms
  transcript_score_ms paper_score_ms matmul_gflop_per_s score_gflop_per_s
  sft_tokens_per_s bopo_tokens_per_s sft_gflop_per_s
  load_mb_per_s memory_mb waiting_s waiting_barrier_s steps_per_s replay_steps_per_s
"""


def test_every_figure_is_there_and_nothing_of_the_run_changes(tmp_path, monkeypatch, router_config):
  router = dataclasses.replace(router_config, buckets=1)
  small = {"ROUTER": router, "STEPS": 4, "MATMUL_SIZES": (64,), "MEDIAN_S": 0.001, "P99_S": 0.002}
  for name, value in small.items():
    monkeypatch.setattr(bench, name, value)
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


def test_flop_by_hand():
  shape = Qwen2Config(99, 4, 6, 2, 2, 1, head_dim=4, rope_theta=100.0)
  # A layer: query and output 4 x 8 each, key and value 4 x 4 each, three of 4 x 6: 168. Two layers:
  # 5 tokens x 336 entries x 2 = 3,360. Tokens see 1 + 2 + 3 and 1 + 2, themselves included: 9
  # pairs x (4 + 4 products and as many sums) x 2 heads x 2 layers = 576.
  windows = [Window([0] * T, [], 0) for T in (3, 2)]
  assert bench.count_flop(shape, windows) == 3360 + 576


def test_api_models_are_not_paid_to_be_measured():
  run = types.SimpleNamespace(pair=types.SimpleNamespace(kind="chat"))
  with pytest.raises(ValueError, match="set --config.models.kind=scripted"):
    bench.main(run)
