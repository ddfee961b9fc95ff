"""The figures of a run, section by section, each with a caption."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.report import curves as cv
from experiments.report.curves import Curve
from experiments.report.runs import Run, is_number, layers, series
from experiments.report.words import in_bytes, large, number, parts_that_differ, percent

MEASURES = {  # of layers: what each is, and values that its axis includes
    "density": ("The share of a weight that is kept.", (0, 1)),
    "flip_rate": ("The share of a mask that the measured step changed.", ()),
    "weight_error": ("The distance of the pruned weight from the weight, relative to the weight's norm.", ()),
    "gradient_variance": (
        "The variance of single draws of the pruned gradient, relative to the squared norm of the exact one.",
        (),
    ),
    "gradient_bias": (
        "The distance of the mean of four draws from the exact gradient, relative to the gradient's norm. "
        "For an unbiased method it is not 0, because four draws leave noise: half the root of the variance. The dotted "
        "line is this noise floor, as a mean of the layers.",
        (),
    ),
    "gradient_cosine": ("The cosine of the angle between the pruned gradient and the exact one.", ()),
}
USE = {  # of devices: the title, a function that writes a value, and what it is
    "mfu": (
        "Model FLOPs utilisation (MFU)",
        percent,
        "The dense FLOPs of the model per second, as a share of the peak of the devices for dense products. "
        "On sparse tensor cores a 2:4 product can be faster than this peak.",
    ),
    "device_memory": ("Peak memory of a device", in_bytes, "The most memory in use so far on the fullest device."),
    "process_memory": (
        "Peak memory of the process",
        in_bytes,
        "The most resident memory of the whole process so far. The backend does not report the memory of devices.",
    ),
}
SMOOTHED = " Smoothing: the faint line shows single values, the clear line shows the means of 50 bins of steps."
DISTINCT = 8  # if there are more layers, their lines are grey and only the mean has a colour


class Figure(NamedTuple):
    """A figure of a page."""

    title: str
    svg: str
    caption: str


class Table(NamedTuple):
    """A table of a page."""

    head: list[str]
    rows: list[list[str]]


def scores(run: Run) -> list[tuple[str, Callable[[float], str], list[Curve]]]:
    """Return the loss and the accuracy: the name, a function that writes a value, and the curves."""
    kinds = {kind: run.metrics.get(kind, []) for kind in ("train", "eval")}
    shown = []
    for key, say in (("loss", number), ("accuracy", percent)):
        curves = [
            *_of_baseline(run, key),
            Curve("train", *series(kinds["train"], key), "muted", 1.4),
            Curve("eval", *series(kinds["eval"], key), "s0", 1.8, cv.DASHES[1]),
            Curve("hardened", *series(kinds["eval"], f"hardened_{key}"), "s1", 2.2),
        ]
        if curves := [c for c in curves if c.steps.size]:
            shown.append((key, say, curves))
    return shown


def _of_baseline(run: Run, key: str) -> list[Curve]:
    """Return the curve of the run that a run is compared with, of its hardened weights if it has such scores."""
    lines = run.baseline.get("eval", [])
    hardened, plain = series(lines, f"hardened_{key}"), series(lines, key)
    return [Curve("baseline", *(hardened if hardened[0].size else plain), "s3", 1.6, cv.DASHES[3])]


def why_losses_differ(run: Run) -> str:
    """Return a sentence on why the losses of training and of evaluations differ, from the settings of the run."""
    of = lambda group: run.config.get(group) if isinstance(run.config.get(group), dict) else {}
    data, model, teacher = of("data"), of("model"), of("teacher")
    has = lambda value: is_number(value) and value > 0
    parts = [f"{name} {number(value)}" for name, value in (
        ("label smoothing", data.get("smoothing")), ("mixup", data.get("mixup")), ("dropout", model.get("dropout")),
    ) if has(value)]  # fmt: skip
    parts += [name for name, value in (("random crops", data.get("crop")), ("random flips", data.get("flip"))) if value]
    parts += ["a teacher"] if teacher.get("weights") else []
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    words = f" Training has {listed}; evaluations do not." if parts else ""
    words += " Evaluations use a moving average of the weights." if has(run.config.get("ema")) else ""
    return words + " Values of train are means over the steps since the line before, so they are of earlier weights."


def latest(run: Run) -> list[tuple[str, str]]:
    """Return the last figures of a run that wrote no summary."""
    judged_first = sorted(scores(run), key=lambda score: score[0] != run.about.get("metric"))
    names = {"eval": "validation", "hardened": "validation hardened"} if run.split == "validation" else {}
    figures = [
        (f"{names.get(c.name, c.name)} {key}", say(c.values[-1]))
        for key, say, curves in judged_first
        for c in reversed(curves)
        if c.name != "baseline"
    ]
    steps = [record["step"] for records in run.metrics.values() for record in records]
    return [*figures, ("steps", f"{max(steps):,}")] if steps else []


def learning(run: Run) -> list[Figure]:
    """Return the figures of loss, accuracy, learning rate and gradient norm."""
    figures = []
    for key, say, curves in scores(run):
        ring, words = None, last_words(curves, say)
        judged = [c for c in curves if c.name not in ("train", "baseline") and c.finite.any()]
        if judged and key == run.about.get("metric"):
            c, pick = judged[-1], np.argmin if key == "loss" else np.argmax
            best = np.flatnonzero(c.finite)[pick(c.values[c.finite])]
            ring = (c.steps[best], c.values[best], c.colour)
            words += f" Best, ringed: {c.name} {say(c.values[best])} at step {c.steps[best]:,.0f}."
        if names := [c.name for c in curves if c.name not in ("train", "baseline")]:
            words += f" Scores of the {run.split} split: {', '.join(names)}."
        if key == "loss" and {"train", "eval"} <= {c.name for c in curves}:
            words += why_losses_differ(run)
        lines = [line for c in curves for line in (cv.smoothed(c) if c.name == "train" else [c])]
        words += SMOOTHED if len(lines) > len(curves) else ""
        figures.append(plot(key, curves, words, run, lines, say=say, log=key == "loss", ring=ring))
    figures += _measured(run, "learning_rate", "s0", number, bounds=(0,))
    return figures + _measured(run, "gradient_norm", "s0", number, smooth=True, log=True)


def _measured(
    run: Run, key: str, colour: str, say: Callable[[float], str], meaning: str = "", title: str = "",
    smooth: bool = False, **options: Any,
) -> list[Figure]:  # fmt: skip
    """Return the figure of one measure of training, if the run has it."""
    c = Curve("", *series(run.metrics.get("train", []), key), colour, 1.8)
    if not c.steps.size:
        return []
    lines = cv.smoothed(c) if smooth else [c]
    words = f"{meaning} {last_words([c], say)}{SMOOTHED if len(lines) > 1 else ''}".strip()
    return [plot(key, [c], words, run, lines, title=title, say=say, **options)]


def sparsity(run: Run) -> tuple[list[Figure], Table]:
    """Return a figure of each measure of the layers, and a table of the last values."""
    figures, last = [], {}
    by_measure = {key: layers(run.metrics.get("sparsity", []), key) for key in MEASURES}
    names = {name for points in by_measure.values() for name in points}
    for key, (meaning, bounds) in MEASURES.items():
        points = {_layer(name, names): arrays for name, arrays in by_measure[key].items()}
        if not points:
            continue
        ends = last[_title(key)] = {name: values[-1] for name, (_, values) in points.items()}
        curves = [Curve(name, *arrays, "muted", 0.7, "-", 0.45, "") for name, arrays in points.items()]
        lines = [*curves, cv.banded(curves, colour="s0", width=2.4)._replace(band=None)]
        if len(curves) <= DISTINCT:
            labels = parts_that_differ(list(points))
            lines = [
                c._replace(colour=f"s{n}", width=1.7, dash=cv.DASHES[n % 4], opacity=1.0, label=label)
                for n, (label, c) in enumerate(zip(labels, curves, strict=True))
            ]
        if key == "gradient_bias" and (floor := noise_floor(by_measure["gradient_variance"])):
            lines.append(floor)
        limit = max(60, min(500, 8000 // len(curves)))  # of points a curve, so that the page stays small
        words = f"{meaning} {spread(ends)}"
        figures.append(plot(key, curves, words, run, lines, limit=limit, log=not bounds, bounds=bounds))
    rows = dict.fromkeys(name for by_layer in last.values() for name in by_layer)
    said = [[name, *(number(v[name]) if name in v else "" for v in last.values())] for name in rows]
    return figures, Table(["layer", *last], said)


def noise_floor(variances: dict[str, tuple[np.ndarray, np.ndarray]]) -> Curve | None:
    """Return the bias that four draws of an unbiased method show by chance: half the root of the variance.

    It is the mean of the layers. Without variances it is None.
    """
    floors = [Curve("", steps, np.sqrt(np.maximum(values, 0)) / 2) for steps, values in variances.values()]
    style = {"colour": "s1", "width": 2.0, "dash": cv.DASHES[2], "label": "noise floor"}
    return cv.banded(floors, "noise floor", **style)._replace(band=None) if floors else None


def spread(last: dict[str, float]) -> str:
    """Return the last values of all layers in words."""
    finite = {name: value for name, value in last.items() if np.isfinite(value)}
    if len(last) == 1 or not finite:
        return f"Last: {', '.join(f'{name} {number(value)}' for name, value in list(last.items())[:DISTINCT])}."
    low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
    if finite[low] == finite[high]:
        return f"Last: {number(finite[low])} in all {len(finite)} layers."
    mean = number(float(np.mean(list(finite.values()))))
    return (
        f"Last: mean {mean} of {len(finite)} layers, lowest {number(finite[low])} in {low}, "
        f"highest {number(finite[high])} in {high}."
    )


def throughput(run: Run) -> list[Figure]:
    """Return the figures of examples and of operations per second, of their share of the peak, and of memory."""
    figures = []
    titles = {"per_second": f"{run.about.get('unit') or 'examples'} per second", "flops_per_second": "FLOP per second"}
    for key, title in titles.items():
        c = Curve("", *series(run.metrics.get("train", []), key), "s2", 1.8)
        if not c.steps.size:
            continue
        words, lines = last_words([c], large), [c]
        if c.finite.any():
            middle = float(np.median(c.values[c.finite]))
            words += f" Median {large(middle)}."
            high = c.values > 2 * middle  # if the host was held up, the steps done meanwhile count as one burst
            words += " Values above twice the median are drawn at twice the median." if high.any() else ""
            lines = cv.smoothed(c._replace(values=np.where(high, 2 * middle, c.values)))
            words += SMOOTHED if len(lines) > 1 else ""
        figures.append(plot(key, [c], words, run, lines, title=title, say=large, bounds=(0,)))
    for key, (title, say, meaning) in USE.items():
        figures += _measured(run, key, "s2", say, meaning, title, bounds=(0,))
    return figures


def plot(
    key: str, curves: list[Curve], words: str, run: Run, lines: list[Curve] | None = None, *, title: str = "",
    limit: int = 500, **options: Any,
) -> Figure:  # fmt: skip
    """Return a figure over the steps of a run, with its caption.

    Args:
      key: The name of the measure.
      curves: The measured values.
      words: The caption.
      run: The run.
      lines: The lines that are drawn instead of the curves.
      title: The title, if it is not the measure's name.
      limit: How many points a line may have.
      options: Options of `curves.draw`.
    """
    title = _title(title or key)
    broken = sum(int((~c.finite).sum()) for c in curves)
    if broken:
        words += f" Not finite: {broken} value{'s' if broken > 1 else ''}, × on the axis."
    until = max(records[-1]["step"] for records in run.metrics.values())
    thin = [cv.thinned(c, limit) for c in lines or curves]
    svg = cv.draw(
        f"plot-{key}",
        thin,
        alt=f"{title} over steps. {words}",
        up=title.lower() if title[1:2].islower() else title,
        until=until,
        say_step=large,
        **options,
    )
    return Figure(title, svg, words)


def last_words(curves: list[Curve], say: Callable[[float], str]) -> str:
    """Return the exact last values in words."""
    ends = [(f"{c.name} {say(c.values[-1])}".strip(), f"{c.steps[-1]:,.0f}") for c in curves]
    if len({step for _, step in ends}) == 1:
        return f"Last, at step {ends[0][1]}: {', '.join(value for value, _ in ends)}."
    return f"Last: {', '.join(f'{value} at step {step}' for value, step in ends)}."


def _layer(name: str, names: set[str]) -> str:
    """Return the layer of a parameter if other measures have it, such as up for up/kernel; else the name itself."""
    layer = name.rpartition("/")[0]
    return layer if layer in names else name


def _title(key: str) -> str:
    return f"{key[:1].upper()}{key[1:]}".replace("_", " ")
