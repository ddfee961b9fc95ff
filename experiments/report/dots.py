"""A value of everything that is compared, with its error: dots beside their names, as SVG that belongs to its page."""

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
