"""Test the variables that engines get, and when a machine can confine code."""

import subprocess
from unittest import mock

import pytest

from baar_jax.envs import engines

ENGINE = engines.Engine(("toy==1.2",), "TOY_DATA", "toy-download")


def test_engines_get_no_secrets(monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.setenv("LANG", "C.UTF-8")
  environ = engines.environ_of(ENGINE)
  assert "OPENAI_API_KEY" not in environ
  assert environ["LANG"] == "C.UTF-8"
  # A user's environment is trusted and gets all variables.
  assert engines.environ_of(None)["OPENAI_API_KEY"] == "secret"


@pytest.mark.parametrize(
  "result, expected",
  [
    (subprocess.CompletedProcess([], 0), True),
    (subprocess.CompletedProcess([], 1), False),  # User namespaces are off.
    (FileNotFoundError("bwrap"), False),
  ],
)
def test_a_machine_is_tried_before_code_is_confined(monkeypatch, result, expected):
  monkeypatch.setattr(engines.subprocess, "run", mock.Mock(side_effect=[result]))
  assert engines.can_confine.__wrapped__(None) is expected
