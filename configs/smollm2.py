"""The default run with a router that has read much: first layers of SmolLM2-135M-Instruct, which
setup gets from PyPI. On two cores it takes hours; docs/pretrained.md says how to shorten it."""

import dataclasses

from baar_jax import config
from configs import quickstart


def get_config() -> config.Config:
  c = quickstart.get_config()
  c.name, c.pretrain = "smollm2", config.PretrainConfig()
  # Its tokens are half as long as those of a tokenizer that has been trained on the profile.
  texts = {name: 2 * tokens for name, tokens in quickstart.TEXTS.items()}
  c.router = config.RouterConfig(
    weights="smollm2", layers=4, show_budget=False, **texts
  )
  c.sft = dataclasses.replace(c.sft, learning_rates=(1e-3,), adam_eps=1e-8)
  c.bopo = dataclasses.replace(c.bopo, learning_rate=2e-5, adam_eps=1e-8)
  return c
