"""Numbers, times and texts, as pages show them, and what the words of pages mean."""

import datetime
import html
import math
import os
import re
from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup, escape

from experiments.errors import visible

PLUS_MINUS = "± is the standard error of the number before it, over seeds."  # in all reports, comparisons and studies
TERMS = {  # a word as it stands in reports: its meaning. docs/glossary.md has each meaning, word by word
    "hardened": "The weights that inference uses: pruned for good, by the final form of each pruner.",
    "effective": "The FLOPs that products would have if the zeros of n:m operands cost nothing. A count, not a time.",
    "share of dense": "The effective FLOPs of a run divided by its dense FLOPs.",
    "frontier": "The runs for which no other finished run has a better score at the same or fewer effective FLOPs.",
    "best": "The best evaluation of the run. Its checkpoint is kept.",
    "train": "Means over the training steps since the previous line, with the augmentation and the label smoothing of "
    "training.",
    "validation": "A split that no step trains on. It decides which checkpoint is the best.",
    "eval": "The scores of an evaluation, with the weights as they are in training: of the validation split, or of the "
    "test split if there is no validation split.",
    "gradient norm": "The root of the sum of squares over the gradients of all parameters.",
    "FLOP per second": "FLOPs of the dense model per second, even if zeros are skipped.",
    "MFU": "Model FLOPs utilisation: dense FLOPs per second, as a share of the peak of the devices.",
    "peak memory": "The most memory that was in use at one time, of a device or of the process, as the report says.",
    "temporary memory": "What a step needs on a device besides its arguments and its results, counted by XLA.",
    "slots": "The place of one operand in one product. It holds a pruner or is empty. It is named after its product "
    "and then its operand: dw_g is g in the product for dw.",
    "emulated": "XLA multiplies the pruned operands, zeros included.",
    "packed": "A kernel multiplies a packed operand, which is 2:4 or sparser, by a dense one on sparse tensor cores.",
    "mask": "An array of booleans: True where a value is kept.",
    "taken for": "A test example has one class, and the model predicts another: the first is taken for the second.",
    "confidence": "The probability that the model gives to its prediction.",
    "loss": "Mean cross-entropy in nats: per example for a classifier, per token for a language model.",
    "nats": "One nat is 1.44 bits.",
    "±": "The standard error of the number before it: over seeds, or over the test examples for the accuracy of a run.",
}  # fmt: skip
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def only_tables(text: str) -> Markup:
    """Return the tables and paragraphs of a piece of HTML. Other tags and all attributes are left out, texts stay.

    What is returned holds no link, no picture, no style and no script, whoever wrote the text.

    >>> only_tables("<p onclick='x'>a &lt; b<meta http-equiv=refresh></table>")
    Markup('<p>a &lt; b</p>')
    """
    parts, opened = [], []
    for piece in re.split(r"(<[^<>]*>)", text):
        tag = re.fullmatch(r"<(/?)(table|thead|tbody|tr|th|td|p|br)\b[^<>]*>", piece)
        if tag is None:
            parts.append("" if re.fullmatch(r"<[^<>]*>", piece) else escape(visible(html.unescape(piece))))
        elif tag[2] == "br":
            parts.append("<br>")
        elif not tag[1] and tag[2] not in opened:
            opened.append(tag[2])
            parts.append(f"<{tag[2]}>")
        while tag and tag[1] and tag[2] in opened:
            parts.append(f"</{opened.pop()}>")
    return Markup("".join([*parts, *(f"</{name}>" for name in reversed(opened))]))


def number(x: float) -> str:
    """Return a number with about three digits: 0.318, 12,000, 2.5·10⁻⁵."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        shown = f"{x:,.0f}" if abs(x) >= 999.5 else f"{x:.3g}"
    else:
        digits, power = f"{x:.2e}".split("e")
        raised = f"10{str(int(power)).translate(_RAISED)}"
        shown = raised if float(digits) == 1 else f"{float(digits):g}·{raised}"
    return shown.replace("-", "−")


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of 1, which is shown in percent."""
    return metric.endswith("accuracy")


def score(metric: str, value: float | None, signed: bool = False) -> str:
    """Return the score of a metric as text: a share in percent, a signed share in points without a unit."""
    if value is None:
        return ""
    if not is_share(metric):
        return f"{value:{'+' if signed else ''}.4f}"
    return f"{100 * value:+.2f}" if signed else f"{100 * value:.2f} %"


def plus_minus(metric: str, error: float | None) -> str:
    """Return an error as it stands behind its score: " ± 2.00"."""
    return "" if error is None else f" ± {score(metric, error).removesuffix(' %')}"


def percent(x: float) -> str:
    """Return a share of 1 in percent."""
    return f"{100 * float(x):.3g} %".replace("-", "−") if math.isfinite(x) else number(x)


def large(x: float) -> str:
    """Return a count with a unit prefix: 12k, 3.4M."""
    if not math.isfinite(x) or abs(x) < 999.5:
        return number(x)
    power = min(int(math.log10(abs(x) / 0.9995)) // 3, 6)  # 999,700 has three digits as 1M
    return f"{x / 1000**power:.3g}{' kMGTPE'[power]}".replace("-", "−")


def in_bytes(x: float) -> str:
    """Return a number of bytes with a unit prefix: 3.4 GB."""
    shown = large(x)
    return f"{shown[:-1]} {shown[-1]}B" if shown[-1:].isalpha() else f"{shown} B"


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 1 h 54 min."""
    if not 60 <= seconds < math.inf:
        return f"{seconds:.3g} s"
    days, rest = divmod(round(seconds), 86400)
    hours, minutes, seconds = rest // 3600, rest // 60 % 60, rest % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def tick(say: Callable[[float], str], value: float, step: float) -> str:
    """Return the text of a tick with as many digits as the step between ticks needs; step 0: as ``say`` writes it.

    >>> [tick(number, x, 0.025) for x in (1.0, 1.025)], tick(percent, 0.9875, 0.0025), tick(signed, 0.0025, 0.0025)
    (['1.000', '1.025'], '98.75 %', '+0.0025')
    >>> tick(large, 1024, 0), tick(large, 1_025, 25), tick(large, 20_000, 5_000)
    ('1,024', '1,025', '20k')
    """
    if say is large and 1000 <= abs(value) < 1e5 and float(f"{value:.3g}") != value:
        return f"{value:,.0f}".replace("-", "−")
    forms = {number: ("{:,.{}f}", 1), percent: ("{:,.{}f} %", 100)}
    form = (forms | {signed: ("{:+,.{}f}", 1), in_points: ("{:+,.{}f}", 100)}).get(say)
    if form is None or not step or not 1e-4 <= abs(step) < 1e6:
        return say(value)
    if say in (signed, in_points) and value == 0:
        return "0"
    text, factor = form
    digits = next((n for n in range(6) if abs(factor * step * 10**n - round(factor * step * 10**n)) < 1e-6), 6)
    return text.format(factor * value + 0.0, digits).replace("-", "−")


def signed(x: float) -> str:
    """Return a difference with its sign: +0.012."""
    return f"{x:+.3f}".replace("-", "−")


def in_points(x: float) -> str:
    """Return a difference of shares of 1 in percentage points, with its sign: +1.2."""
    return f"{100 * x:+.1f}".replace("-", "−")


def milliseconds_of(seconds: float) -> str:
    """Return a part of a step's time: 12.1 ms, 1,440 ms."""
    return f"{number(1e3 * seconds)} ms"


def milliseconds(seconds: float) -> str:
    """Return the time of a step: 12.1 ms, 1.44 s."""
    return milliseconds_of(seconds) if seconds < 1 else duration(seconds)


def moment(iso: object) -> str:
    """Return an ISO time as people write it. Other values are returned as text."""
    try:
        at = datetime.datetime.fromisoformat(iso)
        return f"{at.day} {at:%b %Y, %H:%M %Z}".strip()
    except (ValueError, TypeError):
        return str(iso or "")


def markdown_table(rows: Sequence[Sequence[str]], narrow: bool = False) -> str:
    """Return a table in Markdown. The first row is its head. The rule below it may be narrow, without spaces."""
    head, *others = ("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows)
    rule = "|---" if narrow else "| --- "
    return "\n".join([head, f"{rule * len(rows[0])}|", *others])


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean of values with its standard error as text; "" without values.

    >>> spread([0.5, 0.6, 0.7], ".2f"), spread([1.0], ".2f"), spread([], ".2f")
    ('0.60 ± 0.06', '1.00', '')
    """
    if not len(values):
        return ""
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:{form}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{error}"


def short(name: str, length: int = 18) -> str:
    """Return a name, without its middle if it is longer than ``length``."""
    return name if len(name) <= length else f"{name[: length // 2 - 1]}…{name[-(length // 2) :]}"


def distinct(names: list[str], length: int = 18) -> list[str]:
    """Return short labels of names. Different names have different labels.

    >>> distinct(["blocks=ste(2,4)", "blocks=dense"])
    ['ste(2,4)', 'dense']
    >>> distinct(["m=fade(2,4,linear(1,0,30%)); dw_g=mvue(2,4)", "m=fade(2,4,linear(1,0,70%)); dw_g=mvue(2,4)"])
    ['…30%)); dw_g=mvue…', '…70%)); dw_g=mvue…']
    """
    front = _shared_front(names, "=;/ ")
    own = [name[front:].lstrip("; ,") or name for name in names]
    labels = [short(text, length) for text in own]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [n for n, other in enumerate(labels) if other == label]
        front = _shared_front([own[n] for n in alike], "=;/ (,")
        for n in alike:
            rest = f"…{own[n][front:]}"
            if front < len(own[n]):
                labels[n] = rest if len(rest) <= length else f"{rest[: length - 1]}…"
    return [f"{n}: {short(x, length - 4)}" if labels.count(x) > 1 else x for n, x in enumerate(labels, 1)]


def _shared_front(names: list[str], signs: str) -> int:
    """Return the length of the front that all names share: all of it if it is one of the names, else up to a sign."""
    common = os.path.commonprefix(names) if len(set(names)) > 1 else ""
    return len(common) if common in names else max(common.rfind(sign) for sign in signs) + 1


def parts_that_differ(names: list[str]) -> list[str]:
    """Return paths without the parts at the front and at the end that all of them share."""
    paths = [name.split("/") for name in names]
    if len(paths) < 2:
        return names
    shortest = min(map(len, paths))
    front = next((i for i in range(shortest - 1) if len({p[i] for p in paths}) > 1), shortest - 1)
    back = next((i for i in range(shortest - 1 - front) if len({p[-1 - i] for p in paths}) > 1), shortest - 1 - front)
    return ["/".join(p[front : len(p) - back]) for p in paths]
