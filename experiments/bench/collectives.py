"""The collectives of a compiled program: what its devices send each other, read from the program's text."""

import math
import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """One instruction of a compiled program by which devices send each other data."""

    kind: str
    shape: str  # of the result
    moved: float  # bytes that a device sends each time
    times: int  # in a step: the trips of the loops around it, or once if they are not known
    name: str  # its name in the traced program


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program.

    The bytes are those of ring algorithms. Of an array of b bytes among n devices each device sends 2 b (n-1)/n in an
    all-reduce, b (n-1)/n in an all-gather or all-to-all, b (n-1) in a reduce-scatter (b is its result), and b in a
    permute.

    Args:
      text: The program's text.
    """
    calls, computation, rows = {}, "", []
    partitions = re.search(r"num_partitions=(\d+)", text)
    everyone = int(partitions[1]) if partitions else 1
    done = {start: shape for shape, start in re.findall(r"= (\S.*?) [\w-]+-done\(.*?%([\w.-]+)\)", text)}
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            computation = header[1]
            continue
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        branches = re.findall(r"branch_computations=\{([^}]*)\}", line)
        called = re.findall(r"(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.-]+)", line)
        for inner in (*called, *(name.strip().lstrip("%") for names in branches for name in names.split(","))):
            calls.setdefault(inner, []).append((computation, int(trips[1]) if trips else 1))
        instruction = re.match(rf"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
        if instruction:
            own, shape, kind, start = instruction.groups()
            shape = done.get(own, shape) if start else shape
            rows.append((computation, _collective(line, kind, shape, _together(line, everyone))))

    def times(inside: str) -> int:
        return sum(times(outer) * trips for outer, trips in calls.get(inside, [])) or 1

    return [row._replace(times=times(inside)) for inside, row in rows]


def _collective(line: str, kind: str, shape: str, n: int) -> Collective:
    """Return the collective of a line among n devices, once in a step."""
    rings = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}
    name = re.search(r'op_name="([^"]*)"', line)
    plain = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape)
    return Collective(kind, plain, nbytes(shape) * rings.get(kind, (n - 1) / n), 1, name[1] if name else "")


def nbytes(shape: str) -> int:
    """Return the bytes of an array or of several, whose shapes are written as in compiled programs."""
    total = 0
    for kind, dims in re.findall(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]", shape):
        width = re.search(r"\d+", kind)
        bits = int(width[0]) if width else 8  # pred has no number, and a byte
        total += bits * math.prod(int(d) for d in dims.split(",") if d) // 8
    return total


def _together(line: str, everyone: int) -> int:
    """Return how many devices take part. Programs write it in three ways."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return listed[1].count(",") + 1 if listed else everyone
