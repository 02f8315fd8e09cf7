"""The mesh (data, fsdp) of all devices, and the exchange between processes."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp")


def make_mesh(fsdp: int = 0) -> Mesh:
  """Make the mesh of all devices.

  Args:
    fsdp: number of devices that share one copy of the parameters; 0 is all.

  Raises:
    ValueError: `fsdp` does not divide the number of devices.
  """
  devices = jax.device_count()
  fsdp = fsdp or devices
  if devices % fsdp:
    raise ValueError(
      f"--config.distributed.fsdp is {fsdp}; it must divide {devices} devices"
    )
  return jax.make_mesh((devices // fsdp, fsdp), AXES, axis_types=(AxisType.Auto,) * 2)


def one_device() -> Mesh:
  """Make a mesh of this process's first device alone."""
  return Mesh(np.array([jax.local_devices()[:1]]), AXES)


def split_parameters(params: Any, mesh: Mesh) -> Any:
  """Choose the sharding of each array of a router.

  An array is split over fsdp along its longest axis that fsdp divides, but never along
  the layers. Without such an axis it is repeated.

  Args:
    params: the arrays, or a pytree of their shape.

  Returns:
    NamedShardings in a pytree of the same shape.
  """
  fsdp = mesh.shape["fsdp"]

  def split(path: Sequence[Any], x: Any) -> NamedSharding:
    """Choose the sharding of one array."""
    first = int("layers" in jax.tree_util.keystr(path))  # axis 0 is the layer
    axes = [axis for axis in range(first, x.ndim) if x.shape[axis] % fsdp == 0]
    names = [None] * x.ndim
    if axes:
      names[max(axes, key=x.shape.__getitem__)] = "fsdp"
    return NamedSharding(mesh, P(*names))

  return jax.tree_util.tree_map_with_path(split, params)


def split_rows(tree: Any, mesh: Mesh) -> Any:
  """Spread the rows of NumPy arrays over all devices.

  An array is repeated if the number of devices does not divide its rows.

  Args:
    tree: arrays that every process holds whole; arrays of JAX stay as they are.
  """

  def place(x: Any) -> jax.Array:
    """Place one array."""
    if isinstance(x, jax.Array):
      return x
    x = np.asarray(x)
    rows = P(AXES) if x.ndim and x.shape[0] % mesh.size == 0 else P()
    return jax.make_array_from_callback(
      x.shape, NamedSharding(mesh, rows), x.__getitem__
    )

  return jax.tree.map(place, tree)


def spread_rows(x: jax.Array) -> jax.Array:
  """Spread the rows of x over the mesh in use, if any.

  It is for compiled functions.
  """
  # Without it the compiler may split the work along a split of the weights instead.
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or x.shape[0] % mesh.size:
    return x
  return jax.lax.with_sharding_constraint(x, P(AXES))


def local_copy(tree: Any, mesh: Mesh, dtype: Any) -> Any:
  """Copy whole arrays, in `dtype`, to this process's first device.

  Every process must call it.
  """
  cast = partial(jax.tree.map, lambda x: x.astype(dtype))
  whole = jax.jit(cast, out_shardings=NamedSharding(mesh, P()))(tree)
  return jax.tree.map(lambda x: x.addressable_data(0), whole)


def exchange(value: Any) -> list:
  """Collect the JSON values of all processes, in their order.

  Every process must call it.
  """
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array(len(text)))
  # Powers of two: few lengths are compiled.
  padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
  padded[: len(text)] = text
  texts = multihost_utils.process_allgather(padded)
  return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes)]
