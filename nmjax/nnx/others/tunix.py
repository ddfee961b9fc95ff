"""Tunix: the `Einsum` of each of its models. Tried on google-tunix 0.1.7.

Its embedding is a table of rows, and also the head where the two are tied: such a head stays dense.
"""

from typing import Any

from nmjax.nnx.registry import register_layer

MODELS = ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3")


def _input(layer: Any) -> tuple[int, ...]:
    """Return the shape of an input of a layer that has its equation in ``einsum_str`` and its weight's in ``shape``."""
    inputs, weight = layer.einsum_str.replace(" ", "").partition("->")[0].split(",")
    sizes = dict(zip(weight, layer.shape, strict=True))
    tokens = [label for label in inputs if label not in sizes][-1:]
    return tuple(sizes.get(label, -1 if label in tokens else 1) for label in inputs)


for _model in MODELS:
    register_layer(f"tunix.models.{_model}.model:Einsum", weight="w", input=_input)
