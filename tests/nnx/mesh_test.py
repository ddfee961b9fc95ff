"""Sparse models on meshes: data parallel and with sharded weights, on automatic and explicit axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import nmjax as nm
from tests.networks import Mlp

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
METHODS = ("s_ste(2,4)", "fst(every=2)", "y_w=ste(hold(mse(2,4),every=2)); dx_g=mvue(2,4); dw_g=mvue(2,4)")


def whole(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), jnp.float32)


class Parallel(nnx.Module):
    """A feed-forward block that names the sharding of its result, as explicit axes demand."""

    def __init__(self, result):
        self.up = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
        self.down = nnx.Einsum("ti,io->to", (64, 32), (32,), rngs=nnx.Rngs(1))
        self.result = result

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)), out_sharding=self.result)


def exact(model):
    """Give a model whole numbers as weights, so that devices may add in any order."""
    params = nnx.state(model, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    nnx.update(model, jax.tree.unflatten(tree, [whole(i, *v.shape) for i, v in enumerate(leaves)]))
    return model


def sparse(model, text):
    """Make a model sparse, with scales of 1 for S-STE, so that whole numbers stay whole."""
    nm.nnx.sparsify(model, nm.Recipe(((".*", text),)), seed=3)
    for layer in (model.up.nm_state, model.down.nm_state):
        for variable in layer.variables:
            if variable.dtype == jnp.float32:
                variable.set_value(jnp.ones_like(variable[...]))
    return model


def steps(model, x, count=3):
    """Train some steps, and return the parameters and the other variables."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params, rest, x, step):
        model = nnx.merge(graph, params, rest)
        nm.nnx.set_step(model, step)
        rest = nnx.split(model, nnx.Param, ...)[2]
        loss = lambda params: jnp.sum(nnx.merge(graph, params, rest, copy=True)(x) * jnp.sign(x))
        return jax.tree.map(lambda w, g: w - jnp.sign(g), params, jax.grad(loss)(params)), rest

    for i in range(count):
        params, rest = step(params, rest, x, i)
    return params, rest


def placed(model, mesh, specs):
    """Place the parameters before the model is made sparse, so that masks and scales follow them."""
    for layer, (kernel, bias) in zip((model.up, model.down), specs, strict=True):
        for variable, spec in ((layer.kernel, kernel), (layer.bias, bias)):
            variable.set_value(jax.device_put(variable[...], NamedSharding(mesh, spec)))
    return model


def check_alike(result, expected):
    for tree, like in zip(result, expected, strict=True):
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


LAYOUTS = {  # of the kernels and biases of both layers
    "data": ((P(), P()), (P(), P())),
    "fsdp": ((P("d", None), P()), (P("d", None), P())),
}


@functools.cache
def on_one_device(text):
    return steps(sparse(exact(Mlp(32, 64, rngs=nnx.Rngs(0))), text), whole(9, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), [("data", "auto"), ("data", "explicit"), ("fsdp", "auto")])
@pytest.mark.parametrize("text", METHODS)
def test_a_mesh_trains_as_one_device_does(text, layout, kind):
    x, expected = whole(9, 32, 32), on_one_device(text)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(KINDS[kind],))
    with jax.set_mesh(mesh):
        model = sparse(placed(exact(Mlp(32, 64, rngs=nnx.Rngs(0))), mesh, LAYOUTS[layout]), text)
        if "hold" in text:  # a mask lies as its weight does: it is not whole on every device
            mask = model.up.nm_state.state["y_w"]
            assert mask.sharding.is_equivalent_to(model.up.kernel.sharding, 2)
        result = steps(model, jax.device_put(x, NamedSharding(mesh, P("d", None))))
    check_alike(result, expected)
    assert result[0]["up"]["kernel"].sharding.is_equivalent_to(model.up.kernel.sharding, 2)


@pytest.mark.slow
@pytest.mark.parametrize("text", METHODS)
def test_explicit_axes_of_data_and_model(text):
    """The batch is sharded on one mesh axis; the weights on the other, along out- and in-features."""
    x = whole(9, 32, 32)
    expected = steps(sparse(exact(Parallel(None)), text), x)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        specs = ((P(None, "model"), P("model")), (P("model", None), P()))
        model = sparse(placed(exact(Parallel(P("data", None))), mesh, specs), text)
        result = steps(model, jax.device_put(x, NamedSharding(mesh, P("data", None))))
    check_alike(result, expected)
    assert result[0]["up"]["kernel"].sharding.is_equivalent_to(model.up.kernel.sharding, 2)


@pytest.mark.slow
def test_scales_of_sharded_weights():
    kernel = jax.random.normal(jax.random.key(0), (32, 64))
    mesh = jax.make_mesh((4,), ("d",))
    model = Mlp(32, 64, rngs=nnx.Rngs(0))
    model.up.kernel.set_value(jax.device_put(kernel, NamedSharding(mesh, P("d", None))))
    with jax.set_mesh(mesh):
        nm.nnx.sparsify(model, nm.Recipe((("up", "s_ste(2,4)"),)))
    np.testing.assert_allclose(nm.nnx.scales(model)["up"], nm.soft(2, 4).init(kernel, 0), rtol=1e-6)


@pytest.mark.slow
def test_sharding_metadata_is_the_kernels():
    """nnx.get_partition_spec reads the names of mesh axes. Words and time name only the axis of the stack."""
    make = nnx.vmap(
        lambda rngs: nnx.Linear(16, 8, kernel_metadata={"out_sharding": ("in", "out")}, rngs=rngs),
        transform_metadata={nnx.PARTITION_NAME: "layers"},
    )
    with jax.set_mesh(jax.make_mesh((1, 2, 2), ("layers", "in", "out"), axis_types=(AxisType.Auto,) * 3)):
        model = make(nnx.Rngs(0).split(3))
        nm.nnx.sparsify(model, nm.Recipe(((".*", "fst()"),)))
    specs = nnx.get_partition_spec(nnx.state(model, nm.nnx.SparsityVariable))["nm_state"]
    assert specs["state"]["y_w"].get_value() == P("layers", "in", "out")
    assert specs["words"].get_value() == specs["time"].get_value() == P("layers", None, None)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P(None, None, "d")], ids=str)
@pytest.mark.parametrize("text", ["s_ste(2,4)", "fst(every=2)"])
def test_stacks_on_explicit_axes(text, spec):
    """If the stack or an axis of its layers is sharded, time, state and final forms are those of one device."""
    make = lambda: nnx.vmap(lambda rngs: nnx.Linear(16, 16, use_bias=False, rngs=rngs))(nnx.Rngs(0).split(4))
    rules = nm.Recipe(((".*", text),))
    alone = nm.nnx.sparsify(make(), rules)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        model = make()
        model.kernel.set_value(jax.device_put(model.kernel[...], NamedSharding(mesh, spec)))
        nm.nnx.sparsify(model, rules)
        model.kernel.set_value(model.kernel[...] ** 3)
        nnx.jit(lambda m: nm.nnx.set_step(m, 2))(model)
        results = (nnx.state(nm.nnx.harden(model)), nm.nnx.masks(model), nnx.state(model, nm.nnx.SparsityVariable))
    alone.kernel.set_value(alone.kernel[...] ** 3)
    nnx.jit(lambda m: nm.nnx.set_step(m, 2))(alone)
    for result, like in zip(
        results,
        (nnx.state(nm.nnx.harden(alone)), nm.nnx.masks(alone), nnx.state(alone, nm.nnx.SparsityVariable)),
        strict=True,
    ):
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(like), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


def test_orders_that_gather_from_other_devices():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    model.kernel.set_value(jax.device_put(model.kernel[...], NamedSharding(mesh, P("d", None))))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="dx_w=permute.*: its order gathers values from other devices"),
    ):
        nm.nnx.sparsify(model, nm.Recipe(((".*", "bi_mask()"),)))
