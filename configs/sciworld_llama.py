"""The paper's ScienceWorld with Llama 3.1, 8B and 70B Instruct, at any compatible endpoint."""

from baar_jax import config
from configs import sciworld


def get_config() -> config.Config:
  c = sciworld.get_config("paper")
  c.name = "sciworld_llama"
  c.models = config.ModelsConfig(
    kind="chat",
    names=("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
    base_urls=("http://localhost:8000/v1", "http://localhost:8001/v1"),
  )
  return c
