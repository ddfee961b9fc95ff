"""Timing of functions, and tables of the times."""

import ctypes
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import turns
from experiments.training.provenance import processor

NEAR_ONE = 1 + 1 / 128  # exact in bfloat16. There 1.0001 rounds to 1, and XLA removes the product


def best_times(calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Return the best time of each call in seconds. All are timed in turn. A call of half a second is timed once."""
    for call in calls.values():
        jax.block_until_ready(call())
    best = dict.fromkeys(calls, float("inf"))
    for i in range(rounds):
        for name, call in calls.items():
            if i and best[name] > 0.5:
                continue
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def in_turn(
    calls: dict[str, Callable], rounds: int, seconds: float = 0.03, wait: Callable = jax.block_until_ready
) -> dict[str, list[float]]:
    """Return the seconds of one call of each, round by round. All are timed in turn.

    Args:
      calls: The functions.
      rounds: How many rounds.
      seconds: About the time that the calls of one function take in a round. A function that takes more than 30 times
        as long is called once.
      wait: Waits for the last result of a round. A device works in order, so the others are ready then too.
    """
    with turns.alone():
        for call in calls.values():
            wait(call())  # compiles it, if it is not compiled
        return _in_turn(calls, rounds, seconds, wait)


def _in_turn(calls: dict[str, Callable], rounds: int, seconds: float, wait: Callable) -> dict[str, list[float]]:
    counts = {}
    for name, call in calls.items():
        slow = _seconds(call, 1, wait) > 30 * seconds
        counts[name] = 1 if slow else min(max(round(seconds / _seconds(call, 3, wait)), 1), 1000)
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call, counts[name], wait))
    return times


def _seconds(call: Callable, count: int, wait: Callable) -> float:
    """Return the seconds of one call, as a mean over some without a pause."""
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / count


def speedup(times: list[float], base: list[float]) -> float:
    """Return how many times as fast as the base a function is: the median of the rounds' ratios."""
    return statistics.median(b / t for t, b in zip(times, base, strict=True))


def over(times: list[float], base: list[float]) -> str:
    """Return the ratio of some times to those of a base: the median over the rounds, with the quartiles, as a text."""
    ratios = [t / b for t, b in zip(times, base, strict=True)]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def cublas_only() -> dict[str, bool] | None:
    """Return options of XLA's compiler that turn off its search among Triton's kernels on a GPU. It takes minutes."""
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None


def compiled(programs: dict) -> dict:
    """Compile programs side by side. If a program fails, its exception is returned in its place.

    Args:
      programs: For each name a jitted function and its arguments.
    """

    def one(program):
        jitted, *arguments = program
        try:
            return jitted.lower(*arguments).compile()
        except Exception as error:  # whatever compilers raise: the others are still wanted
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(programs, pool.map(one, programs.values()), strict=True))


def peak_bytes(call: Callable) -> int | None:
    """Return the bytes of resident memory that a call adds at its peak; None if the platform does not tell it."""
    peak = Path("/proc/self/clear_refs")  # of Linux: writing 5 begins a new peak
    if not peak.exists():
        return None
    jax.block_until_ready(call())
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which keeps what was freed
    if trim is not None:
        trim(0)
    peak.write_text("5")
    before = _resident("VmRSS")
    jax.block_until_ready(call())
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Return a number of bytes in the status of the process."""
    return next(int(line.split()[1]) * 1024 for line in _lines("/proc/self/status") if line.startswith(name))


def in_short(error: BaseException) -> str:
    """Return an error's type, and 300 characters of its message."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def in_copies(functions: dict[str, Callable], x: jax.Array, rounds: int) -> dict[str, float]:
    """Return the time of each function of x, divided by that of a copy, ``x * NEAR_ONE``."""
    copy = lambda x: x * jnp.asarray(NEAR_ONE, x.dtype)
    calls = {name: partial(jax.jit(f), x) for name, f in {"copy": copy, **functions}.items()}
    times = best_times(calls, rounds)
    return {name: times[name] / times["copy"] for name in functions}


def markdown(title: str, note: str, rows: dict[str, list], head: list[str]) -> str:
    """Return a table with its title and a note.

    Args:
      title: The title.
      note: The text between the title and the table.
      rows: For each name its cells: texts, numbers, or None for an empty one.
      head: The columns' titles.
    """
    lines = [f"## {title}", "", note, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join([name, *map(_shown, values)]) + " |" for name, values in rows.items()]
    return "\n".join([*lines, ""])


def _shown(value: str | float | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.2f}"


def machine() -> str:
    """Return the date, the device and the versions, for the head of a file of results."""
    device = jax.devices()[0]
    name = processor() if device.platform == "cpu" else device.device_kind
    devices = f"{name}, {len(jax.devices())} device(s), {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}"
    return f"{datetime.date.today()} · {devices} · {versions}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
