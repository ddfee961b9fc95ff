"""Reading a run's folder. Missing files stay empty, and broken ones are reported."""

import datetime
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import files
from experiments.data import reading
from experiments.errors import Mistake
from experiments.report.words import duration, moment, only_tables

PLAN = ("<!-- plan -->", "<!-- end of plan -->")  # around the plan in plan.html
BASELINE = "baseline"  # the folder in which --with_baseline trains the run to compare with
BLOCK = 2**16  # bytes of metrics.jsonl that are read at once, from the end
LARGEST = 2**63  # of integers: no run writes larger ones
BEYOND = 1e100  # float32 ends at 3e38: a larger value was infinite


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that a run may write."""
    return isinstance(value, float) or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and type(value) is not bool and abs(value) < LARGEST


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _all(kind: type, holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check of a list or an object: whether all its values are of a type."""
    return lambda value: isinstance(value, kind) and all(map(holds, value.values() if kind is dict else value))


_is_pair = lambda value: isinstance(value, list) and len(value) == 2
_is_piece = lambda value: _is_pair(value) and (value[1] is None or is_number(value[1]))
_is_window = lambda value: (
    isinstance(value, dict) and is_number(value.get("loss")) and _all(list, _is_piece)(value.get("pieces"))
)
_TEXTS = ("a list of texts", _all(list, _is(str)))
_NUMBERS = ("an object of numbers", _all(dict, is_number))
Fields = dict[str, tuple[str, Callable[[Any], bool]]]  # by field its type in words, and a check; it may be missing
ABOUT: Fields = {  # run.json
    **dict.fromkeys(("name", "outcome", "metric"), ("a text", _is(str))),
    **dict.fromkeys(("figures", "measured"), _NUMBERS),
    **dict.fromkeys(("summary", "header"), ("a list of pairs", _all(list, _is_pair))),
    **dict.fromkeys(("notes", "trained_with"), _TEXTS),
    **dict.fromkeys(("versions", "machine"), ("an object", _is(dict))),
    "git": ("an object or null", lambda v: v is None or isinstance(v, dict)),
    "steps": ("an integer", _is_count),
    "flops": ("a list of two numbers", lambda v: _all(list, is_number)(v) and len(v) == 2),
}
TEXT: Fields = {
    "samples": ("a list", _is(list)),
    **dict.fromkeys(("source", "reference", "output"), _TEXTS),
    "hardest": ("a list of windows with their losses", _all(list, _is_window)),
}
BREAKDOWN: Fields = {
    **dict.fromkeys(("first", "steps", "devices"), ("an integer", _is_count)),
    "seconds": ("a number", is_number),
    **dict.fromkeys(("parts", "slots"), _NUMBERS),
    "layers": ("an object of objects of numbers", _all(dict, _NUMBERS[1])),
}


class Run(NamedTuple):
    """The files of a run, and what pages say of it."""

    path: Path
    about: dict[str, Any]  # run.json
    config: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]] = {}  # the lines of each kind, by rising steps
    plan_html: str = ""  # tables and paragraphs only
    plan_text: str = ""
    pictures: dict[str, np.ndarray] = {}
    text: dict[str, Any] = {}
    complaints: tuple[str, ...] = ()  # what could not be read
    breakdown: dict[str, Any] = {}  # of a traced step, if there is one
    baseline: dict[str, list[dict[str, Any]]] = {}  # the lines of the run that it is compared with, if there is one

    @property
    def name(self) -> str:
        """The name that it has in its report."""
        return str(self.about.get("name", self.path.name))

    @property
    def outcome(self) -> str:
        """The outcome in one word."""
        return str(self.about.get("outcome", "running")).partition(":")[0].strip()

    @property
    def why(self) -> str:
        """The reason of the outcome."""
        return str(self.about.get("outcome", "")).partition(":")[2].strip()

    @property
    def kind(self) -> str:
        """How pages mark the outcome: "good", "open" or "bad"."""
        return {"finished": "good", "running": "open"}.get(self.outcome, "bad")

    @property
    def tags(self) -> list[str]:
        """The tags."""
        given = self.about.get("tags")
        return [str(tag) for tag in given] if isinstance(given, list) else []

    @property
    def split(self) -> str:
        """The split of the lines of kind "eval": "validation", or "test" if it has no validation split."""
        figures, data = self.about.get("figures"), self.config.get("data")
        share = data.get("validation") if isinstance(data, dict) else None
        scored = isinstance(figures, dict) and any(name.startswith("validation_") for name in figures)
        return "validation" if scored or (is_number(share) and share > 0) else "test"

    @property
    def seconds(self) -> float | None:
        """The duration of a run that has ended, in seconds; None if run.json does not say it.

        The time before a run was continued counts, but not the time in between.
        """
        took = self.about.get("seconds")
        if is_number(took) and 0 <= took < 1e12:
            return float(took)
        try:
            began, ended = (datetime.datetime.fromisoformat(self.about[key]) for key in ("began", "ended"))
            return (ended - began).total_seconds()
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def lasted(self) -> str:
        """The duration as text, or "" if the files do not tell it."""
        took = self.seconds
        if took is None:  # the run has not ended: its last line of metrics has the time
            times = [record.get("seconds") for records in self.metrics.values() for record in records]
            took = max((s for s in times if isinstance(s, int | float)), default=0)
        return duration(took) if 0 < took < math.inf else ""

    @property
    def when(self) -> str:
        """The time at which it began, and its duration; and while it goes on, the time of day."""
        written = f"written at {datetime.datetime.now():%H:%M:%S}" if self.kind == "open" else ""
        return " · ".join(filter(None, [moment(self.about.get("began")), self.lasted, written]))

    @property
    def progress(self) -> str:
        """How far it is, and about how long it still takes: "step 120 of 4,042, about 3 min left"."""
        total = self.about.get("steps")
        done = sorted((line["step"], line["seconds"]) for line in self._timed("train") + self._timed("eval"))
        if not total or not done:
            return ""
        (first, since), (last, until) = done[0], done[-1]
        text = f"step {last:,} of {total:,}"
        left = (until - since) / (last - first) * (total - last) if last > first else 0
        return f"{text}, about {duration(left)} left" if left >= 1 else text

    @property
    def reload(self) -> int:
        """After how many seconds its page reloads itself; 0 means never, because the run has ended."""
        seconds = [line["seconds"] for line in self._timed("eval")]
        between = seconds[-1] - seconds[-2] if len(seconds) > 1 else 0  # a page is written at every evaluation
        return round(min(max(between, 5), 60)) if self.kind == "open" else 0

    def _timed(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of a kind that have their time."""
        times = lambda line: is_number(line.get("seconds")) and math.isfinite(line["seconds"])
        return [line for line in self.metrics.get(kind, []) if times(line)]


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
    pictures = {}
    try:
        pictures = reading.arrays(path, (), None) if os.path.lexists(path := run_dir / "pictures.npz") else {}
    except Mistake as error:
        complaints += (str(error),)
    page = _text(run_dir / "plan.html")
    return Run(
        run_dir.resolve(),
        about,
        _json(run_dir / "config.json") or {},
        metrics,
        only_tables(page.partition(PLAN[0])[2].rpartition(PLAN[1])[0] if PLAN[0] in page else page),
        _text(run_dir / "plan.txt"),
        pictures,
        _checked(run_dir / "text.json", TEXT) or {},
        complaints,
        _checked(run_dir / "profile" / "breakdown.json", BREAKDOWN) or {},
        parse_metrics(_text(run_dir / BASELINE / "metrics.jsonl", files.LONGEST))[0],
    )


def glance(run_dir: Path) -> Run:
    """Read what an index shows of a run: run.json, config.json, and the last evaluation if run.json has no figures.

    It raises no errors. What cannot be read becomes a complaint.
    """
    found: dict[str, dict[str, Any]] = {}
    complaints = []
    for name in ("run.json", "config.json"):
        try:
            content = _json(run_dir / name)
            if content is None:
                complaints.append(f"There is no {name}.")
        except (Mistake, OSError) as error:
            content = None
            complaints.append(f"{name} cannot be read: {error.__cause__ or error}".rstrip(".") + ".")
        found[name] = content or {}
    scored = isinstance(found["run.json"].get("figures"), dict) and found["run.json"]["figures"]
    last = None if scored else last_line(run_dir / "metrics.jsonl", "eval")
    metrics = {"eval": [last]} if last else {}
    return Run(run_dir, found["run.json"], found["config.json"], metrics, complaints=tuple(complaints))


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
    unread, complaints = [], []
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if is_line(record):
            records.setdefault(record["kind"], {})[record["step"]] = record
        else:
            unread.append(number)
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
    names = dict.fromkeys(chain(*tables))
    points = {name: _numbers(steps, [table.get(name) for table in tables]) for name in names}
    return {name: (steps, values) for name, (steps, values) in points.items() if steps.size}


def _steps(records: list[dict[str, Any]]) -> np.ndarray:
    return np.fromiter(map(operator.itemgetter("step"), records), float, len(records))


def _numbers(steps: np.ndarray, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    if not set(map(type, values)) <= {float}:  # otherwise, as in most runs, this is much quicker
        kept = np.array([is_number(value) for value in values], bool)
        steps, values = steps[kept], [value for value in values if is_number(value)]
    return steps, np.array(values, float)


def test_examples(run: Run) -> int:
    """Return the number of test examples that the header of a run names: 0 if it names none, or tokens."""
    found = re.search(r"(\d[\d,]*) test\b", str(dict(run.about.get("header") or ()).get("data", "")))
    return int(found[1].replace(",", "")) if found and run.about.get("unit") != "tokens" else 0


def at_once(about: Mapping[str, Any]) -> int:
    """Return the number of runs that were trained side by side, this one included. They share the time."""
    return 1 + len(about.get("trained_with", ()))


def _text(path: Path, limit: int = files.LARGEST) -> str:
    try:
        return files.text(path, limit, errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise Mistake(f"{path} cannot be read: {error.strerror or error}.") from error


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
