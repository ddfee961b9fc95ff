"""The cost of many devices: their collectives in a step, the memory of each; and of saving and of starting again."""

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command, config_files
from experiments.bench.collectives import KINDS, Collective, collectives
from experiments.bench.launches import SHORT, caching, short
from experiments.bench.measure import Table, going_on, in_turn
from experiments.errors import Failed
from experiments.scale.shards import CUT
from experiments.training import tasks
from experiments.training.checkpoints import Checkpoints
from experiments.training.program import Program

CONFIG_FILES = ["configs/vit_sste.py"]
COUNTS = (1, 2, 4, 8)
SAVES, EVERY = 4, (10, 100)  # so many checkpoints in a run, each after so many steps
PARTS = ("imports", "data", "plan", "tracing", "lowering", "compiling", "first step")


def scale(config: Sequence[str], dir: str, rounds: int) -> Iterator[Table]:
    """Return the tables of ``bench scale``.

    Args:
      config: The config files; empty for `CONFIG_FILES`.
      dir: The folder of the data.
      rounds: How often a step is timed.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the devices
    counts = COUNTS if jax.default_backend() == "cpu" else [n for n in COUNTS if n <= jax.device_count()]
    files, data = config or CONFIG_FILES, f"--config.data.dir={dir}"
    results = {
        (config_file, name): apart(n, "step", config_file, str(rounds), data, *words)
        for config_file in files for n in counts for name, words in meshes(n).items()
    }  # fmt: skip
    yield sending(results)
    yield holding(results)
    yield Table(
        "Saving",
        f"*longest*: the longest time between two steps while {SAVES} checkpoints are written, divided by the median "
        "step without checkpoints. *share*: the share of the time in which the loop waits for checkpoints. The loop "
        "also waits for the loss of every step.",
        ["", "longest", "share", "a step", "a checkpoint"],
        {f"{each}, every {every} steps": stall(make_program(each, data), every) for each in files for every in EVERY},
    )  # fmt: skip
    starts, parts = {}, {}
    for each in dict.fromkeys(name for file in files for name in (file.partition(":")[0] + ":smoke", file)):
        pairs = []
        for _ in range(2):  # in turn: machines are noisy
            with tempfile.TemporaryDirectory() as folder:
                pairs.append([short(each, data, cache=folder)[2] for _ in ("cold", "warm")])
                began = str(time.monotonic())
                parts[each] = apart(jax.device_count(), "start", each, began, data, *SHORT, cache=folder)
        cold, warm = map(min, zip(*pairs, strict=True))
        starts[each] = [warm / cold, f"{cold:.1f} s", f"{warm:.1f} s"]
    yield Table(
        "Starting again",
        "The time from the beginning of a run, after the imports of launch.py, to its first step. *warm*: compiled "
        "programs of an earlier start are found in the cache. *cold*: the cache is empty. Each is the better of two. "
        "Aim for warm over cold: 0.40.",
        ["", "warm over cold", "cold", "warm"], starts,
    )  # fmt: skip
    yield Table(
        "The parts of a warm start",
        "The parts of a warm start in seconds, done one after another. A run of launch.py is faster, because it "
        "traces, lowers and reads four programs at the same time.",
        ["", *PARTS], parts,
    )  # fmt: skip


def meshes(n: int) -> dict[str, list[str]]:
    """Return the meshes of so many devices: their names, and the words of a command that set them."""
    if n == 1:
        return {"1 device": []}
    words = {f"{n} x data": [], f"{n} x fsdp": [f"--config.mesh.fsdp={n}"]}
    words[f"{n} x fsdp, 2 micro-batches"] = [f"--config.mesh.fsdp={n}", "--config.accumulate=2"]
    words[f"{n // 2} x data, 2 x tensor" if n > 2 else "2 x tensor"] = ["--config.mesh.tensor=2"]
    return words


def apart(n: int, what: str, *words: str, cache: str = "") -> Any:
    """Run `step` or `start` in a process of its own, and return its result.

    Args:
      n: How many devices the process sees.
      what: "step" or "start".
      words: Its arguments.
      cache: A folder for compiled programs; "" for none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(n)))
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:n])}
    if jax.default_backend() == "cpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={n}"
        devices = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-m", "experiments.bench.scale", what, *words],
        cwd=config_files.ROOT, env=os.environ | devices | caching(cache), capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode:
        raise Failed(f"{' '.join(words)} on {n} devices: {ran.stderr.strip()[-300:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def make_program(config_file: str, *words: str) -> Program:
    """Return the program of a config file, with changes as in a command."""
    config = command.read(["launch.py", f"--config={config_file}", *words]).config
    return Program(config, tasks.task(config))


# ---- the step ----


def least(program: Program) -> dict[str, float]:
    """Return the least bytes that a device has to send in a step, by kind of collective, with parameters in float32.

    Gradients are summed over all devices that have their parameter. If fsdp cuts the parameter, they are summed in
    parts, and the parameter is gathered once. A product that tensor cuts along its contraction (down and out, and in
    the backward pass the layers before them) is summed over tensor.
    """
    data, fsdp, tensor = (program.mesh.shape[name] for name in ("data", "fsdp", "tensor"))
    ring, sent = lambda n: (n - 1) / n, Counter(dict.fromkeys(KINDS, 0.0))
    for leaf in jax.tree.leaves(program.shapes.params):
        size, cut = leaf.size * leaf.dtype.itemsize, leaf.sharding.spec
        size /= tensor if "tensor" in cut else 1
        if "fsdp" in cut:
            sent["all-gather"] += size * ring(fsdp)
            sent["reduce-scatter"] += size * ring(fsdp)
            sent["all-reduce"] += 2 * size / fsdp * ring(data)
        else:
            sent["all-reduce"] += 2 * size * ring(data * fsdp)
    for layer in program.plan.layers if tensor > 1 else ():
        if CUT[1][0].search(layer.path):
            width = 4 if program.config.dtype == "float32" else 2
            out = layer.flops / (2 * layer.kernel[-2]) * width / data / fsdp
            sent["all-reduce"] += 2 * program.config.accumulate * out * 2 * ring(tensor)
    return dict(sent)


def step(config_file: str, rounds: str, *words: str) -> dict:
    """Return the time, collectives, state and memory of a step of a config file on all devices of this process."""
    program = make_program(config_file, *words)
    arrays = next(iter(program.task.feed(0, 0, program.mesh)))
    compiled = program.train.lower(program.shapes, arrays).compile()
    call = going_on(compiled, program.init(jnp.uint32(0)), arrays)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(program.shapes)]
    size = lambda leaf, shape: math.prod(shape) * leaf.dtype.itemsize
    uncut = [(name, leaf) for name, leaf in named if leaf.sharding.shard_shape(leaf.shape) == leaf.shape]
    whole = [(size(leaf, leaf.shape), name) for name, leaf in uncut]
    memory = compiled.memory_analysis()
    return {
        "seconds": min(in_turn({"": call}, int(rounds))[""]),
        "least": least(program),
        "collectives": collectives(compiled.as_text()),
        "total": sum(size(leaf, leaf.shape) for _, leaf in named),
        "share": sum(size(leaf, leaf.sharding.shard_shape(leaf.shape)) for _, leaf in named),
        "whole": sorted(whole, reverse=True)[:3],
        "memory": memory and [memory.argument_size_in_bytes, memory.temp_size_in_bytes],
    }


def sending(steps: dict) -> Table:
    """Return the table of the collectives. Kinds that send more than 1.1 of the least are listed above it."""
    rows, beyond = {}, []
    for (config_file, name), result in steps.items():
        counts, moved, least_bytes = Counter(), Counter(), result["least"]
        for row in (collected := [Collective(*row) for row in result["collectives"]]):
            counts[row.kind] += row.times
            moved[row.kind] += row.times * row.moved
        wanted, sent = sum(least_bytes.values()), sum(moved.values())
        spared = 0 if counts["reduce-scatter"] else least_bytes["reduce-scatter"]
        ratios = [sent / wanted, (sent - spared) / wanted] if wanted else [None, None]
        cells = [f"{counts[kind]}: {moved[kind] / 1e6:.3f}" if counts[kind] else "" for kind in KINDS[:3]]
        cells.append(", ".join(f"{counts[kind]} {kind}: {moved[kind] / 1e6:.3f}" for kind in KINDS[3:] if counts[kind]))
        slower = result["seconds"] / steps[config_file, "1 device"]["seconds"]
        rows[f"{config_file} {name}"] = [*cells, f"{wanted / 1e6:.3f}", *ratios, slower]
        for kind in KINDS if wanted and sent - spared > 1.1 * wanted else ():
            if moved[kind] > 1.1 * least_bytes[kind]:
                largest = sorted((row for row in collected if row.kind == kind), key=lambda row: -row.moved * row.times)
                shown = "; ".join(f"{row.times} x {row.shape[:60]} of `{row.name[-60:]}`" for row in largest[:3])
                sizes = f"{moved[kind] / 1e6:.3f} MB, least {least_bytes[kind] / 1e6:.3f}"
                beyond.append(f"\n- {config_file} {name}, {kind}: {sizes}: {shown}")
    return Table(
        "A step on several devices",
        "For each kind of collective: how many the compiled step has, and the megabytes that each device sends by "
        "them. *least MB*: the least that a device can send. *over least*: what it sends, divided by this. XLA's "
        "compiler for CPUs has no reduce-scatter. It reduces whole gradients, which sends twice the bytes, and then "
        "cuts them. *scattered* is *over least* if these are counted as reduce-scatters. *time*: the time of a step, "
        "divided by that on one device. Virtual devices share the same cores, so this time only tells what the "
        "cutting costs." + ("\n\nBeyond 1.1 of the least:\n" + "".join(beyond) if beyond else ""),
        ["", *KINDS[:3], "others", "least MB", "over least", "scattered", "time"], rows,
    )  # fmt: skip


def holding(steps: dict) -> Table:
    """Return the table of what a device holds."""
    rows = {}
    for (config_file, name), result in steps.items():
        n, single = int(name.split()[0]), steps[config_file, "1 device"]
        if name.endswith("fsdp") or n == 1:
            uncut = ", ".join(f"{name} {size:,} B" for size, name in result["whole"]) if n > 1 else ""
            pairs = zip(result["memory"], single["memory"], strict=True) if result["memory"] else ()
            over = [a / b for a, b in pairs] or [None, None]
            ideal, state = result["share"] / (result["total"] / n), f"{result['share'] / 1e6:.3f} MB"
            rows[f"{config_file} {name}"] = [ideal, state, *over, uncut]
    return Table(
        "What a device holds",
        "*state over ideal*: the bytes of a run's state on each of n devices, divided by one n-th of the whole "
        "state. *arguments* and *temporary*: the memory of the compiled step, divided by that on one device. There "
        "the batch is n times as large, and all training data are on this device. *not cut*: the largest arrays that "
        "each device has whole.",
        ["", "state over ideal", "state", "arguments", "temporary", "not cut"], rows,
    )  # fmt: skip


# ---- saving and starting again ----


def stall(program: Program, every: int) -> list:
    """Return the row of a run that saves every so many steps."""
    arrays, state = next(iter(program.task.feed(0, 0, program.mesh))), program.init(jnp.uint32(0))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints, waited, times = Checkpoints(Path(folder)), [], []
        checkpoints.save(0, state, [], best=False)  # imports Orbax
        checkpoints.wait()
        for saves in (False, False, True):  # the first time compiles
            times.append([time.perf_counter()])
            for i in range(1, SAVES * every + 1):
                state, shown = program.train(state, arrays)
                jax.block_until_ready(shown["loss"])
                times[-1].append(last := time.perf_counter())
                if saves and i % every == 0:
                    checkpoints.save(i, state, [], best=False)
                    waited.append(time.perf_counter() - last)
            times[-1].append(time.perf_counter())
        checkpoints.close()
        files = (checkpoints.directory / str(SAVES * every)).rglob("*")
        size = sum(file.stat().st_size for file in files if file.is_file())
    _, alone, saving = map(np.diff, times)
    usual = float(np.median(alone[:-1]))
    return [saving.max() / usual, sum(waited) / saving.sum(), f"{usual * 1e3:.1f} ms", f"{size / 1e6:.1f} MB"]


def start(config_file: str, began: str, *words: str) -> list[float]:
    """Return the seconds of each of PARTS of a start.

    Args:
      config_file: FILE or FILE:VARIANT.
      began: The time at which the process began, of the monotonic clock.
      words: Changes as in a command.
    """
    importlib.import_module("experiments.training.modes")  # as launch.py does
    config = command.read(["launch.py", f"--config={config_file}", *words]).config
    times, last = Counter(dict.fromkeys(PARTS, 0.0)), [float(began)]

    def spent(part: str, value: Any = None) -> Any:
        last.append(time.monotonic())
        times[part] += last[-1] - last[-2]
        return value

    spent("imports")
    task = spent("data", tasks.task(config))
    program = spent("plan", Program(config, task))
    arrays = spent("data", next(iter(task.feed(0, 0, program.mesh))))
    jobs = [(program.train, (program.shapes, arrays)), (program.compiled_init, (jnp.uint32(0), program.pretrained))]
    if program.measures:
        jobs += [(program.measure, (program.shapes, arrays)), (program.masks, (program.shapes,))]
    for function, arguments in jobs:
        lowered = spent("lowering", spent("tracing", function.trace(*arguments)).lower())
        spent("compiling", lowered.compile())
    spent("first step", jax.block_until_ready(program.train(program.init(jnp.uint32(0)), arrays)))
    return list(times.values())


if __name__ == "__main__":
    print(json.dumps({"step": step, "start": start}[sys.argv[1]](*sys.argv[2:])))
