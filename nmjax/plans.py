"""What a recipe does to a model, layer by layer: a value that prints as a table, and shows as one in a notebook."""

import html
import io
import math
import re
import shutil
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from nmjax.products import refusals
from nmjax.pruners import identity
from nmjax.sparsity import SLOTS, Sparsity
from nmjax.typing import Pruner


class Use(NamedTuple):
    """One product of a layer: its operation and the shapes of its operands, of one of ``stacked`` layers."""

    op: Any
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    stacked: int


class Slot(NamedTuple):
    """What happens in one slot of a layer."""

    name: str
    pruner: Pruner
    along: tuple[int, ...] = ()  # the sizes that its product contracts; empty where only data tells
    groups: int = 0
    refused: str | None = None

    def __str__(self) -> str:
        what = f"{self.name}={self.pruner}"
        if self.refused:
            return f"{what}  REFUSED"
        if not self.along:
            return f"{what}  tokens unknown"
        return f"{what}  {self.groups:,} groups along {' x '.join(map(str, self.along))}"


class LayerPlan(NamedTuple):
    """What happens in one layer, or in a stack of them."""

    path: str
    kind: str
    kernel: tuple[int, ...]
    sparsity: Sparsity
    slots: tuple[Slot, ...]
    flops: int | None  # of each of its three products when dense; None where no example was given
    shares: tuple[float, float, float]  # what is effectively left of fwd, dlhs and drhs


def slots_of(sparsity: Sparsity, uses: list[Use], tokens_known: bool) -> tuple[Slot, ...]:
    """What a sparsity does to a layer of these products, slot by slot."""
    found = []
    for name in (s for s in SLOTS if getattr(sparsity, s) != identity):
        p = getattr(sparsity, name)
        if not uses or (name.startswith("drhs") and not tokens_known):
            found.append(Slot(name, p))
            continue
        op, lhs, rhs, stacked = uses[0]
        g = jax.eval_shape(op, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (lhs, rhs)))
        shape = {"fwd_lhs": lhs, "drhs_lhs": lhs, "dlhs_g": g, "drhs_g": g}.get(name, rhs).shape
        along = tuple(shape[a] for a in op.operands(len(lhs.shape), len(rhs.shape))[name].contract)
        reasons = (dict(refusals(*use[:3], sparsity)).get(name) for use in uses)
        found.append(Slot(name, p, along, stacked * math.prod(shape) // p.block, next(filter(None, reasons), None)))
    return tuple(found)


@dataclass(frozen=True, repr=False)
class Plan:
    """Every layer with a door, what other products cost, and the parameters that no layer with a door covers."""

    layers: tuple[LayerPlan, ...]
    elsewhere: int  # forward FLOPs of dots and convolutions that are no layer's, as in attention
    uncovered: tuple[tuple[str, tuple[int, ...]], ...]
    parameters: int

    @property
    def forward(self) -> tuple[float, float]:
        """FLOPs of a forward pass, dense and effective."""
        cost = [(layer.flops or 0, (layer.flops or 0) * layer.shares[0]) for layer in self.layers]
        return self.elsewhere + sum(d for d, _ in cost), self.elsewhere + sum(e for _, e in cost)

    @property
    def training(self) -> tuple[float, float]:
        """FLOPs of a forward and backward pass, dense and effective."""
        cost = [(3 * (layer.flops or 0), (layer.flops or 0) * sum(layer.shares)) for layer in self.layers]
        return 3 * self.elsewhere + sum(d for d, _ in cost), 3 * self.elsewhere + sum(e for _, e in cost)

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """(layer, reason) of everything that a step of training would refuse."""
        return tuple((layer.path, s.refused) for layer in self.layers for s in layer.slots if s.refused)

    def __repr__(self) -> str:
        table = Table(box=box.SIMPLE, pad_edge=False)
        for title in _HEAD:
            table.add_column(title, overflow="fold")
        for row in self._rows():
            table.add_row(*row)
        out = io.StringIO()
        console = Console(
            file=out, width=max(100, shutil.get_terminal_size((120, 24)).columns), color_system=None, markup=False
        )
        console.print(table)
        for line in self._notes():
            console.print(line, soft_wrap=True)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        cell = lambda tag, text: f"<{tag} style='text-align:left;white-space:pre'>{html.escape(text)}</{tag}>"
        rows = [f"<tr>{''.join(cell('td', text) for text in row)}</tr>" for row in self._rows()]
        head = "".join(cell("th", text) for text in _HEAD)
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._notes())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{notes}"

    def _rows(self) -> list[tuple[str, ...]]:
        """One row for all layers that differ in numbers of their path alone."""
        alike: dict[tuple, list[LayerPlan]] = {}
        for layer in self.layers:
            alike.setdefault((re.sub(r"\d+", "#", layer.path), *layer[1:]), []).append(layer)
        rows = []
        for same in alike.values():
            first, cost = same[0], sum(layer.flops or 0 for layer in same)
            rows.append((
                _range([layer.path for layer in same]) or "(the model)",
                f"{first.kind} {'x'.join(map(str, first.kernel))}",
                "\n".join(map(str, first.slots)) or "dense",
                " ".join(f"{share:.3g}" for share in first.shares),
                f"{_giga(3 * cost)} → {_giga(cost * sum(first.shares))}" if cost and first.slots else _giga(3 * cost) if cost else "",
            ))  # fmt: skip
        return rows

    def _notes(self) -> list[str]:
        lines = [
            f"{self.parameters:,} parameters, {sum(bool(layer.slots) for layer in self.layers)} of {len(self.layers)} layers pruned"
        ]
        if self.forward[0]:
            of = lambda cost: f"{_giga(cost[0])} GFLOPs dense, {_giga(cost[1])} effective"
            lines[0] += f"; forward {of(self.forward)}; with backward {of(self.training)}"
            lines.append(f"Products of no layer, as in attention: {_giga(self.elsewhere)} GFLOPs forward")
        if self.uncovered:
            alike: dict[tuple, list[str]] = {}
            for path, shape in self.uncovered:
                alike.setdefault((re.sub(r"\d+", "#", path), shape), []).append(path)
            shown = [f"{_range(paths)} {'x'.join(map(str, shape))}" for (_, shape), paths in alike.items()]
            lines.append(f"Parameters that no rule reaches: {', '.join(shown)}")
        lines += [f"REFUSED in {path}: {reason}" for path, reason in self.refused]
        return lines


_HEAD = ("layer", "kernel", "slots", "fwd dx dw", "GFLOPs")


def _range(paths: list[str]) -> str:
    """blocks/0/mlp .. blocks/11/mlp as blocks/0-11/mlp; one path as it is."""
    parts = [re.split(r"(\d+)", path) for path in paths]
    merged = [texts[0] if len(set(texts)) == 1 else f"{texts[0]}-{texts[-1]}" for texts in zip(*parts, strict=True)]
    return "".join(merged) + (f"  ({len(paths)})" if len(paths) > 1 else "")


def _giga(cost: float) -> str:
    return f"{cost / 1e9:.4g}"
