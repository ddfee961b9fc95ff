"""The device that a program is traced for, and whether its tensor cores know 2:4.

A context mesh with an abstract device counts as that device (`on`), so that a program can be planned, lowered and
compiled for a device that this machine lacks.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from nmjax.core.refusal import Refusal
from nmjax.kernels.family import Target
from nmjax.kernels.limits import FAMILIES
from nmjax.kernels.tpu import Pruning

BACKENDS = ("auto", "xla", "compact", "pallas", "interpret")
"""The ways to compute products of pruned operands.

- ``"auto"``: fewer rows or a kernel if it is expected to win, else XLA's dense product.
- ``"xla"``: XLA's dense product, always.
- ``"compact"``: fewer rows if `nmjax.rows` chooses them, or an error. XLA's dense product elsewhere.
- ``"pallas"``: a kernel, or an error.
- ``"interpret"``: a kernel simulated on the CPU, for tests with small arrays. A product takes seconds. A program with
  several products needs ``NPROC=16`` in the environment, so that XLA has enough threads that can wait.
"""


@contextmanager
def on(kind: str, cores: int | None = None) -> Iterator[None]:
    """Plan and trace programs for one GPU or TPU of this kind, which need not be there.

    >>> with on("NVIDIA H200"):
    ...     target("auto")
    Target('NVIDIA H200','hopper',132)

    Args:
      kind: The name of the device, as ``jax.Device.device_kind`` gives it.
      cores: The number of its streaming multiprocessors, 132 if it is None; or of the cores of a TPU, 1.
    """
    is_tpu = kind.startswith("TPU")
    device = AbstractDevice(kind, cores or (1 if is_tpu else 132), "tpu" if is_tpu else "gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def target(backend: str) -> Target | Refusal:
    """Return the device that kernels would run on now, or a refusal if no kernel can run.

    >>> target("interpret")
    Target('interpreter','hopper',2,interpret=True)

    Args:
      backend: One of `BACKENDS`.

    Raises:
      ValueError: If ``backend`` is none of them.
    """
    check_backend(backend)
    if backend in ("xla", "compact"):
        return Refusal(f"backend={backend!r}")
    mesh = jax.sharding.get_abstract_mesh()
    devices = _devices(mesh)
    if backend == "interpret" and platform() != "tpu":
        return Target("interpreter", "hopper", 2, True, 1 if isinstance(devices, Refusal) or mesh.empty else devices)
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is None:
        device = _concrete()
        kind = device.device_kind
        cores, capability = getattr(device, "core_count", None), getattr(device, "compute_capability", None)
    else:
        kind, cores, capability = abstract.device_kind, abstract.num_cores, None
    if platform() != "gpu" or "AMD" in kind:
        return Refusal(f"{kind} has no sparse tensor cores")
    family = _family(kind, capability)
    if family is None:
        *most, last = (name.capitalize() for name in FAMILIES)
        return Refusal(f"{kind}: there are kernels for {', '.join(most)} and {last} only")
    if isinstance(devices, Refusal):
        if backend == "auto":
            return devices
        devices = 1
    return Target(kind, family, int(cores or 132), devices=devices)


def pruning(backend: str) -> Pruning | Refusal:
    """Return the device whose kernels prune arrays in one pass, or the reason why XLA prunes.

    >>> with on("TPU v5 lite"):
    ...     pruning("auto")
    Pruning('TPU v5 lite')

    Args:
      backend: One of `BACKENDS`.
    """
    if platform() != "tpu":
        return Refusal("only TPUs have kernels that prune without packing")
    if backend == "xla":
        return Refusal("backend='xla'")
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    kinds = {own for own, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True) if size > 1}
    if AxisType.Manual in kinds and len(kinds) > 1:
        return Refusal("only some axes of the mesh are manual: call the layer in jax.shard_map over all axes")
    if AxisType.Auto in kinds or (mesh.empty and jax.device_count() > 1):
        return Refusal(
            "a kernel cannot see how arrays lie on several devices: set a mesh of explicit axes, as "
            "jax.set_mesh(jax.make_mesh(...)), or call the layer in jax.shard_map"
        )
    kind = _concrete().device_kind if abstract is None else abstract.device_kind
    if re.fullmatch(r"TPU v[23]", kind):
        return Refusal(f"{kind}: kernels are for TPU v4 and later")
    return Pruning(kind, backend == "interpret")


def pruning_kernels(backend: str) -> Pruning | None:
    """Return the device whose kernels prune, for ``Ctx.kernels``; None if XLA prunes. The argument is a backend."""
    device = pruning(backend)
    return device if isinstance(device, Pruning) else None


def platform() -> str:
    """Return the platform of the device that programs are traced for now: "cpu", "gpu" or "tpu".

    >>> with on("NVIDIA H200"):
    ...     platform()
    'gpu'
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    name = (_concrete() if abstract is None else abstract).platform
    return "gpu" if name in ("cuda", "rocm") else name


def _concrete() -> Any:
    """Return the device of this machine on which programs run."""
    device = jax.config.jax_default_device or jax.devices()[0]  # pyrefly: ignore[missing-attribute]
    return jax.devices(device)[0] if isinstance(device, str) else device


def check_backend(backend: str) -> None:
    """Raise a `ValueError` if a backend is none of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")


def _family(kind: str, capability: str | None) -> str | None:
    number = (capability or "").split(".")[0]
    own = lambda family: family.capability == number if number else re.search(family.devices, kind)
    return next((family.name for family in FAMILIES.values() if own(family)), None)


def _devices(mesh: AbstractMesh) -> int | Refusal:
    """Return the number of devices among which XLA may cut arrays, or the reason why kernels cannot run there."""
    if mesh.empty:  # arrays may lie on some mesh nevertheless
        return jax.device_count()
    kinds = {
        kind: {
            name: size
            for name, size, own in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
            if own == kind and (size > 1 or kind == AxisType.Explicit)
        }
        for kind in (AxisType.Auto, AxisType.Explicit, AxisType.Manual)
    }
    free = kinds[AxisType.Auto]
    if kinds[AxisType.Explicit] or (free and kinds[AxisType.Manual]):
        axes = ", ".join(f"{name!r} of size {size}" for name, size in (kinds[AxisType.Explicit] or free).items())
        which = "explicit axes" if kinds[AxisType.Explicit] else "automatic axes beside manual ones"
        return Refusal(
            f"the mesh has {which} ({axes}), and kernels need axes that are all automatic or all manual: make all axes "
            "automatic, or call the layer in jax.shard_map over all axes"
        )
    return math.prod(free.values())
