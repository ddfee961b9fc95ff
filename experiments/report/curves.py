"""Curves as SVG elements of a page. matplotlib draws them; the page's style sheet sets their colours and fonts."""

import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from experiments.report.words import number, short, visible

WIDTH, HEIGHT, LETTER, LINE = 460, 250, 6.3, 13.5  # in units of the drawing; a letter's width and a line's height too
COLOURS = ("ink", "muted", "rule", "bad", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")  # variables of page.css
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
STEPS = (1, 2, 2.5, 5, 10)  # of an axis
BEYOND = 1e100  # float32 ends at 3e38: a larger value was infinite


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
    keep = [[0, count - 1], starts + least, starts + most, first_bad]
    kept = np.unique(np.concatenate(keep))
    return curve._replace(steps=curve.steps[kept], values=curve.values[kept])


def smoothed(curve: Curve, bins: int = 50) -> list[Curve]:
    """Return a noisy curve as two: itself, faint, and the means of its bins. A curve of few points stays one."""
    if len(curve.values) < 3 * bins:
        return [curve]
    groups = np.array_split(np.where(curve.finite, curve.values, np.nan), bins)
    steps = np.array([part.mean() for part in np.array_split(curve.steps, bins)])
    means = np.array([g[g == g].mean() if (g == g).any() else np.nan for g in groups])
    return [curve._replace(width=0.7, opacity=0.4, label=""), curve._replace(steps=steps, values=means)]


def mean(curves: list[Curve], **style: Any) -> Curve:
    """Return the mean of the finite values at every step. It is NaN at a step without any."""
    steps = np.unique(np.concatenate([c.steps for c in curves]))
    total, count = np.zeros(len(steps)), np.zeros(len(steps))
    for c in curves:
        at = np.searchsorted(steps, c.steps[c.finite])
        total[at] += c.values[c.finite]
        count[at] += 1
    return Curve("mean", steps, np.where(count > 0, total / np.maximum(count, 1), np.nan), **style)


def banded(curves: list[Curve], name: str, **style: Any) -> Curve:
    """Return the mean of some curves, with a band from the least value to the largest."""
    line = mean(curves, **style)._replace(name=name)
    low, high = [], []
    for step in line.steps:
        values = [c.values[c.steps == step][0] for c in curves if (c.finite & (c.steps == step)).any()]
        low.append(min(values, default=np.nan))
        high.append(max(values, default=np.nan))
    return line._replace(band=(np.array(low), np.array(high)))


def draw(
    name: str,
    curves: list[Curve],
    *,
    alt: str,
    until: float = 0,
    say: Callable[[float], str] = number,
    say_step: Callable[[float], str] = number,
    log: bool = False,
    bounds: tuple[float, ...] = (),
    ring: tuple[float, float, str] | None = None,
    along: str = "step",
    since: float = 0,
) -> str:
    """Return an SVG element with curves over steps.

    Args:
      name: A name of the picture that is unique on its page.
      curves: The curves.
      alt: The description for readers who do not see the picture.
      until: A step that the axis reaches at least.
      say: Writes a value at the axis.
      say_step: Writes a step at the axis.
      log: Use a logarithmic axis if the values span decades.
      bounds: Values that the axis includes.
      ring: A point that is marked: (step, value, colour).
      along: The title of the axis of steps.
      since: The first step of the axis.
    """
    import matplotlib.style  # here because it is slow, and a launch does not need it
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    margin = min(LETTER * max(len(c.shown) for c in curves) + 12, 130)
    left, right, bottom, top = 52, WIDTH - max(margin, 46), 26, HEIGHT - 8
    bands = [edge[np.isfinite(edge)] for c in curves if c.band is not None for edge in c.band]
    finite = np.concatenate([c.values[c.finite] for c in curves] + bands + [np.array(bounds)])
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
        place = (left / WIDTH, bottom / HEIGHT, (right - left) / WIDTH, (top - bottom) / HEIGHT)
        axes = plain_axes(figure, place, grid="y")
        for n, c in enumerate(curves):
            _plot(axes, c, f"curve{n}")
        if ring:
            style = {"markerfacecolor": "none", "markeredgecolor": hex_of(ring[2]), "clip_on": False}
            axes.plot(*ring[:2], "o", markersize=8, markeredgewidth=1.3, **style)
        _mark_broken(axes, curves)
        _scale(axes, finite, log, bounds)
        axes.set_xlim(since, max([until, 1, *(c.steps.max() for c in curves)]))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=STEPS))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: say_step(x)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: say(y)))
        axes.minorticks_off()
        places = _label_places(axes, curves, bottom, top)
        for n, (c, y) in enumerate(places):
            style = {"color": hex_of(c.colour), "transform": None, "va": "center_baseline"}
            axes.text(right + 7, y, f"@{n}@", **style)  # a placeholder: matplotlib could read the label as TeX
        axes.text(right + 18, bottom - 13, along, color=hex_of("muted"), transform=None)
        svg = svg_of(figure)
    return inline(svg, alt, [c.shown for c, _ in places], [c.name for c in curves])


def _plot(axes, curve: Curve, key: str) -> None:
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


def _mark_broken(axes, curves: list[Curve]) -> None:
    """Draw a cross on the axis at each step where a value is not finite."""
    broken = np.unique(np.concatenate([c.steps[~c.finite] for c in curves]))
    style = {"color": hex_of("bad"), "clip_on": False, "transform": axes.get_xaxis_transform()}
    axes.plot(broken, np.full(len(broken), 0.03), "x", markersize=6, markeredgewidth=1.6, **style)


def svg_of(figure: Any) -> str:
    """Return a matplotlib figure as SVG, without the date and other facts that would change from day to day."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return out.getvalue()


def plain_axes(figure: Any, place: tuple[float, ...], grid: str) -> Any:
    """Add transparent axes to a matplotlib figure, with a line below, and return them.

    Args:
      figure: The figure.
      place: Left, bottom, width and height, in shares of the figure.
      grid: The axis that has grid lines, "x" or "y".
    """
    figure.patch.set_visible(False)
    axes = figure.add_axes(place)
    axes.patch.set_visible(False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set(color=hex_of("muted"), linewidth=0.7)
    axes.tick_params(length=0, pad=5, labelcolor=hex_of("muted"))
    axes.grid(axis=grid, color=hex_of("rule"), linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def _scale(axes, finite: np.ndarray, log: bool, bounds: tuple[float, ...]) -> None:
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
    room = 0.05 * (high - low) or max(0.1 * abs(high), 1e-12)
    bottom = low if low in bounds and low < high else low - room
    top = high if high in bounds and low < high else high + room
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))


def _label_places(axes, curves: list[Curve], bottom: float, top: float) -> list[tuple[Curve, float]]:
    """Return the labelled curves from the lowest up, each with the height of its label. Labels do not overlap."""
    ends = []
    for c in (c for c in curves if c.shown and c.finite.any()):
        last = c.values[c.finite][-1]
        ends.append((axes.transData.transform((0, last))[1], c))
    ends.sort(key=lambda end: end[0])
    heights = np.array([y for y, _ in ends])
    for _ in range(100):  # neighbours push each other apart, by half of what is missing
        push = np.maximum(LINE - np.diff(heights), 0) / 2
        heights += np.append(0, push) - np.append(push, 0)
        heights = np.clip(heights, bottom + 6, top) if len(heights) else heights
    return [(c, y) for (_, c), y in zip(ends, heights.tolist(), strict=True)]


def hex_of(colour: str) -> str:
    """Return the placeholder of a colour, which `inline` replaces by the page's variable."""
    return f"#0000{COLOURS.index(colour) + 1:02x}"


def inline(svg: str, alt: str, labels: list[str], titles: list[str]) -> str:
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
    return ElementTree.tostring(root, encoding="unicode")


def _tidy(attribute: str, value: str) -> str:
    if attribute in ("d", "x", "y"):  # a tenth of a unit is finer than a pixel
        value = re.sub(r"-?\d+\.\d+", lambda x: f"{float(x[0]):.1f}".removesuffix(".0"), value)
        return re.sub(r"\s*([A-Za-z])\s*", r"\1", value)
    if attribute == "style":
        value = "; ".join(part for part in re.split(r";\s*", value) if not part.startswith("font"))
        return re.sub(r"#0000([0-9a-f]{2})", lambda c: f"var(--{COLOURS[int(c[1], 16) - 1]})", value)
    return value
