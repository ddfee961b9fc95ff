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
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

from experiments.bench.measure import markdown
from experiments.bench.silicon.processes import Processes
from experiments.bench.silicon.rows import PARTS, ROWS
from nmjax.kernels import measured

INTERPRETED = 300  # seconds that a row may take in the interpreter at most
AT_ONCE = {"primitives": 8, "numerics": 8, "speed": 6, "tiles": 6, "training": 3}  # rows of a part; else 1


def silicon(out: Path, minutes: float, parts: Iterable[str] = PARTS) -> str:
    """Run the rows that a folder has not yet, and return the table of all.

    Args:
      out: The folder.
      minutes: The time limit. Each part gets an equal share of the time that is left. Rows that do not fit into the
        share of their part run at the end. A row that still runs at the limit is ended, and runs again the next time.
      parts: The parts to run, some of `PARTS`.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, parts = time.monotonic() + 60 * minutes, list(parts)
    here = about(out)
    own = {key: here[key] for key in ("device", "jax", "code")}
    done = {line["row"]: line for line in read(out) if own.items() <= line.items()}
    cores = os.cpu_count() or 1
    for number, part in enumerate(2 * parts):  # the second time with the rows that are left
        left = end - time.monotonic()
        until = time.monotonic() + (left / (len(parts) - number) if number < len(parts) else left)
        at_once = 1 if here["simulated"] else min(AT_ONCE.get(part, 1), cores)
        todo = [name for name, row in ROWS.items() if row.part == part and name not in done]
        with closing(_each(todo, out, done, until, end, here, at_once)) as found:
            for name, line in found:
                done[name] = {"row": name, "part": part, "proves": ROWS[name].proves, **own, **line}
                done[name]["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S")
                with (out / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(done[name]) + "\n")
                print(f"{part}: {name}: {line['result']}", flush=True)
                _write(out, done, here)
    _write(out, done, here)
    return _table(done, here["simulated"])


def _each(
    rows: Iterable[str], out: Path, done: dict[str, dict[str, Any]], until: float, end: float, here: dict[str, Any],
    at_once: int,
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Run rows, some at once, and yield each with what it found.

    A row waits for the rows that prove what it needs. A row that fails beside others runs again alone: they may have
    taken its time or its memory.

    Args:
      rows: The rows in order.
      out: The folder.
      done: The rows that have ended, by name. The caller adds each row to it.
      until: No row begins later.
      end: A row that still runs then is ended.
      here: What `about` returns.
      at_once: How many run at once.
    """
    todo, alone, processes = list(rows), set(), Processes()
    running: dict[Future[dict[str, Any] | None], str] = {}
    with ThreadPoolExecutor(at_once) as pool:
        try:
            while todo or running:
                for name in _next(todo, list(running.values()), alone, at_once) if time.monotonic() <= until else ():
                    todo.remove(name)
                    running[pool.submit(_run, out, name, dict(done), end, here, processes)] = name
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
        except BaseException:
            processes.end()
            raise


def _next(todo: list[str], running: list[str], alone: set[str], at_once: int) -> list[str]:
    """Return the rows that can begin now. Those in ``alone`` run alone, after all others that can run."""
    if alone & set(running):
        return []
    later = {name: set(ROWS[name].proves) for name in (*running, *todo)}
    proved_later = lambda name: set().union(*(kinds for other, kinds in later.items() if other != name))
    ready = [name for name in todo if not proved_later(name) & set(ROWS[name].needs)]
    beside = [name for name in ready if name not in alone][: at_once - len(running)]
    return beside or ([] if running else ready[:1])


def ship(out: Path) -> list[Path]:
    """Put the tables of tiles that a run found into the package, and return their paths.

    Raises:
      ValueError: If the folder has no table of a GPU, or if a file is not a table of the present kernels.
    """
    found = sorted((out / "nmjax" / "tables").glob("*.json"))
    of_devices = [path for path in found if path.stem != "interpreter"]
    if not found:
        command = f"python -m experiments.bench silicon --out {out} --parts tiles"
        raise ValueError(f"{out} has no table of tiles (nmjax/tables/*.json): run {command}.")
    if not of_devices:
        raise ValueError(f"{out} has only tiles of the interpreter: run silicon on a GPU.")
    shipped = []
    for rows, path in [(measured.read(path), path) for path in of_devices]:
        head = json.loads(path.read_text())
        shipped.append(
            measured.write(measured.SHIPPED, head["device"], rows, {key: head[key] for key in ("jax", "date")})
        )
    return shipped


def _run(
    out: Path, name: str, done: dict[str, dict[str, Any]], end: float, here: dict[str, Any],
    processes: Processes,
) -> dict[str, Any] | None:  # fmt: skip
    """Run a row, unless what it needs has failed. Return None if the time was over before it ended."""
    row, left = ROWS[name], end - time.monotonic()
    failed = [kind for line in done.values() if _failed(line) for kind in line["proves"]]
    broken = [kind for kind in row.needs if kind in failed]
    if broken:
        return {"result": f"not run, because {', '.join(broken)} failed"}
    if row.family not in ("", here["family"]):
        return {"result": f"not run: it is a row of {row.family}, and this is {here['family']}"}
    like = next((other for other in done if row.alike and ROWS[other].alike == row.alike), None)
    if here["simulated"] and like is not None:
        return {"result": f"not run: in the interpreter it would repeat the row {like}"}
    most = INTERPRETED if here["simulated"] else row.seconds
    line = processes.run(name, min(most, left), out)
    return None if line["result"].startswith("stopped") and left < most else line


def about(out: Path) -> dict[str, Any]:
    """Return the device, the version of JAX, whether kernels are simulated, and a line about the machine.

    Raises:
      RuntimeError: If a process cannot start the device.
    """
    found = Processes().run("about", INTERPRETED, out)
    if "device" not in found:
        raise RuntimeError(f"silicon: JAX does not start here: {found['result']}")
    if found["device"] == "cpu" and shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise RuntimeError("silicon: JAX does not see the GPU. Install jax[cuda13], or set JAX_PLATFORMS=cpu.")
    return found


def read(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder. A last line that was cut off by the end of its process is left out."""
    path, lines = out / "rows.jsonl", []
    if path.exists():
        text = path.read_text()
        if text and not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]
            path.write_text(text)
        lines = [json.loads(line) for line in text.splitlines()]
    return lines


def _failed(line: dict[str, Any]) -> bool:
    return not line["result"].startswith(("right", "not run"))


def _write(out: Path, done: dict[str, dict[str, Any]], here: dict[str, Any]) -> None:
    draft = out / "silicon.md.part"
    draft.write_text(f"# silicon\n\n{here['machine']}\n\n" + _table(done, here["simulated"]))
    draft.replace(out / "silicon.md")


def _table(done: dict[str, dict[str, Any]], simulated: bool) -> str:
    rows = {}
    for name, line in ((name, done[name]) for name in ROWS if name in done):
        cells = [line["part"], line["result"], line.get("seconds"), line.get("clock", "")]
        rows[name] = [cell if cell is None or isinstance(cell, str) else f"{cell} s" for cell in cells]
    where = "By the interpreter. " if simulated else ""
    note = f"{where}Every row ran in a process of its own. Errors are relative to the largest value: those of products "
    note += "against float64, those of slots against XLA."
    table = markdown("Rows", note, rows, ["row", "part", "result", "with compilation and waiting", "clock after it"])
    left = [name for name in ROWS if name not in done]
    return f"{table}\nNot reached: {'; '.join(left)}.\n" if left else table
