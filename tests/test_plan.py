"""Check what the dry run counts as missing, its costs, and that it changes nothing."""

import contextlib

import pytest
import tiny

from baar_jax.config import ModelsConfig
from baar_jax.episode import Call, Episode, Step, Usage
from baar_jax.run import Run
from baar_jax.stages import plan

STAGES = ["profile", "references", "sft", "bopo", "baselines", "evaluate"]


@pytest.fixture
def config(tmp_path):
  return tiny.config(tmp_path / "runs")


def table(config, capsys) -> dict[str, list[float]]:
  """Run the dry run; return episodes, calls and dollars by stage."""
  plan.main(config, STAGES)
  rows = {}
  for line in capsys.readouterr().out.replace(",", "").splitlines():
    if line.startswith((*STAGES, "in all")):
      name, *cells = line.rsplit(maxsplit=4)
      del cells[2]  # hours
      rows[name] = [*map(float, cells)]
  return rows


def test_a_dry_run_creates_no_file_and_needs_no_key(
  config, tmp_path, monkeypatch, capsys
):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  config.models = ModelsConfig(kind="chat")
  config.baselines.rivals = ("vanilla",)
  rows = table(config, capsys)
  assert list(tmp_path.iterdir()) == []
  # 6 training and 2 dev tasks, 2 trials of 2 boundaries; 60 % of 10 steps each. A SMALL episode of
  # 6 steps: 6 * 1000 + 150 * (0 + 1 + ... + 5) = 8250 tokens at $0.4 a million and 6 * 60 at $1.6;
  # LARGE five times as much. 16 * (0.0033 + 0.000576) * 6
  assert rows["profile"] == [32, 192, pytest.approx(0.3721, abs=5e-5)]
  # 2 seconds a call; each live episode has one call at a time.
  config.env.live_per_process = 4
  hours = plan.tabulate(config, ["profile"]).hours["in all"]
  assert hours == pytest.approx(192 * 2 / 4 / 3600)
  # References: two of five tasks count as hard, 4 of 8, with 3 samples each. BoPO: 1 lam,
  # 2 updates of 2 tasks and 2 episodes; vanilla RL may need three times as many. Evaluation: 2 dev
  # and 3 test tasks; both boundaries, first-large(K=1), random, sft, bopo and vanilla, the last
  # four also with K = 1.
  episodes = [cells[0] for cells in rows.values()]
  assert episodes == [32, 12, 0, 8, 24, 5 * (3 + 2 * 4), 32 + 12 + 8 + 24 + 55]


def test_missing_episodes_cost_the_mean_of_stored_ones(config, capsys):
  config.evaluate.usd_budgets = (5.0,)
  with contextlib.closing(Run(config)) as run:
    for seed, usd in enumerate((1.0, 2.0, 6.0)):
      small = tiny.episode("other", "always-small", seed, "SS", cost_usd=usd)
      large = tiny.episode("other", "always-large", seed, "LLLL", cost_usd=10 * usd)
      run.store.add(small, large)
  rows = table(config, capsys)
  # 16 episodes of each boundary are missing: of $3 and 2 calls, of $30 and 4 calls.
  assert rows["profile"] == [32, 16 * 2 + 16 * 4, 16 * 3 + 16 * 30]
  assert rows["bopo"] == [8, 8 * 3, 8 * 16.5]  # between them
  # 5 of always-small, 5 of always-large, and 35 between them. The cap of $5 adds 5 of always-
  # small, which expects $3, and of First-Large, random, sft and bopo.
  usd = 5 * 3 + 5 * 30 + 35 * 16.5 + 5 * 3 + 20 * 5.0
  assert rows["evaluate"][::2] == [45 + 25, usd]


def test_hours_are_those_of_recorded_calls(config, capsys):
  seconds = (3.0, 5.0, 0.0)  # The last call is replayed.
  calls = [Call(0, Usage(9, 0, 9), 1.0, latency_s=latency_s) for latency_s in seconds]
  with contextlib.closing(Run(config)) as run:
    steps = [Step("", 0, "", calls)]
    run.store.add(Episode("other", "always-small", "profile", 0, steps, 1.0, "done"))
  config.models.kind = "chat"
  # 16 episodes of SMALL with 1 step, 16 of LARGE with the assumed 6, 4 seconds a call
  hours = plan.tabulate(config, ["profile"]).hours["in all"]
  assert hours == pytest.approx((16 + 96) * 4 / 3600)
  for prices, words in (((), "list"), (((1, 1, 1), (2, 2, 2)), "the configured")):
    config.models.prices = prices
    plan.main(config, [])
    out = capsys.readouterr().out
    assert f"estimates, at {words} prices; " in out and "without the router\n" in out
