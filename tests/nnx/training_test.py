"""Training of models: a transformer with scan and remat, and a ResNet with batch norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import nmjax as nm
from tests.networks import GPT, ResNet

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules

RECIPES = {
    "gpt": nm.Recipe(((r"blocks/mlp/.*", "s_ste(2,4)"), (r"blocks/attention/out", "fst(every=2)"),
                      (r"blocks/.*", "mdgf(2,4,linear(1,0,8))"))),
    "resnet": nm.Recipe(((r"stem|.*/shortcut|head", "dense"), (r"blocks/0/.*", "s_ste(2,4)"),
                         (r".*", "sr_ste(2,4); dx_g=rescale(mse(2,4))"))),
}  # fmt: skip

SGD = optax.sgd(0.1, momentum=0.5)  # one value: optax's closures compare by identity, and another would compile again


def task(name):
    """Return a model and a batch that it can learn by heart."""
    if name == "gpt":
        model, tokens = GPT(rngs=nnx.Rngs(0)), jax.random.randint(jax.random.key(1), (4, 16), 0, 64)
        loss = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()
    else:
        model, images = ResNet(rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (8, 8, 8, 3))
        labels = jnp.arange(8) % 4
        loss = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
    return model, loss


def start(name, seed=5):
    model, loss = task(name)
    nm.nnx.sparsify(model, RECIPES[name], seed=seed)
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param), loss


def trainer(loss, traces):
    @nnx.jit
    def train(model, optimizer, step):
        traces.append(step)
        nm.nnx.set_step(model, step)
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return train


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.slow
def test_a_model_trains_hardens_and_resumes(name, tmp_path):
    model, optimizer, loss = start(name)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(task(name)[0], nnx.Param))]
    traces = []
    train = trainer(loss, traces)
    values = []
    for step in range(16):
        if step == 8:
            with ocp.StandardCheckpointer() as saver:
                saver.save(tmp_path / "8", nnx.to_pure_dict(nnx.state((model, optimizer))))
        values.append(float(train(model, optimizer, jnp.int32(step))))
    assert len(traces) == 1
    assert values[-1] < 0.7 * values[0], values
    assert [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))] == paths

    again, optimizer2, _ = start(name, seed=6)
    with ocp.StandardCheckpointer() as saver:
        saved = saver.restore(tmp_path / "8", nnx.to_pure_dict(nnx.state((again, optimizer2))))
    state = nnx.state((again, optimizer2))
    nnx.replace_by_pure_dict(state, saved)
    nnx.update((again, optimizer2), state)
    resumed = [float(train(again, optimizer2, jnp.int32(step))) for step in range(8, 16)]
    assert resumed == values[8:]
    assert len(traces) == 1
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, again)), strict=True):
        np.testing.assert_array_equal(a, b)

    model.eval()
    hard, patterns = nm.nnx.harden(model), nm.nnx.patterns(model)
    broken = nm.metrics.violations(nnx.state(hard, nnx.Param), patterns)
    assert sum(p is not None for p in patterns.values()) == {"gpt": 6, "resnet": 4}[name] == len(broken)
    assert not any(map(int, broken.values()))
    run = nnx.jit(loss)
    assert run(hard) == run(model)
    plan = nm.nnx.plan(model, *([jnp.zeros((4, 16), jnp.int32)] if name == "gpt" else [jnp.zeros((8, 8, 8, 3))]))
    assert not plan.refused
    assert plan.training[1] < plan.training[0]


@pytest.mark.slow
def test_masks_for_the_optimizer_and_for_flip_rates():
    """Masks serve the decay of FST after clipping, and the flip rate."""
    model, _ = task("gpt")
    nm.nnx.sparsify(model, nm.Recipe(((r"blocks/mlp/.*", "fst(lam=0,every=1)"),)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), nm.optim.masked_decay(1e-2), optax.sgd(0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    _, loss = task("gpt")

    @nnx.jit
    def train(model, optimizer, before, step):
        nm.nnx.set_step(model, step)
        masks = nm.nnx.masks(model)
        optimizer.update(model, nnx.grad(loss)(model), masks=masks)
        return masks, nm.metrics.flip_rate(before, masks)

    masks = nm.nnx.masks(model)
    first = model.blocks.mlp.up.kernel[...]
    flips = []
    for step in range(4):
        masks, flipped = train(model, optimizer, masks, step)
        flips.append(float(flipped))
    assert flips[0] == 0 < flips[1] < 0.2
    assert masks["blocks"]["mlp"]["up"]["kernel"].shape == first.shape
    assert masks["head"]["kernel"].shape == ()
    assert float(nm.metrics.density(nnx.state(nm.nnx.harden(model).blocks.mlp.up, nnx.Param)["kernel"])) == 0.5


@pytest.mark.slow
def test_masks_that_a_dense_model_would_have():
    model, _ = task("resnet")
    kernel = model.blocks[0].conv1.kernel[...]
    for text in ("ste(2,4)", "s_ste(2,4)", "y_w=ste(hold(mse(2,4)))"):
        masks = nnx.jit(nm.nnx.masks)(nm.nnx.sparsify(nnx.clone(model), nm.Recipe(((r"blocks/.*", text),))))
        np.testing.assert_array_equal(masks["blocks"][0]["conv1"]["kernel"][...], nm.groups.top(kernel, 2, 2, 4))
        assert masks["stem"]["kernel"].shape == ()
        flipped = jax.tree.map(lambda m: ~m if m.ndim else m, masks)
        assert float(nm.metrics.flip_rate(masks, flipped)) == 1  # what has no mask counts nothing


@pytest.mark.slow
def test_measures_of_weights_and_gradients():
    model, loss = task("gpt")
    nm.nnx.sparsify(
        model,
        nm.Recipe(
            (
                (r"blocks/mlp/up", "s_ste(2,4)"),
                (r"blocks/mlp/down", "top_gradient(2,4)"),
                (r"head", "mdgf(1,4,linear(1,0,4))"),
            )
        ),
    )
    nm.nnx.set_step(model, 1)
    seen = nnx.jit(nm.nnx.weights)(model)
    assert set(seen) == {"blocks/mlp/up", "head"}
    w, kept = model.blocks.mlp.up.kernel[...], nm.nnx.harden(model).blocks.mlp.up.kernel[...]
    np.testing.assert_allclose(seen["blocks/mlp/up"].density, 0.5)
    np.testing.assert_allclose(
        seen["blocks/mlp/up"].error, jnp.linalg.norm((kept - w).ravel()) / jnp.linalg.norm(w.ravel()), rtol=1e-5
    )
    a, b = np.ravel(w), np.ravel(kept)
    np.testing.assert_allclose(seen["blocks/mlp/up"].cosine, a @ b / np.linalg.norm(a) / np.linalg.norm(b), rtol=1e-5)
    assert seen["blocks/mlp/up"].ties == 0
    assert seen["head"].density == 1
    assert np.isnan(seen["head"].ties)
    errors = nnx.jit(lambda model: nm.nnx.gradient_errors(model, loss, draws=16))(model)
    drawn, top, dense = (errors[path] for path in ("blocks/mlp/up", "blocks/mlp/down", "head"))
    assert drawn.bias < 3 * drawn.noise < 1
    assert drawn.variance > 0.01
    assert top.bias > 0.05 > 1e-6 > top.variance  # biased, and the same in every draw
    assert dense.bias < 1e-5  # no backward slot: what is left is rounding, the same in every draw
    assert dense.variance < 1e-10


def test_variables_may_be_numpy_arrays():
    """A restored state may have them."""
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "s_ste(2,4)"}))
    expected = nm.nnx.harden(model).kernel[...]
    nnx.update(model, jax.tree.map(np.asarray, nnx.state(model)))
    nm.nnx.set_step(model, 3)
    nm.nnx.reseed(model, 1)
    assert int(model.nm_state.time[...].reshape(-1)[0]) == 3
    np.testing.assert_array_equal(nm.nnx.harden(model).kernel[...], expected)


@pytest.mark.slow
def test_layers_that_share_a_kernel_have_the_error_of_its_gradient():
    class Tied(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return self.b(self.a(x))

    model = nm.nnx.sparsify(Tied(), nm.Recipe({".*": "mvue(2,4)"}))
    errors = nm.nnx.gradient_errors(model, lambda m, x: (m(x) ** 2).mean(), jnp.eye(8), draws=2)
    assert errors.keys() == {"a", "b"}
    assert errors["a"].variance == errors["b"].variance > 0
