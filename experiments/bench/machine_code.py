"""Machine code of the kernels that pack, compiled for a GPU that need not be there: instructions, bytes and registers.

The kernels have no loops: a program takes 64 x 64 values, and each of its 128 threads takes 32. So the instructions of
the machine code over 32 are those that are issued for each value.
"""

import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from experiments.bench.measure import Table
from experiments.errors import Mistake
from nmjax.kernels import packing, tiles
from nmjax.kernels.limits import Copy
from nmjax.pruners import identity, mse, mvue, mvue_approx, soft, transposable

H200 = AbstractMesh(
    (1,),
    ("x",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"),
)
# stream_executor.GpuTargetConfigProto, what XLA's compiler asks a GPU for.
TARGET = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9
feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536 registers_per_block_limit: 65536
thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
platform_version: "Compute Capability 9.0a" model_str: "sm_9.0a" device_address_bits: 64 name: "NVIDIA H200"
driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
dnn_version: "9.10.0" } platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
SIDE = 1024  # of the arrays that are packed
LANES = 132 * 128 * 1.98e9  # instructions of single threads that an H100 or H200 issues in a second
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?!NOP\b)[A-Z]")

Program = tuple[Any, ...]
"""A function, and the shapes of its arguments."""

_wide = lambda pruner, axis: Copy(None, packed=True, pruner=pruner, axis=axis)
_DRAWN = Copy("e5m2", packed=True, pruner=mvue(2, 4), axis=-2, rounding="random")
_SHRUNK = Copy("e4m3", packed=True, pruner=soft(2, 4), axis=-2), Copy("e5m2", pruner=soft(2, 4), axis=-2)
KERNELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        f"{pruner} along {axis}": (packing.compress, {"axis": axis, "pruner": pruner})
        for pruner in (mse(2, 4), mvue(2, 4), mvue_approx(2, 4), soft(2, 4), identity)
        for axis in (-1, -2)
    },
    **{
        f"{p} along {axis}, {q} along {-3 - axis}": (tiles.copies, {"wanted": (_wide(p, axis), _wide(q, -3 - axis))})
        for p, axis, q in (
            (transposable(2, 4), -2, transposable(2, 4)),
            (mse(2, 4), -2, mse(2, 4)),
            (soft(2, 4), -2, mse(2, 4)),
            (mvue(2, 4), -1, mvue(2, 4)),
        )
    },
    "x of S-STE in FP8": (tiles.copies, {"wanted": (Copy("e4m3"), Copy("e5m2", turned=True))}),
    "g of S-STE in FP8": (tiles.copies, {"wanted": (Copy("e5m2"), _DRAWN)}),
    "w of S-STE in FP8": (tiles.copies, {"wanted": _SHRUNK}),
}


class Code(NamedTuple):
    """The machine code of a kernel.

    Attributes:
      instructions: Its instructions, without those that do nothing.
      registers: The registers of a thread.
      spilt: The bytes of registers that it keeps in memory.
    """

    instructions: int
    registers: int
    spilt: int


def program(make: Callable[..., Any], options: Mapping[str, Any]) -> Program:
    """Return a kernel that packs, as a function of arrays, and their shapes."""
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    x, wanted = shape(jnp.bfloat16, 1, SIDE, SIDE), options.get("wanted", ())
    words = [4] * len(wanted) or [4 if options["pruner"] == mvue_approx(2, 4) else 2]
    scales = (1, 1 + len(wanted)) if wanted else (1,)
    scalars = [*(shape(jnp.uint32, 1, n) for n in words), shape(jnp.float32, *scales), shape(jnp.int32, 3)]
    h, options = [x] * ("activation" in options), {**options, "whole": (1, SIDE, SIDE)}
    return (lambda *arrays: jax.tree.leaves(make(*arrays, **options))), *h, x, *scalars


def disassembler() -> Path | None:
    """Return the folder of CUDA in the packages of Python, with nvdisasm in it; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) / "cu13" for p in (spec.submodule_search_locations or ())] if spec else []
    return next((root for root in roots if (root / "bin" / "nvdisasm").exists()), None)


def dump(programs: Mapping[str, Program], folder: Path, target: str = TARGET, architecture: Any = (9, 0)) -> None:
    """Compile programs, and write what the compiler says of each, and its code, to a folder of its name.

    Args:
      programs: The programs.
      folder: The folder of the folders.
      target: What XLA's compiler is told of the GPU.
      architecture: The architecture that Mosaic assumes.
    """
    os.environ.update({f"MOSAIC_GPU_DUMP_{kind}": "1" for kind in ("PTX", "PTXAS", "SASS")})
    import jax.experimental.mosaic.gpu

    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(disassembler())  # which importing Mosaic has set
    jax.experimental.mosaic.gpu.utils._infer_arch = lambda: architecture  # without a device it is Hopper's
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    there = NamedSharding(mesh, PartitionSpec())
    put = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=there)
    for name, (f, *shapes) in programs.items():
        own = folder / name
        own.mkdir(parents=True)
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(own)
        with jax.sharding.use_abstract_mesh(H200):
            jax.jit(f).trace(*jax.tree.map(put, shapes)).lower().compile()


def read(folder: Path) -> Code:
    """Return what a folder of `dump` says of its program, which is one kernel without branches."""
    said, code = ("".join(p.read_text() for p in folder.glob(f"*{kind}*")) for kind in ("ptxas", "sass"))
    body = code.split("EXIT")
    if len(body) != 2 or "BRA" in body[0] or "CALL" in body[0]:
        raise ValueError(f"{folder.name}: its machine code has branches, or is that of several kernels.")
    find = lambda pattern: [int(number) for number in re.findall(pattern, said)]
    registers, spilt = find(r"Used (\d+) registers"), find(r"(\d+) bytes spill")
    return Code(len(INSTRUCTION.findall(body[0])) + 1, max(registers), sum(spilt))


def moved(of: Program) -> float:
    """Return the bytes that a program reads and writes for each value of its largest argument."""
    f, *shapes = of
    size = lambda v: math.prod(v.shape) * v.dtype.itemsize
    return sum(map(size, [*shapes, *jax.tree.leaves(jax.eval_shape(f, *shapes))])) / SIDE**2


def per_value(code: Code) -> float:
    """Return the instructions for each value. A thread takes 32."""
    return code.instructions / 32


def counts() -> Iterator[Table]:
    """Return the table of ``bench counts --device h200``."""
    if disassembler() is None:
        raise Mistake(
            "counts --device h200 needs XLA's compiler for CUDA and nvdisasm: "
            "pip install --no-deps -r requirements-cuda.txt, and set JAX_PLATFORMS=cpu."
        )
    programs = {name: program(*of) for name, of in KERNELS.items()}
    with tempfile.TemporaryDirectory() as folder:
        dump(programs, Path(folder))
        codes = {name: read(Path(folder, name)) for name in programs}
    rows = {}
    for name, code in codes.items():
        each, forms = moved(programs[name]), len(KERNELS[name][1].get("wanted", ())) or 1
        room = LANES / 3e12 * each
        rows[name] = [
            per_value(code),
            per_value(code) / forms,
            f"{each:.3f}",
            room,
            f"{code.registers}",
            f"{code.spilt}",
        ]
    yield Table(
        "Kernels that pack, in machine code",
        "Compiled for an NVIDIA H200, not run on hardware. For each 16-bit value: the instructions of all forms that a "
        "kernel writes, and of one of them, and the bytes that it reads and writes. The next column has the "
        "instructions that fit into the time in which these bytes move at 3 TB/s: 132 multiprocessors issue 128 in a "
        "cycle, at 1.98 GHz. Some instructions are issued at half of this rate or less.",
        ["", "instructions", "of one form", "bytes", "instructions at 3 TB/s", "registers", "spilled bytes"], rows,
    )  # fmt: skip
