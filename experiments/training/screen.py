"""The lines that a person sees of a run: with a live bar on a terminal, plain in a log."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import nmjax as nm
from experiments.errors import visible
from experiments.scale import processes
from experiments.training.device import MEMORY

LOG_WIDTH = 200  # of lines in a log: wide enough that none is wrapped
WIDE = 120  # a terminal of this width shows the use of the devices too


def number(value: float) -> str:
    """Return three digits of a number with the letter of its magnitude.

    >>> number(12_345), number(3.2e9), number(950), number(999.9)
    ('12.3 k', '3.2 G', '950', '1 k')
    """
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


class Screen:
    """Shows the progress of runs. Only the first of several processes shows anything.

    Args:
      unit: Name of what throughput counts, as "images".
      console: The console to write to, for tests.
    """

    def __init__(self, unit: str, console: Console | None = None):
        self.unit = unit
        quiet = not processes.first()
        self.console = console or Console(highlight=False, quiet=quiet)
        if console is None and not self.console.is_terminal:
            self.console = Console(highlight=False, quiet=quiet, width=LOG_WIDTH)
        self._bar: Progress | None = None
        self._bar_task = TaskID(0)
        self._total = self._start = self._last_line = 0  # steps
        self._began = 0.0

    def header(self, name: str, facts: list[tuple[str, str]]) -> None:
        """Show the names of the runs, and rows (label, text) about them."""
        self.console.print(Text(visible(name), "bold"), f" nmjax {nm.__version__}")
        self.rows(facts)

    def rows(self, rows: list[tuple[str, str]]) -> None:
        """Show rows (label, text)."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        for label, text in rows:
            grid.add_row(label, Text(visible(text)))  # Text: a data set's name may hold what Rich takes for markup
        self.console.print(grid)

    def line(self, text: str) -> None:
        """Show a line."""
        self.console.print(visible(text), markup=False)

    def busy(self, activity: str):
        """Return a context that shows an activity while it lasts."""
        if self.console.is_terminal:
            return self.console.status(activity)
        self.line(activity)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def progress(self, total: int, start: int) -> Iterator[None]:
        """Show the progress of the steps from `start` to `total` that are taken inside."""
        self._total, self._start, self._last_line = total, start, start
        self._began = time.monotonic()
        if not self.console.is_terminal:
            yield
            return
        columns = [BarColumn(12), TextColumn("{task.completed:,}/{task.total:,}"), TextColumn("{task.description}")]
        columns += [TimeRemainingColumn(compact=True), TextColumn("left")]
        with Progress(*columns, console=self.console) as self._bar:
            self._bar_task = self._bar.add_task("", total=total, completed=start)
            yield
        self._bar = None

    def step(self, step: int, means: dict[str, float]) -> None:
        """Move the bar. In a log, show a line at every twentieth of the run."""
        shown = [f"{name} {form(name, means[name])}" for name in ("loss", "accuracy") if name in means]
        if "per_second" in means:
            shown.append(f"{number(means['per_second'])} {self.unit}/s")
            if self.console.width >= 100:
                shown.append(f"{number(means['flops_per_second'])}FLOP/s")
        if self.console.width >= WIDE:
            shown += [f"MFU {means['mfu']:.1%}"] if "mfu" in means else []
            shown += [f"peak {number(means[name])}B" for name in MEMORY if name in means]
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=step, description="  ".join(shown))
        elif (step - self._last_line) * 20 >= self._total or step == self._total:
            left = (time.monotonic() - self._began) / (step - self._start) * (self._total - step)
            self.line("  ".join([f"step {step:,}/{self._total:,}", *shown, f"{clock(left)} left"]))
            self._last_line = step

    def evaluation(self, step: int, split: str, scores: dict[str, float]) -> None:
        """Show the scores of an evaluation on a split."""
        self.line(f"step {step:,}  {split}  " + "   ".join(figures(scores)))


def figures(scores: dict[str, float]) -> list[str]:
    """Return the scores of an evaluation in words, each hardened score beside that of the weights in training.

    >>> figures({"loss": 0.31, "accuracy": 0.97, "hardened_loss": 0.32, "hardened_accuracy": 0.968})
    ['loss 0.3100, hardened 0.3200', 'accuracy 97.00%, hardened 96.80%']
    """
    shown = []
    for name, value in scores.items():
        if name.startswith("hardened_"):
            continue
        text = f"{name} {form(name, value)}"
        if f"hardened_{name}" in scores:
            text += f", hardened {form(name, scores[f'hardened_{name}'])}"
        shown.append(text)
    return shown


def form(name: str, value: float) -> str:
    """Return a score as text: accuracies in percent.

    >>> form("accuracy", 0.97), form("loss", 0.31)
    ('97.00%', '0.3100')
    """
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(75), clock(4000)
    ('1:15', '1:06:40')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
