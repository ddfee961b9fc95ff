"""MaxText: its `DenseGeneral`, and the `Einsum` of its vision models. Tried on maxtext 0.2.5."""

from nmjax.nnx.registry import register_layer

# It contracts the last axes of its input.
register_layer(
    "maxtext.layers.linears:DenseGeneral",
    weight="kernel",
    input=lambda layer: (1, -1, *layer.in_features_shape),
)
# The call says which product it is.
register_layer("maxtext.models.gemma3:Einsum", weight="w")
