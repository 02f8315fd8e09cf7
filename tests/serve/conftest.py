"""Serve a stand-in for the models, and an endpoint before it."""

import contextlib

import pytest
from endpoint import REPLY, Client
from standin import StandIn


@pytest.fixture
def upstream(monkeypatch):
  """Return a stand-in that always gives the same reply."""
  monkeypatch.setattr("baar_jax.llms.provider.BACKOFF_S", 0.01)
  with StandIn(REPLY).running() as server:
    yield server


@pytest.fixture
def open_client(tmp_path, upstream):
  """open_client(**settings): a client of an endpoint with these settings."""
  with contextlib.ExitStack() as stack:
    yield lambda **settings: stack.enter_context(Client(tmp_path, upstream, **settings))


@pytest.fixture
def client(open_client):
  """Return a client of an endpoint."""
  return open_client()
