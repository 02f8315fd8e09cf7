"""Check that the bench measures all figures and writes nothing."""

import dataclasses
import math

import tiny

from tools import bench

FIGURES = [setting.name for setting in bench.SETTINGS]
FIGURES += ["sft_tokens_per_s", "bopo_tokens_per_s"]


def test_the_bench_measures_all_figures_and_writes_nothing(
  tmp_path, monkeypatch, router_config
):
  monkeypatch.setattr(
    bench, "ROUTER", dataclasses.replace(router_config, max_tokens=368)
  )
  monkeypatch.setattr(bench, "STEPS", 4)
  figures = bench.measure(tiny.config(tmp_path))
  assert list(figures) == FIGURES
  assert all(math.isfinite(value) and value > 0 for value in figures.values())
  assert not any(tmp_path.iterdir())
