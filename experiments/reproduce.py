"""REPRODUCTION.md brought up to date: its tables and pictures, out of experiments/results/*.jsonl.

    python -m experiments.reproduce

What stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made of the results of that name, beside what the study's page says
was published; all else is written by hand.
"""

import importlib
import json
import re
import sys
from pathlib import Path

from experiments import sweep
from experiments.errors import Mistake
from experiments.record import replace
from experiments.report import compare, dots
from experiments.report.runs import Run

ROOT = Path(__file__).parent
PAGE, RESULTS = ROOT / "REPRODUCTION.md", ROOT / "results"
BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def read(path: Path) -> list[dict]:
    """The last line of every run in a file of results."""
    if not path.exists():
        raise Mistake(f"there is no {path}: {_command(path.stem)}")
    found = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            form, name = line["format"], line["run"]
        except (ValueError, TypeError, KeyError) as error:
            raise Mistake(
                f"{path}, line {number} is no line of results ({type(error).__name__}: {error}): take it out, and run what is "
                f"missing by {_command(path.stem)}"
            ) from error
        if form != sweep.FORMAT:
            raise Mistake(
                f"{path}, line {number} is of format {form}, and this reads {sweep.FORMAT}: take the line out, and run it again by "
                f"{_command(path.stem)}"
            )
        if "--config." in line["command"] or _page(path.stem) not in line["command"]:
            raise Mistake(
                f"{path}, line {number} was made by another command than {_command(path.stem)}: {line['command']}. Take it out."
            )
        found[name] = line
    return list(found.values())


def _of(name: str) -> tuple[str, str]:
    """The study and the variant that results are named by."""
    known = [path.stem for path in (ROOT / "studies").glob("*.py") if name.startswith(f"{path.stem}_")]
    if not known:
        raise Mistake(f"{name} names no study of experiments/studies, as sdgp_cpu does.")
    study = max(known, key=len)
    return study, name.removeprefix(f"{study}_")


def _page(name: str) -> str:
    study, variant = _of(name)
    return f"experiments/studies/{study}.py:{variant}"


def _command(name: str) -> str:
    return f"python launch.py --config={_page(name)} --sweep --results=experiments/results/{name}.jsonl"


def compared(lines: list[dict], baseline: str) -> compare.Comparison:
    """Results compared as runs are."""
    runs = [Run(Path(line["run"]), line, line["changes"], {}, "", "", {}, {}, ()) for line in lines]
    return compare.compare(runs, baseline)


def block(name: str, results: Path = RESULTS) -> tuple[str, str]:
    """The table of some results, as Markdown, and the picture of the differences, as SVG."""
    which, variant = _of(name)
    study = importlib.import_module(f"experiments.studies.{which}")
    lines = read(results / f"{name}.jsonl")
    asked = study.get_sweep(variant)
    key = next(field for field in asked[0] if field != "seed")
    word, published = key.rpartition(".")[2], getattr(study, "published", lambda variant: {})(variant)
    order = list(dict.fromkeys(change[key] for change in asked))
    lines.sort(key=lambda line: order.index(line["changes"][key]) if line["changes"][key] in order else len(order))
    if len({line["changes"][key] == "dense" for line in lines}) < 2:
        raise Mistake(f"{results / name}.jsonl has not both dense runs and others yet: {_command(name)}")
    found = compared(lines, f"{word}=dense")
    unit = " %" if found.metric.endswith("accuracy") else ""
    head = [
        "method",
        f"{found.metric.replace('_', ' ')}{unit}",
        "difference to dense, paired",
        "effective FLOPs",
        "seeds",
        "",
    ]
    if published:
        head[3:3] = ["published", "its difference"]
    rows, marks = [head, ["---"] * len(head)], []
    for row in found.rows:
        method = row.name.removeprefix(f"{word}=")
        mean = found.say(row.mean).removesuffix(" %") + (
            f" ± {found.say(row.spread).removesuffix(' %')}" if row.spread else ""
        )
        base = row.name == found.names[found.base]
        off = "" if base else found.say(row.difference, signed=True)
        off += f" ± {found.say(row.error).removesuffix(' %')}" if row.error is not None else ""
        cells = [f"`{method}`", mean, off, "" if row.cost is None else f"{row.cost:.3f}", row.seeds, row.marks]
        theirs = published.get(method)
        if published:
            cells[3:3] = [
                "" if theirs is None else f"{theirs}",
                "" if theirs is None or base else f"{theirs - published['dense']:+.1f}",
            ]
        rows.append(cells)
        if not base:
            scale = 100 if unit else 1
            wide = lambda value, scale=scale: None if value is None else scale * value
            gap = None if theirs is None else theirs - published["dense"]
            marks.append(dots.Dot(method, wide(row.difference), wide(row.error), gap))
    missing = [method for method in order if method not in {line["changes"][key] for line in lines}]
    told = [f"\nNot run: {', '.join(f'`{method}`' for method in missing)}."] * bool(missing)
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows)
    notes = "\n".join(f"\n{note}" for note in found.notes)
    words = f"mean ± deviation over seeds; of the difference, its standard error. `{_command(name)}`; {_made(lines)}."
    along = f"{found.metric.replace('_', ' ')}, difference to dense{' in points' if unit else ''}"
    ours = "Dots: ours, with the standard error of the paired difference" + "; diamonds: published" * bool(published)
    svg = dots.standalone(
        dots.draw(name, marks, alt=f"{along}. {ours}.", along=along, say=lambda x: f"{x:+.3g}" if x else "0")
    )
    parts = [f"![{ours}](results/{name}.svg)", "", table, "", words[0].upper() + words[1:], *told, notes]
    return "\n".join(parts).rstrip() + "\n", svg


def _made(lines: list[dict]) -> str:
    """With what the runs were made."""
    devices = " and ".join(dict.fromkeys(line.get("devices", "") for line in lines if line.get("devices")))
    versions = " and ".join(dict.fromkeys(f"jax {line['versions']['jax']}" for line in lines))
    return f"{versions}{f', {devices}' if devices else ''}"


def page(text: str, results: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """The page with its blocks made anew, and the pictures."""
    pictures = {}

    def made(found):
        table, pictures[found[1]] = block(found[1], results)
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
