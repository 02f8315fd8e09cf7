"""Where each model is served: its address and its key."""

import dataclasses
import ipaddress
import os
from urllib.parse import urlsplit

from baar_jax.config import ModelsConfig

OPENAI_URL = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
NO_KEY = "none"  # what an endpoint without keys is sent: the protocol wants some


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A model at an address.

  Attributes:
    model: its name there.
    variable: the environment variable of its key.
  """

  model: str
  base_url: str
  variable: str

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

  def key(self) -> str:
    """The key. Raises ValueError where a public endpoint's variable is not set."""
    key = os.environ.get(self.variable, "") if self.variable else NO_KEY
    if key or self.own:
      return key or NO_KEY
    raise ValueError(
      f"{self.model} at {self.host} needs a key: set the environment variable {self.variable}, "
      "or name another in --config.models.key_variables"
    )


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """Each model's endpoint, in the order of the names."""
  count = len(config.names)
  urls = config.base_urls or (OPENAI_URL,)
  variables = config.key_variables or (OPENAI_KEY,)
  return [
    Endpoint(name, url.rstrip("/"), variable)
    for name, url, variable in zip(
      config.names,
      urls if len(urls) == count else urls * count,
      variables if len(variables) == count else variables * count,
    )
  ]
