"""Pruners of pruners: what `rescale` restores, what a `chain` promises, and what their parts get."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.core.context import Axes


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def largest(x, n=2, m=4):
    """Keep the n largest magnitudes of every m values along the last axis, by sorting."""
    groups = x.reshape(*x.shape[:-1], -1, m)
    ranks = np.argsort(np.argsort(-np.abs(groups), -1), -1)
    return np.where(ranks < n, groups, 0).reshape(x.shape)


def restored(x, norm):
    """Return x, pruned along the last axis and multiplied such that a norm is that of x."""
    y = largest(x.astype(np.float64))
    return y * norm(x.astype(np.float64)) / np.where(norm(y) == 0, 1, norm(y))  # a channel may lose all its values


def group_norm(x):
    return np.repeat(np.abs(x.reshape(*x.shape[:-1], -1, 4)).sum(-1), 4, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "space"),
    [((8,), ()), ((6, 8), ()), ((1, 16), ()), ((3, 5, 8), (1,)), ((2, 3, 4, 8), (1, 2)), ((2, 3, 2, 2, 8), (1, 2, 3))],
)
def test_every_group_has_a_norm_or_with_axes_of_space_every_sample_and_channel(shape, space):
    x = normal(*shape)
    y = nm.prune(nm.rescale(nm.mse(2, 4)), jnp.asarray(x))
    norm = (lambda v: np.abs(v).sum(space, keepdims=True)) if space else group_norm
    np.testing.assert_allclose(y, restored(x, norm), rtol=1e-5)
    np.testing.assert_array_equal(
        y, nm.prune(nm.rescale(nm.mse(2, 4), "spatial" if space else "group"), jnp.asarray(x))
    )


@pytest.mark.slow
def test_the_axes_of_the_product_decide_and_not_the_number_of_axes():
    x = jnp.asarray(normal(2, 6, 8))
    run = lambda over, space: nm.rescale(nm.mse(2, 4), over)(x, -1, nm.Ctx(axes=Axes(1, space)))
    np.testing.assert_array_equal(run("auto", ()), run("group", (1,)))
    np.testing.assert_array_equal(run("auto", (1,)), run("spatial", (1,)))
    np.testing.assert_array_equal(run("auto", (0, 1)), run("spatial", (0, 1)))
    assert len({run("auto", space).tobytes() for space in ((), (1,), (0, 1))}) == 3


def test_a_sample_under_vmap_has_no_axis_of_samples():
    """The product inside sees positions and features, so its gradient has no spatial axes."""
    x, w = jnp.asarray(normal(3, 8, 4)), jnp.asarray(normal(4, 16))

    def gradient(over):
        layer = lambda x: nm.einsum("ti,io->to", x, w, sparsity=nm.methods.sdgp(over=over))
        return jax.vmap(jax.grad(lambda x: (layer(x) ** 2).sum()))(x)

    np.testing.assert_array_equal(gradient("auto"), gradient("group"))


@pytest.mark.parametrize("over", ["auto", "spatial", "group"])
def test_what_is_promised_does_not_depend_on_over(over):
    p = nm.rescale(nm.mse(2, 4), over)
    assert (p.facts.pattern, p.kept(), p.facts.block, p.facts.selects, p.facts.stochastic, p.facts.depends_on_step) == (
        (2, 4),
        0.5,
        4,
        False,
        False,
        False,
    )
    assert p.final == p
    assert nm.rescale(nm.hold(nm.mse(2, 4), 3), over).final == nm.rescale(nm.hold(nm.mse(2, 4)), over)
    assert nm.parse_pruner(str(p)) == p
    assert str(p) == ("rescale(mse(2,4))" if over == "auto" else f"rescale(mse(2,4),over='{over}')")


@dataclass(frozen=True, repr=False)
class plus(nm.Pruner):
    """Adds one to every value, also to zeros."""

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return x + 1


@dataclass(frozen=True, repr=False)
class average(nm.Pruner):
    """Returns the mean of what several pruners return."""

    pruners: tuple[nm.Pruner, ...]

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return sum(p(x, axis, ctx) for p in self.pruners) / len(self.pruners)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "pattern", "kept"),
    [
        (nm.chain(nm.mse(2, 4), plus()), None, 1.0),
        (nm.chain(nm.mse(1, 8), plus(), nm.mse(2, 4)), (2, 4), 0.5),
        (nm.chain(nm.chain(nm.mse(2, 4), plus()), nm.fp8("e4m3")), None, 1.0),
        (nm.chain(nm.mse(2, 4), nm.rescale(nm.mse(1, 4)), nm.fp8("e4m3")), (1, 4), 0.25),
        (nm.chain(nm.mvue(1, 4), nm.uniform(2, 4), nm.soft(2, 4), nm.mvue_approx(2, 4)), (1, 4), 0.25),
    ],
    ids=str,
)
def test_a_chain_promises_the_zeros_that_later_parts_keep(p, pattern, kept):
    assert (p.facts.pattern, p.kept()) == (pattern, kept)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 16)), jnp.float32)
    y = np.asarray(nm.prune(p, x, key=0))
    n, m = pattern or (1, 1)
    assert np.count_nonzero(y.reshape(64, -1, m), -1).max() == n


@pytest.mark.slow
def test_a_product_whose_chain_ends_the_pattern_is_not_packed():
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (128, 128), jnp.bfloat16)
    sparsity = nm.Sparsity(dw_g=nm.chain(nm.mse(2, 4), plus()))

    def gradients(backend):
        product = lambda x, w: nm.einsum("ti,io->to", x, w, sparsity=sparsity, backend=backend)
        return jax.vjp(product, draw(0), draw(1))[1](draw(2))

    for packed, emulated in zip(gradients("interpret"), gradients("xla"), strict=True):
        np.testing.assert_array_equal(packed, emulated)
    assert nm.flops.effective(sparsity) == (1.0, 1.0, 1.0)


def test_pruners_in_a_tuple_are_parts():
    p = average((nm.mvue(2, 4), nm.mse(1, 8)))
    assert (p.parts, p.facts.block, p.facts.stochastic) == ((nm.mvue(2, 4), nm.mse(1, 8)), 8, True)
    with pytest.raises(ValueError, match="pass a key"):
        nm.prune(p, jnp.ones(8))
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": nm.Sparsity(dw_g=p)}))
    assert model.nm_state.words is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "p",
    [
        nm.stages(((0, nm.identity), (10, nm.mvue(2, 4)))),
        nm.ste(nm.mvue(2, 4)),
        nm.sr_ste(nm.uniform(2, 4, rescale=False)),
        nm.fp8("e4m3", "random"),
    ],
    ids=str,
)
def test_an_int_seed_is_the_key_of_its_words(p):
    x = jnp.arange(1.0, 65.0)
    for seed in (3, 2**40 + 3):
        expected = p(x, ctx=nm.Ctx(key=nm.random.words(seed), step=10))
        call = lambda x, seed=seed: p(x, ctx=nm.Ctx(key=seed, step=10))
        np.testing.assert_array_equal(call(x), expected)
        np.testing.assert_allclose(jax.jit(call)(x), expected, rtol=1e-6)
        assert jax.grad(lambda x, call=call: call(x).sum())(x).shape == x.shape


@pytest.mark.slow
def test_an_order_is_chosen_by_the_pruner_of_its_step():
    w = jnp.asarray(np.random.default_rng(0).standard_normal(64) * (np.random.default_rng(1).random(64) < 0.6))
    late = nm.permute(nm.stages(((0, nm.identity), (10, nm.mse(2, 4)))), every=10)
    at = lambda p: p.init(w, ctx=nm.Ctx(step=10))
    np.testing.assert_array_equal(at(late), at(nm.permute(nm.mse(2, 4), every=10)))


def test_a_field_without_a_hash_is_refused():
    with pytest.raises(TypeError, match=r"average: pruners must be hashable, got a dict. Write a number"):
        average({"a": nm.mse(2, 4)})
