"""The page of a comparison: the table, curves, the frontier, and the fields that differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report import compare, compare_table, curves as cv
from experiments.report.curves import Curve
from experiments.report.page import LOGO, document, notes_list
from experiments.report.runs import series, split
from experiments.report.terms import explained
from experiments.report.words import distinct, large, number, percent, safe

TITLE = "nmjax · a comparison"


def render(comparison: compare.Comparison, reports: Mapping[Path, str] | None = None) -> str:
    """Return the whole page.

    Args:
      comparison: The comparison.
      reports: The addresses of reports, by the folder of the run. Names and seeds link to them.
    """
    title = f"{len(comparison.groups)} configs, {sum(len(group.runs) for group in comparison.groups)} runs"
    header = f'<p class="over">{LOGO} {TITLE}</p><h1>{safe(title)}</h1>'
    if comparison.notes:
        header += notes_list(comparison.notes)
    sections = [
        ("table", f"The {comparison.metric.replace('_', ' ')}", _table(comparison, reports or {})),
        ("curves", "Over the steps", _curves(comparison)),
        ("frontier", "Against FLOPs and time", _frontier(comparison)),
        ("configs", "What differs", _differences(comparison)),
    ]
    header, *bodies = explained([header, *(body for _, _, body in sections)])
    shown = [(key, name, body) for (key, name, _), body in zip(sections, bodies, strict=True)]
    return document(title, header, shown)


def html_table(head: list[str], rows: list[list[str]], names: list[str] | None = None) -> str:
    """Return a table whose first column names the rows.

    Args:
      head: The titles of the columns.
      rows: The cells.
      names: The first cells in HTML, if they are more than text.
    """
    titles = "".join(f'<th scope="col">{safe(title)}</th>' for title in head)
    body = ""
    for n, (name, *cells) in enumerate(rows):
        first = names[n] if names else safe(name)
        body += f'<tr><th scope="row">{first}</th>{"".join(f"<td>{safe(cell)}</td>" for cell in cells)}</tr>'
    table = f'<table class="values"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _table(comparison: compare.Comparison, reports: Mapping[Path, str]) -> str:
    groups_and_names = zip(comparison.groups, comparison.names, strict=True)
    names = [_key(n) + _linked(name, group, reports) for n, (group, name) in enumerate(groups_and_names)]
    cells = [
        [cell.replace(" % ", "\u00a0% ").replace(" ± ", "\u00a0±\u00a0") for cell in row]
        for row in compare_table.cells(comparison)
    ]
    table = html_table(compare_table.head(comparison), cells, names)
    return f'{table}<p class="more">{safe(compare_table.legend(comparison))}</p>'


def _linked(name: str, group: compare.Group, reports: Mapping[Path, str]) -> str:
    """Return the name of a group in HTML, with links to the reports of its runs."""
    links = {seed: reports[run.path] for seed, run in group.runs.items() if run.path in reports}
    if len(links) == len(group.runs) == 1:
        return f'<a href="{safe(*links.values())}">{safe(name)}</a>'
    seeds = ", ".join(f'<a href="{safe(link)}">{seed}</a>' for seed, link in links.items())
    return safe(name) + (f" <small>seeds {seeds}</small>" if links else "")


def _key(n: int) -> str:
    """Return a mark in the colour that the n-th group has in the figures."""
    return f'<span class="swatch" style="background:var(--{_style(n)[0]})"></span>'


def _style(n: int) -> tuple[str, str | tuple]:
    """Return the colour and the dash of the n-th group."""
    return f"s{n % 8}", cv.DASHES[n // 8 % len(cv.DASHES)]


def _curves(comparison: compare.Comparison) -> str:
    """Return the figure of the means over seeds."""
    curves, labels = [], distinct(comparison.names)
    for n, (group, name) in enumerate(zip(comparison.groups, comparison.names, strict=True)):
        runs = [Curve("", *series(run.metrics.get("eval", []), comparison.metric)) for run in group.runs.values()]
        runs = [c for c in runs if c.steps.size and c.finite.any()]
        if runs:
            colour, dash = _style(n)
            curves.append(cv.banded(runs, name, colour=colour, dash=dash, width=1.8, label=labels[n]))
    splits = sorted({split(run) for group in comparison.groups for run in group.runs.values()}, reverse=True)
    words = f"Means over seeds, of the {' or the '.join(splits)} split. "
    words += "The bands reach from the smallest to the largest value."
    return _figure("compared", comparison, curves, words)


def _frontier(comparison: compare.Comparison) -> str:
    """Return the figures of the metric by the effective FLOPs of a run, and by the time of its steps."""
    flops = [group.cost and group.cost[1] for group in comparison.groups]
    words = (
        f"{compare_table.TEST}. FLOPs of the whole run: what its products would cost if nothing were spent on zeros."
    )
    by_flops = _figure("frontier", comparison, _points(comparison, flops), words, along="FLOPs")
    words = f"{compare_table.TEST}. Time of all steps, without compilation and evaluations."
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


def _figure(key: str, comparison: compare.Comparison, curves: list[Curve], words: str, **options: Any) -> str:
    if not curves:
        return ""
    title = comparison.metric.replace("_", " ").capitalize()
    say = percent if comparison.shares else number
    svg = cv.draw(f"plot-{key}", curves, alt=f"{title}. {words}", say=say, say_step=large, **options)
    figure = f"<figure><h3>{safe(title)}</h3>{svg}<figcaption>{safe(words)}</figcaption></figure>"
    return f'<div class="figures">{figure}</div>'


def _differences(comparison: compare.Comparison) -> str:
    """Return the table of the fields that are not the same in all configs."""
    configs = [group.config for group in comparison.groups]
    rows = [[key, *(c.get(key, "") for c in configs)] for key in compare.varied(configs)]
    if not rows:
        return ""
    return html_table(["", *comparison.names], rows)
