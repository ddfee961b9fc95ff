"""The use of devices: memory, and the peak FLOP per second that model FLOPs utilisation (MFU) refers to."""

import ctypes
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

import jax
from jax.sharding import Mesh

MEMORY = {  # field of a line of metrics -> what it is
    "device_memory": "of the fullest device",
    "process_memory": "of the process",  # if the backend does not report that of a device
}

KEPT = {  # option of glibc's mallopt -> value
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: free memory is not returned
    -4: 0,  # M_MMAP_MAX: large arrays share the heap; else each has its own memory, which is returned
    -8: 1,  # M_ARENA_MAX: one arena for all threads, because the others cannot grow to large arrays
}

# Peaks of dense products in TFLOP/s: of 16-bit operands, and of float32 operands, which XLA rounds to TF32 on these
# GPUs and to bfloat16 on TPUs, unless jax_default_matmul_precision says otherwise. Where a vendor's table says "with
# sparsity", this is half of it. Sources: NVIDIA's data sheets of the A100, H100, H200, L40S and HGX B200, and its white
# paper on the Ada architecture (RTX 4090, products that add in float32); "TPU architecture" in the documentation of
# Google Cloud (TPU v4, v5e, v5p, v6e). A part of a GPU (MIG) is not listed.
PEAKS = {  # pattern of the whole device_kind -> (bfloat16, float32)
    r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": (312, 156),
    r"NVIDIA H100 \d+GB HBM3": (989.5, 494.7),
    r"NVIDIA H100 PCIe": (756.5, 378),
    r"NVIDIA H100 NVL": (835.5, 417.5),
    r"NVIDIA H200": (989.5, 494.7),
    r"NVIDIA H200 NVL": (835.5, 417.5),
    r"NVIDIA B200": (2250, 1125),
    r"NVIDIA L40S": (362, 183),
    r"NVIDIA GeForce RTX 4090": (165.2, 82.6),
    r"TPU v4": (275, 275),
    r"TPU v5 lite|TPU v5e": (197, 197),
    r"TPU v5p?": (459, 459),
    r"TPU v6 lite|TPU v6e": (918, 918),
}


def named(count: int = 0) -> str:
    """Return a number of devices with their kind, as "1 x cpu". Without a number all devices are meant."""
    return f"{count or jax.device_count()} x {jax.devices()[0].device_kind}"


def peak_flops(kind: str, dtype: str) -> float | None:
    """Return the peak FLOP per second of a device for dense products, or None if it is not known.

    Args:
      kind: Its `jax.Device.device_kind`.
      dtype: What layers compute in: "bfloat16" or "float32".

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16"), peak_flops("cpu", "float32")
    (989500000000000.0, None)
    """
    peaks = next((peaks for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, kind)), None)
    if peaks is None or dtype not in ("bfloat16", "float32"):
        return None
    return peaks[dtype == "float32"] * 1e12


def peak_of(mesh: Mesh, dtype: str) -> float | None:
    """Return the peak of all devices of a mesh together, or None if it is not known. See `peak_flops`."""
    peak = peak_flops(mesh.devices.flat[0].device_kind, dtype)
    return None if peak is None else peak * mesh.size


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, and return whether it does.

    It does nothing without glibc, or if a plugin of JAX for another device is installed and JAX_PLATFORMS is not cpu.
    XLA allocates the temporary memory of a step anew at every step. By default glibc returns it to the system at the
    end of the step. Then the next step touches new pages, and the system clears each of them, which can take 40 % of
    the time of a step. Call this before JAX starts its devices.
    """
    accelerated = entry_points(group="jax_plugins") or importlib.util.find_spec("libtpu")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or (accelerated and os.environ.get("JAX_PLATFORMS") != "cpu"):
        return False
    return all(mallopt(option, value) for option, value in KEPT.items())


def peak_memory(devices: Sequence[jax.Device] | None = None) -> dict[str, int]:
    """Return the peak memory in bytes under its name in `MEMORY`.

    Args:
      devices: The devices. The fullest one counts. By default they are those of this process.
    """
    told = [device.memory_stats() or {} for device in (jax.local_devices() if devices is None else devices)]
    peaks = [stats["peak_bytes_in_use"] for stats in told if "peak_bytes_in_use" in stats]
    if peaks:
        return {"device_memory": max(peaks)}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"process_memory": resident if sys.platform == "darwin" else 1024 * resident}
