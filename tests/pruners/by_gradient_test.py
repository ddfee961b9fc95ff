"""Choices by gradients of the weight."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import nmjax as nm

KINDS = {
    "saliency(2,4,decay=0.5)": lambda w, g: np.abs(w * g),
    "fisher(2,4,decay=0.5)": lambda w, g: (w * g) ** 2,  # of which the state is the root
    "movement(2,4,decay=0.5)": lambda w, g: -w * g,
    "movement(2,4)": lambda w, g: -w * g,
}


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def best(scores, n, m):
    """Return by enumeration the mask of the n of every m, along axis 0, whose sum of scores is largest."""
    kept = np.zeros(scores.shape, bool)
    for i, j in np.ndindex(len(scores) // m, scores.shape[1]):
        group = scores[i * m : (i + 1) * m, j]
        chosen = max(itertools.combinations(range(m), n), key=lambda c: group[list(c)].sum())
        kept[[i * m + c for c in chosen], j] = True
    return kept


@pytest.mark.parametrize("text", KINDS)
def test_scores_are_sums_of_what_gradients_add_and_choose_the_largest(text):
    p, decay = nm.parse_pruner(text), 0.5 if "decay" in text else 1.0
    w, state, scores = drawn(0, 16, 6), None, np.zeros((16, 6))
    state = p.init(w, 0)
    np.testing.assert_array_equal(p.mask(w, 0, nm.Ctx(state=state)), best(np.abs(w), 2, 4))  # before the first one
    for i in range(5):
        w, g = w + 0.1 * drawn(9 + i, 16, 6), drawn(90 + i, 16, 6)
        scores = decay * scores + KINDS[text](w.astype(np.float64), g)
        state = p.refresh(w, 0, nm.Ctx(state=state, gradient=jnp.asarray(g)))
        own = np.square(state[0]) if "fisher" in text else state[0]
        np.testing.assert_allclose(own, scores, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(p.mask(w, 0, nm.Ctx(state=state)), best(scores, 2, 4))
    assert int(state[1]) == 5
    assert p.refresh(w, 0, nm.Ctx(state=state)) is state  # without a gradient


def exchanged(kept, w, g, n, m, k):
    """Return the mask after one exchange, group by group, by sorting."""
    result = np.zeros_like(kept)
    for i, j in np.ndindex(len(kept) // m, kept.shape[1]):
        at = range(i * m, (i + 1) * m)
        stay = sorted((a for a in at if kept[a, j]), key=lambda a: -abs(w[a, j]))[: n - k]
        grown = sorted((a for a in at if a not in stay), key=lambda a: -abs(g[a, j]))[:k]
        result[[*stay, *grown], j] = True
    return result


@pytest.mark.parametrize(("n", "m", "k"), [(2, 4, 1), (3, 8, 1), (4, 16, 2), (4, 16, 3)])
def test_the_smallest_give_way_to_the_largest_gradients(n, m, k):
    p, w = nm.regrow(n, m, every=3, until=9, k=k), drawn(1, 4 * m, 5)
    state = p.init(w, 0)
    kept = best(np.abs(w), n, m)
    for step in range(13):
        w, g = w + 0.1 * drawn(20 + step, *w.shape), drawn(50 + step, *w.shape)
        if step in (3, 6):  # not at 0, and not from 9 on
            kept = exchanged(kept, w, g, n, m, k)
        state = p.refresh(w, 0, nm.Ctx(step=step, state=state, gradient=jnp.asarray(g)))
        np.testing.assert_array_equal(state[0], kept, err_msg=str(step))
    same = p.refresh(w, 0, nm.Ctx(step=3, state=state, gradient=jnp.zeros(w.shape)))
    np.testing.assert_array_equal(same[0], kept)  # no gradient is larger than another


def test_a_held_mask_follows_the_scores_when_it_is_due():
    p, w = nm.hold(nm.saliency(1, 2), every=2), jnp.array([2.0, 1.0])
    state, seen = p.init(w), []
    for step in range(5):
        state = p.refresh(w, ctx=nm.Ctx(step=step, state=state, since=max(step - 1, 0)))
        seen.append(p.mask(w, ctx=nm.Ctx(state=state)).tolist())
        state = p.refresh(w, ctx=nm.Ctx(step=step, state=state, since=step, gradient=jnp.array([0.0, 1.0])))
    assert seen == [[True, False], [True, False], [False, True], [False, True], [False, True]]


def test_the_part_of_a_held_mask_goes_on():
    w, later = jnp.array([2.0, 1.0]), jnp.array([1.0, 2.0])
    p = nm.hold(nm.hold(nm.saliency(1, 2), every=1), every=1)
    state = p.init(w)
    for step in range(3):
        state = p.refresh(w, ctx=nm.Ctx(step=step, state=state, since=max(step - 1, 0)))
        state = p.refresh(w, ctx=nm.Ctx(step=step, state=state, since=step, gradient=jnp.array([0.0, 1.0])))
    assert p.mask(w, ctx=nm.Ctx(state=state)).tolist() == [False, True]
    p = nm.hold(nm.stages(((0, nm.mse(1, 2)), (3, nm.regrow(2, 4, every=9)))), every=1)
    w, later = jnp.array([4.0, 3.0, 2.0, 1.0]), jnp.array([1.0, 2.0, 3.0, 4.0])
    state = p.init(w)
    for step in range(4):
        state = p.refresh(w if step < 2 else later, ctx=nm.Ctx(step=step, state=state, since=max(step - 1, 0)))
    assert p.mask(later, ctx=nm.Ctx(step=3, state=state)).tolist() == [False, False, True, True]


def test_what_is_not_finite_counts_as_zero_and_signs_count():
    for p in (nm.saliency(1, 4), nm.fisher(1, 4), nm.movement(1, 4), nm.regrow(2, 8, every=1)):
        w = jnp.arange(1.0, 1.0 + p.m)
        state = p.init(w)
        for bad in (jnp.nan, jnp.inf, -jnp.inf):
            gradient = jnp.zeros(p.m).at[0].set(bad).at[2].set(-1.0)
            state = p.refresh(w, ctx=nm.Ctx(step=1, state=state, gradient=gradient))
        kept = p.mask(w, ctx=nm.Ctx(state=state))
        assert kept[2], p
        assert not kept[0], p
    w, small = jnp.array([1.0, 1e-3, 1e-3, 1e-3]), nm.movement(1, 4)  # one large negative score beside small ones
    gradient = jnp.array([1.0, -1e-6, -2e-6, -3e-6])
    state = small.refresh(w, ctx=nm.Ctx(state=small.init(w), gradient=gradient))
    assert small.mask(w, ctx=nm.Ctx(state=state)).tolist() == [False, False, False, True]
    state = small.refresh(w, ctx=nm.Ctx(state=small.init(w), gradient=-gradient))
    assert small.mask(w, ctx=nm.Ctx(state=state)).tolist() == [True, False, False, False]
    faint = nm.fisher(1, 2)
    state = faint.refresh(jnp.ones(2), ctx=nm.Ctx(state=faint.init(jnp.ones(2)), gradient=jnp.array([1e-30, 2e-30])))
    assert faint.mask(jnp.ones(2), ctx=nm.Ctx(state=state)).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("text", ["saliency(1,4)", "regrow(2,8,every=1)"])
def test_negative_axes_and_narrow_weights(text, dtype):
    p = nm.parse_pruner(text)
    w, g = (jnp.asarray(drawn(i, 3, 16), dtype) for i in (7, 8))
    state = p.refresh(w, -1, nm.Ctx(step=1, state=p.init(w, -1), gradient=g))
    other = p.refresh(w.T, 0, nm.Ctx(step=1, state=p.init(w.T, 0), gradient=g.T))
    np.testing.assert_array_equal(p.mask(w, -1, nm.Ctx(state=state)), p.mask(w.T, 0, nm.Ctx(state=other)).T)


def test_gradients_are_not_rounded_to_the_dtype_of_the_product():
    layer = nnx.Linear(4, 1, use_bias=False, dtype=jnp.float16, rngs=nnx.Rngs(0))
    model = nm.nnx.sparsify(layer, nm.Recipe({".*": "y_w=ste(saliency(1,4))"}))
    nm.nnx.observe(model, {"kernel": jnp.array([[0.0], [1e-9], [0.0], [0.0]])})
    assert nm.nnx.masks(model)["kernel"].ravel().tolist() == [False, True, False, False]


def test_a_shared_weight_is_observed_under_its_first_path():
    class Net(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2))
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return self.b(self.a(x))

    model = nm.nnx.sparsify(Net(), nm.Recipe({".*": "y_w=ste(saliency(2,4))"}))
    nm.nnx.observe(model, nnx.grad(lambda model: model(jnp.ones((2, 4))).sum())(model))
    jax.tree.map(
        np.testing.assert_array_equal, *(nnx.as_pure(nnx.state(one))["nm_state"] for one in (model.a, model.b))
    )


RECIPE = {".*": "y_w=ste(regrow(2,4,every=1)); dx_w=saliency(2,4)"}


def test_all_doors_observe_alike():
    x, kernel = drawn(3, 12, 8), drawn(4, 8, 4)
    step = lambda f, w: jax.grad(lambda w: jnp.square(f(w)).sum())(w)
    found = {}

    model = nm.nnx.sparsify(nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0)), nm.Recipe(RECIPE))
    model.kernel[...] = kernel
    nm.nnx.reset_state(model)
    for i in range(3):
        nm.nnx.set_step(model, i)
        gradients = nnx.grad(lambda model: jnp.square(model(x)).sum())(model)
        nm.nnx.observe(model, gradients)
    found["nnx"] = [
        v[...].ravel() for v in jax.tree.leaves(model.nm_state.state, is_leaf=lambda v: hasattr(v, "get_value"))
    ]

    with nm.linen.sparsify(nm.Recipe(RECIPE)):
        module = nn.Dense(4, use_bias=False)
        variables = module.init(jax.random.key(0), x)
        variables["params"]["kernel"] = jnp.asarray(kernel)
        variables = nm.linen.reset_state(variables)
        for i in range(3):
            variables = nm.linen.set_step(variables, i)
            call = lambda params, others=variables: module.apply({**others, "params": params}, x)
            variables = nm.linen.observe(variables, step(call, variables["params"]))
    found["linen"] = [jnp.ravel(v) for v in jax.tree.leaves(variables["nm"]["kernel"].state)]

    sparse = nm.transform(lambda params, x: x @ params["kernel"], nm.Recipe({"kernel": RECIPE[".*"]}))
    params = {"kernel": jnp.asarray(kernel)}
    state = sparse.init(params, x)
    for i in range(3):
        state = sparse.set_step(params, state, i)
        state = sparse.observe(params, state, step(partial(sparse, x=x, state=state), params))
    found["transform"] = [jnp.ravel(v) for v in jax.tree.leaves(state["kernel"].state)]

    counts = [int(v[0]) for v in found["nnx"] if v.shape == (1,)]
    assert counts == [3, 3]
    for other in ("linen", "transform"):
        jax.tree.map(np.testing.assert_array_equal, found["nnx"], found[other])


def test_who_does_not_ask_is_left_alone():
    recipe = nm.Recipe({".*": "fst(2,4)"})
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    nm.nnx.observe(model, {})
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_refusals():
    with pytest.raises(ValueError, match=r"y_w=saliency\(2,4\): saliency\(2,4\) chooses by gradients, and autodiff"):
        nm.parse("y_w=saliency(2,4)")
    with pytest.raises(ValueError, match=r"y_x=ste\(fisher\(2,4\)\).* keeps state between steps, and only the slots"):
        nm.parse("y_x=ste(fisher(2,4))")
    for text in ("rows(saliency(2,4))", "pairs(movement(2,4))"):
        with pytest.raises(ValueError, match="reads gradients, and those of norms are not known"):
            nm.parse_pruner(text)
    with pytest.raises(ValueError, match=r"saliency\(2,4,decay=2.0\): decay is what is left of a score"):
        nm.saliency(2, 4, 2.0)
    said = r"a group keeps 1 weights, and fewer can be exchanged. Write .*, as regrow\(2,8,k=1\)"
    with pytest.raises(ValueError, match=said):
        nm.regrow(1, 4)
    with pytest.raises(ValueError, match=r"y_w=stages.*: saliency\(2,4\) chooses by gradients, and autodiff gives"):
        nm.parse("y_w=stages(((0,saliency(2,4)),(100,ste(mse(2,4)))))")
    with pytest.raises(ValueError, match=r"hold\(saliency\(2,4\)\) never looks at the gradients by which it chooses"):
        nm.parse("y_w=ste(hold(saliency(2,4)))")
    with pytest.raises(ValueError, match="every, until and k are at least 1"):
        nm.regrow(2, 4, until=0)
    with pytest.raises(ValueError, match=r"holds an array of shape \(8,\), but the array has shape \(4,\)"):
        nm.saliency(2, 4).mask(jnp.ones(4), ctx=nm.Ctx(state=nm.saliency(2, 4).init(jnp.ones(8))))
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "y_w=ste(saliency(2,4))"}))
    said = r"observe: .* of shape \(8, 4\) is pruned by its gradient, .*, and gradients has "
    with pytest.raises(ValueError, match=said + "none"):
        nm.nnx.observe(model, {"bias": jnp.ones(4)})
    with pytest.raises(ValueError, match=said + r"one of shape \(4, 8\)"):
        nm.nnx.observe(model, {"kernel": jnp.ones((4, 8))})
    sparse = nm.transform(lambda params, x: x @ params["k"], nm.Recipe({"k": "y_w=ste(saliency(2,4))"}))
    params = {"k": jnp.ones((8, 4))}
    state = sparse.init(params, jnp.ones((2, 8)))
    with pytest.raises(ValueError, match=said + r"one of shape \(8, 1\)"):
        sparse.observe(params, state, {"k": jnp.ones((8, 1))})
    with nm.linen.sparsify(nm.Recipe({".*": "y_w=ste(saliency(2,4))"})):
        variables = nn.Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
    with pytest.raises(ValueError, match=said + "none"):
        nm.linen.observe(variables, {"bias": jnp.ones(4)})
    ended = nm.nnx.sparsify(
        nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "y_w=stages(((0,ste(saliency(2,4))),(10,ste(mse(2,4)))))"})
    )
    nm.nnx.set_step(ended, 20)
    nm.nnx.harden(ended)  # says nothing
    with pytest.warns(UserWarning, match="harden: .*the model.* is pruned by gradients, and has seen none"):
        nm.nnx.harden(model)
