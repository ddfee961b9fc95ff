"""Brings the pages of evidence up to date: makes their tables and pictures from experiments/results/*.jsonl.

    python -m experiments.reproduce

The text between ``<!-- NAME -->`` and ``<!-- end -->`` is made from the results of that name: for a study with claims
their verdicts, its arms and pictures (`experiments.evidence`), and for an earlier sweep its table. A study that looks
into runs makes its own table and pictures. ``claims`` are the main claims of all studies. All other text is written by
hand.
"""

import argparse
import datetime
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments import evidence
from experiments.errors import Mistake
from experiments.files import replace
from experiments.recorded import Compared, Study, compared, read, study
from experiments.report import compare, dots
from experiments.report.compare_table import RELATIVE
from experiments.report.words import PLUS_MINUS, duration, markdown_table

ROOT = Path(__file__).parent
PAGES, RESULTS = (ROOT / "REPRODUCTION.md", ROOT / "EARLIER.md"), ROOT / "results"
BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
DOTS = "Dots: ours, with the standard error of the paired difference"  # part of the pictures
CAPTION = "Differences to dense of our runs (dots, with standard errors)"


# ---- a block ----


def block(name: str, results: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """Return the Markdown of the block of a name such as "sdgp_cpu", and its pictures as SVG by their names."""
    if name == "claims":
        return _text([evidence.first_screen(results)]), {}
    its_study = study(name)
    if hasattr(its_study.module, "arms") and not (results / f"{name}.jsonl").exists():
        return _text([f"Not run: `{its_study.command}`."]), {}
    if hasattr(its_study.module, "arms"):
        parts, pictures = evidence.section(name, results)
        lines = read(results / f"{name}.jsonl")
        return _text(["\n\n".join([*parts, _source(its_study, lines)])]), pictures
    if hasattr(its_study.module, "figure"):
        return _figure(name, its_study, read(results / f"{name}.jsonl"))
    ours = compared(name, results)
    published = its_study.optional("published", {})
    caption = f"{DOTS}; diamonds: published" if published else DOTS
    pictures = {name: _dots(name, ours, published, caption)}
    shown = f"{CAPTION} and of the published runs (diamonds)" if published else CAPTION
    parts = [f"![{shown}](results/{name}.svg)", ""]
    against = its_study.optional("against", "")
    shorter = compared(against, results) if against and (results / f"{against}.jsonl").exists() else None
    names = getattr(its_study.module, "NAMES", {})
    if names:
        pictures[f"{name}_frontier"] = _frontier(name, ours, names, shorter)
        parts = [f"![Against effective FLOPs](results/{name}_frontier.svg)", "", *parts]
        if any(row.seconds for row in ours.rows.values()):
            pictures[f"{name}_time"] = _frontier(name, ours, names, shorter, "seconds")
            parts = [f"![Against time](results/{name}_time.svg)", "", *parts]
    parts.append(_table(ours, published, shorter) + _pairs(ours, its_study.optional("pairs", {})))
    parts += ["", PLUS_MINUS]
    parts += ["", _source(its_study, ours.lines)]
    if ours.missing:
        parts.append(f"\nNot run: {', '.join(f'`{method}`' for method in ours.missing)}.")
    if against and shorter is None:
        parts.append(f"\nNot run: the dense runs of as many FLOPs, `{study(against).command}`.")
    return _text([*parts, *(f"\n{note}" for note in ours.comparison.notes)]), pictures


def _text(parts: list[str]) -> str:
    return "\n".join(parts).rstrip() + "\n"


def _figure(name: str, its_study: Study, lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return the block of a study that looks into runs. Cases that diverged are listed, and left out of its figures."""
    wanted = [",".join(f"{field}={value}" for field, value in case.items()) for case in its_study.module.CASES]
    missing = [run for run in wanted if run not in {line["run"] for line in lines}]
    if missing:
        lacking = f"lack {len(missing)} of {len(wanted)} cases, such as {missing[0]}"
        raise Mistake(f"results of {name} {lacking}. Make them by: {its_study.command}")
    lines.sort(key=lambda line: wanted.index(line["run"]))
    finished = [line for line in lines if line["outcome"] == "finished"]
    lost = [line for line in lines if line["outcome"] != "finished"]
    table, drawings = its_study.module.figure(finished)
    pictures = {f"{name}_{part}": dots.standalone(svg) for part, svg in drawings.items()}
    parts = [f"![{part.replace('_', ' ')}](results/{name}_{part}.svg)" for part in drawings]
    parts += ["", table, "", _source(its_study, lines)]
    parts += [f"\n`{line['run']}` {line['outcome']}: it is in none of this." for line in lost]
    parts += [f"\n{note}" for note in dict.fromkeys(note for line in lines for note in line["notes"])]
    return _text(parts), pictures


def _source(its_study: Study, lines: list[dict]) -> str:
    """Return where results come from, and how long the runs took. Overlapping runs count once."""
    devices = " and ".join(dict.fromkeys(line.get("devices", "") for line in lines if line.get("devices")))
    text = " and ".join(dict.fromkeys(f"jax {line['versions']['jax']}" for line in lines))
    if devices:
        text += f" on {devices}"
    spans = [[datetime.datetime.fromisoformat(line[at]).timestamp() for at in ("began", "ended")] for line in lines]
    total, until = 0.0, 0.0
    for began, ended in sorted(spans):
        total, until = total + max(ended - max(began, until), 0), max(until, ended)
    text = f"Command: `{its_study.command}`. Made with {text}."
    if total:
        text += f" {len(lines)} runs took {duration(total)} ({60 * len(lines) / total:.2g} a minute)."
    return text


# ---- tables ----


def _table(ours: Compared, published: dict[str, float | None], shorter: Compared | None) -> str:
    """Return the table of the methods, in percent if the metric is an accuracy."""
    comparison, values = ours.comparison, ours.values
    metric = comparison.metric.replace("_", " ")
    head = [ours.varied, f"{metric} %" if comparison.shares else metric, "difference to dense, paired"]
    head += ["published", "published difference to dense"] if published else []
    known = [field for field in RELATIVE if any(getattr(row, field) for row in ours.rows.values())]
    head += [RELATIVE[field] for field in known]
    head += ["difference to dense with as many FLOPs"] if shorter else []
    rows = [[*head, "seeds", ""]]
    for method, row in ours.rows.items():
        base, accuracy = ours.is_base(row), published.get(method)
        mean = comparison.plain(row.mean) + comparison.plus_minus(row.mean_error)
        difference = "" if base else comparison.plain(row.difference, signed=True)
        cells = [f"`{method}`", mean, difference + comparison.plus_minus(row.error)]
        if published:
            gap = "" if accuracy is None or base else f"{accuracy - published['dense']:+.1f}"
            cells += ["" if accuracy is None else f"{accuracy}", gap]
        shares = [getattr(row, field) for field in known]
        cells += ["" if share is None else f"{share:.3f}" for share in shares]
        if shorter:
            cells.append("" if base else _mean_and_error(comparison, _over(values[method], row.cost, shorter)))
        rows.append([*cells, row.seeds, row.marks])
    return markdown_table(rows)


def _over(values: dict[int, float], cost: float | None, shorter: Compared) -> list[float]:
    """Return for each seed its value minus that of a dense run of the same seed and cost, found by interpolation."""
    gaps = []
    for seed, value in values.items():
        runs = [(shorter.rows[steps].cost, dense[seed]) for steps, dense in shorter.values.items() if seed in dense]
        known = sorted((at, dense) for at, dense in runs if at is not None)
        if known and cost is not None and known[0][0] - 1e-6 <= cost <= known[-1][0] + 1e-6:
            gaps.append(value - float(np.interp(cost, *zip(*known, strict=True))))
    return gaps


def _mean_and_error(comparison: compare.Comparison, gaps: list[float]) -> str:
    """Return the mean of differences by seed, and its standard error."""
    if not gaps:
        return ""
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    return comparison.plain(statistics.fmean(gaps), signed=True) + comparison.plus_minus(error)


def _pairs(ours: Compared, questions: dict[str, dict[str, list[tuple[str, str]]]]) -> str:
    """Return a table of differences between two methods, paired by seed.

    Args:
      ours: The results.
      questions: By row and column the pairs of methods whose differences are averaged.
    """
    if not questions:
        return ""
    values = ours.values
    rows = [["A over B (number of pairs)", *next(iter(questions.values()))]]
    for label, columns in questions.items():
        cells = [label]
        for pairs in columns.values():
            both = [(values.get(a, {}), values.get(b, {})) for a, b in pairs]
            gaps = [left[seed] - right[seed] for left, right in both for seed in left if seed in right]
            cells.append(f"{_mean_and_error(ours.comparison, gaps)} ({len(gaps)})" if gaps else "")
        rows.append(cells)
    return "\n\n" + markdown_table(rows)


# ---- pictures ----


def _scaled(comparison: compare.Comparison, value: float | None) -> float | None:
    """Return a value in points if it is a share."""
    return None if value is None else value * (100 if comparison.shares else 1)


def _axis(comparison: compare.Comparison) -> str:
    points = " in points" if comparison.shares else ""
    return f"{comparison.metric.replace('_', ' ')}, difference to dense{points}"


def _signed(x: float) -> str:
    return f"{x:+.3g}".replace("-", "−") if x else "0"


def _dots(name: str, ours: Compared, published: dict[str, float | None], words: str) -> str:
    """Return the picture of the differences to dense, ours and the published ones."""
    marks = []
    for method, row in ours.rows.items():
        if ours.is_base(row):
            continue
        accuracy = published.get(method)
        gap = None if accuracy is None else accuracy - published["dense"]
        label = _label(method if ours.varied == "method" else f"{method} {ours.varied}", row)
        difference, error = (_scaled(ours.comparison, value) for value in (row.difference, row.error))
        marks.append(dots.Dot(label, difference, error, gap))
    along = _axis(ours.comparison)
    return dots.standalone(dots.draw(name, marks, alt=f"{along}. {words}.", along=along, say=_signed))


def _frontier(
    name: str, ours: Compared, names: dict[tuple[str, str], str], shorter: Compared | None, cost: str = "cost"
) -> str:
    """Return the picture of the differences to dense by what a run costs.

    Args:
      name: The name of the results.
      ours: The results.
      names: The methods by their kind and their name in the picture.
      shorter: The results of dense runs, which are joined by a line.
      cost: The field of rows with the cost, a key of `RELATIVE`.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in names))
    points = [_point(ours, method, part, f"s{kinds.index(kind) + 1}", cost) for (kind, part), method in names.items()]
    line = [_point(shorter, of, "", "s0", cost) for of in shorter.rows] if shorter else []
    along, up = f"{RELATIVE[cost]} of the training run, shares of dense", _axis(ours.comparison)
    keys = {f"dense, {'ended sooner' if shorter.varied == 'steps' else 'narrower'}": "s0"} if shorter else {}
    keys |= {kind: f"s{n}" for n, kind in enumerate(kinds, 1)}
    words = {"alt": f"{up}, by {along}.", "along": along, "up": up, "keys": keys}
    best: Callable = min if ours.comparison.metric.endswith("loss") else max
    shown, joined = ([point for point in each if point] for each in (points, line))
    return dots.standalone(
        dots.frontier(
            f"{name}-{'f' if cost == 'cost' else 't'}",
            shown,
            [joined] if joined else [],
            **words,
            say=_signed,
            best=best,
        )
    )


def _point(results: Compared, method: str, label: str, colour: str, cost: str) -> dots.Point | None:
    """Return the difference to dense of a method and its cost, or None if one of them is not known."""
    row = results.rows.get(method)
    share = row and getattr(row, cost)
    if row is None or share is None:
        return None
    gap = 0.0 if results.is_base(row) else row.difference
    if gap is None:
        return None
    height, error = (_scaled(results.comparison, value) for value in (gap, row.error))
    return dots.Point(_label(label, row), share, height, error, colour)


def _label(name: str, row: compare.Row) -> str:
    """Return the name of a method in a picture, with the number of its seeds if some are missing."""
    return f"{name} ({row.seeds})" if row.marks else name


# ---- the page ----


def page(text: str, results: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """Return the page with new blocks, and their pictures as SVG by their names."""
    pictures = {}

    def renew(match: re.Match) -> str:
        table, drawings = block(match[1], results)
        pictures.update(drawings)
        return f"<!-- {match[1]} -->\n{table}<!-- end -->"

    return BLOCK.sub(renew, text), pictures


def main(args: list[str] | None = None) -> int:
    """Write the page and its pictures, and return the exit code."""
    argparse.ArgumentParser("python -m experiments.reproduce", description=__doc__.split("\n")[0]).parse_args(args)
    try:
        made = {path: page(path.read_text()) for path in PAGES}
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    for path, (text, pictures) in made.items():
        for name, svg in pictures.items():
            replace(RESULTS / f"{name}.svg", svg)
        replace(path, text)
        print(f"{path}: {', '.join(pictures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
