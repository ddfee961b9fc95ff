"""The context `sparsify`, which prunes the layers of flax.linen models."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn, traverse_util

from nmjax.linen.layer import Call
from nmjax.linen.registry import Weight, weights_of
from nmjax.products.sparsity import Sparsity
from nmjax.recipes.missed import Missed, report
from nmjax.recipes.table import Recipe

Path = tuple[str, ...]
NO_LAYERS = (
    "has no registered layer, so nothing would be pruned. Register its layers: "
    "nm.linen.register_layer(..., weight=...)."
)
ACTIVE = threading.local()  # Flax keeps interceptors for each thread
RECIPE = jax.make_user_context(None)  # what is compiled under one recipe is not run under another


class Reached:
    """The parameters of a model that is initializing, and those of registered layers.

    Attributes:
      matrices: The parameters of two axes or more in one layer: path -> (shape, class of the module).
      by_layer: The parameters of registered layers: path -> the path of the layer, as rules match it.
    """

    def __init__(self) -> None:
        self.matrices: dict[Path, tuple[tuple[int, ...], str]] = {}
        self.by_layer: dict[Path, str] = {}

    def note(self, module: nn.Module) -> None:
        """Note the parameters of a module. The bias of a registered layer is left out.

        A stack calls this for one layer first, so the first shape counts.
        """
        assert module.scope is not None
        is_registered = bool(weights_of(module))
        for name, value in module.scope.variables().get("params", {}).items():
            leaves = jax.tree.leaves(value)
            alone = len(leaves) == 1 and not hasattr(value, "items")
            if alone and leaves[0].ndim > 1 and not (name == "bias" and is_registered):
                found = tuple(leaves[0].shape), type(module).__name__
                self.matrices.setdefault((*module.path, name), found)

    def recall(self, model: nn.Module, earlier: "Reached") -> None:
        """Note the parameters of modules that were not called, since nn.jit had compiled them, as ``earlier`` did."""
        assert model.scope is not None
        params = traverse_util.flatten_dict(model.scope.variables().get("params", {}))
        unseen = {(*model.path, *path) for path in params} - {*self.matrices, *self.by_layer}
        self.matrices |= {path: of for path, of in earlier.matrices.items() if path in unseen}
        self.by_layer |= {path: of for path, of in earlier.by_layer.items() if path in unseen}

    def keep(self, later: "Reached") -> None:
        """Take the notes of a later call. They count where both have a parameter."""
        for path in later.matrices:
            self.by_layer.pop(path, None)
        self.matrices |= later.matrices
        self.by_layer |= later.by_layer

    def missed(self, recipe: Recipe) -> list[Missed]:
        """Return the matrices that a rule matches and no registered layer has."""
        left = {"/".join(path): v for path, v in self.matrices.items() if path not in self.by_layer}
        return [Missed(path, *v) for path, v in left.items() if recipe.of_parameter(path) != Sparsity()]

    @property
    def layers(self) -> list[str]:
        """The paths of the registered layers."""
        return [*dict.fromkeys(self.by_layer.values())]

    @property
    def paths(self) -> list[str]:
        """The paths that rules may match: of layers, of matrices outside them, and of their modules."""
        others = [path[:n] for path in self.matrices if path not in self.by_layer for n in range(len(path) + 1)]
        return [*self.layers, *dict.fromkeys("/".join(path) for path in others)]


NOTES: dict[tuple[Recipe, int, bool], Reached] = {}  # what nn.jit has compiled under a recipe is not traced again


class Delivery:
    """The interceptor of `sparsify`."""

    def __init__(self, recipe: Recipe, seed: int, strict: bool) -> None:
        self.recipe, self.seed, self.strict = recipe, seed, strict
        self.depth = 0
        self.running: list[tuple[nn.Module, tuple[Weight, ...], Path]] = []  # registered layers, and their copies
        self.reached = Reached()
        self.earlier = NOTES.setdefault((recipe, seed, strict), Reached())

    def __call__(
        self, next_fun: Callable[..., Any], args: Any, options: Any, context: nn.module.InterceptorContext
    ) -> Any:  # fmt: skip
        """Return the result of a method, computed with pruned products if the module is registered."""
        module, method = context.module, context.method_name
        # A method that Flax has lifted, as nn.scan does, has no name here. It calls the plain one.
        is_method = method != "setup" and callable(getattr(type(module), method, None)) and module.scope is not None
        outermost, self.depth = not self.depth and is_method, self.depth + 1
        try:
            y = self._result(next_fun, args, options, module, method) if is_method else next_fun(*args, **options)
            if module.scope is not None and module.is_initializing():
                self.reached.note(module)
                if outermost:
                    self.reached.recall(module, self.earlier)
                    self._report(module)
            return y
        finally:
            self.depth -= 1
            if not self.depth:
                self.earlier.keep(self.reached)
                self.reached = Reached()

    def _result(self, next_fun: Callable[..., Any], args: Any, options: Any, module: nn.Module, method: str) -> Any:
        weights = () if any(module is other for other, _, _ in self.running) else weights_of(module)
        self.reached.by_layer |= {(*module.path, weight.name): weight.path for weight in weights}
        if not weights:
            return next_fun(*args, **options)
        self._check_apart(module, weights)
        before = len(self.running)
        run = lambda copy: self.running.append((copy, weights, module.path))
        run(module)
        try:
            return self._pruned(next_fun, Call(module, weights, method, args, options, run))
        finally:
            del self.running[before:]

    def _pruned(self, next_fun: Callable[..., Any], call: Call) -> Any:
        """Return the result of a call of a registered layer."""
        initializing, uses, made = call.module.is_initializing(), None, None
        if initializing:
            made = next_fun(*call.args, **call.options)  # it makes the parameters
            uses = call.uses()
            if call.method != "__call__":  # another method may leave the weights to __call__
                uses = {name: one for name, one in uses.items() if one.products}
        elif not all(call.module.has_variable("params", weight.name) for weight in call.weights):
            return next_fun(*call.args, **call.options)
        variables = call.variables(uses, self.recipe, self.seed)
        if all(variable.sparsity == Sparsity() for variable in variables.values()):
            return made if initializing else next_fun(*call.args, **call.options)
        return call.pruned(variables, self.recipe.backend, initializing)

    def _check_apart(self, module: nn.Module, weights: tuple[Weight, ...]) -> None:
        """Refuse a parameter of two registered layers: its own, and one around that."""
        for _, others, path in self.running:
            for one in weights:
                twice = [other for other in others if (*path, other.name) == (*module.path, one.name)]
                if twice and self.recipe(one.path) != Sparsity():
                    value = module.variables["params"][one.name] if module.has_variable("params", one.name) else None
                    shape = tuple(jax.tree.leaves(value)[0].shape) if value is not None else "not known yet"
                    raise ValueError(
                        f"{one.path or 'the model'}: two registered layers have the parameter {one.name} of shape "
                        f"{shape}: {one}, and {twice[0]} of the layer around it. Register one of them."
                    )

    def _report(self, model: nn.Module) -> None:
        """Refuse rules without a layer, and report parameters outside registered layers, at the end of init."""
        self.recipe.check(self.reached.paths)
        if not self.reached.by_layer and any(sparsity != Sparsity() for _, sparsity in self.recipe.rules):
            raise ValueError(f"{type(model).__name__} {NO_LAYERS}")
        missed = self.reached.missed(self.recipe)
        report(missed, "nm.linen.register_layer", self.reached.layers, self.strict, stacklevel=_frames_to_caller())


def _frames_to_caller() -> int:
    """Return the number of frames from the function that calls this one to the first that is not of Flax or JAX."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "flax",
        "jax",
        "nmjax",
    ):
        frame, count = frame.f_back, count + 1
    return count


@contextmanager
def sparsify(recipe: Recipe, *, seed: int = 0, strict: bool = False) -> Iterator[None]:
    """Prune the layers of every model that runs inside the context, as a recipe says for their paths.

    The model takes no argument for it and does not change. Inside the context, ``model.init`` makes the collection
    "nm", and ``model.apply`` computes with pruned products. Use the context around both, also inside functions that
    `jax.jit` compiles. It prunes nn.Dense, nn.DenseGeneral (also inside attention), nn.Einsum, nn.Conv,
    nn.ConvTranspose and the layers of classes that `register_layer` was given.

    ``init`` warns of every parameter of two axes or more that a rule matches and no registered layer has. Enter other
    interceptors inside this context. Interceptors around it see calls of pruned layers twice.

    Args:
      recipe: The sparsity of each layer, by its path.
      seed: The seed of all noise, an int.
      strict: True to raise an error in place of that warning.

    Raises:
      TypeError: ``recipe`` is no Recipe, or ``seed`` no int.
      ValueError: The context is inside another one; in ``init``, a rule matches no layer, or a layer cannot follow its
        rule.

    >>> import jax.numpy as jnp
    >>> import nmjax as nm
    >>> model, x = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)]), jnp.ones((8, 8))
    >>> recipe = nm.Recipe({r"layers_0": "s_ste(2,4)"})
    >>> with nm.linen.sparsify(recipe):
    ...     variables = model.init(jax.random.key(0), x)
    >>> variables = nm.linen.set_step(variables, 1)  # once a step, outside the loss
    >>> with nm.linen.sparsify(recipe):
    ...     y = model.apply(variables, x)
    >>> hard = nm.linen.harden(variables)
    >>> bool(jnp.allclose(model.apply({"params": hard["params"]}, x), y))
    True
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"sparsify takes a Recipe, such as Recipe({{r'.*': 's_ste(2,4)'}}), got {recipe!r}.")
    if not isinstance(seed, int):  # it is part of the compiled program, so it can be no array and no key
        raise TypeError(f"sparsify: seed must be a whole number, such as seed=0, got {seed!r}.")
    if getattr(ACTIVE, "delivery", None) is not None:
        raise ValueError("sparsify is inside another sparsify. Put the rules of both into one recipe.")
    delivery = Delivery(recipe, seed, strict)
    ACTIVE.delivery = delivery
    try:
        with RECIPE((recipe, seed, strict)), nn.intercept_methods(delivery):
            yield
    finally:
        ACTIVE.delivery = None
