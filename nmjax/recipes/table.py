"""Which layer prunes how: an ordered table of path patterns."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nmjax.core.value import Value
from nmjax.kernels.targets import check_backend
from nmjax.products.sparsity import Sparsity
from nmjax.recipes.text import parse


@dataclass(frozen=True, repr=False)
class Recipe(Value):
    """Rules (pattern, sparsity): the first whose regular expression matches a layer's whole path decides; where none
    does the layer is dense. A sparsity may be its text.

    >>> recipe = Recipe(((r".*/attention/.*", "dense"), (r"blocks/.*", "s_ste(2,4)")))
    >>> recipe("blocks/0/mlp/up"), recipe("blocks/0/attention/out"), recipe("head")
    (fwd_rhs=ste(soft(2,4)); drhs_g=mvue(2,4), dense, dense)
    """

    rules: tuple[tuple[str, Sparsity], ...]
    backend: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        check_backend(self.backend)
        object.__setattr__(self, "rules", tuple(map(_rule, _pairs(self.rules))))

    def __call__(self, path: str) -> Sparsity:
        """The sparsity of the layer at a path."""
        row = self._row(path)
        return Sparsity() if row is None else self.rules[row][1]

    def _row(self, path: str) -> int | None:
        return next((i for i, (pattern, _) in enumerate(self.rules) if re.fullmatch(pattern, path)), None)

    def unused(self, paths: Iterable[str]) -> tuple[str, ...]:
        """The patterns that decide for none of the paths. A last ``.*`` does not count: what is left may be nothing."""
        return tuple(self.rules[i][0] for i in self._idle(paths))

    def _idle(self, paths: Iterable[str]) -> list[int]:
        used, last = set(map(self._row, paths)), len(self.rules) - 1
        return [i for i, (p, _) in enumerate(self.rules) if i not in used and not (p == ".*" and i == last)]

    def check(self, paths: Iterable[str]) -> None:
        """Refuse rules that decide for no layer."""
        paths = list(paths)
        if not (idle := self._idle(paths)):
            return
        lines = []
        for pattern in (self.rules[i][0] for i in idle):
            before = {self._row(path) for path in paths if re.fullmatch(pattern, path)}
            first = " and ".join(repr(self.rules[i][0]) for i in sorted(before))
            lines.append(f"  {pattern!r}" + (f": {first} come{'s' * (len(before) == 1)} first" if first else ""))
        alike = lambda path: max(difflib.SequenceMatcher(None, self.rules[i][0], path).ratio() for i in idle)
        near = [path or "'', the model itself" for path in sorted(paths, key=alike, reverse=True)[:20]]
        shown = [f"  {path}" for path in near or ["none"]]
        shown += [f"  and {len(paths) - 20} more"] if len(paths) > 20 else []
        sentence = "A pattern is a regular expression for a layer's whole path. The layers are:"
        raise ValueError("\n".join(["These rules of the recipe decide for no layer:", *lines, sentence, *shown]))

    @classmethod
    def named(cls, rules, sparsity: Mapping[str, str], backend: str = "auto") -> "Recipe":
        """The recipe of a config: rules name their sparsity in a table of texts, or are texts themselves.

        >>> Recipe.named(((r".*/mlp/.*", "mlp"), (r".*", "dense")), {"mlp": "ste(2,4)"})
        Recipe((('.*/mlp/.*',fwd_rhs=ste(mse(2,4))),('.*',dense)))
        """
        return cls(tuple(_rule(rule, sparsity) for rule in _pairs(rules)), backend)


def _pairs(rules) -> tuple:
    if not isinstance(rules, (tuple, list)) or not all(isinstance(r, (tuple, list)) and len(r) == 2 for r in rules):
        raise TypeError(f"Recipe takes rules ((pattern, sparsity), ...), as ((r'.*', 's_ste(2,4)'),), got {rules!r}.")
    return tuple(rules)


def _rule(rule, table: Mapping[str, str] | None = None):
    pattern, sparsity = rule
    if not isinstance(pattern, str):
        raise TypeError(f"a rule's pattern is the text of a regular expression, as r'blocks/.*', got {pattern!r}.")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression for a layer's path: {error}.") from None
    strange = table is not None and isinstance(sparsity, str)
    if strange and sparsity in table:
        sparsity, strange = table[sparsity], False
    if isinstance(sparsity, str):
        try:
            sparsity = parse(sparsity)
        except ValueError as error:
            nor = f" Nor is it in the table, which has {', '.join(map(repr, table)) or 'nothing'}." if strange else ""
            raise ValueError(f"rule {pattern!r}: {error}{nor}") from None
    if not isinstance(sparsity, Sparsity):
        raise TypeError(f"rule {pattern!r} takes a Sparsity or its text, as 's_ste(2,4)', got {sparsity!r}.")
    return pattern, sparsity
