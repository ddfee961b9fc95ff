"""The slots that cannot prune operands of some shapes, and methods without these slots."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.refusal import Refusal
from nmjax.products.compaction import partner_refusal
from nmjax.products.operations import Operation, result_shape
from nmjax.products.pruning import Operand, Shaped, along, check_shards, pruned
from nmjax.products.ragged import laid_out
from nmjax.products.slot import SLOTS, WEIGHT
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity

TOKENS = ("dw_g", "dw_x")  # the slots whose groups lie along tokens, which only a call knows


def fitting(
    op: Operation, lhs: Shaped, rhs: Shaped, sparsity: Sparsity, tokens_known: bool = True
) -> tuple[Sparsity, dict[str, str]]:  # fmt: skip
    """Return a sparsity in which the slots that do not fit are empty, as ``else_dense`` allows, with the reasons.

    Shardings are ignored, so the number of devices does not decide which layers are dense.

    Args:
      op: The operation.
      lhs: x, or its shape.
      rhs: The weight, or its shape.
      sparsity: The sparsity. Its ``else_dense`` says which slots may become empty.
      tokens_known: False if the number of tokens is not known, as before a call.
    """
    if sparsity.else_dense is False:
        return sparsity, {}
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (lhs, rhs)]
    refused = {name: refusal.reason for name, refusal in slot_refusals(op, *shapes, sparsity, tokens_known)}
    if not tokens_known:
        never = lambda name: partner_refusal(op, shapes[0], shapes[1], sparsity.slots[name]) is not None
        refused = {name: reason for name, reason in refused.items() if name not in TOKENS or never(name)}
    if sparsity.else_dense is True:
        whole = [name for name in refused if name not in TOKENS]
        if whole:
            return Sparsity(), {name: refused[whole[0]] for name in SLOTS if not sparsity.slots[name].empty}
        dense = refused
    else:
        dense = {name: reason for name, reason in refused.items() if name in sparsity.else_dense}
    left = sparsity.else_dense
    if isinstance(left, tuple):
        left = tuple(name for name in left if name not in dense)
    return replace(sparsity, **dict.fromkeys(dense, identity), else_dense=left), dense


@lru_cache
def assuming_features_fit(sparsity: Sparsity) -> Sparsity:
    """Return the method of a layer whose features are known to fit, as those of a sparse layer are.

    What ``else dense`` still decides there is the number of tokens. So the layer can have more phases than its method.

    Args:
      sparsity: The method of the layer.

    >>> import nmjax as nm
    >>> sparsity = nm.parse("mdgf(2,4,linear(1,0,60,begin=10)) else dense")
    >>> sparsity.phases, assuming_features_fit(sparsity).phases
    ((70,), (11, 70))
    """
    given = sparsity.else_dense
    left = SLOTS if given is True else given or ()
    tokens = tuple(name for name in TOKENS if name in left and not sparsity.slots[name].empty)
    return replace(sparsity, else_dense=tokens) if given else sparsity


def backward_values(sparsity: Sparsity, x: Any, w: Any, lhs: Any, rhs: Any, g: Any) -> dict[str, Any]:
    """Return the input of each backward slot, given the pruned and the unpruned operands and the gradient."""
    return {
        "dx_g": g,
        "dx_w": rhs if sparsity.slots["dx_w"].raw else w,
        "dw_g": g,
        "dw_x": lhs if sparsity.slots["dw_x"].raw else x,
    }


@lru_cache
def slot_refusals(
    op: Operation, lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, sparsity: Sparsity, tokens_known: bool = False
) -> tuple[tuple[str, Refusal], ...]:
    """Return (slot, refusal) for every slot whose pruner would raise an error with operands of these shapes and
    shardings. Reasons are the texts of these errors. They state shapes of x and g if ``tokens_known``."""
    g = result_shape(op, lhs, rhs)
    values = {"y_x": lhs, "y_w": rhs} | backward_values(sparsity, lhs, rhs, lhs, rhs, g)
    axes = op.operands(lhs.ndim, rhs.ndim)
    axes = {name: axes[name]._replace(known=tokens_known or name in WEIGHT) for name in SLOTS}
    refusals = []
    for name in SLOTS:
        slot, value = sparsity.slots[name], values[name]
        if slot.empty:
            continue
        try:
            partner = partner_refusal(op, lhs, rhs, slot)
            if partner is not None:
                raise ValueError(f"{slot}: {partner}")
            if axes[name].ragged:
                shape = laid_out(value, rhs.shape[0], slot.pruner.facts.block)
            else:
                check_shards(str(slot), slot.pruner, value, axes[name])
                shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
            refusal = _first_use_refusal(str(slot), slot.pruner, shape, axes[name])
        except (TypeError, ValueError) as error:
            refusal = Refusal(str(error))
        if refusal is not None:
            refusals.append((name, refusal))
    return tuple(refusals)


@lru_cache
def _first_use_refusal(label: str, p: Pruner, x: jax.ShapeDtypeStruct, operand: Operand) -> Refusal | None:
    """Return the error that a pruner raises for an array of this shape at the first step, or None."""

    def first_use(x: jax.Array) -> jax.Array:
        ctx = Ctx(random.words(0), 0)
        if p.facts.reads_partner:
            alone = (*operand.batch, *operand.contract)
            ctx = ctx.replace(partner=jnp.ones([x.shape[a] if a in alone else 1 for a in range(x.ndim)], jnp.float32))
        state = along(label, p, x, operand, ctx, p.init)[0] if p.facts.has_state else None
        return pruned(label, p, x, operand, ctx.replace(state=state))

    try:
        jax.eval_shape(first_use, x)
    except (TypeError, ValueError) as error:
        return Refusal(str(error))
    return None
