"""Shared code of the studies that measure steps during training."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments import command
from experiments.report import curves as cv
from experiments.training import tasks
from experiments.training.program import Program

BINS = 20  # of steps, in the curves
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


def program(network: str, *changes: str) -> Program:
    """Return the program of such a config. All seeds can share it, and then it is compiled once."""
    settings = config(network, *changes)
    return Program(settings, tasks.task(settings))


@functools.lru_cache(maxsize=1)
def prepared(network: str, make_look: Callable[[Program], Look], changes: tuple[str, ...]) -> tuple[Program, Look]:
    """Return a program and the compiled look at its steps. All seeds share both."""
    shared = program(network, *changes)
    return shared, make_look(shared)


def case(
    network: str, methods: Mapping[str, str], make_look: Callable[[Program], Look], every: int
) -> tuple[Callable[..., ConfigDict], Callable[..., tuple[dict[str, list], list[str]]]]:  # fmt: skip
    """Return what a study does with a case, which is a method and a seed.

    Args:
      network: The variant of methods.py.
      methods: The texts of the methods in the layers of the blocks, by name.
      make_look: Makes the look at a step of a program.
      every: How many steps lie between two looks.

    Returns:
      The config of a case; and its measures and the notes on the data, after it has trained while looking. Both take
      further changes of the config too: "batch=8".
    """

    def config_of(method: str, seed: int, *changes: str) -> ConfigDict:
        return config(network, f"sparsity.blocks={methods[method]}", f"seed={seed}", *changes)

    def run(method: str, seed: int, *changes: str) -> tuple[dict[str, list], list[str]]:
        shared, look = prepared(network, make_look, (f"sparsity.blocks={methods[method]}", *changes))
        return rows(shared, look, seed, every), shared.task.notes

    return config_of, run


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


Runs = dict[str, dict[int, dict[str, np.ndarray]]]
"""The values of each measure, by method and seed."""


def by_method(lines: list[dict]) -> Runs:
    """Return the runs of lines of results, in their order."""
    found: Runs = {}
    for line in lines:
        rows = {name: np.array(values) for name, values in line["rows"].items()}
        found.setdefault(line["case"]["method"], {})[line["case"]["seed"]] = rows
    return found


def curves(runs: Runs, measure: str) -> list[cv.Curve]:
    """Return the means of a measure over bins of steps, for each method with the range of its seeds."""
    found = []
    for n, (method, of) in enumerate(runs.items()):
        smooth = [cv.smoothed(cv.Curve("", rows["step"], rows[measure]), BINS)[-1] for rows in of.values()]
        found.append(cv.banded(smooth, method, colour=f"s{n}"))
    return found
