"""Linear products whose three matrix products prune as a `Sparsity` says: one rule for dots, einsums and convolutions.

Forward slots are functions that autodiff goes through, by their own gradient rule. Backward slots are never
differentiated. An empty one reuses the value that the forward product used; a pruner there prunes that value again;
``raw(p)`` prunes the operand itself. A last `fp8` stays in its slot: each product rounds its operands for itself, out of
what was pruned. Where all backward slots are empty, and nothing is rounded to fp8, the rule is autodiff itself, and no
custom_vjp stands in the way of forward mode (`sr_ste` has one of its own).

Noise is a function of (key, step, slot, group): the same key at another step draws anew. A product that is traced once and
run many times with one key and step, under `jax.vmap` or as a tied layer, draws the same noise each time.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from nmjax import groups, random
from nmjax.combinators import raw
from nmjax.pruners import identity
from nmjax.sparsity import (
    WEIGHT,
    Operand,
    Sparsity,
    along,
    check_shards,
    merged_operand,
    pruned,
    slot_ctx,
    stored,
)  # fmt: skip
from nmjax.typing import Ctx

BACKENDS = ("auto", "xla")  # what computes a product. Both are XLA's dense products of pruned operands, so far

# ---- the rule ----


def bilinear(
    op, lhs: jax.Array, rhs: jax.Array, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto"
) -> jax.Array:
    """``op(lhs, rhs)`` with its six operands pruned. ``op`` is a bilinear function and a frozen value, and knows the axes
    of its operands."""
    check_backend(backend)
    if not isinstance(sparsity, Sparsity) or not isinstance(ctx, Ctx):
        raise TypeError(
            f"a product takes sparsity=nm.parse('s_ste(2,4)') and ctx=nm.Ctx(...), got {sparsity!r}, {ctx!r}."
        )
    if ctx.key is not None:
        ctx = ctx._replace(key=random.words(ctx.key))
    (left, left_store), (right, right_store) = stored(sparsity.fwd_lhs), stored(sparsity.fwd_rhs)
    axes = op.operands(lhs.ndim, rhs.ndim)
    x = _in_slot("fwd_lhs", left, lhs, axes, ctx)
    w = _in_slot("fwd_rhs", right, rhs, axes, ctx)
    if not sparsity.backward and left_store == right_store == identity:
        return op(x, w)
    unpruned = (
        lax.stop_gradient(lhs) if isinstance(sparsity.drhs_lhs, raw) else None,
        lax.stop_gradient(rhs) if isinstance(sparsity.dlhs_rhs, raw) else None,
    )
    return _ruled(op, sparsity, ctx.name, x, w, unpruned, ctx[:3])


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {' or '.join(map(repr, BACKENDS))}, got {backend!r}: packed kernels are to come.")


def _in_slot(slot, p, value, axes, ctx, call=pruned):
    if p == identity:
        return value
    here, label = slot_ctx(ctx, slot), f"{slot}={p}" if ctx.name is None else f"{ctx.name}: {slot}={p}"
    if p.remembers and slot in WEIGHT and here.state is None:
        raise ValueError(
            f"{label} keeps state between steps and was given none: pass "
            "ctx=Ctx(state=sparsity.init(w, contract=..., out=...)), with the axes of w that the product contracts and leaves."
        )
    return call(label, p, value, axes[slot], here)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ruled(op, sparsity, name, x, w, unpruned, dynamic):
    return op(stored(sparsity.fwd_lhs)[1](x), stored(sparsity.fwd_rhs)[1](w))


def _ruled_forward(op, sparsity, name, x, w, unpruned, dynamic):
    y = _ruled(op, sparsity, name, x, w, unpruned, dynamic)
    # What the backward pass would refuse is refused here, with the caller's line in the traceback; and not in _ruled, for
    # a product that nobody differentiates needs no key, and may have any number of tokens.
    axes = op.operands(x.ndim, w.ndim)
    for slot, value in _backward_values(x, w, unpruned, y).items():
        _in_slot(slot, getattr(sparsity, slot), value, axes, Ctx(*dynamic, name=name), call=merged_operand)
    return y, (x, w, unpruned, dynamic)


def _ruled_backward(op, sparsity, name, residuals, g):
    x, w, unpruned, dynamic = residuals
    values = _backward_values(x, w, unpruned, g)
    axes = op.operands(x.ndim, w.ndim)
    prune = lambda slot: _in_slot(slot, getattr(sparsity, slot), values[slot], axes, Ctx(*dynamic, name=name))
    w_back, x_back = prune("dlhs_rhs"), prune("drhs_lhs")
    (dx,) = jax.linear_transpose(lambda a: op(a, w_back), x)(prune("dlhs_g"))
    (dw,) = jax.linear_transpose(lambda b: op(x_back, b), w)(prune("drhs_g"))
    return dx, dw, None, None


def _backward_values(x, w, unpruned, g):
    lhs, rhs = unpruned
    return {"dlhs_g": g, "dlhs_rhs": w if rhs is None else rhs, "drhs_g": g, "drhs_lhs": x if lhs is None else lhs}


_ruled.defvjp(_ruled_forward, _ruled_backward)


@lru_cache
def refusals(
    op, lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, sparsity: Sparsity
) -> tuple[tuple[str, str], ...]:
    """(slot, reason) for every slot that ``op`` would refuse to prune, of operands of these shapes and shardings."""
    g = jax.eval_shape(op, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (lhs, rhs)))
    values = {"fwd_lhs": lhs, "fwd_rhs": rhs} | _backward_values(lhs, rhs, (None, None), g)
    axes, found = op.operands(lhs.ndim, rhs.ndim), []
    for slot, value in values.items():
        p, label = getattr(sparsity, slot), f"{slot}={getattr(sparsity, slot)}"
        if p == identity:
            continue
        try:
            check_shards(label, p, value, axes[slot])
            plain = jax.ShapeDtypeStruct(value.shape, value.dtype)
            jax.eval_shape(partial(_first_use, label, p, operand=axes[slot]), plain)
        except (TypeError, ValueError) as error:
            found.append((slot, str(error)))
    return tuple(found)


def _first_use(label, p, x, operand):
    """A pruner and what it remembers, at the first step."""
    ctx = Ctx(random.words(0), 0)
    state = along(label, p, x, operand, ctx, p.init)[0] if p.remembers else None
    return pruned(label, p, x, operand, ctx._replace(state=state))


# ---- the products ----


@dataclass(frozen=True)
class Dot:
    """`jax.lax.dot_general` as a value."""

    dims: tuple
    precision: Any
    preferred_element_type: Any
    out_sharding: Any

    def __call__(self, lhs, rhs):
        return lax.dot_general(
            lhs, rhs, self.dims, self.precision, self.preferred_element_type, out_sharding=self.out_sharding
        )  # fmt: skip

    def operands(self, lhs_ndim: int, rhs_ndim: int) -> dict[str, Operand]:
        (lc, rc), (lb, rb) = self.dims
        lf = tuple(a for a in range(lhs_ndim) if a not in lc + lb)
        rf = tuple(a for a in range(rhs_ndim) if a not in rc + rb)
        g_lf = tuple(range(len(lb), len(lb) + len(lf)))
        g_rf = tuple(range(len(lb) + len(lf), len(lb) + len(lf) + len(rf)))
        between = lambda ndim, contract: tuple(a for a in range(1, ndim - 1) if a not in contract)
        return {
            "fwd_lhs": Operand(lc, lf, between(lhs_ndim, lc)),
            "fwd_rhs": Operand(rc, rf, between(rhs_ndim, rc)),
            "dlhs_g": Operand(g_rf, g_lf, between(len(lb + lf + rf), g_rf)),
            "dlhs_rhs": Operand(rf, rc, between(rhs_ndim, rf)),
            "drhs_g": Operand(g_lf, g_rf, between(len(lb + lf + rf), g_lf)),
            "drhs_lhs": Operand(lf, lc, between(lhs_ndim, lf)),
        }


@dataclass(frozen=True)
class Conv:
    """`jax.lax.conv_general_dilated` as a value. Groups lie along channels, and for dw along batch and space."""

    window_strides: tuple
    padding: Any
    lhs_dilation: Any
    rhs_dilation: Any
    dims: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    precision: Any
    preferred_element_type: Any
    out_sharding: Any

    def __call__(self, lhs, rhs):
        options = {} if self.out_sharding is None else {"out_sharding": self.out_sharding}
        return lax.conv_general_dilated(
            lhs, rhs, self.window_strides, self.padding, self.lhs_dilation, self.rhs_dilation, self.dims,
            self.feature_group_count, self.batch_group_count, self.precision, self.preferred_element_type, **options,
        )  # fmt: skip

    def operands(self, lhs_ndim: int, rhs_ndim: int) -> dict[str, Operand]:
        (xb, xc, *xs), (wo, wi, *ws), (gb, gc, *gs) = self.dims.lhs_spec, self.dims.rhs_spec, self.dims.out_spec
        space = lambda axes: tuple(sorted(axes))
        features, batches = self.feature_group_count, self.batch_group_count
        return {
            "fwd_lhs": Operand((xc,), (xb,), space(xs), features),
            "fwd_rhs": Operand((wi,), (wo,), space(ws)),
            "dlhs_g": Operand((gc,), (gb,), space(gs), features * batches),
            "dlhs_rhs": Operand((wo,), (wi,), space(ws), features * batches),
            "drhs_g": Operand((gb, *space(gs)), (gc,), space(gs)),
            "drhs_lhs": Operand((xb, *space(xs)), (xc,), space(xs), batches),
        }


def dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None,
    *, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto",
) -> jax.Array:  # fmt: skip
    """`jax.lax.dot_general` whose three products prune as ``sparsity`` says.

    Where a product contracts several axes, the last one alone is grouped if m divides it, else as few as needed are
    flattened with it, in order.
    """
    op = as_dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    return bilinear(op, lhs, rhs, sparsity, ctx, backend)


def as_dot(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None) -> Dot:
    """The arguments of `jax.lax.dot_general` as a value."""
    (lc, rc), (lb, rb) = dimension_numbers
    whole = lambda axes, ndim: tuple(groups.position(ndim, int(a)) for a in axes)
    dims = ((whole(lc, lhs.ndim), whole(rc, rhs.ndim)), (whole(lb, lhs.ndim), whole(rb, rhs.ndim)))
    precision = tuple(precision) if isinstance(precision, list) else precision
    return Dot(dims, precision, _dtype(preferred_element_type), out_sharding)


def conv_general_dilated(
    lhs: jax.Array, rhs: jax.Array, window_strides, padding, lhs_dilation=None, rhs_dilation=None,
    dimension_numbers=None, feature_group_count: int = 1, batch_group_count: int = 1, precision=None,
    preferred_element_type=None, out_sharding=None, *, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto",
) -> jax.Array:  # fmt: skip
    """`jax.lax.conv_general_dilated` whose three products prune as ``sparsity`` says."""
    op = as_conv(
        lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count, precision, preferred_element_type, out_sharding,
    )  # fmt: skip
    return bilinear(op, lhs, rhs, sparsity, ctx, backend)


def as_conv(
    lhs, rhs, window_strides, padding, lhs_dilation=None, rhs_dilation=None, dimension_numbers=None,
    feature_group_count=1, batch_group_count=1, precision=None, preferred_element_type=None, out_sharding=None,
) -> Conv:  # fmt: skip
    """The arguments of `jax.lax.conv_general_dilated` as a value."""
    ints = lambda v: None if v is None else tuple(map(int, v))
    padding = padding if isinstance(padding, str) else tuple(ints(pair) for pair in padding)
    dims = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    precision = tuple(precision) if isinstance(precision, list) else precision
    return Conv(
        ints(window_strides), padding, ints(lhs_dilation), ints(rhs_dilation), dims, int(feature_group_count),
        int(batch_group_count), precision, _dtype(preferred_element_type), out_sharding,
    )  # fmt: skip


def einsum(
    spec: str, lhs: jax.Array, rhs: jax.Array, *, precision=None, preferred_element_type=None, out_sharding=None,
    sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto",
) -> jax.Array:  # fmt: skip
    """`jnp.einsum` of two operands whose three products prune as ``sparsity`` says. Contracted labels are ordered as the
    right operand, the weight, has them.

    >>> einsum("...i,io->...o", jnp.ones((2, 3, 4)), jnp.ones((4, 5)), sparsity=Sparsity()).shape
    (2, 3, 5)
    """
    dims, order = einsum_dims(spec, lhs.ndim, rhs.ndim)
    if out_sharding is not None:
        out_sharding = _unpermuted(out_sharding, order)
    y = dot_general(
        lhs, rhs, dims, precision, preferred_element_type, out_sharding, sparsity=sparsity, ctx=ctx, backend=backend
    )
    return jnp.transpose(y, order)


def einsum_dims(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[tuple, list[int]]:
    """An einsum as dimension numbers of a dot, and the order of that dot's axes in the result."""
    left, right, out = einsum_labels(spec, lhs_ndim, rhs_ndim)
    batch = [c for c in left if c in right and c in out]
    summed = [c for c in right if c in left and c not in out]
    dims = tuple(tuple(tuple(map(side.index, axes)) for side in (left, right)) for axes in (summed, batch))
    made = batch + [c for c in left if c not in right] + [c for c in right if c not in left]
    return dims, [made.index(c) for c in out]


def _unpermuted(sharding, order):
    """The sharding before a transposition, out of that after it."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    spec = PartitionSpec(
        *(tuple(spec)[order.index(a)] if order.index(a) < len(spec) else None for a in range(len(order)))
    )
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec


def einsum_labels(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[list, list, list]:
    """The labels of both operands and of the result, an ellipsis spelt out."""
    inputs, arrow, out = spec.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        raise ValueError(
            f"einsum {spec!r} has {len(operands)} operands: a product has two. Split it, or use jnp.einsum for what is not pruned."
        )
    sides = []
    for labels, ndim in zip(operands, (lhs_ndim, rhs_ndim), strict=True):
        head, dots, tail = labels.partition("...")
        hidden = ndim - len(head) - len(tail)
        if hidden < 0 or (hidden and not dots):
            raise ValueError(f"einsum {spec!r}: {labels!r} does not fit an operand of {ndim} dimensions.")
        sides.append([*head, *range(-hidden, 0), *tail])
    left, right = sides
    hidden = sorted({c for c in left + right if isinstance(c, int)})
    if arrow:
        head, dots, tail = out.partition("...")
        result = [*head, *(hidden if dots else []), *tail]
    else:
        result = hidden + sorted(c for c in {*left, *right} - {*hidden} if (left + right).count(c) == 1)
    for side in (left, right, result):
        if repeated := {c for c in side if side.count(c) > 1}:
            raise ValueError(
                f"einsum {spec!r} repeats {repeated} within one array, a diagonal. Take it with jnp.diagonal first."
            )
    if unknown := [c for c in result if c not in left + right]:
        raise ValueError(f"einsum {spec!r}: {unknown} of the result is in neither operand.")
    for c in left + right:
        if c not in result and not (c in left and c in right):
            shown = c if isinstance(c, str) else "..."
            raise ValueError(
                f"einsum {spec!r} sums {shown!r} over one operand alone, which is no product. Sum it before."
            )
    return left, right, result


def _dtype(dtype):
    return None if dtype is None else jnp.dtype(dtype)
