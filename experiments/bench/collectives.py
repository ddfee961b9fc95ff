"""What devices tell each other in a compiled program, read from its text."""

import math
import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """One instruction of a compiled program by which devices tell each other something."""

    kind: str
    shape: str  # of what comes out
    moved: float  # bytes that a device sends, each time
    times: int  # in a step: as often as the loops around it go round, or once where that is not known
    name: str  # what it was in the program that was traced


def collectives(text: str) -> list[Collective]:
    """Those of a compiled program, given as text. Of arrays of b bytes among n devices each device sends what the algorithms
    in a ring send: 2 b (n-1)/n to reduce all, b (n-1)/n to gather b or to scatter the sum of b, or to exchange b; b to permute."""
    calls, computation, rows = {}, "", []
    everyone = int((re.search(r"num_partitions=(\d+)", text) or [0, 1])[1])
    done = {start: shape for shape, start in re.findall(r"= (\S.*?) [\w-]+-done\(.*?%([\w.-]+)\)", text)}
    for line in text.splitlines():
        if begun := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = begun[1]
            continue
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        for inner in re.findall(r"(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.-]+)", line):
            calls.setdefault(inner, []).append((computation, int(trips[1]) if trips else 1))
        found = re.match(rf"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
        if not found:
            continue
        own, shape, kind, start = found.groups()
        shape = done.get(own, shape) if start else shape
        n, size = _together(line, everyone), nbytes(shape)
        share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}.get(kind, (n - 1) / n)
        name = re.search(r'op_name="([^"]*)"', line)
        rows.append((computation, Collective(kind, re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape), size * share, 1, name[1] if name else "")))  # fmt: skip
    times = lambda inside: sum(times(outer) * trips for outer, trips in calls.get(inside, [])) or 1
    return [row._replace(times=times(inside)) for inside, row in rows]


def nbytes(shape: str) -> int:
    """Of an array, or of several, as compiled programs write them."""
    bits = lambda kind: 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    arrays = re.findall(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]", shape)
    return sum(bits(kind) * math.prod(int(d) for d in dims.split(",") if d) // 8 for kind, dims in arrays)


def _together(line: str, everyone: int) -> int:
    """How many devices take part, in any of the ways that they are written."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return listed[1].count(",") + 1 if listed else everyone
