"""The sections of a run's errors: what it confuses, and the examples with the greatest loss."""

import math
from typing import Any

import numpy as np

from experiments.report.pictures import image_uri
from experiments.report.runs import Run
from experiments.report.words import number, percent, safe

TABLE = 20  # classes: with more, the confusions are a list
PAIRS = 12  # of classes, in the list
LEVELS = 8  # of shading


def class_name(run: Run, i: int) -> str:
    """Return the name of a class."""
    classes = run.pictures.get("classes", np.array([]))
    return str(classes[i]) if 0 <= i < len(classes) else f"class {i}"


# ---- images ----


def confusion(run: Run) -> str:
    """Return the confusion matrix of the test split; of many classes only the pairs that are confused most."""
    counts = run.pictures.get("confusion")
    if counts is None or counts.ndim != 2 or not counts.sum():
        return ""
    total, wrong = int(counts.sum()), int(counts.sum() - np.trace(counts))
    unit = safe(run.about.get("unit") or "examples")
    lead = f"<p>{wrong:,} of {total:,} test {unit} are classified wrongly ({percent(wrong / total)}).</p>"
    matrix = _matrix(run, counts) if len(counts) <= TABLE else ""
    return lead + matrix + _pairs(run, counts, hidden=bool(matrix))


def _matrix(run: Run, counts: np.ndarray) -> str:
    names = [safe(class_name(run, i)) for i in range(len(counts))]
    top = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = ""
    for i, (name, row) in enumerate(zip(names, counts.tolist(), strict=True)):
        of = max(sum(row), 1)
        cells = ""
        for j, count in enumerate(row):
            kind, share = ("right" if i == j else "wrong"), count / of
            shade = f' class="{kind}" style="--share:{100 * share:.3g}%"' if count else ""
            cells += f"<td{shade}>{count or ''}</td>"
        rows += f'<tr><th scope="row">{name}</th>{cells}<td class="sum">{percent(row[i] / of)}</td></tr>'
    table = (
        f'<table class="values confusion"><thead><tr><th scope="col">is \\ taken for</th>{top}'
        f'<th scope="col">right</th></tr></thead><tbody>{rows}</tbody></table>'
    )
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Confusion matrix">{table}</div>'


def _pairs(run: Run, counts: np.ndarray, hidden: bool) -> str:
    """Return the pairs of classes that are confused most, as a list."""
    off = counts * (1 - np.eye(len(counts), dtype=counts.dtype))
    order = np.argsort(-off, axis=None, kind="stable")[:PAIRS]
    places = [(i, j) for i, j in zip(*np.unravel_index(order, off.shape), strict=True) if off[i, j]]
    if not places:
        return ""
    items = ""
    for i, j in places:
        words = f"{off[i, j]:,} of {counts[i].sum():,}"
        items += f"<li><b>{safe(class_name(run, i))}</b> taken for <b>{safe(class_name(run, j))}</b>: {words}</li>"
    listed = f'<ol class="pairs">{items}</ol>'
    if hidden:
        return f"<details><summary>The pairs that are confused most</summary>{listed}</details>"
    return f"<h3>The pairs that are confused most</h3>{listed}"


def images(run: Run) -> str:
    """Return the test images with the greatest loss."""
    keys = ("images", "labels", "predictions", "confidence", "loss")
    arrays = [run.pictures.get(f"hardest_{key}") for key in keys]
    if any(array is None or not len(array) for array in arrays):
        return ""
    cards = ""
    for image, label, predicted, confidence, loss in zip(*arrays, strict=False):
        names = class_name(run, int(label)), class_name(run, int(predicted))
        cards += card(*names, float(confidence), image, f"loss {number(float(loss))}")
    lead = "The test images with the greatest loss, the greatest first, with the confidence of each answer."
    return f'<p>{lead}</p><div class="samples">{cards}</div>'


def card(truth: str, predicted: str, confidence: float, image: np.ndarray, more: str = "") -> str:
    """Return an image with its class, the model's prediction and its confidence."""
    right = truth == predicted
    if right:
        verdict, alt = f"✓ {safe(predicted)}", f"{truth}, recognised"
    else:
        verdict = f"✕ {safe(predicted)}<small>is {safe(truth)}</small>"
        alt = f"{truth}, taken for {predicted}"
    sure = max(0.0, min(1.0, confidence)) if np.isfinite(confidence) else 0.0
    return (
        f'<figure class="sample {"right" if right else "wrong"}"><img src="{image_uri(image)}" alt="{safe(alt)}">'
        f'<figcaption><b>{verdict}</b><span class="sure" style="--sure:{sure:.3f}">{percent(confidence)}</span>'
        f"{f'<small>{safe(more)}</small>' if more else ''}</figcaption></figure>"
    )


# ---- text ----


def windows(run: Run) -> str:
    """Return the windows or texts of the test split with the greatest loss. Shades show the losses of tokens."""
    found = [window for window in run.text.get("hardest") or [] if isinstance(window, dict) and "pieces" in window]
    losses = [loss for window in found for _, loss in window["pieces"] if loss is not None and math.isfinite(loss)]
    if not found:
        return ""
    limit = max(float(np.quantile(losses, 0.98)) if losses else 0.0, 0.0) or 1.0
    key = "".join(f'<span class="loss{level}"> </span>' for level in range(LEVELS + 1))
    lead = (
        "<p>The windows of the test split with the greatest mean loss. The stronger the shade of a token, the greater "
        "its loss: "
        f'<span class="scale" aria-hidden="true">{key}</span> 0 to {number(limit)} nats and more.</p>'
        if losses
        else "<p>The texts of the test split with the greatest loss. Brackets have the prediction and the class.</p>"
    )
    unit = "nats per token" if losses else "nats"
    cards = ""
    for window in found:
        body = "".join(_shaded(window["pieces"], limit))
        cards += f"<blockquote><small>{number(float(window['loss']))} {unit}</small>{body}</blockquote>"
    return f'{lead}<div class="texts hardest">{cards}</div>'


def _shaded(pieces: list[Any], limit: float) -> list[str]:
    """Return pieces of text with their shading. Neighbours of one shade are one element."""
    joined: list[tuple[int, str]] = []
    for text, loss in pieces:
        share = 0.0 if loss is None else min(max(float(loss), 0.0) / limit, 1.0)
        level = round(LEVELS * share) if math.isfinite(share) else LEVELS  # NaN
        if joined and joined[-1][0] == level:
            joined[-1] = level, joined[-1][1] + str(text)
        else:
            joined.append((level, str(text)))
    return [f'<span class="loss{level}">{safe(text)}</span>' if level else safe(text) for level, text in joined]
