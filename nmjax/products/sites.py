"""A sparse layer, whatever framework it is of: where its noise comes from, and what its weight is in the end."""

import warnings
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.core import groups, layer_paths, random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.products.pruning import Operand, along, pruned
from nmjax.products.slot import SLOTS, WEIGHT, slot_state
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity

UNFINISHED = 0.01  # exponential decay never reaches its end: less than this share of the norm counts as the end


Distance = tuple[str, Pruner, int, float | None]  # of a weight: its path, its pruner, a step, and its `distance` then


def site_words(seed: Any, path: str, stack: tuple[int, ...] = ()) -> jax.Array:
    """Return the words from which a layer draws its noise.

    Args:
      seed: A `jax.random.key`, an int seed, or two uint32 words.
      path: The layer's path.
      stack: The sizes of the axes along which such layers are stacked. Every layer of a stack has words of its own.

    Returns:
      An array of shape ``(*stack, 2)``.
    """
    words = random.named(random.words(seed), path)
    for size in stack:
        each = lambda w, n=size: jax.vmap(random.fold, (None, 0))(w, jnp.arange(n))
        words = jax.vmap(each)(words.reshape(-1, 2)).reshape(*words.shape[:-1], size, 2)
    return words


def site_key(words: jax.Array, micro: Any) -> jax.Array:
    """Return the key of a micro-step. Products fold in the step and the slot."""
    return random.fold(words, micro)


def needs_key(sparsity: Sparsity) -> bool:
    """Return True if a layer draws random numbers: to prune, or to renew its state."""
    return any(sparsity.slots[name].pruner.needs_key for name in SLOTS)


def depends_on_step(sparsity: Sparsity) -> bool:
    """Return True if a layer's products read the step."""
    return any(sparsity.slots[name].pruner.depends_on_step for name in SLOTS)


def has_state(sparsity: Sparsity) -> bool:
    """Return True if a layer keeps state."""
    return any(sparsity.slots[name].pruner.has_state for name in WEIGHT)


def needs_arrays(sparsity: Sparsity) -> bool:
    """Return True if a layer keeps the time, which tells when state was renewed, and perhaps words and state."""
    return needs_key(sparsity) or depends_on_step(sparsity) or has_state(sparsity)


def check_time(step: Any, micro: Any) -> None:
    """Refuse a step or a micro-step that is not an integer, or, if its value is known, is negative or too large."""
    for name, value in (("step", step), ("micro", micro)):
        known = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not known and not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise TypeError(f"set_step: {name} must be an integer, got {value!r}.")
        if known and not 0 <= value < 2**31:
            raise ValueError(f"set_step: {name} must be at least 0 and less than 2**31, got {value}.")


def final(sparsity: Sparsity) -> tuple[Pruner, Sparsity]:
    """Return the pruner that hardens the weight, and the sparsity that every product has after that."""
    return sparsity.fwd_rhs.final, sparsity.only(fwd_lhs=sparsity.fwd_lhs.final)


def final_weight(sparsity: Sparsity, w: jax.Array, operand: Operand, state: Any = None) -> jax.Array:
    """Return a weight as inference uses it.

    Args:
      sparsity: The layer's sparsity.
      w: The weight, in the dtype in which its product computes. Rounding can change which values are the largest.
      operand: Where its axes lie.
      state: The state of the layer, if it keeps one.
    """
    p = sparsity.fwd_rhs.final
    if p == identity:
        return w
    trained, label = sparsity.fwd_rhs, f"fwd_rhs={p}"
    ctx = Ctx(state=trained.final_state(slot_state(state, "fwd_rhs")))
    if p.block == trained.block:
        return pruned(label, p, w, operand, ctx)
    # A mask has the shape of training, where axes were merged for the groups of another pruner. No key is read.
    hard, restore = along(label, trained, w, operand, ctx.replace(key=0), p)
    return restore(hard)


def distance(now: Any, hard: Any) -> float | None:
    """Return the relative L2 distance of a weight as a step uses it from its final form; None if they are traced."""
    if isinstance(now, jax.core.Tracer) or isinstance(hard, jax.core.Tracer):
        return None
    difference = jnp.linalg.norm(groups.wide(now).ravel() - groups.wide(hard).ravel())
    return float(difference / jnp.maximum(jnp.linalg.norm(groups.wide(hard).ravel()), jnp.finfo(jnp.float32).tiny))


def compared_at(p: Pruner, time: Any) -> int | None:
    """Return the step at which a weight is compared with its final form, to see whether its schedule has ended.

    Args:
      p: The pruner of the weight.
      time: The step and the micro-step of its layer.

    Returns:
      None if there is no schedule, if all that is left of it are random numbers, or if the time is traced.
    """
    if time is None or not p.depends_on_step or (p.needs_key and not p.phases):
        return None
    first = time.reshape(-1)[0]  # inside `jit` this is traced, even if the time is not
    if isinstance(first, jax.core.Tracer):
        return None
    step = int(first)
    return None if p.needs_key and ended(p, step) else step


def ended(p: Pruner, step: int) -> bool:
    """Return True if nothing of a pruner changes after a step, as far as its schedules say when they end."""
    values = [getattr(p, f.name) for f in fields(p)]
    lasts = [getattr(v, "moves", (0, None))[1] for v in values if callable(v) and not isinstance(v, Pruner)]
    own = all(last is not None and last <= step for last in lasts) and all(start <= step for start in p.phases)
    return own and all(ended(part, step) for part in p.parts)


def inputs_unfinished(sparsity: Sparsity, time: Any) -> int | None:
    """Return the step if the pruner of x still changes after it; None if it does not, or if the time is traced."""
    p = sparsity.fwd_lhs
    if time is None or not p.phases:
        return None
    first = time.reshape(-1)[0]  # as above
    if isinstance(first, jax.core.Tracer):
        return None
    step = int(first)
    return step if p.at(step) != p.at(max(step, *p.phases)) else None


def warn_unfinished(
    distances: Iterable[Distance], inputs: Iterable[tuple[str, int | None]], stacklevel: int
) -> None:  # fmt: skip
    """Warn of layers that are hardened before their schedule has ended.

    Args:
      distances: (path, pruner, step, `distance`) of every weight that is compared, see `compared_at`.
      inputs: (path, what `inputs_unfinished` returns) of every layer.
      stacklevel: As in `warnings.warn`.
    """
    advice = "Harden after the schedules have ended. If they have, call set_step with the step of the training first."
    if unfinished := [(path, step) for path, step in inputs if step is not None]:
        warnings.warn(
            f"harden at step {unfinished[0][1]}: the schedules of the inputs of "
            f"{_shown(path for path, _ in unfinished)} have not ended. The hardened layers prune their inputs "
            f"differently from this step. {advice}",
            stacklevel=stacklevel,
        )
    far = [(path, ended(p, step), step, d) for path, p, step, d in distances if d is not None and d > UNFINISHED]
    for over in (False, True):
        those = [(path, step, d) for path, done, step, d in far if done == over]
        if not those:
            continue
        what = "have ended at values that are not those of the final form" if over else "have not ended"
        remedy = "End the schedule at the final form: a factor of `decay` at 0." if over else advice
        warnings.warn(
            f"harden at step {those[0][1]}: the schedules of {_shown(path for path, _, _ in those)} {what}. The "
            f"hardened weights differ from those of this step, by up to {max(d for _, _, d in those):.0%} of their "
            f"norm. {remedy}",
            stacklevel=stacklevel,
        )


def _shown(paths: Iterable[str]) -> str:
    short = [layer_paths.short(same) for same in layer_paths.alike((path, None, path) for path in paths)]
    return ", ".join(layer_paths.gathered(short))
