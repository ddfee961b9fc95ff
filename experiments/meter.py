"""What the steps say, taken in while later ones run."""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import jax

from experiments import processes
from experiments.errors import Diverged

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


class Meter:
    """Takes steps' figures as they are done, without waiting for them, and gives means over windows of them.

    ``tell(step, means)`` gets the means and the rate of steps, which leaves out compiling and what is done aside.
    """

    def __init__(self, window: int, tell, seen: list[dict] = ()):
        self.window, self.tell = window, tell
        self.first, self.last = None, None  # when the first step was done, and which was the last
        self.seen = list(seen)  # what the steps since the last line said, those before a run went on too
        self._waiting = deque()
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
        shown = {name: float(value) for name, value in jax.device_get(shown).items()}
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(shown[name]):
                before = "the first step" if self.last is None else f"step {self.last:,} was finite"
                raise Diverged(f"the {name.replace('_', ' ')} is {shown[name]} at step {step:,} ({before})")
        if self.first is None:
            self.first = self._clock = time.monotonic()
        else:
            self._timed += 1
        self.last = step
        self.seen.append(shown)
        if (step + 1) % self.window == 0:  # by the step's number, so that a run that goes on has the same windows
            self.flush()

    def flush(self) -> None:
        """Give the means of the window as far as it goes."""
        if not self.seen:
            return
        means = {name: math.fsum(s[name] for s in self.seen) / len(self.seen) for name in self.seen[0]}
        now = time.monotonic()
        rate = self._timed / (now - self._clock) if self._timed else None
        self.seen, self._clock, self._timed = [], now, 0
        self.tell(self.last + 1, means, rate)

    @contextlib.contextmanager
    def aside(self):
        """Around what is no step, so that no rate counts it."""
        self.settle()
        begin = time.monotonic()
        yield
        self._clock += time.monotonic() - begin
