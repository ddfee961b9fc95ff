"""Runs that are looked into while they train: what every such study shares."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments import command
from experiments.training import tasks
from experiments.training.program import Program

Look = Callable[..., dict[str, jax.Array]]
"""A compiled look at one step: (state before, state after, arrays of the batch, norm of the gradient) -> measures."""


def config(page: str, *changes: str) -> ConfigDict:
    """Return the config of a study's page at the size of two cores.

    Args:
      page: The name of the page.
      changes: Changes as in a command: "seed=1".
    """
    words = [f"--config.{change}" for change in changes]
    return command.read(["launch.py", f"--config=experiments/studies/{page}.py:cpu", *words]).config


def method_config(page: str, method: str, seed: int, *changes: str) -> ConfigDict:
    """Return the config of one run of a page: a method in the feed-forward layers, and a seed."""
    return config(page, f"sparsity.mlp={method}", f"seed={seed}", *changes)


def program(page: str, *changes: str) -> Program:
    """Return the program of such a config. All seeds can share it, and then it is compiled once."""
    settings = config(page, *changes)
    return Program(settings, tasks.task(settings))


@functools.lru_cache(maxsize=1)
def prepared(page: str, make_look: Callable[[Program], Look], changes: tuple[str, ...]) -> tuple[Program, Look]:
    """Return a program and the compiled look at its steps. All seeds share both."""
    shared = program(page, *changes)
    return shared, make_look(shared)


def run(
    page: str, make_look: Callable[[Program], Look], every: int, method: str, seed: int, *changes: str
) -> tuple[dict[str, list], list[str]]:
    """Train with a method and a seed while looking, and return the measures and the notes on the data.

    Args:
      page: The name of the study's page.
      make_look: Makes the look at a step of a program.
      every: How many steps lie between two looks.
      method: The method of the feed-forward layers.
      seed: The seed of the run.
      changes: Further changes of the config: "batch=8".
    """
    shared, look = prepared(page, make_look, (f"sparsity.mlp={method}", *changes))
    return rows(shared, look, seed, every), shared.task.notes


def rows(program: Program, look: Look, seed: int, every: int) -> dict[str, list]:
    """Train, look at every so many-th step, and return the steps and the values of each measure, to five digits."""
    state, columns = program.init(jnp.uint32(seed)), {"step": []}
    for step, arrays in zip(range(program.total), program.task.feed(seed, 0, program.mesh), strict=False):
        before = jax.tree.map(jnp.copy, state) if step % every == 0 else None
        state, shown = program.train(state, arrays)
        jax.block_until_ready(shown)  # programs of several devices that run at once may wait for each other forever
        if before is not None:
            columns["step"].append(step)
            for name, value in look(before, state, arrays, shown["gradient_norm"]).items():
                columns.setdefault(name, []).append(float(f"{float(value):.5g}"))
    return columns
