"""The continuous soft threshold: its published values, its scale, its continuity and both of its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.kernels import limits

GOLDEN = [
    ([1, -2, 3, -4], [0, 0, 1, -2]),
    ([0.1, 0.5, -0.5, 2], [0, 0, 0, 1.5]),
    ([0, 0, 0, 3], [0, 0, 0, 3]),
    ([1, 1, 1, 1], [0, 0, 0, 0]),
    ([-0.3, 0.2, -0.9, 0.4], [0, 0, -0.6, 0.1]),
]
P = nm.soft(2, 4)
_CALL = jax.jit(lambda p, x, state: p(x, -1, nm.Ctx(state=state)), static_argnums=0)


_INIT = jax.jit(P.init, static_argnums=1)


def call(p, x, state=None):
    return np.asarray(_CALL(p, jnp.asarray(x), state))


def scale_of(w, axis=-1):
    return float(_INIT(jnp.asarray(w), axis))


@pytest.mark.parametrize(("a", "expected"), GOLDEN)
def test_golden_values(a, expected):
    a = np.array(a, np.float32)
    np.testing.assert_allclose(call(P, a), expected, rtol=1e-6)
    np.testing.assert_allclose(call(P, -a, jnp.float32(1.5)), -1.5 * np.array(expected), rtol=1e-6)


def test_golden_scale():
    w = jnp.array([GOLDEN[0][0], GOLDEN[1][0], GOLDEN[4][0]], jnp.float32)
    beta = _INIT(w, -1)
    assert beta.dtype == jnp.float32
    assert beta.shape == ()
    assert float(beta) == pytest.approx(14.58 / 7.62, rel=1e-6)
    assert scale_of(w) == pytest.approx(1.913386, abs=1e-6)
    assert scale_of(w.T, 0) == pytest.approx(1.913386, abs=1e-6)
    assert scale_of(w * 1e-12) == pytest.approx(1.913386, abs=1e-6)


def test_other_scales():
    """The scale "now" is that of the current weights and "one" is 1. Neither is state."""
    w, later = (jnp.asarray(np.random.default_rng(i).normal(size=(64, 64)), jnp.float32) for i in (0, 1))
    now, one = nm.soft(2, 4, scale="now"), nm.soft(2, 4, scale="one")
    np.testing.assert_allclose(call(now, later), call(P, later, _INIT(later, -1)), rtol=1e-6)
    np.testing.assert_array_equal(call(one, later), call(P, later))
    np.testing.assert_array_equal(call(one, later, jnp.float32(2)), call(P, later))  # it ignores state
    for p in (now, one):
        assert not p.facts.has_state
        assert p.init(w) is None
        assert nm.parse_pruner(str(p)) == p
        assert nm.Sparsity(y_w=nm.ste(p)).init(w, contract=0, out=1) == {}
    assert not limits.fuses(now)
    assert limits.fuses(one)
    with pytest.raises(ValueError, match="scale must be 'frozen', 'now' or 'one'"):
        nm.soft(2, 4, scale="2")


def soft_in_numpy(w):
    """Prune 2:4 with the branch-free order statistic of the published kernel."""
    a, b, c, d = np.moveaxis(np.abs(w), -1, 0)
    t = np.minimum(np.maximum(np.minimum(a, b), np.minimum(c, d)), np.minimum(np.maximum(a, b), np.maximum(c, d)))
    return np.sign(w) * np.maximum(np.abs(w) - t[..., None], 0)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (1, 4), (2, 4), (3, 4), (4, 4), (3, 8), (8, 32), (1, 128)])
def test_the_threshold_is_the_largest_dropped_value(n, m):
    w = np.random.default_rng(1).normal(size=(2000, m)).astype(np.float32)
    w[::5] = np.round(2 * w[::5])
    t = np.sort(np.abs(w), axis=1)[:, m - n - 1 : m - n] if n < m else np.float32(0)
    np.testing.assert_array_equal(call(nm.soft(n, m), w), np.sign(w) * np.maximum(np.abs(w) - t, 0))


def test_bfloat16_is_subtracted_in_float32():
    """The arithmetic is float32, because in bfloat16 close magnitudes would become ties or lose digits."""
    w = jnp.asarray(np.random.default_rng(2).normal(size=(5000, 4)), jnp.bfloat16)
    wide = np.asarray(w.astype(jnp.float32))
    got = call(P, w)
    assert got.dtype == jnp.bfloat16
    expected = jnp.asarray(soft_in_numpy(wide)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got.astype(np.float32), np.asarray(expected.astype(jnp.float32)))
    scaled = jnp.asarray(np.float32(1.483) * soft_in_numpy(wide)).astype(jnp.bfloat16)
    got = call(P, w, jnp.float32(1.483))
    np.testing.assert_array_equal(got.astype(np.float32), np.asarray(scaled.astype(jnp.float32)))


def test_scale_has_the_least_squared_error():
    w = np.random.default_rng(4).normal(size=(512, 4)).astype(np.float32)
    beta, s = scale_of(w), soft_in_numpy(w).astype(np.float64)
    loss = lambda b: np.sum((w - b * s) ** 2)
    assert loss(beta) < min(loss(beta * 1.001), loss(beta * 0.999), loss(1.0))


def test_scale_of_nothing_is_one():
    for w in (jnp.zeros((2, 4)), jnp.ones((2, 4))):
        assert scale_of(w) == 1.0
        assert call(P, w, jnp.float32(1)).tolist() == np.zeros((2, 4)).tolist()


def test_scale_is_frozen():
    w = jnp.asarray(np.random.default_rng(5).normal(size=(8, 4)), jnp.float32)
    beta = _INIT(w, -1)
    for step in (1, 40, 1000):
        assert P.refresh(w * 3 + 1, -1, nm.Ctx(state=beta, step=step)) is beta
    assert not P.facts.needs_state  # without state its scale is 1


def tied_blocks(rng, count):
    w = rng.normal(size=(count, 4))
    w[:, 1] = w[:, 0] * rng.choice([-1, 1], count)
    w[::2, 2] = w[::2, 0]
    w[::8, 3] = w[::8, 0]
    return rng.permuted(w, axis=1)


def steps(rng, p):
    """||p(w + d) - p(w)|| / ||d|| is bounded over random and tied blocks, with steps from tiny to large."""
    w = np.concatenate([rng.normal(size=(20_000, 4)), tied_blocks(rng, 20_000)]).astype(np.float32)
    d = rng.normal(size=w.shape) * 10 ** rng.uniform(-3, 1, (len(w), 1))
    moved = (w + d).astype(np.float32)
    norm = lambda v: np.sqrt((v.astype(np.float64) ** 2).sum(1))
    d = norm(moved.astype(np.float64) - w)
    # differences of float32 values of size |w| + |d|: a few ulp of noise
    return norm(call(p, moved).astype(np.float64) - call(p, w)), d, 1e-6 * (norm(w) + d)


def test_continuity():
    change, d, noise = steps(np.random.default_rng(6), P)
    assert (change <= np.sqrt(3) * d + noise).all()
    assert (change / d).max() > 1.6  # the bound is nearly reached
    change, d, noise = steps(np.random.default_rng(6), nm.mse(2, 4))
    assert (change / d).max() > 100  # a hard mask jumps


_JACOBIANS = jax.jit(lambda w: (jax.jacrev(P)(w), jax.jacfwd(P)(w)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_jacobian_of_the_bare_pruner(dtype):
    """A kept i has 1 at (i, i) and -sign(a_i) sign(a_j) at the threshold's entry j. The smallest entry gets nothing."""
    rng = np.random.default_rng(7)
    blocks = [[1, -2, 3, -4], [-0.25, 4, 0.5, -1]] + [
        rng.permutation([0.5, 1, 2, 4]) * rng.choice([-1, 1], 4) for _ in range(6)
    ]
    for a in np.array(blocks):
        order = np.argsort(np.abs(a))
        expected, owner = np.zeros((4, 4)), order[1]
        for i in order[2:]:
            expected[i, i], expected[i, owner] = 1, -np.sign(a[i]) * np.sign(a[owner])
        for got in _JACOBIANS(jnp.asarray(a, dtype)):
            np.testing.assert_array_equal(np.asarray(got).astype(np.float32), expected)
        assert (expected[:, order[0]] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_the_bare_pruner_is_not_lost(dtype):
    w = jnp.asarray(np.random.default_rng(8).normal(size=(64, 4)), dtype)
    g = jax.jit(jax.grad(lambda w: (P(w).astype(jnp.float32) ** 2).sum()))(w)
    assert g.dtype == dtype
    g, wide = np.asarray(g).astype(np.float64), np.asarray(w).astype(np.float64)
    nonzero = soft_in_numpy(wide) != 0
    assert nonzero.sum() > 120
    assert (g[nonzero] != 0).all()
    d = np.random.default_rng(9).normal(size=w.shape)
    if dtype == jnp.float32:  # bfloat16 has ties, where no derivative exists
        f = lambda w: (soft_in_numpy(w) ** 2).sum()
        slope = (f(wide + 1e-7 * d) - f(wide - 1e-7 * d)) / 2e-7
        assert np.vdot(g, d) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("state", [None, 1.5])
def test_straight_through_is_the_identity(dtype, state):
    """The scale does not enter the backward pass."""
    rng = np.random.default_rng(10)
    w, g = (jnp.asarray(rng.normal(size=(16, 8)), dtype) for _ in range(2))
    ctx = nm.Ctx(state=None if state is None else jnp.float32(state))
    f = jax.jit(lambda w: nm.ste(P)(w, -1, ctx))
    y, back = jax.vjp(f, w)
    np.testing.assert_array_equal(np.asarray(y), call(P, w, ctx.state))
    np.testing.assert_array_equal(np.asarray(back(g)[0]), np.asarray(g))
    _, tangent = jax.jvp(f, (w,), (g,))
    np.testing.assert_array_equal(np.asarray(tangent), np.asarray(g))
