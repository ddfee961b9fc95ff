"""The queue of what waits for a GPU: whole steps first, then blocks, numbers, tiles, other libraries, and studies.

Each row runs in a process of its own, so that a crash costs one row, and is written to ``rows.jsonl`` and
``silicon.md`` in a folder as it comes. The same command, run again, goes on with the next row. A row of another version
of its kernels, of another device or of another JAX counts as not measured. A kind of kernel that fails is not tried
again in larger rows. The fastest tiles go into a table in the folder, which later rows use; `ship` puts it into the
package. Without a GPU everything runs in the interpreter, with small arrays. It needs jax, flax, optax, numpy and what
nmjax itself needs.

The process that starts the others never touches the device: it would take the memory that they need.
"""

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments import files
from experiments.bench.measure import Table
from experiments.bench.silicon import sources
from experiments.bench.silicon.processes import Processes, gpu_state
from experiments.bench.silicon.rows import PARTS, ROWS, Row
from experiments.errors import Failed, Mistake
from nmjax.kernels import measured
from nmjax.kernels.limits import FAMILIES

INTERPRETED = 300  # seconds that a row may take in the interpreter at most
DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}  # the oldest driver of each

Line = Mapping[str, Any]


def silicon(out: Path | None, ship: Path | None, minutes: float, parts: str) -> Iterator[Table | str]:
    """Run the rows that a folder has not yet, and return the table of all; or ship the tables of tiles of a folder.

    Args:
      out: The folder.
      ship: The folder whose tables are shipped.
      minutes: The time limit. A row that still runs at the limit is ended, and runs again the next time.
      parts: The parts to run, some of `PARTS`; empty for all.

    Raises:
      Mistake: Neither folder is given, a part is unknown or not for this GPU, or there is nothing to ship.
      Failed: JAX does not start, does not see the GPU, or has no kernels for it.
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
    with Processes(out) as machine:
        end = machine.now() + 60 * minutes
        here = about(machine)
        refuse_parts(some, here)
        done, stale = kept(out / "rows.jsonl", here)
        if stale:
            print(f"{out / 'rows.jsonl'}: {stale} Their rows run again, and the table does not have them.", flush=True)
        for line in queue(some, done, machine, end, here):
            done[line["row"]] = line
            files.append(out / "rows.jsonl", lambda _, line=line: [line])
            print(f"{line['part']}: {line['row']}: {line['result']}\n  {left(some, done)}", flush=True)
            files.replace(out / "silicon.md", f"# silicon\n\n{here['machine']}\n\n{_table(done, here)}")
    yield _table(done, here)


# ---- what is done already ----


def own(name: str, here: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line of this row has if it counts: the device, the version of JAX, and those of its kernels."""
    kernels = {group: here["kernels"][group] for group in ROWS[name].kernels}
    return {"device": here["device"], "jax": here["jax"], "kernels": kernels}


def kept(path: Path, here: Mapping[str, Any]) -> tuple[dict[str, Line], str]:
    """Return the lines of a file that count, by row, and a sentence about the others, or "" if there are none."""
    fields, lines = {"row", "part", "result", "proves", "cost"}, files.lines(path)
    rows = [line for line in lines if isinstance(line, dict) and fields <= line.keys() and line["row"] in [*ROWS]]
    rows = [line for line in rows if own(line["row"], here).items() <= line.items()]
    cut = sum(map(bool, path.read_bytes().splitlines())) - len(lines) if path.exists() else 0
    said = [f"{cut} lines are cut off"] * bool(cut)
    foreign = len(lines) - len(rows)
    said += [f"{foreign} are of other kernels, of another device or of another JAX"] * bool(foreign)
    return {line["row"]: line for line in rows}, f"{', and '.join(said)}." if said else ""


def left(some: Sequence[str], done: Mapping[str, Line]) -> str:
    """Return a text that tells how many rows of each part are left."""
    counts = Counter(row.part for name, row in ROWS.items() if name not in done)
    said = [f"{counts[part]} of {part}" for part in some if counts[part]]
    return f"left: {', '.join(said)}" if said else "nothing is left"


# ---- which row is next ----


def queue(
    some: Sequence[str], done: Mapping[str, Line], machine: Processes, end: float, here: Mapping[str, Any]
) -> Iterator[Line]:  # fmt: skip
    """Run rows, some at once, and yield the line of each. The caller adds it to the lines of the rows that are done.

    A row waits for the rows that prove what it needs. A row that fails beside others runs again alone: they may have
    taken its time or its memory. At the end of the time, no row begins.

    Args:
      some: The parts.
      done: The lines of the rows that are done.
      machine: Runs the rows.
      end: The end of the time on the clock of the machine.
      here: What `about` has found.
    """
    todo = [name for name, row in ROWS.items() if row.part in some and name not in done]
    running, alone, since = [], set(), machine.now()  # since: the time up to which lines count it as their cost
    while True:
        now = machine.now()
        name = _next(todo, running, alone, done, here["simulated"]) if now <= end else None
        if name is not None:
            todo.remove(name)
            refusal = _refusal(ROWS[name], done, here)
            if refusal is not None:
                yield _line(name, {"result": refusal}, here, 0.0)
                continue
            most = INTERPRETED if here["simulated"] else ROWS[name].seconds
            machine.start(name, min(most, end - now))
            running.append(name)
        elif running:
            for name, found in machine.ended().items():
                running.remove(name)
                if found["result"].startswith("stopped") and machine.now() >= end:
                    continue  # it runs again the next time
                beside = not here["simulated"] and name not in alone and PARTS[ROWS[name].part].at_once > 1
                if beside and found["result"].startswith(("stopped", "failed")):
                    alone.add(name)
                    todo.append(name)
                    continue
                since, before = machine.now(), since
                yield _line(name, found, here, since - before)
        else:
            return


def _line(name: str, found: Line, here: Mapping[str, Any], cost: float) -> Line:
    """Return the line of a row, with the seconds that it takes of the slice of its part."""
    row = {"row": name, "part": ROWS[name].part, "proves": ROWS[name].proves, **own(name, here), **found}
    return row | {"cost": round(cost, 1), "ended": time.strftime("%Y-%m-%dT%H:%M:%S")}


def _next(
    todo: Sequence[str], running: Sequence[str], alone: set[str], done: Mapping[str, Line], simulated: bool
) -> str | None:  # fmt: skip
    """Return the row that begins now, or None. Those in ``alone`` run alone, after all others of their part."""
    spent = Counter[str]()
    for line in done.values():
        spent[line["part"]] += line["cost"]
    over = [part for part in PARTS if spent[part] >= 60 * PARTS[part].minutes]
    order = [part for part in PARTS if part not in over] + over
    proves = {name: {*ROWS[name].proves} for name in (*running, *todo)}
    waits = lambda name: any({*ROWS[name].needs} & kinds for other, kinds in proves.items() if other != name)
    ready = [name for name in todo if not waits(name)]
    name = min(ready, key=lambda name: (order.index(ROWS[name].part), name in alone, todo.index(name)), default=None)
    if name is None or (running and (name in alone or alone & set(running))):
        return None
    at_once = min(PARTS[ROWS[each].part].at_once for each in (name, *running))
    return name if len(running) < (1 if simulated else min(at_once, os.cpu_count() or 1)) else None


def _refusal(row: Row, done: Mapping[str, Line], here: Mapping[str, Any]) -> str | None:
    """Return why a row does not run here, or None."""
    failed = {kind for line in done.values() if _failed(line) for kind in line["proves"]}
    broken = [kind for kind in row.needs if kind in failed]
    if broken:
        return f"not run, because {', '.join(broken)} failed"
    if row.family not in ("", here["family"]):
        return f"not run: it is a row of {row.family}, and this is {here['family']}"
    like = next((other for other in done if row.alike and ROWS[other].alike == row.alike), None)
    if here["simulated"] and like is not None:
        return f"not run: in the interpreter it would repeat the row {like}"
    return None


def _failed(line: Line) -> bool:
    return not line["result"].startswith(("right", "not run"))


# ---- the device ----


def about(machine: Processes) -> dict[str, Any]:
    """Return the device, the version of JAX and those of kernels, whether they are simulated, and a line about it all.

    Raises:
      Failed: JAX does not start, does not see the GPU, or there are no kernels for the GPU.
    """
    machine.start("about", INTERPRETED)
    (found,) = machine.ended().values()
    driver = gpu_state().get("driver", "")
    if "device" not in found:
        raise Failed(f"silicon: JAX does not start here: {found['result']}. {old_driver(driver)}".strip())
    if found["platform"] == "cpu" and shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu":
        what = old_driver(driver) or "Install jax[cuda13], or set JAX_PLATFORMS=cpu."
        raise Failed(f"silicon: JAX does not see the GPU. {what}")
    if found["platform"] != "cpu" and found["simulated"]:
        families = ", ".join(name.capitalize() for name in FAMILIES)
        raise Failed(f"silicon: {found['device']} is of none of the families that have kernels: {families}.")
    return found | {"kernels": sources.versions(found["family"])}


def old_driver(driver: str) -> str:
    """Return what to do if a driver is too old for the installed plugin of JAX, or ""."""
    number = re.match(r"\d+", driver)
    for plugin, least in DRIVERS.items() if number else ():
        if find_spec(plugin.replace("-", "_")) and int(number[0]) < least:
            return f"Its driver is {driver}, and {plugin} needs {least} or later: install a newer driver."
    return ""


def refuse_parts(some: Sequence[str], here: Mapping[str, Any]) -> None:
    """Raise a `Mistake` if some parts are for Hopper GPUs, and this is another."""
    if here["family"] != "hopper" and not all(PARTS[part].every for part in some):
        every = ",".join(part for part in PARTS if PARTS[part].every)
        what = f"is not a Hopper GPU (H100, H200), which most parts need: write --parts={every}."
        raise Mistake(f"silicon: {here['device']} {what}")


# ---- what was found ----


def _table(done: Mapping[str, Line], here: Mapping[str, Any]) -> Table:
    rows = {}
    for name, line in ((name, done[name]) for name in ROWS if name in done):
        seconds = f"{line['seconds']} s" if "seconds" in line else None
        rows[name] = [line["part"], line["result"], seconds, line.get("state", "")]
    where = "By the interpreter. " if here["simulated"] else ""
    note = f"{where}Every row ran in a process of its own. Errors are those against XLA, relative to the largest value."
    note += f"\n\n{left([*PARTS], done).capitalize()}."
    return Table("Rows", note, ["row", "part", "result", "with compilation and waiting", "GPU after it"], rows)


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
