"""Engines' own Python environments: made once, refused in one line, told no secrets."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from baar_jax.envs import engines

ENGINE = engines.Engine("Toy", ("toy==1.2",), (), (), "TOY_DATA")


@pytest.fixture
def toy(tmp_path, monkeypatch):
  """toy(...): an engine of our own, in a cache of its own; what is installed is noted."""
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("TOY_DATA", raising=False)
  calls = []

  def run(command, **settings):
    calls.append(command)
    if "venv" in command:
      (Path(command[-1]) / "bin").mkdir(parents=True)
      (Path(command[-1]) / "bin" / "python").touch()
    settings["stdout"].write("said\n")
    return subprocess.CompletedProcess(command, int("broken==1" in command))

  def toy(**changes):
    monkeypatch.setitem(engines.ENGINES, "toy", dataclasses.replace(ENGINE, **changes))
    monkeypatch.setattr(engines.subprocess, "run", run)
    return calls

  return toy


def test_an_engine_is_installed_once(toy, tmp_path):
  calls = toy(install=("-m", "toy", "finish"))
  place = tmp_path / "cache" / "toy-1.2"
  with pytest.raises(ValueError, match="Toy is not installed; run: python main.py --stage=setup"):
    engines.python_of("toy")
  place.mkdir(parents=True)
  (place / "half").touch()  # of an installation that was broken off
  assert engines.install("toy") is True
  python = str(place / "bin" / "python")
  assert calls == [
    [sys.executable, "-m", "venv", str(place)],
    [python, "-m", "pip", "install", "toy==1.2"],
    [python, "-m", "toy", "finish"],
  ]
  assert not (place / "half").exists()
  assert engines.install("toy") is False
  assert len(calls) == 3
  assert engines.python_of("toy")[:3] == [python, "-I", "-B"]


def test_a_failed_installation_names_its_log_and_does_not_count(toy, tmp_path):
  toy(packages=("broken==1",))
  with pytest.raises(ValueError, match=r"pip install broken==1 failed; .*toy-1.log") as error:
    engines.install("toy")
  assert "\n" not in str(error.value)
  assert (tmp_path / "cache" / "toy-1.log").read_text() == "said\nsaid\n"
  assert not engines.installed("toy")


def test_what_has_changed_since_is_installed_again(toy, tmp_path):
  calls = toy()
  assert engines.install("toy") is True
  toy(packages=("toy==1.2", "part==2"))
  assert not engines.installed("toy")
  assert engines.install("toy") is True
  (tmp_path / "cache" / "toy-1.2" / "bin" / "python").unlink()  # as an upgrade of Python may
  assert not engines.installed("toy")
  assert len(calls) == 4


def test_a_path_that_the_engine_cannot_use_is_named(toy, tmp_path):
  calls = toy(unusable="cache")
  with pytest.raises(ValueError, match="contains 'cache': set BAAR_JAX_CACHE to another"):
    engines.install("toy")
  assert calls == []


def test_a_missing_compiler_is_named(toy):
  calls = toy(programs=("sh", "no-such-compiler"))
  with pytest.raises(ValueError, match="no-such-compiler cannot be found: install a C.. compiler"):
    engines.install("toy")
  assert calls == []


def test_engines_are_told_no_secrets(toy, monkeypatch):
  toy()
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setenv("LANG", "C.UTF-8")
  assert "secret" not in engines.environ_of("toy").values()
  assert engines.environ_of("toy")["LANG"] == "C.UTF-8"
  assert engines.environ_of("sandbox")["OPENAI_API_KEY"] == "secret"  # it is the user's own code


def test_where_the_data_is(toy, tmp_path, monkeypatch):
  toy()
  own, got, given, named = (
    tmp_path / name for name in ("cache/toy-own", "cache/toy-data", "a", "b")
  )
  with pytest.raises(ValueError, match="Toy has no tasks yet; run: "):
    engines.data_of("toy", "")
  own.mkdir(parents=True)
  assert engines.data_of("toy", "") == engines.data_of("toy", "own") == own
  assert engines.wants_own_data("toy", "")
  got.mkdir()
  assert engines.data_of("toy", "") == got
  assert engines.data_of("toy", "own") == own
  assert not engines.wants_own_data("toy", "")
  monkeypatch.setenv("TOY_DATA", str(given))
  with pytest.raises(ValueError, match=r"a, named by \$TOY_DATA, is not a directory"):
    engines.data_of("toy", "")
  given.mkdir()
  named.mkdir()
  assert engines.data_of("toy", "") == given
  assert engines.data_of("toy", str(named)) == named
  with pytest.raises(ValueError, match="c, named by --config.env.data, is not a directory"):
    engines.data_of("toy", str(tmp_path / "c"))


def test_what_a_module_prints_and_how_it_fails():
  assert engines.output_of("it", [sys.executable, "-c", "print(3)"]) == "3\n"
  with pytest.raises(ValueError, match="^it failed: no$"):
    engines.output_of("it", [sys.executable, "-c", "raise SystemExit('no')"])
