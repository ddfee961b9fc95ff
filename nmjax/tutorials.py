"""What the notebooks share: data, a small training loop, checks and figures. Needs ``nmjax[experiments]``."""

import datetime
import functools
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from cycler import cycler
from flax import nnx
from jax.typing import ArrayLike

LENGTH = 64  # bytes in a window of `batch` and `perplexity`
COLOURS = ("#2f6f9f", "#c8642b", "#3f8a5c", "#8a5a9e", "#9a8630", "#6b6b6b")
GROUND = "#fbfaf7"  # pictures have a ground of their own, so that they are readable on a dark page too
STYLE = {
    "figure.figsize": (7.2, 2.8),
    "figure.constrained_layout.use": True,
    "figure.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.edgecolor": "#8a8680",
    "axes.labelcolor": "#3d3a36",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.prop_cycle": cycler("color", COLOURS),
    "text.color": "#22201d",
    "xtick.color": "#8a8680",
    "ytick.color": "#8a8680",
    "xtick.labelcolor": "#3d3a36",
    "ytick.labelcolor": "#3d3a36",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "font.size": 9,
    "lines.linewidth": 1.8,
    "image.cmap": "RdBu_r",
    "svg.hashsalt": "nmjax",
}


def style() -> None:
    """Draw the pictures of a notebook as SVG, in the colours of the site."""
    from IPython import get_ipython

    plt.rcParams.update(STYLE)
    shell = get_ipython()
    if shell is not None:
        shell.run_line_magic("config", "InlineBackend.figure_formats = ['svg']")


# ---- data ----


def digits() -> tuple[jax.Array, jax.Array]:
    """Return 1,797 handwritten digits in a random order: images (1797, 64) from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])


def licence() -> str:
    """Return the text of nmjax's licence, as a small text to learn from."""
    clone = Path(__file__).parent.parent / "LICENSE"
    if clone.is_file():
        return clone.read_text(encoding="utf-8")
    held = importlib.metadata.files("nmjax") or []
    return next(file for file in held if file.name == "LICENSE").read_text(encoding="utf-8")


@functools.cache
def help_pages() -> tuple[np.ndarray, np.ndarray]:
    """Return the help pages of Python as bytes: nine tenths to train with, and the rest for the test."""
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


# ---- a language model of bytes ----


def batch(seed: int | Sequence[int]) -> jax.Array:
    """Return 32 random windows of the help pages, of `LENGTH` + 1 bytes each."""
    train, _ = help_pages()
    starts = np.random.default_rng(seed).integers(0, len(train) - LENGTH - 1, 32)
    return jnp.asarray(train[starts[:, None] + np.arange(LENGTH + 1)], jnp.int32)


def loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of every byte but the first of each window."""
    logits: jax.Array = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def perplexity(model: nnx.Module) -> float:
    """Return the perplexity per byte on 64 windows of the test text."""
    _, test = help_pages()
    windows = jnp.asarray(test[: 64 * (LENGTH + 1)].reshape(64, LENGTH + 1), jnp.int32)
    return float(jnp.exp(nnx.jit(loss)(model, windows)))


def trained(model: nnx.Module, steps: int, rate: float, seed: int) -> nnx.Module:
    """Return the model after some steps of Adam: an ordinary loop of Flax, which does not know of sparsity.

    Args:
      model: A model of bytes. It is changed in place.
      steps: The number of steps.
      rate: The peak of the learning rate.
      seed: The seed of the batches.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: "nnx.Optimizer[nnx.Module]", tokens: jax.Array) -> None:
        optimizer.update(model, nnx.grad(loss)(model, tokens))

    for i in range(steps):
        step(model, optimizer, batch((seed, i)))
    return model


# ---- checks ----


def refused(call: Callable[[], Any]) -> None:
    """Call a function that is to raise a TypeError or a ValueError, and print its message."""
    try:
        call()
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}\n")


def check(law: str, holds: ArrayLike) -> None:
    """Print whether a law holds everywhere in an array of booleans."""
    print("holds " if jnp.all(holds) else "BROKEN", law)


def same(a: Any, b: Any) -> bool:
    """Return whether two pytrees have the same leaves, bit for bit."""
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# ---- bits and times of a device ----


def in_turn(calls: Mapping[Any, Callable[[], Any]], rounds: int, seconds: float = 0.05) -> dict[Any, np.ndarray]:
    """Return the seconds of one call of each function, round by round. All are timed in turn.

    A function that fails is printed, and its times are NaN.

    Args:
      calls: The functions, by their names.
      rounds: The number of rounds.
      seconds: About the time that the calls of one function take in a round.

    >>> def refuses():
    ...     raise ValueError("no kernel")
    >>> times = in_turn({"ones": lambda: jnp.ones(3), "refuses": refuses}, rounds=2, seconds=0.001)
    refuses: ValueError: no kernel
    >>> times["ones"].shape, times["refuses"].tolist()
    ((2,), [nan, nan])
    """

    def timed(call: Callable[[], Any], count: int) -> float:
        begin, last = time.perf_counter(), None
        for _ in range(count):
            last = call()
        jax.block_until_ready(last)  # a device works in order
        return (time.perf_counter() - begin) / count

    times = {name: np.full(rounds, np.nan) for name in calls}
    counts: dict[Any, int] = {}
    for name, call in calls.items():
        try:
            timed(call, 1)  # compiles
            counts[name] = int(np.clip(seconds / timed(call, 1), 1, 30))
        except Exception as error:  # such as of a compiler
            print(f"{name}: {_first_line(error)}")
    for i in range(rounds):
        for name, count in counts.items():
            times[name][i] = timed(calls[name], count)
    return times


def spread(values: ArrayLike, form: str = ",.0f") -> str:
    """Return the median and the quartiles of times as text, or "failed" if one is NaN.

    >>> spread([1, 2, 3, 4, 10]), spread([float("nan")])
    ('3 (2 to 4)', 'failed')
    """
    if np.isnan(values).any():
        return "failed"
    low, middle, high = np.quantile(np.asarray(values), (0.25, 0.5, 0.75))
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def compared(one: Callable[[], jax.Array], other: Callable[[], jax.Array]) -> str:
    """Return "equal" if two functions give the same bits; else how many values differ and by how much, or the error.

    >>> x = jnp.array([1.0, 2.0, -0.0])
    >>> compared(lambda: x, lambda: x), compared(lambda: x, lambda: x.at[1].set(4.0))
    ('equal', '1 of 3 differ, by up to 5.0e-01 of the value')
    >>> compared(lambda: x, lambda: jnp.abs(x))
    '1 of 3 differ, by up to 0.0e+00 of the value'
    """
    try:
        a, b = jax.block_until_ready((one(), other()))
    except Exception as error:  # such as of a compiler
        return _first_line(error)
    unsigned = f"uint{8 * a.dtype.itemsize}"
    differ = a.view(unsigned) != b.view(unsigned)
    if not differ.any():
        return "equal"
    a, b = (v.astype(jnp.float32) for v in (a, b))
    largest = jnp.maximum(jnp.abs(a), jnp.abs(b))
    relative = jnp.where(largest > 0, jnp.abs(a - b) / largest, 0)
    return f"{differ.sum():,} of {differ.size:,} differ, by up to {relative.max():.1e} of the value"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. The first row is its head.

    >>> print(table([["", "time"], ["copy", "170"]]))
    |      | time |
    |------|------|
    | copy | 170  |
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def machine() -> list[list[str]]:
    """Return the devices, the date and the versions of JAX as rows of a table."""
    devices = jax.devices()
    rows = [["devices", f"{len(devices)} x {devices[0].device_kind}"], ["date", f"{datetime.date.today()}"]]
    for name in ("jax", "jaxlib", "libtpu"):
        found = list(importlib.metadata.distributions(name=name))
        rows.append([name, found[0].version if found else "not installed"])
    return rows


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


# ---- figures ----


def mean_and_spread(truth: ArrayLike, samples: Mapping[str, Any]) -> None:
    """Draw the mean of each pruner's draws against the true values, with the standard deviation as a bar.

    Args:
      truth: The values before pruning.
      samples: The draws of each pruner, by its name: arrays of shape (draws, values).
    """
    _, axes = plt.subplots(1, len(samples), figsize=(7.2, 2.4), sharey=True)
    for ax, (name, draws) in zip(axes, samples.items(), strict=True):
        ax.axline((0, 0), slope=1, color="#b9b4ab", linewidth=1)
        ax.errorbar(truth, draws.mean(0), draws.std(0), fmt=".", markersize=4, elinewidth=0.7)
        ax.set(title=name, xlabel="true value", xticks=[-2, 0, 2])
    axes[0].set_ylabel("mean of the draws")


def variances(possible: ArrayLike, measured: Mapping[str, float]) -> None:
    """Draw a histogram of possible variances, and a line at the variance of each pruner.

    Args:
      possible: The variances of many random choices.
      measured: The variance of each pruner, by its name.
    """
    _, ax = plt.subplots(figsize=(7.2, 2.3))
    ax.hist(possible, bins=np.geomspace(0.9, 60, 70).tolist(), color="#c9c4ba")
    for i, (name, value) in enumerate(measured.items()):
        ax.axvline(value, color=f"C{i + 1}", label=f"{name}: {value:.2f}")
    ax.legend(frameon=False)
    ax.set(xscale="log", yticks=[], xlabel="variance of one group")
    ax.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.minorticks_off()
    ax.spines["left"].set_visible(False)


def errors_by_length(lengths: Sequence[int], errors: Mapping[str, Any]) -> None:
    """Draw the error of each pruner against the length of a dot product.

    Args:
      lengths: The lengths.
      errors: The errors of each pruner, by its name: one for each length.
    """
    _, ax = plt.subplots()
    for name, line in errors.items():
        ax.loglog(lengths, line, ".-", label=name)
    ax.set(xlabel="length of the dot product", ylabel="relative error")
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.legend(frameon=False)


def moving_value(moved: ArrayLike, curves: Mapping[str, Any], names: Sequence[str]) -> None:
    """Draw the values of a group after pruning, while one of them moves. Jumps are left blank.

    Args:
      moved: The value that moves, before pruning. It is the first of its group.
      curves: The group after each pruner, by the pruner's name: arrays of shape (steps, values).
      names: The name of each value of the group.
    """
    figure, axes = plt.subplots(1, len(curves), figsize=(7.2, 2.6), sharey=True)
    for ax, (name, values) in zip(axes, curves.items(), strict=True):
        jumps = np.abs(np.diff(values, axis=0, prepend=values[:1])) > 0.05
        ax.plot(moved, np.where(jumps, np.nan, values)[:, 1:], label=names[1:])
        ax.plot(moved, np.where(jumps, np.nan, values)[:, 0], label=names[0], linewidth=2.4, linestyle=(0, (3, 1)))
        ax.set(title=name, xlabel="value that moves")
    axes[0].set_ylabel("values after pruning")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)


def matrices(named: Mapping[str, Any]) -> None:
    """Draw matrices side by side. Zeros are blank, and lines mark groups of four along both axes.

    Args:
      named: The matrices, by their titles.
    """
    _, axes = plt.subplots(1, len(named), figsize=(7.2, 2.9))
    for ax, (title, matrix) in zip(axes, named.items(), strict=True):
        rows, columns = np.shape(matrix)
        ax.imshow(np.where(matrix == 0, np.nan, matrix), vmin=-2.5, vmax=2.5)
        ax.set_xticks(np.arange(-0.5, columns, 4), [])
        ax.set_yticks(np.arange(-0.5, rows, 4), [])
        ax.set_title(title, fontsize=8)
        ax.grid(color="#8a8680", linewidth=0.7)
    axes[0].set(xlabel="out-features", ylabel="in-features")


def changes(table: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a table of relative changes, in colour.

    Args:
      table: For each row, by its name, the change of each column, by its name. 0 means that no bit changed.
    """
    columns = list(next(iter(table.values())))
    values = np.array([[row[column] for column in columns] for row in table.values()])
    _, ax = plt.subplots(figsize=(5.0, 2.9))
    ax.imshow(np.where(values == 0, np.nan, values), cmap="Blues", vmin=0, vmax=0.9, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        text, colour = (f"{value:.0%}", "#22201d") if value else ("no change", "#a39d93")
        ax.text(j, i, text, ha="center", va="center", color=colour)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(table)), table)
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)


def methods(filled: Mapping[str, Mapping[str, bool]], shares: Mapping[str, Any]) -> None:
    """Draw which slots each method fills, and the share that is left of the FLOPs of its products.

    Args:
      filled: For each method, by its text, the six slots by name, and True where the slot is filled.
      shares: For each method, by its text, the shares of y, dx and dw.
    """
    _, ax = plt.subplots(figsize=(7.2, 3.6))
    for i, (text, slots) in enumerate(filled.items()):
        for j, full in enumerate(slots.values()):
            ax.plot(j, i, "s", markersize=9, color=f"C{j // 2}" if full else "#e6e2da")
        for j, share in enumerate((*shares[text], np.mean(shares[text]))):
            colour = "#22201d" if share < 1 else "#b9b4ab"
            ax.text(6.4 + j, i, f"{share:.3g}", ha="center", va="center", color=colour)
    names = [name.replace("_", "\n", 1) for name in next(iter(filled.values()))]
    ax.set_xticks([*range(6), *np.arange(4) + 6.4], [*names, "share\nof y", "share\nof dx", "share\nof dw", "mean"])
    ax.set_yticks(range(len(filled)), filled)
    ax.set(xlim=(-0.5, 9.9), ylim=(len(filled) - 0.4, -0.6))
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)


def chances(temperatures: ArrayLike, values: Any, measured: Any, formula: Any) -> None:
    """Draw the chance of each value to be kept against the temperature: dots are measured, lines are the formula.

    Args:
      temperatures: The temperatures.
      values: The values of the group.
      measured: The measured chances, of shape (temperatures, values).
      formula: The chances by the formula, of the same shape.
    """
    _, ax = plt.subplots(figsize=(7.2, 2.6))
    for i, value in enumerate(values):
        ax.plot(temperatures, formula[:, i], color=f"C{i}", linewidth=1)
        ax.plot(temperatures, measured[:, i], ".", color=f"C{i}", label=f"{value:g}")
    ax.set(xlabel="temperature", ylabel="chance to be kept", ylim=(0, 1))
    ax.legend(*(part[::-1] for part in ax.get_legend_handles_labels()), title="value", frameon=False)


def errors_by_start(named: Mapping[str, Any], every: int) -> None:
    """Draw the test error of several methods during training, and at its end for each start.

    Args:
      named: For each method, by its name, the test errors as shares of 1: an array of shape (starts, steps).
      every: The distance in steps between the points that are drawn.
    """
    _, (ax, last) = plt.subplots(1, 2, figsize=(7.2, 3), width_ratios=(3, 2))
    for i, (name, errors) in enumerate(named.items()):
        percent = 100 * np.asarray(errors)[:, every - 1 :: every]
        starts, points = percent.shape
        mean, deviation = percent.mean(0), percent.std(0, ddof=1) / starts**0.5
        at = every * np.arange(1, points + 1)
        ax.semilogy(at, mean, color=f"C{i}")
        ax.fill_between(at, mean - deviation, mean + deviation, color=f"C{i}", alpha=0.2, linewidth=0)
        last.plot(percent[:, -1], i + np.linspace(-0.15, 0.15, starts), ".", color=f"C{i}", alpha=0.6)
        last.errorbar(mean[-1], i, xerr=deviation[-1], fmt="|", color=f"C{i}", markersize=16)
        last.text(0, i - 0.3, f"{name}: {mean[-1]:.1f} ± {deviation[-1]:.1f}", color=f"C{i}")
    ax.set(xlabel="step", ylabel="test error, %", title="mean of the starts ± standard error")
    ax.set_yticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    ax.minorticks_off()
    last.set(
        yticks=[], ylim=(len(named) - 0.5, -0.6), xlim=(0, None), xlabel="test error, %", title="each start, at the end"
    )
    last.spines["left"].set_visible(False)


def losses(named: Mapping[str, Any], window: int = 10) -> None:
    """Draw the loss of several runs against the step.

    Args:
      named: The losses of each run, by its name: one for each step.
      window: The number of steps whose mean is one point.
    """
    _, ax = plt.subplots(figsize=(7.2, 2.6))
    for name, values in named.items():
        values = np.asarray(values)
        means = values[: len(values) // window * window].reshape(-1, window).mean(1)
        ax.semilogy(window * (np.arange(len(means)) + 0.5), means, label=f"{name}: {means[-1]:.3f} at the end")
    ax.set(xlabel="step", ylabel=f"loss, mean of {window} steps")
    ax.legend(frameon=False)


def loss_flips_errors(loss: Any, flips: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
    """Draw the loss of a run, and the flip rate and the weight error of some layers, against the step.

    Args:
      loss: The loss of each step.
      flips: The flip rates of each layer, by its name: one for each step. Zeros are not drawn.
      errors: The weight errors of each layer, by its name: one for each step.
    """
    _, axes = plt.subplots(1, 3, figsize=(7.2, 2.5))
    axes[0].plot(loss, color="C5")
    for i, name in enumerate(flips):
        shown = np.where(np.asarray(flips[name]) > 0, flips[name], np.nan)
        axes[1].semilogy(shown, ".", markersize=6 if np.isnan(shown).mean() > 0.5 else 2.5, color=f"C{i}")
        axes[2].plot(errors[name], color=f"C{i}", label=name)
    for ax, title in zip(axes, ("loss", "flip rate", "weight error"), strict=True):
        ax.set(title=title, xlabel="step")
    axes[0].set_ylim(0, None)
    axes[2].set_ylim(0, None)
    axes[2].legend(frameon=False)


def run_curves(accuracies: Mapping[str, Any], errors: Mapping[str, Any], flips: Mapping[str, Any]) -> None:
    """Draw the accuracies of a run, and the weight error and the flip rate of its layers, against the step.

    Args:
      accuracies: The steps and the accuracies as shares of 1, by name: of training, of the evaluation, and hardened.
      errors: For each layer, by its path, the steps and the weight errors.
      flips: For each layer, by its path, the steps and the flip rates.
    """
    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.7))
    styles = ({"color": "#c9c4ba", "linewidth": 1}, {"color": "C0"}, {"color": "C1", "linestyle": "--"})
    for (name, (steps, values)), style in zip(accuracies.items(), styles, strict=True):
        axes[0].plot(steps, 100 * values, label=name, **style)
    axes[0].legend(frameon=False)
    for ax, measure in zip(axes[1:], (errors, flips), strict=True):
        for i, (path, (steps, values)) in enumerate(measure.items()):
            ax.plot(steps, values, ".-", markersize=4, linewidth=1.2, color=f"C{i}", label=path.removesuffix("/kernel"))
    for ax, title in zip(axes, ("accuracy, %", "weight error", "flip rate"), strict=True):
        ax.set(title=title, xlabel="step", ylim=(0, None))
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)


def predictions(images: Any, labels: Any, guesses: Any) -> None:
    """Draw images in a row, each with the model's guess. A wrong guess is red, with the true label.

    Args:
      images: Images of shape (n, height, width, 1).
      labels: The true classes.
      guesses: The predicted classes.
    """
    _, axes = plt.subplots(1, len(images), figsize=(7.2, 1.1))
    for ax, image, label, guess in zip(axes, images, labels, guesses, strict=True):
        ax.imshow(image[..., 0], cmap="Greys")
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        right = label == guess
        ax.set_title(f"{guess}" if right else f"{guess}, not {label}", color="#22201d" if right else "#b03a2e")


def layer_errors(errors: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the error of each layer's output, for each solver.

    Args:
      errors: For each solver, by its name, the errors by layer.
    """
    figure, ax = plt.subplots(figsize=(7.2, 2.6))
    for name, by_layer in errors.items():
        ax.semilogy(list(by_layer.values()), ".-", label=name)
    layers = [path.removeprefix("blocks/") for path in next(iter(errors.values()))]
    ax.set_xticks(range(len(layers)), layers, rotation=60, ha="right", fontsize=7)
    ax.set_ylabel("relative error")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)


def errors_by_draws(counts: Sequence[int], errors: Mapping[str, Any]) -> None:
    """Draw the error of a mean of draws, by the number of draws.

    Args:
      counts: The numbers of draws.
      errors: The errors of each method, by its name.
    """
    _, ax = plt.subplots(figsize=(7.2, 2.6))
    for name, values in errors.items():
        ax.plot(counts, values, marker="o", markersize=3, label=name)
    ax.legend(frameon=False)
    ax.set(xscale="log", yscale="log", xlabel="draws in the mean", ylabel="error, of the norm of dw")
