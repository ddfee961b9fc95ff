"""The corner of a mask that the report shows."""

from typing import Any

import numpy as np
from flax import nnx

SIZE = 64  # rows and columns


def of_masks(masks: Any, patterns: dict[str, Any]) -> dict[str, Any]:
    """Return a corner of the first mask that has a pattern n:m, or {} if none has.

    Args:
      masks: A tree of masks like the parameters.
      patterns: The pattern of each pruned weight by its path, or None.
    """
    by_path = {"/".join(map(str, path)): mask for path, mask in nnx.to_flat_state(masks)}
    for path, pattern in patterns.items():
        if pattern is None or by_path[path].ndim < 2:
            continue
        mask = np.asarray(by_path[path])
        axis = pattern.axes[-1] - mask.ndim + 2
        while mask.ndim > 2:  # the middle layer of a stack, the middle tap of a convolution
            mask = mask[len(mask) // 2]
        return {
            "mask": mask[:SIZE, :SIZE],
            "mask_name": f"{path}, {pattern}",
            "mask_axis": axis,
            "mask_m": pattern.m,
        }
    return {}
