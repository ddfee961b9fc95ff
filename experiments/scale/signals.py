"""SIGTERM and SIGINT: a person's Ctrl-C, or a machine that is about to be taken away."""

import signal
import threading
import time
from typing import Self

from experiments.scale import processes


class Stop:
    """Notes the first SIGTERM or SIGINT inside its context, for the loop to end after its step.

    A later signal ends the process. If one of several processes is told, all end after the same step.

    Attributes:
      signal: The signal that came, or None.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before: dict = {}  # the handlers of the signals
        self._since = 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def now(self) -> bool:
        """Return whether the run ends here. Every process asks after each of its steps."""
        if processes.count() == 1:
            return self.signal is not None
        if not processes.turn(self.signal is not None):
            return False
        if self.signal is None:
            self.signal = signal.SIGTERM  # another process was told
        return True

    def _note(self, number, _) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since > 1:  # a terminal and a launcher may both send one Ctrl-C
            self._restore()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.raise_signal(number)

    def __exit__(self, *_) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
