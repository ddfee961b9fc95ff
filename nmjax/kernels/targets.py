"""Which device a program is traced for, and whether its tensor cores know 2:4.

A context mesh with an abstract device counts as that device, so that a program can be planned, lowered and compiled for
one that is not there: `on`.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from nmjax.core.value import Value

BACKENDS = ("auto", "xla", "pallas", "interpret")
"""What computes products of 2:4 operands: kernels where they are expected to win, XLA's dense products always, kernels
wherever they can or an error, or kernels wherever they can and simulated on the CPU, for tests of small arrays: a product
takes seconds, and programs of several want ``XLA_FLAGS=--xla_force_host_platform_device_count=4``, for threads to wait in."""

_KINDS = {
    r"H100|H200|GH200|H800|H20\b": "hopper",
    r"A100|A800|A30\b|A40\b|A10\b|RTX 30|RTX A|L4\b|L40|RTX 40": "ampere",
}


@dataclass(frozen=True, repr=False)
class Target(Value):
    """A device that kernels are traced for."""

    kind: str
    family: str  # "hopper" or "ampere"
    cores: int  # streaming multiprocessors
    interpret: bool = False

    def __str__(self) -> str:
        return f"{self.family}'s kernels{', simulated' if self.interpret else ''}"


@contextmanager
def on(kind: str, cores: int = 132):
    """Within it, plans are made and programs are traced for one GPU of this kind, though it is not there.

    >>> with on("NVIDIA H200"):
    ...     target("auto")
    Target('NVIDIA H200','hopper',132)
    """
    device = AbstractDevice(kind, cores, "gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def target(backend: str) -> Target | str:
    """The device that kernels would run on now, or why none of them can."""
    check_backend(backend)
    if backend == "xla":
        return "backend='xla'"
    if backend == "interpret":
        return Target("interpreter", "hopper", 2, True)
    mesh = jax.sharding.get_abstract_mesh()
    told = getattr(mesh, "abstract_device", None)
    if told is None:
        device = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
        platform, kind = device.platform, device.device_kind
        cores, capability = getattr(device, "core_count", None), getattr(device, "compute_capability", None)
    else:
        platform, kind, cores, capability = told.platform, told.device_kind, told.num_cores, None
    if platform not in ("gpu", "cuda") or "AMD" in kind:
        return f"{kind} has no sparse tensor cores"
    family = _family(kind, capability)
    if family is None:
        return f"{kind}: there are kernels for Hopper and for Ampere alone"
    if backend == "auto" and (why := _spread(mesh)):
        return why
    return Target(kind, family, int(cores or 132))


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")


def _family(kind: str, capability: str | None) -> str | None:
    if capability:
        return {"9": "hopper", "8": "ampere"}.get(capability.split(".")[0])
    return next((family for pattern, family in _KINDS.items() if re.search(pattern, kind)), None)


def _spread(mesh) -> str | None:
    """Why XLA may cut arrays into shards, which it cannot do to a kernel."""
    if mesh.empty:
        if jax.device_count() == 1:
            return None
        return (
            f"{jax.device_count()} devices, on which arrays may lie in shards, and no mesh that tells: call it in jax.shard_map, "
            "show one device alone (CUDA_VISIBLE_DEVICES), or write backend='pallas'"
        )
    free = {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if (size > 1 and kind != AxisType.Manual) or kind == AxisType.Explicit
    }
    if not free:
        return None
    axes = ", ".join(f"{name!r}: {size}" for name, size in free.items())
    return f"arrays may lie in shards along the mesh's {axes}, and a kernel takes whole ones: call it in jax.shard_map"


def varying(*inputs: jax.Array) -> frozenset:
    """The axes of `jax.shard_map` along which some of the inputs differ between devices."""
    return frozenset().union(*(jax.typeof(v).manual_axis_type.varying for v in inputs))


def result(shape: tuple[int, ...], dtype, *inputs: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result: it differs between devices where one of its inputs does."""
    kind = jax.typeof(inputs[0]).manual_axis_type.update(varying=varying(*inputs))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def as_varying(y: jax.Array, axes: frozenset) -> jax.Array:
    """A value that is said to differ between devices along these axes."""
    missing = axes - varying(y)
    return jax.lax.pcast(y, tuple(missing), to="varying") if missing else y
