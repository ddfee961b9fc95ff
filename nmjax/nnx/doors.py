"""Layers that keep their product in an attribute, the door: those of Flax, and two of `nmjax.models`."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nmjax.analysis.patterns import Pattern
from nmjax.models.moe import Experts
from nmjax.models.transformer import Scores
from nmjax.nnx.variables import Site
from nmjax.products import functions
from nmjax.products.operations import Conv, Dot, Operation, RaggedDot, einsum_dims, einsum_labels
from nmjax.products.pruning import Operand
from nmjax.products.sparsity import Sparsity
from nmjax.programs.parameters import Parameter, Step
from nmjax.programs.sites import Origin

Shape = tuple[int, ...]


class Door(NamedTuple):
    """The attribute in which a kind of layer keeps its product.

    Attributes:
      name: The attribute.
      plain: The dense function that the layer puts there.
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
    Experts: Door("ragged_dot", lax.ragged_dot, functions.ragged_dot),
    Scores: Door("einsum_op", jnp.einsum, functions.einsum),
}


class Example(NamedTuple):
    """An operation, the shapes of its operands, and the way from the weight to its operand.

    Attributes:
      op: The operation.
      lhs: The shape of the input.
      rhs: The shape of the operand that is made of the weight.
      steps: The changes of layout that make it. Flax's layers have none: they give the promoted kernel.
    """

    op: Operation
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that has a door.

    Attributes:
      path: Its path in the model, such as "blocks/0/mlp/up".
      module: The layer: an nnx.Linear, LinearGeneral, Einsum or Conv, or the experts of `nmjax.models.MoE`.
      door: Its door.
      called: The product that a call asked it for. Needed only if the layer itself does not say which.
      weight_name: The attribute of the module that holds the weight.
    """

    path: str
    module: Any
    door: Door
    called: Example | None = None
    weight_name: str = "kernel"

    @property
    def has_weight(self) -> bool:
        """True if an operand of the product is a weight."""
        return True

    @property
    def kernel(self) -> Any:
        """The variable of the weight."""
        return getattr(self.module, self.weight_name)

    @property
    def kernel_path(self) -> str:
        """The path of the weight."""
        return f"{self.path}/kernel".lstrip("/")

    @property
    def inside(self) -> Any:
        """The content of the door: the product of Flax, one of the model itself, or what `put` put there."""
        return getattr(self.module, self.door.name)

    def put(self, product: nnx.Module | None) -> None:
        """Put a product into the door. None is Flax's own."""
        inside = nnx.static(self.door.plain) if product is None else nnx.data(product)
        setattr(self.module, self.door.name, inside)

    @property
    def site(self) -> Site | None:
        """The site that `sparsify` put into the door; None if the layer is dense."""
        return self.inside if isinstance(self.inside, Site) else None

    @property
    def plain(self) -> Callable[..., jax.Array] | None:
        """The dense product of the layer: the model's own if it has one, else Flax's."""
        make = getattr(self.module, "dot_general_cls", None)
        if make is not None:
            return lambda *operands, **options: make()(*operands, **options)
        return self.door.plain if self.site is not None or self.inside is None else self.inside

    @property
    def pruned_product(self) -> Callable[..., jax.Array] | None:
        """The pruned product that takes the place of Flax's; None if the door was declared."""
        return self.door.product

    @property
    def foreign(self) -> str | None:
        """The name of the model's own product, which a site would replace; None if the product is Flax's."""
        own = self.inside not in (None, self.door.plain) and self.site is None
        if not own and not getattr(self.module, "dot_general_cls", None):
            return None
        return getattr(self.inside, "__qualname__", type(self.inside).__name__)

    @property
    def hardened(self) -> Pattern | None:
        """The pattern that `harden` gave the weight; None if it ended dense, or was not hardened."""
        return getattr(self.module, "hardened", None)

    def harden(self, pattern: Pattern | None) -> None:
        """Write down the pattern of the hardened weight."""
        self.module.hardened = nnx.static(pattern)

    @property
    def other_readers(self) -> list[str]:
        """The methods of a class with a declared door that name the weight beside the method of the door."""
        return []

    @property
    def mask(self) -> Any:
        """The mask that a convolution of Flax multiplies its kernel by, or None."""
        return getattr(self.module, "mask", None) if isinstance(self.module, nnx.Conv) else None

    def drop_mask(self) -> None:
        """Drop the mask of a convolution, after `weight` was written into the kernel."""
        if self.mask is not None:
            self.module.mask = None

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
        shape, declared = tuple(self.kernel.shape), self.declared
        ways = combinations(range(len(shape)), max(0, len(shape) - len(declared)))
        fitting = [way for way in ways if tuple(n for a, n in enumerate(shape) if a not in way) == declared]
        if not fitting:
            raise ValueError(
                f"{self.path or 'the model'}: the kernel has shape {shape}, which is not {declared}, the shape that "
                f"the layer declares, nor a stack of such kernels. Give the layer a kernel of shape {declared}."
            )
        return fitting

    def stacked(self, axes: tuple[int, ...] | None) -> "Layer":
        """Return the layer with these stacking axes; or itself, if it finds them or if they do not fit."""
        del axes  # `stacks` lists every way that fits the declared shape
        return self

    @property
    def rank(self) -> int:
        """The number of axes of one layer's kernel."""
        return len(self.declared)

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes of the kernel that stack layers."""
        at_site = None if self.site is None else self.site.stack
        return at_site if at_site in self.stacks else self.stacks[0]  # inside a scan, one layer is no stack

    def example(self, tokens: int) -> Example | None:
        """Return one layer's product on so many tokens; None if only a call says which product it is.

        The tokens of a linear layer are positions of one sequence, because pruners may use spatial axes.
        """
        m, shape, dtype = self.module, self.declared, self.dtype
        if isinstance(m, nnx.Linear):
            op, lhs = _dot((((2,), (0,)), ((), ()))), (1, tokens, shape[0])
        elif isinstance(m, nnx.LinearGeneral):
            op, lhs = _linear_general(m, shape, tokens)
        elif isinstance(m, nnx.Conv):
            op, lhs = _conv(m, shape, tokens)
        elif isinstance(m, Experts):
            op, lhs = RaggedDot(None, None), (tokens, shape[1])
        elif m.einsum_str is None:
            return self.called
        else:
            op, lhs = _einsum(m.einsum_str, shape, tokens)
        return Example(op, jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(shape, dtype))

    @property
    def product(self) -> Example | None:
        """One layer's product; None if only a call says which product it is."""
        if self.site is not None and self.site.example is not None:
            return self.site.example
        return self.example(1)

    @property
    def own_product(self) -> Example | None:
        """The product, for a site to remember, if the layer itself does not say it."""
        return self.called or (None if self.site is None else self.site.example)

    @property
    def why_unknown(self) -> str:
        """The reason why the product is unknown before a call, and the remedy."""
        return (
            "its einsum_str comes with the call. Give it to the constructor, or pass examples of the model's inputs: "
            "sparsify(model, recipe, x)."
        )

    @property
    def operand(self) -> Operand | None:
        """The roles of the axes of the weight's operand; None if only a call says which product it is."""
        product = self.product
        return None if product is None else product.op.operands(product.lhs.ndim, product.rhs.ndim)["fwd_rhs"]

    @property
    def steps(self) -> Parameter:
        """The way from the weight, as `weight` returns it, to the operand of its product; the same for layers alike."""
        product = self.product
        return Parameter("", () if product is None else product.steps)

    @property
    def origin(self) -> Origin:
        """The weight of one layer, and what its products prune."""
        operand = self.operand or Operand((), (), ())  # if only a call says it, no weight is pruned
        return Origin(self.steps._replace(path=self.path), operand, self.sparsity)

    @property
    def dtype(self) -> Any:
        """The dtype that the layer computes in, if its inputs do not widen it."""
        kernel = self.kernel
        return jax.eval_shape(self._promoted, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)).dtype

    def weight(self) -> jax.Array:
        """Return the kernel as the product gets it; of a declared layer, as `steps` takes it."""
        kernel = self.kernel[...]
        return self._promoted(kernel if self.mask is None else kernel * self.mask)

    def _promoted(self, kernel: jax.Array) -> jax.Array:
        return self.module.promote_dtype((kernel, kernel, None), dtype=self.module.dtype)[1]


class ScoresLayer(Layer):
    """The product of attention's scores and values. No operand is a weight; the variable `marker` takes its place."""

    @property
    def has_weight(self) -> bool:
        return False

    @property
    def declared(self) -> Shape:
        return (1,) * 4

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        return [tuple(range(self.kernel.ndim - 4))]

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.module.dtype or jnp.float32)

    def example(self, tokens: int) -> Example:
        m = self.module
        op = _dot(einsum_dims("bhqk,bkhd->bqhd", 4, 4)[0])
        scores, values = (1, m.heads, tokens, tokens), (1, tokens, m.heads, m.features)
        return Example(op, jax.ShapeDtypeStruct(scores, self.dtype), jax.ShapeDtypeStruct(values, self.dtype))


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
    """Return the operation of a convolution, and the shape of its input: an image of the kernel's size per token."""
    ndim = len(shape)
    images, kernels = (0, ndim - 1, *range(1, ndim - 1)), (ndim - 1, ndim - 2, *range(ndim - 2))
    numbers, once = lax.ConvDimensionNumbers(images, kernels, images), (1,) * (ndim - 2)
    op = Conv(once, "SAME", None, None, numbers, m.feature_group_count, 1, None, None, None)
    return op, (tokens, *shape[:-2], m.in_features)
