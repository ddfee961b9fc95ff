"""The cost of a training step of a run: sparse, dense, written by hand with Optax alone, and slot by slot."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nmjax as nm
from experiments import config_files
from experiments.bench.measure import NEAR_ONE, in_turn, markdown, over
from experiments.errors import Failed, Mistake
from experiments.training import settings, tasks
from experiments.training.program import Program
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner

CONFIG_FILES = ["configs/vit_24.py", "configs/resnet_24.py", "configs/gpt_24.py"]
SHORT = 4  # steps of each run that is started: enough for 30 % of them to be a step


def train(config_files: list[str], directory: str, rounds: int) -> str:
    """Return the tables of ``bench train``."""
    rows = {}
    for config_file in config_files:
        rows |= one(config_file, directory, rounds)
    steps = markdown(
        "A training step",
        "Over the plain step: a training step written by hand in Flax and Optax, with the same model, batches and "
        "optimizer. The median of the rounds' ratios, with the quartiles. Aim: 1.03 for the dense step. While they are "
        "timed, JAX refuses transfers between host and device.",
        rows, ["", "time", "temporary memory", "a second", "a step"],
    )  # fmt: skip
    slots = markdown(
        "Slot by slot",
        "Over the dense step of the same config file: the median of the rounds' ratios, with the quartiles. In each "
        "row only these slots are used. A copy reads the operand and writes it back. Pruning that is an operation of "
        "its own takes at least this time.",
        {name: row for each in config_files for name, row in slot_by_slot(each, directory, 3 * rounds).items()},
        ["", "time"],
    )  # fmt: skip
    print(steps, slots, sep="\n", file=sys.stderr, flush=True)  # the starts take minutes
    starts = {config_file: started(config_file, directory) for config_file in config_files}
    return steps + "\n" + slots + "\n" + markdown(
        "From start to first step",
        "Seconds from the start of the process: to the first step done and written; and to the end of a run of "
        f"{SHORT} steps, evaluated, saved and reported.", starts, ["", "first step", "whole run"],
    )  # fmt: skip


def one(config_file: str, directory: str, rounds: int) -> dict[str, list]:
    """Return the rows of a config file: its step, the same step dense, and the plain one."""
    config = config_files.load(config_file)
    if jax.device_count() > 1 or config.accumulate > 1:
        raise Mistake("bench train needs one device and config.accumulate=1, because the plain step has no more.")
    config.data.dir = directory
    task = tasks.task(config)
    dense = config.copy_and_resolve_references()
    dense.rules, dense.sparsity = ((r".*", "dense"),), {}
    programs = {"sparse": Program(config, task), "dense": Program(dense, task)}
    arrays = next(iter(task.feed(0, 0, programs["dense"].mesh)))
    steps = {name: (program.train, program.init(jnp.uint32(0))) for name, program in programs.items()}
    steps["plain"] = plain(programs["dense"], task)
    memory = {
        name: step.lower(state, arrays).compile().memory_analysis().temp_size_in_bytes
        for name, (step, state) in steps.items()
    }
    calls = {name: _call(step, step(state, arrays)[0], arrays) for name, (step, state) in steps.items()}
    with jax.transfer_guard("disallow"):
        seconds = in_turn(calls, 3 * rounds)
    rows = {}
    for name, times in seconds.items():
        middle = statistics.median(times)
        rows[f"{config_file} {name}"] = [
            over(times, seconds["plain"]),
            memory[name] / memory["plain"],
            f"{config.batch * task.units / middle:,.0f} {task.unit}",
            f"{middle * 1e3:.2f} ms",
        ]
    return rows


@dataclass(frozen=True, repr=False)
class copied(Pruner):
    """A copy in the place of pruning."""

    def __call__(self, x: jax.Array, axis: int = -1, ctx: Ctx = Ctx()) -> jax.Array:
        # XLA would remove a copy of equal values, and would fuse one of other values into the operation that made x
        return jax.lax.optimization_barrier(x * jnp.asarray(NEAR_ONE, x.dtype))


def slot_by_slot(config_file: str, directory: str, rounds: int) -> dict[str, list]:
    """Return the rows of a config file: each slot of its first pruned layer alone, a copy in its place, all slots."""
    config = config_files.load(config_file)
    config.data.dir = directory
    task = tasks.task(config)
    program = Program(config, task)
    method = next((layer.sparsity for layer in program.plan.layers if layer.sparsity != nm.Sparsity()), nm.Sparsity())
    used = {name: slot for name, slot in method.slots.items() if not slot.empty}
    copy = f"{__name__}:copied()"
    texts = {"dense": "dense"}
    for name, slot in used.items():
        texts[str(slot)] = str(slot)
        texts[f"{name}, a copy"] = f"{name}={f'ste({copy})' if name.startswith('fwd') else copy}"
    texts["all"] = str(method)
    calls = {}
    given, rules = tuple(config.sparsity), config.rules
    for name, text in texts.items():
        config.sparsity = dict.fromkeys(given, text)
        config.rules = tuple((pattern, rule if rule in (*given, "dense") else text) for pattern, rule in rules)
        program = Program(config.copy_and_resolve_references(), task)
        arrays = next(iter(task.feed(0, 0, program.mesh)))
        calls[name] = _call(program.train, program.init(jnp.uint32(0)), arrays)
    seconds = in_turn(calls, rounds)
    return {f"{config_file} `{name}`": [over(times, seconds["dense"])] for name, times in seconds.items()}


def _call(step: Callable, state: Any, arrays: Any) -> Callable[[], Any]:
    """Return a training step as a call without arguments. Each call goes on from the last."""
    now = [state]

    def call() -> Any:
        now[0], shown = step(now[0], arrays)
        return shown

    return call


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


def started(config_file: str, directory: str) -> list[float]:
    """Run a few steps in a process of its own. Return the seconds to the first step and to the end of the run."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--config.epochs=0",
            f"--config.steps={SHORT}",
            "--config.measure=0",
            "--config.learning_rate.warmup=0",
        ]
        words = [f"--config={config_file}", f"--config.data.dir={directory}", f"--workdir={folder}/run", *options]
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "launch.py", *words], stdout=subprocess.DEVNULL, cwd=config_files.ROOT
        )
        metrics = Path(folder) / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        first = time.perf_counter() - start
        if process.wait():
            raise Failed(f"{config_file} failed. See: python launch.py {' '.join(words)}")
        return [first, time.perf_counter() - start]
