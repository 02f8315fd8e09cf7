"""Endpoints of API models: the address, the key and the protocol of each."""

import dataclasses
import ipaddress
import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import urlsplit

from baar_jax.config import ModelsConfig

OPENAI_URL = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
NO_KEY = "none"  # The key for an endpoint without keys: the protocol wants some.


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A model at an address.

  Attributes:
    variable: environment variable of the key; "" means no key, None the usual one.
  """

  model: str
  base_url: str
  variable: str | None

  @property
  def host(self) -> str:
    """Return the address's host name."""
    return urlsplit(self.base_url).hostname

  @property
  def is_private(self) -> bool:
    """Tell whether the address is of this machine or a private network."""
    try:
      return ipaddress.ip_address(self.host).is_private
    except ValueError:
      return "." not in self.host  # localhost, or a name within the user's network

  @property
  def is_openai(self) -> bool:
    """Tell whether the address is OpenAI's, in any of its regions."""
    return f".{self.host}".endswith(".api.openai.com")

  def key(self) -> str:
    """Read the key from the environment.

    Raises:
      ValueError: the key of a public endpoint is not set, or it cannot be a key. The message
        names no variable: the user may have configured the key itself as one.
    """
    variable = self.variable
    if variable is None and self.is_openai:
      variable = OPENAI_KEY
    key = os.environ.get(variable or "", "").strip()
    is_missing = not key and not self.is_private and variable != ""
    if is_missing or not (key.isascii() and key.isprintable()):
      problem = f"{self.model} at {self.host} needs a key of printable ASCII characters"
      choice = f"'' for no key; {OPENAI_KEY} at OpenAI's addresses"
      place = f"environment variable that --config.models.key_variables names ({choice})"
      raise ValueError(f"{problem}: set the {place}")
    return key or NO_KEY


@dataclasses.dataclass(frozen=True)
class WireForm:
  """A protocol of upstream models.

  The rest of the program reads and writes OpenAI's chat completions; a form translates.

  Attributes:
    path: where requests go, below the endpoint's base URL.
    limits: fields of a written request that limit the tokens of a reply.
    headers: lists the headers that carry an endpoint's key and account.
    write: writes a chat-completions request for a model, with a limit of tokens.
    read_answer: reads a body as a chat completion; {} if it cannot be read.
    read_error: reads the message, type and code of a refusal's text; "" for each that is missing.
    read_chunks: reads a stream's events as chunks of a chat completion, up to the end mark.
  """

  path: str
  limits: tuple[str, ...]
  headers: Callable[[Endpoint, str], Mapping[str, str]]
  write: Callable[[dict, Endpoint, ModelsConfig], dict]
  read_answer: Callable[[bytes], dict]
  read_error: Callable[[str], Mapping[str, str]]
  read_chunks: Callable[[AsyncIterator[str]], AsyncIterator[dict]]


def endpoints(config: ModelsConfig) -> list[Endpoint]:
  """List the models' endpoints in the order of the names."""
  urls = itertools.cycle(config.base_urls or (OPENAI_URL,))
  variables = itertools.cycle(config.key_variables or (None,))
  served = []
  for name, url, variable in zip(config.names, urls, variables):
    served.append(Endpoint(name, url.rstrip("/"), variable))
  return served
