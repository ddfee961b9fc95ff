"""Being told to stop: by Ctrl-C, or by who runs the machine."""

import signal
import threading
import time

from experiments.scale import processes


class Stop:
    """Within it, the first SIGTERM or SIGINT is noted, for the loop to end after its step; a later one ends the process. Of
    several processes any may be told, and all end after the same step."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before, self._since = {}, 0.0

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._told) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def now(self) -> bool:
        """Whether the run ends here, to be asked after every step."""
        if processes.count() == 1:
            return self.signal is not None
        if not processes.turn(self.signal is not None):
            return False
        self.signal = self.signal or signal.SIGTERM  # another one was told
        return True

    def _told(self, number, _):
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since > 1:  # else it is one stop, told twice: by a terminal and by a launcher
            self._restore()
            signal.raise_signal(number)

    def __exit__(self, *_):
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
