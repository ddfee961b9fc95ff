"""Pictures and texts of a run for TensorBoard, made of what the run keeps for its report."""

from typing import Any

import numpy as np

from experiments.training.events import Events

SIDE, COLUMNS = 64, 8  # of the images in a sheet: the least height in pixels, and how many are in a row
CELL = 8  # pixels of a cell of a mask


def write(events: Events, step: int, pictures: dict[str, Any]) -> None:
    """Write the pictures and the texts of a run.

    Args:
      events: TensorBoard's file.
      step: The step that they belong to.
      pictures: Arrays and texts, as the task's `pictures` returns them.
    """
    for name, image in images(pictures).items():
        events.image(step, name, image)
    for name, text in texts(pictures).items():
        events.text(step, name, text)


def images(pictures: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return pictures uint8[H, W, C] by their names: a corner of a mask (white is kept), and the hardest images."""
    found = {}
    if "mask" in pictures:
        found["mask"] = np.kron(pictures["mask"], np.full((CELL, CELL), 255, np.uint8))[..., None]
    if len(pictures.get("hardest_images", ())):
        found["hardest"] = sheet(pictures["hardest_images"])
    return found


def sheet(pictures: np.ndarray) -> np.ndarray:
    """Return pictures uint8[k, H, W, C] side by side as one, enlarged if they are small, with a white edge."""
    factor = -(-SIDE // pictures.shape[1])
    large = np.repeat(np.repeat(pictures, factor, 1), factor, 2)
    large = np.pad(large, ((0, -len(large) % COLUMNS), (2, 2), (2, 2), (0, 0)), constant_values=255)
    rows = large.reshape(-1, COLUMNS, *large.shape[1:])
    return np.concatenate([np.concatenate(list(row), 1) for row in rows], 0)


def texts(pictures: dict[str, Any]) -> dict[str, str]:
    """Return texts in Markdown by their names: what a language model writes, and the hardest examples."""
    found = {}
    if pictures.get("samples") is not None and "prompt" in pictures:
        found["samples"] = "\n\n---\n\n".join(block(pictures["prompt"] + sample) for sample in pictures["samples"])
    if len(pictures.get("hardest_images", ())):
        found["hardest"] = _hardest_images(pictures)
    elif pictures.get("hardest"):
        windows = pictures["hardest"]
        shown = [(window["loss"], "".join(piece for piece, _ in window["pieces"])) for window in windows]
        of_tokens = any(loss is not None for window in windows for _, loss in window["pieces"])
        unit = "nats per token" if of_tokens else "nats"
        found["hardest"] = "\n\n".join(f"{loss:.3f} {unit}\n\n{block(text)}" for loss, text in shown)
    return found


def _hardest_images(pictures: dict[str, Any]) -> str:
    names = pictures["classes"]
    keys = ("labels", "predictions", "confidence", "loss")
    rows = zip(*(pictures[f"hardest_{key}"] for key in keys), strict=True)
    words = [
        block(f"{names[label]} taken for {names[taken]} ({sure:.1%}), loss {loss:.3f}")
        for label, taken, sure, loss in rows
    ]
    return "\n".join(words)


def block(text: str) -> str:
    """Return a text as a block of code in Markdown, which shows every character as it is."""
    plain = text.encode("utf-8", "replace").decode()  # a command line may hold what UTF-8 cannot encode
    return "\n".join(f"    {line}" for line in plain.splitlines())
