"""The checkpoints of a run: the states that it can continue from, in `checkpoints/` of its directory.

`orbax.checkpoint.CheckpointManager` writes them in the background, commits each by a rename, and removes old ones. It
does not notice a bit that has flipped, so a file of checksums is written among the others before the commit::

    checkpoints/40/state/            the state after 40 steps
    checkpoints/40/checksums.json    checksums of the files of the state, and of itself

The last two checkpoints and the best one are kept. A damaged checkpoint is renamed to `unreadable-40`, and the run
continues from the last valid one.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.errors import Failed
from experiments.files import FULL, of_json, replace, text
from experiments.scale import processes

CHECKSUMS = "checksums.json"
PARTS = {"_CHECKPOINT_METADATA", "commit_success.txt", "state", CHECKSUMS}  # of a checkpoint
BEING_WRITTEN = ".orbax-checkpoint-tmp"  # ends the name of a folder that Orbax has not committed


class Checksums(NamedTuple):
    """The content of the file of checksums of a checkpoint. A checkpoint that has this file is complete."""

    best: bool  # it was the best when it was saved
    pending: list[dict]  # figures of the steps since the last line of metrics
    files: dict[str, int]  # the CRC-32 of every file of the state


def write_checksums(folder: Path, best: bool, pending: list[dict]) -> None:
    """Write the file of checksums of a checkpoint whose state is written."""
    files = sorted(file for file in (folder / "state").rglob("*") if file.is_file())
    made = Checksums(best, pending, {str(file.relative_to(folder)): _checksum(file) for file in files})
    replace(folder / CHECKSUMS, json.dumps({**made._asdict(), "own": _own(made._asdict())}))


def read_checksums(folder: Path) -> Checksums | None:
    """Return the content of the file of checksums of a checkpoint, or None if it cannot be read."""
    try:
        content = of_json(text(folder / CHECKSUMS))
        whole = content["own"] == _own(content) and content["files"]
        return Checksums(*(content[name] for name in Checksums._fields)) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(folder: Path) -> str:
    """Return in words how the files of a checkpoint differ from its checksums, or "" if they do not."""
    written = read_checksums(folder)
    if written is None:
        return f"{CHECKSUMS} cannot be read"
    for name, wanted in written.files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _checksum(folder / name) != wanted:
            return f"{name} is not what was written"
    return ""


def steps(workdir: Path, best: bool = False) -> list[int]:
    """Return the steps of all checkpoints of a run, in order; with `best`, of those that were the best when saved."""
    folders = [path.parent for path in (workdir / "checkpoints").glob("*/state")]
    found = sorted(int(folder.name) for folder in folders if folder.name.isdecimal() and not folder.is_symlink())
    written = lambda step: read_checksums(workdir / "checkpoints" / str(step))
    return [step for step in found if (sums := written(step)) and sums.best] if best else found


def _own(content: Mapping[str, Any]) -> int:
    """Return the checksum of the file of checksums itself."""
    return zlib.crc32(json.dumps([content[name] for name in Checksums._fields]).encode())


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            total = zlib.crc32(part, total)
    return total


class Restored(NamedTuple):
    """A restored checkpoint. Without a checkpoint: step 0, state None."""

    step: int
    state: Any
    pending: list[dict]  # metrics of steps that are not yet written to metrics.jsonl


class Checkpoints:
    """Saves and restores the states of a run.

    A failed save is reported, and training continues; with several processes it raises `Failed`.

    Args:
      workdir: The run's directory.
      report: Shows a line to the person who watches the run.
    """

    def __init__(self, workdir: Path, report: Callable[[str], None] = print):
        self.workdir, self.directory = workdir, (workdir / "checkpoints").absolute()
        self.lost: str | None = None  # why the last save failed
        self._report = report
        self._writing: tuple[int, list[dict], bool] | None = None  # step, pending and best of the last save

    @functools.cached_property
    def _manager(self):
        """Orbax's manager. It has threads of its own, so it is made when something is first saved."""
        import orbax.checkpoint as ocp

        _silence_threads()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            cleanup_tmp_directories=True,  # of a process that was killed
            lightweight_initialize=True,
            save_root_metadata=False,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._complete),
        )
        handlers = {"state": ocp.PyTreeCheckpointHandler()}
        return ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def _drop_manager(self) -> None:
        """Close Orbax's manager, if there is one. It raises the errors of its threads, one at each call."""
        manager = vars(self).pop("_manager", None)
        for _ in range(5 if manager else 0):
            with contextlib.suppress(Exception):  # `_failed` has reported it
                manager.close()
                return

    # ---- writing ----

    def save(self, step: int, state: Any, pending: list[dict], best: bool) -> None:
        """Write the checkpoint of a training step.

        The order of writes (`save` returns after number 2, and the rest goes on in threads of Orbax):

        0. The loop has taken in the figures of all steps. Those without a line in metrics.jsonl yet are `pending`.
        1. The checkpoint before this one is finished: `wait`.
        2. Orbax copies the state to the host.
        3. All processes write it to a folder of another name.
        4. Process 0 writes the file of checksums into it, and Orbax gives it its name: this commits it.
        5. Orbax removes old checkpoints: `should_preserve`.

        A run that is killed at any moment therefore leaves valid checkpoints, and what is left of others.

        Args:
          step: Number of steps that are done.
          state: The state after them. It may be donated as soon as this returns.
          pending: Metrics of steps that are not yet written to metrics.jsonl.
          best: True if the evaluation after this step is the best so far.
        """
        self.wait()
        import orbax.checkpoint as ocp

        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self._path(step)):
                raise OSError(f"{self._path(step)} is there, and is not of this run")
            with tempfile.TemporaryDirectory(prefix=f"{step}{BEING_WRITTEN}-", dir=self.directory):
                pass  # where no folder can be made, Orbax would wait for one for minutes
            self._writing = step, list(pending), best  # later steps append to the list
            state = ocp.args.PyTreeSave(state._asdict())
            self._manager.save(step, args=ocp.args.Composite(state=state), force=True)
        except (OSError, ValueError) as error:
            self._failed(step, error)

    def _complete(self) -> None:
        """Write the file of checksums. Orbax calls this in process 0, before the commit."""
        assert self._writing is not None
        step, pending, best = self._writing
        write_checksums(self.directory / f"{step}{BEING_WRITTEN}", best, pending)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Tell Orbax which checkpoints stay, the new one among them: the last two, the best, and what is not the run's.

        This is called while the new one is written. The others are removed after its commit.
        """
        assert self._writing is not None
        new, _, new_is_best = self._writing
        best = [new] if new_is_best else steps(self.workdir, best=True)
        kept = {*steps(self.workdir)[-1:], new, *best[-1:]}
        return [info.step in kept or not _is_own(self._path(info.step)) for info in checkpoints]

    def _failed(self, step: int, error: Exception) -> None:
        """Report a failed save, and remove its files.

        With several processes, raise, because the others are waiting.
        """
        self._writing = None
        full = isinstance(error, OSError) and error.errno in FULL or "RESOURCE_EXHAUSTED" in str(error)
        reason = "no space is left on the disk" if full else " ".join(str(error).split())[:300]
        self.lost = f"The checkpoint of step {step:,} could not be written: {reason}."
        if processes.count() > 1:
            raise Failed(self.lost.rstrip("."))
        self._drop_manager()  # otherwise the next save raises what is left of these errors
        for attempt in range(20):  # a thread of Orbax may still be writing
            if not (left := list(self.directory.glob(f"*{BEING_WRITTEN}*"))):
                break
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.05 * attempt)
        self._report(f"{self.lost} {self.kept_message()} Training continues.")

    def wait(self) -> None:
        """Wait until the save that was begun is finished."""
        if self._writing is None:
            return
        try:
            self._manager.wait_until_finished()  # waits for all processes
            self._writing = self.lost = None
        except Exception as error:  # Orbax raises many types of errors when the disk is full
            self._failed(self._writing[0], error)

    def close(self) -> None:
        """Finish writing, and end the threads."""
        self.wait()
        self._drop_manager()

    def dump(self, state: Any) -> None:
        """Write the state of a diverged run to `failed-STEP/`, for debugging. It cannot be restored."""
        import orbax.checkpoint as ocp

        self.wait()
        with contextlib.suppress(Exception):  # the error of the run is more important
            step = int(state.step)
            path = self.directory / f"failed-{step}"
            with ocp.StandardCheckpointer() as writer:
                writer.save(path, state._asdict(), force=True)
            self._report(f"The state after step {step:,} is in {path}, to be looked at.")

    # ---- restoring ----

    def last(self, best: bool = False) -> int:
        """Return the step of the last valid checkpoint, or 0. With `best`, only those count that were the best."""
        return self._last_valid(best, rename_damaged=False)[0]

    def restore(self, shapes: Any, best: bool = False, rename_damaged: bool = True) -> Restored:
        """Read the last valid checkpoint.

        Args:
          shapes: The state as `jax.ShapeDtypeStruct`s with shardings.
          best: Read the last valid one of those that were the best when they were saved.
          rename_damaged: Rename damaged checkpoints. Use it only for the run's own directory.

        Raises:
          Failed: If there are checkpoints but none is valid, or if the state has other shapes.
        """
        step, pending = processes.agreed(lambda: self._last_valid(best, rename_damaged))
        fields = self._read(step, shapes._asdict(), "model and optimizer") if step else {}
        return Restored(step, type(shapes)(**fields) if step else None, pending)

    def restore_fields(self, fields: dict[str, Any], best: bool = False) -> tuple[int, dict[str, Any]]:
        """Read some fields of the state of the last valid checkpoint, on any devices. The others are not read.

        Args:
          fields: The fields as `jax.ShapeDtypeStruct`s with shardings, by name.
          best: Read the last valid one of those that were the best when they were saved.

        Returns:
          The step and the fields; or 0 and {} if there is no checkpoint.

        Raises:
          Failed: As `restore`.
        """
        step, _ = processes.agreed(lambda: self._last_valid(best, rename_damaged=False))
        return step, self._read(step, fields, "model") if step else {}

    def _read(self, step: int, fields: dict[str, Any], owner: str) -> dict[str, Any]:
        """Read fields of the state of a valid checkpoint. Any error is `Failed`."""
        import orbax.checkpoint as ocp

        try:
            handler = ocp.PyTreeCheckpointHandler()
            with ocp.Checkpointer(handler) as reader:
                stored = handler.metadata(self._path(step) / "state").tree
                _compare({name: stored.get(name) for name in fields}, fields)
                places = ocp.checkpoint_utils.construct_restore_args(fields)
                args = ocp.args.PyTreeRestore(item=fields, restore_args=places, partial_restore=True)
                return reader.restore(self._path(step) / "state", args=args)
        except Exception as error:  # many types of errors; the files are as they were written
            reason = " ".join(str(error).split())[:300]
            raise Failed(f"{self._path(step)} holds no state of this {owner}: {reason}") from error

    def _last_valid(self, best: bool, rename_damaged: bool) -> tuple[int, list[dict]]:
        """Return the step of the last valid checkpoint and the metrics that it holds, or step 0 if there is none."""
        found = steps(self.workdir, best)
        for step in reversed(found):
            damaged = damage(self._path(step))
            if not damaged and (written := read_checksums(self._path(step))):
                return step, written.pending
            moved = f" It was renamed to {self._rename_damaged(step)}." if rename_damaged else ""
            self._report(f"The checkpoint of step {step:,} is damaged: {damaged}.{moved}")
        if found:
            renamed = "They were renamed, so the same command starts from the beginning. Or give another --workdir"
            hint = renamed if rename_damaged else "Give the directory of another run"
            raise Failed(f"None of the checkpoints in {self.directory} can be read. {hint}")
        return 0, []

    def _rename_damaged(self, step: int) -> Path:
        """Rename a damaged checkpoint, and return its new name."""
        names = (f"unreadable-{step}{more}" for more in ("", *(f"-{number}" for number in range(2, 1000))))
        aside = next(path for name in names if not os.path.lexists(path := self.directory / name))
        os.replace(self._path(step), aside)
        return aside

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def kept_message(self) -> str:
        """Return a sentence about which checkpoint is kept, for a person."""
        kept = steps(self.workdir)
        if not kept:
            return "There is no checkpoint to continue from."
        return f"The checkpoint of step {kept[-1]:,} is kept in {self.directory}."


def _is_own(folder: Path) -> bool:
    """Return whether a folder holds nothing but a checkpoint, or what is left of one that was being removed."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return names <= PARTS and (CHECKSUMS not in names or read_checksums(folder) is not None)


def _compare(stored: Any, wanted: Any) -> None:
    """Refuse a stored state whose arrays have other names, shapes or dtypes than the wanted ones.

    Orbax finds some of the differences too, but only while it reads.
    """
    arrays = [
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (stored, wanted)
    ]
    for name in dict.fromkeys([*arrays[1], *arrays[0]]):
        there, here = (_described(each.get(name)) for each in arrays)
        if there != here:
            raise ValueError(f"{name} is {there} in the checkpoint and {here} in this run")


def _described(array: Any) -> str:
    """Return the dtype and the shape of an array in words. Keys are stored as the numbers that they hold."""
    if array is None:
        return "missing"
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.eval_shape(jax.random.key_data, array)
    return f"{array.dtype}{list(array.shape)}"


@functools.cache
def _silence_threads() -> None:
    """Leave the reports of failed writes to `Checkpoints._failed`.

    When a write fails, Orbax closes its event loop without waiting for the other writes. Each of them would then print
    a traceback, asyncio would log errors that nothing handles, and Python would warn of writes that never began.
    """
    warnings.filterwarnings("ignore", r"coroutine '.*(write|serialize)\w*' was never awaited", RuntimeWarning)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others
