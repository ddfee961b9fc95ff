"""Files of torch, which are pickles. Only torch's restricted loader opens them, and only if torch is installed."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from nmjax.checkpoints.tensors import CheckpointError, Tensors

SUFFIXES = (".bin", ".pth", ".pt")


class TorchTensors(Tensors):
    """The tensors of a file of torch, by name."""

    def __init__(self, path: Path) -> None:
        """Open a file.

        Args:
          path: The file.

        Raises:
          CheckpointError: torch is missing, its restricted loader refuses the file, or the file has other things than
            tensors.
          OSError: The file cannot be read.
        """
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
        super().__init__([])
        self._arrays = {str(name): self._array(torch, value) for name, value in found.items()}
        self.texts[path], self.files[path] = {"format": "pt"}, tuple(self._arrays)

    def _array(self, torch: Any, value: Any) -> np.ndarray:
        value = value.detach().contiguous()
        others = {
            torch.bfloat16: jnp.bfloat16,
            torch.float8_e4m3fn: jnp.float8_e4m3fn,
            torch.float8_e5m2: jnp.float8_e5m2,
        }
        known = others.get(value.dtype)
        bits = torch.int16 if value.dtype == torch.bfloat16 else torch.uint8
        array = value.numpy() if known is None else value.view(bits).numpy().view(known)
        array.flags.writeable = False
        return array

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Any:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._arrays[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a tensor."""
        return self._arrays[name].dtype
