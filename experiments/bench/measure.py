"""How things are timed and tabled."""

import datetime
import os
import platform
import time
from collections.abc import Callable
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
