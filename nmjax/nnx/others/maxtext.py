"""MaxText: its `DenseGeneral`, and the `Einsum` of its vision models. Tried on maxtext 0.2.5."""

from nmjax.nnx.doors import door

# It contracts the last axes of its input.
door(
    "maxtext.layers.linears:DenseGeneral",
    weight="kernel",
    input=lambda layer: (1, -1, *layer.in_features_shape),
)
# The call says which product it is.
door("maxtext.models.gemma3:Einsum", weight="w")
