"""The processes of a run: how they connect, share values, stop together and exit. Process 0 prints and writes for all.

Every process has a connection to process 0. A failing process sends the reason; a dying process closes the connection.
Either way the others exit at once, since their next collective would never return.
"""

import contextlib
import os
import queue
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NoReturn, TypeVar

import numpy as np

from experiments.errors import Diverged, Failed, Mistake, Stopped
from experiments.scale.address import Address

T = TypeVar("T")

HEARTBEAT_TIMEOUT = 45  # seconds after which JAX counts a silent process as dead, for machines that are gone
MEETING_TIMEOUT = 300  # seconds to wait until all processes have started
_LAUNCHERS = {"SLURM": "SLURM_STEP_NUM_TASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}  # variables: the number of processes
_PORT_BYTES, _KEY_BYTES = 2, 16

_count, _index = 1, 0
_connections: dict[int, Connection] = {}  # process 0: to all others; others: to process 0
_sending = threading.Lock()
_answers: queue.Queue = queue.Queue()  # what process 0 has found, for `agreed`
_over = threading.Event()  # process 0 has finished
_at_end: list[Callable[[str], None]] = []


def count() -> int:
    """Return the number of processes of this run."""
    return _count


def first() -> bool:
    """Return whether this is process 0, which prints and writes for all."""
    return _index == 0


def name() -> str:
    """Return a name for this process: its number and its machine."""
    return f"process {_index} of {_count} on {socket.gethostname()}"


# ---- meeting ----


@contextlib.contextmanager
def joined(option: str) -> Iterator[None]:
    """Connect this process to the others of its run inside the context.

    An error in one process ends the others. An error that occurs in all processes is reported by process 0 only.

    Args:
      option: The value of --distributed. "auto": the cluster says how many processes there are. "HOST:PORT,N,I": the
        address of process 0, the number of processes, the number of this one. "off" or "": this process is alone.

    Raises:
      Mistake: If the option cannot be read, or if the processes could not connect.
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


def _meet(option: str) -> None:
    global _count, _index
    if option in ("", "off"):
        if not option:
            _refuse_unjoined()
        return
    address = None if option == "auto" else Address.read(option)
    if address is not None:
        address.refuse_taken_port()
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM from here to the end
    who = f"a process on {socket.gethostname()}"
    if address is not None:
        who = f"process {address.index} of {address.count} at {address.coordinator}"
    met = threading.Event()
    threading.Thread(target=_limit_meeting, args=(who, met), daemon=True).start()
    try:
        jax.distributed.initialize(
            **_jax_options(address), heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT,
        )  # fmt: skip
        if address is not None:
            address.refuse_other_counts(HEARTBEAT_TIMEOUT)
    except Mistake:
        raise
    except Exception as error:  # each cluster raises its own
        hint = "" if address else " SLURM, Open MPI, Kubernetes and TPUs are found; elsewhere write HOST:PORT,N,I."
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise Mistake(f"--distributed={option}: the processes did not meet: {reason}.{hint}") from error
    finally:
        met.set()
    _count, _index = jax.process_count(), jax.process_index()
    if _count > 1:
        _connect("" if address is None else address.place())


def _refuse_unjoined() -> None:
    """Raise if a launcher started several processes and --distributed is not set."""
    launchers = [launcher for launcher, variable in _LAUNCHERS.items() if int(os.environ.get(variable) or 1) > 1]
    if launchers:
        raise Mistake(
            f"{launchers[0]} has started several processes, and each would do the same. Write --distributed=auto "
            "to make them one run, or --distributed=off if each is to be a run of its own."
        )


def _jax_options(address: Address | None) -> dict[str, Any]:
    options: dict[str, Any] = {"initialization_timeout": MEETING_TIMEOUT + 60}  # `_limit_meeting` exits earlier
    if address is not None:
        options |= {
            "coordinator_address": address.coordinator,
            "num_processes": address.count,
            "process_id": address.index,
            "cluster_detection_method": "deactivate",  # it would give every process one device of its machine
        }
        if place := address.place():  # otherwise JAX listens at all addresses
            options["coordinator_bind_address"] = f"{place}:{address.coordinator.rpartition(':')[2]}"
    return options


def _limit_meeting(who: str, met: threading.Event) -> None:
    """Print that this process waits, and end it after `MEETING_TIMEOUT` seconds without a traceback."""
    if not met.wait(10):
        print(f"{who} waits for the others, up to {MEETING_TIMEOUT} s", file=sys.stderr, flush=True)
        if not met.wait(MEETING_TIMEOUT - 10):
            _end(
                f"{who} has waited {MEETING_TIMEOUT} s for the others. Start all processes with the same HOST:PORT "
                "and N",
                Failed.code,
            )


def _connect(place: str) -> None:
    """Connect every process to process 0, which listens at `place`, or at all of its addresses if that is ""."""
    from jax._src import distributed  # the only place that knows which address the cluster gave

    host = distributed.global_state.coordinator_address.rpartition(":")[0].strip("[]")
    failure = f"no connection to process 0 on {host}{{}}. The machines of a run must be able to connect on all ports"
    too_late = f" within {HEARTBEAT_TIMEOUT} s"
    late = threading.Timer(HEARTBEAT_TIMEOUT, lambda: _end(f"{name()}: {failure.format(too_late)}", 1))
    late.daemon = True
    late.start()
    if first():
        _accept(place)
    else:
        _call(host, failure)
    late.cancel()
    threading.Thread(target=_listen, daemon=True).start()


def _accept(place: str) -> None:
    """In process 0: wait until all others have connected."""
    key = secrets.token_bytes(_KEY_BYTES)
    listener = Listener((place, 0), backlog=_count, authkey=key)
    _broadcast(listener.address[1].to_bytes(_PORT_BYTES, "big") + key)
    while len(_connections) < _count - 1:
        with contextlib.suppress(Exception):  # ignore connections from other programs
            connection = listener.accept()
            _connections[connection.recv()] = connection
    listener.close()


def _call(host: str, failure: str) -> None:
    """In the others: connect to process 0, and send it the number of this process."""
    known = _broadcast(bytes(_PORT_BYTES + _KEY_BYTES))
    try:
        _connections[0] = Client((host, int.from_bytes(known[:_PORT_BYTES], "big")), authkey=known[_PORT_BYTES:])
        _connections[0].send(_index)
    except OSError as error:
        raise Failed(failure.format(f" ({error})")) from error


def _broadcast(own: bytes) -> bytes:
    """Return `own` of process 0: its port and its key. `own` must have the same length in all processes."""
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8)).tobytes()


# ---- agreeing ----


def agreed(find: Callable[[], T]) -> T:
    """Return what `find` returns in process 0. All processes have to call this in the same order."""
    if not first():
        return _answers.get()
    answer = find()
    _send("answer", answer)
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
# A turn is a step of the loop, counted by `turn`. A process that is to stop sends "stop" to process 0, which asks all
# others how many turns they have taken ("where"). Each answers ("at") and takes no further turn. Process 0 then sends
# the turn at which all stop ("until"): one after the furthest.

_gate = threading.Lock()  # held while the processes say how far they are: no turn is taken then
_first_to_ask = threading.Lock()  # the loop's thread and the listening thread may both ask
_turns = 0  # that this process has taken
_last: int | None = None  # the turn at which all stop
_asked = False  # this process has asked to stop
_far: dict[int, int] = {}  # in process 0: the turns that each process has taken


def turn(stop: bool) -> bool:
    """Count a step, and return whether all processes stop here.

    Every process calls this after each of its steps. Soon after one process asks to stop, all calls for the same step
    return True.

    Args:
      stop: True if this process asks to stop.
    """
    global _turns, _asked
    if stop and not _asked:
        _asked = True
        if first():
            _ask_all()
        else:
            _send("stop", None)
    with _gate:
        _turns += 1
        return _turns == _last


def _ask_all() -> None:
    """In process 0: take no further turn, and ask all others how many turns they have taken. Do so only once."""
    with _first_to_ask:
        if _far:
            return
        _gate.acquire()
        _far[0] = _turns
    _send("where", None)


def _stopping(who: int, kind: str, content: Any) -> None:
    """Handle a message about stopping. With "at" and "until", the content is a number of turns."""
    global _last
    if kind == "stop":
        _ask_all()
    elif kind == "where":
        _gate.acquire()
        _send("at", _turns)
    elif kind == "at":
        _far[who] = content
        if len(_far) == _count:
            _last = max(_far.values()) + 1
            _send("until", _last)
            _gate.release()
    else:
        _last = content
        _gate.release()


# ---- parting ----


@contextlib.contextmanager
def at_end(do: Callable[[str], None]) -> Iterator[None]:
    """Call `do(reason)` if this process exits inside the context because another one failed."""
    _at_end.append(do)
    try:
        yield
    except BaseException as error:
        _wait_for_cause(error)
        raise
    finally:
        _at_end.remove(do)


def _wait_for_cause(error: BaseException) -> None:
    """Wait for the message that another process failed, since a collective may fail here before it arrives."""
    if _count > 1 and not isinstance(error, Mistake | Failed | Stopped | KeyboardInterrupt):
        time.sleep(2)


def _leave() -> None:
    """Send that this process is done. All others wait for process 0, because JAX's own wait is short."""
    _send("done", None)
    if not first():
        _over.wait()


def _send(kind: str, content: Any) -> None:
    """Send a message over all connections of this process."""
    with _sending:
        for connection in _connections.values():
            with contextlib.suppress(OSError):
                connection.send((kind, content))


def _listen() -> None:
    """Handle the messages of all connections until each process has sent that it is done."""
    open_ones = {connection: who for who, connection in _connections.items()}
    while open_ones:
        for connection in wait(list(open_ones)):
            who = open_ones[connection]
            try:
                kind, content = connection.recv()
            except Exception:  # the connection was closed, perhaps within a message
                kind, content = (
                    "failed",
                    (f"process {who} of {_count} is gone, and gave no reason. Look at its own output", 1),
                )
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
    """End this process because another one has failed."""
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
      text: The text to print; by default the reason.
    """
    try:
        _send("failed", (reason, code))
        text = text or reason
        print(text if "launch.py: " in text else f"launch.py: {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(code)
