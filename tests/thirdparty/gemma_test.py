"""Layers of DeepMind's gemma, in flax.linen, without a changed line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import nmjax as nm

layers = pytest.importorskip("gemma.gm.nn._layers", reason="gemma is not installed: make test-thirdparty")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the package


class Block(nn.Module):
    """Attention and a feed-forward layer, as gemma has them."""

    @nn.compact
    def __call__(self, x):
        q = layers.Einsum((4, 32, 8), name="q")("BTD,NDH->BTNH", x)
        k, v = layers.Einsum((2, 4, 32, 8), name="kv")("BTD,CNDH->CBTNH", x)
        weights = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k) / 8**0.5)
        y = jnp.einsum("BNTS,BSNH->BTNH", weights, v)
        x = x + layers.Einsum((4, 8, 32), name="out")("BTNH,NHD->BTD", y)
        gate, up = layers.Einsum((2, 64, 32), name="gating")("BTF,NHF->NBTH", x)
        return x + layers.Einsum((64, 32), name="linear")("BTH,HF->BTF", jax.nn.gelu(gate) * up)


def test_a_block_of_gemma():
    model, x = Block(), jax.random.normal(jax.random.key(0), (2, 8, 32))
    with nm.linen.sparsify(nm.Recipe({".*": "s_ste(2,4)"}), seed=1, strict=True):
        variables = model.init(jax.random.key(1), x)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(variables, state, now):
        variables = nm.linen.set_step(variables, now)
        with nm.linen.sparsify(nm.Recipe({".*": "s_ste(2,4)"}), seed=1):
            loss = lambda params: (model.apply({**variables, "params": params}, x) ** 2).mean()
            value, gradients = jax.value_and_grad(loss)(variables["params"])
        updates, state = optimizer.update(gradients, state)
        return {**variables, "params": optax.apply_updates(variables["params"], updates)}, state, value

    state, losses = optimizer.init(variables["params"]), []
    for now in range(5):
        variables, state, value = step(variables, state, now)
        losses.append(value)
    assert losses[4] < losses[0]
    hard = nm.linen.harden(variables)
    violations = nm.linen.violations(hard)
    assert set(violations) == {f"{name}/w" for name in ("q", "kv", "out", "gating", "linear")}
    assert set(map(int, violations.values())) == {0}
    with nm.linen.sparsify(nm.Recipe({".*": "s_ste(2,4)"}), seed=1):
        sparse = model.apply(variables, x)
    np.testing.assert_allclose(model.apply({"params": hard["params"]}, x), sparse, rtol=1e-5, atol=1e-6)
