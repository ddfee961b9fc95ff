"""Paths from a chain of pruners to one of them, and the key and the state that lie at the end of a path."""

from collections.abc import Sequence
from typing import NamedTuple

from nmjax.core import random
from nmjax.core.context import Ctx


class Link(NamedTuple):
    """One element of a path: from a chain, or from stages, to one of its pruners.

    Args:
      number: The index of the pruner, from 0.
      count: The number of pruners.
      keyed: True if each pruner has a random key of its own, as in a chain.
    """

    number: int
    count: int
    keyed: bool = True


def with_part_key(ctx: Ctx, number: int) -> Ctx:
    """Return the context of one part of a chain, with its own random key."""
    return ctx if ctx.key is None else ctx.replace(key=random.fold(random.words(ctx.key), number))


def follow(path: Sequence[Link], ctx: Ctx) -> Ctx:
    """Return the context of the pruner at the end of a path.

    Args:
      path: The path, as `NormalForm` holds it.
      ctx: The context of the pruner where the path begins.
    """
    for number, count, keyed in path:
        ctx = with_part_key(ctx, number) if keyed else ctx
        if count == 1 or ctx.state is None:
            continue
        if not isinstance(ctx.state, (tuple, list)) or len(ctx.state) != count:
            raise ValueError(
                f"a pruner of {count} parts has a tuple of {count} states: pass what its init(x, axis) returns."
            )
        ctx = ctx.replace(state=ctx.state[number])
    return ctx
