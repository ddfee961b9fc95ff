"""Pictures of values with their errors by their cost, as SVG."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from experiments.report.curves import hex_of, inline, plain_axes, svg_of
from experiments.report.words import large, visible

LETTER, LINE = 6.3, 19  # in units of the drawing: the width of a letter, and the height of a row


class Point(NamedTuple):
    """A value that is reached at a cost."""

    name: str
    cost: float
    value: float
    error: float | None = None
    colour: str = "s0"


def frontier(
    name: str, points: list[Point], lines: list[list[Point]], *, alt: str, along: str, up: str, keys: dict[str, str],
    say: Callable[[float], str], best: Callable = max,
) -> str:  # fmt: skip
    """Return an SVG element with values by their costs. A dashed line joins the points that no other point beats.

    Args:
      name: A name of the picture that is unique on its page.
      points: The points, each with its name beside it.
      lines: Points of other kinds, joined by a line for each kind, without names. The one with the highest cost may
        also be on the dashed line.
      alt: The description for readers who do not see the picture.
      along: The title of the axis of costs.
      up: The title of the axis of values.
      keys: The colours' meanings, shown in a row above.
      say: Writes a value at the axis.
      best: ``max`` if a higher value is better, else ``min``.
    """
    import matplotlib.style  # here because it is slow, and a launch does not need it
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    width, height, left, bottom, top = 760, 470, 52, 44, 58
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        place = (left / width, bottom / height, (width - left - 20) / width, (height - bottom - top) / height)
        axes = plain_axes(figure, place, grid="y")
        axes.axhline(0, color=hex_of("muted"), linewidth=1)
        joined = [p for line in lines for p in line]
        known = [*points, *joined]
        edge = [*points, *sorted(joined, key=lambda p: p.cost)[-1:]]
        edge = [p for p in edge if not any(_beats(q, p, best) for q in edge)]
        for along_line, colour, dash in (
            (edge, "muted", (0, (4, 3))),
            *((line, line[-1].colour, "-") for line in lines),
        ):
            ends = sorted((p.cost, p.value) for p in along_line)
            axes.plot([x for x, _ in ends], [y for _, y in ends], color=hex_of(colour), linewidth=1, linestyle=dash)
        low, high = (end(p.cost for p in known) for end in (min, max))
        axes.set_xlim(low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1))
        shown = _apart(points, 0.011 * (high - low or 1))
        for p in [*joined, *shown]:
            axes.errorbar(
                p.cost, p.value, yerr=p.error, fmt="o", color=hex_of(p.colour), markersize=4 if p in joined else 7,
                elinewidth=1.4, capsize=0, markeredgewidth=0,
            )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.6g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: say(y)))
        axes.set_ylim(axes.get_ylim())  # fixed now: matplotlib would compute them later, after the names are placed
        texts = [(p.name, x, y, p.colour, alignment) for p, x, y, alignment in _places(axes, shown, joined)]
        texts.append((along, left + (width - left - 20) / 2, 12, "muted", "center"))
        texts.append((up, 8, height - 12, "muted", "left"))
        start = left
        for key, colour in keys.items():
            texts.append((f"● {key}", start, height - 36, colour, "left"))
            start += LETTER * (len(key) + 2) + 18
        for n, (_, x, y, colour, alignment) in enumerate(texts):
            axes.text(x, y, f"@{n}@", **_beside(colour, alignment))
        svg = svg_of(figure)
    return inline(svg, alt, [text for text, *_ in texts], [])


def cloud(
    name: str, points: list[Point], edge: list[Point], *, alt: str, along: str, say: Callable[[float], str],
    best: Callable = max,
) -> str:  # fmt: skip
    """Return an SVG element that plots many values by their costs. A dashed line joins those that no other value beats.

    Args:
      name: A name of the picture that is unique on its page.
      points: The points that others beat. Their names appear when a reader points at them.
      edge: The others by rising cost. They are numbered from 1. There is at least one.
      alt: The description for readers who do not see the picture.
      along: The title of the axis of costs.
      say: Writes a value at the axis.
      best: ``max`` if a higher value is better, else ``min``.
    """
    import matplotlib.style  # here because it is slow, and a launch does not need it
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    width, height, left, bottom = 560, 340, 56, 42
    known, up = [*points, *edge], 1 if best is max else -1
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        place = (left / width, bottom / height, (width - left - 14) / width, (height - bottom - 18) / height)
        axes = plain_axes(figure, place, grid="y")
        looks = {"clip_on": False, "markeredgewidth": 0}
        others, ends = ([(p.cost, p.value) for p in part] for part in (points, edge))
        style = {"color": hex_of("muted"), "alpha": 0.5, "markersize": 4.5}
        axes.plot(*zip(*others, strict=True) if others else ([], []), "o", gid="dots0", **style, **looks)
        style = {"color": hex_of("s1"), "linewidth": 1, "markersize": 7}
        axes.plot(*zip(*ends, strict=True), "--o", gid="dots1", **style, **looks)
        if max(p.cost for p in known) > 30 * min(p.cost for p in known):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: large(x)))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: say(y)))
        axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # fixed now, before the numbers are placed
        texts, free = [(along, left + (width - left) / 2, 9, "muted", "center")], -math.inf
        for number, (x, y) in enumerate(axes.transData.transform(ends).tolist(), 1):
            if x - free > 13:  # else the numbers would overlap
                texts.append((str(number), x - 8, y + 9 * up, "s1", "center"))
                free = x
        for n, (_, x, y, colour, alignment) in enumerate(texts):
            axes.text(x, y, f"@{n}@", **_beside(colour, alignment))
        svg = svg_of(figure)
    return inline(svg, alt, [text for text, *_ in texts], [p.name for p in known])


def _beats(q: Point, p: Point, best: Callable) -> bool:
    """Return whether q costs no more than p and is no worse, and differs in one of them."""
    no_worse = best(q.value, p.value) == q.value
    return q.cost <= p.cost and no_worse and (q.cost, q.value) != (p.cost, p.value)


def _apart(points: list[Point], step: float) -> list[Point]:
    """Return the points, those of one cost moved side by side, so that their error bars do not overlap."""
    alike = [[n for n, q in enumerate(points) if abs(q.cost - p.cost) < step / 2] for p in points]
    shifts = [step * (near.index(n) - (len(near) - 1) / 2) for n, near in enumerate(alike)]
    return [p._replace(cost=p.cost + shift) for p, shift in zip(points, shifts, strict=True)]


class _Obstacle(NamedTuple):
    """A rectangle of the picture, and how bad it is to write on it."""

    left: float
    right: float
    bottom: float
    top: float
    price: float


def _places(axes, points: list[Point], line: list[Point]) -> list[tuple[Point, float, float, str]]:
    """Return where each name is written, near its point and away from others: (point, x, y, alignment)."""
    box, to = axes.get_window_extent(), axes.transData.transform
    zero = to((0.0, 0.0))[1]
    obstacles = [_Obstacle(box.x0, box.x1, zero - 1, zero + 1, 2.0)]
    for p in [*points, *line]:
        (x, y), (_, low), (_, high) = (to((p.cost, p.value + off)) for off in (0.0, -(p.error or 0), p.error or 0))
        obstacles.append(_Obstacle(x - 5, x + 5, y - 5, y + 5, 9.0))
        obstacles.append(_Obstacle(x - 1, x + 1, low, high, 3.0))
    places = []
    for p in points:
        (x, y), length = to((p.cost, p.value)), LETTER * len(p.name)
        starts = [(start, y + up) for start in (x + 9, x - 9 - length) for up in range(-60, 61, 2)]
        prices = [_price(start, height, length, x, y, box, obstacles) for start, height in starts]
        start, height = starts[prices.index(min(prices))]
        obstacles.append(_Obstacle(start, start + length, height - 6, height + 6, 30.0))
        places.append((p, start, height, "left") if start > x else (p, start + length, height, "right"))
    return places


def _price(start: float, at: float, length: float, x: float, y: float, box, obstacles: list[_Obstacle]) -> float:
    """Return how bad it is to write a name of this length from (start, at) on, if its point is at (x, y)."""
    price = 0.0
    for o in obstacles:
        if o.left < start + length and start < o.right and o.bottom < at + 6 and at - 6 < o.top:
            price += o.price
    price += 0.12 * abs(at - y)
    if start < x:
        price += 0.5
    if start < box.x0 or start + length > box.x1 + 18 or not box.y0 + 6 < at < box.y1 + 6:
        price += 50
    return price


def _beside(colour: str, alignment: str) -> dict:
    return {"color": hex_of(colour), "transform": None, "va": "center_baseline", "ha": alignment}


def standalone(svg: str) -> str:
    """Return a drawing as the text of its own file, with the colours of light and of dark pages.

    It paints its own ground: the page around it may be dark when the reader's system is light.
    """
    sheet = (Path(__file__).parent / "page.css").read_text()
    light, dark = (" ".join(re.findall(r"--(?!sans|serif|mono)\w+: #\w+;", part)) for part in _schemes(sheet))
    style = f"svg{{{light} background: var(--paper)}}text{{font:11px system-ui,sans-serif}}"
    style += f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f"><style>{visible(style)}</style>", 1
    )


def _schemes(sheet: str) -> tuple[str, str]:
    """Return the parts of page.css that have the light and the dark colours."""
    light, _, rest = sheet.partition("@media")
    return light, rest.partition("* {")[0]
