"""The packed format, against an independent reading of what the hardware says of it."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import nmjax as nm
from nmjax.kernels import format as packing

NIBBLES = {0x4: (0, 1), 0x8: (0, 2), 0xC: (0, 3), 0x9: (1, 2), 0xD: (1, 3), 0xE: (2, 3)}


def two_of_four(shape, dtype, seed=0, axis=-1):
    """Random values at random places, two in every group of four along an axis: all six patterns."""
    draw = np.random.default_rng(seed)
    w = np.moveaxis(draw.standard_normal(shape), axis, -1)
    keep = draw.random((*w.shape[:-1], w.shape[-1] // 4, 4)).argsort(-1).argsort(-1) < 2
    return jnp.asarray(np.moveaxis(w * keep.reshape(w.shape), -1, axis), dtype)


# ---- the instructions, as CuTe's layouts and the PTX manual describe them: which bit of which thread says what ----


def fields16(thread: int, bit: int) -> tuple[int, int]:
    """CuTe's ELayout_64x32, ((2,2,8,4),(16,2)) : ((1024,0,1,16),(64,8)): bit -> (row, bit along k) of 64 x 32."""
    t0, t2, t3 = thread % 2, thread // 4 % 8, thread // 32
    at = t0 * 1024 + t2 + t3 * 16 + bit % 16 * 64 + bit // 16 * 8
    return at % 64, at // 64


def fields8(thread: int, bit: int) -> tuple[int, int]:
    """CuTe's ELayout_64x64, ((2,2,8,4),32) : ((8,2048,1,16),64)."""
    at = thread % 2 * 8 + thread // 2 % 2 * 2048 + thread // 4 % 8 + thread // 32 * 16 + bit * 64
    return at % 64, at // 64


def expanded(values, bits):
    """Return what an instruction multiplies: stored values [64, k/2] at the places that the bits [64, k] give."""
    nibbles = bits.reshape(64, -1, 4) @ np.array([1, 2, 4, 8])
    dense = np.zeros(bits.shape)
    for row in range(64):
        for group, nibble in enumerate(nibbles[row]):
            for slot, place in enumerate(NIBBLES[int(nibble)]):  # any other nibble is undefined
                dense[row, 4 * group + place] = values[row, 2 * group + slot]
    return dense


def instruction16(values, words, selector):
    """A of one wgmma.mma_async.sp.m64nNk32: the threads that the selector names hand over their word."""
    bits = np.zeros((64, 32), int)
    for thread in range(128):
        if thread % 4 // 2 == selector:
            for bit in range(32):
                bits[fields16(thread, bit)] = int(words[thread]) >> bit & 1
    return expanded(values, bits)


def instruction8(values, words):
    """A of one m64nNk64 of 8-bit values: all threads hand over a word."""
    bits = np.full((64, 64), -1)
    for thread in range(128):
        for bit in range(32):
            assert bits[fields8(thread, bit)] == -1
            bits[fields8(thread, bit)] = int(words[thread]) >> bit & 1
    return expanded(values, bits)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("axis", [-1, -2])
def test_words16_say_to_the_instruction_what_was_packed(dtype, axis):
    x = two_of_four((128, 192), dtype)
    packed = nm.pack(x if axis == -1 else x.T, axis)
    assert packed.order == "words16"
    assert packed.indices.shape == (2, 3, 128)
    values, words = np.asarray(packed.values if axis == -1 else packed.values.T, np.float64), np.asarray(packed.indices)
    x = np.asarray(x, np.float64)
    for i in range(2):
        for j in range(3):
            for selector in range(2):
                k = 64 * j + 32 * selector
                made = instruction16(values[64 * i : 64 * i + 64, k // 2 : k // 2 + 16], words[i, j], selector)
                np.testing.assert_array_equal(made, x[64 * i : 64 * i + 64, k : k + 32])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_words8_say_to_the_instruction_what_was_packed(dtype):
    x = two_of_four((128, 128), dtype)
    packed = nm.pack(x)
    assert packed.order == "words8"
    assert packed.indices.shape == (128, 4)
    stored, rows, x = np.asarray(packed.values, np.float64), np.asarray(packed.indices), np.asarray(x, np.float64)
    for i in range(2):
        for j in range(2):
            words = np.zeros(128, np.uint32)  # thread 32 w + 4 g + 2 b + a has row 16 w + g + 8 a, and k from 32 b on
            for thread in range(128):
                w, g, b, a = thread // 32, thread // 4 % 8, thread // 2 % 2, thread % 2
                words[thread] = rows[64 * i + 16 * w + g + 8 * a, 2 * j + b]
            made = instruction8(stored[64 * i : 64 * i + 64, 32 * j : 32 * j + 32], words)
            np.testing.assert_array_equal(made, x[64 * i : 64 * i + 64, 64 * j : 64 * j + 64])


def test_nibbles_are_legal():
    """Groups with fewer than two non-zeros, or none, name two rising places all the same."""
    x = jnp.where(np.random.default_rng(2).random((64, 256)) < 0.4, two_of_four((64, 256), jnp.bfloat16, 1), 0)
    assert 0 in np.asarray(nm.groups.counts(x, 4))
    nibbles = np.asarray(packing.nibbles16(nm.pack(x).indices))
    assert set(np.unique(nibbles)) == set(NIBBLES)
    np.testing.assert_array_equal(nm.unpack(nm.pack(x)), x)


# ---- any n:m, any axis ----


def packed_by_hand(x, axis, n, m):
    """Group by group."""
    x = np.moveaxis(np.asarray(x), axis, -1)
    groups = x.reshape(-1, m)
    values, places = np.zeros((len(groups), n), x.dtype), np.zeros((len(groups), n), np.uint8)
    for i, group in enumerate(groups):
        full = [j for j in range(m) if group[j] != 0]
        kept = sorted((full + [j for j in range(m) if j not in full])[:n])
        values[i], places[i] = group[kept], kept
    shape = (*x.shape[:-1], x.shape[-1] // m * n)
    return (np.moveaxis(v.reshape(shape), -1, axis) for v in (values, places))


patterns = st.sampled_from([(1, 2), (2, 4), (1, 4), (4, 8), (1, 8), (2, 8), (3, 5), (4, 4), (8, 16), (1, 32)])


@settings(max_examples=25)
@given(st.data(), patterns, st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]))
@pytest.mark.slow
def test_plain_order_is_what_hands_would_write(data, pattern, dtype):
    (n, m), rank = pattern, data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(-rank, rank - 1))
    shape = [2, 3, 1][:rank]  # few shapes: each is compiled
    shape[axis] *= m
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = jnp.asarray(np.where(draw.random(shape) < 0.8, draw.integers(-2, 3, shape), -0.0), dtype)
    x = nm.prune(nm.mse(n, m), x, axis=axis)
    packed = nm.pack(x, axis, n, m, order="plain")
    values, places = packed_by_hand(x, axis, n, m)
    np.testing.assert_array_equal(np.asarray(packed.values, np.float32), values.astype(np.float32))
    np.testing.assert_array_equal(packed.indices, places)
    assert packed.shape == x.shape
    assert packed.dtype == x.dtype
    np.testing.assert_array_equal(nm.unpack(packed).astype(jnp.float32), x.astype(jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("k", [4, 256, 300])
def test_sublanes_hold_eight_groups_that_are_eight_apart(k, dtype):
    x = two_of_four((2, k, 3), dtype, axis=-2)
    packed = nm.pack(x, -2, order="sublanes")
    assert packed.indices.shape == (2, -(-k // 256) * 8, 3)
    words, dense = np.asarray(packed.indices), np.zeros(x.shape)
    for group in range(words.shape[1] * 8):
        nibbles = words[:, group // 64 * 8 + group % 8] >> np.uint32(4 * (group // 8 % 8)) & 15
        for batch, column in itertools.product(range(2), range(3)):
            nibble = int(nibbles[batch, column])
            if group >= k // 4:
                assert nibble == packing.NO_GROUP
            for slot, place in enumerate(NIBBLES.get(nibble, ())):
                dense[batch, 4 * group + place, column] = packed.values[batch, 2 * group + slot, column]
    np.testing.assert_array_equal(dense, np.asarray(x, np.float64))
    np.testing.assert_array_equal(nm.unpack(packed), x)


@pytest.mark.slow
def test_orders_agree():
    """The same matrix in every order that takes it unpacks to itself."""
    x = two_of_four((2, 128, 64), jnp.bfloat16)
    for axis, y in ((-1, x), (-2, x.mT)):
        for order in ("plain", "words16"):
            np.testing.assert_array_equal(nm.unpack(nm.pack(y, axis, order=order)), y)


def test_a_packed_array_is_a_pytree():
    x = two_of_four((3, 64, 128), jnp.bfloat16)
    one = nm.pack(x)
    mapped = jax.vmap(nm.pack)(x)
    assert jax.tree.structure(mapped) == jax.tree.structure(one)
    for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(jax.jit(lambda p: nm.unpack(p))(one), x)
    _, again = jax.lax.scan(lambda c, p: (c, nm.unpack(p)), 0, one)
    np.testing.assert_array_equal(again, x)
    assert one.nbytes == x.nbytes * 9 // 16  # half of the values, and 1/16 of words


@pytest.mark.slow
def test_kernels_pick_the_two_that_pack_picks():
    draw = np.random.default_rng(3)
    v = [jnp.asarray(draw.integers(0, 2, 4096) * draw.standard_normal(4096), jnp.bfloat16) for _ in range(4)]
    x = jnp.stack(v, -1)
    few = nm.groups.counts(x, 4)[:, 0] <= 2
    first, second, nibble = packing.two_of_four(v)
    packed = nm.pack(x[few], order="plain")
    np.testing.assert_array_equal(jnp.stack([first, second], -1)[few], packed.values)
    np.testing.assert_array_equal(nibble[few], packed.indices[:, 0] | packed.indices[:, 1] << 2)
    for f, s in zip(np.asarray(first[~few]), np.asarray(second[~few]), strict=True):
        assert f != 0
        assert s != 0


# ---- edges ----


def test_zeros_negative_zeros_and_what_is_not_finite():
    x = jnp.array([[-0.0, 0.0, 0.0, -0.0], [jnp.nan, 0.0, jnp.inf, 0.0], [0.0, -0.0, 0.0, -jnp.inf]])
    packed = nm.pack(x)
    np.testing.assert_array_equal(packed.indices, [[0, 1], [0, 2], [0, 3]])
    np.testing.assert_array_equal(nm.unpack(packed), x)


def test_too_many_under_jit_are_nan():
    x = jnp.array([1.0, 2.0, 3.0, 0.0, 0.0, 5.0, 0.0, 0.0])
    y = jax.jit(lambda x: nm.unpack(nm.pack(x)))(x)
    assert jnp.isnan(y[:4]).sum() == 2
    np.testing.assert_array_equal(y[4:], x[4:])


@pytest.mark.slow
def test_natural_orders():
    order = lambda shape, dtype, axis=-1, **kw: nm.pack(jnp.zeros(shape, dtype), axis, **kw).order
    assert order((64, 64), jnp.bfloat16) == order((3, 64, 128), jnp.float16, 1) == "words16"
    assert order((5, 32), jnp.float8_e5m2) == "words8"
    assert order((64, 64), jnp.float32) == order((64, 32), jnp.bfloat16) == order((64,), jnp.bfloat16) == "plain"
    assert order((64, 64, 64), jnp.bfloat16, 0) == order((64, 64), jnp.float8_e4m3fn, 0) == "plain"
    assert order((64, 64), jnp.bfloat16, n=1) == "plain"


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: nm.pack(jnp.ones((2, 8)), 1), ValueError, r"^pack: 4 of 4 groups of 4 along axis 1 of an array of shape \(2, 8\) hold more than 2 non-zeros, the first at \[0, 0:4\]\. Prune it first, as nm\.prune\(nm\.mse\(2,4\), x, axis=1\)"),
        (lambda: nm.pack(jnp.eye(8).at[6, :4].set(1)), ValueError, r"1 of 16 groups .* \[6, 0:4\]"),
        (lambda: nm.pack(jnp.eye(8).at[4:, 5].set(1), 0), ValueError, r"1 of 16 groups of 4 along axis 0 .* \[4:8, 5\]"),
        (lambda: nm.pack(jnp.ones((2, 6))), ValueError, "6 values, which do not divide into groups of 4"),
        (lambda: nm.pack(jnp.ones((2, 8), jnp.int32)), TypeError, "only floating-point values"),
        (lambda: nm.pack(jnp.zeros(8), n=3, m=2), ValueError, "^pack: 3:2 is not a pattern"),
        (lambda: nm.pack(jnp.zeros(512), n=1, m=512), ValueError, "m is at most 256"),
        (lambda: nm.pack(jnp.zeros((64, 64)), order="words16"), ValueError, r"^pack: order 'words16' and an array of shape \(64, 64\) and dtype float32: it takes 16-bit values\. Cast it"),
        (lambda: nm.pack(jnp.zeros((64, 64), jnp.bfloat16), order="words8"), ValueError, "it takes 8-bit values"),
        (lambda: nm.pack(jnp.zeros((64, 96), jnp.bfloat16), order="words16"), ValueError, "both of its last axes must divide by 64. Pad it"),
        (lambda: nm.pack(jnp.zeros((4, 8), jnp.float8_e5m2), order="words8"), ValueError, "its last axis must divide by 32"),
        (lambda: nm.pack(jnp.zeros((64, 64), jnp.float8_e5m2), 0, order="words8"), ValueError, "8-bit values must be contiguous along their groups, .* not along axis 0"),
        (lambda: nm.pack(jnp.zeros((64, 64), jnp.bfloat16), n=1, order="words16"), ValueError, "2:4 only, not 1:4"),
        (lambda: nm.pack(jnp.zeros((64, 64)), order="sublanes"), ValueError, "groups must lie along the axis before the last, not along axis 1"),
        (lambda: nm.pack(jnp.zeros((64, 64), jnp.float8_e5m2), 0, order="sublanes"), ValueError, "it takes 16- or 32-bit values"),
        (lambda: nm.pack(jnp.zeros((64, 64)), 0, n=1, order="sublanes"), ValueError, "2:4 only, not 1:4"),
        (lambda: nm.pack(jnp.zeros((64, 64)), order="coo"), ValueError, "^pack: the orders are 'plain', 'words16', 'words8', 'sublanes', got 'coo'"),
    ],
)  # fmt: skip
def test_errors(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


def test_models_of_the_instructions_see_a_wrong_order():
    """The check can fail: one swapped pair of words is seen."""
    x = two_of_four((64, 64), jnp.bfloat16)
    packed = nm.pack(x)
    words = np.asarray(packed.indices[0, 0]).copy()
    words[[0, 1]] = words[[1, 0]]
    made = instruction16(np.asarray(packed.values[:, :16], np.float64), words, 0)
    assert (made != np.asarray(x[:, :32], np.float64)).any()


def test_values_of_fp8_round_trip_bit_for_bit():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    x = jnp.zeros((256, 64), jnp.float8_e4m3fn).at[:, 5].set(every)
    np.testing.assert_array_equal(np.asarray(nm.unpack(nm.pack(x))[:, 5]).view(np.uint8) & 0x7F, np.arange(256) & 0x7F)


# ---- PyTorch's form ----

# Of torch/sparse/_semi_structured_conversions.py: which of four values are not zero, and the bits of the group.
TORCH = {
    "1100": 0b0100, "1010": 0b1000, "0110": 0b1001, "1001": 0b1100, "0101": 0b1101, "0011": 0b1110,
    "0000": 0b1110, "0001": 0b1110, "0010": 0b1110, "0100": 0b1001, "1000": 0b1000,
}  # fmt: skip


def test_the_documented_function_gives_pytorchs_form():
    """Every four groups of the 11 kinds: the values and metadata of the table, which `pack` has for two non-zeros."""
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "weights.md").read_text()
    lines = re.search(r"(?m)^>>> def compressed.*\n(?:\.\.\. .*\n)+", page)[0]
    names = {"jnp": jnp}
    exec(re.sub(r"(?m)^(>>>|\.\.\.) ", "", lines), names)
    rows = list(itertools.product(TORCH, repeat=4))
    rows = rows[:: len(rows) // 512][:512]
    kept = np.array([[int(bit) for group in row for bit in group] for row in rows])
    w = (kept * np.random.default_rng(0).uniform(1, 2, kept.shape)).astype(ml_dtypes.bfloat16)
    values, metadata = names["compressed"](jnp.asarray(w))
    nibbles = np.array([[TORCH[group] for group in row] for row in rows])
    places = np.stack([nibbles & 3, nibbles >> 2], -1)
    expected = np.take_along_axis(w.reshape(-1, 4, 4), places, -1)
    np.testing.assert_array_equal(np.asarray(values), expected.reshape(len(w), 8))
    np.testing.assert_array_equal(np.asarray(metadata).astype(np.uint16)[:, 0], nibbles @ 16 ** np.arange(4))

    packed = nm.pack(jnp.asarray(w), order="plain")
    same = (np.asarray(packed.indices).reshape(places.shape) == places).all(-1)
    full = kept.reshape(-1, 4, 4).sum(-1) == 2
    assert same[full].all()
    assert not same[~full].all()
