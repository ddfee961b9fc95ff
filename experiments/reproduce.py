"""Brings the pages with results up to date: makes their tables and pictures from experiments/results/*.jsonl.

    python -m experiments.reproduce

The text between ``<!-- NAME -->`` and ``<!-- end -->`` is made from the results of that name: for a study with claims
their verdicts, its configs and pictures (`experiments.evidence`). A study that looks into runs makes its own table and
pictures. ``counts``, ``claims`` and ``networks`` are about all studies, and ``legend`` explains the tables.
``cpu_steps`` and ``tpu_steps`` have rows of the benchmarks' tables. A block that begins with several lines shows the
claims that they ask for::

    <!-- claims
    Is S-STE as good as dense training?
    methods_vit_cpu: S-STE.* is as good as dense
    -->

A line with a colon has a study, and a regular expression of its claims. Other lines are questions. All other text is
written by hand, so it must say nothing that a verdict could overturn.
"""

import argparse
import datetime
import os
import re
import sys
from pathlib import Path

from experiments import evidence
from experiments.errors import Mistake
from experiments.files import replace
from experiments.recorded import Study, read, seconds, study
from experiments.report import curves
from experiments.report.words import duration, markdown_table
from experiments.studies import SEARCH

ROOT = Path(__file__).parent
PAGE, RESULTS = ROOT / "REPRODUCTION.md", ROOT / "results"
DOCS = ROOT.parent / "docs"
PAGES = (
    PAGE,
    *(DOCS / f"{name}.md" for name in ("evidence/methods", "evidence/benchmarks", "hardware", "how_to/tpus")),
)
ALL = {
    "counts": evidence.counts,
    "claims": evidence.main_claims,
    "networks": evidence.networks,
}  # of all studies together
BLOCK = re.compile(r"<!-- (\w+) ?((?:\n[^\n]+)*?\n)?-->\n.*?<!-- end -->", re.DOTALL)


# ---- a block ----


def block(name: str, results: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """Return the Markdown of the block of a name such as "recipe_vit_cpu", and its pictures as SVG by their names."""
    if name == "legend":
        return _text([evidence.legend()]), {}
    if name == "cpu_steps":
        return _text([_cpu_steps(results)]), {}
    if name == "tpu_steps":
        return _text([_tpu_steps(results)]), {}
    if name in ALL:
        return _text([ALL[name](results)]), {}
    its_study = study(name)
    if not (results / f"{name}.jsonl").exists():
        return _text([f"Not run: `{its_study.command}`."]), {}
    lines = read(results / f"{name}.jsonl")
    if hasattr(its_study.module, "figure"):
        return _figure(name, its_study, lines)
    parts, pictures = evidence.section(name, results)
    return _text(["\n\n".join([*parts, _source(its_study, lines)])]), pictures


def _cpu_steps(results: Path) -> str:
    """Return the times of training steps on a CPU, from the recorded tables of the benchmarks `train` and `savings`."""
    train, savings = ((results / f"cpu_{name}.md").read_text() for name in ("train", "savings"))
    steps = re.findall(r"\| configs/(\w+)\.py `all` \| ([\d.]+)", train)
    in_rows = re.findall(r"(?s)## (GPT, \d+ wide).*?\| (`dw_g=rows\(mvue\(1,4\)\)`) \| ([\d.]+)", savings)
    cores = " and ".join(dict.fromkeys(re.findall(r"\d+ cores", train + savings)))
    head = [f"a training step on a CPU, {cores}", "time / dense", "caveat"]
    rows = [[f"`{name}`", time, "zeros are multiplied; depends on the processor"] for name, time in steps]
    rows += [[f"{model}, {slot}", time, "whole rows; no sparse tensor cores needed"] for model, slot, time in in_rows]
    return markdown_table([head, *rows], narrow=True)


def _tpu_steps(results: Path) -> str:
    """Return the bytes and the memory of a step on a TPU, from the recorded table of the benchmark `tpu`."""
    section = (results / "tpu_counts.md").read_text().split("## A feed-forward step on a v5e")[1].split("## ")[0]
    rows = re.findall(r"(?m)^\| (`.*`) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", section)
    head = ["a feed-forward step, over dense", "bytes, XLA prunes", "bytes, kernels prune", "temporary memory, kernels"]
    return markdown_table([head, *([text, xla, moved, memory] for text, xla, _, moved, memory in rows)], narrow=True)


def _text(parts: list[str]) -> str:
    return "\n".join(parts).rstrip() + "\n"


def _figure(name: str, its_study: Study, lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return the block of a study that looks into runs. Cases that diverged are listed, and left out of its figures."""
    wanted = [",".join(f"{field}={value}" for field, value in case.items()) for case in its_study.module.CASES]
    missing = [run for run in wanted if run not in {line["run"] for line in lines}]
    if missing:
        done = f"{len(wanted) - len(missing)} of {len(wanted)} cases are done"
        return _text([f"Not finished: {done}. Make the others with: `{its_study.command}`."]), {}
    lines.sort(key=lambda line: wanted.index(line["run"]))
    finished = [line for line in lines if line["outcome"] == "finished"]
    lost = [line for line in lines if line["outcome"] != "finished"]
    table, drawings = its_study.module.figure(finished)
    pictures = {f"{name}_{part}": curves.standalone(svg) for part, svg in drawings.items()}
    parts = [f"![{part.replace('_', ' ')}](results/{name}_{part}.svg)" for part in drawings]
    parts += ["", table, "", _source(its_study, lines)]
    parts += [f"\n`{line['run']}` {line['outcome']}. It is left out of the tables and pictures." for line in lost]
    of = lambda line: f"{line['case']['task']}: " if "task" in line["case"] else ""  # the data that a note is about
    parts += [f"\n{note}" for note in dict.fromkeys(of(line) + note for line in lines for note in line["notes"])]
    return _text(parts), pictures


def _source(its_study: Study, lines: list[dict]) -> str:
    """Return where results come from, and how long the runs took. Overlapping runs count once."""
    devices = " and ".join(dict.fromkeys(line.get("devices", "") for line in lines if line.get("devices")))
    text = " and ".join(dict.fromkeys(f"jax {line['versions']['jax']}" for line in lines))
    if devices:
        text += f" on {devices}"
    ends = [datetime.datetime.fromisoformat(line["ended"]).timestamp() for line in lines]
    total, until = 0.0, 0.0
    for began, ended in sorted((end - seconds(line), end) for end, line in zip(ends, lines, strict=True)):
        total, until = total + max(ended - max(began, until), 0), max(until, ended)
    text = f"Command: `{its_study.command}`. Made with {text}."
    if total:
        text += f" The {len(lines)} runs took {duration(total)}."
    if not all("machine" in line for line in lines):
        text += " The processor and the number of threads were not recorded."
    return text


# ---- the pages ----


def page(path: Path, results: Path = RESULTS) -> tuple[str, dict[str, str]]:
    """Return the text of a page with new blocks, and their pictures as SVG by their names."""
    pictures = {}

    def renew(match: re.Match) -> str:
        if match[2]:
            table, drawings = _text([evidence.asked(match[2], results, lambda name: _section(name, path))]), {}
        else:
            table, drawings = block(match[1], results)
        pictures.update(drawings)
        return f"<!-- {match[1]}{match[2] or ' '}-->\n{table}<!-- end -->"

    return BLOCK.sub(renew, path.read_text()), pictures


def _section(name: str, page: Path) -> str:
    """Return the address of the section of a study from a page."""
    before = PAGE.read_text().partition(f"<!-- {name} -->")[0]
    heading = re.sub(r"[^\w -]", "", before.rpartition("\n## ")[2].partition("\n")[0])
    return f"{'' if page == PAGE else os.path.relpath(PAGE, page.parent)}#{heading.lower().replace(' ', '-')}"


def unplaced(text: str, results: Path = RESULTS) -> list[Path]:
    """Return the files of results that the page has no block for. Times, searches and baselines' scores need none."""
    known = {name for name, _ in BLOCK.findall(text)} | {"recorded_baselines"}
    found = (path for path in sorted(results.glob("*.jsonl")) if not re.search(f"^times_|{SEARCH}$", path.stem))
    return [path for path in found if path.stem not in known]


def main(args: list[str] | None = None) -> int:
    """Write the pages and their pictures, and return the exit code."""
    argparse.ArgumentParser("python -m experiments.reproduce", description=__doc__.split("\n")[0]).parse_args(args)
    try:
        made = {path: page(path) for path in PAGES}
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    for path in unplaced(PAGE.read_text()):
        print(f"{path}: the page has no place for these results. Write <!-- {path.stem} --> and <!-- end --> there.")
    for path, (text, pictures) in made.items():
        for name, svg in pictures.items():
            replace(RESULTS / f"{name}.svg", svg)
        replace(path, text)
        print(f"{path}: {', '.join(pictures)}".rstrip(": "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
