"""The endpoints of the configured models, and their check before anything is run."""

import itertools
from urllib.parse import urlsplit

from baar_jax.config import ZERO_SHOT, Config
from baar_jax.llms.prices import prices_of
from baar_jax.llms.wire import endpoints, load_form


def check_models(config: Config) -> None:
  """Check that each model has a price and a key, and that the cheapest comes first.

  Raises:
    ValueError: it is not so; one line names the setting.
  """
  groups = {"models": config.models}
  if ZERO_SHOT in config.baselines.rivals:
    groups["baselines.judge"] = config.baselines.judge
  for group_name, group in groups.items():
    load_form(group.wire)
    try:
      prices = prices_of(group.names, group.prices)
      for endpoint in endpoints(group) if config.models.kind == "chat" else ():
        endpoint.key()
        _ = urlsplit(endpoint.base_url).port  # raises ValueError above 65535
    except ValueError as error:
      raise ValueError(str(error).replace(".models.", f".{group_name}.")) from None
    for cheaper, costlier in itertools.pairwise(prices):
      if cheaper.input > costlier.input and cheaper.output > costlier.output:
        names = f"--config.{group_name}.names is {group.names!r}"
        advice = "name the cheapest first, by the list's prices or your own"
        raise ValueError(f"{names}; one of them is dearer than the next: {advice}")
