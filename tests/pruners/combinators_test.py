"""`rescale`: the norm that it restores, in arrays with and without axes of space."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("shape", [(8,), (6, 8), (1, 16)])
def test_without_axes_of_space_every_group_has_a_norm(shape):
    x = normal(*shape)
    y = nm.prune(nm.rescale(nm.mse(2, 4)), jnp.asarray(x))
    np.testing.assert_allclose(y, restored(x, group_norm), rtol=1e-6)
    np.testing.assert_array_equal(y, nm.prune(nm.rescale(nm.mse(2, 4), "group"), jnp.asarray(x)))


@pytest.mark.parametrize(("shape", "space"), [((3, 5, 8), (1,)), ((2, 3, 4, 8), (1, 2)), ((2, 3, 2, 2, 8), (1, 2, 3))])
def test_with_axes_of_space_every_sample_and_channel_has_a_norm(shape, space):
    x = normal(*shape)
    y = nm.prune(nm.rescale(nm.mse(2, 4)), jnp.asarray(x))
    np.testing.assert_allclose(y, restored(x, lambda v: np.abs(v).sum(space, keepdims=True)), rtol=1e-5)
    np.testing.assert_array_equal(y, nm.prune(nm.rescale(nm.mse(2, 4), "spatial"), jnp.asarray(x)))


def test_the_axes_of_the_product_decide_and_not_the_number_of_axes():
    x = jnp.asarray(normal(2, 6, 8))
    run = lambda over, space: nm.rescale(nm.mse(2, 4), over)(x, -1, nm.Ctx(axes=Axes(1, space)))
    np.testing.assert_array_equal(run("auto", ()), run("group", (1,)))
    np.testing.assert_array_equal(run("auto", (1,)), run("spatial", (1,)))
    np.testing.assert_array_equal(run("auto", (0, 1)), run("spatial", (0, 1)))
    assert len({run("auto", space).tobytes() for space in ((), (1,), (0, 1))}) == 3


def test_spatial_is_refused_without_axes_of_space():
    p = nm.rescale(nm.mse(2, 4), "spatial")
    with pytest.raises(ValueError, match=r"^rescale\(mse\(2,4\),over='spatial'\) needs axes of space") as refused:
        p(jnp.ones((6, 8)))
    assert "shape" not in str(refused.value)
    with pytest.raises(ValueError, match="needs axes of space"):
        jax.jit(p)(jnp.ones(8))


def test_a_sample_under_vmap_has_no_axis_of_samples():
    """The product inside sees positions and features, so its gradient has no axes of space."""
    x, w = jnp.asarray(normal(3, 8, 4)), jnp.asarray(normal(4, 16))

    def gradient(over):
        layer = lambda x: nm.einsum("ti,io->to", x, w, sparsity=nm.methods.sdgp(over=over))
        return jax.vmap(jax.grad(lambda x: (layer(x) ** 2).sum()))(x)

    np.testing.assert_array_equal(gradient("auto"), gradient("group"))


@pytest.mark.parametrize("over", ["auto", "spatial", "group"])
def test_what_is_promised_does_not_depend_on_over(over):
    p = nm.rescale(nm.mse(2, 4), over)
    assert (p.pattern, p.kept(), p.block, p.selects, p.stochastic, p.depends_on_step) == (
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
