"""What a recipe does to a model, layer by layer: a value that prints as a table, and shows as one in a notebook."""

import html
import io
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from nmjax.analysis import flops
from nmjax.core.pruner import Pruner
from nmjax.products.routes import RESULTS, Route, explain
from nmjax.products.rule import refusals
from nmjax.products.slot import SLOTS, WEIGHT
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity


class Use(NamedTuple):
    """One product of a layer: its operation and the shapes of its operands, of one of ``stacked`` layers."""

    op: Any
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    stacked: int


class SlotPlan(NamedTuple):
    """What happens in one slot of a layer."""

    name: str
    pruner: Pruner
    along: tuple[int, ...] = ()  # the sizes that its product contracts; empty where only a call tells
    groups: int | None = None  # in one call; None where only a call tells
    refused: str | None = None

    def __str__(self) -> str:
        what = f"{self.name}={self.pruner}"
        if self.refused:
            return f"{what}\n  REFUSED"
        if self.pruner.block == 1:  # which only rounds
            return what
        unknown = "axes unknown" if self.name in WEIGHT else "tokens unknown"
        if not self.along:
            return f"{what}\n  {unknown}"
        along = f"groups along {' x '.join(map(str, self.along))}"
        return f"{what}\n  {along}, {unknown}" if self.groups is None else f"{what}\n  {self.groups:,} {along}"


class LayerPlan(NamedTuple):
    """What happens in one layer, or in a stack of them."""

    path: str
    kind: str
    kernel: tuple[int, ...]
    sparsity: Sparsity
    slots: tuple[SlotPlan, ...]
    flops: int | None  # of each of its three products when dense; None where no example was given
    shares: tuple[float, float, float]  # what is effectively left of fwd, dlhs and drhs, at its sparsest
    hardened: str  # what `harden` makes of its weight: n:m, dense, or none where it is drawn anew at every step
    runs: tuple[tuple[str, Route], ...] = ()  # how its products run: fwd, dlhs, drhs; empty where only a call tells


def hardened(sparsity: Sparsity) -> str:
    """What `harden` makes of a weight, in words."""
    try:
        pattern = sparsity.fwd_rhs.final.pattern
    except ValueError:
        return "none"
    return "dense" if pattern is None else f"{pattern[0]}:{pattern[1]}"


def slots_of(sparsity: Sparsity, uses: list[Use], tokens_known: bool) -> tuple[SlotPlan, ...]:
    """What a sparsity does to a layer of these products, slot by slot."""
    found = []
    for name in (s for s in SLOTS if getattr(sparsity, s) != identity):
        p = getattr(sparsity, name)
        if not uses or (name.startswith("drhs") and not tokens_known):
            found.append(SlotPlan(name, p))
            continue
        op, lhs, rhs, stacked = uses[0]
        g = jax.eval_shape(op, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (lhs, rhs)))
        shape = {"fwd_lhs": lhs, "drhs_lhs": lhs, "dlhs_g": g, "drhs_g": g}.get(name, rhs).shape
        along = tuple(shape[a] for a in op.operands(len(lhs.shape), len(rhs.shape))[name].contract)
        groups = stacked * math.prod(shape) // p.block if tokens_known or name in WEIGHT else None
        reasons = (dict(refusals(*use[:3], sparsity)).get(name) for use in uses)
        found.append(SlotPlan(name, p, along, groups, next(filter(None, reasons), None)))
    return tuple(found)


def runs_of(
    sparsity: Sparsity, uses: list[Use], backend: str, before: frozenset[str] = frozenset()
) -> tuple[tuple[str, Route], ...]:  # fmt: skip
    """How the products of a layer run, of which some find the weight packed."""
    choices = explain(*uses[0][:3], sparsity, backend, before) if uses else {}
    refused = lambda choice: backend == "pallas" and choice.how == "emulated"
    return tuple((name, c._replace(how="refused") if refused(c) else c) for name, c in choices.items())


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

    def over(self, steps: int) -> tuple[float, float]:
        """FLOPs of a forward and backward pass, dense and effective, on average over so many steps: methods change with them."""
        shares = {sparsity: flops.over(sparsity, steps) for sparsity in {layer.sparsity for layer in self.layers}}
        cost = [(layer.flops or 0) * sum(shares[layer.sparsity]) for layer in self.layers]
        return self.training[0], 3 * self.elsewhere + sum(cost)

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """(layer, reason) of everything that a step of training would refuse."""
        slots = [(layer.path, s.refused) for layer in self.layers for s in layer.slots if s.refused]
        runs = [(layer.path, name, c) for layer in self.layers for name, c in layer.runs if c.how == "refused"]
        text = lambda name, why: f"backend='pallas', but {RESULTS[name]} cannot be packed: {why}. Write backend='auto'."
        return (*slots, *((path, text(name, choice.why)) for path, name, choice in runs))

    @property
    def runs(self) -> dict[str, int]:
        """How many pruned products run "packed", in "fp8" and "emulated"."""
        return dict(Counter(choice.how for layer in self.layers for _, choice in layer.runs if choice.how != "dense"))

    def __repr__(self) -> str:
        table = Table(box=box.SIMPLE, pad_edge=False)
        for title in _HEAD:
            table.add_column(title, overflow="fold")
        for row in self._rows():
            table.add_row(*row)
        out, width = io.StringIO(), min(max(shutil.get_terminal_size((120, 24)).columns, 60), 120)
        plain = {"color_system": None, "markup": False, "emoji": False, "highlight": False, "force_jupyter": False}
        console = Console(file=out, width=width, legacy_windows=False, **plain)
        console.print(table, *self._notes(), sep="\n")
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        # breaks and spaces as such, for some pages of notebooks, as GitHub's, leave styles out
        plain = lambda text: html.escape(text).replace("\n", "<br>").replace("  ", "&nbsp; ")
        cell = lambda tag, text: f"<{tag} style='text-align:left'>{plain(text)}</{tag}>"
        rows = [f"<tr>{''.join(cell('td', text) for text in row)}</tr>" for row in self._rows()]
        head = "".join(cell("th", text) for text in _HEAD)
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._notes())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{notes}"

    def _rows(self) -> list[tuple[str, ...]]:
        """One row for all layers that differ in numbers of their path alone."""
        rows = []
        for same in _alike((layer.path, layer[1:], layer) for layer in self.layers):
            first, cost = same[0], sum(layer.flops or 0 for layer in same)
            many, kernel = f"{len(same)} " if len(same) > 1 else "", "x".join(map(str, first.kernel))
            rows.append((
                f"{_range([layer.path for layer in same])}\n  {many}{first.kind} {kernel}",
                "\n".join(map(str, first.slots)) or "dense",
                " ".join(f"{share:.3g}" for share in first.shares),
                "" if first.flops is None else _change(3 * cost, cost * sum(first.shares)),
                first.hardened,
            ))  # fmt: skip
        return rows

    def _notes(self) -> list[str]:
        pruned = sum(bool(layer.slots) for layer in self.layers)
        lines = [f"{self.parameters:,} parameters, {pruned} of {len(self.layers)} layers pruned"]
        if self.forward[0]:
            changes = self.over(1)[1] != self.training[1]  # the first step is not as sparse
            at = " at the sparsest step," if changes else ""
            lines[0] += f"; GFLOPs{at} forward {_change(*self.forward)}, with backward {_change(*self.training)}"
            if self.elsewhere:
                lines.append(f"Products of no layer, as in attention: {_giga(self.elsewhere)} GFLOPs forward")
            if idle := [layer.path for layer in self.layers if not layer.flops]:
                shown = map(_range, _alike((path, None, path) for path in idle))
                lines.append(f"Layers that this call does not reach: {', '.join(shown)}")
        if self.uncovered:
            groups = _alike((path, shape, (path, shape)) for path, shape in self.uncovered)
            shown = (f"{_range([p for p, _ in same])} {'x'.join(map(str, same[0][1]))}" for same in groups)
            lines.append(f"Parameters that no rule reaches: {', '.join(shown)}")
        lines += self._how()
        for same in _alike((path, reason, (path, reason)) for path, reason in self.refused):
            lines.append(f"REFUSED in {_range([path for path, _ in same])}: {same[0][1]}")
        return lines

    def _how(self) -> list[str]:
        """How pruned products run, in which layers, and why."""
        found: dict[tuple[str, str], dict[str, list[str]]] = {}
        for layer in self.layers:
            for product, (how, why, *_) in layer.runs:
                if how not in ("dense", "refused"):
                    found.setdefault((how, why), {}).setdefault(layer.path, []).append(RESULTS[product])
        lines, pruned = [], sum(bool(layer.slots) for layer in self.layers)
        for (how, why), layers in found.items():
            everywhere = len(found) == 1 and len(layers) == pruned
            by_results: dict[str, list[str]] = {}
            for same in _alike((path, tuple(results), path) for path, results in layers.items()):
                by_results.setdefault(" and ".join(layers[same[0]]), []).append(_range(same))
            some = "; ".join(f"{results} of {', '.join(_gathered(paths))}" for results, paths in by_results.items())
            lines.append(f"{_HOW[how]} {'everywhere' if everywhere else some}: {why}")
        return lines


_HOW = {"packed": "Packed", "fp8": "In FP8", "emulated": "Emulated, zeros multiplied,"}
_HEAD = ("layer", "slots", "left of\nfwd dx dw", "GFLOPs of\nall three", "hardened")


def _alike(items: Iterable[tuple[str, Any, Any]]) -> list[list]:
    """Of (path, what, item) the items whose paths differ in numbers alone and that are the same."""
    found: dict[tuple, list] = {}
    for path, what, item in items:
        found.setdefault((*re.split(r"\d+", path), what), []).append(item)
    return list(found.values())


def _range(paths: list[str]) -> str:
    """Paths that differ in numbers: blocks/0/mlp .. blocks/11/mlp as blocks/0-11/mlp."""
    parts = [re.split(r"(\d+)", path) for path in paths]
    seen = [list(dict.fromkeys(texts)) for texts in zip(*parts, strict=True)]
    if math.prod(map(len, seen)) == len(paths):
        return "".join(texts[0] if len(texts) == 1 else _runs(texts) for texts in seen) or "(the model)"
    at = next(i for i, texts in enumerate(seen) if len(texts) > 1)
    return ", ".join(_range([path for path, p in zip(paths, parts, strict=True) if p[at] == n]) for n in seen[at])


def _gathered(paths: list[str]) -> list[str]:
    """Paths that differ in their last name: mlp/up, mlp/down as mlp/(up|down)."""
    found: dict[str, list[str]] = {}
    for path in paths:
        front, slash, last = path.rpartition("/")
        found.setdefault(front + slash, []).append(last)
    return [front + (names[0] if len(names) == 1 else f"({'|'.join(names)})") for front, names in found.items()]


def _runs(numbers: list[str]) -> str:
    """0, 1, 2, 5 as 0-2,5."""
    runs: list[list[str]] = []
    for n in sorted(numbers, key=int):
        if runs and int(n) == int(runs[-1][-1]) + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _change(before: float, after: float) -> str:
    return f"{_giga(before)} → {_giga(after)}" if after != before else _giga(before)


def _giga(cost: float) -> str:
    return f"{cost / 1e9:,.0f}" if cost >= 1e13 else f"{cost / 1e9:.4g}"
