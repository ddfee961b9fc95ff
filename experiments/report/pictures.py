"""Pictures of a run: a piece of a weight's mask, and images of the data."""

import base64
import io

import numpy as np

from experiments.report.words import percent, safe

ROWS, COLUMNS = 32, 96  # of a mask: the cells stay visible on a phone
SAMPLES = 24  # images on the page
LARGE = 96  # images with more pixels on a side are shrunk and compressed with loss


def mask_pattern(mask: np.ndarray, axis: int, m: int) -> str:
    """Return the pattern of a mask: 2:4, or ≤ 2:4 if some groups keep fewer. A group that is cut off does not count."""
    whole = np.moveaxis(mask, axis, -1)[:, : mask.shape[axis] // m * m]
    kept = whole.reshape(-1, m).sum(-1)
    if not kept.size:
        return f"groups of {m}"
    pattern = f"{kept.max()}:{m}"
    return pattern if kept.min() == kept.max() else f"≤ {pattern}"


def mask_svg(mask: np.ndarray, axis: int, m: int, name: str) -> tuple[str, str]:
    """Return the first rows and columns of a mask as an SVG element, and a description in words.

    Args:
      mask: True where a value is kept.
      axis: The axis of the groups, 0 or 1.
      m: The size of a group.
      name: The weight's name.
    """
    rows, columns = (limit // m * m or m for limit in (ROWS, COLUMNS))
    shown = mask[:rows, :columns]
    h, w = shown.shape
    runs = []
    for y, row in enumerate(shown):
        turns = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
        runs += [f"M{start} {y + 0.5}h{end - start}" for start, end in turns.reshape(-1, 2)]
    edges = "".join(f"M{at} 0v{h}" if axis else f"M0 {at}h{w}" for at in range(m, w if axis else h, m))
    along = "in each row" if axis else "down each column"
    pattern = mask_pattern(shown, axis, m)
    words = f"a corner of {h} × {w} values, {pattern} along axis {axis}, {along}; {percent(shown.mean())} are kept"
    alt = f"Mask of {name}: {words}"
    svg = (
        f'<svg viewBox="0 0 {w} {h}" role="img" aria-label="{safe(alt)}" class="mask">'
        f'<path class="kept" d="{"".join(runs)}"/><path class="groups" d="{edges}"/></svg>'
    )
    return svg, words


def image_uri(image: np.ndarray) -> str:
    """Return an image uint8[H, W, C] as a data URI. Small images are exact. Of two channels the first is shown."""
    from PIL import Image

    pixels = image[..., 0] if image.shape[-1] < 3 else image[..., :3]
    picture, out = Image.fromarray(pixels), io.BytesIO()
    if max(picture.size) > LARGE:
        picture.thumbnail((2 * LARGE, 2 * LARGE))
        picture.save(out, "JPEG", quality=85)
        kind = "jpeg"
    else:
        picture.save(out, "PNG", optimize=True)
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
