"""Files and folders that are written whole or not at all. What a killed process left is taken away by the next one.

Everything is written into a hidden draft beside its place. A draft is locked while its process lives.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a draft of a file. If nothing fails, it replaces the file once it is on the disk."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with replacing_all(path.parent, [path.name]) as (file,):
        yield file


@contextmanager
def replacing_all(folder: Path, names: Sequence[str | Path]) -> Iterator[list[BinaryIO]]:
    """Open a draft of each of several files of a folder. If nothing fails, all are on the disk before one is in place.

    A folder that did not exist appears whole. In one that did, the old config goes first and the new one comes last, so
    that a mixture is no checkpoint. If the process is killed between, the next one puts the rest in place.
    """
    taken = next((folder / name for name in names if (folder / name).is_dir()), None)
    if taken is not None:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(taken))
    finish(folder, whole=len(names) > 1)  # a file alone moves no other
    place = folder.resolve()  # a link to a folder stays one
    new = not place.exists()
    draft = _name(place.parent if new else place, place.name)
    path = folder / names[0] if len(names) == 1 else folder
    try:
        draft.mkdir(parents=True)
        with _locked(draft):
            with ExitStack() as stack:
                files: list[BinaryIO] = []
                for name in names:
                    path = folder / name
                    for parent in (draft,) if new else (draft, place):
                        (parent / name).parent.mkdir(parents=True, exist_ok=True)
                    files.append(stack.enter_context((draft / name).open("xb")))
                yield files
                for name, file in zip(names, files, strict=True):
                    path = folder / name  # an error is of this path
                    file.flush()
                    os.fsync(file.fileno())
            if not new and len(names) == 1:
                os.replace(draft / names[0], place / names[0])
            else:
                put(draft, place)
    except OSError as error:
        if error.filename is None or Path(str(error.filename)).is_relative_to(draft):
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put(draft: Path, folder: Path) -> None:
    """Put a folder of files in the place of another one, which may be missing. Its files are replaced, as above."""
    place = folder.resolve()
    if not place.exists():
        os.rename(draft, place)
        return
    whole = _name(place, place.name).with_suffix(".whole")
    os.rename(draft, whole)
    _move(whole, place)


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Open the hidden folder beside another one in which its files are made, over several calls if some are killed."""
    place = folder.resolve()
    if place.exists() and place.stat().st_dev != place.parent.stat().st_dev:
        raise OSError(errno.EXDEV, "a disk of its own cannot be replaced at once. Name a folder in it", str(folder))
    draft = place.parent / f".{place.name}.unfinished"
    draft.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(draft, strict=True))
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, "another process makes this checkpoint", str(folder)) from None
        yield draft


def finish(folder: Path, whole: bool = True) -> None:
    """Remove the drafts that killed processes left for a folder. Of those that were whole, put all files in place."""
    place = folder.resolve()
    for draft in _dead(place, place.name):
        if draft.suffix == ".draft":
            shutil.rmtree(draft, ignore_errors=True)
        elif whole:
            _move(draft, place)
    for draft in _dead(place.parent, place.name):
        shutil.rmtree(draft, ignore_errors=True)


def _move(whole: Path, folder: Path) -> None:
    """Move the files of a draft into a folder. It can be called again if it was interrupted anywhere."""
    files = sorted((file.relative_to(whole) for file in whole.rglob("*") if not file.is_dir()), key=_rank)
    if len(files) > 1:
        for file in filter(_rank, reversed(files)):
            (folder / file).unlink(missing_ok=True)
    for file in files:
        os.replace(whole / file, folder / file)
    shutil.rmtree(whole)


def _rank(file: Path) -> int:
    """Return 1 for an index, 2 for the config, without which nobody takes a folder for a checkpoint, and else 0."""
    return 2 if str(file) == "config.json" else str(file).endswith(".safetensors.index.json")


def _name(place: Path, name: str) -> Path:
    return place / f".{name}.{secrets.token_hex(4)}.draft"


def _dead(place: Path, name: str) -> Iterator[Path]:
    """Yield the drafts of a folder whose processes do not live, each while it is locked."""
    form = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.(draft|whole)")
    try:
        paths = sorted(place.iterdir())
    except OSError:  # it is missing, or may not be listed
        return
    for path in paths:
        if form.fullmatch(path.name) and not path.is_symlink() and path.is_dir():
            with suppress(OSError, ImportError), _locked(path, strict=True):
                yield path


@contextmanager
def _locked(draft: Path, strict: bool = False) -> Iterator[None]:
    """Lock a draft. Where that cannot be done, it is an error if strict, and else the draft is not locked."""
    with ExitStack() as stack:
        try:
            import fcntl

            handle = os.open(draft, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (ImportError, OSError):
            if strict:
                raise
        yield
