"""Kernels on arrays that XLA cuts into shards: every device works on its part.

On a mesh of automatic axes a program is traced with whole arrays, and XLA decides later how they are cut. It cannot
cut a kernel. `jax.experimental.custom_partitioning` asks the functions here instead, and tells them how the operands
lie. They keep the cuts that a kernel can follow. Other cuts are undone: XLA gathers the array before the kernel.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nmjax.kernels.family import Shape, Target
from nmjax.kernels.limits import product_refusal

Axes = tuple[str, ...]
"""The axes of a mesh that cut one axis of an array; () if it is not cut."""

Cuts = dict[str, Axes]
"""The axes of a mesh that cut each axis of a problem, by its letter."""

# ---- products ----


def product(
    multiply: Callable[[Shape], Callable[..., jax.Array]], shape: Shape, wide: bool, target: Target
) -> Callable[..., jax.Array]:
    """Return a function of (values, words, B, scales) that multiplies the parts on every device.

    Rows of A and columns of B stay cut. If A and B are cut alike along K, the sums of the devices are added up in
    float32.

    Args:
      multiply: Returns the product of this shape on one device, as a function of the same four arrays.
      shape: The product of whole arrays.
      wide: True if the words are ``words16``, False for ``words8``.
      target: The device.
    """
    a_letters = "bkm" if shape.m_major else "bmk"
    b_letters = "bkn" if shape.n_major else "bnk"
    y_letters = "bnm" if shape.transpose else "bmn"
    inputs = (a_letters, "bmkw" if wide else "bmk", b_letters, "b")

    def partition(mesh: Mesh, arguments: Sequence[Any], result: Any) -> tuple[Any, ...]:
        seen = [_cuts(letters, argument) for letters, argument in zip(inputs, arguments, strict=True)]
        a, _, b, _ = seen
        cuts = _without_repeats({
            "b": a["b"] or b["b"],
            "k": a["k"] if a["k"] == b["k"] else (),
            "m": a["m"],
            "n": b["n"],
        })  # fmt: skip
        cuts, part = _fitting(shape, arguments[0].shape[0], cuts, mesh, target)
        summed = cuts["k"]
        call = multiply(replace(part, out="float32") if summed else part)

        def run(*arrays: jax.Array) -> jax.Array:
            y = call(*arrays)
            return lax.psum(y, summed).astype(shape.out) if summed else y

        return mesh, run, _laid(y_letters, cuts, mesh), tuple(_laid(letters, cuts, mesh) for letters in inputs)

    rule = "b (m r) (k c), b m k w, b n (k d), b -> b (m r) n" if wide else "b m (k c), b m k, b n (k d), b -> b m n"
    if shape.m_major:
        rule = rule.replace("(m r) (k c)", "(k c) (m r)")
    if shape.n_major:
        rule = rule.replace("n (k d)", "(k d) n")
    if shape.transpose:
        rule = rule.replace("-> b (m r) n", "-> b n (m r)").replace("-> b m n", "-> b n m")
    sizes = {"r": 64, "c": 32, "d": 64} if wide else {"c": 16, "d": 32}
    whole = multiply(shape)
    cut = custom_partitioning(lambda *arrays: whole(*arrays))
    cut.def_partition(partition=partition, infer_sharding_from_operands=None, sharding_rule=rule, **sizes)
    return cut


def _fitting(shape: Shape, batch: int, cuts: Cuts, mesh: Mesh, target: Target) -> tuple[Cuts, Shape]:
    """Undo as few cuts as possible so that a kernel fits the parts, or all if none fits.

    Returns:
      The cuts that are left, and the product of one part.
    """
    for count in range(len(cuts) + 1):
        for gathered in itertools.combinations("nkmb", count):
            left = cuts | dict.fromkeys(gathered, ())
            part = _part(shape, left, mesh)
            if part is not None and batch % _size(left["b"], mesh) == 0 and product_refusal(part, target) is None:
                return left, part
    return dict.fromkeys(cuts, ()), shape


def _part(shape: Shape, cuts: Cuts, mesh: Mesh) -> Shape | None:
    """Return the product of the parts on one device; None if its sizes do not divide."""
    sizes = {}
    for letter in "mnk":
        whole, parts = getattr(shape, letter), _size(cuts[letter], mesh)
        if whole % parts:
            return None
        sizes[letter] = whole // parts
    return replace(shape, **sizes)


# ---- packing ----


def blocks(
    pack: Callable[..., Sequence[jax.Array]], x: jax.Array, scalars: Sequence[jax.Array], block: tuple[int, int],
    outputs: Sequence[str],
) -> list[jax.Array]:  # fmt: skip
    """Call a kernel that works on blocks of an array ``[batch, rows, columns]``, and let every device do its part.

    Args:
      pack: Takes the array, the scalars, and where the array begins in the whole one ([batch, row, column]).
      x: The array.
      scalars: Small arrays, which every device holds whole. Their first axis is 1, or divides the batch. If it is not
        1, the batch is not cut.
      block: The rows and columns of a block.
      outputs: For each result a letter for each axis: b, i or j for an axis that is cut as the batch, the rows or the
        columns of the array are, and w for one that is not cut.
    """
    letters = "bij"

    def partition(mesh: Mesh, arguments: Sequence[Any], result: Any) -> tuple[Any, ...]:
        cuts = _without_repeats(_cuts(letters, arguments[0]))
        if any(v.shape[0] > 1 for v in arguments[1:]):
            cuts["b"] = ()
        for letter, size, unit in zip(letters, arguments[0].shape, (1, *block), strict=True):
            if size % (unit * _size(cuts[letter], mesh)):
                cuts[letter] = ()

        def run(x: jax.Array, *scalars: jax.Array) -> Sequence[jax.Array]:
            first = [
                lax.axis_index(cuts[letter]) * size if cuts[letter] else 0
                for letter, size in zip(letters, x.shape, strict=True)
            ]
            return pack(x, *scalars, jnp.stack([jnp.asarray(at, jnp.int32) for at in first]))

        whole = [_laid("", cuts, mesh)] * len(scalars)
        results = [_laid(axes, cuts, mesh) for axes in outputs]
        return mesh, run, results, (_laid(letters, cuts, mesh), *whole)

    shapes = jax.eval_shape(pack, x, *scalars, jnp.zeros(3, jnp.int32))
    rule, sizes = _rule_of_blocks(x.shape, block, scalars, [v.shape for v in shapes], outputs)
    cut = custom_partitioning(lambda x, *scalars: pack(x, *scalars, jnp.zeros(3, jnp.int32)))
    cut.def_partition(partition=partition, infer_sharding_from_operands=None, sharding_rule=rule, **sizes)
    return cut(x, *scalars)


def _rule_of_blocks(
    x: Sequence[int], block: tuple[int, int], scalars: Sequence[jax.Array], shapes: Sequence[Sequence[int]],
    outputs: Sequence[str],
) -> tuple[str, dict[str, int]]:  # fmt: skip
    """Return the rule of propagation, in which i and j count blocks, and the sizes of parts of axes."""
    count = {"b": x[0], "i": x[1] // block[0], "j": x[2] // block[1]}
    sizes: dict[str, int] = dict(count)
    names = (f"f{n}" for n in itertools.count())

    def said(letters: str, shape: Sequence[int]) -> str:
        words = []
        for letter, size in zip(letters, shape, strict=True):
            if letter not in count:
                words.append(next(names))
            elif size == count[letter]:
                words.append(letter)
                sizes.pop(letter, None)  # the rule takes it from the axis
            else:
                name = next(names)
                words.append(f"({letter} {name})")
                sizes[name] = size // count[letter]
        return " ".join(words)

    inputs = [said("bij", x), *(said("w" * v.ndim, v.shape) for v in scalars)]
    results = [said(letters, shape) for letters, shape in zip(outputs, shapes, strict=True)]
    return f"{', '.join(inputs)} -> {', '.join(results)}", sizes


# ---- how arrays are cut ----


def _cuts(letters: str, argument: Any) -> Cuts:
    """Return how an argument is cut, by the letters of its axes."""
    spec = argument.sharding.spec
    named = [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]
    named += [()] * (len(letters) - len(named))
    return dict(zip(letters, named, strict=True))


def _without_repeats(cuts: Mapping[str, Axes]) -> Cuts:
    """Return cuts in which no axis of the mesh occurs twice: the first one stays."""
    taken: set[str] = set()
    found: Cuts = {}
    for letter, axes in cuts.items():
        found[letter] = () if taken & set(axes) else axes
        taken |= set(found[letter])
    return found


def _size(axes: Axes, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _laid(letters: str, cuts: Cuts, mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array whose axes have these letters."""
    return NamedSharding(mesh, PartitionSpec(*(cuts.get(letter) or None for letter in letters)))
