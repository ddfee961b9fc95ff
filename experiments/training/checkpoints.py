"""The states that a run can go on from, by Orbax, in ``checkpoints/`` of its directory.

::

    checkpoints/40/         the state after 40 steps
    checkpoints/40.json     its seal, written last: sums of its files, whether it was the best yet, what the last steps said

What has no seal was never finished, and is no checkpoint. What does not match its seal is put aside, and the one before it
serves. The last two are kept, and the best.
"""

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from experiments.errors import Failed
from experiments.files import replace
from experiments.scale import processes


class Restored(NamedTuple):
    """What a run goes on from."""

    step: int
    state: Any
    seen: list[dict]  # what the steps since the last line of metrics said


class Checkpoints:
    """Saving goes on beside training, and what fails of it is told and not raised: the run and the last good checkpoint stay."""

    def __init__(self, workdir: Path, tell: Callable[[str], None] = print):
        self.directory, self._tell = (workdir / "checkpoints").absolute(), tell
        self._thread, self._writing, self.lost = ThreadPoolExecutor(1), Future(), None
        self._writing.set_result(None)

    @cached_property
    def _orbax(self):
        """Made when first something is saved or restored: it has threads of its own."""
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.CRITICAL)  # what Orbax has to say is told here, once
        return ocp.StandardCheckpointer()

    # ---- saving ----

    def save(self, step: int, state, seen: list[dict], best: bool) -> None:
        """Save a state. It waits for the one before, and for the copy to the host."""
        self.wait()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._orbax.save(self.directory / str(step), state._asdict(), force=True)
        except (OSError, ValueError) as error:
            self._failed(step, error)
            return
        seal = {"best": best, "seen": list(seen)}  # written while later steps say more
        self._writing = self._thread.submit(self._finish, step, seal)

    def _finish(self, step: int, seal: dict) -> None:
        try:
            self._orbax.wait_until_finished()  # of all processes
            self.lost = None
            if not processes.first():
                return
            seal["sums"] = _sums(self.directory / str(step))
            replace(self.directory / f"{step}.json", json.dumps(seal))
            self._clear()
        except Exception as error:  # whatever Orbax makes of a full disk
            self._failed(step, error)

    def _failed(self, step: int, error: Exception) -> None:
        full = isinstance(error, OSError) and error.errno == 28 or "RESOURCE_EXHAUSTED" in str(error)
        why = "no space is left on the disk" if full else " ".join(str(error).split())[:300]
        self.lost = f"The checkpoint of step {step:,} could not be written: {why}."
        if processes.first():
            with contextlib.suppress(OSError):
                (self.directory / f"{step}.json").unlink(missing_ok=True)
                self._clear()
        if processes.count() > 1:  # the others wait for this one
            raise Failed(self.lost.rstrip("."))
        self._tell(f"{self.lost} {self.kept()} Training goes on.")

    def _clear(self) -> None:
        """Remove what is not to be kept, and what was never finished. Seals go first."""
        steps, best = self.steps(), self.steps(best=True)
        kept = {*steps[-2:], *best[-1:]}
        for step in set(steps) - kept:
            (self.directory / f"{step}.json").unlink()
        for path in self.directory.iterdir():
            name = path.name.partition(".")[0]
            if path.is_dir() and name.isdigit() and (int(name) not in kept or path.name != name):
                shutil.rmtree(path, ignore_errors=True)

    def wait(self) -> None:
        """Until what was begun is written."""
        self._writing.result()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        if "_orbax" in vars(self):
            self._orbax.close()

    def dump(self, state) -> None:
        """Write what a run that diverged is now, for a person to look at: no run goes on from it."""
        self.wait()
        with contextlib.suppress(Exception):  # what failed comes first
            step = int(state.step)
            self._orbax.save(self.directory / f"failed-{step}", state._asdict(), force=True)
            self._orbax.wait_until_finished()
            self._tell(f"The state after step {step:,} is in {self.directory / f'failed-{step}'}, to be looked at.")

    # ---- restoring ----

    def steps(self, best: bool = False) -> list[int]:
        """The steps of sealed checkpoints; or of those that were the best when they were saved."""
        found = sorted(int(p.stem) for p in self.directory.glob("*.json") if p.stem.isdigit())
        return [step for step in found if not best or _seal(self._path(step, ".json")).get("best")]

    def last(self) -> int:
        """The step of the last checkpoint that is as it was written, or 0."""
        return self._sound(best=False, mend=False)[0]

    def restore(self, shapes, best: bool = False, mend: bool = True) -> Restored:
        """The last checkpoint that is as it was written, or the best; of step 0 and without a state, where there is none.
        ``mend`` puts aside what is not: of a run that goes on, but not of another's."""
        step, seen = processes.agreed(lambda: self._sound(best, mend))
        if not step:
            return Restored(0, None, [])
        try:
            state = self._orbax.restore(self._path(step), shapes._asdict())
        except Exception as error:  # whatever Orbax and TensorStore make of it; its files are as they were written
            why = " ".join(str(error).split())[:300]
            raise Failed(f"{self._path(step)} holds no state of this model and optimizer: {why}") from error
        return Restored(step, type(shapes)(**state), seen)

    def _sound(self, best: bool, mend: bool) -> tuple[int, list[dict]]:
        """The last step whose files are as they were written, and what its seal has of the steps before it."""
        steps = self.steps(best)
        for step in reversed(steps):
            seal = _seal(self._path(step, ".json"))
            if not (why := _unsound(self._path(step), seal)):
                return step, seal["seen"]
            self._tell(f"The checkpoint of step {step:,} cannot be read{self._aside(step) if mend else ''}: {why}.")
        if steps:
            raise Failed(
                f"None of the checkpoints in {self.directory} can be read. To begin anew, remove that directory, or give another --workdir"
            )
        return 0, []

    def _aside(self, step: int) -> str:
        """Put a checkpoint aside, and say where."""
        aside = self._path(step).with_name(f"unreadable-{step}")
        shutil.rmtree(aside, ignore_errors=True)
        self._path(step, ".json").unlink()
        if self._path(step).exists():
            os.replace(self._path(step), aside)
        return f", and is put aside as {aside}"

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"

    def kept(self) -> str:
        """In words, for who looks for what is left."""
        steps = self.steps()
        return (
            f"The checkpoint of step {steps[-1]:,} is kept in {self.directory}."
            if steps
            else "No checkpoint was written before."
        )


def _seal(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _sums(directory: Path) -> dict[str, int]:
    """A sum of every file."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): _sum(p) for p in files}


def _sum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            found = zlib.crc32(part, found)
    return found


def _unsound(directory: Path, seal: dict) -> str | None:
    """What is not as the seal says; None if all is."""
    if not {"sums", "seen"} <= seal.keys():
        return "its seal cannot be read"
    for name, wanted in seal["sums"].items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if _sum(path) != wanted:
            return f"{name} is not what was written"
    return None
