"""Shared code of the studies that measure steps during training."""

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


def config(network: str, *changes: str) -> ConfigDict:
    """Return the config of a network of methods.py.

    Args:
      network: The variant of the config file.
      changes: Changes as in a command: "seed=1".
    """
    words = [f"--config.{change}" for change in changes]
    return command.read(["launch.py", f"--config=experiments/studies/methods.py:{network}", *words]).config


def method_config(network: str, method: str, seed: int, *changes: str) -> ConfigDict:
    """Return the config of one run of a network: a method in the layers of the blocks, and a seed."""
    return config(network, f"sparsity.blocks={method}", f"seed={seed}", *changes)


def program(network: str, *changes: str) -> Program:
    """Return the program of such a config. All seeds can share it, and then it is compiled once."""
    settings = config(network, *changes)
    return Program(settings, tasks.task(settings))


@functools.lru_cache(maxsize=1)
def prepared(network: str, make_look: Callable[[Program], Look], changes: tuple[str, ...]) -> tuple[Program, Look]:
    """Return a program and the compiled look at its steps. All seeds share both."""
    shared = program(network, *changes)
    return shared, make_look(shared)


def run(
    network: str, make_look: Callable[[Program], Look], every: int, method: str, seed: int, *changes: str
) -> tuple[dict[str, list], list[str]]:
    """Train with a method and a seed while looking, and return the measures and the notes on the data.

    Args:
      network: The variant of methods.py.
      make_look: Makes the look at a step of a program.
      every: How many steps lie between two looks.
      method: The method of the layers of the blocks.
      seed: The seed of the run.
      changes: Further changes of the config: "batch=8".
    """
    shared, look = prepared(network, make_look, (f"sparsity.blocks={method}", *changes))
    return rows(shared, look, seed, every), shared.task.notes


def rows(program: Program, look: Look, seed: int, every: int) -> dict[str, list]:
    """Train, look once in `every` steps, and return the steps and the values of each measure, to five digits."""
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
