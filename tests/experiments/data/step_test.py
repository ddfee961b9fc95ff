"""Order, augmentation and windows: what of the data is computed inside the compiled step."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy import stats

from experiments.data import augment, order, text
from experiments.errors import Mistake

RNG = np.random.default_rng(0)
positions = jax.jit(order.positions, static_argnums=(2, 3))


# ---- order ----


def order_in_integers(seed, epoch, place, n):
    """One position in Python's own integers, from the formula of the module."""

    def mix(h):
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    width = (n - 1).bit_length()
    low_bits, high_bits = width // 2, width - width // 2
    key = mix((mix((seed + 0x9E3779B9) % 2**32) + epoch) % 2**32)
    keys = [mix((key + i * 0x9E3779B9) % 2**32) for i in range(1, 17)]
    while True:
        high, low = divmod(place, 2**low_bits)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            high ^= mix(low ^ even) % 2**high_bits
            low ^= mix(high ^ odd) % 2**low_bits
        place = high * 2**low_bits + low
        if place < n:
            return place


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 97, 1437, 50_000])
def test_every_epoch_is_a_permutation(n):
    epoch, index = positions(3, 0, 3 * n, n)
    assert epoch.dtype == index.dtype == jnp.int32
    np.testing.assert_array_equal(epoch, np.repeat([0, 1, 2], n))
    np.testing.assert_array_equal(np.sort(np.asarray(index).reshape(3, n)), np.tile(np.arange(n), (3, 1)))
    some = RNG.integers(0, 3 * n, 20)
    assert np.asarray(index)[some].tolist() == [order_in_integers(3, int(p) // n, int(p) % n, n) for p in some]


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "n"), [(7, 10), (25, 10), (64, 1437)])
def test_batches_tile_the_run(batch, n):
    steps = 12
    whole = positions(5, 0, steps * batch, n)
    parts = jax.vmap(lambda step: order.positions(5, step, batch, n))(jnp.arange(steps))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b.reshape(-1))


@pytest.mark.parametrize(
    ("seed", "step", "batch", "n"), [(0, 3, 8, 97), (2**32 - 1, 2**24 - 1, 256, 1437), (7, 2, 5, 1)]
)
def test_jit_eager_and_numpy_agree(seed, step, batch, n):
    eager = order.positions(seed, step, batch, n)
    traced = positions(jnp.uint32(seed), jnp.uint32(step), batch, n)
    host = order.positions(seed, step, batch, n, np)
    for a, b, c in zip(eager, traced, host, strict=True):
        assert isinstance(c, np.ndarray)
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    p = step * batch + np.arange(batch)  # up to 2**32, in int64
    np.testing.assert_array_equal(eager[0], p // n)
    assert np.asarray(eager[1]).tolist() == [order_in_integers(seed, int(q) // n, int(q) % n, n) for q in p]


def test_seeds_and_epochs_order_differently():
    """Two unrelated orders of 1437 agree in about one place. Ten orders have 45 pairs."""
    orders = [np.asarray(positions(seed, 0, 5 * 1437, 1437)[1]).reshape(5, -1) for seed in (0, 1)]
    orders = np.concatenate(orders)
    agree = [(orders[i] == orders[j]).sum() for i in range(10) for j in range(i)]
    assert max(agree) < 9
    assert 0 < sum(agree) < 80


def shuffles(n, seeds):
    return np.asarray(jax.jit(jax.vmap(lambda seed: order.positions(seed, 0, n, n)[1]))(jnp.arange(seeds)))


@pytest.mark.parametrize(("n", "seeds"), [(3, 20_000), (5, 20_000), (6, 50_000)])
def test_all_orders_of_few_are_as_likely(n, seeds):
    """Chi-square over the n! permutations, at 1 in 10,000."""
    code = shuffles(n, seeds) @ (n ** np.arange(n))
    counts = np.unique(code, return_counts=True)[1]
    assert len(counts) == np.prod(np.arange(1, n + 1))
    assert stats.chisquare(counts).pvalue > 1e-4


def test_neighbours_are_uncorrelated():
    """At 4 standard errors, in one large order; and the order is none of the places themselves."""
    p = np.asarray(positions(0, 0, 50_000, 50_000)[1], np.float64)
    bound = 4 / np.sqrt(len(p))
    for lag in (1, 2, 3, 128):
        assert abs(np.corrcoef(p[:-lag], p[lag:])[0, 1]) < bound
    assert abs(np.corrcoef(p, np.arange(len(p)))[0, 1]) < bound


@pytest.mark.parametrize(
    ("seed", "step", "batch", "n", "why"),
    [
        (0, 0, 4, 0, "at least 1 and less than 2\\*\\*31 samples; this one has 0"),
        (0, 0, 0, 4, "got batch=0"),
        (-1, 0, 4, 4, "seed of the data .* got -1"),
        (0, 2**24, 256, 4, "at most 2\\*\\*32 samples, and step 16777216 of 256"),
    ],
)
def test_order_refuses(seed, step, batch, n, why):
    with pytest.raises(Mistake, match=why):
        order.positions(seed, step, batch, n)


# ---- augmentation ----


def test_normalise():
    images = RNG.integers(0, 256, (5, 4, 3, 2), dtype=np.uint8)
    mean, std = np.array([0.3, 0.6]), np.array([0.2, 0.25])
    want = (images / 255 - mean) / std
    np.testing.assert_allclose(augment.normalise(jnp.asarray(images), mean, std), want, atol=2e-6)
    low = augment.normalise(jnp.asarray(images), (0.3, 0.6), (0.2, 0.25), jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(low, np.float32), want, rtol=2**-8, atol=1e-5)
    with pytest.raises(Mistake, match="have 2 channels"):
        augment.normalise(jnp.asarray(images), (0.3,), (0.2,))


def test_crop_draws_every_shift_as_often():
    """Against numpy's own shifts of images whose pixels all differ: one fits, each of the 25 as often as the others."""
    image = (np.arange(6 * 5 * 2, dtype=np.uint8) + 1).reshape(6, 5, 2)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    shifted = np.stack([padded[i : i + 6, j : j + 5] for i in range(5) for j in range(5)])
    got = np.asarray(jax.jit(augment.crop, static_argnums=2)(jax.random.key(0), jnp.asarray([image] * 5000), 2))
    assert got.dtype == np.uint8
    fits = (got[:, None] == shifted[None]).all((2, 3, 4))
    np.testing.assert_array_equal(fits.sum(1), 1)
    assert stats.chisquare(fits.sum(0)).pvalue > 1e-3
    assert augment.crop(jax.random.key(0), got, 0) is got


def test_flip_mirrors_half():
    images = RNG.integers(0, 256, (4000, 2, 3, 1), dtype=np.uint8)
    got = np.asarray(augment.flip(jax.random.key(0), jnp.asarray(images)))
    same, mirrored = ((got == x).all((1, 2, 3)) for x in (images, images[:, :, ::-1]))
    assert (same | mirrored).all()
    assert abs((mirrored & ~same).sum() - 2000) < 4 * np.sqrt(1000)


@pytest.mark.slow
def test_mixup():
    """One lambda for images and targets, of Beta's mean and variance, 1/2 and 1 / (4 (2 alpha + 1))."""
    alpha = 0.2
    images = jnp.asarray(RNG.normal(size=(6, 2, 2, 1)), jnp.float32)
    targets = augment.one_hot(jnp.arange(6), 6)
    mixed = jax.jit(jax.vmap(partial(augment.mixup, alpha=alpha), (0, None, None)))
    x, y = map(np.asarray, mixed(jax.random.split(jax.random.key(0), 5000), images, targets))
    lam = y[:, 0, 0]
    want = lam[:, None, None] * np.eye(6) + (1 - lam)[:, None, None] * np.roll(np.eye(6), 1, 0)
    np.testing.assert_allclose(y, want, atol=1e-6)
    np.testing.assert_allclose(x, np.einsum("sij,jhwc->sihwc", y, images), atol=1e-5)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(lam.mean() - 0.5) < 4 * np.sqrt(variance / 5000)
    assert abs(lam.var() - variance) < 4 * np.sqrt((1 / 16 - variance**2) / 5000)  # (lam - 1/2)**4 <= 1/16


def test_mixup_of_nothing():
    images, targets = jnp.ones((2, 1, 1, 1)), jnp.ones((2, 3))
    assert augment.mixup(jax.random.key(0), images, targets, 0.0) == (images, targets)
    low = jax.eval_shape(partial(augment.mixup, alpha=1.0), jax.random.key(0), images.astype(jnp.bfloat16), targets)
    assert [x.dtype for x in low] == [jnp.bfloat16, jnp.float32]


def test_one_hot():
    np.testing.assert_allclose(
        augment.one_hot(jnp.array([2, 0, -1]), 4, 0.1),
        [[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025], [0, 0, 0, 0]],
        atol=1e-7,
    )
    np.testing.assert_array_equal(augment.one_hot(jnp.array([1]), 3), [[0, 1, 0]])
    np.testing.assert_allclose(augment.one_hot(jnp.arange(7), 7, 0.3).sum(1), 1, atol=1e-6)


def everything(key, images, labels):
    keys = jax.random.split(key, 3)
    x = augment.normalise(augment.flip(keys[0], augment.crop(keys[1], images, 2)), (0.5, 0.4, 0.3), (0.2, 0.2, 0.3))
    return augment.mixup(keys[2], x, augment.one_hot(labels, 10, 0.1), 0.4)


@pytest.mark.slow
def test_a_batch_over_four_devices_is_augmented_alike():
    images, labels = RNG.integers(0, 256, (16, 8, 8, 3), dtype=np.uint8), RNG.integers(0, 10, 16).astype(np.int32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    x, y = jax.device_put((images, labels), split)
    key = jax.random.key(0)
    got = jax.jit(everything, out_shardings=split)(key, x, y)
    assert len(got[0].sharding.device_set) == 4
    for a, b in zip(got, jax.jit(everything)(key, images, labels), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    moved = jax.jit(lambda key, x: augment.flip(key, augment.crop(key, x, 2)), out_shardings=split)
    hlo = moved.lower(key, x).compile().as_text()
    assert "all-gather" not in hlo
    assert "all-reduce" not in hlo


# ---- windows ----


@pytest.mark.parametrize(("n", "length"), [(20, 4), (23, 4), (16, 8), (100, 1), (1000, 64)])
def test_windows_take_each_target_once_an_epoch(n, length):
    k = text.windows(n, length)
    epochs = 40 * length
    epoch, index = (x.reshape(-1) for x in np.meshgrid(np.arange(epochs), np.arange(k), indexing="ij"))
    rows = jnp.asarray(text.rows(np.arange(n, dtype=np.uint16), length))
    inputs, targets = jax.jit(text.take)(rows, jnp.asarray(epoch), jnp.asarray(index), 7)
    assert inputs.dtype == targets.dtype == jnp.int32
    inputs, targets = np.asarray(inputs).reshape(epochs, k * length), np.asarray(targets).reshape(epochs, k * length)
    shift = inputs[:, 0]
    np.testing.assert_array_equal(inputs, shift[:, None] + np.arange(k * length))  # so no start was clamped
    np.testing.assert_array_equal(targets, inputs + 1)
    assert targets.max() == n - n % length - 1
    counts = np.bincount(shift, minlength=length)
    assert len(counts) == length
    assert length == 1 or stats.chisquare(counts).pvalue > 1e-3


def test_other_seeds_shift_otherwise():
    rows, epoch = jnp.arange(2000).reshape(-1, 500), jnp.arange(50)
    starts = [np.asarray(text.take(rows, epoch, epoch * 0, seed)[0][:, 0]) for seed in (0, 1, jnp.uint32(1))]
    assert (starts[0] == starts[1]).sum() < 4
    np.testing.assert_array_equal(starts[1], starts[2])


def test_cut_for_evaluation(caplog):
    tokens = RNG.integers(0, 2**16, 30).astype(np.uint16)
    with caplog.at_level(logging.INFO):
        rows = text.cut(tokens, 7)
    assert rows.shape == (4, 8)
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows[:, 1:].reshape(-1), tokens[1:29])
    np.testing.assert_array_equal(rows[:, :-1].reshape(-1), tokens[:28])
    assert "the last 1 of 30 tokens" in caplog.text
    assert text.cut(tokens[:29], 7).shape == (4, 8)


def test_too_short_a_text():
    with pytest.raises(Mistake, match="windows of 8 tokens need a text of 16 tokens, and this one has 15"):
        text.windows(15, 8)
    with pytest.raises(Mistake, match="got length=0"):
        text.windows(15, 0)
    with pytest.raises(Mistake, match="need a test text of 9 tokens, and this one has 8"):
        text.cut(np.zeros(8, np.uint8), 8)
