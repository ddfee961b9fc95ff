"""Files of torch, which are pickles. Only torch's restricted loader opens them, and only if torch is installed."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from nmjax.checkpoints.tensors import CheckpointError, Tensor, Tensors

SUFFIXES = (".bin", ".pth", ".pt")


def read(path: Path) -> Tensors:
    """Open a file. It is refused if torch is missing, or if it has other things than tensors."""
    path.open("rb").close()
    try:
        import torch  # pyrefly: ignore[missing-import]
    except ModuleNotFoundError:
        raise CheckpointError(
            f"{path}: this is a pickle, which only torch's restricted loader may open. pip install torch, or "
            "save the tensors as safetensors."
        ) from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path}: torch's restricted loader refuses the file: {reason}") from error
    if not isinstance(found, dict):
        found = {"the file": found}
    others = [f"{k}: {type(v).__name__}" for k, v in found.items() if not isinstance(v, torch.Tensor)]
    if others:
        raise CheckpointError(f"{path}: the file must hold only tensors, but has {', '.join(others[:5])}.")
    arrays = {str(name): _array(torch, value.detach().contiguous()) for name, value in found.items()}
    tensors = {name: Tensor(v.shape, v.dtype, lambda v=v: v) for name, v in arrays.items()}
    return Tensors([(path, tensors, {"format": "pt"})])


def _array(torch: Any, value: Any) -> np.ndarray:
    narrow = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}  # NumPy lacks them
    name = str(value.dtype).removeprefix("torch.")
    array = value.view(narrow[name]).numpy().view(getattr(jnp, name)) if name in narrow else value.numpy()
    array.flags.writeable = False
    return array
