"""Many runs of one config file: those that its `get_sweep()` lists, each in a directory of its own.

Finished runs are not done again, interrupted runs continue, and runs that another process writes are left to it. Runs
that differ in their seed alone share one compiled program. Those of them that are at the same step may be trained side
by side in it. `results.jsonl` holds a line for every run that has ended. A file of results elsewhere gets the lines
that it does not have; a run whose line is there, or in a file beside it, is not trained again.
"""

import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from experiments import collected
from experiments.errors import Diverged, Failed, Mistake, Stopped, Taken, visible
from experiments.files import writable
from experiments.members import Member, at, refuse_other_names
from experiments.report import compare_page
from experiments.report.words import duration
from experiments.scale import processes
from experiments.training import digest, lock, record
from experiments.training.checkpoints import Checkpoints


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
        if record.is_done(workdir / member.folder):
            digest.refuse_another(workdir / member.folder, member.identity)
    refuse_other_names(runs, workdir)
    collected.refuse_foreign(workdir)
    sweep = _Sweep(runs, workdir, make, train)
    if results is not None:
        sweep.reuse(runs if index is None else [runs[index]], results)
    for number in sweep.numbers(index):
        member, group, stopped_by = runs[number], [], None
        if not processes.agreed(partial(sweep.done, member)):
            group, stopped_by = sweep.train_from(number, at_once, alone=index is not None)
        else:
            if processes.first():
                record.complete(workdir / member.folder, labels or {})
            if not processes.agreed(partial(record.finished, workdir / member.folder)):
                sweep.failed.append(member.name)  # it diverged, in an earlier command or in another process
        if processes.first():
            with writable(workdir):
                collected.collect(runs, workdir)
            if results is not None:
                sweep.add(results)
        if stopped_by and index is None and processes.agreed(sweep.unfinished):
            names = ", ".join(member.name for member in group)
            text = f"interrupted by {stopped_by.name} after the last step of {names}."
            raise Stopped(f"{text} The same command continues with the others.", stopped_by)
    own = [member for member in runs if member.name not in sweep.reused]
    if own:
        _say(f"\n{_outcomes(own, workdir)}")
    if len(own) > 1 and index is None and processes.first():
        _compare(workdir)
    if sweep.failed:
        raise Failed(
            f"{len(sweep.failed)} of the runs failed: {', '.join(sweep.failed)}. The reasons are above, and in the "
            "run.json of each."
        )
    if sweep.unwritten:
        raise Failed(f"{sweep.unwritten} Run the same command again: it adds the lines, and repeats no run.")
    left = [member.name for member in sweep.left if not sweep.done(member)]
    if left:
        raise Failed(
            f"not done: {', '.join(left)}. Other processes are training these runs, or runs beside them. Wait until "
            "they end, and give the same command again."
        )


class _Sweep:
    """The runs of a sweep, which of them have begun and failed, and the last program."""

    def __init__(self, runs: list[Member], workdir: Path, make: Callable, train: Callable):
        self.runs, self.workdir, self._make, self._train = runs, workdir, make, train
        self.begun: set[str] = set()
        self.failed: list[str] = []
        self.left: list[Member] = []  # to other processes
        self.took: list[float] = []  # seconds of each run that this process trained
        self.reused: dict[str, str] = {}  # runs that are not trained, and the file that has their results
        self.unwritten = ""  # why the file of results has not got all lines
        self._program: Any = None
        self._made_for: Member | None = None

    def done(self, member: Member) -> bool:
        """Return whether a run finished or diverged, in this command or another."""
        return record.is_done(self.workdir / member.folder)

    def numbers(self, index: int | None) -> Iterator[int]:
        """Yield the numbers of the runs to do: first all, then those that another process had and did not finish.

        Args:
          index: The number of the only run to do, or None for all.
        """
        for number, member in enumerate(self.runs):
            if index in (None, number) and member.name not in self.begun and member.name not in self.reused:
                yield number
        for member in tuple(self.left):
            if not self.done(member) and not lock.is_taken(self.workdir / member.folder):
                self.left.remove(member)
                yield self.runs.index(member)

    def unfinished(self) -> bool:
        """Return whether a run is left that neither finished nor failed."""
        known = {*self.reused, *self.failed}
        return any(member.name not in known and not self.done(member) for member in self.runs)

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
            if processes.count() == 1 and not alone:  # now, because it takes seconds to make a program
                lock.refuse_taken(self.workdir / group[0].folder)
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
        except (Exception, SystemExit) as error:  # SystemExit: of a user's own code
            mistake = isinstance(error, Mistake)
            of_all = mistake and not earlier and not any(map(self.done, self.runs))  # likely, if it is of the first
            if alone or processes.count() > 1 or isinstance(error, Stopped) or of_all:
                raise
            if not mistake:
                traceback.print_exc()
            names = [member.name for member in group]
            said = error if mistake else f"{type(error).__name__}: {error}"
            _say(f"{', '.join(names)}: {said}")
            self._program = self._made_for = None
            self.begun.update(names)
            self.failed += [name for name in names if name not in self.failed]
        return group, None

    def reuse(self, wanted: list[Member], results: Path) -> None:
        """Find the runs whose results are known from a file, and say so: they are not trained."""
        self.reused = processes.agreed(partial(collected.reused, wanted, self.workdir, results))
        if self.reused:
            found = list(self.reused.values())
            counts = ", ".join(f"{found.count(path)} in {path}" for path in dict.fromkeys(found))
            _say(
                f"{len(found)} of {len(wanted)} runs are not trained, because their results are known: {counts}. To "
                f"train them anyway, write --results=FILE in another folder."
            )

    def add(self, results: Path) -> None:
        """Append new lines to a file of results. If it cannot be written, say so once."""
        try:
            collected.add(self.runs, self.workdir, results)
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
        return [member, *islice(_beside(member, self._left_from(number + 1), self.workdir), at_once - 1)]

    def _left_from(self, number: int) -> list[Member]:
        """Return the runs from a number on that are neither begun nor done."""
        known = self.begun | self.reused.keys()
        return [member for member in self.runs[number:] if member.name not in known and not self.done(member)]

    def train(self, group: list[Member]) -> signal.Signals | None:
        """Train runs side by side. If they fail, say so: the others are still wanted."""
        names = [member.name for member in group]
        places = ", ".join(str(self.runs.index(member) + 1) for member in group)
        self.begun.update(names)
        _say(f"\n==== {', '.join(names)} ({places} of {len(self.runs)}){self._estimate(len(group))} ====\n")
        stopped_by, began = None, time.monotonic()
        try:
            stopped_by = self._train(group, self._program)
        except Failed as error:
            if processes.count() > 1 and not isinstance(error, Diverged):  # other processes may not have failed
                raise
            _say(str(error) if len(group) > 1 else f"{names[0]}: {error}")
        left = lambda: [member.name for member in group if not record.finished(self.workdir / member.folder)]
        self.failed += processes.agreed(left)
        self.took += [(time.monotonic() - began) / len(group)] * len(group)
        return stopped_by

    def _estimate(self, count: int) -> str:
        """Return in words how long this process takes for the next runs and all that are left after them.

        Args:
          count: The number of the next runs.
        """
        if not self.took:
            return ""
        left = count + len(self._left_from(0))
        return f", about {duration(left * statistics.mean(self.took))} left"


def _beside(member: Member, later: list[Member], workdir: Path) -> Iterator[Member]:
    """Yield those that can be trained beside a run.

    They differ in their seed alone, they are at the same step, and no other process trains them.
    """
    alike = [other for other in later if _but_for_seed(other) == _but_for_seed(member)]
    step = _step(workdir / member.folder) if alike else None
    for other in alike:
        directory = workdir / other.folder
        if step is not None and _step(directory) == step and not lock.is_taken(directory):
            yield other


def _but_for_seed(member: Member) -> dict:
    return member.config.to_dict() | {"seed": None}


def _step(directory: Path) -> int | None:
    """Return the step that a run continues from, or None if its checkpoints are damaged: then the run will say so."""
    try:
        return Checkpoints(directory, lambda _: None).last()
    except Failed:
        return None


def _say(text: str) -> None:
    if processes.first():
        print(visible(text), flush=True)


def _compare(workdir: Path) -> None:
    """Write the comparison of the runs of a sweep, and say where it is, or why there is none."""
    try:
        with writable(workdir):
            _say(str(compare_page.write(workdir)))
    except (Mistake, Failed) as error:
        _say(f"There is no comparison of the runs: {error}")


def _outcomes(runs: list[Member], workdir: Path) -> str:
    """Return in words how many runs have which outcome."""
    abouts = [record.read(workdir / member.folder) for member in runs]
    outcomes = ["not begun" if about is None else about["outcome"].partition(":")[0] for about in abouts]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    return f"{len(runs)} runs: {counts}. {workdir / 'results.jsonl'}"
