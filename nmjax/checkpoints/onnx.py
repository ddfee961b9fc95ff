"""Models as ONNX files, through the package jax2onnx."""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nmjax.checkpoints.drafts import replacing
from nmjax.checkpoints.quantized import product
from nmjax.checkpoints.tensors import CheckpointError
from nmjax.nnx.variables import SparsityState


def write_onnx(
    path: str | os.PathLike[str], model: nnx.Module, *inputs: Any, names: Sequence[str] | None = None,
    weights: Iterable[tuple[np.ndarray, np.ndarray]] = (),
) -> int:  # fmt: skip
    """Write a model as an ONNX file. Its weights keep their zeros.

    It needs the package jax2onnx, which the extra ``onnx`` brings.

    Args:
      path: The file, which is replaced if it exists.
      model: The model. If it was sparse, pass ``nm.nnx.harden(model)``.
      *inputs: The arguments of a call: arrays, or their shapes as `jax.ShapeDtypeStruct`. Axes of
        `jax.export.symbolic_shape` are free in the file. An input of dtype int64 is so in the file, which casts it to
        the int32 that the model takes.
      names: The names of the inputs in the file.
      weights: Matrices of 8 bits [outputs, inputs] and their scales [outputs, 1]. Where the model has their product,
        the file has them and DequantizeLinear.

    Returns:
      The number of weights that have 8 bits in the file.

    Raises:
      CheckpointError: The model is not hardened, or it prunes activations; or jax2onnx is missing, or cannot convert
        the model.
      OSError: The file cannot be written.

    >>> import jax, jax.numpy as jnp
    >>> def convert(model):
    ...     write_onnx("model.onnx", model, jax.ShapeDtypeStruct((8, 16), jnp.float32), names=["x"])
    """
    sparse = {
        "/".join(map(str, place)): node for place, node in nnx.iter_graph(model) if isinstance(node, SparsityState)
    }
    others = [place for place, s in sparse.items() if s.sparsity != s.sparsity.only(y_x=s.sparsity.y_x)]
    if others:  # jax2onnx replaces each nnx.Linear as a whole, so it would export the dense weights
        raise CheckpointError(f"the model is sparse: it prunes at {others[0]}. Export nm.nnx.harden(model).")
    if sparse:
        layer = next(iter(sparse.values())).name
        raise CheckpointError(f"{layer}: this layer prunes its input, and the export would lose that.")
    try:
        import onnx  # pyrefly: ignore[missing-import]
        from jax2onnx import to_onnx  # pyrefly: ignore[missing-import]
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"the package {error.name} is missing. Run pip install '.[onnx]' in the checkout of nmjax."
        ) from None
    path = Path(path)
    names = [f"in_{i}" for i in range(len(inputs))] if names is None else names
    wide = [np.dtype(one.dtype) == np.int64 for one in inputs]  # jax2onnx would make them int32
    given = [jax.ShapeDtypeStruct(v.shape, jnp.int32) if w else v for v, w in zip(inputs, wide, strict=True)]
    inner = [f"{name}_int32" if w else name for name, w in zip(names, wide, strict=True)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints each reshape that it tries
            made = to_onnx(model, given, return_mode="proto", input_names=inner)
    except Exception as error:  # it raises errors of many kinds
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        free = dict.fromkeys(str(n) for one in given for n in one.shape if not isinstance(n, int))
        if "ClosedJaxpr" in reason:  # its own code for an activation function reads a name that JAX 0.12 removed
            free.clear()
            reason = f"it cannot convert SiLU or ReLU with jax {jax.__version__} ({reason})"
        hint = f" The axes {', '.join(free)} are free: fixed ones, by --batch and --length, may help." if free else ""
        raise CheckpointError(f"{path}: jax2onnx cannot convert the model: {reason}.{hint}") from error
    for name, one, w in zip(names, made.graph.input, wide, strict=True):
        if w:
            made.graph.node.insert(0, onnx.helper.make_node("Cast", [name], [one.name], to=onnx.TensorProto.INT32))
            one.name, one.type.tensor_type.elem_type = name, onnx.TensorProto.INT64
    count = _quantize(made.graph, weights, onnx)
    size = made.ByteSize()
    if size >= 1 << 31:
        raise CheckpointError(f"{path}: the model has {size:,} bytes, and an ONNX file has less than 2 GiB.")
    with replacing(path) as file:
        file.write(made.SerializeToString())
    return count


def _quantize(graph: Any, weights: Iterable[tuple[np.ndarray, np.ndarray]], onnx: Any) -> int:
    """Put matrices of 8 bits and DequantizeLinear in the place of constants, and return their number."""
    digest = lambda v: (v.shape, hashlib.sha256(np.ascontiguousarray(v).tobytes()).digest())
    known: dict[Any, tuple[int, np.ndarray, np.ndarray]] = {}
    for values, scales in weights:
        whole, one = product(values, scales), np.broadcast_to(np.float32(scales), (len(values), 1)).ravel()
        known |= {digest(whole): (0, values, one), digest(whole.T): (1, values.T, one)}
    count = 0
    for constant in list(graph.initializer) if known else ():
        found = known.get(digest(onnx.numpy_helper.to_array(constant)))
        if found is not None:
            axis, values, scales = found
            parts = {f"{constant.name}_8_bits": np.ascontiguousarray(values), f"{constant.name}_scale": scales}
            graph.initializer.remove(constant)
            graph.initializer.extend(onnx.numpy_helper.from_array(v, name) for name, v in parts.items())
            graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", [*parts], [constant.name], axis=axis))
            count += 1
    return count
