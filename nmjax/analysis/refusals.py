"""The plan's refusals: this file decides what a plan says that training would refuse.

There are two kinds:

- A slot is refused if its pruner cannot prune the operands of one of the layer's products: an axis does not divide
  into groups, the groups would lie on two devices, or the dtype is wrong (`slot_refusal`).
- A product is refused if ``backend="pallas"`` demands a kernel and no kernel can run it (`product_refusal`).

The reasons are those that a product itself raises: they come from `nmjax.products.rule.refusals` and
`nmjax.products.routes`. A plan collects them in ``Plan.refused``.

`nmjax.nnx.sparsify` refuses more than a plan does: for example layers whose product is the model's own, layers in
nnx.WeightNorm or nnx.SpectralNorm, ambiguous stacks, and pruned weights of an nnx.Einsum without einsum_str. See
`nmjax.nnx.delivery`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax

from nmjax.core.refusal import Refusal
from nmjax.products.operations import Operation
from nmjax.products.routes import Route, not_packed
from nmjax.products.rule import refusals
from nmjax.products.sparsity import Sparsity


class Use(NamedTuple):
    """A product that a call asks a layer for.

    Attributes:
      op: The operation.
      lhs: The shape of the left operand, in one layer of a stack.
      rhs: The shape of the weight, likewise.
      stacked: The number of layers in the stack.
    """

    op: Operation
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    stacked: int


def slot_refusal(slot: str, sparsity: Sparsity, uses: Iterable[Use]) -> Refusal | None:
    """Return the reason why a slot cannot prune in some product of a layer; None if it can prune in all.

    Args:
      slot: The name of the slot, such as "fwd_rhs".
      sparsity: What the layer prunes.
      uses: The products of the layer. The first that refuses gives the reason.
    """
    for use in uses:
        reason = dict(refusals(use.op, use.lhs, use.rhs, sparsity)).get(slot)
        if reason:
            return Refusal(reason)
    return None


def product_refusal(product: str, route: Route, backend: str) -> Refusal | None:
    """Return the reason why a backend refuses a product; None if it runs it.

    Args:
      product: "fwd", "dlhs" or "drhs".
      route: The route that the product would take. Pruned zeros that XLA would multiply are "emulated".
      backend: The layer's backend. Only "pallas" refuses.
    """
    if backend == "pallas" and route.how == "emulated":
        return Refusal(not_packed(product, route))
    return None
