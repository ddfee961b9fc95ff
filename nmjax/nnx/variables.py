"""The pruned product that `sparsify` puts into a layer (a `SparsityState`), and its variables (`SparsityVariable`)."""

import math
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib
from jax import lax

from nmjax.core.context import Ctx
from nmjax.products import rule
from nmjax.products.activated import activated_dot
from nmjax.products.fit import assuming_features_fit
from nmjax.products.forms import Form, FormKey
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import moves
from nmjax.programs.rewriting import Product
from nmjax.programs.states import Origin, context, first
from nmjax.pruners import identity


class SparsityVariable(nnx.Variable[jax.Array]):
    """The variable type of all that a sparse layer holds in addition to its parameters: noise words, time and state.

    These variables have no gradient, and optimizers do not change them. They have the rank of the layer's kernel, so
    they can be stacked and sharded along the same axes. Use the type in filters, and in the axes of `nnx.scan` and
    `nnx.vmap`::

        nnx.StateAxes({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None})

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "mvue(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> print(*sorted(path[-1] for path, _ in nnx.to_flat_state(nnx.state(model, nm.nnx.SparsityVariable))))
    time words
    """


class SparsityState(nnx.Module):
    """The sparsity of a layer, in its attribute ``nm_state``.

    Attributes:
      sparsity: The pruner of each slot.
      words: Two uint32 words from which the layer draws its random numbers; None if it draws none.
      time: The step and the micro-step; None if nothing depends on them.
      state: The arrays that slots keep, such as a held mask of the weight's shape, by slot; None if they keep none.
      phase: The first step of the phase that `nmjax.nnx.phase` has set; None if it has set none.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> model.nm_state
    SparsityState(
      y_w=ste(mse(2,4))
    )
    """

    def __init__(
        self,
        origin: Origin,
        backend: str,
        rank: int,
        stack: tuple[int, ...],
        example: Any = None,
    ) -> None:
        """Make a state without variables.

        Args:
          origin: The weight of one layer.
          backend: The backend, as in `Recipe`.
          rank: The number of axes of one layer's kernel.
          stack: The axes of the kernel that stack layers.
          example: The `Example` of the layer's product; None if only a call says which it is.
        """
        self.origin, self.example = nnx.static(origin), nnx.static(example)
        self.phase: int | None = None  # the first step of the phase that `nmjax.nnx.phase` has set
        self.backend = backend
        self.rank, self.stack = rank, stack
        self.words: SparsityVariable | None = None
        self.time: SparsityVariable | None = None
        # A tree of SparsityVariable: the pruners' states, padded with axes of size 1 to the kernel's rank.
        self.state: Any = nnx.data(None)
        self.ranks: tuple[int, ...] = ()  # the rank of each part of the state before padding
        self.packed: Any = None  # the weight's forms for kernels, inside `packed`

    def activated(self, activation: Callable[[jax.Array], jax.Array], layer: Any, x: jax.Array) -> jax.Array:
        """Return ``activation(layer(x))``, for `nmjax.fused`. ``layer`` is a layer with this state."""
        linear = vars(type(layer)).get("_nm_dense") is nnx.Linear and layer.dot_general is lax.dot_general
        if not linear:
            return activation(layer(x))
        kernel, bias = layer.kernel[...], None if layer.bias is None else layer.bias[...]
        x, kernel, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
        self.check_one_layer(kernel.shape)
        with jax.named_scope(self.name):
            return activated_dot(
                activation, x, kernel, bias, precision=layer.precision,
                preferred_element_type=layer.preferred_element_type, sparsity=self.now, ctx=self.ctx(),
                backend=self.backend, name=self.name, packed=self.forms(),
            )  # fmt: skip

    def _multiply(self, product: Product, x: jax.Array, w: jax.Array) -> jax.Array:
        """Return the pruned product of an operand and the weight, as a layer's method asks for it."""
        refusal = product.refusal(w)
        if refusal is not None:
            raise ValueError(f"{self.name}: {refusal}. Take the derivative outside the registered method.")
        asked = (product.op.operands(x.ndim, w.ndim)["y_w"], product.parameter.steps)
        known = self.example and (
            self.example.op.operands(self.example.lhs.ndim, self.example.rhs.ndim)["y_w"], self.example.steps
        )  # fmt: skip
        if known and (asked[0], moves(asked[1])) != (known[0], moves(known[1])):
            raise ValueError(
                f"{self.name}: the call contracts axes {asked[0].contract} of an operand of shape {w.shape}, but for "
                f"the registered input it was axes {known[0].contract} of {self.example.rhs.shape}. Give "
                "register_layer an input of the same kind as the call, or pass sparsify examples of the model's inputs."
            )
        with jax.named_scope(self.name):
            return rule.bilinear(
                product.op,
                x,
                w,
                self.now,
                self.ctx(),
                self.backend,
                name=self.name,
                extra=product.extra,
                packed=self.forms(),
            )

    def __nnx_repr__(self) -> Generator[reprlib.Object | reprlib.Attr, None, None]:
        """Yield what Flax prints of a state: its slots, a backend that was chosen, and the variables that it has."""
        yield reprlib.Object(type=type(self))
        for name in SLOTS:
            if getattr(self.now, name) != identity:
                yield reprlib.Attr(name, getattr(self.now, name))
        if self.backend != "auto":
            yield reprlib.Attr("backend", self.backend)
        for name, variables in (("words", self.words), ("time", self.time), ("state", self.state)):
            if variables is not None:
                values = [v.get_value() for v in jax.tree.leaves(variables, is_leaf=_is_variable)]
                yield reprlib.Attr(name, ", ".join(map(_short, values)), use_raw_value=True)

    def check_one_layer(self, kernel: tuple[int, ...]) -> None:
        """Raise an error if the layer is a stack of layers, or if its noise words or its time are not integers."""
        ranked = [(self.words, 1), (self.time, 1), *zip(self.variables, self.ranks, strict=True)]
        stacked = [v.shape for v, rank in ranked if v is not None and v.ndim != max(self.rank, rank)]
        stacked += [v.shape for v in (self.words, self.time) if v is not None and math.prod(v.shape) != 2]
        if len(kernel) != self.rank or stacked:
            variable = f" and a SparsityVariable of shape {stacked[0]}" if stacked else ""
            raise ValueError(
                f"{self.name}: its product got a kernel of shape {kernel}{variable}, but those of one layer have "
                f"{self.rank} axes. The model is a stack of layers: slice nnx.Param and nm.nnx.SparsityVariable along "
                "the same axis, nnx.StateAxes({nnx.Param: 0, nm.nnx.SparsityVariable: 0, ...: None}). If sparsify took "
                "the stack for one layer, name its axis: sparsify(..., stack=0)."
            )
        if any(v is not None and not jnp.issubdtype(v.dtype, jnp.integer) for v in (self.words, self.time)):
            raise TypeError(
                f"{self.name}: its noise words or its time are not integers, for example because they were averaged. "
                "Average nnx.state(model, nnx.Param) only."
            )

    @property
    def now(self) -> Sparsity:
        """The method of the layer's products: in the phase that `nmjax.nnx.phase` has set, or at all steps."""
        return self.sparsity if self.phase is None else assuming_features_fit(self.sparsity).at(self.phase)

    @property
    def sparsity(self) -> Sparsity:
        """The pruner of each slot."""
        return self.origin.sparsity

    @property
    def name(self) -> str:
        """The layer's path, for errors."""
        return self.origin.name

    def ctx(self) -> Ctx:
        """Return the context of one layer's product."""
        return context(*self.arrays(()))

    def forms(self) -> dict[FormKey, Form] | None:
        """Return the weight's forms that `packed` gave, or None."""
        return jax.tree.map(lambda v: v[...], self.packed, is_leaf=_is_variable)

    def arrays(self, stack: tuple[int, ...]) -> tuple[jax.Array | None, jax.Array | None, Any]:
        """Return words, time and state of a layer or of a stack, without padding, the axes that stack layers first."""
        ranks = iter(self.ranks)
        value = lambda v, rank: first(v.get_value(), stack, rank)  # v[...] would be an operation of its own
        words, time = (None if v is None else value(v, 1) for v in (self.words, self.time))
        return words, time, jax.tree.map(lambda v: value(v, next(ranks)), self.state, is_leaf=_is_variable)

    @property
    def variables(self) -> list[SparsityVariable]:
        """The variables of the state."""
        return jax.tree.leaves(self.state, is_leaf=_is_variable)


def _is_variable(v: Any) -> bool:
    return isinstance(v, SparsityVariable)


def _short(value: Any) -> str:
    """Return an array as its dtype and shape, and any other value as it prints."""
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") and hasattr(value, "shape") else repr(value)


def write(variable: nnx.Variable[jax.Array], value: jax.Array) -> None:
    """Replace a variable's value, and keep its sharding. ``variable[...] = value`` would compile to a scatter."""
    old = variable.get_value()
    if not isinstance(value, jax.core.Tracer) and not isinstance(old, jax.core.Tracer):
        # A device_put commits an array to its device, and a program that got it uncommitted would compile once more.
        if isinstance(old, jax.ShapeDtypeStruct) or (isinstance(old, jax.Array) and old.committed):
            value = jax.device_put(value, old.sharding)
    else:
        sharding = jax.typeof(old).sharding
        if jax.typeof(value).sharding != sharding and not sharding.mesh.empty:
            value = jax.sharding.reshard(value, sharding)
    variable.set_value(value)


def unhardened(model: Any) -> str | None:
    """Return the path of a product that still prunes its weight, or None. A hardened model may prune activations."""
    sparse = lambda v: isinstance(v, SparsityState) and v.sparsity.y_w != identity
    return next(("/".join(map(str, path)) for path, node in nnx.iter_graph(model) if sparse(node)), None)
