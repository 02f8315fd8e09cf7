"""Where arrays lie on one device; tests of several are in test_distributed.py."""

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from baar_jax import mesh as meshes


# 12 is the longest axis that 4 divides; the 8 layers are never split, 3 cannot be.
@pytest.mark.parametrize(
  "fsdp, embedding, kernel",
  [(4, P(None, "fsdp"), P(None, None, "fsdp")), (5, P("fsdp", None), P(None, None, None))],
)
def test_the_longest_axis_that_can_be_is_split(fsdp, embedding, kernel):
  layers = {"kernel": np.zeros((8, 4, 12)), "bias": np.zeros((8, 3))}
  params = {"embedding": np.zeros((10, 8)), "layers": layers}
  split = meshes.split_parameters(params, AbstractMesh((1, fsdp), meshes.AXES))
  assert (split["embedding"].spec, split["layers"]["kernel"].spec) == (embedding, kernel)
  assert split["layers"]["bias"].spec == P(None, None)
