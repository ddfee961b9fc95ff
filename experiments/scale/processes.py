"""The processes of a run, of which the first speaks and writes for all: how they meet, agree, stop and part.

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
PATIENCE = 300  # seconds to wait for one that has not come yet
_MANY = {"SLURM": "SLURM_STEP_NUM_TASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}  # how many each says it has started

_count, _index = 1, 0
_lines: dict[int, Connection] = {}  # to the first process; the first has one to every other
_sending = threading.Lock()
_said: queue.Queue = queue.Queue()  # what the first has told all
_over = threading.Event()  # the first has done all that it had to
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
    try:
        _meet(asked)
        yield
    except BaseException as error:
        if _count == 1:
            raise
        if not isinstance(error, Stopped | Diverged):
            _fail(error)
        _leave()
        if first():
            raise
        sys.exit(error.code)
    _leave()


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

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself, from here to the end
    who = f"process {told[3]} of {told[2]} at {told[1]}" if told else f"a process on {socket.gethostname()}"
    met = threading.Event()
    threading.Thread(target=_patient, args=(who, met), daemon=True).start()
    given |= {"initialization_timeout": PATIENCE + 60}  # JAX would end with a stack trace
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=SILENCE, shutdown_timeout_seconds=SILENCE)
    except Exception as error:  # of every cluster its own
        hint = "" if told else " SLURM, Open MPI, Kubernetes and TPUs are found; elsewhere write HOST:PORT,N,I."
        raise Mistake(
            f"--distributed={asked}: the processes did not meet: {' '.join(str(error).split())[:300].rstrip('.')}.{hint}"
        ) from error
    finally:
        met.set()
    _count, _index = jax.process_count(), jax.process_index()
    if _count > 1:
        _connect()


def _patient(who: str, met: threading.Event) -> None:
    if not met.wait(10):
        print(f"{who} waits for the others, up to {PATIENCE} s", file=sys.stderr, flush=True)
        if not met.wait(PATIENCE - 10):
            _end(f"{who} has waited {PATIENCE} s for the others", Failed.code)


def _connect() -> None:
    from jax._src import distributed  # the one place that knows which address the cluster gave
    from jax.experimental import multihost_utils

    host = distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
    what = f"no line to process 0 on {host} within {SILENCE} s: machines of a run want all ports open between them"
    late = threading.Timer(SILENCE, lambda: _end(f"{name()}: {what}", 1))
    late.daemon = True
    late.start()
    key = secrets.token_bytes(16)
    listener = Listener(("", 0), backlog=_count, authkey=key) if first() else None
    port = listener.address[1] if listener else 0
    known = multihost_utils.broadcast_one_to_all(np.frombuffer(port.to_bytes(2, "big") + key, np.uint8)).tobytes()
    if listener:
        while len(_lines) < _count - 1:
            with contextlib.suppress(Exception):  # of who is none of ours
                line = listener.accept()
                _lines[line.recv()] = line
        listener.close()
    else:
        try:
            _lines[0] = Client((host, int.from_bytes(known[:2], "big")), authkey=known[2:])
            _lines[0].send(_index)
        except OSError as error:
            raise Failed(f"{what} ({error})") from error
    late.cancel()
    threading.Thread(target=_listen, daemon=True).start()


# ---- to agree ----


def agreed(find: Callable):
    """What the first process finds, known to all."""
    if not first():
        return _said.get()
    found = find()
    _tell("known", found)
    return found


def same(mine: dict) -> None:
    """Refuse what is not alike in all processes."""
    theirs = agreed(lambda: mine)
    if odd := [what for what in sorted(mine | theirs) if mine.get(what) != theirs.get(what)]:
        raise Mistake(
            f"{odd[0]} is {mine.get(odd[0])!r} here and {theirs.get(odd[0])!r} in process 0; all want the same."
        )


# ---- to stop together ----

_gate = threading.Lock()  # held while all say how far they are
_first_to_ask = threading.Lock()  # for both threads may
_turns, _last, _asked, _far = 0, None, False, {}


def turn(stop: bool) -> bool:
    """To be called by all, after every step of theirs: whether all stop here. Some time after one of them wants to ``stop`` it
    is so, and for all at the same turn."""
    global _turns, _asked
    if stop and not _asked:
        _asked = True
        _ask_all() if first() else _tell("stop", None)
    with _gate:
        _turns += 1
        return _turns == _last


def _ask_all() -> None:
    with _first_to_ask:
        if _far:
            return
        _gate.acquire()
        _far[0] = _turns
    _tell("where", None)


def _stopping(who: int, kind: str, what) -> None:
    """One message more of: I want to stop; how far are you? so far; then stop after this turn."""
    global _last
    if kind == "stop":
        _ask_all()
    elif kind == "where":
        _gate.acquire()
        _tell("at", _turns)
    elif kind == "at":
        _far[who] = what
        if len(_far) == _count:
            _last = max(_far.values()) + 1
            _tell("until", _last)
            _gate.release()
    else:
        _last = what
        _gate.release()


# ---- to part ----


@contextlib.contextmanager
def at_end(do: Callable[[str], None]):
    """Within it, ``do`` is what the end of another process leaves to be done here."""
    _at_end.append(do)
    try:
        yield
    except BaseException as error:
        _wait_for_cause(error)
        raise
    finally:
        _at_end.remove(do)


def _wait_for_cause(error: BaseException) -> None:
    """What another one's death does to this one may come before the line tells of it, which then ends this one."""
    if _count > 1 and not isinstance(error, Mistake | Failed | Stopped | KeyboardInterrupt):
        time.sleep(2)


def _leave() -> None:
    """The first may have more to do than the others, who wait for it: JAX would not for long."""
    _tell("done", None)
    if not first():
        _over.wait()


def _tell(kind: str, what) -> None:
    with _sending:
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
            except Exception:  # its end, or part of a last word
                kind, what = "failed", (f"process {who} of {_count} is gone, and had no time to say why", 1)
            if kind == "failed":
                text, code = what
                for do in list(_at_end):
                    with contextlib.suppress(Exception):  # this process ends all the same
                        do(text)
                _end(text, code, f"{text}. {name()} ends with it.")
            elif kind == "done":
                del open_lines[line]
                if not first():
                    _over.set()
            elif kind == "known":
                _said.put(what)
            else:
                _stopping(who, kind, what)


def _fail(error: BaseException) -> None:
    known = isinstance(error, Mistake | Failed | KeyboardInterrupt)
    _wait_for_cause(error)
    what = f"{name()}: {str(error) or ('interrupted' if known else type(error).__name__)}"
    text = "" if known else "".join(traceback.format_exception(error))
    _end(what.rstrip("."), getattr(error, "code", 130 if known else 1), f"{text}launch.py: {what}")


def _end(what: str, code: int, text: str = "") -> None:
    """End here and now, and all others too: what JAX does at its exit would wait for who is gone."""
    try:
        _tell("failed", (what, code))
        text = text or what
        print(text if "launch.py: " in text else f"launch.py: {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(code)
