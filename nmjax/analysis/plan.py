"""The plan of a model: a value that says what every layer will do, and prints as a table.

`nmjax.nnx.plan` makes it, and `nmjax.analysis.refusals` decides its refusals.
"""

import html
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nmjax.analysis import flops, runs, savings
from nmjax.analysis.refusals import Use, fitting_all, slot_refusal
from nmjax.analysis.runs import Phases, Runs
from nmjax.core import layer_paths
from nmjax.core.pruner import Pruner
from nmjax.products.fit import assuming_features_fit
from nmjax.products.operations import Conv, result_shape
from nmjax.products.pruning import Operand, space_left
from nmjax.products.slot import SLOTS, WEIGHT
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import identity, rescale, whole_rows


class SlotPlan(NamedTuple):
    """The plan of one slot of a layer.

    Attributes:
      name: The slot, such as "y_w".
      pruner: The slot's pruner.
      along: The sizes of the axes that its product contracts; empty if they are known only from a call.
      groups: The number of groups in one call; None if it is known only from a call.
      refused: The reason why the pruner cannot be used here; None if it can.
      norms: The choice of `rescale` in this layer if its ``over`` is "auto": "spatial" or "group". Both if it is known
        only from a call, or differs between calls. Empty if nothing is chosen.
      of_rows: True if all columns share the groups.

    >>> import nmjax as nm
    >>> print(SlotPlan("y_w", nm.mse(2, 4), along=(16,), groups=128))
    y_w=mse(2,4)
      128 groups along 16
    >>> print(SlotPlan("dx_g", nm.rescale(nm.mse(2, 4)), along=(16,), groups=128, norms=("group",)))
    dx_g=rescale(mse(2,4))
      128 groups along 16
      norm of each group
    """

    name: str
    pruner: Pruner
    along: tuple[int, ...] = ()
    groups: int | None = None
    refused: str | None = None
    norms: tuple[str, ...] = ()
    of_rows: bool = False

    def __str__(self) -> str:
        """Return the slot and what the plan says of it, a line for each."""
        return "\n  ".join([f"{self.name}={self.pruner}", *self.facts])

    @property
    def facts(self) -> list[str]:
        """What the plan says of the slot: its groups and its norm, or that it is refused."""
        if self.refused:
            return ["REFUSED"]
        norms = [f"norm {' or '.join(_NORMS[norm] for norm in self.norms)}"] if self.norms else []
        if self.pruner.facts.block == 1:  # no groups
            return norms
        unknown = "axes unknown" if self.name in WEIGHT else "tokens unknown"
        if not self.along:
            return [unknown, *norms]
        kind = "groups of rows" if self.of_rows else "groups"
        along = f"{kind} along {' x '.join(map(str, self.along))}"
        return [f"{along}, {unknown}" if self.groups is None else f"{self.groups:,} {along}", *norms]


_NORMS = {"spatial": "over space", "group": "of each group"}


class LayerPlan(NamedTuple):
    """The plan of one layer, or of a stack of layers.

    Attributes:
      path: The layer's path in the model.
      kind: Its class, such as "Linear".
      kernel: The shape of its kernel; () if it has none.
      sparsity: The pruner of each slot.
      slots: The plans of its slots that are not empty.
      flops: The FLOPs of one product when dense; all three cost the same. None if no example inputs were given.
      shares: The fraction of the FLOPs of y, dx and dw that remains at the sparsest step.
      hardened: The form of its weight after `harden`: "n:m", "dense", or "none" if it is random at every step.
      runs: The routes of y, dx and dw; empty if no example was given. ``how`` is "refused" if the backend
        refuses the product.
      else_dense: (slot, reason) of the slots that its rule leaves empty, because they do not fit.
      phases: (first step, routes) of each phase of its method (`Sparsity.phases`), from step 0 on; empty if the method
        has only one phase, if no example was given, or if the model is in a phase.
      phase: The first step of the phase that the model is in (`nmjax.nnx.phase`); None if it is in none.
      kept: The bytes of its input x, and those that the backward pass keeps of it; (0, 0) if ``dw_x`` is empty.
      reads_data: Whether its input depends on no parameter, so that training of the model needs no dx.

    >>> import nmjax as nm
    >>> layer = LayerPlan("up", "Linear", (8, 4), nm.parse("ste(2,4)"), (), 1024, (0.5, 1.0, 1.0), "2:4")
    >>> [round(layer.flops * share) for share in layer.shares]
    [512, 1024, 1024]
    """

    path: str
    kind: str
    kernel: tuple[int, ...]
    sparsity: Sparsity
    slots: tuple[SlotPlan, ...]
    flops: int | None
    shares: tuple[float, float, float]
    hardened: str
    runs: Runs = ()
    else_dense: tuple[tuple[str, str], ...] = ()
    kept: tuple[int, int] = (0, 0)
    phases: Phases = ()
    phase: int | None = None
    reads_data: bool = False


def hardened(sparsity: Sparsity) -> str:
    """Return the form of a weight after `harden`, as text: "n:m", "dense" or "none"."""
    try:
        pattern = sparsity.y_w.final.facts.pattern
    except ValueError:
        return "none"
    return "dense" if pattern is None else f"{pattern[0]}:{pattern[1]}"


def layer_plan(
    path: str,
    kind: str,
    kernel: tuple[int, ...],
    sparsity: Sparsity,
    uses: list[Use],
    *,
    backend: str = "auto",
    called: bool = True,
    cost: int | None = None,
    reads_data: bool = False,
    refused: str | None = None,
    refused_slots: Mapping[str, str] = {},
    packed_before: frozenset[str] = frozenset(),
    phase: int | None = None,
    in_phases: bool = False,
) -> LayerPlan:
    """Return the plan of a layer, whoever found its products.

    Args:
      path, kind, kernel, reads_data: As in `LayerPlan`.
      sparsity: What the recipe or the layer says.
      uses: The products of the layer. The first one gives the numbers.
      backend: The layer's backend.
      called: False if ``uses`` are not those of a call, so that their number of tokens is a placeholder.
      cost: `LayerPlan.flops`.
      refused: The reason why the layer cannot be pruned at all; None if it can.
      refused_slots: Reasons of slots that are refused for more than the products in ``uses``.
      packed_before: The products whose weight is already packed.
      phase: The phase that the model is in.
      in_phases: True if a program of its own can run in each phase of the method.
    """
    if refused is not None:
        pruners = ((name, getattr(sparsity, name)) for name in SLOTS)
        slots = tuple(SlotPlan(name, p, refused=refused) for name, p in pruners if p != identity)
        shares, form = flops.effective(sparsity), hardened(sparsity)
        return LayerPlan(path, kind, kernel, sparsity, slots, cost, shares, form, reads_data=reads_data)
    sparsity, else_dense = fitting_all(sparsity, uses, tokens_known=called)
    slots = slots_of(sparsity, uses, called)
    slots = tuple(slot._replace(refused=slot.refused or refused_slots.get(slot.name)) for slot in slots)
    now = sparsity if phase is None else assuming_features_fit(sparsity).at(phase)
    plan = LayerPlan(
        path, kind, kernel, sparsity, slots, cost, flops.effective(now), hardened(sparsity), else_dense=else_dense,
        phase=phase, reads_data=reads_data,
    )  # fmt: skip
    if not called or sparsity == Sparsity():
        return plan
    how = uses, backend, packed_before
    phases = runs.phases_of(sparsity, *how) if in_phases and phase is None else ()
    return plan._replace(runs=runs.runs_of(now, *how), kept=savings.kept_of(now, uses, backend), phases=phases)


def slots_of(sparsity: Sparsity, uses: list[Use], tokens_known: bool) -> tuple[SlotPlan, ...]:
    """Return the plans of a layer's slots that are not empty.

    Args:
      sparsity: The pruner of each slot.
      uses: The products that a call asks the layer for. The first one gives the numbers.
      tokens_known: False if the number of tokens in ``uses`` is a placeholder.
    """
    plans: list[SlotPlan] = []
    for name in SLOTS:
        p = getattr(sparsity, name)
        if p == identity:
            continue
        if not uses or (name.startswith("dw_") and not tokens_known):
            plans.append(SlotPlan(name, p, norms=("spatial", "group") if _auto_rescale(p) else ()))
            continue
        shape, operand = _operand(name, uses[0])
        along = tuple(shape[a] for a in operand.contract)
        counted = name in WEIGHT or (tokens_known and not operand.ragged)  # the sizes of a call fix the ragged groups
        of_rows = whole_rows.has_rows(p)  # all columns share the groups
        axes = (*operand.contract, *operand.batch) if of_rows else range(len(shape))
        groups = uses[0].stacked * math.prod(shape[a] for a in axes) // p.facts.block if counted else None
        refusal = slot_refusal(name, sparsity, uses, tokens_known)
        reason = None if refusal is None else refusal.reason
        plans.append(SlotPlan(name, p, along, groups, reason, _norms(name, p, uses, tokens_known), of_rows))
    return tuple(plans)


def _operand(name: str, use: Use) -> tuple[tuple[int, ...], Operand]:
    """Return the shape of a slot's operand, and where its axes lie."""
    g, axes = result_shape(use.op, use.lhs, use.rhs), use.op.operands(len(use.lhs.shape), len(use.rhs.shape))
    shapes = {"y_x": use.lhs, "dw_x": use.lhs, "dx_g": g, "dw_g": g}
    return shapes.get(name, use.rhs).shape, axes[name]


def _norms(name: str, p: Pruner, uses: list[Use], tokens_known: bool) -> tuple[str, ...]:
    """Return `SlotPlan.norms`. Before a call, only a convolution says whether x and g have spatial axes."""
    found = _auto_rescale(p)
    if found is None:
        return ()
    if not tokens_known and name not in WEIGHT and not all(isinstance(use.op, Conv) for use in uses):
        return ("spatial", "group")
    spaces = [space_left(shape, p, operand) for shape, operand in (_operand(name, use) for use in uses)]
    return tuple(dict.fromkeys(map(found.over_in, spaces)))


def _auto_rescale(p: Pruner) -> rescale | None:
    """Return the `rescale` in a pruner that chooses its norm by the array, or None."""
    if isinstance(p, rescale) and p.over == "auto":
        return p
    return next((found for part in p.parts if (found := _auto_rescale(part)) is not None), None)


@dataclass(frozen=True, repr=False)
class Plan:
    """The plan of a model. It prints as a table of 80 columns, and in a notebook as HTML.

    Layers that differ only in a number of their paths, or in the last name, share a row: ``blocks/0-11/mlp/(down|up)``
    are 24 layers of one class and shape, which the plan answers alike. The FLOPs of a row are those of all its layers.
    A reason that several layers share stands once, below the table, with their paths.

    Attributes:
      layers: The plan of every layer that can be sparse.
      elsewhere: The forward FLOPs of dots and convolutions outside these layers, as in attention.
      uncovered: (path, shape) of the parameters outside these layers that have more than one axis.
      parameters: The number of all parameters.
      recipe_refusals: (where, reason) of what `nmjax.nnx.sparsify` would refuse in the recipe itself.
      missed: The paths of parameters that a rule matches and no registered layer has.
      speed: The FLOPs per second of a dense product on this CPU, if a product is compacted.

    >>> import nmjax as nm
    >>> layer = LayerPlan("up", "Linear", (8, 4), nm.parse("ste(2,4)"), (), 1024, (0.5, 1.0, 1.0), "2:4")
    >>> plan = Plan((layer,), elsewhere=0, uncovered=(), parameters=36)
    >>> plan.forward, plan.training, plan.refused
    ((1024, 512.0), (3072, 2560.0), ())
    >>> plan
    layer                           left of the FLOPs FLOPs of all          hardened
      slot                          y     dx    dw    three products
    ────────────────────────────────────────────────────────────────────────────────
    up
      Linear 8x4                    0.5   1     1     3.07 → 2.56 kFLOPs    2:4
    <BLANKLINE>
    36 parameters, 0 of 1 layers pruned; forward 1.02 → 0.512 kFLOPs, with backward
      3.07 → 2.56 kFLOPs
    """

    layers: tuple[LayerPlan, ...]
    elsewhere: int
    uncovered: tuple[tuple[str, tuple[int, ...]], ...]
    parameters: int
    recipe_refusals: tuple[tuple[str, str], ...] = ()
    missed: tuple[str, ...] = ()
    speed: float | None = None

    @property
    def forward(self) -> tuple[float, float]:
        """The FLOPs of a forward pass, dense and effective."""
        cost = [(layer.flops or 0, (layer.flops or 0) * layer.shares[0]) for layer in self.layers]
        return self.elsewhere + sum(d for d, _ in cost), self.elsewhere + sum(e for _, e in cost)

    @property
    def training(self) -> tuple[float, float]:
        """The FLOPs of a forward and backward pass, dense and effective, at the sparsest step."""
        cost = [(3 * (layer.flops or 0), (layer.flops or 0) * sum(layer.shares)) for layer in self.layers]
        return 3 * self.elsewhere + sum(d for d, _ in cost), 3 * self.elsewhere + sum(e for _, e in cost)

    def over(self, steps: int, *, data_gradients: bool = True) -> tuple[float, float]:
        """Return the mean FLOPs of a forward and backward pass, dense and effective, over the steps of a run.

        Args:
          steps: The number of steps. With a schedule, the FLOPs change from step to step.
          data_gradients: False to leave out dx of layers whose input is data: training of a whole model needs none.

        >>> import nmjax as nm
        >>> fading = nm.parse("mdgf(2,4,linear(1,0,80))")
        >>> layer = LayerPlan("up", "Linear", (8, 4), fading, (), 1024, (0.5, 1.0, 1.0), "2:4")
        >>> Plan((layer,), elsewhere=0, uncovered=(), parameters=36).over(160)
        (3072, 2816.0)
        """
        mean = {sparsity: flops.over(sparsity, steps) for sparsity in {layer.sparsity for layer in self.layers}}
        cost = [(layer.flops or 0) * sum(mean[layer.sparsity]) for layer in self.layers]
        unneeded = [layer for layer in self.layers if layer.reads_data and not data_gradients]
        left_out = sum((layer.flops or 0) * mean[layer.sparsity][1] for layer in unneeded)
        return self.training[0] - sum(layer.flops or 0 for layer in unneeded), 3 * self.elsewhere + sum(cost) - left_out

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """(where, reason) of everything that a step of training would refuse. See `nmjax.analysis.refusals`.

        In a plan with a recipe, also of what `sparsify` would refuse. The first part is a layer's path, or a rule.
        """
        slots = [(layer.path, slot.refused) for layer in self.layers for slot in layer.slots if slot.refused]
        runs = [(layer.path, route.why) for layer in self.layers for _, route in layer.runs if route.how == "refused"]
        return tuple(dict.fromkeys((*slots, *runs, *self.recipe_refusals)))

    @property
    def runs(self) -> dict[str, int]:
        """The number of pruned products that run "compacted", "packed", "fp8" and "emulated", or are "refused"."""
        return dict(Counter(route.how for layer in self.layers for _, route in layer.runs if route.how != "dense"))

    @property
    def saved(self) -> dict[str, tuple[float | None, int]]:
        """(seconds, bytes of inputs) that each layer saves in a step, by path. Seconds are None without `speed`."""
        time = lambda layer: savings.seconds_of(layer.flops, layer.runs, self.speed)
        return {layer.path: (time(layer), layer.kept[0] - layer.kept[1]) for layer in self.layers}

    def runs_at(self, step: int) -> dict[str, int]:
        """Return `runs` for the phase that contains a step (`nmjax.nnx.phase`).

        Args:
          step: The step.
        """
        now = [route.how for layer in self.layers for _, route in runs.at(layer.runs, layer.phases, step)]
        return dict(Counter(how for how in now if how != "dense"))

    @property
    def phases(self) -> tuple[int, ...]:
        """The steps, rising and above 0, at which a phase of some layer's method begins. See `nmjax.nnx.phase`."""
        return tuple(sorted({step for layer in self.layers for step in assuming_features_fit(layer.sparsity).phases}))

    def __repr__(self) -> str:
        lines = [*_line("layer", "left of the FLOPs", "FLOPs of all", "hardened")]
        lines += [*_line("  slot", _shares("y", "dx", "dw"), "three products", ""), "─" * _WIDTH]
        for paths, alike in self._folded():
            first, (shares, cost, form) = alike[0], _numbers(alike)
            lines += _wrapped(paths, "  ")
            lines += _line(f"  {_kind(alike)}", shares, cost, form)
            for slot in first.slots:
                lines += _line(f"  {slot.name}={slot.pruner}", ", ".join(slot.facts))
        return "\n".join([*lines, "", *(line for note in self._notes() for line in _wrapped(note, "  "))])

    def _repr_html_(self) -> str:
        # Some viewers of notebooks, such as GitHub, drop styles. So line breaks are <br>, and spaces are entities.
        plain = lambda text: html.escape(text).replace("\n", "<br>").replace("  ", "&nbsp; ")
        cell = lambda tag, text: f"<{tag} style='text-align:left'>{plain(text)}</{tag}>"
        rows = [f"<tr>{''.join(cell('td', text) for text in row)}</tr>" for row in self._rows()]
        head = "".join(cell("th", text) for text in _HEAD)
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._notes())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{notes}"

    def _folded(self) -> list[tuple[str, list[LayerPlan]]]:
        """Return (paths, layers) of the rows. Layers that differ only in a number or in the last name share a row."""
        answers = lambda one: one._replace(path="", reads_data=False)
        by_folder: dict[tuple[str, LayerPlan], list[tuple[str, list[LayerPlan]]]] = {}
        for alike in layer_paths.alike((one.path, answers(one), one) for one in self.layers):
            paths = layer_paths.short([layer.path for layer in alike])
            folder = paths.rpartition("/")[0]
            by_folder.setdefault((folder if folder and ", " not in paths else paths, answers(alike[0])), []).append(
                (paths, alike)
            )
        return [
            (", ".join(layer_paths.gathered(paths for paths, _ in rows)), [layer for _, own in rows for layer in own])
            for rows in by_folder.values()
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table in HTML."""
        return [
            (
                f"{paths}\n  {_kind(alike)}",
                "\n".join(map(str, alike[0].slots)) or "dense",
                " ".join(f"{share:.3g}" for share in alike[0].shares),
                *_numbers(alike)[1:],
            )
            for paths, alike in self._folded()
        ]

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        refused = sum(any(slot.refused for slot in layer.slots) for layer in self.layers)
        pruned = sum(bool(layer.slots) for layer in self.layers) - refused
        lines = [f"{self.parameters:,} parameters, {pruned} of {len(self.layers)} layers pruned"]
        if refused:
            lines[0] += f", {refused} refused"
        if self.forward[0]:
            changes = self.over(1)[1] != self.training[1]  # the first step is not the sparsest
            at = " at the sparsest step," if changes else ""
            lines[0] += f";{at} forward {_change(*self.forward)}, with backward {_change(*self.training)}"
            if self.elsewhere:
                lines.append(f"Products outside layers, as in attention: {_change(self.elsewhere)} forward")
            idle = [layer.path for layer in self.layers if not layer.flops]
            if idle:
                ranges = map(layer_paths.short, layer_paths.alike((path, None, path) for path in idle))
                lines.append(f"Layers that this call does not use: {', '.join(ranges)}")
        others = [(path, shape) for path, shape in self.uncovered if path not in self.missed]
        if self.missed:
            meant = [(path, shape) for path, shape in self.uncovered if path in self.missed]
            lead = "Parameters that a rule matches and no registered layer has, so they stay dense"
            lines.insert(0, f"{lead}: {_shapes(meant)}")
        if others:
            lead = "Other parameters" if self.missed else "Parameters"
            lines.append(f"{lead} outside registered layers: {_shapes(others)}")
        reasons = lambda layer: dict.fromkeys(reason for _, reason in layer.else_dense)
        left = [(layer.path, reason) for layer in self.layers for reason in reasons(layer)]
        lines += [f"Dense, as the rule says: {line}" for line in layer_paths.folded(left)]
        lines += self._route_notes()
        lines += savings.of_memory((layer.path, layer.kept) for layer in self.layers)
        lines += [f"REFUSED in {line}" for line in layer_paths.folded(self.refused)]
        if refused:
            lines.append("The FLOPs and the hardened forms above count the refused slots as if they pruned.")
        return lines

    def _route_notes(self) -> list[str]:
        """Return lines that say how products run: in one program for all steps, and what changes in each phase."""
        pruned = [layer for layer in self.layers if layer.sparsity != Sparsity()]
        lines = runs.notes([(layer.path, layer.flops, layer.runs) for layer in pruned], self.speed)
        current = max((layer.phase for layer in pruned if layer.phase is not None), default=None)
        if current is not None:
            return [f"In the phase from step {current:,}: {line}" for line in lines]
        if not any(layer.phases for layer in pruned):
            return lines
        before, lines = lines, [f"In one program for all steps: {line}" for line in lines]
        for start in (0, *self.phases):
            now = [(layer.path, layer.flops, runs.at(layer.runs, layer.phases, start)) for layer in pruned]
            dense = all(route.how == "dense" for _, _, own in now for _, route in own)
            found = runs.notes(now, self.speed) or ["All products are dense"] * dense
            left = self._at(start) / self.training[0]
            changed = [line for line in found if line not in before] or ["as above"]
            lines += [f"From step {start:,} ({left:.2f} of the FLOPs): {line}" for line in changed]
            before = found
        return lines

    def _at(self, step: int) -> float:
        """Return the effective FLOPs of a forward and backward pass at a step."""
        cost = ((layer.flops or 0) * sum(flops.effective(layer.sparsity, step)) for layer in self.layers)
        return 3 * self.elsewhere + sum(cost)


_HEAD = ("layer", "slots", "left of\ny dx dw", "FLOPs of\nall three", "hardened")


# ---- a plan as text, in lines of 80 columns ----

_WIDTH, _COLUMNS = 80, (32, 18, 22)


def _line(*cells: str) -> list[str]:
    """Return a row of the text. A first cell that is too long for its column has lines of its own."""
    first, *others = cells
    rest = "".join(cell.ljust(width) for cell, width in zip(others, (*_COLUMNS[1:], 0), strict=False)).rstrip()
    if len(first) < _COLUMNS[0] or not rest:
        return [(first.ljust(_COLUMNS[0]) + rest).rstrip()]
    if len(first) + 2 + len(rest) <= _WIDTH and len(others) == 1:
        return [f"{first}  {rest}"]
    return [*_wrapped(first, "    "), " " * _COLUMNS[0] + rest]


def _wrapped(text: str, indent: str) -> list[str]:
    """Return a text in lines. A word that is longer than a line is cut at its marks, as a path is at a slash."""
    lines, words = [""], re.split(r"(?<= )", text)
    for word in words:
        parts = [word] if len(word) + len(indent) <= _WIDTH else re.split(r"(?<=[/|])|(?<=,)(?!\d)", word)
        for part in parts:
            if len(lines[-1]) + len(part.rstrip()) > _WIDTH and lines[-1].strip():
                lines.append(indent)
            lines[-1] += part
    return [line.rstrip() for line in lines]


def _shares(*shares: str) -> str:
    return "".join(share.ljust(6) for share in shares).rstrip()


def _kind(alike: list[LayerPlan]) -> str:
    """Return the number, the class and the shape of the layers of a row."""
    count = f"{len(alike)} " if len(alike) > 1 else ""
    return f"{count}{alike[0].kind} {'x'.join(map(str, alike[0].kernel))}".rstrip()


def _numbers(alike: list[LayerPlan]) -> tuple[str, str, str]:
    """Return the shares, the costs and the hardened form of the layers of a row."""
    first, cost = alike[0], sum(layer.flops or 0 for layer in alike)
    change = "" if first.flops is None else _change(3 * cost, cost * sum(first.shares))
    return _shares(*(f"{share:.3g}" for share in first.shares)), change, first.hardened


# ---- costs as text ----


def _change(*costs: float) -> str:
    """Return FLOPs before and after in the unit of the first. Equal ones stand once."""
    power = next((p for p in range(6, 0, -1) if costs[0] >= 0.9995 * 1000**p), 0)
    numbers = " → ".join(f"{cost / 1000**power:.3g}" for cost in dict.fromkeys(costs))
    return f"{numbers} {' kMGTPE'[power].strip()}FLOPs"


def _shapes(parameters: list[tuple[str, tuple[int, ...]]]) -> str:
    """Return parameters and their shapes as text. Paths that differ only in numbers are joined."""
    texts: list[str] = []
    for alike in layer_paths.alike((path, shape, (path, shape)) for path, shape in parameters):
        texts.append(f"{layer_paths.short([path for path, _ in alike])} {'x'.join(map(str, alike[0][1]))}")
    return ", ".join(texts)
