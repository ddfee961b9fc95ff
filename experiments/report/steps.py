"""The breakdown of a step in a run with --profile: a bar and tables that show where the time goes."""

from typing import Any

from experiments.report.runs import Run
from experiments.report.words import number, percent, safe

PARTS = {  # part of a step -> (its colour, what it is)
    "input": ("s4", "waiting for data, and making the batch"),
    "forward": ("s0", "the loss, without pruning"),
    "backward": ("s3", "its gradient, without pruning"),
    "pruning": ("s1", "what runs in the scope of a slot, in both passes; packing for kernels too"),
    "update": ("s2", "optimizer, clipping and averages"),
    "other": ("s6", "operations whose names say none of these, such as copies that XLA adds"),
    "idle": ("rule", "no operation ran"),
}
HOW = (
    "Operations that run at the same time share it evenly. XLA fuses operations of several parts; a fusion counts as "
    "the part that its name says."
)


def breakdown(run: Run) -> str:
    """Return the section: how long each part of a traced step took, and each layer."""
    found = run.breakdown
    total, parts = found.get("seconds") or 0.0, found.get("parts") or {}
    if not total or not parts:
        return ""
    first, count = found.get("first", 0), found.get("steps", 1)
    steps = f"step {first:,}" if count == 1 else f"the mean of steps {first:,} to {first + count - 1:,}"
    devices = f"{found.get('devices', 1)} x {found.get('device', '')}"
    lead = f"<p>A traced step took {_time(total)}: {safe(steps)}, on {safe(devices)}. {HOW}</p>"
    shares = {part: (float(parts.get(part, 0.0)), *about) for part, about in PARTS.items()}
    alt = ", ".join(f"{part} {percent(time / total)}" for part, (time, _, _) in shares.items())
    pieces = "".join(
        f'<span style="flex-grow:{time / total:.5f};background:var(--{colour})"></span>'
        for time, colour, _ in shares.values()
    )
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch" style="background:var(--{colour})"></span>{part}</th>'
        f'<td>{_time(time)}</td><td>{percent(time / total)}</td><td class="words">{meaning}</td></tr>'
        for part, (time, colour, meaning) in shares.items()
    )
    bar = f'<div class="bar" role="img" aria-label="{safe(f"Parts of a step: {alt}")}">{pieces}</div>'
    head = ("part", "time", "share", "")
    return (
        lead + bar + _table(head, rows) + _slots(found.get("slots") or {}, total) + _layers(found.get("layers") or {})
    )


def _slots(slots: dict[str, float], total: float) -> str:
    """Return the time of each slot in words."""
    if not slots:
        return ""
    each = ", ".join(
        f"<code>{safe(slot)}</code> {_time(time)} ({percent(time / total)})" for slot, time in slots.items()
    )
    return f'<p class="more">Pruning by slot: {each}.</p>'


def _layers(layers: dict[str, dict[str, float]]) -> str:
    """Return a table of the pruned layers."""
    if not layers:
        return ""
    kinds = ("forward", "backward", "pruning")
    times = lambda row: "".join(f"<td>{_time(row.get(kind, 0.0))}</td>" for kind in kinds)
    rows = "".join(f'<tr><th scope="row">{safe(path)}</th>{times(row)}</tr>' for path, row in layers.items())
    count = f"{len(layers)} pruned layer{'s' if len(layers) > 1 else ''}"
    return f"<details><summary>The time of {count}</summary>{_table(('layer', *kinds), rows)}</details>"


def _table(head: tuple[str, ...], rows: str) -> str:
    top = "".join(f'<th scope="col">{title}</th>' for title in head)
    return f'<div class="scroll"><table class="values"><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>'


def _time(seconds: Any) -> str:
    return f"{number(1000 * seconds)} ms"
