"""A decoder layer of MaxText, in a small size, without a changed line."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.thirdparty.training import goes_sparse

maxtext = pytest.importorskip("maxtext", reason="maxtext is not installed: make test-thirdparty")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the package

SETTINGS = (
    "run_name=test", "enable_checkpointing=False", "base_emb_dim=32", "base_mlp_dim=64", "base_num_query_heads=4",
    "base_num_kv_heads=2", "head_dim=8", "base_num_decoder_layers=2", "vocab_size=64", "max_target_length=8",
    "per_device_batch_size=2", "decoder_block=llama2", "attention=dot_product", "dtype=float32",
    "weight_dtype=float32", "scan_layers=False", "log_config=False", "skip_jax_distributed_system=True",
    "hardware=cpu",
)  # fmt: skip


def test_a_decoder_layer_of_maxtext():
    from maxtext.configs import pyconfig
    from maxtext.models.llama2 import LlamaDecoderLayer

    config_file = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(config_file), *SETTINGS])
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes))
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    make = lambda: LlamaDecoderLayer(config=config, mesh=mesh, model_mode="train", rngs=nnx.Rngs(0))
    x, positions = jax.random.normal(jax.random.key(0), (2, 8, 32)), jnp.tile(jnp.arange(8), (2, 1))
    segments = jnp.ones((2, 8), jnp.int32)
    with mesh:
        goes_sparse(make, lambda layer: layer(x, segments, positions, True, "train")[0])
