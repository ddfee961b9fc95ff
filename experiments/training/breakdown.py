"""The breakdown of a traced step: how long each part of it ran, by the names of its operations.

XLA keeps the `jax.named_scope`s around an operation in its ``op_name``. An operation in the scope of a slot prunes. Of
the others, those that autodiff transposed are the backward pass, and those that it linearised are the forward pass. The
program has scopes of its own for the batch and for the update (`Program.train_step`).
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nmjax.products.slot import SLOTS

PARTS = ("input", "forward", "backward", "pruning", "update", "other", "idle")
LOOPS = ("while", "conditional", "call")  # their time is that of the operations inside
IN_SCOPE = ("update", "input")  # scopes that are parts
UNTIMED = "untimed"  # the host's annotation of what belongs to no step


class Op(NamedTuple):
    """An operation that ran once.

    Attributes:
      name: The name of its instruction, such as "fusion.12".
      begin, end: When it ran, in nanoseconds.
      mine: Whether it belongs to the program of a step.
    """

    name: str
    begin: float
    end: float
    mine: bool = True


class Span(NamedTuple):
    """A span of time in which the host waited for "input", or did something "untimed"."""

    name: str
    begin: float
    end: float


class Instruction(NamedTuple):
    """An instruction of a compiled program: its opcode and its ``op_name``, or "" if it has none."""

    opcode: str
    op_name: str


def instructions(program: str) -> dict[str, Instruction]:
    """Return the instructions of a compiled program by name, from its text.

    A fusion without an ``op_name`` has that of the last named instruction in it.

    >>> instructions('  ROOT %dot.3 = f32[2]{0} dot(%a, %b), metadata={op_name="jit(f)/jvp(up)/dot_general"}')
    {'dot.3': Instruction(opcode='dot', op_name='jit(f)/jvp(up)/dot_general')}
    """
    found, last, body = {}, {}, ""  # last: the last op_name in each computation
    for line in program.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = .*?[ )]([a-z][\w-]*)\(", line)
        if match:
            named = re.search(r'metadata=\{[^}]*?op_name="([^"]*)"', line)
            called = re.search(r"calls=%?([\w.-]+)", line)
            op_name = named[1] if named else last.get(called[1], "") if called else ""
            found[match[1]] = Instruction(match[2], op_name)
            last[body] = op_name or last.get(body, "")
        elif line.endswith("{"):
            body = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
    return found


def slots_of(op_name: str) -> list[str]:
    """Return the slots in whose scope an operation is. A kernel may prune for two.

    >>> slots_of("jit(train_step)/transpose(jvp(mlp/up))/dw_g/mul"), slots_of("jit(train_step)/jvp(mlp/up)/dot_general")
    (['dw_g'], [])
    """
    scopes = (scope.split("+") for scope in re.split(r"[/()]", op_name))
    return next((names for names in scopes if set(names) <= set(SLOTS)), [])


def part_of(op_name: str) -> str:
    """Return the part of a step that an operation belongs to.

    >>> part_of("jit(train_step)/jvp(up)/dot_general"), part_of("jit(train_step)/transpose(jvp(up))/dot_general")
    ('forward', 'backward')
    """
    scopes = re.split(r"[/()]", op_name)
    if slots_of(op_name):
        return "pruning"
    outermost = re.sub(r"^jit\([^)]*\)/", "", op_name).partition("/")[0]  # a layer may have such a name further inside
    if outermost in IN_SCOPE:
        return outermost
    if "transpose(jvp" in op_name:
        return "backward"
    return "forward" if "jvp" in scopes else "other"


def layer_of(op_name: str, paths: Sequence[str]) -> str | None:
    """Return the layer whose operation this is, or None. Of several paths the longest counts.

    >>> layer_of("jit(train_step)/jvp(blocks/0/mlp/up)/dot_general", ["blocks/0/mlp/up", "up"])
    'blocks/0/mlp/up'
    """
    fitting = [path for path in paths if re.search(rf"(?:^|[/(]){re.escape(path)}(?:[/)]|$)", op_name)]
    return max(fitting, key=len, default=None)


# ---- a trace ----


def events(trace: Any, program: str) -> tuple[list[Op], list[Span]]:
    """Return the operations and the host's notes of a trace.

    Args:
      trace: A `jax.profiler.ProfileData`.
      program: The name of the program of a step, such as "jit_train_step".
    """
    ops, spans, ends, begun = [], [], {}, []
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                name, begin, end = event.name, event.start_ns, event.start_ns + event.duration_ns
                if name in ("input", UNTIMED):
                    spans.append(Span(name, begin, end))
                elif name.startswith("end: "):  # on a CPU: the end of an operation that ran in other threads
                    ends[dict(event.stats).get("_c")] = end
                else:
                    stats = dict(event.stats)
                    if "hlo_op" in stats:
                        mine = str(stats.get("hlo_module", "")).partition("(")[0] == program
                        begun.append((Op(str(stats["hlo_op"]), begin, end, mine), stats.get("_p")))
    for op, number in begun:
        ops.append(op._replace(end=max(op.end, ends.get(number, op.end) if number is not None else op.end)))
    return ops, spans


class Shared(NamedTuple):
    """The time of a trace in nanoseconds, divided among its operations.

    Attributes:
      total: The time from the first event to the last operation's end, without what is untimed.
      ops: The time of each instruction of the step.
      others: The time of other programs' operations.
      waiting: The time in which no operation ran and the host waited for input.
      idle: The other time in which no operation ran.
    """

    total: float
    ops: dict[str, float]
    others: float
    waiting: float
    idle: float


def shared(ops: Sequence[Op], spans: Iterable[Span], loops: Iterable[str] = ()) -> Shared:
    """Divide the time of a trace among its operations. Operations that run at the same time share it evenly.

    Args:
      ops: The operations.
      spans: The host's notes.
      loops: Instructions that run others. They get the time in which nothing else runs.

    >>> shared([Op("a", 0, 4), Op("b", 2, 6)], [])
    Shared(total=6, ops={'a': 3.0, 'b': 3.0}, others=0.0, waiting=0.0, idle=0.0)
    """
    loops, spans = set(loops), list(spans)
    waits = [span for span in spans if span.name == "input"]
    if not ops:
        return Shared(0, {}, 0.0, 0.0, 0.0)
    first, last = min(event.begin for event in [*ops, *waits]), max(op.end for op in ops)
    turns = sorted(
        [(event.begin, 1, event) for event in [*ops, *spans]] + [(event.end, -1, event) for event in [*ops, *spans]],
        key=lambda turn: turn[0],
    )
    times: dict[str, float] = defaultdict(float)
    total = others = waiting = idle = 0
    running: dict[Any, int] = defaultdict(int)
    before = first
    for moment, change, event in turns:
        since, now = max(before, first), min(moment, last)
        if now > since and not any(isinstance(e, Span) and e.name == UNTIMED for e in running):
            total += now - since
            at_once = [e for e in running if isinstance(e, Op)]
            at_once = [e for e in at_once if e.name not in loops] or at_once
            if not at_once:
                waiting, idle = (waiting, idle + now - since) if not running else (waiting + now - since, idle)
            for op in at_once:
                share = (now - since) * running[op] / sum(running[e] for e in at_once)
                if op.mine:
                    times[op.name] += share
                else:
                    others += share
        before = moment
        running[event] += change
        if not running[event]:
            del running[event]
    return Shared(total, dict(times), float(others), float(waiting), float(idle))


def table(times: Shared, program: Mapping[str, Instruction], paths: Sequence[str], steps: int) -> dict[str, Any]:
    """Return the seconds of a step by part, by slot and by layer.

    Args:
      times: What `shared` returned.
      program: The instructions of the step.
      paths: The paths of the pruned layers.
      steps: The number of steps in the trace.

    Returns:
      "seconds" of a step; "parts" {part: seconds}, whose sum is "seconds"; "slots" {slot: seconds}, whose sum is the
      part "pruning"; "layers" {path: {"forward", "backward" and "pruning": seconds}}.
    """
    second = steps * 1e9
    parts = dict.fromkeys(PARTS, 0.0)
    slots: dict[str, float] = {}
    layers: dict[str, dict[str, float]] = {}
    parts["idle"] += times.idle / second
    parts["input"] += times.waiting / second
    parts["other"] += times.others / second
    for name, time in times.ops.items():
        op_name = program[name].op_name if name in program else ""
        part, layer, pruned = part_of(op_name), layer_of(op_name, paths), slots_of(op_name)
        parts[part] += time / second
        for slot in pruned:
            slots[slot] = slots.get(slot, 0.0) + time / second / len(pruned)
        if layer is not None and part in ("forward", "backward", "pruning"):
            row = layers.setdefault(layer, {"forward": 0.0, "backward": 0.0, "pruning": 0.0})
            row[part] += time / second
    ordered = {path: layers[path] for path in paths if path in layers}
    return {"seconds": times.total / second, "parts": parts, "slots": slots, "layers": ordered}


def timeline(
    ops: Sequence[Op], spans: Iterable[Span], program: Mapping[str, Instruction], paths: Sequence[str]
) -> dict[str, Any]:
    """Return a trace in Chrome's format, which Perfetto opens: operations by part, under the names of their scopes.

    Args:
      ops: The operations.
      spans: The host's notes.
      program: The instructions of the step.
      paths: The paths of the pruned layers.
    """
    rows = [(span.begin, span.end, "host", span.name, {}) for span in spans]
    for op in ops:
        op_name = program[op.name].op_name if op.mine and op.name in program else ""
        label = [layer_of(op_name, paths) or "", "+".join(slots_of(op_name)), op_name.rpartition("/")[2] or op.name]
        about = {"instruction": op.name, "op_name": op_name}
        rows.append((op.begin, op.end, part_of(op_name), " ".join(filter(None, label)), about))
    lanes: dict[tuple[str, int], float] = {}  # (part, number) -> the end of its last operation
    traced = []
    for begin, end, part, label, about in sorted(rows, key=lambda row: row[:2]):
        lane = next(i for i in itertools.count() if lanes.get((part, i), begin) <= begin)
        lanes[part, lane] = end
        place = {"pid": 1 + ("host", *PARTS).index(part), "tid": lane + 1}
        traced.append({"ph": "X", "name": label, "cat": part, "ts": begin / 1e3, "dur": (end - begin) / 1e3} | place)
        traced[-1]["args"] = about
    names = [
        {"ph": "M", "name": "process_name", "pid": i, "args": {"name": part}}
        for i, part in enumerate(("host", *PARTS), 1)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + traced}
