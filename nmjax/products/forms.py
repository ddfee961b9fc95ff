"""Running a layer's products by kernels: the forms that operands are wanted in, and the products of these.

What prunes an operand is fused with making its form where a kernel can do both; else XLA prunes, and the kernel packs.
Forms of x and w are made in the forward pass, once for all products, those of g in the backward pass.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner, apart
from nmjax.kernels import calls, limits
from nmjax.products.routes import CONTRACTED, OPERANDS, WRAPPERS, Engine, result, store
from nmjax.products.sparsity import Sparsity, slot_ctx, stored
from nmjax.pruners import identity, transposable
from nmjax.pruners.combinators import chain, folded, raw
from nmjax.pruners.float8 import fp8

FORWARD = {"x": "fwd_lhs", "w": "fwd_rhs"}


class Source(NamedTuple):
    """An array, and what is yet to be done to it."""

    array: jax.Array
    pruner: Pruner = identity
    along: str = ""  # the axis of the pruner's groups
    key: Any = None
    state: Any = None
    rounding: str = "nearest"  # to FP8, and its key
    rounding_key: Any = None


class Want(NamedTuple):
    """A form that a product takes an operand in."""

    product: str
    packed: bool
    format: str | None
    source: Source


def forms(
    engine: Engine, sparsity: Sparsity, operand: str, value, unpruned, ctx: Ctx, prune: Callable,
    products: Iterable[str] = tuple(CONTRACTED),
) -> dict[str, Any]:  # fmt: skip
    """The forms of an operand, by product: packed, or in FP8. ``value`` is what its forward slot made of ``unpruned``, and
    ``prune(slot, p, value)`` is XLA's way."""
    takes = lambda c, product: c and operand in OPERANDS[product] and (c.formats or c.operand == operand)
    wanted, wants = [product for product in products if takes(engine[product], product)], []
    found = _made_before(engine, wanted, ctx) if operand == "w" and ctx.packed else {}
    fused = fuses(engine, sparsity, operand, [product for product in wanted if product not in found])
    for product in (product for product in wanted if product not in found):
        choice = engine[product]
        packed, format = choice.how == "packed" and choice.operand == operand, dict(choice.formats).get(operand)
        source = _source(sparsity, product, operand, value, unpruned, ctx, prune, fused, whole=format is None)
        wants.append(Want(product, packed, format, source))
    small = [want for want in wants if want.format]
    found |= _in_16_bits(engine, operand, [w for w in wants if not w.format])
    return found | _in_fp8(engine, operand, small)


def _made_before(engine: Engine, products: Iterable[str], ctx: Ctx) -> dict[str, Any]:
    """The forms of the weight that were given."""
    sizes, found = dict(engine.layout.sizes), {}
    for product in products:
        if (form := ctx.packed.get(form_of_weight(engine, product))) is not None:
            shape = (form[0] if isinstance(form, tuple) else form).shape
            if len(shape) != 3 or math.prod(shape) != sizes["B"] * sizes["I"] * sizes["O"]:
                weight = dict(engine.layout.shapes)["w"]
                raise ValueError(
                    f"{ctx.name or 'a product'}: its weight of shape {weight} was packed before as one of {shape}. The forms of a stack "
                    "of layers are sliced as its kernels are: nnx.StateAxes({nnx.Param: 0, nm.nnx.NM: 0, ...: None})."
                )
            found[product] = form
    return found


def products_of(ctx: Ctx) -> frozenset[str]:
    """The products whose form of the weight was given."""
    return frozenset(name.partition(" ")[0] for name in ctx.packed or ())


def form_of_weight(engine: Engine, product: str) -> str:
    """What tells the forms of one weight apart."""
    choice = engine[product]
    how = "packed" if choice.operand == "w" else "whole"
    return " ".join([product, dict(engine.layout.labels)["w"], how, dict(choice.formats).get("w", "16 bits")])


def _source(sparsity, product, operand, value, unpruned, ctx, prune, fused, whole) -> Source:
    """Where a form is made from: the operand as it was, with a pruner that is fused, or what XLA made of it. The
    ``whole`` slot is done, where one that ends in `fp8` is simulated; else the form is in FP8 itself."""
    slot = OPERANDS[product][operand]
    p, here = getattr(sparsity, slot), slot_ctx(ctx, slot)
    rounding = _rounding(p, here)
    forward = FORWARD.get(operand)
    if slot != forward and forward and not isinstance(p, raw) and _alone(p, here)[0] == identity:
        slot, p, along = forward, getattr(sparsity, forward), CONTRACTED["fwd"]  # the forward product's value again
        here, given = slot_ctx(ctx, slot), unpruned
    else:
        along = CONTRACTED[product]
        given = unpruned if slot == forward or isinstance(p, raw) else value
    simulated = whole and store(getattr(sparsity, OPERANDS[product][operand])) is not None
    core, inner = _core(p, here, fused)
    if core is not None and given is not None and not simulated:
        key = inner.key if core.stochastic else None
        return Source(given, core, along, key, inner.state, *rounding)
    if slot != forward:
        value = prune(slot, p if whole else _without_store(p), given)
    elif simulated:
        value = stored(getattr(sparsity, OPERANDS[product][operand]))[1](value)
    return Source(value, along=along, rounding=rounding[0], rounding_key=rounding[1])


def needs_unpruned(engine: Engine, sparsity: Sparsity, operand: str) -> bool:
    """Whether a form is made from what an operand was before its forward slot."""
    wanted = any(c and (c.formats or c.operand == operand) for c in map(engine.__getitem__, CONTRACTED))
    fused = fuses(engine, sparsity, operand, CONTRACTED)
    return wanted and _core(getattr(sparsity, FORWARD[operand]), Ctx(), fused)[0] is not None


def fuses(engine: Engine, sparsity: Sparsity, operand: str, products: Iterable[str]) -> Callable[[Pruner], bool]:
    """Whether a kernel prunes an operand by a pruner while it packs it for these products: by `transposable` where it packs
    a weight along both of its axes."""
    packed = lambda choice: choice is not None and choice.operand == operand == "w" and not choice.formats
    both = {"fwd", "dlhs"} <= set(products) and packed(engine["fwd"]) and packed(engine["dlhs"])
    again = not isinstance(sparsity.dlhs_rhs, raw) and _alone(sparsity.dlhs_rhs, Ctx())[0] == identity
    tiles = both and again and len(dict(engine.layout.shapes)["w"]) == 2
    return lambda p: limits.fuses(p) or (tiles and p == transposable(2, 4))


def _core(p: Pruner, ctx: Ctx, fused: Callable[[Pruner], bool]) -> tuple[Pruner | None, Ctx]:
    """The pruner of a slot that a kernel fuses, with its own key and state; None where there is none such."""
    core, inner = _alone(p, ctx)
    return (core if core is not None and fused(core) else None), inner


def _alone(p: Pruner, ctx: Ctx, last: bool = True) -> tuple[Pruner | None, Ctx]:
    """The one pruner of a slot, with its own key and state; None where there are several. What gradient it has is aside,
    and a ``last`` `fp8`, which says how the result is held."""
    if isinstance(p, fp8):
        return (identity if last else None), ctx
    if isinstance(p, chain):
        ends = [last and i == len(p.parts) - 1 for i in range(len(p.parts))]
        parts = [
            (q, folded(part, i), end)
            for i, (q, part, end) in enumerate(zip(p.parts, apart(p, ctx), ends, strict=True))
            if q != identity and not (isinstance(q, fp8) and end)
        ]
        return (identity, ctx) if not parts else _alone(*parts[0]) if len(parts) == 1 else (None, ctx)
    if type(p) in WRAPPERS:
        return _alone(p.parts[0], ctx, last)
    return p, ctx


def _rounding(p: Pruner, ctx: Ctx) -> tuple[str, Any]:
    """How a slot rounds to FP8, and by which key."""
    last = store(p)
    if last is None or not last.stochastic:
        return "nearest", None
    while not isinstance(p, fp8):
        ctx = folded(ctx, len(p.parts) - 1) if isinstance(p, chain) else ctx
        p = p.parts[-1]
    return "random", ctx.key


def _without_store(p: Pruner) -> Pruner:
    if isinstance(p, fp8):
        return identity
    if isinstance(p, chain) and p.parts:
        return chain(*p.parts[:-1], _without_store(p.parts[-1]))
    return raw(_without_store(p.p)) if isinstance(p, raw) else p


# ---- making forms ----


def matrix(engine: Engine, operand: str, v: jax.Array) -> jax.Array:
    """An operand as [B, rows, columns]."""
    sizes = dict(engine.layout.sizes)
    return v.reshape(sizes["B"], *(sizes[axis] for axis in dict(engine.layout.labels)[operand]))


def _axis(engine, operand, axis: str) -> int:
    return dict(engine.layout.labels)[operand].index(axis) - 2


def _in_16_bits(engine, operand, wants) -> dict[str, Any]:
    if len(wants) == 2 and wants[0].source.array is wants[1].source.array and _one_mask(wants):
        made = calls.compress_both(
            matrix(engine, operand, wants[0].source.array), wants[0].source.pruner, target=engine.here
        )
        by_axis = {form.axis: form for form in made}
        return {want.product: by_axis[_axis(engine, operand, CONTRACTED[want.product])] for want in wants}
    found = {}
    for want in wants:
        source, axis = want.source, _axis(engine, operand, CONTRACTED[want.product])
        view = matrix(engine, operand, source.array)
        noise = {"key": source.key, "state": source.state}
        found[want.product] = calls.compress(view, axis, source.pruner, target=engine.here, **noise)
    return found


def _one_mask(wants) -> bool:
    """Whether both forms keep the same values, 2:4 along both axes."""
    return all(want.source.pruner == identity or isinstance(want.source.pruner, transposable) for want in wants)


def _in_fp8(engine, operand, wants) -> dict[str, Any]:
    """Forms in FP8, along k; those of one array and one key out of one reading."""
    batches: list[list[Want]] = []
    for want in wants:
        mate = next((b for b in batches if _read_together(b[0].source, want.source)), None)
        mate.append(want) if mate else batches.append([want])
    found = {}
    for batch in batches:
        source = batch[0].source
        copies = tuple(
            limits.Copy(
                want.format,
                turned=_axis(engine, operand, CONTRACTED[want.product]) == -2,
                packed=want.packed,
                pruner=want.source.pruner,
                axis=_axis(engine, operand, want.source.along),
                rounding=want.source.rounding,
            )
            for want in batch
        )
        keys = [
            next((k for k in keys if k is not None), 0)
            for keys in zip(*((w.source.key, w.source.rounding_key) for w in batch), strict=True)
        ]
        state = next((want.source.state for want in batch if want.source.state is not None), None)
        view = matrix(engine, operand, source.array)
        made = calls.copies(view, copies, keys=keys, state=state, target=engine.here)
        found |= {want.product: form for want, form in zip(batch, made, strict=True)}
    return found


def _read_together(a: Source, b: Source) -> bool:
    """Whether one kernel can make forms of both: of one array, and with no draws of two keys."""
    draws = lambda s: (s.pruner.stochastic, s.rounding == "random")
    apart = any(x and y for x, y in zip(draws(a), draws(b), strict=True)) or None not in (a.state, b.state)
    return a.array is b.array and (not apart or (a.state is b.state and not any(draws(a)) and not any(draws(b))))


# ---- products of forms ----


def product(engine: Engine, name: str, made: dict[str, Any], dense: Callable[[], jax.Array], dtype) -> jax.Array:
    """A product of the forms of its operands; of 16 bits, of one form and the other operand as ``dense`` gives it."""
    choice, layout = engine[name], engine.layout
    axes, wanted = CONTRACTED[name], result(name, layout)
    shape = dict(layout.shapes)[{"fwd": "g", "dlhs": "x", "drhs": "w"}[name]]
    if choice.how == "packed":
        other = next(o for o in OPERANDS[name] if o != choice.operand)
        if choice.formats:
            (a, undo_a), (b, undo_b) = made[choice.operand], made[other]
            return calls.run(a, b, undo_a * undo_b, shape=choice.shape, target=engine.here).reshape(shape)
        b = matrix(engine, other, dense())
        return calls.run(made[choice.operand], b, None, shape=choice.shape, target=engine.here).reshape(shape)
    first = next(o for o in OPERANDS[name] if dict(layout.labels)[o].replace(axes, "") == wanted[0])
    second = next(o for o in OPERANDS[name] if o != first)
    (a, undo_a), (b, undo_b) = made[first], made[second]
    a, b = (v.astype(jnp.bfloat16) if engine.here.interpret else v for v in (a, b))
    y = lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return (y * (undo_a * undo_b)).astype(dtype).reshape(shape)
