"""Test the installation of engines, the choice of their data, and their variables."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from baar_jax.envs import engines
from tools import make_tasks

ENGINE = engines.Engine(
  ("toy==1.2",), "TOY_DATA", "toy-download", ", which takes gcc,", ("-m", "finish")
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
  """Record the commands that would install an engine "toy"; none of them runs."""
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("TOY_DATA", raising=False)
  calls = []

  def run(command, **_):
    calls.append(command)
    if "venv" in command:
      (Path(command[-1]) / "bin").mkdir(parents=True, exist_ok=True)
      (Path(command[-1]) / "bin" / "python").touch()
    return subprocess.CompletedProcess(
      command, int("broken==1" in command), "", "lines\nlast"
    )

  monkeypatch.setattr(engines.subprocess, "run", run)
  return calls


def test_an_engine_is_installed_once_and_again_if_changed(toy, tmp_path, monkeypatch):
  place = tmp_path / "cache" / "toy-1.2"
  ENGINE.install()
  python = str(place / "bin" / "python")
  venv = [sys.executable, "-m", "venv", "--clear", str(place)]
  assert toy == [
    venv,
    [python, "-m", "pip", "install", "toy==1.2"],
    [python, "-m", "finish"],
  ]
  ENGINE.install()
  assert len(toy) == 3
  assert engines.command_of(ENGINE)[:3] == [python, "-I", "-B"]
  changed = dataclasses.replace(ENGINE, packages=("toy==1.2", "part==2"))
  changed.install()
  assert len(toy) == 6
  # A failed installation raises one line, and the engine stays uninstalled.
  broken = dataclasses.replace(ENGINE, packages=("broken==1",))
  with pytest.raises(
    ValueError,
    match="pip install broken==1, which takes gcc, failed .last.: correct this",
  ):
    broken.install()
  assert not broken.is_installed()


def test_engines_get_no_secrets(toy, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setenv("LANG", "C.UTF-8")
  assert "secret" not in engines.environ_of(ENGINE).values()
  assert engines.environ_of(ENGINE)["LANG"] == "C.UTF-8"
  # A user's environment is trusted and gets all variables.
  assert engines.environ_of(None)["OPENAI_API_KEY"] == "secret"


def test_data_come_from_the_option_the_variable_or_the_tool(toy, tmp_path, monkeypatch):
  lines: list[str] = []
  generated, variable, flag = (tmp_path / name for name in ("cache/toy-own", "a", "b"))
  for named, place in (("", generated), ("", variable), (str(flag), flag)):
    if place == variable:
      monkeypatch.setenv("TOY_DATA", str(place))
    with pytest.raises(
      ValueError, match=f"toy has no data in {place}: .*make_tasks toy"
    ):
      ENGINE.find_data(named)
    ENGINE.set_up(named, lines.append)
    assert "bin/toy-download" in lines[-1] and "make_tasks toy" in lines[-1]
    place.mkdir(parents=True)
    assert ENGINE.find_data(named) == str(place)
    ENGINE.set_up(named, lines.append)
    assert lines[-1] == f"the engine of toy is in {ENGINE.directory}"


def test_tasks_are_made_in_the_engine_s_python(toy, tmp_path, monkeypatch):
  monkeypatch.setitem(make_tasks.MODULES, "toy", "tools.toy")
  ENGINE.install()
  make_tasks.make_tasks(ENGINE, tmp_path / "games", (3, 2, 1))
  assert toy[-1][0] == str(ENGINE.python)
  assert toy[-1][-5:] == ["tools.toy", f"{tmp_path}/games", "3", "2", "1"]


def test_a_confined_engine_reads_its_python_and_its_data(toy):
  ENGINE.install()
  (ENGINE.directory / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
  engine = dataclasses.replace(ENGINE, code_reads="games")
  command = engine.confine("/data", "/scratch")
  assert command[:2] == ["bwrap", "--unshare-all"]
  readable = [command[i + 1] for i, word in enumerate(command) if "--ro-bind" in word]
  own = {str(ENGINE.directory), "/data/games", "/opt/python/bin", "/opt/python/lib"}
  assert own <= {*readable}
  # Neither the directory of all runs, nor the user's, nor the whole system.
  assert not {"/", "/data", "/etc", engines.ROOT, str(Path.home())} & {*readable}
  assert command[-5:] == ["--tmpfs", "/scratch", "--setenv", "HOME", "/scratch"]


@pytest.mark.parametrize(
  "result, expected",
  [
    (subprocess.CompletedProcess([], 0), True),
    (subprocess.CompletedProcess([], 1), False),  # User namespaces are off.
    (FileNotFoundError("bwrap"), False),
  ],
)
def test_a_machine_is_tried_before_code_is_confined(toy, monkeypatch, result, expected):
  ENGINE.install()
  (ENGINE.directory / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
  monkeypatch.setattr(engines.subprocess, "run", mock.Mock(side_effect=[result]))
  assert dataclasses.replace(ENGINE, code_reads="games").is_confinable is expected
  assert not ENGINE.is_confinable  # It runs no code of agents.
