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
    name: str, points: list[Point], line: list[Point], *, alt: str, along: str, up: str, keys: dict[str, str],
    say: Callable[[float], str], best: Callable = max,
) -> str:  # fmt: skip
    """Values by their costs, each with its name, and in a row above what their colours stand for. What no other beats in both
    is joined. So are the points of a ``line``, which stand for something else; the dearest of them is among the others."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    width, height, left, bottom, top = 760, 470, 52, 44, 58
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        place = (left / width, bottom / height, (width - left - 20) / width, (height - bottom - top) / height)
        axes = plain_axes(figure, place, grid="y")
        axes.axhline(0, color=hex_of("muted"), linewidth=1)
        known = [*points, *line]
        edge = [*points, *sorted(line, key=lambda p: p.cost)[-1:]]
        edge = [p for p in edge if not any(_beats(q, p, best) for q in edge)]
        for joined, colour, looks in ((edge, "muted", (0, (4, 3))), (line, line[0].colour if line else "muted", "-")):
            at = sorted((p.cost, p.value) for p in joined)
            axes.plot([x for x, _ in at], [y for _, y in at], color=hex_of(colour), linewidth=1, linestyle=looks)
        low, high = (end(p.cost for p in known) for end in (min, max))
        axes.set_xlim(low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1))
        shown = _apart(points, 0.011 * (high - low or 1))
        for p in [*line, *shown]:
            axes.errorbar(
                p.cost, p.value, yerr=p.error, fmt="o", color=hex_of(p.colour), markersize=4 if p in line else 7,
                elinewidth=1.4, capsize=0, markeredgewidth=0,
            )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: say(y)))
        axes.set_ylim(axes.get_ylim())  # as they are now: matplotlib finds them when it is asked
        texts = [(p.name, x, y, p.colour, how) for p, x, y, how in _places(axes, shown, line)]
        texts.append((along, left + (width - left - 20) / 2, 12, "muted", "center"))
        texts.append((up, 8, height - 12, "muted", "left"))
        start = left
        for key, colour in keys.items():
            texts.append((f"● {key}", start, height - 36, colour, "left"))
            start += LETTER * (len(key) + 2) + 18
        for n, (_, x, y, colour, how) in enumerate(texts):
            axes.text(x, y, f"@{n}@", **_beside(colour, how))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return inline(out.getvalue(), alt, [text for text, *_ in texts], [])


def _beats(q: Point, p: Point, best: Callable) -> bool:
    """Whether one costs no more and is no worse, and is not the same."""
    no_worse = best(q.value, p.value) == q.value
    return q.cost <= p.cost and no_worse and (q.cost, q.value) != (p.cost, p.value)


def _apart(points: list[Point], step: float) -> list[Point]:
    """Those of one cost side by side, so that their errors can be told apart."""
    alike = [[n for n, q in enumerate(points) if abs(q.cost - p.cost) < step / 2] for p in points]
    shifts = [step * (of.index(n) - (len(of) - 1) / 2) for n, of in enumerate(alike)]
    return [p._replace(cost=p.cost + shift) for p, shift in zip(points, shifts, strict=True)]


def _places(axes, points: list[Point], line: list[Point]) -> list[tuple[Point, float, float, str]]:
    """Where each name stands: near its point, where least is in its way."""
    box, to = axes.get_window_extent(), axes.transData.transform
    zero = to((0.0, 0.0))[1]
    there = [(box.x0, box.x1, zero - 1, zero + 1, 2.0)]  # left, right, bottom, top, and how bad it is to stand on it
    for p in [*points, *line]:
        (x, y), (_, low), (_, high) = (to((p.cost, p.value + off)) for off in (0.0, -(p.error or 0), p.error or 0))
        there += [(x - 5, x + 5, y - 5, y + 5, 9.0), (x - 1, x + 1, low, high, 3.0)]
    found = []
    for p in points:
        (x, y), long = to((p.cost, p.value)), LETTER * len(p.name)

        def price(place: tuple[float, float], x=x, y=y, long=long) -> float:
            start, at = place
            met = (bad for a, b, c, d, bad in there if a < start + long and start < b and c < at + 6 and at - 6 < d)
            out = start < box.x0 or start + long > box.x1 + 18 or not box.y0 + 6 < at < box.y1 + 6
            return sum(met) + 0.12 * abs(at - y) + 0.5 * (start < x) + 50 * out

        start, at = min(((start, y + up) for start in (x + 9, x - 9 - long) for up in range(-60, 61, 2)), key=price)
        there.append((start, start + long, at - 6, at + 6, 30.0))
        found.append((p, start, at, "left") if start > x else (p, start + long, at, "right"))
    return found


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
