"""Test the installation of engines, the choice of their data, and their variables."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from baar_jax.envs import engines

ENGINE = engines.Engine(
  ("toy==1.2",), "TOY_DATA", "toy-download", ", which takes gcc,", ("-m", "finish")
)


@pytest.fixture
def commands(tmp_path, monkeypatch) -> list[list[str]]:
  """Record the commands that would install an engine "toy"; none of them runs."""
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("TOY_DATA", raising=False)
  calls = []

  def run(command, **_):
    calls.append(command)
    if "venv" in command:
      programs = Path(command[-1]) / "bin"
      programs.mkdir(parents=True, exist_ok=True)
      (programs / "python").touch()
      (programs.parent / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    return subprocess.CompletedProcess(command, "broken==1" in command, "", "a\nlast")

  monkeypatch.setattr(engines.subprocess, "run", run)
  return calls


def test_an_engine_is_installed_once_and_again_if_changed(commands):
  ENGINE.install()
  ENGINE.install()
  python = str(ENGINE.python)
  assert commands == [
    [sys.executable, "-m", "venv", "--clear", str(ENGINE.directory)],
    [python, "-m", "pip", "install", "toy==1.2"],
    [python, "-m", "finish"],
  ]
  assert engines.command_of(ENGINE)[:3] == [python, "-I", "-B"]
  dataclasses.replace(ENGINE, packages=("toy==1.2", "part==2")).install()
  assert len(commands) == 6
  broken = dataclasses.replace(ENGINE, packages=("broken==1",))
  with pytest.raises(ValueError, match="broken==1, which takes gcc, failed .last.:"):
    broken.install()
  assert not broken.is_installed()


def test_engines_get_no_secrets(monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setenv("LANG", "C.UTF-8")
  environ = engines.environ_of(ENGINE)
  assert "OPENAI_API_KEY" not in environ
  assert environ["LANG"] == "C.UTF-8"
  # A user's environment is trusted and gets all variables.
  assert engines.environ_of(None)["OPENAI_API_KEY"] == "secret"


def test_data_come_from_the_option_or_variable_or_tool(commands, tmp_path, monkeypatch):
  ENGINE.install()
  assert ENGINE.find_data("") == tmp_path / "cache" / "toy-own"
  monkeypatch.setenv("TOY_DATA", str(tmp_path / "variable"))
  assert ENGINE.find_data("") == tmp_path / "variable"
  option = tmp_path / "option"
  assert ENGINE.find_data(str(option)) == option
  line = ENGINE.explain_missing(option)
  assert f"{ENGINE.python.parent}/toy-download" in line
  assert "python -m tools.make_tasks toy" in line
  option.mkdir()
  assert ENGINE.explain_missing(option) == ""


@pytest.mark.parametrize(
  "result, expected",
  [
    (subprocess.CompletedProcess([], 0), True),
    (subprocess.CompletedProcess([], 1), False),  # User namespaces are off.
    (FileNotFoundError("bwrap"), False),
  ],
)
def test_a_machine_is_tried_before_code_is_confined(
  commands, monkeypatch, result, expected
):
  ENGINE.install()
  monkeypatch.setattr(engines.subprocess, "run", mock.Mock(side_effect=[result]))
  engines.can_confine.cache_clear()
  assert engines.can_confine(ENGINE) is expected
