"""The validation split: a share of the training data that no step of a run sees. It is the same for every seed."""

import numpy as np

from experiments.errors import Mistake

FEW = 100  # images: a split of fewer is a rough measure


def note(count: int) -> list[str]:
    """Return a note if the validation split has few images.

    >>> print(*note(12))
    the validation split has 12 images: one image changes the accuracy by 8.33 points. config.data.validation sets it
    >>> note(0), note(100)  # without a validation split, the test split is used
    ([], [])
    """
    if not 0 < count < FEW:
        return []
    images = "1 image" if count == 1 else f"{count} images"
    rest = f"one image changes the accuracy by {100 / count:.3g} points. config.data.validation sets it"
    return [f"the validation split has {images}: {rest}"]


def positions(labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the training examples and of the validation examples, each rising.

    The validation examples are evenly spaced in the order of their labels, so each class gives its share.

    Args:
      labels: The label of each example.
      share: The share of the examples that are for validation, at least 0 and below 1.

    >>> positions(np.array([0, 1, 0, 1, 0, 1, 0, 1]), 0.25)
    (array([0, 1, 2, 3, 6, 7]), array([4, 5]))
    """
    count = _count(len(labels), share)
    places = (2 * np.arange(count) + 1) * len(labels) // (2 * max(count, 1))
    chosen = np.argsort(labels, kind="stable")[places]
    return np.setdiff1d(np.arange(len(labels)), chosen), np.sort(chosen)


def tokens(text: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the training text and the validation text: the last share of the tokens is for validation.

    >>> tokens(np.arange(10), 0.2)
    (array([0, 1, 2, 3, 4, 5, 6, 7]), array([8, 9]))
    """
    at = len(text) - _count(len(text), share)
    return text[:at], text[at:]


def _count(size: int, share: float) -> int:
    """Return the number of validation examples: 0 for a share of 0, else at least 1."""
    if not 0 <= share < 1:
        raise Mistake(f"config.data.validation={share} is not a share: write 0 or a share below 1, such as 0.1.")
    count = max(1, round(size * share)) if share else 0
    if count >= size:
        raise Mistake(f"config.data.validation={share} leaves no training data: there are {size} examples.")
    return count
