"""Models as ONNX files, through the package jax2onnx."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from nmjax.checkpoints.drafts import replacing
from nmjax.checkpoints.tensors import CheckpointError
from nmjax.nnx.variables import SparsityState


def write_onnx(
    path: str | os.PathLike[str], model: nnx.Module, *inputs: Any, names: Sequence[str] | None = None
) -> None:  # fmt: skip
    """Write a model as an ONNX file. Its weights keep their zeros.

    It needs the package jax2onnx, which the extra ``onnx`` brings.

    Args:
      path: The file, which is replaced if it exists.
      model: The model. If it was sparse, pass ``nm.nnx.harden(model)``.
      *inputs: The arguments of a call: arrays, or their shapes as `jax.ShapeDtypeStruct`.
      names: The names of the inputs in the file.

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
        from jax2onnx import to_onnx  # pyrefly: ignore[missing-import]
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"the package {error.name} is missing. Run pip install '.[onnx]' in the checkout of nmjax."
        ) from None
    path = Path(path)
    try:
        made = to_onnx(model, list(inputs), return_mode="proto", input_names=names)
    except Exception as error:  # it raises errors of many kinds
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path}: jax2onnx cannot convert the model: {reason}") from error
    size = made.ByteSize()
    if size >= 1 << 31:
        raise CheckpointError(f"{path}: the model has {size:,} bytes, and an ONNX file has less than 2 GiB.")
    with replacing(path) as file:
        file.write(made.SerializeToString())
