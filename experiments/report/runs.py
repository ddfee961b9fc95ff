"""Reading a run's folder. Missing files stay empty, and broken ones are reported."""

import datetime
import io
import json
import operator
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import Mistake


class Run(NamedTuple):
    """The files of a run."""

    path: Path
    about: dict[str, Any]  # run.json
    config: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]  # the lines of each kind, by rising steps
    plan_html: str  # trusted
    plan_text: str
    pictures: dict[str, np.ndarray]
    text: dict[str, Any]
    complaints: tuple[str, ...]  # what could not be read


def read(run_dir: Path) -> Run:
    """Read the run of a folder.

    Raises:
      Mistake: If there is no run.json, or if a file of JSON cannot be read.
    """
    run_dir = Path(run_dir)
    about = _json(run_dir / "run.json")
    if about is None:
        raise Mistake(f"{run_dir} is no run: it has no run.json. Give the folder that a run wrote.")
    metrics, complaints = parse_metrics(_text(run_dir / "metrics.jsonl"))
    pictures, broken = _arrays(run_dir / "pictures.npz")
    return Run(
        run_dir.resolve(),
        about,
        _json(run_dir / "config.json") or {},
        metrics,
        _text(run_dir / "plan.html"),
        _text(run_dir / "plan.txt"),
        pictures,
        _json(run_dir / "text.json") or {},
        complaints + broken,
    )


def parse_metrics(text: str) -> tuple[dict[str, list[dict[str, Any]]], tuple[str, ...]]:
    """Return the lines of metrics.jsonl by kind, each by rising steps, and complaints about unreadable lines."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    records: dict[str, dict[int, dict[str, Any]]] = {}
    unread = []
    for number, line in lines:
        try:
            record = json.loads(line)
            kind, step = str(record["kind"]), operator.index(record["step"])
            records.setdefault(kind, {})[step] = record
        except (ValueError, TypeError, KeyError):
            unread.append(number)
    complaints = []
    if unread and unread[-1] == lines[-1][0]:
        unread.pop()
        complaints.append("The last line of metrics.jsonl is cut off: the run was stopped while it wrote it.")
    if unread:
        complaints.append(f"metrics.jsonl: skipped lines that cannot be read: {', '.join(map(str, unread))}.")
    by_kind = {kind: [record for _, record in sorted(by_step.items())] for kind, by_step in records.items()}
    return by_kind, tuple(complaints)


def series(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of one measure. Lines without it are left out."""
    return _numbers((record["step"], record.get(key)) for record in records)


def layers(records: list[dict[str, Any]], key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the steps and values of one measure in each layer that has any."""
    by_step = [(record["step"], record[key]) for record in records if isinstance(record.get(key), dict)]
    names = dict.fromkeys(name for _, by_layer in by_step for name in by_layer)
    points = {name: _numbers((step, by_layer.get(name)) for step, by_layer in by_step) for name in names}
    return {name: (steps, values) for name, (steps, values) in points.items() if steps.size}


def _numbers(pairs: Iterable[tuple[int, Any]]) -> tuple[np.ndarray, np.ndarray]:
    kept = [(step, value) for step, value in pairs if isinstance(value, int | float)]
    return np.array([step for step, _ in kept], float), np.array([value for _, value in kept], float)


def seconds(run: Run) -> float | None:
    """Return the duration of a run that has ended, in seconds; None if run.json does not tell it."""
    try:
        began, ended = (datetime.datetime.fromisoformat(run.about[key]) for key in ("began", "ended"))
        return (ended - began).total_seconds()
    except (KeyError, TypeError, ValueError):
        return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _json(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise Mistake(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise Mistake(f"{path} holds no JSON object, but {str(content)[:40]!r}.")
    return content


def _arrays(path: Path) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return dict(arrays), ()
    except FileNotFoundError:
        return {}, ()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        return {}, (f"pictures.npz could not be read: {error}",)
