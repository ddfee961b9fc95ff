"""The page of a run that goes on: how far it is, and how often the page reloads itself."""

import datetime
import math
from typing import Any

from experiments.report.runs import Run, is_number
from experiments.report.words import duration


def running(run: Run) -> bool:
    """Return whether the run goes on, as its run.json says."""
    return run.about.get("outcome", "running") == "running"


def times(run: Run) -> list[tuple[int, float]]:
    """Return pairs (step, seconds since the start), sorted by step."""
    lines = [line for kind in ("train", "eval") for line in run.metrics.get(kind, [])]
    return sorted({(line["step"], line["seconds"]) for line in lines if _timed(line)})


def _timed(line: dict[str, Any]) -> bool:
    """Return whether a line of metrics has its time."""
    return is_number(line.get("seconds")) and math.isfinite(line["seconds"])


def progress(run: Run) -> str:
    """Return how far a run is, and about how long it still takes: "step 120 of 4,042, about 3 min left"."""
    total, done = run.about.get("steps"), times(run)
    if not total or not done:
        return ""
    (first, since), (last, until) = done[0], done[-1]
    text = f"step {last:,} of {total:,}"
    left = (until - since) / (last - first) * (total - last) if last > first else 0
    return f"{text}, about {duration(left)} left" if left >= 1 else text


def reload(run: Run) -> int:
    """Return after how many seconds the page of a run reloads itself; 0 means never, because the run has ended."""
    if not running(run):
        return 0
    seconds = [line["seconds"] for line in run.metrics.get("eval", []) if _timed(line)]
    between = seconds[-1] - seconds[-2] if len(seconds) > 1 else 0  # a page is written at every evaluation
    return round(min(max(between, 5), 60))


def written(run: Run) -> str:
    """Return the time of day at which the page of a run that goes on is written; "" if the run has ended."""
    return f"written at {datetime.datetime.now():%H:%M:%S}" if running(run) else ""
