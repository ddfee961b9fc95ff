"""Comparisons of runs. Runs that differ only in their seed are one line, with its spread."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import Mistake
from experiments.report import curves as cv
from experiments.report.curves import Curve
from experiments.report.page import LOGO, document, flat, notes_list
from experiments.report.runs import Run, read, seconds, series
from experiments.report.words import duration, large, markdown_table, number, percent, safe


class Group(NamedTuple):
    """Runs of one config, by their seeds."""

    config: dict[str, Any]  # flat, without the seed
    runs: dict[int, Run]

    def values(self, metric: str) -> dict[int, float]:
        """Return the last figure of every finished run, by seed. Figures that are not finite are left out."""
        figures = {seed: run.about.get("figures", {}).get(metric) for seed, run in self.runs.items() if finished(run)}
        return {seed: value for seed, value in figures.items() if value is not None and math.isfinite(value)}

    @property
    def time(self) -> float | None:
        """The mean duration of the finished runs in seconds."""
        times = [took for run in self.runs.values() if finished(run) and (took := seconds(run)) is not None]
        return statistics.fmean(times) if times else None

    @property
    def cost(self) -> tuple[float, float] | None:
        """FLOPs of the whole run, dense and effective."""
        about = next(iter(self.runs.values())).about
        if "flops" not in about or "steps" not in about:
            return None
        dense, effective = (cost * about["steps"] for cost in about["flops"])
        return dense, effective


def finished(run: Run) -> bool:
    """Return whether a run came to its end."""
    return run.about.get("outcome") == "finished"


def groups(runs: list[Run]) -> list[Group]:
    """Return the runs by config, in their order.

    Raises:
      Mistake: If two runs have one config and one seed.
    """
    by_config: dict[str, Group] = {}
    for run in runs:
        config = dict(flat(run.config))
        seed = config.pop("seed", 0)
        group = by_config.setdefault(json.dumps(config, sort_keys=True, default=str), Group(config, {}))
        if seed in group.runs:
            both = f"{run.path} and {group.runs[seed].path}"
            raise Mistake(f"{both} are the same run: they have one config and one seed.")
        group.runs[seed] = run
    return list(by_config.values())


def folders(paths: list[Path]) -> list[Path]:
    """Return the folders of runs. Each path is one, or holds some.

    Raises:
      Mistake: If a path is not the folder of a run or of runs.
    """
    runs = []
    for path in paths:
        inside = sorted(p.parent for p in path.glob("*/run.json"))
        if (path / "run.json").exists():
            runs.append(path)
        elif inside:
            runs += _ordered(path, inside)
        else:
            raise Mistake(
                f"{path} is not the folder of a run or of runs: neither it nor a folder in it has a run.json."
            )
    return runs


def _ordered(path: Path, inside: list[Path]) -> list[Path]:
    """Return the runs of a sweep in the order of its results, then the others."""
    lines = (path / "results.jsonl").read_text().splitlines() if (path / "results.jsonl").exists() else []
    named = [path / json.loads(line)["run"] for line in lines]
    return [p for p in named if p in inside] + [p for p in inside if p not in named]


# ---- the table ----


class Row(NamedTuple):
    """A line of the table: the figures of one group."""

    name: str
    mean: float | None
    spread: float | None  # standard deviation over seeds
    seeds: str
    difference: float | None  # to the baseline: the mean over the seeds that both have; of the means if there are none
    error: float | None  # the standard error of the difference
    paired: bool  # True if the difference is over seeds that both have
    cost: float | None  # effective FLOPs, relative to the baseline's
    time: float | None  # the mean duration of a run, in seconds
    marks: str  # the runs that failed or are missing


class Comparison(NamedTuple):
    """Groups of runs, compared with one of them."""

    metric: str
    groups: list[Group]
    names: list[str]
    rows: list[Row]
    base: int  # the number of the baseline
    notes: list[str]

    @property
    def shares(self) -> bool:
        """True if the metric is a share of 1, which is shown in percent."""
        return self.metric.endswith("accuracy")

    def say(self, value: float | None, signed: bool = False) -> str:
        """Return a figure as text: a share in percent, a signed share in points without a unit."""
        if value is None:
            return ""
        sign = "+" if signed else ""
        if not self.shares:
            return f"{value:{sign}.4f}"
        return f"{100 * value:+.2f}" if signed else f"{100 * value:.2f} %"

    def plain(self, value: float | None, signed: bool = False) -> str:
        """Return a figure as text without its unit."""
        return self.say(value, signed).removesuffix(" %")

    def plus_minus(self, error: float | None) -> str:
        """Return an error as it stands behind its figure: " ± 2.00"."""
        return "" if error is None else f" ± {self.plain(error)}"


def compare(runs: list[Run], baseline: str = "", seeds: Iterable[int] = ()) -> Comparison:
    """Return the comparison of runs with a baseline.

    Args:
      runs: The runs.
      baseline: The name of the baseline. If it is empty, the only dense group is the baseline, else the first group.
      seeds: Seeds that every group should have, besides those of any run.

    Raises:
      Mistake: If no group has the baseline's name, if two runs are the same, or if the runs have different metrics.
    """
    by_config = groups(runs)
    names = _names(by_config)
    if baseline and baseline not in names:
        raise Mistake(f"--baseline={baseline!r} is none of the configs: {', '.join(map(repr, names))}.")
    base = names.index(baseline) if baseline else _dense(by_config)
    kinds = {run.about.get("metric", "loss") for run in runs}
    if len(kinds) > 1:
        raise Mistake("some of these runs are judged by accuracy and some by loss. Compare them separately.")
    kind = kinds.pop()
    hardened = all(f"hardened_{kind}" in run.about.get("figures", {}) for run in runs if finished(run))
    metric = f"hardened_{kind}" if hardened else kind
    wanted = sorted({seed for group in by_config for seed in group.runs} | {*seeds})
    rows = [_row(group, name, by_config[base], metric, wanted) for group, name in zip(by_config, names, strict=True)]
    notes = list(dict.fromkeys(note for run in runs for note in run.about.get("notes") or ()))
    return Comparison(metric, by_config, names, rows, base, notes)


def compare_folders(paths: list[Path], baseline: str = "") -> Comparison:
    """Return the comparison of the runs of folders. Each folder is a run or holds some."""
    return compare([read(path) for path in folders(paths)], baseline)


def _dense(by_config: list[Group]) -> int:
    """Return the number of the only group whose effective FLOPs are its dense ones, or 0 if there is not one."""
    dense = [n for n, group in enumerate(by_config) if group.cost and group.cost[0] == group.cost[1]]
    return dense[0] if len(dense) == 1 else 0


def _varied(by_config: list[Group]) -> list[str]:
    """Return the fields that are not the same in all configs."""
    keys = dict.fromkeys(key for group in by_config for key in group.config)
    return [key for key in keys if len({repr(group.config.get(key)) for group in by_config}) > 1]


def _names(by_config: list[Group]) -> list[str]:
    """Return names of groups, made of the fields that differ between them."""
    varied = _varied(by_config)
    if not varied:
        return [next(iter(group.runs.values())).about.get("name", "run").partition(",seed=")[0] for group in by_config]
    last = [key.rpartition(".")[2] for key in varied]
    short = {key: word if last.count(word) == 1 else key for key, word in zip(varied, last, strict=True)}
    names = []
    for group in by_config:
        parts = [f"{word}={group.config.get(key)}" for key, word in short.items() if key in group.config]
        names.append(", ".join(parts) or "the rest")
    return names


def _row(group: Group, name: str, base: Group, metric: str, seeds: list[int]) -> Row:
    values, base_values = group.values(metric), base.values(metric)
    gaps = [values[seed] - base_values[seed] for seed in values if seed in base_values] if group is not base else []
    difference = statistics.fmean(gaps) if gaps else None
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    if group is not base and not gaps and values and base_values:  # no seed in common
        both = values.values(), base_values.values()
        difference = statistics.fmean(both[0]) - statistics.fmean(both[1])
        if min(map(len, both)) > 1:
            error = math.sqrt(sum(statistics.variance(v) / len(v) for v in both))
    outcomes = {seed: run.about.get("outcome", "running").partition(":")[0] for seed, run in group.runs.items()}
    marks = [f"seed {seed} {outcome}" for seed, outcome in outcomes.items() if outcome != "finished"]
    marks += [f"seed {seed} missing" for seed in seeds if seed not in outcomes]
    return Row(
        name,
        mean=statistics.fmean(values.values()) if values else None,
        spread=statistics.stdev(values.values()) if len(values) > 1 else None,
        seeds=f"{len(values)} of {len(seeds)}",
        difference=difference,
        error=error,
        paired=bool(gaps),
        cost=group.cost[1] / base.cost[1] if group.cost and base.cost else None,
        time=group.time,
        marks=", ".join(marks),
    )


DIFFERENCE, COST = "difference to the baseline", "effective FLOPs, relative to the baseline's"
SPREADS = (
    "Each mean has its standard deviation over seeds. Each difference is the mean over the seeds that both have, with "
    "its standard error; an unpaired one is the difference of the means, because no seed is common."
)


def _head(comparison: Comparison) -> list[str]:
    return ["config", comparison.metric.replace("_", " "), "seeds", DIFFERENCE, COST, "time of a run", ""]


def _cells(comparison: Comparison, row: Row, number: int) -> list[str]:
    mean = comparison.say(row.mean) + comparison.plus_minus(row.spread)
    difference = "the baseline"
    if number != comparison.base:
        difference = comparison.say(row.difference, signed=True) + comparison.plus_minus(row.error)
        if row.difference is not None and not row.paired:
            difference += ", unpaired"
    cost = "" if row.cost is None else f"{row.cost:.3f}"
    time = "" if row.time is None else duration(row.time)
    return [row.name, mean, row.seeds, difference, cost, time, row.marks]


def markdown(comparison: Comparison) -> str:
    """Return the table as Markdown."""
    cells = [_cells(comparison, row, n) for n, row in enumerate(comparison.rows)]
    parts = [markdown_table([_head(comparison), *cells]), SPREADS, *comparison.notes]
    return "\n\n".join(parts) + "\n"


# ---- the page ----


def render(comparison: Comparison, reports: Mapping[Path, str] | None = None) -> str:
    """Return the whole page.

    Args:
      comparison: The comparison.
      reports: The addresses of reports, by the folder of the run. Names and seeds link to them.
    """
    title = f"{len(comparison.groups)} configs, {sum(len(group.runs) for group in comparison.groups)} runs"
    header = f'<p class="over">{LOGO} nmjax · a comparison</p><h1>{safe(title)}</h1>'
    if comparison.notes:
        header += notes_list(comparison.notes)
    sections = [
        ("table", f"The last {comparison.metric.replace('_', ' ')}", _table(comparison, reports or {})),
        ("curves", "Over the steps", _curves(comparison)),
        ("frontier", "Against effective FLOPs", _frontier(comparison)),
        ("configs", "What differs", _differences(comparison)),
    ]
    return document(title, header, sections)


def _html_table(head: list[str], rows: list[list[str]], names: list[str] | None = None) -> str:
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


def _table(comparison: Comparison, reports: Mapping[Path, str]) -> str:
    cells = [_cells(comparison, row, n) for n, row in enumerate(comparison.rows)]
    groups_and_names = zip(comparison.groups, comparison.names, strict=True)
    names = [_linked(name, group, reports) for group, name in groups_and_names]
    return f'{_html_table(_head(comparison), cells, names)}<p class="more">{SPREADS}</p>'


def _linked(name: str, group: Group, reports: Mapping[Path, str]) -> str:
    """Return the name of a group in HTML, with links to the reports of its runs."""
    links = {seed: reports[run.path] for seed, run in group.runs.items() if run.path in reports}
    if len(links) == len(group.runs) == 1:
        return f'<a href="{safe(*links.values())}">{safe(name)}</a>'
    seeds = ", ".join(f'<a href="{safe(link)}">{seed}</a>' for seed, link in links.items())
    return safe(name) + (f" <small>seeds {seeds}</small>" if links else "")


def _style(n: int) -> tuple[str, str | tuple]:
    """Return the colour and the dash of the n-th group."""
    return f"s{n % 8}", cv.DASHES[n // 8 % len(cv.DASHES)]


def _curves(comparison: Comparison) -> str:
    """Return the figure of the means over seeds."""
    curves = []
    for n, (group, name) in enumerate(zip(comparison.groups, comparison.names, strict=True)):
        runs = [Curve("", *series(run.metrics.get("eval", []), comparison.metric)) for run in group.runs.values()]
        runs = [c for c in runs if c.steps.size and c.finite.any()]
        if runs:
            colour, dash = _style(n)
            curves.append(cv.banded(runs, name, colour=colour, dash=dash, width=1.8))
    words = "Means over seeds. The bands reach from the least to the largest."
    return _figure("compared", comparison, curves, words)


def _frontier(comparison: Comparison) -> str:
    """Return the figure of the metric by the effective FLOPs of a run."""
    points = []
    for n, (group, row) in enumerate(zip(comparison.groups, comparison.rows, strict=True)):
        if row.mean is not None and group.cost:
            points.append(Curve(row.name, np.array([group.cost[1]]), np.array([row.mean]), _style(n)[0], 4.0))
    words = "FLOPs of the whole run: what its products would cost if nothing were spent on zeros."
    return _figure("frontier", comparison, points, words, along="FLOPs")


def _figure(key: str, comparison: Comparison, curves: list[Curve], words: str, **options: Any) -> str:
    if not curves:
        return ""
    title = comparison.metric.replace("_", " ").capitalize()
    say = percent if comparison.shares else number
    svg = cv.draw(f"plot-{key}", curves, alt=f"{title}. {words}", say=say, say_step=large, **options)
    figure = f"<figure><h3>{safe(title)}</h3>{svg}<figcaption>{safe(words)}</figcaption></figure>"
    return f'<div class="figures">{figure}</div>'


def _differences(comparison: Comparison) -> str:
    """Return the table of the fields that are not the same in all configs."""
    varied = _varied(comparison.groups)
    if not varied:
        return ""
    rows = [[key, *(group.config.get(key, "") for group in comparison.groups)] for key in varied]
    return _html_table(["", *comparison.names], rows)
