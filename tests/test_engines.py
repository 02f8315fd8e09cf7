"""Engines' Python environments: installed once, refused in one line, given no secrets."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from baar_jax.envs import engines

ENGINE = engines.Engine("Toy", ("toy==1.2",), "TOY_DATA")


@pytest.fixture
def toy(tmp_path, monkeypatch):
  """toy(...) declares an engine; its cache is empty and its installation only records commands."""
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("TOY_DATA", raising=False)
  calls = []

  def run(command, stdout, **_):
    calls.append(command)
    if "venv" in command:
      (Path(command[-1]) / "bin").mkdir(parents=True)
      (Path(command[-1]) / "bin" / "python").touch()
    stdout.write("output\n")
    return subprocess.CompletedProcess(command, int("broken==1" in command))

  def toy(**changes):
    monkeypatch.setitem(engines.ENGINES, "toy", dataclasses.replace(ENGINE, **changes))
    monkeypatch.setattr(engines.subprocess, "run", run)
    return calls

  return toy


def test_an_engine_is_installed_once_and_again_when_it_has_changed(toy, tmp_path):
  calls = toy(install=("-m", "toy", "finish"))
  place = tmp_path / "cache" / "toy-1.2"
  with pytest.raises(ValueError, match="Toy is not installed; run: python main.py --stage=setup"):
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
  calls = toy(packages=("broken==1",), programs=("sh", "no-such"))
  with pytest.raises(ValueError, match="no-such cannot be found: install a C.. compiler"):
    engines.install("toy")
  assert calls == []
  toy(packages=("broken==1",))
  with pytest.raises(ValueError, match=r"pip install broken==1 failed; .*toy-1.log") as error:
    engines.install("toy")
  assert "\n" not in str(error.value)
  assert (tmp_path / "cache" / "toy-1.log").read_text() == "output\noutput\n"
  assert not engines.is_installed("toy")


def test_engines_get_no_secrets(toy, monkeypatch):
  toy()
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setenv("LANG", "C.UTF-8")
  assert "secret" not in engines.environ_of("toy").values()
  assert engines.environ_of("toy")["LANG"] == "C.UTF-8"
  assert engines.environ_of("sandbox")["OPENAI_API_KEY"] == "secret"  # it is the user's code


def test_where_the_data_is(toy, tmp_path, monkeypatch):
  """What the flag names, else the variable, what was downloaded, and what was generated."""
  toy()
  names = "cache/toy-own", "cache/toy-data", "a", "b"
  generated, downloaded, variable, flag = (tmp_path / name for name in names)
  with pytest.raises(ValueError, match="Toy has no tasks yet; run: "):
    engines.existing_data("toy", "")
  for place in (generated, downloaded, variable):
    if place == variable:
      monkeypatch.setenv("TOY_DATA", str(place))
      with pytest.raises(ValueError, match=r"a, named by .*TOY_DATA, is not a directory"):
        engines.data_of("toy", "")
    place.mkdir(parents=True)
    assert engines.existing_data("toy", "") == place
    assert engines.uses_generated_data("toy", "") == (place == generated)
    assert engines.existing_data("toy", "own") == generated
  with pytest.raises(ValueError, match="b, named by --config.env.data.*is not a directory"):
    engines.data_of("toy", str(flag))
  flag.mkdir()
  assert engines.data_of("toy", str(flag)) == flag
