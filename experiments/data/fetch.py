"""Fetches published data sets. A download continues where it broke off, and is checked by its size and MD5."""

import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from experiments.data.published import SETS, File
from experiments.errors import Failed, Mistake

TRIES = 3  # in a row without a new byte, before a file is given up
WAIT = 1.0  # seconds between tries
TIMEOUT = 30.0  # seconds without an answer

Show = Callable[[str, int, int], None]  # (name of the file, bytes that are there, bytes in all)


def get(name: str, dir: str | Path, show: Show) -> Path:
    """Fetch the files of a data set that are not there yet, and return the folder that holds them.

    Args:
      name: One of SETS.
      dir: The folder in which `experiments.data.find` then finds the set.
      show: Called as bytes arrive.

    Raises:
      Mistake: The folder cannot be written, or holds another file of that name.
      Failed: A file cannot be fetched. What has arrived is kept, and the next call continues.
    """
    published = SETS[name]
    folder = Path(dir).expanduser() / published.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in published.files:
            fetch([address + file.name for address in published.addresses], file, folder / file.name, show)
    except OSError as error:
        raise Mistake(
            f"{folder} cannot be written: {error.strerror or error}. Give another folder by --dir."
        ) from error
    return folder


def fetch(addresses: list[str], file: File, path: Path, show: Show) -> None:
    """Fetch a file into PATH.part, check it, and rename it. If the file exists already, only check it."""
    if path.exists():
        if not path.is_file() or _md5(path) != file.md5:
            raise Mistake(f"{path} exists, but is not the published file. Remove it, or give another folder by --dir.")
        show(file.name, file.size, file.size)
        return
    part = path.with_name(f"{path.name}.part")
    with part.open("ab+") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"another process is fetching {path}. Wait until it ends.") from None
        _fill(addresses, file, out, show)
        os.fsync(out.fileno())
        if (md5 := _md5(part)) != file.md5:
            part.unlink()
            raise Failed(f"what arrived is not {file.name}: its MD5 is {md5}, not {file.md5}. It has been removed.")
        os.replace(part, path)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fill(addresses: list[str], file: File, out: BinaryIO, show: Show) -> None:
    """Append the missing bytes of a file. Try the next address if no byte arrives, and give up after some tries."""
    stuck = 0
    while (before := out.seek(0, os.SEEK_END)) != file.size:
        try:
            _append(addresses[stuck % len(addresses)], file, out, show)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
            kept = out.seek(0, os.SEEK_END)
            stuck = 0 if kept > before else stuck + 1
            if stuck >= max(TRIES, len(addresses)):
                hosts = " and ".join(str(urllib.parse.urlsplit(address).hostname) for address in addresses)
                why = getattr(error, "reason", None) or error
                why = getattr(why, "strerror", None) or why
                left = f"{kept:,} of {file.size:,} bytes are kept, and the same command continues"
                raise Failed(
                    f"cannot fetch {file.name} from {hosts} ({why}): {left if kept else 'try again later'}. On a "
                    "machine without a network, copy the file from another machine."
                ) from error
            time.sleep(WAIT)


def _append(address: str, file: File, out: BinaryIO, show: Show) -> None:
    """Append the rest of a file from an address to `out`. If the address sends the whole file, begin again."""
    start = out.tell()
    if start > file.size:
        out.truncate(start := 0)
    headers = {"User-Agent": "nmjax"} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        goes_on = answer.status == 206 and (answer.headers["Content-Range"] or "").startswith(f"bytes {start}-")
        if start and not goes_on:
            out.truncate(start := 0)  # the server ignores ranges, and sends the whole file
        length = answer.headers["Content-Length"]
        if length is not None and length.isdigit() and start + int(length) != file.size:
            raise OSError(f"it is {start + int(length):,} bytes long, not {file.size:,}")
        while data := answer.read(1 << 16):
            if start + len(data) > file.size:
                out.truncate(0)
                raise OSError(f"it is longer than {file.size:,} bytes")
            out.write(data)
            start += len(data)
            show(file.name, start, file.size)
    out.flush()
    if start < file.size:
        raise OSError("the download broke off")
