"""A run's directory: its config, where it came from, its metrics as lines and as TensorBoard events; and in a sink beside it."""

import contextlib
import hashlib
import json
import platform
import secrets
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from importlib import metadata
from pathlib import Path

import numpy as np

from experiments.errors import Mistake
from experiments.files import lines, replace, writable
from experiments.scale import sinks

ROOT = Path(__file__).parents[2]


class Record:
    """Writes what a run says of itself: config.json, run.json, plan.txt and plan.html, metrics.jsonl, TensorBoard events.

    What a directory holds of the same config is gone on with; `check` has refused that of another one. A sink is sent the same
    numbers, and run.json holds its name for this run.
    """

    def __init__(self, workdir: Path, config, about: dict, plan, tell: Callable[[str], None] = print, sink: str = ""):
        self.dir, self.metrics = workdir, workdir / "metrics.jsonl"
        with writable(workdir):
            replace(workdir / "config.json", _resolved(config))
            replace(workdir / "plan.txt", f"{plan}\n")
            replace(workdir / "plan.html", plan._repr_html_())
            self.about = {
                **about,
                "began": now(),
                "ended": None,
                "outcome": "running",
                "versions": versions(),
                "git": git(),
                "sent": _sent(workdir / "run.json"),
            }
            self._about()
        self._tell, self._began = tell, time.monotonic()
        self._lines, self._events = None, None
        self._sink, self._config, self._sender = sink, config, None

    def begin(self, step: int) -> None:
        """Write from a step on: what is there of later ones is dropped, and a line that was cut off."""
        kept = [line for line in lines(self.metrics) if line["step"] + (line["kind"] == "sparsity") <= step]
        replace(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        self._lines, self._events = Lines(self.metrics), Events(self.dir / "tensorboard", step)
        self._began -= max((line["seconds"] for line in kept), default=0.0)
        if self._sink:
            self._send(step)

    def _send(self, step: int) -> None:
        """Send from a step on, to where what was before it is."""
        self.about["sent"] = {self._sink: secrets.token_hex(4)} | (self.about["sent"] if step else {})
        self._about()
        run = sinks.Run(self.about["sent"][self._sink], self.dir, fields(self._config))
        self._sender = sinks.Sender(self._sink, run, self._tell)

    def write(self, kind: str, step: int, **values) -> None:
        """A line of metrics: numbers, or tables of numbers by layer. What a full disk does not take is kept until it does."""
        line = {"step": step, "seconds": round(self.elapsed(), 3), "kind": kind, **values}
        whole = self._lines.write(json.dumps(line) + "\n")
        self._events.write(step, numbers := _flat(values, f"{kind}/", "/"))
        if self._sender is not None:
            self._sender.write(step, numbers)
        if not whole and self._lines.late == 1:
            self._tell(f"{self.metrics} cannot be written: {self._lines.why}. Its lines are kept until it can.")

    def best(self, name: str, higher: bool) -> float | None:
        """The best evaluation yet, of hardened weights where there are any."""
        found = [line.get(f"hardened_{name}", line.get(name)) for line in lines(self.metrics) if line["kind"] == "eval"]
        found = [value for value in found if value is not None and np.isfinite(value)]
        return (max if higher else min)(found, default=None)

    def keep(self, summary: list, figures: dict[str, float], pictures: dict) -> None:
        """What the report shows beside the curves."""
        self.about |= {"summary": summary, "figures": figures}
        texts = {name: value for name, value in pictures.items() if name == "prompt" or isinstance(value, list)}
        arrays = {name: value for name, value in pictures.items() if name not in texts}
        if texts:
            replace(self.dir / "text.json", json.dumps(texts))
        if arrays:
            np.savez_compressed(self.dir / "pictures.npz", **arrays)

    def elapsed(self) -> float:
        """Seconds that the run has taken, those before it was gone on with too."""
        return time.monotonic() - self._began

    def close(self, outcome: str) -> None:
        if self._lines is not None:
            written, self._lines = self._lines, None
            self._events.close()
            written.close()
        self.about |= {"ended": now(), "outcome": outcome}
        self._about()
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.close(outcome, {f"summary/{label}": text for label, text in self.about.get("summary", ())})

    def _about(self) -> None:
        replace(self.dir / "run.json", json.dumps(self.about, indent=1))


class Silent:
    """The record of a process that leaves writing to the first."""

    begin = write = best = keep = close = lambda *_, **__: None
    elapsed = lambda _: 0.0


class Lines:
    """A file of lines, each of which is there whole as soon as it is written, or waits for the next."""

    def __init__(self, path: Path):
        self._file, self._size, self._waiting = path.open("ab", buffering=0), path.stat().st_size, []
        self.why = ""

    @property
    def late(self) -> int:
        """How many lines wait."""
        return len(self._waiting)

    def write(self, line: str) -> bool:
        """Whether all is written."""
        self._waiting.append(line)
        data = "".join(self._waiting).encode()
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            self.why = error.strerror or str(error)
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # part of a line, which later ones would spoil
            return False
        self._size, self._waiting = self._size + done, []
        return True

    def close(self) -> None:
        lost = self._waiting and not self.write("")
        self._file.close()
        if lost:
            raise OSError(f"{len(self._waiting) - 1} lines of {self._file.name} could not be written: {self.why}")


class Events:
    """TensorBoard's file of numbers, written as they come: a thread of its own would hang on a full disk."""

    def __init__(self, directory: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter  # imported where a run begins: plans do without
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        directory.mkdir(parents=True, exist_ok=True)
        self._scalar, self._event = scalar, event_pb2.Event
        self._writer = EventsWriter(str(directory / "events"))
        if step:  # what an earlier file has of later steps is void
            self._put(step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        for tag, number in values.items():
            self._put(step, summary=self._scalar(tag, number))
        with contextlib.suppress(OSError):
            self._writer.flush()

    def _put(self, step, **what):
        with contextlib.suppress(OSError):  # metrics.jsonl has the same, and says what is missing
            self._writer.write_event(self._event(step=step, wall_time=time.time(), **what))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


def _resolved(config) -> str:
    return json.dumps(config.to_dict(), indent=1, sort_keys=True)


def check(workdir: Path, config) -> None:
    """Refuse, before anything is done, a directory that cannot be written or that holds a run of another config."""
    if workdir.exists() and not workdir.is_dir():
        raise Mistake(f"--workdir={workdir} is a file, not a directory.")
    with writable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        (draft := workdir / ".writable").touch()
        draft.unlink()
    if lines(workdir / "metrics.jsonl") or any((workdir / "checkpoints").glob("*.json")):  # there is what to go on with
        same_config(workdir, config)


def finished(workdir: Path) -> bool:
    about = workdir / "run.json"
    return about.exists() and json.loads(about.read_text())["outcome"] == "finished"


def same_config(workdir: Path, config) -> None:
    """Refuse the directory of a run of another config, but for its mesh: where arrays lie changes rounding alone."""
    if not (workdir / "config.json").is_file():
        raise Mistake(
            f"--workdir={workdir} has lost its config.json, so nothing says what its run was. Give another one."
        )
    there, here = held(workdir), _but_for_mesh(fields(config))
    if there != here:
        names = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
        changed = "; ".join(f"{name}: {there.get(name)!r} there, {here.get(name)!r} here" for name in names[:4])
        raise Mistake(
            f"--workdir={workdir} holds a run of another config ({changed}). Give this one a directory of its own; to evaluate "
            f"that one, write --mode=eval --workdir={workdir} alone."
        )


def held(workdir: Path) -> dict:
    """The fields of the config whose run is there."""
    return _but_for_mesh(_flat(json.loads((workdir / "config.json").read_text())))


def _but_for_mesh(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if not name.startswith("mesh.")}


def digest(fields: dict) -> str:
    """A name of a config, by which results are known to be of it."""
    return hashlib.sha256(json.dumps(_but_for_mesh(fields), sort_keys=True).encode()).hexdigest()[:12]


def fields(config) -> dict:
    """Those of a config, by their dotted names, as config.json would give them back."""
    return _flat(json.loads(_resolved(config)))


def _flat(tree: dict, before: str = "", joint: str = ".") -> dict:
    """The leaves of nested tables by their whole names, as a config's fields by their dotted ones."""
    flat = {}
    for name, value in tree.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{before}{name}{joint}", joint) if inner else {before + name: value}
    return flat


def _sent(about: Path) -> dict[str, str]:
    """Under which name a directory's run has been sent to a sink, if it has."""
    try:
        return json.loads(about.read_text()).get("sent", {})
    except (OSError, ValueError):
        return {}


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    names = ("nmjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def git() -> dict | None:
    """The commit that runs, and whether files differ from it; None outside a repository."""
    ask = lambda *words: subprocess.run(
        ["git", "-C", ROOT, *words], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        return {
            "commit": ask("rev-parse", "HEAD"),
            "dirty": bool(ask("status", "--porcelain", "--", ".", ":!*results/*")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None
