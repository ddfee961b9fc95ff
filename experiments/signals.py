"""Being told to stop: by Ctrl-C, or by who runs the machine."""

import os
import signal
import threading

from experiments import processes


class Stop:
    """Within it, the first SIGTERM or SIGINT is noted, for the loop to end after its step; a second one ends the process.

    Several processes end after the same step, whichever of them was told: JAX hears SIGTERM, and they agree.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            heard = (signal.SIGINT, signal.SIGTERM)[: 1 if processes.count() > 1 else 2]
            self._before = {s: signal.signal(s, self._told) for s in heard}
        return self

    def after(self, step: int) -> bool:
        """Whether the run ends after this step, which is asked after every one."""
        if processes.count() > 1:
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            if not reached_preemption_sync_point(step):
                return False
            self.signal = self.signal or signal.SIGTERM
        return self.signal is not None

    def _told(self, number, _):
        self.signal = signal.Signals(number)
        self._restore()
        if processes.count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *_):
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
