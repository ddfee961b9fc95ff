"""Models of Bonsai whose layers are not Flax's. It is not on PyPI: the tests run where its sources are on the path."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.thirdparty.training import goes_sparse

modeling = pytest.importorskip("bonsai.models.qwen3_vl.modeling", reason="the sources of bonsai are not on the path")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the package


class Block(nnx.Module):
    """Two layers of Qwen 3 VL, which take a sharding with every call."""

    def __init__(self):
        self.up = modeling.ShardedLinear(16, 32, rngs=nnx.Rngs(0))
        self.down = modeling.ShardedLinear(32, 16, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x, out_sharding=None)), out_sharding=None)


def test_layers_of_bonsai():
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    goes_sparse(Block, lambda model: model(x), inputs=(jax.ShapeDtypeStruct(x.shape, jnp.float32),))
