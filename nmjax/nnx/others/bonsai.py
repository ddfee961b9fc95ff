"""Bonsai: the layers that are not Flax's. Tried on its sources of 27 March 2026, commit 3628425.

Their calls take more than one array, or a sharding. So `sparsify` needs examples of the model's inputs.
"""

from nmjax.nnx.registry import register_layer

register_layer("bonsai.models.llada.modeling:ShardedLinear", weight="kernel")
register_layer("bonsai.models.qwen3_vl.modeling:ShardedLinear", weight="kernel")
register_layer("bonsai.models.gemma3.modeling:Gemma3MultiModalProjector", weight="mm_input_projection_weight")
