"""A run's directory: config.json, run.json, the plan, the metrics, the report; and a tracker beside it."""

import contextlib
import io
import itertools
import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import report
from experiments.errors import Failed, Mistake
from experiments.files import DRAFTS, lines, of_json, remove_drafts, replace, text, writable
from experiments.report.runs import at_once, is_line
from experiments.scale import trackers
from experiments.training import board, checkpoints, digest, lock, provenance
from experiments.training.digest import Identity
from experiments.training.events import Events, Pieces

FOLDERS = ("baseline", "checkpoints", "model", "profile", "tensorboard")  # of a run's directory
FILES = (  # likewise
    "config.json", "metrics.jsonl", "pictures.npz", "plan.html", "plan.txt", "report.html", "run.json", "run.lock",
    "text.json",
)  # fmt: skip
ASIDE = "unreadable-metrics.jsonl"  # the end of the name of a copy of metrics.jsonl with lines that no run writes
LABELS = ("tags", "note")  # of run.json: a run that continues keeps them, unless they are given again
SHOWING = 0.05  # the share of a run's time that reports may take while it goes on


class Record:
    """Writes what a run says of itself: config.json, run.json, plan.txt, plan.html, metrics.jsonl, TensorBoard events.

    A directory that holds a run of the same config is continued. `check` has refused the directory of another config.

    Args:
      workdir: The run's directory.
      identity: The identity of the run's config.
      about: What run.json says of the run, beside the times, the outcome and the versions.
      plan: The plan of the model.
      tell: Shows a line to the person who watches the run.
      tracker: Name of the service that gets the same numbers, or "". run.json keeps the id that the run has there.
    """

    def __init__(
        self, workdir: Path, identity: Identity, about: dict, plan: Any, tell: Callable[[str], None] = print,
        tracker: str = "",
    ):  # fmt: skip
        self.dir, self.metrics = workdir, workdir / "metrics.jsonl"
        with writable(workdir):
            for folder in (workdir, workdir / "model"):
                remove_drafts(folder)
            replace(workdir / "config.json", identity.text)
            replace(workdir / "plan.txt", f"{plan}\n")
            replace(workdir / "plan.html", report.plan_page(about["name"], plan._repr_html_()))
            before = read(workdir) or {}
            self.about = {
                **{name: before[name] for name in LABELS if name in before},
                **about,
                "began": provenance.now(),
                "ended": None,
                "outcome": "running",
                "versions": provenance.versions(),
                "machine": provenance.machine(),
                "git": provenance.git(),
                "sent": before.get("sent", {}),
            }
            self._write_about()
        self._identity, self._tell, self._began = identity, tell, time.monotonic()
        self._lines: Pieces | None = None
        self._events: Events | None = None
        self._tracker = tracker
        self._sender: trackers.Sender | None = None
        self._step = 0  # of the last line
        self._tell_once = True  # if a report cannot be written
        self._showing = 0.0  # seconds spent on reports while the run goes on

    def begin(self, step: int) -> None:
        """Open the files of numbers at a step. Lines of later steps are dropped, and a line that was cut off."""
        found = _lines(self.metrics)
        if len(found) < len(whole := lines(self.metrics)):
            names = itertools.chain([ASIDE], (f"{number}-{ASIDE}" for number in itertools.count(2)))
            copy = next(path for name in names if not os.path.lexists(path := self.dir / name))
            replace(copy, self.metrics.read_bytes())
            self._tell(
                f"{len(whole) - len(found)} lines of {self.metrics} are not of a run: left out. {copy} has them."
            )
        kept = [line for line in found if _reached(line) <= step and line["kind"] != "test"]
        replace(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        self._lines = Pieces(self.metrics)
        self._events = Events(self.dir / "tensorboard", step)
        self._step = step
        self._events.text(step, "command", board.block(self.about.get("command", "")))
        self._events.text(step, "config", board.block(self._identity.text))
        self._began -= max((line.get("seconds", 0.0) for line in kept), default=0.0)
        if self._tracker:
            self._open_tracker(step)
        if not kept:  # without figures a page takes no time
            self.show()
            self._showing = 0.0

    def _open_tracker(self, step: int) -> None:
        """Send to the tracker from a step on. A run that continues keeps its id; a run that starts gets a new one."""
        before = self.about["sent"] if step else {}
        self.about["sent"] = {self._tracker: secrets.token_hex(4)} | before
        self._write_about()
        run = trackers.Run(self.about["sent"][self._tracker], self.dir, self._identity.fields)
        self._sender = trackers.Sender(self._tracker, run, self._tell)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write a line of metrics. Lines that a full disk does not take are kept until it does.

        Args:
          kind: "train", "eval", "sparsity" or "test".
          step: The step after which a loss or score was taken; the step at whose beginning sparsity was measured.
          **values: Numbers, or tables of numbers by layer.
        """
        assert self._lines is not None
        assert self._events is not None
        self._step = step
        line = {"step": step, "seconds": round(self.elapsed(), 3), "kind": kind, **values}
        on_disk = self._lines.write(f"{json.dumps(line)}\n".encode())
        numbers = digest.flat(values, "/", f"{kind}/")
        self._events.write(step, numbers)
        if self._sender is not None:
            self._sender.write(step, numbers)
        if not on_disk and self._lines.late == 1:
            self._tell(f"{self.metrics} cannot be written: {self._lines.reason}. New lines are kept in memory.")

    def best(self, metric: str, higher: bool) -> tuple[int, float] | None:
        """Return the step and the score of the best evaluation so far; of equal ones the first. None: there is none.

        Scores of hardened weights count where there are any.
        """
        evaluations = [line for line in _lines(self.metrics) if line["kind"] == "eval"]
        scores = [(line["step"], line.get(f"hardened_{metric}", line.get(metric))) for line in evaluations]
        finite = [(step, score) for step, score in scores if score is not None and np.isfinite(score)]
        return min(finite, key=lambda found: -found[1] if higher else found[1], default=None)

    def median(self, name: str, least: int = 1) -> float | None:
        """Return the median of a figure over the lines of training that have it; None if fewer than `least` have it."""
        values = [line[name] for line in _lines(self.metrics) if line["kind"] == "train" and name in line]
        return statistics.median(values) if len(values) >= least else None

    def keep(self, summary: list, about: dict[str, Any], pictures: dict) -> None:
        """Keep what the report shows beside the curves.

        Args:
          summary: Rows (label, text).
          about: What run.json says of the end: "figures", the scores by name, with "validation_" in front of those of
            the validation split; "comparison", a text that compares the run with its baseline; "steps", "flops" and
            "measured".
          pictures: Arrays and texts, as the task's `pictures` returns them.
        """
        self.about |= {"summary": summary, **about}
        texts = {name: value for name, value in pictures.items() if name == "prompt" or isinstance(value, list)}
        arrays = {name: value for name, value in pictures.items() if name not in texts}
        if texts:
            replace(self.dir / "text.json", json.dumps(texts))
        if arrays:
            np.savez_compressed(data := io.BytesIO(), **arrays)
            replace(self.dir / "pictures.npz", data.getvalue())
        if self._events is not None:
            tested = [f"test/{name}" for name in about["figures"] if not name.startswith("validation_")]
            self._events.hparams(self._step, self._identity.fields, tested)
            try:
                board.write(self._events, self._step, pictures)
            except Exception as error:  # pictures of a user's own task may have any form
                self._tell(f"The pictures are not in TensorBoard: {type(error).__name__}: {error}.")

    def elapsed(self) -> float:
        """Return the seconds that the run has taken, including those before it was continued."""
        return time.monotonic() - self._began

    def close(self, outcome: str) -> None:
        """Close the files of numbers, and write the outcome: "finished", "interrupted", or "failed: ...".

        The report of a finished run is written first: when run.json says "finished", everything else is there.

        Raises:
          Failed: The run is not finished, because lines of metrics could not be written.
          OSError: The run is not finished, because its report or the outcome could not be written.
        """
        lost = self._close_lines()
        if lost and outcome == "finished":
            raise Failed(lost)
        if lost:
            self._tell(f"{lost}.")
        self.about |= {"ended": provenance.now(), "seconds": round(self.elapsed(), 3), "outcome": outcome}
        if outcome == "finished":
            report.write(self.dir, self.about)
            self._write_about()
        else:
            for write in (self._write_about, lambda: report.write(self.dir, self.about)):
                with contextlib.suppress(Exception):  # what ended the run is more important
                    write()
        if self._events is not None:  # what waits for TensorBoard may take the last free space of a disk
            self._events.close()
            self._events = None
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.close(outcome, {f"summary/{label}": text for label, text in self.about.get("summary", ())})

    def _close_lines(self) -> str:
        """Close metrics.jsonl, and return which lines were lost, or ""."""
        if self._lines is None:
            return ""
        numbers, self._lines = self._lines, None
        lost = numbers.close()
        return f"{lost} lines of {self.metrics} could not be written: {numbers.reason}" if lost else ""

    def show(self) -> None:
        """Write report.html of a run that goes on, unless such pages have taken more than a share of its time.

        An error does not end the run. It is reported once.
        """
        if self._showing * at_once(self.about) > SHOWING * self.elapsed():
            return
        began = time.monotonic()
        try:
            report.write(self.dir, self.about)
        except Exception as error:
            if self._tell_once:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                self._tell(f"{self.dir / 'report.html'} cannot be written now: {reason}. The run continues.")
            self._tell_once = False
        self._showing += time.monotonic() - began

    def _write_about(self) -> None:
        replace(self.dir / "run.json", json.dumps(self.about, indent=1))


class Silent:
    """The record of a process that leaves writing to the first process: it does nothing."""

    begin = write = best = median = keep = close = show = lambda *_, **__: None
    elapsed = lambda _: 0.0


def check(workdir: Path, identity: Identity) -> None:
    """Refuse, before anything is done, a directory that cannot be written or that holds something else."""
    if workdir.exists() and not workdir.is_dir():
        raise Mistake(f"--workdir={workdir} is a file, not a directory.")
    with writable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    links = [name for name in FOLDERS if (workdir / name).is_symlink()]
    if links:
        raise Mistake(
            f"--workdir={workdir}: {links[0]} in it is a link, and a run follows no links, because it removes files. "
            "Give another --workdir, which may itself be a link."
        )
    if read(workdir) is None:
        _refuse_foreign(workdir, identity)
    begun = checkpoints.steps(workdir) or lines(workdir / "metrics.jsonl")
    if begun or finished(workdir):
        digest.refuse_another(workdir, identity)


def _refuse_foreign(workdir: Path, identity: Identity) -> None:
    """Refuse a directory that holds more than what a process leaves that was killed before it wrote run.json."""
    begun = (workdir / "config.json").is_file() and digest.recorded(workdir).lasting == identity.lasting
    known = {*FILES, *FOLDERS} if begun else {lock.NAME, "baseline"}  # a baseline is trained first
    known |= {p.name for p in workdir.glob(DRAFTS)} | {p.name for p in workdir.glob(f"*{ASIDE}") if begun}
    foreign = sorted(p.name for p in workdir.iterdir() if p.name not in known)
    if foreign:
        raise Mistake(
            f"--workdir={workdir} holds {foreign[0]!r}, which is not of a run. A run replaces and removes files in its "
            "directory, so give it a new or an empty one."
        )


def read(workdir: Path) -> dict | None:
    """Return the run.json of a directory, or None if no run has begun there."""
    try:
        about = of_json(text(workdir / "run.json"))
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and isinstance(about.get("outcome"), str) else None


def finished(workdir: Path) -> bool:
    """Return whether a directory holds a finished run."""
    about = read(workdir)
    return about is not None and about["outcome"] == "finished"


def labels(tags: list[str] | None, note: str | None) -> dict[str, Any]:
    """Return the tags and the note of a command line as run.json keeps them, without those that are not given.

    >>> labels(["paper, odd", "paper"], None)
    {'tags': ['paper', 'odd']}
    """
    words = [word.strip() for tag in tags or () for word in tag.split(",")]
    given = {"tags": None if tags is None else list(dict.fromkeys(filter(None, words))), "note": note}
    return {name: value for name, value in given.items() if value is not None}


def complete(workdir: Path, given: dict[str, Any]) -> None:
    """Give a run that has ended what is new in its run.json, and write its report if that is missing.

    Args:
      workdir: The run's directory.
      given: New tags, a new note, or a new comparison with its baseline.
    """
    about = read(workdir) or {}
    changed = about | given != about
    with writable(workdir):
        if changed or not (workdir / "report.html").exists():
            report.write(workdir, about | given)
        if changed:
            replace(workdir / "run.json", json.dumps(about | given, indent=1))


def done(about: dict) -> bool:
    """Return whether a run need not be run again: it is finished, or it diverged and would diverge again."""
    return about["outcome"] == "finished" or about["outcome"].startswith("diverged")


def is_done(directory: Path) -> bool:
    """Return whether the run of a directory finished or diverged."""
    about = read(directory)
    return about is not None and done(about)


def _lines(metrics: Path) -> list[dict]:
    """Return the lines of metrics.jsonl that are of a run."""
    return [line for line in lines(metrics) if is_line(line)]


def _reached(line: dict) -> int:
    """Return how many steps were done when a line of metrics was complete: sparsity is measured around its step."""
    return line["step"] + 1 if line["kind"] == "sparsity" else line["step"]
