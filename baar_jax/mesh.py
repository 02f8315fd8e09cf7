"""Spread arrays over a mesh of all devices, and exchange values between processes."""

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
  """Make the mesh of the devices of all processes, with the axes data and fsdp.

  Args:
    fsdp: number of devices that share one copy of the parameters; 0 means all devices.

  Raises:
    ValueError: `fsdp` does not divide the number of devices.
  """
  devices = jax.device_count()
  fsdp = fsdp or devices
  if devices % fsdp:
    raise ValueError(
      f"--config.distributed.fsdp={fsdp} must divide the number of devices, {devices}. "
      "Set a divisor, or 0 for all devices."
    )
  return jax.make_mesh((devices // fsdp, fsdp), AXES, axis_types=(AxisType.Auto,) * 2)


def one_device() -> Mesh:
  """Make a mesh of a single device, the first one of this process."""
  return Mesh(np.array([jax.local_devices()[:1]]), AXES)


def split_parameters(params: Any, mesh: Mesh) -> Any:
  """Choose the sharding of each array of a router's parameters.

  An array is split over the mesh axis fsdp, along its longest axis that the size of
  fsdp divides. The axis of stacked layers is never split. An array without a suitable
  axis is replicated.

  Args:
    params: pytree of the arrays, or of their shapes and types.
    mesh: the mesh.

  Returns:
    A NamedSharding for each array, as a pytree with the structure of `params`.
  """
  fsdp = mesh.shape["fsdp"]

  def split(path: Sequence[Any], x: Any) -> NamedSharding:
    """Choose the sharding of one array."""
    # The parameters of all layers are stacked, so their axis 0 is the layer.
    first = int("layers" in jax.tree_util.keystr(path))
    axes = [axis for axis in range(first, x.ndim) if x.shape[axis] % fsdp == 0]
    names = [None] * x.ndim
    if axes:
      names[max(axes, key=x.shape.__getitem__)] = "fsdp"
    return NamedSharding(mesh, P(*names))

  return jax.tree_util.tree_map_with_path(split, params)


def split_rows(tree: Any, mesh: Mesh) -> Any:
  """Spread the rows of NumPy arrays over all devices of a mesh.

  An array is replicated if the number of devices does not divide its number of rows.

  Args:
    tree: pytree of NumPy arrays, the same in every process. JAX arrays in it are
      returned unchanged.
    mesh: the mesh.
  """

  def spread(x: Any) -> jax.Array:
    """Spread the rows of one array."""
    if isinstance(x, jax.Array):
      return x
    x = np.asarray(x)
    rows = P(AXES) if x.ndim and x.shape[0] % mesh.size == 0 else P()
    return jax.make_array_from_callback(
      x.shape, NamedSharding(mesh, rows), x.__getitem__
    )

  return jax.tree.map(spread, tree)


def spread_rows(x: jax.Array) -> jax.Array:
  """Constrain the rows of x to be spread over all devices.

  The function is for use within compiled functions. It returns x unchanged without a
  mesh in the context, or if the number of devices does not divide the number of rows.
  """
  # Without this constraint, the compiler may split the computation along the axes of
  # the weights, instead of the rows.
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or x.shape[0] % mesh.size:
    return x
  return jax.lax.with_sharding_constraint(x, P(AXES))


def local_copy(tree: Any, mesh: Mesh, dtype: Any) -> Any:
  """Gather whole arrays on this process's first device.

  All processes must call this function together.

  Args:
    tree: pytree of arrays on the mesh.
    mesh: the mesh.
    dtype: type of the copies.
  """
  cast = partial(jax.tree.map, lambda x: x.astype(dtype))
  whole = jax.jit(cast, out_shardings=NamedSharding(mesh, P()))(tree)
  return jax.tree.map(lambda x: x.addressable_data(0), whole)


def exchange(value: Any) -> list:
  """Collect one JSON value from each process.

  All processes must call this function together.

  Args:
    value: this process's value.

  Returns:
    The values, in the order of the processes.
  """
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array(len(text)))
  # Each padded length is compiled once, so lengths are rounded up to powers of two.
  padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
  padded[: len(text)] = text
  texts = multihost_utils.process_allgather(padded)
  return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes)]
