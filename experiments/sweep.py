"""Many runs of one page: those that its `get_sweep()` lists, each in a directory of its own.

Finished runs are not done again, interrupted runs continue, and runs that another process writes are left to it. Runs
that differ in their seed alone share one compiled program. Those of them that are at the same step may be trained side
by side in it. `results.jsonl` holds a line for every run that has ended; a file of results elsewhere gets the lines
that it does not have.
"""

import contextlib
import hashlib
import json
import math
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.errors import Diverged, Failed, Mistake, Stopped, Taken
from experiments.files import append, lines as lines_of, replace, writable
from experiments.scale import processes
from experiments.training import digest, record
from experiments.training.checkpoints import Checkpoints
from experiments.training.digest import Identity

EXAMPLE = "[{'seed': 0}, {'seed': 1, 'sparsity.blocks': 'dense'}]"


class Member(NamedTuple):
    """One run of a sweep."""

    name: str  # says in full what this run changes
    folder: str  # its directory, a name that needs no quotes in a shell
    changes: dict[str, Any]
    config: ConfigDict
    identity: Identity


# ---- the runs of a sweep ----


def members(config: ConfigDict, changes: list[dict[str, Any]]) -> list[Member]:
    """Return the runs of a list of changes. Each is named by the fields that are not the same in all of them.

    The same list gives the same names and the same folders, so that a sweep that is started again finds its runs.

    Args:
      config: The page's settings.
      changes: For each run the fields that it changes, by dotted names.

    Raises:
      Mistake: If the list is of another kind, if a change does not fit its field, or if two runs have one name.
    """
    if not isinstance(changes, list) or not changes or not all(isinstance(c, dict) for c in changes):
        raise Mistake(f"get_sweep() has to return a list of changes, such as {EXAMPLE}.")
    fields = dict.fromkeys(field for change in changes for field in change)
    varied = [field for field in fields if len({repr(change.get(field)) for change in changes}) > 1]
    named_by = varied or list(fields)[:1]
    runs = [_member(config, change, named_by) for change in changes]
    names = [member.name for member in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Mistake(f"get_sweep() has two runs named {twice[0]}. Every run has to differ from the others.")
    taken: set[str] = set()
    for number, member in enumerate(runs):
        folder = member.folder
        if folder.lower() in taken:  # in lower case, because some file systems ignore case
            folder = f"{folder}-{_digest(member.name)}"
        taken.add(folder.lower())
        runs[number] = member._replace(folder=folder)
    return runs


def _member(config: ConfigDict, change: dict[str, Any], named_by: list[str]) -> Member:
    changed = config.copy_and_resolve_references()
    for field, value in change.items():
        _set(changed, field, value)
    check_seed(changed)
    last = [field.rpartition(".")[2] for field in named_by]
    short = {field: end if last.count(end) == 1 else field for field, end in zip(named_by, last, strict=True)}
    name = ",".join(f"{short[field]}={change[field]}" for field in named_by if field in change) or "run"
    return Member(name, folder(name), change, changed.lock(), digest.identity(changed))


def check_seed(config: ConfigDict) -> None:
    """Refuse a seed that no key can be made of."""
    if not 0 <= config.seed < 2**32:
        raise Mistake(f"config.seed={config.seed} is not from 0 to 4,294,967,295.")


def folder(name: str) -> str:
    """Return a name of a directory that needs no quotes in a shell: letters, digits and ``._=+-``.

    >>> folder("blocks=mdgf(2,4,linear(1,0,30%)); drhs_g=mvue(2,4),seed=0")
    'blocks=mdgf-2-4-linear-1-0-30pct-drhs_g=mvue-2-4-seed=0'
    """
    plain = re.sub(r"[^\w.=+-]+", "-", name.replace("%", "pct"), flags=re.ASCII).strip("-.") or "run"
    return plain if len(plain) <= 120 else f"{plain[:110]}-{_digest(name)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:6]


def _set(config: ConfigDict, field: str, value: Any) -> None:
    try:
        with config.unlocked():
            config.update_from_flattened_dict({field: value})
    except (TypeError, KeyError) as error:
        raise Mistake(f"get_sweep(): {field}={value!r}: {' '.join(str(error).split())}") from error


def at(runs: list[Member], index: int) -> Member:
    """Return the run of an index, and refuse an index that the sweep does not have."""
    if not 0 <= index < len(runs):
        raise Mistake(f"--sweep_index={index}: the sweep has {len(runs)} runs, from 0 to {len(runs) - 1}.")
    return runs[index]


def refuse_other_names(runs: list[Member], workdir: Path) -> None:
    """Refuse a directory that holds a run of the sweep in a folder of another name, because the sweep got a field."""
    folders = {member.folder for member in runs}
    wanted = {member.identity.digest: member.folder for member in runs if not (workdir / member.folder).exists()}
    moves = []
    for path in sorted(workdir.glob("*/config.json")) if wanted else []:
        with contextlib.suppress(Mistake):  # it is damaged
            new = wanted.get(digest.recorded(path.parent).digest)
            if new and path.parent.name not in folders:
                moves.append(f"mv {path.parent} {workdir / new}")
    if moves:
        raise Mistake(
            f"Runs of this sweep are in folders of other names, and would be trained again. Rename them:\n"
            f"{chr(10).join(moves)}\nOr write another --workdir."
        )


# ---- running them ----


def run(
    runs: list[Member], workdir: Path, index: int | None, at_once: int, make: Callable[[Member], Any],
    train: Callable[[list[Member], Any], signal.Signals | None], results: Path | None = None,
    labels: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Run all members of a sweep that are not done, or the one of an index.

    Args:
      runs: The members of the sweep.
      workdir: The directory in which each has its own.
      index: Number of the only run to do, or None for all.
      at_once: Number of runs that may be trained side by side, if they differ in their seed alone.
      make: Returns the program of a run. It serves the next run too if that differs in its seed alone.
      train: `train(members, program)` trains runs side by side. It returns the signal that told it to stop when no
        step was left.
      results: A file that gets a line for each finished run too.
      labels: The tags and the note that all runs get, also finished ones.

    Raises:
      Failed: At the end, if runs failed, if other processes still write to them, or if the file of results could not be
        written. It names them.
      Taken: If another process writes to the only run.
      Stopped: If a signal came after the last step of a run, and others are left.
    """
    if index is not None:
        at(runs, index)
    for member in runs:
        if is_done(workdir / member.folder):
            digest.refuse_another(workdir / member.folder, member.identity)
    refuse_other_names(runs, workdir)
    sweep = _Sweep(runs, workdir, make, train)
    for number, member in enumerate(runs):
        if index not in (None, number) or member.name in sweep.begun:
            continue
        group, stopped_by = [], None
        if not processes.agreed(partial(is_done, workdir / member.folder)):
            group, stopped_by = sweep.train_from(number, at_once, alone=index is not None)
        elif processes.first():
            record.complete(workdir / member.folder, labels or {})
        if processes.first():
            with writable(workdir):
                collect(runs, workdir)
            if results is not None:
                sweep.add(results)
        if stopped_by and index is None and number + 1 < len(runs):
            names = ", ".join(member.name for member in group)
            text = f"interrupted by {stopped_by.name} after the last step of {names}."
            raise Stopped(f"{text} The same command continues with the others.", stopped_by)
    _say(f"\n{_outcomes(runs, workdir)}")
    if sweep.failed:
        raise Failed(f"{len(sweep.failed)} of the runs failed: {', '.join(sweep.failed)}")
    if sweep.unwritten:
        raise Failed(f"{sweep.unwritten} The same command adds the lines, and trains nothing again.")
    left = [member.name for member in sweep.left if not is_done(workdir / member.folder)]
    if left:
        raise Failed(f"other processes write to these runs or to those beside them: {', '.join(left)}")


class _Sweep:
    """The runs of a sweep, which of them have begun and failed, and the last program."""

    def __init__(self, runs: list[Member], workdir: Path, make: Callable, train: Callable):
        self.runs, self.workdir, self._make, self._train = runs, workdir, make, train
        self.begun: set[str] = set()
        self.failed: list[str] = []
        self.left: list[Member] = []  # to other processes
        self.unwritten = ""  # why the file of results has not got all lines
        self._program: Any = None
        self._made_for: Member | None = None

    def train_from(self, number: int, at_once: int, alone: bool) -> tuple[list[Member], signal.Signals | None]:
        """Train the run of a number, and those that may be trained beside it. If it fails, the sweep goes on.

        Args:
          number: The number of the run.
          at_once: Number of runs that may be trained side by side.
          alone: Whether it is the only run of the command. Then all errors are raised.

        Returns:
          The runs, and the signal that told them to stop when no step was left.
        """
        group, earlier = [self.runs[number]], bool(self.begun)
        try:
            group = self.group(number, at_once)
            return group, self.train(group)
        except Taken as error:
            if alone or processes.count() > 1:  # other processes do not know of it
                raise
            if len(group) > 1:  # one of them is taken
                self.begun.difference_update(member.name for member in group)
                return self.train_from(number, 1, alone)
            _say(str(error))
            self.left += group
        except Exception as error:
            earlier = earlier or any(is_done(self.workdir / member.folder) for member in self.runs)
            if (
                alone
                or processes.count() > 1
                or isinstance(error, Stopped)
                or isinstance(error, Mistake)
                and not earlier
            ):
                raise  # a mistake of the first run is likely one of all runs
            if not isinstance(error, Mistake):
                traceback.print_exc()
            names = [member.name for member in group]
            _say(f"{', '.join(names)}: {error if isinstance(error, Mistake) else type(error).__name__}")
            self._program = self._made_for = None
            self.begun.update(names)
            self.failed += [name for name in names if name not in self.failed]
        return group, None

    def add(self, results: Path) -> None:
        """Append new lines to a file of results. If it cannot be written, say so once."""
        try:
            add(self.runs, self.workdir, results)
            self.unwritten = ""
        except Failed as error:
            if not self.unwritten:
                _say(str(error))
            self.unwritten = f"{error}."

    def group(self, number: int, at_once: int) -> list[Member]:
        """Return the run of a number, and those that are to be trained beside it; `_program` becomes theirs."""
        member = self.runs[number]
        if self._made_for is None or _but_for_seed(self._made_for) != _but_for_seed(member):
            self._program, self._made_for = self._make(member), member
            if at_once > 1 and self._program.task.streamed:
                _say(
                    "--seeds_at_once: the runs are trained one after another, because their data are streamed in an "
                    "order that depends on the seed."
                )
        if at_once == 1 or self._program.task.streamed:
            return [member]
        later = [
            m for m in self.runs[number + 1 :] if m.name not in self.begun and not is_done(self.workdir / m.folder)
        ]
        return [member, *_beside(member, later, self.workdir)[: at_once - 1]]

    def train(self, group: list[Member]) -> signal.Signals | None:
        """Train runs side by side. If they fail, say so: the others are still wanted."""
        names = [member.name for member in group]
        places = ", ".join(str(self.runs.index(member) + 1) for member in group)
        self.begun.update(names)
        _say(f"\n==== {', '.join(names)} ({places} of {len(self.runs)}) ====\n")
        stopped_by = None
        try:
            stopped_by = self._train(group, self._program)
        except Failed as error:
            if processes.count() > 1 and not isinstance(error, Diverged):  # other processes may not have failed
                raise
            _say(str(error) if len(group) > 1 else f"{names[0]}: {error}")
        left = lambda: [member.name for member in group if not record.finished(self.workdir / member.folder)]
        self.failed += processes.agreed(left)
        return stopped_by


def _beside(member: Member, later: list[Member], workdir: Path) -> list[Member]:
    """Return those that can be trained beside a run: they differ in their seed alone, and are at the same step."""
    alike = [other for other in later if _but_for_seed(other) == _but_for_seed(member)]
    step = _step(workdir / member.folder) if alike else None
    return [other for other in alike if step is not None and _step(workdir / other.folder) == step]


def _but_for_seed(member: Member) -> dict:
    return member.config.to_dict() | {"seed": None}


def _step(directory: Path) -> int | None:
    """Return the step that a run continues from, or None if its checkpoints are damaged: then the run will say so."""
    try:
        return Checkpoints(directory, lambda _: None).last()
    except Failed:
        return None


def is_done(directory: Path) -> bool:
    """Return whether the run of a directory finished or diverged."""
    about = record.read(directory)
    return about is not None and record.done(about)


def _say(text: str) -> None:
    if processes.first():
        print(text, flush=True)


def _outcomes(runs: list[Member], workdir: Path) -> str:
    """Return in words how many runs have which outcome."""
    abouts = [record.read(workdir / member.folder) for member in runs]
    outcomes = ["not begun" if about is None else about["outcome"].partition(":")[0] for about in abouts]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    return f"{len(runs)} runs: {counts}. {workdir / 'results.jsonl'}"


# ---- their results ----

FORMAT = 1  # of a line of results: readers refuse lines of another format
KEPT = ("outcome", "metric", "figures", "steps", "flops", "measured", "began", "ended")  # of run.json
KEPT += ("command", "versions", "machine", "git", "notes")


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
    metrics = lines_of(directory / "metrics.jsonl")
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


def collect(runs: list[Member], workdir: Path) -> None:
    """Write results.jsonl. If several commands share a sweep, each writes again until nothing changes any more."""
    written = None
    while True:
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines(runs, workdir))
        if text == written:
            return
        replace(workdir / "results.jsonl", text)
        written = text


def add(runs: list[Member], workdir: Path, results: Path) -> None:
    """Append the lines of finished and diverged runs to a file that does not have them, with their curves."""
    append(results, partial(_new_lines, runs, workdir))


def _new_lines(runs: list[Member], workdir: Path, old: list[dict]) -> Iterator[dict]:
    key = lambda line: (line.get("run"), line.get("began"), line.get("config"))
    known = {key(line) for line in old}
    for line in lines(runs, workdir):
        if record.done(line) and key(line) not in known:
            yield line | {"curves": curves(workdir / line["folder"])}
