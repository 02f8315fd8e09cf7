"""Engines' Python environments: installed once, refused in one line, given no secrets."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from baar_jax.envs import engines

ENGINE = engines.Engine(
  ("toy==1.2",), "TOY_DATA", "toy-download", "toy_maker", ", which takes gcc,", ("-m", "finish")
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
  """The commands that would run for an engine "toy", of which nothing is there."""
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("TOY_DATA", raising=False)
  monkeypatch.setitem(engines.ENGINES, "toy", ENGINE)
  calls = []

  def run(command, **_):
    calls.append(command)
    if "venv" in command:
      (Path(command[-1]) / "bin").mkdir(parents=True)
      (Path(command[-1]) / "bin" / "python").touch()
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(engines.subprocess, "run", run)
  return calls


def test_an_engine_is_installed_once_and_again_when_it_has_changed(toy, tmp_path, monkeypatch):
  place = tmp_path / "cache" / "toy-1.2"
  with pytest.raises(ValueError, match="toy is not installed; run: python main.py --stage=setup"):
    engines.python_of("toy")
  place.mkdir(parents=True)
  (place / "half").touch()  # of an interrupted installation
  engines.install("toy")
  assert not (place / "half").exists()
  python = str(place / "bin" / "python")
  venv = [sys.executable, "-m", "venv", str(place)]
  assert toy == [venv, [python, "-m", "pip", "install", "toy==1.2"], [python, "-m", "finish"]]
  engines.install("toy")
  assert len(toy) == 3
  assert engines.python_of("toy")[:3] == [python, "-I", "-B"]
  changed = dataclasses.replace(ENGINE, packages=("toy==1.2", "part==2"))
  monkeypatch.setitem(engines.ENGINES, "toy", changed)
  engines.install("toy")
  assert len(toy) == 6
  Path(python).unlink()  # as an upgrade of Python may
  assert not engines.is_installed("toy")


def test_engines_get_no_secrets(toy, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setenv("LANG", "C.UTF-8")
  assert "secret" not in engines.environ_of("toy").values()
  assert engines.environ_of("toy")["LANG"] == "C.UTF-8"
  assert engines.environ_of("sandbox")["OPENAI_API_KEY"] == "secret"  # it is the user's code
