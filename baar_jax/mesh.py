"""One mesh (data, fsdp) over all devices: where arrays lie, and what processes tell each other."""

import json
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp")


def make_mesh(fsdp: int = 0) -> Mesh:
  """The mesh of all devices; `fsdp` of them share one copy of the parameters, 0 is all."""
  devices = jax.device_count()
  fsdp = fsdp or devices
  if devices % fsdp:
    raise ValueError(
      f"--config.distributed.fsdp is {fsdp}; it must divide {devices} devices"
    )
  return jax.make_mesh((devices // fsdp, fsdp), AXES, axis_types=(AxisType.Auto,) * 2)


def one_device() -> Mesh:
  """A mesh of this process's first device alone."""
  return Mesh(
    np.array([jax.local_devices()[:1]]), AXES, axis_types=(AxisType.Auto,) * 2
  )


def split_parameters(params: Any, mesh: Mesh) -> Any:
  """The sharding of each array of a router, or of a pytree of its shape: over fsdp, along its
  longest axis that fsdp divides, never along the layers; without such an axis it is repeated."""
  fsdp = mesh.shape["fsdp"]

  def split(path: tuple, x: jax.Array) -> NamedSharding:
    first = int("layers" in jax.tree_util.keystr(path))  # axis 0 is the layer
    axes = [axis for axis in range(first, x.ndim) if x.shape[axis] % fsdp == 0]
    longest = max(axes, key=lambda axis: x.shape[axis], default=None)
    return NamedSharding(
      mesh, P(*("fsdp" if a == longest else None for a in range(x.ndim)))
    )

  return jax.tree_util.tree_map_with_path(split, params)


def split_rows(tree: Any, mesh: Mesh) -> Any:
  """NumPy arrays that every process holds whole, with their rows spread over all devices, or
  repeated where the number of devices does not divide them; arrays of JAX stay where they are."""

  def place(x: Any) -> jax.Array:
    if isinstance(x, jax.Array):
      return x
    x = np.asarray(x)
    rows = P(AXES) if x.ndim and x.shape[0] % mesh.size == 0 else P()
    return jax.make_array_from_callback(
      x.shape, NamedSharding(mesh, rows), lambda at: x[at]
    )

  return jax.tree.map(place, tree)


def spread_rows(x: jax.Array) -> jax.Array:
  """Inside a compiled function: x with its rows over all devices of the mesh in use, if any."""
  # Without it the compiler may split the work along a split of the weights instead.
  mesh = jax.sharding.get_abstract_mesh()
  splits = not mesh.empty and x.shape[0] % mesh.size == 0
  return jax.lax.with_sharding_constraint(x, P(AXES)) if splits else x


def local_copy(tree: Any, mesh: Mesh, dtype: jax.typing.DTypeLike) -> Any:
  """Whole arrays in `dtype` on this process's first device; every process must call it."""
  cast = partial(jax.tree.map, lambda x: x.astype(dtype))
  whole = jax.jit(cast, out_shardings=NamedSharding(mesh, P()))(tree)
  return jax.tree.map(lambda x: x.addressable_data(0), whole)


def exchange(value: Any) -> list:
  """The JSON values of all processes, in their order; every process must call it."""
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array(len(text)))
  padded = np.zeros(
    1 << int(sizes.max() - 1).bit_length(), np.uint8
  )  # few lengths are compiled
  padded[: len(text)] = text
  texts = multihost_utils.process_allgather(padded)
  return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes)]
