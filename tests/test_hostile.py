"""A whole run among models that misbehave in every way that the stand-in knows."""

import dataclasses
import json

import pytest
import tiny
from lockpick import Lockpick
from standin import FAULTS, StandIn

import main
from baar_jax.config import ModelsConfig
from baar_jax.llms import chat
from baar_jax.llms.calls import read_spent

TASKS = {"train_tasks": 8, "dev_tasks": 2, "test_tasks": 5, "max_steps": 14}
PRICES = {"small": ("0.4", "0.1", "1.6"), "large": ("2", "0.5", "8")}
REFUSALS = ("429", "503", "502", "404", "400 content_filter", "429 insufficient_quota")
KEY = "sk-hostile-0123456789abcdef"


def test_a_run_among_all_misbehaviours_ends_with_a_report_and_knows_what_it_paid(
  tmp_path, monkeypatch, capsys
):
  """Each twentieth request is met by the next one; what stops the run is one line, and the same
  command goes on. No answer that was billed is missing in the run's books at any stop."""
  monkeypatch.setenv("HOSTILE_KEY", KEY)
  monkeypatch.setattr(chat, "BACKOFF_S", 0.001)
  left, lines = [*FAULTS, *REFUSALS], []

  def fault(number, request):
    return left.pop(0) if left and number % 20 == 7 else None

  server = StandIn(Lockpick(**TASKS), fault, retry_after="0", stall_s=0.6, bills_what_it_loses=True)
  with server.running():
    models = {"names": ("small", "large"), "prices": ((0.4, 0.1, 1.6), (2.0, 0.5, 8.0))}
    models |= {"base_urls": (server.url,), "key_variables": ("HOSTILE_KEY",)}
    models = ModelsConfig(kind="chat", **models, max_completion_tokens=60, timeout_s=0.4)
    config = dataclasses.replace(tiny.config(tmp_path, **TASKS), models=models)
    config.profile.trials = 7
    while code := main.main((config, "all")):
      lines.append(capsys.readouterr().err.splitlines()[-1])
      assert code == 2 and lines[-1].startswith("error: ") and lines[-1].isprintable()
      assert len(lines) < len(FAULTS) + len(REFUSALS)
      assert float(server.usd(PRICES)) <= read_spent(tmp_path / "tiny", 2).at_most_usd + 1e-9
  assert not left, f"{len(server.seen)} requests are too few for {len(left)} more misbehaviours"
  known = read_spent(tmp_path / "tiny", 2).at_most_usd
  assert float(server.usd(PRICES)) <= known + 1e-9 < 3 * server.usd(PRICES)
  ledger = json.loads((tmp_path / "tiny/report/results.json").read_text())["ledger"]
  assert ledger["total_usd"] + ledger["presumed_usd"] - ledger["router_usd"] == pytest.approx(known)
  files = [path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()]
  said = "".join([*lines, *capsys.readouterr()]).encode()
  assert not [text for text in [said, *files] if KEY[3:].encode() in text]
