"""The index of all runs below a folder: a table that can be sorted and filtered, and the frontier of every task."""

import datetime
import math
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from experiments.errors import Mistake
from experiments.report import curves as cv
from experiments.report.compare import NO_RUNS, began_with, data_of, judged_by, labels
from experiments.report.curves import Point
from experiments.report.page import flat
from experiments.report.runs import BEYOND, Run, glance
from experiments.report.templates import FOLDER, fill
from experiments.report.words import duration, large, moment, number, percent, score

MARKS = {"run.json", "metrics.jsonl", "run.lock"}  # a folder with one of these files is that of a run
BASELINE = "baseline"  # the folder, in the folder of a run, of the baseline that --with_baseline trains
FIELDS = 6  # how many of the fields that differ are shown
TITLE = "nmjax · an index"
SCRIPT = FOLDER / "index.js"
TEXTS = ("outcome", "what differs", "tags and note", "data and metric", "model")  # columns; the others hold numbers


class Entry(NamedTuple):
    """A run of the index. What its files do not contain is None or empty."""

    place: str  # its folder, from the folder of the index
    run: Run
    task: str  # the data set, and what else makes scores comparable
    metric: str  # "accuracy", "hardened_accuracy", ...
    score: float | None  # on the test split
    effective: float | None  # FLOPs of the whole run
    orders: dict[str, float | None] = {}  # by column what it is sorted by
    cells: dict[str, Any] = {}  # by column what it shows
    address: str = ""  # of its report
    best: bool = False  # whether it is on the frontier

    @property
    def outcome(self) -> str:
        """The outcome in one word."""
        return self.run.outcome if self.run.about else "damaged"

    @property
    def kind(self) -> str:
        """How the outcome is marked."""
        return self.run.kind if self.run.about else "bad"

    @property
    def why(self) -> str:
        """The reason of the outcome, and what could not be read."""
        return " ".join(filter(None, [self.run.why, *self.run.complaints]))

    @property
    def word(self) -> str:
        """The name of the run, if its folder does not have it."""
        name = str(self.run.about.get("name", ""))
        return "" if name in self.place or "=" in name else name

    @property
    def compared(self) -> bool:
        """True if the run is in the picture of its task."""
        return self.outcome == "finished" and self.score is not None and (self.effective or 0) > 0


def find(folder: Path) -> list[Path]:
    """Return the folders of runs below a folder, in order. Inside a run only its baseline is searched.

    Links are not followed.
    """
    found = []
    for place, folders, files in os.walk(folder):
        if Path(place) != folder and not MARKS.isdisjoint(files):
            found.append(Path(place))
            folders[:] = [name for name in folders if name == BASELINE]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def entries(folder: Path) -> list[Entry]:
    """Return the runs below a folder, the latest first.

    Raises:
      Mistake: If there are none.
    """
    runs = [glance(path) for path in find(folder)]
    if not runs:
        raise Mistake(NO_RUNS.format(folder))
    runs.sort(key=lambda run: _began(run) or -math.inf, reverse=True)
    metrics = _metrics(runs)
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault((_task(run.config), metrics[run.path], _model(run.config)), []).append(run)
    found = {}
    for (task, metric, model), group in alike.items():
        for run, differs in zip(group, _differences(group), strict=True):
            found[run.path] = _entry(folder, run, task, metric, model, differs)
    return [found[run.path] for run in runs]


def _entry(folder: Path, run: Run, task: str, metric: str, model: str, differs: list[str]) -> Entry:
    about, last = run.about, run.metrics["eval"][-1] if run.metrics.get("eval") else {}
    dense, effective = _flops(about)
    if dense is not None and dense == effective and not any(field.endswith("=dense") for field in differs):
        differs = ["dense", *(field for field in differs if not field.startswith(("rules=", "sparsity=")))]
    scores = _scores(run)
    value, validated = _finite(scores.get(metric)), _finite(scores.get(f"validation_{metric}"))
    if last and run.split == "validation":  # a run has one of the two until it ends
        value, validated = None, value
    done = _finite(last.get("step"))
    finished = about and run.outcome == "finished"
    of = f"{done:,.0f} of " if done is not None and not finished else ""
    numbers = {  # by column a number, and what writes it
        "score": (value, lambda x: score(metric, x)),
        "validation": (validated, lambda x: score(metric, x)),
        "effective FLOPs": (effective, large),
        "share of dense": (effective / dense if effective is not None and dense else None, "{:.3f}".format),
        "seed": (_finite(run.config.get("seed")), "{:.0f}".format),
        "steps": (_finite(about.get("steps")), lambda x: f"{of}{x:,.0f}"),
        "time": (run.seconds or _finite(last.get("seconds")), lambda x: duration(max(x, 0))),
        "began": (_began(run), str),
        "parameters": (_finite(about.get("parameters")), large),
    }
    cells = {name: "" if x is None else say(x) for name, (x, say) in numbers.items()}
    cells |= {"outcome": run.outcome if about else "damaged", "what differs": differs, "model": model}
    cells["tags and note"] = run.tags or about.get("note")
    cells["data and metric"] = ", ".join(filter(None, [task, metric.replace("_", " ")]))
    cells["began"] = moment(about.get("began"))
    orders = dict.fromkeys(TEXTS) | {name: x for name, (x, _) in numbers.items()}
    return Entry(run.path.relative_to(folder).as_posix(), run, task, metric, value, effective, orders, cells)


COLUMNS = (
    "outcome", "what differs", "tags and note", "score", "validation", "data and metric", "effective FLOPs",
    "share of dense", "seed", "model", "steps", "time", "began", "parameters",
)  # fmt: skip


def _began(run: Run) -> float | None:
    """Return when a run began, in seconds since 1970."""
    try:
        return datetime.datetime.fromisoformat(run.about["began"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _differences(runs: list[Run]) -> list[list[str]]:
    """Return for each run the fields of its config that differ between the runs: the methods first, the rules last."""
    place = lambda name: (name == "rules") - name.startswith("sparsity")
    configs = [_fields(run) for run in runs]
    parts = [labels([{k: v for k, v in c.items() if place(k) == n} for c in configs]) for n in (-1, 0, 1)]
    return [[*methods, *others, *rules] for methods, others, rules in zip(*parts, strict=True)]


def _fields(run: Run) -> dict[str, Any]:
    """Return the config of a run by dotted names, without the seed, the baseline, and epochs that steps override."""
    unused = ("seed", "baseline", "epochs") if run.config.get("steps") else ("seed", "baseline")
    try:
        return {name: value for name, value in flat(run.config) if name not in unused} | began_with(run)
    except RecursionError:  # no run writes such a config
        return {}


def _task(config: dict[str, Any]) -> str:
    """Return the data set of a config, or the task if it has no data set."""
    return data_of(config) or str(config.get("experiment") or "")


def _model(config: dict[str, Any]) -> str:
    """Return the name and the size of a config's model."""
    model = config.get("model")
    return " ".join(str(model[key]) for key in ("name", "size") if model.get(key)) if isinstance(model, dict) else ""


def _scores(run: Run) -> dict[str, Any]:
    """Return the scores of a run: run.json's, or those of the last evaluation."""
    figures = run.metrics["eval"][-1] if run.metrics.get("eval") else run.about.get("figures")
    return figures if isinstance(figures, dict) else {}


def _metrics(runs: list[Run]) -> dict[Path, str]:
    """Return for each run the metric by which it is compared: of hardened weights, if all finished runs have it."""
    tasks: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        tasks.setdefault((_task(run.config), str(run.about.get("metric", ""))), []).append(run)
    chosen = {}
    for (_, metric), group in tasks.items():
        finished = [_scores(run) for run in group if run.about.get("outcome") == "finished"]
        scores = list(filter(None, finished)) or [found for run in group if (found := _scores(run))]
        chosen |= dict.fromkeys((run.path for run in group), judged_by(metric, scores))
    return chosen


def _finite(value: Any) -> float | None:
    """Return a number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < BEYOND:
        return None
    return float(value)


def _flops(about: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the FLOPs of the whole run, dense and effective."""
    costs, steps = about.get("flops"), _finite(about.get("steps"))
    if not isinstance(costs, list) or len(costs) != 2 or steps is None:
        return None, None
    dense, effective = (None if cost is None else cost * steps for cost in map(_finite, costs))
    return dense, effective


def frontier(runs: list[Entry]) -> list[Entry]:
    """Return the runs by rising cost for which no run has a better score at the same or fewer effective FLOPs."""
    best = min if runs and runs[0].metric.endswith("loss") else max
    return [runs[n] for n in cv.unbeaten([(run.effective, run.score) for run in runs], best)]


# ---- the page ----


def render(folder: Path, to: Path | None = None) -> str:
    """Return the page of the runs below a folder.

    Args:
      folder: The folder.
      to: The folder of the page, if it is another one.

    Raises:
      Mistake: If there are no runs.
    """
    found = [entry._replace(address=_address(entry, to or folder)) for entry in entries(folder)]
    tasks: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        if entry.compared:
            tasks.setdefault((entry.task, entry.metric), []).append(entry)
    edges = [(group, frontier(group)) for group in tasks.values()]
    best = {entry.run.path for _, edge in edges for entry in edge}
    found = [entry._replace(best=entry.run.path in best) for entry in found]
    counts = Counter(entry.outcome for entry in found)
    columns = [name for name in COLUMNS if any(entry.cells[name] for entry in found)]
    heading = f"{len(found)} run{'s' if len(found) > 1 else ''}"
    return fill(
        "index",
        title=f"nmjax: {heading}",
        heading=heading,
        outcomes=", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()),
        tags=Counter(tag for entry in found for tag in entry.run.tags).most_common(),
        columns=[(name, all(entry.orders[name] is None for entry in found)) for name in columns],
        entries=found,
        fields=FIELDS,
        pictures=[_picture(n, group, edge) for n, (group, edge) in enumerate(edges)],
        script=Markup(SCRIPT.read_text(encoding="utf-8")),
    )


def _address(entry: Entry, folder: Path) -> str:
    """Return the address of a run's report from a folder, or "" if there is none."""
    page = entry.run.path / "report.html"
    return relative(page, folder) if page.exists() else ""


def relative(page: Path, folder: Path) -> str:
    """Return the address of a page from a folder, quoted as a link needs it."""
    return quote(os.fsencode(Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix()), safe="/=,+")


def _picture(n: int, group: list[Entry], edge: list[Entry]) -> dict[str, Any]:
    """Return the figure of one task, with the runs of its frontier."""
    losses = group[0].metric.endswith("loss")
    metric = group[0].metric.replace("_", " ")
    title = f"{metric} on {group[0].task}" if group[0].task else metric
    best = {entry.run.path for entry in edge}
    middle = statistics.median(entry.score for entry in group)
    far = 4 * abs(edge[-1].score - middle) or math.inf  # from the best score on
    points = [Point(e.place, e.effective, e.score) for e in group if e.run.path not in best]
    near = [point for point in points if abs(point.value - edge[-1].score) <= far]
    line = [Point(e.place, e.effective, e.score) for e in edge]
    runs = "1 finished run" if len(group) == 1 else f"{len(group)} finished runs"
    words = f"{runs}. FLOPs of the whole run: what its products would cost if zeros cost nothing."
    if out := len(points) - len(near):
        words += f" The worst scores, of {out} runs, are" if out > 1 else " The worst score, of 1 run, is"
        words += " outside the picture."
    svg = cv.cloud(
        f"frontier-{n}", near, line, alt=f"{title} by effective FLOPs. {words}", along="effective FLOPs", up=metric,
        say=number if losses else percent, best=min if losses else max,
    )  # fmt: skip
    return {"title": title, "svg": svg, "words": words, "metric": metric, "edge": edge}
