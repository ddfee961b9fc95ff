"""Refusals of `sparsify`: layers that cannot follow a recipe, with the rules that leave them dense.

- slots that cannot prune the layer's shapes, as a plan says too (`nmjax.products.fit.slot_refusals`)
- layers that use their weight otherwise too, or are in nnx.WeightNorm or nnx.SpectralNorm,
  ambiguous stacks, weights whose product is known only in a call, and scores with a rule for weights (`layer_refusal`)

Rules that match no layer are refused by ``Recipe.check``. A plan with a recipe lists all of these.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nmjax.analysis.refusals import Use, fitting_all
from nmjax.core import layer_paths
from nmjax.core.refusal import Refusal
from nmjax.nnx.layer import Layer
from nmjax.products.fit import slot_refusals
from nmjax.products.slot import SLOTS
from nmjax.products.sparsity import Sparsity
from nmjax.programs import states
from nmjax.programs.parameters import moves
from nmjax.pruners import identity

NO_LAYERS = (
    "has no registered layer, so nothing would be pruned. Register its layers: nm.nnx.register_layer(..., weight=...). "
    "To prune a product that is written out by hand, write nm.einsum(..., sparsity=...)."
)


def normalised(model: Any) -> set[int]:
    """Return the ids of the layers that are wrapped in nnx.WeightNorm or nnx.SpectralNorm."""
    wrappers = [m for _, m in nnx.iter_modules(model) if isinstance(m, (nnx.WeightNorm, nnx.SpectralNorm))]
    return {id(m.layer_instance) for m in wrappers}


def check_uses(sparse: list[tuple[Layer, Sparsity]], others: Mapping[int, list[str]]) -> None:
    """Refuse weights that a recipe prunes and that a call uses in operations of its own too.

    There they are not pruned, so the weight has no final form: a hardened model would be another function.

    Args:
      sparse: The layers, and what they prune.
      others: The operations that take a weight elsewhere, by the id of its variable (`recording.other_uses`).
    """
    refused = [
        (layer, sparsity)
        for layer, sparsity in sparse
        if sparsity.y_w != identity and layer.has_weight and layer.mask is None and id(layer.kernel) in others
    ]
    if refused:
        lines = [
            f"  {layer.path or 'the model'}: {', '.join(others[id(layer.kernel)])} takes {layer.weight_name} of shape "
            f"{tuple(layer.kernel.shape)}, which y_w={sparsity.y_w} prunes in the layer only"
            for layer, sparsity in refused
        ]
        rules = ", ".join(f'(r"{re.escape(layer.path)}", "dense")' for layer, _ in refused)
        raise ValueError(
            "\n".join(["The call uses weights outside of their layers too, as a tied head does:", *lines])
            + "\nSuch a weight has no single final form. To prune every product with it, use nm.transform(..., "
            f"mask_per_product=True), or one layer that both places call. To leave it dense, put first: {rules}."
        )


def check_layers(
    chosen: list[tuple[Layer, Sparsity]], axes: tuple[int, ...] | None, in_norms: set[int], all_paths: list[str]
) -> None:  # fmt: skip
    """Raise one error for all layers that cannot follow the recipe. Reasons that differ only in numbers share lines."""
    refused = [
        (layer.path, refusal.reason)
        for layer, sparsity in chosen
        for refusal in _refusals(layer, sparsity, axes, id(layer.module) in in_norms)
    ]
    if refused:
        paths = dict.fromkeys(path for path, _ in refused)
        others = [path for path in all_paths if path not in paths]
        rules = [f'  (r"{pattern}", "dense"),' for pattern in layer_paths.patterns(paths, others)]
        head, hint = "The recipe cannot be carried out:", "To leave these layers dense, put these rules first:"
        raise ValueError("\n".join([head, *(f"  {line}" for line in layer_paths.folded(refused)), hint, *rules]))


def _refusals(
    layer: Layer, sparsity: Sparsity, axes: tuple[int, ...] | None, in_norm: bool
) -> list[Refusal]:  # fmt: skip
    """Return the reasons why a layer cannot use this sparsity."""
    if isinstance(layer.kernel.get_value(), jax.ShapeDtypeStruct) and states.has_state(sparsity):
        return [
            Refusal(
                "its kernel is a shape without values, and its state is made from values. Make both abstract together: "
                "nnx.eval_shape(lambda: sparsify(...))."
            )
        ]
    refusal = layer_refusal(layer, sparsity, axes, in_norm)
    return [refusal] if refusal is not None else [r for _, r in layer_slot_refusals(layer, sparsity, axes)]


def layer_refusal(
    layer: Layer, sparsity: Sparsity, axes: tuple[int, ...] | None, in_norm: bool
) -> Refusal | None:  # fmt: skip
    """Return the reason why a layer cannot be made sparse, apart from slots that do not fit its shapes; None if it can.

    Args:
      layer: The layer.
      sparsity: What it would prune.
      axes: The stacking axes of the weight, if the caller named them.
      in_norm: True if an nnx.WeightNorm or nnx.SpectralNorm normalises the layer's weight.
    """
    kernel = layer.kernel.get_value()
    if in_norm:
        return Refusal("a module around it normalises its kernel, so the pruned kernel is not the one multiplied.")
    if type(kernel).__name__ == "BatchTracer" and states.needs_key(sparsity):
        return Refusal(
            "it is made inside vmap, where all layers of a stack would get the same noise. Call sparsify on the whole "
            "stack."
        )
    if not layer.has_weight and not sparsity.y_w == sparsity.dx_w == identity:
        return Refusal(
            "it multiplies scores by values, and no operand is a weight, so y_w and dx_w must be empty. Give "
            'it a rule of its own that comes first, such as (r".*/scores", "y_x=mse(2,4)").'
        )
    try:
        ways = layer.stacks
        product = layer.product
    except ValueError as error:
        return Refusal(str(error).removeprefix(f"{layer.path or 'the model'}: "))
    if axes not in ways and len(ways) > 1:
        choices = ", or ".join(f"sparsify(..., stack={way[0] if len(way) == 1 else way})" for way in ways)
        return Refusal(
            f"its kernel has shape {kernel.shape}, which does not say which axes stack layers. Name them: {choices}."
        )
    if product is None:
        if sparsity.y_w == sparsity.dx_w == identity:
            return None
        return Refusal(layer.why_unknown)
    own = tuple(n for a, n in enumerate(kernel.shape) if a not in (axes if axes in layer.stacks else ways[0]))
    if layer.steps.axes(own) is None:
        return Refusal(
            f"its call multiplies by its weight in another shape, {product.rhs.shape}, which mixes axes of "
            f"{kernel.shape}. Use nm.transform, or leave it dense."
        )
    if layer.called is not None and layer.steps.shape(own) != layer.called.rhs.shape:
        return Refusal(
            f"its call multiplies by a weight of shape {product.rhs.shape}, which is not that of its parameter, "
            f"{kernel.shape}, or of one layer of a stack. Use nm.transform, or leave it dense."
        )
    return None


def fitted(
    layer: Layer, sparsity: Sparsity, axes: tuple[int, ...] | None
) -> tuple[Sparsity, tuple[tuple[str, str], ...]]:  # fmt: skip
    """Return a sparsity without the slots that ``else dense`` makes empty in a layer, and (slot, reason) of these.

    The number of tokens is not known before a call. So a call may make more slots empty.
    """
    if not sparsity.else_dense or layer_refusal(layer, sparsity, axes, in_norm=False) is not None:
        return sparsity, ()
    product = layer.example(tokens=math.lcm(*(getattr(sparsity, slot).facts.block for slot in SLOTS)))
    if product is None:
        return sparsity, ()
    return fitting_all(sparsity, [Use(product.op, product.lhs, product.rhs, 1)], tokens_known=False)


def layer_slot_refusals(
    layer: Layer, sparsity: Sparsity, axes: tuple[int, ...] | None
) -> tuple[tuple[str, Refusal], ...]:  # fmt: skip
    """Return the slots of a layer that cannot prune operands of its shapes, with the reasons.

    Args:
      layer: A layer that `layer_refusal` does not refuse.
      sparsity: What it would prune.
      axes: The stacking axes of the weight, if the caller named them.
    """
    stack = axes if axes in layer.stacks else layer.stacks[0]
    product = layer.example(tokens=math.lcm(*(getattr(sparsity, slot).facts.block for slot in SLOTS)))
    if product is None:  # only a call says which product it is; its weight is not pruned
        return ()
    kernel = layer.kernel.get_value()
    sharding = getattr(kernel, "sharding", None)
    if isinstance(sharding, NamedSharding) and not moves(product.steps):
        spec = [*sharding.spec, *[None] * (kernel.ndim - len(sharding.spec))]
        one = NamedSharding(sharding.mesh, PartitionSpec(*(s for a, s in enumerate(spec) if a not in stack)))
        product = product._replace(rhs=jax.ShapeDtypeStruct(product.rhs.shape, product.rhs.dtype, sharding=one))
    return slot_refusals(product.op, product.lhs, product.rhs, sparsity)
