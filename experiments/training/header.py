"""The header of a run: rows that describe what the run does, and on which devices."""

from collections import Counter

from ml_collections import ConfigDict

from experiments.scale import processes, shards
from experiments.training import device, settings
from experiments.training.program import Program, gains
from experiments.training.screen import number
from nmjax.analysis import savings
from nmjax.analysis.plan import LayerPlan, Plan


def rows(program: Program) -> list[tuple[str, str]]:
    """Return the rows (label, text) of a program."""
    config, task, plan = program.config, program.task, program.plan
    dense, effective = program.step_flops()
    found = [("devices", _devices(program))]
    if program.untyped:
        found.append(("pruning", f"by XLA: {program.untyped}"))
    found.append(("computing", f"{config.dtype}, parameters float32; {_by_phase(program)}"))
    if program.count > 1:
        found.append(("side by side", f"{program.count} runs; the figures of their steps on screen are the mean"))
    found += task.facts
    found.append(("batch", _batch(program)))
    found.append(("length", _length(program)))
    found.append(("optimizer", _optimizer(config)))
    found.append(("learning rate", _rate(config, program.total)))
    model = config.get("model", {})  # a task of another module may name its model elsewhere
    name = " ".join(filter(None, (model.get("name"), model.get("size"))))
    found.append(("model", f"{name}{', ' if name else ''}{plan.parameters:,} parameters"))
    share = effective / dense
    effect = f"{number(dense)} dense, {number(effective)} effective ({share:.2f}), on average"
    found.append(("FLOPs a step", effect + expected_time(plan)))
    if not (model.get("remat") or model.get("lean")):  # then inputs of layers are computed again
        found += [("memory", line) for line in savings.of_memory((layer.path, layer.kept) for layer in plan.layers)]
    if program.hardening_refusal:
        found.append(("hardened", f"not evaluated: {program.hardening_refusal}"))
    return found


def expected_time(plan: Plan) -> str:
    """Return the time that is expected of the products of a step, if some of them are compacted."""
    saved = sum((layer.flops or 0) * (1 - route.share) for layer in plan.layers for _, route in layer.runs)
    if not saved:
        return ""
    return f"; {1 - saved / plan.training[0]:.2f} of the dense time is expected of the products on this device"


def in_short(plan: Plan) -> str:
    """Return a plan in one line: how many layers have which pattern in the end."""
    forms = Counter(_form(layer) for layer in plan.layers if layer.slots)
    total = len(plan.layers)
    if not forms:
        return f"{total} layers, all dense"
    counts = ", ".join(f"{count} of {total} layers {form}" for form, count in forms.most_common())
    return f"{counts}; --mode=plan shows them"


def _form(layer: LayerPlan) -> str:
    """Return how a layer is pruned in the end: the patterns of its slots, or the names of pruners that have none."""
    found: dict[str, None] = {}
    for slot in layer.slots:
        try:
            pattern = slot.pruner.final.facts.pattern
        except ValueError:  # it has no final form, because it draws again at every step
            pattern = slot.pruner.facts.pattern
        found[f"`{type(slot.pruner).__name__}`" if pattern is None else f"{pattern[0]}:{pattern[1]}"] = None
    return " and ".join(found)


def _devices(program: Program) -> str:
    """Return the number and the kind of the devices, and how they are arranged."""
    count = program.mesh.size
    axes = [f"{name} {size}" for name, size in program.mesh.shape.items() if size > 1]
    text = device.named(count)
    if axes and axes != [f"data {count}"]:
        text += f" as {' x '.join(axes)}"
    if processes.count() > 1:
        text += f", in {processes.count()} processes"
    return text


def _batch(program: Program) -> str:
    """Return the size of the batch, and how micro-batches and devices share it."""
    config, parts = program.config, shards.parts(program.mesh)
    each = config.batch // config.accumulate // parts
    micro = f"{config.accumulate} micro-batches x " if config.accumulate > 1 else ""
    devices = "device" if parts == 1 else "devices"
    return f"{config.batch:,} = {micro}{parts} {devices} x {each:,}"


def _length(program: Program) -> str:
    """Return the steps of the run, and its epochs if the number of examples is known."""
    text, examples = f"{program.total:,} steps", program.task.examples
    if not examples:
        return text
    return f"{text} = {program.total * program.config.batch / examples:.4g} epochs of {examples:,}"


def _optimizer(config: ConfigDict) -> str:
    """Return the optimizer, and what is done to gradients before it."""
    clip = f", gradients clipped to norm {config.clip:g}" if config.clip > 0 else ""
    decay = f", dropped weights decay by {config.masked_decay:g}" if config.masked_decay > 0 else ""
    return f"{config.optimizer}{clip}{decay}"


def _rate(config: ConfigDict, total: int) -> str:
    """Return the learning rate over the steps of a run in words.

    >>> rate = dict(peak=3e-3, warmup="5%", shape="cosine", end=0.0)
    >>> _rate(ConfigDict({"learning_rate": rate}), 4042)
    '0.003 after a warm-up of 202 steps, then cosine to 0'
    >>> _rate(ConfigDict({"learning_rate": rate | {"warmup": "0", "shape": "constant"}}), 4042)
    '0.003, constant'
    """
    c = config.learning_rate
    warmup = settings.duration(c.warmup, total, "config.learning_rate.warmup")
    shape = c.shape if c.shape == "constant" else f"{c.shape} to {c.end:g}"
    if not warmup:
        return f"{c.peak:g}, {shape}"
    return f"{c.peak:g} after a warm-up of {warmup:,} {'step' if warmup == 1 else 'steps'}, then {shape}"


def _by_phase(program: Program) -> str:
    """Return in words how pruned products run, phase by phase."""
    plan, backend = program.plan, program.config.backend
    if not program.phases:
        return _products(plan.runs, backend)
    runs = [(s, plan.runs_at(s) if gains(plan, s) else plan.runs) for s in sorted({0, *program.phases})]
    words = [(start, _products(own, backend)) for start, own in runs]
    changed = [pair for i, pair in enumerate(words) if not i or pair[1] != words[i - 1][1]]
    return "; ".join(f"from step {start:,} {text}" for start, text in changed)


def _products(runs: dict[str, int], backend: str) -> str:
    """Return in words how pruned products run.

    >>> _products({"packed": 12, "emulated": 2}, "auto")
    'pruned products: 12 on sparse tensor cores, 2 emulated, for the reasons in the plan'
    >>> _products({"compacted": 24}, "auto")
    'pruned products: 24 compacted to the chosen rows'
    """
    if not runs:
        return "nothing is pruned"
    if set(runs) == {"emulated"}:
        return "n:m products are emulated: zeros are multiplied"
    words = {"compacted": "compacted to the chosen rows", "packed": "on sparse tensor cores", "fp8": "dense in FP8"}
    if backend == "interpret":
        words |= {"packed": "in simulated kernels", "fp8": "in simulated FP8"}
    words["emulated"] = "emulated, for the reasons in the plan"
    return "pruned products: " + ", ".join(f"{runs[how]} {text}" for how, text in words.items() if how in runs)
