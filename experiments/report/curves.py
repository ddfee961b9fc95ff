"""Curves and points as SVG elements of a page. matplotlib draws them; the page's style sheet sets colours and fonts."""

import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

from experiments.report.runs import BEYOND
from experiments.report.templates import FOLDER
from experiments.report.words import large, number, short, tick, visible

WIDTH, HEIGHT, LETTER, LINE = 460, 270, 6.9, 13.5  # in units of the drawing; a letter's width and a line's height too
COLOURS = ("ink", "muted", "rule", "bad", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")  # variables of page.css
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
STEPS = (1, 2, 2.5, 5, 10)  # of an axis
Say = Callable[[float], str]  # writes a value at an axis


class Curve(NamedTuple):
    """One line: its points and its style."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    colour: str = "ink"
    width: float = 1.6
    dash: str | tuple = "-"
    opacity: float = 1.0
    label: str | None = None  # the text at its end; None: its name
    band: tuple[np.ndarray, np.ndarray] | None = None  # the lower and the upper edge of a band around it

    @property
    def shown(self) -> str:
        """The text at its end."""
        return short(self.name if self.label is None else self.label)

    @property
    def finite(self) -> np.ndarray:
        """For each value whether it is finite."""
        return np.abs(np.nan_to_num(self.values, nan=np.inf)) < BEYOND


class Point(NamedTuple):
    """A value that is reached at a cost."""

    name: str
    cost: float
    value: float
    error: float | None = None
    colour: str = "s0"


# ---- what is drawn ----


def thinned(curve: Curve, limit: int = 500) -> Curve:
    """Return a curve of at most about ``limit`` points.

    Both ends are kept, and of each bin the least value, the largest and one that is not finite.
    """
    if len(curve.values) <= limit:
        return curve
    count, width = len(curve.values), -(-len(curve.values) // (limit // 2 - 1))
    bins = np.full((-(-count // width), width), np.nan)  # of equal length; the last one may be cut off
    bins.flat[:count] = np.where(curve.finite, curve.values, np.nan)
    starts = np.arange(len(bins)) * width
    least, most = (np.argmax(np.nan_to_num(side, nan=-np.inf), 1) for side in (-bins, bins))
    bad = np.flatnonzero(~curve.finite)
    first_bad = bad[np.unique(bad // width, return_index=True)[1]]
    kept = np.unique(np.concatenate([[0, count - 1], starts + least, starts + most, first_bad]))
    return curve._replace(steps=curve.steps[kept], values=curve.values[kept])


def smoothed(curve: Curve, bins: int = 50) -> list[Curve]:
    """Return a noisy curve as two: itself, faint, and the means of its bins. A curve of few points stays one."""
    if len(curve.values) < 3 * bins:
        return [curve]
    groups = np.array_split(np.where(curve.finite, curve.values, np.nan), bins)
    steps = np.array([part.mean() for part in np.array_split(curve.steps, bins)])
    means = np.array([g[g == g].mean() if (g == g).any() else np.nan for g in groups])
    return [curve._replace(width=0.7, opacity=0.4, label=""), curve._replace(steps=steps, values=means)]


def banded(curves: list[Curve], name: str = "mean", **style: Any) -> Curve:
    """Return the mean of the finite values at every step, with a band from the least to the largest.

    It is NaN at a step without any.
    """
    steps = np.unique(np.concatenate([c.steps for c in curves]))
    table = np.full((len(curves), len(steps)), np.nan)
    for row, c in zip(table, curves, strict=True):
        row[np.searchsorted(steps, c.steps[c.finite])] = c.values[c.finite]
    known = np.ma.masked_invalid(table)
    middle, low, high = (of(0).filled(np.nan) for of in (known.mean, known.min, known.max))
    return Curve(name, steps, middle, band=(low, high), **style)


def unbeaten(points: Sequence[tuple[float, float]], best: Callable = max) -> list[int]:
    """Return the numbers of the points (cost, value) that no other beats, by rising cost.

    A point beats another one if it costs no more and is no worse, and differs in one of them.
    """
    sign = 1 if best is max else -1
    edge: list[int] = []
    for n in sorted(range(len(points)), key=lambda n: (points[n][0], -sign * points[n][1])):
        if not edge or sign * points[n][1] > sign * points[edge[-1]][1] or points[n] == points[edge[-1]]:
            edge.append(n)
    return edge


# ---- pictures ----


def draw(
    name: str, curves: list[Curve], *, alt: str, up: str, until: float = 0, say: Say = number, say_step: Say = number,
    log: bool = False, bounds: tuple[float, ...] = (), ring: tuple[float, float, str] | None = None,
    along: str = "step", since: float = 0, wide: bool = False, least: float = 0,
) -> Markup:  # fmt: skip
    """Return an SVG element with curves over steps.

    Args:
      name: A name of the picture that is unique on its page.
      curves: The curves.
      alt: The description for readers who do not see the picture.
      up: The title of the axis of values.
      until: A step that the axis reaches at least.
      say: Writes a value at the axis.
      say_step: Writes a step at the axis.
      log: Use a logarithmic axis if the values span decades.
      bounds: Values that the axis includes.
      ring: A point that is marked: (step, value, colour).
      along: The title of the axis of steps.
      since: The first step of the axis.
      wide: Whether there is room for long names at the ends of curves.
      least: The least range of the axis of values.
    """
    width = 700 if wide else WIDTH
    shown = [c._replace(label=c.name if wide and c.label is None else c.shown) for c in curves]
    margin = min(LETTER * max(len(c.label or "") for c in shown) + 12, 300 if wide else 138)
    left, right, bottom, top = 52, width - max(margin, 20), 42, HEIGHT - 26
    bands = [edge[np.isfinite(edge)] for c in curves if c.band is not None for edge in c.band]
    finite = np.concatenate([c.values[c.finite] for c in curves] + bands + [np.array(bounds)])

    def paint(axes: Any, locate: Any) -> list[_Text]:
        for n, c in enumerate(curves):
            _plot(axes, c, f"curve{n}")
        if ring:
            style = {"markerfacecolor": "none", "markeredgecolor": hex_of(ring[2]), "clip_on": False}
            axes.plot(*ring[:2], "o", markersize=8, markeredgewidth=1.3, **style)
        broken = np.unique(np.concatenate([c.steps[~c.finite] for c in curves]))  # a cross on the axis at each
        style = {"color": hex_of("bad"), "clip_on": False, "transform": axes.get_xaxis_transform()}
        axes.plot(broken, np.full(len(broken), 0.03), "x", markersize=6, markeredgewidth=1.6, **style)
        _scale(axes, finite, log, bounds, least)
        axes.set_xlim(since, max([until, 1, *(c.steps.max() for c in curves)]))
        axes.xaxis.set_major_locator(locate(6, integer=True, steps=STEPS))
        axes.minorticks_off()
        places = _label_places(axes, shown, bottom, top)
        texts = [_Text(c.label or "", right + 7, y, c.colour, {"va": "center_baseline"}) for c, y in places]
        return [*texts, _beside(along, (left + right) / 2, 10), _beside(up, 4, HEIGHT - 9, "muted", "left")]

    box = (left, bottom, right - left, top - bottom)
    return _picture(name, (width, HEIGHT), box, paint, (say_step, say), alt, [c.name for c in curves])


def frontier(
    name: str, points: list[Point], lines: list[list[Point]], *, alt: str, along: str, up: str, keys: dict[str, str],
    say: Say, best: Callable = max, least: float = 0, wide: bool = True,
) -> Markup:  # fmt: skip
    """Return an SVG element with values by their costs. A dashed line joins the points that no other point beats.

    Names stand beside their points. If one would lie on a line or on data, the points are numbered from the best on,
    and their names are listed below. Values that are far worse than the others lie on the edge, as triangles.

    Args:
      name: A name of the picture that is unique on its page.
      points: The points, each with its name.
      lines: Points of other kinds, joined by a line for each kind, without names. The one with the highest cost may
        also be on the dashed line.
      alt: The description for readers who do not see the picture.
      along: The title of the axis of costs.
      up: The title of the axis of values.
      keys: The colours' meanings, shown in a row above.
      say: Writes a value at the axis.
      best: ``max`` if a higher value is better, else ``min``.
      least: The least range of the axis of values.
      wide: Whether it fills a page. Otherwise it has the width of a picture of `draw`.
    """
    joined = [p for line in lines for p in line]
    known, sign = [*points, *joined], 1 if best is max else -1
    end = worst_shown([sign * p.value for p in known])
    far = lambda p: sign * p.value < end
    said = lambda p: f"{p.name}: {say(p.value)}" if far(p) else p.name
    order = sorted(points, key=lambda p: -sign * p.value)
    edge = [*points, *sorted(joined, key=lambda p: p.cost)[-1:]]
    edge = [edge[n] for n in unbeaten([(p.cost, p.value) for p in edge], best)]

    def drawn(numbered: bool) -> tuple[Markup, bool]:
        """Return the picture, and whether a name lies on something."""
        columns = 1 if not wide or max((len(said(p)) for p in points), default=0) > 48 else 2
        rows = -(-len(points) // columns) if numbered else 0
        width, left, bottom, top = 760 if wide else WIDTH, 58, 44 + (17 * rows + 8 if rows else 0), 58 if keys else 34
        height, crowded = (412 if wide else 250) + bottom, False

        def paint(axes: Any, locate: Any) -> list[_Text]:
            nonlocal crowded
            axes.axhline(0, color=hex_of("muted"), linewidth=1)
            ends = [(p.value - (p.error or 0), p.value + (p.error or 0)) for p in known if not far(p)]
            low, high = min(a for a, _ in ends), max(b for _, b in ends)
            room = max(0.06 * (high - low), (least - (high - low)) / 2) or 0.06
            below, above = (room * (3 if sign == side and any(map(far, known)) else 1) for side in (1, -1))
            limits = (low - below, high + above)
            axes.set_ylim(limits)
            rim = limits[0] + room if sign > 0 else limits[1] - room
            first, last = (of(p.cost for p in known) for of in (min, max))
            axes.set_xlim(first - 0.04 * (last - first or 1), last + 0.04 * (last - first or 1))
            at = lambda p: p._replace(value=rim, error=None) if far(p) else p
            placed = order if numbered else points
            shown = _apart(placed, 0.011 * (last - first or 1))
            moved = {id(p): q.cost for p, q in zip(placed, shown, strict=True)}
            place = lambda line: sorted((moved.get(id(p), p.cost), p.value) for p in line)
            for line, colour, dash in ((edge, "muted", (0, (4, 3))), *((line, line[-1].colour, "-") for line in lines)):
                axes.plot(*zip(*place(line), strict=True), color=hex_of(colour), linewidth=1, linestyle=dash)
            for p in [*joined, *shown]:
                size, mark = (4 if p in joined else 7) + 2 * far(p), ("v" if sign > 0 else "^") if far(p) else "o"
                axes.errorbar(
                    p.cost, at(p).value, yerr=at(p).error, fmt=mark, color=hex_of(p.colour), markersize=size,
                    elinewidth=1.4, capsize=0, markeredgewidth=0,
                )  # fmt: skip
            axes.xaxis.set_major_locator(locate(6, steps=STEPS))
            axes.yaxis.set_major_locator(locate(6, steps=STEPS))
            axes.set(xlim=axes.get_xlim(), ylim=limits)  # fixed now: matplotlib would compute them later
            words = {id(p): str(n) if numbered else said(p) for n, p in enumerate(shown, 1)}
            named = [at(p)._replace(name=words[id(p)]) for p in shown]
            segments = [[(x, rim if sign * y < end else y) for x, y in place(line)] for line in (edge, *lines)]
            places, crowded = _places(axes, named, [at(p) for p in joined], segments)
            texts = [_beside(p.name, x, y, p.colour, how) for p, x, y, how in places]
            outside = [p for p in joined if far(p)]
            texts += [_value_of(axes, at(p), say(p.value)) for p in outside]
            texts.append(_beside(along, left + (width - left - 20) / 2, bottom - 32))
            texts.append(_beside(up, 8, height - 12, "muted", "left"))
            start = left
            for key, colour in keys.items():
                texts.append(_beside(f"● {key}", start, height - 36, colour, "left"))
                start += LETTER * (len(key) + 2) + 18
            for n, p in enumerate(shown if numbered else []):
                x, y = 8 + (width / 2) * (n // rows), bottom - 56 - 17 * (n % rows)
                texts.append(_beside(f"{n + 1}\u2003{said(p)}", x, y, p.colour, "left"))
            return texts

        box = (left, bottom, width - left - 20, height - bottom - top)
        return _picture(name, (width, height), box, paint, (number, say), alt, []), crowded

    picture, crowded = drawn(numbered=False)
    return drawn(numbered=True)[0] if crowded else picture


def worst_shown(values: Sequence[float]) -> float:
    """Return a limit below which values lie so far from the others that they would flatten them; -inf if none do.

    At most a third of the values lie below, the gap above them is wider than 0.8 of the range of the others, and
    the whole range is 2.5 times theirs.

    >>> worst_shown([-0.42, -0.25, -0.07, -0.05, -0.03, -0.02, -0.01, 0.0]), worst_shown([-0.04, -0.03, -0.02, -0.01])
    (-0.07, -inf)
    """
    ordered = sorted(values)
    for n in range(len(ordered) // 3, 0, -1):
        others = ordered[-1] - ordered[n]
        if ordered[n] - ordered[n - 1] > 0.8 * others > 0 and ordered[-1] - ordered[0] > 2.5 * others:
            return ordered[n]
    return -math.inf


def cloud(
    name: str, points: list[Point], edge: list[Point], *, alt: str, along: str, up: str, say: Say, best: Callable = max
) -> Markup:
    """Return an SVG element that plots many values by their costs. A dashed line joins those that no other value beats.

    Args:
      name: A name of the picture that is unique on its page.
      points: The points that others beat. Their names appear when a reader points at them.
      edge: The others by rising cost. They are numbered from 1. There is at least one.
      alt: The description for readers who do not see the picture.
      along: The title of the axis of costs.
      up: The title of the axis of values.
      say: Writes a value at the axis.
      best: ``max`` if a higher value is better, else ``min``.
    """
    width, height, left, bottom = 560, 356, 56, 42
    known, sign = [*points, *edge], 1 if best is max else -1

    def paint(axes: Any, locate: Any) -> list[_Text]:
        from matplotlib.ticker import LogLocator

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
            axes.xaxis.set_major_locator(locate(6))
        axes.minorticks_off()
        axes.yaxis.set_major_locator(locate(6))
        axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # fixed now, before the numbers are placed
        texts = [_beside(along, left + (width - left) / 2, 9), _beside(up, 4, height - 9, "muted", "left")]
        free = -math.inf
        for place, (x, y) in enumerate(axes.transData.transform(ends).tolist(), 1):
            if x - free > 13:  # else the numbers would overlap
                texts.append(_beside(str(place), x - 8, y + 9 * sign, "s1"))
                free = x
        return texts

    box = (left, bottom, width - left - 14, height - bottom - 34)
    return _picture(name, (width, height), box, paint, (large, say), alt, [p.name for p in known])


class _Text(NamedTuple):
    """A text of a picture, in units of the drawing."""

    text: str
    x: float
    y: float
    colour: str
    style: dict[str, Any]


def _beside(text: str, x: float, y: float, colour: str = "muted", alignment: str = "center") -> _Text:
    return _Text(text, x, y, colour, {"va": "center_baseline", "ha": alignment})


def _picture(
    name: str, size: tuple[float, float], box: tuple[float, ...], paint: Callable[[Any, Any], list[_Text]],
    says: tuple[Say, Say], alt: str, titles: list[str],
) -> Markup:  # fmt: skip
    """Return an SVG element with transparent axes, a line below them and horizontal grid lines.

    Args:
      name: A name of the picture that is unique on its page.
      size: Its width and height.
      box: Left, bottom, width and height of the axes.
      paint: Draws into the axes, given a class of locators of ticks too, and returns the texts.
      says: Write a cost and a value at the axes.
      alt: The description for readers who do not see the picture.
      titles: The texts that appear when a reader points at the curves or marks.
    """
    import matplotlib.style  # here because it is slow, and a launch does not need it
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    (width, height), out = size, io.StringIO()
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        axes.patch.set_visible(False)
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.spines["bottom"].set(color=hex_of("muted"), linewidth=0.7)
        axes.tick_params(length=0, pad=5, labelcolor=hex_of("muted"))
        axes.grid(axis="y", color=hex_of("rule"), linewidth=0.7)
        axes.set_axisbelow(True)
        texts = paint(axes, MaxNLocator)
        for axis, say in zip((axes.xaxis, axes.yaxis), says, strict=True):
            steps = np.diff(axis.get_majorticklocs())  # of a logarithmic axis they differ
            step = float(steps[0]) if steps.size and np.allclose(steps, steps[0], rtol=1e-3) else 0.0
            axis.set_major_formatter(FuncFormatter(lambda value, _, say=say, step=step: tick(say, value, step)))
        for n, text in enumerate(texts):  # placeholders: matplotlib could read a text as TeX
            axes.text(text.x, text.y, f"@{n}@", color=hex_of(text.colour), transform=None, **text.style)
        # without the date and other facts that would change from day to day
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(out.getvalue(), alt, [text.text for text in texts], titles)


def _plot(axes: Any, curve: Curve, key: str) -> None:
    """Draw a curve with its band. A finite value without a finite neighbour is a dot."""
    colour = hex_of(curve.colour)
    style = {"color": colour, "alpha": curve.opacity, "clip_on": False, "solid_capstyle": "round"}
    if curve.band is not None:
        axes.fill_between(curve.steps, *curve.band, color=colour, alpha=0.18, linewidth=0)
    shown = np.where(curve.finite, curve.values, np.nan)
    axes.plot(curve.steps, shown, linewidth=curve.width, linestyle=curve.dash, gid=key, **style)
    alone = curve.finite & ~np.append(False, curve.finite[:-1]) & ~np.append(curve.finite[1:], False)
    if alone.any():
        size = 2.5 * curve.width
        axes.plot(curve.steps[alone], curve.values[alone], "o", markersize=size, markeredgewidth=0, **style)


def _scale(axes: Any, finite: np.ndarray, log: bool, bounds: tuple[float, ...], least_range: float = 0) -> None:
    """Set the limits of the axis of values. With ``log`` it is logarithmic if the values span decades."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    least = finite[finite > 0].min(initial=np.inf)
    if log and low >= 0 and high >= 50 * least:
        if low > 0:
            axes.set_yscale("log")
            axes.set_ylim(low / 1.3, high * 1.3)
            few_decades = high < 300 * low
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,), numticks=8))
        else:  # zeros lie on the axis, below the decades
            axes.set_yscale("symlog", linthresh=max(least, high * 1e-6), linscale=0.5)
            axes.set_ylim(0, high * 1.3)
        return
    room = max(0.05 * (high - low), (least_range - (high - low)) / 2) or max(0.1 * abs(high), 1e-12)
    bottom = low if low in bounds and low < high else low - room
    top = high if high in bounds and low < high else high + room
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))


# ---- where names are written ----


def _label_places(axes: Any, curves: list[Curve], bottom: float, top: float) -> list[tuple[Curve, float]]:
    """Return the labelled curves from the lowest up, each with the height of its label. Labels do not overlap."""
    labelled = [c for c in curves if c.shown and c.finite.any()]
    ends = [(axes.transData.transform((0, c.values[c.finite][-1]))[1], c) for c in labelled]
    ends.sort(key=lambda end: end[0])
    heights = np.array([y for y, _ in ends])
    for _ in range(100):  # neighbours push each other apart, by half of what is missing
        push = np.maximum(LINE - np.diff(heights), 0) / 2
        heights += np.append(0, push) - np.append(push, 0)
        heights = np.clip(heights, bottom + 6, top) if len(heights) else heights
    return [(c, y) for (_, c), y in zip(ends, heights.tolist(), strict=True)]


def _apart(points: list[Point], step: float) -> list[Point]:
    """Return the points, those of one cost moved side by side, so that their error bars do not overlap."""
    alike = [[n for n, q in enumerate(points) if abs(q.cost - p.cost) < step / 2] for p in points]
    shifts = [step * (near.index(n) - (len(near) - 1) / 2) for n, near in enumerate(alike)]
    return [p._replace(cost=p.cost + shift) for p, shift in zip(points, shifts, strict=True)]


def _value_of(axes: Any, point: Point, text: str) -> _Text:
    """Return the value of a point on the edge, above or below it."""
    x, y = axes.transData.transform((point.cost, point.value))
    return _beside(text, x, y + (11 if y > axes.get_window_extent().y0 + 40 else -11), point.colour)


def _places(
    axes: Any, points: list[Point], line: list[Point], segments: list[list[tuple[float, float]]]
) -> tuple[list[tuple[Point, float, float, str]], bool]:
    """Return where each name is written, near its point: (point, x, y, alignment), and whether one lies on something.

    Args:
      axes: The axes.
      points: The points with names.
      line: Other points.
      segments: The lines of the picture, each as its points.
    """
    box, to = axes.get_window_extent(), axes.transData.transform
    zero = to((0.0, 0.0))[1]
    obstacles = [
        (box.x0, box.x1, zero - 1, zero + 1, 4.0)
    ]  # left, right, bottom, top, and how bad it is to write there
    for ends in segments:
        for a, b in itertools.pairwise(to(ends).tolist() if ends else []):
            count = max(2, int(max(abs(b[0] - a[0]), abs(b[1] - a[1])) / 5))
            for x, y in zip(*(np.linspace(a[k], b[k], count) for k in (0, 1)), strict=True):
                obstacles.append((x - 3, x + 3, y - 3, y + 3, 5.0))
    for p in [*points, *line]:
        (x, y), (_, low), (_, high) = (to((p.cost, p.value + off)) for off in (0.0, -(p.error or 0), p.error or 0))
        obstacles += [(x - 5, x + 5, y - 5, y + 5, 9.0), (x - 1, x + 1, low, high, 3.0)]
    places, crowded = [], False
    for p in points:
        (x, y), length = to((p.cost, p.value)), LETTER * len(p.name)

        def price(place: tuple[float, float], x=x, y=y, length=length) -> tuple[float, bool]:
            start, at = place
            on = lambda left, right, low, high: (
                left < start + length and start < right and low < at + 6 and at - 6 < high
            )
            outside = start < box.x0 or start + length > box.x1 + 18 or not box.y0 + 6 < at < box.y1 + 12
            total = sum(bad for *corners, bad in obstacles if on(*corners))
            return total + 0.12 * abs(at - y) + 0.5 * (start < x) + 50 * outside, total > 0 or outside

        starts = [(start, y + up) for start in (x + 9, x - 9 - length) for up in range(-60, 61, 2)]
        starts += [(x - length / 2, y + up) for up in (-14, 14)] if length < 20 else []
        start, height = min(starts, key=lambda place: price(place)[0])
        crowded |= price((start, height))[1]
        obstacles.append((start, start + length, height - 6, height + 6, 30.0))
        places.append((p, start, height, "left") if start > x else (p, start + length, height, "right"))
    return places, crowded


# ---- as elements of a page ----


def hex_of(colour: str) -> str:
    """Return the placeholder of a colour, which `_inline` replaces by the page's variable."""
    return f"#0000{COLOURS.index(colour) + 1:02x}"


def _inline(svg: str, alt: str, labels: list[str], titles: list[str]) -> Markup:
    """Return matplotlib's file as an element of a page, with the page's colours.

    Args:
      svg: The file's text.
      alt: The description for readers who do not see the picture.
      labels: The texts in the places of the placeholders "@0@", "@1@", ...
      titles: The texts that appear when a reader points at the curves, or at the marks of "dots".
    """
    root = ElementTree.fromstring(svg)
    used, of_dots = set(re.findall(r'(?:href="|url\()#([^")]+)', svg)), iter(titles)
    for element in list(root.iter()):
        for child in [child for child in element if child.tag.endswith(("metadata", "style"))]:
            element.remove(child)
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (element.text or "").strip(), ""
        match = re.fullmatch("@([0-9]+)@", element.text)
        if match:
            element.text = visible(labels[int(match[1])])
        key = element.get("id", "")
        element.attrib = {k.rpartition("}")[2]: _tidy(k, v) for k, v in element.items() if k != "id" or key in used}
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        if key.startswith("curve"):
            element.set("class", "curve")
            ElementTree.SubElement(element, "title").text = visible(titles[int(key[5:])])
        if key.startswith("dots"):
            for mark in [mark for mark in element.iter() if mark.tag.endswith("use")]:
                ElementTree.SubElement(mark, "title").text = visible(next(of_dots))
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": visible(alt)}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _tidy(attribute: str, value: str) -> str:
    if attribute in ("d", "x", "y"):  # a tenth of a unit is finer than a pixel
        value = re.sub(r"-?\d+\.\d+", lambda x: f"{float(x[0]):.1f}".removesuffix(".0"), value)
        return re.sub(r"\s*([A-Za-z])\s*", r"\1", value)
    if attribute == "style":
        value = "; ".join(part for part in re.split(r";\s*", value) if not part.startswith("font"))
        return re.sub(r"#0000([0-9a-f]{2})", lambda c: f"var(--{COLOURS[int(c[1], 16) - 1]})", value)
    return value


def standalone(svg: str) -> str:
    """Return a drawing as the text of its own file, with the colours of light and of dark pages.

    It paints its own ground. In an ``<img>`` it is dark where the page's ``color-scheme`` is, and inside a page also
    where an element around it has ``data-theme="dark"``.
    """
    bright, _, rest = (FOLDER / "page.css").read_text(encoding="utf-8").partition("@media")
    schemes = (bright, rest.partition("* {")[0].partition(":root")[2].partition("}")[0])
    light, dark = (" ".join(re.findall(r"--(?!sans|serif|mono)\w+: #\w+;", part)) for part in schemes)
    style = f".nmjax-chart{{{light} background: var(--paper); font:11px system-ui,sans-serif}}"
    style += f"@media(prefers-color-scheme:dark){{.nmjax-chart{{{dark}}}}}"
    style += f"[data-theme=light] .nmjax-chart{{{light}}}[data-theme=dark] .nmjax-chart{{{dark}}}"
    svg = str(svg).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" class="nmjax-chart" ', 1)
    return svg.replace(">", f"><style>{style}</style>", 1)
