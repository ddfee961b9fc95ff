"""Functions timed in turn, what they need, and the tables of what was found."""

import ctypes
import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import turns
from experiments.training.provenance import processor


class Table(NamedTuple):
    """A table.

    Attributes:
      title: The title.
      note: The text between the title and the table.
      head: The columns' titles.
      rows: For each name its cells: texts, numbers, or None for an empty one.
    """

    title: str
    note: str
    head: Sequence[str] = ()
    rows: Mapping[str, Sequence[str | float | None]] = {}

    def __str__(self) -> str:
        lines = [f"## {self.title}", "", self.note, ""]
        if self.head:
            cells = [self.head, *([name, *map(_shown, values)] for name, values in self.rows.items())]
            first, *others = ("| " + " | ".join(line) + " |" for line in cells)
            lines += [first, "|" + "---|" * len(self.head), *others, ""]
        return "\n".join(lines)


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


def in_turn(
    calls: Mapping[Any, Callable],
    rounds: int,
    seconds: float = 0.03,
    once: float = math.inf,
    wait: Callable = jax.block_until_ready,
) -> dict[Any, list[float]]:
    """Return the seconds of one call of each, round by round. All are timed in turn.

    Args:
      calls: The functions.
      rounds: How many rounds.
      seconds: About the time that the calls of one function take in a round. A function that takes more than 30 times
        as long is called once.
      once: A function that takes longer is timed in the first round only.
      wait: Waits for the last result of a round. A device works in order, so the others are ready then too.
    """
    with turns.alone():
        for call in calls.values():
            wait(call())  # compiles it, if it is not compiled
        counts, times = {}, {name: [] for name in calls}
        for name, call in calls.items():
            slow = _seconds(call, 1, wait) > 30 * seconds
            counts[name] = 1 if slow else min(max(round(seconds / _seconds(call, 3, wait)), 1), 1000)
        for i in range(rounds):
            for name, call in calls.items():
                known = i and times[name][0] > once
                times[name].append(times[name][0] if known else _seconds(call, counts[name], wait))
        return times


def _seconds(call: Callable, count: int, wait: Callable) -> float:
    """Return the seconds of one call, as a mean over some without a pause."""
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / count


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return how many times as long as a base something takes: the median of the rounds' ratios."""
    return statistics.median(t / b for t, b in zip(times, base, strict=True))


def over(times: Sequence[float], base: Sequence[float]) -> str:
    """Return the ratio of some times to those of a base: the median over the rounds, with the quartiles, as a text."""
    ratios = [t / b for t, b in zip(times, base, strict=True)]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def going_on(step: Callable, state: Any, *arguments: Any) -> Callable[[], Any]:
    """Return a step from a state to the next one as a call without arguments. Each call goes on from the last."""
    now = [state]

    def call() -> Any:
        now[0], shown = step(now[0], *arguments)
        return shown

    return call


def copy(x: jax.Array) -> jax.Array:
    """Read an array, and write one of nearly equal values."""
    return x * jnp.asarray(1 + 1 / 128, x.dtype)  # exact in bfloat16. There 1.0001 is 1, and XLA removes the product


def cublas_only() -> dict[str, bool] | None:
    """Return options of XLA's compiler that turn off its search among Triton's kernels on a GPU. It takes minutes."""
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None


def compiled(programs: Mapping[Any, Sequence[Any]]) -> dict:
    """Compile programs side by side. If a program fails, its exception is returned in its place.

    Args:
      programs: For each name a jitted function and its arguments.
    """

    def one(program: Sequence[Any]) -> Any:
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
    before = resident("VmRSS")
    jax.block_until_ready(call())
    return resident("VmHWM") - before


def resident(name: str, process: int | str = "self") -> int:
    """Return a number of bytes in the status of a process of Linux, such as VmRSS, its resident memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def in_short(error: BaseException) -> str:
    """Return an error's type, and 300 characters of its message."""
    return f"{type(error).__name__}: {str(error)[:300]}"
