"""The plan's refusals: what a plan says that training would refuse.

There are two kinds:

- A slot is refused if its pruner cannot prune the operands of one of the layer's products: an axis does not divide
  into groups, the groups would lie on two devices, or the dtype is wrong (`slot_refusal`).
- A product is refused if ``backend="pallas"`` demands a kernel, or ``backend="compact"`` fewer rows, and it cannot
  run so (`backend_refusal`).

The conditions are those of the products: `nmjax.products.pruning` checks an operand's axis, shards and dtype, and
`nmjax.products.routes` chooses kernels. A plan collects the refusals in ``Plan.refused`` and raises nothing.

`nmjax.nnx.sparsify` raises an error: for the slots that a plan refuses, for layers that it cannot make sparse
(`nmjax.nnx.delivery`), and for rules that match no layer (``Recipe.check``). It does not look at the backend.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax

from nmjax.core.refusal import Refusal
from nmjax.products.fit import fitting, slot_refusals
from nmjax.products.operations import Operation
from nmjax.products.routes import Route, chooses_rows, not_run
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


def slot_refusal(slot: str, sparsity: Sparsity, uses: Iterable[Use], tokens_known: bool = False) -> Refusal | None:
    """Return the reason why a slot cannot prune in some product of a layer; None if it can prune in all.

    Args:
      slot: The name of the slot, such as "y_w".
      sparsity: What the layer prunes.
      uses: The products of the layer. The first that refuses gives the reason.
      tokens_known: True if the shapes of the products are those of a call. Otherwise a reason states no shape of x
        and g.
    """
    for use in uses:
        refusal = dict(slot_refusals(use.op, use.lhs, use.rhs, sparsity, tokens_known)).get(slot)
        if refusal is not None:
            return refusal
    return None


def fitting_all(
    sparsity: Sparsity, uses: Iterable[Use], tokens_known: bool = True
) -> tuple[Sparsity, tuple[tuple[str, str], ...]]:  # fmt: skip
    """Return a sparsity without the slots that its ``else_dense`` leaves empty in some product of a layer.

    Args:
      sparsity: What the layer prunes.
      uses: The products of the layer.
      tokens_known: False if the number of tokens is not known, as before a call.

    Returns:
      The sparsity, and (slot, reason) of every slot that stays empty.
    """
    dense: dict[str, str] = {}
    for use in uses:
        sparsity, reasons = fitting(use.op, use.lhs, use.rhs, sparsity, tokens_known)
        dense |= reasons
    return sparsity, tuple(dense.items())


def backend_refusal(product: str, route: Route, backend: str, sparsity: Sparsity) -> Refusal | None:
    """Return the reason why a backend refuses a product; None if it runs it.

    Args:
      product: "y", "dx" or "dw".
      route: The route that the product would take. Pruned zeros that XLA would multiply are "emulated".
      backend: The layer's backend. "pallas" refuses every emulated product, "compact" those of chosen rows.
      sparsity: The pruner of each slot.
    """
    demanded = backend == "pallas" or (backend == "compact" and chooses_rows(sparsity, product))
    if demanded and route.how == "emulated":
        return Refusal(not_run(product, route, backend))
    return None
