"""What a run's page shows beside curves: pictures, errors, texts, and where the time of a step goes."""

import base64
import io
import itertools
import math
from typing import Any

import numpy as np

from experiments.report.runs import Run
from experiments.report.words import milliseconds_of, number, percent

ROWS, COLUMNS = 32, 96  # of a mask: the cells stay visible on a phone
SAMPLES = 24  # images on the page
LARGE = 96  # images with more pixels on a side are shrunk and compressed with loss
TABLE = 20  # classes: with more, the confusions are a list
PAIRS = 12  # of classes, in the list
LEVELS = 8  # of shading
PARTS = {  # part of a step -> (its colour, what it is)
    "input": ("s4", "waiting for data, and making the batch"),
    "forward": ("s0", "the loss, without pruning"),
    "backward": ("s3", "its gradient, without pruning"),
    "pruning": ("s1", "what runs in the scope of a slot, in both passes; packing for kernels too"),
    "update": ("s2", "optimizer, clipping and averages"),
    "other": ("s6", "operations whose names say none of these, such as copies that XLA adds"),
    "idle": ("rule", "no operation ran"),
}
HOW = (
    "Operations that run at the same time share it evenly. XLA fuses operations of several parts; a fusion counts as "
    "the part that its name says."
)


# ---- images ----


def class_name(run: Run, i: int) -> str:
    """Return the name of a class."""
    classes = run.pictures.get("classes", np.array([]))
    return str(classes[i]) if 0 <= i < len(classes) else f"class {i}"


def images(run: Run, front: str = "") -> list[tuple[str, str, float, str, str]]:
    """Return test images with their classes, predictions and confidence, and what else a card says.

    Args:
      run: The run.
      front: How the names of the arrays begin: "" for samples, "hardest_" for those with the greatest loss.
    """
    keys = [f"{front}{'images' if front else 'samples'}", f"{front}labels", f"{front}predictions", f"{front}confidence"]
    arrays = [run.pictures.get(key) for key in (*keys, *(["hardest_loss"] if front else []))]
    if any(array is None for array in arrays):
        return []
    cards = []
    for image, truth, predicted, confidence, *loss in list(zip(*arrays, strict=False))[:SAMPLES]:
        more = f"loss {number(float(loss[0]))}" if loss else ""
        names = class_name(run, int(truth)), class_name(run, int(predicted))
        cards.append((*names, float(confidence), image_uri(image), more))
    return cards


def image_uri(image: np.ndarray) -> str:
    """Return an image uint8[H, W, C] as a data URI. Small images are exact. Of two channels the first is shown."""
    from PIL import Image

    pixels = image[..., 0] if image.shape[-1] < 3 else image[..., :3]
    picture, out, kind = Image.fromarray(pixels), io.BytesIO(), "png"
    if max(picture.size) > LARGE:
        picture.thumbnail((2 * LARGE, 2 * LARGE))
        kind = "jpeg"
    picture.save(out, kind, **({"quality": 85} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def confusion(run: Run) -> dict[str, Any]:
    """Return the confusion matrix of the test split, and the pairs of classes that are confused most."""
    counts = run.pictures.get("confusion")
    if counts is None or counts.ndim != 2 or not counts.sum():
        return {}
    total, wrong = int(counts.sum()), int(counts.sum() - np.trace(counts))
    unit = run.about.get("unit") or "examples"
    rows = []
    for i, row in enumerate(counts.tolist() if len(counts) <= TABLE else []):
        of = max(sum(row), 1)
        cells = [(n, f"{100 * n / of:.3g}", "right" if i == j else "wrong") for j, n in enumerate(row)]
        rows.append((class_name(run, i), cells, percent(row[i] / of)))
    off = counts * (1 - np.eye(len(counts), dtype=counts.dtype))
    order = np.argsort(-off, axis=None, kind="stable")[:PAIRS]
    places = [(i, j) for i, j in zip(*np.unravel_index(order, off.shape), strict=True) if off[i, j]]
    name = lambda i: class_name(run, i)
    pairs = [(name(i), name(j), f"{off[i, j]:,} of {counts[i].sum():,}") for i, j in places]
    lead = f"{wrong:,} of {total:,} test {unit} are classified wrongly ({percent(wrong / total)})."
    return {"lead": lead, "rows": rows, "pairs": pairs}


def mask(run: Run) -> dict[str, Any]:
    """Return a corner of a weight's mask: paths of an SVG element, and a description in words."""
    kept = run.pictures.get("mask")
    if kept is None or kept.ndim != 2 or not kept.size:
        return {}
    axis, m = int(run.pictures.get("mask_axis", 0)) % 2, max(int(run.pictures.get("mask_m", 1)), 1)
    rows, columns = (limit // m * m or m for limit in (ROWS, COLUMNS))
    shown = kept.astype(bool)[:rows, :columns]
    h, w = shown.shape
    runs = []
    for y, row in enumerate(shown):
        turns = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
        runs += [f"M{start} {y + 0.5}h{end - start}" for start, end in turns.reshape(-1, 2)]
    edges = "".join(f"M{at} 0v{h}" if axis else f"M0 {at}h{w}" for at in range(m, w if axis else h, m))
    along = "in each row" if axis else "down each column"
    pattern = mask_pattern(shown, axis, m)
    words = f"a corner of {h} × {w} values, {pattern} along axis {axis}, {along}; {percent(shown.mean())} are kept"
    name = str(run.pictures.get("mask_name", "a weight"))
    return {"name": name, "words": words, "width": w, "height": h, "kept": "".join(runs), "edges": edges}


def mask_pattern(mask: np.ndarray, axis: int, m: int) -> str:
    """Return the pattern of a mask: 2:4, or ≤ 2:4 if some groups keep fewer. A group that is cut off does not count."""
    whole = np.moveaxis(mask, axis, -1)[:, : mask.shape[axis] // m * m]
    kept = whole.reshape(-1, m).sum(-1)
    if not kept.size:
        return f"groups of {m}"
    pattern = f"{kept.max()}:{m}"
    return pattern if kept.min() == kept.max() else f"≤ {pattern}"


# ---- text ----


def answers(run: Run) -> list[tuple[str, str, str]]:
    """Return the sources, references and outputs that a task of one's own shows. A missing one is ""."""
    texts = [run.text.get(name) or [] for name in ("source", "reference", "output")]
    return list(itertools.zip_longest(*texts, fillvalue=""))[:SAMPLES]


def windows(run: Run) -> dict[str, Any]:
    """Return the windows or texts of the test split with the greatest loss, each as (loss, pieces with their shades).

    The limit is the loss of the strongest shade; 0 if tokens have no losses.
    """
    found = run.text.get("hardest") or []
    losses = [loss for window in found for _, loss in window["pieces"] if loss is not None and math.isfinite(loss)]
    limit = (max(float(np.quantile(losses, 0.98)), 0.0) or 1.0) if losses else 0.0
    return {"limit": limit, "shown": [(float(w["loss"]), _shaded(w["pieces"], limit or 1.0)) for w in found]}


def _shaded(pieces: list[Any], limit: float) -> list[tuple[int, str]]:
    """Return pieces of text with their shades. Neighbours of one shade are one piece."""
    joined: list[tuple[int, str]] = []
    for text, loss in pieces:
        share = 0.0 if loss is None else min(max(float(loss), 0.0) / limit, 1.0)
        level = round(LEVELS * share) if math.isfinite(share) else LEVELS  # NaN
        before = joined.pop()[1] if joined and joined[-1][0] == level else ""
        joined.append((level, before + str(text)))
    return joined


# ---- the time of a step ----


def step(run: Run) -> dict[str, Any]:
    """Return how long each part of a traced step took, each slot, and each pruned layer, in a run with --profile."""
    found = run.breakdown
    total, parts, layers = found.get("seconds") or 0.0, found.get("parts") or {}, found.get("layers") or {}
    if not total or not parts:
        return {}
    first, count = found.get("first", 0), found.get("steps", 1)
    times = {part: float(parts.get(part, 0.0)) for part in PARTS}
    share = lambda time: percent(time / total)
    kinds = ("forward", "backward", "pruning")
    return {
        "seconds": total,
        "which": f"step {first:,}" if count == 1 else f"the mean of steps {first:,} to {first + count - 1:,}",
        "devices": f"{found.get('devices', 1)} x {found.get('device', '')}",
        "how": HOW,
        "parts": [
            {"name": part, "colour": PARTS[part][0], "meaning": PARTS[part][1], "time": time, "share": share(time)}
            | {"grow": f"{time / total:.5f}"}
            for part, time in times.items()
        ],
        "slots": [(slot, time, share(time)) for slot, time in (found.get("slots") or {}).items()],
        "layers": [[path, *(milliseconds_of(row.get(kind, 0.0)) for kind in kinds)] for path, row in layers.items()],
    }
