"""A first run of the kernels on a GPU: every primitive in a process of its own, so that a crash costs one row.

Rows are written as they come, to ``rows.jsonl`` and ``silicon.md`` in a folder. The same command, run again, continues
with the next row. A kind of kernel that fails is not tried again in larger rows. The fastest tiles go into a table in
the folder. Later rows use it, and `ship` puts it into the package. Without a GPU everything runs in the interpreter,
with small arrays. It needs jax, flax, optax, numpy and what nmjax itself needs.

The process that starts the others never touches the device: it would take the memory that they need.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

from experiments import files
from experiments.bench.measure import Table
from experiments.bench.silicon import processes
from experiments.bench.silicon.rows import PARTS, ROWS
from experiments.errors import Failed, Mistake
from nmjax.kernels import measured

INTERPRETED = 300  # seconds that a row may take in the interpreter at most
AT_ONCE = {"primitives": 8, "numerics": 8, "speed": 6, "tiles": 6, "training": 3}  # rows of a part; else 1


def silicon(out: Path | None, ship: Path | None, minutes: float, parts: str) -> Iterator[Table | str]:
    """Run the rows that a folder has not yet, and return the table of all; or ship the tables of tiles of a folder.

    Args:
      out: The folder.
      ship: The folder whose tables are shipped.
      minutes: The time limit. A row that still runs at the limit is ended, and runs again the next time.
      parts: The parts to run, some of `PARTS`; empty for all.

    Raises:
      Mistake: Neither folder is given, a part is unknown, or there is nothing to ship.
      Failed: JAX does not start, or does not see the GPU.
    """
    some = parts.replace(",", " ").split() or list(PARTS)
    unknown = sorted(set(some) - set(PARTS))
    if unknown:
        raise Mistake(f"--parts: {', '.join(unknown)} is none of the parts {', '.join(PARTS)}.")
    if ship is not None:
        yield from map(str, shipped(ship))
        return
    if out is None:
        raise Mistake("silicon: write --out DIR, the folder of its results.")
    out.mkdir(parents=True, exist_ok=True)
    end, here = time.monotonic() + 60 * minutes, about(out)
    own = {key: here[key] for key in ("device", "jax", "code")}
    done = {line["row"]: line for line in files.lines(out / "rows.jsonl") if own.items() <= line.items()}
    for part in some:
        todo = [name for name, row in ROWS.items() if row.part == part and name not in done]
        for name, line in _each(todo, out, done, end, here, AT_ONCE.get(part, 1)):
            ended = {"ended": time.strftime("%Y-%m-%dT%H:%M:%S")}
            done[name] = {"row": name, "part": part, "proves": ROWS[name].proves, **own, **line, **ended}
            files.append(out / "rows.jsonl", lambda _, line=done[name]: [line])
            print(f"{part}: {name}: {line['result']}", flush=True)
            files.replace(out / "silicon.md", f"# silicon\n\n{here['machine']}\n\n{_table(done, here['simulated'])}")
    yield _table(done, here["simulated"])


def _each(
    rows: Iterable[str], out: Path, done: Mapping[str, dict[str, Any]], end: float, here: dict[str, Any], at_once: int
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Run rows, some at once, and yield each with what it found. The caller adds it to the rows that are done.

    A row waits for the rows that prove what it needs. A row that fails beside others runs again alone: they may have
    taken its time or its memory. At the end of the time, no row begins.
    """
    todo, alone, over = list(rows), set(), Event()
    at_once = 1 if here["simulated"] else min(at_once, os.cpu_count() or 1)
    running: dict[Future[dict[str, Any] | None], str] = {}
    with ThreadPoolExecutor(at_once) as pool:
        try:
            while todo or running:
                for name in _next(todo, [*running.values()], alone, at_once) if time.monotonic() <= end else ():
                    todo.remove(name)
                    running[pool.submit(_row, name, out, dict(done), end, here, over)] = name
                if not running:
                    return
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    name, line = running.pop(ended), ended.result()
                    if line is None:
                        todo.clear()
                    elif at_once > 1 and name not in alone and line["result"].startswith(("stopped", "failed")):
                        alone.add(name)
                        todo.append(name)
                    else:
                        yield name, line
        finally:
            over.set()


def _next(todo: list[str], running: list[str], alone: set[str], at_once: int) -> list[str]:
    """Return the rows that can begin now. Those in ``alone`` run alone, after all others that can run."""
    if alone & set(running):
        return []
    proves = {name: {*ROWS[name].proves} for name in (*running, *todo)}
    waits = lambda name: any({*ROWS[name].needs} & kinds for other, kinds in proves.items() if other != name)
    ready = [name for name in todo if not waits(name)]
    beside = [name for name in ready if name not in alone][: at_once - len(running)]
    return beside or ([] if running else ready[:1])


def _row(
    name: str, out: Path, done: Mapping[str, dict[str, Any]], end: float, here: dict[str, Any], over: Event
) -> dict[str, Any] | None:  # fmt: skip
    """Run a row, unless what it needs has failed. Return None if the time was over before it ended."""
    row, left = ROWS[name], end - time.monotonic()
    failed = {kind for line in done.values() if _failed(line) for kind in line["proves"]}
    broken = [kind for kind in row.needs if kind in failed]
    if broken:
        return {"result": f"not run, because {', '.join(broken)} failed"}
    if row.family not in ("", here["family"]):
        return {"result": f"not run: it is a row of {row.family}, and this is {here['family']}"}
    like = next((other for other in done if row.alike and ROWS[other].alike == row.alike), None)
    if here["simulated"] and like is not None:
        return {"result": f"not run: in the interpreter it would repeat the row {like}"}
    most = INTERPRETED if here["simulated"] else row.seconds
    line = processes.run(name, min(most, left), out, over)
    return None if line["result"].startswith("stopped") and left < most else line


def _failed(line: dict[str, Any]) -> bool:
    return not line["result"].startswith(("right", "not run"))


def about(out: Path) -> dict[str, Any]:
    """Return the device, the version of JAX, whether kernels are simulated, and a line about the machine."""
    found = processes.run("about", INTERPRETED, out, Event())
    if "device" not in found:
        raise Failed(f"silicon: JAX does not start here: {found['result']}")
    if found["device"] == "cpu" and shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise Failed("silicon: JAX does not see the GPU. Install jax[cuda13], or set JAX_PLATFORMS=cpu.")
    return found


def _table(done: Mapping[str, dict[str, Any]], simulated: bool) -> Table:
    rows = {}
    for name, line in ((name, done[name]) for name in ROWS if name in done):
        seconds = f"{line['seconds']} s" if "seconds" in line else None
        rows[name] = [line["part"], line["result"], seconds, line.get("clock", "")]
    where = "By the interpreter. " if simulated else ""
    note = f"{where}Every row ran in a process of its own. Errors are those against XLA, relative to the largest value."
    left = [name for name in ROWS if name not in done]
    note += f"\n\nNot reached: {'; '.join(left)}." if left else ""
    return Table("Rows", note, ["row", "part", "result", "with compilation and waiting", "clock after it"], rows)


def shipped(out: Path) -> list[Path]:
    """Put the tables of tiles that a run found into the package, and return their paths.

    Raises:
      Mistake: The folder has no table of a GPU, or a file is not a table of the present kernels.
    """
    found = sorted((out / "nmjax" / "tables").glob("*.json"))
    of_devices = [path for path in found if path.stem != "interpreter"]
    if not found:
        command = f"python -m experiments.bench silicon --out {out} --parts tiles"
        raise Mistake(f"--ship: {out} has no table of tiles (nmjax/tables/*.json): run {command}.")
    if not of_devices:
        raise Mistake(f"--ship: {out} has only tiles of the interpreter: run silicon on a GPU.")
    try:
        tables = [(json.loads(path.read_text()), measured.read(path)) for path in of_devices]
    except ValueError as error:
        raise Mistake(f"--ship: {error}") from error
    return [
        measured.write(measured.SHIPPED, head["device"], rows, {key: head[key] for key in ("jax", "date")})
        for head, rows in tables
    ]
