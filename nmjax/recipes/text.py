"""Text and values. What a value prints, `parse` and `parse_pruner` read back: the language of configs.

The grammar is Python's own: calls of known names, numbers, strings, tuples. A `Sparsity` is a method, slots, or a method
with slots replaced: ``"s_ste(2,4)"``, ``"fwd_rhs=ste(mse(2,4)); drhs_g=mvue(2,4)"``, ``"s_ste(); drhs_g=identity"``.
"""

import ast
import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace

from nmjax import pruners
from nmjax.core.pruner import Pruner
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.pruners import combinators, estimators, float8, schedules
from nmjax.recipes import methods

PRUNERS: dict[str, Callable | Pruner] = {
    "identity": pruners.identity,
    **{
        name: getattr(module, name)
        for module, names in (
            (pruners, ("mse", "mvue", "mvue_approx", "soft", "transposable", "uniform")),
            (combinators, ("chain", "hold", "permute", "raw", "rescale", "stages")),
            (estimators, ("decay", "sr_ste", "ste")),
            (float8, ("fp8",)),
        )
        for name in names
    },
}
SCHEDULES: dict[str, Callable] = {
    name: getattr(schedules, name)
    for name in ("constant", "cosine", "exponential", "linear", "optax_schedule", "stairs")
}
METHODS: dict[str, Callable] = {
    name: getattr(methods, name)
    for name in (
        "activation", "bdwp", "bi_mask", "dense", "fst", "mdgf", "mvue", "s_ste", "sdgf", "sdgp", "sr_ste", "ste", "top_gradient",
    )
}  # fmt: skip


def parse(text: str) -> Sparsity:
    """The `Sparsity` that a text says.

    >>> parse("s_ste(2,4); dlhs_g=rescale(mse(2,4))")
    fwd_rhs=ste(soft(2,4)); dlhs_g=rescale(mse(2,4)); drhs_g=mvue(2,4)
    """
    method, slots = Sparsity(), {}
    parts = [part.strip() for part in _text(text).split(";")]
    for i, part in enumerate(p for p in parts if p):
        slot, equals, value = part.partition("=")
        if equals and slot.strip().isidentifier():
            slot = slot.strip()
            if slot not in SLOTS:
                raise ValueError(
                    f"{text!r}: no slot is called {slot!r}{_nearest(slot, SLOTS)} The slots are {', '.join(SLOTS)}."
                )
            if slot in slots:
                raise ValueError(f"{text!r} fills {slot} twice.")
            slots[slot] = parse_pruner(value)
        elif i:
            raise ValueError(
                f"{text!r}: a method comes first and once, then slots that replace its own: 's_ste(2,4); dlhs_g=mse(2,4)'."
            )
        else:
            method = _value(part, METHODS, "method", other=PRUNERS)
            if not isinstance(method, Sparsity):
                raise ValueError(
                    f"{text!r} is {method!r}: neither a method, as s_ste(2,4), nor a slot, as drhs_g=mvue(2,4)."
                )
    return replace(method, **slots)


def parse_pruner(text: str) -> Pruner:
    """The `Pruner` that a text says.

    >>> parse_pruner("chain(soft(2,4), fp8('e4m3'))")
    chain(soft(2,4),fp8('e4m3'))
    """
    p = _value(_text(text).strip(), PRUNERS, "pruner", other=METHODS)
    if not isinstance(p, Pruner):
        raise ValueError(f"{text!r} is {p!r}, not a pruner such as mse(2,4).")
    return p


def _text(text) -> str:
    if not isinstance(text, str):
        raise TypeError(
            f"a text is wanted, got {type(text).__name__}: {text!r} is a value already, and needs no parsing."
        )
    return text


def _value(text, names, kind, other):
    if "<callable" in text:
        raise ValueError(
            f"{text!r} holds a bare callable, which has no text. Use a schedule that is a value: linear, optax_schedule, ..."
        )
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        hint = " Slots are parted by ';'." if re.search(r"\)\s*,\s*\w+\s*=", text) else ""
        if pattern := re.search(r"(\d+):(\d+)", text):
            hint = f" {pattern[0]} is written ({pattern[1]},{pattern[2]})."
        raise ValueError(
            f"{text!r} is not a {kind}: expected a call such as 'ste(2,4)', with brackets closed.{hint}"
        ) from None
    name = tree.func if isinstance(tree, ast.Call) else tree
    if isinstance(name, ast.Name) and name.id not in names and name.id in other:
        right = "pruner, which stands in a slot: 'drhs_g=...'" if kind == "method" else "method, which stands alone"
        raise ValueError(f"{text!r}: {name.id} is a {right}.")
    if kind == "method" and isinstance(tree, ast.Call) and any(_names_pruner(a) for a in tree.args):
        raise ValueError(f"{text!r} is a pruner, which stands in a slot: 'fwd_rhs={text}'.")
    return _build(tree, names, kind, text)


def _names_pruner(node) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in PRUNERS


def _build(node, names, kind, text):
    """One node of Python's grammar as a value; whatever is not on this short list is refused."""
    build = lambda n: _build(n, PRUNERS | SCHEDULES, "pruner or schedule", text)
    if isinstance(node, ast.Name):
        if node.id == "inf":
            return float("inf")
        return _call(_known(node.id, names, kind, text), (), {}, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        keywords = {}
        for k in node.keywords:
            if k.arg is None or k.arg in keywords:
                raise ValueError(
                    f"{text!r}: {'** is not allowed' if k.arg is None else f'{k.arg} is given twice'} in {node.func.id}."
                )
            keywords[k.arg] = build(k.value)
        return _call(_known(node.func.id, names, kind, text), [build(a) for a in node.args], keywords, text)
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) in (int, float, str, bool)):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(build(e) for e in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = build(node.operand)
        if type(value) in (int, float):
            return -value
    raise ValueError(f"{text!r}: {ast.unparse(node)!r} is not a {kind}. Known are {', '.join(sorted(names))}.")


def _known(name, names, kind, text):
    if name not in names:
        raise ValueError(
            f"{text!r}: no {kind} is called {name!r}{_nearest(name, [*names, *PRUNERS, *METHODS])} Known are {', '.join(sorted(names))}."
        )
    return names[name]


def _nearest(name, names) -> str:
    near = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else "."


def _call(make, args, keywords, text):
    if isinstance(make, Pruner):  # identity
        if args or keywords:
            raise ValueError(f"{text!r}: {make} takes nothing.")
        return make
    try:
        inspect.signature(make).bind(*args, **keywords)
    except TypeError as error:
        raise ValueError(f"{text!r}: {make.__name__}{_takes(make)}, {_plainly(str(error), args)}.") from None
    try:
        return make(*args, **keywords)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from None


def _takes(make) -> str:
    shown = []
    for p in inspect.signature(make).parameters.values():
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        shown.append(f"{star}{p.name}" + ("" if p.default is p.empty else f"={p.default!r}"))
    return f"({', '.join(shown)})"


def _plainly(message, args) -> str:
    return f"got {len(args)} values" if "too many" in message else message
