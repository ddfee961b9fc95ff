"""Files of tensors: against the package safetensors, and files that are damaged."""

import json
import os
import struct
import subprocess
import sys

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given

from nmjax.checkpoints.tensors import DTYPES, INDEX, CheckpointError, read, write

PEERS = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64"]


def some(dtype, shape, seed=0):
    """Return an array of random bytes: also -0.0, NaN of every kind, and denormals."""
    drawn = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize)
    if dtype == "BOOL":
        drawn = bytes(byte & 1 for byte in drawn)
    return np.frombuffer(drawn, DTYPES[dtype]).reshape(shape)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def raw(path, header, content=b""):
    """Write a file by hand. The header is a text, or an object that becomes one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


def entry(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


# ---- files that are right ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (4, 0, 2), (1, 1, 1, 2)])
def test_every_dtype_comes_back_bit_for_bit(dtype, shape, tmp_path):
    value = some(dtype, shape)
    write(tmp_path / "m.safetensors", {"x": value, "odd": some("U8", (3,)), "y": value})
    got = read(tmp_path / "m.safetensors")
    assert same(got["x"], value)
    assert same(got["y"], value)
    assert (got.dtype("y"), got.shape("y")) == (value.dtype, value.shape)
    assert not got["x"].flags.writeable


@pytest.mark.slow
@given(
    named=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(PEERS), st.lists(st.integers(0, 4), max_size=3)), max_size=6,
    ),
    metadata=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), st.just("x"), max_size=1),
)  # fmt: skip
def test_the_package_and_this_read_and_write_the_same_bytes(tmp_path_factory, named, metadata):
    folder = tmp_path_factory.mktemp("peer")
    values = {name: some(dtype, tuple(shape)) for name, (dtype, shape) in named.items()}
    safetensors.numpy.save_file(values, folder / "theirs.safetensors", metadata or None)
    got = read(folder / "theirs.safetensors")
    assert dict(got.metadata) == metadata
    assert set(got) == set(values)
    assert all(same(got[name], value) for name, value in values.items())
    write(folder / "ours.safetensors", got, got.metadata)
    assert (folder / "ours.safetensors").read_bytes() == (folder / "theirs.safetensors").read_bytes()
    write(folder / "other.safetensors", dict(reversed(values.items())), metadata)  # in an order that it never writes
    theirs = safetensors.numpy.load_file(folder / "other.safetensors")
    assert set(theirs) == set(values)
    assert all(same(theirs[name], value) for name, value in values.items())


def test_arrays_of_jax_views_and_other_byte_orders(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    values = {"jax": jnp.asarray(x, jnp.bfloat16), "view": x.T[::2], "big": x.astype(">f4"), "scalar": np.float64(2)}
    write(tmp_path / "m.safetensors", values)
    got = read(tmp_path / "m.safetensors")
    assert list(got) == list(values)
    assert same(got["jax"], np.asarray(values["jax"]))
    np.testing.assert_array_equal(got["view"], x.T[::2])
    np.testing.assert_array_equal(got["big"], x)
    assert got["big"].dtype == np.float32
    assert got["scalar"] == 2


def test_several_files_and_an_index(tmp_path):
    values = {f"w{i}": some("F32", (2, i + 1), i) for i in range(4)}
    write(tmp_path / "model-1.safetensors", {name: values[name] for name in ("w0", "w1")}, {"format": "pt"})
    write(tmp_path / "model-2.safetensors", {name: values[name] for name in ("w2", "w3")}, {"format": "other"})
    where = {"w3": "model-2.safetensors", "w0": "model-1.safetensors", "w1": "model-1.safetensors"}
    where["w2"] = "model-2.safetensors"
    about = {"total_size": 80, "note": "\U0001f600"}  # two halves that JSON escapes are one character
    (tmp_path / f"model{INDEX}").write_text(json.dumps({"metadata": about, "weight_map": where}))
    for path in (tmp_path, tmp_path / f"model{INDEX}"):
        got = read(path)
        assert set(got) == set(values)
        assert all(same(got[name], value) for name, value in values.items())
        assert [(path.name, names) for path, names in got.files.items()] == [
            ("model-2.safetensors", ("w2", "w3")), ("model-1.safetensors", ("w0", "w1")),
        ]  # fmt: skip
        assert (got.metadata, got.about) == ({"format": "other"}, about)
    write(tmp_path / "model.safetensors", {"w0": values["w1"]})  # what other programs read in place of the index
    with pytest.raises(
        CheckpointError, match=r"has model.safetensors.index.json and, of other tensors, model.safetens"
    ):
        read(tmp_path)
    assert set(read(tmp_path / f"model{INDEX}")) == set(values)
    assert list(read(tmp_path / "model.safetensors")) == ["w0"]


# ---- files that are wrong ----

REFUSED = [
    ("cut", b"\5\0\0", "has at least 8 bytes, and this one has 3"),
    ("length", struct.pack("<Q", 2**63) + b"{}", "the header would have 9,223,372,036,854,775,808 bytes"),
    ("not JSON", b"{]", "this is not valid JSON"),
    ("a list", [], "the header is not a JSON object"),
    ("not UTF-8", b'{"\xff": 1}', "this is not valid JSON"),
    ("deep", b"[" * 200_000, "this is not valid JSON"),
    ("half a character", b'{"\\ud800": 1}', "a name or a text is not valid Unicode"),
    ("half in a text", b'{"__metadata__": {"a": "\\uDC00"}}', "a name or a text is not valid Unicode"),
    ("large", b"{" + b" " * 40_000_000 + b"}", "the names and shapes of the tensors take more than 32,000,000 bytes"),
    ("twice", b'{"a": 1, "a": 2}', "the name 'a' appears twice"),
    ("metadata", {"__metadata__": {"a": 1}}, "'__metadata__' in the header is not a table of texts"),
    ("no entry", {"a": 3}, "does not say dtype, shape and data_offsets of the tensor 'a'"),
    ("no offsets", {"a": {"dtype": "U8", "shape": [1]}}, "does not say dtype, shape and data_offsets"),
    ("bool", {"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, "does not say dtype, shape"),
    ("negative", {"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, "does not say dtype, shape"),
    ("before", {"a": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}}, "does not say dtype, shape"),
    ("float", {"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, "does not say dtype, shape"),
    ("dtype", {"a": entry(0, 4, "F3", [8])}, "has dtype 'F3'. Supported: BOOL, U8"),
    ("dtype of a list", {"a": entry(0, 4, [], [8])}, r"has dtype \[\]. Supported:"),
    ("axes", {"a": entry(0, 1, shape=[1] * 65)}, "has 65 axes"),
    ("size", {"a": entry(0, 4, "F32", [2])}, r"of shape \(2,\) and dtype F32 has 8 bytes, and its data_offsets are"),
    ("huge", {"a": entry(0, 4, "F32", [2**62, 2**62])}, "has 85,070"),
    ("huge without values", {"a": entry(0, 0, "F32", [0, 2**62])}, "the tensor 'a' of shape .* is too large"),
    ("overlap", {"a": entry(0, 4), "b": entry(2, 6)}, "the tensor 'b' overlaps the one before it"),
    ("same place", {"a": entry(0, 4), "b": entry(0, 4)}, "the tensor 'b' overlaps the one before it"),
    ("hole", {"a": entry(0, 4), "b": entry(5, 8)}, "the tensor 'b' begins 1 bytes after the one before"),
    ("late", {"a": entry(2, 8)}, "the tensor 'a' begins 2 bytes after"),
    ("short", {"a": entry(0, 9)}, "the tensors end at byte .* The file is cut short"),
    ("rest", {"a": entry(0, 7)}, "the tensors end at byte .* The rest belongs to no tensor"),
]


@pytest.mark.parametrize(("header", "said"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_a_wrong_file_is_refused_with_a_sentence(header, said, tmp_path):
    path = tmp_path / "m.safetensors"
    if said.startswith(("has at least", "the header would")):
        path.write_bytes(header)
    else:
        raw(path, header, bytes(8))
    with pytest.raises(CheckpointError, match=said) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([], "an index has a table 'weight_map'"),
        ({"weight_map": {}}, "an index has a table 'weight_map'"),
        ({"weight_map": {"a": 1}}, "an index has a table 'weight_map'"),
        ({"weight_map": {"a": "../m.safetensors"}}, "'../m.safetensors' is not the name of a file in the same folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd' is not the name of a file in the same folder"),
        ({"weight_map": {"a": "sub\\m.safetensors"}}, "is not the name of a file in the same folder"),
        ({"weight_map": {"a": ".."}}, "'..' is not the name of a file in the same folder"),
        ({"weight_map": {"b": "1.safetensors"}}, "the tensor 'b' is not in 1.safetensors, where the index has it"),
        ({"weight_map": {"a": "1.safetensors"}}, "the files have a tensor 'c' that the index does not have"),
        ({"weight_map": {"a": "1.safetensors", "c": "2.safetensors"}}, "the tensor 'c' is in another file"),
        ({"weight_map": {"\ud800": "1.safetensors"}}, "a name or a text is not valid Unicode"),
        ({"weight_map": {"a": "\udc00.safetensors"}}, "a name or a text is not valid Unicode"),
        ({"weight_map": {"a": "3.safetensors"}}, "No such file or directory: '.*3.safetensors'"),
    ],
)
def test_a_wrong_index_is_refused_with_a_sentence(index, said, tmp_path):
    write(tmp_path / "1.safetensors", {"a": some("U8", (2,)), "c": some("U8", (2,))})
    write(tmp_path / "2.safetensors", {"c": some("U8", (2,))})
    (tmp_path / f"model{INDEX}").write_text(json.dumps(index))
    with pytest.raises((CheckpointError, FileNotFoundError), match=said):
        read(tmp_path)


def test_a_large_index_is_not_read_into_memory(tmp_path):
    with (tmp_path / f"model{INDEX}").open("wb") as file:
        file.truncate(1 << 40)  # zeros that take no place
    with pytest.raises(CheckpointError, match="take more than 32,000,000 bytes"):
        read(tmp_path)


def test_a_folder_must_say_which_file(tmp_path):
    with pytest.raises(CheckpointError, match="the folder has no .safetensors file"):
        read(tmp_path)
    write(tmp_path / "a.safetensors", {})
    assert dict(read(tmp_path)) == {}
    write(tmp_path / "b.safetensors", {})
    with pytest.raises(CheckpointError, match=r"the folder has a.safetensors, b.safetensors: name one"):
        read(tmp_path)


# ---- writing ----


class Odd:
    """An array that gives other values than it declares, or none."""

    dtype, shape = np.dtype(np.float32), (4,)

    def __init__(self, value=None):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        if self.value is None:
            raise RuntimeError("no values")
        return self.value


@pytest.mark.parametrize(
    ("tensors", "metadata", "said"),
    [
        ({"a": np.zeros(4), "b": Odd()}, None, "no values"),
        ({"a": Odd(np.zeros(3, np.float32))}, None, r"'a' was declared with shape \(4,\), and has \(3,\) of float32"),
        ({"a": Odd(np.zeros(4))}, None, r"'a' was declared with shape \(4,\), and has \(4,\) of float64"),
        ({"a": np.array(["x"])}, None, "the tensor 'a' has dtype <U1, which safetensors lacks"),
        ({"a": np.zeros(2, np.complex128)}, None, "the tensor 'a' has dtype complex128, which safetensors lacks"),
        ({"__metadata__": np.zeros(2)}, None, "a tensor cannot be named '__metadata__'"),
        ({"w": np.zeros(1)}, {"a": 1}, "metadata must be strings by name"),
        ({"w": np.zeros(1)}, {1: "a"}, "metadata must be strings by name"),
        ({"a\ud800": np.zeros(1)}, None, "is not valid Unicode"),
        ({"w": np.zeros(1)}, {"a": "\ud800"}, "is not valid Unicode"),
    ],
)
def test_what_cannot_be_written_changes_nothing(tensors, metadata, said, tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises((CheckpointError, RuntimeError), match=said):
        write(path, tensors, metadata)
    assert os.listdir(tmp_path) == []
    write(path, {"a": some("F32", (4,))})
    before = path.read_bytes()
    with pytest.raises((CheckpointError, RuntimeError), match=said):
        write(path, tensors, metadata)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing/m.safetensors"):
        write(tmp_path / "missing" / "m.safetensors", {})


# ---- size ----


@pytest.mark.slow
def test_a_header_of_100_000_tensors(tmp_path):
    values = {f"blocks/{i}/weight": np.uint8([i % 256]) for i in range(100_000)}
    write(tmp_path / "m.safetensors", values)
    got = read(tmp_path / "m.safetensors")
    assert len(got) == 100_000
    assert got["blocks/99999/weight"] == 99999 % 256


MEMORY = """
import resource, sys
import numpy as np
from nmjax.checkpoints.tensors import read, write
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensors = read(sys.argv[1])
assert tensors["first"][0, 0] == 0
opened = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write(sys.argv[2], tensors)
print(opened - before)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_opening_a_file_reads_only_what_is_used(tmp_path):
    """200 MB of tensors: opening them and using one value takes less than a tenth of that in memory."""
    values = {name: np.zeros((5000, 5000), np.float32) for name in ("first", "second")}
    write(tmp_path / "m.safetensors", values)
    told = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "m.safetensors"), str(tmp_path / "n.safetensors")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    unit = 1024 if sys.platform == "linux" else 1
    assert int(told.stdout) * unit < 20e6
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "n.safetensors").read_bytes()
