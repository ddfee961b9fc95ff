"""Computes a layer's three products (y, dx, dw) with pruned operands, as one differentiable function.

It serves dots, einsums, convolutions and grouped products. Autodiff differentiates through the forward pruners, with
their own gradient rules. Backward slots are never differentiated. If a backward slot of x or w is empty, its product
uses the operand that the forward slot pruned. A pruner there prunes that operand again. ``raw(p)`` prunes the original
operand. An `fp8` or `fp4` at the end of a slot is its storage format. Each product rounds its own operands, after
pruning.

`jax.jvp` works if all backward slots are empty, no slot ends in `fp8` or `fp4`, and no kernel computes dx or dw. A
kernel may compute y. Otherwise the products have a custom_vjp, and `jax.jvp` raises an error. Second derivatives then
raise an error too, if any backward slot is filled, if a kernel computes any of the products, or if one is compacted.
`sr_ste` always has a custom_vjp of its own.

Random numbers depend on key, step, slot and group. The same key gives new numbers at another step. A product that is
traced once and run many times with one key and step, under `jax.vmap` or as a tied layer, uses the same numbers each
time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.value import told
from nmjax.kernels import calls
from nmjax.kernels.batches import as_varying, varying
from nmjax.kernels.targets import check_backend, pruning_kernels
from nmjax.products.applying import (
    PARTNER_SLOT,
    StaticProduct,
    check_partner,
    gather_matching_rows,
    gather_rows,
    kept_of_x,
    prune_slot,
    reads_partner,
)  # fmt: skip
from nmjax.products.compaction import Rows, without_strides
from nmjax.products.fit import backward_values, fitting
from nmjax.products.forms import (
    Form,
    FormKey,
    OperandValue,
    make_forms,
    needs_unpruned,
    product_of_forms,
    products_of,
)
from nmjax.products.keeping import KEPT, Aval, Entries, like, unpack
from nmjax.products.layout import CONTRACTED, OPERANDS
from nmjax.products.operations import Conv, Dot, Operation, plain_vmap_error
from nmjax.products.pruning import Shaped, merged_operand
from nmjax.products.routes import compacted_of, routes_of
from nmjax.products.slot import BACKWARD
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity


class Inputs(NamedTuple):
    """The inputs of a layer besides its pruned operands.

    Attributes:
      unpruned_x, unpruned_w: The operands before pruning. Each is None unless a `raw` slot, a kernel that prunes, or
        a choice of rows in the forward product reads it.
      ctx: Key, step and state.
      packed: The result of `nmjax.products.weights.packed_weight`, or None.
      extra: The operands of the operation after the first two.
    """

    unpruned_x: jax.Array | None
    unpruned_w: jax.Array | None
    ctx: Ctx
    packed: Mapping[FormKey, Form] | None
    extra: tuple[jax.Array, ...]


Forms = Mapping[str, Mapping[str, Form]]
"""``forms[operand][product]`` is the operand as the kernel of that product reads it."""


class Call(NamedTuple):
    """A product that is ready to be computed: its operands are pruned, and its routes are chosen.

    Attributes:
      run: The function that computes it: `_plain`, `_kernel_y` or `pruned_product`.
      product: The static arguments.
      x, w: The operands as the forward product uses them.
      inputs: The other inputs.
    """

    run: Callable[..., jax.Array]
    product: StaticProduct
    x: jax.Array
    w: jax.Array
    inputs: Inputs

    def compute(self) -> jax.Array:
        """Return the product."""
        return self.run(self.product, self.x, self.w, self.inputs)


def bilinear(
    op: Operation, lhs: jax.Array, rhs: jax.Array, sparsity: Sparsity, ctx: Ctx = Ctx(), backend: str = "auto",
    *, name: str | None = None, packed: Mapping[FormKey, Form] | None = None, extra: tuple[jax.Array, ...] = (),
) -> jax.Array:  # fmt: skip
    """Return ``op(lhs, rhs, *extra)``, with pruned operands in it and in the two products of its gradient.

    Args:
      op: The bilinear operation, a hashable value that holds the operands' axes.
      lhs: The left operand, x.
      rhs: The right operand, the weight.
      sparsity: The pruner of each slot.
      ctx: Key, step and state.
      backend: The backend, one of `nmjax.kernels.targets.BACKENDS`.
      name: The layer's name. Error messages begin with it.
      packed: The weight's forms, from `nmjax.products.weights.packed_weight`.
      extra: The operands that the operation takes after these two: the sizes of a `RaggedDot`.
    """
    return prepare(op, lhs, rhs, sparsity, ctx, backend, name=name, packed=packed, extra=extra).compute()


def prepare(
    op: Operation, lhs: jax.Array, rhs: jax.Array, sparsity: Sparsity, ctx: Ctx, backend: str, *, name: str | None,
    packed: Mapping[FormKey, Form] | None, extra: tuple[jax.Array, ...] = (),
) -> Call:  # fmt: skip
    """Apply the forward slots, and choose how the products are computed. The arguments are those of `bilinear`."""
    check_backend(backend)
    if not isinstance(sparsity, Sparsity) or not isinstance(ctx, Ctx):
        wrong = told(ctx if isinstance(sparsity, Sparsity) else sparsity)
        raise TypeError(f"a product takes sparsity=nm.parse('s_ste(2,4)') and ctx=nm.Ctx(...), got {wrong}.")
    if ctx.key is not None:
        ctx = ctx.replace(key=random.words(ctx.key))
    if ctx.kernels is None or backend == "xla":
        ctx = ctx.replace(kernels=pruning_kernels(backend))
    if sparsity.else_dense:
        sparsity, _ = fitting(op, lhs, rhs, sparsity)
    left, right = sparsity.slots["y_x"], sparsity.slots["y_w"]
    product = StaticProduct(op, sparsity, name, None)
    axes = product.operands(lhs, rhs)
    x = prune_slot(product, left, left.applied, lhs, axes, ctx)
    w = prune_slot(product, right, right.applied, rhs, axes, ctx)
    forward_only = not sparsity.backward and left.storage is None and right.storage is None
    plain = Call(_plain, product, x, w, Inputs(None, None, ctx, packed, extra))
    if forward_only and left.applied == right.applied == identity:
        return plain
    compacted = compacted_of(op, lhs, rhs, sparsity, backend, name)
    routes = routes_of(op, lhs, rhs, sparsity, backend, name, products_of(packed))
    if routes is None and forward_only and not compacted:
        return plain
    product = product._replace(routes=routes, compacted=compacted)
    inputs = Inputs(
        lax.stop_gradient(lhs) if sparsity.slots["dw_x"].raw or _reads_unpruned(product, "x") else None,
        lax.stop_gradient(rhs) if sparsity.slots["dx_w"].raw or _reads_unpruned(product, "w") else None,
        ctx,
        packed,
        extra,
    )
    y_alone = routes is None or not (routes["dx"].uses_forms or routes["dw"].uses_forms)
    # autodiff gives the derivatives if only y is pruned and no kernel computes dx or dw; else the custom_vjp does
    return Call(_kernel_y if forward_only and y_alone else pruned_product, product, x, w, inputs)


def _plain(product: StaticProduct, x: jax.Array, w: jax.Array, inputs: Inputs) -> jax.Array:
    return product.op(x, w, *inputs.extra)


def _reads_unpruned(product: StaticProduct, operand: str) -> bool:
    """Return True if the forward product reads an unpruned operand: to choose its rows, or to make a form of it."""
    return ("y", operand) in product.compacted or needs_unpruned(product.routes, product.sparsity, operand)


# ---- a kernel computes y; autodiff computes derivatives ----


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _kernel_y(product: StaticProduct, x: jax.Array, w: jax.Array, inputs: Inputs) -> jax.Array:
    """Compute y with a kernel, and its derivatives with ``op``."""
    return _forward(product, x, w, inputs, ("y",))[0]


@partial(_kernel_y.defjvp, symbolic_zeros=True)
def _(product: StaticProduct, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    x, w, inputs = primals
    dx, dw, _ = tangents
    y = _kernel_y(product, x, w, inputs)
    terms = []
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        terms.append(product.op(dx, w, *inputs.extra))
    if not isinstance(dw, jax.custom_derivatives.SymbolicZero):
        terms.append(product.op(x, dw, *inputs.extra))
    if not terms:
        return y, jnp.zeros_like(y)
    return y, as_varying(sum(terms[1:], terms[0]), varying(y))


# ---- the custom_vjp for all three products ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def pruned_product(product: StaticProduct, x: jax.Array, w: jax.Array, inputs: Inputs) -> jax.Array:
    """Compute y. The gradients of x and w are those of `pruned_product_backward`."""
    return _forward(product, x, w, inputs, ("y",))[0]


def _forward(
    product: StaticProduct, x: jax.Array, w: jax.Array, inputs: Inputs, products: Iterable[str]
) -> tuple[jax.Array, Forms]:
    """Return y, and the forms of x and w that the kernels of the given products read."""
    op, routes = product.op, product.routes
    forms: Forms = {}
    if routes is not None:
        prune_here = partial(prune_slot, product, axes=product.operands(x, w), ctx=inputs.ctx)
        forms = {
            operand.name: make_forms(routes, product.sparsity, operand, inputs.ctx, inputs.packed, prune_here, products)
            for operand in (OperandValue("x", x, inputs.unpruned_x), OperandValue("w", w, inputs.unpruned_w))
        }
    stored = lambda name: _stored(product, name, x if name == "y_x" else w)
    chosen = dict(product.compacted).get("y")
    if chosen is not None:
        slot, axes = product.sparsity.slots[OPERANDS["y"][chosen]], product.operands(x, w)
        few = gather_rows(product, slot, {"y_x": inputs.unpruned_x, "y_w": inputs.unpruned_w}, axes, inputs.ctx)
        other = PARTNER_SLOT[slot.name]
        theirs = gather_matching_rows(stored(other), slot, other, axes, few, inputs.ctx.kernels)
        return op(*((few.values, theirs) if chosen == "x" else (theirs, few.values)), *inputs.extra), forms
    if routes is None:
        return op(stored("y_x"), stored("y_w"), *inputs.extra), forms
    if not routes["y"].uses_forms:
        return op(stored("y_x"), stored("y_w")), forms
    dtype = jax.eval_shape(op, x, w).dtype
    dense = lambda: stored("y_w" if routes["y"].operand == "x" else "y_x")
    y = product_of_forms(routes, "y", _forms_of(forms, "y"), dense, dtype)
    return checkpoint_name(y, KEPT), forms  # as `nmjax.policies` keeps the products of XLA


def _stored(product: StaticProduct, name: str, value: jax.Array) -> jax.Array:
    """Round an operand of the forward product to its storage format, if it has one."""
    storage = product.sparsity.slots[name].storage
    if storage is None:
        return value
    with jax.named_scope(name):
        return storage(value)


def _forms_of(forms: Forms, name: str) -> dict[str, Form]:
    """Return the forms of one product, by operand."""
    return {operand: by_product[name] for operand, by_product in forms.items() if name in by_product}


class Residuals(NamedTuple):
    """The values that the backward pass keeps.

    Attributes:
      x: The left operand as the forward product uses it; only its type, if dw does not need it.
      w: The weight as the forward product uses it.
      kept: The part of x that dw needs in place of x; None if dw needs x itself or a form of x.
      inputs: The other inputs.
      forms: The forms of x and w.
    """

    x: jax.Array | Aval
    w: jax.Array
    kept: Rows | Entries | None
    inputs: Inputs
    forms: Forms


def pruned_product_forward(
    product: StaticProduct, x: jax.Array, w: jax.Array, inputs: Inputs
) -> tuple[jax.Array, Residuals]:
    """Return y, and the residuals for the backward pass."""
    # The backward pass gets x and w themselves, so that JAX sees if they are also the unpruned operands.
    y, forms = _forward(
        product, _forbid_second_derivative(product, x), _forbid_second_derivative(product, w), inputs, tuple(CONTRACTED)
    )
    # Check the backward slots here, so that the traceback shows the caller's line. Do not check in
    # `pruned_product`: without differentiation no key is needed, and any number of tokens is allowed.
    axes, check = product.operands(x, w), lambda *given: merged_operand(*given).array
    for name, value in backward_values(product.sparsity, x, w, inputs.unpruned_x, inputs.unpruned_w, y).items():
        slot = product.sparsity.slots[name]
        check_partner(product, slot, x, w)
        prune_slot(product, slot, slot.pruner, value, axes, inputs.ctx, check, inputs.extra)
    backward = {
        operand: {p: form for p, form in by_product.items() if p != "y"} for operand, by_product in forms.items()
    }
    name = partial(jax.tree.map, lambda v: checkpoint_name(v, KEPT))
    backward |= {"x": name(backward["x"])} if "x" in backward else {}
    kept = name(kept_of_x(product, x, w, inputs.unpruned_x, inputs.ctx, inputs.extra))
    by_kernel = product.routes is not None and product.routes["dw"].takes("x")  # its form of x is in `forms`
    drop = kept is not None or (by_kernel and not reads_partner(product))
    return y, Residuals(like(x) if drop else x, w, kept, inputs._replace(unpruned_x=None) if drop else inputs, backward)


def pruned_product_backward(
    product: StaticProduct, residuals: Residuals, g: jax.Array, forms_of_g: Mapping[str, Form] | None = None
) -> tuple[jax.Array | None, jax.Array | None, None]:  # fmt: skip
    """Return dx and dw. ``forms_of_g`` has forms of g that are made already, by product."""
    x, w, kept, inputs, forms = residuals
    sparsity, routes, ctx = product.sparsity, product.routes, inputs.ctx
    w, g = _forbid_second_derivative(product, w), _forbid_second_derivative(product, g)
    x = x.type if isinstance(x, Aval) else _forbid_second_derivative(product, x)
    values, axes = backward_values(sparsity, x, w, inputs.unpruned_x, inputs.unpruned_w, g), product.operands(x, w)
    prune_here = partial(prune_slot, product, axes=axes, ctx=ctx, extra=inputs.extra, values=values)

    def prune(name: str) -> jax.Array:
        slot = sparsity.slots[name]
        if name == "dw_x" and isinstance(kept, Entries):
            assert slot.pattern is not None
            return unpack(kept, x.shape, axes[name], slot.pattern)
        return prune_here(slot, slot.pruner, values[name])

    if routes is not None:
        ready = forms_of_g or {}
        others = [name for name in CONTRACTED if name not in ready]
        made = make_forms(routes, sparsity, OperandValue("g", g, None), ctx, None, prune_here, others)
        forms = {**forms, "g": {**made, **ready}}

    def gradient(name: str, like: Shaped) -> jax.Array:
        """Return dx or dw: from the rows that a slot chose, by a kernel, or by XLA from both pruned operands."""
        (_, of_g), (_, other) = OPERANDS[name].items()
        chosen = dict(product.compacted).get(name)
        if chosen is not None:
            return from_rows(name, chosen, like)
        if routes is None or not routes[name].uses_forms:
            return _transposed(name, product.op, prune(of_g), prune(other), like, inputs.extra)
        dense = other if routes[name].operand == "g" else of_g
        y = product_of_forms(routes, name, _forms_of(forms, name), lambda: prune(dense), like.dtype)
        return summed_as(y, like)

    def from_rows(name: str, chosen: str, like: Shaped) -> jax.Array:
        """Multiply the rows that the slot of operand ``chosen`` keeps by the same rows of its partner."""
        slot = sparsity.slots[OPERANDS[name][chosen]]
        theirs = PARTNER_SLOT[slot.name]
        given = slot.name == "dw_x" and isinstance(kept, Rows)
        few = kept if given else gather_rows(product, slot, values, axes, ctx)
        op, value = without_strides(product.op, prune(theirs)) if name == "dw" else (product.op, prune(theirs))
        value = gather_matching_rows(value, slot, theirs, axes, few, ctx.kernels)
        pair = (few.values, value) if chosen == "g" else (value, few.values)
        if isinstance(op, (Dot, Conv)) and op.out_sharding is not None:  # rows that are left may lie on other axes
            op = replace(op, out_sharding=jax.typeof(pair[0]).sharding)
        return _transposed(name, op, *pair, like, inputs.extra)

    real = lambda v: jnp.issubdtype(v.dtype, jnp.inexact)  # integers have no gradient
    return gradient("dx", x) if real(x) else None, gradient("dw", w) if real(w) else None, None


def _transposed(
    name: str, op: Operation, g: jax.Array, other: jax.Array, like: Shaped, extra: tuple[jax.Array, ...]
) -> jax.Array:
    """Return dx, the product of g and w, or dw, the product of g and x."""
    forward = (lambda v: op(v, other, *extra)) if name == "dx" else (lambda v: op(other, v, *extra))
    with plain_vmap_error():
        return jax.linear_transpose(forward, like)(g)[0]


pruned_product.defvjp(pruned_product_forward, pruned_product_backward)


def _forbid_second_derivative(product: StaticProduct, v: jax.Array) -> jax.Array:
    """Return an input of a gradient unchanged, and refuse to differentiate it where no second derivative exists.

    Each input has a call of its own, so that JAX can leave out those that a gradient does not read.
    """
    if not isinstance(v, jax.core.Tracer):
        return v
    if product.sparsity.backward:
        return _traced_once(product.sparsity, v)
    return v if product.routes is None and not product.compacted else calls.nondifferentiable(v)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _nondifferentiable(sparsity: Sparsity, v: jax.Array) -> jax.Array:
    return v


@_nondifferentiable.defjvp
def _(sparsity: Sparsity, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    filled = "; ".join(str(slot) for slot in sparsity.slots.values() if slot.name in BACKWARD and not slot.empty)
    raise TypeError(
        f"a product whose gradient is pruned ({filled}) has no derivative beyond the gradient of its layer: for a "
        "second derivative leave backward slots empty, as ste(2,4) does."
    )


_traced_once = jax.jit(_nondifferentiable, static_argnums=0, inline=True)  # traced once for all layers that are alike


def summed_as(y: jax.Array, like: Shaped) -> jax.Array:
    """Sum a gradient over the `jax.shard_map` axes on which its primal is replicated."""
    axes = tuple(varying(y) - varying(like))
    return lax.psum(y, axes) if axes else y
