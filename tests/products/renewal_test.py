"""State is renewed whatever steps are left out: in nnx, linen and transform alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import nmjax as nm

HELD = "y_w=ste(hold(mse(2,4),every=40))"
STAGED = "y_w=ste(stages(((0,mse(3,4)),(3,hold(mse(2,4))))))"


def weight(step):
    """The weight at a step: another one at each."""
    return np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)


def two_of_four(step):
    """The mask of the weight at a step, by counting."""
    size = np.abs(weight(step)).reshape(2, 4, 4)
    return ((size[:, None] > size[:, :, None]).sum(2) < 2).reshape(8, 4)


def in_nnx(text, steps):
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": text}))
    model.kernel[...] = jnp.asarray(weight(0))
    nm.nnx.reset_state(model)
    for step in steps:
        model.kernel[...] = jnp.asarray(weight(step))
        nm.nnx.set_step(model, step)
    return np.asarray(nm.nnx.masks(model)["kernel"][...])


def in_linen(text, steps):
    with nm.linen.sparsify(nm.Recipe({".*": text})):
        model = nn.Dense(4, use_bias=False)
        variables = model.init(jax.random.key(0), jnp.ones((2, 8)))
        at = lambda w: {**variables, "params": {"kernel": jnp.asarray(w)}}
        variables = nm.linen.reset_state(at(weight(0)))
        for step in steps:
            variables = nm.linen.set_step(at(weight(step)), step)
        return np.asarray(model.apply(at(np.ones((8, 4), np.float32)), jnp.eye(8))) > 0


def in_transform(text, steps):
    f = nm.transform(lambda params, x: x @ params["w"], nm.Recipe({".*": text}))
    state = f.init({"w": jnp.asarray(weight(0))}, jnp.ones((2, 8)))
    renew = jax.jit(f.set_step)
    for step in steps:
        state = renew({"w": jnp.asarray(weight(step))}, state, step)
    return np.asarray(f({"w": jnp.ones((8, 4))}, jnp.eye(8), state=state)) > 0


@pytest.mark.sampled
@pytest.mark.parametrize("delivered", [in_nnx, in_linen, in_transform])
@pytest.mark.parametrize(
    ("text", "steps", "renewed"),
    [
        (HELD, (2, 6, 10), 0),
        (HELD, (38, 39, 40, 41), 40),  # by ones, as ever
        (HELD, (2, 38, 42, 44), 42),  # 40 was left out
        (HELD, (0, 100, 101, 119), 100),  # so were 40 and 80
        (HELD, (1000, 1001), 1000),
        (HELD, (50, 10, 30), 50),  # back in time, and no multiple between
        (HELD, (50, 10, 45), 45),
        (STAGED, (0, 1, 2, 3, 4), 3),
        (STAGED, (0, 2, 4, 6), 4),  # the first step of the stage was left out
        (STAGED, (10, 12), 10),
    ],
)
def test_state_is_renewed_if_steps_are_left_out(delivered, text, steps, renewed):
    np.testing.assert_array_equal(delivered(text, steps), two_of_four(renewed))


def test_a_stack_is_renewed_once_for_all_its_layers():
    """`nm.transform` of a scan: the step of a stack is one number, so that `lax.cond` computes one branch."""
    weights = lambda step: jnp.stack([jnp.asarray(weight(step + i)[:4]) for i in range(3)])
    params = {"w": weights(0)}
    f = nm.transform(
        lambda params, x: jax.lax.scan(lambda x, w: (x @ w, None), x, params["w"])[0], nm.Recipe({".*": HELD})
    )
    states = f.init(params, jnp.ones((2, 4)))
    assert "cond" in str(jax.make_jaxpr(f.set_step)(params, states, 1))
    for step in (39, 41):
        states = f.set_step({"w": weights(step)}, states, step)
    held = np.asarray(states["w"].state["y_w"])
    for i in range(3):
        size = np.abs(np.asarray(weights(41)[i]))
        np.testing.assert_array_equal(held[i], (size[None] > size[:, None]).sum(1) < 2)


@pytest.mark.parametrize(("text", "step"), [(HELD, 40), (HELD, 42), (STAGED, 3), (STAGED, 5)])
def test_the_same_step_twice_renews_once(text, step):
    """As before an evaluation, when the weights have moved on."""
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": text}))
    for seed, now in enumerate((1, step, step), 7):
        model.kernel[...] = jnp.asarray(weight(seed))
        nm.nnx.set_step(model, now)
    np.testing.assert_array_equal(np.asarray(nm.nnx.masks(model)["kernel"][...]), two_of_four(8))


@pytest.mark.parametrize(("step", "micro"), [(-1, 0), (2**40, 0), (2**31, 0), (0, -1), (0, 2**31)])
def test_a_time_that_does_not_exist_is_refused(step, micro):
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": HELD}))
    with pytest.raises(ValueError, match="must be at least 0 and less than"):
        nm.nnx.set_step(model, step, micro)
