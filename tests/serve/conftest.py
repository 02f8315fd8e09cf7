"""Serve a stand-in for the models, and an endpoint before it."""

import pytest
from endpoint import REPLY, Client
from standin import StandIn


@pytest.fixture
def upstream(monkeypatch):
  """Return a stand-in that always gives the same reply."""
  monkeypatch.setattr("baar_jax.llms.provider.BACKOFF_S", 0.01)
  with StandIn(lambda request: REPLY).running() as server:
    yield server


@pytest.fixture
def client(tmp_path, upstream):
  """Return a client of an endpoint."""
  with Client(tmp_path, upstream) as client:
    yield client
