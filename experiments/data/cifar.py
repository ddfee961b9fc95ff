"""CIFAR-10's own files (https://www.cs.toronto.edu/~kriz/cifar.html): pickles, read as data and never as a program.

A pickle is a program, and an array in it is a call of NumPy with a state that the file chooses. ``pickle.Unpickler``
runs the program. Restricting its names is not enough: NumPy's own dtype and array follow addresses that a state gives
them. So ``_value`` interprets the instructions itself, as ``pickletools.genops`` lists them. It is short enough to be
checked:

- It knows the instructions in these six files and refuses every other one.
- It calls nothing that the file names. Where the file calls NumPy, a stand-in holds what NumPy would be given. Two
  calls are known, with all of their arguments, and the result of each takes one state.
- An instruction adds one value to memory, or bytes that the file holds. Instructions and bytes are limited.

The array is made at the end, from as many bytes as its shape needs.
"""

import dataclasses
import gzip
import pickletools
import tarfile
from pathlib import Path

import numpy as np

from experiments.data import reading
from experiments.errors import Mistake

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_LARGEST = 32 << 20  # bytes in a file: each of the six has 31 million
_UNPACKED = 192 << 20  # bytes in the archive: its files have 186 million
_MEMBERS = 100  # files and folders in the archive: it has 9
_STEPS = 100_000  # instructions in a file: 10,000 labels and 10,000 names of images take about 30,000

# The calls in a file with their arguments, and the state of a dtype: so Python 2 pickled an array of uint8.
_ARRAY = ("numpy.core.multiarray _reconstruct", ("numpy ndarray", (0,), b"b"))
_DTYPE = ("numpy dtype", (b"u1", False, True))
_UINT8 = (3, b"|", None, None, None, -1, -1, 0)
_NAMES = (_ARRAY[0], _ARRAY[1][0], _DTYPE[0])


def read(path: Path):
    """Return (images, labels) of the training set and of the test set, from the folder or from the archive."""
    batches = {name: _batch(f"{path}: {name}", data) for name, data in _contents(path)}
    if missing := [name for name in _FILES if name not in batches]:
        raise Mistake(f"{path}: {missing[0]} cannot be read (the archive does not hold it). Download it again.")
    x, y = (np.concatenate(parts) for parts in zip(*(batches[name] for name in _FILES[:-1]), strict=True))
    return (x, y), batches[_FILES[-1]]


def _contents(path: Path):
    """Yield the names and the bytes of the six files. An archive is read once, in its own order, and not extracted."""
    name = ""
    try:
        if path.is_dir():
            for name in _FILES:
                with reading.opened(path / name) as file:
                    yield name, _all(file)
            return
        names = {f"cifar-10-batches-py/{name}": name for name in _FILES}
        with (
            reading.opened(path) as raw,
            gzip.open(raw) as file,
            tarfile.open(fileobj=_Limited(file), mode="r|") as archive,
        ):
            for count, member in enumerate(archive):
                if count == _MEMBERS:
                    raise ValueError(f"it holds more than {_MEMBERS} files")
                if member.isreg() and member.name in names:
                    name = names[member.name]
                    yield name, _all(archive.extractfile(member))
                    name = ""
    except Exception as e:  # a damaged archive raises anything
        raise Mistake(f"{path}: {name or 'the archive'} cannot be read ({str(e)[:200]}). Download it again.") from e


def _all(file) -> bytes:
    data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    return data


class _Limited:
    """An open file that gives no more bytes than the archive of CIFAR-10 may have."""

    def __init__(self, file):
        self._file, self._left = file, _UNPACKED

    def read(self, size: int) -> bytes:
        """Return the next bytes, as many as `size` where there are so many."""
        self._left -= size
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {_UNPACKED} bytes")
        return self._file.read(size)


@dataclasses.dataclass(eq=False)
class _Made:
    """A stand-in for the result of a call: the call, and the state that the file gives to the result."""

    call: tuple
    state: tuple | None = None


def _batch(where: str, data: bytes):
    """Return the images and the labels in the bytes of a file."""
    try:
        x, y = _arrays(_value(data))
    except (ValueError, LookupError, DeprecationWarning) as e:  # of genops too, and of an empty stack or memo
        why = str(e)[:200] if isinstance(e, ValueError) else "its instructions do not fit together"
        raise Mistake(f"{where} is no batch of CIFAR-10: {why}. Download it again.") from e
    return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy(), y


def _value(data: bytes):
    """Return the value in a pickle: numbers, bytes, tuples, lists, dictionaries, stand-ins, and names as strings.

    Values can be nested so that it takes for ever to walk through them: compare them with constants, and never hash or
    print them.
    """
    stacks, memo = [[]], {}  # a mark begins a stack
    for step, (code, given, _) in enumerate(pickletools.genops(data)):
        if step == _STEPS:
            raise ValueError(f"it has more than {_STEPS} instructions")
        stack = stacks[-1]
        match code.name:
            case "PROTO":
                pass
            case "BININT" | "BININT1" | "BININT2":
                stack.append(given)
            case "BINSTRING" | "SHORT_BINSTRING":
                stack.append(given.encode("latin-1"))
            case "NONE" | "NEWFALSE" | "NEWTRUE":
                stack.append({"NONE": None, "NEWFALSE": False, "NEWTRUE": True}[code.name])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "BINPUT" | "LONG_BINPUT":
                memo[given] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[given])
            case "MARK":
                stacks.append([])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values = [stack.pop() for _ in range(int(code.name[-1]))]
                stack.append(tuple(values[::-1]))
            case "TUPLE" | "APPENDS" | "SETITEMS":
                stacks.pop()
                _gather(code.name, stack, stacks[-1])
            case "GLOBAL":
                if given not in _NAMES:
                    raise ValueError(f"it names {repr(given[:80])[1:-1].replace(' ', '.')}, which CIFAR-10 does not")
                stack.append(given)
            case "REDUCE":
                arguments, name = stack.pop(), stack.pop()
                if (name, arguments) not in (_ARRAY, _DTYPE):
                    raise ValueError("it calls what CIFAR-10 does not, or with other arguments")
                stack.append(_Made((name, arguments)))
            case "BUILD":
                state, made = stack.pop(), stack[-1]
                if type(made) is not _Made or made.state is not None or type(state) is not tuple:
                    raise ValueError("it gives a state to what has one, or to what can have none")
                made.state = state
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"it has the instruction {name}, which CIFAR-10 does not")


def _gather(how: str, values: list, stack: list):
    """Make one tuple of the values since a mark, or add them to the list or the dictionary before it."""
    if how == "TUPLE":
        stack.append(tuple(values))
    elif how == "APPENDS" and type(stack[-1]) is list:
        stack[-1].extend(values)
    elif how == "SETITEMS" and type(stack[-1]) is dict and len(values) % 2 == 0:
        if any(type(key) is not bytes for key in values[::2]):
            raise ValueError("a key in it is no string")
        stack[-1].update(zip(values[::2], values[1::2], strict=True))
    else:
        raise ValueError("it adds values to what is no list and no dictionary, or a key without a value")


def _arrays(batch):
    """Return the two arrays that a value stands for, if it is the dictionary of a batch."""
    array, labels = (batch.get(b"data"), batch.get(b"labels")) if type(batch) is dict else (None, None)
    if type(array) is not _Made or array.call != _ARRAY or len(array.state or ()) != 5 or type(labels) is not list:
        raise ValueError("it has no array called data, or no list called labels")
    version, shape, dtype, fortran, raw = array.state
    if type(dtype) is not _Made or dtype.call != _DTYPE or dtype.state != _UINT8:
        raise ValueError("the dtype of its data is not uint8")
    if version != 1 or fortran is not False or type(raw) is not bytes:
        raise ValueError("its data is no array of bytes in C order")
    if not all(type(label) is int and 0 <= label < len(CLASSES) for label in labels):
        raise ValueError(f"its labels should be numbers of 0..{len(CLASSES) - 1}")
    if not labels or shape != (len(labels), 3072) or len(raw) != 3072 * len(labels):
        got = f"{len(raw)} bytes and {len(labels)} labels"
        raise ValueError(f"it should hold uint8 (n, 3072) and n labels, and its shape does not fit {got}")
    return np.frombuffer(raw, np.uint8), np.array(labels, np.int32)
