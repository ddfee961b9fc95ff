"""The checkpoints of a run: the states that it can continue from, by Orbax, in `checkpoints/` of its directory.

::

    checkpoints/40/         the state after 40 steps
    checkpoints/40.json     its seal (`seals.py`), with checksums of its files
    checkpoints/41.begun    while the next one is written: a folder of that step is the run's own

A checkpoint is valid if its files match its seal. The last two checkpoints and the best one are kept. The docstring of
`Checkpoints.save` gives the order of writes. A damaged checkpoint is renamed to `unreadable-40`, and the run continues
from the last valid one.
"""

import contextlib
import functools
import itertools
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.errors import Failed
from experiments.files import FULL
from experiments.scale import processes
from experiments.training import seals


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
        self.directory = (workdir / "checkpoints").absolute()
        self.lost: str | None = None  # why the last save failed
        self._report = report
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future = Future()
        self._writing.set_result(None)

    @functools.cached_property
    def _orbax(self):
        """Orbax's checkpointer. It has threads of its own, so it is made when something is first saved or restored."""
        import orbax.checkpoint as ocp

        _silence_threads()
        return ocp.StandardCheckpointer()

    def _drop_orbax(self) -> None:
        """Close Orbax's checkpointer, if there is one. It raises the errors of its threads, one at each call."""
        orbax = vars(self).pop("_orbax", None)
        for _ in range(5 if orbax else 0):
            with contextlib.suppress(Exception):  # `_failed` has reported it
                orbax.close()
                return

    # ---- writing ----

    def save(self, step: int, state: Any, pending: list[dict], best: bool) -> None:
        """Write the checkpoint of a training step.

        The order of writes (`save` returns after number 2, and the rest runs in a thread):

        0. The loop has taken in the figures of all steps. Those without a line in metrics.jsonl yet are `pending`.
        1. The checkpoint before this one is finished: `wait`.
        2. Orbax copies the state to the host, and begins to write it to `STEP/`, in this call.
        3. All processes finish writing: `_finish`.
        4. Process 0 writes the seal `STEP.json` atomically: `seals.write`.
        5. It removes old checkpoints, each seal before its folder: `_remove_old`.

        A run that is killed at any moment therefore leaves valid checkpoints, folders without a seal, and at most one
        temporary file of a seal, whose name begins with a dot.

        Args:
          step: Number of steps that are done.
          state: The state after them. It may be donated as soon as this returns.
          pending: Metrics of steps that are not yet written to metrics.jsonl.
          best: True if the evaluation after this step is the best so far.
        """
        self.wait()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if processes.first():
                self._begin(step)
            self._orbax.save(self._path(step), state._asdict(), force=True)
        except (OSError, ValueError) as error:
            self._failed(step, error)
            return
        pending = list(pending)  # later steps append to it while the seal waits
        self._writing = self._thread.submit(self._finish, step, pending, best)

    def _begin(self, step: int) -> None:
        """Mark a checkpoint as begun by this run. Refuse a folder that is none of its own."""
        mark, seal = seals.begun(self.directory, step), seals.path(self.directory, step)
        if seals.read(self.directory, step) is not None:
            os.replace(seal, mark)  # the checkpoint that it seals is about to be written again
        elif not mark.exists():
            for path in (self._path(step), seal):
                if os.path.lexists(path):
                    raise OSError(f"{path} is there, and is not of this run")
            mark.touch()
        with tempfile.TemporaryDirectory(prefix=f"{step}.orbax-checkpoint-tmp-", dir=self.directory):
            pass  # where no folder can be made, Orbax would wait for one for minutes

    def _finish(self, step: int, pending: list[dict], best: bool) -> None:
        try:
            self._orbax.wait_until_finished()  # waits for all processes
            self.lost = None
            if processes.first():
                seals.write(self.directory, step, best, pending)
                seals.begun(self.directory, step).unlink()
                self._remove_old()
        except Exception as error:  # Orbax raises many types of errors when the disk is full
            self._failed(step, error)

    def _remove_old(self) -> None:
        """Remove this run's checkpoints that are not kept, seals first, and those that it began and never finished."""
        steps, best = self.steps(), self.steps(best=True)
        kept = {*steps[-2:], *best[-1:]}
        for step in set(steps) - kept:
            if seals.read(self.directory, step) is not None:  # otherwise it is damaged, or somebody else's
                os.replace(seals.path(self.directory, step), seals.begun(self.directory, step))
        for step in seals.begun_steps(self.directory):
            if step not in kept:
                of_step = (self._path(step), *self.directory.glob(f"{step}.orbax-checkpoint-tmp*"))
                for path in of_step:
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
                if any(map(os.path.lexists, of_step)):
                    continue  # Orbax's threads may still write there: the mark stays for the next time
            seals.begun(self.directory, step).unlink(missing_ok=True)

    def _failed(self, step: int, error: Exception) -> None:
        """Report a failed save, and remove its files.

        With several processes, raise, because the others are waiting.
        """
        full = isinstance(error, OSError) and error.errno in FULL or "RESOURCE_EXHAUSTED" in str(error)
        reason = "no space is left on the disk" if full else " ".join(str(error).split())[:300]
        self.lost = f"The checkpoint of step {step:,} could not be written: {reason}."
        if processes.count() == 1:
            self._drop_orbax()  # otherwise the next save raises what is left of these errors
        if processes.first():
            with contextlib.suppress(OSError):
                self._remove_old()
        if processes.count() > 1:
            raise Failed(self.lost.rstrip("."))
        self._report(f"{self.lost} {self.kept_message()} Training continues.")

    def wait(self) -> None:
        """Wait until the save that was begun is finished."""
        self._writing.result()

    def close(self) -> None:
        """Finish writing, and end the threads."""
        self.wait()
        self._thread.shutdown()
        self._drop_orbax()

    def dump(self, state: Any) -> None:
        """Write the state of a diverged run to `failed-STEP/`, for debugging. It cannot be restored."""
        self.wait()
        with contextlib.suppress(Exception):  # the error of the run is more important
            step = int(state.step)
            path = self.directory / f"failed-{step}"
            self._orbax.save(path, state._asdict(), force=True)
            self._orbax.wait_until_finished()
            self._report(f"The state after step {step:,} is in {path}, to be looked at.")

    # ---- restoring ----

    def steps(self, best: bool = False) -> list[int]:
        """Return the steps of all sealed checkpoints; with `best`, of those that were the best when they were saved."""
        steps = seals.sealed_steps(self.directory)
        return [step for step in steps if seals.was_best(self.directory, step)] if best else steps

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
        if not step:
            return Restored(0, None, [])
        with self._refused(step, "model and optimizer"):
            stored = self._orbax.metadata(self._path(step)).item_metadata.tree
            _compare(stored, shapes._asdict())
            state = self._orbax.restore(self._path(step), shapes._asdict())
        return Restored(step, type(shapes)(**state), pending)

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
        if not step:
            return 0, {}
        import orbax.checkpoint as ocp

        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader, self._refused(step, "model"):
            stored = reader.metadata(self._path(step)).item_metadata.tree
            _compare({name: stored.get(name) for name in fields}, fields)
            item = {name: jax.tree.map(lambda _: ocp.PLACEHOLDER, tree) for name, tree in stored.items()} | fields
            places = ocp.checkpoint_utils.construct_restore_args(item)
            state = reader.restore(self._path(step), args=ocp.args.PyTreeRestore(item=item, restore_args=places))
        return step, {name: state[name] for name in fields}

    @contextlib.contextmanager
    def _refused(self, step: int, owner: str) -> Iterator[None]:
        """Turn any error of reading a valid checkpoint into `Failed`."""
        try:
            yield
        except Exception as error:  # many types of errors; the files are as they were written
            reason = " ".join(str(error).split())[:300]
            raise Failed(f"{self._path(step)} holds no state of this {owner}: {reason}") from error

    def _last_valid(self, best: bool, rename_damaged: bool) -> tuple[int, list[dict]]:
        """Return the step of the last valid checkpoint and the metrics in its seal, or step 0 if there are none."""
        steps = self.steps(best)
        for step in reversed(steps):
            seal = seals.read(self.directory, step)
            damage = seals.damage(self.directory, step, seal)
            if seal is not None and not damage:
                return step, seal.pending
            moved = f" It was renamed to {self._rename_damaged(step)}." if rename_damaged else ""
            self._report(f"The checkpoint of step {step:,} is damaged: {damage}.{moved}")
        if steps:
            renamed = "They were renamed, so the same command starts from the beginning. Or give another --workdir"
            hint = renamed if rename_damaged else "Give the directory of another run"
            raise Failed(f"None of the checkpoints in {self.directory} can be read. {hint}")
        return 0, []

    def _rename_damaged(self, step: int) -> Path:
        """Rename a damaged checkpoint and its seal, and return its new name."""
        names = itertools.chain(
            [f"unreadable-{step}"], (f"unreadable-{step}-{number}" for number in itertools.count(2))
        )
        places = (self.directory / name for name in names)
        aside = next(p for p in places if not os.path.lexists(p) and not os.path.lexists(p.with_suffix(".json")))
        os.replace(seals.path(self.directory, step), aside.with_suffix(".json"))
        if os.path.lexists(self._path(step)):
            os.replace(self._path(step), aside)
        return aside

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def kept_message(self) -> str:
        """Return a sentence about which checkpoint is kept, for a person."""
        steps = self.steps()
        if not steps:
            return "There is no checkpoint to continue from."
        return f"The checkpoint of step {steps[-1]:,} is kept in {self.directory}."


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
