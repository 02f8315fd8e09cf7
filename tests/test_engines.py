"""Engines' Python environments: installed once, refused in one line, given no secrets."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from baar_jax.envs import engines

ENGINE = engines.Engine(("toy==1.2",), "TOY_DATA", "toy-download", "toy_maker")


@pytest.fixture
def toy(tmp_path, monkeypatch):
  """toy(...) declares an engine; its cache is empty, and what would run is only recorded."""
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("TOY_DATA", raising=False)
  calls = []

  def run(command, **_):
    calls.append(command)
    if "venv" in command:
      (Path(command[-1]) / "bin").mkdir(parents=True)
      (Path(command[-1]) / "bin" / "python").touch()
    return subprocess.CompletedProcess(command, int("broken==1" in command), "", "lines\nlast")

  def toy(**changes):
    monkeypatch.setitem(engines.ENGINES, "toy", dataclasses.replace(ENGINE, **changes))
    monkeypatch.setattr(engines.subprocess, "run", run)
    return calls

  return toy


def test_an_engine_is_installed_once_and_again_when_it_has_changed(toy, tmp_path):
  calls = toy(install=("-m", "toy", "finish"))
  place = tmp_path / "cache" / "toy-1.2"
  with pytest.raises(ValueError, match="toy is not installed; run: python main.py --stage=setup"):
    engines.python_of("toy")
  place.mkdir(parents=True)
  (place / "half").touch()  # of an interrupted installation
  engines.install("toy")
  assert not (place / "half").exists()
  python = str(place / "bin" / "python")
  venv = [sys.executable, "-m", "venv", str(place)]
  packages = [python, "-m", "pip", "install", "toy==1.2"]
  assert calls == [venv, packages, [python, "-m", "toy", "finish"]]
  engines.install("toy")
  assert len(calls) == 3
  assert engines.python_of("toy")[:3] == [python, "-I", "-B"]
  toy(packages=("toy==1.2", "part==2"))
  engines.install("toy")
  assert len(calls) == 5
  Path(python).unlink()  # as an upgrade of Python may
  assert not engines.is_installed("toy")


def test_a_failed_installation_is_one_line_and_does_not_count(toy, tmp_path):
  toy(packages=("broken==1",), needs=", which takes a compiler,")
  with pytest.raises(
    ValueError, match="pip install broken==1, which takes a compiler, failed: last"
  ):
    engines.install("toy")
  assert not engines.is_installed("toy")


def test_engines_get_no_secrets(toy, monkeypatch):
  toy()
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setenv("LANG", "C.UTF-8")
  assert "secret" not in engines.environ_of("toy").values()
  assert engines.environ_of("toy")["LANG"] == "C.UTF-8"
  assert engines.environ_of("sandbox")["OPENAI_API_KEY"] == "secret"  # it is the user's code


def test_data_are_what_the_flag_names_or_the_variable_or_else_generated(toy, tmp_path, monkeypatch):
  calls, lines = toy(), []
  generated, variable, flag = (tmp_path / name for name in ("cache/toy-own", "a", "b"))
  for named, place in (("", generated), ("", variable), (str(flag), flag)):
    if place == variable:
      monkeypatch.setenv("TOY_DATA", str(place))
    with pytest.raises(ValueError, match=f"toy has no data in {place}: .*, or run: "):
      engines.existing_data("toy", named)
    place.mkdir(parents=True)
    assert engines.existing_data("toy", named) == place
    del calls[:], lines[:]
    engines.set_up("toy", named, (3, 2, 1), lines.append)
    made = [["toy_maker", str(generated), "3", "2", "1"]] if place == generated else []
    assert [call[-5:] for call in calls if "toy_maker" in call] == made
    assert ("bin/toy-download" in lines[-1]) == bool(made)
