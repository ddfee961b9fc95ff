"""Being told to stop: by Ctrl-C, or by who runs the machine."""

import signal
import threading


class Stop:
    """Within it, the first SIGTERM or SIGINT is noted, for the loop to end after its step; a second one ends the process."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._told) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _told(self, number, _):
        self.signal = signal.Signals(number)
        self._restore()

    def __exit__(self, *_):
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
