"""Where arrays lie on one device; tests of several are in test_distributed.py."""

import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from baar_jax import mesh as meshes


def test_the_longest_axis_that_can_be_is_split():
  # 12 is the longest axis that 4 divides; the 8 layers are never split, 3 cannot be.
  layers = {"kernel": np.zeros((8, 4, 12)), "bias": np.zeros((8, 3))}
  params = {"embedding": np.zeros((10, 8)), "layers": layers}
  split = meshes.split_parameters(params, AbstractMesh((1, 4), meshes.AXES))
  assert split["embedding"].spec == P(None, "fsdp")
  assert split["layers"]["kernel"].spec == P(None, None, "fsdp")
  assert split["layers"]["bias"].spec == P(None, None)
