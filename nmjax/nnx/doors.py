"""The layers of a model that have a door, and the kernel and the product of each.

A door is the attribute in which a Flax layer keeps its product.
"""

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
from nmjax.products.operations import Conv, Dot, Operation, einsum_dims, einsum_labels
from nmjax.products.pruning import Operand
from nmjax.products.sparsity import Sparsity

Shape = tuple[int, ...]


class Door(NamedTuple):
    """The attribute in which a kind of layer keeps its product.

    Attributes:
      name: The attribute.
      plain: The function that Flax puts there.
      product: The pruned product that takes its place.
    """

    name: str
    plain: Callable[..., jax.Array]
    product: Callable[..., jax.Array]


DOORS: dict[type, Door] = {
    nnx.Linear: Door("dot_general", lax.dot_general, functions.dot_general),
    nnx.LinearGeneral: Door("dot_general", lax.dot_general, functions.dot_general),
    nnx.Einsum: Door("einsum_op", jnp.einsum, functions.einsum),
    nnx.Conv: Door("conv_general_dilated", lax.conv_general_dilated, functions.conv_general_dilated),
}


class Example(NamedTuple):
    """An operation and the shapes of its operands."""

    op: Operation
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct


class Layer(NamedTuple):
    """A layer that has a door.

    Attributes:
      path: Its path in the model, such as "blocks/0/mlp/up".
      module: The layer: an nnx.Linear, LinearGeneral, Einsum or Conv.
      door: Its door.
    """

    path: str
    module: Any
    door: Door

    @property
    def site(self) -> Site | None:
        """The site that `sparsify` put into the door; None if the layer is dense."""
        product = getattr(self.module, self.door.name)
        return product if isinstance(product, Site) else None

    @property
    def sparsity(self) -> Sparsity:
        """The sparsity of the layer; all slots are empty if it is dense."""
        return Sparsity() if self.site is None else self.site.sparsity

    @property
    def declared(self) -> Shape:
        """The shape of one layer's kernel, as the layer was declared."""
        m = self.module
        if isinstance(m, nnx.Linear):
            return (m.in_features, m.out_features)
        if isinstance(m, nnx.LinearGeneral):
            return (*m.batch_axis.values(), *m.in_features, *m.out_features)
        return tuple(m.kernel_shape)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """The axes of the kernel that may stack layers: without them it has the declared shape. Leading axes first."""
        shape, declared = tuple(self.module.kernel.shape), self.declared
        ways = combinations(range(len(shape)), max(0, len(shape) - len(declared)))
        fitting = [way for way in ways if tuple(n for a, n in enumerate(shape) if a not in way) == declared]
        if not fitting:
            raise ValueError(
                f"{self.path}: the kernel has shape {shape}, which is not {declared}, the shape that the layer "
                "declares, nor a stack of such kernels. Give the layer a kernel of its own shape."
            )
        return fitting

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes of the kernel that stack layers."""
        at_site = None if self.site is None else self.site.stack
        return at_site if at_site in self.stacks else self.stacks[0]  # inside a scan, one layer is no stack

    def example(self, tokens: int) -> Example | None:
        """Return one layer's product on so many tokens; None if only a call says which product it is.

        The tokens of a linear layer are positions of one sequence, because pruners may use axes of space.
        """
        m, shape, dtype = self.module, self.declared, self.dtype
        if isinstance(m, nnx.Linear):
            op, lhs = _dot((((2,), (0,)), ((), ()))), (1, tokens, shape[0])
        elif isinstance(m, nnx.LinearGeneral):
            op, lhs = _linear_general(m, shape, tokens)
        elif isinstance(m, nnx.Conv):
            op, lhs = _conv(m, shape, tokens)
        elif m.einsum_str is None:
            return None
        else:
            op, lhs = _einsum(m.einsum_str, shape, tokens)
        return Example(op, jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(shape, dtype))

    @property
    def operand(self) -> Operand | None:
        """The roles of the axes of one layer's kernel; None if only a call says which product it is."""
        product = self.example(1)
        return None if product is None else product.op.operands(product.lhs.ndim, product.rhs.ndim)["fwd_rhs"]

    @property
    def dtype(self) -> Any:
        """The dtype that the layer computes in, if its inputs do not widen it."""
        kernel = self.module.kernel
        return jax.eval_shape(self._promoted, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)).dtype

    def weight(self) -> jax.Array:
        """Return the kernel as the product gets it."""
        kernel = self.module.kernel[...]
        mask = getattr(self.module, "mask", None)
        return self._promoted(kernel if mask is None else kernel * mask)

    def _promoted(self, kernel: jax.Array) -> jax.Array:
        return self.module.promote_dtype((kernel, kernel, None), dtype=self.module.dtype)[1]


def _dot(dims: Any) -> Dot:
    return Dot(dims, None, None, None)


def _linear_general(m: nnx.LinearGeneral, shape: Shape, tokens: int) -> tuple[Operation, Shape]:
    """Return the operation of a LinearGeneral, and the shape of its input."""
    batch, inward = len(m.batch_axis), len(m.in_features)
    batches, contracted = tuple(range(batch)), tuple(range(batch, batch + inward))
    dims = ((tuple(a + 2 for a in contracted), contracted), (batches, batches))
    return _dot(dims), (*shape[:batch], 1, tokens, *shape[batch : batch + inward])


def _einsum(spec: str, shape: Shape, tokens: int) -> tuple[Operation, Shape]:
    """Return the operation of an einsum, and the shape of its input."""
    rank = len(spec.split(",")[0].replace("...", "."))
    labels, kernel, _ = einsum_labels(spec, rank, len(shape))
    sizes = dict(zip(kernel, shape, strict=True))
    return _dot(einsum_dims(spec, rank, len(shape))[0]), tuple(sizes.get(c, tokens) for c in labels)


def _conv(m: nnx.Conv, shape: Shape, tokens: int) -> tuple[Operation, Shape]:
    """Return the operation of a convolution, and the shape of its input: as many images of one kernel's size."""
    ndim = len(shape)
    images, kernels = (0, ndim - 1, *range(1, ndim - 1)), (ndim - 1, ndim - 2, *range(ndim - 2))
    numbers, once = lax.ConvDimensionNumbers(images, kernels, images), (1,) * (ndim - 2)
    op = Conv(once, "SAME", None, None, numbers, m.feature_group_count, 1, None, None, None)
    return op, (tokens, *shape[:-2], m.in_features)


def layers(model: Any) -> Iterator[Layer]:
    """Return every layer with a door once, in the order of the paths, numbers by value.

    Raises:
      TypeError: If the model is not one of flax.nnx.
    """
    if not isinstance(model, (nnx.Pytree, tuple, list)):
        raise TypeError(f"expected an nnx.Module, got {type(model).__name__}. For flax.linen models use nm.linen.")
    tree: Any = model  # iter_modules takes tuples and lists too, though its annotation does not say so
    with_doors: list[Layer] = []
    for path, module in nnx.iter_modules(tree):
        door = next((door for kind, door in DOORS.items() if isinstance(module, kind)), None)
        if door is not None:
            with_doors.append(Layer("/".join(map(str, path)), module, door))
    by_number = lambda layer: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", layer.path)]
    return iter(sorted(with_doors, key=by_number))


def over(stack: tuple[int, ...], f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a whole stack's arrays.

    Args:
      stack: The axes that stack layers.
      f: A function of one layer's arrays, which have the kernel's rank.
    """
    for axis in stack:
        f = jax.vmap(f, in_axes=axis, out_axes=axis)
    return f
