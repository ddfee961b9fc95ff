"""The six slots of a linear layer, and the normal form of a slot's pruner.

============  ====================  ===========================
product       slots                 contracts: groups lie along
============  ====================  ===========================
y  = x w      ``y_x``, ``y_w``      in-features
dx = g w^T    ``dx_g``, ``dx_w``    out-features
dw = x^T g    ``dw_g``, ``dw_x``    tokens: batch and positions
============  ====================  ===========================

A slot is named after its product and then its operand. g is the gradient of y.

Every slot prunes along the contraction axis of its own product, so no axis has to be given.

A slot is put in normal form once, when its `Sparsity` is created. Products, kernels, FLOPs and plans read the `Slot`;
none of them looks inside a pruner. Each combinator defines its normal form in its method `normal_form`.

Who rounds to FP8 and FP4, and when:

- An `fp8` or `fp4` at the end of a slot is the slot's storage (see ``normal_form`` of `fp8`, `chain` and `raw`). An
  empty slot has none.
- A product can run in FP8 if both of its operands are stored in FP8, for dx those of ``dx_g`` and ``dx_w``
  (``routes._formats``). It does if the device, the layout, the dtypes and the backend allow it (``routes._route``).
- In FP8, the kernel that makes a form rounds it: `nmjax.products.forms` asks for it, `nmjax.kernels.tiles` does it.
- Otherwise, and of FP4 always, XLA simulates the rounding: of forward operands in ``rule._stored``; of backward
  operands in ``rule.pruned_product_backward``, which calls the slot's pruner, and that ends in the storage; of 16-bit
  forms in ``forms._form_request``.
- Random rounding is allowed for backward operands only (``_check_slot``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nmjax.core import random
from nmjax.core.context import Ctx
from nmjax.core.paths import follow
from nmjax.core.pruner import NormalForm, Pattern, Pruner
from nmjax.core.value import told
from nmjax.pruners import hold, identity, stages
from nmjax.pruners.float4 import fp4
from nmjax.pruners.float8 import fp8

FORWARD = ("y_x", "y_w")
BACKWARD = ("dx_g", "dx_w", "dw_g", "dw_x")
SLOTS = FORWARD + BACKWARD
WEIGHT = ("y_w", "dx_w")  # the slots that can keep state between steps
RAW = ("dx_w", "dw_x")  # the slots where `raw` is allowed


@dataclass(frozen=True)
class Slot:
    """One of the six slots of a layer, with its pruner.

    Attributes:
      name: One of `SLOTS`.
      pruner: The pruner as given.
      form: Its normal form.
    """

    name: str
    pruner: Pruner
    form: NormalForm

    @property
    def empty(self) -> bool:
        """True if the pruner is `identity`."""
        return self.pruner == identity

    @property
    def core(self) -> Pruner | None:
        """The only part that changes values, apart from the storage. `identity` if no part does; None if several do."""
        return self.form.core

    @property
    def applied(self) -> Pruner:
        """The pruner without its storage. In a forward slot it includes the gradient rule."""
        return self.form.applied

    @property
    def storage(self) -> fp8 | fp4 | None:
        """The `fp8` or `fp4` to which the product rounds the operand. None if the operand keeps its dtype."""
        storage = self.form.storage
        assert storage is None or isinstance(storage, fp8 | fp4)
        return storage

    @property
    def raw(self) -> bool:
        """True if the unpruned operand is pruned, not the value that the forward product used."""
        return self.form.raw

    @property
    def pattern(self) -> Pattern | None:
        """The n:m pattern of the pruned operand along the contracted axis."""
        return self.pruner.facts.pattern

    def context(self, ctx: Ctx) -> Ctx:
        """Return the slot's context: its own key for this step, and its own state."""
        return slot_context(ctx, self.name)

    def core_context(self, ctx: Ctx) -> Ctx:
        """Return the context of the core, given the product's."""
        return follow(self.form.core_path, self.context(ctx))

    def rounding_key(self, ctx: Ctx) -> Any:
        """Return the key for random rounding. None if the slot has no storage, or the storage rounds to nearest."""
        if self.storage is None or not self.storage.facts.stochastic:
            return None
        return follow(self.form.storage_path, self.context(ctx).replace(state=None)).key

    def __str__(self) -> str:
        return f"{self.name}={self.pruner}"


def as_slot(name: str, pruner: Any) -> Slot:
    """Return a slot in normal form. Raise an error if the pruner is not allowed in this slot."""
    _check_pruner(name, pruner)
    slot = Slot(name, pruner, pruner.normal_form())
    storage = slot.form.storage
    if storage is not None and not isinstance(storage, fp8 | fp4):
        raise TypeError(
            f"{slot}: {type(pruner).__name__}.normal_form gives {storage} as its storage, which is no fp8 or fp4."
        )
    _check_slot(slot)
    return slot


def _check_pruner(name: str, pruner: Any) -> None:
    if isinstance(pruner, Pruner):
        return
    raise TypeError(f"{name} takes a pruner, such as mse(2,4), got {told(pruner)}.")


def _check_slot(slot: Slot) -> None:
    """Raise an error if the pruner is not allowed in this slot."""
    p, forward = slot.pruner, slot.name in FORWARD
    if slot.raw and slot.name not in RAW:
        raise ValueError(f"{slot}: raw is only for dx_w and dw_x. Here write {slot.name}={p.parts[0]}.")
    if p.facts.gradient_rule and not forward:
        rule = slot.form.rule
        instead = "Write the rows without ste or sr_ste." if rule is None else f"Write {slot.name}={rule.parts[0]}."
        raise ValueError(
            f"{slot}: a gradient rule has no meaning in a backward slot, which is never differentiated. {instead}"
        )
    if forward and p.facts.reads_partner:
        raise ValueError(
            f"{slot}: only a backward slot may read the norms of both operands, because a forward value serves other "
            "products too. Write by='own'."
        )
    if p.facts.reads_partner and p.facts.has_state:
        raise ValueError(
            f"{slot}: it keeps state, but the norms of the other operand are new at every call. Write by='own'."
        )
    if forward and slot.storage is not None and slot.storage.facts.stochastic:
        raise ValueError(
            f"{slot}: a forward operand is rounded to nearest, because several products must see the same value. "
            f"Random rounding is for gradients, in dx_g and dw_g. Here write {slot.storage.final}."
        )
    if forward and p.facts.stochastic and not p.facts.noise_in_rule:
        raise ValueError(f"{slot}: autodiff gives a random choice no useful gradient. Write {slot.name}=ste({p}).")
    if forward and (blind := _by_no_gradient(p)) is not None:
        raise ValueError(
            f"{slot}: {blind} chooses by gradients, and autodiff gives dropped weights none. Write ste({blind})."
        )
    if (frozen := _never_renewed(p)) is not None:
        raise ValueError(f"{slot}: {frozen} never looks at the gradients by which it chooses. Write every=... too.")
    if p.facts.needs_state and slot.name not in WEIGHT:
        raise ValueError(
            f"{slot}: {p} keeps state between steps, and only the slots of the weight can: y_w and dx_w. Write "
            "a pruner without state here, such as mse(2,4)."
        )


def _by_no_gradient(p: Pruner) -> Pruner | None:
    """Return the pruner, or the row of stages, that reads gradients and has no gradient rule; None if none does."""
    if isinstance(p, stages):
        return next((found for row in p.parts if (found := _by_no_gradient(row)) is not None), None)
    return p if p.facts.reads_gradient and not p.facts.gradient_rule else None


def _never_renewed(p: Pruner) -> Pruner | None:
    """Return the `hold` in a pruner that keeps a first mask of one that reads gradients; None if there is none."""
    if isinstance(p, hold) and p.every is None and p.facts.reads_gradient:
        return p
    return next((found for part in p.parts if (found := _never_renewed(part)) is not None), None)


def slot_context(ctx: Ctx, name: str) -> Ctx:
    """Return the slot's context, given the product's: its own key for this step, and its own state."""
    state, key = slot_state(ctx.state, name), None
    if ctx.key is not None:
        key = random.fold(random.fold(random.words(ctx.key), ctx.step), SLOTS.index(name))
    return Ctx(key, ctx.step, state, since=ctx.since, gradient=ctx.gradient, kernels=ctx.kernels)


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
