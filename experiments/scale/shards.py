"""Where the arrays of a run lie: its mesh of devices, and along which of its axes parameters are cut.

``config.mesh.fsdp`` devices share the parameters, and all that goes with them: the optimizer's state, averages, masks
and scales. ``config.mesh.tensor`` devices share the products of a transformer's block: its layers *up*, *query*, *key* and
*value* by out-features, *down* and *out* by in-features. What is left of the devices has its own part of the batch, as
those of ``fsdp`` have. No group n:m of a weight lies on two devices.

The axes are automatic: the compiler puts the collectives where they are wanted.
"""

import math
import re
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.errors import Mistake
from nmjax.nnx.doors import Layer, layers
from nmjax.products.rule import refusals

AXES = ("data", "fsdp", "tensor")
CUT = ((re.compile(r"/(up|query|key|value)$"), "other"), (re.compile(r"/(down|out)$"), "contract"))  # by `tensor`
SMALL = 2**12  # numbers: parameters of fewer lie whole on every device


def mesh(config) -> Mesh:
    """The devices, as the config arranges them."""
    shares = {name: config.mesh[name] for name in AXES[1:]}
    for name, size in shares.items():
        if size < 1:
            raise Mistake(f"config.mesh.{name}={size} is no number of devices: 1 is none beside the others.")
    count, taken = jax.device_count(), math.prod(shares.values())
    if count % taken:
        told = " x ".join(f"config.mesh.{name}={size}" for name, size in shares.items())
        raise Mistake(f"{told} is {taken} devices, which do not divide the {count} that are here.")
    return jax.make_mesh((count // taken, *shares.values()), AXES, axis_types=(AxisType.Auto,) * 3)


def parts(mesh: Mesh) -> int:
    """In how many parts a batch is cut."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def batch(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def rows(mesh: Mesh, size: int) -> np.ndarray:
    """Those of a batch of so many that lie on devices of this process."""
    held = batch(mesh).addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[index] for index in held]))


def gathered(arrays: Any, mesh: Mesh, size: int):
    """Batches of so many, of which every process gives its `rows`."""
    put = lambda x: jax.make_array_from_process_local_data(batch(mesh), x, (size, *x.shape[1:]))
    return jax.tree.map(put, arrays)


def placed(arrays: Any, where: NamedSharding):
    """Arrays that every process has whole, on the devices."""
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, where, x.__getitem__), arrays)


def whole(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


# ---- parameters ----


def of_state(state, model: nnx.Module, mesh: Mesh):
    """Where every array of a run's state lies, given as shapes: that of a parameter, wherever it is kept; or of what a sparse
    layer holds, as its kernel along the axes that both have."""
    cuts = _kernels(model, mesh) | _others(model, mesh)
    homes = {layer.path: (layer.module.kernel.shape, cuts[_name(layer)]) for layer in layers(model)}

    def place(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        for start in range(len(names)):
            cut = cuts.get("/".join(names[start:]))
            if cut is not None and len(cut) == len(leaf.shape):
                return NamedSharding(mesh, PartitionSpec(*cut))
        text = "/".join(names)
        for home, (shape, cut) in homes.items():
            if f"/{home}/" in f"/{text}/" and len(leaf.shape) <= len(shape):
                alike = zip(leaf.shape, shape, cut, strict=False)
                return NamedSharding(mesh, PartitionSpec(*(name if a == b else None for a, b, name in alike)))
        return whole(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def in_use(where, mesh: Mesh):
    """Where parameters lie while a step computes with them: whole along fsdp. Said of what goes into the model, for within a
    loop the compiler would rather cut the products, and tell activations."""
    whole = lambda at: NamedSharding(mesh, PartitionSpec(*(None if name == "fsdp" else name for name in at.spec)))
    return jax.tree.map(whole, where)


def stacked(count: int, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """So many of an array, of which each is cut as one is."""
    cut = NamedSharding(one.sharding.mesh, PartitionSpec(None, *one.sharding.spec))
    return jax.ShapeDtypeStruct((count, *one.shape), one.dtype, sharding=cut)


def _name(layer: Layer) -> str:
    return f"{layer.path}/kernel".lstrip("/")


def _kernels(model: nnx.Module, mesh: Mesh) -> dict[str, tuple]:
    """Along which axes of the mesh the axes of every kernel are cut."""
    return {_name(layer): _kernel(layer, mesh) for layer in layers(model)}


def _kernel(layer: Layer, mesh: Mesh) -> tuple:
    shape, operand = layer.module.kernel.shape, layer.operand
    cut: list[Any] = [None] * len(shape)
    own = [a for a in range(len(shape)) if a not in layer.stack]
    part = next((part for pattern, part in CUT if pattern.search(layer.path)), None)
    if mesh.shape["tensor"] > 1 and part and operand is not None:
        axis = own[getattr(operand, part)[0]]
        if not _legal(layer, axis, mesh.shape["tensor"]):
            there = mesh.size // mesh.shape["fsdp"]  # devices that may be asked for
            legal = [n for n in range(1, there + 1) if there % n == 0 and _legal(layer, axis, n)]
            near = min(legal, key=lambda n: (abs(n - mesh.shape["tensor"]), n))
            raise Mistake(
                f"config.mesh.tensor={mesh.shape['tensor']}: {layer.path}, a kernel of {' x '.join(map(str, shape))}, cannot be cut along "
                f"axis {axis} for {layer.sparsity}: its parts would not be whole, or groups would lie on two devices. Write "
                f"--config.mesh.tensor={near}."
            )
        cut[axis] = "tensor"
    if mesh.shape["fsdp"] > 1 and math.prod(shape) >= SMALL:
        free = sorted((a for a in own if cut[a] is None), key=lambda a: -shape[a])
        fitting = [a for a in free if _legal(layer, a, mesh.shape["fsdp"])]
        if fitting:
            cut[fitting[0]] = "fsdp"
    return tuple(cut)


def _legal(layer: Layer, axis: int, count: int) -> bool:
    """Whether an axis of a kernel can be cut in so many equal parts, each with whole groups."""
    if layer.module.kernel.shape[axis] % count:
        return False
    product = layer.example(math.lcm(*(getattr(layer.sparsity, slot).block for slot in ("drhs_g", "drhs_lhs"))))
    if product is None or count == 1:
        return True
    own = [a for a in range(layer.module.kernel.ndim) if a not in layer.stack]
    at = PartitionSpec(*("cut" if a == axis else None for a in own))
    cut = jax.sharding.AbstractMesh((count,), ("cut",), axis_types=(AxisType.Auto,))
    rhs = jax.ShapeDtypeStruct(product.rhs.shape, product.rhs.dtype, sharding=NamedSharding(cut, at))
    return not [
        slot for slot, _ in refusals(product.op, product.lhs, rhs, layer.sparsity) if slot.endswith("rhs")
    ]


def _others(model: nnx.Module, mesh: Mesh) -> dict[str, tuple]:
    """The same of parameters that are no layer's kernel: each along its largest axis."""
    count, found = mesh.shape["fsdp"], {}
    kernels = {_name(layer) for layer in layers(model)}
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, shape = "/".join(map(str, path)), value.get_value().shape
        if name not in kernels:
            fitting = [a for a in range(len(shape)) if shape[a] % count == 0]
            cut = [None] * len(shape)
            if count > 1 and fitting and math.prod(shape) >= SMALL:
                cut[max(fitting, key=lambda a: shape[a])] = "fsdp"
            found[name] = tuple(cut)
    return found
