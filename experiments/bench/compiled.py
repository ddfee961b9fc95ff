"""What XLA makes of pruning on a device that need not be there: bytes, memory and kernels of compiled programs."""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from experiments.bench.cases import COLUMNS, METHODS, SIDES, TOKENS, WIDTH, Case, arrays, step
from experiments.bench.measure import Table
from experiments.errors import Mistake

# stream_executor.GpuTargetConfigProto, what XLA's compiler asks a GPU for.
A100 = """
platform_name: "CUDA" device_description_str: "NVIDIA A100-SXM4-80GB" dnn_version_info { major: 9 minor: 10 }
gpu_device_info { name: "NVIDIA A100-SXM4-80GB" cuda_compute_capability { major: 8 feature_extension: NONE }
  core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 memory_bandwidth: 2039040000000 l2_cache_size: 41943040
  device_memory_size: 85100068864 device_address_bits: 64 threads_per_warp: 32 threads_per_block_limit: 1024
  threads_per_core_limit: 2048 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" }
"""
SHARED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")  # instructions that are no kernel
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)")


class Cost(NamedTuple):
    """The bytes that the kernels of a program read and write, the bytes of its temporary memory, and its kernels."""

    bytes: int
    memory: int
    kernels: int


def a100() -> Callable[[Case], Cost]:
    """Return a function that compiles a program for an A100, and counts."""
    try:
        there = topologies.get_topology_desc(platform="cuda", target_config=A100, topology="1x1x1")
    except Exception as error:  # whatever a plugin that is missing or broken raises
        raise Mistake(
            "counts --device a100 needs XLA's compiler for CUDA: pip install jax-cuda13-plugin jax-cuda13-pjrt in the "
            "version of jax, and set JAX_PLATFORMS=cpu."
        ) from error
    mesh = topologies.make_mesh(there, (1,), ("device",))
    return partial(cost, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


DEVICES = {"a100": ("NVIDIA A100", a100)}


def cost(case: Case, sharding: Any) -> Cost:
    """Compile a program, and count. A kernel reads each of its operands once, and writes its results once."""
    function, arguments = case
    placed = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding), arguments)
    program = jax.jit(function).trace(*placed).lower().compile()
    types, moved = {}, []
    for line in program.as_text().partition("\nENTRY ")[2].splitlines():
        found = INSTRUCTION.match(line)
        if found is not None:
            name, types[found[1]], kind, operands = found[1], found[2], found[3], found[4]
            read = [_bytes(types[operand]) for operand in set(re.findall(r"%([\w.\-]+)", operands))]
            moved += [] if kind in SHARED else [sum(read) + _bytes(types[name])]
    return Cost(sum(moved), program.memory_analysis().temp_size_in_bytes, len(moved))


def _bytes(kind: str) -> int:
    """Return the bytes of a type of HLO.

    >>> _bytes("(bf16[8,4]{1,0}, pred[], f8e4m3fn[2]{0})")
    67
    """
    size = lambda name: 1 if name == "pred" else max(int(re.sub(r"\D*(\d+).*", r"\1", name)) // 8, 1)
    found = re.findall(r"(pred|bf16|[sfuc]\d+\w*)\[([\d,]*)\]", kind)
    return sum(size(name) * math.prod(int(side) for side in sides.split(",") if side) for name, sides in found)


def counts(device: str) -> Iterator[Table]:
    """Return the tables of ``bench counts --device``: pruned arrays, and a feed-forward step."""
    name, compiler = DEVICES[device]
    count, rows = compiler(), {}
    for text, cases in arrays():
        rows[text] = []
        for case, (dtype, _) in zip(cases, COLUMNS, strict=True):
            one = math.prod(SIDES) * jnp.dtype(dtype).itemsize
            found = count(case)
            rows[text].append(f"{found.bytes / one:.2f}, {found.memory / one:.2f}, {found.kernels}")
    about = f"Compiled by XLA for an {name}, not run on hardware. No kernel of nmjax is used."
    yield Table(
        "Pruned arrays",
        f"{about} For an array of {SIDES[0]} x {SIDES[1]}: the bytes that kernels read and write, the bytes of "
        "temporary memory, both over those of the array, and the number of kernels. A copy is 2, 0, 1.",
        ["", *(f"{jnp.dtype(dtype).name}, axis {axis}" for dtype, axis in COLUMNS)], rows,
    )  # fmt: skip
    costs = {text: count(step(text)) for text in METHODS}
    dense = costs["dense"]
    yield Table(
        "Feed-forward step",
        f"{about} Forward and backward of {TOKENS} tokens, {WIDTH} -> {4 * WIDTH} -> {WIDTH}, in bfloat16, over the "
        "dense step. All products are dense.",
        ["", "bytes", "temporary memory", "kernels", "absolute"],
        {
            text: [
                own.bytes / dense.bytes, own.memory / dense.memory, f"{own.kernels}",
                f"{own.bytes / 2**20:.0f} MiB, {own.memory / 2**20:.0f} MiB",
            ]
            for text, own in costs.items()
        },
    )  # fmt: skip
