"""What stops a run, told in one line: what a person can put right, and what went wrong on the way."""


class Mistake(Exception):
    """Something asked for that cannot be done as it stands: what, where, and what to write instead."""

    code = 2  # of the process


class Failed(Exception):
    """A run that began and could not go on: the step, and where what it had reached is kept."""

    code = 1


class Diverged(Failed):
    """A run whose numbers are no longer finite: it would diverge again."""


class Stopped(Exception):
    """A run that was told to stop, and has saved what it had."""

    def __init__(self, text: str, signal: int):
        super().__init__(text)
        self.signal, self.code = signal, 128 + signal
