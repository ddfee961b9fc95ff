"""What stops a run, told in one line: what a person can put right, and what went wrong on the way."""


class Mistake(Exception):
    """Something asked for that cannot be done as it stands: what, where, and what to write instead. Exit code 2."""


class Failed(Exception):
    """A run that began and could not go on: the step, and where what it had reached is kept. Exit code 1."""
