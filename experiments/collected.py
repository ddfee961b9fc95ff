"""Lines of results: one for every run of a sweep that has ended, and files that collect them."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from experiments import files
from experiments.errors import Mistake
from experiments.members import Member
from experiments.report.runs import is_line
from experiments.training import record

FORMAT = 1  # of a line of results: readers refuse lines of another format
KEPT = ("outcome", "metric", "figures", "steps", "flops", "measured", "began", "ended", "seconds")  # of run.json
KEPT += ("command", "versions", "machine", "git", "notes", "origin")


def lines(runs: list[Member], workdir: Path) -> Iterator[dict]:
    """Yield a line of results for each run that has ended."""
    for member in runs:
        about = record.read(workdir / member.folder)
        if about is not None and about["outcome"] != "running":
            line = {"format": FORMAT, "run": member.name, "folder": member.folder, "changes": member.changes}
            line["devices"] = dict(about.get("header", ())).get("devices", "")
            line["config"] = member.identity.digest
            yield line | {name: about[name] for name in KEPT if name in about}


def curves(directory: Path) -> dict[str, dict[str, list]]:
    """Return what a run evaluated and measured over its steps, to five digits. Measures by layer become their mean."""
    metrics = [line for line in files.lines(directory / "metrics.jsonl") if is_line(line)]
    return {kind: _curves([line for line in metrics if line["kind"] == kind]) for kind in ("eval", "sparsity")}


def _curves(rows: list[dict]) -> dict[str, list]:
    names = dict.fromkeys(name for row in rows for name in row if name not in ("kind", "seconds"))
    return {name: [row[name] if name == "step" else _short(row.get(name)) for row in rows] for name in names}


def _short(value: Any) -> float | None:
    """Return a number, or the mean of a table of numbers, to five digits; None if one is missing or not finite."""
    values = list(value.values()) if isinstance(value, dict) else [value]
    if not values or not all(v is not None and math.isfinite(v) for v in values):
        return None
    return float(f"{math.fsum(values) / len(values):.5g}")


def refuse_foreign(workdir: Path) -> None:
    """Refuse the directory of a sweep whose results.jsonl is not of a sweep: it would be replaced."""
    path = workdir / "results.jsonl"
    if not path.exists() and not path.is_symlink():
        return
    ours = lambda line: isinstance(line, dict) and line.get("format") == FORMAT and {"run", "config"} <= line.keys()
    if not path.is_file() or path.is_symlink() or not all(map(ours, files.lines(path))) or _cut(path):
        raise Mistake(f"{path} is not the results of a sweep, which would replace it. Give another --workdir.")


def _cut(path: Path) -> bool:
    """Return whether a file has lines that are not JSON. `collect` writes it whole."""
    return len(files.lines(path)) < len([line for line in path.read_bytes().splitlines() if line.strip()])


def collect(runs: list[Member], workdir: Path) -> None:
    """Write results.jsonl. If several commands share a sweep, each writes again until nothing changes any more."""
    written, own = None, {member.folder for member in runs}
    workdir.mkdir(parents=True, exist_ok=True)  # a run that failed early has made none
    others = [line for line in files.lines(workdir / "results.jsonl") if line.get("folder") not in own]
    while True:
        text = "".join(json.dumps(line, default=str) + "\n" for line in [*lines(runs, workdir), *others])
        if text == written:
            return
        files.replace(workdir / "results.jsonl", text)
        written = text


def reused(runs: list[Member], workdir: Path, results: Path) -> dict[str, str]:
    """Return the runs that need no training, because a file of results has the line of a run with the same config.

    The files are that of the sweep and those beside it. The sweep's own file gets the lines that it does not have,
    under the names of the sweep's runs.

    Args:
      runs: The members of the sweep.
      workdir: The directory of the sweep. Runs that are done there are left out.
      results: The file of results of the sweep.

    Returns:
      The file that has the line, by the name of the run.
    """
    times = Counter(member.identity.digest for member in runs)  # the digest leaves out fields such as model.lean
    own = [member for member in runs if times[member.identity.digest] == 1]
    left = {member.identity.digest: member for member in own if not record.is_done(workdir / member.folder)}
    found: dict[str, tuple[Path, dict]] = {}
    for path in [results, *sorted(set(results.parent.glob("*.jsonl")) - {results})] if left else []:
        for line in _of_runs(files.lines(path) if path.is_file() else []):
            if line["config"] in left:
                found.setdefault(line["config"], (path, line))

    def copies(old: list[dict]) -> Iterator[dict]:
        known = {_key(line["config"], line["changes"]) for line in _of_runs(old)}
        for config, (_, line) in found.items():
            member = left[config]
            if _key(config, member.changes) not in known:
                yield line | {"run": member.name, "folder": member.folder, "changes": member.changes}

    if found:
        files.append(results, copies)
    return {left[config].name: str(path) for config, (path, _) in found.items()}


def _key(config: str, changes: Any) -> tuple[str, str]:
    """Return what tells runs of a file apart. Changes are compared as JSON, because a file has no tuples."""
    return config, json.dumps(changes, sort_keys=True, default=str)


def _of_runs(lines: list[dict]) -> list[dict]:
    """Return those lines of a file that are of runs which finished or diverged."""
    fields = {"config", "run", "folder", "changes", "outcome"}
    return [
        line
        for line in lines
        if isinstance(line, dict) and line.get("format") == FORMAT and fields <= line.keys() and record.done(line)
    ]


def add(runs: list[Member], workdir: Path, results: Path) -> None:
    """Append the lines of finished and diverged runs to a file that does not have them, with their curves."""
    files.append(results, partial(_new_lines, runs, workdir))


def _new_lines(runs: list[Member], workdir: Path, old: list[dict]) -> Iterator[dict]:
    known = {_key(line["config"], line["changes"]) for line in _of_runs(old)}
    for line in lines(runs, workdir):
        if record.done(line) and _key(line["config"], line["changes"]) not in known:
            yield line | {"curves": curves(workdir / line["folder"])}
