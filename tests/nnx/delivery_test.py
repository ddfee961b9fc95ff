"""Sparsity in flax.nnx models: what is special to their stacks, traces, variables and checkpoints.

The laws of every delivery are in tests/delivery_test.py.
"""

import re
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import lax

import nmjax as nm
from nmjax.programs import states
from tests.delivery_test import METHODS, whole
from tests.networks import Mlp

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules


def recipe(text, pattern=".*"):
    return nm.Recipe(((pattern, text),))


def exact(model):
    """Give a model whole numbers as parameters."""
    params = nnx.state(model, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    nnx.update(model, jax.tree.unflatten(tree, [whole(i, *v.shape) for i, v in enumerate(leaves)]))
    return model


# ---- stacks: each layer its own noise, whatever axis stacks them ----


class Cell(nnx.Module):
    """A layer without a bias, so that any axis can stack it."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.sign(self.linear(x))


def loss_of(y):
    return jnp.sum(y * whole(4, *y.shape))


@pytest.mark.slow
def test_an_ensemble():
    """Each member under nnx.vmap computes what it computes by itself, with the words that it has in the stack."""
    cells, x = exact(nnx.vmap(Cell)(nnx.Rngs(0).split(3))), whole(2, 8, 16)
    nm.nnx.sparsify(cells, recipe("s_ste(2,4)"))
    nm.nnx.set_step(cells, 3)
    grads = nnx.vmap(nnx.grad(lambda cell, x: loss_of(cell(x))), in_axes=(0, None))(cells, x)["linear"]["kernel"][...]
    for i in range(3):
        cell = Cell(nnx.Rngs(0))
        cell.linear.kernel[...] = cells.linear.kernel[...][i]
        nm.nnx.sparsify(cell, recipe("s_ste(2,4)"))
        cell.linear.nm_state.words[...] = cells.linear.nm_state.words[...][i].reshape(2, 1)
        nm.nnx.set_step(cell, 3)
        own = nnx.grad(lambda cell: loss_of(cell(x)))(cell)["linear"]["kernel"][...]
        np.testing.assert_array_equal(np.asarray(grads[i]), np.asarray(own))


@pytest.mark.slow
def test_two_stacks_deep():
    make = lambda rngs: Cell(rngs)
    cells = nnx.vmap(nnx.vmap(make))(nnx.Rngs(0).split((2, 3)))
    nm.nnx.sparsify(cells, recipe("s_ste(2,4)"))
    words = np.asarray(cells.linear.nm_state.words[...]).reshape(6, 2)
    assert len(np.unique(words, axis=0)) == 6
    np.testing.assert_array_equal(words, states.noise_words(0, "linear", (2, 3)).reshape(6, 2))
    assert nm.nnx.scales(cells)["linear"].shape == (2, 3)
    hard = nm.nnx.harden(cells)
    assert nm.groups.is_nm(hard.linear.kernel[...], 2, 4, axis=2)


# ---- traces ----


def draws_of(model, x, step, micro=0):
    """Return the gradient of every kernel at a step."""

    @nnx.jit
    def run(model, x, step, micro):
        nm.nnx.set_step(model, step, micro)
        return nnx.grad(lambda model: loss_of(model(x)))(model)

    return jax.tree.map(np.asarray, nnx.to_pure_dict(run(model, x, step, micro)))


def two(text="s_ste(2,4)", seed=0):
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.sign, nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
    return nm.nnx.sparsify(exact(model), recipe(text), seed=seed)


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_two_layers_of_one_shape_draw_apart():
    model = nnx.Dict(a=nnx.Linear(16, 16, rngs=nnx.Rngs(0)), b=nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    nm.nnx.sparsify(model, recipe("mvue(2,4)"))
    assert not np.array_equal(model.a.nm_state.words[...], model.b.nm_state.words[...])
    other = nm.nnx.sparsify(nnx.clone(model), recipe("mvue(2,4)"), seed=1)
    assert not equal(nnx.state(model, nm.nnx.SparsityVariable), nnx.state(other, nm.nnx.SparsityVariable))
    nm.nnx.reseed(model, 1)
    assert equal(nnx.state(model, nm.nnx.SparsityVariable), nnx.state(other, nm.nnx.SparsityVariable))


def test_a_compiled_step_stays_valid_when_seed_step_or_state_are_set_outside_of_it():
    x, model = whole(2, 8, 16), two("mvue(2,4); y_w=ste(hold(mse(2,4),every=3))")
    graph = nnx.split(model)[0]
    step = jax.jit(lambda state: nnx.grad(lambda model: loss_of(model(x)))(nnx.merge(graph, state)))
    step(nnx.state(model))
    nm.nnx.reseed(model, 3)
    step(nnx.state(model))
    nm.nnx.set_step(model, 3)
    step(nnx.state(model))
    nm.nnx.reset_state(model)
    step(nnx.state(model))
    assert step._cache_size() == 1


def test_another_seed_or_step_compiles_nothing_anew():
    x, traces = whole(2, 8, 16), []

    @nnx.jit
    def run(model, step):
        traces.append(1)
        nm.nnx.set_step(model, step)
        return nnx.grad(lambda model: loss_of(model(x)))(model)

    for seed in (0, 1):
        model = two(seed=seed)
        for step in range(3):
            run(model, step)
    assert len(traces) == 1


@pytest.mark.slow
def test_plain_jax_on_a_split_and_donated_state():
    """The pattern in the docs gives bit for bit the results of nnx.jit, also with held masks."""
    x, text = whole(2, 8, 16), "fst(every=2)"
    model = two(text)
    optimizer = nnx.Optimizer(model, optax.sgd(0.125), wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model, optimizer, step):
        nm.nnx.set_step(model, step)
        optimizer.update(model, nnx.grad(lambda model: loss_of(model(x)))(model))

    graph, params, rest = nnx.split(two(text), nnx.Param, ...)

    def plain_step(params, rest, step):
        model = nnx.merge(graph, params, rest)
        nm.nnx.set_step(model, step)
        rest = nnx.split(model, nnx.Param, ...)[2]
        loss = lambda params: loss_of(nnx.merge(graph, params, rest, copy=True)(x))
        return jax.tree.map(lambda w, g: w - 0.125 * g, params, jax.grad(loss)(params)), rest

    plain_step = jax.jit(plain_step, donate_argnums=(0, 1))
    for step in range(5):
        nnx_step(model, optimizer, step)
        params, rest = plain_step(params, rest, step)
    expected = nnx.split(model, nnx.Param, ...)[1:]
    chex.assert_trees_all_equal(nnx.to_pure_dict(params), nnx.to_pure_dict(expected[0]))
    chex.assert_trees_all_equal(nnx.to_pure_dict(rest), nnx.to_pure_dict(expected[1]))


@pytest.mark.slow
def test_accumulated_gradients_have_fresh_noise():
    """The micro-steps of one step have different noise and the same masks."""
    x = whole(2, 8, 16)
    model = two("fst(every=2)")
    each = [draws_of(model, x, 4, m) for m in range(3)]
    assert not any(equal(each[i], each[j]) for i in range(3) for j in range(i))

    @nnx.jit
    def accumulated(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def one(carry, micro):
            model = nnx.merge(graph, params, carry[1], copy=True)
            nm.nnx.set_step(model, 4, micro)
            grads = nnx.grad(lambda model: loss_of(model(x)))(model)
            return (jax.tree.map(jnp.add, carry[0], grads), nnx.split(model, nnx.Param, ...)[2]), None

        return lax.scan(one, (jax.tree.map(jnp.zeros_like, params), rest), jnp.arange(3))[0][0]

    total = jax.tree.map(np.asarray, nnx.to_pure_dict(accumulated(model)))
    chex.assert_trees_all_equal(total, jax.tree.map(lambda *g: sum(g), *each))


@pytest.mark.slow
def test_clones_tied_layers_and_averages():
    x = whole(2, 8, 16)
    model = two("fst(every=2)")
    nm.nnx.set_step(model, 2)
    copy = nnx.clone(model)
    assert equal(draws_of(copy, x, 3), draws_of(model, x, 3))
    model.layers[0].kernel[...] = -model.layers[0].kernel[...]
    assert not equal(draws_of(copy, x, 3), draws_of(model, x, 3))

    linear = exact(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    tied = nm.nnx.sparsify(nnx.Sequential(linear, jnp.sign, linear), recipe("s_ste(2,4)"))
    assert list(nm.nnx.patterns(tied)) == ["layers/0/kernel"]
    assert np.isfinite(draws_of(tied, x, 1)["layers"][0]["kernel"]).all()

    state = nnx.state(model)
    averaged = jax.tree.map(lambda a, b: a if a.dtype != jnp.float32 else 0.5 * a + 0.5 * b, state, nnx.state(copy))
    nnx.update(model, averaged)
    assert np.isfinite(loss_of(model(x)))


def test_arrays_only_where_needed():
    """Dense layers and methods without noise add no arrays. A dense rule leaves Flax's function in its place."""
    arrays = lambda text: len(jax.tree.leaves(nnx.state(two(text), nm.nnx.SparsityVariable)))
    assert [arrays(t) for t in ("dense", "ste(2,4)", "bdwp()", "sdgp(2,4,over='group')")] == [0, 0, 0, 0]
    assert [arrays(t) for t in ("mvue(2,4)", "mdgf(2,4,linear(1,0,9))", "s_ste(2,4)", "fst()")] == [4, 2, 6, 6]
    assert two("dense").layers[0].dot_general is lax.dot_general
    model = nm.nnx.sparsify(two("fst()"), recipe("dense"))
    plain = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.sign, nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(plain))


@pytest.mark.slow
def test_paths_of_parameters_stay():
    before = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.sign, nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(before, nnx.Param))]
    for text in METHODS:
        assert [path for path, _ in nnx.to_flat_state(nnx.state(two(text), nnx.Param))] == paths


def test_a_sparse_layer_prints_its_slots_and_no_address():
    model = Mlp(16, 32, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(model, nm.Recipe((("up", "s_ste(2,4); dx_w=mse(2,4)"),), backend="xla"))
    printed = textwrap.dedent(
        """
        SparsityState(
          y_w=ste(soft(2,4)),
          dx_w=mse(2,4),
          dw_g=mvue(2,4),
          backend='xla',
          words=uint32[2, 1],
          time=int32[2, 1],
          state=float32[1, 1]
        )"""
    ).strip()
    assert repr(model.up.nm_state) == str(model.up.nm_state) == printed
    assert f"nm_state={textwrap.indent(printed, '    ').strip()}" in repr(model)
    assert repr(nnx.merge(*nnx.split(model)).up.nm_state) == printed
    abstract = nnx.eval_shape(lambda: nnx.clone(model))
    assert repr(abstract.up.nm_state) == printed
    counted = jax.tree.map(lambda v: v.size, model)  # a tree of other values than arrays prints too
    assert repr(counted.up.nm_state) == re.sub(r"(words|time)=.*,", r"\1=2,", printed).replace("float32[1, 1]", "1")


def test_sparsified_twice_is_the_second():
    x = whole(2, 8, 16)
    model = nm.nnx.sparsify(two("fst()"), recipe("s_ste(2,4)"))
    assert equal(draws_of(model, x, 3), draws_of(two(), x, 3))


@pytest.mark.slow
def test_resume_from_orbax_is_exact(tmp_path):
    x = whole(2, 8, 16)
    text = "fst(every=3); dx_g=mvue(2,4)"

    def steps(model, optimizer, first, last):
        @nnx.jit
        def one(model, optimizer, step):
            nm.nnx.set_step(model, step)
            optimizer.update(model, nnx.grad(lambda model: loss_of(model(x)))(model))

        for step in range(first, last):
            one(model, optimizer, step)

    def fresh():
        model = two(text)
        return model, nnx.Optimizer(model, optax.sgd(0.125, momentum=0.5), wrt=nnx.Param)

    whole_run = fresh()
    steps(*whole_run, 0, 8)
    first = fresh()
    steps(*first, 0, 4)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "4", nnx.to_pure_dict(nnx.state(first)))
    second = fresh()
    with ocp.StandardCheckpointer() as saver:
        restored = saver.restore(tmp_path / "4", nnx.to_pure_dict(nnx.state(second)))
    state = nnx.state(second)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(second, state)
    steps(*second, 4, 8)
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(second)), nnx.to_pure_dict(nnx.state(whole_run)))
