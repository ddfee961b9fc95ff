"""Models of Tunix, in small sizes, without a changed line."""

import importlib
import inspect

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.thirdparty.training import goes_sparse, tokens

pytest.importorskip("tunix", reason="google-tunix is not installed: make test-thirdparty")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages

SIZES = {
    "num_layers": 2, "vocab_size": 64, "num_embed": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4,
    "head_dim": 8, "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6, "final_logit_softcap": None,
    "use_post_attn_norm": False, "use_post_ffw_norm": False, "sliding_window_size": 4, "param_dtype": jnp.float32,
    "global_key_size": 8,
}  # fmt: skip


def model_of(name, kind, **more):
    module = importlib.import_module(f"tunix.models.{name}.model")
    fields = inspect.signature(module.ModelConfig).parameters
    if "attention_types" in fields:
        more["attention_types"] = (module.AttentionType.GLOBAL,) * 2
    config = module.ModelConfig(**{key: value for key, value in {**SIZES, **more}.items() if key in fields})
    return getattr(module, kind)(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("name", "kind", "stays_dense"),
    [
        ("qwen3", "Qwen3", ["embedder/input_embedding"]),
        ("qwen2", "Qwen2", ["embedder/input_embedding"]),
        ("llama3", "Llama3", ["embedder/input_embedding"]),
        ("gemma", "Gemma", ["embedder/input_embedding"]),  # it is also the head
        ("gemma3", "Gemma3", ["embedder/input_embedding"]),
        ("gemma4", "Gemma4", ["embedder/input_embedding"]),
    ],
)
def test_a_model_of_tunix(name, kind, stays_dense):
    ids, positions, mask = tokens()
    call = lambda model: model(ids, positions, None, mask)[0]
    goes_sparse(lambda: model_of(name, kind), call, stays_dense=stays_dense)
