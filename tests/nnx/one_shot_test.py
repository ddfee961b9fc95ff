"""One-shot pruning of layers that are not plain: stacks, masked convolutions and experts."""

from operator import attrgetter

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
LINEAR = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
BLOCKS = nm.Recipe((("blocks/.*", "ste(2,4)"), (".*", "dense")))


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
    with pytest.warns(UserWarning, match="experts has 0 rows of an expert for 16 inputs .* Give much more: 10 rows"):
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
    """With 0 seconds between them there is a line for each block; else one, after the first."""
    monkeypatch.setattr(one_shot, "EVERY", every)
    model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)))
    x = jax.random.normal(jax.random.key(0), (32, 8))
    nm.nnx.prune(model, "ste(2,4)", [x], progress=True)
    out, err = capsys.readouterr()
    told = [f"Pruning: {i} of 3 blocks in " for i in ((1, 2, 3) if every == 0 else (1,))]
    assert out == ""
    assert [line[: len("Pruning: 1 of 3 blocks in ")] for line in err.splitlines()] == told
    nm.nnx.prune(model, "ste(2,4)", [x])
    assert capsys.readouterr() == ("", "")


# ---- the order of inputs ----


def dense_twin(kind):
    size = {"vocabulary": 40, "length": 32, "width": 32, "depth": 2, "rngs": nnx.Rngs(0)}
    if kind == "gpt":
        return nm.models.GPT(heads=4, hidden=64, **size)
    if kind == "modernbert":
        return nm.models.ModernBERT(heads=4, hidden=64, classes=4, **size)
    return nm.models.Decoder(heads=4, kv_heads=2, features=8, hidden=64, **size)


@pytest.mark.parametrize("kind", ["gpt", "decoder", "modernbert"])
@pytest.mark.slow
def test_an_order_changes_no_function_and_keeps_more(kind):
    """A solver that prunes nothing shows the order alone: the outputs are those of the dense model."""
    model, x = dense_twin(kind), jax.random.randint(jax.random.key(1), (4, 32), 0, 40)
    nothing = lambda w, moments, n, m: oneshot.Solved(np.asarray(w), np.ones(w.shape, bool), 0.0, 0.0)
    moved = nm.nnx.prune(model, BLOCKS, [x], nothing, permute=True).model
    np.testing.assert_allclose(moved(x), model(x), rtol=1e-4, atol=1e-5)
    for name in ("mlp.down", "attention.out", "mlp.up", "attention.value"):
        own, other = (np.asarray(attrgetter(f"{name}.kernel")(one.blocks[0])[...]) for one in (model, moved))
        assert (own != other).any(), name
        np.testing.assert_array_equal(np.sort(own.ravel()), np.sort(other.ravel()))
    lost = {False: [], True: []}  # what wanda loses of its own score, layer by layer
    for permute, own in lost.items():

        def solver(w, moments, n, m, own=own):
            own.append(oneshot.wanda(w, np.diag(moments), n, m).error)
            return oneshot.sparsegpt(w, moments, n, m)

        hard = nm.nnx.prune(model, nm.Recipe({"blocks/0/.*": "ste(2,4)", ".*": "dense"}), [x], solver, permute=permute)
        assert all(v is None or not v for v in nm.nnx.violations(hard.model).values())
    less = [b / a for a, b in zip(*lost.values(), strict=True)]
    assert sorted(less)[-4 - (kind != "gpt") :] == pytest.approx([1] * (4 + (kind != "gpt")))
    assert max(sorted(less)[:2]) < 0.99


def test_an_order_needs_modules_that_list_free_inputs():
    for in_turn in (True, False):
        with pytest.raises(ValueError, match="permute=True needs in_turn=True, and modules with a method free_inputs"):
            nm.nnx.prune(
                nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "ste(2,4)", [jnp.ones((9, 8))], permute=True, in_turn=in_turn
            )
    stack = nm.models.GPT(heads=2, hidden=8, vocabulary=8, length=8, width=8, depth=2, scan=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="is a stack. permute=True needs blocks in a list: scan=False"):
        nm.nnx.prune(stack, BLOCKS, [jnp.zeros((4, 8), int)], permute=True)


WRONG_INPUTS = {
    "free_inputs of blocks/0 names 'dwn', which is no layer of it": (nm.oneshot.FreeInputs("dwn", ("up",)), "ste(2,4)"),
    r"of a layer of 8 inputs, blocks/0/down, needs layers of 4 outputs in 1 parts, and blocks/0/up has others": (
        nm.oneshot.FreeInputs("down", ("up",), uses=2), "ste(2,4)"
    ),
    "of a layer of 8 inputs, blocks/0/down, needs layers of 8 outputs in 3 parts, and blocks/0/up has others": (
        nm.oneshot.FreeInputs("down", ("up",), parts=3), "ste(2,4)"
    ),
    "permute=True orders the inputs of blocks/0/down in parts of 4, which m=8 does not divide": (
        nm.oneshot.FreeInputs("down", ("up",), parts=2), "ste(4,8)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG_INPUTS)
def test_free_inputs_that_do_not_fit_are_refused(said):
    free, sparsity = WRONG_INPUTS[said]

    class Mlp(nnx.Module):
        def __init__(self):
            self.up, self.down = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))

        def free_inputs(self):
            return [free]

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    class Net(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Mlp(), Mlp()])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    with pytest.raises(ValueError, match=said):
        nm.nnx.prune(Net(), nm.Recipe({"blocks/0/down": sparsity, ".*": "dense"}), [jnp.ones((9, 4))], permute=True)
