"""The forms of a weight, made before the products that read them."""

from functools import partial

import jax
from jax import lax

from nmjax.core.context import Ctx
from nmjax.products.applying import StaticProduct, prune_slot
from nmjax.products.fit import fitting
from nmjax.products.forms import Form, FormKey, OperandValue, key_of_weight, make_forms
from nmjax.products.operations import Operation
from nmjax.products.routes import routes_of
from nmjax.products.sparsity import Sparsity


def packed_weight(
    op: Operation, lhs: jax.ShapeDtypeStruct, rhs: jax.Array, sparsity: Sparsity, ctx: Ctx = Ctx(),
    backend: str = "auto", *, name: str | None = None,
) -> dict[FormKey, Form]:  # fmt: skip
    """Return the weight's forms. Pass them to a product as ``packed``.

    Use it to pack a weight once for all micro-steps. The result is empty if no product is packed. It omits forms that
    need new random numbers at each micro-step.

    Args:
      op: The operation.
      lhs: The shape of the left operand.
      rhs: The weight.
      sparsity, ctx, backend, name: As in `nmjax.products.rule.bilinear`.
    """
    if sparsity.else_dense:
        sparsity, _ = fitting(op, lhs, rhs, sparsity)
    forward = sparsity.slots["y_w"]
    weight_slots = {"y": forward, "dx": sparsity.slots["dx_w"]}
    fixed = frozenset(p for p, slot in weight_slots.items() if not slot.pruner.facts.needs_key)
    routes = routes_of(op, lhs, rhs, sparsity, backend, name, fixed)
    if routes is None or forward.pruner.facts.needs_key:
        return {}
    rhs = lax.stop_gradient(rhs)  # no gradient flows through the forms
    product = StaticProduct(op, sparsity, name, routes)
    prune_here = partial(prune_slot, product, axes=product.operands(lhs, rhs), ctx=ctx)
    w = prune_here(forward, forward.applied, rhs)
    forms = make_forms(
        routes, sparsity, OperandValue("w", w, rhs), ctx, None, prune_here, sorted(fixed, key=list(weight_slots).index)
    )
    return {key_of_weight(routes, product): form for product, form in forms.items()}
