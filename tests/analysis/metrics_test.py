"""Metrics of a run, against loops in numpy, closed forms and enumerations."""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import nmjax as nm
from nmjax.analysis import metrics
from nmjax.analysis.metrics import Pattern
from nmjax.products import pruning
from tests.products.common import normal, whole

pytestmark = pytest.mark.sampled

NM = [(1, 2), (2, 4), (3, 4), (4, 4), (3, 8), (1, 16), (8, 32)]
DTYPES = [jnp.float32, jnp.bfloat16]


def groups_of(x, m, axis):
    """(groups, m), cut out in numpy."""
    return np.moveaxis(np.asarray(x.astype(jnp.float32)), axis, -1).reshape(-1, m)


# ---- masks ----


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.int32, bool])
def test_density_is_of_all_entries_together(dtype):
    tree = {
        "a": [whole(0, 3, 5, 7, most=1, dtype=dtype), None],
        "b": jnp.zeros((4, 4), dtype),
        "c": jnp.ones((), dtype),
    }
    hits, size = sum(np.count_nonzero(x) for x in jax.tree.leaves(tree)), 3 * 5 * 7 + 16 + 1
    got = metrics.density(tree)
    assert got.dtype == jnp.float32
    assert float(got) == np.float32(hits) / np.float32(size)


def test_density_counts_nan_and_infinity_and_no_negative_zero():
    assert float(metrics.density(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e-30, 0.0, -0.0]))) == np.float32(4 / 6)


@pytest.mark.parametrize("shape", [(2**16, 2**16), (2**31 - 1, 3), (3, 2**31 - 1), (2, 2**11, 2**20)])
def test_more_entries_than_int32_counts(shape):
    """Fused into the reduction: nothing of that size is made. In int32 alone 2**32 entries would be none."""
    count = jax.jit(lambda x: metrics.density(jnp.broadcast_to(x, shape)))
    assert abs(float(count(jnp.int8(1))) - 1) < 1e-6
    assert float(count(jnp.int8(0))) == 0


def test_flips_of_masks():
    rng = np.random.default_rng(0)
    before, after = ({"a": rng.random((6, 8)) < 0.5, "b": [None, rng.random(40) < p]} for p in (0.1, 0.9))
    flips = metrics.sad(before, after)
    assert jax.tree.structure(flips) == jax.tree.structure(before)
    for got, m, new in zip(*map(jax.tree.leaves, (flips, before, after)), strict=True):
        assert got.dtype == jnp.float32
        assert got.shape == ()
        assert float(got) == np.sum(m ^ new)
    count = sum(np.sum(m ^ new) for m, new in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    assert 0 < count < 88
    assert float(metrics.flip_rate(before, after)) == np.float32(count) / np.float32(88)
    assert float(metrics.flip_rate(before, before)) == 0
    assert float(metrics.flip_rate(before, jax.tree.map(np.invert, before))) == 1


@pytest.mark.parametrize(
    ("after", "got"),
    [(jnp.ones((1, 4), bool), r"bool\[1,4\]"), (jnp.ones((3, 4)), r"float32\[3,4\]"), (jnp.ones((3, 4), int), "int32")],
)
def test_what_is_no_pair_of_masks(after, got):
    for f in (metrics.sad, metrics.flip_rate):
        with pytest.raises(ValueError, match=r"two masks must be bool and of one shape, got bool\[3,4\] and " + got):
            f(jnp.ones((3, 4), bool), after)


# ---- ties ----


@pytest.mark.parametrize(
    ("n", "m", "axis", "dtype"),
    [(*nm, -1, jnp.float32) for nm in NM] + [(2, 4, axis, dtype) for axis in (0, 1, -2) for dtype in DTYPES],
)
def test_ties_by_sorting(n, m, axis, dtype):
    x = whole(m, 32, 64, 32, most=m, dtype=dtype)
    order = -np.sort(-np.abs(groups_of(x, m, axis)), 1)
    tied = (order[:, n - 1] == order[:, n]) & (order[:, n] > 0) if n < m else np.zeros(len(order), bool)
    assert n == m or 0 < tied.mean() < 1
    got = jax.jit(lambda x: metrics.ties(x, n, m, axis))(x)
    assert got.dtype == jnp.float32
    assert float(got) == np.float32(tied.sum()) / np.float32(tied.size)


@pytest.mark.parametrize("n", [1, 100])
@pytest.mark.parametrize("m", [2**15, 2**16])
def test_ties_of_long_groups_of_16_bits(n, m):
    x = jnp.arange(m, 0, -1, jnp.float32).astype(jnp.bfloat16)  # n + 1 is rounded to n or not
    sizes = np.sort(np.asarray(x, np.float32))[::-1]
    assert float(metrics.ties(x, n, m)) == float(sizes[n - 1] == sizes[n])
    assert float(metrics.ties(jnp.ones(m, jnp.bfloat16), n, m)) == 1


@pytest.mark.parametrize(
    ("x", "share"),
    [
        ([0, 0, 0, 0], 0), ([5, 0, 0, 0], 0), ([5, 0, -0.0, 4], 0), ([5, 4, 4, 0], 1), ([4, 4, 5, 0], 1), ([4, 4, 0, 0], 0),
        ([np.nan, np.nan, np.nan, 1], 1), ([np.inf, 1, -np.inf, 1], 0), ([1e-38, 2e-38, 1e-38, 0], 1),
        ([5, 1, np.nextafter(np.float32(1), np.float32(2)), 0], 0),
    ],
)  # fmt: skip
def test_ties_by_hand(x, share):
    assert float(metrics.ties(jnp.array(x, jnp.float32), 2, 4)) == share


# ---- violations ----


def broken(x, n, m, axes):
    """Violating groups by a loop over all of them, of the innermost axes that m divides."""
    x = np.asarray(x.astype(jnp.float32))
    axes = [a % x.ndim for a in axes]
    while len(axes) > 1 and x.shape[axes[-1]] % m == 0:
        axes = axes[-1:]
    rest = [a for a in range(x.ndim) if a not in axes]
    rows = np.transpose(x, [*rest, *axes]).reshape(-1, np.prod([x.shape[a] for a in axes]))
    return sum(sum(v != 0 for v in row[i : i + m]) > n for row in rows for i in range(0, len(row), m))


@pytest.mark.parametrize(
    ("n", "m", "axes", "dtype"),
    [(n, m, (1,), dtype) for n, m in ((1, 2), (2, 4), (3, 8), (4, 4)) for dtype in DTYPES]
    + [(2, 4, axes, jnp.float32) for axes in ((0,), (-1,), (0, 1), (1, 0), (0, 2), (2, 0))],
)
def test_violations_of_one_array(n, m, axes, dtype):
    x = normal(m, 8, 16, 24, dtype=dtype) * (np.random.default_rng(m).random((8, 16, 24)) < 0.5).astype(dtype)
    got = metrics.violations(x, Pattern(n, m, axes))
    assert got.dtype == jnp.int32
    assert int(got) == broken(x, n, m, axes)
    assert (int(got) > 0) == (n < m)
    # of several axes the last alone, for m divides it; of one axis, what pruning along it leaves
    assert int(metrics.violations(nm.prune(nm.mse(n, m), x, axis=axes[-1]), Pattern(n, m, axes))) == 0


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0, 2), (2, 1), (0, 1, 2)])
def test_several_axes_are_flattened_as_products_do(axes):
    """4 divides none of 2, 6 and 10, but any two together; three only where the last two do not."""
    x = whole(0, 2, 6, 10, most=1)
    assert int(metrics.violations(x, Pattern(2, 4, axes))) == broken(x, 2, 4, axes[-2:]) > 0
    w = whole(1, 2, 6, 5)
    y, back = jax.vjp(lambda w: nm.einsum("tabc,abc->t", jnp.ones((1, 2, 6, 5)), w, sparsity=nm.methods.ste(2, 4)), w)
    product = pruning.pruned("y_w", nm.mse(2, 4), w, pruning.Operand((0, 1, 2), (), ()), nm.Ctx())
    assert int(metrics.violations(w, Pattern(2, 4, (0, 1, 2)))) > 0
    assert int(metrics.violations(product, Pattern(2, 4, (0, 1, 2)))) == 0
    assert float(y[0]) == float(product.sum())


def test_more_groups_than_int32_counts():
    count = jax.jit(lambda x: metrics.violations(jnp.broadcast_to(x, (2**17, 2**16)), Pattern(1, 2)))
    assert float(count(jnp.int8(1))) == 2**32


@jax.tree_util.register_pytree_with_keys_class
@dataclass
class Layer:
    kernel: object
    value: object = None

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("kernel"), self.kernel), (key("value"), self.value)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
@dataclass
class Anonymous:
    inside: object

    def tree_flatten(self):
        return (self.inside,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def weights():
    """Four violating groups along axis 0 in every kernel of the layers, and other shapes that 4 does not divide."""
    return {
        "layers": [
            {"mlp": Layer(jnp.ones((4, 4))), "bias": jnp.ones(3)},
            {"mlp": Layer(jnp.ones((4, 4))), "none": None},
        ],
        "head": {"kernel": jnp.ones((6, 2))},
        "tail": Anonymous(np.zeros((8, 3))),
    }


def test_paths():
    tree = [weights()["layers"], {"b": Layer(Layer(1, 2), 3), "c": (4, Anonymous(5))}, {3: 6, 4: {"value": 7}}]
    got = {metrics.path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    assert [*got][:3] == ["0/0/bias", "0/0/mlp/kernel", "0/1/mlp/kernel"]
    assert {k: v for k, v in got.items() if k[0] != "0"} == {
        "1/b/kernel/kernel": 1, "1/b/kernel": 2, "1/b": 3, "1/c/0": 4, "1/c/1/0": 5, "2/3": 6, "2/4/value": 7,
    }  # fmt: skip
    assert metrics.path(()) == ""


@pytest.mark.slow
def test_violations_of_a_tree():
    count = lambda patterns: {k: int(v) for k, v in metrics.violations(weights(), patterns).items()}
    rows = Pattern(2, 4, 0)
    assert count({}) == {}
    assert count({"layers/.*/kernel": rows}) == {"layers/0/mlp/kernel": 4, "layers/1/mlp/kernel": 4}
    assert count({"layers/0/mlp/kernel": rows, "tail/0": rows}) == {"tail/0": 0, "layers/0/mlp/kernel": 4}
    # the first that fits decides
    assert count({"layers/1/.*": None, "layers/.*/kernel": rows}) == {"layers/0/mlp/kernel": 4}
    assert count({"layers/.*/kernel": Pattern(4, 4, 0), "layers/1/.*": rows}) == {
        "layers/0/mlp/kernel": 0,
        "layers/1/mlp/kernel": 0,
    }
    assert count({"layers/0/mlp/kernel": Pattern(1, 2, 1), ".*mlp.*": rows}) == {
        "layers/0/mlp/kernel": 8,
        "layers/1/mlp/kernel": 4,
    }
    # a path is compared as it is, whatever it means as an expression
    odd = {"a+b": jnp.ones((4, 1)), "aab": jnp.ones((4, 2)), "c[": jnp.ones((4, 3))}
    got = metrics.violations(odd, {"a+b": rows, "c[": rows})
    assert {k: int(v) for k, v in got.items()} == {"a+b": 1, "c[": 3}
    # one array, in a box or not
    assert (
        int(metrics.violations(Layer(jnp.ones((4, 5))), rows)) == int(metrics.violations(jnp.ones((4, 5)), rows)) == 5
    )


def test_patterns_are_values():
    assert repr(Pattern(2, 4, 0)) == "2:4 along axis 0"
    assert repr(Pattern(1, 8, [0, 1])) == "1:8 along axes 0, 1"
    assert Pattern(2, 4) == Pattern(2, 4, (-1,)) == Pattern(2, np.int64(4), np.int64(-1))
    assert len({Pattern(2, 4, 0), Pattern(2, 4, (0,)), Pattern(2, 4, 1)}) == 2


MANY = {f"layer_{i}": {"kernel": jnp.ones((4, 4))} for i in range(30)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.violations(weights(), {"layers/0/mlp/kernels": None}), r"'layers/0/mlp/kernels' fits no path. The 5 paths, nearest first: layers/0/mlp/kernel, layers/1/mlp/kernel.*tail/0\.$"),
        (lambda: metrics.violations(weights(), {"kernel": Pattern(2, 4, 0)}), "'kernel' fits no path"),  # of a whole path
        (lambda: metrics.violations(MANY, {"layer_3/kernel ": None}), r"The 30 paths, nearest first: layer_3/kernel, (layer_\d+/kernel, ){8}layer_\d+/kernel, and 20 more\.$"),
        (lambda: metrics.violations({}, {"a": None}), "'a' fits no path. The 0 paths"),
        (lambda: metrics.violations(weights(), {"(": None}), r"'\(' is neither a path nor a regular expression"),
        (lambda: metrics.violations(weights(), {"head/kernel": Pattern(2, 4, 0)}), r"'head/kernel' of shape \(6, 2\) does not divide into 2:4 along axis 0: name the axes that its product contracts, or None"),
        (lambda: metrics.violations(weights(), {".*bias": Pattern(2, 4, 1)}), r"'layers/0/bias' of shape \(3,\) does not divide into 2:4 along axis 1"),
        (lambda: metrics.violations(jnp.ones((4, 8)), Pattern(2, 4, (-1, 1))), r"'array' of shape \(4, 8\) does not divide into 2:4 along axes -1, 1"),
        (lambda: metrics.violations(jnp.float32(1), Pattern(2, 4)), r"of shape \(\) does not divide"),
        (lambda: metrics.violations(jnp.ones(4), Pattern(2, 4, ())), "does not divide into 2:4 along axes"),
        (lambda: metrics.violations(weights(), Pattern(2, 4)), r"one Pattern is for one array, and there are 5: write \{'.\*/kernel': 2:4 along axis -1\}"),
        (lambda: metrics.violations(weights(), {".*": (2, 4)}), r"'.\*': expected Pattern\(n, m, axes\), or None if dense, got \(2, 4\)"),
        (lambda: metrics.violations({"a/b": jnp.ones(4), "a": {"b": jnp.ones(4)}}, {}), "two arrays have the same path, 'a/b': rename one"),
        (lambda: Pattern(3, 2), r"3:2 along axis -1: n must lie between 1 and m"),
        (lambda: Pattern(2, 4.5), "Pattern: m must be a whole number"),
        (lambda: Pattern(2, 4, "0"), "str"),
        (lambda: metrics.ties(jnp.ones(4), 0, 4), "n must lie between 1 and m"),
        (lambda: metrics.ties(jnp.ones(6), 2, 4), "6 values, which do not divide into groups of 4"),
        (lambda: metrics.density({"a": None, "b": jnp.ones((0, 4))}), "has no entries to measure"),
        (lambda: metrics.gradient_variance([]), "has no entries to measure"),
        (lambda: metrics.error({"a": jnp.ones((3, 2)), "b": jnp.ones((4, 2))}, {"a": jnp.ones(2), "b": jnp.ones(2)}), r"expected shapes \[\(3, 2\), \(3, 2\)\], got \[\(3, 2\), \(4, 2\)\]"),
        (lambda: metrics.error(jnp.ones((2, 3)), jnp.ones((2, 3))), r"expected shapes \[\(2, 2, 3\)\], got \[\(2, 3\)\]"),
        (lambda: metrics.error([jnp.ones((2, 3))], jnp.ones(3)), "draws are a tree like exact"),
        (lambda: metrics.pruned_error(nm.mse(2, 4), jnp.ones(6)), "do not divide into groups of 4"),
        (lambda: gradient("s_ste(2,4)"), "keeps state between steps and was given none"),
        (lambda: gradient("y_x=ste(mvue(2,4)); dw_g=mvue(2,4)"), r"y_x=ste\(mvue\(2,4\)\).*if a forward slot draws, no dw is the exact one"),
        (lambda: gradient("dw_g=mvue(2,5)"), r"dw_g=mvue\(2,5\) prunes an array of shape \(8, 4\)"),
    ],
)  # fmt: skip
def test_errors_say_what_to_write(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# ---- errors ----


def in_float64(draws, exact):
    """The four numbers by their definitions."""
    d, e = np.asarray(draws, np.float64).reshape(len(draws), -1), np.asarray(exact, np.float64).reshape(-1)
    norm = np.linalg.norm(e)
    variance = d.var(0, ddof=1).sum() / norm**2
    cosine = np.mean(d @ e / (np.linalg.norm(d, axis=1) * norm))
    return np.linalg.norm(d.mean(0) - e) / norm, np.sqrt(variance / len(d)), variance, cosine


@pytest.mark.parametrize("scale", [1, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("count", [2, 3, 50])
def test_error_by_its_definition(count, scale):
    draws, exact = normal(0, count, 6, 9) + 3, normal(1, 6, 9)
    got = metrics.error(draws * scale, exact * scale)
    np.testing.assert_allclose(got, in_float64(draws, exact), rtol=2e-6)
    assert all(v.dtype == jnp.float32 and v.shape == () for v in got)
    cut = lambda x: {"a": x[..., :2, :], "b": [x[..., 2:, 3:].astype(jnp.float32), None], "c": x[..., 2:, :3]}
    np.testing.assert_allclose(metrics.error(cut(draws), cut(exact)), in_float64(draws, exact), rtol=2e-6)


def test_error_in_bfloat16():
    draws, exact = normal(0, 20, 64, dtype=jnp.bfloat16), normal(1, 64, dtype=jnp.bfloat16)
    wide = [v.astype(jnp.float32) for v in (draws, exact)]
    np.testing.assert_allclose(metrics.error(draws, exact), in_float64(*wide), rtol=2e-6)


def test_little_noise_around_much_bias_is_seen():
    """Sums of squares would cancel: 1e-4 beside 1, squared, is less than float32 tells apart."""
    exact = normal(0, 1000)
    draws = 2 * exact[None] + 1e-4 * normal(1, 40, 1000)
    expected = in_float64(draws, exact)
    assert expected[2] < 2e-8
    np.testing.assert_allclose(metrics.error(draws, exact), expected, rtol=1e-3)


def test_error_by_hand():
    bias, noise, variance, cosine = metrics.error(jnp.array([[3.0, 4], [3, -4], [0, 6]]), jnp.array([3.0, 0]))
    # mean (2, 2); deviations (1, 2), (1, -6), (-2, 4), squared 5 + 37 + 20 = 62, halved 31
    np.testing.assert_allclose([bias, variance, noise], [np.sqrt(5) / 3, 31 / 9, np.sqrt(31 / 27)], rtol=1e-6)
    np.testing.assert_allclose(cosine, (0.6 + 0.6 + 0) / 3, rtol=1e-6)


def test_what_cannot_be_told_is_nan():
    assert np.isnan(metrics.error(jnp.ones((3, 4)), jnp.zeros(4))).all()
    assert np.isnan(metrics.pruned_error(nm.mse(2, 4), jnp.zeros(4))).all()
    bias, noise, variance, cosine = metrics.error(jnp.array([[2.0, 0]]), jnp.array([1.0, 0]))
    assert (bias, cosine) == (1, 1)
    assert np.isnan([noise, variance]).all()
    assert np.isnan(metrics.pruned_error(nm.mvue(2, 4), jnp.arange(1.0, 5), draws=1).noise)


@pytest.mark.slow
def test_magnitude_pruning_is_exactly_so_biased():
    """(1, 2, 3, 4) -> (0, 0, 3, 4): 5 of 30 is lost, squared, and the cosine is 25 / (5 sqrt(30))."""
    x = jnp.tile(jnp.array([[1.0], [-2], [3], [4]]), (2, 3))
    for got in (metrics.pruned_error(nm.mse(2, 4), x, axis=0), metrics.pruned_error(nm.mse(2, 4), x, axis=0, draws=3)):
        np.testing.assert_allclose(got, [np.sqrt(5 / 30), 0, 0, 5 / np.sqrt(30)], rtol=1e-6)
    assert "length=1\n" in str(jax.make_jaxpr(lambda x: metrics.pruned_error(nm.mse(2, 4), x, axis=0))(x))  # one draw
    bias, noise, variance, cosine = metrics.pruned_error(nm.identity, normal(0, 50, 50))
    assert bias == noise == variance == 0
    np.testing.assert_allclose(cosine, 1, rtol=1e-6)


GROUPS, DRAWS = 256, 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_mvue_has_the_variance_of_its_closed_form(dtype):
    """(1, 2, 3, 4) in 2:4: tau = 5 and p = g / 5, so the variance is sum(g^2/p) - sum(g^2) = 50 - 30 of 30. Kept are 1 and 3,
    2 and 4, or 3 and 4, with probabilities .2, .4, .4, all as 5: the norm is always sqrt(50), and g * theta is 20, 30 or 35,
    on average 30, with variance 30. All these numbers are exact in bf16 too."""
    g, p = np.arange(1, 5), np.arange(1, 5) / 5
    assert np.isclose(sum(g**2 / p) - sum(g**2), 20)
    x = jnp.tile(jnp.arange(1, 5, dtype=dtype), (GROUPS, 1))
    bias, noise, variance, cosine = metrics.pruned_error(nm.mvue(2, 4), x, key=1, draws=DRAWS)
    # Sample variance of a group: (50 - |mean|^2) K / (K - 1), and |mean|^2 has variance 4 * 30 / K. Four of the 256 groups'
    # standard errors, over 30.
    assert abs(variance - 20 / 30) < 4 * np.sqrt(4 * 30 / DRAWS / GROUPS) / 30
    np.testing.assert_allclose(noise, np.sqrt(variance / DRAWS), rtol=1e-6)
    assert abs(cosine - 30 / np.sqrt(1500)) < 4 * np.sqrt(30 / 1500 / GROUPS / DRAWS)
    # |mean - exact|^2 is a sum over 256 groups, so bias / noise is 1 within sqrt(2 / 256) / 2 = 4 %, times four
    assert abs(bias / noise - 1) < 4 * np.sqrt(2 / GROUPS) / 2


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4)])
def test_random_pruning_without_its_factor_is_biased_by_what_it_drops(n, m):
    """On average n / m of any x is left. The squared norm of the noise adds to that of the bias."""
    got = metrics.pruned_error(nm.uniform(n, m, rescale=False), normal(0, 64, 64), draws=64)
    assert got.bias > 5 * got.noise
    np.testing.assert_allclose(np.sqrt(got.bias**2 - got.noise**2), 1 - n / m, rtol=0.02)


@pytest.mark.slow
def test_draws_differ_by_key_and_share_a_step():
    x = normal(0, 64, 64)
    late = nm.stages(((0, nm.identity), (10, nm.mvue(2, 4))))
    assert metrics.pruned_error(late, x).variance == 0
    after = metrics.pruned_error(late, x, step=10)
    np.testing.assert_allclose(after.variance, metrics.pruned_error(nm.mvue(2, 4), x).variance, rtol=0.1)
    first, again, other = (metrics.pruned_error(nm.mvue(2, 4), x, key=jax.random.key(k)) for k in (0, 0, 1))
    assert first == again
    assert first.bias != other.bias
    held = nm.hold(nm.mse(2, 4))
    mask = nm.mse(2, 4).mask(x[::-1])
    got = metrics.pruned_error(held, x, state=mask)
    np.testing.assert_allclose(got.bias, jnp.linalg.norm(jnp.where(mask, 0, x)) / jnp.linalg.norm(x), rtol=1e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_draws():
    run = lambda draws: jax.jit(lambda x: metrics.pruned_error(nm.mvue(2, 4), x, draws=draws))
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    few, many = (run(k).lower(x).compile().memory_analysis().temp_size_in_bytes for k in (4, 400))
    assert many < few + 2**20  # one more draw


# ---- gradients ----


def gradient(sparsity, tokens=(8,), inner=8, outer=4, dtype=jnp.float32, **options):
    x, w, g = (
        normal(i, *shape, dtype=dtype) for i, shape in enumerate([(*tokens, inner), (inner, outer), (*tokens, outer)])
    )
    return jax.jit(lambda *arrays: metrics.gradient_error(nm.parse(sparsity), *arrays, **options))(x, w, g)


@pytest.mark.parametrize("tokens", [(16,), (3, 8), (2, 3, 4), (2, 6), (2, 2, 5)])
def test_top_gradient_against_numpy(tokens):
    x, w, g = whole(0, *tokens, 8), normal(1, 8, 4), whole(2, *tokens, 4)
    flat = (
        np.asarray(g).reshape(-1, 4).T.reshape(4, -1, 4)
    )  # out, groups, tokens: 4 divides the last axis, or all together
    last = np.argsort(np.argsort(-np.abs(flat), -1, kind="stable"), -1) < 2
    pruned = np.where(last, flat, 0).reshape(4, -1).T
    rows = np.asarray(x).reshape(-1, 8)
    expected = in_float64((rows.T @ pruned)[None].repeat(2, 0), rows.T @ np.asarray(g).reshape(-1, 4))
    got = metrics.gradient_error(nm.methods.top_gradient(2, 4), x, w, g)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    assert got.bias > 0.05


@pytest.mark.parametrize("sparsity", ["dense()", "sr_ste(2,4); dx_g=mvue(2,4)", "y_x=ste(mse(2,4))"])
def test_no_error_without_pruning_in_dw(sparsity):
    np.testing.assert_allclose(gradient(sparsity), [0, 0, 0, 1], rtol=1e-6, atol=1e-7)  # one dw is fused, the other not


def test_mvue_of_the_gradient_by_its_closed_form():
    """Four tokens, one in-feature, x = g = (1, 2, 3, 4): dw is 20, 30 or 35 with probabilities .2, .4, .4, and 30 on
    average, with variance 20 + 10 and fourth moment 2000 + 250, of which follows the standard error of a variance."""
    x, w = jnp.arange(1.0, 5)[:, None], jnp.ones((1, 512))
    g = jnp.tile(x, (1, 512))
    got = metrics.gradient_error(nm.methods.mvue(2, 4), x, w, g, key=3, draws=32)
    assert abs(got.variance - 30 / 900) < 4 * np.sqrt((2250 - 900) / (512 * 32)) / 900
    assert abs(got.bias / got.noise - 1) < 4 * np.sqrt(2 / 512) / 2
    mean_square = 0.2 * 20**2 + 0.4 * 30**2 + 0.4 * 35**2
    assert abs(got.cosine - 30 / np.sqrt(mean_square)) < 1e-3


UNBIASED_DW = ["mvue(2,4)", "dw_g=mvue(1,4); dw_x=mvue(2,4)", "sr_ste(2,4); dw_x=raw(mvue(2,4))"]


@pytest.mark.parametrize(
    ("sparsity", "dtype"), [*itertools.product(UNBIASED_DW, [jnp.float32]), (UNBIASED_DW[1], jnp.bfloat16)]
)
def test_unbiased_dw_has_no_more_bias_than_noise(sparsity, dtype):
    got = gradient(sparsity, (4, 32), 32, 32, dtype=dtype, draws=32)
    assert 0.8 < got.bias / got.noise < 1.25
    assert got.noise > 0.01


@pytest.mark.parametrize("sparsity", ["dw_g=chain(mvue(3,4),mse(2,4))", "dw_g=mvue(2,4); dw_x=mse(2,4)"])
def test_biased_dw_has_more_bias_than_noise(sparsity):
    got = gradient(sparsity, (4, 32), 32, 32, draws=64)
    assert got.bias > 2 * got.noise > 0.01


@pytest.mark.slow
def test_only_dw_is_judged():
    """A forward pruner and its state change neither x nor g, so they do not change dw."""
    sparsity, w = nm.methods.s_ste(2, 4), normal(1, 8, 4)
    state = sparsity.init(w, contract=0, out=1)
    assert gradient("s_ste(2,4)", state=state) == gradient("mvue(2,4)")


@pytest.mark.slow
def test_gradient_errors_differ_by_key_and_share_a_step():
    late = "dw_g=stages(((0,identity),(10,mvue(2,4))))"
    assert gradient(late).variance == 0
    assert gradient(late, step=10).variance > 0
    assert gradient("mvue(2,4)") == gradient("mvue(2,4)", key=0)
    assert gradient("mvue(2,4)") != gradient("mvue(2,4)", key=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 2.0**-40])
def test_variance_of_gradients(scale, dtype):
    grads = {"a": normal(0, 40, 50, dtype=dtype) * scale, "b": [normal(1, 7, dtype=dtype) * (5 * scale), None]}
    every = np.concatenate(
        [np.abs(np.asarray(v.astype(jnp.float32), np.float64)).ravel() for v in jax.tree.leaves(grads)]
    )
    got = metrics.gradient_variance(grads)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, every.var(), rtol=1e-5)
    for v, one in zip(
        jax.tree.leaves(grads), jax.tree.leaves(jax.tree.map(metrics.gradient_variance, grads)), strict=True
    ):
        np.testing.assert_allclose(one, np.abs(np.asarray(v.astype(jnp.float32), np.float64)).var(), rtol=1e-5)


def test_variance_of_gradients_beside_a_large_mean():
    """By mean squares less the square of means it would be 0 or worse: 1e8 + 1e-2 in float32."""
    grads = 1e4 + 0.1 * normal(0, 100, 100)
    expected = np.asarray(grads, np.float64).var()
    np.testing.assert_allclose(metrics.gradient_variance([grads, -grads]), expected, rtol=1e-3)


# ---- under jit, and on four devices ----

SPARSITY = nm.parse("dw_g=mvue(2,4)")
MEASURES = {
    "density": lambda x, y: metrics.density({"x": x, "y": y}),
    "sad": lambda x, y: metrics.sad({"x": x > 0, "y": y > 0}, {"x": y > 0, "y": x > 1}),
    "flip_rate": lambda x, y: metrics.flip_rate([x > 0], [y > 0]),
    "ties, rows": lambda x, y: metrics.ties(x, 2, 4, 0),
    "ties, columns": lambda x, y: metrics.ties(x, 2, 4, 1),
    "violations, rows": lambda x, y: metrics.violations({"x": x, "y": y}, {".*": Pattern(2, 4, 0)}),
    "violations, columns": lambda x, y: metrics.violations({"x": x, "y": y}, {".*": Pattern(2, 4, 1)}),
    "gradient_variance": lambda x, y: metrics.gradient_variance({"x": x, "y": y}),
    "error": lambda x, y: metrics.error({"a": jnp.stack([x, x + 1, y])}, {"a": x}),
    "pruned_error": lambda x, y: metrics.pruned_error(nm.mvue(2, 4), x, axis=0, draws=4),
    "pruned_error, sure": lambda x, y: metrics.pruned_error(nm.mse(2, 4), x),
    "gradient_error": lambda x, y: metrics.gradient_error(SPARSITY, x, jnp.ones((64, 64), x.dtype), y, draws=4),
}  # fmt: skip


@functools.cache
def on_one_device(name):
    return jax.jit(MEASURES[name])(whole(0, 64, 64), whole(1, 64, 64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MEASURES)
def test_one_trace_and_the_same_as_outside(name, dtype):
    traces = []

    @jax.jit
    def run(x, y):
        traces.append(name)
        return MEASURES[name](x, y)

    for seed in range(3):
        got = run(whole(seed, 64, 64, dtype=dtype), whole(seed + 1, 64, 64, dtype=dtype))
        assert all(v.dtype in (jnp.float32, jnp.int32) and v.shape == () for v in jax.tree.leaves(got))
        if seed == 0:
            outside = MEASURES[name](whole(0, 64, 64, dtype=dtype), whole(1, 64, 64, dtype=dtype))
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, outside)
    assert len(traces) == 1


LAYOUTS = {"rows": P("d", None), "columns": P(None, "d")}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [case for case in itertools.product(MEASURES, LAYOUTS) if case != ("gradient_error", "columns")],  # which adds up y
)
def test_sharded_is_unsharded(name, layout, kind):
    mesh, spec = jax.make_mesh((4,), ("d",), axis_types=(kind,)), LAYOUTS[layout]
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        compiled = jax.jit(MEASURES[name]).lower(place(whole(0, 64, 64)), place(whole(1, 64, 64))).compile()
        got = compiled(place(whole(0, 64, 64)), place(whole(1, 64, 64)))
    expected = on_one_device(name)
    exact = all(v.dtype == jnp.int32 for v in jax.tree.leaves(expected)) or name.split(",")[0] in (
        "density",
        "sad",
        "flip_rate",
        "ties",
    )
    check = np.testing.assert_array_equal if exact else functools.partial(np.testing.assert_allclose, rtol=2e-5)
    jax.tree.map(check, got, expected)
    moved = [c for c in ("all-gather", "all-to-all", "collective-permute") if c in compiled.as_text()]
    assert moved == []  # scalars are added up, and nothing else is sent


def test_the_error_of_a_slot_that_may_be_dense():
    x, w, g = jnp.ones((4, 2)), jnp.ones((2, 3)), jnp.arange(12.0).reshape(4, 3)
    error = lambda text: metrics.gradient_error(nm.parse(text), x, w, g)
    assert error("dw_g=mse(2,4) else dense") == error("dw_g=mse(2,4)")
