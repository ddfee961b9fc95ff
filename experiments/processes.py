"""The processes of a run, of which the first speaks and writes for all: how they meet, agree and part.

Every process holds a line to the first. One that fails says why on it, and one that dies closes it; the others then end at
once, and do not wait for ever in their next collective. That a whole machine is gone, JAX notices within `SILENCE`.
"""

import contextlib
import os
import queue
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait

import numpy as np

from experiments.errors import Diverged, Failed, Mistake, Stopped

SILENCE = 45  # seconds after which a process that is not heard of counts as dead
_MANY = {"SLURM": "SLURM_STEP_NUM_TASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}  # how many each says it has started

_count, _index = 1, 0
_lines: dict[int, Connection] = {}  # to the first process; the first has one to every other
_said: queue.Queue = queue.Queue()  # what the first has told all
_at_end: list[Callable[[str], None]] = []


def count() -> int:
    return _count


def first() -> bool:
    """Whether this process speaks and writes for all."""
    return _index == 0


def name() -> str:
    return f"process {_index} of {_count} on {socket.gethostname()}"


# ---- to meet ----


@contextlib.contextmanager
def joined(asked: str):
    """Within it this process is one of several: as the cluster says with ``auto``, as told by ``HOST:PORT,N,I``; or it is
    alone, with ``off``. An error of its own ends the others; one that all have is said by the first."""
    _meet(asked)
    try:
        yield
    except BaseException as error:
        if _count == 1:
            raise
        if not isinstance(error, Stopped | Diverged):
            _fail(error)
        _tell("done", None)
        if first():
            raise
        sys.exit(error.code)
    _tell("done", None)


def _meet(asked: str) -> None:
    global _count, _index
    if asked in ("", "off"):
        many = [who for who, variable in _MANY.items() if int(os.environ.get(variable) or 1) > 1]
        if many and not asked:
            raise Mistake(
                f"{many[0]} has started several of this command, which would all do the same. Write --distributed=auto, and they "
                "are one run; or --distributed=off, if each is to be a run of its own."
            )
        return
    told = re.fullmatch(r"(.+:\d+),(\d+),(\d+)", asked)
    if not told and asked != "auto":
        raise Mistake(
            f"--distributed={asked}: write auto, off, or HOST:PORT,N,I: where process 0 is, how many there are, and which this is."
        )
    given = {}
    if told:
        given = {"coordinator_address": told[1], "num_processes": int(told[2]), "process_id": int(told[3])}
        given |= {"cluster_detection_method": "deactivate"}  # it would give every process one device of its machine
    if told and given["process_id"] >= given["num_processes"]:
        raise Mistake(f"--distributed={asked}: {told[2]} processes are numbered from 0 to {int(told[2]) - 1}.")
    import jax
    from jax._src import distributed  # the one place that knows which address the cluster gave
    from jax.experimental import multihost_utils

    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=SILENCE, shutdown_timeout_seconds=SILENCE)
    except Exception as error:  # of every cluster its own
        hint = "" if told else " SLURM, Open MPI, Kubernetes and TPUs are found; elsewhere write HOST:PORT,N,I."
        raise Mistake(
            f"--distributed={asked}: the processes did not meet: {' '.join(str(error).split())[:300].rstrip('.')}.{hint}"
        ) from error
    _count, _index = jax.process_count(), jax.process_index()
    if _count == 1:
        return
    key = secrets.token_bytes(16)
    listener = Listener(("", 0), backlog=_count, authkey=key) if first() else None
    port = listener.address[1] if listener else 0
    known = multihost_utils.broadcast_one_to_all(np.frombuffer(port.to_bytes(2, "big") + key, np.uint8)).tobytes()
    if listener:
        while len(_lines) < _count - 1:
            line = listener.accept()
            _lines[line.recv()] = line
        listener.close()
    else:
        host = distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
        _lines[0] = Client((host, int.from_bytes(known[:2], "big")), authkey=known[2:])
        _lines[0].send(_index)
    threading.Thread(target=_listen, daemon=True).start()


# ---- to agree ----


def agreed(find: Callable):
    """What the first process finds, known to all."""
    if not first():
        return _said.get()
    found = find()
    _tell("known", found)
    return found


def same(what: str, mine: str) -> None:
    """Refuse what is not alike in all processes."""
    if agreed(lambda: mine) != mine:
        raise Mistake(f"{what} is not that of process 0; all processes want the same.")


# ---- to part ----


@contextlib.contextmanager
def at_end(do: Callable[[str], None]):
    """Within it, ``do`` is what the end of another process leaves to be done here."""
    _at_end.append(do)
    yield
    _at_end.remove(do)


def _tell(kind: str, what) -> None:
    for line in _lines.values():
        with contextlib.suppress(OSError):
            line.send((kind, what))


def _listen() -> None:
    open_lines = {line: who for who, line in _lines.items()}
    while open_lines:
        for line in wait(list(open_lines)):
            who = open_lines[line]
            try:
                kind, what = line.recv()
            except (EOFError, OSError):
                kind, what = "failed", f"process {who} of {_count} is gone, and had no time to say why"
            if kind == "failed":
                for do in _at_end:
                    with contextlib.suppress(Exception):  # this process ends all the same
                        do(what)
                print(f"launch.py: {what}. {name()} ends with it.", file=sys.stderr)
                _end(what, 1)
            elif kind == "done":
                del open_lines[line]
            else:
                _said.put(what)


def wait_for_cause(error: BaseException) -> None:
    """Of what another one's death does to this one the line tells the cause, and ends it meanwhile."""
    if _count > 1 and not isinstance(error, Mistake | Failed | Stopped):
        time.sleep(2)


def _fail(error: BaseException) -> None:
    known = isinstance(error, Mistake | Failed)
    wait_for_cause(error)
    if not known:
        traceback.print_exception(error)
    what = f"{name()}: {error or type(error).__name__}"
    print(f"launch.py: {what}", file=sys.stderr)
    _end(what.rstrip("."), error.code if known else 1)


def _end(what: str, code: int) -> None:
    """End here and now: what JAX does at its exit would wait for who is gone."""
    _tell("failed", what)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
