"""The figures of the steps, read from the device while later steps run."""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments.errors import Diverged
from experiments.scale import processes

AHEAD = 16  # steps that the host may be in front of the device


def supplied(feed: Iterable, warn: Callable[[float], None]) -> Iterator:
    """Yield the batches of a feed. Warn once if the steps wait for batches most of the time.

    Args:
      feed: Yields batches.
      warn: Called once, with the number of batches a second.
    """
    began, waited, warned = time.monotonic(), 0.0, False
    feed = iter(feed)
    for count in itertools.count(1):
        asked = time.monotonic()
        try:
            with jax.profiler.TraceAnnotation("input"):  # for a profile; without one it costs nothing
                arrays = next(feed)
        except StopIteration:
            return
        now = time.monotonic()
        waited += now - asked
        if not warned and count > AHEAD and now - began > 10 and waited > (now - began) / 2:
            warned = True
            warn(count / (now - began))
        yield arrays


def fetched(figures: Any, count: int) -> list:
    """Return figures of the device as floats, for each run.

    Args:
      figures: A tree of scalars if there is one run, of arrays (runs,) if there are several.
      count: The number of runs.

    Returns:
      For each run a tree of floats. All are fetched at once.
    """
    figures = jax.device_get(figures)
    return [jax.tree.map(lambda value, run=run: float(np.ravel(value)[run]), figures) for run in range(count)]


def mean(tables: Collection[dict[str, float]]) -> dict[str, float]:
    """Return the mean of tables, name by name. All tables have the same names.

    >>> mean([{"loss": 1.0}, {"loss": 3.0}])
    {'loss': 2.0}
    """
    names = next(iter(tables))
    return {name: math.fsum(table[name] for table in tables) / len(tables) for name in names}


class Meter:
    """Takes in the figures of steps without waiting for them, and gives means over windows of steps.

    Args:
      window: Number of steps in a window.
      runs: The runs that go on, by their numbers. `pending` of each has the figures of the steps since its last line of
        metrics. `drop` takes out a run that diverged.
      report: Called as `report(step, means, rate)` at the end of each window: the means of each run, and the steps a
        second, or None if no step was timed. The rate leaves out compilation and what is done inside `untimed`.
      drop: Called as `drop(number, error)` if the loss or the gradient norm of a run is not finite.
    """

    def __init__(
        self,
        window: int,
        runs: Mapping[int, Any],
        report: Callable[[int, dict[int, dict], float | None], None],
        drop: Callable[[int, Diverged], None],
    ):
        self.window, self.runs, self.report, self.drop = window, runs, report, drop
        self.first: float | None = None  # when the first step ended
        self.last: int | None = None  # the last step whose figures are taken in
        self._count = len(runs)
        self._waiting: deque[tuple[int, dict]] = deque()
        self._clock, self._timed = 0.0, 0  # when the timed steps began, and their number

    def push(self, step: int, shown: dict) -> None:
        """Give the figures of a step, which may still run on the device."""
        self._waiting.append((step, shown))
        self.settle(AHEAD)

    def settle(self, leave: int = 0) -> None:
        """Take in the steps that are done. Wait until at most `leave` steps are left."""
        while self._waiting and (len(self._waiting) > leave or self._next_is_done()):
            self._take(*self._waiting.popleft())

    def _next_is_done(self) -> bool:
        # Several processes must all see a divergence after the same step, so they do not look ahead.
        return processes.count() == 1 and self._waiting[0][1]["loss"].is_ready()

    def _take(self, step: int, shown: dict) -> None:
        for number, figures in enumerate(fetched(shown, self._count)):
            if number in self.runs:
                self._check(number, step, figures)
        if self.first is None:
            self.first = self._clock = time.monotonic()
        else:
            self._timed += 1
        self.last = step
        if (step + 1) % self.window == 0:  # by the step's number: a run that was continued has the same windows
            self.flush()

    def _check(self, number: int, step: int, figures: dict[str, float]) -> None:
        """Keep the figures of a run, or drop the run if they are not finite."""
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(figures[name]):
                before = "the first step of this process" if self.last is None else f"step {self.last + 1:,} was finite"
                text = f"the {name.replace('_', ' ')} is {figures[name]} at step {step + 1:,} ({before})"
                self.drop(number, Diverged(text))
                return
        self.runs[number].pending.append(figures)

    def flush(self) -> None:
        """Report the means of the window so far, and begin a new window."""
        means = {number: mean(run.pending) for number, run in self.runs.items() if run.pending}
        if not means or self.last is None:
            return
        now = time.monotonic()
        rate = self._timed / (now - self._clock) if self._timed else None
        for run in self.runs.values():
            run.pending = []
        self._clock, self._timed = now, 0
        self.report(self.last + 1, means, rate)

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the time that is spent inside out of the rate."""
        self.settle()
        begin = time.monotonic()
        with jax.profiler.TraceAnnotation("untimed"):
            yield
        self._clock += time.monotonic() - begin
