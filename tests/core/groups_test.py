"""N:M arithmetic against plain numpy: stable sorts of integer magnitudes, loops over groups, explicit transposes."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nmjax.core import fusion, groups, merging

TOP = jax.jit(groups.top, static_argnums=(1, 2, 3))
INTS = {1: np.int8, 2: np.int16, 4: np.int32}
NM = [
    (1, 2),
    (1, 4),
    (2, 4),
    (3, 4),
    (4, 4),
    (3, 8),
    (4, 8),
    (8, 16),
    (1, 32),
    (8, 32),
    (31, 32),
    (1, 128),
    (5, 128),
    (16, 64),
]


def bits_of(x):
    """Return magnitude bits as wide integers. From 16 bits on, the two largest NaN payloads count as equal."""
    kind = INTS[x.dtype.itemsize]
    most = np.iinfo(kind).max
    if x.dtype.itemsize == 1:
        size = np.abs(x.astype(np.float64))
        return np.where(np.isnan(size), 2.0**40 + (x.view(kind).astype(np.int64) & most), np.minimum(size, 2.0**39))
    return np.minimum(x.view(kind).astype(np.int64) & most, most - 1)


def top_by_sorting(x, axis, n, m):
    """Return the mask of the first n of a stable descending sort of every group."""
    moved = np.moveaxis(bits_of(x), axis, -1)
    order = np.argsort(-moved.reshape(-1, m), axis=1, kind="stable")
    kept = np.zeros(order.shape, bool)
    np.put_along_axis(kept, order[:, :n], True, axis=1)
    return np.moveaxis(kept.reshape(moved.shape), -1, axis)


def awkward(rng, shape, dtype):
    """Return plain values mixed with ties, zeros of both signs, infinities and NaN of many payloads."""
    kind = INTS[np.dtype(dtype).itemsize]
    info = np.iinfo(kind)
    inf = np.array(np.inf, dtype).view(kind)
    special = np.array(
        [0, info.min, inf, inf | info.min, inf + 1, (inf + 1) | info.min, info.max, info.max - 1, -1, -2, 1], np.int64
    ).astype(kind)
    plain = rng.integers(-4, 5, shape).astype(np.float32).astype(dtype).view(kind)
    return np.where(rng.random(shape) < 0.3, rng.choice(special, shape), plain).view(dtype)


@pytest.mark.parametrize(
    ("n", "m", "dtype"),
    [*((*nm, d) for nm in NM for d in (np.float32, ml_dtypes.bfloat16)), (2, 4, np.float16), (8, 32, np.float16)],
)
def test_top_is_a_stable_sort(n, m, dtype):
    x = awkward(np.random.default_rng(m), (64, 2 * m), dtype)
    got = TOP(jnp.asarray(x), 1, n, m)
    np.testing.assert_array_equal(np.asarray(got), top_by_sorting(x, 1, n, m))
    assert (np.asarray(got).reshape(-1, m).sum(1) == n).all()


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 32), (5, 32)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_top_along_any_axis(n, m, axis):
    shape = [3, 2, 5]
    shape[axis] = 2 * m
    x = awkward(np.random.default_rng(3), tuple(shape), np.float32)
    np.testing.assert_array_equal(np.asarray(TOP(jnp.asarray(x), axis, n, m)), top_by_sorting(x, axis, n, m))


@pytest.mark.parametrize("m", [2, 4, 8, 16, 32, 128])
def test_top_with_a_traced_n(m):
    x = awkward(np.random.default_rng(4), (16, m), np.float32)
    traced = jax.jit(lambda x, n: groups.top(x, 1, n, m))
    for n in {0, 1, 2, m // 2, m - 1, m}:
        np.testing.assert_array_equal(np.asarray(traced(x, n)), top_by_sorting(x, 1, n, m))


@pytest.mark.parametrize(
    "way", [groups._by_rank, groups._by_bisection, groups._first_largest], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("m", [1, 3, 4, 17, 33])
def test_the_three_ways_agree_with_sorting(way, m):
    x = awkward(np.random.default_rng(5), (32, m), ml_dtypes.bfloat16)
    size = groups.magnitude(jnp.asarray(x))
    for n in {1} if way is groups._first_largest else {1, (m + 1) // 2, m}:
        got = jax.jit(lambda size: way(size, 1) if way is groups._first_largest else way(size, 1, n))(size)  # noqa: B023
        np.testing.assert_array_equal(np.asarray(got), top_by_sorting(x, 1, n, m))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_every_pattern_of_ties_of_a_small_group(n):
    x = np.array(list(itertools.product([0.0, -0.0, 1.0, -1.0, 2.0], repeat=4)), np.float32)
    np.testing.assert_array_equal(np.asarray(TOP(jnp.asarray(x), 1, n, 4)), top_by_sorting(x, 1, n, 4))


@pytest.mark.parametrize(
    ("bits", "kept"),
    [
        ([0x7FC0, 0x3F80, 0x7F80, 0xC000], [1, 0, 1, 0]),  # nan, 1, inf, -2
        ([0x3F80, 0xFFC0, 0xFF80, 0x7F80], [0, 1, 1, 0]),  # 1, -nan, -inf, inf
        ([0x7FFF, 0x7FFF, 0x7FFF, 0x7FFF], [1, 1, 0, 0]),  # the NaN whose successor does not fit the integer
        ([0x3F80, 0x7F80, 0x7FFF, 0xFFFF], [0, 0, 1, 1]),
        ([0x7F81, 0x7FC0, 0xFFFF, 0x7F80], [0, 1, 1, 0]),
        ([0x8000, 0x0000, 0x8000, 0x0000], [1, 1, 0, 0]),  # zeros of both signs are equal
        ([0x8000, 0x0001, 0x0000, 0x8001], [0, 1, 0, 1]),  # the smallest subnormals are more than zero
    ],
)
@pytest.mark.parametrize("m", [4, 32], ids=["rank", "bisection"])
def test_bit_patterns_of_bfloat16(bits, kept, m):
    x = np.array(bits, np.uint16).view(ml_dtypes.bfloat16)
    if m == 32:
        x, kept = np.concatenate([x, np.zeros(28, x.dtype)]), [*kept, *[0] * 28]
    np.testing.assert_array_equal(np.asarray(TOP(jnp.asarray(x), 0, 2, m)).astype(int), kept)


EIGHT_BITS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e4m3", "e3m4")


@pytest.mark.parametrize("dtype", [getattr(ml_dtypes, f"float8_{name}") for name in EIGHT_BITS], ids=EIGHT_BITS)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (8, 16), (1, 32), (16, 64)])
def test_top_of_eight_bit_floats(n, m, dtype):
    x = np.random.default_rng(6).integers(0, 256, (64, m)).astype(np.uint8).view(dtype)
    np.testing.assert_array_equal(np.asarray(TOP(jnp.asarray(x), 1, n, m)), top_by_sorting(x, 1, n, m))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e5m2, np.float32], ids=str)
@pytest.mark.parametrize("m", [2**15 - 1, 2**15, 2**15 + 1, 2**16, 2**17])
def test_long_groups(m, dtype):
    """Places do not fit the 16-bit integers that magnitudes of 16 bits are."""
    x = np.random.default_rng(m).integers(-3, 4, m).astype(dtype)
    for values in (x, np.ones(m, dtype)):
        for n in (1, 100, m - 1):
            np.testing.assert_array_equal(
                np.asarray(TOP(jnp.asarray(values), 0, n, m)), top_by_sorting(values, 0, n, m)
            )


@pytest.mark.parametrize(
    ("dtype", "words"), [("float8_e8m0fnu", "has no zero"), ("float4_e2m1fn", "fewer than 8 bits"), ("int8", "float")]
)
def test_dtypes_that_cannot_be_pruned(dtype, words):
    x = jnp.ones(4, dtype)
    for refused in (groups.magnitude, groups.wide, groups.check_floating):
        with pytest.raises(TypeError, match=f"dtype {dtype}, .*{words}.* x.astype"):
            refused(x)


@pytest.mark.slow
@hypothesis.given(
    st.lists(st.floats(width=32), min_size=32, max_size=32),
    st.sampled_from([(2, 4), (3, 8), (1, 32), (7, 32)]),
)
def test_top_of_any_floats(values, nm):
    n, m = nm
    x = np.array(values, np.float32)
    np.testing.assert_array_equal(np.asarray(TOP(jnp.asarray(x), 0, n, m)), top_by_sorting(x, 0, n, m))


@pytest.mark.slow
@hypothesis.given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, np.nan, np.inf]), min_size=24, max_size=24), st.integers(0, 4)
)
def test_counts_and_is_nm(values, n):
    x = np.array(values, np.float32)
    expected = [sum(v != 0 for v in x[i : i + 4]) for i in range(0, 24, 4)]
    assert groups.counts(jnp.asarray(x), 4).tolist() == expected
    assert bool(groups.is_nm(jnp.asarray(x), n, 4)) == (max(expected) <= n)


def test_counts_along_any_axis():
    x = np.random.default_rng(7).integers(0, 2, (4, 8, 12)).astype(np.float32)
    for axis in (0, 1, 2, -1, -2):
        moved = np.moveaxis(x, axis, -1)
        expected = np.moveaxis((moved.reshape(*moved.shape[:-1], -1, 4) != 0).sum(-1), -1, axis)
        np.testing.assert_array_equal(np.asarray(groups.counts(jnp.asarray(x), 4, axis)), expected)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_split_puts_members_beside_their_groups(axis):
    x = np.arange(4 * 8 * 12, dtype=np.float32).reshape(4, 8, 12)
    got = np.asarray(groups.split(jnp.asarray(x), axis, 4))
    assert got.ndim == 4
    for g in range(x.shape[axis] // 4):
        for j in range(4):
            place = [slice(None)] * 3
            place[axis] = 4 * g + j
            at = [slice(None)] * 4
            at[axis % 3], at[axis % 3 + 1] = g, j
            np.testing.assert_array_equal(got[tuple(at)], x[tuple(place)])
    np.testing.assert_array_equal(got.reshape(x.shape), x)


@pytest.mark.parametrize(("shape", "axis", "m"), [((6,), 0, 4), ((4, 2), 1, 4), ((0,), 0, 4), ((4, 0), 1, 1)])
def test_split_refuses_what_does_not_divide(shape, axis, m):
    with pytest.raises(ValueError, match="groups of"):
        groups.split(jnp.zeros(shape), axis, m)


@pytest.mark.parametrize("axis", [2, -3, 5])
def test_axes_that_do_not_exist(axis):
    with pytest.raises(ValueError, match="does not exist"):
        groups.top(jnp.zeros((4, 4)), axis, 2, 4)


def test_members_are_slices():
    g = jnp.arange(24.0).reshape(2, 3, 4)
    got = groups.members(g, 1)
    assert [v.shape for v in got] == [(2, 1, 4)] * 3
    np.testing.assert_array_equal(np.concatenate([np.asarray(v) for v in got], 1), np.asarray(g))


# ---- merge ----


def merged_axes(shape, axes, block):
    """Return how many of the innermost axes a block needs to divide their size, or None if all do not suffice."""
    for taken in range(1, len(axes) + 1):
        if np.prod([shape[a] for a in axes[-taken:]]) % block == 0:
            return axes[-taken:]
    return None


def check_merge(shape, axes, block):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    inner = merged_axes(shape, axes, block)
    got = merging.merge(jnp.asarray(x), axes, block)
    if inner is None:
        assert got is None
        return
    flat, axis, where, back = got
    np.testing.assert_array_equal(np.asarray(back(flat)), x)
    assert flat.shape[axis] == np.prod([shape[a] for a in inner])
    if len(inner) == 1:
        np.testing.assert_array_equal(np.asarray(flat), x)
        assert axis == inner[0]
        assert where == tuple(range(len(shape)))
        return
    assert [a for a in range(len(shape)) if where[a] is None] == sorted(inner)
    kept = [a for a in range(len(shape)) if a not in inner]
    assert sorted([axis, *(where[a] for a in kept)]) == list(range(flat.ndim))
    # in the merged axis the last contracted axis varies fastest, and other axes do not change
    flat = np.asarray(flat)
    for index in np.ndindex(*shape):
        position = np.ravel_multi_index([index[a] for a in inner], [shape[a] for a in inner])
        at = [0] * flat.ndim
        at[axis] = position
        for a in kept:
            at[where[a]] = index[a]
        assert flat[tuple(at)] == x[index]


@pytest.mark.parametrize(
    ("shape", "axes", "block"),
    [
        ((8,), (0,), 4),
        ((3, 8), (0, 1), 4),
        ((8, 3), (0, 1), 4),
        ((8, 3), (1, 0), 4),
        ((2, 3, 6), (0, 2), 4),
        ((2, 3, 6), (2, 0), 12),
        ((2, 3, 2, 5), (0, 1, 2), 4),
        ((2, 3, 2, 5), (0, 1, 2), 12),
        ((2, 3, 2, 5), (2, 0, 1), 6),
        ((2, 3, 2, 5), (3, 1), 4),
        ((4, 3), (0,), 8),
        ((3, 5), (0, 1), 4),
    ],
)
def test_merge(shape, axes, block):
    check_merge(shape, axes, block)


@pytest.mark.slow
@hypothesis.given(st.data())
def test_merge_of_any_axes(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axes = tuple(data.draw(st.permutations(range(len(shape)))))[: data.draw(st.integers(1, len(shape)))]
    check_merge(shape, axes, data.draw(st.sampled_from([1, 2, 3, 4, 6, 8])))


# ---- dtypes ----


def test_wide_and_rounded():
    assert groups.wide(jnp.zeros(1, jnp.bfloat16)).dtype == jnp.float32
    assert groups.wide(jnp.zeros(1, jnp.float16)).dtype == jnp.float32
    assert groups.wide(jnp.zeros(1, jnp.float32)).dtype == jnp.float32
    x = np.random.default_rng(8).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    x = x[(np.abs(x) > 1e-37) | (x == 0)]  # some hardware flushes subnormal results to zero
    x = np.concatenate([x, np.array([0, -0.0, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, 3.39e38], np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float32):
            got = np.asarray(fusion.rounded(jnp.asarray(x), jnp.dtype(dtype)))
            expected = x.astype(dtype)
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
            assert (np.signbit(got) == np.signbit(expected))[~np.isnan(x)].all()


def test_float64_is_rounded_to_the_same_shape():
    with jax.enable_x64(True):
        assert fusion.rounded(jnp.array([1.001, 2.0], jnp.float64), jnp.bfloat16).tolist() == [1.0, 2.0]


def test_rounded_has_the_derivative_of_a_cast():
    for dtype in (jnp.bfloat16, jnp.float32):
        f = lambda x: fusion.rounded(x, dtype)  # noqa: B023
        primal, tangent = jax.jvp(f, (jnp.array([1.5, 2.0]),), (jnp.array([3.0, 4.0]),))
        assert primal.dtype == tangent.dtype == dtype
        assert tangent.tolist() == [3.0, 4.0]
        (back,) = jax.vjp(f, jnp.array([1.5, 2.0]))[1](jnp.array([3.0, 4.0], dtype))
        assert back.dtype == jnp.float32
        assert back.tolist() == [3.0, 4.0]
