"""A model in a phase of training computes what it computes at all steps, by other programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm

X = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
TEXT = "mdgf(2,4,linear(1,0,4,begin=3)); dw_g=stages(((0,identity),(5,mvue(2,4))))"


def model(text=TEXT, backend="auto", dtype=None):
    made = nnx.Linear(64, 64, dtype=dtype, rngs=nnx.Rngs(0))
    return nm.nnx.sparsify(made, nm.Recipe(((".*", text),), backend=backend))


@nnx.jit
def gradients(model, step):
    nm.nnx.set_step(model, step)
    return nnx.value_and_grad(lambda model: jnp.sin(model(X.astype(model.dtype or X.dtype)).astype(X.dtype)).sum())(
        model
    )


@pytest.mark.slow
def test_gradients_and_state_are_those_of_one_program():
    whole, phased = model(), model()
    for step in range(9):
        nm.nnx.phase(phased, step)
        for a, b in zip(*(jax.tree.leaves(gradients(m, step)) for m in (whole, phased)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))
    assert jax.tree.structure(nnx.state(whole)) == jax.tree.structure(nnx.state(phased))


def test_only_a_new_phase_is_a_new_program():
    made = model()
    graphs = [nnx.split(nm.nnx.phase(made, step))[0] for step in range(9)]
    assert [a == b for a, b in zip(graphs, graphs[1:], strict=False)] == [
        step not in (4, 5, 7) for step in range(1, 9)
    ]  # fmt: skip
    assert nm.nnx.phase(made, None).nm_state.now == nm.parse(TEXT)
    assert nnx.split(made)[0] == nnx.split(model())[0]


@pytest.mark.kernels
def test_a_product_runs_packed_in_its_phase():
    text = "mdgf(2,4,linear(1,0,4)); dw_g=mvue(2,4)"
    whole, phased = (model(text, "interpret", jnp.bfloat16) for _ in range(2))
    nm.nnx.phase(phased, 4)
    how = lambda m: [route.how for _, route in nm.nnx.plan(m, X.astype(jnp.bfloat16)).layers[0].runs]
    assert how(whole) == ["emulated", "dense", "packed"]
    assert how(phased) == ["packed", "dense", "packed"]
    for a, b in zip(*(jax.tree.leaves(gradients(m, 5)) for m in (whole, phased)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-7 * float(jnp.abs(b).max()))


def test_the_plan_tells_it_phase_by_phase():
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    with nm.kernels.on("NVIDIA H200"):
        made = nnx.eval_shape(lambda: nnx.Linear(4096, 16384, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        plan = nm.nnx.plan(made, nm.Recipe(((".*", TEXT),)), x)
    assert plan.phases == (4, 5, 7)
    said = " ".join(repr(plan).split())
    assert "In one program for all steps: Emulated (zeros are multiplied) y of (the model): y_w=decay" in said
    assert "From step 0 (1.00 of the FLOPs): All products are dense" in said
    assert "From step 5 (0.83 of the FLOPs): Packed dw of (the model): g by hopper's kernels" in said
    assert "From step 7 (0.67 of the FLOPs): Packed y of (the model): w by hopper's kernels" in said
    assert [start for start, _ in plan.layers[0].phases] == [0, 4, 5, 7]


def test_a_layer_that_is_left_dense_stays_dense():
    """Its 62 features have no groups of four, in no phase; the number of tokens is known from a call alone."""
    text = "y_w=ste(stages(((0,identity),(5,mse(2,4))))); dx_g=mse(1,2); dw_g=stages(((0,mse(1,2)),(5,mse(2,4))))"
    recipe = nm.Recipe(((".*", f"{text}; else dense"),))
    plan = nm.nnx.plan(nnx.Linear(62, 64, rngs=nnx.Rngs(0)), recipe, X[:, :62])
    assert plan.layers[0].phases == ()
    assert plan.layers[0].sparsity == nm.Sparsity()
    fits = model(f"{text}; else dense")
    assert nm.nnx.phase(fits, 5).nm_state.now.y_w == nm.ste(nm.mse(2, 4))
    assert nm.nnx.phase(fits, 0).nm_state.now.slots["y_w"].core == nm.identity
    assert nm.nnx.phase(fits, 0).nm_state.now.dw_g == nm.parse(text).dw_g


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "starts"),
    [("sdgf(2,4,'geometric',steps=300,k=4)", (100, 200)), ("mdgf(2,4,linear(1,0,60,begin=10))", (11, 70))],
)
@pytest.mark.parametrize("slot", [False, True])
def test_a_method_that_may_be_dense_has_all_its_phases(method, starts, slot):
    """In each phase the layer prunes as without ``else dense``: a phase never lasts beyond its own steps."""
    whole = nm.Sparsity(y_w=nm.parse(method).y_w)
    either = nm.Sparsity(y_w=whole.y_w, else_dense=("y_w",) if slot else True)
    made, alone = (model(str(sparsity)) for sparsity in (either, whole))
    assert nm.nnx.plan(made, X).phases == nm.nnx.plan(alone, X).phases == starts
    w = made.kernel[...]
    for step in sorted({0, *starts, *(start - 1 for start in starts), starts[-1] + 50}):
        now = nm.nnx.phase(made, step).nm_state.now
        assert now.y_w == nm.nnx.phase(alone, step).nm_state.now.y_w
        ctx = nm.Ctx(step=step)
        pruned = [pruner(w, axis=0, ctx=ctx) for pruner in (now.y_w, whole.y_w)]
        np.testing.assert_array_equal(*pruned)


def test_a_model_in_a_phase_has_the_plan_of_the_phase():
    text = "dw_x=rows(stages(((0,identity),(9,mvue(1,4)))))"
    made = model(text, "compact")
    plan = nm.nnx.plan(nm.nnx.phase(made, 9), X)
    assert plan.phases == (9,)
    assert plan.runs == {"compacted": 1}
    assert plan.layers[0].kept == (64 * 64 * 4, 16 * 65 * 4)
    assert "In the phase from step 9: Compacted dw everywhere" in repr(plan)
    assert nm.nnx.plan(nm.nnx.phase(made, None), X).layers[0].kept == (64 * 64 * 4, 64 * 64 * 4)


def test_what_is_refused():
    made = model()
    with pytest.raises(ValueError, match="phase: step must be at least 0, got -1"):
        nm.nnx.phase(made, -1)
    with pytest.raises(TypeError, match="phase: step must be an integer that is known before the call, got 3.0"):
        nm.nnx.phase(made, 3.0)
    with pytest.raises(TypeError, match="outside of jit with a Python int"):
        jax.jit(lambda step: nm.nnx.phase(made, step) and 1)(3)
    with pytest.raises(ValueError, match="phase was called inside of jit"):
        nnx.jit(lambda made: nm.nnx.phase(made, 3) and 1)(made)
    with pytest.raises(ValueError, match="no method in the model has a phase that ends at a step known before"):
        nm.nnx.phase(model("s_ste(2,4)"), 3)
    with pytest.raises(ValueError, match="the model has no sparse layers. Call nm.nnx.sparsify first"):
        nm.nnx.phase(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), 3)
    assert nm.nnx.phase(made, np.int64(7)).nm_state.phase == 7
    with pytest.raises(ValueError, match=r"set_step\(6\), but the model is in the phase that begins at step 7"):
        nm.nnx.set_step(made, 6)
    nm.nnx.set_step(made, 100)
