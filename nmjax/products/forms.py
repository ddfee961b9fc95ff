"""The forms in which kernels take the operands of a layer's products, and the products of these forms.

A form is a packed array, or an array in FP8 with the factor that undoes its scale. If a kernel can prune while it
makes the form, it does; else XLA prunes, and the kernel packs. Forms of x and w are made in the forward pass, once
for all products, and forms of g in the backward pass."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.kernels import calls, limits
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import Copy
from nmjax.products.routes import CONTRACTED, LAID_AS, OPERANDS, Routes, result_axes
from nmjax.products.slot import Slot
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity

FORWARD_SLOT = {"x": "fwd_lhs", "w": "fwd_rhs"}

Form = Packed | tuple[jax.Array | Packed, jax.Array]
"""A packed array of 16-bit values; or an FP8 array, packed or not, with the factor that undoes its scale."""


class FormKey(NamedTuple):
    """The name of one form of a weight.

    Attributes:
      product: "fwd" or "dlhs".
      axes: How the weight lies as a matrix, "IO" or "OI".
      packed: True if it is packed.
      format: Its FP8 format; "" if its values have 16 bits.
    """

    product: str
    axes: str
    packed: bool
    format: str


class Source(NamedTuple):
    """The array that a form is made from, and what the kernel has yet to do to it.

    Attributes:
      array: The array.
      pruner: What the kernel prunes by; `identity` if the array is pruned already.
      along: The axis of the pruner's groups: T, I or O.
      key, state: What the pruner reads.
      rounding: How it is rounded to FP8, "nearest" or "random".
      rounding_key: The key of random rounding.
    """

    array: jax.Array
    pruner: Pruner = identity
    along: str = ""
    key: Any = None
    state: Any = None
    rounding: str = "nearest"
    rounding_key: Any = None


class Want(NamedTuple):
    """A form that a product takes an operand in."""

    product: str
    packed: bool
    format: str | None
    source: Source


class OperandValue(NamedTuple):
    """One operand of a layer, and how it was before its forward slot.

    Attributes:
      name: X, w or g.
      value: What the forward slot made of it.
      unpruned: The operand itself, if a form is made of it; else None.
    """

    name: str
    value: jax.Array
    unpruned: jax.Array | None


PruneByXla = Callable[[Slot, Pruner, jax.Array], jax.Array]
"""(slot, pruner, value) -> the pruned value, by the reference."""


def make_forms(
    routes: Routes, sparsity: Sparsity, operand: OperandValue, ctx: Ctx, packed: Mapping[FormKey, Form] | None,
    prune: PruneByXla, products: Iterable[str] = tuple(CONTRACTED),
) -> dict[str, Form]:  # fmt: skip
    """Return the forms that products take an operand in, by product.

    Args:
      routes: Who runs the products.
      sparsity: What is pruned.
      operand: The operand.
      ctx: Key, step and state of the layer.
      packed: Forms of the weight that were made before.
      prune: XLA's way to prune, for pruners that no kernel knows.
      products: The products to make forms for.
    """
    products = [product for product in products if _takes(routes, product, operand.name)]
    forms: dict[str, Form] = {}
    if operand.name == "w" and packed:
        forms = _packed_before(routes, products, packed)
    products = [product for product in products if product not in forms]
    fused = _fuses(routes, sparsity, operand.name, products)
    wants = [_want(routes, sparsity, product, operand, ctx, prune, fused) for product in products]
    forms |= _in_16_bits(routes, operand.name, [want for want in wants if want.format is None])
    forms |= _in_fp8(routes, operand.name, [want for want in wants if want.format is not None])
    return forms


def _takes(routes: Routes, product: str, operand: str) -> bool:
    return operand in OPERANDS[product] and routes[product].takes(operand)


def _packed_before(
    routes: Routes, products: Iterable[str], packed: Mapping[FormKey, Form]
) -> dict[str, Form]:  # fmt: skip
    """Return the forms of the weight that were given."""
    layout = routes.layout
    forms: dict[str, Form] = {}
    for product in products:
        form = packed.get(key_of_weight(routes, product))
        if form is None:
            continue
        shape = (form[0] if isinstance(form, tuple) else form).shape
        if len(shape) != 3 or math.prod(shape) != layout.size("B") * layout.size("I") * layout.size("O"):
            raise ValueError(
                f"{routes.name or 'a product'}: its weight of shape {layout.w.shape} was packed before as one of "
                f"{shape}. The forms of a stack of layers are sliced as its kernels are: "
                "nnx.StateAxes({nnx.Param: 0, nm.nnx.NM: 0, ...: None})."
            )
        forms[product] = form
    return forms


def products_of(packed: Mapping[FormKey, Form] | None) -> frozenset[str]:
    """Return the products whose form of the weight was given."""
    return frozenset(key.product for key in packed or ())


def key_of_weight(routes: Routes, product: str) -> FormKey:
    """Return the name of the form in which a product takes the weight."""
    route = routes[product]
    return FormKey(product, routes.layout.w.axes, route.operand == "w", dict(route.formats).get("w", ""))


# ---- where forms are made from ----


def _want(
    routes: Routes, sparsity: Sparsity, product: str, operand: OperandValue, ctx: Ctx, prune: PruneByXla,
    fused: Callable[[Pruner], bool],
) -> Want:  # fmt: skip
    """Return the form that a product takes an operand in, and where it is made from.

    It is made from the operand as it was, by a pruner that the kernel fuses, if there is one; else from what XLA
    pruned. An FP8 form is rounded by the kernel. In a 16-bit form of a slot that ends in `fp8`, XLA simulates the
    rounding."""
    route, slot = routes[product], sparsity.slots[OPERANDS[product][operand.name]]
    packed = route.how == "packed" and route.operand == operand.name
    format = dict(route.formats).get(operand.name)
    simulated = format is None and slot.storage is not None
    rounding = _rounding(slot, ctx)
    pruning, along, array = slot, CONTRACTED[product], operand.value
    if operand.name in FORWARD_SLOT:
        forward = sparsity.slots[FORWARD_SLOT[operand.name]]
        if slot is forward or slot.raw:
            array = operand.unpruned
        elif slot.core == identity:  # the forward product's value again
            pruning, along, array = forward, CONTRACTED["fwd"], operand.unpruned
    by_forward = pruning.name in FORWARD_SLOT.values()
    if pruning.core is not None and fused(pruning.core) and array is not None and not simulated:
        inner = pruning.core_context(ctx)
        key = inner.key if pruning.core.stochastic else None
        return Want(product, packed, format, Source(array, pruning.core, along, key, inner.state, *rounding))
    value = operand.value
    if not by_forward:
        assert array is not None
        value = prune(pruning, pruning.pruner if format is None else pruning.applied, array)
    elif simulated and slot.storage is not None:
        value = slot.storage(value)
    return Want(product, packed, format, Source(value, identity, along, None, None, *rounding))


def _rounding(slot: Slot, ctx: Ctx) -> tuple[str, Any]:
    """Return how a slot rounds to FP8, and by which key."""
    if slot.storage is None or not slot.storage.stochastic:
        return "nearest", None
    return "random", slot.rounding_key(ctx)


def needs_unpruned(routes: Routes | None, sparsity: Sparsity, operand: str) -> bool:
    """Return True if a form is made from an operand as it was before its forward slot."""
    if routes is None or not any(routes[product].takes(operand) for product in CONTRACTED):
        return False
    core = sparsity.slots[FORWARD_SLOT[operand]].core
    return core is not None and _fuses(routes, sparsity, operand, CONTRACTED)(core)


def _fuses(
    routes: Routes, sparsity: Sparsity, operand: str, products: Iterable[str]
) -> Callable[[Pruner], bool]:  # fmt: skip
    """Return a function that says if a kernel prunes by a pruner while it makes these forms.

    It prunes by tiles only where it packs a weight along both of its axes.
    """
    again = sparsity.slots["dlhs_rhs"]
    reused = again.core == identity and not again.raw
    both = {"fwd", "dlhs"} <= set(products) and operand == "w"
    packed = all(routes[product].operand == "w" and not routes[product].formats for product in ("fwd", "dlhs"))
    tiles = both and packed and reused and len(routes.layout.w.shape) == 2
    return lambda p: limits.fuses(p) or (tiles and p.by_tile)


# ---- making forms ----


def matrix(routes: Routes, operand: str, v: jax.Array) -> jax.Array:
    """Return an operand as [B, rows, columns]."""
    return v.reshape(routes.layout.size("B"), *routes.layout.sides(operand))


def _axis(routes: Routes, operand: str, axis: str) -> int:
    """Return where T, I or O lies in an operand's matrix, -2 or -1."""
    return routes.layout.matrix(operand).axes.index(axis) - 2


def _in_16_bits(routes: Routes, operand: str, wants: Sequence[Want]) -> dict[str, Form]:
    if len(wants) == 2 and wants[0].source.array is wants[1].source.array and _one_mask(wants):
        array = matrix(routes, operand, wants[0].source.array)
        both = calls.compress_both(array, wants[0].source.pruner, target=routes.device)
        by_axis = {form.axis: form for form in both}
        return {want.product: by_axis[_axis(routes, operand, CONTRACTED[want.product])] for want in wants}
    forms: dict[str, Form] = {}
    for want in wants:
        source, axis = want.source, _axis(routes, operand, CONTRACTED[want.product])
        array = matrix(routes, operand, source.array)
        forms[want.product] = calls.compress(
            array, axis, source.pruner, key=source.key, state=source.state, target=routes.device
        )
    return forms


def _one_mask(wants: Sequence[Want]) -> bool:
    """Return True if both forms keep the same values, 2:4 along both axes."""
    return all(want.source.pruner == identity or want.source.pruner.by_tile for want in wants)


def _in_fp8(routes: Routes, operand: str, wants: Sequence[Want]) -> dict[str, Form]:
    """Return forms in FP8, along k. Forms of one array and one key are made in one reading of it."""
    batches: list[list[Want]] = []
    for want in wants:
        mate = next((batch for batch in batches if _read_together(batch[0].source, want.source)), None)
        if mate is None:
            batches.append([want])
        else:
            mate.append(want)
    forms: dict[str, Form] = {}
    for batch in batches:
        copies = tuple(_copy(routes, operand, want) for want in batch)
        keys = [
            next((key for key in keys if key is not None), 0)
            for keys in zip(*((want.source.key, want.source.rounding_key) for want in batch), strict=True)
        ]
        state = next((want.source.state for want in batch if want.source.state is not None), None)
        array = matrix(routes, operand, batch[0].source.array)
        in_fp8 = calls.copies(array, copies, keys=keys, state=state, target=routes.device)
        forms |= {want.product: form for want, form in zip(batch, in_fp8, strict=True)}
    return forms


def _copy(routes: Routes, operand: str, want: Want) -> Copy:
    assert want.format is not None
    return Copy(
        want.format,
        turned=_axis(routes, operand, CONTRACTED[want.product]) == -2,
        packed=want.packed,
        pruner=want.source.pruner,
        axis=_axis(routes, operand, want.source.along),
        rounding=want.source.rounding,
    )


def _read_together(a: Source, b: Source) -> bool:
    """Return True if one kernel can make forms of both: of one array, without draws of two keys."""
    if a.array is not b.array:
        return False
    pruned_twice = a.pruner.stochastic and b.pruner.stochastic
    rounded_twice = a.rounding == b.rounding == "random"
    if not pruned_twice and not rounded_twice and (a.state is None or b.state is None):
        return True
    any_draws = any(s.pruner.stochastic or s.rounding == "random" for s in (a, b))
    return a.state is b.state and not any_draws


# ---- products of forms ----


def product_of_forms(
    routes: Routes, product: str, forms: Mapping[str, Form], dense: Callable[[], jax.Array], dtype: Any
) -> jax.Array:
    """Return a product that a kernel runs, or that runs in FP8.

    Args:
      routes: Who runs the products.
      product: "fwd", "dlhs" or "drhs".
      forms: The forms of its operands, by operand.
      dense: A function that returns the other operand of a packed product of 16 bits.
      dtype: The dtype of the result.
    """
    route, layout = routes[product], routes.layout
    shape = layout.matrix(LAID_AS[product]).shape
    if route.how == "packed":
        assert route.shape is not None
        other = next(o for o in OPERANDS[product] if o != route.operand)
        if route.formats:
            (a, undo_a), (b, undo_b) = _in_format(forms, route.operand), _in_format(forms, other)
            return calls.run(a, b, undo_a * undo_b, shape=route.shape, target=routes.device).reshape(shape)
        a, b = forms[route.operand], matrix(routes, other, dense())
        assert isinstance(a, Packed)
        return calls.run(a, b, None, shape=route.shape, target=routes.device).reshape(shape)
    first = next(
        operand
        for operand in OPERANDS[product]
        if layout.matrix(operand).axes.replace(CONTRACTED[product], "") == result_axes(product, layout)[0]
    )
    second = next(o for o in OPERANDS[product] if o != first)
    (a, undo_a), (b, undo_b) = _in_format(forms, first), _in_format(forms, second)
    if routes.device.interpret:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    y = lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return (y * (undo_a * undo_b)).astype(dtype).reshape(shape)


def _in_format(forms: Mapping[str, Form], operand: str) -> tuple[Any, jax.Array]:
    """Return an operand in FP8, and the factor that undoes its scale."""
    form = forms[operand]
    assert isinstance(form, tuple)
    return form
