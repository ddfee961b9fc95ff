"""Which of a layer's three products run on sparse tensor cores, and why the others do not.

To a kernel an operand is a matrix of two of three axes: T tokens, I in-features, O out-features. Each product contracts
the third of its result::

    fwd    y [T, O] = x . w    over I         dlhs   dx = g . w    over O         drhs   dw = x . g    over T

A product is *packed* where one operand is 2:4, or sparser, along the contracted axis. Where both operands are held in FP8 it
runs in FP8, packed or not. What stands in the way is a reason, and the product is then *emulated*: XLA's, of pruned
operands. Where nothing is pruned it is *dense*.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nmjax.core.pruner import Pruner
from nmjax.core.refusal import Refusal
from nmjax.kernels import check, limits, tuning
from nmjax.kernels.targets import Target, target
from nmjax.products.operations import Dot
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import float8, identity, transposable
from nmjax.pruners.combinators import chain, hold, raw, rescale
from nmjax.pruners.estimators import sr_ste, ste
from nmjax.pruners.float8 import fp8

CONTRACTED = {"fwd": "I", "dlhs": "O", "drhs": "T"}
RESULTS = {"fwd": "y", "dlhs": "dx", "drhs": "dw"}
OPERANDS = {  # of each product, and the slots that prune them
    "fwd": {"x": "fwd_lhs", "w": "fwd_rhs"},
    "dlhs": {"g": "dlhs_g", "w": "dlhs_rhs"},
    "drhs": {"g": "drhs_g", "x": "drhs_lhs"},
}


WRAPPERS = (ste, sr_ste, raw)  # which leave the values of what is in them as they are


class Choice(NamedTuple):
    """How one product runs."""

    how: str  # "packed", "fp8", "emulated" or "dense"
    why: str = ""  # what runs, or what is in the way
    operand: str = ""  # which is packed: x, w or g
    shape: Any = None  # of a packed product, as tables of tiles know it
    formats: tuple[tuple[str, str], ...] = ()  # of FP8 operands, by name


class Layout(NamedTuple):
    """How the operands of a layer lie, as matrices."""

    labels: tuple[tuple[str, str], ...]  # as ("x", "TI"), the second axis contiguous
    sizes: tuple[tuple[str, int], ...]  # of T, I, O, and of a batch B in front
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of x, w and g as arrays


@dataclass(frozen=True)
class Engine:
    """What runs the products of one layer where XLA does not."""

    here: Target
    choices: tuple[tuple[str, Choice], ...]
    layout: Layout

    def __getitem__(self, product: str) -> Choice | None:
        """How it runs a product; None where XLA does."""
        choice = dict(self.choices)[product]
        return choice if choice.how in ("packed", "fp8") else None


def engine(
    op, lhs, rhs, sparsity: Sparsity, backend: str, name: str | None = None, before: frozenset[str] = frozenset()
) -> Engine | None:  # fmt: skip
    """What runs the products of operands of these shapes; None where XLA runs all of them. For those of ``before`` the
    weight was packed before."""
    if backend == "xla":
        return None
    choices, layout, here = _chosen(op, *_shapes(lhs, rhs), sparsity, backend, target(backend), before)
    if backend == "pallas":
        for product, choice in choices:
            if choice.how == "emulated":
                where = f"{name}: " if name else ""
                raise ValueError(
                    f"{where}backend='pallas', but {RESULTS[product]} cannot be packed: {choice.why}. Write backend='auto'."
                )
    made = None if isinstance(here, Refusal) else Engine(here, choices, layout)
    return made if made and any(made[product] for product in CONTRACTED) else None


def explain(
    op, lhs, rhs, sparsity: Sparsity, backend: str, before: frozenset[str] = frozenset()
) -> dict[str, Choice]:  # fmt: skip
    """How each product of operands of these shapes would run now, and why."""
    return dict(_chosen(op, *_shapes(lhs, rhs), sparsity, backend, target(backend), before)[0])


def _shapes(*values):
    return (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values)


@lru_cache
def _chosen(op, lhs, rhs, sparsity, backend, here, before):
    layout = _laid(op, lhs, rhs)
    made = lambda here: tuple(
        (p, _choice(p, op, lhs, rhs, sparsity, backend, here, layout, before)) for p in CONTRACTED
    )
    choices = made(here)
    if any(choice.how in ("packed", "fp8") for _, choice in choices) and (refusal := check.fault(here)):
        return made(refusal), layout, refusal
    return choices, layout, here


def _laid(op, lhs, rhs) -> Layout | str:
    """How operands lie, or why they do not lie as matrices."""
    if not isinstance(op, Dot):
        return "it is a convolution, and kernels multiply matrices"
    (lc, rc), (lb, rb) = op.dims
    free = lambda v, taken: tuple(a for a in range(len(v.shape)) if a not in taken)
    lf, rf = free(lhs, lc + lb), free(rhs, rc + rb)
    labels = {"x": _order(lb, {"T": lf, "I": lc}), "w": _order(rb, {"O": rf, "I": rc}), "g": "TO"}
    for name, v in (("x", lhs), ("w", rhs)):
        if labels[name] is None:
            return f"the axes of {name} {tuple(v.shape)} are not in an order that reads as a matrix without moving them"
    size = lambda v, axes: math.prod(v.shape[a] for a in axes)
    sizes = {"T": size(lhs, lf), "I": size(lhs, lc), "O": size(rhs, rf), "B": size(lhs, lb)}
    shapes = {"x": lhs.shape, "w": rhs.shape, "g": jax.eval_shape(op, lhs, rhs).shape}
    return Layout(*(tuple(table.items()) for table in (labels, sizes, shapes)))


def _order(batch, parts: dict[str, tuple[int, ...]]) -> str | None:
    """In which order two parts of an operand's axes lie behind those of the batch."""
    for first, second in (tuple(parts), tuple(parts)[::-1]):
        axes = (*batch, *parts[first], *parts[second])
        if axes == tuple(range(len(axes))):
            return first + second
    return None


def _choice(product, op, lhs, rhs, sparsity, backend, here, layout, before) -> Choice:
    slots = OPERANDS[product]
    patterns = {operand: pattern(sparsity, slot) for operand, slot in slots.items()}
    held = {operand: store(getattr(sparsity, slot)) for operand, slot in slots.items()}
    formats = tuple((o, s.format) for o, s in held.items() if s)
    formats = formats if len(formats) == 2 else ()
    fitting = [operand for operand, p in patterns.items() if p and _is_two_of_four(*p)]
    if not fitting and not formats:
        return _never(sparsity, slots, patterns)
    if (
        why := here.reason
        if isinstance(here, Refusal)
        else layout
        if isinstance(layout, str)
        else _types_unfit(op, lhs, rhs, product)
    ):
        return Choice("emulated", why)
    found = [_packed(product, operand, op, lhs, rhs, layout, formats, here) for operand in fitting]
    for choice in found:
        if choice.how == "packed" and (backend != "auto" or _expected(choice, here, product in before) > 1):
            return choice
    if formats and (why := _fp8_unfit(product, layout, here)) is None:
        return Choice("fp8", " x ".join(f for _, f in formats) + ", dense", formats=formats)
    if not found:
        return Choice("emulated", why)
    return next((c for c in found if c.how == "emulated"), None) or Choice(
        "emulated", _loses(found[0], here, product in before)
    )


def _never(sparsity, slots, patterns) -> Choice:
    """Where no operand is 2:4: dense, or why what prunes it does not make it so."""
    for operand, slot in slots.items():
        p = getattr(sparsity, slot)
        if patterns[operand]:
            n, m = patterns[operand]
            return Choice("emulated", f"{operand} is {n}:{m}, and sparse tensor cores know 2:4")
        if any(q.block > 1 for q in _leaves(p)):
            return Choice("emulated", f"{slot}={p} is not 2:4 at every step")
        if p != identity:
            return Choice("emulated", f"{slot}={p} leaves it dense")
    return Choice("dense")


def _leaves(p: Pruner):
    return [p] if not p.parts else [leaf for q in p.parts for leaf in _leaves(q)]


def _is_two_of_four(n: int, m: int) -> bool:
    """Whether every group of four of an n:m array holds at most two."""
    return (n, m) == (1, 2) or (n <= 2 and m % 4 == 0)


def pattern(sparsity: Sparsity, slot: str) -> tuple[int, int] | None:
    """n:m of a slot's operand along the axis that its product contracts."""
    p, forward = getattr(sparsity, slot), sparsity.fwd_rhs
    if not (_ours(p) and _ours(forward)):
        return None  # a class from elsewhere inherits what its parts promise, and may do otherwise
    if p.pattern or slot != "dlhs_rhs" or isinstance(p, raw):
        return p.pattern
    return forward.pattern if forward.pattern and _both_ways(forward) else None  # along its other axis


def _ours(p: Pruner) -> bool:
    return type(p).__module__.startswith("nmjax.") and all(map(_ours, p.parts))


def _both_ways(p: Pruner) -> bool:
    """Whether a pruner keeps 2:4 along the weight's other axis too."""
    through = isinstance(p, (chain, hold, rescale)) or type(p) in WRAPPERS
    return (isinstance(p, transposable) and p.m == 4) or (through and any(map(_both_ways, p.parts)))


def store(p: Pruner) -> fp8 | None:
    """The last `fp8` of a slot: how its product holds the operand."""
    if isinstance(p, fp8):
        return p
    if isinstance(p, chain):
        return store(p.parts[-1]) if p.parts else None
    return store(p.parts[0]) if type(p) in WRAPPERS else None


def _types_unfit(op, lhs, rhs, product) -> str | None:
    if op.out_sharding is not None:
        return "out_sharding is given, of which a kernel knows nothing"
    types = {"x": lhs.dtype, "w": rhs.dtype, "g": op.preferred_element_type or lhs.dtype}
    names = {o: jnp.dtype(types[o]).name for o in OPERANDS[product]}
    if len({*names.values()}) > 1 or not {*names.values()} <= {"bfloat16", "float16"}:
        shown = " and ".join(f"{o} {name}" for o, name in names.items())
        return f"it is of {shown}: kernels take bfloat16 or float16, as dtype=jnp.bfloat16 of a layer gives"
    return None


def result(product: str, layout: Layout) -> str:
    """How a product's result is wanted: y and g as [T, O], dx as x lies, dw as w lies."""
    return dict(layout.labels)[{"fwd": "g", "dlhs": "x", "drhs": "w"}[product]]


def _packed(product, operand, op, lhs, rhs, layout, formats, here) -> Choice:
    """A product with one operand packed, or why it cannot be."""
    labels, sizes, contracted = dict(layout.labels), dict(layout.sizes), CONTRACTED[product]
    dense = next(o for o in OPERANDS[product] if o != operand)
    m, n = (labels[o].replace(contracted, "") for o in (operand, dense))
    along_m, along_n = (not formats and labels[o][0] == contracted for o in (operand, dense))
    kind = float8.FORMATS[dict(formats)[operand]] if formats else lhs.dtype
    out = {"fwd": op.preferred_element_type or lhs.dtype, "dlhs": lhs.dtype, "drhs": rhs.dtype}[product]
    sides = [sizes[axis] for axis in (m, n, contracted)]
    turned = result(product, layout) == n + m
    shape = limits.Shape(*sides, jnp.dtype(kind).name, along_m, along_n, turned, jnp.dtype(out).name)
    if why := (formats and _fp8_unfit(product, layout, here)) or limits.product_refusal(shape, here):
        return Choice("emulated", str(why))
    return Choice("packed", f"{operand} {'in FP8 ' if formats else ''}by {here}", operand, shape, formats)


def _fp8_unfit(product, layout, here) -> str | None:
    """Why operands cannot be held in FP8."""
    if here.family != "hopper":
        return f"{here.kind} has no FP8 tensor cores"
    labels, sizes = dict(layout.labels), dict(layout.sizes)
    refusals = (limits.copies_refusal([sizes[a] for a in labels[o]]) for o in OPERANDS[product])
    return next((r.reason for r in refusals if r is not None), None)


def _expected(choice, here, before: bool) -> float:
    free = bool(choice.formats) or (
        before and choice.operand == "w"
    )  # in FP8 there is less to write than of a dense form
    return tuning.gain(choice.shape, here, packed_before=free)


def _loses(choice, here, before: bool) -> str:
    m, n, k = choice.shape.m, choice.shape.n, choice.shape.k
    expected = _expected(choice, here, before)
    return f"packed, M, N, K = {m}, {n}, {k} is expected at {expected:.2f} of the dense speed on {here.kind}"
