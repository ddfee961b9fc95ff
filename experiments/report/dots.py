"""A value of everything that is compared, with its error, beside its name or by its cost: as SVG that belongs to its page."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from experiments.report.curves import hex_of, inline, plain_axes
from experiments.report.words import visible

LETTER, LINE = 6.3, 19  # in units of the drawing: of a name's letters, and of a row


class Dot(NamedTuple):
    """One row: ours with its error, and what was published."""

    name: str
    value: float | None
    error: float | None = None
    published: float | None = None


def draw(name: str, dots: list[Dot], *, alt: str, along: str, say: Callable[[float], str]) -> str:
    """The dots from the first down, on an axis that is named ``along``; 0 is a line."""
    import matplotlib.style  # slow, and of no use to a launch
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    left, right = LETTER * max(len(dot.name) for dot in dots) + 14, 14
    width, height = left + 330 + right, LINE * len(dots) + 46
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        axes = plain_axes(figure, (left / width, 40 / height, 330 / width, LINE * len(dots) / height), grid="x")
        axes.axvline(0, color=hex_of("muted"), linewidth=1)
        for row, dot in enumerate(dots):
            if dot.published is not None:
                looks = {"markerfacecolor": "none", "markeredgecolor": hex_of("s1"), "markeredgewidth": 1.4}
                axes.plot(dot.published, row, "D", markersize=6, clip_on=False, **looks)
            if dot.value is not None:
                axes.errorbar(
                    dot.value, row, xerr=dot.error, fmt="o", color=hex_of("s0"), markersize=5.5, elinewidth=1.6, capsize=0,
                    markeredgewidth=0,
                )  # fmt: skip
            axes.text(left - 10, 40 + LINE * (len(dots) - row - 0.5), f"@{row}@", **_beside("ink", "right"))
        axes.set_ylim(len(dots) - 0.5, -0.5)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: say(x)))
        axes.text(left + 165, 10, f"@{len(dots)}@", **_beside("muted", "center"))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return inline(out.getvalue(), alt, [*(dot.name for dot in dots), along], [])


class Point(NamedTuple):
    """What is reached for a cost."""

    name: str
    cost: float
    value: float
    error: float | None = None
    colour: str = "s0"


def frontier(
    name: str, points: list[Point], *, alt: str, along: str, up: str, say: Callable[[float], str], best: Callable = max
) -> str:
    """Values by their costs, each with its name; what no other beats in both is joined by a line."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    width, height, left, bottom = 700, 380, 52, 44
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        place = (left / width, bottom / height, (width - left - 20) / width, (height - bottom - 30) / height)
        axes = plain_axes(figure, place, grid="y")
        axes.axhline(0, color=hex_of("muted"), linewidth=1)
        edge = [p for p in points if not any(_beats(q, p, best) for q in points)]
        edge.sort(key=lambda p: p.cost)
        axes.plot(
            [p.cost for p in edge], [p.value for p in edge], color=hex_of("muted"), linewidth=1, linestyle=(0, (4, 3))
        )
        for p in points:
            axes.errorbar(
                p.cost, p.value, yerr=p.error, fmt="o", color=hex_of(p.colour), markersize=7, elinewidth=1.4, capsize=0,
                markeredgewidth=0,
            )  # fmt: skip
        low, high = min(p.cost for p in points), max(p.cost for p in points)
        room = 0.05 * (high - low or 1)
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: say(y)))
        for n, (p, x, y, how) in enumerate(_places(axes, points)):
            axes.text(x, y, f"@{n}@", **_beside(p.colour, how))
        axes.text(left + (width - left - 20) / 2, 12, f"@{len(points)}@", **_beside("muted", "center"))
        axes.text(8, height - 12, f"@{len(points) + 1}@", **_beside("muted", "left"))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return inline(out.getvalue(), alt, [*(p.name for p in points), along, up], [])


def _beats(q: Point, p: Point, best: Callable) -> bool:
    """Whether one costs no more and is no worse, and is not the same."""
    no_worse = best(q.value, p.value) == q.value
    return q.cost <= p.cost and no_worse and (q.cost, q.value) != (p.cost, p.value)


def _places(axes, points: list[Point]) -> list[tuple[Point, float, float, str]]:
    """Where each name stands: beside its point, on the side that has room, and off the names that stand there already."""
    box, taken, found = axes.get_window_extent(), [], {}
    for p in sorted(points, key=lambda p: -p.value):
        x, y = axes.transData.transform((p.cost, p.value))
        zero = axes.transData.transform((p.cost, 0.0))[1]
        y = zero + 9 if abs(y - zero) < 7 else y  # off the line
        long = LETTER * len(p.name)
        how = "left" if x + 10 + long < box.x1 or x < (box.x0 + box.x1) / 2 else "right"
        start = x + 10 if how == "left" else x - 10 - long
        while any(start < b and a < start + long and abs(y - at) < 14 for a, b, at in taken):
            y -= 1
        taken.append((start, start + long, y))
        found[p] = (p, x + 10 if how == "left" else x - 10, y, how)
    return [found[p] for p in points]


def _beside(colour: str, how: str) -> dict:
    return {"color": hex_of(colour), "transform": None, "va": "center_baseline", "ha": how}


def standalone(svg: str) -> str:
    """A drawing as a file of its own, in the colours of light and of dark pages."""
    sheet = (Path(__file__).parent / "page.css").read_text()
    light, dark = (" ".join(re.findall(r"--(?!sans|serif|mono)\w+: #\w+;", part)) for part in _schemes(sheet))
    style = f"svg{{{light}}}text{{font:11px system-ui,sans-serif}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f"><style>{visible(style)}</style>", 1
    )


def _schemes(sheet: str) -> tuple[str, str]:
    light, _, rest = sheet.partition("@media")
    return light, rest.partition("* {")[0]
