"""A run's folder, read: what is missing stays empty, what is broken is said."""

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
    """What a run wrote."""

    path: Path
    about: dict[str, Any]  # run.json
    config: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]  # of each kind its lines, by rising steps
    plan_html: str  # trusted
    plan_text: str
    pictures: dict[str, np.ndarray]
    text: dict[str, Any]
    complaints: tuple[str, ...]  # what could not be read


def read(run_dir: Path) -> Run:
    """The run of a folder."""
    run_dir = Path(run_dir)
    about = _json(run_dir / "run.json")
    if about is None:
        raise Mistake(f"{run_dir} is no run: there is no run.json in it. Name the folder that a run wrote.")
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
    """The lines of metrics.jsonl by kind, each kind by rising steps, and what was wrong with them."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    unread = []
    for number, line in lines:
        try:
            record = json.loads(line)
            kind, step = str(record["kind"]), operator.index(record["step"])
            found.setdefault(kind, {})[step] = record
        except (ValueError, TypeError, KeyError):
            unread.append(number)
    complaints = []
    if unread and unread[-1] == lines[-1][0]:
        unread.pop()
        complaints.append("The last line of metrics.jsonl is cut off: the run was stopped while it wrote.")
    if unread:
        complaints.append(f"metrics.jsonl: passed over what could not be read, line {', '.join(map(str, unread))}.")
    return {kind: [record for _, record in sorted(at.items())] for kind, at in found.items()}, tuple(complaints)


def series(records: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps and values of one measure, where it was taken."""
    return _taken((record["step"], record.get(key)) for record in records)


def layers(records: list[dict[str, Any]], key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The steps and values of one measure in each layer."""
    taken = [(record["step"], record[key]) for record in records if isinstance(record.get(key), dict)]
    names = dict.fromkeys(name for _, of in taken for name in of)
    found = {name: _taken((step, of.get(name)) for step, of in taken) for name in names}
    return {name: (steps, values) for name, (steps, values) in found.items() if steps.size}


def _taken(pairs: Iterable[tuple[int, Any]]) -> tuple[np.ndarray, np.ndarray]:
    kept = [(step, value) for step, value in pairs if isinstance(value, int | float)]
    return np.array([step for step, _ in kept], float), np.array([value for _, value in kept], float)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _json(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise Mistake(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise Mistake(f"{path} holds no JSON object, but {str(found)[:40]!r}.")
    return found


def _arrays(path: Path) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
            return dict(found), ()
    except FileNotFoundError:
        return {}, ()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        return {}, (f"pictures.npz could not be read: {error}",)
