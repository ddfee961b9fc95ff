"""Hardened weights: n:m along the contracted axis, and bit for bit the values of training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.models.transformer import Scores
from tests.networks import GPT, Mlp, ResNet

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules


def recipe(text, pattern=".*"):
    return nm.Recipe(((pattern, text),))


def randomly(model, seed=0):
    """Change the weights, as training would, but not the scales and masks."""
    params = nnx.state(model, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    noise = np.random.default_rng(seed)
    moved = [v + jnp.asarray(0.05 * noise.standard_normal(v.shape), v.dtype) for v in leaves]
    nnx.update(model, jax.tree.unflatten(tree, moved))
    return model


def violations(model, patterns):
    return {path: int(n) for path, n in nm.metrics.violations(nnx.state(model, nnx.Param), patterns).items()}


@pytest.mark.slow
def test_stacks_and_convolutions():
    model = GPT(rngs=nnx.Rngs(0))
    nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", "s_ste(2,4)"), (r"head", "ste(1,4)"))))
    randomly(model)
    hard, patterns = nm.nnx.harden(model), nm.nnx.patterns(model)
    assert patterns["blocks/mlp/up/kernel"] == nm.metrics.Pattern(2, 4, 1)
    assert patterns["blocks/attention/out/kernel"] == nm.metrics.Pattern(2, 4, (1, 2))
    assert patterns["head/kernel"] == nm.metrics.Pattern(1, 4, 0)
    assert set(violations(hard, patterns).values()) == {0}
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)
    run = nnx.jit(lambda m, x: m(x))
    np.testing.assert_array_equal(run(hard, tokens), run(model, tokens))
    for i, kernel in enumerate(model.blocks.mlp.up.kernel[...]):  # each layer by its own scale
        beta = nm.nnx.scales(model)["blocks/mlp/up"][i]
        expected = nm.prune(nm.soft(2, 4), kernel, axis=0, state=beta)
        np.testing.assert_array_equal(hard.blocks.mlp.up.kernel[...][i], expected)

    images = ResNet(rngs=nnx.Rngs(0))
    nm.nnx.sparsify(images, nm.Recipe(((r"blocks/.*", "s_ste(2,4)"),)))
    randomly(images)
    images.eval()
    hard, patterns = nm.nnx.harden(images), nm.nnx.patterns(images)
    assert patterns["blocks/1/conv1/kernel"] == nm.metrics.Pattern(2, 4, 2)
    assert patterns["stem/kernel"] is None
    assert set(violations(hard, patterns).values()) == {0}
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    np.testing.assert_array_equal(run(hard, x), run(images, x))


def test_it_says_where_a_method_ends_dense():
    model = Mlp(16, 32, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(model, nm.Recipe(((r"up", "fst(dense_from=100)"), (r"down", "mvue(2,4)"))))
    assert nm.nnx.patterns(model) == {"up/kernel": None, "down/kernel": None}
    hard = nm.nnx.harden(randomly(model))
    np.testing.assert_array_equal(hard.up.kernel[...], model.up.kernel[...])
    assert not jax.tree.leaves(nnx.state(hard, nm.nnx.SparsityVariable))


def test_a_held_mask_is_what_hardens():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(model, recipe("y_w=ste(hold(mse(2,4),every=100))"))
    mask = model.nm_state.state["y_w"][...]
    randomly(model)
    model.kernel[...] = model.kernel[...] * jnp.where(mask, 0.01, 1.0)  # which other ranks would drop
    np.testing.assert_array_equal(nm.nnx.harden(model).kernel[...], jnp.where(mask, model.kernel[...], 0))


def test_inside_jit_and_of_a_split_state():
    model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe("s_ste(2,4)"))
    x = jnp.ones((4, 16))
    graph, state = nnx.split(model)
    hard = jax.jit(lambda state, x: nm.nnx.harden(nnx.merge(graph, state))(x))(state, x)
    np.testing.assert_array_equal(hard, nnx.jit(lambda m, x: m(x))(nm.nnx.harden(model), x))
    assert isinstance(model.up.nm_state, nm.nnx.SparsityState)  # the model itself stays as it was


def test_activations_stay_pruned():
    model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), nm.Recipe(((r"down", "activation(2,4)"),)))
    hard = nm.nnx.harden(model)
    assert hard.down.nm_state.sparsity == nm.parse("y_x=mse(2,4)")
    x = jax.random.normal(jax.random.key(0), (4, 16))
    np.testing.assert_array_equal(hard(x), model(x))
    dense = nnx.clone(hard)
    nm.nnx.sparsify(dense, nm.Recipe(((r".*", "dense"),)))
    assert not np.array_equal(dense(x), model(x))


def test_hardened_again_it_keeps_its_pattern():
    """A hardened layer may still prune activations."""
    model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), nm.Recipe({"down": "ste(2,4); y_x=mse(2,4)"}))
    once = nm.nnx.harden(model)
    twice = nm.nnx.harden(once)
    assert nm.nnx.patterns(twice) == nm.nnx.patterns(once)
    assert str(nm.nnx.patterns(twice)["down/kernel"]) == "2:4 along axis 0"
    x = jnp.ones((4, 16))
    assert [[layer.hardened for layer in nm.nnx.plan(m, x).layers] for m in (model, once)] == 2 * [["2:4", "dense"]]


@pytest.mark.slow
def test_one_shot_pruning_warns_of_no_schedule(recwarn):
    model, x = Mlp(16, 32, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (64, 16))
    pruned = nm.nnx.prune(model, "mdgf(2,4,linear(1,0,80)); y_x=ste(stages(((0,identity),(9,mse(2,4)))))", [x]).model
    assert not [str(w.message) for w in recwarn if "harden" in str(w.message)]
    assert str(pruned.up.hardened) == "2:4 along axis 0"


def test_a_mask_of_a_class_of_ones_own_is_no_mask_of_the_kernel():
    class Masked(nnx.Linear):
        def __init__(self, rngs):
            super().__init__(8, 8, rngs=rngs)
            self.mask = nnx.Variable(jnp.array([[1.0] * 6 + [0.0] * 2]))

        def __call__(self, x):
            return super().__call__(x * self.mask[...])

    x = jnp.ones((4, 8))
    model = nm.nnx.sparsify(Masked(nnx.Rngs(0)), recipe("ste(2,4)"), x)
    hard = nm.nnx.harden(model)
    np.testing.assert_array_equal(hard(x), model(x))
    np.testing.assert_array_equal(hard.kernel[...], nm.prune(nm.mse(2, 4), model.kernel[...], axis=0))


@pytest.mark.slow
def test_a_masked_convolution():
    mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 3, 8, 8)), jnp.float32)
    model = nnx.Conv(8, 8, (3, 3), mask=mask, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(model, recipe("s_ste(2,4)"))
    hard, x = nm.nnx.harden(model), jax.random.normal(jax.random.key(0), (2, 6, 6, 8))
    np.testing.assert_array_equal(hard(x), model(x))
    assert hard.mask is None


def test_tied_weights():
    """An array of two layers is hardened once if both agree, and refused if they do not."""

    def tied(second, other=None):
        model = nnx.Dict(
            a=nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)),
            b=nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(1)),
        )
        model.b.kernel = model.a.kernel
        return nm.nnx.sparsify(model, nm.Recipe(((r"a", "s_ste(2,4)"), (r"b", second))))

    model = tied("s_ste(2,4); dw_g=identity")
    hard = nm.nnx.harden(model)
    expected = nm.prune(nm.soft(2, 4), model.a.kernel[...], axis=0, state=nm.nnx.scales(model)["a"])
    np.testing.assert_array_equal(hard.a.kernel[...], expected)  # and not shrunk twice
    assert hard.a.kernel is hard.b.kernel
    for second in ("ste(2,4)", "dense", "s_ste(1,4)"):
        with pytest.raises(
            ValueError,
            match=r"^a: y_w=ste\(soft\(2,4\)\) prunes a weight of shape \(16, 16\) that b/kernel uses too, .*"
            r"\(r\"a\", \"dense\"\)\.$",
        ):
            nm.nnx.harden(tied(second))

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            self.head = nnx.Einsum("td,vd->tv", (16, 8), rngs=rngs)
            self.head.kernel = self.embed.embedding

    with pytest.raises(ValueError, match="head: .* that embed/embedding uses too, as it is"):
        nm.nnx.harden(nm.nnx.sparsify(Tied(nnx.Rngs(0)), recipe("ste(2,4)")))


@pytest.mark.parametrize("how", ["held for longer", "other scales", "in a list", "a mask"])
def test_tied_weights_of_one_rule_that_differ_all_the_same(how):
    make = lambda seed, **k: nnx.Conv(8, 8, (1, 1), use_bias=False, rngs=nnx.Rngs(seed), **k)
    mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (1, 1, 8, 8)), jnp.float32)
    model = nnx.Dict(a=make(0), b=make(1, mask=mask) if how == "a mask" else make(1))
    texts = {"held for longer": ["y_w=ste(hold(mse(2,4),every=2))", "y_w=ste(hold(mse(2,4),every=9))"]}
    a, b = texts.get(how, ["s_ste(2,4)"] * 2)
    if how != "other scales":
        model.b.kernel = model.a.kernel
    if how == "in a list":
        model.b = nnx.data([model.a.kernel])
    rules = nm.Recipe((("a", a), ("b", b))[: 1 if how == "in a list" else 2])
    nm.nnx.sparsify(model, rules)
    if how == "other scales":
        model.b.kernel = model.a.kernel
    with pytest.raises(ValueError, match="a: y_w=.* uses too, .* has no single final form"):
        nm.nnx.harden(model)


def test_the_dtype_of_a_layers_own_promotion():
    """A layer's promote_dtype can give the product bfloat16, though neither layer nor kernel has it."""
    low = lambda args, dtype=None: tuple(None if v is None else v.astype(jnp.bfloat16) for v in args)
    model = nnx.Linear(64, 32, promote_dtype=low, rngs=nnx.Rngs(0))
    nm.nnx.sparsify(model, recipe("ste(2,4)"))
    x = jax.random.normal(jax.random.key(0), (4, 64))
    run = nnx.jit(lambda m, x: m(x).astype(jnp.float32))
    np.testing.assert_array_equal(run(nm.nnx.harden(model), x), run(model, x))


# ---- what is said ----


def test_violations_that_check_nothing_say_so():
    model = nm.nnx.sparsify(Mlp(16, 32, rngs=nnx.Rngs(0)), recipe("mvue(2,4)"))
    with pytest.warns(UserWarning, match="^violations: no weight has an n:m final form, so nothing was checked.$"):
        assert nm.nnx.violations(nm.nnx.harden(model)) == {"down/kernel": None, "up/kernel": None}
    nm.nnx.sparsify(model, recipe("ste(2,4)", "up"))
    counts = nm.nnx.violations(model)
    assert counts["down/kernel"] is None
    assert int(counts["up/kernel"]) == 16 * 32 // 4


# ---- a model that is made sparse again ----


def test_a_new_recipe_decides_alone():
    """The pattern of an earlier `harden` says nothing of a model that `sparsify` made sparse in another way."""
    model = Mlp(16, 32, rngs=nnx.Rngs(0))
    first = nm.nnx.harden(nm.nnx.sparsify(model, recipe("ste(2,4)")))
    again = nm.nnx.sparsify(first, nm.Recipe({"up": "ste(1,4)", "down": "dense"}))
    assert {path: p and str(p) for path, p in nm.nnx.patterns(again).items()} == {
        "up/kernel": "1:4 along axis 0",
        "down/kernel": None,
    }
    randomly(again)
    assert {path: n is not None and int(n) > 0 for path, n in nm.nnx.violations(again).items()} == {
        "up/kernel": True,
        "down/kernel": False,
    }
    assert nm.nnx.patterns(nm.nnx.harden(again))["down/kernel"] is None


def test_pruning_in_one_shot_leaves_what_the_recipe_leaves_dense():
    model, x = Mlp(16, 32, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (64, 16))
    first = nm.nnx.prune(model, nm.Recipe({"up": "ste(2,4)", "down": "dense"}), [x]).model
    randomly(first)  # trained densely
    second = nm.nnx.prune(first, nm.Recipe({"up": "dense", "down": "ste(2,4)"}), [x])
    assert list(second.errors) == ["down"]
    assert not np.any(second.model.up.kernel[...] == 0)


def test_a_product_that_may_be_dense_may_be_dense_when_hardened():
    """Scores of 6 keys do not divide into groups of 4, which `else dense` allows."""

    class Attention(nnx.Module):
        def __init__(self):
            self.scores = Scores(2, 4, None)

        def __call__(self, p, v):
            return self.scores(p, v)

    p, v = jax.nn.softmax(jnp.ones((1, 2, 6, 6))), jnp.arange(48.0).reshape(1, 6, 2, 4)
    model = nm.nnx.sparsify(Attention(), recipe("y_x=mse(2,4) else dense", "scores"))
    np.testing.assert_array_equal(nm.nnx.harden(model)(p, v), model(p, v))
    assert nm.nnx.gradient_errors(model, lambda m, p, v: m(p, v).sum(), p, v) == {}


@pytest.mark.slow
def test_a_mask_of_the_last_stage_keeps_the_layout_of_training():
    """The first stage has larger groups, so the axes of the weight are merged, and the mask has the merged shape."""

    def hardened(first):
        stages = nm.stages(((0, first), (100, nm.hold(nm.mse(2, 4)))))
        model = nnx.LinearGeneral((2, 4), 4, axis=(-2, -1), rngs=nnx.Rngs(0))
        model = nm.nnx.sparsify(model, nm.Recipe({".*": nm.Sparsity(y_w=nm.ste(stages))}))
        nm.nnx.set_step(model, 100)
        x = np.eye(8, dtype=np.float32).reshape(8, 2, 4)
        hard = nm.nnx.harden(model)
        np.testing.assert_allclose(hard(x), model(x), rtol=1e-6)
        return hard.kernel[...]

    np.testing.assert_array_equal(hardened(nm.mse(1, 8)), hardened(nm.mse(2, 4)))
    assert np.count_nonzero(hardened(nm.mse(1, 8)).reshape(2, 4, 4), 1).max() == 2
