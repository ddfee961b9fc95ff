"""What every delivery shares: where a layer's noise comes from, and what its weight is in the end."""

import jax
import jax.numpy as jnp

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.products.sparsity import SLOTS, WEIGHT, Operand, Sparsity, at_random, pruned, slot_state
from nmjax.pruners import identity


def site_words(seed, path: str, stack: tuple[int, ...] = ()) -> jax.Array:
    """The words of a layer: of the seed, its path and, where layers are stacked, its place in the stack. ``(*stack, 2)``."""
    words = random.named(random.words(seed), path)
    for size in stack:
        each = lambda w, n=size: jax.vmap(random.fold, (None, 0))(w, jnp.arange(n))
        words = jax.vmap(each)(words.reshape(-1, 2)).reshape(*words.shape[:-1], size, 2)
    return words


def site_key(words: jax.Array, micro) -> jax.Array:
    """The key of a micro-step. Products fold in the step and the slot."""
    return random.fold(words, micro)


def draws(sparsity: Sparsity) -> bool:
    """Whether a layer needs words: to prune, or to renew what it holds."""
    return any(at_random(getattr(sparsity, slot)) for slot in SLOTS)


def timed(sparsity: Sparsity) -> bool:
    """Whether a layer's products read the step."""
    return any(getattr(sparsity, slot).timed for slot in SLOTS)


def remembers(sparsity: Sparsity) -> bool:
    """Whether a layer keeps state."""
    return any(getattr(sparsity, slot).remembers for slot in WEIGHT)


def final(sparsity: Sparsity) -> tuple[Pruner, Sparsity]:
    """What a weight is pruned by once and for all, and what is left to do in every product after that."""
    return sparsity.fwd_rhs.final, Sparsity(fwd_lhs=sparsity.fwd_lhs.final)


def final_weight(sparsity: Sparsity, w: jax.Array, operand: Operand, state=None) -> jax.Array:
    """A weight as inference will use it. It comes in the dtype that its product computes in, for ranks of rounded values
    differ from those of what they were."""
    p = sparsity.fwd_rhs.final
    if p == identity:
        return w
    held = sparsity.fwd_rhs.final_state(slot_state(state, "fwd_rhs"))
    return pruned(f"fwd_rhs={p}", p, w, operand, Ctx(state=held))
