"""Where each model is served: its address and its key."""

import dataclasses
import ipaddress
import itertools
import os
from urllib.parse import urlsplit

from baar_jax.config import ModelsConfig

OPENAI_URL, OPENAI_HOST = "https://api.openai.com/v1", "api.openai.com"
OPENAI_KEY = "OPENAI_API_KEY"
NO_KEY = "none"  # what an endpoint without keys is sent: the protocol wants some


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A model at an address."""

  model: str
  base_url: str
  variable: str | None  # that holds the key; "" needs none, None is not configured

  @property
  def host(self) -> str:
    return urlsplit(self.base_url).hostname or self.base_url

  @property
  def own(self) -> bool:
    """Whether the address is of this machine or a private network."""
    if "." not in self.host and ":" not in self.host:
      return True  # localhost, or a name within one's own network
    try:
      return ipaddress.ip_address(self.host).is_private
    except ValueError:
      return False

  @property
  def openai(self) -> bool:
    """Whether the address is OpenAI's, in any of its regions."""
    return f".{self.host}".endswith(f".{OPENAI_HOST}")

  def key(self) -> str:
    """The key. Raises ValueError where it cannot be one, or a public endpoint's is not set."""
    if self.variable is None and not self.own:
      raise ValueError(
        f"{self.model} at {self.host}: name the environment variable of its key in "
        "--config.models.key_variables, or '' if it needs none"
      )
    key = os.environ.get(self.variable, "").strip() if self.variable else NO_KEY
    if not (key.isascii() and key.isprintable()):
      raise ValueError(f"the environment variable {self.variable} holds characters of no key")
    if key or self.own:
      return key or NO_KEY
    raise ValueError(
      f"{self.model} at {self.host} needs a key: set the environment variable {self.variable}, "
      "or name another in --config.models.key_variables"
    )


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """Each model's endpoint, in the order of the names.

  Where no variables are configured OpenAI's is for OpenAI's addresses alone.
  """
  urls, variables = config.base_urls or (OPENAI_URL,), config.key_variables or (None,)
  columns = config.names, itertools.cycle(urls), itertools.cycle(variables)
  rows = [Endpoint(name, url.rstrip("/"), variable) for name, url, variable in zip(*columns)]
  if config.key_variables:
    return rows
  return [dataclasses.replace(row, variable=OPENAI_KEY) if row.openai else row for row in rows]
