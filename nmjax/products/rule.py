"""Linear products whose three matrix products prune as a `Sparsity` says: one rule for dots, einsums and convolutions.

Forward slots are functions that autodiff goes through, by their own gradient rule. Backward slots are never
differentiated. An empty one reuses the value that the forward product used; a pruner there prunes that value again;
``raw(p)`` prunes the operand itself. A last `fp8` stays in its slot: each product rounds its operands for itself, out of
what was pruned. Where all backward slots are empty, and nothing is rounded to fp8, the rule is autodiff itself, and no
custom_vjp stands in the way of forward mode (`sr_ste` has one of its own); nor where of such a product y alone is packed.
Where dx or dw is, `jax.jvp` and second derivatives are refused.

Noise is a function of (key, step, slot, group): the same key at another step draws anew. A product that is traced once and
run many times with one key and step, under `jax.vmap` or as a tied layer, draws the same noise each time.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.kernels import calls
from nmjax.kernels.targets import as_varying, check_backend, varying
from nmjax.products import forms as packed
from nmjax.products.operations import as_conv, as_dot, einsum_dims
from nmjax.products.routes import Engine, engine as engine_of
from nmjax.products.sparsity import (
    WEIGHT,
    Operand,
    Sparsity,
    along,
    at_random,
    check_shards,
    merged_operand,
    pruned,
    slot_ctx,
    stored,
)  # fmt: skip
from nmjax.pruners import identity
from nmjax.pruners.combinators import raw

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
    if not sparsity.backward and left == right == left_store == right_store == identity:
        return op(x, w)
    engine = engine_of(op, lhs, rhs, sparsity, backend, ctx.name, packed.products_of(ctx))
    bare = not sparsity.backward and left_store == right_store == identity
    if engine is None and bare:
        return op(x, w)
    fused = lambda operand: engine is not None and packed.needs_unpruned(engine, sparsity, operand)
    unpruned = (
        lax.stop_gradient(lhs) if isinstance(sparsity.drhs_lhs, raw) or fused("x") else None,
        lax.stop_gradient(rhs) if isinstance(sparsity.dlhs_rhs, raw) or fused("w") else None,
    )
    rule = _derived if bare and engine["dlhs"] is engine["drhs"] is None else _ruled
    return rule(op, sparsity, ctx.name, engine, x, w, unpruned, (ctx.key, ctx.step, ctx.state, ctx.packed))


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


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _derived(op, sparsity, name, engine: Engine, x, w, unpruned, dynamic):
    """A product whose value alone is a kernel's: its derivatives are those of ``op``."""
    return _forward(op, sparsity, name, engine, x, w, unpruned, dynamic, ("fwd",))[0]


@partial(_derived.defjvp, symbolic_zeros=True)
def _(op, sparsity, name, engine, primals, tangents):
    x, w, *rest = primals
    y = _derived(op, sparsity, name, engine, x, w, *rest)
    dx, dw, *_ = tangents
    terms = ((dx, lambda: op(dx, w)), (dw, lambda: op(x, dw)))
    parts = [make() for v, make in terms if not isinstance(v, jax.custom_derivatives.SymbolicZero)]
    return y, as_varying(sum(parts[1:], parts[0]), varying(y)) if parts else jnp.zeros_like(y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _ruled(op, sparsity, name, engine: Engine | None, x, w, unpruned, dynamic):
    return _forward(op, sparsity, name, engine, x, w, unpruned, dynamic, ("fwd",))[0]


def _forward(op, sparsity, name, engine, x, w, unpruned, dynamic, products):
    """y, and the forms of x and w that kernels want for some products."""
    if engine is None:
        return op(stored(sparsity.fwd_lhs)[1](x), stored(sparsity.fwd_rhs)[1](w)), {}
    ctx = _ctx(name, dynamic)
    by_xla = partial(_by_xla, op.operands(x.ndim, w.ndim), ctx)
    made = {
        operand: packed.forms(engine, sparsity, operand, value, before, ctx, by_xla, products)
        for operand, value, before in (("x", x, unpruned[0]), ("w", w, unpruned[1]))
    }
    if engine["fwd"] is None:
        return op(stored(sparsity.fwd_lhs)[1](x), stored(sparsity.fwd_rhs)[1](w)), made
    out = jax.eval_shape(op, x, w).dtype
    dense = lambda: w if engine["fwd"].operand == "x" else x
    return packed.product(engine, "fwd", _of(made, "fwd"), dense, out), made


def _ctx(name, dynamic) -> Ctx:
    key, step, state, weight = dynamic
    return Ctx(key, step, state, name=name, packed=weight)


def _by_xla(axes, ctx, slot, p, value):
    return _in_slot(slot, p, value, axes, ctx)


def _of(made, product):
    """The forms of one product, by operand."""
    return {operand: forms[product] for operand, forms in made.items() if product in forms}


def _underived(*values):
    return map(calls.underived, values)


def _ruled_forward(op, sparsity, name, engine, x, w, unpruned, dynamic):
    if engine is not None:
        x, w = _underived(x, w)
    y, made = _forward(op, sparsity, name, engine, x, w, unpruned, dynamic, ("fwd", "dlhs", "drhs"))
    # What the backward pass would refuse is refused here, with the caller's line in the traceback; and not in _ruled, for
    # a product that nobody differentiates needs no key, and may have any number of tokens.
    axes = op.operands(x.ndim, w.ndim)
    for slot, value in _backward_values(sparsity, x, w, unpruned, y).items():
        _in_slot(slot, getattr(sparsity, slot), value, axes, _ctx(name, dynamic), call=merged_operand)
    backward = {o: {p: form for p, form in forms.items() if p != "fwd"} for o, forms in made.items()}
    return y, (x, w, unpruned, dynamic, backward)


def _ruled_backward(op, sparsity, name, engine, residuals, g):
    x, w, unpruned, dynamic, made = residuals
    if engine is not None:
        x, w, g = _underived(x, w, g)
    values = _backward_values(sparsity, x, w, unpruned, g)
    ctx = _ctx(name, dynamic)
    by_xla = partial(_by_xla, op.operands(x.ndim, w.ndim), ctx)
    prune = lambda slot: by_xla(slot, getattr(sparsity, slot), values[slot])
    if engine is not None:
        made = made | {"g": packed.forms(engine, sparsity, "g", g, None, ctx, by_xla)}

    def product(name, of_g, dense, transposed):
        """By a kernel, of forms and one dense operand perhaps; else XLA's."""
        if engine is None or engine[name] is None:
            return transposed(prune(of_g), prune(dense))
        other = of_g if engine[name].operand != "g" else dense
        like = x if name == "dlhs" else w
        y = packed.product(engine, name, _of(made, name), lambda: prune(other), like.dtype)
        devices = tuple(varying(y) - varying(like))  # in shard_map: the gradient of what they share is their sum
        return lax.psum(y, devices) if devices else y

    dx = product("dlhs", "dlhs_g", "dlhs_rhs", lambda g, w: jax.linear_transpose(lambda a: op(a, w), x)(g)[0])
    dw = product("drhs", "drhs_g", "drhs_lhs", lambda g, x: jax.linear_transpose(lambda b: op(x, b), w)(g)[0])
    return dx, dw, None, None


def _backward_values(sparsity, x, w, unpruned, g):
    lhs, rhs = unpruned
    back = lambda slot, value, before: before if isinstance(getattr(sparsity, slot), raw) else value
    return {
        "dlhs_g": g,
        "dlhs_rhs": back("dlhs_rhs", w, rhs),
        "drhs_g": g,
        "drhs_lhs": back("drhs_lhs", x, lhs),
    }


_ruled.defvjp(_ruled_forward, _ruled_backward)


def packed_weight(
    op, lhs: jax.ShapeDtypeStruct, rhs: jax.Array, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto"
) -> dict:
    """A weight in the forms that packed products of it with ``lhs`` of this shape take, for `Ctx.packed`: so that the
    micro-steps of a gradient pack it once. Empty where none runs packed; without what is drawn anew at every micro-step."""
    fixed = frozenset(p for p, s in (("fwd", "fwd_rhs"), ("dlhs", "dlhs_rhs")) if not at_random(getattr(sparsity, s)))
    engine = engine_of(op, lhs, rhs, sparsity, backend, ctx.name, fixed)
    if engine is None or at_random(sparsity.fwd_rhs):
        return {}
    rhs = lax.stop_gradient(rhs)  # whose gradient does not come by its forms
    axes = op.operands(len(lhs.shape), rhs.ndim)
    w = _in_slot("fwd_rhs", stored(sparsity.fwd_rhs)[0], rhs, axes, ctx)
    made = packed.forms(engine, sparsity, "w", w, rhs, ctx, partial(_by_xla, axes, ctx), fixed)
    return {packed.form_of_weight(engine, product): form for product, form in made.items()}


@lru_cache
def refusals(
    op, lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, sparsity: Sparsity
) -> tuple[tuple[str, str], ...]:
    """(slot, reason) for every slot that ``op`` would refuse to prune, of operands of these shapes and shardings."""
    g = jax.eval_shape(op, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (lhs, rhs)))
    values = {"fwd_lhs": lhs, "fwd_rhs": rhs} | _backward_values(sparsity, lhs, rhs, (lhs, rhs), g)
    axes, found = op.operands(lhs.ndim, rhs.ndim), []
    for slot, value in values.items():
        p, label = getattr(sparsity, slot), f"{slot}={getattr(sparsity, slot)}"
        if p == identity:
            continue
        try:
            check_shards(label, p, value, axes[slot])
            why = _misfit(label, p, jax.ShapeDtypeStruct(value.shape, value.dtype), axes[slot])
        except (TypeError, ValueError) as error:
            why = str(error)
        if why:
            found.append((slot, why))
    return tuple(found)


@lru_cache
def _misfit(label: str, p: Pruner, x: jax.ShapeDtypeStruct, operand: Operand) -> str:
    """Why a pruner, or what it remembers, would refuse an array of this shape at the first step; "" if it does not."""

    def first_use(x):
        ctx = Ctx(random.words(0), 0)
        state = along(label, p, x, operand, ctx, p.init)[0] if p.remembers else None
        return pruned(label, p, x, operand, ctx._replace(state=state))

    try:
        jax.eval_shape(first_use, x)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


# ---- the products ----


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


def _unpermuted(sharding, order):
    """The sharding before a transposition, out of that after it."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    spec = PartitionSpec(
        *(tuple(spec)[order.index(a)] if order.index(a) < len(spec) else None for a in range(len(order)))
    )
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec
