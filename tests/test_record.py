"""Test the recording of models at a stand-in server, and that it can be played."""

from pathlib import Path
from unittest import mock

import tickets
from hand import HandPolicy, job
from standin import StandIn

from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import read_recording
from baar_jax.rollout.loop import Trial, run_episodes
from baar_jax.rollout.source import env_arguments
from baar_jax.run import open_pair
from tools import measure_recording, record


def answer(request):
  """Solve each function as LARGE, and none as SMALL."""
  number = {"small": -1, "large": 1}[request["model"]]
  return f"```python\ndef f(x): return x + {number}\n```"


def test_calls_in_flight_at_the_cap_are_recorded(tmp_path, capsys):
  config = tickets.configure(tmp_path)
  # SMALL's worst case is about $0.004, and LARGE's ten times as much.
  config.max_usd = 0.02
  config.models.kind = "chat"
  out = Path(config.models.recording)
  command = record.Command(config, out, 1, 2)
  with StandIn(answer, latency_s=0.3).running() as server:
    config.models.base_urls = (server.url,)
    assert record.main(command) == 3
    assert "raise it and go on" in capsys.readouterr().err
    nodes = read_recording.__wrapped__(str(out)).nodes
    assert {path for _, _, path in nodes} == {"0"}
    assert len(nodes) == len(server.seen) > 0


def test_a_reply_that_is_left_out_is_told_and_asked_again(tmp_path, capsys):
  config = tickets.configure(tmp_path)
  config.max_usd = 9.0
  config.models.kind = "chat"
  command = record.Command(config, Path(config.models.recording), 1, 1)
  with StandIn(answer, fault=["400 context_length_exceeded"]).running() as server:
    config.models.base_urls = (server.url,)
    assert record.main(command) == 1
    assert "replies left out: 1" in capsys.readouterr().err
    assert record.main(command) == 0
    # Another server or file behind the same address is refused.
    with mock.patch.object(record, "describe_server", lambda _: {"build": "2"}):
      assert record.main(command) == 2
    assert "with another server or file for small" in capsys.readouterr().err


def test_a_recording_goes_on_and_is_played(tmp_path, capsys):
  config = tickets.configure(tmp_path)
  config.max_usd = 9.0
  config.models.kind = "chat"
  out = config.models.recording

  def run(trials):
    return record.main(record.Command(config, Path(out), trials, 2))

  with StandIn(answer).running() as server:
    config.models.base_urls = (server.url,)
    assert run(1) == 0
    # SMALL has one try and fails; then each model has a second try.
    assert len(server.seen) == 12 * (2 + 2)
    # A killed process leaves an older file, and its ledger has all replies.
    older = read_recording.__wrapped__(out)
    for key in [*older.nodes][25:]:
      del older.nodes[key]
    record.write_recording(Path(out), older)
    assert run(2) == 0
    # Every call has a seed of its own.
    assert len({seen["seed"] for seen in server.seen}) == 96
    # 60 % of 48 first tries are expected to fail, so 105.6 calls are: 9.6 more.
    config.dry_run = True
    assert run(2) == 0 and "12 functions, about 10 more" in capsys.readouterr().out
    config.dry_run = False
    config.models.temperature = 0.1
    assert run(2) == 2 and len(server.seen) == 96
    assert "with temperature=0.7, not 0.1: give" in capsys.readouterr().err
    config.models.temperature = 0.7
  # Another process reads the file again.
  read_recording.cache_clear()
  recording = read_recording(out)
  assert recording.trials == 2
  figures = measure_recording.measure(measure_recording.read_tries(recording))
  assert figures["solved by 01"] == "1.000 [1.000, 1.000] of 24"
  assert figures["00 repeats the code"] == figures["solved by 01"]
  assert figures["SMALL solves 1, LARGE 1"] == "0.000 [0.000, 0.000] of 24"
  assert figures["two trials of 1 agree"] == "1.000 [1.000, 1.000] of 12"
  assert recording.header["servers"] == [{}, {}]
  config.models.kind = "recorded"
  jobs = [Trial(HandPolicy([], "SL" * 4), job("dev-0", 2000))]
  env = make("code", **env_arguments(config))
  (ended,) = run_episodes(jobs, open_pair(config, None), [env])
  assert [step.score for step in ended.episode.steps][1::2] == [0.25, 0.5, 0.75, 1.0]
