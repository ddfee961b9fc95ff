"""The six slots of a linear layer, and the normal form of what fills one.

===========  ==========================  ===============================  ===========================
product      computes                    slots                            contracts, and so groups by
===========  ==========================  ===============================  ===========================
fwd          y  = x w                    ``fwd_lhs`` x, ``fwd_rhs`` w     in-features
dlhs         dx = g w^T                  ``dlhs_g`` g, ``dlhs_rhs`` w     out-features
drhs         dw = x^T g                  ``drhs_g`` g, ``drhs_lhs`` x     tokens: batch and positions
===========  ==========================  ===============================  ===========================

Every slot prunes along the contraction axis of its own product, so nobody names an axis.

A slot is taken apart once, when its `Sparsity` is made. Products, kernels, FLOPs and plans read the `Slot`; none of
them looks inside a pruner. What a combinator is to a slot stands in its own class, in `Pruner.normal`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.pruner import Normal, Pattern, Pruner, follow
from nmjax.pruners import identity
from nmjax.pruners.float8 import fp8

FORWARD = ("fwd_lhs", "fwd_rhs")
BACKWARD = ("dlhs_g", "dlhs_rhs", "drhs_g", "drhs_lhs")
SLOTS = FORWARD + BACKWARD
WEIGHT = ("fwd_rhs", "dlhs_rhs")  # the slots that can keep state between steps
RAW = ("dlhs_rhs", "drhs_lhs")  # the slots whose operand exists unpruned too


@dataclass(frozen=True)
class Slot:
    """What happens to one operand of one product.

    Attributes:
      name: One of `SLOTS`.
      pruner: The pruner as it was written.
      form: Its normal form.
    """

    name: str
    pruner: Pruner
    form: Normal

    @property
    def empty(self) -> bool:
        """True if nothing is written in the slot."""
        return self.pruner == identity

    @property
    def core(self) -> Pruner | None:
        """The one pruner that prunes; `identity` if none does, None if several do, one after another."""
        return self.form.core

    @property
    def applied(self) -> Pruner:
        """The pruner without its storage. In a forward slot it brings the gradient rule."""
        return self.form.applied

    @property
    def storage(self) -> fp8 | None:
        """The `fp8` in which the product holds the operand; None if it holds the operand's own dtype."""
        storage = self.form.storage
        assert storage is None or isinstance(storage, fp8)
        return storage

    @property
    def raw(self) -> bool:
        """True if the operand itself is pruned, not the value that the forward product used."""
        return self.form.raw

    @property
    def pattern(self) -> Pattern | None:
        """The n:m that it gives its operand along the axis that its product contracts."""
        return self.pruner.pattern

    def context(self, ctx: Ctx) -> Ctx:
        """Return what the slot's pruner reads: noise of its own at every step, and its own state."""
        return slot_context(ctx, self.name)

    def core_context(self, ctx: Ctx) -> Ctx:
        """Return what the core reads, given the context of the product."""
        return follow(self.form.core_path, self.context(ctx))

    def rounding_key(self, ctx: Ctx) -> Any:
        """Return the key by which the storage rounds at random; None if it rounds to nearest."""
        if self.storage is None or not self.storage.stochastic:
            return None
        return follow(self.form.storage_path, self.context(ctx).replace(state=None)).key

    def __str__(self) -> str:
        return f"{self.name}={self.pruner}"


def as_slot(name: str, pruner: Any) -> Slot:
    """Return a slot in normal form. Refuse a pruner where it has no meaning."""
    _check_pruner(name, pruner)
    slot = Slot(name, pruner, pruner.normal())
    storage = slot.form.storage
    if storage is not None and not isinstance(storage, fp8):
        raise TypeError(f"{slot}: {type(pruner).__name__}.normal gives {storage} as its storage, which is no fp8.")
    _check_slot(slot)
    return slot


def _check_pruner(name: str, pruner: Any) -> None:
    if isinstance(pruner, Pruner):
        return
    hint = f": parse it first, nm.parse_pruner({pruner!r})" if isinstance(pruner, str) else ""
    raise TypeError(f"{name} takes a pruner, got {type(pruner).__name__}{hint}.")


def _check_slot(slot: Slot) -> None:
    """Refuse a pruner where it has no meaning."""
    p, forward = slot.pruner, slot.name in FORWARD
    if slot.raw and slot.name not in RAW:
        raise ValueError(
            f"{slot}: raw prunes an operand itself, in dlhs_rhs or drhs_lhs. Here write {slot.name}={p.parts[0]}."
        )
    if p.ruled and not forward:
        rule = slot.form.rule
        instead = "the pruner itself" if rule is None else rule.parts[0]
        raise ValueError(
            f"{slot}: a gradient rule has no meaning in a backward slot, which is never differentiated. "
            f"Write {slot.name}={instead}."
        )
    if forward and p.bare_noise:
        raise ValueError(f"{slot}: autodiff gives a random choice no useful gradient. Write {slot.name}=ste({p}).")
    if forward and slot.storage is not None and slot.storage.stochastic:
        raise ValueError(
            f"{slot}: a forward operand is rounded to nearest, because several products must see the same value. "
            f"Random rounding is for gradients, in dlhs_g and drhs_g. Here write fp8({slot.storage.format!r})."
        )
    if p.stateful and slot.name not in WEIGHT:
        raise ValueError(
            f"{slot}: only a weight keeps state between steps, in fwd_rhs or dlhs_rhs. Here write a pruner without "
            "hold or permute."
        )


def slot_context(ctx: Ctx, name: str) -> Ctx:
    """Return the context of one slot, given the product's: noise of its own at every step, and its own state."""
    state, key = slot_state(ctx.state, name), None
    if ctx.key is not None:
        key = random.fold(random.fold(random.words(ctx.key), ctx.step), SLOTS.index(name))
    return Ctx(key, ctx.step, state)


def slot_state(state: Any, name: str) -> Any:
    """Return the state of one slot, given a product's state."""
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise TypeError(
            f"ctx.state of a product is a dict from slot to state, as Sparsity.init returns it, got "
            f"{type(state).__name__}."
        )
    if unknown := set(state) - set(WEIGHT):
        names = ", ".join(sorted(map(str, unknown)))
        raise ValueError(f"ctx.state has {names}: only {' and '.join(WEIGHT)} keep state.")
    return state.get(name)
