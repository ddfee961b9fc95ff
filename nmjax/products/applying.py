"""Applying the pruner of a slot to its operand: all of the operand, or only the rows that are kept."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.products.compaction import Rows, choose, partner_norms, partner_refusal, take, without_strides
from nmjax.products.keeping import Entries, pack, packed_pattern
from nmjax.products.layout import OPERANDS
from nmjax.products.operations import Operation
from nmjax.products.pruning import Operand, Shaped, pruned
from nmjax.products.ragged import by_expert
from nmjax.products.routes import Compacted, Routes
from nmjax.products.slot import WEIGHT, Slot
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity
from nmjax.pruners.whole_rows import rows

PARTNER_SLOT = {  # slot -> the slot of the other operand of its product
    mine: theirs for slots in OPERANDS.values() for mine, theirs in (tuple(slots.values()), tuple(slots.values())[::-1])
}


class StaticProduct(NamedTuple):
    """The static arguments of a layer's products.

    ``routes`` is None if no kernel runs a product. ``compacted`` has the products that multiply chosen rows.
    """

    op: Operation
    sparsity: Sparsity
    name: str | None
    routes: Routes | None
    compacted: Compacted = ()

    def operands(self, lhs: Shaped, rhs: Shaped) -> dict[str, Operand]:
        """Return the axes of each slot's operand."""
        return self.op.operands(lhs.ndim, rhs.ndim)


def prune_slot(
    product: StaticProduct, slot: Slot, p: Pruner, value: Any, axes: Mapping[str, Operand], ctx: Ctx,
    call: Callable[..., Any] = pruned, extra: tuple[jax.Array, ...] = (), values: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Prune an operand with a slot's pruner.

    Args:
      product: The product.
      slot: The slot.
      p: The slot's pruner, or the part of it that is to be applied.
      value: The operand.
      axes: The axes of each slot's operand.
      ctx: Key, step and state of the product.
      call: The function to call: `pruned`, or one that checks without pruning.
      extra: The operands of the operation after the first two.
      values: The input of each backward slot, for a pruner that reads the norms of the other operand.
    """
    if p == identity:
        return value
    label = _label(product, slot.name, p)
    own = slot.context(ctx).replace(partner=_partner(product, slot, values, axes))
    if p.facts.has_state and slot.name in WEIGHT and own.state is None:
        raise ValueError(
            f"{label} keeps state between steps and was given none: pass "
            "ctx=Ctx(state=sparsity.init(w, contract=..., out=...)). contract are the axes of w that the product sums "
            "over, out are its other axes."
        )
    operand = axes[slot.name]
    with jax.named_scope(slot.name):
        return (by_expert(call, *extra) if operand.ragged else call)(label, p, value, operand, own)


def _label(product: StaticProduct, slot: str, p: Pruner) -> str:
    return f"{slot}={p}" if product.name is None else f"{product.name}: {slot}={p}"


def _partner(
    product: StaticProduct, slot: Slot, values: Mapping[str, Any] | None, axes: Mapping[str, Operand]
) -> jax.Array | None:
    """Return the norms of the rows of a product's other operand, if the slot's pruner reads them."""
    if values is None or not slot.pruner.facts.reads_partner:
        return None
    other = PARTNER_SLOT[slot.name]
    value = without_strides(product.op, values[other])[1] if other == "dw_x" else values[other]
    return partner_norms(axes[slot.name], values[slot.name].ndim, value, axes[other])


def check_partner(product: StaticProduct, slot: Slot, x: Shaped, w: Shaped) -> None:
    """Raise a `ValueError` if a slot's pruner reads the rows of the other operand, and they are not rows of x."""
    refusal = partner_refusal(product.op, x, w, slot)
    if refusal is not None:
        raise ValueError(f"{_label(product, slot.name, slot.pruner)}: {refusal}")


def gather_rows(
    product: StaticProduct, slot: Slot, values: Mapping[str, Any], axes: Mapping[str, Operand], ctx: Ctx
) -> Rows:
    """Return the rows of an operand that a slot keeps.

    Args:
      product: The product.
      slot: The slot. Its core is `rows`.
      values: The input of each slot.
      axes: The axes of each slot's operand.
      ctx: Key, step and state of the product.
    """
    p = slot.core
    assert isinstance(p, rows)
    own = slot.core_context(ctx).replace(partner=_partner(product, slot, values, axes))
    with jax.named_scope(slot.name):
        choice = choose(_label(product, slot.name, slot.pruner), p, values[slot.name], axes[slot.name], own)
        at = axes[slot.name], choice.places, p.facts.block
        few = take(values[slot.name], *at, choice.scales, ctx.kernels)
        return Rows(few, choice.places)


def gather_matching_rows(
    value: jax.Array, slot: Slot, other: str, axes: Mapping[str, Operand], few: Rows, kernels: Any = None
) -> jax.Array:
    """Return the rows of the other operand of a product that a slot has chosen.

    Args:
      value: The other operand.
      slot: The slot that has chosen.
      other: The slot of the other operand.
      axes: The axes of each slot's operand.
      few: The rows that it has chosen.
      kernels: As in `take`.
    """
    assert isinstance(slot.core, rows)
    with jax.named_scope(other):
        return take(value, axes[other], few.places, slot.core.facts.block, kernels=kernels)


def reads_partner(product: StaticProduct) -> bool:
    """Return True if a choice in dw needs the rows of both operands."""
    return any(product.sparsity.slots[name].pruner.facts.reads_partner for name in ("dw_x", "dw_g"))


def kept_of_x(
    product: StaticProduct, x: jax.Array, w: Shaped, unpruned: jax.Array | None, ctx: Ctx,
    extra: tuple[jax.Array, ...] = (),
) -> Rows | Entries | None:  # fmt: skip
    """Return what dw needs of x, if that is less than x and is known in the forward pass.

    Args:
      product: The product.
      x: The left operand as the forward product uses it.
      w: The weight.
      unpruned: The left operand before it is pruned, if ``dw_x`` is `raw`.
      ctx: Key, step and state of the product.
      extra: The operands of the operation after the first two.
    """
    if reads_partner(product):
        return None
    slot, axes = product.sparsity.slots["dw_x"], product.operands(x, w)
    value = unpruned if slot.raw else x
    if ("dw", "x") in product.compacted:
        return gather_rows(product, slot, {slot.name: value}, axes, ctx)
    by_kernel = product.routes is not None and product.routes["dw"].takes("x")  # its form of x is kept
    pattern = packed_pattern(slot.pattern, x, axes[slot.name])
    if by_kernel or pattern is None:
        return None
    value = prune_slot(product, slot, slot.pruner, value, axes, ctx, extra=extra)
    with jax.named_scope(slot.name):
        return pack(value, axes[slot.name], pattern)
