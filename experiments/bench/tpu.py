"""What a TPU's own compiler counts in programs, on a machine without a TPU. Nothing runs.

It needs the package libtpu, in the version that ``jax[tpu]`` names: ``make test-tpu`` installs it beside the others.
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to be asked
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes compile at once

import importlib.metadata
import importlib.util
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import nmjax as nm
from experiments.bench.cases import METHODS, step
from experiments.bench.measure import Table
from experiments.bench.steps import LARGE, loss, recipe
from experiments.errors import Mistake
from nmjax.kernels.targets import pruning_kernels

Shape = jax.ShapeDtypeStruct

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "TPU7x": "TPU7x:2x2x1"}


class Counts(NamedTuple):
    """What the compiler counts.

    Attributes:
      moved: The bytes that the program reads and writes.
      temporary: The bytes of memory that it needs beside its arguments and results.
      kernels: The number of Pallas kernels.
      collectives: The number of operations between devices, by their names.
      seconds: The time to compile.
    """

    moved: int
    temporary: int
    kernels: int
    collectives: dict[str, int]
    seconds: float


@cache
def topology(name: str) -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES.get(name, name))


def mesh_of(name: str, sides: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("device",)) -> Mesh:
    """Return a mesh of the devices of a topology. One device has an automatic axis, several have explicit ones."""
    devices = np.array(topology(name).devices)[: int(np.prod(sides))].reshape(sides)
    kind = AxisType.Auto if devices.size == 1 else AxisType.Explicit
    return Mesh(devices, axes, axis_types=(kind,) * len(axes))


def counted(f: Any, arguments: Any, mesh: Mesh) -> Counts:
    """Compile a function for the devices of a mesh. Arguments without a sharding lie on all devices."""
    whole = NamedSharding(mesh, P())
    arguments = jax.tree.map(lambda v: Shape(v.shape, v.dtype, sharding=v.sharding or whole), arguments)
    first = mesh.devices.flat[0]
    device = AbstractDevice(first.device_kind, first.num_cores, "tpu")
    within = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(within):
        lowered, begin = jax.jit(f).lower(*arguments), time.perf_counter()
        program = lowered.compile()
        seconds = time.perf_counter() - begin
    text, analysis = program.as_text(), program.cost_analysis()
    names = re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    moved, temporary = int(analysis["bytes accessed"]), program.memory_analysis().temp_size_in_bytes
    return Counts(moved, temporary, text.count('custom_call_target="tpu_custom_call"'), dict(Counter(names)), seconds)


def pruned(text: str, dtype: Any, axis: int, shape: tuple[int, ...] = (4096, 8192), backend: str = "auto") -> Any:
    """Return a function that prunes an array, and its arguments."""
    p, x = nm.parse_pruner(text), Shape(shape, dtype)

    def f(x: jax.Array, key: jax.Array, step: jax.Array, state: Any) -> jax.Array:
        return p(x, axis, nm.Ctx(key, step, state, kernels=pruning_kernels(backend)))

    return f, (x, Shape((2,), jnp.uint32), Shape((), jnp.int32), jax.eval_shape(lambda x: p.init(x, axis), x))


# ---- tables ----

ARRAYS = ("mse(2,4)", "mvue(2,4)", "soft(2,4)", "transposable(2,4)", "mse(8,16)")
STEPS = (*METHODS[1:], "fst()")
MESHES = {"v5e:2x4": (2, 4), "v6e:4x4": (4, 4)}


def tpu() -> Iterator[Table]:
    """Return the tables of ``bench tpu``."""
    if importlib.util.find_spec("libtpu") is None:
        raise Mistake("The compiler of TPUs is not installed: make test-tpu puts it into .venv/tpu, for PYTHONPATH.")
    version = importlib.metadata.version("libtpu")
    how = (
        f"Counted by the compiler of libtpu {version}, without a TPU: nothing ran. Bytes are those that it says a "
        "program reads and writes; moving an array into a TPU's fast memory counts too."
    )
    rows: dict[str, list[Any]] = {}
    for text in ARRAYS:
        for axis in (-2, -1):
            counts = [counted(*pruned(text, jnp.bfloat16, axis, backend=b), mesh_of("v5e")) for b in ("xla", "auto")]
            size = 4096 * 8192 * 2
            cells = [f"{v / size:.1f}" for both in counts for v in (both.moved, both.temporary)]
            rows[f"`{text}`, axis {axis}"] = cells
    head = ["", "bytes, by XLA", "temporary memory, by XLA", "bytes, by a kernel", "temporary memory, by a kernel"]
    yield Table("An array of 4096 x 8192 in bfloat16 on a v5e, in arrays", f"{how} A copy moves 2.", head, rows)
    for generation in ("v5e", "v6e"):
        dense, rows = counted(*step("dense", "auto"), mesh_of(generation)), {}
        for text in STEPS:
            cells = []
            for backend in ("xla", "auto") if generation == "v5e" else ("auto",):
                counts = counted(*step(text, backend), mesh_of(generation))
                cells += [counts.moved / dense.moved, counts.temporary / dense.temporary]
            rows[f"`{text}`"] = [None] * (4 - len(cells)) + cells
        note = (
            "Forward and backward pass in bfloat16, 4096 tokens, 2048 -> 8192 -> 2048. "
            f"Dense: {dense.moved / 1e6:,.0f} MB moved, {dense.temporary / 1e6:,.0f} MB of temporary memory."
        )
        yield Table(f"A feed-forward step on a {generation}, over dense", note, head, rows)
    rows = {}
    for name, sides in MESHES.items():
        mesh = mesh_of(name, sides, ("fsdp", "tensor"))
        dense = counted(*step("dense", "auto", mesh), mesh)
        for text in ("s_ste(2,4)", "y_w=ste(transposable(2,4))", "dw_g=rows(mvue(1,4))"):
            counts = counted(*step(text, "auto", mesh), mesh)
            exchanged = [str(sum(c.collectives.values())) for c in (dense, counts)]
            rows[f"{name}, `{text}`"] = [counts.moved / dense.moved, *exchanged]
    head = ["", "bytes of a device over dense", "collectives: dense", "pruned"]
    note = "The weights are cut along both axes of a mesh (fsdp, tensor) of explicit axes, and gathered along fsdp."
    yield Table("The same step on many devices", note, head, rows)
    dense, rows = counted(*passes("dense"), mesh_of("v5e")), {}
    for text in ("s_ste(2,4)", "fst()"):
        own = counted(*passes(text), mesh_of("v5e"))
        over = own.moved / dense.moved, own.temporary / dense.temporary, own.seconds / dense.seconds
        rows[f"`{text}`"] = [*over, str(own.kernels)]
    head = ["", "bytes over dense", "temporary memory", "time to compile", "kernels"]
    note = "Forward and backward pass in bfloat16. The linear layers of blocks are pruned."
    yield Table(
        "GPT-2 124M on a v5e, 8 x 1024 tokens, over dense", f"{note} Dense: {dense.moved / 1e9:.1f} GB.", head, rows
    )


def passes(text: str) -> Any:
    """Return the gradient of GPT-2 for 8 texts, which a v5e has the memory for, and its arguments."""
    make, example = LARGE["GPT-2 124M, 32 x 1024 tokens"]

    def made() -> nnx.Module:
        model = make()
        return model if text == "dense" else nm.nnx.sparsify(model, recipe(text))

    graph, params, rest = nnx.split(nnx.eval_shape(made), nnx.Param, ...)
    f = lambda params, rest, x: jax.grad(lambda p: loss(nnx.merge(graph, p, rest), x))(params)
    return f, (params, rest, Shape((8, *example.shape[1:]), example.dtype))
