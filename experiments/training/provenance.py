"""The origin of results: the versions of the packages, the commit of this repository, the machine, the time."""

import os
import platform
import subprocess
from datetime import datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def now() -> str:
    """Return the local time as ISO text, with its time zone, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    import nmjax  # with all of JAX

    own = {"python": platform.python_version(), "nmjax": nmjax.__version__}  # an editable install may name an older one
    return own | {name: metadata.version(name) for name in PACKAGES}


def machine() -> dict[str, str | int]:
    """Return the processor, and the number of threads that XLA computes with on it: they change the order of sums."""
    threads = os.environ.get("NPROC", "")
    return {"processor": processor(), "threads": int(threads) if threads.isdecimal() else _cores()}


def processor() -> str:
    """Return the name of the processor."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    found = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git() -> dict | None:
    """Return the commit of this repository and whether files differ from it, or None outside a repository.

    Files of results do not count as different: a sweep appends to them while it runs.
    """
    try:
        return {
            "commit": _git("rev-parse", "HEAD"),
            "dirty": bool(_git("status", "--porcelain", "--", ".", ":!*results/*")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
