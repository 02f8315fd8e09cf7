"""The HTTP client of an endpoint: it follows no redirect, unpacks nothing, and reads so much."""

import os
from collections.abc import AsyncIterator

import httpx2

from baar_jax.config import ModelsConfig
from baar_jax.llms.endpoints import Endpoint

MOST_BYTES = 16 * 2**20  # of an answer
CONNECT_S = 10.0  # to connect to one of a host's addresses, and to agree on encryption
# What OpenAI alone is sent, and the environment variables that hold it.
ACCOUNT = {"openai-organization": "OPENAI_ORG_ID", "openai-project": "OPENAI_PROJECT_ID"}


def open_client(endpoint: Endpoint, config: ModelsConfig) -> httpx2.AsyncClient:
  """A client of the endpoint's address. Raises ValueError without the endpoint's key."""
  headers = {"authorization": f"Bearer {endpoint.key()}", "content-type": "application/json"}
  headers["accept-encoding"] = "identity"
  if endpoint.openai:
    headers |= {name: os.environ[key] for name, key in ACCOUNT.items() if key in os.environ}
  return httpx2.AsyncClient(
    base_url=endpoint.base_url,
    headers=headers,
    limits=httpx2.Limits(max_connections=config.concurrency),
    timeout=httpx2.Timeout(None, connect=min(CONNECT_S, config.timeout_s)),
  )


async def read_parts(response: httpx2.Response) -> AsyncIterator[bytes]:
  """The body as it comes, up to `MOST_BYTES`."""
  async for part in response.aiter_raw():
    if response.num_bytes_downloaded > MOST_BYTES:
      raise httpx2.ReadError("too many bytes")
    yield part
