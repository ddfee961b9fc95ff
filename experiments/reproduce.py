"""REPRODUCTION.md brought up to date: its tables and pictures, out of experiments/results/*.jsonl.

    python -m experiments.reproduce

What stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made of the results of that name: of a sweep beside what the study's
page says was published, and against the dense runs of other results that it names; or as a study that looks into runs draws its own
figure. All else is written by hand.
"""

import datetime
import importlib
import json
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from experiments import command, sweep
from experiments.errors import Mistake
from experiments.files import replace
from experiments.report import compare, dots
from experiments.report.runs import Run
from experiments.report.words import duration
from experiments.studies import __main__ as looks
from experiments.training import digest

ROOT = Path(__file__).parent
PAGE, RESULTS = ROOT / "REPRODUCTION.md", ROOT / "results"
BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


class Study(NamedTuple):
    """What some results are of."""

    module: ModuleType
    variant: str
    page: str  # of its config, if it is a sweep
    short: str  # what each of its commands has
    command: str  # that makes what is missing


def study(name: str) -> Study:
    """That of the results of a name: sdgp_cpu are those of studies/sdgp.py at the size of two cores."""
    known = [path.stem for path in (ROOT / "studies").glob("[a-z]*.py") if name.startswith(f"{path.stem}_")]
    if not known:
        raise Mistake(f"{name} names no study of experiments/studies, as sdgp_cpu does.")
    which = max(known, key=len)
    module, variant = importlib.import_module(f"experiments.studies.{which}"), name.removeprefix(f"{which}_")
    if which in looks.NAMES:
        return Study(module, variant, "", looks.command(which), looks.command(which))
    page = f"experiments/studies/{which}.py:{variant}"
    short = f"python launch.py --config={page} --sweep"
    return Study(module, variant, page, short, f"{short} --results=experiments/results/{name}.jsonl")


def read(path: Path) -> list[dict]:
    """The last line of every run in a file of results."""
    of = study(path.stem)
    if not path.exists():
        raise Mistake(f"there is no {path}: {of.command}")
    found = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
            form, name, made_by = line["format"], line["run"], line.get("command", "")
        except (ValueError, TypeError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
            raise Mistake(
                f"{where} is no line of results ({why}): take it out, and run what is missing by {of.command}"
            ) from error
        if form != sweep.FORMAT:
            raise Mistake(
                f"{where} is of format {form}, and this reads {sweep.FORMAT}: take the line out, and run it again by {of.command}"
            )
        if "--config." in made_by or of.short not in made_by:
            raise Mistake(f"{where} was made by another command than {of.command}: {made_by}. Take it out.")
        if line.get("config") != _digest(of, line):
            raise Mistake(
                f"{where} is of another config than the page has now: take it out, and run it again by {of.command}"
            )
        found[name] = line
    return list(found.values())


def _digest(of: Study, line: dict) -> str:
    """Of the config that a line's run would have now."""
    if not of.page:
        return digest.identity(of.module.config(**line["case"])).digest
    return sweep.members(command.load(of.page), [line["changes"]])[0].identity.digest


class Compared(NamedTuple):
    """The results of a sweep, compared to the first of its methods as runs are."""

    lines: list[dict]
    what: str  # differs: the method, or another field
    missing: list[str]  # of these
    found: compare.Comparison
    rows: dict[str, compare.Row]  # by method

    @property
    def values(self) -> dict[str, dict[int, float]]:
        """By method and seed."""
        return {m: group.values(self.found.metric) for m, group in zip(self.rows, self.found.groups, strict=True)}


def compared(name: str, results: Path) -> Compared:
    of, lines = study(name), read(results / f"{name}.jsonl")
    asked = of.module.get_sweep(of.variant)
    key = next(field for field in asked[0] if field != "seed")
    order = list(dict.fromkeys(change[key] for change in asked))
    there = {line["changes"].get(key) for line in lines}
    if odd := there - {*order}:
        raise Mistake(
            f"{results / name}.jsonl has runs of {sorted(map(str, odd))[0]}, which the sweep has not: take them out."
        )
    if len({method == order[0] for method in there}) < 2:
        raise Mistake(f"{results / name}.jsonl has not both runs of {order[0]} and others yet: {of.command}")
    lines.sort(key=lambda line: order.index(line["changes"][key]))
    runs = [Run(Path(line["run"]), line, line["changes"], {}, "", "", {}, {}, ()) for line in lines]
    word = key.rpartition(".")[2]
    found = compare.compare(runs, f"{word}={order[0]}", {change["seed"] for change in asked})
    rows = {row.name.removeprefix(f"{word}="): row for row in found.rows}
    return Compared(
        lines, "method" if "." in key else key, [method for method in order if method not in there], found, rows
    )


# ---- a block ----


def block(name: str, results: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """Its Markdown, and its pictures as SVG by their names."""
    of = study(name)
    if hasattr(of.module, "figure"):
        return _figure(name, of, read(results / f"{name}.jsonl"))
    ours = compared(name, results)
    published = getattr(of.module, "published", lambda variant: {})(of.variant)
    seen = "Dots: ours, with the standard error of the paired difference" + "; diamonds: published" * bool(published)
    pictures = {name: _dots(name, ours, published, seen)}
    parts = [f"![{seen}](results/{name}.svg)", ""]
    against = getattr(of.module, "against", lambda variant: "")(of.variant)
    shorter = compared(against, results) if against and (results / f"{against}.jsonl").exists() else None
    if names := getattr(of.module, "NAMES", {}):
        pictures[f"{name}_frontier"] = _frontier(name, ours, names, shorter)
        parts[:0] = [f"![Against effective FLOPs](results/{name}_frontier.svg)", ""]
    table = _table(ours, published, shorter)
    table += _pairs(ours, getattr(of.module, "pairs", lambda variant: {})(of.variant))
    words = f"Mean ± deviation over seeds; of the difference, its standard error. `{of.command}`; {_made(ours.lines)}."
    told = [f"\nNot run: {', '.join(f'`{method}`' for method in ours.missing)}."] * bool(ours.missing)
    if against and shorter is None:
        told.append(f"\nNot run: the dense runs of as many FLOPs, `{study(against).command}`.")
    return _lines([*parts, table, "", words, *told, *(f"\n{note}" for note in ours.found.notes)]), pictures


def _lines(parts: list[str]) -> str:
    return "\n".join(parts).rstrip() + "\n"


def _figure(name: str, of: Study, lines: list[dict]) -> tuple[str, dict[str, str]]:
    """What a study that looks into runs makes of its lines; of those that diverged it is said."""
    asked = [",".join(f"{field}={value}" for field, value in case.items()) for case in of.module.CASES]
    missing = [run for run in asked if run not in {line["run"] for line in lines}]
    if missing:
        raise Mistake(f"results of {name} lack {len(missing)} of {len(asked)} cases, as {missing[0]}: {of.command}")
    lines.sort(key=lambda line: asked.index(line["run"]))
    lost = [
        f"\n`{line['run']}` {line['outcome']}: it is in none of this."
        for line in lines
        if line["outcome"] != "finished"
    ]
    table, drawn = of.module.figure([line for line in lines if line["outcome"] == "finished"])
    pictures = {f"{name}_{part}": dots.standalone(svg) for part, svg in drawn.items()}
    shown = [f"![{part.replace('_', ' ')}](results/{name}_{part}.svg)" for part in drawn]
    notes = [f"\n{note}" for note in dict.fromkeys(note for line in lines for note in line["notes"])]
    return _lines([*shown, "", table, "", f"`{of.command}`; {_made(lines)}.", *lost, *notes]), pictures


def _table(ours: Compared, published: dict, shorter: Compared | None) -> str:
    found, values = ours.found, ours.values
    metric = found.metric.replace("_", " ") + " %" * found.metric.endswith("accuracy")
    head = [ours.what, metric, "difference to dense, paired", "effective FLOPs", "seeds", ""]
    if shorter:
        head[4:4] = ["difference to dense of as many FLOPs"]
    if published:
        head[3:3] = ["published", "its difference"]
    table = [head, ["---"] * len(head)]
    plain = lambda value, **how: found.say(value, **how).removesuffix(" %")
    for method, row in ours.rows.items():
        base, theirs = row.name == found.names[found.base], published.get(method)
        mean = plain(row.mean) + (f" ± {plain(row.spread)}" if row.spread is not None else "")
        off = "" if base else plain(row.difference, signed=True)
        off += f" ± {plain(row.error)}" if row.error is not None else ""
        cells = [f"`{method}`", mean, off, "" if row.cost is None else f"{row.cost:.3f}", row.seeds, row.marks]
        if shorter:
            cells[4:4] = ["" if base else _with_error(found, _over(values[method], row.cost, shorter))]
        if published:
            gap = "" if theirs is None or base else f"{theirs - published['dense']:+.1f}"
            cells[3:3] = ["" if theirs is None else f"{theirs}", gap]
        table.append(cells)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in table)


def _over(values: dict[int, float], cost: float | None, shorter: Compared) -> list[float]:
    """By seed, a value less that of dense runs of the seed that cost as much: on straight lines between those that were run."""
    found = []
    for seed, value in values.items():
        runs = [(shorter.rows[steps].cost, of[seed]) for steps, of in shorter.values.items() if seed in of]
        known = sorted((at, dense) for at, dense in runs if at is not None)
        if known and cost is not None and known[0][0] - 1e-6 <= cost <= known[-1][0] + 1e-6:
            found.append(value - float(np.interp(cost, *zip(*known, strict=True))))
    return found


def _with_error(found: compare.Comparison, gaps: list[float]) -> str:
    """The mean of differences by seed, and its standard error."""
    if not gaps:
        return ""
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    told = f" ± {found.say(error).removesuffix(' %')}" if error is not None else ""
    return f"{found.say(statistics.fmean(gaps), signed=True).removesuffix(' %')}{told}"


def _pairs(ours: Compared, asked: dict[str, dict[str, list[tuple[str, str]]]]) -> str:
    """A table of what one method has over another, run by run of the same seed: by its rows and columns lists of such pairs."""
    if not asked:
        return ""
    values = ours.values
    columns = list(next(iter(asked.values())))
    table = [["first less second, paired by seed (pairs)", *columns], ["---"] * (len(columns) + 1)]
    for label, of in asked.items():
        cells = [label]
        for pairs in of.values():
            both = [(values.get(a, {}), values.get(b, {})) for a, b in pairs]
            gaps = [left[seed] - right[seed] for left, right in both for seed in left if seed in right]
            cells.append(f"{_with_error(ours.found, gaps)} ({len(gaps)})" if gaps else "")
        table.append(cells)
    return "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _scaled(found: compare.Comparison, value: float | None) -> float | None:
    """In points, where it is a share."""
    return None if value is None else value * (100 if found.metric.endswith("accuracy") else 1)


def _along(found: compare.Comparison) -> str:
    points = " in points" if found.metric.endswith("accuracy") else ""
    return f"{found.metric.replace('_', ' ')}, difference to dense{points}"


def _signed(x: float) -> str:
    return f"{x:+.3g}".replace("-", "−") if x else "0"


def _dots(name: str, ours: Compared, published: dict, words: str) -> str:
    """The differences to dense, ours and theirs."""
    found, marks = ours.found, []
    for method, row in ours.rows.items():
        if row.name != found.names[found.base]:
            theirs = published.get(method)
            gap = None if theirs is None else theirs - published["dense"]
            name_of = (method if ours.what == "method" else f"{method} {ours.what}") + f" ({row.seeds})" * bool(
                row.marks
            )
            marks.append(dots.Dot(name_of, _scaled(found, row.difference), _scaled(found, row.error), gap))
    along = _along(found)
    return dots.standalone(dots.draw(name, marks, alt=f"{along}. {words}.", along=along, say=_signed))


def _frontier(name: str, ours: Compared, names: dict[tuple[str, str], str], shorter: Compared | None) -> str:
    """The differences to dense by what a run costs, of methods by their kinds and their names in these; and of dense runs."""
    kinds = list(dict.fromkeys(kind for kind, _ in names))
    points = [_point(ours, text, part, f"s{kinds.index(kind) + 1}") for (kind, part), text in names.items()]
    line = [_point(shorter, steps, "", "s0") for steps in shorter.rows] if shorter else []
    along, up = "effective FLOPs of the training run, shares of dense", _along(ours.found)
    keys = {"dense, ended sooner": "s0"} if shorter else {}
    keys |= {kind: f"s{n}" for n, kind in enumerate(kinds, 1)}
    words = {"alt": f"{up}, by {along}.", "along": along, "up": up, "keys": keys}
    best = min if ours.found.metric.endswith("loss") else max
    shown, joined = ([point for point in each if point] for each in (points, line))
    return dots.standalone(dots.frontier(f"{name}-f", shown, joined, **words, say=_signed, best=best))


def _point(of: Compared, method: str, name: str, colour: str) -> dots.Point | None:
    """A difference to dense and what it costs, if both are known."""
    row = of.rows.get(method)
    gap = row and (0.0 if row.name == of.found.names[of.found.base] else row.difference)
    if row is None or None in (row.cost, gap):
        return None
    seeds = f" ({row.seeds})" * bool(row.marks)
    return dots.Point(name + seeds, row.cost, _scaled(of.found, gap), _scaled(of.found, row.error), colour)


def _made(lines: list[dict]) -> str:
    """With what the runs were made, and how fast."""
    devices = " and ".join(dict.fromkeys(line.get("devices", "") for line in lines if line.get("devices")))
    versions = " and ".join(dict.fromkeys(f"jax {line['versions']['jax']}" for line in lines))
    taken, until = 0.0, 0.0
    for began, ended in sorted(
        [datetime.datetime.fromisoformat(line[at]).timestamp() for at in ("began", "ended")] for line in lines
    ):
        taken, until = taken + max(ended - max(began, until), 0), max(until, ended)
    rate = f"; {len(lines)} runs in {duration(taken)}: {60 * len(lines) / taken:.2g} a minute" if taken else ""
    return f"{versions}{f', {devices}' if devices else ''}{rate}"


# ---- the page ----


def page(text: str, results: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """The page with its blocks made anew, and the pictures."""
    pictures = {}

    def made(found):
        table, drawn = block(found[1], results)
        pictures.update(drawn)
        return f"<!-- {found[1]} -->\n{table}<!-- end -->"

    return BLOCK.sub(made, text), pictures


def main() -> int:
    try:
        text, pictures = page(PAGE.read_text())
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    for name, svg in pictures.items():
        replace(RESULTS / f"{name}.svg", svg)
    replace(PAGE, text)
    print(f"{PAGE}: {', '.join(pictures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
