"""Text and values: `parse` and `parse_pruner` read what a value prints. This is the language of configs.

The grammar is Python's own: calls of known names, numbers, strings and tuples. A `Sparsity` is a method, slots, or a
method with slots replaced::

    s_ste(2,4)
    y_w=ste(mse(2,4)); dw_g=mvue(2,4)
    s_ste(); dw_g=identity

``else dense`` after a method, or after a slot, leaves dense what cannot be pruned::

    s_ste(2,4) else dense
    ste(2,4); dw_g=mvue(2,4) else dense

One thing is not Python's: ``module:name`` names a pruner, a schedule or a method of another module::

    dw_g=mylab.pruners:above(0.5,4)
"""

import ast
import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from nmjax import pruners
from nmjax.core import names
from nmjax.core.pruner import Pruner
from nmjax.core.value import Value, as_written, show, written
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import ELSE, Sparsity
from nmjax.pruners import identity, schedules
from nmjax.recipes import methods

PRUNERS: dict[str, Callable[..., Any] | Pruner] = {
    name: value
    for name, value in sorted(vars(pruners).items())
    if isinstance(value, Pruner) or (inspect.isclass(value) and issubclass(value, Pruner))
}
SCHEDULES: dict[str, Callable[..., Any]] = {
    name: getattr(schedules, name)
    for name in ("constant", "cosine", "exponential", "linear", "optax_schedule", "stairs")
}
METHODS: dict[str, Callable[..., Sparsity]] = {
    name: value
    for name, value in sorted(vars(methods).items())
    if inspect.isfunction(value) and value.__module__ == methods.__name__ and not name.startswith("_")
}
_KNOWN: dict[str, Mapping[str, Any]] = {
    "method": METHODS,
    "pruner": PRUNERS,
    "pruner or schedule": PRUNERS | SCHEDULES,
}

_WORDS = dict.fromkeys(("magnitude", "topk", "top_k", "prune"), ("ste", "mse"))  # other words: (method, pruner)

LONGEST = 10_000  # characters of a text


class _Source(NamedTuple):
    """A text that is being read."""

    text: str
    foreign: bool  # whether it may name what is not nmjax's own
    marks: Mapping[str, str] = MappingProxyType({})  # identifier -> module:name that it stands for in Python's grammar


@dataclass(frozen=True, repr=False)
class Function(Value):
    """A function of the step in another module. It prints and compares by its name."""

    name: str

    def __call__(self, step: Any) -> Any:
        return names.load(self.name)(step)

    def __repr__(self) -> str:
        return self.name


@contextlib.contextmanager
def _briefly() -> Iterator[None]:
    """Cut the middle out of a long message: it repeats the text, which may have thousands of characters."""
    try:
        yield
    except (ValueError, TypeError) as error:
        said = str(error)
        if len(said) <= 1000:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{said[:600]} ... {said[-300:]}") from error


@_briefly()
def parse(text: str, *, foreign: bool = True) -> Sparsity:
    """Return the `Sparsity` that a text describes, such as "s_ste(2,4)".

    Args:
      text: A method, slots, or a method and then the slots that replace its own, separated by ";". A method is one of
        `nmjax.methods`, or ``module:name(...)`` of a function that returns a `Sparsity`. A slot is ``slot=pruner``
        with a pruner as in `parse_pruner`. The empty text and "dense" prune nothing.
      foreign: Whether the text may name other modules. They are imported, and importing a module runs it: pass False
        for a text that nobody you trust wrote.

    Returns:
      The sparsity. It prints as a text that parses to it again, without the names of default arguments; a method of
      another module prints as written.

    Raises:
      ValueError: The text does not follow the grammar, names something unknown, or gives it wrong arguments.
      TypeError: The text is not a str.

    >>> parse("s_ste(2,4)")
    y_w=ste(soft(2,4)); dw_g=mvue(2,4)
    >>> parse("s_ste(2,4); dx_g=rescale(mse(2,4))")
    y_w=ste(soft(2,4)); dx_g=rescale(mse(2,4)); dw_g=mvue(2,4)
    """
    source = _source(text, foreign)
    parts = [part for part in map(str.strip, _pieces(text)) if part]
    method = Sparsity()
    slots: dict[str, Pruner] = {}
    alone: list[str] = []
    whole = False
    for i, given in enumerate(parts):
        part = re.sub(r"(^|\s+)else\s+dense$", "", given)
        slot, equals, value = part.partition("=")
        slot = slot.strip()
        if equals and _with_underscores(slot) in SLOTS:
            slot = _with_underscores(slot)
            raise ValueError(f"{text!r}: the slot is written {slot!r}, with an underscore.")
        if equals and slot.isidentifier():
            if slot not in SLOTS:
                of_product = " or ".join(repr(name) for name in SLOTS if name.startswith(f"{slot}_"))
                letters = lambda name: sorted(name.replace("_", ""))
                alike = of_product or " or ".join(repr(name) for name in SLOTS if letters(name) == letters(slot))
                near = f"; did you mean {alike}?" if alike else "."
                raise ValueError(f"{text!r}: no slot is called {slot!r}{near} The slots are {', '.join(SLOTS)}.")
            if slot in slots:
                raise ValueError(f"{text!r} fills {slot} twice.")
            slots[slot] = parse_pruner(value, foreign=foreign)
            alone += [slot] * (part != given)
        elif part != given and (i == 0 or not part):
            whole = True
            method = _method(part, source) if part else method
        elif i == 0:
            method = _method(part, source)
        else:
            raise ValueError(f"{text!r}: write at most one method, before the slots: 's_ste(2,4); dx_g=mse(2,4)'.")
    return _replaced(method, slots, whole or tuple(alone))


@_briefly()
def parse_pruner(text: str, *, foreign: bool = True) -> Pruner:
    """Return the `Pruner` that a text describes. ``parse_pruner(str(pruner)) == pruner``.

    Args:
      text: A call of a pruner with numbers, strings, tuples, pruners and schedules as arguments. A pruner is one of
        nmjax's, by its name, or one of another module, ``module:name(...)``. So is a schedule; it may also be a
        function of the step, ``module:name`` without brackets.
      foreign: Whether the text may name other modules. They are imported, and importing a module runs it: pass False
        for a text that nobody you trust wrote.

    Returns:
      The pruner. It prints without the names of default arguments; a pruner of another module prints as written.

    Raises:
      ValueError: The text does not follow the grammar, names something unknown, or gives it wrong arguments.
      TypeError: The text is not a str.

    >>> parse_pruner("chain(soft(2,4), fp8('e4m3'))")
    chain(soft(2,4),fp8('e4m3'))
    >>> parse_pruner("ste(nmjax.pruners.magnitude:mse(2, m=4))")
    ste(nmjax.pruners.magnitude:mse(2,m=4))
    """
    source = _source(text, foreign)
    p = _value(text.strip(), "pruner", source)
    if not isinstance(p, Pruner):
        raise ValueError(f"{text!r} is {show(p)}, not a pruner such as mse(2,4).")
    return p


def _source(text: Any, foreign: bool) -> _Source:
    if not isinstance(text, str):
        raise TypeError(
            f"expected a text, got {type(text).__name__}: {text!r} is a value already and needs no parsing."
        )
    if len(text) > LONGEST:
        raise ValueError(f"a text has at most {LONGEST:,} characters, and {text[:40]!r}... has {len(text):,}.")
    return _Source(text, foreign)


def _pieces(text: str) -> list[str]:
    """Cut a text at each ";" outside strings."""
    return re.findall(rf"(?:{names.STRING}|[^;])+", text)


def _method(part: str, source: _Source) -> Sparsity:
    method = _value(part, "method", source)
    if not isinstance(method, Sparsity):
        raise ValueError(
            f"{source.text!r} is {show(method)}: neither a method, as s_ste(2,4), nor a slot, as dw_g=mvue(2,4)."
        )
    return method


def _replaced(method: Sparsity, slots: dict[str, Pruner], else_dense: bool | tuple[str, ...]) -> Sparsity:
    """Replace slots of a method; keep the source text of foreign methods."""
    if not slots and not else_dense:
        return method
    before = method.else_dense
    kept = [slot for slot in before if slots.get(slot) != identity] if isinstance(before, tuple) else []
    named = dict.fromkeys([*kept, *(else_dense if isinstance(else_dense, tuple) else ())])
    left = True in (before, else_dense) or tuple(named) or False
    sparsity, text = replace(method, **slots, else_dense=left), written(method)
    if text is None:
        return sparsity
    alone = () if isinstance(else_dense, bool) else else_dense
    parts = [text, *(f"{slot}={slots[slot]}{ELSE * (slot in alone)}" for slot in SLOTS if slot in slots)]
    return as_written(sparsity, "; ".join(parts + [ELSE.strip()] * (else_dense is True)))


def _value(part: str, kind: str, source: _Source) -> Any:
    try:
        return _read(part, kind, source)
    except (RecursionError, MemoryError):  # MemoryError: of Python's own parser
        raise ValueError(f"{part[:40]!r}... is nested too deeply to be a {kind}.") from None


def _read(part: str, kind: str, source: _Source) -> Any:
    if "<callable" in part:
        raise ValueError(
            f"{part!r} holds a bare callable, which has no text. Use a schedule that is a value, such as "
            "linear(1,0,1000), or module:name of a function of the step."
        )
    source = source._replace(text=part)
    tree, source = _tree(source, kind)
    name = _name(tree.func if isinstance(tree, ast.Call) else tree, source)
    if kind == "method" and name in PRUNERS and name not in METHODS:
        raise ValueError(
            f"{part!r}: {name} is a pruner, which stands in a slot, as in 'y_w=ste(mse(2,4))' or 'dw_g=mvue(2,4)'."
        )
    if kind == "pruner" and name in METHODS and name not in PRUNERS:
        raise ValueError(f"{part!r}: {name} is a method, but a slot takes a pruner.")
    number_first = isinstance(tree, ast.Call) and tree.args[:1] and isinstance(tree.args[0], ast.Constant)
    if kind == "pruner" and number_first and name in METHODS and "p" in inspect.signature(PRUNERS[name]).parameters:
        raise ValueError(
            f"{part!r}: in a slot, {name} is the estimator and takes a pruner: '{name}(mse(2,4))'. "
            f"The method {name} stands alone: '{name}(2,4)'."
        )
    if kind == "method" and isinstance(tree, ast.Call) and any(_names_pruner(a, source) for a in tree.args):
        if name in PRUNERS:
            raise ValueError(f"{part!r} is a pruner, which stands in a slot: 'y_w={part}'.")
        if name in METHODS:
            hint = f"Write numbers, as in {name}(2,4), or a pruner in a slot, as in 'y_w=ste(mse(2,4))'."
            raise ValueError(f"{part!r}: the method {name} takes no pruner. {hint}")
    return _build(tree, kind, source)


def _tree(source: _Source, kind: str) -> tuple[ast.expr, _Source]:
    """Parse a text as Python, with an identifier in place of every ``module:name``."""
    marks: dict[str, str] = {}

    def mark(match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0]
        identifier = f"_foreign_{len(marks)}"
        marks[identifier] = match["name"]
        return identifier

    try:
        return ast.parse(names.TOKEN.sub(mark, source.text), mode="eval").body, source._replace(marks=marks)
    except (SyntaxError, ValueError):
        if share := re.search(r"\d[\d.]*\s*%", source.text):
            raise ValueError(
                f"{source.text!r}: shares such as {share[0]} work only in configs, and Python takes a number of steps, "
                "as in linear(1,0,300)."
            ) from None
        pattern = re.search(r"(?<!\d)(\d++):(\d+)", source.text)
        hint = ""
        if pattern:
            hint = f" {pattern[0]} is written ({pattern[1]},{pattern[2]})."
        elif re.search(r"\)\s*,\s*\w+\s*=", source.text):
            hint = " Slots are separated by ';'."
        elif source.text.count("(") > source.text.count(")"):
            hint = " A bracket is not closed."
        raise ValueError(f"{source.text!r} is not a {kind}: expected a call such as 'ste(2,4)'.{hint}") from None


def _name(node: ast.expr, source: _Source) -> str:
    """Return the name that a node is, ours or ``module:name``; "" if it is none."""
    return source.marks.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _names_pruner(node: ast.expr, source: _Source) -> bool:
    return _name(node.func if isinstance(node, ast.Call) else node, source) in PRUNERS


def _build(node: ast.expr, kind: str, source: _Source) -> Any:
    """Return the value of one node of Python's grammar; refuse all that is not on this short list."""
    build = lambda inner: _build(inner, "pruner or schedule", source)
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) in (int, float, str, bool)):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(build(e) for e in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = build(node.operand)
        if type(value) in (int, float):
            return -value
    if isinstance(node, ast.Name) and node.id == "inf":
        return float("inf")
    called = isinstance(node, ast.Call)
    name = _name(node.func if called else node, source)
    if not name:
        shown = re.sub(r"_foreign_\d+", lambda match: source.marks.get(match[0], match[0]), ast.unparse(node))
        begins = re.match(r"[\w-]*", source.text.strip())
        near = _with_underscores(begins[0]) if begins else ""
        hint = f"; did you mean {near!r}?" if near in _KNOWN[kind] else "."
        raise ValueError(f"{source.text!r}: {shown!r} is not a {kind}{hint} Known: {', '.join(sorted(_KNOWN[kind]))}.")
    args = [build(a) for a in node.args] if called else []
    keywords = _keywords(node.keywords, name, build, source.text) if called else {}
    if names.is_foreign(name):
        return _foreign(name, kind, (args, keywords) if called else None, source)
    return _call(_known(name, kind, source.text), args, keywords, source.text)


def _keywords(nodes: Sequence[ast.keyword], name: str, build: Callable[[ast.expr], Any], text: str) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for node in nodes:
        if node.arg is None:
            raise ValueError(f"{text!r}: ** is not allowed in {name}.")
        if node.arg in keywords:
            raise ValueError(f"{text!r}: {node.arg} is given twice in {name}.")
        keywords[node.arg] = build(node.value)
    return keywords


def _known(name: str, kind: str, text: str) -> Any:
    known = _KNOWN[kind]
    if name not in known:
        word = name.lower()
        near = _nearest(_WORDS[word][kind != "method"] if word in _WORDS else word, [*known, *PRUNERS, *METHODS])
        raise ValueError(f"{text!r}: no {kind} is called {name!r}{near} Known: {', '.join(sorted(known))}.")
    return known[name]


def _with_underscores(name: str) -> str:
    """Return a name as Python has it, if it was written with hyphens, as in "sr-ste" or "SR-STE"."""
    return name.replace("-", "_").lower() if "-" in name else ""


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else "."


# ---- what is not ours ----


def _foreign(name: str, kind: str, arguments: tuple[list[Any], dict[str, Any]] | None, source: _Source) -> Any:
    """Return the value that a name of another module stands for, called if it has brackets.

    Without brackets a value stands for itself, a function of the step is a schedule, and a class or a method is called
    with nothing, as ours are.
    """
    text = source.text
    if not source.foreign:
        raise ValueError(
            f"{text!r} names {name}, which is not part of nmjax. A text that was read from a file, or parsed with "
            "foreign=False, may not name other modules. If you trust it, pass it to nm.parse yourself."
        )
    try:
        value = names.load(name)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    if arguments is not None:
        args, keywords = arguments
        if not callable(value):
            raise ValueError(f"{text!r}: {name} is of type {type(value).__name__} and cannot be called.")
        value = _call(value, args, keywords, text)
        name = f"{name}({','.join([*map(show, args), *(f'{k}={show(v)}' for k, v in keywords.items())])})"
    elif isinstance(value, type) or (kind == "method" and inspect.isroutine(value)):
        value = _call(value, [], {}, text)
    elif kind == "pruner or schedule" and inspect.isroutine(value):
        return Function(name)
    _check_kind(value, name, kind, text)
    return as_written(value, name)


def _check_kind(value: Any, shown: str, kind: str, text: str) -> None:
    if kind == "method":
        wanted, fits = "a method: a function that returns an nm.Sparsity", isinstance(value, Sparsity)
    elif kind == "pruner":
        wanted, fits = "a pruner: a frozen dataclass that derives from nm.Pruner", isinstance(value, Pruner)
    else:
        wanted, fits = "a pruner or a schedule of the step", isinstance(value, Pruner) or callable(value)
    if not fits:
        raise ValueError(f"{text!r}: {shown} is of type {type(value).__name__}, and is not {wanted}.")
    if type(value).__eq__ is object.__eq__:
        raise ValueError(
            f"{text!r}: {shown} gives a {type(value).__name__}, which is equal to itself only. Make it a frozen "
            "dataclass, or write module:name, without brackets, of a function of the step."
        )


# ---- calls ----


def _call(make: Any, args: list[Any], keywords: dict[str, Any], text: str) -> Any:
    if isinstance(make, Pruner):  # identity
        if args or keywords:
            raise ValueError(f"{text!r}: {make} takes no arguments.")
        return make
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some functions written in C have none
        signature = None
    name = getattr(make, "__name__", type(make).__name__)
    if signature is not None:
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            reason = f"got {len(args)} values" if "too many" in str(error) else str(error)
            raise ValueError(f"{text!r}: {name}{_takes(signature)}, {reason}.") from None
    try:
        return make(*args, **keywords)
    except (TypeError, ValueError) as error:
        said = str(error)
        if METHODS.get(name) is make:  # tell of the method, not of a pruner in it
            said = re.sub(r"^\w+\(\S*\): ", "", said).replace("as in (", f"as in {name}(")
        raise ValueError(f"{text!r}: {said}") from None
    except Exception as error:  # a function of another module may raise anything
        raise ValueError(f"{text!r}: {name} raised {type(error).__name__}: {error}") from error


def _takes(signature: inspect.Signature) -> str:
    shown = []
    for p in signature.parameters.values():
        star = ""
        if p.kind is p.VAR_POSITIONAL:
            star = "*"
        elif p.kind is p.VAR_KEYWORD:
            star = "**"
        default = "" if p.default is p.empty else f"={p.default!r}"
        shown.append(f"{star}{p.name}{default}")
    return f"({', '.join(shown)})"
