"""The command line: a wrong one is one line that says what to do, with exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What is wrong, the flags, and what the line has to say.
WRONG = {
  "stage": (["--stage=nonsense"], ["--stage=nonsense", "all|setup|profile|references|"]),
  "flag": (["--nonsense=3"], ["Unknown command line flag 'nonsense'"]),
  "argument": (["profile"], ["unexpected argument 'profile'", "--stage=NAME"]),
  "field": (["--config.bopo.lamb=3"], ["lamb", "baar_jax/config.py"]),
  "keyword": (["--config.bopo.lambda=3"], ["bopo.lambda", "baar_jax/config.py"]),
  "default-field": (["--config.bopo.lamb=3"], ["lamb", "baar_jax/config.py"]),
  "default-keyword": (["--config.bopo.lambda=3"], ["bopo.lambda", "baar_jax/config.py"]),
  "default-type": (["--config.sft.updates=many"], ["--config.sft.updates=many", "int"]),
  "default-section": (["--config.sfft.updates=3"], ["sfft", "baar_jax/config.py"]),
  "type": (["--config.sft.updates=many"], ["--config.sft.updates=many", "int"]),
  "type-in-list": (["--config.bopo.lam=(0.1,'much')"], ["--config.bopo.lam", "numbers"]),
  "value": (["--config.sft.updates=0"], ["--config.sft.updates is 0; it must be above 0"]),
  "file": (["--config=configs/none.py"], ["configs/none.py", "No such file"]),
  "model": (["--config.models.names=('gpt-4.1-mini','gpt-9')"], ["gpt-9", "known: gpt-4.1"]),
  "place": (["--config.runs=main.py/runs"], ["cannot write to main.py/runs", "--config.runs"]),
  "weights": (
    ["--config.router.weights=none", "--config.pretrain.epochs=0"],
    ["none/config.json is missing"],
  ),
  "devices": (["--config.distributed.fsdp=3"], ["fsdp is 3", "the number of devices, 1"]),
  "coordinator": (
    ["--config.distributed.processes=2"],
    ["--config.distributed.coordinator is ''", "host:port of process 0"],
  ),
  "coordinator-port": (
    ["--config.distributed.processes=2", "--config.distributed.coordinator=localhost"],
    ["--config.distributed.coordinator is 'localhost'", "host:port of process 0"],
  ),
  "sft": (["--stage=sft"], ["no finished references: run --stage=references first"]),
  "report": (["--stage=report"], ["no profile: run --stage=profile first"]),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
  """Exit code, stdout and stderr of every command; they run side by side."""
  runs = tmp_path_factory.mktemp("runs")
  width, waiting, found = os.cpu_count() or 1, dict(WRONG), {}
  running = {}
  while waiting or running:
    while waiting and len(running) < width:
      name = next(iter(waiting))
      flags, _ = waiting.pop(name)
      command = [sys.executable, "main.py", f"--config.runs={runs / name}", *flags]
      if not name.startswith("default"):  # its fields are parsed earlier than those of a file
        command.insert(2, "--config=configs/sandbox.py")
      running[name] = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
      )
    name = next(iter(running))
    process = running.pop(name)
    found[name] = *process.communicate(), process.returncode
  return found


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(answers, name):
  out, err, code = answers[name]
  assert err.count("\n") == 1 and err.startswith("error: "), err
  for part in WRONG[name][1]:
    assert part in err
  assert out == ""
  assert code == 2
