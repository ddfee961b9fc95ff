"""The processes of a run: how they meet, agree, stop together and part. The first one speaks and writes for all.

Every process holds a connection to the first one. A process that fails says on it why, and one that dies closes it; the
others then end at once, because they would wait for ever in their next collective. JAX notices within `SILENCE` seconds
if a whole machine is gone.
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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from experiments.errors import Diverged, Failed, Mistake, Stopped

T = TypeVar("T")

SILENCE = 45  # seconds after which a process that is not heard of counts as dead
PATIENCE = 300  # seconds to wait for a process that has not come yet
_STARTERS = {"SLURM": "SLURM_STEP_NUM_TASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}  # how many processes each started

_count, _index = 1, 0
_connections: dict[int, Connection] = {}  # to the first process, which has one to every other
_sending = threading.Lock()
_answers: queue.Queue = queue.Queue()  # what the first process has found, for `agreed`
_over = threading.Event()  # the first process has done all that it had to
_at_end: list[Callable[[str], None]] = []


def count() -> int:
    """Return the number of processes of this run."""
    return _count


def first() -> bool:
    """Return whether this process speaks and writes for all."""
    return _index == 0


def name() -> str:
    """Return this process in words: its number and its machine."""
    return f"process {_index} of {_count} on {socket.gethostname()}"


# ---- meeting ----


@contextlib.contextmanager
def joined(option: str) -> Iterator[None]:
    """Make this process one of several inside the context.

    An error of one process ends the others. The first process reports an error that all have.

    Args:
      option: The value of --distributed. "auto": the cluster says how many processes there are. "HOST:PORT,N,I": the
        address of process 0, the number of processes, the number of this one. "off" or "": this process is alone.

    Raises:
      Mistake: If the option cannot be read, or if the processes did not meet.
    """
    try:
        _meet(option)
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


class _Address(NamedTuple):
    """The value of --distributed=HOST:PORT,N,I."""

    coordinator: str
    count: int
    index: int


def _meet(option: str) -> None:
    global _count, _index
    if option in ("", "off"):
        if not option:
            _refuse_unjoined()
        return
    address = None if option == "auto" else _parsed(option)
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM from here to the end
    who = f"a process on {socket.gethostname()}"
    if address is not None:
        who = f"process {address.index} of {address.count} at {address.coordinator}"
    met = threading.Event()
    threading.Thread(target=_patient, args=(who, met), daemon=True).start()
    try:
        jax.distributed.initialize(
            **_jax_options(address), heartbeat_timeout_seconds=SILENCE, shutdown_timeout_seconds=SILENCE
        )
    except Exception as error:  # each cluster raises its own
        hint = "" if address else " SLURM, Open MPI, Kubernetes and TPUs are found; elsewhere write HOST:PORT,N,I."
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise Mistake(f"--distributed={option}: the processes did not meet: {reason}.{hint}") from error
    finally:
        met.set()
    _count, _index = jax.process_count(), jax.process_index()
    if _count > 1:
        _connect()


def _refuse_unjoined() -> None:
    """Refuse to run alone in one of several processes that a cluster has started of this command."""
    starters = [starter for starter, variable in _STARTERS.items() if int(os.environ.get(variable) or 1) > 1]
    if starters:
        raise Mistake(
            f"{starters[0]} has started several of this command, and each would do the same. Write --distributed=auto "
            "to make them one run, or --distributed=off if each is to be a run of its own."
        )


def _parsed(option: str) -> _Address:
    match = re.fullmatch(r"(.+:\d+),(\d+),(\d+)", option)
    if match is None:
        raise Mistake(
            f"--distributed={option}: write auto, off, or HOST:PORT,N,I: the address of process 0, the number of "
            "processes, and the number of this one."
        )
    address = _Address(match[1], int(match[2]), int(match[3]))
    if address.index >= address.count:
        raise Mistake(f"--distributed={option}: {address.count} processes are numbered from 0 to {address.count - 1}.")
    return address


def _jax_options(address: _Address | None) -> dict[str, Any]:
    options: dict[str, Any] = {"initialization_timeout": PATIENCE + 60}  # `_patient` gives up before, without a trace
    if address is not None:
        options |= {
            "coordinator_address": address.coordinator,
            "num_processes": address.count,
            "process_id": address.index,
            "cluster_detection_method": "deactivate",  # it would give every process one device of its machine
        }
    return options


def _patient(who: str, met: threading.Event) -> None:
    """Say that this process waits for the others, and end it after `PATIENCE` seconds."""
    if not met.wait(10):
        print(f"{who} waits for the others, up to {PATIENCE} s", file=sys.stderr, flush=True)
        if not met.wait(PATIENCE - 10):
            _end(f"{who} has waited {PATIENCE} s for the others", Failed.code)


def _connect() -> None:
    """Connect every process to the first one."""
    from jax._src import distributed  # the only place that knows which address the cluster gave

    host = distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
    failure = f"no connection to process 0 on {host} within {SILENCE} s. The machines of a run need open ports"
    late = threading.Timer(SILENCE, lambda: _end(f"{name()}: {failure}", 1))
    late.daemon = True
    late.start()
    if first():
        _accept()
    else:
        _call(host, failure)
    late.cancel()
    threading.Thread(target=_listen, daemon=True).start()


def _accept() -> None:
    """Wait, as the first process, until all others have called."""
    key = secrets.token_bytes(16)
    listener = Listener(("", 0), backlog=_count, authkey=key)
    _broadcast(listener.address[1].to_bytes(2, "big") + key)
    while len(_connections) < _count - 1:
        with contextlib.suppress(Exception):  # a caller that is not one of these processes
            connection = listener.accept()
            _connections[connection.recv()] = connection
    listener.close()


def _call(host: str, failure: str) -> None:
    """Call the first process, and tell it the number of this one."""
    known = _broadcast(bytes(18))
    try:
        _connections[0] = Client((host, int.from_bytes(known[:2], "big")), authkey=known[2:])
        _connections[0].send(_index)
    except OSError as error:
        raise Failed(f"{failure} ({error})") from error


def _broadcast(own: bytes) -> bytes:
    """Return the port and the key of the first process; every process gives bytes of the same length."""
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8)).tobytes()


# ---- agreeing ----


def agreed(find: Callable[[], T]) -> T:
    """Return what `find` returns in the first process. All processes have to call this in the same order."""
    if not first():
        return _answers.get()
    answer = find()
    _tell("answer", answer)
    return answer


def same(own: dict[str, Any]) -> None:
    """Refuse settings that are not the same in all processes.

    Args:
      own: The settings of this process, by name.
    """
    others = agreed(lambda: own)
    different = [setting for setting in sorted(own | others) if own.get(setting) != others.get(setting)]
    if different:
        setting = different[0]
        raise Mistake(
            f"{setting} is {own.get(setting)!r} here and {others.get(setting)!r} in process 0. All processes of a run "
            "need the same settings."
        )


# ---- stopping together ----
#
# A process that was told to stop asks the first one ("stop"). The first asks all how many turns they have taken
# ("where"); each answers ("at") and takes no further turn. The first then tells all the turn at which they stop
# ("until"): one after the furthest.

_gate = threading.Lock()  # held while the processes say how far they are: no turn is taken then
_first_to_ask = threading.Lock()  # the loop's thread and the listening thread may both ask
_turns = 0  # that this process has taken
_last: int | None = None  # the turn at which all stop
_asked = False  # this process has asked to stop
_far: dict[int, int] = {}  # in the first process: the turns that each has taken


def turn(stop: bool) -> bool:
    """Count a step, and return whether all processes stop here.

    Every process calls this after each of its steps. Some turns after one of them wants to stop, it returns True in all
    of them at the same turn.

    Args:
      stop: True if this process was told to stop.
    """
    global _turns, _asked
    if stop and not _asked:
        _asked = True
        if first():
            _ask_all()
        else:
            _tell("stop", None)
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


def _stopping(who: int, kind: str, content: Any) -> None:
    """Handle a message about stopping."""
    global _last
    if kind == "stop":
        _ask_all()
    elif kind == "where":
        _gate.acquire()
        _tell("at", _turns)
    elif kind == "at":
        _far[who] = content
        if len(_far) == _count:
            _last = max(_far.values()) + 1
            _tell("until", _last)
            _gate.release()
    else:
        _last = content
        _gate.release()


# ---- parting ----


@contextlib.contextmanager
def at_end(do: Callable[[str], None]) -> Iterator[None]:
    """Call `do(reason)` if the end of another process ends this one inside the context."""
    _at_end.append(do)
    try:
        yield
    except BaseException as error:
        _wait_for_cause(error)
        raise
    finally:
        _at_end.remove(do)


def _wait_for_cause(error: BaseException) -> None:
    """Wait for the message that another process has died: its death may fail a collective here before it arrives."""
    if _count > 1 and not isinstance(error, Mistake | Failed | Stopped | KeyboardInterrupt):
        time.sleep(2)


def _leave() -> None:
    """Say that this process is done. The others wait here for the first one, because JAX would not wait for long."""
    _tell("done", None)
    if not first():
        _over.wait()


def _tell(kind: str, content: Any) -> None:
    with _sending:
        for connection in _connections.values():
            with contextlib.suppress(OSError):
                connection.send((kind, content))


def _listen() -> None:
    """Handle the messages of all connections until each has said that it is done."""
    open_ones = {connection: who for who, connection in _connections.items()}
    while open_ones:
        for connection in wait(list(open_ones)):
            who = open_ones[connection]
            try:
                kind, content = connection.recv()
            except Exception:  # the connection's end, or a part of a last message
                kind, content = "failed", (f"process {who} of {_count} is gone, and had no time to say why", 1)
            if kind == "failed":
                _end_with(*content)
            elif kind == "done":
                del open_ones[connection]
                if not first():
                    _over.set()
            elif kind == "answer":
                _answers.put(content)
            else:
                _stopping(who, kind, content)


def _end_with(reason: str, code: int) -> NoReturn:
    """End this process because another one has ended."""
    for do in list(_at_end):
        with contextlib.suppress(Exception):  # this process ends all the same
            do(reason)
    _end(reason, code, f"{reason}. {name()} ends with it.")


def _fail(error: BaseException) -> NoReturn:
    """End this process and all others because of an error of this one."""
    known = isinstance(error, Mistake | Failed | KeyboardInterrupt)
    _wait_for_cause(error)
    reason = f"{name()}: {str(error) or ('interrupted' if known else type(error).__name__)}"
    trace = "" if known else "".join(traceback.format_exception(error))
    code = getattr(error, "code", 130 if known else 1)
    _end(reason.rstrip("."), code, f"{trace}launch.py: {reason}")


def _end(reason: str, code: int, text: str = "") -> NoReturn:
    """End this process at once, and all others. JAX's own exit would wait for processes that are gone.

    Args:
      reason: The reason, for the other processes.
      code: The exit code of all.
      text: What this process prints, if it is not the reason.
    """
    try:
        _tell("failed", (reason, code))
        text = text or reason
        print(text if "launch.py: " in text else f"launch.py: {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(code)
