"""What a run saw and kept, as pictures: a piece of a weight's mask, and images with what the model said of them."""

import base64
import io

import numpy as np

from experiments.report.words import percent, safe

ROWS, COLUMNS = 32, 96  # of a mask: cells that stay visible on a phone
SAMPLES = 24
LARGE = 96  # images of more pixels a side are made smaller, and compressed with loss


def mask_pattern(mask: np.ndarray, axis: int, m: int) -> str:
    """What a mask keeps of each whole group: 2:4, or ≤ 2:4 where some keep fewer."""
    whole = np.moveaxis(mask, axis, -1)[:, : mask.shape[axis] // m * m]
    kept = whole.reshape(-1, m).sum(-1)
    return f"{'' if kept.min() == kept.max() else '≤ '}{kept.max()}:{m}" if kept.size else f"groups of {m}"


def mask_svg(mask: np.ndarray, axis: int, m: int, name: str) -> tuple[str, str]:
    """The first rows and columns of a mask as an SVG element, what is kept in ink, and words for it."""
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
    """A uint8 image H x W x C as a data URI: exact where small."""
    from PIL import Image

    picture, out = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image[..., :3]), io.BytesIO()
    if max(picture.size) > LARGE:
        picture.thumbnail((2 * LARGE, 2 * LARGE))
        picture.save(out, "JPEG", quality=85)
        kind = "jpeg"
    else:
        picture.save(out, "PNG", optimize=True)
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
