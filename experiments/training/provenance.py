"""The origin of results: the versions of the packages, the commit of this repository, the time."""

import platform
import subprocess
from datetime import datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("nmjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def now() -> str:
    """Return the local time as ISO text, with its time zone, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


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
