"""A run: its config, its directory, and how far it has come."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.errors import Diverged, Stopped
from experiments.scale import processes
from experiments.training import baseline as baselines, checkpoints, digest, lock, record
from experiments.training.baseline import Baseline
from experiments.training.checkpoints import Checkpoints
from experiments.training.program import Program
from experiments.training.record import Record, Silent
from experiments.training.screen import Screen


class Run:
    """One run, trained alone or side by side with others.

    Args:
      name: Name of the run on the screen and in its report.
      config: All settings of the run.
      workdir: The run's directory.
      labels: The tags and the note that it gets.
      baseline: The run that it is compared with, if its config file names one.
    """

    record: Record | Silent
    checkpoints: Checkpoints

    def __init__(
        self, name: str, config: ConfigDict, workdir: Path, labels: dict[str, Any] | None = None,
        baseline: Baseline | None = None,
    ):  # fmt: skip
        self.name, self.config, self.workdir, self.labels, self.baseline = name, config, workdir, labels or {}, baseline
        self.identity = digest.identity(config)
        self.pending: list[dict] = []  # figures of the steps since the last line of metrics
        self.best: tuple[int, float] | None = None  # the step and the score of the best evaluation so far

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep other processes from writing to the run's directory inside the context, unless it is finished.

        Raises:
          Mistake: If the directory cannot hold this run, or if another process writes to it.
        """
        record.check(self.workdir, self.identity)
        if record.finished(self.workdir):  # its directory is only read, except for new labels
            record.complete(self.workdir, self.labels | self.comparison(record.read(self.workdir) or {}))
            yield
            return
        with lock.held(self.workdir):
            record.check(self.workdir, self.identity)  # another process may have had a run here in between
            yield

    def comparison(self, about: dict) -> dict[str, str]:
        """Return what run.json says of a finished run beside its baseline, if it has one."""
        if self.baseline is None or "figures" not in about:
            return {}
        told = (about["metric"], about["figures"], about["flops"], about["measured"])
        return {"comparison": baselines.comparison(self.baseline, self.workdir, *told)}

    def open(self, about: dict, program: Program, screen: Screen, tracker: str) -> None:
        """Begin to write to the run's directory.

        Args:
          about: What run.json says of the run.
          program: The program of the run.
          screen: Shows what goes wrong with writing.
          tracker: Name of the service that gets the run's numbers, or "".
        """
        if processes.first():
            about = {"name": self.name, **about, **self.labels}
            self.record = Record(self.workdir, self.identity, about, program.plan, screen.line, tracker)
        else:
            self.record = Silent()
        self.checkpoints = Checkpoints(self.workdir, screen.line)

    def improves(self, step: int, score: float, higher: bool) -> bool:
        """Return whether the score after a step is the best so far, and keep it if it is."""
        better = self.best is None or (score > self.best[1] if higher else score < self.best[1])
        if better:
            self.best = step, score
        return better

    def end(self, error: BaseException) -> None:
        """End the run because of an error. What is written stays, and run.json says why the run ended."""
        if processes.count() == 1 or isinstance(error, Stopped | Diverged):
            self.checkpoints.close()  # after other errors, not all processes are there to finish a checkpoint
        if stopped(error):
            outcome = "interrupted"
        elif isinstance(error, Diverged):
            outcome = f"diverged: {error or repr(error)}"
        else:
            outcome = f"failed: {error or repr(error)}"
        with contextlib.suppress(Exception):  # the run's own error is more important
            self.record.close(outcome)

    def explain(self, error: Exception) -> str:
        """Return in words what ended the run, which checkpoint is kept, and what a person may do."""
        reason = str(error)
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        text = f"{reason.rstrip('.')}. {self.checkpoints.kept_message()}"
        if isinstance(error, Diverged) and checkpoints.steps(self.workdir):
            text += (
                " To continue from it with other settings, start another run, with --workdir=ANOTHER "
                f"--from={self.workdir} and a change, such as a smaller --config.learning_rate.peak."
            )
        return text


def stopped(error: BaseException) -> bool:
    """Return whether an error means that a person or a machine told the run to stop."""
    return isinstance(error, KeyboardInterrupt | Stopped)
