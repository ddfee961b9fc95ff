"""What a person sees of a run: on a terminal a live bar, in a log plain lines."""

import contextlib
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import nmjax as nm
from experiments.scale import processes


def number(value: float) -> str:
    """With its magnitude's letter.

    >>> number(12_345), number(3.2e9), number(950), number(999.9)
    ('12.3 k', '3.2 G', '950', '1 k')
    """
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


class Screen:
    """Says what happens, as it happens."""

    def __init__(self, unit: str, console: Console | None = None):
        self.unit = unit
        self.console = console or Console(highlight=False, quiet=not processes.first())
        if not self.console.is_terminal and console is None:
            self.console = Console(highlight=False, quiet=not processes.first(), width=200)  # a log wraps nothing
        self._bar, self._task, self._total, self._said, self._began = None, None, 0, 0, 0.0

    def header(self, name: str, facts: list) -> None:
        self.console.print(Text(name, "bold"), f" nmjax {nm.__version__}")
        self.rows(facts)

    def rows(self, rows: list) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        for label, text in rows:
            grid.add_row(label, Text(text))  # what others wrote is no markup
        self.console.print(grid)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def busy(self, what: str):
        """While something is done that shows nothing."""
        if self.console.is_terminal:
            return self.console.status(what)
        self.line(what)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def progress(self, total: int, start: int):
        """While steps are done."""
        self._total, self._said, self._began, self._start = total, start, time.monotonic(), start
        if not self.console.is_terminal:
            yield
            return
        columns = (BarColumn(12), TextColumn("{task.completed:,}/{task.total:,}"), TextColumn("{task.description}"))
        with Progress(
            *columns, TimeRemainingColumn(compact=True), TextColumn("left"), console=self.console
        ) as self._bar:
            self._task = self._bar.add_task("", total=total, completed=start)
            yield
        self._bar = None

    def step(self, step: int, means: dict) -> None:
        """The bar, or a line a twentieth of the run."""
        shown = [f"{name} {form(name, means[name])}" for name in ("loss", "accuracy") if name in means]
        if "per_second" in means:
            shown.append(f"{number(means['per_second'])} {self.unit}/s")
            shown += [f"{number(means['flops_per_second'])}FLOP/s"] * (self.console.width >= 100)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description="  ".join(shown))
        elif (step - self._said) * 20 >= self._total or step == self._total:
            left = (time.monotonic() - self._began) / (step - self._start) * (self._total - step)
            self.line("  ".join([f"step {step:,}/{self._total:,}", *shown, f"{clock(left)} left"]))
            self._said = step

    def evaluation(self, step: int, found: dict[str, float]) -> None:
        """The training form's figures, and the hardened ones beside them."""
        self.line(f"step {step:,}  test  " + "   ".join(figures(found)))


def figures(found: dict[str, float]) -> list[str]:
    """What an evaluation found, in words: hardened beside training.

    >>> figures({"loss": 0.31, "accuracy": 0.97, "hardened_loss": 0.32, "hardened_accuracy": 0.968})
    ['loss 0.3100, hardened 0.3200', 'accuracy 97.00%, hardened 96.80%']
    """
    shown = []
    for name, value in found.items():
        if not name.startswith("hardened_"):
            hard = found.get(f"hardened_{name}")
            shown.append(f"{name} {form(name, value)}" + ("" if hard is None else f", hardened {form(name, hard)}"))
    return shown


def form(name: str, value: float) -> str:
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(75), clock(4000)
    ('1:15', '1:06:40')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
