"""The index of all runs below a folder: a table that can be sorted and filtered, and the frontier of every task."""

import datetime
import math
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from experiments.errors import Mistake
from experiments.report import dots
from experiments.report.compare import began_with, data_of, labels
from experiments.report.curves import BEYOND
from experiments.report.dots import Point
from experiments.report.page import LOGO, document, flat, marked, tags
from experiments.report.runs import Run, glance, seconds, split
from experiments.report.terms import explained
from experiments.report.words import duration, large, moment, number, percent, safe

MARKS = {"run.json", "metrics.jsonl", "run.lock"}  # a folder with one of these files is that of a run
TWIN = "twin"  # the folder, in the folder of a run, of the twin that --with_twin trains
FIRST = ' aria-sort="descending"'  # the column by which rows are sorted at first
FIELDS = 6  # how many of the fields that differ are shown
SO_FAR = '<small title="of the last evaluation">so far</small>'
TITLE = "nmjax · an index"
SCRIPT = Path(__file__).with_name("index.js")


class Entry(NamedTuple):
    """A run of the index. What its files do not contain is None or empty."""

    place: str  # its folder, from the folder of the index
    run: Run
    task: str  # the data set, and what else makes scores comparable
    metric: str  # "accuracy", "hardened_accuracy", ...
    model: str
    score: float | None  # on the test split
    validation: float | None  # on the validation split
    dense: float | None  # FLOPs of the whole run
    effective: float | None
    differs: list[str]

    @property
    def outcome(self) -> str:
        """The outcome in one word."""
        return str(self.run.about.get("outcome", "running")).partition(":")[0] if self.run.about else "damaged"

    @property
    def why(self) -> str:
        """The reason of the outcome, and what could not be read."""
        reason = str(self.run.about.get("outcome", "")).partition(":")[2].strip()
        return " ".join(filter(None, [reason, *self.run.complaints]))

    @property
    def compared(self) -> bool:
        """True if the run is in the picture of its task."""
        return self.outcome == "finished" and self.score is not None and (self.effective or 0) > 0


def find(folder: Path) -> list[Path]:
    """Return the folders of runs below a folder, in order. Inside a run only its twin is searched.

    Links are not followed.
    """
    found = []
    for place, folders, files in os.walk(folder):
        if Path(place) != folder and not MARKS.isdisjoint(files):
            found.append(Path(place))
            folders[:] = [name for name in folders if name == TWIN]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def entries(folder: Path) -> list[Entry]:
    """Return the runs below a folder, the latest first.

    Raises:
      Mistake: If there are none.
    """
    runs = [glance(path) for path in find(folder)]
    if not runs:
        raise Mistake(
            f"{folder} is not the folder of a run or of runs: neither it nor a folder in it has a run.json. Name the "
            "--workdir of a run, or a folder that holds some."
        )
    runs.sort(key=lambda run: _began(run) or -math.inf, reverse=True)
    metrics = _metrics(runs)
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault((_task(run.config), metrics[run.path], _model(run.config)), []).append(run)
    found = {}
    for (data, metric, model), group in alike.items():
        for run, differs in zip(group, _differences(group), strict=True):
            place, (score, validation) = run.path.relative_to(folder).as_posix(), _by_split(run, metric)
            dense, effective = _flops(run.about)
            if dense is not None and dense == effective and not any(field.endswith("=dense") for field in differs):
                differs = ["dense", *(field for field in differs if not field.startswith(("rules=", "sparsity=")))]
            found[run.path] = Entry(place, run, data, metric, model, score, validation, dense, effective, differs)
    return [found[run.path] for run in runs]


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
    """Return the config of a run by dotted names, without the seed, the twin, and epochs that steps override."""
    unused = ("seed", "twin", "epochs") if run.config.get("steps") else ("seed", "twin")
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


def _by_split(run: Run, metric: str) -> tuple[float | None, float | None]:
    """Return a score of a run on the test split and on the validation split. A run has one of them until it ends."""
    scores = _scores(run)
    value, validated = _finite(scores.get(metric)), _finite(scores.get(f"validation_{metric}"))
    return (None, value) if run.metrics.get("eval") and split(run) == "validation" else (value, validated)


def _metrics(runs: list[Run]) -> dict[Path, str]:
    """Return for each run the metric by which it is compared: of hardened weights, if all finished runs have it."""
    tasks: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        tasks.setdefault((_task(run.config), str(run.about.get("metric", ""))), []).append(run)
    chosen = {}
    for (_, metric), group in tasks.items():
        scored = [run for run in group if _scores(run)]
        judged = [run for run in scored if run.about.get("outcome") == "finished"] or scored
        hardened = bool(judged) and all(f"hardened_{metric}" in _scores(run) for run in judged)
        chosen |= {run.path: f"hardened_{metric}" if hardened else metric for run in group}
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
    dense, effective = map(_finite, costs)
    return None if dense is None else dense * steps, None if effective is None else effective * steps


def frontier(runs: list[Entry]) -> list[Entry]:
    """Return the runs by rising cost for which no run has a better score at the same or fewer effective FLOPs."""
    sign = -1 if runs and runs[0].metric.endswith("loss") else 1
    edge: list[Entry] = []
    for entry in sorted(runs, key=lambda e: (e.effective, -sign * e.score)):
        best = (edge[-1].effective, edge[-1].score) if edge else (math.nan, -sign * math.inf)
        if sign * entry.score > sign * best[1] or (entry.effective, entry.score) == best:
            edge.append(entry)
    return edge


# ---- the page ----


def render(folder: Path, to: Path | None = None) -> str:
    """Return the page of the runs below a folder.

    Args:
      folder: The folder.
      to: The folder of the page, if it is another one.

    Raises:
      Mistake: If there are no runs.
    """
    found = entries(folder)
    address = lambda entry: _address(entry, to or folder)
    tasks: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        if entry.compared:
            tasks.setdefault((entry.task, entry.metric), []).append(entry)
    edges = {task: frontier(group) for task, group in tasks.items()}
    best = {entry.run.path for edge in edges.values() for entry in edge}
    pictures = [_picture(n, group, edges[task], address) for n, (task, group) in enumerate(tasks.items())]
    counts = Counter(entry.outcome for entry in found)
    title = f"{len(found)} run{'s' if len(found) > 1 else ''}"
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    header = f'<p class="over">{LOGO} {TITLE}</p><h1>{title}</h1><p class="when">{safe(outcomes)}</p>'
    sections = [
        ("runs", "All runs", _controls(found) + _table(found, best, address)),
        ("frontier", "The frontier", f"<p>{FRONTIER}</p>{''.join(pictures)}" if pictures else ""),
    ]
    header, *bodies = explained([header, *(body for _, _, body in sections)])
    shown = [(key, name, body) for (key, name, _), body in zip(sections, bodies, strict=True)]
    return document(f"nmjax: {title}", header, shown, script=SCRIPT.read_text(encoding="utf-8"))


FRONTIER = (
    "A run is on the frontier if no other finished run has a better score at the same or fewer effective FLOPs. "
    "Only runs of one data set and one metric are compared. A point is a single run: of runs that differ only in "
    "their seed, the better one is on the frontier. A comparison shows the means over seeds. "
    "The scores here are of the test split. To choose a run, compare the scores in the column validation of the table. "
    "If you choose by test scores, the test score of the chosen run is too optimistic."
)


def _address(entry: Entry, folder: Path) -> str:
    """Return the address of a run's report from a folder, or "" if there is none."""
    page = entry.run.path / "report.html"
    if not page.exists():
        return ""
    return relative(page, folder)


def relative(page: Path, folder: Path) -> str:
    """Return the address of a page from a folder, quoted as a link needs it."""
    return quote(os.fsencode(Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix()), safe="/=,+")


def _linked(entry: Entry, address: str) -> str:
    """Return the name of a run in HTML, with a link to its report if there is one."""
    name = safe(entry.place)
    return f'<a href="{safe(address)}">{name}</a>' if address else name


def _say(entry: Entry, score: float | None) -> str:
    """Return a score of a run as text."""
    if score is None:
        return ""
    text = f"{100 * score:.2f} %" if entry.metric.endswith("accuracy") else f"{score:.4f}"
    return text if entry.outcome == "finished" else f"{text} {SO_FAR}"


def _controls(found: list[Entry]) -> str:
    """Return the field that filters the table, and a button for each tag. The script shows them."""
    counts = Counter(tag for entry in found for tag in tags(entry.run))
    buttons = "".join(
        f'<button type="button" class="tag" aria-pressed="false" data-tag="{safe(tag)}">{safe(tag)} '
        f"<small>{count}</small></button>"
        for tag, count in counts.most_common()
    )
    label = '<label>Filter <input type="search" id="filter" autocomplete="off" placeholder="words of a run"></label>'
    return f'<div class="controls" hidden>{label}<span id="count" role="status"></span>{buttons}</div>'


def _table(found: list[Entry], best: set[Path], address: Any) -> str:
    """Return the table of the runs. Columns without any value are left out."""
    rows = [_row(entry, entry.run.path in best) for entry in found]
    heads = [head for head in rows[0] if any(row[head][1] for row in rows)]
    titles = '<th scope="col">run</th>'
    for head in heads:
        words = "" if any(row[head][0] is not None for row in rows) else ' class="words"'
        titles += f'<th scope="col"{words}{FIRST if head == "began" else ""}>{head}</th>'
    body = []
    for entry, row in zip(found, rows, strict=True):
        name, word = _linked(entry, address(entry)), str(entry.run.about.get("name", ""))
        word = "" if word in entry.place or "=" in word else f" <small>{safe(word)}</small>"
        cells = "".join(_cell(*row[head]) for head in heads)
        body.append(f'<tr><th scope="row">{name}{word}</th>{cells}</tr>')
    return (
        f'<div class="scroll wide"><table class="values index"><thead><tr>{titles}</tr></thead>'
        f"<tbody>\n{chr(10).join(body)}\n</tbody></table></div>"
    )


def _cell(order: Any, text: str) -> str:
    """Return a cell. Numbers are sorted by their value, and other cells by their text."""
    if isinstance(order, float):
        return f'<td data-v="{order:.10g}">{text}</td>'
    return f'<td class="words">{text}</td>'


def _row(entry: Entry, best: bool) -> dict[str, tuple[Any, str]]:
    """Return the cells of a run by their columns, each with the number by which it is sorted, or None."""
    about, run = entry.run.about, entry.run
    kind = {"finished": "good", "running": "open"}.get(entry.outcome, "bad")
    outcome = f'<span class="outcome {kind}">{safe(entry.outcome)}</span>'
    why = f'<small title="{safe(entry.why)}">{safe(entry.why[:80])}{"…" if len(entry.why) > 80 else ""}</small>'
    differs = safe(", ".join(entry.differs))
    if len(entry.differs) > FIELDS + 1:
        more = (
            f'<small title="{safe(", ".join(entry.differs[FIELDS:]))}">and {len(entry.differs) - FIELDS} more</small>'
        )
        differs = f"{safe(', '.join(entry.differs[:FIELDS]))}, {more}"
    task = ", ".join(filter(None, [entry.task, entry.metric.replace("_", " ")]))
    mark = '<b title="on the frontier">◆</b> ' if best else ""
    share = entry.effective / entry.dense if entry.effective is not None and entry.dense else None
    last = run.metrics["eval"][-1] if run.metrics.get("eval") else {}
    steps, done, began = _finite(about.get("steps")), _finite(last.get("step")), _began(run)
    took = seconds(run) or _finite(last.get("seconds"))
    parameters, seed = _finite(about.get("parameters")), _finite(run.config.get("seed"))
    of = f"{done:,.0f} of " if done is not None and entry.outcome != "finished" else ""
    shown = lambda value, say: (value, "" if value is None else say(value))
    return {
        "outcome": (None, outcome + (why if entry.why else "")),
        "what differs": (None, differs),
        "tags and note": (None, marked(run)),
        "score": (entry.score, mark + _say(entry, entry.score)),
        "validation": (entry.validation, _say(entry, entry.validation)),
        "data and metric": (None, safe(task)),
        "effective FLOPs": shown(entry.effective, large),
        "share of dense": shown(share, lambda x: f"{x:.3f}"),
        "seed": shown(seed, lambda x: f"{x:.0f}"),
        "model": (None, safe(entry.model)),
        "steps": shown(steps, lambda x: f"{of}{x:,.0f}"),
        "time": shown(took, lambda x: duration(max(x, 0))),
        "began": (began, safe(moment(about.get("began")))),
        "parameters": shown(parameters, large),
    }


def _picture(n: int, group: list[Entry], edge: list[Entry], address: Any) -> str:
    """Return the figure of one task, with a table of its frontier."""
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
    if len(near) < len(points):
        out = len(points) - len(near)
        words += f" The worst scores, of {out} runs, are" if out > 1 else " The worst score, of 1 run, is"
        words += " outside the picture."
    svg = dots.cloud(
        f"frontier-{n}", near, line, alt=f"{title} by effective FLOPs. {words}", along="effective FLOPs",
        say=number if losses else percent, best=min if losses else max,
    )  # fmt: skip
    rows = "".join(
        f'<tr><td>{place}</td><th scope="row">{_linked(e, address(e))}</th><td>{_say(e, e.score)}</td>'
        f"<td>{large(e.effective)}</td></tr>"
        for place, e in enumerate(edge, 1)
    )
    head = f'<tr><th></th><th class="words">run</th><th>{safe(metric)}</th><th>effective FLOPs</th></tr>'
    return (
        f'<div class="figures"><figure><h3>{safe(title)}</h3>{svg}<figcaption>{safe(words)}</figcaption></figure>'
        f'<div class="scroll"><table class="values edge"><thead>{head}</thead><tbody>{rows}</tbody></table></div></div>'
    )
