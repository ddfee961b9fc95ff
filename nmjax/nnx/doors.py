"""The layers of a model that have doors: where a product is kept, and what its kernel looks like."""

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nmjax.nnx.variables import Site
from nmjax.products import functions
from nmjax.products.operations import Conv, Dot, einsum_dims, einsum_labels
from nmjax.products.pruning import Operand
from nmjax.products.sparsity import Sparsity


class Door(NamedTuple):
    """Where a layer keeps its product, what may stand there already, and ours."""

    name: str
    plain: Callable
    product: Callable


DOORS = {
    nnx.Linear: Door("dot_general", lax.dot_general, functions.dot_general),
    nnx.LinearGeneral: Door("dot_general", lax.dot_general, functions.dot_general),
    nnx.Einsum: Door("einsum_op", jnp.einsum, functions.einsum),
    nnx.Conv: Door("conv_general_dilated", lax.conv_general_dilated, functions.conv_general_dilated),
}


class Example(NamedTuple):
    """An operation and the shapes of its operands."""

    op: Any
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct


class Layer(NamedTuple):
    """A layer that has a door."""

    path: str
    module: nnx.Module
    door: Door

    @property
    def site(self) -> Site | None:
        found = getattr(self.module, self.door.name)
        return found if isinstance(found, Site) else None

    @property
    def sparsity(self) -> Sparsity:
        return Sparsity() if self.site is None else self.site.sparsity

    @property
    def declared(self) -> tuple[int, ...]:
        """The shape of one layer's kernel."""
        m = self.module
        if isinstance(m, nnx.Linear):
            return (m.in_features, m.out_features)
        if isinstance(m, nnx.LinearGeneral):
            return (*m.batch_axis.values(), *m.in_features, *m.out_features)
        return tuple(m.kernel_shape)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """The axes of the kernel that may stack layers: those without which it is as declared. The first ones come first."""
        shape, declared = tuple(self.module.kernel.shape), self.declared
        ways = combinations(range(len(shape)), max(0, len(shape) - len(declared)))
        found = [way for way in ways if tuple(n for a, n in enumerate(shape) if a not in way) == declared]
        if not found:
            raise ValueError(
                f"{self.path}: the kernel has shape {shape}, which is not {declared}, as the layer declares it, with axes of "
                "a stack beside. Give the layer a kernel of its own shape."
            )
        return found

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes of the kernel that stack layers."""
        told = None if self.site is None else self.site.stack
        return told if told in self.stacks else self.stacks[0]  # inside a scan, one layer of the stack is no stack

    def example(self, tokens: int) -> "Example | None":
        """One layer's product, of as many tokens; None where only a call says what it is."""
        m, shape, dtype = self.module, self.declared, self.dtype
        if isinstance(m, nnx.Linear):
            dims, lhs = (((1,), (0,)), ((), ())), (tokens, shape[0])
        elif isinstance(m, nnx.LinearGeneral):
            batch, inward = len(m.batch_axis), len(m.in_features)
            batches, contracted = tuple(range(batch)), tuple(range(batch, batch + inward))
            dims = ((tuple(a + 1 for a in contracted), contracted), (batches, batches))
            lhs = (*shape[:batch], tokens, *shape[batch : batch + inward])
        elif isinstance(m, nnx.Einsum):
            if m.einsum_str is None:
                return None
            left = m.einsum_str.split(",")[0]
            rank = len(left.replace("...", "."))
            labels, kernel, _ = einsum_labels(m.einsum_str, rank, len(shape))
            sizes = dict(zip(kernel, shape, strict=True))
            dims, lhs = einsum_dims(m.einsum_str, rank, len(shape))[0], tuple(sizes.get(c, tokens) for c in labels)
        else:
            ndim = len(shape)
            images, kernels = (0, ndim - 1, *range(1, ndim - 1)), (ndim - 1, ndim - 2, *range(ndim - 2))
            numbers, once = lax.ConvDimensionNumbers(images, kernels, images), (1,) * (ndim - 2)
            op = Conv(once, "SAME", None, None, numbers, m.feature_group_count, 1, None, None, None)
            lhs = (tokens, *shape[:-2], m.in_features)
        if not isinstance(m, nnx.Conv):
            op = Dot(dims, None, None, None)
        return Example(op, jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(shape, dtype))

    @property
    def operand(self) -> Operand | None:
        """The axes of one layer's kernel that its product contracts and leaves."""
        product = self.example(1)
        return None if product is None else product.op.operands(product.lhs.ndim, product.rhs.ndim)["fwd_rhs"]

    @property
    def dtype(self):
        """What the layer computes in, for inputs that do not widen it."""
        kernel = self.module.kernel
        return jax.eval_shape(self._promoted, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)).dtype

    def weight(self) -> jax.Array:
        """The kernel as its product sees it."""
        kernel = self.module.kernel[...]
        mask = getattr(self.module, "mask", None)
        return self._promoted(kernel if mask is None else kernel * mask)

    def _promoted(self, kernel):
        return self.module.promote_dtype((kernel, kernel, None), dtype=self.module.dtype)[1]


def layers(model: nnx.Module) -> Iterator[Layer]:
    """Every layer with a door, once, in the order of its path."""
    if not isinstance(model, nnx.Pytree | tuple | list):
        raise TypeError(f"an nnx.Module is wanted, got {type(model).__name__}. For flax.linen there is nm.linen.")
    found = []
    for path, module in nnx.iter_modules(model):
        door = next((door for kind, door in DOORS.items() if isinstance(module, kind)), None)
        if door is not None:
            found.append(Layer("/".join(map(str, path)), module, door))
    return iter(sorted(found, key=lambda layer: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", layer.path)]))


def over(stack: tuple[int, ...], f: Callable) -> Callable:
    """A function of one layer's arrays, which have the kernel's rank, as one of a stack's."""
    for axis in stack:
        f = jax.vmap(f, in_axes=axis, out_axes=axis)
    return f
