"""Convert operands to the forms that kernels read, and multiply them.

A form is a packed array, or an FP8 array with its inverse scale. If a kernel can prune while it makes the form, it
does; else XLA prunes, and the kernel packs. Forms of x and w are made in the forward pass, once for all products, and
forms of g in the backward pass."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.kernels import calls, limits
from nmjax.kernels.activations import Activation
from nmjax.kernels.calls import Form
from nmjax.kernels.check import ACTIVATED, BOTH, fault
from nmjax.kernels.format import Packed
from nmjax.kernels.limits import Copy
from nmjax.products.layout import CONTRACTED, LAID_AS, OPERANDS
from nmjax.products.routes import Routes, result_axes
from nmjax.products.slot import Slot
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity

FORWARD_SLOT = {"x": "y_x", "w": "y_w"}


class FormKey(NamedTuple):
    """The key of one form of a weight.

    Attributes:
      product: "y" or "dx".
      axes: The axis order of the weight matrix, "IO" or "OI".
      packed: True if it is packed.
      format: Its FP8 format; "" if its values have 16 bits.
    """

    product: str
    axes: str
    packed: bool
    format: str


class KernelInput(NamedTuple):
    """The input of the kernel that makes a form, and what that kernel still has to do.

    Attributes:
      array: The array.
      pruner: The pruner that the kernel applies; `identity` if the array is pruned already.
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


class FormRequest(NamedTuple):
    """A form that a product needs."""

    product: str
    packed: bool
    format: str | None
    source: KernelInput


class OperandValue(NamedTuple):
    """One operand of a layer, pruned and unpruned.

    Attributes:
      name: "x", "w" or "g".
      value: The operand after its forward slot; for g, the gradient.
      unpruned: The unpruned operand, or None if no form needs it.
    """

    name: str
    value: jax.Array
    unpruned: jax.Array | None


PruneByXla = Callable[[Slot, Pruner, jax.Array], jax.Array]
"""(slot, pruner, value) -> the value pruned by XLA."""


def make_forms(
    routes: Routes, sparsity: Sparsity, operand: OperandValue, ctx: Ctx, packed: Mapping[FormKey, Form] | None,
    prune: PruneByXla, products: Iterable[str] = tuple(CONTRACTED),
) -> dict[str, Form]:  # fmt: skip
    """Return one operand's form for each product.

    Args:
      routes: How each product runs.
      sparsity: The pruner of each slot.
      operand: The operand.
      ctx: Key, step and state of the layer.
      packed: The weight's forms that `nmjax.products.weights.packed_weight` made, or None.
      prune: Prunes with XLA; used if no kernel supports the pruner.
      products: The products to make forms for.
    """
    products = [product for product in products if _takes(routes, product, operand.name)]
    forms: dict[str, Form] = {}
    if operand.name == "w" and packed:
        forms = _packed_before(routes, products, packed)
    products = [product for product in products if product not in forms]
    fused = _fuses(routes, sparsity, operand.name, products)
    wants = [_form_request(routes, sparsity, product, operand, ctx, prune, fused) for product in products]
    return forms | _made(routes, operand.name, wants)


def _takes(routes: Routes, product: str, operand: str) -> bool:
    return operand in OPERANDS[product] and routes[product].takes(operand)


def _packed_before(
    routes: Routes, products: Iterable[str], packed: Mapping[FormKey, Form]
) -> dict[str, Form]:  # fmt: skip
    """Return the forms of the weight found in ``packed``."""
    layout = routes.layout
    forms: dict[str, Form] = {}
    for product in products:
        form = packed.get(key_of_weight(routes, product))
        if form is None:
            continue
        shape = (form[0] if isinstance(form, tuple) else form).shape
        if len(shape) != 3 or math.prod(shape) != layout.size("B") * layout.size("I") * layout.size("O"):
            raise ValueError(
                f"{routes.name or 'a product'}: its weight has shape {layout.w.shape}, but its packed form has shape "
                f"{shape}. If layers are stacked, slice the packed forms with the kernels: "
                "nnx.StateAxes({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None})."
            )
        forms[product] = form
    return forms


def products_of(packed: Mapping[FormKey, Form] | None) -> frozenset[str]:
    """Return the products whose form of the weight is in ``packed``."""
    return frozenset(key.product for key in packed or ())


def key_of_weight(routes: Routes, product: str) -> FormKey:
    """Return the key of the form that a product uses for the weight."""
    route = routes[product]
    return FormKey(product, routes.layout.w.axes, route.operand == "w", dict(route.formats).get("w", ""))


# ---- which forms are needed, and from which arrays ----


def _form_request(
    routes: Routes, sparsity: Sparsity, product: str, operand: OperandValue, ctx: Ctx, prune: PruneByXla,
    fused: Callable[[Pruner], bool],
) -> FormRequest:  # fmt: skip
    """Return the form that a product needs of an operand, and the array that it is made from.

    If the kernel can apply the pruner, the form is made from the array that the slot prunes; otherwise from the array
    that XLA pruned. The kernel rounds an FP8 form. If the slot ends in `fp8` or `fp4` but the form has 16 bits, XLA
    simulates the rounding."""
    route, slot = routes[product], sparsity.slots[OPERANDS[product][operand.name]]
    packed = route.how == "packed" and route.operand == operand.name
    format = dict(route.formats).get(operand.name)
    simulated = format is None and slot.storage is not None
    rounding = ("nearest" if slot.storage is None else slot.storage.rounding), slot.rounding_key(ctx)
    pruning_slot, along, array = slot, CONTRACTED[product], operand.value
    if operand.name in FORWARD_SLOT:
        forward = sparsity.slots[FORWARD_SLOT[operand.name]]
        if slot is forward or slot.raw:
            array = operand.unpruned
        elif slot.core == identity:  # a backward slot that prunes nothing: as in the forward product
            pruning_slot, along, array = forward, CONTRACTED["y"], operand.unpruned
    by_forward = pruning_slot.name in FORWARD_SLOT.values()
    if pruning_slot.core is not None and fused(pruning_slot.core) and array is not None and not simulated:
        inner = pruning_slot.core_context(ctx)
        key = inner.key if pruning_slot.core.facts.stochastic else None
        return FormRequest(
            product, packed, format, KernelInput(array, pruning_slot.core, along, key, inner.state, *rounding)
        )
    value = operand.value
    if not by_forward:
        assert array is not None
        value = prune(pruning_slot, pruning_slot.pruner if format is None else pruning_slot.applied, array)
    elif simulated and slot.storage is not None:
        with jax.named_scope(slot.name):
            value = slot.storage(value)
    return FormRequest(
        product, packed, format, KernelInput(value, identity, CONTRACTED[product], None, None, *rounding)
    )


def needs_unpruned(routes: Routes | None, sparsity: Sparsity, operand: str) -> bool:
    """Return True if some form needs the unpruned operand."""
    if routes is None or not any(routes[product].takes(operand) for product in CONTRACTED):
        return False
    core = sparsity.slots[FORWARD_SLOT[operand]].core
    return core is not None and _fuses(routes, sparsity, operand, CONTRACTED)(core)


def _fuses(
    routes: Routes, sparsity: Sparsity, operand: str, products: Iterable[str]
) -> Callable[[Pruner], bool]:  # fmt: skip
    """Return a predicate: can a kernel apply this pruner while it makes these forms?

    Tile pruners are fused only if the weight is packed along both axes.
    """
    dx_slot = sparsity.slots["dx_w"]
    reuses_forward = dx_slot.core == identity and not dx_slot.raw
    both_products = {"y", "dx"} <= set(products) and operand == "w"
    packed = all(routes[product].operand == "w" and not routes[product].formats for product in ("y", "dx"))
    fuses_tiles = both_products and packed and reuses_forward and len(routes.layout.w.shape) == 2
    return lambda p: limits.fuses(p) or (fuses_tiles and p.kernel_form.tile is not None)


# ---- making forms ----


def matrix(routes: Routes, operand: str, v: jax.Array) -> jax.Array:
    """Return an operand as [B, rows, columns]."""
    return v.reshape(routes.layout.size("B"), *routes.layout.sides(operand))


def _axis(routes: Routes, operand: str, axis: str) -> int:
    """Return where T, I or O lies in an operand's matrix, -2 or -1."""
    return routes.layout.matrix(operand).axes.index(axis) - 2


def _made(routes: Routes, operand: str, wants: Sequence[FormRequest]) -> dict[str, Form]:
    """Return forms, in FP8 contiguous along the contracted axis. Those that `_read_together` allows share a pass."""
    passes: list[list[FormRequest]] = []
    for want in wants:
        own = next((one for one in passes if _read_together(routes, one[0], want)), None)
        if own is None:
            passes.append([want])
        else:
            own.append(want)
    forms: dict[str, Form] = {}
    for own in passes:
        copies, sources = tuple(_copy(routes, operand, want) for want in own), [want.source for want in own]
        array, keys = matrix(routes, operand, sources[0].array), [(s.key, s.rounding_key) for s in sources]
        state = next((s.state for s in sources if s.state is not None), None)
        with _scope(operand, own):
            if len(own) == 1 and copies[0].format is None:
                copy, options = copies[0], {"key": keys[0][0], "state": state, "target": routes.device}
                made: Sequence[Form] = [calls.compress(array, copy.axis, copy.pruner, **options)]
            else:
                made = calls.copies(array, copies, keys=keys, state=state, target=routes.device)
        forms |= {want.product: form for want, form in zip(own, made, strict=True)}
    return forms


def _scope(operand: str, wants: Iterable[FormRequest]) -> Any:
    """Return the `jax.named_scope` that forms are made in: their slots, as in "y_w+dx_w"."""
    return jax.named_scope("+".join(OPERANDS[want.product][operand] for want in wants))


def _copy(routes: Routes, operand: str, want: FormRequest) -> Copy:
    contracted = _axis(routes, operand, CONTRACTED[want.product])
    axis = contracted if want.packed else _axis(routes, operand, want.source.along)
    return Copy(want.format, contracted == -2, want.packed, want.source.pruner, axis, want.source.rounding)


def _read_together(routes: Routes, a: FormRequest, b: FormRequest) -> bool:
    """Return True if one kernel call can make both forms: they read one array, and do not need two states."""
    one, two = a.source, b.source
    if one.array is not two.array or not (one.state is None or two.state is None or one.state is two.state):
        return False
    return (a.format is not None and b.format is not None) or fault(routes.device, (BOTH,)) is None


def can_fuse(routes: Routes | None, sparsity: Sparsity) -> bool:
    """Return True if a kernel packs g for dw, and can compute g from the gradient of an activation function's output.

    Args:
      routes: How each product runs.
      sparsity: The pruner of each slot.
    """
    if routes is None or routes["dw"].how != "packed" or routes["dw"].operand != "g" or routes["dw"].formats:
        return False
    core, device = sparsity.slots["dw_g"].core, routes.device
    if core is None or not limits.fuses(core) or sparsity.slots["dw_g"].storage is not None:
        return False
    one_process = device.devices == 1 and jax.process_count() == 1
    return one_process and _axis(routes, "g", "T") == -2 and fault(device, (ACTIVATED,)) is None


def pack_gradient(
    routes: Routes, sparsity: Sparsity, activation: Activation, h: jax.Array, g: jax.Array, ctx: Ctx
) -> tuple[jax.Array, dict[str, Form]]:
    """Compute the gradient of an activation function's input, and pack it for dw. Call it only if `can_fuse` is True.

    Args:
      routes, sparsity: As in `can_fuse`.
      activation: The function. It is `nmjax.kernels.activations.known`.
      h: The function's input.
      g: The gradient of its output.
      ctx: Key, step and state of the layer.

    Returns:
      The gradient, and its packed form by the name of the product.
    """
    slot = sparsity.slots["dw_g"]
    own = slot.core_context(ctx)
    assert slot.core is not None
    key = own.key if slot.core.facts.stochastic else None
    with jax.named_scope("dw_g"):
        made, form = calls.compress_activated(
            activation, matrix(routes, "g", h), matrix(routes, "g", g), slot.core, key=key, state=own.state,
            target=routes.device,
        )  # fmt: skip
    return made.reshape(g.shape), {"dw": form}


# ---- multiplying forms ----


def product_of_forms(
    routes: Routes, product: str, forms: Mapping[str, Form], dense: Callable[[], jax.Array], dtype: Any
) -> jax.Array:
    """Multiply forms: with a kernel if one is packed, else with XLA in FP8.

    Args:
      routes: How each product runs.
      product: "y", "dx" or "dw".
      forms: The forms of its operands, by operand.
      dense: Returns the dense operand of a 16-bit packed product.
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
    """Return an operand in FP8, and its inverse scale."""
    form = forms[operand]
    assert isinstance(form, tuple)
    return form
