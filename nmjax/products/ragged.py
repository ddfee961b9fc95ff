"""Pruning along tokens that belong to different experts.

The tokens of a grouped product are sorted by expert, and a call says how many each expert has. A group has tokens of
one expert alone: the first group of an expert begins at its first token, and its last group is filled up with zeros. So
the tokens are copied to a layout with room for the zeros, pruned, and copied back. The layout has a fixed size. The
sizes decide the place of each token.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.products.pruning import Operand


def room(tokens: int, experts: int, m: int) -> int:
    """Return the least multiple of m that is enough for the tokens and zeros of any sizes.

    Args:
      tokens: The number of tokens.
      experts: The number of experts.
      m: The number that divides the room of each expert.

    >>> room(8, experts=3, m=4), room(8, experts=3, m=1)  # 1 + 1 + 6 tokens take 4 + 4 + 8 places
    (16, 8)
    """
    return (tokens + min(experts, tokens) * (m - 1)) // m * m


def places(sizes: jax.Array, tokens: int, m: int) -> jax.Array:
    """Return the place of every token in the layout. A token without an expert gets a place behind the end.

    Args:
      sizes: The number of tokens of each expert.
      tokens: The number of all tokens.
      m: The number that divides the room of each expert.

    >>> places(jnp.array([1, 0, 2]), tokens=4, m=4).tolist()  # the last token has no expert
    [0, 4, 5, 15]
    """
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), tokens)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    rooms = (ends - starts + m - 1) // m * m
    moved = jnp.cumsum(rooms) - rooms - starts  # by how many places the tokens of each expert move
    moved = jnp.append(moved, room(tokens, len(sizes), m))
    counts = jnp.append(ends - starts, tokens - ends[-1])
    return jnp.arange(tokens, dtype=jnp.int32) + jnp.repeat(moved, counts, total_repeat_length=tokens)


def by_expert(call: Callable[..., jax.Array], sizes: jax.Array) -> Callable[..., jax.Array]:
    """Return a function that prunes the tokens of each expert separately.

    Args:
      call: The function that prunes an operand, as `nmjax.products.pruning.pruned`.
      sizes: The number of tokens of each expert. Tokens without an expert become zeros.
    """

    def apart(label: str, p: Pruner, x: jax.Array, operand: Operand, ctx: Ctx) -> jax.Array:
        (axis,), tokens = operand.contract, x.shape[operand.contract[0]]
        assert axis == 0, "tokens are the first axis"
        at = places(sizes, tokens, p.facts.block)
        laid = jnp.zeros((room(tokens, len(sizes), p.facts.block), *x.shape[1:]), x.dtype)
        laid = laid.at[at].set(x, mode="drop", indices_are_sorted=True, unique_indices=True)
        if ctx.partner is not None:
            partner = jnp.zeros((laid.shape[0], *ctx.partner.shape[1:]), ctx.partner.dtype)
            ctx = ctx.replace(partner=partner.at[at].set(ctx.partner, mode="drop", unique_indices=True))
        pruned = call(label, p, laid, operand, ctx)
        return pruned.at[at].get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

    return apart


def laid_out(x: Any, experts: int, m: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an operand in the layout."""
    return jax.ShapeDtypeStruct((room(x.shape[0], experts, m), *x.shape[1:]), x.dtype)
