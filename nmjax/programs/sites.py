"""The site of a parameter: the words of its noise, the time, and its state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from nmjax.analysis.patterns import Pattern, violations
from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.products.pruning import Operand, pruned
from nmjax.products.sites import final, final_weight, site_key
from nmjax.products.slot import slot_context
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import Parameter
from nmjax.pruners import identity


class ParameterOrigin(NamedTuple):
    """The parameter that a site was made for.

    Attributes:
      parameter: The parameter, in the layout in which its product takes it.
      operand: The roles of its axes in the product.
      sparsity: What its products prune: as at the start, or what `transform.harden` left.
      several: True if products take the parameter in several layouts.
      elsewhere: The names of other operations that use the parameter.
    """

    parameter: Parameter
    operand: Operand
    sparsity: Sparsity
    several: bool
    elsewhere: tuple[str, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["words", "time", "state"], meta_fields=["origin"])
@dataclass(frozen=True)
class ProgramSite:
    """The arrays that a method keeps for a parameter. Each is None if the method does without it.

    Attributes:
      origin: What the site was made for.
      words, time, state: Arrays. Their first axes are those of the stack, if the parameter is one.
    """

    origin: ParameterOrigin
    words: Any = None
    time: Any = None
    state: Any = None

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Words, time and state."""
        return self.words, self.time, self.state


def _alike(origin: ParameterOrigin) -> ParameterOrigin:
    """Return an origin without names, so that parameters that are alike compile once."""
    return origin._replace(parameter=origin.parameter._replace(path=""), elsewhere=())


def state_of(site: ProgramSite, value: Any, step: Any = None) -> Any:
    """Return the state of a parameter at a step, renewed if it is due; without a step, a new state."""
    since = None if step is None or site.time is None else site.time[..., 0].max()  # one step for a whole stack
    return _states(value, site.words, site.state, step, since, origin=_alike(site.origin))


# Compiled, so that divisions round as in a compiled program.
@partial(jax.jit, static_argnames="origin")
def _states(value: jax.Array, words: Any, state: Any, step: Any, since: Any, *, origin: ParameterOrigin) -> Any:
    make: Callable[..., Any] = origin.sparsity.init if step is None else origin.sparsity.refresh

    def one(w: jax.Array, words: Any, state: Any) -> Any:
        ctx = Ctx(words, 0 if step is None else step, state, since=since)
        operand = origin.operand
        return make(w, contract=operand.contract, out=operand.other, batch=operand.batch, ctx=ctx)

    return origin.parameter.apply(one, value, words, state)


def final_form(path: str, site: ProgramSite) -> tuple[Pruner, Sparsity]:
    """Return the pruner that hardens a parameter, and the sparsity after that."""
    try:
        return final(site.origin.sparsity)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def hardened(path: str, value: Any, site: ProgramSite) -> tuple[Any, ProgramSite]:
    """Return a parameter in its final form, and its site after that."""
    origin, (p, rest) = site.origin, final_form(path, site)
    if p != identity:
        if origin.several or origin.elsewhere:
            others = ", ".join(origin.elsewhere)
            by = f"it also goes into {others}" if others else "products take it in several layouts"
            raise ValueError(
                f"{path}: fwd_rhs={origin.sparsity.fwd_rhs} prunes a parameter of shape {np.shape(value)} that has no "
                f'single final form, because {by}. Leave it dense: (r"{path}", "dense").'
            )
        value = _final(value, site.state, origin=_alike(origin))
    return value, ProgramSite(origin._replace(sparsity=rest))


@partial(jax.jit, static_argnames="origin")
def _final(value: jax.Array, state: Any, *, origin: ParameterOrigin) -> jax.Array:
    one = lambda w, state: final_weight(origin.sparsity, w, origin.operand, state)
    return origin.parameter.apply(one, value, state, back=True)


def of_step(site: ProgramSite, value: Any) -> jax.Array:
    """Return a parameter as its forward product uses it at the step of its site."""
    origin, p = site.origin, site.origin.sparsity.fwd_rhs

    def one(w: jax.Array, words: Any, time: Any, state: Any) -> jax.Array:
        key = None if words is None else site_key(words, time[1])
        ctx = slot_context(Ctx(key, 0 if time is None else time[0], state), "fwd_rhs")
        return pruned(f"fwd_rhs={p}", p, w, origin.operand, ctx)

    return origin.parameter.apply(one, value, site.words, site.time, site.state, back=True)


def broken_groups(path: str, value: Any, site: ProgramSite) -> jax.Array | None:
    """Return the number of groups that break the pattern of a hardened parameter; None if it ends dense."""
    pattern = final_form(path, site)[0].pattern
    if pattern is None:
        return None
    promised = Pattern(*pattern, site.origin.operand.contract)
    return site.origin.parameter.apply(lambda w: violations(w, promised), value).sum()
