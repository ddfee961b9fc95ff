"""A method as a value: the pruners of the six slots."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import jax

from nmjax.core import groups
from nmjax.core.bases import inner_at
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.value import Value, written
from nmjax.products.pruning import Operand, along, pruned
from nmjax.products.slot import BACKWARD, FORWARD, SLOTS, Slot, as_slot
from nmjax.pruners import identity

ELSE = " else dense"  # at the end of a slot's text; alone, of the whole layer


@dataclass(frozen=True, repr=False)
class Sparsity(Value):
    """A method: the pruner of each of the six slots. An empty slot is `identity`, and all empty is dense.

    It prints as the text from which `nmjax.parse` makes it again. ``sparsity.slots`` has the normal form of each slot.

    Args:
      y_x, y_w, dx_g, dx_w, dw_g, dw_x: The pruner of each slot.
      else_dense: The slots that stay empty, instead of raising an error, if they cannot prune the shape of an operand.
        If True, the whole layer is dense if a slot of y or dx does not fit. A slot of dw that does not fit the number
        of tokens stays empty.

    Raises:
      TypeError: If a slot holds no pruner.
      ValueError: If a pruner has no meaning in its slot, or ``else_dense`` names no slot that prunes.

    >>> import nmjax as nm
    >>> nm.Sparsity(y_w=nm.ste(nm.mse(2, 4)), dw_g=nm.mvue(2, 4))
    y_w=ste(mse(2,4)); dw_g=mvue(2,4)
    >>> nm.Sparsity(y_w=nm.ste(nm.mse(2, 4)), else_dense=True)
    y_w=ste(mse(2,4)); else dense
    """

    y_x: Pruner = identity
    y_w: Pruner = identity
    dx_g: Pruner = identity
    dx_w: Pruner = identity
    dw_g: Pruner = identity
    dw_x: Pruner = identity
    else_dense: bool | tuple[str, ...] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.slots  # refuses what has no meaning
        object.__setattr__(self, "else_dense", self._may_be_dense())

    def _may_be_dense(self) -> bool | tuple[str, ...]:
        """Return the slots of ``else_dense`` in their order."""
        given = self.else_dense
        if isinstance(given, bool):
            return given and any(not slot.empty for slot in self.slots.values())
        wrong = [name for name in given if name not in SLOTS or self.slots[name].empty]
        if wrong:
            raise ValueError(
                f"else_dense={given!r}: {wrong[0]!r} is not a slot that prunes. Name such slots, or write True."
            )
        return tuple(name for name in SLOTS if name in given) or False

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """The normal form of each slot, by name."""
        return {name: as_slot(name, getattr(self, name)) for name in SLOTS}

    def __repr__(self) -> str:
        if written(self) is not None:
            return str(written(self))
        alone = () if isinstance(self.else_dense, bool) else self.else_dense
        parts = [f"{slot}{ELSE * (name in alone)}" for name, slot in self.slots.items() if not slot.empty]
        return "; ".join(parts + [ELSE.strip()] * (self.else_dense is True)) or "dense"

    def only(self, **slots: Pruner) -> "Sparsity":
        """Return a sparsity with only these slots. A slot that ``else_dense`` names here is named in the result too.

        Args:
          **slots: Pruners by the names of their slots. All other slots are empty.

        >>> import nmjax as nm
        >>> method = nm.parse("y_x=mse(2,4) else dense; dw_g=mvue(2,4)")
        >>> method.only(y_x=method.y_x)
        y_x=mse(2,4) else dense
        """
        left, these = self.else_dense, Sparsity(**cast(Any, slots))
        if isinstance(left, tuple):
            left = tuple(name for name in left if not these.slots[name].empty)
        return replace(these, else_dense=left)

    @property
    def backward(self) -> bool:
        """True if any backward slot prunes."""
        return any(not self.slots[name].empty for name in BACKWARD)

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """The steps, rising and above 0, at which a new phase begins: at which the result of `at` changes.

        >>> import nmjax as nm
        >>> nm.parse("mdgf(2,4,linear(1,0,60,begin=10)); dw_g=stages(((0,identity),(30,mvue(2,4))))").phases
        (11, 30, 70)
        """
        starts = sorted({step for slot in self.slots.values() for step in slot.pruner.phases})
        forms = [self.at(step) for step in (0, *starts)] if starts else []
        return tuple(s for s, before, now in zip(starts, forms, forms[1:], strict=False) if now != before)

    def at(self, step: int) -> "Sparsity":
        """Return an equivalent method for the phase that contains a step.

        In that phase both give the same values and gradients, and both have the same state. Where a schedule has ended,
        the result does not read it any more. So a kernel may run a product that is n:m from then on. A slot
        keeps its own pruner if the simpler one would change its rounding, its random numbers or its state.

        Args:
          step: A step, at least 0.

        >>> import nmjax as nm
        >>> nm.parse("mdgf(2,4,linear(1,0,60,begin=10)); dw_g=stages(((0,identity),(30,mvue(2,4))))").at(70)
        y_w=ste(mse(2,4)); dw_g=mvue(2,4)
        """
        if step < 0:
            raise ValueError(f"at: step must be at least 0, got {step}.")
        left = self.else_dense
        now = {}
        for name, slot in self.slots.items():
            now[name] = _slot_at(slot, step)
            may_be_dense = left is True or (isinstance(left, tuple) and name in left)
            if may_be_dense and not _fits_alike(slot.pruner, now[name], left is True and not name.startswith("dw_")):
                now[name] = slot.pruner
        if isinstance(left, tuple):
            left = tuple(name for name in left if now[name] != identity)
        return replace(self, **now, else_dense=left)

    def init(
        self, rhs: jax.Array, *, contract: int | tuple[int, ...], out: int | tuple[int, ...],
        batch: int | tuple[int, ...] = (), ctx: Ctx = Ctx(),
    ) -> dict[str, Any]:  # fmt: skip
        """Return the state of the weight slots, for ``ctx.state``. It is empty if the method has no state.

        Args:
          rhs: The weight.
          contract: The axes of ``rhs`` that the forward product contracts, one or several in the product's order.
          out: The axes of ``rhs`` that the forward product leaves, likewise.
          batch: The axes of ``rhs`` that are the product's batch. Each matrix of a batch has rows of its own.
          ctx: Key and step, if the method reads them.

        >>> import nmjax as nm
        >>> import jax.numpy as jnp
        >>> nm.Sparsity(y_w=nm.ste(nm.soft(2, 4))).init(jnp.array([[1.], [-2.], [3.], [-4.]]), contract=0, out=1)
        {'y_w': Array(2.2, dtype=float32)}
        """
        return self._states(rhs, (contract, out, batch), ctx.replace(state=None), "init")

    def refresh(
        self, rhs: jax.Array, *, contract: int | tuple[int, ...], out: int | tuple[int, ...],
        batch: int | tuple[int, ...] = (), ctx: Ctx = Ctx(),
    ) -> dict[str, Any]:  # fmt: skip
        """Return the state of ``ctx.step``, given in ``ctx.state`` the state of an earlier step. Arguments as in
        `init`."""
        return self._states(rhs, (contract, out, batch), ctx, "refresh")

    def _states(self, rhs: jax.Array, axes: tuple[int | tuple[int, ...], ...], ctx: Ctx, make: str) -> dict[str, Any]:
        """Return the states of the weight slots. ``axes`` are those of the contraction, the outputs and the batch."""
        inward, outward, batch = (_axes(rhs, each) for each in axes)
        space = tuple(a for a in range(rhs.ndim) if a not in inward + outward + batch)
        forward, backward = Operand(inward, outward, space, batch), Operand(outward, inward, space, batch)
        states: dict[str, Any] = {}
        slot = self.slots["y_w"]
        if slot.pruner.facts.has_state:
            states["y_w"] = _state(slot, rhs, forward, ctx, make)
        slot = self.slots["dx_w"]
        if slot.pruner.facts.has_state:
            weight = (
                rhs if slot.raw else self._used_forward(rhs, forward, ctx.replace(state=states or None, gradient=None))
            )
            states["dx_w"] = _state(slot, weight, backward, ctx, make)
        return states

    def _used_forward(self, rhs: jax.Array, operand: Operand, ctx: Ctx) -> jax.Array:
        """Return the weight as the forward product uses it."""
        slot = self.slots["y_w"]
        return pruned(f"y_w={slot.applied}", slot.applied, rhs, operand, slot.context(ctx))


def _slot_at(slot: Slot, step: int) -> Pruner:
    """Return `Pruner.at` for a slot. Return the pruner itself if the new one would round or draw differently."""
    whole = slot.pruner
    now = whole.at(step) if slot.name in FORWARD else inner_at(whole, step)
    try:
        new = as_slot(slot.name, now)
    except (TypeError, ValueError):  # such as random rounding in a forward slot
        return whole
    rounds_elsewhere = new.form.storage != slot.form.storage or new.raw != slot.raw
    other_noise = (
        now.facts.stochastic and now.facts.block != whole.facts.block
    )  # random numbers may be those of other groups
    return whole if rounds_elsewhere or other_noise else now


def _fits_alike(whole: Pruner, now: Pruner, of_layer: bool) -> bool:
    """Return True if both pruners fit the same shapes. ``of_layer``: a misfit makes the whole layer dense."""
    if now == identity and not of_layer:
        return True
    return (now.facts.block, now.facts.tiles, now.facts.reads_partner) == (
        whole.facts.block,
        whole.facts.tiles,
        whole.facts.reads_partner,
    )


def _axes(rhs: jax.Array, axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(groups.position(rhs.ndim, a) for a in (axes if isinstance(axes, (tuple, list)) else (axes,)))


def _state(slot: Slot, x: jax.Array, operand: Operand, ctx: Ctx, make: str) -> Any:
    with jax.named_scope(slot.name):
        return along(str(slot), slot.pruner, x, operand, slot.context(ctx), getattr(slot.pruner, make))[0]
