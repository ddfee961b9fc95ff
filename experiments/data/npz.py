"""Your own images in an ``.npz`` file: arrays x and y, and x_test and y_test if the file has a test split."""

from pathlib import Path

import numpy as np

from experiments.data import reading, validation
from experiments.errors import Mistake

_NAMES = ("x", "y", "x_train", "y_train", "x_test", "y_test")
_ASKED = "An image set has x (images) and y (labels), or x_train and y_train. It may also have x_test and y_test."


def read(path: Path):
    """Return (images, labels) of the training set and of the test set, and a note on how they were made.

    Images are uint8, whole numbers from 0 to 255, or floats from 0 to 1, which become 8 bits. Their shape is
    (n, height, width) or (n, height, width, channels). Without x_test, an evenly spaced tenth of the images is the test
    split.

    Raises:
      Mistake: The file cannot be read, or it is not clear what its arrays mean.
    """
    found = reading.arrays(path, (), _NAMES)
    own = [name for name in ("x", "x_train") if name in found]
    if len(own) != 1 or own[0].replace("x", "y") not in found or ("x_test" in found) != ("y_test" in found):
        has = f"holds {', '.join(found)}" if found else "has no arrays x and y"
        raise Mistake(f"{path} {has}. {_ASKED}")
    names = (own[0], "x_test") if "x_test" in found else (own[0],)
    images, notes = _pixels(path, {name: found[name] for name in names})
    labels = [_labels(path, name.replace("x", "y"), found) for name in names]
    if len(names) == 1:
        kept, chosen = validation.positions(labels[0], 0.1)
        images, labels = [images[0][kept], images[0][chosen]], [labels[0][kept], labels[0][chosen]]
        notes.append(f"{path.name} has no x_test: an evenly spaced tenth of its images is the test split")
    low, high = min(y.min() for y in labels), max(y.max() for y in labels)
    if low < 0 or np.unique(labels[0]).size != high + 1:
        raise Mistake(
            f"{path}: its labels are from {low} to {high}. Number the classes from 0, without gaps; each class needs "
            "images to train on."
        )
    train, test = zip(images, (y.astype(np.int32) for y in labels), strict=True)
    return train, test, "; ".join(notes)


def _labels(path: Path, name: str, found: dict[str, np.ndarray]) -> np.ndarray:
    y, count = found[name], len(found[name.replace("y", "x")])
    if y.shape not in ((count,), (count, 1)) or y.dtype.kind not in "iu":
        raise Mistake(f"{path}: {name} is {y.dtype} {y.shape}, not one whole number for each of {count:,} images.")
    return y.reshape(-1)


def _pixels(path: Path, splits: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
    """Return images as uint8 (n, height, width, channels), and notes on what was changed."""
    for name, x in splits.items():
        if x.ndim not in (3, 4) or 0 in x.shape:
            raise Mistake(
                f"{path}: {name} is {x.shape}, not images (n, height, width) or (n, height, width, channels)."
            )
        if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
            raise Mistake(f"{path}: {name} is {x.shape}, with channels first. Save {name}.transpose(0, 2, 3, 1).")
    every = [x if x.ndim == 4 else x[..., None] for x in splits.values()]
    if any(x.shape[1:] != every[0].shape[1:] for x in every):
        raise Mistake(f"{path}: its images are of two shapes, {every[0].shape[1:]} and {every[1].shape[1:]}.")
    if all(x.dtype == np.uint8 for x in every):
        return every, []
    if any(x.dtype.kind not in "iuf" for x in every):
        raise Mistake(f"{path}: its images are {every[0].dtype}, not uint8 or other numbers.")
    low, high = min(x.min() for x in every), max(x.max() for x in every)  # NaN if one of them is
    floats = all(x.dtype.kind == "f" for x in every)
    if floats and low >= 0 and high <= 1:
        return [np.rint(x * np.float32(255)).astype(np.uint8) for x in every], ["numbers from 0 to 1 became 8 bits"]
    if low >= 0 and 1 < high <= 255 and all((x == np.rint(x)).all() for x in every):
        return [x.astype(np.uint8) for x in every], []
    raise Mistake(
        f"{path}: its images are {every[0].dtype} from {low:g} to {high:g}, and it is not clear which value is black "
        "and which is white. Save uint8, whole numbers from 0 to 255, or floats from 0 to 1."
    )
