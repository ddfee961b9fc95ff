"""The places of a run's arrays: the mesh of devices, and the axes of it along which parameters are cut.

`config.mesh.fsdp` devices share the parameters and all that goes with them: the optimizer's state, averages, masks and
scales. `config.mesh.tensor` devices share the products of a transformer's block: its layers *up*, *query*, *key* and
*value* by out-features, *down* and *out* by in-features. The other devices each take a part of the batch, and so do
those of `fsdp`. No n:m group of a weight lies on two devices.

The axes are automatic: the compiler inserts the collectives. On TPUs the loss is computed on explicit ones, where the
type of an array says how it lies, and kernels prune each device's part.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.errors import Mistake
from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import layers
from nmjax.products.fit import slot_refusals
from nmjax.products.slot import WEIGHT

AXES = ("data", "fsdp", "tensor")
CUT = ((re.compile(r"/(up|query|key|value)$"), "other"), (re.compile(r"/(down|out)$"), "contract"))  # by `tensor`
SMALL = 2**12  # numbers: parameters with fewer lie whole on every device


def mesh(sizes: Any) -> Mesh:
    """Return the mesh of all devices of a run.

    Args:
      sizes: The settings `config.mesh`: how many devices `fsdp` and `tensor` take. `data` takes the others.

    Raises:
      Mistake: If a size is below 1, or if the sizes do not divide the number of devices.
    """
    shares = {name: sizes[name] for name in AXES[1:]}
    for name, size in shares.items():
        if size < 1:
            raise Mistake(f"config.mesh.{name}={size} is not a number of devices. 1 means that parameters are not cut.")
    count, needed = jax.device_count(), math.prod(shares.values())
    if count % needed:
        product = " x ".join(f"config.mesh.{name}={size}" for name, size in shares.items())
        raise Mistake(
            f"{product} is {needed} devices, which do not divide the {count} devices of this run. Choose numbers whose "
            f"product divides {count}."
        )
    return jax.make_mesh((count // needed, *shares.values()), AXES, axis_types=(AxisType.Auto,) * 3)


def parts(mesh: Mesh) -> int:
    """Return the number of parts that a batch is cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def batch(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def whole(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that lies whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shows(mesh: Mesh) -> bool:
    """Return whether the loss is computed on explicit axes. Kernels of GPUs ask the compiler how arrays lie instead.

    Products of two operands that `tensor` cuts along the contraction have no type without a word of the model.
    """
    return mesh.devices.flat[0].platform == "tpu" and mesh.size > 1 and mesh.shape["tensor"] == 1


def explicit(mesh: Mesh) -> AbstractMesh:
    """Return the mesh with explicit axes."""
    return mesh.abstract_mesh.update(axis_types=(AxisType.Explicit,) * len(AXES))


def typed(loss: Callable[..., Any], mesh: Mesh, params: Any, rest: Any) -> Callable[..., Any]:
    """Return ``loss(params, rest, batch)`` computed on explicit axes, for arguments on automatic ones.

    Args:
      loss: The function.
      mesh: The devices.
      params, rest: The shardings of its arguments. A batch is cut by `batch`.
    """

    def within(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    specs = jax.tree.map(lambda place: place.spec, (params, rest))
    function = jax.sharding.explicit_axes(loss, axes=AXES, in_sharding=(*specs, batch(mesh).spec))
    return within


def rows(mesh: Mesh, size: int) -> np.ndarray:
    """Return which rows of a batch of ``size`` rows lie on devices of this process."""
    indices = batch(mesh).addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[index] for index in indices]))


def gathered(arrays: Any, mesh: Mesh, size: int) -> Any:
    """Return batches of ``size`` rows. Every process gives its own part of the rows, as `rows` says."""
    put = lambda x: jax.make_array_from_process_local_data(batch(mesh), x, (size, *x.shape[1:]))
    return jax.tree.map(put, arrays)


def placed(arrays: Any, where: NamedSharding) -> Any:
    """Return arrays on the devices. Every process gives them whole."""
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, where, x.__getitem__), arrays)


# ---- the state of a run ----


def of_state(state: Any, model: nnx.Module, mesh: Mesh) -> Any:
    """Return the shardings of all arrays of a run's state.

    An array that belongs to a parameter lies as the parameter does, whether it is the parameter itself, its average or
    the optimizer's state. Masks and scales of a sparse layer lie as its kernel does, along the axes that both have.

    Args:
      state: The state as shapes.
      model: The sparse model as shapes.
      mesh: The devices.
    """
    kernels = {layer.kernel_path: _cut_kernel(layer, mesh) for layer in layers(model)}
    cuts = kernels | _cut_others(model, mesh, kernels) | _cut_states(model, kernels)

    def place(path, leaf):  # the first names may be those of the state, and the others are a path in the model
        names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        for start in range(len(names)):
            cut = cuts.get("/".join(names[start:]))
            if cut is not None and len(cut) == len(leaf.shape):
                return NamedSharding(mesh, PartitionSpec(*cut))
        return whole(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def in_use(places: Any, mesh: Mesh) -> Any:
    """Return the shardings of parameters while a step computes with them: whole along fsdp.

    They are set on what goes into the model. Inside a loop the compiler would otherwise cut the products, and send
    activations between devices.
    """
    gather = lambda at: NamedSharding(mesh, PartitionSpec(*(None if name == "fsdp" else name for name in at.spec)))
    return jax.tree.map(gather, places)


def stacked(count: int, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of ``count`` arrays along a new first axis. Each is cut as one array is."""
    cut = NamedSharding(one.sharding.mesh, PartitionSpec(None, *one.sharding.spec))
    return jax.ShapeDtypeStruct((count, *one.shape), one.dtype, sharding=cut)


# ---- variables: for each axis of one, the axis of the mesh that cuts it, or None ----


def _cut_kernel(layer: Layer, mesh: Mesh) -> tuple[str | None, ...]:
    """Cut a kernel along one axis by `tensor` and along another by `fsdp`, so that every group stays on one device."""
    shape = layer.kernel.shape
    own = [axis for axis in range(len(shape)) if axis not in layer.stack]
    cut: list[str | None] = [None] * len(shape)
    axis = _tensor_axis(layer, own) if mesh.shape["tensor"] > 1 else None
    if axis is not None:
        if not _legal(layer, axis, mesh.shape["tensor"]):
            raise _no_tensor_cut(layer, axis, mesh)
        cut[axis] = "tensor"
    if mesh.shape["fsdp"] > 1 and math.prod(shape) >= SMALL:
        free = sorted((axis for axis in own if cut[axis] is None), key=lambda axis: -shape[axis])
        legal = [axis for axis in free if _legal(layer, axis, mesh.shape["fsdp"])]
        if legal:
            cut[legal[0]] = "fsdp"
    return tuple(cut)


def _tensor_axis(layer: Layer, own: list[int]) -> int | None:
    """Return the axis of a kernel that `tensor` cuts: of its out-features or of its in-features, by its name."""
    for pattern, axes in CUT:
        if pattern.search(layer.path) and layer.operand is not None:
            return own[getattr(layer.operand, axes)[0]]
    return None


def _no_tensor_cut(layer: Layer, axis: int, mesh: Mesh) -> Mistake:
    """Return the error for a kernel that `tensor` cannot cut, with the nearest number of devices that could."""
    asked, most = mesh.shape["tensor"], mesh.size // mesh.shape["fsdp"]
    legal = [count for count in range(1, most + 1) if most % count == 0 and _legal(layer, axis, count)]
    nearest = min(legal, key=lambda count: (abs(count - asked), count))
    shape = " x ".join(map(str, layer.kernel.shape))
    return Mistake(
        f"config.mesh.tensor={asked}: {layer.path}, a kernel of {shape}, cannot be cut along axis {axis} for "
        f"{layer.sparsity}: its parts would not be equal, or groups would lie on two devices. Write "
        f"--config.mesh.tensor={nearest}."
    )


def _legal(layer: Layer, axis: int, count: int) -> bool:
    """Return whether an axis of a kernel can be cut into so many equal parts of whole groups."""
    if layer.kernel.shape[axis] % count:
        return False
    product = layer.example(math.lcm(*(getattr(layer.sparsity, slot).facts.block for slot in ("dw_g", "dw_x"))))
    if product is None or count == 1:
        return True
    own = [a for a in range(layer.kernel.ndim) if a not in layer.stack]
    spec = PartitionSpec(*("cut" if a == axis else None for a in own))
    cut_mesh = AbstractMesh((count,), ("cut",), axis_types=(AxisType.Auto,))
    rhs = jax.ShapeDtypeStruct(product.rhs.shape, product.rhs.dtype, sharding=NamedSharding(cut_mesh, spec))
    refusals = slot_refusals(product.op, product.lhs, rhs, layer.sparsity)
    return not any(slot in WEIGHT for slot, _ in refusals)


def _cut_others(model: nnx.Module, mesh: Mesh, kernels: Iterable[str]) -> dict[str, tuple[str | None, ...]]:
    """Cut every parameter that is not the kernel of a layer along its largest axis, by `fsdp`."""
    count, cuts = mesh.shape["fsdp"], {}
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, shape = "/".join(map(str, path)), value.get_value().shape
        if name in kernels:
            continue
        cut: list[str | None] = [None] * len(shape)
        fitting = [axis for axis in range(len(shape)) if shape[axis] % count == 0]
        if count > 1 and fitting and math.prod(shape) >= SMALL:
            cut[max(fitting, key=lambda axis: shape[axis])] = "fsdp"
        cuts[name] = tuple(cut)
    return cuts


def _cut_states(model: nnx.Module, kernels: Mapping[str, tuple[str | None, ...]]) -> dict[str, tuple[str | None, ...]]:
    """Cut what a sparse layer holds as its kernel is cut, along the axes of the same size."""
    paths, cuts = {id(node): path for path, node in nnx.iter_graph(model)}, {}
    for layer in layers(model):
        held = [] if layer.state is None else nnx.to_flat_state(nnx.state(layer.state))
        for path, value in held:
            axes = zip(value.get_value().shape, layer.kernel.shape, kernels[layer.kernel_path], strict=False)
            name = "/".join(map(str, (*paths[id(layer.state)], *path)))
            cuts[name] = tuple(cut if own == size else None for own, size, cut in axes)
    return cuts
