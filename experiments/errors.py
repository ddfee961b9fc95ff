"""Errors that end a command with one line on the screen. Each has the exit code of the process."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def visible(text: object) -> str:
    """Return any value as text that a terminal and a page can show.

    Visible signs take the place of control characters. A name in a file may hold some, and a terminal would obey them.

    >>> visible("\x1b[31mred")
    '␛[31mred'
    """
    text = str(text).replace("\r\n", "\n")
    return _NO_TEXT.sub(lambda c: chr(0x2400 + ord(c[0])) if c[0] < " " else "\ufffd", text)


class Mistake(Exception):
    """A person asked for something that cannot be done. It says what, where, and what to write instead."""

    code = 2


@contextlib.contextmanager
def mistaken(about: str = "") -> Iterator[None]:
    """Turn what the library refuses, and an error of opening a file, into a `Mistake` that begins with ``about``."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise Mistake(f"{about}: {error}" if about else str(error)) from error


def meant(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """Return a question with the nearest of the known names, or "" if none is near.

    >>> meant("bach", ["batch", "seed"], "config.{}")
    ' Did you mean config.batch?'
    """
    near = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f" Did you mean {form.format(near[0])}?" if near else ""


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
