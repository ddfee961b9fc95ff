"""Transformations between gradients and weights: against closed forms, inside optax's own wrappers, over the switch."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nmjax as nm
from nmjax import optim

pytestmark = pytest.mark.sampled

LAM = 0.25
STANDARD = jax.numpy_dtype_promotion("standard")  # for optax's own code


def normal(seed, shape=(8, 4), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def tree(seed, dtype=jnp.float32):
    return {"a": {"kernel": normal(seed, dtype=dtype), "bias": normal(seed + 1, (4,), dtype)}, "b": normal(seed + 2)}


PARAMS, GRADS = tree(0), tree(10)
MASKS = {"a": {"kernel": nm.mse(2, 4).mask(PARAMS["a"]["kernel"], 0), "bias": True}, "b": PARAMS["b"] > 0}


def expected(grads=GRADS, lam=LAM):
    return jax.tree.map(lambda g, w, keep: jnp.where(keep, g, g + jnp.float32(lam) * w), grads, PARAMS, MASKS)


def once(tx, grads=GRADS, params=PARAMS, masks=MASKS):
    return tx.update(grads, tx.init(params), params, masks=masks)[0]


# masked_decay: the term


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_term_is_that_of_sr_ste(wrap):
    x, w, p = normal(3, (16, 8)), normal(4, (8, 4)), nm.mse(2, 4)

    def gradient(sparsity):
        return jax.grad(lambda w: jnp.square(nm.einsum("ti,io->to", x, w, sparsity=sparsity)).sum())

    tx = optim.masked_decay(LAM)
    ours = wrap(lambda w: once(tx, gradient(nm.methods.ste(2, 4))(w), w, p.mask(w, 0)))
    theirs = wrap(gradient(nm.methods.sr_ste(2, 4, lam=LAM)))
    np.testing.assert_array_equal(ours(w), theirs(w))


def test_the_term_on_trees():
    chex.assert_trees_all_equal(once(optim.masked_decay(LAM)), expected())
    assert optim.masked_decay(LAM).init(PARAMS) == optax.EmptyState()


@pytest.mark.parametrize("lam", [0.0, nm.constant(0.0)], ids=["number", "schedule"])
def test_a_rate_of_0_changes_nothing(lam):
    bad = jax.tree.map(lambda w: jnp.full_like(w, jnp.inf), PARAMS)
    chex.assert_trees_all_equal(once(optim.masked_decay(lam), params=bad), GRADS)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_kept_weight_leaves_its_gradient_alone(bad):
    w, keep = jnp.array([bad, 1.0, bad]), jnp.array([True, False, False])
    got = once(optim.masked_decay(LAM), jnp.array([-0.0, 1.0, 1.0]), w, keep)
    np.testing.assert_array_equal(got, jnp.array([-0.0, 1.25, bad]))
    assert np.signbit(got[0])


@pytest.mark.parametrize("weights", [jnp.bfloat16, jnp.float32])
def test_bf16_is_rounded_once(weights):
    g, w = normal(5, (64,), jnp.bfloat16), normal(6, (64,), weights)
    got = once(optim.masked_decay(6e-3), g, w, jnp.zeros(64, bool))
    exact = g.astype(jnp.float32) + jnp.float32(6e-3) * w.astype(jnp.float32)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


def test_a_schedule_counts_updates():
    tx = optim.masked_decay(nm.linear(0, 1, 4))
    state, w, g = tx.init(jnp.ones(2)), jnp.ones(2), jnp.zeros(2)
    for step in range(6):
        assert state.count == step
        got, state = jax.jit(tx.update)(g, state, w, masks=jnp.array([True, False]))
        np.testing.assert_allclose(got, [0, min(step / 4, 1)], rtol=1e-6)


@pytest.mark.slow
def test_the_term_is_not_clipped_and_goes_through_adam():
    with STANDARD:
        clipped, _ = optax.clip_by_global_norm(1.0).update(GRADS, optax.EmptyState())
        got = once(optax.chain(optax.clip_by_global_norm(1.0), optim.masked_decay(LAM)))
        chex.assert_trees_all_equal(got, expected(clipped))
        before, after = (optax.chain(optim.masked_decay(LAM), optax.adam(1.0)), optax.adam(1.0))
        # Adam's first step is the sign of the gradient that it sees: decay before it turns signs, decay after it adds
        chex.assert_trees_all_close(once(before), jax.tree.map(lambda g: -jnp.sign(g), expected()), rtol=1e-4)
        late = once(optax.chain(optax.scale_by_adam(), optim.masked_decay(LAM)))
        signs = jax.tree.map(jnp.sign, GRADS)
        chex.assert_trees_all_close(late, expected(signs), rtol=1e-4)
        moments = [tx.update(GRADS, tx.init(PARAMS), PARAMS, masks=MASKS)[1] for tx in (before, after)]
    mu, dense_mu = (optax.tree.get(m, "mu")["b"] for m in moments)
    assert np.array_equal(mu == dense_mu, MASKS["b"])


# masked_decay: inside optax's wrappers


def test_every_mask_has_its_weight_in_a_chain_with_adamw():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optim.masked_decay(6e-5), optax.adamw(1e-2))
    with STANDARD:

        @jax.jit
        @chex.assert_max_traces(n=1)
        def train(params, state, masks):
            updates, state = tx.update(params, state, params, masks=masks)
            return optax.apply_updates(params, updates), state

        params, state, masks = PARAMS, tx.init(PARAMS), jax.tree.map(jnp.asarray, MASKS)
        for _ in range(3):
            params, state = train(params, state, masks)
    chex.assert_tree_all_finite(params)


LABELS = {
    "leaves": {"a": {"kernel": "pruned", "bias": "rest"}, "b": "rest"},
    "subtrees": {"a": "pruned", "b": "rest"},
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("narrow", [False, True], ids=["whole", "masked masks"])
def test_one_label_of_multi_transform(labels, narrow):
    """The wrapper hands on the masks of the whole tree, or with this option those of the label."""
    tx = optax.multi_transform(
        {"pruned": optim.masked_decay(LAM), "rest": optax.set_to_zero()}, labels, mask_compatible_extra_args=narrow
    )
    whole, zero = expected(), jax.tree.map(jnp.zeros_like, PARAMS)
    kernel, bias = whole["a"]["kernel"], whole["a"]["bias"] if labels["a"] == "pruned" else zero["a"]["bias"]
    chex.assert_trees_all_equal(once(tx), {"a": {"kernel": kernel, "bias": bias}, "b": zero["b"]})


def test_masks_of_one_label_alone():
    tx = optax.multi_transform({"pruned": optim.masked_decay(LAM), "rest": optax.identity()}, LABELS["leaves"])
    got = once(tx, masks={"a": {"kernel": MASKS["a"]["kernel"]}})
    chex.assert_trees_all_equal(got, {**GRADS, "a": {**GRADS["a"], "kernel": expected()["a"]["kernel"]}})


@pytest.mark.parametrize("narrow", [False, True], ids=["whole", "masked masks"])
def test_masked(narrow):
    chosen = {"a": {"kernel": True, "bias": False}, "b": False}
    tx = optax.masked(optim.masked_decay(LAM), chosen, mask_compatible_extra_args=narrow)
    chex.assert_trees_all_equal(once(tx)["b"], GRADS["b"])
    chex.assert_trees_all_equal(once(tx)["a"], {**GRADS["a"], "kernel": expected()["a"]["kernel"]})


@pytest.mark.parametrize("skip", [None, optax.skip_not_finite], ids=["all", "finite"])
def test_multi_steps_decays_once_for_all_its_gradients(skip):
    tx = optax.MultiSteps(optim.masked_decay(LAM), 2, should_skip_update_fn=skip)
    with STANDARD:
        state = tx.init(PARAMS)
        first, state = jax.jit(tx.update)(GRADS, state, PARAMS, masks=MASKS)
        second, state = jax.jit(tx.update)(GRADS, state, PARAMS, masks=MASKS)
    chex.assert_trees_all_equal(first, jax.tree.map(jnp.zeros_like, GRADS))
    chex.assert_trees_all_close(second, expected(), rtol=1e-6)


def test_multi_steps_goes_around_a_chain():
    tx = optax.chain(optax.MultiSteps(optim.masked_decay(LAM), 2).gradient_transformation())
    with pytest.raises(ValueError, match="got no masks"), STANDARD:
        once(tx)


def test_inject_hyperparams():
    tx = optax.inject_hyperparams(optim.masked_decay)(lam=LAM)
    with STANDARD:
        chex.assert_trees_all_close(once(tx), expected(), rtol=1e-6)


class Model(nnx.Module):
    def __init__(self):
        self.first, self.second = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def nnx_masks(model):
    return jax.tree.map(
        lambda w: nm.mse(2, 4).mask(w, 0) if w.ndim > 1 else jnp.array(True), nnx.state(model, nnx.Param)
    )


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_flax_optimizer(wrap):
    """A state of Variables goes in, and so do masks made of it."""
    with STANDARD:
        model, x = Model(), normal(7, (5, 8))
        optimizer = nnx.Optimizer(model, optax.chain(optim.masked_decay(LAM), optax.sgd(1.0)), wrt=nnx.Param)
        params, masks = nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(nnx_masks(model))
        gradient = lambda model: nnx.grad(lambda m: jnp.square(m(x)).mean())(model)
        grads = nnx.as_pure(gradient(model))

        @wrap
        def train(model, optimizer):
            optimizer.update(model, gradient(model), masks=nnx_masks(model))

        train(model, optimizer)
        want = jax.tree.map(lambda g, w, k: w - g - jnp.where(k, 0, LAM * w), grads, params, masks)
    chex.assert_trees_all_close(nnx.as_pure(nnx.state(model, nnx.Param)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_masks_may_be_plain_dicts_beside_a_state():
    params = nnx.as_pure(nnx.state(Model(), nnx.Param))
    masks = nnx.to_pure_dict(nnx_masks(Model()))
    got = once(optim.masked_decay(LAM), params, params, masks)
    chex.assert_trees_all_equal(got, once(optim.masked_decay(LAM), params, params, nnx.as_pure(nnx_masks(Model()))))


@pytest.mark.slow
def test_states_of_variables_without_the_optimizer():
    model = Model()
    params = nnx.state(model, nnx.Param)
    grads = jax.tree.map(jnp.ones_like, params)
    got = once(optim.masked_decay(LAM), grads, params, nnx_masks(model))
    chex.assert_trees_all_equal_structs(got, grads)


# masked_decay: what it refuses


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda tx: tx.update(GRADS, tx.init(PARAMS), PARAMS), ValueError, r"masks=nm\.nnx\.masks\(model\)"),
        (
            lambda tx: tx.update(GRADS, tx.init(PARAMS), masks=MASKS),
            ValueError,
            "got no parameters to decay: write tx.update",
        ),
        (
            lambda tx: once(tx, masks={**MASKS, "b": jnp.ones((4, 8), bool)}),
            ValueError,
            r"mask at \['b'\] has shape \(4, 8\), its parameter \(8, 4\)",
        ),
        (
            lambda tx: once(tx, masks={**MASKS, "a": {"kernel": True}}),
            ValueError,
            r"gradient at \['a'\]\['bias'\], of shape \(4,\), has no mask",
        ),
        (
            lambda tx: once(tx, masks={**MASKS, "a": True}),
            ValueError,
            r"gradient at \['a'\]\['bias'\], of shape \(4,\), has no mask",
        ),
        (
            lambda tx: once(tx, masks={**MASKS, "c": jnp.ones(3, bool)}),
            ValueError,
            r"mask at \['c'\], of shape \(3,\), has no gradient",
        ),
        (
            lambda tx: once(tx, params={**PARAMS, "c": jnp.ones(3)}),
            ValueError,
            r"parameter at \['c'\], of shape \(3,\), has no gradient",
        ),
        (
            lambda tx: once(tx, params={**PARAMS, "b": jnp.ones((4, 8))}),
            ValueError,
            r"gradient at \['b'\] has shape \(8, 4\), its parameter \(4, 8\)",
        ),
        (lambda tx: once(tx, params={"a": PARAMS["a"]}), ValueError, r"\['b'\].*has no parameter"),
        (
            lambda tx: once(tx, masks={**MASKS, "b": 1.0}),
            TypeError,
            r"mask at \['b'\] has dtype float32.*Write mask != 0",
        ),
        (
            lambda tx: once(tx, jnp.ones(3), jnp.ones(3), jnp.ones(2, bool)),
            ValueError,
            r"masked_decay: the mask has shape \(2,\), its parameter \(3,\)",
        ),
    ],
)
def test_masked_decay_says_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call(optim.masked_decay(LAM))


# proximal: the step


def products(x, n):
    """The sum of all products of n of the values along the first axis, by the definition."""
    return sum(np.prod(x[list(chosen)], axis=0) for chosen in itertools.combinations(range(len(x)), n))


def stepped(w, n, m, strength):
    """One proximal step of groups [m, groups], without a gradient."""
    tx = optim.proximal(n, m, strength, axis=0)
    update = jax.jit(tx.update)(jnp.zeros_like(w), tx.init(w), w)[0]
    return np.asarray(w + update, np.float64)


def test_a_step_of_equal_magnitudes_by_hand():
    # x = a - 3 strength x^2 of four equal values; three stay alike up to strength * a = 1/2 + 1/sqrt(2), then one goes
    a, strength = 0.8, 0.25
    x = (np.sqrt(1 + 12 * strength * a) - 1) / (6 * strength)
    np.testing.assert_allclose(stepped(jnp.full((4, 1), a), 2, 4, strength)[:, 0], [x] * 4, rtol=1e-4)
    three = jnp.array([[1.0], [-1.0], [1.0], [0.0]])
    below, above = (stepped(three, 2, 4, 0.5 + 0.5**0.5 + e)[:, 0] for e in (-0.01, 0.01))
    assert np.count_nonzero(below) == 3
    np.testing.assert_allclose(below[:3], [below[0], -below[0], below[0]], rtol=1e-4)
    np.testing.assert_array_equal(above, [1, -1, 0, 0])


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (3, 4), pytest.param(2, 8, marks=pytest.mark.slow)])
def test_no_other_point_is_better(n, m):
    w = np.abs(np.hstack([normal(7, (m, 20)), 1 + 0.1 * normal(8, (m, 20))]).astype(np.float64))
    for strength in (0.05, 0.3, 0.6, 1.2, 3.0):
        found = stepped(jnp.asarray(w, jnp.float32), n, m, strength)
        cost = lambda x, w=w, strength=strength: ((x - w) ** 2).sum(0) / 2 + strength * products(x, n + 1)
        corners = np.array(list(itertools.product((0, 1), repeat=m)))[:, :, None] * w
        others = np.random.default_rng(0).uniform(0, 1, (400, m, 1)) * w
        near = np.maximum(found + 0.02 * np.random.default_rng(1).standard_normal((400, m, 40)), 0)
        for x in (*corners, *others, *near):
            assert (cost(found) <= cost(x) + 1e-4).all()


def test_many_steps_end_with_the_pattern_and_keep_large_weights():
    w = normal(8, (64, 16))
    tx = optax.chain(optax.sgd(0.0), optim.proximal(2, 4, 0.3))
    step = jax.jit(lambda w: optax.apply_updates(w, tx.update(jnp.zeros_like(w), tx.init(w), w)[0]))
    end = w
    for _ in range(60):
        end = step(end)
    assert nm.groups.is_nm(end, 2, 4, axis=0)
    np.testing.assert_array_equal(end != 0, nm.mse(2, 4).mask(w, 0))  # without gradients the order of magnitudes stays


def test_a_proximal_step_takes_the_update_leaves_vectors_and_counts_for_its_schedule():
    params = {"kernel": normal(9, (8, 4)), "bias": normal(10, (4,))}
    updates = {"kernel": normal(11, (8, 4)), "bias": normal(12, (4,))}
    tx = optim.proximal(2, 4, nm.linear(0, 1, 2))
    new, state = tx.update(updates, tx.init(params), params)
    chex.assert_trees_all_close(new, updates, atol=1e-6)  # the strength is 0 at first
    moved, _ = jax.jit(tx.update)(updates, state, params)
    np.testing.assert_array_equal(moved["bias"], updates["bias"])
    alone = stepped((params["kernel"] + updates["kernel"]).reshape(2, 4, 4)[0], 2, 4, 0.5)
    np.testing.assert_allclose((params["kernel"] + moved["kernel"])[:4], alone, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optim.proximal(5, 4, 1.0), "n lies between 1 and m, and m is at most 8; got n=5 and m=4"),
        (lambda: optim.proximal(4, 16, 1.0), "m is at most 8; got n=4 and m=16"),
        (lambda: optim.proximal(2, 4, -1.0), "strength is at least 0, got -1.0"),
        (lambda: optim.proximal(2, 4, 1.0).update(PARAMS, optax.EmptyState()), "no parameters to move"),
        (
            lambda: optim.proximal(2, 3, 1.0).update(PARAMS, optax.EmptyState(), PARAMS),
            r"m=3 does not divide axis -2 of the parameter at \['a'\]\['kernel'\], of shape \(8, 4\)",
        ),
    ],
)
def test_proximal_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_strength_of_a_proximal_step_may_be_injected():
    w, kept = normal(13, (8, 4)), {"static_args": ("n", "m", "axis")}
    tx = optax.inject_hyperparams(optim.proximal, **kept)(n=2, m=4, strength=0.1)
    alone = optim.proximal(2, 4, 0.1)
    with STANDARD:
        found, wanted = (one.update(w, one.init(w), w)[0] for one in (tx, alone))
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        with pytest.raises(TypeError, match="n must be a plain number.*static_args=\\('n', 'm', 'axis'\\)"):
            optax.inject_hyperparams(optim.proximal)(n=2, m=4, strength=0.1).init(w)


# step_adam


def reference(w, gradient, steps, lr, b1, b2, eps, decay, after, before, mean="arithmetic"):
    """The algorithm in NumPy, in double precision: weights after every update, and the step that the model is told."""
    length = {0.9: 10, 0.99: 100}[b2]
    m, v, zs, switched, weights, told = np.zeros_like(w), np.zeros_like(w), [], None, [], []
    for t in range(1, steps + 1):
        told.append(0 if switched is None else t - switched)
        g = gradient(w, t)
        m = b1 * m + (1 - b1) * g
        if switched is None:
            old, v = v, b2 * v + (1 - b2) * g**2
            change = np.abs(v - old)
            zs.append(change.mean() if mean == "arithmetic" else np.exp(np.log(change).mean()))
            scale = np.sqrt(v / (1 - b2**t)) + eps
            if t > before or (np.mean(zs[-length:]) < eps and t > after):
                switched = t
        else:
            scale = np.sqrt(v) + np.sqrt(eps) * eps**0.25
        w = w - lr * (m / (1 - b1**t) / scale + decay * w)
        weights.append(w)
    return weights, told


START = np.linspace(-1, 1, 12).reshape(3, 4)
TARGET = np.cos(np.arange(12.0)).reshape(3, 4)


def wave(w, t):
    """Gradients that calm down."""
    return 0.3 * (w - TARGET) + np.sin(t + np.arange(12.0)).reshape(3, 4) * 0.8**t


def trained(tx, steps, params, gradient=wave, seen=optim.since, state=None, begin=1):
    """Weights, steps told and states of every update, compiled once."""
    traces = []

    @jax.jit
    def train(params, state, g):
        traces.append(1)
        updates, state = tx.update(g, state, params)
        return jax.tree.map(lambda p, u: (p + u.astype(p.dtype)).astype(p.dtype), params, updates), state

    state, weights, told, states = tx.init(params) if state is None else state, [], [], []
    for t in range(begin, steps + 1):
        told.append(int(seen(state)))
        g = jax.tree.map(lambda p: jnp.asarray(gradient(np.asarray(p, np.float64), t), p.dtype), params)  # noqa: B023
        params, state = train(params, state, g)
        weights.append(params)
        states.append(state)
    assert len(traces) == 1
    return weights, told, states


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
@pytest.mark.parametrize(
    ("after", "before", "first"),
    [(5, 60, None), (50, 60, 51), (0, 12, 13), (30, 30, 31), (60, 60, 61), (0, 0, 1)],
    ids=["settled", "not before after", "at before", "at a step", "never", "at once"],
)
def test_against_the_algorithm_in_numpy(mean, after, before, first):
    """60 updates, over the switch; ``first`` is the last dense one."""
    w = jnp.asarray(START, jnp.float32)
    lr, b1, b2, eps, decay = 0.1, 0.8, 0.9, 1e-3, 0.01
    tx = optim.step_adam(lr, b1, b2, eps, decay, after=after, before=before, mean=mean)
    weights, told, _ = trained(tx, 60, w)
    want, want_told = reference(START, wave, 60, lr, b1, b2, eps, decay, after, before, mean)
    assert told == want_told
    switched = told.count(0)
    assert switched == (min(first, 60) if first else switched)
    assert first or 20 < switched < 50
    np.testing.assert_allclose(np.array(weights), np.array(want), rtol=2e-4, atol=2e-5)


def test_the_means_differ():
    told = {}
    for mean in ("arithmetic", "geometric"):
        told[mean] = trained(
            optim.step_adam(0.1, b2=0.9, eps=1e-3, after=5, before=99, mean=mean), 60, jnp.asarray(START, jnp.float32)
        )[1].count(0)
    assert told["geometric"] < told["arithmetic"]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rate", [0.01, optax.linear_schedule(0.1, 0.0, 20)], ids=["number", "schedule"])
def test_dense_it_is_optax_adamw(rate, decay):
    params = {"w": normal(8), "b": normal(9, (4,))}
    with STANDARD:
        ours = trained(optim.step_adam(rate, 0.9, 0.99, weight_decay=decay, after=50, before=50), 20, params, noise)
        theirs = trained(optax.adamw(rate, 0.9, 0.99, weight_decay=decay), 20, params, noise, lambda _: 0)
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)


def noise(w, t):
    return np.sin(w * 7 + t) * 0.1


def test_the_variance_is_frozen_bit_for_bit():
    _, told, states = trained(
        optim.step_adam(0.1, b2=0.9, after=5, before=9), 30, jnp.asarray(START, jnp.float32), noise
    )
    last_dense = told.count(0) - 1
    for state in states[last_dense:]:
        np.testing.assert_array_equal(state.nu, states[last_dense].nu)
        np.testing.assert_array_equal(state.window, states[last_dense].window)
    assert not np.array_equal(states[last_dense - 1].nu, states[last_dense].nu)
    assert not np.array_equal(states[-2].mu, states[-1].mu)


@pytest.mark.parametrize(("b2", "length"), [(0.9, 10), (0.99, 100), (0.999, 1000), (0.9985, 666), (0.0, 1)])
def test_the_window_is_as_long_as_the_formula_says(b2, length):
    """And not as floating point has it: int(1 / (1 - 0.999)) is 999."""
    state = optim.step_adam(0.1, b2=b2, after=1, before=2).init(jnp.ones(3))
    assert state.window.shape == (length,)
    assert state.window.dtype == jnp.float32


def test_the_window_is_the_mean_of_the_last_steps():
    states = trained(optim.step_adam(0.1, b2=0.9, after=99, before=99), 25, jnp.asarray(START, jnp.float32), wave)[2]
    changes = [np.abs(np.float64(b.nu) - a.nu).mean() for a, b in zip(states, states[1:], strict=False)]
    np.testing.assert_allclose(states[-1].window.sum(), sum(changes[-10:]), rtol=1e-4)


def test_the_geometric_mean_has_no_zeros_by_rounding():
    """v_t and v_(t-1) are often equal in float32 though v moves."""
    tx = optim.step_adam(0.1, after=9, before=9, mean="geometric")
    g = jnp.array([1.0, 1.0, 1.0])
    state = tx.init(g)._replace(nu=jnp.array([1 + 1e-6, 1.1, 0.9]), count=jnp.int32(5))
    new = tx.update(g, state, g)[1]
    assert new.nu[0] == state.nu[0]
    assert new.window[5] > 0


def test_bf16_weights_have_float32_moments():
    params = {"w": normal(8, dtype=jnp.bfloat16)}
    weights, told, states = trained(
        optim.step_adam(0.01, b2=0.9, weight_decay=0.1, after=5, before=9), 20, params, noise
    )
    assert {x.dtype for x in jax.tree.leaves((states[-1].mu, states[-1].nu))} == {jnp.dtype("float32")}
    assert weights[-1]["w"].dtype == jnp.bfloat16
    assert told[-1] == 10


def pairs():
    """Wrappers around the same optimizer, and how many of their updates are one of it."""
    tx = optim.step_adam(0.1, b2=0.9, after=2, before=3)
    labels = {"w": "pruned", "b": "rest"}
    return {
        "alone": (tx, 1),
        "chain": (optax.chain(optax.clip_by_global_norm(1.0), optax.chain(tx, optax.scale(0.5))), 1),
        "multi_transform": (optax.multi_transform({"pruned": tx, "rest": optax.adamw(0.1)}, labels), 1),
        "masked": (optax.masked(tx, {"w": True, "b": False}), 1),
        "MultiSteps": (optax.MultiSteps(tx, 2), 2),
        "apply_if_finite": (optax.apply_if_finite(tx, 3), 1),
        "inject_hyperparams": (
            optax.inject_hyperparams(optim.step_adam, static_args=("b2", "after", "before", "mean"))(
                learning_rate=0.1, b2=0.9, after=2, before=3
            ),
            1,
        ),
    }


@pytest.mark.parametrize(("tx", "every"), pairs().values(), ids=pairs())
def test_since_is_found_in_any_state(tx, every):
    with STANDARD:
        told = trained(tx, 7 * every, {"w": normal(8), "b": normal(9, (4,))}, noise)[1]
    assert told[::every] == [0, 0, 0, 0, 1, 2, 3]


def test_the_variance_watched_is_of_the_label_alone():
    params = {"w": normal(8), "b": normal(9, (4,))}
    alone = optim.step_adam(0.1, b2=0.9, after=2, before=9)
    both = optax.multi_transform({"pruned": alone, "rest": optax.sgd(0.1)}, {"w": "pruned", "b": "rest"})
    with STANDARD:
        one = trained(alone, 6, {"w": params["w"]}, noise)[2][-1]
        two = trained(both, 6, params, noise)[2][-1].inner_states["pruned"].inner_state
    np.testing.assert_array_equal(one.window, two.window)


@pytest.mark.parametrize("every", [1, 2])
def test_flax_optimizer_tells_the_model(every):
    with STANDARD:
        model = Model()
        tx = optax.chain(optim.masked_decay(1e-4), optim.step_adam(0.01, after=1, before=2))
        tx = tx if every == 1 else optax.MultiSteps(tx, every)
        optimizer, told = nnx.Optimizer(model, tx, wrt=nnx.Param), []

        @nnx.jit
        def train(model, optimizer):
            step = optim.since(optimizer.opt_state)
            grads = nnx.grad(lambda m: jnp.square(m(jnp.ones((2, 8)))).mean())(model)
            optimizer.update(model, grads, masks=nnx_masks(model))
            return step

        for _ in range(5 * every):
            told.append(int(train(model, optimizer)))
    assert told[::every] == [0, 0, 0, 1, 2]
    assert isinstance(optim.since(optimizer.opt_state), jax.Array)


def test_a_model_that_switches():
    """The method of the docstring: dense until the variance has settled, then 2:4; one compilation."""
    sparsity = nm.parse("y_w=ste(stages(((0,identity),(1,mse(2,4)))))")
    tx = optim.step_adam(0.02, b2=0.9, after=10, before=30)
    x, best = normal(1, (64, 8)), normal(2, (8, 4))
    used = lambda w, state: nm.prune(sparsity.y_w, w, axis=0, step=optim.since(state))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def train(w, state):
        ctx = nm.Ctx(step=optim.since(state))
        loss = lambda w: jnp.square(nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=ctx) - x @ best).mean()
        value, g = jax.value_and_grad(loss)(w)
        updates, state = tx.update(g, state, w)
        return w + updates, state, value

    w, state, losses = normal(3, (8, 4)), tx.init(best), []
    for step in range(60):
        assert bool(nm.groups.is_nm(used(w, state), 2, 4, axis=0)) == (step > 30)
        w, state, value = train(w, state)
        losses.append(float(value))
    assert losses[-1] < losses[30] < losses[0] / 2


def test_the_state_is_arrays_and_resumes():
    params, tx = jnp.asarray(START, jnp.float32), optim.step_adam(0.1, b2=0.9, after=5, before=9)
    weights, _, states = trained(tx, 20, params, noise)
    leaves, structure = jax.tree.flatten(states[7])
    assert all(isinstance(x, jax.Array) for x in leaves)
    saved = structure.unflatten([jnp.asarray(np.array(x)) for x in leaves])
    again, _, final = trained(tx, 20, weights[7], noise, state=saved, begin=9)
    np.testing.assert_array_equal(again[-1], weights[-1])
    chex.assert_trees_all_equal(final[-1], states[-1])


def test_the_first_state_may_be_donated():
    tx = optim.step_adam(0.1, after=5, before=9)
    state = jax.jit(lambda s, w: tx.update(w, s, w)[1], donate_argnums=0)(tx.init(jnp.ones(4)), jnp.ones(4))
    assert state.count == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.step_adam(0.1, after=9, before=5), "0 <= after <= before; got after=9, before=5"),
        (lambda: optim.step_adam(0.1, after=-1, before=5), "got after=-1"),
        (lambda: optim.step_adam(0.1, after=0.1, before=0.5), r"whole numbers .* write int\(0.1 \* updates\)"),
        (lambda: optim.step_adam(0.1, after=1, before=float("inf")), "before=inf"),
        (lambda: optim.step_adam(0.1, after=jnp.int32(1), before=5), "after must be a plain number"),
        (lambda: optim.step_adam(0.1, b2=1.0, after=1, before=5), "b2 must be at least 0 and less than 1, got 1.0"),
        (lambda: optim.step_adam(0.1, b1=-0.1, after=1, before=5), "b1 must be"),
        (lambda: optim.step_adam(0.1, b2=jnp.float32(0.9), after=1, before=5), "static_args"),
        (lambda: optim.step_adam(0.1, eps=0.0, after=1, before=5), "eps must be positive"),
        (
            lambda: optim.step_adam(0.1, after=1, before=5, mean="harmonic"),
            "'arithmetic' or 'geometric', got 'harmonic'",
        ),
        (
            lambda: once(optim.step_adam(0.1, after=1, before=5), {}, {}),
            "step_adam got no parameters, so it has no variance to watch",
        ),
        (
            lambda: (tx := optim.step_adam(0.1, weight_decay=0.1, after=1, before=5)).update(GRADS, tx.init(PARAMS)),
            "step_adam got no parameters to decay",
        ),
        (lambda: optim.since(optax.adam(0.1).init(PARAMS)), "found none in a tuple"),
        (
            lambda: optim.since([optim.step_adam(0.1, after=1, before=5).init(jnp.ones(2))] * 2),
            "found 2 in a list. Give it the part",
        ),
    ],
)
def test_step_adam_says_what_is_wrong(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.slow
def test_a_mask_of_step_adam_may_be_a_prefix():
    params = {"a": {"kernel": jnp.ones(3), "bias": jnp.ones(2)}, "b": jnp.ones(2)}
    made = [
        optim.step_adam(0.1, after=1, before=2, weight_decay=0.1, mask=mask)
        for mask in ({"a": False, "b": True}, {"a": {"kernel": False, "bias": False}, "b": True})
    ]
    prefix, whole = (tx.update(params, tx.init(params), params)[0] for tx in made)
    chex.assert_trees_all_equal(prefix, whole)
