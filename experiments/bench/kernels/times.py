"""Timing of programs in turn. A program that fails leaves the others their times."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from experiments.bench import turns
from experiments.bench.measure import compiled, in_short, in_turn, speedup


class Program(NamedTuple):
    """A call, or a jitted function and its arguments. One call does the timed work ``count`` times."""

    call: Callable
    arguments: tuple = ()
    count: int = 1


class Times(dict):
    """For each program its seconds, round by round, or the text of the error that it raised."""

    def ms(self, name: Any) -> float | None:
        """Return the median in milliseconds."""
        return statistics.median(self[name]) * 1e3 if self.ran(name) else None

    def rate(self, name: Any, amount: float) -> float | None:
        """Return an amount per second, in units of 1e12."""
        return amount / self.ms(name) / 1e9 if self.ran(name) else None

    def over(self, name: Any, base: Any) -> float | None:
        """Return how many times faster than the base it is."""
        return speedup(self[name], self[base]) if self.ran(name) and self.ran(base) else None

    def note(self, name: Any, otherwise: str = "") -> str:
        """Return the error of a program, or the other text if there is none."""
        return self[name] if isinstance(self.get(name), str) else otherwise

    def ran(self, name: Any) -> bool:
        """Return whether a program ran."""
        return isinstance(self.get(name), list)


def timed(programs: dict[Any, Program], rounds: int, **options: Any) -> Times:
    """Return the times of programs, taken in turn. ``options`` are those of `in_turn`."""
    calls, failed = {}, {}
    for name, (call, arguments, _) in programs.items():
        try:
            if isinstance(call, Exception):
                raise call
            jax.block_until_ready(call(*arguments))
            calls[name] = partial(call, *arguments)
        except Exception as error:  # the others are still wanted
            failed[name] = in_short(error)
    times = in_turn(calls, rounds, **options)
    return Times({name: [s / programs[name].count for s in seconds] for name, seconds in times.items()} | failed)


def built(programs: dict[Any, Program]) -> dict[Any, Program]:
    """Compile jitted programs side by side. One that fails has its exception as its call."""
    with turns.alone():  # XLA times its own products when it compiles them
        executables = compiled({name: (program.call, *program.arguments) for name, program in programs.items()})
    return {name: program._replace(call=executables[name]) for name, program in programs.items()}


def repeated(f: Callable, make: Callable, count: int) -> Program:
    """Return a program that does a function ``count`` times, with new arguments each time.

    Args:
      f: Takes a list of tuples of arguments.
      make: Returns a tuple of arguments.
      count: How many tuples.
    """
    return Program(f, ([make() for _ in range(count)],), count)
