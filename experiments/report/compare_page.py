"""The page of a comparison: the table, curves, the frontier, and the fields that differ."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import Mistake
from experiments.files import replace, text
from experiments.report import compare, curves as cv
from experiments.report.curves import Curve
from experiments.report.figures import Figure
from experiments.report.index import relative
from experiments.report.runs import BEYOND, series, test_examples
from experiments.report.templates import fill
from experiments.report.words import distinct, in_points, is_share, large, number, percent, signed

TITLE = "nmjax · a comparison"


def pages(folders: list[Path], target: Path, baseline: str = "") -> dict[Path, str]:
    """Return compare.html and compare.md of runs, by their paths.

    Args:
      folders: The folders of runs. Each is a run or holds some.
      target: The folder of the pages.
      baseline: The name of the baseline, or "" for the best dense config.

    Raises:
      Mistake: If the runs cannot be compared, or if the target has other pages of these names.
    """
    comparison = compare.compare_folders(folders, baseline)
    for name, mark in (("compare.html", TITLE), ("compare.md", compare.BASELINE)):
        if (target / name).exists() and mark not in text(target / name, errors="replace"):
            raise Mistake(f"{target / name} is not a comparison of runs. Name another folder for this one: --to=DIR.")
    runs = [run for group in comparison.groups for run in group.runs.values()]
    reports = {run.path: run.path / "report.html" for run in runs if (run.path / "report.html").exists()}
    links = {path: relative(page, target) for path, page in reports.items()}
    return {target / "compare.html": render(comparison, links), target / "compare.md": compare.markdown(comparison)}


def write(folder: Path) -> Path:
    """Write compare.html and compare.md of the runs of a sweep into its folder, and return the path of the first.

    Raises:
      Mistake: If the runs cannot be compared, or if the folder has other pages of these names.
    """
    for path, page in pages([folder], folder).items():
        replace(path, page)
    return folder / "compare.html"


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
    unbroken = lambda cell: cell.replace(" % ", "\u00a0% ").replace(" ± ", "\u00a0±\u00a0").replace(", +", ",\u00a0+")
    rows = [[row[0], *map(unbroken, row[1:])] for row in compare.table(comparison)]
    first = len(rows[0]) - 1 - len(comparison.others)  # the number of the first of the other scores
    marked = any(row[-1] for row in rows)
    legend, more = compare.legend_parts(comparison)
    return fill(
        "compare",
        title=f"{len(groups)} configs, {sum(len(group.runs) for group in comparison.groups)} runs",
        heading=f"The {comparison.metric.replace('_', ' ')}",
        remarks=comparison.notes,
        groups=groups,
        rows=[row[:first] + ([row[-1]] if marked else []) for row in rows],
        others=[[row[0], *row[first:-1]] for row in rows] if comparison.others else [],
        legend=legend,
        more=more,
        curves=curves(comparison),
        frontier=_frontier(comparison),
        differ=[["", *comparison.names], *([k, *(c.get(k, "") for c in configs)] for k in compare.varied(configs))],
    )


def _style(n: int) -> tuple[str, str | tuple]:
    """Return the colour and the dash of the n-th group."""
    return f"s{n % 8}", cv.DASHES[n // 8 % len(cv.DASHES)]


def curves(comparison: compare.Comparison) -> list[Figure]:
    """Return the figure of the means over seeds."""
    drawn, labels = [], distinct(comparison.names)
    for n, (group, name) in enumerate(zip(comparison.groups, comparison.names, strict=True)):
        runs = [Curve("", *series(run.metrics.get("eval", []), comparison.metric)) for run in group.runs.values()]
        if runs := [c for c in runs if c.steps.size and c.finite.any()]:
            colour, dash = _style(n)
            drawn.append(cv.banded(runs, name, colour=colour, dash=dash, width=1.8, label=labels[n]))
    splits = sorted({run.split for group in comparison.groups for run in group.runs.values()}, reverse=True)
    several = any(len(group.runs) > 1 for group in comparison.groups)
    words = f"{'Means over seeds, of' if several else 'Scores of'} the {' or the '.join(splits)} split."
    words += " The bands reach from the smallest to the largest value." if several else ""
    return _figure("compared", comparison, drawn, words)


def _frontier(comparison: compare.Comparison) -> list[Figure]:
    """Return the figures of the differences to the baseline, by the effective FLOPs of a run and by its time."""
    rows = comparison.rows
    by_flops = _differences("frontier", comparison, [row.cost for row in rows], "effective FLOPs")
    times = [row.steps_time if row.comparable else None for row in rows]
    return by_flops + _differences("time", comparison, times, "time of all steps")


def _differences(key: str, comparison: compare.Comparison, costs: Sequence[float | None], cost: str) -> list[Figure]:
    """Return the figure of the differences to the baseline with their 95 % intervals; none if only one is known."""
    points, labels, metric = [], distinct(comparison.names, 40), comparison.metric
    alone = all(row.difference is None for row in comparison.rows)  # then the scores themselves are shown
    for n, (row, share) in enumerate(zip(comparison.rows, costs, strict=True)):
        base = n == comparison.base
        value = row.mean if alone else 0.0 if base else row.difference
        if value is None or share is None or abs(value) >= BEYOND:
            continue
        half = (row.interval[1] - row.interval[0]) / 2 if row.interval else None
        name = f"{labels[n]}, the baseline" if base and not alone else labels[n]
        points.append(cv.Point(name, share, value, _of_examples(comparison, n) if alone else half, _style(n)[0]))
    if len(points) < 2:
        return []
    title, points_of = metric.replace("_", " "), is_share(metric)
    up = f"{title} minus the baseline's{' in points' if points_of else ''}, 95 % intervals"
    words = f"{compare.TEST}. A config without a line has too few seeds for an interval."
    say = in_points if points_of else signed
    if alone:
        up, say, words = title, percent if points_of else number, f"{compare.TEST}."
        words += " The lines are binomial standard errors." if any(p.error for p in points) else ""
    svg = cv.frontier(
        f"plot-{key}", points, [], alt=f"{up}, by {cost}.", along=f"{cost}, as a share of the baseline's", up=up,
        say=say, keys={}, best=max if points_of else min, least=_least(comparison), wide=False,
    )  # fmt: skip
    return [Figure(f"By {cost}", svg, f"{words} {_one_example(comparison)}".strip())]


def _of_examples(comparison: compare.Comparison, n: int) -> float | None:
    """Return the binomial standard error of the accuracy of a config's only run; None if it is not known."""
    mean, runs = comparison.rows[n].mean, [*comparison.groups[n].finished.values()]
    if mean is None or not is_share(comparison.metric) or len(runs) != 1 or not (count := test_examples(runs[0])):
        return None
    return math.sqrt(mean * (1 - mean) / count)


def _least(comparison: compare.Comparison) -> float:
    """Return the least range of an axis of scores: a smaller one would turn a few examples into a mountain."""
    if is_share(comparison.metric):
        return 0.02
    means = [row.mean for row in comparison.rows if row.mean is not None]
    return 0.02 * abs(min(means, key=abs, default=0.0))


def _one_example(comparison: compare.Comparison) -> str:
    """Return a sentence on what one test example is worth, if runs tell how many there are; else ""."""
    counts = {test_examples(run) for group in comparison.groups for run in group.runs.values()}
    if len(counts) != 1 or not is_share(comparison.metric) or not (count := counts.pop()):
        return ""
    return f"One of the {count:,} test examples is {100 / count:.2g} points."


def _figure(key: str, comparison: compare.Comparison, curves: list[Curve], words: str, **options: Any) -> list[Figure]:
    if not curves:
        return []
    title = comparison.metric.replace("_", " ").capitalize()
    say = percent if is_share(comparison.metric) else number
    options |= {"say": say, "say_step": large, "up": title.lower(), "least": _least(comparison)}
    svg = cv.draw(f"plot-{key}", curves, alt=f"{title}. {words}", **options)
    return [Figure(title, svg, words)]
