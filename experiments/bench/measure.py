"""How things are timed and tabled."""

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
import numpy as np


def best_times(calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """The best time of each, all of them timed in turn. What takes half a second is timed once."""
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
    """Seconds a call of each, round by round, all of them timed in turn. In a round each is called as often as takes about
    ``seconds``, and the last result is waited for: a device does what it is given in order."""
    counts = {}
    for name, call in calls.items():
        _seconds(call, 1, wait)
        counts[name] = min(max(round(seconds / _seconds(call, 3, wait)), 1), 1000)
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call, counts[name], wait))
    return times


def _seconds(call, count, wait):
    """Seconds a call, of so many without a pause."""
    start = time.perf_counter()
    for _ in range(count):
        made = call()
    wait(made)
    return (time.perf_counter() - start) / count


def speedup(times: list[float], base: list[float]) -> float:
    """How many times faster than the base: the median of what every round says."""
    return statistics.median(b / t for t, b in zip(times, base, strict=True))


def compiled(programs: dict) -> dict:
    """Jitted functions and their arguments, compiled side by side; in the place of one that fails, its exception."""

    def one(program):
        jitted, *arguments = program
        try:
            return jitted.lower(*arguments).compile()
        except Exception as error:  # whatever compilers raise: the others are still wanted
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(programs, pool.map(one, programs.values()), strict=True))


def in_short(error: BaseException) -> str:
    """What went wrong: the type, and 300 characters."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def in_copies(functions: dict[str, Callable], x, rounds: int) -> dict[str, float]:
    """What each function of x costs, in copies of x."""
    calls = {name: partial(jax.jit(f), x) for name, f in {"copy": lambda x: x * 1.0001, **functions}.items()}
    times = best_times(calls, rounds)
    return {name: times[name] / times["copy"] for name in functions}


def markdown(title: str, note: str, rows: dict[str, list], head: list[str]) -> str:
    show = lambda v: "" if v is None else v if isinstance(v, str) else f"{v:.2f}"
    lines = [f"## {title}", "", note, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join([name, *map(show, values)]) + " |" for name, values in rows.items()]
    return "\n".join([*lines, ""])


def machine() -> str:
    """Where and when, for the head of a results file."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    device = jax.devices()[0]
    return (
        f"{datetime.date.today()} · {device.device_kind if device.platform != 'cpu' else cpu}, {len(jax.devices())} device(s), "
        f"{os.cpu_count()} cores · Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}"
    )


def _lines(path):
    return Path(path).read_text().splitlines() if Path(path).exists() else []
