"""The routes of the products of layers, in a program for all steps and in each phase of training."""

from collections.abc import Sequence
from typing import TypeAlias

from nmjax.analysis import savings
from nmjax.analysis.refusals import Use, backend_refusal
from nmjax.core import layer_paths
from nmjax.products.fit import assuming_features_fit
from nmjax.products.routes import Route, explain
from nmjax.products.sparsity import Sparsity

Runs: TypeAlias = tuple[tuple[str, Route], ...]
"""Pairs (product, route)."""

Phases: TypeAlias = tuple[tuple[int, Runs], ...]
"""Pairs (first step, routes) of the phases of a layer's method."""


def runs_of(
    sparsity: Sparsity, uses: list[Use], backend: str, packed_before: frozenset[str] = frozenset()
) -> Runs:  # fmt: skip
    """Return the route of each product of a layer.

    Args:
      sparsity: The pruner of each slot.
      uses: The products that a call asks the layer for. The first one counts.
      backend: The layer's backend.
      packed_before: The products whose weight is already packed.
    """
    if not uses:
        return ()
    runs: list[tuple[str, Route]] = []
    for product, route in explain(uses[0].op, uses[0].lhs, uses[0].rhs, sparsity, backend, packed_before).items():
        refusal = backend_refusal(product, route, backend, sparsity)
        if refusal is not None:
            route = route._replace(how="refused", why=refusal.reason)
        runs.append((product, route))
    return tuple(runs)


def phases_of(
    sparsity: Sparsity, uses: list[Use], backend: str, packed_before: frozenset[str] = frozenset()
) -> Phases:  # fmt: skip
    """Return the routes in each phase of a layer's method, from step 0 on. The arguments are those of `runs_of`."""
    sparsity = assuming_features_fit(sparsity)
    if not uses or not sparsity.phases:
        return ()
    starts = (0, *sparsity.phases)
    return tuple((start, runs_of(sparsity.at(start), uses, backend, packed_before)) for start in starts)


def at(runs: Runs, phases: Phases, step: int) -> Runs:
    """Return the routes of a layer in the phase that contains a step.

    Args:
      runs: Its routes in a program for all steps.
      phases: What `phases_of` returned.
      step: The step.
    """
    return [runs, *(own for start, own in phases if start <= step)][-1]


def notes(layers: Sequence[tuple[str, int | None, Runs]], speed: float | None) -> list[str]:
    """Return a line for each route of pruned products: which layers take it, and why."""
    results: dict[tuple[str, str], dict[str, list[str]]] = {}  # of each route, by layer
    for path, _, runs in layers:
        for product, route in runs:
            if route.how not in ("dense", "refused"):
                results.setdefault((route.how, route.why), {}).setdefault(path, []).append(product)
    lines: list[str] = []
    by_path = {path: (cost, runs) for path, cost, runs in layers}
    for (how, why), by_layer in results.items():
        ranges: dict[str, list[str]] = {}
        for paths in layer_paths.alike((path, tuple(names), path) for path, names in by_layer.items()):
            ranges.setdefault(" and ".join(by_layer[paths[0]]), []).append(layer_paths.short(paths))
        where = "; ".join(f"{names} of {', '.join(layer_paths.gathered(paths))}" for names, paths in ranges.items())
        if len(results) == 1 and len(by_layer) == len(layers):
            where = f"{next(iter(ranges))} everywhere" if how == "compacted" and len(ranges) == 1 else "everywhere"
        saved = savings.of_time([by_path[path] for path in by_layer], why, speed)
        lines.append(f"{_HOW[how]} {where}: {why}{saved}")
    return lines


_HOW = {"compacted": "Compacted", "packed": "Packed", "fp8": "In FP8", "emulated": "Emulated (zeros are multiplied)"}
