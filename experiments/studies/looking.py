"""Runs that are looked at while they train: what is the same, whatever is looked at."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments import command
from experiments.training import tasks
from experiments.training.program import Program


def config(page: str, *changes: str):
    """That of a study's page at the size of two cores, with changes as of a command: "seed=1"."""
    words = [f"--config.{change}" for change in changes]
    return command.read(["launch.py", f"--config=experiments/studies/{page}.py:cpu", *words]).config


def program(page: str, *changes: str) -> Program:
    """That of such a config: compiled once for all seeds, if it is kept."""
    made = config(page, *changes)
    return Program(made, tasks.task(made))


@functools.lru_cache(maxsize=1)
def prepared(looked_at: Callable[[Program], Callable], page: str, changes: tuple[str, ...]) -> tuple[Program, Callable]:
    """A program and the compiled look at its steps, for all seeds."""
    made = program(page, *changes)
    return made, looked_at(made)


def rows(made: Program, look: Callable, seed: int, every: int) -> dict[str, list]:
    """Train, and look at every so many-th step: at the states before and after it, on its batch, with the norm of its gradient."""
    state, found = made.init(jnp.uint32(seed)), {"step": []}
    for step, arrays in zip(range(made.total), made.task.feed(seed, 0, made.mesh), strict=False):
        before = jax.tree.map(jnp.copy, state) if step % every == 0 else None
        state, shown = made.train(state, arrays)
        jax.block_until_ready(shown)  # programs of several devices that run at once may wait for each other without end
        if before is not None:
            found["step"].append(step)
            for name, value in look(before, state, arrays, shown["gradient_norm"]).items():
                found.setdefault(name, []).append(float(f"{float(value):.5g}"))
    return found
