"""The decay of `sr_ste` may be a schedule: against the closed form, at every step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm

W = jnp.array([1.0, -2.0, 3.0, -4.0])
DROPPED = np.array([1.0, -2.0, 0.0, 0.0])
RISING = "sr_ste(mse(2,4),lam=linear(0.0,0.1,500))"


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("step", "lam"), [(0, 0.0), (250, 0.05), (500, 0.1), (900, 0.1)])
def test_the_decay_at_a_step_is_that_of_the_schedule(step, lam, jit):
    p = nm.parse_pruner(RISING)
    gradient = jax.grad(lambda w, step: p(w, ctx=nm.Ctx(step=step)).sum())
    found = (jax.jit(gradient) if jit else gradient)(W, jnp.int32(step))
    np.testing.assert_allclose(found, 1 + lam * DROPPED, rtol=1e-6)


def test_a_schedule_is_a_field_and_a_number_needs_no_step():
    p = nm.parse_pruner(RISING)
    assert str(p) == RISING
    assert p.facts.depends_on_step
    assert not nm.sr_ste(nm.mse(2, 4)).facts.depends_on_step
    assert nm.methods.sr_ste(2, 4, nm.linear(0, 0.1, 500)).y_w == p
    assert str(nm.sr_ste(nm.mse(2, 4), 1)) == "sr_ste(mse(2,4),lam=1.0)"


@pytest.mark.parametrize("lam", ["much", True, float("nan"), nm.mse(2, 4), None])
def test_what_is_neither_a_number_nor_a_schedule_is_refused(lam):
    with pytest.raises(TypeError, match="sr_ste: lam must be a number, or a schedule such as linear"):
        nm.sr_ste(nm.mse(2, 4), lam)


@pytest.mark.slow
def test_a_model_follows_the_schedule_in_one_compilation():
    model = nnx.Linear(4, 1, use_bias=False, kernel_init=lambda *_: W[:, None], rngs=nnx.Rngs(0))
    model = nm.nnx.sparsify(model, nm.Recipe({".*": "sr_ste(2,4,linear(0,0.1,500))"}))
    traces = []

    @nnx.jit
    def gradient(model, step):
        traces.append(step)
        nm.nnx.set_step(model, step)
        return nnx.grad(lambda model: model(jnp.ones((1, 4))).sum())(model)

    for step, lam in ((0, 0.0), (250, 0.05), (900, 0.1)):
        found = gradient(model, jnp.int32(step)).kernel[...].ravel()
        np.testing.assert_allclose(found, 1 + lam * DROPPED, rtol=1e-6)
    assert len(traces) == 1
    hard = nm.nnx.harden(model).kernel[...].ravel()
    np.testing.assert_array_equal(hard, [0, 0, 3, -4])
