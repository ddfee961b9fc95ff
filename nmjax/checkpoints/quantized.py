"""Weights of 8 bits with a scale for each output, in the format compressed-tensors.

A matrix ``X.weight`` [outputs, inputs] is int8 or float8_e4m3fn, ``X.weight_scale`` [outputs, 1] is its scale, and the
weight is their product. There is no zero point: a zero stays zero, and an n:m weight n:m. The field
``quantization_config`` of ``config.json`` says so. https://github.com/vllm-project/compressed-tensors has the format.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from nmjax.checkpoints.tensors import CheckpointError, Tensor, Tensors

KINDS: dict[str, tuple[Any, float, str]] = {"int8": (np.int8, 127, "int"), "fp8": (jnp.float8_e4m3fn, 448, "float")}
"""The dtype, its greatest value and the name of its type in a config, by kind."""


def quantized(w: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix [outputs, inputs] in 8 bits, and its scales in float32, [outputs, 1].

    An output's scale is its largest magnitude divided by the greatest value of the dtype; 1 if all are zero.

    >>> values, scales = quantized(np.array([[0.0, -2.54, 1.0], [0.0, 0.0, 0.0]]), "int8")
    >>> values.tolist(), scales.round(3).tolist()
    ([[0, -127, 50], [0, 0, 0]], [[0.019999999552965164], [1.0]])
    """
    dtype, top, _ = KINDS[kind]
    w = np.asarray(w, np.float64)
    most = np.abs(w).max(axis=1, keepdims=True)
    scales = np.where(most > 0, np.maximum(most / top, np.finfo(np.float32).tiny), 1).astype(np.float32)
    values = w / scales
    return (np.rint(values) if kind == "int8" else values).astype(dtype), scales


def described(kind: str, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint whose linear layers, but for the ignored, have 8 bits.

    Programs quantize the inputs of these layers too: each token when it comes, since the files have no scale for them.
    """
    values = {"num_bits": 8, "type": KINDS[kind][2], "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**values, "strategy": "channel", "dynamic": False},
        "input_activations": {**values, "strategy": "token", "dynamic": True}, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": f"{KINDS[kind][2]}-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": list(ignored),
    }  # fmt: skip


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the kind of the weights that a config describes, by a scale for each output or one for all; else None."""
    about = config.get("quantization_config")
    if not isinstance(about, dict) or about.get("quant_method") != "compressed-tensors":
        return None
    if about.get("transform_config") or about.get("sparsity_config"):
        return None
    groups = about.get("config_groups")
    weights = (
        [isinstance(one, dict) and one.get("weights") for one in groups.values()] if isinstance(groups, dict) else []
    )
    known = lambda one: isinstance(one, dict) and one.get("strategy") in ("channel", "tensor") and one.get("symmetric")
    if not weights or not all(map(known, weights)):
        return None
    return next((kind for kind, (*_, of) in KINDS.items() if about.get("format") == f"{of}-quantized"), None)


def scales_of(config: Mapping[str, Any], tensors: Tensors) -> dict[str, str]:
    """Return the name of the scales of each weight of 8 bits.

    Raises:
      CheckpointError: A weight or its scales are missing, or are not what the config says.
    """
    kind = kind_of(config)
    if kind is None:
        return {}
    dtype = np.dtype(KINDS[kind][0])
    narrow = [np.dtype(one) for one, *_ in KINDS.values()]
    weights = [name for name in tensors if name.endswith("weight") and tensors.dtype(name) in narrow]
    weights += [name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")]
    found = {name: f"{name}_scale" for name in weights}
    for name, scale in found.items():
        if scale not in tensors:
            raise CheckpointError(f"{name} is {tensors.dtype(name)}, and its scales, {scale}, are missing.")
        if name not in tensors or tensors.dtype(name) != dtype or len(tensors.shape(name)) != 2:
            has = f"{tensors.dtype(name)} of shape {tensors.shape(name)}" if name in tensors else "missing"
            raise CheckpointError(f"{scale} scales {name}, which config.json calls a matrix of {dtype}. It is {has}.")
        shape, given = tensors.shape(scale), tensors.dtype(scale)
        if shape not in ((tensors.shape(name)[0], 1), (1,)) or not jnp.issubdtype(given, jnp.floating):
            raise CheckpointError(
                f"{scale} is {given} of shape {shape}. Scales of {name} are floating-point numbers of shape "
                f"{(tensors.shape(name)[0], 1)}, or one of shape (1,)."
            )
        values = np.asarray(tensors[scale], np.float32)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise CheckpointError(f"{scale} has values that are not finite and above 0.")
    return found


def product(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return a weight in float32, of its values in 8 bits and their scales."""
    return np.asarray(values, np.float32) * np.asarray(scales, np.float32)


def dequantized(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Return the tensors of a checkpoint with weights in float32 in the place of those of 8 bits and their scales."""
    pairs = scales_of(config, tensors)
    made = {
        name: Tensor(one.shape, np.dtype(np.float32), lambda name=name: product(tensors[name], tensors[pairs[name]]))
        if name in pairs
        else one
        for name, one in tensors.tensors.items()
        if name not in pairs.values()
    }
    return Tensors([(Path(), made, {})]) if pairs else tensors
