"""The generator: its exact words, and its statistical quality for fixed seeds with stated bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy import stats

import nmjax as nm
from nmjax.core import random

MASK = 0xFFFFFFFF


def fmix32(h: int) -> int:
    """Apply MurmurHash3's finaliser to a Python integer."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & MASK
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & MASK
    return h ^ (h >> 16)


GAMMA = [i * 0x9E3779B9 & MASK for i in (1, 2, 3)]


def scrambled(k0: int, k1: int) -> tuple[int, int]:
    """Apply three Feistel rounds to a key, as `random.scrambled` documents them."""
    for constant in GAMMA:
        k0, k1 = k1, k0 ^ fmix32(k1 + constant & MASK)
    return k0, k1


def unscrambled(a: int, b: int) -> tuple[int, int]:
    """Return the key that is scrambled to two words."""
    for constant in reversed(GAMMA):
        a, b = b ^ fmix32(a + constant & MASK), a
    return a, b


def words_of(seed, count, start=0):
    """Return ``count`` words of a key as a numpy array."""
    index = jnp.arange(start, start + count, dtype=jnp.uint32)
    return np.asarray(random.bits(random.words(seed), index))


# ---- exact values ----


def test_mix_is_murmur3s_finaliser():
    known = {0: 0, 1: 0x514E28B7, 2: 0x30F4C306, 0xFFFFFFFF: 0x81F16F39}
    rng = np.random.default_rng(0)
    inputs = [*known, *map(int, rng.integers(0, 2**32, 200))]
    got = np.asarray(random.mix(jnp.asarray(np.array(inputs, np.uint32)))).tolist()
    assert got[: len(known)] == list(known.values())
    assert got == [fmix32(i) for i in inputs]


@pytest.mark.parametrize("key", [(0, 0), (0, 1), (3, 5), (0xFFFFFFFF, 0x12345678), (0x9E3779B9, 0xFFFFFFFF)])
def test_bits_are_two_keyed_rounds(key):
    index = np.array([0, 1, 2, 3, 1000, 2**31, 2**32 - 1], np.uint32)
    got = random.bits(jnp.array(key, jnp.uint32), jnp.asarray(index))
    a, b = scrambled(*key)
    assert unscrambled(a, b) == key
    expected = [fmix32(fmix32(int(i) + a & MASK) ^ b) for i in index]
    assert np.asarray(got).tolist() == expected


# These words may never change: a run that a newer release resumes must draw the same noise.
GOLDEN = {
    "bits of (0, 5)": [1941338416, 570833491, 3021945352, 1411768711, 942549322, 585542701],
    "bits of (0xDEADBEEF, 0x01234567)": [552944183, 116038828, 1172376018, 2133783167, 2065210311, 2871368439],
    "fold((0, 5), 7)": [3161199523, 234652034],
    "uniform of (0, 5), in 2**-23": [3791676, 1114909, 5902237, 2757360, 1840916, 1143638],
}


def test_golden_words():
    k = jnp.array([0xDEADBEEF, 0x01234567], jnp.uint32)
    five = random.words(5)
    got = {
        "bits of (0, 5)": random.bits(five, random.counter((6,))),
        "bits of (0xDEADBEEF, 0x01234567)": random.bits(k, random.counter((2, 3))).reshape(-1),
        "fold((0, 5), 7)": random.fold(five, 7),
        "uniform of (0, 5), in 2**-23": random.uniform(five, (6,)) * 2**23,
    }
    assert {name: np.asarray(v).astype(np.int64).tolist() for name, v in got.items()} == GOLDEN


# ---- quality: a comment beside each bound gives the number of comparisons and the chance of a false alarm ----

SEEDS = [0, 1, 2, 64, 2**32 + 1, -1]


def chi2_z(counts):
    """Return the chi-square statistic of equally likely cells as a normal score."""
    expected = counts.sum() / counts.size
    return (np.sum((counts - expected) ** 2 / expected) - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shift", [24, 16, 8, 0])
def test_chi_square_of_bytes_and_of_serial_pairs(seed, shift):
    byte = (words_of(seed, 2**19) >> np.uint32(shift) & np.uint32(255)).astype(np.int64)
    assert abs(chi2_z(np.bincount(byte, minlength=256))) < 5  # 48 comparisons in all, two-sided: 3e-5
    assert abs(chi2_z(np.bincount(byte[::2] * 256 + byte[1::2], minlength=65536))) < 5


@pytest.mark.parametrize("where", ["index", "first key word", "second key word"])
@pytest.mark.parametrize("small", [False, True], ids=["random", "counting"])
def test_avalanche(where, small):
    """Every input bit flips every output bit half of the time, for random inputs and for counters with small keys."""
    n = 2**15
    rng = np.random.default_rng(2)
    index, k0, k1 = rng.integers(0, 2**32, (3, n), dtype=np.uint32)
    if small:
        index, k0, k1 = np.arange(n, dtype=np.uint32), np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32) % 65
    draw = jax.jit(jax.vmap(lambda i, a, b: random.bits(jnp.stack([a, b]), i)))
    base = np.asarray(draw(index, k0, k1))
    flips = np.empty((32, 32))
    for b in range(32):
        bit = np.uint32(1 << b)
        other = np.asarray(
            draw(
                index ^ bit if where == "index" else index,
                k0 ^ bit if where == "first key word" else k0,
                k1 ^ bit if where == "second key word" else k1,
            )
        )
        changed = base ^ other
        flips[b] = [(changed >> np.uint32(o) & np.uint32(1)).sum() for o in range(32)]
    z = (flips - n / 2) / np.sqrt(n / 4)
    # 1024 cells x 6 cases, 5.5 standard errors: 2e-4 by chance. The bound allows 1.5 %.
    assert np.abs(z).max() < 5.5


def correlations(streams):
    """Return the pairwise correlations of rows as normal scores."""
    x = streams.astype(np.float64) / 2**32 - 0.5
    return (x @ x.T * 12 / np.sqrt(x.shape[1]))[np.triu_indices(len(x), 1)]


@pytest.mark.parametrize(
    "keys",
    [
        [random.words(s) for s in range(65)],
        [random.fold(random.words(0), s) for s in range(65)],
        [random.fold(random.fold(random.words(s), 3), 1) for s in range(65)],
    ],
    ids=["small seeds", "folds of one key", "folds of small seeds"],
)
def test_streams_of_different_keys_are_uncorrelated(keys):
    streams = np.stack([np.asarray(random.bits(k, random.counter((2**14,)))) for k in keys])
    assert np.abs(correlations(streams)).max() < 5.5  # 2080 pairs x 3: 2e-4
    differing = np.array([bin(int(a)).count("1") for a in (streams[:1] ^ streams[1:])[:, :256].ravel()])
    z = (differing.mean() - 16) / np.sqrt(8 / differing.size)
    assert abs(z) < 5  # 3 comparisons


def overlaps(streams):
    """Return how often two neighbouring words occur at two places: in one stream, equal streams or shifted ones."""
    pairs = streams[:, :-1].astype(np.uint64) << np.uint64(32) | streams[:, 1:].astype(np.uint64)
    return pairs.size - len(np.unique(pairs))


@pytest.mark.slow
def test_streams_of_related_keys_are_neither_equal_nor_shifted():
    """For [layer, seed] and layer << 32 | seed, and for every step after that: 2**21 words, 1e-7 by chance."""
    few = jnp.arange(64, dtype=jnp.uint32)
    keys = jnp.stack(jnp.meshgrid(few, few), -1).reshape(-1, 2)
    draw = jax.jit(jax.vmap(lambda k: random.bits(k, random.counter((512,)))))
    assert overlaps(np.asarray(draw(keys))) == 0
    unscrambled_keys = jax.jit(jax.vmap(lambda k: random.stream((k[0], k[1]), random.counter((512,)))))
    assert overlaps(np.asarray(unscrambled_keys(keys))) > 1e6  # the check finds what scrambling prevents

    few = jnp.arange(32, dtype=jnp.uint32)
    high, low, step = (v.reshape(-1) for v in jnp.meshgrid(few, few, few))
    fold = lambda hi, lo, s: random.bits(random.fold(jnp.stack([hi, lo]), s), random.counter((64,)))
    streams = np.asarray(jax.jit(jax.vmap(fold))(high, low, step))
    assert overlaps(streams) == 0
    repeated = streams.size - len(np.unique(streams))  # single words: 512 by chance, Poisson
    assert abs(repeated - 2**42 / 2**33) < 5 * np.sqrt(512)
    assert np.abs(correlations(streams[:: len(streams) // 500])).max() < 6  # 125,000 pairs: 2e-4


@pytest.mark.slow
def test_a_key_and_a_step_do_not_stand_for_each_other():
    g = jax.random.normal(jax.random.key(0), (16, 8))
    first = nm.prune(nm.mvue(2, 4), g, key=0, step=1)
    for key in (1 << 32, 2 << 32, 1, 2):
        assert (nm.prune(nm.mvue(2, 4), g, key=key, step=0) != first).any()


def test_scrambling_is_a_bijection():
    few = np.array(np.meshgrid(np.arange(256), np.arange(256)), np.uint32).reshape(2, -1)
    a, b = jax.jit(jax.vmap(lambda k0, k1: random.scrambled(jnp.stack([k0, k1]))))(*few)
    for i in range(0, few.shape[1], 1111):
        assert unscrambled(int(a[i]), int(b[i])) == (few[0, i], few[1, i])
    for word in (np.asarray(a), np.asarray(b)):  # no word repeats more often than in a random map: 0.5 by chance
        assert len(word) - len(np.unique(word)) < 7


def test_folds_do_not_collide():
    folds = np.asarray(jax.jit(jax.vmap(lambda i: random.fold(random.words(9), i)))(np.arange(100_000)))
    as_one = folds[:, 0].astype(np.uint64) << np.uint64(32) | folds[:, 1].astype(np.uint64)
    assert len(np.unique(as_one)) == len(folds)
    # single words differ too, because the words of one key are a bijection of the index
    assert len(np.unique(folds)) == folds.size


def test_folding_does_not_commute_and_nests():
    a, b = random.fold(random.fold(random.words(0), 1), 2), random.fold(random.fold(random.words(0), 2), 1)
    assert (np.asarray(a) != np.asarray(b)).any()
    pairs = {tuple(np.asarray(random.fold(random.fold(random.words(s), i), j)).tolist())
             for s in range(6) for i in range(6) for j in range(6)}  # fmt: skip
    assert len(pairs) == 216


@pytest.mark.parametrize("fold", [False, True], ids=["one key", "a key each"])
def test_birthday_spacings(fold):
    """Marsaglia's test: among 4096 birthdays in a year of 2**32 days, about 4 spacings repeat."""
    repeats, m = 200, 4096
    if fold:
        keys = jax.vmap(lambda s: random.fold(random.words(4), s))(jnp.arange(repeats))
        days = np.asarray(jax.vmap(lambda k: random.bits(k, random.counter((m,))))(keys))
    else:
        days = words_of(4, repeats * m).reshape(repeats, m)
    spacings = np.sort(np.diff(np.sort(days.astype(np.int64), axis=1), axis=1), axis=1)
    repeated = (np.diff(spacings, axis=1) == 0).sum()
    assert abs(repeated - 4 * repeats) < 4.5 * np.sqrt(4 * repeats)  # Poisson; 2 comparisons: 1.4e-5


def test_uniform_is_uniform():
    u = np.asarray(random.uniform(random.words(11), (2**19,)), np.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert (u * 2**23 == np.floor(u * 2**23)).all()
    n = u.size  # 3 comparisons at 5 standard errors: 2e-6
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / n)
    assert stats.kstest(u, "uniform").pvalue > 1e-6


def test_uniform_reaches_zero_and_the_largest_below_one():
    """Both ends of the range occur. The key is chosen such that index 0 gives the word that is wanted."""

    def key_for(word):  # mix(mix(0) ^ b) = word  <=>  b = unmix(word), and mix(0) = 0
        h = word ^ word >> 16
        h = h * pow(0xC2B2AE35, -1, 2**32) & MASK
        h ^= h >> 13 ^ h >> 26
        h = h * pow(0x85EBCA6B, -1, 2**32) & MASK
        b = h ^ h >> 16
        assert fmix32(b) == word
        return jnp.array(unscrambled(0, b), jnp.uint32)

    assert float(random.uniform(key_for(0), (1,))[0]) == 0.0
    assert float(random.uniform(key_for(MASK), (1,))[0]) == 1 - 2.0**-23


# ---- indices ----


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (1, 1), (3, 1, 5), (2, 3, 4), (1, 6), (6, 1), (2, 1, 3, 1, 4), (0,), (3, 0, 2)]
)
def test_counter_is_row_major(shape):
    got = random.counter(shape)
    assert got.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(got), np.arange(np.prod(shape, dtype=int), dtype=np.uint32).reshape(shape))


def test_counter_refuses_more_than_a_key_has():
    jax.eval_shape(lambda: random.counter((2**16, 2**16)))
    with pytest.raises(ValueError, match="draws"):
        random.counter((2**16, 2**16, 2))


def test_bits_are_the_same_compiled_and_sharded():
    shape, key = (8, 12), random.words(21)
    draw = lambda k: random.bits(k, random.counter(shape))
    expected = np.asarray(draw(key))
    np.testing.assert_array_equal(np.asarray(jax.jit(draw)(key)), expected)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    for spec in (PartitionSpec("d"), PartitionSpec(None, "d")):
        sharded = jax.jit(draw, out_shardings=NamedSharding(mesh, spec))(key)
        assert len(sharded.sharding.device_set) == 4
        np.testing.assert_array_equal(np.asarray(sharded), expected)
        floats = jax.jit(lambda k: random.uniform(k, shape), out_shardings=NamedSharding(mesh, spec))(key)
        np.testing.assert_array_equal(np.asarray(floats), np.asarray(random.uniform(key, shape)))


# ---- keys ----


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (0, (0, 0)),
        (5, (0, 5)),
        (np.int64(5), (0, 5)),
        (2**32 + 7, (1, 7)),
        (2**64 - 1, (MASK, MASK)),
        (-1, (MASK, MASK)),
        (np.array([3, 4], np.uint32), (3, 4)),
        (jnp.array([3, 4], jnp.uint32), (3, 4)),
        (jax.random.key(5), (0, 5)),
        (jax.random.key(5, impl="threefry2x32"), (0, 5)),
        (jax.random.PRNGKey(5), (0, 5)),
    ],
)
def test_words_of_keys(key, expected):
    got = random.words(key)
    assert isinstance(got, jax.Array)
    assert got.dtype == jnp.uint32
    assert tuple(np.asarray(got).tolist()) == expected


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_words_of_wide_keys_use_all_of_the_key(impl):
    keys = set()
    for position in range(4):
        data = np.zeros(4, np.uint32)
        data[position] = 1
        got = random.words(jax.random.wrap_key_data(jnp.asarray(data), impl=impl))
        assert got.shape == (2,)
        assert got.dtype == jnp.uint32
        keys.add(tuple(np.asarray(got).tolist()))
    assert len(keys) == 4


def test_words_inside_jit():
    key = jax.random.key(5)
    np.testing.assert_array_equal(np.asarray(jax.jit(random.words)(key)), np.asarray(random.words(key)))
    np.testing.assert_array_equal(np.asarray(jax.jit(random.words)(random.words(5))), np.asarray(random.words(5)))


@pytest.mark.parametrize(
    "key",
    [
        None, True, 1.5, "seed", [0, 1], (0, 1), np.zeros(2, np.int32), np.zeros(3, np.uint32),
        np.zeros((2, 2), np.uint32), np.float32(1), jnp.zeros(2), jax.random.split(jax.random.key(0), 2),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_keys_are_refused(key):
    with pytest.raises(TypeError, match="key"):
        random.words(key)
