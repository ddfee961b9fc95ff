"""Runs beside each other: those that differ in their seed alone are one line, with its spread."""

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import Mistake
from experiments.report import curves as cv
from experiments.report.curves import Curve
from experiments.report.page import LOGO, document, flat
from experiments.report.runs import Run, read, series
from experiments.report.words import large, number, percent, safe


class Group(NamedTuple):
    """Runs of one config, by their seeds."""

    config: dict[str, Any]  # flat, without the seed
    runs: dict[int, Run]

    def values(self, metric: str) -> dict[int, float]:
        """The last figure of every run that ended well."""
        found = {seed: run.about.get("figures", {}).get(metric) for seed, run in self.runs.items() if run_ended(run)}
        return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}

    @property
    def cost(self) -> tuple[float, float] | None:
        """FLOPs of the whole run, dense and effective."""
        about = next(iter(self.runs.values())).about
        if "flops" not in about or "steps" not in about:
            return None
        dense, effective = (cost * about["steps"] for cost in about["flops"])
        return dense, effective


def run_ended(run: Run) -> bool:
    return run.about.get("outcome") == "finished"


def groups(runs: list[Run]) -> list[Group]:
    """Runs by config, in the order in which they were named."""
    found: dict[str, Group] = {}
    for run in runs:
        config = dict(flat(run.config))
        seed = config.pop("seed", 0)
        group = found.setdefault(json.dumps(config, sort_keys=True, default=str), Group(config, {}))
        if seed in group.runs:
            raise Mistake(f"{run.path} and {group.runs[seed].path} are the same run: one config and one seed.")
        group.runs[seed] = run
    return list(found.values())


def folders(paths: list[Path]) -> list[Path]:
    """The folders of runs, of which each path is one or holds some."""
    found = []
    for path in paths:
        inside = sorted(p.parent for p in path.glob("*/run.json"))
        if (path / "run.json").exists():
            found.append(path)
        elif inside:
            found += _ordered(path, inside)
        else:
            raise Mistake(f"{path} is no run and holds none: there is no run.json in it, nor in its folders.")
    return found


def _ordered(path: Path, inside: list[Path]) -> list[Path]:
    """As the sweep lists them, then what else is there."""
    lines = (path / "results.jsonl").read_text().splitlines() if (path / "results.jsonl").exists() else []
    named = [path / json.loads(line)["run"] for line in lines]
    return [p for p in named if p in inside] + [p for p in inside if p not in named]


# ---- the table ----


class Row(NamedTuple):
    """What is told of a group."""

    name: str
    mean: float | None
    spread: float | None  # standard deviation over seeds
    seeds: str
    difference: float | None  # to the baseline, of the seeds that both have, and its standard error
    error: float | None
    cost: float | None  # of effective FLOPs, in shares of the baseline's
    marks: str


class Comparison(NamedTuple):
    """What the page and the text tell."""

    metric: str
    groups: list[Group]
    names: list[str]
    rows: list[Row]
    base: int
    notes: list[str]

    def say(self, value: float | None, signed: bool = False) -> str:
        if value is None:
            return ""
        form = f"{'+' if signed else ''}.2f"
        return (
            f"{100 * value:{form}}{'' if signed else ' %'}"
            if self.metric.endswith("accuracy")
            else f"{value:{'+' if signed else ''}.4f}"
        )


def compare(runs: list[Run], baseline: str = "", asked: Iterable[int] = ()) -> Comparison:
    """Runs, compared with the first of their groups, or the one of that name; of which those seeds were asked for, beside any that are there."""
    found = groups(runs)
    names = _names(found)
    if baseline and baseline not in names:
        raise Mistake(f"--baseline={baseline!r}: there are {', '.join(map(repr, names))}.")
    base = names.index(baseline) if baseline else 0
    kinds = {run.about.get("metric", "loss") for run in runs}
    if len(kinds) > 1:
        raise Mistake("some of these runs are judged by accuracy and some by loss: compare them apart.")
    kind = kinds.pop()
    hardened = all(f"hardened_{kind}" in run.about.get("figures", {}) for run in runs if run_ended(run))
    metric = f"hardened_{kind}" if hardened else kind
    seeds = sorted({seed for group in found for seed in group.runs} | {*asked})
    rows = [_row(group, name, found[base], metric, seeds) for group, name in zip(found, names, strict=True)]
    notes = list(dict.fromkeys(note for run in runs for note in run.about.get("notes") or ()))
    return Comparison(metric, found, names, rows, base, notes)


def _names(found: list[Group]) -> list[str]:
    """Groups named by what differs between them."""
    keys = dict.fromkeys(key for group in found for key in group.config)
    varied = [key for key in keys if len({repr(group.config.get(key)) for group in found}) > 1]
    if not varied:
        return [next(iter(group.runs.values())).about.get("name", "run").partition(",seed=")[0] for group in found]
    last = [key.rpartition(".")[2] for key in varied]
    short = [word if last.count(word) == 1 else key for key, word in zip(varied, last, strict=True)]
    told = lambda group: [
        f"{word}={group.config.get(key)}" for key, word in zip(varied, short, strict=True) if key in group.config
    ]
    return [", ".join(told(group)) or "the rest" for group in found]


def _row(group: Group, name: str, base: Group, metric: str, seeds: list[int]) -> Row:
    values, theirs = group.values(metric), base.values(metric)
    mean = statistics.fmean(values.values()) if values else None
    spread = statistics.stdev(values.values()) if len(values) > 1 else None
    pairs = [values[seed] - theirs[seed] for seed in values if seed in theirs] if group is not base else []
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    cost = group.cost[1] / base.cost[1] if group.cost and base.cost else None
    outcomes = {seed: run.about.get("outcome", "running").partition(":")[0] for seed, run in group.runs.items()}
    marks = [f"seed {seed} {outcome}" for seed, outcome in outcomes.items() if outcome != "finished"]
    marks += [f"seed {seed} missing" for seed in seeds if seed not in outcomes]
    return Row(
        name, mean, spread, f"{len(values)} of {len(seeds)}", statistics.fmean(pairs) if pairs else None, error, cost,
        ", ".join(marks),
    )  # fmt: skip


HEAD = ("config", "", "seeds", "difference to the baseline, paired by seed", "effective FLOPs, of the baseline's", "")


def _cells(found: Comparison, row: Row, n: int) -> list[str]:
    mean = found.say(row.mean) + (f" ± {found.say(row.spread).removesuffix(' %')}" if row.spread is not None else "")
    difference = found.say(row.difference, signed=True)
    difference += f" ± {found.say(row.error).removesuffix(' %')}" if row.error is not None else ""
    cost = "" if row.cost is None else f"{row.cost:.3f}"
    return [row.name, mean, row.seeds, "the baseline" if n == found.base else difference, cost, row.marks]


def markdown(found: Comparison) -> str:
    """The table as text."""
    head = [title or found.metric.replace("_", " ") if i == 1 else title for i, title in enumerate(HEAD)]
    lines = [head, ["---"] * len(head), *(_cells(found, row, n) for n, row in enumerate(found.rows))]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    said = "\n".join(f"\n{note}" for note in found.notes)
    return (
        f"{table}\n\nMean ± standard deviation over seeds; of the difference, its standard error.\n{said}".rstrip()
        + "\n"
    )


# ---- the page ----


def render(found: Comparison) -> str:
    """The whole page."""
    title = f"{len(found.groups)} configs, {sum(len(g.runs) for g in found.groups)} runs"
    header = f'<p class="over">{LOGO} nmjax · a comparison</p><h1>{safe(title)}</h1>'
    if found.notes:
        header += (
            f'<ul class="notes" aria-label="Notes">{"".join(f"<li>{safe(note)}</li>" for note in found.notes)}</ul>'
        )
    sections = [
        ("table", f"The last {found.metric.replace('_', ' ')}", _table(found)),
        ("curves", "Over the steps", _curves(found)),
        ("frontier", "Against effective FLOPs", _frontier(found)),
        ("configs", "What differs", _differences(found)),
    ]
    return document(title, header, sections)


def _table(found: Comparison) -> str:
    head = "".join(
        f'<th scope="col">{safe(title or (found.metric.replace("_", " ") if i == 1 else ""))}</th>'
        for i, title in enumerate(HEAD)
    )
    rows = ""
    for n, row in enumerate(found.rows):
        name, *cells = _cells(found, row, n)
        rows += f'<tr><th scope="row">{safe(name)}</th>{"".join(f"<td>{safe(cell)}</td>" for cell in cells)}</tr>'
    body = (
        f'<div class="scroll"><table class="values"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return f"{body}<p>Mean ± standard deviation over seeds; of the difference, its standard error.</p>"


def _looks(n: int) -> tuple[str, str | tuple]:
    return f"s{n % 8}", cv.DASHES[n // 8 % len(cv.DASHES)]


def _curves(found: Comparison) -> str:
    """The mean over seeds, in a band from the least to the largest."""
    curves = []
    for n, (group, name) in enumerate(zip(found.groups, found.names, strict=True)):
        each = [Curve("", *series(run.metrics.get("eval", []), found.metric)) for run in group.runs.values()]
        each = [c for c in each if c.steps.size and c.finite.any()]
        if each:
            colour, dash = _looks(n)
            curves.append(cv.banded(each, name, colour=colour, dash=dash, width=1.8))
    if not curves:
        return ""
    say = percent if found.metric.endswith("accuracy") else number
    words = "Means over seeds; the bands reach from the least to the largest."
    return _figure("compared", found.metric, curves, words, say=say, say_step=large)


def _frontier(found: Comparison) -> str:
    """What is reached for what is spent, effectively."""
    points = []
    for n, (group, row) in enumerate(zip(found.groups, found.rows, strict=True)):
        if row.mean is not None and group.cost:
            points.append(Curve(row.name, np.array([group.cost[1]]), np.array([row.mean]), _looks(n)[0], 4.0))
    if not points:
        return ""
    say = percent if found.metric.endswith("accuracy") else number
    words = "Of the whole run: what its products would cost if nothing were spent on zeros."
    return _figure("frontier", found.metric, points, words, say=say, say_step=large, along="FLOPs")


def _figure(key: str, metric: str, curves: list[Curve], words: str, **options) -> str:
    title = metric.replace("_", " ").capitalize()
    svg = cv.draw(f"plot-{key}", curves, alt=f"{title}. {words}", **options)
    return (
        f'<div class="figures"><figure><h3>{safe(title)}</h3>{svg}<figcaption>{safe(words)}</figcaption></figure></div>'
    )


def _differences(found: Comparison) -> str:
    """The fields of the configs that are not the same in all."""
    keys = dict.fromkeys(key for group in found.groups for key in group.config)
    varied = [key for key in keys if len({repr(group.config.get(key)) for group in found.groups}) > 1]
    if not varied:
        return ""
    head = "".join(f'<th scope="col">{safe(name)}</th>' for name in ("", *found.names))
    cell = lambda group, key: f"<td>{safe(group.config.get(key, ''))}</td>"
    rows = "".join(
        f'<tr><th scope="row">{safe(key)}</th>{"".join(cell(group, key) for group in found.groups)}</tr>'
        for key in varied
    )
    return (
        f'<div class="scroll"><table class="values"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def of(paths: list[Path], baseline: str = "") -> Comparison:
    """The runs of folders, compared."""
    return compare([read(path) for path in folders(paths)], baseline)
