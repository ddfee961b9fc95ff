"""Curves as SVG that belongs to its page: drawn once by matplotlib, coloured and lettered by the style sheet."""

import io
import re
from collections.abc import Callable
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from experiments.report.words import number, short, visible

WIDTH, HEIGHT, LETTER, LINE = 460, 250, 6.3, 13.5  # in units of the drawing, a letter and a line of its text too
COLOURS = ("ink", "muted", "rule", "bad", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")  # variables of page.css
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
STEPS = (1, 2, 2.5, 5, 10)  # of an axis: round numbers
BEYOND = 1e100  # arrays of float32 end at 3e38: what is larger was infinite on its way


class Curve(NamedTuple):
    """One line: its points, and its looks."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    colour: str = "ink"
    width: float = 1.6
    dash: str | tuple = "-"
    opacity: float = 1.0
    label: str | None = None  # at its end; its name, unless this says otherwise
    band: tuple[np.ndarray, np.ndarray] | None = None  # around it, from the one to the other

    @property
    def shown(self) -> str:
        return short(self.name if self.label is None else self.label)

    @property
    def finite(self) -> np.ndarray:
        return np.abs(np.nan_to_num(self.values, nan=np.inf)) < BEYOND


def thinned(curve: Curve, limit: int = 500) -> Curve:
    """At most about ``limit`` points: of each bin the least, the largest and one that is not finite, and both ends."""
    if len(curve.values) <= limit:
        return curve
    keep, finite = {0, len(curve.values) - 1}, curve.finite
    for at in np.array_split(np.arange(len(curve.values)), limit // 2 - 1):
        good, bad = at[finite[at]], at[~finite[at]]
        keep.update(bad[:1])
        if good.size:
            keep |= {good[np.argmin(curve.values[good])], good[np.argmax(curve.values[good])]}
    kept = sorted(keep)
    return curve._replace(steps=curve.steps[kept], values=curve.values[kept])


def smoothed(curve: Curve, bins: int = 50) -> list[Curve]:
    """A noisy curve as it is, faint, and the means of its bins, clear; one of few points as it is."""
    if len(curve.values) < 3 * bins:
        return [curve]
    groups = np.array_split(np.where(curve.finite, curve.values, np.nan), bins)
    steps = np.array([at.mean() for at in np.array_split(curve.steps, bins)])
    means = np.array([g[g == g].mean() if (g == g).any() else np.nan for g in groups])
    return [curve._replace(width=0.7, opacity=0.4, label=""), curve._replace(steps=steps, values=means)]


def mean(curves: list[Curve], **looks) -> Curve:
    """The mean of what is finite, at every step where there is any."""
    steps = np.unique(np.concatenate([c.steps for c in curves]))
    total, count = np.zeros(len(steps)), np.zeros(len(steps))
    for c in curves:
        at = np.searchsorted(steps, c.steps[c.finite])
        total[at] += c.values[c.finite]
        count[at] += 1
    return Curve("mean", steps, np.where(count > 0, total / np.maximum(count, 1), np.nan), **looks)


def banded(curves: list[Curve], name: str, **looks) -> Curve:
    """The mean of some curves, in a band from the least to the largest."""
    line = mean(curves, **looks)._replace(name=name)
    at = lambda step: [c.values[c.steps == step][0] for c in curves if (c.finite & (c.steps == step)).any()] or [np.nan]
    seen = [at(step) for step in line.steps]
    return line._replace(band=(np.array([min(v) for v in seen]), np.array([max(v) for v in seen])))


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
    """The curves over steps as an SVG element.

    ``name`` is unique on its page, ``until`` the last step of the axis, ``since`` its first, ``bounds`` are values that it reaches, ``log``
    lets values that span decades have a logarithmic axis, ``ring`` marks a (step, value, colour).
    """
    import matplotlib.style  # slow, and of no use to a launch
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
            looks = {"color": hex_of(c.colour), "alpha": c.opacity, "clip_on": False, "solid_capstyle": "round"}
            shown = np.where(c.finite, c.values, np.nan)
            if c.band is not None:
                axes.fill_between(c.steps, *c.band, color=hex_of(c.colour), alpha=0.18, linewidth=0)
            axes.plot(c.steps, shown, linewidth=c.width, linestyle=c.dash, gid=f"curve{n}", **looks)
            alone = c.finite & ~np.append(False, c.finite[:-1]) & ~np.append(c.finite[1:], False)
            if alone.any():
                axes.plot(c.steps[alone], c.values[alone], "o", markersize=2.5 * c.width, markeredgewidth=0, **looks)
        if ring:
            looks = {"markerfacecolor": "none", "markeredgecolor": hex_of(ring[2]), "clip_on": False}
            axes.plot(*ring[:2], "o", markersize=8, markeredgewidth=1.3, **looks)
        broken = np.unique(np.concatenate([c.steps[~c.finite] for c in curves]))
        bars = {"color": hex_of("bad"), "clip_on": False, "transform": axes.get_xaxis_transform()}
        axes.plot(broken, np.full(len(broken), 0.03), "x", markersize=6, markeredgewidth=1.6, **bars)
        _scale(axes, finite, log, bounds)
        axes.set_xlim(since, max([until, 1, *(c.steps.max() for c in curves)]))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=STEPS))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: say_step(x)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: say(y)))
        axes.minorticks_off()
        places = _label_places(axes, curves, bottom, top)
        for n, (c, y) in enumerate(places):
            looks = {"color": hex_of(c.colour), "transform": None, "va": "center_baseline"}
            axes.text(right + 7, y, f"@{n}@", **looks)  # no text of others: it may be TeX, or of no glyph
        axes.text(right + 18, bottom - 13, along, color=hex_of("muted"), transform=None)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    labels = [c.shown for c, _ in places]
    return inline(out.getvalue(), alt, labels, [c.name for c in curves])


def plain_axes(figure, place: tuple[float, ...], grid: str):
    """Axes on the page's own ground, with a line below and a grid across one of them."""
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
    """The limits of the values' axis, and decades where there are some."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    least = finite[finite > 0].min(initial=np.inf)
    if log and low >= 0 and high >= 50 * least:
        if low > 0:
            axes.set_yscale("log")
            axes.set_ylim(low / 1.3, high * 1.3)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=8))
        else:  # zeros lie on the axis, below the decades
            axes.set_yscale("symlog", linthresh=max(least, high * 1e-6), linscale=0.5)
            axes.set_ylim(0, high * 1.3)
        return
    room = 0.05 * (high - low) or max(0.1 * abs(high), 1e-12)
    axes.set_ylim(*(v if v in bounds and low < high else v + sign * room for v, sign in ((low, -1), (high, 1))))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))


def _label_places(axes, curves: list[Curve], bottom: float, top: float) -> list[tuple[Curve, float]]:
    """The labelled curves from the lowest up, and where each is named: beside its end, but clear of others."""
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
    """The placeholder of a colour."""
    return f"#0000{COLOURS.index(colour) + 1:02x}"


def inline(svg: str, alt: str, labels: list[str], titles: list[str]) -> str:
    """matplotlib's file as an element of a page: colours as variables, texts in their places, names to hover over."""
    root = ElementTree.fromstring(svg)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    for element in list(root.iter()):
        for child in [child for child in element if child.tag.endswith(("metadata", "style"))]:
            element.remove(child)
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (element.text or "").strip(), ""
        if match := re.fullmatch("@([0-9]+)@", element.text):
            element.text = visible(labels[int(match[1])])
        key = element.get("id", "")
        element.attrib = {k.rpartition("}")[2]: _tidy(k, v) for k, v in element.items() if k != "id" or key in used}
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        if key.startswith("curve"):
            element.set("class", "curve")
            ElementTree.SubElement(element, "title").text = visible(titles[int(key[5:])])
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
