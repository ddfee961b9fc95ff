"""What a report shows of a model: a corner of a mask, the classes that it confuses, and its hardest examples."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

IMAGES, WINDOWS = 24, 4  # how many are kept
CORNER = 64  # rows and columns of a mask


def corner(masks: Any, patterns: dict[str, Any]) -> dict[str, Any]:
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
            "mask": mask[:CORNER, :CORNER],
            "mask_name": f"{path}, {pattern}",
            "mask_axis": axis,
            "mask_m": pattern.m,
        }
    return {}


def greatest(loss: jax.Array, values: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """Return the values of the examples with the greatest loss, and their "loss".

    Args:
      loss: The loss of each example of a batch; -inf for one that does not count.
      values: Arrays with a row for each example.
      count: The number of examples that are kept, at most.
    """
    top, at = jax.lax.top_k(loss, min(count, len(loss)))
    return {"loss": top} | {name: value[at] for name, value in values.items()}


def merged(parts: list[dict[str, np.ndarray]], count: int) -> dict[str, np.ndarray]:
    """Return the examples with the greatest loss among those of several batches, the greatest first."""
    together = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(-together["loss"], kind="stable")[:count]
    order = order[together["loss"][order] > -np.inf]
    return {name: value[order] for name, value in together.items()}


# ---- examples with labels. Fillers have label -1 ----


def sums(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Return sums over a batch: the number of examples, their loss, and how many are classified rightly."""
    counts = labels >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    of = {"count": counts, "loss": jnp.where(counts, loss, 0), "accuracy": counts & (jnp.argmax(logits, -1) == labels)}
    return {name: jnp.sum(value, dtype=jnp.float32) for name, value in of.items()}


def of_labels(logits: jax.Array, y: jax.Array, values: dict[str, jax.Array], count: int) -> tuple[dict, dict]:
    """Return labels, predictions, confidences and losses of a batch; and those of its hardest examples, with values."""
    logits = logits.astype(jnp.float32)
    loss, shares = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 0)), jax.nn.softmax(logits)
    every = {"labels": y, "predictions": jnp.argmax(shares, -1), "confidence": jnp.max(shares, -1)}
    return every | {"loss": loss}, greatest(jnp.where(y >= 0, loss, -jnp.inf), values | every, count)


def errors(looks: Iterable[tuple[dict, dict]], classes: int, count: int) -> tuple[dict, dict]:
    """Return what is known of every example of the test split; and its confusion, and arrays of the hardest examples.

    Args:
      looks: What `of_labels` returns of every batch.
      classes: The number of classes.
      count: The number of hardest examples.
    """
    confusion, every, hardest = np.zeros((classes, classes), np.int64), [], []
    for of_all, of_hardest in map(jax.device_get, looks):
        counts = of_all["labels"] >= 0
        of_all = {name: value[counts] for name, value in of_all.items()}
        np.add.at(confusion, (of_all["labels"], of_all["predictions"]), 1)
        every.append(of_all)
        hardest = [merged([*hardest, of_hardest], count)]
    if not every:
        return {}, {}
    together = {name: np.concatenate([part[name] for part in every]) for name in every[0]}
    return together, {"confusion": confusion} | hardest[0]


# ---- text ----


def of_windows(logits: jax.Array, windows: jax.Array, counts: jax.Array) -> dict[str, jax.Array]:
    """Return the hardest windows of a batch: their tokens, and the loss of every token after the first."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    mean = jnp.where(counts, losses.mean(-1), -jnp.inf)
    return greatest(mean, {"tokens": windows, "losses": losses.astype(jnp.float32)}, WINDOWS)


def windows(looks: Iterable[dict], decode: Callable[[np.ndarray], str]) -> list[dict[str, Any]]:
    """Return the hardest windows of a text for text.json: the mean loss, and pieces of text with their losses.

    Args:
      looks: What `of_windows` returns of every batch.
      decode: A function from tokens to their text.
    """
    hardest: list[dict] = []
    for found in map(jax.device_get, looks):
        hardest = [merged([*hardest, found], WINDOWS)]
    if not hardest:
        return []
    found = hardest[0]
    rows = zip(found["loss"], found["tokens"], found["losses"], strict=True)
    return [{"loss": float(loss), "pieces": pieces(tokens, losses, decode)} for loss, tokens, losses in rows]


def pieces(
    tokens: np.ndarray, losses: np.ndarray, decode: Callable[[np.ndarray], str]
) -> list[tuple[str, float | None]]:
    """Return the text of tokens piece by piece, each with the mean loss of its tokens.

    A piece is one token, or several that form one character together. The first token has no loss, because nothing
    predicts it.
    """
    found: list[tuple[str, float | None]] = [(decode(tokens[:1]), None)]
    before, start = 0, 1  # the piece before this one begins at `before`: some decoders drop the space at the start
    for end in range(2, len(tokens) + 1):
        text = decode(tokens[before:end])
        if text.endswith("\ufffd") and end - start < 4 and end < len(tokens):
            continue  # a character that is not complete
        head = decode(tokens[before:start])
        piece = text.removeprefix(head) if text.startswith(head) else decode(tokens[start:end])
        found.append((piece, float(np.mean(losses[start - 1 : end - 1]))))
        before, start = start, end
    return found
