"""One-shot pruning of layers that are not plain: stacks, masked convolutions and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax import oneshot
from nmjax.models.moe import Experts
from nmjax.nnx import one_shot

RNG = np.random.default_rng(0)


class Transposed(nnx.Module):
    """A layer that keeps its weight as [out, in]."""

    def __init__(self, inside, outside, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (outside, inside)))

    def __call__(self, x):
        return x @ jnp.transpose(self.w[...], (1, 0))


nm.nnx.register_layer(Transposed, weight="w", input=lambda layer: (-1, layer.w.shape[-1]))


class Stack(nnx.Module):
    def __init__(self, inside, outside):
        make = nnx.vmap(lambda rngs: Transposed(inside, outside, rngs))
        self.layers = make(nnx.Rngs(0).split(3))

    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)


@pytest.mark.parametrize("outside", [8, 4, 16])
def test_a_stack_of_layers_that_transpose_their_weight(outside):
    model, x = Stack(8, outside), jnp.asarray(RNG.normal(size=(64, 8)), jnp.float32)
    pruned = nm.nnx.prune(model, "ste(2,4)", [x], oneshot.magnitude)
    hard = nm.nnx.harden(nm.nnx.sparsify(nnx.clone(model), nm.Recipe({".*": "ste(2,4)"})))
    np.testing.assert_array_equal(pruned.model.layers.w[...], hard.layers.w[...])
    assert [int(count.sum()) for count in nm.nnx.violations(pruned.model).values()] == [0]


@pytest.mark.parametrize("solver", [oneshot.sparsegpt, oneshot.admm, oneshot.wanda])
def test_masked_places_of_a_convolution_stay_zero(solver):
    allowed = jnp.ones((3, 3, 8, 8)).at[2].set(0).at[1, 2].set(0)  # nothing after a position
    model = nnx.Conv(8, 8, (3, 3), mask=allowed, use_bias=False, rngs=nnx.Rngs(0))
    x = jnp.asarray(RNG.normal(size=(4, 8, 8, 8)), jnp.float32)
    pruned = nm.nnx.prune(model, "ste(2,4)", [x], solver)
    assert not jnp.any(pruned.model.kernel[...] * (1 - allowed))
    wanted, (error, _) = model(x), pruned.errors[""]
    measured = jnp.sum((wanted - pruned.model(x)) ** 2) / jnp.sum(wanted**2)
    assert error == pytest.approx(float(measured), rel=1e-3)


class Routed(nnx.Module):
    def __init__(self):
        self.experts = Experts(4, 16, 8, dtype=None, rngs=nnx.Rngs(0))

    def __call__(self, x, sizes):
        return self.experts(x, sizes)


@pytest.mark.parametrize("solver", [oneshot.wanda, oneshot.ria, oneshot.sparsegpt, oneshot.admm])
def test_an_expert_without_tokens_is_pruned_by_magnitude(solver):
    model, x = Routed(), jnp.asarray(RNG.normal(size=(64, 16)), jnp.float32)
    with pytest.warns(UserWarning, match="experts: 0 rows of an expert for 16 inputs"):
        pruned = nm.nnx.prune(model, "ste(2,4)", [(x, jnp.array([44, 20, 0, 0]))], solver)
    dense, kept = model.experts.kernel[...][3], pruned.model.experts.kernel[...][3]
    if solver is not oneshot.ria:  # its scores depend on the sums of rows and columns too
        np.testing.assert_array_equal(kept != 0, oneshot.magnitude(dense, np.eye(16)).mask)
    assert float(jnp.sum((dense - kept) ** 2) / jnp.sum(dense**2)) < 0.25


def test_an_error_names_the_layer():
    class Net(nnx.Module):
        def __init__(self):
            self.up, self.down = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            return self.down(jnp.log(self.up(x)))

    with pytest.raises(ValueError, match="down: w or moments are not finite"):
        nm.nnx.prune(Net(), "ste(2,4)", [jnp.ones((16, 8)), -jnp.ones((16, 8))])


@pytest.mark.parametrize("every", [0.0, 1e9])
def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(every, capsys, monkeypatch):
    """With 0 seconds between them there is a line for each block; else there is none."""
    monkeypatch.setattr(one_shot, "EVERY", every)
    model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)))
    x = jax.random.normal(jax.random.key(0), (32, 8))
    nm.nnx.prune(model, "ste(2,4)", [x], progress=True)
    out, err = capsys.readouterr()
    told = [f"Pruning: {i} of 3 blocks in " for i in (1, 2, 3)] if every == 0 else []
    assert out == ""
    assert [line[: len("Pruning: 1 of 3 blocks in ")] for line in err.splitlines()] == told
    nm.nnx.prune(model, "ste(2,4)", [x])
    assert capsys.readouterr() == ("", "")
