"""Check that the bench writes all figures and changes nothing of a run."""

import dataclasses
import json
import math

import tiny

from baar_jax.run import Run
from tools import bench

FIGURES = [setting.name for setting in bench.SETTINGS]
FIGURES += ["sft_tokens_per_s", "bopo_tokens_per_s"]


def test_the_bench_writes_all_figures_and_nothing_else(
  tmp_path, monkeypatch, router_config
):
  monkeypatch.setattr(
    bench, "ROUTER", dataclasses.replace(router_config, max_tokens=368, buckets=1)
  )
  monkeypatch.setattr(bench, "STEPS", 4)
  run = Run(tiny.config(tmp_path))
  bench.main(run)
  run.close()
  figures = json.loads((run.dir / "report" / "bench.json").read_text())
  assert list(figures) == FIGURES
  assert all(math.isfinite(value) and value > 0 for value in figures.values())
  assert not (run.dir / "checkpoints").exists()
