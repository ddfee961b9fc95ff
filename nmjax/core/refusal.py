"""A refusal: the value that a function returns, with the reason, if it cannot return what the caller asked for."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """A reason why something cannot be done.

    Args:
      reason: The reason, worded so that an error can end with it.

    >>> str(Refusal("K = 40 does not divide by 64"))
    'K = 40 does not divide by 64'
    """

    reason: str

    def __str__(self) -> str:
        return self.reason
