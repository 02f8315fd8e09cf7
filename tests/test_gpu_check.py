"""Check that the GPU check measures all figures, here on a CPU."""

import dataclasses
import json
import math

import tiny

from configs import sciworld
from tools import gpu_check


def test_all_figures_are_measured_and_stored(tmp_path, monkeypatch):
  config = sciworld.get_config("paper")
  config.router = tiny.config(tmp_path).router
  config.router.max_tokens = 444
  monkeypatch.setattr(sciworld, "get_config", lambda _: config)
  task = dataclasses.replace(gpu_check.TASK, max_steps=2)
  for name, value in dict(ROWS=2, STEPS=2, TASK=task, pass_tests=bool).items():
    monkeypatch.setattr(gpu_check, name, value)
  monkeypatch.chdir(tmp_path)
  gpu_check.main(gpu_check.SMALL)
  figures = json.loads((tmp_path / "gpu_check.json").read_text())
  assert all(math.isfinite(value) for value in figures.values())
  # A training pass sees what the live decisions have seen.
  assert max(figures["log_ratio_2"], figures["attention_gap"]) < 0.1
  measured = {"decision_1_ms", "decision_2_ms", "sft_share_of_peak", "bopo_peak_gb"}
  assert {*measured, "tests_passed", "paper_peak_gb"} <= {*figures}
