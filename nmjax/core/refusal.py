"""A refusal: the value that a function returns in place of what was asked for, with the reason."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """A reason why something cannot be done, in words that an error can end with.

    >>> str(Refusal("K = 40 does not divide by 64"))
    'K = 40 does not divide by 64'
    """

    reason: str

    def __str__(self) -> str:
        return self.reason
