"""Errors that end a command with one line on the screen. Each has the exit code of the process."""


class Mistake(Exception):
    """A person asked for something that cannot be done. It says what, where, and what to write instead."""

    code = 2


class Missing(Mistake):
    """The data of a run are not in any of the places that were searched."""


class Taken(Mistake):
    """Another process writes to the directory of this run."""


class Failed(Exception):
    """A run began and could not continue. It says why, and which checkpoint is kept."""

    code = 1


class Diverged(Failed):
    """The numbers of a run are no longer finite. It would diverge again."""


class Stopped(Exception):
    """A run was told to stop, and has saved its state."""

    def __init__(self, text: str, signal: int):
        super().__init__(text)
        self.signal, self.code = signal, 128 + signal
