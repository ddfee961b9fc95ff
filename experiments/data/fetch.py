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
from typing import BinaryIO, NamedTuple

from experiments.errors import Failed, Mistake

TRIES = 3  # in a row without a new byte, before a file is given up
WAIT = 1.0  # seconds between tries
TIMEOUT = 30.0  # seconds without an answer

Show = Callable[[str, int, int], None]  # (name of the file, bytes that are there, bytes in all)


class File(NamedTuple):
    """A published file."""

    name: str
    size: int
    md5: str


class Published(NamedTuple):
    """The files of a data set, the folder in which nmjax looks for them, and the addresses that have them."""

    folder: str
    addresses: tuple[str, ...]
    files: tuple[File, ...]


SETS = {
    "cifar10": Published(
        "",
        ("https://www.cs.toronto.edu/~kriz/",),
        (File("cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),),
    ),
    "mnist": Published(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            File("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            File("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            File("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            File("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
    "fashion_mnist": Published(
        "fashion-mnist",
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        ),
        (
            File("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            File("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            File("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            File("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
}


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
        _refuse_another(file, path)
        show(file.name, file.size, file.size)
        return
    part = path.with_name(f"{path.name}.part")
    with part.open("ab+") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"another process is fetching {path}. Wait until it ends.") from None
        _fill(addresses, file, out, show)
        out.flush()
        os.fsync(out.fileno())
        out.seek(0)
        if (md5 := _md5(out)) != file.md5:
            part.unlink()
            raise Failed(f"what arrived is not {file.name}: its MD5 is {md5}, not {file.md5}. It has been removed.")
        os.replace(part, path)


def _refuse_another(file: File, path: Path) -> None:
    if path.is_file():
        with path.open("rb") as there:
            if _md5(there) == file.md5:
                return
    raise Mistake(f"{path} exists, but is not the published file. Remove it, or give another folder by --dir.")


def _md5(file: BinaryIO) -> str:
    return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fill(addresses: list[str], file: File, out: BinaryIO, show: Show) -> None:
    """Append the missing bytes of a file. Try the next address if no byte arrives, and give up after some tries."""
    stuck = 0
    while (before := out.seek(0, os.SEEK_END)) != file.size:
        address = addresses[stuck % len(addresses)]
        try:
            _append(address, file, out, show)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
            stuck = 0 if out.seek(0, os.SEEK_END) > before else stuck + 1
            if stuck >= max(TRIES, len(addresses)):
                raise Failed(_reason(addresses, file, out.tell(), error)) from error
            time.sleep(WAIT)


def _append(address: str, file: File, out: BinaryIO, show: Show) -> None:
    """Append the rest of a file from an address to `out`. If the address sends the whole file, begin again."""
    start = out.seek(0, os.SEEK_END)
    if start > file.size:
        out.truncate(start := 0)
    request = urllib.request.Request(address, headers={"User-Agent": "nmjax"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if start and not (
            answer.status == 206 and (answer.headers["Content-Range"] or "").startswith(f"bytes {start}-")
        ):
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


def _reason(addresses: list[str], file: File, kept: int, error: Exception) -> str:
    hosts = " and ".join(str(urllib.parse.urlsplit(address).hostname) for address in addresses)
    why = getattr(error, "reason", None) or error
    why = getattr(why, "strerror", None) or why
    again = f"{kept:,} of {file.size:,} bytes are kept, and the same command continues" if kept else "try again later"
    return (
        f"cannot fetch {file.name} from {hosts} ({why}): {again}. On a machine without a network, copy the file "
        "from another machine."
    )
