"""The mixture of experts: against a loop over tokens, its balance, and text drawn from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nmjax as nm
from experiments import config_files
from experiments.training import text
from nmjax.models import Decoder, MoE, generate, moe
from nmjax.models.moe import Mixture

pytestmark = pytest.mark.sampled

SIZE = {"width": 8, "depth": 2, "heads": 2, "hidden": 16, "experts": 4, "top": 2}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 8)))


def make(**changes):
    model = MoE(**SIZE | changes, vocabulary=16, length=8, rngs=nnx.Rngs(0))
    model.eval()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("top", [1, 2, 4])
def test_each_token_gets_the_sum_of_its_experts(top):
    """Every token alone, in NumPy: no token is dropped, and none gets the output of another."""
    mixture = Mixture(8, 16, 4, top, rngs=nnx.Rngs(1), inits=(nnx.initializers.normal(0.5),) * 2)
    mixture.router.kernel[...] *= 20  # so that tokens differ in their experts
    mixture.balance[...] = jnp.array([0.1, 0.0, -0.1, 0.0])
    mixture.eval()
    x = jax.random.normal(jax.random.key(0), (3, 5, 8))
    found = nnx.jit(mixture)(x)
    up, down = (np.asarray(layer.kernel[...], np.float64) for layer in (mixture.up, mixture.down))
    used = set()
    for token, y in zip(np.asarray(x, np.float64).reshape(-1, 8), found.reshape(-1, 8), strict=True):
        logits = token @ np.asarray(mixture.router.kernel[...])
        shares = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-(shares + np.asarray(mixture.balance[...])))[:top]
        used |= {*chosen.tolist()}
        wanted = sum(shares[e] * (np.asarray(jax.nn.gelu(jnp.asarray(token @ up[e]))) @ down[e]) for e in chosen)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert len(used) > 1


@pytest.mark.parametrize("norm_shares", [False, True])
@pytest.mark.parametrize("top", [1, 3])
def test_each_token_of_a_decoder_gets_the_sum_of_its_gated_experts(top, norm_shares):
    """Every token alone, in NumPy. Shares are those of all experts, or of the token's."""
    size = {"width": 8, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 16, "vocabulary": 16, "length": 8}
    options = {"experts": 4, "top": top, "norm_shares": norm_shares, "activation": jnp.tanh}
    mixture = Decoder(**size, **options, rngs=nnx.Rngs(1)).blocks[0].mlp
    for layer in (mixture.router, mixture.gate, mixture.up, mixture.down):
        layer.kernel[...] *= 20
    x = jax.random.normal(jax.random.key(0), (3, 5, 8))
    gate, up, down = (np.asarray(one.kernel[...], np.float64) for one in (mixture.gate, mixture.up, mixture.down))
    used = set()
    for token, y in zip(np.asarray(x, np.float64).reshape(-1, 8), mixture(x).reshape(-1, 8), strict=True):
        shares = np.exp(token @ np.asarray(mixture.router.kernel[...]))
        chosen = np.argsort(-shares)[:top]
        used |= {*chosen.tolist()}
        of = shares[chosen].sum() if norm_shares else shares.sum()
        wanted = sum(shares[e] / of * ((np.tanh(token @ gate[e]) * (token @ up[e])) @ down[e]) for e in chosen)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert len(used) > 1
    with pytest.raises(ValueError, match=r"top is the number of experts that a token uses, from 1 to experts=4, got 5"):
        Decoder(**size, **options | {"top": 5}, rngs=nnx.Rngs(1))


@pytest.mark.slow
def test_the_balance_moves_towards_experts_that_had_few_tokens():
    """It changes only in training, by ``rate``, and without a gradient. In the end all experts are in use."""
    mixture = Mixture(8, 16, 4, 1, rate=0.02, rngs=nnx.Rngs(0))
    mixture.router.kernel[...] = jnp.zeros((8, 4))  # the first expert wins every tie
    x = jax.random.normal(jax.random.key(0), (2, 20, 8))
    step = nnx.jit(lambda mixture, x: mixture(x))
    step(mixture, x)
    np.testing.assert_allclose(mixture.balance[...], [-0.02, 0.02, 0.02, 0.02])
    mixture.eval()
    step(mixture, x)
    np.testing.assert_allclose(mixture.balance[...], [-0.02, 0.02, 0.02, 0.02])
    mixture.train()
    mixture.router.kernel[...] = jax.random.normal(jax.random.key(1), (8, 4)) + jnp.array([[3.0, 0, 0, 0]])

    def loads():
        shares = jax.nn.softmax(mixture.router(x.reshape(-1, 8))) + mixture.balance[...][None]
        return np.bincount(np.argmax(shares, -1), minlength=4)

    before = loads()
    for _ in range(60):
        step(mixture, x)
    after = loads()
    assert after.max() - after.min() < (before.max() - before.min()) / 2
    assert after.min() > 0
    grads = nnx.grad(lambda mixture: mixture(x).sum())(mixture)
    assert [path[0] for path, _ in nnx.to_flat_state(grads)] == ["down", "router", "up"]
    assert jnp.abs(grads["router"]["kernel"][...]).max() > 0


@pytest.mark.slow
def test_no_token_sees_a_later_one():
    """The output at a position does not depend on later tokens of the batch."""
    model = make()
    y = nnx.jit(model)(TOKENS)
    changed = nnx.jit(model)(TOKENS.at[:, 5:].set(0))
    np.testing.assert_allclose(changed[:, :5], y[:, :5], atol=1e-6)
    assert jnp.abs(changed[:, 5:] - y[:, 5:]).max() > 1e-3
    np.testing.assert_allclose(nnx.jit(model)(TOKENS[:1, :3]), y[:1, :3], atol=1e-6)


@pytest.mark.slow
def test_text_is_drawn_from_it():
    drawn = generate(make(), TOKENS[:2, :3], jax.random.key(0), count=4, temperature=0.0)
    assert drawn.shape == (2, 7)
    model, longer = make(), TOKENS[:2, :3]
    for _ in range(4):
        longer = jnp.concatenate([longer, nnx.jit(model)(longer)[:, -1:].argmax(-1)], axis=1)
    np.testing.assert_array_equal(drawn, longer)


@pytest.mark.slow
def test_sizes_and_dtypes():
    state = nnx.state(nnx.eval_shape(lambda: MoE(**moe.SIZES["tiny"], vocabulary=256, length=128, rngs=nnx.Rngs(0))))
    of = lambda kind: sum(v.size for v in jax.tree.leaves(nnx.filter_state(state, kind)))
    block = 4 * (128 * 128 + 128) + 4 * 128 + 128 * 4 + 2 * 4 * 128 * 256
    assert of(nnx.Param) == (256 + 128) * 128 + 4 * block + 2 * 128
    assert of(moe.Balance) == 4 * 4
    narrow = make(dtype=jnp.bfloat16)
    wide = make()
    y, wanted = nnx.jit(narrow)(TOKENS), nnx.jit(wide)(TOKENS)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, wanted, atol=0.02)
    assert narrow.blocks[0].moe.up.kernel[...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top": 0}, "from 1 to experts=4, got 0"),
        ({"top": 5}, "from 1 to experts=4, got 5"),
        ({"depth": 0}, "depth is the number of blocks, at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit(changes, said):
    with pytest.raises(ValueError, match=said):
        make(**changes)


@pytest.mark.slow
def test_runs_of_several_seeds_are_those_of_each_seed():
    """jax.vmap over whole models, as a sweep of seeds does. Grouped products take it if all operands are mapped."""
    seeds = jax.random.split(jax.random.key(0), 2)
    graph = nnx.graphdef(make())

    def one(key):
        model = MoE(**SIZE, vocabulary=16, length=8, rngs=nnx.Rngs(key))
        model.eval()
        params, rest = nnx.split(model, nnx.Param, ...)[1:]
        return jax.grad(lambda p: (nnx.merge(graph, p, rest, copy=True)(TOKENS) ** 2).sum())(nnx.as_pure(params))

    together = jax.jit(jax.vmap(one))(seeds)
    for i, key in enumerate(seeds):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-5), together, jax.jit(one)(key)
        )


def test_the_config_file_prunes_experts_and_attention():
    config = config_files.load("configs/moe_24.py:smoke")
    assert config.model.to_dict() == {"name": "moe", "size": "tiny", "depth": 1}
    assert text.MODELS["moe"] == (MoE, moe.SIZES)
    recipe = nm.Recipe(
        [(pattern, config.sparsity.get(name, "dense").replace("30%", "300")) for pattern, name in config.rules]
    )
    assert recipe("blocks/0/moe/router") == recipe("tokens") == nm.Sparsity()
    for path in ("blocks/0/moe/up", "blocks/3/moe/down", "blocks/0/attention/query"):
        assert recipe(path).dw_g == nm.mvue(2, 4)
