"""Check the run's dollars: their parts, their sum, and what does not count."""

from collections import Counter

from baar_jax.config import Config
from baar_jax.episode import FAILED, PRESUMED, REPLY, RETRY
from baar_jax.report.table import read_ledger
from baar_jax.store import Calls, read_spent


def test_the_ledger_has_what_api_models_were_paid(tmp_path):
  calls = Calls(tmp_path / "episodes.sqlite")
  for model, kind, usd in ((0, REPLY, 1.0), (2, REPLY, 2.0), (1, RETRY, 4.0)):
    calls.end(calls.begin(model, 99.0, "r"), kind, usd)
  calls.begin(1, 8.0, "r")
  config = Config()
  assert read_ledger(config, tmp_path).empty  # Scripted models are never paid.
  config.models.kind = "chat"
  # SMALL, LARGE, the judge, attempts, what is unknown, and the sum.
  assert read_ledger(config, tmp_path).usd.tolist() == [1.0, 0.0, 2.0, 4.0, 8.0, 15.0]


def test_calls_of_all_processes_are_added_up(tmp_path):
  for name in ("episodes", "episodes-12", "episodes-old"):  # the last is no process's
    calls = Calls(tmp_path / f"{name}.sqlite")
    for kind, dollars in ((REPLY, 2.0), (RETRY, 4.0), (PRESUMED, 8.0), (FAILED, 0.0)):
      calls.end(calls.begin(1, 99.0, "r"), kind, dollars)
    calls.begin(1, 16.0, "r")  # its process was killed
    calls.close()
  spent_usd = read_spent(tmp_path)
  assert spent_usd == Counter({1: 4.0, RETRY: 8.0, PRESUMED: 48.0})
  assert spent_usd.total() == 60.0
