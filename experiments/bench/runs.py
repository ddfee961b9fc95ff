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
import time
from pathlib import Path
from typing import Any

from experiments.bench.measure import markdown

LINES, LAYERS, RUNS, STEPS = 100_000, 24, 1000, 10_000
ABOUT = {
    "name": "long", "command": "python launch.py", "began": "2026-01-31T12:00:00+00:00", "unit": "images", "header": [],
    "ended": "2026-01-31T16:00:00+00:00", "outcome": "finished", "metric": "accuracy", "flops": [1e9, 7e8], "notes": [],
}  # fmt: skip
CONFIG = {"seed": 0, "experiment": "image", "data": {"name": "digits"}, "model": {"name": "vit", "size": "tiny"}}


def runs(rounds: int) -> str:
    """Return the tables of ``bench runs``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = long_run(folder / "long")
        many(folder / "many")
        rows = {
            f"report of a run of {LINES:,} lines of metrics ({one / 1e6:.0f} MB)": _report(folder / "long", rounds),
            f"index of {RUNS:,} runs": _report(folder / "many", rounds),
        }
    pages = (
        "`python -m experiments.report`, as a process of its own. Aims: at most 5 s and 5 MB for the report, and 10 s "
        "for the index."
    )
    flat = f"`vit_24.py:smoke` with {STEPS:,} steps, an evaluation and a checkpoint every 100."
    return "\n".join(
        [
            markdown("Reports", pages, rows, ["", "median", "best", "worst", "page"]),
            markdown("Memory and open files over a run", flat, _memory(), ["step", "resident memory", "open files"]),
        ]
    )


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


def _report(folder: Path, rounds: int) -> list[str]:
    """Return how long the command takes for a folder, and the size of the page."""
    seconds = []
    for _ in range(rounds):
        began = time.monotonic()
        words = [sys.executable, "-m", "experiments.report", str(folder)]
        page = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        seconds.append(time.monotonic() - began)
    size = Path(page).stat().st_size
    return [*(f"{f(seconds):.1f} s" for f in (statistics.median, min, max)), f"{size / 1e6:.2f} MB"]


def _memory() -> dict[str, list[str]]:
    """Return the resident memory and the number of open files of a run about every 1,000 steps."""
    changes = {"epochs": 0, "steps": STEPS, "evaluate": 100, "learning_rate.warmup": 0}
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--config.{name}={value}" for name, value in changes.items()]
        command = [sys.executable, "launch.py", "--config=configs/vit_24.py:smoke", f"--workdir={folder}/run", *words]
        run, found, wanted = subprocess.Popen(command, stdout=subprocess.DEVNULL), {}, 1000
        metrics = Path(folder, "run", "metrics.jsonl")
        while run.poll() is None:
            time.sleep(0.2)
            step = _last_step(metrics)
            if step >= wanted:
                with contextlib.suppress(FileNotFoundError):  # the process has just ended
                    files = len(os.listdir(f"/proc/{run.pid}/fd"))
                    found[f"{step:,}"] = [f"{_resident(run.pid) / 1e6:.0f} MB", str(files)]
                wanted = step // 1000 * 1000 + 1000
    if run.returncode:
        raise RuntimeError(f"the run ended with exit code {run.returncode}.")
    return found


def _last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    lines = metrics.read_bytes().rsplit(b"\n", 2)  # a whole line ends with a line feed
    return json.loads(lines[-2])["step"] if len(lines) > 1 and lines[-2] else 0


def _resident(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
