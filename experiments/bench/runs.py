"""The cost of long runs and of many runs: their reports and their index, and the memory of a run over its steps."""

import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.bench.launches import watched
from experiments.bench.measure import Table, in_turn, resident

LINES, LAYERS, RUNS, STEPS = 100_000, 24, 1000, 10_000
ABOUT = {
    "name": "long", "command": "python launch.py", "began": "2026-01-31T12:00:00+00:00", "unit": "images", "header": [],
    "ended": "2026-01-31T16:00:00+00:00", "outcome": "finished", "metric": "accuracy", "flops": [1e9, 7e8], "notes": [],
}  # fmt: skip
CONFIG = {"seed": 0, "experiment": "image", "data": {"name": "digits"}, "model": {"name": "vit", "size": "tiny"}}


def runs(rounds: int) -> Iterator[Table]:
    """Return the tables of ``bench runs``."""
    with tempfile.TemporaryDirectory() as name:
        long, several = Path(name, "long"), Path(name, "many")
        size = long_run(long)
        many(several)
        folders = {
            f"report of a run of {LINES:,} lines of metrics ({size / 1e6:.0f} MB)": long,
            f"index of {RUNS:,} runs": several,
        }
        words = [sys.executable, "-m", "experiments.report"]
        report = lambda folder: subprocess.run([*words, folder], capture_output=True, text=True, check=True).stdout
        rows = {}
        for title, folder in folders.items():
            page = Path(report(folder).strip()).stat().st_size
            times = in_turn({"": lambda folder=folder: report(folder)}, rounds)[""]
            seconds = (f"{f(times):.1f} s" for f in (statistics.median, min, max))
            rows[title] = [*seconds, f"{page / 1e6:.2f} MB"]
    yield Table(
        "Reports",
        "`python -m experiments.report`, as a process of its own. Aims: at most 5 s and 5 MB for the report, and 10 s "
        "for the index.",
        ["", "median", "best", "worst", "page"], rows,
    )  # fmt: skip
    flat = f"`vit_24.py:smoke` with {STEPS:,} steps, an evaluation and a checkpoint every 100."
    yield Table("Memory and open files over a run", flat, ["step", "resident memory", "open files"], _memory())


def long_run(folder: Path) -> int:
    """Write the files of a finished run with `LINES` lines of metrics, and return their size in bytes."""
    folder.mkdir()
    draw, some = random.Random(0), LINES // 20
    names = [f"blocks/{i // 4}/{('qkv', 'out', 'up', 'down')[i % 4]}" for i in range(LAYERS)]
    steps = LINES - 2 * some
    about = ABOUT | {"steps": steps, "figures": {"hardened_accuracy": 0.89}, "summary": [["hardened accuracy", "89%"]]}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"sparsity": {"blocks": "ste(2,4)"}}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 2.3 * math.exp(-5 * step / steps) + 0.2 * draw.random()
            about_step = {"step": step, "seconds": step / 10}
            train = {"loss": loss, "learning_rate": 1e-3, "gradient_norm": draw.random(), "per_second": 1e3 + loss}
            lines: list[dict[str, Any]] = [train | {"kind": "train", "accuracy": 1 - loss / 4}]
            if step % (steps // some) == 0 and step // (steps // some) <= some:
                lines.append({"kind": "eval", "accuracy": 1 - loss / 4, "hardened_accuracy": 0.99 - loss / 4})
                measures = ("density", "weight_error", "flip_rate", "gradient_variance", "gradient_cosine")
                lines.append({"kind": "sparsity"} | {key: {n: draw.random() for n in names} for key in measures})
            file.writelines(json.dumps(about_step | line) + "\n" for line in lines)
    return (folder / "metrics.jsonl").stat().st_size


def many(folder: Path) -> None:
    """Write run.json and config.json of many runs with different methods and steps."""
    draw, methods = random.Random(1), {"dense": 1.0, "ste(2,4)": 0.73, "s_ste(2,4)": 0.68, "ste(1,4)": 0.45}
    for n in range(RUNS):
        method = draw.choice([*methods])
        run = folder / f"sweep{n // 20}" / f"run{n}"
        run.mkdir(parents=True)
        score, steps = draw.gauss(0.9, 0.02), draw.choice([1000, 2000, 4000])
        about = ABOUT | {"name": run.name, "steps": steps, "flops": [1e9, 1e9 * methods[method]], "summary": []}
        (run / "run.json").write_text(json.dumps(about | {"figures": {"hardened_accuracy": score}}))
        (run / "config.json").write_text(json.dumps(CONFIG | {"seed": n % 5, "sparsity": {"blocks": method}}))


def _memory() -> dict[str, list[str]]:
    """Return the resident memory and the number of open files of a run about every 1,000 steps."""
    changes = {"epochs": 0, "steps": STEPS, "evaluate": 100, "learning_rate.warmup": 0}
    words, found, wanted = [f"--config.{name}={value}" for name, value in changes.items()], {}, 1000
    with tempfile.TemporaryDirectory() as folder:
        for process, step in watched(Path(folder, "run"), "configs/vit_24.py:smoke", *words):
            if step >= wanted:
                with contextlib.suppress(FileNotFoundError, StopIteration):  # the process has just ended
                    memory = f"{resident('VmRSS', process) / 1e6:.0f} MB"
                    found[f"{step:,}"] = [memory, str(len(os.listdir(f"/proc/{process}/fd")))]
                wanted = step // 1000 * 1000 + 1000
    return found
