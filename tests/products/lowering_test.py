"""Every method lowers for accelerators, on a machine that has none."""

import jax
import jax.numpy as jnp
import pytest

import nmjax as nm
from nmjax.recipes import text as spec

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", spec.METHODS)
def test_gradients_lower(name, platform):
    s = nm.parse({"sdgp": "sdgp(over='group')", "mdgf": "mdgf(2,4,exponential(1e-4))", "vnm": "vnm(2)"}.get(name, name))
    x, w = jax.ShapeDtypeStruct((2, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)

    def loss(x, w, step):
        ctx = nm.Ctx(key=0, step=step, state=s.init(w, contract=0, out=1, ctx=nm.Ctx(0)))
        return nm.einsum("bti,io->bto", x, w, sparsity=s, ctx=ctx).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1))).trace(x, w, jnp.int32(0)).lower(lowering_platforms=(platform,))
    assert "stablehlo.dot_general" in lowered.as_text()
