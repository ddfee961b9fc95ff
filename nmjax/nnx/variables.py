"""What stands in a layer's door."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nmjax.core.context import Ctx
from nmjax.products import functions, sites
from nmjax.products.sparsity import Sparsity


class NM(nnx.Variable):
    """What sparse layers hold beside their parameters: no gradient, no optimizer. It has the rank of the layer's kernel, so
    that whatever axis stacks or shards the one does so to the other."""


class Site(nnx.Module):
    """A layer's product, pruned. It stands in the layer's own door."""

    def __init__(
        self,
        path: str,
        sparsity: Sparsity,
        product: Callable,
        backend: str,
        rank: int,
        stack,
        words,
        time,
        state,
        ranks,
    ):
        self.path, self.sparsity, self.product, self.backend = path, sparsity, product, backend
        self.rank, self.stack = rank, stack  # of one layer's kernel; and the axes of it that stack layers
        self.words: NM | None = words
        self.time: NM | None = time
        self.state: Any = nnx.data(state)  # a tree of NM, each a pruner's state with axes of 1 at its end ...
        self.ranks = ranks  # ... beyond these
        self.packed: Any = None  # the weight's packed forms, where `packed` gave them

    def __call__(self, *operands, **options):
        kernel = operands[2 if self.product is functions.einsum else 1]
        held = [(self.words, 1), (self.time, 1), *zip(self.variables(), self.ranks, strict=True)]
        off = [v.shape for v, rank in held if v is not None and v.ndim != max(self.rank, rank)]
        off += [v.shape for v in (self.words, self.time) if v is not None and math.prod(v.shape) != 2]
        if kernel.ndim != self.rank or off:
            raise ValueError(
                f"{self.name}: reached with a kernel of shape {kernel.shape} and {f'an NM of shape {off[0]}' if off else 'no NM'}, "
                f"where one layer's have {self.rank} axes. This is a stack of layers, of which nnx.Param and nm.nnx.NM are to be "
                "sliced along the same axis: nnx.StateAxes({nnx.Param: 0, nm.nnx.NM: 0, ...: None})."
            )
        if any(v is not None and not jnp.issubdtype(v.dtype, jnp.integer) for v in (self.words, self.time)):
            raise TypeError(f"{self.name}: its noise or time was averaged. Average nnx.state(model, nnx.Param) alone.")
        context = {"sparsity": self.sparsity, "ctx": self.ctx(), "backend": self.backend}
        return self.product(*operands, **context, name=self.name, packed=self.forms(), **options)

    @property
    def name(self) -> str:
        return self.path or "the model"

    def ctx(self) -> Ctx:
        """The context of one layer's product."""
        return one_ctx(*self.held(), self.ranks)

    def forms(self) -> dict | None:
        """The weight's packed forms, where `packed` gave them."""
        return jax.tree.map(lambda v: v[...], self.packed, is_leaf=lambda v: isinstance(v, NM))

    def held(self) -> tuple:
        """Words, time and state as arrays, of one layer or of a stack."""
        value = lambda v: None if v is None else v[...]
        return value(self.words), value(self.time), self.values()

    def values(self):
        """The state as arrays, of one layer or of a stack; None where there is none."""
        return jax.tree.map(lambda v: v[...], self.state, is_leaf=lambda v: isinstance(v, NM))

    def variables(self) -> list[NM]:
        """The parts of the state."""
        return jax.tree.leaves(self.state, is_leaf=lambda v: isinstance(v, NM))


def one_ctx(words, time, state, ranks: tuple[int, ...]) -> Ctx:
    """The context of one layer, out of what it holds."""
    time = None if time is None else time.reshape(2)
    key = None if words is None else sites.site_key(words.reshape(2), time[1])
    return Ctx(key, None if time is None else time[0], None if state is None else in_rank(state, ranks))


def in_rank(state, ranks: tuple[int, ...]):
    """The state of one layer, every part in its own rank."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [v.reshape(v.shape[:rank]) for v, rank in zip(leaves, ranks, strict=True)])


def write(variable: nnx.Variable, value: jax.Array) -> None:
    """Replace a value, and leave it where it was: assigning through an index would scatter into it."""
    old = variable.get_value()
    traced = isinstance(value, jax.core.Tracer) or isinstance(old, jax.core.Tracer)
    if not traced:
        value = jax.device_put(value, old.sharding)
    elif jax.typeof(value).sharding != (where := jax.typeof(old).sharding) and not where.mesh.empty:
        value = jax.sharding.reshard(value, where)
    variable.set_value(value)
