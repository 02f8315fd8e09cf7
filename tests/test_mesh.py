"""Where arrays lie on one device; tests of several are in test_distributed.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from baar_jax import mesh as meshes


@pytest.mark.parametrize(
  "fsdp, wanted",
  [
    # 12 is the longest axis that 4 divides; the 8 layers are never split, 3 cannot be
    (4, {"embedding": P(None, "fsdp"), "kernel": P(None, None, "fsdp"), "bias": P(None, None)}),
    (5, {"embedding": P("fsdp", None), "kernel": P(None, None, None), "bias": P(None, None)}),
  ],
)
def test_the_longest_axis_that_can_be_is_split(fsdp, wanted):
  mesh = AbstractMesh((1, fsdp), meshes.AXES)
  params = {
    "embedding": np.zeros((10, 8)),
    "layers": {"kernel": np.zeros((8, 4, 12)), "bias": np.zeros((8, 3))},
  }
  found = meshes.split_parameters(params, mesh)
  assert found["embedding"].spec == wanted["embedding"]
  assert found["layers"]["kernel"].spec == wanted["kernel"]
  assert found["layers"]["bias"].spec == wanted["bias"]


def test_a_mesh_has_all_devices():
  assert dict(meshes.make_mesh().shape) == {"data": 1, "fsdp": 1}
  with pytest.raises(ValueError, match=r"fsdp is 3; it must divide the number of devices, 1"):
    meshes.make_mesh(3)


def test_rows_keep_their_values():
  mesh = meshes.one_device()
  placed = meshes.split_rows({"x": np.arange(6).reshape(3, 2), "y": np.float32(2)}, mesh)
  np.testing.assert_array_equal(placed["x"], [[0, 1], [2, 3], [4, 5]])
  assert placed["y"] == 2 and isinstance(placed["y"], jax.Array)
  assert meshes.split_rows(placed, mesh)["x"] is placed["x"]


def test_a_local_copy_is_cast_and_keeps_the_original():
  params = {"x": jnp.array([1.0, 1 / 3])}
  copy = meshes.local_copy(params, meshes.one_device(), jnp.bfloat16)
  assert copy["x"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(copy["x"].astype(jnp.float32), [1.0, 0.333984375])
  assert params["x"].dtype == jnp.float32


def test_a_lone_process_talks_to_itself():
  assert meshes.exchange([1, "two"]) == [[1, "two"]]
