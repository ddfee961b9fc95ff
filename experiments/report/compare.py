"""Comparisons of runs, and their tables. Runs that differ only in their seed are one line, with its spread."""

import datetime
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.errors import Mistake
from experiments.files import lines
from experiments.report.page import flat
from experiments.report.runs import BEYOND, Run, at_once, is_number, read
from experiments.report.words import PLUS_MINUS, duration, is_share, large, markdown_table, plus_minus, score, visible

NO_RUNS = (
    "{} is not the folder of a run or of runs: neither it nor a folder in it has a run.json. Name the --workdir of a "
    "run, or a folder that holds some."
)
DATA_DIFFER = "The runs have different data sets, so their scores cannot be compared."
DEVICES_DIFFER = "The runs were made on different devices, so their times and their memory cannot be compared."
BASELINE = "The baseline is"
TEST = "Scores are from the test split"
VALIDATION = ". Columns named validation are from the validation split. Use those to choose a config"
RELATIVE = {  # fields of rows that are shares of the baseline's: the titles of their columns
    "cost": "effective FLOPs",
    "steps_time": "time of all steps",
    "temporary": "temporary memory",
}
SHARES = (
    "Effective FLOPs, the time of all steps and the temporary memory of a step are shares of the baseline's. The time "
    "is without compilation and evaluations."
)
DIFFERENCES = (
    "A difference is the mean over the seeds that both configs have, with its 95 % interval by Student's t. If they "
    "share no seed, it is the difference of the means, marked unpaired. A config is better or worse if the interval "
    "leaves out 0; otherwise the difference may be chance. One seed cannot tell, nor can seeds with one and the same "
    "difference. The intervals are not corrected for the number of configs."
)
BETTER, WORSE, CHANCE, UNKNOWN = "better", "worse", "may be chance", "cannot be told"
NOT_COMPARABLE = "not comparable"
TIMES_DIFFER = (
    "Times are not comparable where runs overlapped on a machine, were made on other devices than the baseline, or had "
    "another number of seeds trained side by side."
)
MEMORY = {  # in lines of metrics; the first that a run has counts
    "device_memory": "Device memory is the most that was in use on a device at one time.",
    "process_memory": "Process memory is the most that was in use by the process of the run at one time.",
}
SO_FAR = "If a process trains runs one after another, a later one shows at least the memory of those before it."


class Group(NamedTuple):
    """Runs of one config, by their seeds."""

    config: dict[str, Any]  # flat, without the seed
    runs: dict[int, Run]

    @property
    def finished(self) -> dict[int, Run]:
        """The runs that came to their end."""
        return {seed: run for seed, run in self.runs.items() if run.about.get("outcome") == "finished"}

    def values(self, metric: str) -> dict[int, float]:
        """Return the last figure of every finished run, by seed. Figures that are not finite are left out."""
        figures = {seed: run.about.get("figures", {}).get(metric) for seed, run in self.finished.items()}
        return {seed: value for seed, value in figures.items() if value is not None and abs(value) < BEYOND}

    @property
    def time(self) -> float | None:
        """The mean duration of the finished runs in seconds. Runs that were trained side by side share their time."""
        return _mean(run.seconds / at_once(run.about) for run in self.finished.values() if run.seconds is not None)[0]

    def measured(self, name: str) -> float | None:
        """Return the mean over finished runs of what a step takes: "step_seconds" or "step_bytes"."""
        found = (run.about.get("measured", {}).get(name) for run in self.finished.values())
        return _mean(value for value in found if value is not None)[0]

    @property
    def seconds(self) -> float | None:
        """The mean time of all steps of a finished run in seconds, without compilation and evaluations."""
        abouts = [run.about for run in self.finished.values()]  # a run that stops early has fewer steps
        known = [about for about in abouts if "steps" in about and "step_seconds" in about.get("measured", {})]
        return _mean(about["measured"]["step_seconds"] * about["steps"] for about in known)[0]

    def memory(self, kind: str) -> float | None:
        """Return the most bytes of a kind of memory in any line of any run; None if no line has it."""
        peaks = [line.get(kind) for run in self.runs.values() for line in run.metrics.get("train", [])]
        return max((peak for peak in peaks if is_number(peak) and peak), default=None)

    @property
    def cost(self) -> tuple[float, float] | None:
        """FLOPs of a whole run, dense and effective: the mean of the finished runs, or of all if none is finished."""
        known = [run.about for run in (self.finished or self.runs).values() if {"flops", "steps"} <= run.about.keys()]
        if not known:
            return None
        dense, effective = (statistics.fmean(about["flops"][i] * about["steps"] for about in known) for i in (0, 1))
        return dense, effective


def groups(runs: list[Run]) -> list[Group]:
    """Return the runs by config, in their order.

    Raises:
      Mistake: If two runs have one config and one seed, or if a seed is no integer.
    """
    by_config: dict[str, Group] = {}
    for run in runs:
        config = {name: value for name, value in flat(run.config) if name != "baseline"} | began_with(run)
        seed = config.pop("seed", 0)
        if not isinstance(seed, int):
            raise Mistake(f'{run.path / "config.json"} cannot be compared: "seed" has to be an integer.')
        group = by_config.setdefault(json.dumps(config, sort_keys=True, default=str), Group(config, {}))
        if seed in group.runs:
            both = f"{run.path} and {group.runs[seed].path}"
            raise Mistake(f"{both} are the same run: they have one config and one seed. Leave one of them out.")
        group.runs[seed] = run
    return list(by_config.values())


def began_with(run: Run) -> dict[str, str]:
    """Return, as a field beside those of its config, the run with whose state a run began; {} if with none."""
    origin = run.about.get("origin")
    if not isinstance(origin, dict):
        return {}
    return {"from": f"{origin.get('directory')} at step {origin.get('step')}"}


def folders(paths: list[Path]) -> list[Path]:
    """Return the folders of runs. Each path is one, or holds some: these in the order of the sweep's results.

    Raises:
      Mistake: If a path is not the folder of a run or of runs.
    """
    runs = []
    for path in paths:
        inside = sorted(p.parent for p in path.glob("*/run.json"))
        if (path / "run.json").exists():
            runs.append(path)
        elif inside:
            try:
                results = [line for line in lines(path / "results.jsonl") if isinstance(line, dict)]
            except (UnicodeDecodeError, RecursionError):
                results = []
            named = dict.fromkeys(path / str(result.get("folder", result.get("run"))) for result in results)
            runs += [p for p in named if p in inside] + [p for p in inside if p not in named]
        else:
            raise Mistake(NO_RUNS.format(path))
    return runs


class Row(NamedTuple):
    """A line of the table: the figures of one group."""

    name: str
    mean: float | None
    mean_error: float | None  # the standard error of the mean
    seeds: str
    difference: float | None  # to the baseline: the mean over the seeds that both have; of the means if there are none
    error: float | None  # the standard error of the difference
    interval: tuple[float, float] | None  # the 95 % interval of the difference; None if it cannot be told
    paired: bool  # True if the difference is over seeds that both have
    cost: float | None  # effective FLOPs, relative to the baseline's
    steps_time: float | None  # time of all steps, relative to the baseline's
    temporary: float | None  # temporary memory of a step, relative to the baseline's
    time: float | None  # the mean duration of a run, in seconds
    comparable: bool  # whether its times can be compared with the baseline's
    memory: float | None  # the most bytes that were in use at one time
    others: dict[str, tuple[float | None, float | None]]  # of the other metrics: the mean and its standard error
    marks: str  # the runs that failed or are missing

    @property
    def apart(self) -> bool | None:
        """Whether the 95 % interval of the difference leaves out 0; None if that cannot be told."""
        return None if self.interval is None else not self.interval[0] <= 0 <= self.interval[1]


class Comparison(NamedTuple):
    """Groups of runs, compared with one of them."""

    metric: str
    others: list[str]  # the other metrics that all runs share
    memory: str  # what the bytes of the rows are: "device_memory" or "process_memory"; "" if no run has any
    groups: list[Group]
    names: list[str]
    rows: list[Row]
    base: int  # the number of the baseline
    why: str  # what makes it the baseline
    notes: list[str]


def compare(runs: list[Run], baseline: str = "") -> Comparison:
    """Return the comparison of runs with a baseline.

    Args:
      runs: The runs.
      baseline: The name of the baseline. If it is empty, the dense group with the best score is the baseline, or the
        first group if none is dense.

    Raises:
      Mistake: If no group has the baseline's name, if two runs are the same, or if the runs have different metrics.
    """
    by_config = groups(runs)
    names = _names(by_config)
    if baseline and baseline not in names:
        raise Mistake(f"--baseline={baseline!r} is none of the configs: {', '.join(map(repr, names))}.")
    kinds = {run.about.get("metric", "loss") for run in runs}
    if len(kinds) > 1:
        raise Mistake("some of these runs are judged by accuracy and some by loss. Compare them separately.")
    kind = kinds.pop()
    figures = [run.about.get("figures", {}) for group in by_config for run in group.finished.values()]
    scores = list(filter(None, figures)) or [run.metrics["eval"][-1] for run in runs if run.metrics.get("eval")]
    metric = judged_by(kind, scores)
    base, why = (names.index(baseline), "from --baseline") if baseline else _baseline(by_config, metric)
    wanted = sorted({seed for group in by_config for seed in group.runs})
    others = [name for name in figures[0] if name != metric and all(name in f for f in figures)] if figures else []
    memory = next((kind for kind in MEMORY if any(group.memory(kind) for group in by_config)), "")
    timed = with_own_times(by_config, by_config[base])
    rows = [
        _row(group, name, by_config[base], metric, others, wanted, memory)._replace(comparable=own)
        for group, name, own in zip(by_config, names, timed, strict=True)
    ]
    notes = list(dict.fromkeys(note for run in runs for note in run.about.get("notes") or ()))
    if not all(row.comparable for row in rows if row.time is not None):
        notes.insert(0, TIMES_DIFFER)
    named = {data_of(run.config) for run in runs} - {""}
    checksums = {str(run.about.get("data") or "") for run in runs} - {""}
    if len(named) > 1 or len(checksums) > 1:
        notes.insert(0, DATA_DIFFER)
    if len({devices for run in runs if (devices := devices_of(run))}) > 1:
        notes.insert(0, DEVICES_DIFFER)
    return Comparison(metric, others, memory, by_config, names, rows, base, why, notes)


def judged_by(metric: str, scores: list[dict[str, Any]]) -> str:
    """Return the metric by which runs with some scores are compared: of hardened weights, if all have it."""
    return f"hardened_{metric}" if scores and all(f"hardened_{metric}" in of for of in scores) else metric


def compare_folders(paths: list[Path], baseline: str = "") -> Comparison:
    """Return the comparison of the runs of folders. Each folder is a run or holds some."""
    return compare([read(path) for path in folders(paths)], baseline)


def data_of(config: dict[str, Any]) -> str:
    """Return the data set of a config with what else its scores depend on, or "" if it has no data set."""
    data = config.get("data")
    if not isinstance(data, dict) or not data.get("name"):
        return ""
    own = data["name"] == "folder" or "." in str(data["name"])  # a file of the folder. Of sets one copy is as another
    parts = [data["name"], data.get("dir") if own else "", data.get("tokenizer"), data.get("test")]
    parts += [f"{data['windows']} windows"] if data.get("windows") else []
    return ", ".join(str(part) for part in parts if part and part != "bytes")


def _mean(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Return the mean of values, and its standard error; None where there are too few values."""
    values = list(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return (statistics.fmean(values) if values else None), error


def _baseline(by_config: list[Group], metric: str) -> tuple[int, str]:
    """Return the number of the baseline, and why it is the baseline: the best of the dense groups.

    A group is dense if its effective FLOPs are its dense ones. The best one has the best validation score, or the best
    test score if a dense group has no validation score.
    """
    dense = [n for n, group in enumerate(by_config) if group.cost and group.cost[0] == group.cost[1]]
    if len(dense) < 2:
        return (dense[0], "the only dense config") if dense else (0, "the first config, because none is dense")
    scored = [n for n in dense if by_config[n].values(metric)]
    if not scored:
        return dense[0], "the first dense config, because none has a score yet"
    name, why = f"validation_{metric}", "it has the best validation score of the dense configs"
    if not all(by_config[n].values(name) for n in scored):
        name = metric
        why = "it has the best test score of the dense configs, and some of these have no validation score"
    means = {n: statistics.fmean(by_config[n].values(name).values()) for n in scored}
    best = (min if metric.endswith("loss") else max)(means, key=means.__getitem__)
    return best, why


def varied(configs: list[dict[str, Any]]) -> list[str]:
    """Return the fields that are not the same in all of these flat configs."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def labels(configs: list[dict[str, Any]]) -> list[list[str]]:
    """Return for each of these flat configs the fields that differ, such as ["blocks=ste(2,4)", "peak=0.001"]."""
    keys = varied(configs)
    last = [key.rpartition(".")[2] for key in keys]
    short = {key: word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)}
    return [[f"{word}={config.get(key)}" for key, word in short.items() if key in config] for config in configs]


def _names(by_config: list[Group]) -> list[str]:
    """Return names of groups, made of the fields that differ between them."""
    configs = [group.config for group in by_config]
    if not varied(configs):
        return [next(iter(group.runs.values())).about.get("name", "run").partition(",seed=")[0] for group in by_config]
    return [", ".join(parts) or "the rest" for parts in labels(configs)]


def _row(
    group: Group, name: str, base: Group, metric: str, others: list[str], seeds: list[int], memory: str
) -> Row:  # fmt: skip
    values, base_values = group.values(metric), base.values(metric)
    gaps = [values[seed] - base_values[seed] for seed in values if seed in base_values] if group is not base else []
    difference, error = _mean(gaps)
    freedom = len(gaps) - 1.0
    if group is not base and not gaps and values and base_values:  # no seed in common
        both = values.values(), base_values.values()
        difference = statistics.fmean(both[0]) - statistics.fmean(both[1])
        if min(map(len, both)) > 1:
            parts = [statistics.variance(v) / len(v) for v in both]
            error = math.sqrt(sum(parts))
            shares = [part / (max(parts) or 1.0) for part in parts]  # as squares of large losses overflow
            spread = sum(share**2 / (len(v) - 1) for share, v in zip(shares, both, strict=True))
            freedom = sum(shares) ** 2 / spread if spread else 1.0  # of Welch's test
    mean, mean_error = _mean(values.values())
    marks = [f"seed {seed} {run.outcome}" for seed, run in group.runs.items() if seed not in group.finished]
    marks += [f"seed {seed} without a score" for seed in group.finished if seed not in values]
    marks += [f"seed {seed} missing" for seed in seeds if seed not in group.runs]
    ratio = lambda value, of: value / of if value is not None and of else None
    half = _half(difference, error, freedom)
    return Row(
        name,
        mean=mean,
        mean_error=mean_error,
        seeds=f"{len(values)} of {len(seeds)}",
        difference=difference,
        error=error,
        interval=None if half is None or difference is None else (difference - half, difference + half),
        paired=bool(gaps),
        cost=ratio(group.cost and group.cost[1], base.cost and base.cost[1]),
        steps_time=ratio(group.seconds, base.seconds),
        temporary=ratio(group.measured("step_bytes"), base.measured("step_bytes")),
        time=group.time,
        comparable=True,
        memory=group.memory(memory),
        others={other: _mean(group.values(other).values()) for other in others},
        marks=", ".join(marks),
    )


def _half(difference: float | None, error: float | None, freedom: float) -> float | None:
    """Return half the width of the 95 % interval of a difference; None if that cannot be told.

    It cannot be told from one seed, nor from seeds that all have the same difference, as few test examples give.
    """
    from scipy.special import stdtrit  # here because it is slow, and a launch does not need it

    if difference is None or error is None or error <= 1e-9 * abs(difference):
        return None
    return float(stdtrit(freedom, 0.975)) * error


def with_own_times(by_config: list[Group], base: Group) -> list[bool]:
    """Return for each config whether its times can be compared with those of the baseline.

    Its runs overlap with no other run than those that they were trained side by side with. They have the devices of the
    baseline, and as many runs beside them. Work of other programs is not known.
    """
    spans = [(run, span) for group in by_config for run in group.runs.values() if (span := _span(run))]

    def alone(run: Run) -> bool:
        own, beside = _span(run), {run.name, *(run.about.get("trained_with") or ())}
        meets = lambda other: own is not None and own[0] < other[1] and other[0] < own[1]
        return not any(meets(span) for other, span in spans if other is not run and other.name not in beside)

    kinds = lambda group: {(devices_of(run), at_once(run.about)) for run in group.finished.values()}
    own = [all(map(alone, group.finished.values())) for group in by_config]
    base_alone = own[next(n for n, group in enumerate(by_config) if group is base)]
    return [base_alone and mine and kinds(group) == kinds(base) for group, mine in zip(by_config, own, strict=True)]


def _span(run: Run) -> tuple[datetime.datetime, datetime.datetime] | None:
    """Return when a run began and ended; None if that is not known."""
    try:
        began, ended = (datetime.datetime.fromisoformat(run.about[key]) for key in ("began", "ended"))
        return (began, ended) if began <= ended else None
    except (KeyError, TypeError, ValueError):
        return None


def devices_of(run: Run) -> str:
    """Return the devices of a run as its header has them, or ""."""
    return str(dict(run.about.get("header", ())).get("devices") or "")


def verdict(row: Row, metric: str) -> str:
    """Return how a config compares with the baseline, in words."""
    if row.difference is None:
        return ""
    if row.interval is None:
        return UNKNOWN
    if not row.apart:
        return CHANCE
    return BETTER if (row.difference < 0) == metric.endswith("loss") else WORSE


# ---- the table ----


def legend(comparison: Comparison) -> str:
    """Return an explanation of the numbers in the table."""
    return " ".join(legend_parts(comparison))


def legend_parts(comparison: Comparison) -> tuple[str, str]:
    """Return what a reader has to know of the numbers, and what explains them in full."""
    base = f"{BASELINE} {comparison.names[comparison.base]}: {comparison.why}."
    validated = any(name.startswith("validation_") for name in comparison.others)
    splits = f"{TEST}{VALIDATION if validated else ''}."
    memory = [f"{MEMORY[comparison.memory]} {SO_FAR}"] if comparison.memory else []
    return f"{splits} {base}", " ".join([PLUS_MINUS, DIFFERENCES, SHARES, *memory])


def table(comparison: Comparison) -> list[list[str]]:
    """Return the rows of the table as texts; the first is its head. A column of costs that no row has is left out."""
    known = lambda name: name == "cost" or any(getattr(row, name) is not None for row in comparison.rows)
    relative = {name: title for name, title in RELATIVE.items() if known(name)}
    first, *others = (name.replace("_", " ") for name in (comparison.metric, *comparison.others))
    memory = [comparison.memory.replace("_", " ")] if comparison.memory else []
    costs = [*relative.values(), "time of a run", *memory]
    unit = " in points" if is_share(comparison.metric) else ""
    rows = [["config", first, "compared", f"difference{unit}, 95 % interval", "seeds", *costs, *others, ""]]
    for number, row in enumerate(comparison.rows):
        words, difference = "the baseline", ""
        if number != comparison.base:
            words = verdict(row, comparison.metric)
            difference = score(comparison.metric, row.difference, signed=True)
            if row.interval is not None:
                difference += f" [{', '.join(score(comparison.metric, end, signed=True) for end in row.interval)}]"
            difference += ", unpaired" if row.difference is not None and not row.paired else ""
        mean = score(comparison.metric, row.mean) + plus_minus(comparison.metric, row.mean_error)
        means = [score(name, value) + plus_minus(name, error) for name, (value, error) in row.others.items()]
        shown = lambda name, row=row: row.comparable or name != "steps_time"
        costs = [
            "" if (share := getattr(row, name)) is None else f"{share:.3f}" if shown(name) else NOT_COMPARABLE
            for name in relative
        ]
        costs.append("" if row.time is None else duration(row.time) if row.comparable else NOT_COMPARABLE)
        costs += ["" if row.memory is None else f"{large(row.memory)}B"] if comparison.memory else []
        rows.append([row.name, mean, words, difference, row.seeds, *costs, *means, row.marks])
    return rows


def markdown(comparison: Comparison) -> str:
    """Return the table as Markdown."""
    parts = [markdown_table(table(comparison)), legend(comparison), *comparison.notes]
    return visible("\n\n".join(parts) + "\n")
