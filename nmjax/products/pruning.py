"""Pruning one operand of a product along the axes that the product contracts, with everything checked."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from nmjax.core import groups, merging, random
from nmjax.core.context import Axes, Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.value import told
from nmjax.kernels.targets import pruning_kernels
from nmjax.products.slot import SLOTS
from nmjax.pruners import identity

Shaped = jax.Array | jax.ShapeDtypeStruct


def shape_of(v: Any) -> Any:
    """Return the shape of an array, with its sharding if its type has a mesh. Return anything else as it is."""
    if not isinstance(v, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return v
    kind = jax.typeof(v)
    sharding = None if kind.sharding.mesh.empty else kind.sharding
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


class Operand(NamedTuple):
    """The axes of an operand, by their part in a product.

    Attributes:
      contract: The axes that the product contracts, the innermost last. Groups lie along them.
      other: The axes that the transposed use of the operand contracts.
      space: The axes of positions, such as height and width.
      batch: The axes of the product's batch.
      runs: The number of equal parts of the contraction that no group may straddle: feature groups of a convolution.
      other_runs: The number of equal parts of the last axis of ``other`` that no tile may straddle, likewise.
      ragged: True if a call cuts the contraction into parts that no group may straddle: the tokens of each expert.
      known: False if only the sizes of the axes of features are known, before a call. Errors then state no shape.
    """

    contract: tuple[int, ...]
    other: tuple[int, ...]
    space: tuple[int, ...]
    batch: tuple[int, ...] = ()
    runs: int = 1
    other_runs: int = 1
    ragged: bool = False
    known: bool = True


def pruned(label: str, p: Pruner, x: jax.Array, operand: Operand, ctx: Ctx) -> jax.Array:
    """Return an operand pruned along its contraction.

    Args:
      label: The slot and its pruner, which begin every error.
      p: The pruner.
      x: The operand.
      operand: Where its axes lie.
      ctx: What the pruner reads.
    """
    if p == identity:
        return x
    if isinstance(x, jax.core.Tracer):
        with suppress(TypeError, ValueError):  # raised again below, under the layer's name
            return _traced(x, ctx, p=p, operand=operand)
    return _pruned(label, p, x, operand, ctx)


def _pruned(label: str, p: Pruner, x: jax.Array, operand: Operand, ctx: Ctx) -> jax.Array:
    result, restore = along(label, p, x, operand, ctx, p)
    return restore(result)


@partial(jax.jit, static_argnames=("p", "operand"), inline=True)
def _traced(x: jax.Array, ctx: Ctx, *, p: Pruner, operand: Operand) -> jax.Array:
    """Prune an operand. It is traced once for all layers that are alike, and inlined in compiled programs."""
    return _pruned(str(p), p, x, operand, ctx)


def along(
    label: str, p: Pruner, x: jax.Array, operand: Operand, ctx: Ctx, call: Callable[..., Any]
) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """Call a pruner, its mask, or its init or refresh along one axis.

    The axes that a product contracts are merged into one if a single one does not divide into groups.

    Returns:
      What ``call(x, axis, ctx)`` returns, and a function that restores the operand's shape.
    """
    merged = merged_operand(label, p, x, operand, ctx)
    others = tuple(axis for old in operand.other if (axis := merged.axes[old]) is not None)
    space = tuple(axis for old in space_left(x.shape, p, operand) if (axis := merged.axes[old]) is not None)
    alone = (*operand.contract, *operand.batch)
    apart = tuple(axis for old in alone if (axis := merged.axes[old]) is not None and axis != merged.axis)
    for name, beside in {"partner": ctx.partner, "gradient": ctx.gradient}.items():
        if beside is not None:
            also = merging.merge(beside, operand.contract, p.facts.block * operand.runs)
            assert also is not None
            ctx = ctx.replace(**{name: also.array})
    try:
        axes = Axes(others[-1] if others else None, space, apart, others)
        result = call(merged.array, merged.axis, ctx.replace(axes=axes))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{label}: {error}") from error
    return result, merged.restore


def space_left(shape: tuple[int, ...], p: Pruner, operand: Operand) -> tuple[int, ...]:
    """Return the axes of positions that an operand still has after the axes that its groups need are merged.

    Args:
      shape: The shape of the operand.
      p: The pruner.
      operand: Where its axes lie.

    >>> import nmjax as nm
    >>> g = Operand((0, 1, 2), (3,), space=(1, 2))
    >>> space_left((2, 4, 4, 8), nm.mse(2, 4), g), space_left((2, 6, 6, 8), nm.mse(2, 4), g)
    ((1, 2), ())
    """
    count = merging.innermost(shape, operand.contract, p.facts.block * operand.runs) or 0
    merged = operand.contract[-count:] if count > 1 else ()
    return tuple(axis for axis in operand.space if axis not in merged)


def merged_operand(label: str, p: Pruner, x: Any, operand: Operand, ctx: Ctx) -> merging.Merged:
    """Return an operand with one axis to prune along.

    Raises:
      TypeError: If it is not of floating-point values.
      ValueError: If it cannot be pruned so: it is empty, a key is missing, or groups do not fit.
    """
    _check_operand(label, p, x, operand, ctx)
    merged = merging.merge(x, operand.contract, p.facts.block * operand.runs)
    if merged is None:
        raise ValueError(_misfit(label, p, x, operand, tokens="dw_" in label.partition("=")[0]))
    check_shards(label, p, x, operand)
    return merged


def _subject(label: str, x: Any, operand: Operand, *more: str) -> str:
    """Return the beginning of an error. It states the shape only if that is the shape of the caller's array."""
    facts = [f"shape {x.shape}", *more] if operand.known and not operand.ragged else [*more]
    return f"{label} prunes an array" + (f" of {' and '.join(facts)}" if facts else "")


def _check_operand(label: str, p: Pruner, x: Any, operand: Operand, ctx: Ctx) -> None:
    subject, with_dtype = _subject(label, x, operand), _subject(label, x, operand, f"dtype {x.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{with_dtype}: only floating-point values are pruned. Cast it, or leave it dense.")
    reason = groups.dtype_refusal(x.dtype)
    if reason is not None:
        raise TypeError(f"{with_dtype}, {reason}, or leave it dense.")
    if not x.size:
        raise ValueError(f"{subject}: an empty array has no groups. Leave it dense.")
    if not operand.contract:
        raise ValueError(
            f"{subject}: its product contracts no axis of it, so there are no groups. Leave the slot empty."
        )
    if p.facts.stochastic and ctx.key is None:
        raise ValueError(
            f"{subject} and draws random numbers: pass a key, as Ctx(key=jax.random.key(0), step=step) or "
            "prune(..., key=...)."
        )
    if p.facts.tiles and operand.other_runs > 1 and x.shape[operand.other[-1]] % (p.facts.block * operand.other_runs):
        raise ValueError(
            f"{subject}: its tiles of {p.facts.block} x {p.facts.block} values would lie in two of the "
            f"{operand.other_runs} feature groups. Leave this layer dense."
        )
    if operand.runs > 1 and p.facts.reorders:
        raise ValueError(f"{subject}: its order would mix the {operand.runs} feature groups. Leave this layer dense.")


def _misfit(label: str, p: Pruner, x: Any, operand: Operand, tokens: bool) -> str:
    """Say that the contraction does not divide into groups, and what to do."""
    sizes = " x ".join(str(x.shape[axis]) for axis in operand.contract)
    axes = f"contraction axis {', '.join(map(str, operand.contract))}" if operand.known else "features"
    runs = f" in each of {operand.runs} feature groups" if operand.runs > 1 else ""
    if operand.known and math.prod(x.shape[axis] for axis in operand.contract) == 1:
        subject = _subject(label, x, operand)
        return f"{subject} along its {axes}, where it has one value, and a group has {p.facts.block}. Leave it dense."
    if tokens:
        remedy = (
            "They are tokens, batch x positions: choose an m that divides them, pad or drop what a last batch leaves "
            "over, or leave this slot empty."
        )
    else:
        in_slot = label.partition("=")[0] in SLOTS  # else a pruner alone, as in `prune`
        dense = "write 'else dense' after its method, as in 's_ste(2,4) else dense'" if in_slot else "leave it dense"
        remedy = f"Choose an m that divides them, make the layer a multiple of it, or {dense}."
    return (
        f"{_subject(label, x, operand)} along its {axes}, whose {sizes} values do not divide into groups of "
        f"{p.facts.block}{runs}. {remedy}"
    )


def check_shards(label: str, p: Pruner, x: Any, operand: Operand) -> None:
    """Refuse groups that lie on two devices, and a reordering across devices, if the sharding is known.

    It is known for a concrete array, for a shape with a sharding, and for an array traced on a mesh of explicit axes.
    """
    sharding = _sharding(x)
    if sharding is None:
        return
    subject = f"{label} prunes an array of shape {x.shape}, sharded as {sharding.spec}"
    names, parts = _parts(sharding, len(x.shape))
    if p.facts.reorders and max(parts) > 1 and AxisType.Explicit in sharding.mesh.axis_types:
        raise ValueError(
            f"{subject}: its order gathers values from other devices, which a mesh of explicit axes does not allow. "
            "Use a mesh with AxisType.Auto, or a pruner that does not reorder, such as mse(2,4)."
        )
    for run in (operand.contract, operand.other[-1:] if p.facts.tiles else ()):
        axis = _cut_axis(x.shape, parts, run, p.facts.block, operand.runs)
        if axis is not None:
            raise ValueError(
                f"{subject}: its groups of {p.facts.block} would lie on two devices, because axis {axis} has "
                f"{x.shape[axis]} values on {parts[axis]} devices. Shard another axis, use fewer devices along "
                f"{' and '.join(map(repr, names[axis]))}, or leave it dense."
            )


def lie_on_one_device(x: Any, contract: tuple[int, ...], block: int) -> bool:
    """Return False if a group of values along the contraction lies on two devices, as far as `check_shards` sees.

    Args:
      x: An array, or its shape.
      contract: The axes that the product contracts.
      block: The size of a group.
    """
    sharding = _sharding(x)
    return sharding is None or _cut_axis(x.shape, _parts(sharding, len(x.shape))[1], contract, block, 1) is None


def _sharding(x: Any) -> NamedSharding | None:
    """Return the sharding of an array or a shape, if it can be seen."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _parts(sharding: NamedSharding, ndim: int) -> tuple[list[tuple[str, ...]], list[int]]:
    """Return the mesh axes that each axis of an array is cut along, and the number of parts."""
    names = [_names(entry) for entry in sharding.spec]
    names += [()] * (ndim - len(names))
    return names, [math.prod(sharding.mesh.shape[name] for name in axis) for axis in names]


def _cut_axis(shape: tuple[int, ...], parts: list[int], run: tuple[int, ...], block: int, runs: int) -> int | None:
    """Return the first axis of ``run`` that is cut within a group of ``block`` values; None if no group is cut."""
    merged = merging.innermost(shape, run, block * runs) or 0
    for i, axis in enumerate(run[len(run) - merged :]):
        inner = math.prod(shape[a] for a in run[len(run) - merged + i + 1 :])
        whole_groups = i == 0 and shape[axis] // parts[axis] * inner % block == 0
        if parts[axis] > 1 and not whole_groups:
            return axis
    return None


def _names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes along which one axis of an array is sharded."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def prune(
    pruner: Pruner, x: jax.Array, *, axis: int = -1, key: Any = None, step: Any = 0, state: Any = None
) -> jax.Array:
    """Return ``x`` pruned in groups along ``axis``, with everything checked.

    Args:
      pruner: The pruner, such as ``mse(2, 4)``.
      x: An array of floating-point values.
      axis: The axis along which groups lie. ``pruner.block`` must divide its length.
      key: A `jax.random.key` or an int seed, if the pruner is stochastic.
      step: The step of training. Schedules read it, and random numbers depend on it.
      state: The state that ``pruner.init`` returned, if the pruner keeps one.

    Returns:
      An array of the shape and dtype of ``x``.

    Raises:
      TypeError: If ``pruner`` is no pruner, or ``x`` is not of floating-point values.
      ValueError: If the axis does not divide into groups, or a key or a state is missing.

    >>> import nmjax as nm
    >>> nm.prune(nm.mse(2, 4), jnp.array([1., -2., 3., -4.]))
    Array([ 0.,  0.,  3., -4.], dtype=float32)
    >>> w = nm.prune(nm.mvue(2, 4), jnp.ones((8, 16)), axis=0, key=0)  # [in, out], along in
    >>> w.shape, float((w != 0).mean())
    ((8, 16), 0.5)
    """
    if not isinstance(pruner, Pruner):
        raise TypeError(f"prune takes a pruner such as mse(2,4), got {told(pruner)}.")
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError(f"{pruner} prunes along an axis, and a 0-d array has none.")
    axis = groups.position(x.ndim, axis)
    words = None if key is None else random.fold(random.words(key), step)
    ctx = Ctx(words, step, state, kernels=pruning_kernels("auto"))
    axes = ctx.axes_of(x.ndim, axis)
    return pruned(str(pruner), pruner, x, Operand((axis,), axes.others, axes.space), ctx)
