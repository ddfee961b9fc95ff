"""The page of a comparison: the table, curves, the frontier, and the fields that differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report import compare, curves as cv
from experiments.report.curves import Curve
from experiments.report.figures import Figure
from experiments.report.runs import series
from experiments.report.templates import fill
from experiments.report.words import distinct, is_share, large, number, percent

TITLE = "nmjax · a comparison"


def render(comparison: compare.Comparison, reports: Mapping[Path, str] | None = None) -> str:
    """Return the whole page.

    Args:
      comparison: The comparison.
      reports: The addresses of reports, by the folder of the run. Names and seeds link to them.
    """
    groups = []
    for n, group in enumerate(comparison.groups):
        links = [(seed, reports[run.path]) for seed, run in group.runs.items() if run.path in (reports or {})]
        groups.append({"colour": _style(n)[0], "links": links, "alone": len(links) == len(group.runs) == 1})
    configs = [group.config for group in comparison.groups]
    unbroken = lambda cell: cell.replace(" % ", "\u00a0% ").replace(" ± ", "\u00a0±\u00a0")
    return fill(
        "compare",
        title=f"{len(groups)} configs, {sum(len(group.runs) for group in comparison.groups)} runs",
        heading=f"The {comparison.metric.replace('_', ' ')}",
        remarks=comparison.notes,
        groups=groups,
        rows=[[row[0], *map(unbroken, row[1:])] for row in compare.table(comparison)],
        legend=compare.legend(comparison),
        curves=_curves(comparison),
        frontier=_frontier(comparison),
        differ=[["", *comparison.names], *([k, *(c.get(k, "") for c in configs)] for k in compare.varied(configs))],
    )


def _style(n: int) -> tuple[str, str | tuple]:
    """Return the colour and the dash of the n-th group."""
    return f"s{n % 8}", cv.DASHES[n // 8 % len(cv.DASHES)]


def _curves(comparison: compare.Comparison) -> list[Figure]:
    """Return the figure of the means over seeds."""
    curves, labels = [], distinct(comparison.names)
    for n, (group, name) in enumerate(zip(comparison.groups, comparison.names, strict=True)):
        runs = [Curve("", *series(run.metrics.get("eval", []), comparison.metric)) for run in group.runs.values()]
        if runs := [c for c in runs if c.steps.size and c.finite.any()]:
            colour, dash = _style(n)
            curves.append(cv.banded(runs, name, colour=colour, dash=dash, width=1.8, label=labels[n]))
    splits = sorted({run.split for group in comparison.groups for run in group.runs.values()}, reverse=True)
    words = f"Means over seeds, of the {' or the '.join(splits)} split. "
    words += "The bands reach from the smallest to the largest value."
    return _figure("compared", comparison, curves, words)


def _frontier(comparison: compare.Comparison) -> list[Figure]:
    """Return the figures of the metric by the effective FLOPs of a run, and by the time of its steps."""
    flops = [group.cost and group.cost[1] for group in comparison.groups]
    words = f"{compare.TEST}. FLOPs of the whole run: what its products would cost if nothing were spent on zeros."
    by_flops = _figure("frontier", comparison, _points(comparison, flops), words, along="FLOPs")
    words = f"{compare.TEST}. Time of all steps, without compilation and evaluations."
    points = _points(comparison, [group.seconds for group in comparison.groups])
    return by_flops + _figure("time", comparison, points, words, along="seconds")


def _points(comparison: compare.Comparison, costs: Sequence[float | None]) -> list[Curve]:
    """Return the mean score of each config at its cost. Configs without one of them are left out."""
    points, labels = [], distinct(comparison.names)
    for n, (row, cost) in enumerate(zip(comparison.rows, costs, strict=True)):
        if row.mean is not None and cost is not None:
            at = np.array([cost]), np.array([row.mean])
            points.append(Curve(row.name, *at, _style(n)[0], 4.0, label=labels[n]))
    return points


def _figure(key: str, comparison: compare.Comparison, curves: list[Curve], words: str, **options: Any) -> list[Figure]:
    if not curves:
        return []
    title = comparison.metric.replace("_", " ").capitalize()
    say = percent if is_share(comparison.metric) else number
    svg = cv.draw(f"plot-{key}", curves, alt=f"{title}. {words}", say=say, say_step=large, **options)
    return [Figure(title, svg, words)]
