"""The models: their sizes as published, and their results against each other and against code by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import nmjax as nm
from nmjax.models import (
    BERT,
    GPT,
    ModernBERT,
    ResNet,
    ViT,
    bert,
    generate,
    gpt,
    modernbert,
    resnet,
    transformer,
    vit,
)
from nmjax.models.resnet import Block as Residual
from nmjax.models.transformer import Attention, Block

pytestmark = pytest.mark.sampled

SMALL = {"width": 16, "depth": 2, "heads": 2, "hidden": 32}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 8)))
IMAGES = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8, 8, 3)), jnp.float32)
MAKE = {
    "vit": lambda seed=0, **k: ViT(**SMALL | {"pool": "mean"} | k, image=8, patch=4, classes=4, rngs=nnx.Rngs(seed)),
    "gpt": lambda seed=0, **k: GPT(**SMALL | k, vocabulary=16, length=8, rngs=nnx.Rngs(seed)),
    "bert": lambda seed=0, **k: BERT(**SMALL | k, vocabulary=16, length=8, classes=4, rngs=nnx.Rngs(seed)),
    "modernbert": lambda **k: ModernBERT(**SMALL | k, vocabulary=16, length=8, classes=4, rngs=nnx.Rngs(0)),
    "resnet": lambda seed=0, **k: ResNet(**resnet.SIZES["tiny"], stem="cifar", classes=4, rngs=nnx.Rngs(seed), **k),
}
INPUT = {"vit": IMAGES, "gpt": TOKENS, "bert": TOKENS, "modernbert": TOKENS, "resnet": IMAGES}


def size(make):
    state = nnx.state(nnx.eval_shape(make), nnx.Param)
    return sum(v.size for v in jax.tree.leaves(state))


forward = nnx.jit(lambda model, *inputs: model(*inputs))


def trained(model, x):
    """Return the logits, and the gradients of a loss that no symmetry makes zero."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(params, rest):
        def loss(params):
            y = nnx.merge(graph, params, rest, copy=True)(x)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)), y

        grads, y = jax.grad(loss, has_aux=True)(params)
        return y, grads

    return run(params, rest)


def stacked(tree):
    """Return the state of a model with a list of blocks as that of a model with a stack of blocks."""
    tree = nnx.to_pure_dict(tree)
    blocks = tree.pop("blocks")
    return {**tree, "blocks": jax.tree.map(lambda *v: jnp.stack(v), *(blocks[i] for i in range(len(blocks))))}


# ---- sizes ----

PUBLISHED = {
    **{("vit", k): n for k, n in (("Ti", 5_717_416), ("S", 22_050_664), ("B", 86_567_656), ("L", 304_326_632))},
    **{("gpt", k): n for k, n in (("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080))},
    ("gpt", "xl"): 1_557_611_200,
    ("bert", "base"): 109_482_240,
    ("bert", "large"): 335_141_888,
    ("modernbert", "base"): 149_014_272,
    ("modernbert", "large"): 394_781_696,
    ("resnet", "18"): 11_689_512,
    ("resnet", "50"): 25_557_032,
}


@pytest.mark.parametrize(("name", "which"), PUBLISHED)
def test_parameters_are_as_many_as_published(name, which):
    model = {
        "vit": lambda: ViT(**vit.SIZES[which], image=224, patch=16, classes=1000, scan=True, rngs=nnx.Rngs(0)),
        "gpt": lambda: GPT(**gpt.SIZES[which], vocabulary=50257, length=1024, scan=True, rngs=nnx.Rngs(0)),
        "bert": lambda: BERT(**bert.SIZES[which], vocabulary=30522, length=512, classes=0, scan=True, rngs=nnx.Rngs(0)),
        "modernbert": lambda: ModernBERT(
            **modernbert.SIZES[which], vocabulary=50368, length=8192, classes=0, pooled=False, scan=True,
            rngs=nnx.Rngs(0),
        ),
        "resnet": lambda: ResNet(**resnet.SIZES[which], classes=1000, rngs=nnx.Rngs(0)),
    }[name]  # fmt: skip
    assert size(model) == PUBLISHED[name, which]


def test_parameters_of_the_small_forms():
    assert size(lambda: ResNet(**resnet.SIZES["18"], stem="cifar", classes=10, rngs=nnx.Rngs(0))) == 11_173_962
    digits = lambda **k: ViT(**vit.SIZES["tiny"], image=8, channels=1, patch=2, classes=10, rngs=nnx.Rngs(0), **k)
    assert size(digits) - size(lambda: digits(pool="mean")) == 2 * 64  # the token and its position
    assert size(digits) == size(lambda: digits(scan=True, remat=True))


def test_initial_values():
    """In GPT, layers whose output is added to the stream start smaller in deeper models. The others have 0.02."""
    model = MAKE["gpt"](width=64, hidden=128)
    std = lambda v: float(v[...].std())
    for layer in (model.blocks[0].attention.query, model.blocks[1].mlp.up):
        np.testing.assert_allclose(std(layer.kernel), 0.02, rtol=0.05)
    for layer in (model.blocks[0].attention.out, model.blocks[1].mlp.down):
        np.testing.assert_allclose(std(layer.kernel), 0.02 / 2, rtol=0.05)
    kernel = resnet.conv(16, 64, 3, dtype=None, rngs=nnx.Rngs(0)).kernel
    np.testing.assert_allclose(std(kernel), (2 / (9 * 64)) ** 0.5, rtol=0.05)


# ---- forms ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt", "vit"])
def test_a_scan_computes_what_a_list_does(name):
    listed = MAKE[name]()
    inputs = (TOKENS, TOKENS > 3) if name == "bert" else (INPUT[name],)
    y = forward(listed, *inputs)
    scanned = MAKE[name](seed=1, scan=True)
    assert jnp.abs(jnp.diff(scanned.blocks.mlp.up.kernel[...], axis=0)).max() > 1e-2  # each block has its own
    assert jnp.abs(forward(scanned, *inputs) - y).max() > 1e-3
    nnx.update(scanned, stacked(nnx.state(listed, nnx.Param)))
    np.testing.assert_allclose(forward(scanned, *inputs), y, atol=1e-5)


@functools.cache
def plain():
    """Return parameters, logits and gradients of a GPT without scan and remat."""
    model = MAKE["gpt"]()
    return nnx.state(model, nnx.Param), *trained(model, TOKENS)


@pytest.mark.slow
def test_scan_and_remat_change_no_gradient():
    params, y, grads = plain()
    for form in ({"remat": True}, {"scan": True, "remat": True}, {"lean": True}, {"scan": True, "lean": True}):
        model = MAKE["gpt"](seed=1, **form)
        nnx.update(model, stacked(params) if "scan" in form else params)
        other, others = trained(model, TOKENS)
        np.testing.assert_allclose(other, y, atol=1e-5)
        expected, got = stacked(grads) if "scan" in form else nnx.to_pure_dict(grads), nnx.to_pure_dict(others)
        assert jax.tree.structure(expected) == jax.tree.structure(got)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt", "vit"])
def test_lean_changes_no_gradient_of_chosen_rows(name):
    """Draw the same numbers in a product that is computed again."""
    grads = {}
    for lean in (False, True):
        model = MAKE[name](lean=lean)
        text = "dw_x=rows(mvue(1,2)); dw_g=mvue(1,2); y_w=ste(rows(mse(2,4)))"
        nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", text), (r".*", "dense")), backend="compact"))
        nm.nnx.set_step(model, 3)
        _, grads[lean] = trained(model, INPUT[name])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *map(nnx.to_pure_dict, grads.values()))


def test_a_stack_may_be_closed_over():
    model = MAKE["gpt"](scan=True, remat=True)
    np.testing.assert_allclose(jax.jit(lambda x: model(x))(TOKENS), forward(model, TOKENS), atol=1e-5)


def kept(text="dense", **form):
    """Return the number of values that the backward pass keeps, beside parameters."""
    model = MAKE["gpt"](**form)
    nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*", text), (r".*", "dense"))))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda p, rest: jax.vjp(lambda p: nnx.merge(graph, p, rest)(TOKENS), p)[1]
    sizes = {v.shape: v.size for v in jax.tree.leaves(params)}
    return sum(v.size for v in jax.tree.leaves(jax.eval_shape(loss, params, rest)) if v.shape not in sizes)


def test_remat_keeps_little():
    """With remat, the backward pass keeps only the input of each block; with lean the results of products too."""
    everything, lean, inputs = kept(), kept(lean=True), kept(remat=True)
    assert inputs < lean / 2
    assert lean < everything / 2
    with pytest.raises(ValueError, match="exclude each other"):
        MAKE["gpt"](remat=True, lean=True)(TOKENS)


@pytest.mark.slow
def test_chosen_rows_are_kept_in_place_of_inputs():
    """Without remat the inputs of layers are not kept; with lean their chosen rows are."""
    rows = "dw_x=rows(mvue(1,4))"
    assert kept(rows) < kept()
    assert kept(lean=True) < kept(rows, lean=True) < kept(rows)


@pytest.mark.parametrize("name", MAKE)
def test_bfloat16_computes_and_float32_keeps(name):
    """Parameters and logits are float32; values between them are rounded."""
    model = MAKE[name](dtype=jnp.bfloat16)
    y, wide = forward(model, INPUT[name]), forward(MAKE[name](), INPUT[name])
    assert {v.dtype for v in jax.tree.leaves((y, nnx.state(model)))} == {jnp.dtype(jnp.float32)}
    assert 0 < jnp.abs(y - wide).max() < 0.03 * jnp.abs(wide).max()


@pytest.mark.slow
def test_gradients_of_bfloat16_are_near():
    _, grads = trained(MAKE["gpt"](dtype=jnp.bfloat16), TOKENS)
    _, _, expected = plain()
    for (path, g), (_, e) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(expected), strict=True):
        assert g.dtype == jnp.float32
        assert jnp.linalg.norm(g[...] - e[...]) < 0.05 * jnp.linalg.norm(e[...]) or {"key", "bias"} <= set(path)


# ---- what is computed, against hands ----


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_jax(causal):
    layer = Attention(16, 4, causal=causal, inits=(jax.nn.initializers.normal(1.0),) * 2, rngs=nnx.Rngs(0))
    x, mask = jax.random.normal(jax.random.key(0), (3, 5, 16)), jnp.arange(5)[None] < jnp.array([[5], [3], [1]])
    layer.query.kernel[...] *= 30  # so that it chooses
    q, k, v = (f(x).reshape(3, 5, 4, 4) for f in (layer.query, layer.key, layer.value))
    expected = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None], is_causal=causal)
    np.testing.assert_allclose(layer(x, mask), layer.out(expected.reshape(3, 5, 16)), atol=1e-4)


def test_patches():
    """The token of a patch is a linear function of its pixels. Patches follow each other row by row."""
    model = MAKE["vit"]()
    kernel, bias = model.patches.kernel[...], model.patches.bias[...]
    by_hand = IMAGES.reshape(4, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(4, 4, 48) @ kernel.reshape(48, 16)
    np.testing.assert_allclose(model.patches(IMAGES).reshape(4, 4, 16), by_hand + bias[None, None], atol=1e-5)


def silent(model):
    """Make the blocks of a model add nothing."""
    for block in model.blocks:
        block.attention.out.kernel[...] *= 0
        block.mlp.down.kernel[...] *= 0
    return model


@pytest.mark.slow
def test_pools():
    """If blocks add nothing, "mean" reads the mean of the patches, and "cls" a token that saw none of them."""
    mean, cls = silent(MAKE["vit"](depth=1)), silent(MAKE["vit"](depth=1, pool="cls"))
    tokens = mean.patches(IMAGES).reshape(4, 4, 16) + mean.positions[...][None]
    np.testing.assert_allclose(forward(mean, IMAGES), mean.head(mean.norm(tokens).mean(1)), atol=1e-5)
    token = cls.head(cls.norm(cls.cls[...] + cls.positions[...][:1]))
    np.testing.assert_allclose(forward(cls, IMAGES), jnp.broadcast_to(token, (4, 4)), atol=1e-5)


def test_layer_scale():
    """Factors of 0 leave the input as it is, and those of 1 the block as it is without."""
    x = jax.random.normal(jax.random.key(0), (2, 4, 16))
    make = lambda scale: Block(16, 2, 32, jax.nn.relu, 1e-6, layer_scale=scale, dtype=None, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(make(0.0)(x), x)
    np.testing.assert_array_equal(make(1.0)(x), make(None)(x))
    double = make(1.0)
    double.scale1[...], double.scale2[...] = 2.0 + 0 * double.scale1[...], 0 * double.scale2[...]
    np.testing.assert_allclose(double(x), x + 2 * double.attention(double.norm1(x)), atol=1e-6)


@pytest.mark.parametrize("post", [False, True])
def test_where_the_norms_stand(post):
    block = Block(16, 2, 32, jax.nn.relu, 1e-6, post=post, dtype=None, rngs=nnx.Rngs(0))
    block.norm1.bias[...] += 1
    block.norm2.scale[...] += 1
    x = jax.random.normal(jax.random.key(0), (2, 4, 16))

    @nnx.jit
    def by_hand(block, x):
        if post:
            y = block.norm1(x + block.attention(x))
            return block.norm2(y + block.mlp.down(jax.nn.relu(block.mlp.up(y))))
        y = x + block.attention(block.norm1(x))
        return y + block.mlp.down(jax.nn.relu(block.mlp.up(block.norm2(y))))

    np.testing.assert_allclose(forward(block, x), by_hand(block, x), atol=1e-5)


def test_kinds_of_blocks():
    kinds = {name: MAKE[name](depth=1).blocks[0] for name in ("vit", "gpt", "bert")}
    assert {name: b.post for name, b in kinds.items()} == {"vit": False, "gpt": False, "bert": True}
    x = jnp.linspace(-3, 3, 7)
    for name, exact in (("vit", True), ("gpt", False), ("bert", True)):
        expected = jax.nn.gelu(x, approximate=not exact)
        np.testing.assert_allclose(kinds[name].mlp.activation(x), expected, atol=1e-6)


@pytest.mark.slow
def test_every_dropout_of_every_block_has_a_key_of_its_own(monkeypatch):
    keys, plain = [], transformer.dropped
    monkeypatch.setattr(transformer, "dropped", lambda x, rate, key: keys.append(key) or plain(x, rate, key))
    MAKE["gpt"](dropout=0.1)(TOKENS, jax.random.key(0))
    assert len({tuple(np.ravel(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys) == 1 + 2 * 4


def test_the_future_of_a_text_is_not_seen():
    model = MAKE["gpt"]()
    y, other = forward(model, TOKENS), forward(model, TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % 16))
    np.testing.assert_array_equal(other[:, :5], y[:, :5])
    assert (jnp.abs(other - y).max((0, 2))[5:] > 1e-4).all()


def test_the_head_of_gpt_is_its_embedding():
    model = MAKE["gpt"](depth=1)
    x = model.tokens.embedding[...][TOKENS] + model.positions.embedding[...][None]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(forward(silent(model), TOKENS), x @ model.tokens.embedding[...].T, atol=1e-5)


@pytest.mark.slow
def test_padding_does_not_matter():
    model, mask = MAKE["bert"](), jnp.broadcast_to(jnp.arange(8) < 6, (4, 8))
    other = TOKENS.at[:, 6:].set((TOKENS[:, 6:] + 1) % 16)
    y = forward(model, TOKENS, mask)
    np.testing.assert_allclose(y, forward(model, TOKENS[:, :6]), atol=1e-6)
    np.testing.assert_array_equal(y, forward(model, other, mask))
    assert jnp.abs(forward(model, TOKENS, ~mask) - forward(model, other, ~mask)).max() > 1e-5
    assert jnp.abs(y - forward(model, TOKENS, mask, jnp.ones_like(TOKENS))).max() > 1e-5


def batch_norm(x):
    return (x - x.mean((0, 1, 2), keepdims=True)) / jnp.sqrt(x.var((0, 1, 2), keepdims=True) + 1e-5)


def convolved(x, layer, stride, padding):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, layer.kernel[...], (stride,) * 2, [(padding,) * 2] * 2, dimension_numbers=numbers
    )


@pytest.mark.slow
@pytest.mark.parametrize("bottleneck", [False, True])
def test_residual_blocks(bottleneck):
    block = Residual(3, 8, 2, bottleneck, dtype=None, rngs=nnx.Rngs(0))
    if bottleneck:  # the stride is of the 3x3
        y = jax.nn.relu(batch_norm(convolved(IMAGES, block.conv1, 1, 0)))
        y = jax.nn.relu(batch_norm(convolved(y, block.conv2, 2, 1)))
        y = batch_norm(convolved(y, block.conv3, 1, 0))
    else:
        y = jax.nn.relu(batch_norm(convolved(IMAGES, block.conv1, 2, 1)))
        y = batch_norm(convolved(y, block.conv2, 1, 1))
    short = batch_norm(convolved(IMAGES, block.shortcut, 2, 0))
    np.testing.assert_allclose(block(IMAGES), jax.nn.relu(y + short), atol=1e-4)


def test_the_stem_for_large_images():
    """The stem is a 7x7 convolution and a 3x3 maximum, both of stride 2. Its padding never exceeds a negative value."""
    model = ResNet(blocks=(), width=8, classes=8, rngs=nnx.Rngs(0))
    model.head.kernel[...] = jnp.eye(8)
    x = jax.nn.relu(batch_norm(convolved(IMAGES, model.stem, 2, 3)))
    assert x.shape == (4, 4, 4, 8)
    window = lambda i, j: x[:, max(0, 2 * i - 1) : 2 * i + 2, max(0, 2 * j - 1) : 2 * j + 2]
    pooled = [[window(i, j).max((1, 2)) for i in (0, 1)] for j in (0, 1)]
    np.testing.assert_allclose(model(IMAGES), sum(map(sum, pooled)) / 4, atol=1e-5)


@pytest.mark.parametrize(("stem", "stride"), [("cifar", 1), ("half", 2)])
def test_the_stems_for_small_images(stem, stride):
    """The stem is a 3x3 convolution without pooling."""
    model = ResNet(blocks=(), width=8, stem=stem, classes=8, rngs=nnx.Rngs(0))
    model.head.kernel[...] = jnp.eye(8)
    x = jax.nn.relu(batch_norm(convolved(IMAGES, model.stem, stride, 1)))
    assert x.shape == (4, 8 // stride, 8 // stride, 8)
    np.testing.assert_allclose(model(IMAGES), x.mean((1, 2)), atol=1e-5)


def test_batch_norm_learns_and_uses():
    model = ResNet(blocks=(), width=8, stem="cifar", classes=4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    batch = model.stem(IMAGES).astype(jnp.float32)
    y = model(IMAGES)
    np.testing.assert_allclose(model.norm.mean[...], 0.1 * batch.mean((0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(model.norm.var[...], 0.9 + 0.1 * batch.var((0, 1, 2)), atol=1e-4)
    model.eval()
    before = nnx.state(nnx.clone(model), nnx.BatchStat)
    assert jnp.abs(model(IMAGES) - y).max() > 1e-2
    np.testing.assert_allclose(model(IMAGES[:1]), model(IMAGES)[:1], atol=1e-5)  # each image for itself
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.BatchStat), before)
    model.norm.mean[...] = jnp.full(8, 257.0)  # a number that bfloat16 has not
    np.testing.assert_allclose(model.norm(jnp.full((1, 1, 1, 8), 257.0)), jnp.zeros((1, 1, 1, 8)))


# ---- made sparse ----

RECIPE = nm.Recipe(((r"blocks/.*|stages/.*conv\d", "s_ste(2,4)"),))
FORMS = [("vit", {"depth": 1}), ("gpt", {"scan": True, "remat": True}), ("bert", {"depth": 1}), ("resnet", {})]


@pytest.mark.parametrize(("name", "form"), FORMS, ids=str)
@pytest.mark.slow
def test_made_sparse_every_model_takes_a_gradient(name, form):
    model = MAKE[name](**form)
    dense = forward(model, INPUT[name])
    nm.nnx.sparsify(model, RECIPE, seed=0)
    y, grads = trained(model, INPUT[name])
    assert jnp.abs(y - dense).max() > 1e-3 * jnp.abs(dense).max()
    for path, g in nnx.to_flat_state(grads):
        small = "key" in path and "bias" in path  # which a softmax does not see
        assert jnp.isfinite(g[...]).all()
        assert small or jnp.abs(g[...]).max() > 0
    patterns = [path for path, pattern in nm.nnx.patterns(model).items() if str(pattern) != "None"]
    stack = "" if "scan" in form else r"\d/"
    expected = rf"blocks/{stack}(attention|mlp)/\w+/kernel|stages/\d/\d/conv\d/kernel"
    assert len(patterns) == (4 if name == "resnet" else 6)
    assert all(re.fullmatch(expected, path) for path in patterns)


@pytest.mark.slow
def test_the_paths_that_rules_see():
    block = {f"attention/{n}" for n in ("query", "key", "value", "out")} | {"mlp/up", "mlp/down"}
    every = {
        "vit": {"patches", "head"} | {f"blocks/{i}/{n}" for i in (0, 1) for n in block},
        "gpt": {f"blocks/{i}/{n}" for i in (0, 1) for n in block},
        "bert": {"pooler", "head"} | {f"blocks/{i}/{n}" for i in (0, 1) for n in block},
        "resnet": {"stem", "head", "stages/1/0/shortcut"} | {f"stages/{i}/0/conv{j}" for i in (0, 1) for j in (1, 2)},
    }
    for name, paths in every.items():
        sparse = nnx.eval_shape(lambda name=name: nm.nnx.sparsify(MAKE[name](), RECIPE))
        plan = nm.nnx.plan(sparse, jax.ShapeDtypeStruct(INPUT[name].shape, INPUT[name].dtype))
        assert {layer.path for layer in plan.layers} == paths
        pruned = {layer.path for layer in plan.layers if layer.hardened == "2:4"}
        assert pruned == {p for p in paths if "blocks" in p or "conv" in p}
        assert plan.refused == ()


# ---- samples ----


@pytest.mark.slow
def test_greedy_samples_are_those_of_a_loop():
    """Each token is the likeliest after the last eight, within the length of the model and beyond it."""
    model = MAKE["gpt"](seed=3)
    params = nnx.state(model.blocks, nnx.Param)
    nnx.update(model.blocks, jax.tree.map(lambda v: 20 * v, params))  # so that all of the window matters
    for prompt in (TOKENS[:2, :6], jnp.tile(TOKENS[:2], 2)):
        text = prompt
        for _ in range(9):
            text = jnp.concatenate([text, forward(model, text[:, -8:])[:, -1:].argmax(-1)], axis=1)
        drawn = generate(model, prompt, jax.random.key(0), count=9, temperature=0)
        np.testing.assert_array_equal(drawn, text)
        assert len(set(np.ravel(drawn[:, -9:]).tolist())) > 1


@pytest.mark.slow
def test_samples_follow_the_logits():
    """Over many texts the first token has the model's distribution, and a key draws the same tokens again."""
    model, prompt = MAKE["gpt"](), jnp.tile(TOKENS[:1, :3], (4000, 1))
    model.norm.scale[...] *= 10
    drawn = generate(model, prompt, jax.random.key(0), count=1, temperature=0.5)
    p = jax.nn.softmax(forward(model, prompt)[0, -1] / 0.5)
    assert p.max() > 2 / 16
    np.testing.assert_allclose(jnp.bincount(drawn[:, -1], length=16) / 4000, p, atol=0.03)
    np.testing.assert_array_equal(drawn, generate(model, prompt, jax.random.key(0), count=1, temperature=0.5))
    assert (drawn != generate(model, prompt, jax.random.key(1), count=1, temperature=0.5)).any()


# ---- errors ----

BAD = {
    "heads must divide width, got heads=3 and width=16": lambda: Attention(16, 3, rngs=nnx.Rngs(0)),
    "patch must divide image, got patch=3 and image=8.* to 6":
        lambda: ViT(**SMALL, image=8, patch=3, classes=2, rngs=nnx.Rngs(0)),
    "depth is the number of blocks, at least 1, got 0": lambda: MAKE["gpt"](depth=0),
    "pool is 'cls', 'mean' or 'both', got 'max'":
        lambda: ViT(**SMALL, image=8, patch=4, classes=2, pool="max", rngs=nnx.Rngs(0)),
    r"images are of shape \[batch, 8, 8, 3\], got \(8, 8, 3\)": lambda: MAKE["vit"]()(IMAGES[0]),
    "stem is 'imagenet', .* 'cifar', .* or 'half', .* got 'small'":
        lambda: ResNet(stem="small", classes=2, rngs=nnx.Rngs(0)),
    r"images are of shape \[batch, height, width, 3\], got \(4, 8, 8, 1\)": lambda: MAKE["resnet"]()(IMAGES[..., :1]),
    r"from 1 to length=8, got \(4, 16\).* tokens\[:, :8\]": lambda: MAKE["gpt"]()(jnp.tile(TOKENS, 2)),
    r"from 1 to length=8, got \(8,\)": lambda: MAKE["bert"]()(TOKENS[0]),
    r"mask has the shape of tokens, \(4, 8\), got \(8,\)": lambda: MAKE["bert"]()(TOKENS, jnp.ones(8, bool)),
    r"types has the shape of tokens, \(4, 8\), got \(4, 1\)": lambda: MAKE["bert"]()(TOKENS, types=TOKENS[:, :1]),
    r"got shape \(8,\). Write tokens\[None\] for":
        lambda: generate(MAKE["gpt"](), TOKENS[0], jax.random.key(0), count=1),
    "got count=0 and temperature=1.0": lambda: generate(MAKE["gpt"](), TOKENS, jax.random.key(0), count=0),
    "got count=1 and temperature=-1":
        lambda: generate(MAKE["gpt"](), TOKENS, jax.random.key(0), count=1, temperature=-1),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_a_scale_with_a_whole_offset_is_a_float():
    assert nm.models.decoder.RMSNorm(8, 1e-6, offset=1).scale.dtype == jnp.float32
