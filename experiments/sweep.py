"""Many runs of one page: those that its ``get_sweep()`` lists, one after another, each in a directory of its own.

What is finished is not done again, and what was interrupted goes on. Runs that differ in their seed alone share one
compiled program, and may be trained side by side in it: those that are at the same step. ``results.jsonl`` holds a line
for every run that has ended, and a file of results elsewhere is given what it does not have.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.errors import Diverged, Failed, Mistake, Stopped
from experiments.files import append, lines as lines_of, replace
from experiments.scale import processes
from experiments.training.checkpoints import Checkpoints
from experiments.training.record import digest, fields, finished, same_config


class Member(NamedTuple):
    """One run of a sweep."""

    name: str
    changes: dict[str, Any]
    config: ConfigDict


def members(config: ConfigDict, changes: list[dict[str, Any]]) -> list[Member]:
    """The runs of a list of changes, each named by what is not the same in all of them."""
    if not isinstance(changes, list) or not changes or not all(isinstance(c, dict) for c in changes):
        raise Mistake("get_sweep() gives a list of changes, as [{'seed': 0}, {'seed': 1, 'sparsity.blocks': 'dense'}].")
    keys = dict.fromkeys(key for change in changes for key in change)
    varied = [key for key in keys if len({repr(change.get(key)) for change in changes}) > 1] or list(keys)[:1]
    found = []
    for change in changes:
        made = config.copy_and_resolve_references()
        for field, value in change.items():
            _set(made, field, value)
        shown = ",".join(f"{key.rpartition('.')[2]}={change[key]}" for key in varied if key in change)
        found.append(Member(re.sub(r"[^\w.,=()+-]+", "_", shown)[:200] or "run", change, made.lock()))
    names = [member.name for member in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise Mistake(f"get_sweep() has two runs named {sorted(twice)[0]}: every run differs from the others.")
    return found


def at(found: list[Member], index: int) -> Member:
    """That of an index."""
    if not 0 <= index < len(found):
        raise Mistake(f"--sweep_index={index}: the sweep has {len(found)} runs, from 0 to {len(found) - 1}.")
    return found[index]


def _set(config: ConfigDict, field: str, value) -> None:
    try:
        with config.unlocked():
            config.update_from_flattened_dict({field: value})
    except (TypeError, KeyError) as error:
        raise Mistake(f"get_sweep(): {field}={value!r}: {' '.join(str(error).split())}") from error


def run(
    found: list[Member], workdir: Path, index: int | None, at_once: int, make: Callable[[Member], Any],
    train: Callable[[list[Member], Any], Any], results: Path | None = None,
) -> None:  # fmt: skip
    """Run those that are not done, or the one of an index; so many ``at_once`` that differ in their seed alone. ``make`` gives
    the program of a run, which serves the next one too if that differs in its seed alone, and ``train(members, program)``
    trains with it, and gives the signal that told it to stop when there was no step left. ``results`` is a file that is given
    a line for each of them too."""
    if index is not None:
        at(found, index)
    for member in found:
        if _done(workdir / member.name):
            same_config(workdir / member.name, member.config)
    begun, failed, program, before = set(), [], None, None
    for number, member in enumerate(found):
        if index not in (None, number) or member.name in begun:
            continue
        told = None
        if not processes.agreed(partial(_done, workdir / member.name)):
            if program is None or before is None or _but_for_seed(before) != _but_for_seed(member):
                program, before = make(member), member
                if at_once > 1 and program.task.streamed:
                    _say(
                        "--seeds_at_once: one after another, for data that are streamed come in an order of each seed."
                    )
            group = [member]
            if at_once > 1 and not program.task.streamed:
                later = [m for m in found[number + 1 :] if m.name not in begun and not _done(workdir / m.name)]
                group += _beside(member, later, workdir)[: at_once - 1]
            names, places = [m.name for m in group], [str(found.index(m) + 1) for m in group]
            begun.update(names)
            _say(f"\n==== {', '.join(names)} ({', '.join(places)} of {len(found)}) ====\n")
            try:
                told = train(group, program)
            except Failed as error:  # the others are still wanted
                if processes.count() > 1 and not isinstance(error, Diverged):  # it may be one process' own
                    raise
                _say(str(error) if len(group) > 1 else f"{member.name}: {error}")
            failed += processes.agreed(lambda names=names: [n for n in names if not finished(workdir / n)])
        if processes.first():
            collect(found, workdir)
            if results is not None:
                add(found, workdir, results)
        if told and index is None and number + 1 < len(found):
            text = f"interrupted by {told.name} after the last step of {', '.join(names)}. The same command goes on with the others."
            raise Stopped(text, told)
    _say(f"\n{_told(found, workdir)}")
    if failed:
        raise Failed(f"{len(failed)} of the runs failed: {', '.join(failed)}")


def _beside(member: Member, later: list[Member], workdir: Path) -> list[Member]:
    """Those that can be trained beside a run: they differ in their seed alone, and go on from the same step."""
    alike = [other for other in later if _but_for_seed(other) == _but_for_seed(member)]
    step = _step(workdir / member.name) if alike else None
    return [other for other in alike if step is not None and _step(workdir / other.name) == step]


def _step(directory: Path) -> int | None:
    """Where a run goes on from; None where that cannot be told, and the run will say why."""
    try:
        return Checkpoints(directory, lambda _: None).last()
    except Failed:
        return None


def _say(text: str) -> None:
    if processes.first():
        print(text, flush=True)


def _done(directory: Path) -> bool:
    about = ended(directory)
    return about is not None and done(about)


def _but_for_seed(member: Member) -> dict:
    return member.config.to_dict() | {"seed": None}


def ended(directory: Path) -> dict | None:
    """What a run says of itself; None where it has not begun."""
    try:
        return json.loads((directory / "run.json").read_text())
    except (OSError, ValueError):
        return None


def done(about: dict) -> bool:
    """Whether a run need not be run again: it is finished, or would diverge as it did."""
    return about["outcome"] == "finished" or about["outcome"].startswith("diverged")


FORMAT = 1  # of a line of results: what reads others of another one says so
KEPT = ("outcome", "metric", "figures", "steps", "flops", "began", "ended")  # of what a run says of itself
KEPT += ("command", "versions", "git", "notes")


def lines(found: list[Member], workdir: Path) -> Iterator[dict]:
    """What became of the runs that have ended."""
    for member in found:
        about = ended(workdir / member.name)
        if about is not None and about["outcome"] != "running":
            line = {"format": FORMAT, "run": member.name, "changes": member.changes}
            line["devices"] = dict(about.get("header", ())).get("devices", "")
            line["config"] = digest(fields(member.config))
            yield line | {k: about[k] for k in KEPT if k in about}


def curves(directory: Path) -> dict[str, dict[str, list]]:
    """What a run evaluated and measured over its steps, to five digits; of measures by layer their mean over the layers."""
    found = {}
    for kind in ("eval", "sparsity"):
        rows = [line for line in lines_of(directory / "metrics.jsonl") if line["kind"] == kind]
        names = dict.fromkeys(name for row in rows for name in row if name not in ("kind", "seconds"))
        found[kind] = {name: [row[name] if name == "step" else _short(row.get(name)) for row in rows] for name in names}
    return found


def _short(value) -> float | None:
    each = list(value.values() if isinstance(value, dict) else [value])
    whole = bool(each) and all(v is not None and math.isfinite(v) for v in each)
    return float(f"{math.fsum(each) / len(each):.5g}") if whole else None


def collect(found: list[Member], workdir: Path) -> None:
    """Write results.jsonl. Several processes may: each writes what all have done, until that is no more."""
    made = lambda: "".join(json.dumps(line, default=str) + "\n" for line in lines(found, workdir))
    text = None
    while text != (text := made()):
        replace(workdir / "results.jsonl", text)


def add(found: list[Member], workdir: Path, results: Path) -> None:
    """Append to a file the lines of finished and diverged runs that it does not have, with their curves. Several processes may."""

    def new(there: list[dict]) -> Iterator[dict]:
        known = {(line.get("run"), line.get("began")) for line in there}
        for line in lines(found, workdir):
            if done(line) and (line["run"], line["began"]) not in known:
                yield line | {"curves": curves(workdir / line["run"])}

    append(results, new)


def _told(found: list[Member], workdir: Path) -> str:
    outcomes = [
        about["outcome"].partition(":")[0] if (about := ended(workdir / m.name)) else "not begun" for m in found
    ]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in dict.fromkeys(outcomes))
    return f"{len(found)} runs: {counts}. {workdir / 'results.jsonl'}"
