"""Prunes the products of any function whose parameters have names: `transform`."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.analysis import flops
from nmjax.analysis.patterns import checked
from nmjax.analysis.plan import LayerPlan, Plan, hardened, slots_of
from nmjax.analysis.refusals import Use, fitting_all, slot_refusal
from nmjax.analysis.runs import runs_of
from nmjax.analysis.savings import kept_of, speed_of
from nmjax.core.context import Ctx
from nmjax.core.value import Value
from nmjax.products import rule
from nmjax.products.fit import fitting
from nmjax.products.pruning import Operand, shape_of
from nmjax.products.sites import (
    check_time,
    depends_on_step,
    distance,
    has_schedule,
    has_state,
    needs_arrays,
    needs_key,
    site_key,
    site_words,
    warn_unfinished,
)
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.programs.rewriting import Product, Rewriter
from nmjax.programs.running import is_array, leaves, run
from nmjax.programs.sites import Origin, ProgramSite, broken_groups, hardened as hardened_parameter, of_step, state_of
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe

Params = TypeVar("Params")
Sites = dict[str, ProgramSite]


class Place(NamedTuple):
    """A product with a parameter, and the shapes of its operands in one layer of a stack."""

    product: Product
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct

    @property
    def operand(self) -> Operand:
        """The roles of the axes of the parameter's operand."""
        return self.product.op.operands(self.lhs.ndim, self.rhs.ndim)["fwd_rhs"]

    def use(self, layers: int = 1) -> Use:
        """Return the product as a plan reads it, in a stack of so many layers."""
        return Use(self.product.op, self.lhs, self.rhs, layers)


@dataclass(frozen=True, repr=False)
class transform(Value):
    """A function with pruned products. The function itself does not change.

    ``transform(f, recipe)(params, ...)`` is ``f(params, ...)`` with pruned products: dot products with one parameter as
    an operand, convolutions with a parameter as their kernel, and `jax.lax.ragged_dot` with a parameter as its weights.
    The recipe matches the parameter's path in the tree ``params``, such as "blocks/0/up/kernel". A parameter is
    followed through `jax.jit`, `jax.checkpoint`, `lax.scan`, `lax.cond` and `lax.while_loop`, and through changes of
    its dtype, its shape and the order of its axes. So it works with plain JAX, and with any library whose models are
    functions of a tree of parameters.

    The function is traced, and its program is run with other products. A compiled function has no cost for this.
    Outside `jax.jit` every call traces again.

    Args:
      f: A function of a tree of parameters and other arguments. Arguments that are not arrays, such as flags, are
        given to it as they are.
      recipe: The sparsity of each parameter, by its path.
      seed: The seed of all random numbers, an int.

    Raises:
      TypeError: ``f`` is not callable, or ``recipe`` is not a Recipe.

    >>> import nmjax as nm
    >>> f = lambda params, x: jax.nn.relu(x @ params["up"]) @ params["down"]
    >>> params = {"up": jax.random.normal(jax.random.key(0), (8, 16)), "down": jnp.ones((16, 4))}
    >>> sparse = nm.transform(f, nm.Recipe((("up", "s_ste(2,4)"),)))
    >>> sites = sparse.init(params, jnp.ones((4, 8)))
    >>> sites = sparse.set_step(params, sites, 1)
    >>> sparse(params, jnp.ones((4, 8)), sites=sites).shape
    (4, 4)
    >>> params, sites = sparse.harden(params, sites)
    >>> bool(nm.groups.is_nm(params["up"], 2, 4, axis=0))
    True
    """

    f: Callable[..., Any]
    recipe: Recipe
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise TypeError(f"transform takes a function f(params, ...), got {type(self.f).__name__}.")
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"transform takes a Recipe, such as Recipe(((r'.*', 'ste(2,4)'),)), got {self.recipe!r}.")

    def __call__(self, params: Any, *args: Any, sites: Mapping[str, ProgramSite] | None = None, **options: Any) -> Any:
        """Return the function's result, computed with pruned products.

        Args:
          params: The tree of parameters.
          *args: The other arguments of the function.
          sites: What `init` returned. Needed if a method draws random numbers, has a schedule or keeps state.
          **options: Keyword arguments of the function.

        Raises:
          ValueError: A product cannot be pruned, or ``sites`` is missing.
        """
        known = {} if sites is None else dict(sites)
        _known(params, known)

        def compute(product: Product, x: jax.Array, w: jax.Array, arrays: Any) -> jax.Array | None:
            path = product.parameter.path
            sparsity = known[path].origin.sparsity if path in known else self.recipe(path)
            sparsity, _ = fitting(product.op, x, w, sparsity, tokens_known=False)
            if sparsity == Sparsity():
                return None
            if arrays is None and needs_arrays(sparsity):
                raise ValueError(
                    f"{path}: {sparsity} reads what init returns: write sites = f.init(params, ...), and call "
                    "f(params, ..., sites=sites)."
                )
            words, time, state = arrays or (None, None, None)
            step, micro = (0, 0) if time is None else time
            key = None if words is None else site_key(words, micro)
            ctx = Ctx(key, step, state)
            with jax.named_scope(path):
                backend, extra = self.recipe.backend, product.extra
                return rule.bilinear(product.op, x, w, sparsity, ctx, backend, name=path, extra=extra)

        arrays = {path: site.arrays for path, site in known.items()}
        return run(self.f, params, args, options, Rewriter(compute, lambda parameter, name: None), arrays)

    # ---- what the program does with its parameters ----

    def _places(self, params: Any, args: Any, options: Any) -> tuple[dict[str, list[Place]], dict[str, list[str]]]:
        """Return the products of every parameter, and the names of other operations that use it, by its path."""
        places: dict[str, list[Place]] = {path: [] for path in leaves(params)}
        others: dict[str, list[str]] = {path: [] for path in places}

        def compute(product: Product, x: Any, w: Any, arrays: Any) -> None:
            places[product.parameter.path].append(Place(product._replace(extra=()), shape_of(x), shape_of(w)))

        whole, tree = jax.tree.flatten((params, args, options))
        again = lambda params, args, options: run(
            self.f,
            params,
            args,
            options,
            Rewriter(compute, lambda parameter, name: others[parameter.path].append(name)),
            {},
        )

        def traced(given: list[Any]) -> list[Any]:
            arrays = iter(given)
            every = [next(arrays) if is_array(v) else v for v in whole]
            return [v for v in jax.tree.leaves(again(*jax.tree.unflatten(tree, every))) if is_array(v)]

        jax.eval_shape(traced, [shape_of(v) for v in whole if is_array(v)])
        unique = lambda values: list(dict.fromkeys(values))
        return {p: unique(v) for p, v in places.items()}, {p: unique(v) for p, v in others.items()}

    def init(self, params: Any, *args: Any, strict: bool = False, **options: Any) -> Sites:
        """Return what the methods keep: the sites of the parameters, by their paths.

        Args:
          params: The tree of parameters.
          *args: Examples of the other arguments: arrays or their shapes.
          strict: True to raise an error for a matrix that the recipe would prune and that no product takes.
          **options: Keyword arguments of the function.

        Raises:
          ValueError: A rule is not used by any parameter, or a product cannot be pruned. All such products are listed.
        """
        places, others = self._places(params, args, options)
        self.recipe.check(path for path, value in leaves(params).items() if places[path] or np.ndim(value) > 1)
        self._report_unreached(params, places, others, strict)
        refused = [
            f"  {path}: {refusal.reason}"
            for path, found in places.items()
            for slot in SLOTS
            if (refusal := _refusal(slot, self._fitted(path, found)[0], found)) is not None
        ]
        if refused:
            raise ValueError("\n".join(["The recipe cannot be carried out:", *dict.fromkeys(refused)]))
        made: Sites = {}
        for path, value in leaves(params).items():
            if places[path] and self._fitted(path, places[path])[0] != Sparsity():
                made[path] = self._site(path, value, places[path], others[path])
        return made

    def _report_unreached(self, params: Any, places: Any, others: Any, strict: bool) -> None:
        """Warn of matrices that a rule would prune and that no product takes, or refuse them."""
        missed = [
            f"  {path} of shape {np.shape(value)}" + (f", used by {', '.join(others[path])}" if others[path] else "")
            for path, value in leaves(params).items()
            if not places[path] and np.ndim(value) > 1 and self.recipe(path) != Sparsity()
        ]
        if not missed:
            return
        text = "\n".join(
            ["Rules of the recipe match these parameters, but no product takes them, so they stay dense:", *missed]
        )
        if strict:
            raise ValueError(f'{text}\nGive them a rule such as (r"{missed[0].split()[0]}", "dense").')
        warnings.warn(text, stacklevel=3)

    def _fitted(self, path: str, places: list[Place]) -> tuple[Sparsity, tuple[tuple[str, str], ...]]:
        """Return what a parameter's products prune in any call, and (slot, reason) of what does not fit."""
        return fitting_all(self.recipe(path), [place.use() for place in places], tokens_known=False)

    def _site(self, path: str, value: Any, places: list[Place], others: list[str]) -> ProgramSite:
        sparsity, first = self._fitted(path, places)[0], places[0]
        layouts = {(place.product.parameter.steps, place.operand) for place in places}
        stacks = {place.product.parameter.stack(np.shape(value)) for place in places}
        if (len(layouts) > 1 and has_state(sparsity)) or (len(stacks) > 1 and needs_arrays(sparsity)):
            raise ValueError(
                f"{path}: {sparsity} keeps arrays for this parameter, and {len(layouts)} products take it in different "
                "layouts. Give it a method without state, noise and schedule, such as ste(2,4)."
            )
        origin = Origin(first.product.parameter, first.operand, sparsity, len(layouts) > 1, tuple(others))
        stack = first.product.parameter.stack(np.shape(value))
        words = site_words(self.seed, path, stack) if needs_key(sparsity) else None
        timed = words is not None or depends_on_step(sparsity)
        time = jnp.zeros((*stack, 2), jnp.int32) if timed else None
        site = ProgramSite(origin, words, time)
        return replace(site, state=state_of(site, value)) if has_state(sparsity) else site

    # ---- time and state ----

    def set_step(self, params: Any, sites: Mapping[str, ProgramSite], step: Any, micro: Any = 0) -> Sites:
        """Return the sites for a step, and compute state that is due. Call it once a (micro-)step, outside the loss.

        Args:
          params: The tree of parameters.
          sites: What `init` or `set_step` returned.
          step: The step of training, an integer.
          micro: The micro-step of gradient accumulation, an integer.

        Raises:
          TypeError: ``step`` or ``micro`` is not an integer.
        """
        check_time(step, micro)
        values, now = _known(params, sites), jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32)])
        renewed: Sites = {}
        for path, site in sites.items():
            time = None if site.time is None else jnp.broadcast_to(now, site.time.shape)
            state = None if site.state is None else state_of(site, values[path], now[0])
            renewed[path] = replace(site, time=time, state=state)
        return renewed

    def harden(self, params: Params, sites: Mapping[str, ProgramSite]) -> tuple[Params, Sites]:
        """Return the parameters in their final form, as inference uses them, and sites that prune activations only.

        Args:
          params: The tree of parameters.
          sites: What `init` or `set_step` returned.

        Raises:
          ValueError: A weight is drawn again at every step, or something else uses it too, so it has no final form.

        Warns:
          UserWarning: The schedule of a method has not ended, so the hardened weights are not those of this step.
        """
        values, left = _known(params, sites), dict(sites)
        distances: list[tuple[str, int, float | None]] = []
        for path, site in sites.items():
            final, left[path] = hardened_parameter(path, values[path], site)
            if has_schedule(site.origin.sparsity.fwd_rhs) and not isinstance(site.time, (jax.core.Tracer, type(None))):
                step = int(site.time.reshape(-1)[0])
                distances.append((path, step, distance(of_step(site, values[path]), final)))
            values[path] = final
        warn_unfinished(distances, stacklevel=3)
        return jax.tree.unflatten(jax.tree.structure(params), values.values()), left

    def violations(self, params: Any, sites: Mapping[str, ProgramSite]) -> dict[str, jax.Array | None]:
        """Return the number of groups of each parameter that break the pattern which `harden` promises.

        Args:
          params: The tree of parameters, as `harden` returned it.
          sites: What `init` or `set_step` returned, before `harden`.

        Returns:
          A dict from path to a count. None: nothing was checked, because the final form is dense.

        Warns:
          UserWarning: No parameter has an n:m final form, so nothing was checked.
        """
        values = _known(params, sites)
        return checked({path: broken_groups(path, values[path], site) for path, site in sites.items()})

    def plan(self, params: Any, *args: Any, **options: Any) -> Plan:
        """Return what every parameter will do, as `nmjax.nnx.plan` does for the layers of a model.

        Args:
          params: The tree of parameters, or of their shapes.
          *args: Examples of the other arguments.
          **options: Keyword arguments of the function.
        """
        places, _ = self._places(params, args, options)
        values = leaves(params)
        rows = [self._row(path, values[path], found) for path, found in places.items() if found]
        uncovered = tuple((path, np.shape(v)) for path, v in values.items() if np.ndim(v) > 1 and not places[path])
        unused = "it matches no parameter's whole path, or earlier rules decide for its parameters."
        refused = tuple((f"the rule {p!r}", unused) for p in self.recipe.unused([row.path for row in rows]))
        count, speed = sum(int(np.size(v)) for v in values.values()), speed_of(row.runs for row in rows)
        return Plan(tuple(rows), 0, uncovered, count, refused, speed=speed)

    def _row(self, path: str, value: Any, places: list[Place]) -> LayerPlan:
        shape = tuple(np.shape(value))
        layers = math.prod(places[0].product.parameter.stack(shape))
        uses = [place.use(layers) for place in places]
        sparsity, dense = fitting_all(self.recipe(path), uses)
        cost = sum(flops.flops(place.product.op, place.lhs.shape, place.rhs.shape) * layers for place in places)
        slots, runs = slots_of(sparsity, uses, True), runs_of(sparsity, uses, self.recipe.backend)
        form, shares = hardened(sparsity), flops.effective(sparsity)
        kept = kept_of(sparsity, uses, self.recipe.backend)
        return LayerPlan(path, "parameter", shape, sparsity, slots, cost, shares, form, runs, dense, kept)


def _known(params: Any, sites: Mapping[str, ProgramSite]) -> dict[str, Any]:
    """Return the leaves of a tree by their paths. Refuse sites of parameters that it does not have."""
    values = leaves(params)
    unknown = [path for path in sites if path not in values]
    if unknown:
        raise ValueError(
            f"params has no parameter {', '.join(map(repr, unknown[:4]))}, but there are sites for it. Pass the same "
            "tree of parameters as to init."
        )
    return values


def _refusal(slot: str, sparsity: Sparsity, places: list[Place]) -> Any:
    if getattr(sparsity, slot) == identity:
        return None
    return slot_refusal(slot, sparsity, [place.use() for place in places], tokens_known=True)
