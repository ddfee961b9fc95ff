"""Hidden states and dropout of the models, and the options of decoders and ModernBERT, against code by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from nmjax.models import BERT, GPT, Decoder, ModernBERT, Rotary, ViT
from nmjax.models.decoder import RMSNorm, rotated
from nmjax.models.transformer import Block, Dropout, dropped

pytestmark = pytest.mark.sampled

SMALL = {"width": 16, "depth": 3, "heads": 2, "hidden": 32}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 8)))
IMAGES = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8, 8, 3)), jnp.float32)
MASK = jnp.arange(8)[None] < jnp.array([8, 6, 3, 1])[:, None]
MAKE = {
    "vit": lambda **k: ViT(**SMALL | k, image=8, patch=4, classes=4, rngs=nnx.Rngs(0)),
    "gpt": lambda **k: GPT(**SMALL | k, vocabulary=16, length=8, rngs=nnx.Rngs(0)),
    "bert": lambda **k: BERT(**SMALL | k, vocabulary=16, length=8, classes=4, rngs=nnx.Rngs(0)),
    "decoder": lambda **k: Decoder(**SMALL | {"kv_heads": 1} | k, vocabulary=16, length=8, rngs=nnx.Rngs(0)),
    "modernbert": lambda **k: ModernBERT(
        **SMALL | {"window": 3} | k, vocabulary=16, length=8, classes=4, rngs=nnx.Rngs(0)
    ),
}
INPUT = {"vit": (IMAGES,), "gpt": (TOKENS,), **dict.fromkeys(("bert", "decoder", "modernbert"), (TOKENS, MASK))}
DROPS = ["vit", "gpt", "bert", "modernbert"]
GEMMA = {
    "local": (True, True, False), "window": 3, "norm_heads": True, "norm_outputs": True, "norm_offset": 1.0,
    "embedding_scale": 4.0, "local_rotary": Rotary(100.0), "features": 6, "kv_heads": 2, "activation": jax.nn.gelu,
}  # fmt: skip


def louder(model):
    """Give small initial weights the size at which all parts of a model matter."""
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("kernel", "embedding"):
            v[...] = v[...] * 8
    return model


def head(name, model, x):
    """Return what a call makes of the output of the last block."""
    if name == "bert":
        return model.head(jnp.tanh(model.pooler(x[:, 0])))
    if name == "modernbert":
        x = jax.nn.gelu(model.norm(x)[:, 0] @ model.pooler.kernel[...], approximate=False)
        return model.head((x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5))
    x = model.norm(x)
    return model.head(x[:, 0]) if name == "vit" else x @ model.tokens.embedding[...].T


# ---- hidden states ----


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("remat", [False, True])
def test_hidden_states_are_the_embedding_and_the_output_of_each_block(name, remat):
    model, inputs = louder(MAKE[name](remat=remat)), INPUT[name]
    states = nnx.jit(lambda model: model.hidden(*inputs))(model)
    assert states.shape[0] == 4
    np.testing.assert_allclose(head(name, model, states[-1]), model(*inputs), rtol=1e-4, atol=1e-5)
    one = MAKE[name](depth=1)  # its first block alone
    nnx.update(one.blocks[0], nnx.state(model.blocks[0], nnx.Param))
    for part in ("tokens", "positions", "types", "norm", "patches", "cls"):
        if isinstance(getattr(one, part, None), nnx.Param):
            getattr(one, part)[...] = getattr(model, part)[...]
        elif getattr(one, part, None) is not None:
            nnx.update(getattr(one, part), nnx.state(getattr(model, part)))
    np.testing.assert_allclose(one.hidden(*inputs), states[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("options", [{}, GEMMA], ids=["plain", "gemma"])
def test_a_scan_has_the_same_hidden_states(name, options):
    options = options if name == "decoder" else {}
    listed, scanned = louder(MAKE[name](**options)), MAKE[name](**options, scan=True)
    tree = nnx.to_pure_dict(nnx.state(listed))
    blocks = tree.pop("blocks")
    tree["blocks"] = jax.tree.map(lambda *v: jnp.stack(v), *(blocks[i] for i in range(len(blocks))))
    nnx.update(scanned, tree)
    hidden = lambda model: model.hidden(*INPUT[name])
    np.testing.assert_allclose(nnx.jit(hidden)(scanned), nnx.jit(hidden)(listed), rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(scanned(*INPUT[name]), listed(*INPUT[name]), rtol=2e-4, atol=1e-4)


# ---- dropout ----


def test_dropout_keeps_the_mean():
    """The share of zeros within five standard errors; the other values are scaled by exactly one number."""
    x = jnp.ones((100, 1000))
    y = dropped(x, 0.3, jax.random.key(0))
    np.testing.assert_array_equal(jnp.unique(y), [0, np.float32(1 / 0.7)])
    assert abs(float((y == 0).mean()) - 0.3) < 5 * (0.3 * 0.7 / x.size) ** 0.5
    assert dropped(x, 0.3, None) is x
    assert dropped(x, 0.0, jax.random.key(0)) is x


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPS)
def test_dropout_needs_a_key_and_a_rate(name):
    model, inputs = louder(MAKE[name](dropout=0.2)), INPUT[name]
    calm = louder(MAKE[name]())
    np.testing.assert_array_equal(model(*inputs), calm(*inputs))
    np.testing.assert_array_equal(calm(*inputs, key=jax.random.key(0)), calm(*inputs))
    first, again, other = (model(*inputs, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != model(*inputs)).any()


@pytest.mark.parametrize("rate", [1.0, -0.1, 1.5, float("nan")])
def test_a_rate_of_dropout_is_from_0_to_less_than_1(rate):
    """With a rate of 1, gradients would be NaN."""
    for make in (*(MAKE[name] for name in DROPS), functools.partial(MAKE["gpt"], scan=True)):
        with pytest.raises(ValueError, match=f"dropout is a rate from 0 to less than 1, got {rate}"):
            make(dropout=rate)
    for where in Dropout._fields:
        with pytest.raises(ValueError, match="dropout is a rate"):
            Block(16, 2, 32, jax.nn.relu, 1e-5, dropout=Dropout(**{where: rate}), dtype=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dropout is a rate"):
        dropped(jnp.ones(4), rate, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPS)
def test_dropout_of_a_scan_and_under_remat(name):
    """A block's draws are those of its number, also when the backward pass computes it again."""
    loss = lambda model: jnp.square(model(*INPUT[name], key=jax.random.key(3))).mean()
    values, grads = zip(
        *(nnx.value_and_grad(loss)(MAKE[name](dropout=0.2, remat=r)) for r in (False, True)), strict=True
    )
    np.testing.assert_allclose(*values, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *grads)
    listed, scanned = MAKE[name](dropout=0.2), MAKE[name](dropout=0.2, scan=True)
    tree = nnx.to_pure_dict(nnx.state(listed))
    blocks = tree.pop("blocks")
    tree["blocks"] = jax.tree.map(lambda *v: jnp.stack(v), *(blocks[i] for i in range(len(blocks))))
    nnx.update(scanned, tree)
    np.testing.assert_allclose(loss(scanned), loss(listed), rtol=1e-5)


@pytest.mark.slow
def test_the_places_of_dropout_in_a_block():
    """Each rate alone, against the part of the block that it leaves alone."""
    make = lambda **rates: Block(16, 2, 32, jax.nn.relu, 1e-5, dropout=Dropout(**rates), dtype=None, rngs=nnx.Rngs(0))
    x, key = jax.random.normal(jax.random.key(1), (2, 8, 16)), jax.random.key(2)
    dense = make()
    for rates in ({"sums": 0.999999}, {"scores": 0.999999}):  # nothing is left of attention, but its bias
        block = make(**rates)
        attended = x + (0 if "sums" in rates else block.attention.out.bias[...][None, None])
        rest = 0 if "sums" in rates else dense.mlp(dense.norm2(attended))
        np.testing.assert_allclose(block(x, None, key), attended + rest, rtol=1e-5, atol=1e-6)
    block = make(hidden=0.999999)
    attended = x + dense.attention(dense.norm1(x))
    np.testing.assert_allclose(
        block(x, None, key), attended + dense.mlp.down.bias[...][None, None], rtol=1e-5, atol=1e-6
    )


# ---- the decoder ----


def test_rotary_positions_depend_on_the_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    rotary = Rotary(100.0)
    at = lambda x, position: rotated(x, rotary.tables(jnp.array([position]), 8))
    product = lambda i, j: float(jnp.sum(at(q, i) * at(k, j)))
    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-3)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3
    np.testing.assert_array_equal(at(q, 0), q)


def test_rotary_positions_as_complex_numbers():
    x, positions = jax.random.normal(jax.random.key(0), (1, 5, 2, 8)), jnp.arange(5)
    z = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
    turned = z * np.exp(1j * np.arange(5)[:, None] * 100.0 ** (-np.arange(4) / 4))[None, :, None]
    y = rotated(x, Rotary(100.0).tables(positions, 8))
    np.testing.assert_allclose(y, np.concatenate([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


def test_rotary_frequencies_of_llama_3():
    """Frequencies with more turns than the upper bound stay, those with less than the lower one are divided."""
    plain, scaled = Rotary(5e5).frequencies(64), Rotary(5e5, 32.0, (1.0, 4.0, 8192)).frequencies(64)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 32)
    assert (np.diff(scaled) < 0).all()
    np.testing.assert_allclose(Rotary(5e5, 8.0).frequencies(64), plain / 8)


def test_rms_norm_by_hand():
    x, norm = np.asarray(jax.random.normal(jax.random.key(0), (3, 8))), RMSNorm(8, 1e-6, offset=1.0)
    norm.scale[...] = jnp.arange(8.0)
    right = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * (1 + np.arange(8))
    np.testing.assert_allclose(norm(x), right, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, GEMMA, {"tied": False, "bias": True, "kv_heads": 2}], ids=["llama", "gemma", "qwen"]
)
def test_a_decoder_sees_only_what_it_may(options):
    """A change of a token changes no logits before it; padding changes none; local blocks see only their window."""
    model = louder(MAKE["decoder"](**options))
    y, changed = model(TOKENS), model(TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % 16))
    np.testing.assert_array_equal(y[:, :5], changed[:, :5])
    assert (jnp.abs(y - changed)[:, 5:].max((1, 2)) > 1e-4).all()
    padded = model(TOKENS.at[0, 6:].set(0), MASK[1:2] & jnp.ones((4, 8), bool))
    np.testing.assert_allclose(padded[:, :6], y[:, :6], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_window_ends():
    model = louder(MAKE["decoder"](**GEMMA | {"depth": 1, "local": (True,)}))
    y, changed = model(TOKENS), model(TOKENS.at[:, 2].set((TOKENS[:, 2] + 1) % 16))
    np.testing.assert_array_equal(y[:, 5:], changed[:, 5:])  # positions 2, 3 and 4 see it
    assert (jnp.abs(y - changed)[:, 4].max(-1) > 1e-6).all()


def test_groups_share_keys_and_values():
    """With as many groups as heads, and the keys and values of each group repeated."""
    grouped, every = MAKE["decoder"](kv_heads=1), MAKE["decoder"](kv_heads=2)
    for a, b in zip(grouped.blocks, every.blocks, strict=True):
        for part in ("key", "value"):
            getattr(b.attention, part).kernel[...] = jnp.tile(getattr(a.attention, part).kernel[...], (1, 2))
        for part in ("query", "out"):
            getattr(b.attention, part).kernel[...] = getattr(a.attention, part).kernel[...]
        nnx.update(b.mlp, nnx.state(a.mlp))
    every.tokens.embedding[...] = grouped.tokens.embedding[...]
    np.testing.assert_allclose(every(TOKENS), grouped(TOKENS), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_sparse_decoder_trains_in_a_scan():
    model = nm.nnx.sparsify(
        MAKE["decoder"](**GEMMA, scan=True, scores=True), nm.Recipe({".*/mlp/.*": "s_ste(2,4)", ".*": "dense"})
    )
    losses = nnx.value_and_grad(lambda model: jnp.square(model(TOKENS)).mean())(model)
    assert jnp.isfinite(losses[0])
    assert all(jnp.isfinite(v).all() for v in jax.tree.leaves(losses[1]))
    hard = nm.nnx.harden(model)
    broken = [int(count.sum()) for count in nm.nnx.violations(hard).values() if count is not None]
    assert broken == [0, 0, 0]


BAD = {
    "kv_heads must divide heads, both at least 1, got kv_heads=3 and heads=2": {"kv_heads": 3},
    "heads must divide width, got heads=3 and width=16": {"heads": 3},
    "features of a head must be even and at least 2, .* got 5": {"features": 5},
    "features of a head must be even and at least 2, .* got 0": {"features": 0},
    "kv_heads must divide heads, both at least 1, got kv_heads=1 and heads=0": {"heads": 0},
    "window must be at least 1; .* and window=0": {"local": (True, False, False), "window": 0},
    r"got local=\(True,\) for depth=3, and window=4": {"local": (True,), "window": 4},
    "for depth=3, and window=None": {"local": (True, False, False)},
}


@pytest.mark.parametrize("message", BAD)
def test_sizes_that_do_not_fit(message):
    with pytest.raises(ValueError, match=message):
        MAKE["decoder"](**BAD[message])


def test_a_mask_of_another_shape_is_refused():
    model = MAKE["decoder"]()
    for shape in ((TOKENS.shape[1],), (TOKENS.shape[0], 1)):
        with pytest.raises(ValueError, match="mask has the shape of tokens"):
            model(TOKENS, jnp.ones(shape, bool))


@pytest.mark.slow
def test_logits_of_a_head_of_its_own_are_not_rounded():
    """In bfloat16 the operands are rounded, and the sums are not."""
    logits = MAKE["decoder"](tied=False, dtype=jnp.bfloat16)(TOKENS)
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()
    tied = MAKE["decoder"](dtype=jnp.bfloat16)
    for model in (MAKE["decoder"](tied=False, dtype=jnp.bfloat16), tied):
        grads = nnx.grad(lambda model: jnp.square(model(TOKENS)).mean())(model)
        assert all(jnp.isfinite(v).all() for v in jax.tree.leaves(grads))


# ---- ModernBERT ----


def test_a_centred_norm_is_a_layer_norm_without_a_bias():
    x, norm = 3 + jax.random.normal(jax.random.key(0), (5, 8)), RMSNorm(8, 1e-2, centred=True)
    right = nnx.LayerNorm(8, epsilon=1e-2, use_bias=False, use_fast_variance=False, rngs=nnx.Rngs(0))
    right.scale[...] = norm.scale[...] = jnp.arange(8.0)
    np.testing.assert_allclose(norm(x), right(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_block_of_a_modernbert_sees_both_sides():
    """A local one sees two positions to each side, if its window is three; another one sees all."""
    other = TOKENS.at[:, 3].set((TOKENS[:, 3] + 1) % 16)
    for local, seen in ((True, jnp.abs(jnp.arange(8) - 3) < 3), (False, jnp.ones(8, bool))):
        model = louder(MAKE["modernbert"](depth=1, local=(local,)))
        changes = jnp.abs(model.hidden(TOKENS)[-1] - model.hidden(other)[-1]).max(-1)
        np.testing.assert_array_equal(changes > 1e-5, jnp.broadcast_to(seen, (4, 8)))
        np.testing.assert_array_equal(jnp.where(seen, 0, changes), 0)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_padding_does_not_matter_to_a_modernbert(pool):
    model, mask = louder(MAKE["modernbert"](pool=pool)), jnp.broadcast_to(jnp.arange(8) < 6, (4, 8))
    y = model(TOKENS, mask)
    np.testing.assert_allclose(y, model(TOKENS[:, :6]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y, model(TOKENS.at[:, 6:].set(1), mask), rtol=1e-4, atol=1e-5)
    states = model.hidden(TOKENS, mask)
    np.testing.assert_array_equal(model.logits(states[-1], None, mask), y)
    assert (jnp.abs(model.logits(states[-1]) - y).max() > 1e-3) == (pool == "mean")
    np.testing.assert_allclose(model.logits(states[-1][:, :6]), y, rtol=1e-4, atol=1e-5)
    assert jnp.isfinite(model(TOKENS, jnp.zeros((4, 8), bool))).all()


def test_a_modernbert_is_local_in_two_of_three_blocks():
    assert MAKE["modernbert"](depth=7).local == (False, True, True, False, True, True, False)
    for options, said in (
        ({"pool": "max"}, "pool is 'cls' or 'mean', got 'max'"),
        ({"heads": 3}, "heads must divide width, got heads=3 and width=16"),
        ({"window": 0}, "window must be at least 1; .* and window=0"),
        ({"local": (True,)}, r"got local=\(True,\) for depth=3"),
    ):
        with pytest.raises(ValueError, match=said):
            MAKE["modernbert"](**options)
