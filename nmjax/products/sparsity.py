"""The six slots of a linear layer, and what may stand in each.

===========  ==========================  ===============================  ===========================
product      computes                    slots                            contracts, and so groups by
===========  ==========================  ===============================  ===========================
fwd          y  = x w                    ``fwd_lhs`` x, ``fwd_rhs`` w     in-features
dlhs         dx = g w^T                  ``dlhs_g`` g, ``dlhs_rhs`` w     out-features
drhs         dw = x^T g                  ``drhs_g`` g, ``drhs_lhs`` x     tokens: batch and positions
===========  ==========================  ===============================  ===========================

Every slot prunes along the contraction axis of its own product, so nobody names an axis.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from nmjax.core import groups, random
from nmjax.core.context import Axes, Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.value import Value, written
from nmjax.pruners import identity, transposable
from nmjax.pruners.combinators import chain, permute, raw, stages
from nmjax.pruners.estimators import Estimator, ste
from nmjax.pruners.float8 import fp8

FORWARD = ("fwd_lhs", "fwd_rhs")
BACKWARD = ("dlhs_g", "dlhs_rhs", "drhs_g", "drhs_lhs")
SLOTS = FORWARD + BACKWARD
WEIGHT = ("fwd_rhs", "dlhs_rhs")  # the slots that can keep state between steps


@dataclass(frozen=True, repr=False)
class Sparsity(Value):
    """A method: what to do in each of the six slots. All empty is dense."""

    fwd_lhs: Pruner = identity
    fwd_rhs: Pruner = identity
    dlhs_g: Pruner = identity
    dlhs_rhs: Pruner = identity
    drhs_g: Pruner = identity
    drhs_lhs: Pruner = identity

    def __post_init__(self):
        super().__post_init__()
        for slot in SLOTS:
            _check_slot(slot, getattr(self, slot))

    def __repr__(self) -> str:
        slots = "; ".join(f"{slot}={p}" for slot in SLOTS if (p := getattr(self, slot)) != identity)
        return written(self) or slots or "dense"

    @property
    def backward(self) -> bool:
        """Whether any backward slot prunes."""
        return any(getattr(self, slot) != identity for slot in BACKWARD)

    def init(self, rhs: jax.Array, *, contract, out, ctx: Ctx = Ctx()) -> dict[str, Any]:
        """The state of the weight slots, for ``ctx.state``. Empty for methods that remember nothing.

        ``contract`` are the axes of ``rhs`` that the forward product contracts and ``out`` those that it leaves, one or
        several, in the product's order.
        """
        return self._states(rhs, contract, out, ctx._replace(state=None), "init")

    def refresh(self, rhs: jax.Array, *, contract, out, ctx: Ctx = Ctx()) -> dict[str, Any]:
        """The state of ``ctx.step``, out of ``ctx.state``."""
        return self._states(rhs, contract, out, ctx, "refresh")

    def _states(self, rhs, contract, out, ctx, make):
        axes = lambda a: tuple(groups.position(rhs.ndim, i) for i in (a if isinstance(a, (tuple, list)) else (a,)))
        inward, outward = axes(contract), axes(out)
        space = tuple(a for a in range(rhs.ndim) if a not in inward + outward)
        states = {}
        for slot, operand in (
            ("fwd_rhs", Operand(inward, outward, space)),
            ("dlhs_rhs", Operand(outward, inward, space)),
        ):
            p = getattr(self, slot)
            if not p.remembers:
                continue
            x, here = rhs, slot_ctx(ctx, slot)
            if slot == "dlhs_rhs" and not isinstance(p, raw):  # which sees what the forward product uses
                forward = slot_ctx(ctx._replace(state=states or None), "fwd_rhs")
                q, sides = stored(self.fwd_rhs)[0], Operand(inward, outward, space)
                x = pruned(f"fwd_rhs={q}", q, rhs, sides, forward)
            state = along(f"{slot}={p}", p, x, operand, here, getattr(p, make))[0]
            states[slot] = state
        return states


def _check_slot(slot: str, p: Any) -> None:
    """Refuse a pruner where it has no meaning."""
    if not isinstance(p, Pruner):
        hint = f": parse it first, nm.parse_pruner({p!r})" if isinstance(p, str) else ""
        raise TypeError(f"{slot} takes a pruner, got {type(p).__name__}{hint}.")
    if isinstance(p, raw) and slot not in ("dlhs_rhs", "drhs_lhs"):
        raise ValueError(
            f"{slot}={p}: raw chooses an operand's unpruned value in dlhs_rhs or drhs_lhs. Write {slot}={p.p}."
        )
    if p.ruled and slot not in FORWARD:
        inner = p.p if isinstance(p, Estimator) else "the pruner itself"
        raise ValueError(
            f"{slot}={p}: a gradient rule has no meaning in a backward slot, which is never differentiated. Write {slot}={inner}."
        )
    if p.stochastic and slot in FORWARD and not _rule_for_noise(p):
        raise ValueError(f"{slot}={p}: what autodiff makes of a random choice is no gradient. Write {slot}=ste({p}).")
    if slot in FORWARD and stored(p)[1].stochastic:
        raise ValueError(
            f"{slot}={p}: a forward operand is rounded to nearest, for no two of its products would see the same. Random "
            f"rounding is for gradients, dlhs_g and drhs_g. Here write fp8({stored(p)[1].format!r})."
        )
    if p.stateful and slot not in WEIGHT:
        raise ValueError(
            f"{slot}={p}: only a weight keeps state between steps, in fwd_rhs or dlhs_rhs. Here write a pruner without hold or permute."
        )


def at_random(p: Pruner) -> bool:
    """Whether a pruner draws, anywhere in it."""
    return p.stochastic or any(map(at_random, p.parts))


def _rule_for_noise(p: Pruner) -> bool:
    if isinstance(p, stages):
        return all(_rule_for_noise(q) for q in p.parts)
    return isinstance(p, Estimator) or not p.stochastic


def stored(p: Pruner) -> tuple[Pruner, Pruner]:
    """A forward slot as what prunes and how its product stores the result: a last `fp8` stays in its slot, for every
    product rounds its operands for itself."""
    if isinstance(p, fp8):
        return identity, p
    if isinstance(p, chain) and p.parts:
        last, store = stored(p.parts[-1])
        return chain(*p.parts[:-1], last), store
    if isinstance(p, ste):
        inner, store = stored(p.p)
        return (identity if inner == identity else ste(inner)), store
    return p, identity


class Operand(NamedTuple):
    """Where the axes of an operand lie."""

    contract: tuple[int, ...]  # the last is the innermost
    other: tuple[int, ...]
    space: tuple[int, ...]
    runs: int = 1  # equal parts of the contraction that no group may straddle: feature groups of a convolution


def slot_ctx(ctx: Ctx, slot: str) -> Ctx:
    """What one slot sees: noise of its own at every step, and its own state."""
    key = None if ctx.key is None else random.fold(random.fold(random.words(ctx.key), ctx.step), SLOTS.index(slot))
    return Ctx(key, ctx.step, slot_state(ctx.state, slot))


def slot_state(state, slot: str):
    """The state of one slot out of a product's state."""
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise TypeError(
            f"ctx.state of a product is a dict from slot to state, as Sparsity.init makes it, got {type(state).__name__}."
        )
    if unknown := set(state) - set(WEIGHT):
        raise ValueError(
            f"ctx.state has {', '.join(sorted(map(str, unknown)))}: only {' and '.join(WEIGHT)} keep state."
        )
    return state.get(slot)


def pruned(label: str, p: Pruner, x: jax.Array, operand: Operand, ctx: Ctx) -> jax.Array:
    if p == identity:
        return x
    if isinstance(x, jax.core.Tracer):
        with suppress(TypeError, ValueError):  # told below, under the name of the layer
            return _traced(x, ctx.key, ctx.step, ctx.state, p=p, operand=operand)
    return _pruned(label, p, x, operand, ctx)


def _pruned(label, p, x, operand, ctx):
    result, back = along(label, p, x, operand, ctx, p)
    return back(result)


@partial(jax.jit, static_argnames=("p", "operand"), inline=True)
def _traced(x, key, step, state, *, p, operand):
    """The same, traced once for all layers that are alike; compiled programs do not know of it."""
    return _pruned(str(p), p, x, operand, Ctx(key, step, state))


def along(label, p, x, operand, ctx, call):
    """Call a pruner, or its init or refresh, along one axis, of the several perhaps that its product contracts."""
    flat, axis, where, back = merged_operand(label, p, x, operand, ctx)
    other = [a for o in operand.other if (a := where[o]) is not None]
    space = tuple(a for s in operand.space if (a := where[s]) is not None)
    try:
        return call(flat, axis, ctx._replace(axes=Axes(other[-1] if other else None, space))), back
    except (TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{label}: {error}") from error


def merged_operand(label, p, x, operand, ctx):
    """The operand with one axis to prune along, or a sentence on why there is none."""
    where = f"{label} prunes an array of shape {x.shape}"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{where} and dtype {x.dtype}: only floating-point values are pruned. Cast it, or leave it dense."
        )
    if not x.size:
        raise ValueError(f"{where}: an empty array has no groups. Leave it dense.")
    if not operand.contract:
        raise ValueError(
            f"{where}, of which its product contracts no axis, so there are no groups. Leave the slot empty."
        )
    if p.stochastic and ctx.key is None:
        raise ValueError(
            f"{where} and draws random numbers: pass a key, as Ctx(key=jax.random.key(0), step=step) or prune(..., key=...)."
        )
    if operand.runs > 1 and _permutes(p):
        raise ValueError(f"{where}: its order would mix the {operand.runs} feature groups. Leave this layer dense.")
    merged = groups.merge(x, operand.contract, p.block * operand.runs)
    if merged is None:
        sizes, axes = (
            join.join(map(str, v))
            for join, v in ((" x ", [x.shape[a] for a in operand.contract]), (", ", operand.contract))
        )
        runs = f" in each of {operand.runs} feature groups" if operand.runs > 1 else ""
        tokens = "drhs_" in label.partition("=")[0]
        remedy = (
            "They are tokens, batch x positions: choose an m that divides them, pad or drop what a last batch leaves over, or "
            "leave this slot empty."
            if tokens
            else "Choose an m that divides them, make the layer a multiple of it, or leave it dense (identity)."
        )
        raise ValueError(
            f"{where} along its contraction axis {axes}, whose {sizes} values do not divide into groups of {p.block}{runs}. "
            + remedy
        )
    check_shards(label, p, x, operand)
    return merged


def check_shards(label: str, p: Pruner, x, operand: Operand) -> None:
    """Refuse groups that lie on two devices, where the sharding can be seen: of a concrete array, of a shape that has one,
    and of what is traced on a mesh of explicit axes."""
    traced = isinstance(x, jax.core.Tracer)
    sharding = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return
    names = [() if s is None else s if isinstance(s, tuple) else (s,) for s in sharding.spec]
    names += [()] * (len(x.shape) - len(names))
    parts = [math.prod(sharding.mesh.shape[name] for name in axis) for axis in names]
    if _permutes(p) and max(parts) > 1 and AxisType.Explicit in sharding.mesh.axis_types:
        raise ValueError(
            f"{label} prunes an array of shape {x.shape}, sharded as {sharding.spec}: its order gathers values of other devices, "
            "which explicit mesh axes want to be told of. Use automatic ones, or another method here."
        )
    for run in (operand.contract, operand.other[-1:] if _tiles(p) else ()):
        taken = groups.innermost(x.shape, run, p.block * operand.runs)
        for i, axis in enumerate(run[-taken:] if taken else ()):
            inner = math.prod(x.shape[a] for a in run[len(run) - taken + i + 1 :])
            if parts[axis] > 1 and (i or x.shape[axis] // parts[axis] * inner % p.block):
                raise ValueError(
                    f"{label} prunes an array of shape {x.shape}, sharded as {sharding.spec}: its groups of {p.block} would "
                    f"lie on two devices, for axis {axis} has {x.shape[axis]} values on {parts[axis]} devices. Shard another "
                    f"axis, use fewer devices along {' and '.join(map(repr, names[axis]))}, or leave it dense (identity)."
                )


def _tiles(p: Pruner) -> bool:
    return isinstance(p, transposable) or any(map(_tiles, p.parts))


def _permutes(p: Pruner) -> bool:
    return isinstance(p, permute) or any(map(_permutes, p.parts))


def prune(pruner: Pruner, x: jax.Array, *, axis: int = -1, key=None, step=0, state=None) -> jax.Array:
    """``x`` pruned in groups along ``axis``, with everything checked.

    >>> from nmjax.pruners import mse, mvue
    >>> prune(mse(2, 4), jnp.array([1., -2., 3., -4.]))
    Array([ 0.,  0.,  3., -4.], dtype=float32)
    """
    if not isinstance(pruner, Pruner):
        hint = f": parse it first, nm.parse_pruner({pruner!r})" if isinstance(pruner, str) else ""
        raise TypeError(f"prune takes a pruner such as mse(2,4), got {type(pruner).__name__}{hint}.")
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError(f"{pruner} prunes along an axis, and a 0-d array has none.")
    axis = groups.position(x.ndim, axis)
    ctx = Ctx(None if key is None else random.fold(random.words(key), step), step, state)
    located = ctx.located(x.ndim, axis)
    other = () if located.other is None else (located.other,)
    return pruned(f"{pruner}", pruner, x, Operand((axis,), other, located.space), ctx)
