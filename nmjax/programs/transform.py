"""Prunes the products of any function whose parameters have names: `transform`."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from nmjax.analysis import scopes
from nmjax.analysis.patterns import checked
from nmjax.analysis.plan import LayerPlan, Plan, layer_plan
from nmjax.analysis.refusals import fitting_all, slot_refusal
from nmjax.analysis.savings import speed_of
from nmjax.analysis.scopes import Costs
from nmjax.core import random
from nmjax.core.value import Value
from nmjax.products import rule
from nmjax.products.fit import fitting
from nmjax.products.pruning import Operand, shape_of
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import Parameter, moves
from nmjax.programs.rewriting import Product, Rewriter, ShapedProduct
from nmjax.programs.running import is_array, leaves, run
from nmjax.programs.states import Origin, WeightState, context, has_state, moment, needs_arrays, warn_unfinished
from nmjax.pruners import identity
from nmjax.recipes.table import Recipe, unused_rules

Params = TypeVar("Params")
State = dict[str, WeightState]


class _Traced(NamedTuple):
    """The parameters in the program of a call.

    Attributes:
      products: The products of every parameter, by its path.
      others: The names of other operations that use it, likewise.
      unused: The shapes of the matrices that no product takes, likewise. A stack of vectors is no matrix.
      costs: The FLOPs by parameter, numbered as in ``products``.
    """

    products: dict[str, list[ShapedProduct]]
    others: dict[str, list[str]]
    unused: dict[str, tuple[int, ...]]
    costs: Costs

    @property
    def ruled(self) -> list[str]:
        """The paths that rules may match: of parameters that a product takes, and of matrices that none takes."""
        return [path for path, own in self.products.items() if own or path in self.unused]


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

    The function may not differentiate these products itself: transform the function that it differentiates. So the
    gradient of an energy is ``jax.grad(transform(energy, recipe), 1)``, and not a transformed ``jax.grad(energy, 1)``.

    Args:
      f: A function of a tree of parameters and other arguments. Arguments that are not arrays, such as flags, are
        given to it as they are.
      recipe: The sparsity of each parameter, by its path.
      seed: The seed of all random numbers, an int.
      mask_per_product: True if products may contract different axes of a parameter, as ``h @ e`` and ``h @ e.T`` do.
        Each of them then prunes it along its own axis, so the parameter has several masks and no final form. False to
        refuse such a parameter.

    Raises:
      TypeError: ``f`` is not callable, ``recipe`` is not a Recipe, or ``seed`` is not an int.
      ValueError: ``seed`` does not fit 64 bits.

    >>> import nmjax as nm
    >>> f = lambda params, x: jax.nn.relu(x @ params["up"]) @ params["down"]
    >>> params = {"up": jax.random.normal(jax.random.key(0), (8, 16)), "down": jnp.ones((16, 4))}
    >>> sparse = nm.transform(f, nm.Recipe((("up", "s_ste(2,4)"),)))
    >>> state = sparse.init(params, jnp.ones((4, 8)))
    >>> state = sparse.set_step(params, state, 1)
    >>> sparse(params, jnp.ones((4, 8)), state=state).shape
    (4, 4)
    >>> params, state = sparse.harden(params, state)
    >>> bool(nm.groups.is_nm(params["up"], 2, 4, axis=0))
    True
    """

    f: Callable[..., Any]
    recipe: Recipe
    seed: int = 0
    mask_per_product: bool = False

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise TypeError(f"transform takes a function f(params, ...), got {type(self.f).__name__}.")
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"transform takes a Recipe, such as Recipe(((r'.*', 'ste(2,4)'),)), got {self.recipe!r}.")
        super().__post_init__()
        random.words(self.seed)

    def __call__(self, params: Any, *args: Any, state: Mapping[str, WeightState] | None = None, **options: Any) -> Any:
        """Return the function's result, computed with pruned products.

        Args:
          params: The tree of parameters.
          *args: The other arguments of the function.
          state: What `init` returned. Needed if a method draws random numbers, has a schedule or keeps state.
          **options: Keyword arguments of the function.

        Raises:
          ValueError: A product cannot be pruned, or ``state`` is missing.
        """
        known = {} if state is None else dict(state)
        values = _known(params, known)
        origins = {path: weight_state.origin for path, weight_state in known.items()}
        ways = {path: {_way(origin.parameter, origin.operand)} for path, origin in origins.items()}

        def compute(product: Product, x: jax.Array, w: jax.Array, arrays: Any) -> jax.Array | None:
            path = product.parameter.path
            sparsity = origins[path].sparsity if path in origins else self.recipe(path)
            sparsity, _ = fitting(product.op, x, w, sparsity, tokens_known=False)
            if sparsity == Sparsity():
                return None
            own = ways.setdefault(path, set())
            own.add(_way(product.parameter, product.op.operands(x.ndim, w.ndim)["y_w"]))
            refusal = _derived(path, product, w) or self._conflict(path, np.shape(values[path]), sparsity, own)
            if refusal is not None:
                raise ValueError(f"{path}: {refusal}")
            if arrays is None and needs_arrays(sparsity):
                raise ValueError(
                    f"{path}: {sparsity} reads what init returns: write state = f.init(params, ...), and call "
                    "f(params, ..., state=state)."
                )
            with jax.named_scope(path):
                ctx, backend, extra = context(*(arrays or (None, None, None))), self.recipe.backend, product.extra
                return rule.bilinear(product.op, x, w, sparsity, ctx, backend, name=path, extra=extra)

        arrays = {path: weight_state.arrays for path, weight_state in known.items()}
        return run(self.f, params, args, options, Rewriter(compute, lambda parameter, name: None), arrays)

    # ---- what the program does with its parameters ----

    def _traced(self, params: Any, args: Any, options: Any) -> _Traced:
        """Return what the program of a call does with the parameters. It is traced on shapes."""
        products: dict[str, list[ShapedProduct]] = {path: [] for path in leaves(params)}
        others: dict[str, list[tuple[str, int]]] = {path: [] for path in products}
        numbers = {path: number for number, path in enumerate(products)}

        def compute(product: Product, x: Any, w: Any, arrays: Any) -> Any:
            path = product.parameter.path
            products[path].append(ShapedProduct.of(product, x, w))
            with scopes.of_layer(numbers[path]):
                return product.op(x, w, *product.extra)

        stacked = lambda parameter: sum(step.kind == "slice" for step in parameter.steps)
        seen = lambda parameter, name: others[parameter.path].append((name, stacked(parameter)))
        rewriter = Rewriter(compute, seen)
        whole, tree = jax.tree.flatten((params, args, options))
        learned = [i < len(products) for i, v in enumerate(whole) if is_array(v)]

        def traced(given: list[Any]) -> list[Any]:
            arrays = iter(given)
            every = [next(arrays) if is_array(v) else v for v in whole]
            params, args, options = jax.tree.unflatten(tree, every)
            y = run(self.f, params, args, options, rewriter, {})
            return [v for v in jax.tree.leaves(y) if is_array(v)]

        program = jax.make_jaxpr(traced)([shape_of(v) for v in whole if is_array(v)]).jaxpr
        unique = lambda values: {path: list(dict.fromkeys(own)) for path, own in values.items()}
        names = {path: [name for name, _ in own] for path, own in others.items()}
        layers = {path: min((axes for _, axes in own), default=0) for path, own in others.items()}
        unused = {
            path: tuple(np.shape(v))
            for path, v in leaves(params).items()
            if np.ndim(v) - layers[path] > 1 and not products[path]
        }
        return _Traced(unique(products), unique(names), unused, scopes.costs_of(program, learned, len(products)))

    def init(self, params: Any, *args: Any, strict: bool = False, **options: Any) -> State:
        """Return the sparsity state: what the methods keep for each parameter, by its path.

        Args:
          params: The tree of parameters.
          *args: Examples of the other arguments: arrays or their shapes.
          strict: True to raise an error for a matrix that the recipe would prune and that no product takes.
          **options: Keyword arguments of the function.

        Raises:
          ValueError: A rule applies to no parameter; products cannot be pruned, and all are listed; or ``strict`` is
            True and a matrix would stay dense.
        """
        traced, values = self._traced(params, args, options), leaves(params)
        products, others = traced.products, traced.others
        self.recipe.check(traced.ruled)
        self._report_missed(traced, strict)
        refused = [
            f"  {path}: {reason}"
            for path, found in products.items()
            for reason in self._refusals(path, values[path], self._fitted(path, found)[0], found)
        ]
        if refused:
            raise ValueError("\n".join(["The recipe cannot be carried out:", *refused]))
        made: State = {}
        for path, value in values.items():
            if products[path] and self._fitted(path, products[path])[0] != Sparsity():
                made[path] = self._weight_state(path, value, products[path], others[path])
        return made

    def _report_missed(self, traced: _Traced, strict: bool) -> None:
        """Warn of matrices that a rule would prune and that no product takes, or refuse them."""
        missed, others = self._missed(traced), traced.others
        if not missed:
            return
        lines = [
            f"  {path} of shape {shape}" + (f", used by {', '.join(others[path])}" if others[path] else "")
            for path, shape in missed.items()
        ]
        said = "Rules of the recipe match these parameters, but no product takes them, so they stay dense:"
        rules = ", ".join(f'(r"{path}", "dense")' for path in missed)
        text = "\n".join([said, *lines, f"To say so in the recipe, put these rules first: {rules}."])
        if strict:
            raise ValueError(text)
        warnings.warn(text, stacklevel=3)

    def _missed(self, traced: _Traced) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the matrices that a rule would prune and that no product takes, by their paths."""
        return {path: shape for path, shape in traced.unused.items() if self.recipe(path) != Sparsity()}

    def _fitted(self, path: str, products: list[ShapedProduct]) -> tuple[Sparsity, tuple[tuple[str, str], ...]]:
        """Return what a parameter's products prune in any call, and (slot, reason) of what does not fit."""
        return fitting_all(self.recipe(path), [one.use() for one in products], tokens_known=False)

    def _refusals(self, path: str, value: Any, sparsity: Sparsity, products: list[ShapedProduct]) -> list[str]:
        """Return the reasons why the products of a parameter cannot be pruned: one for all slots, or one for each."""
        whole = self._refused(path, value, sparsity, products)
        if whole is not None:
            return [whole]
        refusals = (_refusal(slot, sparsity, products) for slot in SLOTS)
        return list(dict.fromkeys(refusal.reason for refusal in refusals if refusal is not None))

    def _refused(self, path: str, value: Any, sparsity: Sparsity, products: list[ShapedProduct]) -> str | None:
        """Return the reason why the products of a parameter cannot be pruned at all; None if they can."""
        if sparsity == Sparsity():
            return None
        derived = (reason for one in products if (reason := _derived(path, one.product, one.rhs)) is not None)
        ways = {(one.product.parameter, one.operand) for one in products}
        return next(derived, None) or self._conflict(path, np.shape(value), sparsity, ways)

    def _conflict(
        self, path: str, shape: tuple[int, ...], sparsity: Sparsity, ways: Iterable[tuple[Parameter, Operand]]
    ) -> str | None:
        """Return the reason why the ways in which products take a parameter exclude each other; None if they do not."""
        axes = {parameter.contracted(shape, operand.contract) for parameter, operand in ways}
        if len(axes) > 1 and sparsity.y_w != identity and not self.mask_per_product:
            meant = "" if has_state(sparsity) else ". If each shall have a mask of its own, set mask_per_product=True"
            return (
                f"products contract different axes of this parameter, of shape {shape}, so each would prune it with "
                f'another mask, and it would have no final form. Leave it dense: (r"{path}", "dense"){meant}.'
            )
        layouts = {(parameter.steps, operand) for parameter, operand in ways}
        stacks = {parameter.stack(shape) for parameter, _ in ways}
        if (len(layouts) > 1 and has_state(sparsity)) or (len(stacks) > 1 and needs_arrays(sparsity)):
            return (
                f"{sparsity} keeps arrays for this parameter, and products take it in {len(layouts)} different "
                "layouts. Give it a method without state, noise and schedule, such as ste(2,4)."
            )
        return None

    def _weight_state(self, path: str, value: Any, products: list[ShapedProduct], others: list[str]) -> WeightState:
        sparsity, first = self._fitted(path, products)[0], products[0]
        layouts = {(one.product.parameter.steps, one.operand) for one in products}
        origin = Origin(first.product.parameter, first.operand, sparsity, len(layouts) > 1, tuple(others))
        return WeightState.new(origin, value, self.seed).renewed(value)

    # ---- time and state ----

    def set_step(self, params: Any, state: Mapping[str, WeightState], step: Any, micro: Any = 0) -> State:
        """Return the sparsity state of a step. Call it once a (micro-)step, outside the loss.

        Args:
          params: The tree of parameters.
          state: What `init` or `set_step` returned.
          step: The step of training, an integer.
          micro: The micro-step of gradient accumulation, an integer.

        Raises:
          TypeError: ``step`` or ``micro`` is not an integer.
        """
        now, values = moment(step, micro), _known(params, state)
        return {path: weight_state.at(values[path], now) for path, weight_state in state.items()}

    def observe(self, params: Any, state: Mapping[str, WeightState], gradients: Any) -> State:
        """Return the sparsity state after the gradients of a step, by which some pruners choose weights.

        They are `nmjax.saliency`, `movement`, `fisher` and `regrow`. Call it after the backward pass of each step; of
        micro-batches, with the mean of their gradients.

        Args:
          params: The tree of parameters.
          state: What `init` or `set_step` returned.
          gradients: The gradients of the parameters, a tree of the same paths.

        Raises:
          ValueError: There is no gradient of a weight whose pruner reads it, or it has another shape.
        """
        values, given = _known(params, state), leaves(gradients)
        return {path: weight_state.observed(values[path], given.get(path)) for path, weight_state in state.items()}

    def harden(self, params: Params, state: Mapping[str, WeightState]) -> tuple[Params, State]:
        """Return the parameters in their final form, as inference uses them, and a state that prunes activations only.

        Args:
          params: The tree of parameters.
          state: What `init` or `set_step` returned.

        Raises:
          ValueError: A weight is drawn again at every step, or something else uses it too, so it has no final form.

        Warns:
          UserWarning: The schedule of a method has not ended, so the hardened layers compute something else than at
            this step.
        """
        values, left = _known(params, state), dict(state)
        unfinished = []
        for path, weight_state in state.items():
            final, left[path] = weight_state.hardened(values[path])
            unfinished.append(weight_state.unfinished(values[path], final))
            values[path] = final
        warn_unfinished(unfinished, stacklevel=3)
        return jax.tree.unflatten(jax.tree.structure(params), values.values()), left

    def violations(self, params: Any, state: Mapping[str, WeightState]) -> dict[str, jax.Array | None]:
        """Return the number of groups of each parameter that break the pattern which `harden` promises.

        Args:
          params: The tree of parameters, as `harden` returned it.
          state: What `init` or `set_step` returned, before `harden`.

        Returns:
          A dict from path to a count. None: nothing was checked, because the final form is dense.

        Warns:
          UserWarning: No parameter has an n:m final form, so nothing was checked.
        """
        values = _known(params, state)
        return checked({path: weight_state.broken(values[path]) for path, weight_state in state.items()})

    def plan(self, params: Any, *args: Any, **options: Any) -> Plan:
        """Return what every parameter will do, as `nmjax.nnx.plan` does for the layers of a model.

        One program serves all steps, so the plan has no phases.

        Args:
          params: The tree of parameters, or of their shapes.
          *args: Examples of the other arguments.
          **options: Keyword arguments of the function.

        >>> import nmjax as nm
        >>> f = lambda params, x: jax.nn.softmax(x @ x.T) @ jnp.tanh(x @ params["up"])
        >>> sparse, params = nm.transform(f, nm.Recipe({".*": "ste(2,4)"})), {"up": jnp.ones((8, 16))}
        >>> plan = sparse.plan(params, jnp.ones((4, 8)))
        >>> plan.forward, plan.elsewhere  # FLOPs; x @ x.T and the product with its softmax are elsewhere
        ((1792, 1280.0), 768)
        """
        traced, values = self._traced(params, args, options), leaves(params)
        products, costs = traced.products, traced.costs
        rows = [
            self._row(path, values[path], own, costs.layers[i], i in costs.reading_data)
            for i, (path, own) in enumerate(products.items())
            if own
        ]
        refused = tuple(unused_rules(self.recipe, traced.ruled, of="parameter"))
        uncovered, missed = tuple(traced.unused.items()), tuple(self._missed(traced))
        count, speed = sum(int(np.size(v)) for v in values.values()), speed_of(row.runs for row in rows)
        return Plan(tuple(rows), costs.elsewhere, uncovered, count, refused, missed, speed)

    def _row(
        self, path: str, value: Any, products: list[ShapedProduct], cost: int, reads_data: bool
    ) -> LayerPlan:  # fmt: skip
        shape = tuple(np.shape(value))
        layers = math.prod(products[0].product.parameter.stack(shape))
        uses = [one.use(layers) for one in products]
        refused = self._refused(path, value, fitting_all(self.recipe(path), uses)[0], products)
        return layer_plan(
            path, "parameter", shape, self.recipe(path), uses, backend=self.recipe.backend, cost=cost,
            reads_data=reads_data, refused=refused,
        )  # fmt: skip


def _known(params: Any, state: Mapping[str, WeightState]) -> dict[str, Any]:
    """Return the leaves of a tree by their paths. Refuse the state of parameters that it does not have."""
    values = leaves(params)
    unknown = [path for path in state if path not in values]
    if unknown:
        raise ValueError(
            f"the state is of {', '.join(map(repr, unknown[:4]))}, which params does not have. Pass the same tree of "
            "parameters as to init."
        )
    return values


def _way(parameter: Parameter, operand: Operand) -> tuple[Parameter, Operand]:
    """Return how a product takes a parameter, whatever its dtype."""
    return parameter._replace(steps=moves(parameter.steps)), operand


def _derived(path: str, product: Product, w: Any) -> str | None:
    """Return the reason why a product of a derivative cannot be pruned, and what to write instead; None for others."""
    refusal = product.refusal(w)
    if refusal is None:
        return None
    return (
        f"{refusal}. Transform the function that it differentiates, sparse = nm.transform(inner, recipe), and write "
        f'jax.grad(sparse) in the place of jax.grad(inner). Or leave the parameter dense: (r"{path}", "dense").'
    )


def _refusal(slot: str, sparsity: Sparsity, products: list[ShapedProduct]) -> Any:
    if getattr(sparsity, slot) == identity:
        return None
    return slot_refusal(slot, sparsity, [one.use() for one in products], tokens_known=True)
