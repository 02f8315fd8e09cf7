"""Check that the bench measures all figures and writes nothing."""

import math

import pytest
import tiny

from tools import bench
from tools import qwen2_checkpoint as hf


@pytest.mark.parametrize(
  "unit, settings",
  [("tokens", bench.CACHED + bench.WHOLE), ("decisions", bench.CACHED)],
)
def test_the_bench_measures_all_figures_and_writes_nothing(
  tmp_path, monkeypatch, unit, settings
):
  monkeypatch.setattr(bench, "STEPS", 4)
  config = tiny.config(tmp_path / "runs")
  if unit == "tokens":
    config.router.max_tokens = 412
    config.router.weights = str(hf.write(tmp_path, hf.SHAPES["grouped"], tokens=300))
  figures = bench.measure(config)
  expected = [setting.name for setting in settings]
  assert list(figures) == [*expected, f"sft_{unit}_per_s", f"bopo_{unit}_per_s"]
  assert all(math.isfinite(value) and value > 0 for value in figures.values())
  assert not (tmp_path / "runs").exists()
