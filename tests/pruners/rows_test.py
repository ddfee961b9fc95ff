"""Rows: the choice and the factors, against closed forms and exhaustive sums."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.core.context import Axes
from nmjax.pruners.whole_rows import norms
from tests.products.common import MATMUL, normal
from tests.pruners.unbiased_test import water_fill

DRAWS = 4000


def test_norms_are_those_of_float64_at_every_size():
    x = np.random.default_rng(0).standard_normal((7, 5, 3))
    x[1] *= 1e30  # its squares overflow
    x[2] *= 1e-30  # its squares underflow
    x[3] *= np.float64(2) ** 63
    x[4] = 0
    x[5] *= np.geomspace(1e-25, 1e10, 15).reshape(5, 3)
    x = x.astype(np.float32)
    wanted = np.sqrt((x.astype(np.float64) ** 2).sum((1, 2), keepdims=True))
    np.testing.assert_allclose(norms(jnp.asarray(x), (0,)), wanted, rtol=1e-6)
    np.testing.assert_allclose(
        norms(jnp.asarray(x), (0, 2)), np.sqrt((x.astype(float) ** 2).sum(1, keepdims=True)), rtol=1e-6
    )
    assert norms(jnp.asarray(x, jnp.bfloat16), (0,)).dtype == jnp.float32


@pytest.mark.slow
def test_gradients_of_norms_are_finite_at_every_size():
    p = nm.rows(nm.soft(2, 4, scale="one"))
    for size in (2e19, 1e-25, 0.0):
        x = normal(0, 8, 4).at[3, 2].set(size)
        assert np.isfinite(jax.grad(lambda x: p(x, 0).sum())(x)).all()


def test_norms_show_what_is_not_finite_and_what_overflows():
    x = jnp.array([[1.0, jnp.nan], [-jnp.inf, 1.0], [3e38, 3e38], [jnp.inf, jnp.nan]])
    found = norms(x, (0,))[:, 0].tolist()
    assert found[1] == found[2] == float("inf")
    assert np.isnan([found[0], found[3]]).all()


@pytest.mark.slow
def test_mse_keeps_the_longest_rows_as_they_are():
    x = normal(0, 8, 6)
    length = np.linalg.norm(np.asarray(x), axis=1).reshape(2, 4)
    kept = length >= np.sort(length, 1)[:, -2:-1]
    np.testing.assert_array_equal(nm.rows(nm.mse(2, 4))(x, 0), np.where(kept.reshape(8, 1), x, 0))


@pytest.mark.slow
def test_soft_scales_a_row_as_its_norm_is_scaled():
    x = normal(1, 8, 6)
    p = nm.rows(nm.soft(2, 4, scale="one"))
    length = np.linalg.norm(np.asarray(x, np.float64), axis=1)
    factor = np.maximum(length.reshape(2, 4) - np.sort(length.reshape(2, 4), 1)[:, 1:2], 0).reshape(8) / length
    np.testing.assert_allclose(p(x, 0), np.asarray(x) * factor[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_that_are_not_finite_are_kept_first():
    x = normal(2, 8, 4).at[3, 1].set(jnp.nan).at[6, 0].set(jnp.inf).at[7].set(1e3)
    for p in (nm.mse(1, 4), nm.mvue(1, 4)):
        y = np.asarray(nm.prune(nm.rows(p), x, axis=0, key=0))
        assert np.isnan(y[3, 1])
        assert not y[:3].any()
        np.testing.assert_array_equal(y[6], x[6])


@pytest.mark.slow
def test_zero_rows_stay_zero():
    x = jnp.zeros((8, 3)).at[5].set(2.0)
    for p in (nm.mse(2, 4), nm.mvue(2, 4), nm.uniform(2, 4), nm.soft(2, 4)):
        y = np.asarray(nm.prune(nm.rows(p), x, axis=0, key=0))
        assert np.isfinite(y).all()
        assert not np.delete(y, 5, 0).any()
    np.testing.assert_array_equal(nm.prune(nm.rows(nm.mvue(2, 4)), x, axis=0, key=0), x)


# ---- unbiased, with the variance of the closed form ----


def of_dw(text, x, g, by_xla=True):
    """Many draws of dw."""
    s = nm.parse(text)

    def draw(step):
        f = lambda w: nm.dot_general(
            x, w, MATMUL, sparsity=s, ctx=nm.Ctx(7, step), backend="xla" if by_xla else "compact"
        )
        return jax.vjp(f, jnp.zeros((x.shape[1], g.shape[1])))[1](g)[0]

    return np.asarray(jax.jit(lambda: jax.lax.map(draw, jnp.arange(DRAWS), batch_size=100))(), np.float64)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("by", ["own", "both"])
@pytest.mark.parametrize("slot", ["dw_g", "dw_x"])
def test_dw_is_unbiased_and_its_variance_is_that_of_the_closed_form(slot, by, n):
    text = f"{slot}=rows(mvue({n},4),by='{by}')"
    size = np.random.default_rng(3).uniform(0.1, 4, (16, 2))
    x, g = normal(4, 16, 3) * size[:, :1], normal(5, 16, 5) * size[:, 1:]
    found = of_dw(text, x, g, by_xla=n == 1)
    length = {"x": np.linalg.norm(np.asarray(x, float), axis=1), "g": np.linalg.norm(np.asarray(g, float), axis=1)}
    terms = (length["x"] * length["g"]) ** 2
    weights = length["x"] * length["g"] if by == "both" else length[slot[-1]]
    p = water_fill(weights.reshape(4, 4), n)[1].ravel()
    terms_of = np.einsum("ti,to->tio", np.asarray(x, float), np.asarray(g, float))
    mean = terms_of.sum(0)
    wanted = ((1 / p - 1) * terms).sum() + covariance(terms_of, p, n)
    spread = found.std(0)
    assert (np.abs(found.mean(0) - mean) <= 5 * spread / DRAWS**0.5 + 1e-5).all()
    total = ((found - mean) ** 2).sum((1, 2))
    assert abs(total.mean() - wanted) <= 5 * total.std() / DRAWS**0.5


def covariance(terms, p, n):
    """The part of the variance that two rows of a group have in common, by systematic sampling: their chance to be
    kept together, by the points (u + j) tau on the line of all rows that are not certain."""
    found = 0.0
    for first in range(0, len(p), 4):
        q = p[first : first + 4]
        ends = np.cumsum(np.where(q < 1, q, 0))
        grid = (np.arange(200_000) + 0.5) / 200_000
        hit = np.stack([
            np.ceil(end - grid) - np.ceil(start - grid) > 0 if chance < 1 else np.ones_like(grid, bool)
            for start, end, chance in zip(ends - np.where(q < 1, q, 0), ends, q, strict=True)
        ])  # fmt: skip
        for a, b in itertools.permutations(range(4), 2):
            together = (hit[a] & hit[b]).mean()
            found += (together / (q[a] * q[b]) - 1) * (terms[first + a] * terms[first + b]).sum()
    return found


@pytest.mark.slow
def test_by_both_has_the_least_variance():
    size = np.random.default_rng(6).uniform(0.05, 4, (32, 2))
    x, g = normal(7, 32, 3) * size[:, :1], normal(8, 32, 5) * size[:, 1:]
    dw = np.asarray(x.T @ g, float)
    error = {
        text: ((of_dw(text, x, g) - dw) ** 2).sum((1, 2))
        for text in ("dw_g=rows(mvue(1,4),by='both')", "dw_g=rows(mvue(1,4))", "dw_x=rows(mvue(1,4))",
                     "dw_g=rows(uniform(1,4))")
    }  # fmt: skip
    both, *others = ((e.mean(), e.std() / DRAWS**0.5) for e in error.values())
    for mean, deviation in others:
        assert both[0] + 5 * (both[1] + deviation) < mean


# ---- what is refused ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows(transposable(2,4))", "transposable(2,4) prunes along two axes"),
        ("rows(permute(mse(2,4)))", "permute(mse(2,4)) changes the order of the groups"),
        ("rows(chain(mse(2,4),fp8('e4m3')))", "Round after it: chain(rows(mse(2,4)),fp8('e4m3'))"),
        ("rows(wanda(2,4))", "norms of the inputs"),
        ("hold(wanda(2,4))", "Then write hold(mse(2,4)): it holds that mask"),
        ("rows(rows(mse(2,4)))", "rows cannot stand inside rows"),
        ("rows(identity)", "rows needs a pruner with groups, such as mse(2,4)"),
        ("rows(ste(mse(2,4)))", "ste(rows(...))"),
        ("rows(mse(2,4),by='x')", "by must be 'own' or 'both'"),
    ],
)
def test_pruners_without_a_meaning_for_norms_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        nm.parse_pruner(text)


@pytest.mark.slow
def test_both_is_for_backward_slots_of_products():
    with pytest.raises(ValueError, match="only a backward slot may read the norms of both operands"):
        nm.parse("y_x=ste(rows(mse(2,4),by='both'))")
    with pytest.raises(ValueError, match="reads the norms of the other operand"):
        nm.prune(nm.rows(nm.mse(2, 4), by="both"), jnp.ones((4, 2)), axis=0)


@pytest.mark.slow
def test_axes_apart_have_rows_of_their_own():
    x = normal(9, 3, 8, 5)
    p = nm.rows(nm.mse(1, 4))
    found = p(x, 1, nm.Ctx(axes=Axes(2, (), (0,))))
    np.testing.assert_array_equal(found, jnp.stack([p(v, 0) for v in x]))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1e-25, 1e-15), (1e25, 1e15)])
def test_products_of_both_norms_neither_vanish_nor_overflow(sizes):
    """1e-40 and 1e40 are no numbers of float32. A factor of all rows changes no choice."""
    x, partner = jnp.array([[3.0], [1.0], [2.0], [1.0]]), jnp.array([[1.0], [5.0], [1.0], [1.0]])
    factors = lambda p, a, b: nm.rows(p, by="both").scales(a * x, 0, nm.Ctx(4, partner=b * partner))
    assert factors(nm.mse(1, 4), *sizes).ravel().tolist() == [0, 1, 0, 0]
    wanted = factors(nm.mvue(1, 4), 1.0, 1.0)
    assert np.count_nonzero(wanted) == 1
    np.testing.assert_allclose(factors(nm.mvue(1, 4), *sizes), wanted, rtol=1e-5)


def test_rows_that_end_dense_have_a_final_form():
    p = nm.rows(nm.stages(((0, nm.mse(2, 4)), (100, nm.identity))))
    assert p.final == nm.identity
