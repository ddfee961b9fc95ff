"""What the steps say, taken in while later ones run."""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

import jax
import numpy as np

from experiments.errors import Diverged
from experiments.scale import processes

AHEAD = 16  # steps that the host may be in front of the device


def supplied(feed: Iterable, tell: Callable[[float], None]) -> Iterator:
    """The batches of a feed; ``tell`` is given their rate once, if the steps wait for them most of the time."""
    began, waited, told = time.monotonic(), 0.0, False
    feed = iter(feed)
    for count in itertools.count(1):
        asked = time.monotonic()
        try:
            arrays = next(feed)
        except StopIteration:
            return
        now = time.monotonic()
        waited += now - asked
        if not told and count > AHEAD and now - began > 10 and waited > (now - began) / 2:
            told = True
            tell(count / (now - began))
        yield arrays


def fetched(figures, count: int) -> list:
    """Figures of the device as numbers, of each of so many runs: in arrays, where there are several. Fetched at once."""
    figures = jax.device_get(figures)
    of = lambda number: jax.tree.map(lambda value: float(np.ravel(value)[number]), figures)
    return [of(number) for number in range(count)]


def mean(tables: Collection[dict[str, float]]) -> dict[str, float]:
    """Of what all of them have."""
    return {name: math.fsum(table[name] for table in tables) / len(tables) for name in next(iter(tables))}


class Meter:
    """Takes steps' figures as they are done, without waiting for them, and gives means over windows of them.

    ``runs`` are those that go on, by their numbers, and ``seen`` of each is what its steps since the last line said, those
    before it went on too. ``tell(step, means, rate)`` gets the means of each and the rate of steps, which leaves out compiling
    and what is done aside; ``lose(number, error)`` is told of a run that diverged.
    """

    def __init__(self, window: int, runs: dict, tell, lose):
        self.window, self.runs, self.tell, self.lose = window, runs, tell, lose
        self.first, self.last = None, None  # when the first step was done, and which was the last
        self._count, self._waiting = len(runs), deque()
        self._clock, self._timed = 0.0, 0

    def push(self, step: int, shown: dict) -> None:
        self._waiting.append((step, shown))
        self.settle(AHEAD)

    def settle(self, leave: int = 0) -> None:
        """Take in the steps that are done; wait until at most so many are not."""
        while self._waiting and (len(self._waiting) > leave or self._done()):
            self._take(*self._waiting.popleft())

    def _done(self) -> bool:
        """Whether the next is; with several processes that is not asked, for all are to see it after the same step."""
        return processes.count() == 1 and self._waiting[0][1]["loss"].is_ready()

    def _take(self, step: int, shown: dict) -> None:
        for number, figures in enumerate(fetched(shown, self._count)):
            if number in self.runs:
                self._look(number, step, figures)
        if self.first is None:
            self.first = self._clock = time.monotonic()
        else:
            self._timed += 1
        self.last = step
        if (step + 1) % self.window == 0:  # by the step's number, so that a run that goes on has the same windows
            self.flush()

    def _look(self, number: int, step: int, figures: dict[str, float]) -> None:
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(figures[name]):
                before = "the first step" if self.last is None else f"step {self.last:,} was finite"
                what = f"the {name.replace('_', ' ')} is {figures[name]} at step {step:,} ({before})"
                self.lose(number, Diverged(what))
                return
        self.runs[number].seen.append(figures)

    def flush(self) -> None:
        """Give the means of the window as far as it goes."""
        means = {number: mean(run.seen) for number, run in self.runs.items() if run.seen}
        if not means:
            return
        now = time.monotonic()
        rate = self._timed / (now - self._clock) if self._timed else None
        for run in self.runs.values():
            run.seen = []
        self._clock, self._timed = now, 0
        self.tell(self.last + 1, means, rate)

    @contextlib.contextmanager
    def aside(self):
        """Around what is no step, so that no rate counts it."""
        self.settle()
        begin = time.monotonic()
        yield
        self._clock += time.monotonic() - begin
