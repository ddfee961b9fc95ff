"""Programs timed in turn."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from experiments.bench.measure import compiled, in_short, in_turn, speedup


class Program(NamedTuple):
    """Something to time: a call, or a jitted function and its arguments; how many times it does what is told of."""

    call: Callable
    arguments: tuple = ()
    count: int = 1


class Times(dict):
    """Seconds of what runs, round by round, and of the others what they raised."""

    def ms(self, name) -> float | None:
        return statistics.median(self[name]) * 1e3 if self.ran(name) else None

    def rate(self, name, amount: float) -> float | None:
        """An amount a second, in units of 1e12."""
        return amount / self.ms(name) / 1e9 if self.ran(name) else None

    def over(self, name, base) -> float | None:
        """How many times faster than the base."""
        return speedup(self[name], self[base]) if self.ran(name) and self.ran(base) else None

    def note(self, name, otherwise: str = "") -> str:
        return self[name] if isinstance(self.get(name), str) else otherwise

    def ran(self, name) -> bool:
        return isinstance(self.get(name), list)


def timed(programs: dict[Any, Program], rounds: int, **options) -> Times:
    """All that run, in turn."""
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
    made = compiled({name: (program.call, *program.arguments) for name, program in programs.items()})
    return {name: program._replace(call=made[name]) for name, program in programs.items()}


def repeated(f: Callable, make: Callable, count: int) -> Program:
    """A function so often in one program, of other arguments each time."""
    return Program(f, ([make() for _ in range(count)],), count)
