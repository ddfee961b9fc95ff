"""The cost of a training step of a run: sparse, dense, written by hand with Optax alone, and slot by slot."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nmjax as nm
from experiments import config_files
from experiments.bench import launches
from experiments.bench.measure import Table, copy, going_on, in_turn, over
from experiments.errors import Mistake
from experiments.training import settings, tasks
from experiments.training.program import Program
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner

CONFIG_FILES = ["configs/vit_24.py", "configs/resnet_24.py", "configs/gpt_24.py"]


def train(config: Sequence[str], dir: str, rounds: int) -> Iterator[Table]:
    """Return the tables of ``bench train``.

    Args:
      config: The config files; empty for `CONFIG_FILES`.
      dir: The folder of the data.
      rounds: How often everything is timed.
    """
    files = config or CONFIG_FILES
    steps, slots = {}, {}
    for each in files:
        for rows, more in zip((steps, slots), measured(each, dir, rounds), strict=True):
            rows |= more
    yield Table(
        "A training step",
        "Over the plain step: a training step written by hand in Flax and Optax, with the same model, batches and "
        "optimizer. The median of the rounds' ratios, with the quartiles. Aim: 1.03 for the dense step. While they are "
        "timed, JAX refuses transfers between host and device.",
        ["", "time", "temporary memory", "a second", "a step"], steps,
    )  # fmt: skip
    yield Table(
        "Slot by slot",
        "Over the dense step of the same config file: the median of the rounds' ratios, with the quartiles. In each "
        "row only these slots are used. A copy reads the operand and writes it back. Pruning that is an operation of "
        "its own takes at least this time.",
        ["", "time"], slots,
    )  # fmt: skip
    yield Table(
        "From start to first step",
        "Seconds from the start of the process: to the first step done and written; and to the end of a run of 4 "
        "steps, evaluated, saved and reported.",
        ["", "first step", "whole run"], {each: launches.short(each, f"--config.data.dir={dir}")[:2] for each in files},
    )  # fmt: skip


def measured(config_file: str, directory: str, rounds: int) -> tuple[dict[str, list], dict[str, list]]:
    """Return the rows of a config file.

    Those of the first table are its step, the same step dense, and the plain one. Those of the second are steps with
    each slot of its first pruned layer alone, and with a copy in its place.
    """
    config = config_files.load(config_file)
    config.data.dir = directory
    if jax.device_count() > 1 or config.accumulate > 1:
        raise Mistake("bench train needs one device and config.accumulate=1, because the plain step has no more.")
    task = tasks.task(config)
    programs = {"sparse": Program(config.copy_and_resolve_references(), task)}
    layers = programs["sparse"].plan.layers
    method = next((layer.sparsity for layer in layers if layer.sparsity != nm.Sparsity()), nm.Sparsity())
    texts, instead = {"dense": "dense"}, f"{__name__}:copied()"
    for name, slot in method.slots.items():
        if not slot.empty:
            texts[str(slot)] = str(slot)
            texts[f"{name}, a copy"] = f"{name}={f'ste({instead})' if name.startswith('y_') else instead}"
    texts["all"] = str(method)
    given, rules = tuple(config.sparsity), config.rules
    for name, text in texts.items():
        config.sparsity = dict.fromkeys(given, text)
        config.rules = tuple((pattern, rule if rule in (*given, "dense") else text) for pattern, rule in rules)
        programs[name] = Program(config.copy_and_resolve_references(), task)
    arrays = next(iter(task.feed(0, 0, programs["dense"].mesh)))
    steps = {name: (program.train, program.init(jnp.uint32(0))) for name, program in programs.items()}
    steps["plain"] = plain(programs["dense"], task)
    memory, calls = {}, {}
    for name, (step, state) in steps.items():
        memory[name] = step.lower(state, arrays).compile().memory_analysis().temp_size_in_bytes
        calls[name] = going_on(step, step(state, arrays)[0], arrays)
    with jax.transfer_guard("disallow"):
        seconds = in_turn(calls, 3 * rounds)
    rows = {}
    for name in ("sparse", "dense", "plain"):
        middle = statistics.median(seconds[name])
        rate = f"{config.batch * task.units / middle:,.0f} {task.unit}"
        more = memory[name] / memory["plain"]
        rows[f"{config_file} {name}"] = [over(seconds[name], seconds["plain"]), more, rate, f"{middle * 1e3:.2f} ms"]
    return rows, {f"{config_file} `{name}`": [over(seconds[name], seconds["dense"])] for name in texts}


@dataclass(frozen=True, repr=False)
class copied(Pruner):
    """A copy in the place of pruning."""

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        return jax.lax.optimization_barrier(copy(x))  # XLA would fuse it into the operation that made x


def plain(program: Program, task: Any) -> tuple[Callable, tuple]:
    """Return the step that a person would write with the model, the batches and the optimizer, and its state."""
    model = task.make(nnx.Rngs(0))
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tx = settings.optimizer(program.config, program.rate, program.total)

    def step(state, arrays):
        now, params, rest, opt = state

        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            value, _ = task.loss(model, batch)
            return value, nnx.split(model, nnx.Param, ...)[2]

        batch = task.batch(arrays, jnp.uint32(0), now, program.mesh)
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return (now + 1, optax.apply_updates(params, updates), rest, opt), value

    params, rest = nnx.as_pure(params), nnx.as_pure(rest)
    return jax.jit(step, donate_argnums=0), (jnp.int32(0), params, rest, tx.init(params))
