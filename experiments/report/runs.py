"""Reading a run's folder. Missing files stay empty, and broken ones are reported."""

import datetime
import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import files
from experiments.data import reading
from experiments.errors import Mistake
from experiments.report.words import only_tables

PLAN = ("<!-- plan -->", "<!-- end of plan -->")  # around the plan in plan.html
BLOCK = 2**16  # bytes of metrics.jsonl that are read at once, from the end
LARGEST = 2**63  # of integers: no run writes larger ones


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that a run may write."""
    return isinstance(value, float) or (isinstance(value, int) and type(value) is not bool and abs(value) < LARGEST)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _are_windows(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(window, dict)
        and is_number(window.get("loss"))
        and _are_pairs(window.get("pieces"))
        and all(loss is None or is_number(loss) for _, loss in window["pieces"])
        for window in value
    )


Fields = dict[
    str, tuple[str, Callable[[Any], bool]]
]  # for each field its type in words, and a check; a field may be missing
ABOUT: Fields = {  # run.json
    "name": ("a text", _is_text),
    "outcome": ("a text", _is_text),
    "metric": ("a text", _is_text),
    "figures": ("an object of numbers", _are_numbers),
    "measured": ("an object of numbers", _are_numbers),
    "summary": ("a list of pairs", _are_pairs),
    "header": ("a list of pairs", _are_pairs),
    "notes": ("a list of texts", lambda v: _is_list(v) and all(map(_is_text, v))),
    "trained_with": ("a list of texts", lambda v: _is_list(v) and all(map(_is_text, v))),
    "versions": ("an object", _is_object),
    "machine": ("an object", _is_object),
    "git": ("an object or null", lambda v: v is None or _is_object(v)),
    "steps": ("an integer", _is_count),
    "flops": ("a list of two numbers", lambda v: _is_list(v) and len(v) == 2 and all(map(is_number, v))),
}
TEXT: Fields = {
    "samples": ("a list", _is_list),
    "hardest": ("a list of windows with their losses", _are_windows),
}
BREAKDOWN: Fields = {
    **dict.fromkeys(("first", "steps", "devices"), ("an integer", _is_count)),
    "seconds": ("a number", is_number),
    **dict.fromkeys(("parts", "slots"), ("an object of numbers", _are_numbers)),
    "layers": ("an object of objects of numbers", lambda v: _is_object(v) and all(map(_are_numbers, v.values()))),
}


class Run(NamedTuple):
    """The files of a run."""

    path: Path
    about: dict[str, Any]  # run.json
    config: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]  # the lines of each kind, by rising steps
    plan_html: str  # tables and paragraphs only
    plan_text: str
    pictures: dict[str, np.ndarray]
    text: dict[str, Any]
    complaints: tuple[str, ...]  # what could not be read
    breakdown: dict[str, Any] = {}  # of a traced step, if there is one


def read(run_dir: Path) -> Run:
    """Read the run of a folder.

    Raises:
      Mistake: If there is no run.json, if a file cannot be read, or if a field is of another type.
    """
    run_dir = Path(run_dir)
    about = _checked(run_dir / "run.json", ABOUT)
    if about is None:
        raise Mistake(f"{run_dir} is not a run directory: it has no run.json. Give the folder that a run wrote.")
    metrics, complaints = parse_metrics(_text(run_dir / "metrics.jsonl", files.LONGEST))
    pictures, broken = _arrays(run_dir / "pictures.npz")
    return Run(
        run_dir.resolve(),
        about,
        _json(run_dir / "config.json") or {},
        metrics,
        only_tables(_between(_text(run_dir / "plan.html"), *PLAN)),
        _text(run_dir / "plan.txt"),
        pictures,
        _checked(run_dir / "text.json", TEXT) or {},
        complaints + broken,
        _checked(run_dir / "profile" / "breakdown.json", BREAKDOWN) or {},
    )


def glance(run_dir: Path) -> Run:
    """Read what an index shows of a run: run.json, config.json, and the last evaluation if run.json has no figures.

    It raises no errors. What cannot be read becomes a complaint.
    """
    files, complaints = {}, []
    for name in ("run.json", "config.json"):
        try:
            content = _json(run_dir / name)
            files[name] = {} if content is None else content
            if content is None:
                complaints.append(f"There is no {name}.")
        except (Mistake, OSError) as error:
            files[name] = {}
            complaints.append(f"{name} cannot be read: {error.__cause__ or error}".rstrip(".") + ".")
    about = files["run.json"]
    scored = isinstance(about.get("figures"), dict) and about["figures"]
    last = None if scored else last_line(run_dir / "metrics.jsonl", "eval")
    return Run(
        run_dir, about, files["config.json"], {"eval": [last]} if last else {}, "", "", {}, {}, tuple(complaints)
    )


def last_line(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the last line of a kind in metrics.jsonl, read from the end; None if there is none."""
    try:
        with files.opened(path, links=False) as file:
            end, size, rest = file.seek(0, 2), BLOCK, b""
            while end:
                start = max(0, end - size)
                file.seek(start)
                first, *lines = (file.read(end - start) + rest).split(b"\n")
                rest, lines = (first, lines) if start else (b"", [first, *lines])
                for line in reversed(lines):
                    metrics, _ = parse_metrics(line.decode(errors="replace")) if kind.encode() in line else ({}, ())
                    if metrics.get(kind):
                        return metrics[kind][0]
                end, size = start, 2 * size
    except OSError:
        pass
    return None


def parse_metrics(text: str) -> tuple[dict[str, list[dict[str, Any]]], tuple[str, ...]]:
    """Return the lines of metrics.jsonl by kind, each by rising steps, and complaints about unreadable lines."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    records: dict[str, dict[int, dict[str, Any]]] = {}
    unread = []
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if is_line(record):
            records.setdefault(record["kind"], {})[record["step"]] = record
        else:
            unread.append(number)
    complaints = []
    if unread and unread[-1] == lines[-1][0]:
        unread.pop()
        complaints.append("The last line of metrics.jsonl is cut off: the run was stopped while it wrote this line.")
    if unread:
        complaints.append(f"metrics.jsonl: skipped lines that cannot be read: {', '.join(map(str, unread))}.")
    by_kind = {kind: [record for _, record in sorted(by_step.items())] for kind, by_step in records.items()}
    return by_kind, tuple(complaints)


def is_line(record: Any) -> bool:
    """Return whether a value of JSON is a line of metrics, as a run writes it."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("kind"), str)
        and _is_count(record.get("step"))
        and record["step"] >= 0
        and is_number(record.get("seconds", 0))
    )


def series(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of one measure. Lines without it are left out."""
    measured = [record for record in records if key in record]
    return _numbers(_steps(measured), [record[key] for record in measured])


def layers(records: list[dict[str, Any]], key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the steps and values of one measure in each layer that has any."""
    measured = [record for record in records if isinstance(record.get(key), dict)]
    steps, tables = _steps(measured), [record[key] for record in measured]
    names = list(dict.fromkeys(chain(*tables)))
    if all(list(table) == names for table in tables):  # as in most runs: this is quicker
        columns = zip(*(table.values() for table in tables), strict=True)
    else:
        columns = ([table.get(name) for table in tables] for name in names)
    points = {name: _numbers(steps, column) for name, column in zip(names, columns, strict=True)}
    return {name: (steps, values) for name, (steps, values) in points.items() if steps.size}


def _steps(records: list[dict[str, Any]]) -> np.ndarray:
    return np.fromiter(map(operator.itemgetter("step"), records), float, len(records))


def _numbers(steps: np.ndarray, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    if not set(map(type, values)) <= {float}:  # otherwise, as in most runs, this is much quicker
        kept = np.array([is_number(value) for value in values], bool)
        steps, values = steps[kept], [value for value in values if is_number(value)]
    return steps, np.array(values, float)


def split(run: Run) -> str:
    """Return the split of a run's lines of kind "eval": "validation", or "test" if it has no validation split."""
    figures, data = run.about.get("figures"), run.config.get("data")
    share = data.get("validation") if isinstance(data, dict) else None
    scored = isinstance(figures, dict) and any(name.startswith("validation_") for name in figures)
    return "validation" if scored or (is_number(share) and share > 0) else "test"


def at_once(about: Mapping[str, Any]) -> int:
    """Return the number of runs that were trained side by side, this one included. They share the time."""
    return 1 + len(about.get("trained_with", ()))


def seconds(run: Run) -> float | None:
    """Return the duration of a run that has ended, in seconds; None if run.json does not say it.

    The time before a run was continued counts, but not the time in between.
    """
    took = run.about.get("seconds")
    if is_number(took) and 0 <= took < 1e12:
        return float(took)
    try:
        began, ended = (datetime.datetime.fromisoformat(run.about[key]) for key in ("began", "ended"))
        return (ended - began).total_seconds()
    except (KeyError, TypeError, ValueError):
        return None


def _text(path: Path, limit: int = files.LARGEST) -> str:
    try:
        return files.text(path, limit, errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise Mistake(f"{path} cannot be read: {error.strerror or error}.") from error


def _between(text: str, begin: str, end: str) -> str:
    """Return the part of a text between two marks; the whole text if it has none."""
    return text.partition(begin)[2].rpartition(end)[0] if begin in text else text


def _json(path: Path) -> Any:
    try:
        content = files.of_json(files.text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Mistake(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise Mistake(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise Mistake(f"{path} does not hold a JSON object. It holds {str(content)[:40]!r}.")
    return content


def _checked(path: Path, fields: Fields) -> Any:
    """Return the object of a file of JSON, or None. Refuse it if a field is of another type than pages need."""
    content = _json(path)
    for name, (kind, holds) in fields.items():
        if content and name in content and not holds(content[name]):
            found = json.dumps(content[name])[:40]
            raise Mistake(f'{path} cannot be read: "{name}" must be {kind}, but it is {found}.')
    return content


def _arrays(path: Path) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    if not os.path.lexists(path):
        return {}, ()
    try:
        return reading.arrays(path, (), None), ()
    except Mistake as error:
        return {}, (str(error),)
