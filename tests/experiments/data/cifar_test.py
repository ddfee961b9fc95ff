"""Files of CIFAR-10 made by an enemy: each is refused in a sentence, in a child process that could crash.

``python -m tests.experiments.data.cifar_test SEED SECONDS`` is that child. It may take 500 MB more than at its start.
"""

import contextlib
import faulthandler
import functools
import gzip
import io
import itertools
import json
import os
import pickletools
import random
import re
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.data import cifar
from experiments.errors import Mistake

ROOT = Path(__file__).parents[3]
NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


# ---- the instructions of a pickle, written by hand ----


def text(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def raw(value: bytes) -> bytes:
    return b"T" + len(value).to_bytes(4, "little") + value


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
UINT8 = b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b"
STATE = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
PIXELS = bytes(range(256)) * 12  # of one image


def batch(
    labels=b"](K\x06K\x09e",
    array=ARRAY,
    shape=b"K\x02M\x00\x0c\x86",
    dtype=UINT8 + STATE,
    order=b"\x89",
    data=raw(PIXELS * 2),
    end=b"tb",
    more=b"",
):
    """Return a file as CIFAR-10's are, instruction by instruction, or with another part."""
    start = b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04" + labels
    state = b"(K\x01" + shape + dtype + order + data + end
    names = b"U\x09filenamesq\x0d]r\xff\x01\x00\x00(U\x05a.pngq\x0eh\x0ee"
    return start + b"U\x04dataq\x06" + array + state + names + more + b"u."


def test_a_file_as_it_is_published_is_read_bit_for_bit():
    x, y = cifar._batch("here", batch())
    assert (x.shape, x.dtype, y.dtype) == ((2, 32, 32, 3), np.uint8, np.int32)
    assert x.transpose(0, 3, 1, 2).tobytes() == PIXELS * 2  # planes of red, green, blue
    assert y.tolist() == [6, 9]
    x, y = cifar._batch("here", batch(labels=b"](K\x06K\x09er\xff\xff\xff\xff"))  # a place in the memo takes no memory
    assert y.tolist() == [6, 9]


# ---- attacks ----

# An array of raw bytes, whose dtype is then given fields of objects: NumPy follows the bytes as an address.
_OBJECT = b"cnumpy\ndtype\nU\x02O8\x89\x88\x87R(K\x03U\x01|NNN" + number(-1) * 2 + b"K\x3ftb"
_FIELDS = b"(K\x03U\x01|NU\x01a\x85}(U\x01a" + _OBJECT + b"K\x00\x86uK\x08K\x01K\x3ftb"
_RAW = b"cnumpy\ndtype\nU\x02V8\x89\x88\x87Rq\x10"
_POINTER = ARRAY + b"(K\x01K\x01\x85" + _RAW + b"\x89" + text(b"\0AAAAA\0\0") + b"tb"


def laughs(begin: bytes, end: bytes) -> bytes:
    """Return a value that holds two of a value that holds two of a value, and so on: 2**64 of them."""
    return begin * 65 + end + b"q\x20" + (b"h\x20" + end + b"q\x20") * 64


_LISTS, _TUPLES = laughs(b"](", b"e"), laughs(b"(", b"t")
_OTHER = "it has the instruction {}, which CIFAR-10 does not"


@functools.cache
def attacks() -> dict[str, tuple[bytes, str]]:
    """Return files, and the reason why each is refused."""
    return {
        "an address, by the memo": (batch(labels=_POINTER + text(b"x") + b"h\x10" + _FIELDS), "it calls what CIFAR-10"),
        "an address, by uint8's memo": (batch(more=text(b"x") + b"h\x0b" + _FIELDS), "it calls what CIFAR-10"),
        "a dtype again, by the memo": (batch(more=text(b"x") + b"h\x0b" + STATE), "it gives a state to what has one"),
        "fields of objects at once": (batch(dtype=UINT8 + _FIELDS), "it calls what CIFAR-10"),
        "fields without objects": (
            batch(dtype=UINT8 + b"(K\x03U\x01|NU\x01a\x85}K\x08K\x01K\x3ftb"),
            "dtype .* is not uint8",
        ),
        "objects": (batch(dtype=_OBJECT), "it calls what CIFAR-10"),
        "no state of a dtype": (batch(dtype=UINT8), "dtype of its data is not uint8"),
        "flags": (batch(dtype=UINT8 + STATE.replace(b"K\x00tb", b"K\x3ftb")), "dtype of its data is not uint8"),
        "a dtype by words": (batch(dtype=text(b"u1")), "dtype of its data is not uint8"),
        "an array as dtype": (batch(dtype=b"h\x09"), "dtype of its data is not uint8"),
        "a state twice": (batch(more=text(b"x") + b"h\x09(K\x01tb"), "it gives a state to what has one"),
        "no state": (batch(more=text(b"data") + ARRAY), "it has no array called data"),
        "a short state": (batch(more=text(b"data") + ARRAY + b"(K\x01tb"), "it has no array called data"),
        "a state of a number": (batch(end=b"tbK\x01b"), "it gives a state to what has one"),
        "a state of a list": (batch(labels=b"]]b"), "it gives a state to what has one, or to what can have none"),
        "a large array": (batch(array=ARRAY.replace(b"K\x00\x85", b"J\xff\xff\xff\x7f\x85")), "it calls what CIFAR-10"),
        "an array of words": (batch(array=ARRAY.replace(b"U\x01b", b"U\x01O")), "it calls what CIFAR-10"),
        "a call of ndarray": (batch(array=b"cnumpy\nndarray\nK\x01\x85R"), "it calls what CIFAR-10"),
        "a call of a string": (batch(array=b"U\x0bnumpy dtypeU\x02u1K\x00K\x01\x87R"), "it calls what CIFAR-10"),
        "a call of a call": (batch(array=ARRAY + b"(tR"), "it calls what CIFAR-10"),
        "a dtype as array": (batch(array=UINT8), "it has no array called data"),
        "bytes as array": (batch(more=text(b"data") + text(b"x")), "it has no array called data"),
        "too few bytes": (batch(shape=b"M\x10\x27M\x00\x0c\x86"), "n labels, .* 6144 bytes and 2 labels"),
        "a shape below zero": (batch(shape=number(-2) + b"M\x00\x0c\x86"), "n labels, .* 6144 bytes"),
        "a shape of 2**62": (batch(shape=number(2**31 - 1) + number(2**31 - 1) + b"\x86"), "n labels, .* 6144 bytes"),
        "a shape of three": (batch(shape=b"K\x02M\x00\x0cK\x01\x87"), "n labels, .* 6144 bytes"),
        "a shape without end": (batch(shape=_TUPLES), "n labels, .* 6144 bytes"),
        "bytes without end": (batch(data=_LISTS), "its data is no array of bytes"),
        "Fortran's order": (batch(order=b"\x88"), "its data is no array of bytes in C order"),
        "labels without end": (batch(labels=_LISTS), "its labels should be numbers of 0[.][.]9"),
        "labels of themselves": (batch(labels=b"]q\x20(h\x20h\x20e"), "its labels should be numbers"),
        "labels of an array": (batch(labels=ARRAY), "no list called labels"),
        "labels of 10": (batch(labels=b"](K\x06K\x0ae"), "its labels should be numbers"),
        "labels below zero": (batch(labels=b"](K\x06" + number(-1) + b"e"), "its labels should be numbers"),
        "labels of truth": (batch(labels=b"](K\x06\x88e"), "its labels should be numbers"),
        "labels for one": (batch(labels=b"](K\x06e"), "n labels, .* 6144 bytes and 1 labels"),
        "no image": (batch(labels=b"]", shape=b"K\x00M\x00\x0c\x86", data=raw(b"")), "0 bytes and 0 labels"),
        "a key without end": (batch(more=_TUPLES + b"N"), "a key in it is no string"),
        "a key without a value": (batch(more=text(b"x")), "a key without a value"),
        "a string of 4 GB": (batch(data=b"T\xff\xff\xff\xff"), "byte count < 0"),
        "a string of 2 GB": (batch(data=b"T\xff\xff\xff\x7f"), "but only [0-9]+ remain"),
        "a string of 2**60 bytes": (batch(data=b"\x8e" + (2**60).to_bytes(8, "little")), "but only [0-9]+ remain"),
        "a number of 2 GB": (batch(shape=b"\x8b\xff\xff\xff\x7f"), "not enough data"),
        "a long number": (batch(shape=b"L" + b"9" * 100_000 + b"L\n"), "Exceeds the limit"),
        "many instructions": (batch(labels=b"](" + b"N" * 2_000_000 + b"e"), "more than 100000 instructions"),
        "many lists": (batch(labels=b"](" + b"]" * 2_000_000 + b"e"), "more than 100000 instructions"),
        "many marks": (batch(labels=b"(" * 2_000_000), "more than 100000 instructions"),
        "deep calls": (batch(labels=b"]" + b"\x85" * 50_000), "no list called labels"),
        "deep states": (batch(labels=ARRAY * 6000 + b"\x85b" * 5999), "no list called labels"),
        "many bytes": (b"\x80\x02N0" * (9 << 20), _OTHER.format("POP")),
        "a name": (batch(labels=b"cposix\nsystem\n"), "it names posix[.]system, which CIFAR-10 does not"),
        "a name that is escaped": (batch(labels=b"cos\n\x1b[31m\n"), r"it names os[.]\\x1b\[31m, which"),
        "a long name": (batch(labels=b"c" + b"a" * 10_000_000 + b"\nb\n"), "it names a{80}, which"),
        "NumPy's other names": (
            batch(labels=b"cnumpy._core.multiarray\nscalar\n"),
            "it names numpy._core.multiarray.scalar",
        ),
        "a name by the stack": (batch(labels=text(b"os") + text(b"system") + b"\x93"), _OTHER.format("STACK_GLOBAL")),
        "an object": (batch(labels=b"cnumpy\nndarray\n)\x81"), _OTHER.format("(NEWOBJ|EMPTY_TUPLE)")),
        "an instance": (batch(labels=b"(ios\nsystem\n"), _OTHER.format("INST")),
        "an old object": (batch(labels=b"(cnumpy\nndarray\no"), _OTHER.format("OBJ")),
        "a persistent id": (batch(labels=b"Px\n"), _OTHER.format("PERSID")),
        "a persistent value": (batch(labels=b"NQ"), _OTHER.format("BINPERSID")),
        "an extension": (batch(labels=b"\x82\x01"), _OTHER.format("EXT1")),
        "a large extension": (batch(labels=b"\x84\x01\x01\x01\x01"), _OTHER.format("EXT4")),
        "a buffer of others": (batch(data=b"\x97"), _OTHER.format("NEXT_BUFFER")),
        "a frame": (batch(labels=b"\x95" + b"\xff" * 8), _OTHER.format("FRAME")),
        "an empty memo": (batch(labels=b"h\x77"), "its instructions do not fit together"),
        "an empty stack": (b"\x80\x02R.", "its instructions do not fit together"),
        "no mark": (b"\x80\x02}u.", "its instructions do not fit together"),
        "a tuple of nothing": (b"\x80\x02N\x87.", "its instructions do not fit together"),
        "no instruction": (b"", "pickle exhausted before seeing STOP"),
        "no value": (b"\x80\x02.", "its instructions do not fit together"),
        "no dictionary": (b"\x80\x02K\x01.", "it has no array called data"),
        "an unknown instruction": (batch(labels=b"\xff"), "unknown"),
        "an early end": (batch()[:-50], "no batch of CIFAR-10"),
    }


def archived(members) -> bytes:
    """Return an archive of pairs of a TarInfo, or a name, and bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, data in members:
            info = tarfile.TarInfo(f"cifar-10-batches-py/{info}") if isinstance(info, str) else info
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _link() -> tarfile.TarInfo:
    info = tarfile.TarInfo("cifar-10-batches-py/data_batch_3")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return info


def _header(kind: bytes, size: int, sparse: bytes = b"") -> bytes:
    info = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    info.type, info.size = kind, size
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386 : 386 + len(sparse)] = sparse
    return checked(header)


def checked(header: bytes) -> bytes:
    """Return a header of tar with its sum."""
    return header[:148] + b"%06o\0 " % (sum(header[:148]) + sum(header[156:512]) + 8 * 32) + header[156:]


_HOLE = b"0" * 24 * 4 + b"\0" + b"77777777777\0"  # the header of a sparse file: 8 GB without data


def _zeros(count: int) -> bytes:
    return gzip.compress(bytes(16 << 20)) * count  # of 16 MiB each


@functools.cache
def archives() -> dict[str, tuple[bytes, str]]:
    """Return archives, and the reason why each is refused."""
    six = [(name, batch()) for name in NAMES]
    return {
        "not an archive": (b"what", "the archive cannot be read"),
        "an early end": (gzip.compress(archived(six))[:-200], "cannot be read"),
        "no batch": (
            gzip.compress(archived(six[:2] + six[3:])),
            "data_batch_3 cannot be read .the archive does not hold",
        ),
        "a link": (gzip.compress(archived([*six[:2], (_link(), b""), *six[3:]])), "data_batch_3 .* does not hold it"),
        "many files": (gzip.compress(archived([("x", b"")] * 101)), "holds more than 100 files"),
        "an extension of 8 GB": (gzip.compress(_header(b"x", 8**11 - 1)) + _zeros(64), "unpacks to more than"),
        "many names": (gzip.compress((_header(b"L", 1) + bytes(512)) * 5000), "cannot be read"),
        "a large batch": (
            gzip.compress(_header(b"0", 64 << 20)) + _zeros(5),
            "data_batch_1 .* more than 33554432 bytes",
        ),
        "a sparse batch": (
            gzip.compress(_header(b"S", 0, _HOLE) + bytes(1024)),
            "data_batch_1 .* more than 33554432 bytes",
        ),
    }


# ---- the child ----


def try_attacks() -> dict[str, str]:
    """Return what the reader says of every attack."""
    said = {}
    for name, (data, _) in attacks().items():
        said[name] = outcome(cifar._batch, "here", data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cifar-10-python.tar.gz")
        for name, (data, _) in archives().items():
            path.write_bytes(data)
            said[f"archive: {name}"] = outcome(cifar.read, path)
        for name in NAMES:
            Path(folder, name).write_bytes(batch())
        os.truncate(Path(folder, "data_batch_2"), 1 << 40)
        said["a file of 1 TB"] = outcome(cifar.read, Path(folder))
    return said


def outcome(read, *args):
    """Return what is read, or the sentence of a refusal. A signal ends the process after 20 seconds."""
    signal.alarm(20)
    try:
        return read(*args)
    except Mistake as e:
        return str(e)
    finally:
        signal.alarm(0)


def pieces(data: bytes) -> list[bytes]:
    """Return the instructions of a pickle, as far as it has any."""
    places = [0]
    with contextlib.suppress(ValueError):
        places += [place for _, _, place in pickletools.genops(data)]
    return [data[a:b] for a, b in itertools.pairwise([*places, len(data)]) if a < b]


def mutated(rng: random.Random, files: list[list[bytes]], others: list[bytes]) -> bytes:
    """Return a file of which some instructions are others, are missing, are there twice, or are damaged."""
    parts = list(rng.choice(files))
    for _ in range(rng.choice((1, 1, 2, 3, 5, 20))):
        at = rng.randrange(len(parts)) if parts else 0
        end = at + rng.choice((0, 0, 1, 1, 2, 5))
        match rng.randrange(5):
            case 0:
                parts[at:end] = [rng.choice(others)]
            case 1:
                parts[at:end] = []
            case 2:
                parts[at:at] = parts[at:end]
            case 3:
                parts.insert(rng.randrange(len(parts) + 1), b"".join(parts[at:end]))
            case 4 if parts and parts[at]:
                part = bytearray(parts[at])
                for _ in range(rng.choice((1, 1, 4))):
                    part[rng.randrange(min(len(part), 100))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
                parts[at] = bytes(part)
    return b"".join(parts)


def damaged(rng: random.Random, archive: bytes, path: Path) -> Path:
    """Write an archive of which some bytes of a header, or of the compressed file, are others."""
    at = 512 * 14 * rng.randrange(6)
    header = bytearray(archive[at : at + 512])
    for _ in range(rng.choice((1, 1, 3, 10))):
        header[rng.choice((rng.randrange(512), *range(124, 136), 156))] = rng.choice(b"\0 0157DKLSVgx\x80\xff")
    data = bytearray(gzip.compress(archive[:at] + checked(header) + archive[at + 512 :], 1))
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    return path


def fuzz(seed: int, seconds: float, path: Path) -> list[int]:
    """Return how many files were read, and how many refused. Pixels that are read stand in the file."""
    rng, counts = random.Random(seed), [0, 0]
    files = [
        pieces(data) for data in (*[batch()] * 20, *(data for data, _ in attacks().values())) if len(data) < 20_000
    ]
    others = sorted({part for parts in files for part in parts} | {bytes([i]) for i in range(256)})
    others += [code.code.encode("latin-1") + rng.randbytes(n) for code in pickletools.opcodes for n in (1, 4, 8)]
    archive, end = archived([(name, batch()) for name in NAMES]), time.monotonic() + seconds
    while time.monotonic() < end:
        if rng.random() < 0.02:
            counts[isinstance(outcome(cifar.read, damaged(rng, archive, path)), str)] += 1
            continue
        data = mutated(rng, files, others)
        said = outcome(cifar._batch, "here", data)
        if isinstance(said, str):
            assert re.fullmatch(r"here is no batch of CIFAR-10: [^\0-\x1f]{1,200}[.] Download it again[.]", said), said
        else:
            x, y = said
            assert (x.shape, x.dtype, y.dtype) == ((len(y), 32, 32, 3), np.uint8, np.int32)
            assert y.size > 0
            assert set(y.tolist()) <= set(range(10))
            assert x.transpose(0, 3, 1, 2).tobytes() in data
        counts[isinstance(said, str)] += 1
    return counts


def main(seed: int, seconds: float):
    """Try every attack, and then as many others as there is time for."""
    faulthandler.enable()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 500_000_000,) * 2)
    with tempfile.TemporaryDirectory() as folder:
        counts = fuzz(seed, seconds, Path(folder, "cifar-10-python.tar.gz"))
    print(json.dumps({"attacks": try_attacks(), "fuzz": counts}))


def child(seed: int, seconds: float) -> dict:
    """Return what the child process prints. It must not end by a signal or an error."""
    command = [sys.executable, "-m", "tests.experiments.data.cifar_test", str(seed), str(seconds)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 120)
    assert run.returncode == 0, f"seed {seed}, exit code {run.returncode}: {run.stderr[-3000:]}"
    return json.loads(run.stdout)


# ---- the tests of the child ----

linux = pytest.mark.skipif(sys.platform != "linux", reason="the child limits its own memory as Linux can")


@linux
def test_every_attack_is_refused_in_a_sentence():
    said = child(seed=0, seconds=1)
    reasons = {name: why for name, (_, why) in attacks().items()}
    reasons |= {f"archive: {name}": why for name, (_, why) in archives().items()}
    reasons |= {"a file of 1 TB": "data_batch_2 cannot be read .it has more than 33554432 bytes"}
    assert said["attacks"].keys() == reasons.keys()
    for name, sentence in said["attacks"].items():
        assert re.search(reasons[name], sentence), f"{name}: {sentence}"
        assert sentence.endswith("Download it again.")
        assert sentence.isprintable()
        assert len(sentence) < 400
    assert min(said["fuzz"]) > 20


@linux
@pytest.mark.slow
def test_twenty_seconds_of_other_files():
    assert min(child(seed=time.time_ns() % 2**32, seconds=20)["fuzz"]) > 150


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
