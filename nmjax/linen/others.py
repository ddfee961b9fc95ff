"""Layers of other libraries, by name, so that no library is imported."""

OTHERS: dict[type | str, tuple[str, ...]] = {
    # DeepMind's gemma: tried on 4.0.1. A layer that sets ``w_scale`` multiplies by another array: leave it dense.
    "gemma.gm.nn._layers:Einsum": ("{weight_name}",),
    "gemma.gm.nn.gemma3n._layers:Einsum": ("{weight_name}",),
    "gemma.gm.nn.gemma4._layers:Einsum": ("{weight_name}",),
    "gemma.gm.nn.gemma4._layers:ClippedEinsum": ("{weight_name}",),
}
"""The names of the weights, as in `nmjax.linen.register_layer`, by "package.module:Class"."""
