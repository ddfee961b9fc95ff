"""The unfinished copy of a checkpoint, in which it is pruned, and which becomes the new checkpoint by one rename."""

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nmjax.checkpoints import models, tensors
from nmjax.checkpoints.drafts import put, unfinished
from nmjax.checkpoints.tensors import CheckpointError, Tensors
from nmjax.checkpoints.torch_files import SUFFIXES

NOTE = ".pruning.json"  # in an unfinished copy: what is done to it


@dataclass
class Copy:
    """The unfinished copy of a checkpoint.

    Attributes:
      folder: Its folder.
      asked: What is done to it.
      done: The number of blocks that are pruned.
      continued: True if an earlier call began it.
    """

    folder: Path
    asked: dict[str, Any]
    done: int
    continued: bool

    @cached_property
    def tensors(self) -> Tensors:
        """Its tensors, which may be changed in place."""
        return tensors.read(self.folder, writable=True)

    def note(self, done: int) -> None:
        """Note that so many blocks are pruned, when they are on the disk."""
        for file, names in self.tensors.files.items():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            release(self.tensors, names)
        self.done, note = done, self.folder / NOTE
        new = note.with_suffix(".new")
        with new.open("w") as file:
            file.write(json.dumps(self.asked | {"done": done}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, note)


@contextmanager
def copied(
    source: Any, target: Any, asked: dict[str, Any], overwrite: bool, before: dict[Path, list[int]]
) -> Iterator[Copy]:  # fmt: skip
    """Copy a checkpoint, or open the copy that a killed process left. At the end it is put in the target's place.

    ``before`` is what `stamps` returned before the checkpoint was looked at.
    """
    models.check_target(target, source, overwrite)
    found, folder = models.opened(source), Path(target)
    config = [file.read_bytes() for file in Path(source).glob("config.json")]
    about = [str(Path(source).resolve()), *([file.name, *stamp] for file, stamp in before.items())]
    asked = asked | {"source": about, "config": hashlib.sha256(b"".join(config)).hexdigest()[:16]}
    with unfinished(folder) as draft:
        note = draft / NOTE
        left: dict[str, Any] = json.loads(note.read_text()) if note.exists() else {}
        if not left:  # a call was killed while it copied
            for one in draft.iterdir():
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        done = left.pop("done", 0)
        if left and left != json.loads(json.dumps(asked)):
            other = next(name for name in asked if left.get(name) != asked[name])
            raise CheckpointError(
                f"{draft}: a call that was stopped began to prune with another {other}. Repeat that call to go on, "
                "or remove this folder."
            )
        copy = Copy(draft, asked, done, continued=bool(left))
        try:
            if not left:
                _copy(found, draft)
                copy.note(0)
            yield copy
            if stamps(source) != before:
                copy.done = 0
                raise CheckpointError(f"{source}: the files changed while they were read. Nothing was written.")
            copy.note(copy.done)
            models.copy_texts(source, draft)
        except Exception as error:
            if not copy.done or isinstance(error, ValueError):  # otherwise the same call goes on
                shutil.rmtree(draft, ignore_errors=True)
            raise
        put(draft, folder)
        (folder / NOTE).unlink()


def _copy(found: Tensors, draft: Path) -> None:
    """Copy the files of a checkpoint into a folder; those of torch as safetensors."""
    size = sum(path.stat().st_size for path in found.files)
    free = shutil.disk_usage(draft).free
    if free < size:
        raise CheckpointError(
            f"{draft.parent}: the disk has {free:,} bytes left, and the new checkpoint takes {size:,}."
        )
    for path, names in found.files.items():
        if path.suffix in SUFFIXES:
            tensors.write(draft / models.file_name(path), {name: found[name] for name in names}, found.texts[path])
        else:
            shutil.copyfile(path, draft / path.name)
    if found.index is not None:
        shutil.copyfile(next(iter(found.files)).with_name(found.index), draft / found.index)


def stamps(source: Any) -> dict[Path, list[int]]:
    """Return the size and the time of each file of a checkpoint."""
    about = {path: path.stat() for path in models.opened(source).files}
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in about.items()}


def base(v: Any) -> Any:
    """Return what holds the values of an array: the map of a file, or an array."""
    while isinstance(v, np.ndarray) and v.base is not None:
        v = v.base
    return v.obj if isinstance(v, memoryview) else v


def release(held: Tensors, names: Sequence[str]) -> None:
    """Let the memory of a file's pages go. The system keeps the pages as long as nobody needs it."""
    readable = [name for name in names if not isinstance(held.dtype(name), str)]
    mapped = base(held[readable[0]]) if readable else None
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
