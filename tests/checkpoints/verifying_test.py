"""The verifier: against counts by hand, and against torch's own compression where torch is installed."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.checkpoints import CheckpointError, verify, verifying, write

RNG = np.random.default_rng(0)


def pruned(shape, axis, n=2, m=4, dtype=np.float32):
    return np.array(nm.pruners.mse(n, m)(jnp.asarray(RNG.normal(size=shape), jnp.float32), axis), dtype)


def found(tmp_path, tensors, *args, **options):
    write(tmp_path / "model.safetensors", tensors)
    return verify(tmp_path, *args, **options)


def by_hand(x, n, m):
    """Return the broken groups along each axis, by loops."""
    counts = {}
    for axis in range(x.ndim):
        if x.shape[axis] % m == 0:
            lines = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
            counts[axis] = sum(
                sum(value != 0 for value in line[i : i + m]) > n for line in lines for i in range(0, len(line), m)
            )
    return counts


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (6, 8), (5, 7), (4, 8, 3, 3), (3, 4, 8)])
@pytest.mark.parametrize("chunk", [1, 50, 1 << 24])
def test_counts_are_those_by_hand(shape, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(verifying, "CHUNK", chunk)
    for n, m in ((2, 4), (1, 4), (2, 8), (1, 2)):
        x = np.where(RNG.random(shape) < 0.4, 1.0, 0.0).astype(np.float32)
        (one,) = found(tmp_path, {"w": x}, n, m).tensors
        counts = by_hand(x, n, m)
        assert one.axes == tuple(axis for axis, broken in counts.items() if not broken)
        assert one.broken == min(counts.values(), default=0)
        assert one.axis is None or counts[one.axis] == one.broken
        assert one.groups == (x.size // m if counts else 0)
        np.testing.assert_allclose(one.density, (x != 0).mean())


@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16, jnp.float8_e4m3fn, "int8", "float64"])
def test_dtypes(dtype, tmp_path):
    """-0.0 is zero and NaN is not. Integers other than int8, vectors and empty tensors are not looked at."""
    x = np.tile(np.array([[1, -0.0, 0, 2], [0, 0, 3, 4]]), (8, 1)).astype(dtype)
    others = {"ids": np.zeros((4, 4), np.int64), "bias": np.zeros(8, np.float32), "none": np.zeros((0, 4), np.float32)}
    (one,) = found(tmp_path, {"w": x, **others}).tensors
    assert (one.name, one.axes, one.density) == ("w", (1,), 0.5)
    if dtype != "int8":
        x[0, 1] = np.nan
        (one,) = found(tmp_path, {"w": x}).tensors
        assert (one.axes, one.broken, one.state) == ((), 1, "broken")


def damaged(groups):
    """Return an array of 128 groups of which some have four non-zeros."""
    x = pruned((8, 64), 1)
    x.reshape(-1)[: 4 * groups] = 1
    return x


STATES = {  # whether a file with one more tensor that is 2:4 holds, the state of the tensor, and what is printed of it
    "dense": (RNG.normal(size=(64, 64)), True, "dense", "no: "),
    "ones": (np.ones((8, 64)), True, "dense", "no: 100 % of groups have more than 2"),
    "zeros": (np.zeros((8, 8)), True, "zero", "all zero"),
    "a causal mask": (np.tril(np.ones((16, 16)))[None, None], True, "dense", "no: "),
    "a group": (damaged(1), False, "broken", "1 of 128 groups along axis 1 have more than 2"),
    "a tenth": (damaged(12), False, "broken", "12 of 128 groups along axis 1 have more than 2"),
    "more than a tenth": (damaged(16), True, "dense", "no: 12 % of groups have more than 2"),
}


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_tensor(case, tmp_path):
    """Zeros and dense tensors prove nothing. Few broken groups are a damaged weight, and many are another tensor."""
    x, holds, state, said = STATES[case]
    alone = found(tmp_path, {"w": x.astype(np.float32)})
    assert (alone.holds, alone.sparse, alone.tensors[0].state) == (False, (), state)
    report = found(tmp_path, {"w": x.astype(np.float32), "up": pruned((32, 64), 1)})
    assert (report.holds, [one.name for one in report.broken]) == (holds, ["w"] if state == "broken" else [])
    assert said in str(report)
    assert json.loads(json.dumps(report.as_dict()))["tensors"][0]["state"] == state


def test_alike_tensors_share_a_line(tmp_path):
    tensors = {f"layer.{i}.up.weight": pruned((32, 64), 1) for i in range(3)} | {"head": np.ones((5, 7), np.float32)}
    lines = str(found(tmp_path, tensors, programs=verifying.PROGRAMS)).splitlines()
    assert re.search(
        r"layer.0-2.up.weight +32 x 64 \(3 tensors\) +float32 +0.500 +along axis 1 +yes +yes +yes", lines[2]
    )
    assert re.search(r"head +5 x 7 +float32 +1.000 +no +it is not 2:4", lines[3])


def test_every_tensor_of_a_name_has_to_be_sparse(tmp_path):
    tensors = {"up": pruned((32, 64), 1), "down": RNG.normal(size=(64, 32)).astype(np.float32), "bias": np.ones(3)}
    assert found(tmp_path, tensors).holds
    report = verify(tmp_path, every="up|down|bias")
    assert not report.holds
    assert [one.name for one in report.dense] == ["down"]
    assert verify(tmp_path, every="u.*").holds
    with pytest.raises(CheckpointError, match="the tensors that match 'b.*' are empty or have one axis"):
        verify(tmp_path, every="b.*")
    assert not found(tmp_path, {"up": pruned((32, 64), 1), "us": np.zeros((8, 8), np.float32)}, every="u.*").holds


def test_a_tensor_that_cannot_be_verified_is_not_passed_by(tmp_path):
    tensors = {"up": pruned((32, 64), 1), "down": np.ones((64, 32), np.uint8)}
    assert found(tmp_path, tensors).holds
    with pytest.raises(CheckpointError, match="only floating-point numbers and int8 can be verified, not down uint8"):
        verify(tmp_path, every="up|down")


def test_a_file_that_no_program_can_use_does_not_hold(tmp_path):
    assert found(tmp_path, {"w": pruned((20, 20), 1)}).holds
    assert not verify(tmp_path, programs=["torch"]).holds
    assert verify(tmp_path, programs=["tensorrt"]).holds


@pytest.mark.parametrize(("pattern", "shape", "reason"), [
    ((1, 2), (6, 6), "its inputs do not divide by 4"), ((1, 2), (6, 8), None), ((2, 8), (6, 16), None),
    ((4, 8), (6, 16), "not checked for 2:4; use n=2, m=4"),
])  # fmt: skip
def test_other_patterns_that_are_2_4_too(pattern, shape, reason, tmp_path):
    x = pruned(shape, 1, *pattern)
    (one,) = found(tmp_path, {"w": x}, *pattern, programs=["tensorrt"]).tensors
    assert one.misfits == {"tensorrt": reason}


def test_names_are_printed_as_they_are(tmp_path):
    text = str(found(tmp_path, {"[bold]w[/a]\x1b[31m": pruned((8, 8), 1)}))
    assert "[bold]w[/a]\\x1b[31m" in text


FITS = {
    ("torch", (32, 64), 1, np.float16): None,
    ("torch", (48, 64), 1, np.float16): "rows and columns must be multiples of 32 and 64",
    ("cusparselt", (48, 64), 1, np.float16): None,
    ("cusparselt", (48, 40), 1, np.float16): "rows and columns must be multiples of 16 and 16",
    ("torch", (32, 64), 0, np.float16): "its groups lie along axis 0; programs need axis 1",
    ("torch", (32, 64), 1, jnp.float8_e4m3fn): "it has no kernel for float8_e4m3fn",
    ("cusparselt", (32, 64), 1, jnp.float8_e4m3fn): None,
    ("torch", (8, 8, 3, 3), 1, np.float16): "it is not a matrix",
    ("tensorrt", (8, 8, 3, 3), 1, np.float16): None,
    ("tensorrt", (6, 8), 1, np.float32): None,
}


@pytest.mark.parametrize("case", FITS)
def test_which_program_can_use_a_tensor(case, tmp_path):
    program, shape, axis, dtype = case
    (one,) = found(tmp_path, {"w": pruned(shape, axis, dtype=dtype)}, programs=[program]).tensors
    assert one.misfits == {program: FITS[case]}


@pytest.mark.parametrize("shape", [(32, 64), (64, 128), (48, 64), (32, 32), (96, 192), (16, 64)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_compresses_what_it_is_said_to_use(shape, dtype, tmp_path):
    """By the conversion of its CUTLASS form, which runs on a CPU: back to the same bits."""
    torch = pytest.importorskip("torch")
    from torch.sparse import SparseSemiStructuredTensorCUTLASS as Cutlass
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass as compress,
        sparse_semi_structured_to_dense_cutlass as restore,
    )

    x = pruned(shape, 1, dtype=jnp.dtype(dtype))
    (one,) = found(tmp_path, {"w": x}, programs=["torch"]).tensors
    tensor = torch.tensor(x.astype(np.float32)).to(getattr(torch, dtype))
    least = Cutlass._DTYPE_SHAPE_CONSTRAINTS[tensor.dtype]
    fits = shape[0] % least.sparse_min_rows == 0 and shape[1] % least.sparse_min_cols == 0
    assert (one.misfits["torch"] is None) == fits
    if fits:
        assert torch.equal(restore(*compress(tensor)), tensor)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="n must be at least 1 and less than m, got n=5 and m=4"):
        found(tmp_path, {"w": np.ones((4, 4), np.float32)}, 5, 4)
    with pytest.raises(ValueError, match="less than m, got n=4 and m=4"):
        verify(tmp_path, 4, 4)
    with pytest.raises(
        CheckpointError, match="no tensor has a name that matches 'v'.*as the file has them, such as 'w'"
    ):
        verify(tmp_path, every="v")
    with pytest.raises(CheckpointError, match="is not a regular expression"):
        verify(tmp_path, every="(")
    with pytest.raises(CheckpointError, match="the programs are torch, cusparselt, tensorrt, got 'onnx'"):
        verify(tmp_path, programs=["onnx"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16])
@pytest.mark.parametrize("name", ["up", "bias"])
def test_numbers_that_are_not_finite_do_not_hold(name, dtype, value, tmp_path, monkeypatch):
    """The value takes the place of one that is kept, so the pattern holds. It lies in the last chunk of three."""
    monkeypatch.setattr(verifying, "CHUNK", 800)
    tensors = {"up": pruned((32, 64), 1, dtype=jnp.dtype(dtype)), "bias": np.ones(2048, jnp.dtype(dtype))}
    assert found(tmp_path, tensors).holds
    flat = tensors[name].reshape(-1)
    flat[np.flatnonzero(flat)[-1]] = value
    report = found(tmp_path, tensors)
    assert (report.holds, report.not_finite, report.tensors[0].state) == (False, (name,), "n:m")
    assert str(report).endswith(f"\nNaN or infinity in {name}")
    assert json.loads(json.dumps(report.as_dict()))["not_finite"] == [name]
    assert verify(tmp_path, every="up").holds == (name == "bias")
