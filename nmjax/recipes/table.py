"""The recipe: an ordered table of path patterns, which gives each layer its sparsity."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from nmjax.core.pruner import Pruner
from nmjax.core.value import Value, told
from nmjax.kernels.targets import check_backend
from nmjax.products.sparsity import Sparsity
from nmjax.recipes.text import parse

Rules: TypeAlias = Mapping[str, str | Sparsity] | Sequence[tuple[str, str | Sparsity]]
"""A mapping from patterns to sparsities, or pairs (pattern, sparsity)."""


@dataclass(frozen=True, repr=False)
class Recipe(Value):
    """The sparsity of each layer of a model, by rules for the layers' paths.

    The first rule whose regular expression matches a layer's whole path decides. A layer that none matches is dense.

    Args:
      rules: Pairs of a regular expression and a `Sparsity` or its text, as in `nmjax.parse`. A mapping has the
        rules in the order of its items.
      backend: Who runs pruned products, one of `nmjax.kernels.targets.BACKENDS`: "auto" is fewer rows or a kernel if
        one is expected to win, "xla" always XLA's dense product, "compact" always fewer rows where `nmjax.rows` chooses
        them, "pallas" always a kernel, "interpret" a kernel simulated on a CPU.

    Raises:
      TypeError: The rules are not pairs of a text and a sparsity.
      ValueError: A pattern is no regular expression, a text is no sparsity, or the backend is none of `BACKENDS`.

    >>> recipe = Recipe({r".*/attention/.*": "dense", r"blocks/.*": "s_ste(2,4)"})
    >>> recipe("blocks/0/mlp/up"), recipe("blocks/0/attention/out"), recipe("head")
    (y_w=ste(soft(2,4)); dw_g=mvue(2,4), dense, dense)
    >>> Recipe(((r".*/attention/.*", "dense"), (r"blocks/.*", "s_ste(2,4)"))) == recipe
    True
    """

    rules: tuple[tuple[str, Sparsity], ...]
    backend: str = "auto"

    if TYPE_CHECKING:  # the constructor accepts more types than the fields hold

        def __init__(self, rules: Rules, backend: str = "auto") -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        check_backend(self.backend)
        object.__setattr__(self, "rules", tuple(map(_rule, _pairs(self.rules))))

    def __call__(self, path: str) -> Sparsity:
        """Return the sparsity of the layer at a path, such as "blocks/0/mlp/up"."""
        row = self.row(path)
        return Sparsity() if row is None else self.rules[row][1]

    def of_parameter(self, path: str) -> Sparsity:
        """Return the sparsity for a parameter: of the first rule that matches its path or that of its module.

        If no rule matches either, the nearest module above them that a rule matches decides.

        >>> Recipe({"embed/table": "dense", "embed": "ste()", "blocks": "mvue()"}).of_parameter("blocks/0/matrix")
        dw_g=mvue(2,4)
        """
        around = path.rpartition("/")[0]
        rows = [row for row in map(self.row, (path, around)) if row is not None]
        while not rows and around:
            around = around.rpartition("/")[0]
            rows = [row for row in (self.row(around),) if row is not None]
        return self.rules[min(rows)][1] if rows else Sparsity()

    def row(self, path: str) -> int | None:
        """Return the index of the rule that decides for a layer's path; None if no pattern matches it."""
        return next((i for i, (pattern, _) in enumerate(self.rules) if re.fullmatch(pattern, path)), None)

    def unused(self, paths: Iterable[str], unreached: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the patterns that decide for none of the paths.

        Args:
          paths: The paths of all layers of a model.
          unreached: Paths outside registered layers. A rule counts as used if it leaves one of them dense.

        Returns:
          Patterns in their order. A last ``.*`` is never one of them, because earlier rules may leave nothing to it.

        >>> Recipe(((r".*/mlp/.*", "ste()"), (r"head", "ste()"), (r".*", "dense"))).unused(["blocks/mlp/up"])
        ('head',)
        """
        return tuple(self.rules[i][0] for i in self._idle(paths, unreached))

    def _idle(self, paths: Iterable[str], unreached: Iterable[str]) -> list[int]:
        used, last = set(map(self.row, paths)), len(self.rules) - 1
        used |= {row for row in map(self.row, unreached) if row is not None and self.rules[row][1] == Sparsity()}
        return [i for i, (p, _) in enumerate(self.rules) if i not in used and not (p == ".*" and i == last)]

    def check(self, paths: Iterable[str], unreached: Iterable[str] = ()) -> None:
        """Refuse rules that apply to no layer.

        Args:
          paths: The paths of all layers of a model.
          unreached: As in `unused`.

        Raises:
          ValueError: A rule applies to no layer. The error has the path that is most like its pattern, and the layers.
        """
        paths = list(paths)
        idle = self._idle(paths, unreached)
        if not idle:
            return
        patterns = [self.rules[i][0] for i in idle]
        nearest = set(sorted(paths, key=lambda path: _likeness(path, patterns), reverse=True)[:20])
        lines = ["These rules of the recipe apply to no layer:"]
        lines += [f"  {pattern!r}{self._hint(pattern, paths)}" for pattern in patterns]
        lines.append("A pattern is a regular expression for a layer's whole path. The layers are:")
        lines += [f"  {path}" if path else "  '', the model itself" for path in paths if path in nearest] or ["  none"]
        if len(paths) > 20:
            lines.append(f"  and {len(paths) - 20} more")
        raise ValueError("\n".join(lines))

    def _hint(self, pattern: str, paths: list[str]) -> str:
        """Return in words which rules take all layers that a pattern matches; if it matches none, the nearest path."""
        rows = {self.row(path) for path in paths if re.fullmatch(pattern, path)}
        names = " and ".join(repr(other) for i, (other, _) in enumerate(self.rules) if i in rows)
        if not rows:
            near = difflib.get_close_matches(pattern, paths, 1)
            return f"; did you mean {near[0]!r}?" if near else ""
        return f": {names} {'comes' if len(rows) == 1 else 'come'} first"

    @classmethod
    def named(cls, rules: Any, sparsity: Mapping[str, str], backend: str = "auto") -> "Recipe":
        """Return the recipe of a config. A rule names its sparsity in a table of texts, or holds it.

        Args:
          rules: Pairs of a regular expression and a name in the table, a text or a `Sparsity`.
          sparsity: The table, from names to texts.
          backend: As in `Recipe`.

        Returns:
          The recipe.

        Raises:
          TypeError: The rules are not pairs of a text and a sparsity.
          ValueError: A pattern is no regular expression, or a text is neither a name in the table nor a sparsity.

        >>> Recipe.named(((r".*/mlp/.*", "mlp"), (r".*", "dense")), {"mlp": "ste(2,4)"})
        Recipe((('.*/mlp/.*',y_w=ste(mse(2,4))),('.*',dense)))
        """
        return cls(tuple(_rule(rule, sparsity) for rule in _pairs(rules)), backend)


def unused_rules(
    recipe: Recipe, paths: Iterable[str], unreached: Iterable[str] = (), of: str = "layer"
) -> list[tuple[str, str]]:  # fmt: skip
    """Return (where, reason) of each rule that applies to none of the paths, as a plan lists refusals.

    Args:
      recipe: The recipe.
      paths, unreached: As in `Recipe.unused`.
      of: The thing that has the paths: a layer, or a parameter.

    >>> unused_rules(Recipe({"head": "ste()", ".*": "dense"}), ["up"])
    [("the rule 'head'", "it matches no layer's whole path, or earlier rules decide for its layers.")]
    """
    reason = f"it matches no {of}'s whole path, or earlier rules decide for its {of}s."
    return [(f"the rule {pattern!r}", reason) for pattern in recipe.unused(paths, unreached)]


def _likeness(path: str, patterns: list[str]) -> float:
    return max(difflib.SequenceMatcher(None, pattern, path).ratio() for pattern in patterns)


def _pairs(rules: Any) -> tuple[Any, ...]:
    if isinstance(rules, Mapping):  # a ConfigDict is none, and sorts its keys
        return tuple(rules.items())
    if not isinstance(rules, (tuple, list)) or not all(isinstance(r, (tuple, list)) and len(r) == 2 for r in rules):
        raise TypeError(f"Recipe takes rules ((pattern, sparsity), ...), as ((r'.*', 's_ste(2,4)'),), got {rules!r}.")
    return tuple(rules)


def _rule(rule: tuple[Any, Any], table: Mapping[str, str] | None = None) -> tuple[str, Sparsity]:
    """Return a rule with its sparsity parsed; in a recipe by names, look it up in the table first."""
    pattern, sparsity = rule
    if not isinstance(pattern, str):
        raise TypeError(f"a rule's pattern is the text of a regular expression, as r'blocks/.*', got {pattern!r}.")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression for a layer's path: {error}.") from None
    hint = ""
    if table is not None and isinstance(sparsity, str):
        if sparsity in table:
            sparsity = table[sparsity]
        else:
            hint = f" Nor is it in the table, which has {', '.join(map(repr, table)) or 'nothing'}."
    if isinstance(sparsity, str):
        try:
            sparsity = parse(sparsity)
        except ValueError as error:
            raise ValueError(f"rule {pattern!r}: {error}{hint}") from None
    if not isinstance(sparsity, Sparsity):
        in_slot = f" A pruner stands in a slot: nm.Sparsity(y_w={sparsity!r})." if isinstance(sparsity, Pruner) else ""
        raise TypeError(
            f"rule {pattern!r} takes a Sparsity or its text, as 's_ste(2,4)', got {told(sparsity)}.{in_slot}"
        )
    return pattern, sparsity


def recipe_of(plan: str, given: Sequence[Any], options: Mapping[str, Any]) -> tuple[Recipe | None, tuple[Any, ...]]:
    """Return the recipe and the inputs of ``plan(model, recipe, *inputs)``, where the recipe may be left out.

    Args:
      plan: The name of the function, for errors.
      given: Its arguments after the model.
      options: Its keyword arguments.
    """
    if "recipe" in options or any(isinstance(one, Recipe) for one in given[1:]):
        raise TypeError(f"plan takes a recipe before the inputs: {plan}(model, recipe, x).")
    if given and isinstance(given[0], (str, Sparsity)):
        raise TypeError(f"plan takes a Recipe, such as Recipe({{r'.*': 's_ste(2,4)'}}), got {told(given[0])}.")
    recipe = given[0] if given and isinstance(given[0], Recipe) else None
    return recipe, tuple(given[recipe is not None :])
