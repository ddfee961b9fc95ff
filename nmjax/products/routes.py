"""The routes of a layer's three products: on fewer rows, on sparse tensor cores or by XLA, and the reason.

A product has one of five routes:

- *compacted*: XLA multiplies the rows that a `rows` pruner keeps (`nmjax.products.compaction`).
- *packed*: a kernel multiplies one packed operand, which is 2:4 or sparser along the contracted axis, by a dense one.
- *fp8*: XLA multiplies two dense FP8 operands.
- *emulated*: XLA multiplies pruned operands with their zeros, or operands whose FP8 rounding is simulated.
- *dense*: nothing is pruned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nmjax.core.pruner import Pattern
from nmjax.core.refusal import Refusal
from nmjax.kernels import limits, tuning
from nmjax.kernels.check import fault, kinds_of, product_fault
from nmjax.kernels.limits import Shape
from nmjax.kernels.measured import Row, table
from nmjax.kernels.targets import Target, platform, pruning, target
from nmjax.kernels.tpu import Pruning
from nmjax.products import compaction
from nmjax.products.layout import CONTRACTED, LAID_AS, OPERANDS, Layout, layout_of
from nmjax.products.operations import Operation, result_shape
from nmjax.products.pruning import Shaped
from nmjax.products.slot import Slot
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity, whole_rows
from nmjax.pruners.float8 import FORMATS, fp8
from nmjax.pruners.whole_rows import rows


class Route(NamedTuple):
    """The way in which one product runs, and the reason.

    Attributes:
      how: "compacted", "packed", "fp8", "emulated" or "dense".
      why: For messages: details, such as the operand and the device, or the reason why the product is emulated.
      operand: The operand that is packed, or whose rows are chosen: x, w or g.
      shape: The product of one device, if it is packed: its key in the tables of tiles.
      formats: Pairs (operand, FP8 format). Empty if the product does not run in FP8.
      share: The expected time of a compacted product, as a share of the time of the dense product.
      times: What a packed product is expected to take; None if it is not known.

    >>> route = Route("emulated", "cpu has no sparse tensor cores")
    >>> route.how, route.uses_forms
    ('emulated', False)
    """

    how: str
    why: str = ""
    operand: str = ""
    shape: Shape | None = None
    formats: tuple[tuple[str, str], ...] = ()
    share: float = 1.0
    times: tuning.Times | None = None

    @property
    def packed_shape(self) -> Shape:
        """The shape of a packed product."""
        assert self.shape is not None
        return self.shape

    @property
    def uses_forms(self) -> bool:
        """True if the product multiplies forms: packed or FP8 operands. False if XLA multiplies pruned operands."""
        return self.how in ("packed", "fp8")

    def takes(self, operand: str) -> bool:
        """Return True if the product reads this operand as a form."""
        return self.uses_forms and (bool(self.formats) or self.operand == operand)


@dataclass(frozen=True)
class Routes:
    """The routes of one layer's products. At least one is "packed" or "fp8"."""

    device: Target
    layout: Layout
    by_product: tuple[tuple[str, Route], ...]
    name: str | None = None  # of the layer, for errors

    def __getitem__(self, product: str) -> Route:
        """Return the route of "y", "dx" or "dw"."""
        return dict(self.by_product)[product]


Compacted = tuple[tuple[str, str], ...]
"""Pairs (product, operand whose rows are chosen) of the products that are compacted."""


class Case(NamedTuple):
    """All that the route of a product depends on."""

    op: Operation
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    sparsity: Sparsity
    backend: str
    device: Target | Refusal
    platform: str  # "cpu", "gpu" or "tpu"
    pruning: Pruning | Refusal  # the device whose kernels prune
    packed_before: frozenset[str]  # the products whose weight is already packed
    tiles: tuple[Row, ...]  # the rows of the table of the device


def routes_of(
    op: Operation, lhs: Shaped, rhs: Shaped, sparsity: Sparsity, backend: str, name: str | None = None,
    packed_before: frozenset[str] = frozenset(),
) -> Routes | None:  # fmt: skip
    """Return the routes of a layer's products. None if all are "emulated" or "dense".

    Args:
      op: The operation.
      lhs, rhs: Its operands, or their shapes.
      sparsity: What is pruned.
      backend: One of `nmjax.kernels.targets.BACKENDS`.
      name: The layer, for errors.
      packed_before: The products whose weight is already packed.

    Raises:
      ValueError: If the backend is "pallas" and a pruned product cannot be packed.
    """
    if backend == "xla":
        return None
    case = _case(op, lhs, rhs, sparsity, backend, packed_before)
    by_product, layout, device = _routes(case)
    if backend == "pallas":
        for product, route in by_product:
            if route.how == "emulated":
                where = f"{name}: " if name else ""
                raise ValueError(f"{where}{not_run(product, route, backend)}")
    if isinstance(device, Refusal) or isinstance(layout, Refusal):
        return None
    if not any(route.uses_forms for _, route in by_product):
        return None
    return Routes(device, layout, by_product, name)


def compacted_of(
    op: Operation, lhs: Shaped, rhs: Shaped, sparsity: Sparsity, backend: str, name: str | None = None
) -> Compacted:
    """Return the products that are compacted, each with the operand whose rows are chosen.

    The arguments are those of `routes_of`.

    Raises:
      ValueError: If the backend is "compact" and a pruned product cannot be compacted.
    """
    if backend == "xla":
        return ()
    case = _case(op, lhs, rhs, sparsity, backend, frozenset())
    by_product, _, _ = _routes(case)
    if backend == "compact":
        for product, route in by_product:
            if route.how == "emulated" and chooses_rows(sparsity, product):
                where = f"{name}: " if name else ""
                raise ValueError(f"{where}{not_run(product, route, backend)}")
    return compacted_in(dict(by_product))


def compacted_in(routes: Mapping[str, Route]) -> Compacted:
    """Return the products that are compacted, each with the operand whose rows are chosen, given all routes."""
    return tuple((product, route.operand) for product, route in routes.items() if route.how == "compacted")


def not_run(product: str, route: Route, backend: str) -> str:
    """Return the error message if the backend "pallas" or "compact" cannot run a pruned product."""
    done = {"pallas": "packed", "compact": "compacted"}[backend]
    return f"backend={backend!r}, but {product} cannot be {done}: {route.why}. Write backend='auto'."


def explain(
    op: Operation, lhs: Shaped, rhs: Shaped, sparsity: Sparsity, backend: str,
    packed_before: frozenset[str] = frozenset(),
) -> dict[str, Route]:  # fmt: skip
    """Return the route of each product on the current device. The arguments are those of `routes_of`."""
    case = _case(op, lhs, rhs, sparsity, backend, packed_before)
    return dict(_routes(case)[0])


def _case(
    op: Operation, lhs: Shaped, rhs: Shaped, sparsity: Sparsity, backend: str, packed_before: frozenset[str]
) -> Case:
    left, right = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (lhs, rhs))
    device = target(backend)
    tiles = () if isinstance(device, Refusal) else table(device.kind)
    return Case(op, left, right, sparsity, backend, device, platform(), pruning(backend), packed_before, tiles)


@lru_cache
def _routes(case: Case) -> tuple[tuple[tuple[str, Route], ...], Layout | Refusal, Target | Refusal]:
    layout = layout_of(case.op, case.lhs, case.rhs)
    routes = _in_one_pass([(product, _route(product, case, layout)) for product in CONTRACTED])
    if case.platform == "tpu":
        routes = ((product, _on_tpu(product, route, case)) for product, route in routes)
    return tuple(routes), layout, case.device


def _in_one_pass(routes: list[tuple[str, Route]]) -> list[tuple[str, Route]]:
    """Return the routes with the times of operands that one pass packs for two products."""
    packed = [route.operand for _, route in routes if route.how == "packed" and not route.formats]
    shared = lambda route: route.times is not None and not route.formats and packed.count(route.operand) > 1
    return [
        (product, route._replace(times=route.times.in_one_pass) if shared(route) and route.times else route)
        for product, route in routes
    ]


def _on_tpu(product: str, route: Route, case: Case) -> Route:
    """Return a route that also says what prunes the operands: kernels in one pass, or XLA, and why."""
    if route.how not in ("emulated", "compacted"):
        return route
    axes = case.op.operands(case.lhs.ndim, case.rhs.ndim)
    arrays = {"x": case.lhs, "w": case.rhs, "g": result_shape(case.op, case.lhs, case.rhs)}
    by_xla: list[str] = []
    for operand, name in OPERANDS[product].items():
        if case.sparsity.slots[name].empty:  # a backward product then reads what the forward one pruned
            name = {"dx_w": "y_w", "dw_x": "y_x"}.get(name, name)
        p, v, of = case.sparsity.slots[name].pruner, arrays[operand], axes[name]
        if p != identity and of.contract:
            other = of.other[-1] if p.facts.tiles and of.other else None
            refusal = case.pruning
            if isinstance(refusal, Pruning):
                refusal = refusal.refusal(p, v.shape, v.dtype, of.contract[-1], other)
            by_xla += [] if refusal is None else [f"XLA prunes {name}: {refusal}"]
    how = "; ".join(by_xla) or "operands are pruned in one pass"
    why = route.why if chooses_rows(case.sparsity, product) else case.device
    return route._replace(why=f"{why}; {how}")


def _route(product: str, case: Case, layout: Layout | Refusal) -> Route:
    slots = {operand: case.sparsity.slots[name] for operand, name in OPERANDS[product].items()}
    formats = _formats(slots)
    patterns = {operand: pattern(case.sparsity, slot) for operand, slot in slots.items()}
    compacted = _compacted(product, case)
    if isinstance(compacted, Route):
        return compacted
    if isinstance(compacted, Refusal) and isinstance(case.device, Refusal):
        return Route("emulated", compacted.reason)
    sparse = [operand for operand, p in patterns.items() if p is not None and _is_two_of_four(*p)]
    if not sparse and not formats:
        return _unpacked(slots, patterns)
    early = next((slot for o, slot in slots.items() if o != "g" and slot.pruner.facts.reads_partner), None)
    if early is not None:
        return Route("emulated", f"{early} reads g too, and kernels prepare x and w in the forward pass")
    if (refusal := _refusal(case, layout) or _types_refusal(case, product)) is not None:
        return Route("emulated", refusal.reason)
    assert isinstance(case.device, Target)
    assert isinstance(layout, Layout)
    before = product in case.packed_before
    refusals: list[Refusal] = []
    slow: list[Route] = []
    for operand in sparse:
        route = _packed(product, operand, case, layout, formats, case.device)
        if isinstance(route, Refusal):
            refusals.append(route)
            continue
        route = route._replace(times=_times(route, case.device, before, slots[operand]))
        if case.backend == "auto" and _gain(route) <= 1:
            slow.append(route)
        elif broken := product_fault(case.device, route.packed_shape, slots[operand].core or identity):
            refusals.append(broken)
        else:
            return route
    if formats:
        refusal = _fp8_refusal(product, layout, case.device) or fault(case.device, kinds_of(None))
        if refusal is None:
            return Route("fp8", " x ".join(f for _, f in formats) + ", dense", formats=formats)
        refusals.append(refusal)
    if refusals:
        return Route("emulated", refusals[0].reason)
    return Route("emulated", _too_slow(slow[0], case.device))


def _chosen(sparsity: Sparsity, product: str) -> dict[str, tuple[Slot, rows]]:
    """Return the operands of a product whose rows are chosen, each with its slot and the `rows` in it."""
    slots = {operand: sparsity.slots[name] for operand, name in OPERANDS[product].items()}
    return {operand: (slot, slot.core) for operand, slot in slots.items() if isinstance(slot.core, rows)}


def chooses_rows(sparsity: Sparsity, product: str) -> bool:
    """Return True if a pruner of a product's operands is a `rows`, or has one as a part."""
    return any(whole_rows.has_rows(sparsity.slots[name].pruner) for name in OPERANDS[product].values())


def _compacted(product: str, case: Case) -> Route | Refusal | None:
    """Return the route of a compacted product, why it is not compacted, or None if no rows are chosen.

    If the rows of both operands are chosen, it is compacted by the operand that keeps fewer."""
    chosen = _chosen(case.sparsity, product)
    if not chosen and chooses_rows(case.sparsity, product):
        return Refusal("rows is a part of another pruner, which may change the rows that it keeps")
    if not chosen:
        return None
    operand = min(chosen, key=lambda o: chosen[o][1].kept())
    slot, p = chosen[operand]
    if p.facts.pattern is None:
        return Refusal(f"{slot} is not n:m at every step")
    if p.facts.pattern[1] != p.facts.block:
        return Refusal(f"{slot} has groups of different sizes")
    if slot.storage is not None:
        return Refusal(f"{slot} is rounded to {type(slot.storage).__name__.upper()}")
    refusal = compaction.operation_refusal(case.op, case.lhs, case.rhs, product, operand)
    if refusal is not None:
        return refusal
    if case.backend in ("xla", "pallas") or (case.backend == "interpret" and case.platform != "tpu"):
        return Refusal(f"backend={case.backend!r}")
    slots = {name: case.sparsity.slots[of] for name, of in OPERANDS[product].items()}
    share = compaction.expected(case.op, case.lhs, case.rhs, slots, operand, case.platform)
    if case.backend == "auto" and share >= 1:
        return Refusal(
            f"on {p.facts.pattern[0]} of {p.facts.pattern[1]} rows, it is expected at {share:.2f} of the dense time"
        )
    why = f"{p.facts.pattern[0]}:{p.facts.pattern[1]} of its rows, {share:.2f} of the dense time"
    return Route("compacted", why, operand, share=share)


def _unpacked(slots: Mapping[str, Slot], patterns: Mapping[str, Pattern | None]) -> Route:
    """Return the route if no operand is 2:4: dense, or emulated because what prunes an operand does not make it 2:4."""
    for operand, slot in slots.items():
        p = patterns[operand]
        if p is not None:
            return Route("emulated", f"{operand} is {p[0]}:{p[1]}, but sparse tensor cores support only 2:4")
        if slot.core == identity and slot.storage is None and not slot.raw:
            continue  # a phase in which nothing is pruned
        if slot.applied.facts.block > 1:
            return Route("emulated", f"{slot} is not 2:4 at every step")
        if not slot.empty:
            return Route("emulated", f"{slot} leaves {operand} dense")
    return Route("dense")


def _is_two_of_four(n: int, m: int) -> bool:
    """Return True if every group of four of an n:m array holds at most two."""
    return (n, m) == (1, 2) or (n <= 2 and m % 4 == 0)


def pattern(sparsity: Sparsity, slot: Slot) -> Pattern | None:
    """Return the n:m of a slot's operand along the axis that its product contracts."""
    if slot.pattern is not None or slot.name != "dx_w" or slot.raw:
        return slot.pattern
    if slot.core != identity and not slot.pruner.facts.selects:
        return None  # the pruner may replace zeros by other values
    across = (
        sparsity.y_w.facts.pattern_across
    )  # dx contracts the other axis of the weight that the forward product uses
    return across if across is not None and across[1] == 4 else None


def _formats(slots: Mapping[str, Slot]) -> tuple[tuple[str, str], ...]:
    """Return the FP8 formats of both operands; empty if one is not held in FP8."""
    formats = [(operand, slot.storage.format) for operand, slot in slots.items() if isinstance(slot.storage, fp8)]
    return tuple(formats) if len(formats) == 2 else ()


def _refusal(case: Case, layout: Layout | Refusal) -> Refusal | None:
    """Return why no product of a layer runs in a kernel."""
    if isinstance(case.device, Refusal):
        return case.device
    if case.backend == "auto" and limits.FAMILIES[case.device.family].tuned_only and not case.tiles:
        return Refusal(f"no tiles have been measured on {case.device.kind}: run python -m experiments.bench tune")
    return layout if isinstance(layout, Refusal) else None


def _types_refusal(case: Case, product: str) -> Refusal | None:
    op, lhs, rhs = case.op, case.lhs, case.rhs
    if op.out_sharding is not None:
        return Refusal("out_sharding is given, and kernels do not support it")
    types = {"x": lhs.dtype, "w": rhs.dtype, "g": op.preferred_element_type or lhs.dtype}
    names = {operand: jnp.dtype(types[operand]).name for operand in OPERANDS[product]}
    kinds = set(names.values())
    if len(kinds) == 1 and kinds <= {"bfloat16", "float16"}:
        return None
    shown = " and ".join(f"{operand} {name}" for operand, name in names.items())
    return Refusal(
        f"its operands are {shown}, but kernels need bfloat16 or float16: set dtype=jnp.bfloat16 in the layer"
    )


def result_axes(product: str, layout: Layout) -> str:
    """Return the axes of a product's result as a matrix: "TO" for y, those of x for dx, those of w for dw."""
    return layout.matrix(LAID_AS[product]).axes


def _packed(
    product: str, operand: str, case: Case, layout: Layout, formats: tuple[tuple[str, str], ...], device: Target
) -> Route | Refusal:
    """Return the route of a product with one operand packed. Several devices are expected to share the tokens."""
    contracted = CONTRACTED[product]
    dense = next(o for o in OPERANDS[product] if o != operand)
    m, n = (layout.matrix(o).axes.replace(contracted, "") for o in (operand, dense))
    m_major, n_major = (not formats and layout.matrix(o).axes[0] == contracted for o in (operand, dense))
    sizes = {axis: layout.size(axis) for axis in {m, n, contracted}}
    if sizes.get("T", 0) % device.devices:
        return Refusal(f"{sizes['T']} tokens do not split evenly over {device.devices} devices")
    sizes |= {axis: size // device.devices for axis, size in sizes.items() if axis == "T"}
    dtype = jnp.dtype(FORMATS[dict(formats)[operand]] if formats else case.lhs.dtype).name
    turned, out = result_axes(product, layout) == n + m, _result_dtype(product, case)
    shape = Shape(sizes[m], sizes[n], sizes[contracted], dtype, m_major, n_major, transpose=turned, out=out)
    refusal = _fp8_refusal(product, layout, device) if formats else None
    refusal = refusal or limits.product_refusal(shape, device)
    if refusal is not None:
        return Refusal(f"{refusal.reason}, on each of {device.devices} devices") if device.devices > 1 else refusal
    kind = "in FP8 " if formats else ""
    return Route("packed", f"{operand} {kind}by {device}", operand, shape, formats)


def _result_dtype(product: str, case: Case) -> str:
    if product == "y":
        return jnp.dtype(case.op.preferred_element_type or case.lhs.dtype).name
    return jnp.dtype(case.lhs.dtype if product == "dx" else case.rhs.dtype).name


def _fp8_refusal(product: str, layout: Layout, device: Target) -> Refusal | None:
    """Return why operands cannot be held in FP8; None if they can."""
    if not limits.FAMILIES[device.family].fp8:
        return Refusal(f"{device.kind} has no FP8 tensor cores")
    return next(filter(None, (limits.copies_refusal(layout.sides(o)) for o in OPERANDS[product])), None)


def _times(route: Route, device: Target, before: bool, slot: Slot) -> tuning.Times | None:
    """Return what a packed product is expected to take.

    The pruning of x and w counts for neither, because another product may need the pruned operand too."""
    if device.interpret:
        return None
    free = bool(route.formats) or (before and route.operand == "w")  # an FP8 form has less to write than a dense one
    fused = route.operand == "g" and slot.core is not None and limits.fuses(slot.core)
    return tuning.times(route.packed_shape, device, packed_before=free, saves_pruning=fused)


def _gain(route: Route) -> float:
    """Return how many times as fast as an emulated product a packed one is expected to be; 0 if it is not known."""
    return 0.0 if route.times is None else route.times.gain


def _too_slow(route: Route, device: Target) -> str:
    m, n, k = route.packed_shape.sides
    return (
        f"packed, with M, N, K = {m}, {n}, {k}, it is expected at {_gain(route):.2f} of the emulated speed on "
        f"{device.kind}"
    )
