"""The state of pruners: made by init, renewed by refresh, read by final, each part with its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm

W = jax.random.normal(jax.random.key(0), (8, 16))
LATER = jax.random.normal(jax.random.key(1), (8, 16))
HELD = nm.hold(nm.mse(2, 4), every=10)


def phased(p):
    return nm.stages(((0, nm.identity), (100, p)))


@pytest.mark.parametrize(
    ("p", "final"),
    [
        (nm.ste(HELD), HELD),
        (nm.ste(phased(HELD)), HELD),
        (nm.sr_ste(phased(HELD)), HELD),
        (nm.decay(phased(HELD), nm.linear(1, 0, 9)), HELD),
        (phased(nm.ste(HELD)), HELD),
        (phased(phased(HELD)), HELD),
        (nm.ste(phased(nm.soft(2, 4))), nm.soft(2, 4)),
        (nm.ste(nm.chain(phased(HELD), nm.fp8("e4m3"))), nm.chain(HELD, nm.fp8("e4m3"))),
        (nm.rescale(phased(HELD), over="group"), nm.rescale(HELD, over="group")),
        (nm.raw(phased(HELD)), HELD),
    ],
    ids=str,
)
def test_final_reads_the_state_of_its_own_part(p, final):
    state = p.init(W, 1)
    got = p.final(LATER, 1, nm.Ctx(state=p.final_state(state)))
    np.testing.assert_array_equal(got, final(LATER, 1, nm.Ctx(state=final.init(W, 1))))


@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_stage_begins_with_the_weights_it_finds(call):
    """A mask for ever after a dense phase is of the weights that the dense phase made."""
    p = phased(nm.hold(nm.mse(2, 4)))
    refresh = call(lambda w, step, state: p.refresh(w, 1, nm.Ctx(step=step, state=state)))
    state = p.init(W, 1)
    for step, w, expected in ((1, W, W), (99, LATER, W), (100, LATER, LATER), (101, W, LATER), (500, W, LATER)):
        state = refresh(w, step, state)
        np.testing.assert_array_equal(state[1], nm.mse(2, 4).mask(expected, 1))


def test_parts_that_draw_draw_apart():
    random = nm.hold(nm.uniform(2, 4, rescale=False))
    first, second = nm.chain(random, random).init(W, 1, nm.Ctx(key=0))
    assert not np.array_equal(first, second)


@pytest.mark.slow
def test_the_second_scale_is_of_what_the_forward_product_uses():
    """<v, s> / <s, s> of v, the weight after its 1:4 pruning, along the outputs."""
    s = nm.Sparsity(y_w=nm.ste(nm.mse(1, 4)), dx_w=nm.soft(2, 4))
    state = s.init(W, contract=0, out=1)
    value = np.asarray(nm.mse(1, 4)(W, 0), np.float64)
    size = np.abs(value).reshape(8, 4, 4)
    shrunk = np.maximum(size - np.sort(size, -1)[..., 1:2], 0).reshape(8, 16) * np.sign(value)
    assert set(state) == {"dx_w"}
    np.testing.assert_allclose(state["dx_w"], (value * shrunk).sum() / (shrunk**2).sum(), rtol=1e-5)


@pytest.mark.slow
def test_state_is_made_along_the_axes_of_the_product():
    """The same weight, stored either way round, has the same mask."""
    s = nm.methods.fst()
    one, other = s.init(W, contract=0, out=1)["y_w"], s.init(W.T, contract=1, out=0)["y_w"]
    np.testing.assert_array_equal(one, jnp.transpose(other))
    with pytest.raises(TypeError, match="contract"):
        s.init(W)
