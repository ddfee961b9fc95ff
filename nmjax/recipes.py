"""Which layer prunes how: an ordered table of path patterns."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nmjax.products import check_backend
from nmjax.sparsity import Sparsity
from nmjax.spec import parse
from nmjax.typing import Value


@dataclass(frozen=True, repr=False)
class Recipe(Value):
    """Rules (pattern, sparsity): the first whose regular expression matches a layer's whole path decides; where none does
    the layer is dense. A sparsity may be its text.

    >>> recipe = Recipe(((r".*/attention/.*", "dense"), (r"blocks/.*", "s_ste(2,4)")))
    >>> recipe("blocks/0/mlp/up"), recipe("blocks/0/attention/out"), recipe("head")
    (fwd_rhs=ste(soft(2,4)); drhs_g=mvue(2,4), dense, dense)
    """

    rules: tuple[tuple[str, Sparsity], ...]
    backend: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        check_backend(self.backend)
        if not all(isinstance(rule, tuple) and len(rule) == 2 for rule in self.rules):
            raise TypeError(f"Recipe takes (pattern, sparsity) pairs, got {self.rules!r}.")
        object.__setattr__(self, "rules", tuple(map(_rule, self.rules)))

    def __call__(self, path: str) -> Sparsity:
        """The sparsity of the layer at a path."""
        row = self._row(path)
        return Sparsity() if row is None else self.rules[row][1]

    def _row(self, path: str) -> int | None:
        return next((i for i, (pattern, _) in enumerate(self.rules) if re.fullmatch(pattern, path)), None)

    def unused(self, paths: Iterable[str]) -> tuple[str, ...]:
        """The patterns that decide for none of the paths. A last ``.*`` does not count: what is left may be nothing."""
        used = set(map(self._row, paths))
        return tuple(
            pattern
            for i, (pattern, _) in enumerate(self.rules)
            if i not in used and not (pattern == ".*" and i == len(self.rules) - 1)
        )

    def check(self, paths: Iterable[str]) -> None:
        """Refuse rules that decide for no layer."""
        paths = list(paths)
        if unused := self.unused(paths):
            earlier = lambda i, pattern: next(
                (f": {self.rules[row][0]!r} comes first" for p in paths if re.fullmatch(pattern, p) and (row := self._row(p)) != i), ""
            )  # fmt: skip
            lines = [
                f"  {pattern!r}{earlier(i, pattern)}" for i, (pattern, _) in enumerate(self.rules) if pattern in unused
            ]
            near = sorted(paths, key=lambda p: -max(difflib.SequenceMatcher(None, u, p).ratio() for u in unused))
            shown = [f"  {p}" for p in near[:20]] + ([f"  and {len(paths) - 20} more"] if len(paths) > 20 else [])
            raise ValueError(
                "These rules of the recipe decide for no layer:\n"
                + "\n".join(lines)
                + "\nA pattern is a regular expression "
                "for a layer's whole path. The layers are:\n" + "\n".join(shown or ["  none"])
            )

    @classmethod
    def named(cls, rules, sparsity: Mapping[str, str], backend: str = "auto") -> "Recipe":
        """The recipe of a config: rules name their sparsity in a table of texts, or are texts themselves.

        >>> Recipe.named(((r".*/mlp/.*", "mlp"), (r".*", "dense")), {"mlp": "ste(2,4)"})
        Recipe((('.*/mlp/.*',fwd_rhs=ste(mse(2,4))),('.*',dense)))
        """
        return cls(tuple((pattern, sparsity.get(name, name)) for pattern, name in rules), backend)


def _rule(rule):
    pattern, sparsity = rule
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression for a layer's path: {error}.") from None
    if isinstance(sparsity, str):
        try:
            sparsity = parse(sparsity)
        except ValueError as error:
            raise ValueError(f"rule {pattern!r}: {error}") from None
    if not isinstance(sparsity, Sparsity):
        raise TypeError(
            f"rule {pattern!r} takes a Sparsity or its text, as 's_ste(2,4)', got {type(sparsity).__name__}."
        )
    return pattern, sparsity
