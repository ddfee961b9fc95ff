"""Final forms, masks and scales of a model's weights."""

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nmjax.analysis.patterns import Pattern, checked, violations as groups_that_break
from nmjax.nnx.checks import check_uses
from nmjax.nnx.delivery import put_state
from nmjax.nnx.layer import Layer
from nmjax.nnx.layers import back, layers, read, shape, stacked, value
from nmjax.nnx.recording import other_uses
from nmjax.nnx.variables import write
from nmjax.programs import states
from nmjax.pruners import identity

Model = TypeVar("Model")


class User(NamedTuple):
    """A place in a model that uses a variable.

    Attributes:
      path: The path of the attribute that holds it.
      layer: The layer whose kernel it is; None if it is something else.
    """

    path: tuple[Any, ...]
    layer: Layer | None


def harden(model: Model, *inputs: Any, **options: Any) -> Model:
    """Return a copy of a model with every weight in its final form, as inference uses it.

    The weights of the copy are n:m arrays of the same shapes and dtypes, and it prunes activations only. Each layer
    that was sparse has an attribute ``hardened``: its `Pattern`, or None if its weight ends dense.

    If the model uses the weight of a sparse layer elsewhere too, as a tied head does, hardening would change that
    product: pass ``inputs`` here, or to `sparsify`, and it is refused. A weight is pruned in the dtype that its layer
    computes in. If float32 inputs widen a bfloat16 weight in training, the hardened weight differs from it by rounding.

    Args:
      model: A sparse model.
      *inputs: Examples of the model's inputs: arrays or their shapes. The model is traced on them.
      **options: Keyword arguments of the model's call.

    Returns:
      A copy. Parameters keep their paths. The model itself stays as it is. Arrays that do not change are shared. If
      you donate the model to a compiled function afterwards, write first
      ``nnx.update(hard, jax.tree.map(jnp.copy, nnx.state(hard)))``.

    Raises:
      ValueError: A weight is drawn again at every step, so it has no final form; two layers share a weight and prune
        it differently; or the call with ``inputs`` uses a pruned weight elsewhere too.

    Warns:
      UserWarning: The schedule of a method has not ended, so the hardened layers compute something else than at
        this step. Inside `jit` nothing is compared.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "s_ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> hard = nm.nnx.harden(model)
    >>> bool(nm.groups.is_nm(hard.kernel[...], 2, 4, axis=0)), hard.hardened
    (True, 2:4 along axis 0)
    """
    if inputs or options:
        check_uses([(one, one.sparsity) for one in layers(model)], other_uses(model, inputs, options))
    else:
        _check_methods(model)
    hard, unfinished = harden_without_warning(model)
    states.warn_unfinished(unfinished, stacklevel=3)
    return hard


def _check_methods(model: Any) -> None:
    """Refuse weights of declared layers that another method of their class names, because no call was looked at."""
    for layer in layers(model):
        others = layer.other_readers if layer.state is not None and layer.sparsity.y_w != identity else []
        if others:
            raise ValueError(
                f"{layer.path or 'the model'}: y_w={layer.sparsity.y_w} prunes {layer.weight_name} of shape "
                f"{tuple(layer.kernel.shape)}, which {type(layer.module).__name__}.{others[0]} uses too, without "
                "pruning. If the model's call uses it there, it has no single final form: leave the layer dense, "
                f'(r"{re.escape(layer.path)}", "dense"). If not, pass examples of its inputs: harden(model, x).'
            )


def harden_without_warning(model: Model) -> tuple[Model, list[states.Unfinished]]:
    """Return the hardened copy of a model, and what `states.warn_unfinished` takes."""
    hard = nnx.clone(model)
    users, done = users_of(hard), set()
    found: list[states.Unfinished] = []
    for layer in layers(hard):
        if layer.state is None:
            continue
        state, kernel, pattern = read(layer), layer.kernel, _pattern(layer)
        p, rest = state.form(shape(layer))
        if p == identity or id(kernel) in done:
            found.append(([], (layer.path, states.inputs_unfinished(layer.sparsity, state.time)), None))
        else:
            _check_shared(layer, users[id(kernel)])
            weight = value(layer)
            final, _ = state.hardened(weight)
            found.append(state.unfinished(weight, final))
            write(kernel, back(layer, final).astype(kernel.dtype))
            done.add(id(kernel))
            layer.drop_mask()
        put_state(layer, rest, layer.state.backend, 0, layer.stack)
        layer.harden(pattern if p != identity else layer.hardened)
    return hard, found


def users_of(model: Any) -> dict[int, list[User]]:
    """Return all places that use a variable, by the variable's identity."""
    layer_of = {(id(layer.module), layer.weight_name): layer for layer in layers(model)}
    users: dict[int, list[User]] = defaultdict(list)
    for path, module in nnx.iter_modules(model):
        for name, held in vars(module).items():
            for leaf in jax.tree.leaves(held, is_leaf=lambda v: isinstance(v, (nnx.Variable, nnx.Module))):
                if isinstance(leaf, nnx.Variable):
                    users[id(leaf)].append(User((*path, name), layer_of.get((id(module), name))))
    return users


def _check_shared(layer: Layer, users: list[User]) -> None:
    """Refuse a weight that is used in several final forms, because there is one array to harden."""
    for path, other in users:
        if other is None or other.state is None:
            use = "as it is"
        elif not _same_form(other, layer):
            use = f"pruned by {other.sparsity.y_w}"
            if other.sparsity.y_w == layer.sparsity.y_w:
                use += " along other axes, in another dtype, with another mask or with other state"
        else:
            continue
        raise ValueError(
            f"{layer.path or 'the model'}: y_w={layer.sparsity.y_w} prunes a weight of shape "
            f"{layer.kernel.shape} that {'/'.join(map(str, path))} uses too, {use}. It has no single final form. "
            f'Give both one rule, or leave this layer dense: (r"{re.escape(layer.path)}", "dense").'
        )


def _same_form(a: Layer, b: Layer) -> bool:
    """Return True if two sparse layers give the weight that they share the same final form."""
    assert a.state is not None
    assert b.state is not None
    if a.sparsity.y_w != b.sparsity.y_w or a.operand != b.operand or a.dtype != b.dtype or a.stack != b.stack:
        return False
    if a.steps.steps != b.steps.steps:
        return False
    return a.mask is b.mask and _same_values(read(a).state, read(b).state)


def _same_values(a: Any, b: Any) -> bool:
    """Return True if two states are equal, as far as values are known: traced ones count as equal."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return all(
        isinstance(v, jax.core.Tracer) or isinstance(w, jax.core.Tracer) or bool((v == w).all()) for v, w in pairs
    )


def _pattern(layer: Layer) -> Pattern | None:
    """Return the pattern of a sparse layer's hardened kernel along its axes; None if it is dense."""
    assert layer.state is not None
    pattern = states.WeightState(stacked(layer, layer.state.origin)).pattern(
        shape(layer)
    )  # no array is read: they may be shapes
    return pattern and replace(pattern, axes=states.stored_axes(pattern.contracted, layer.stack, layer.kernel.ndim))


def patterns(model: Any) -> dict[str, Pattern | None]:
    """Return the pattern that every layer's weight has after `harden`.

    Args:
      model: A sparse model, or what `harden` returned.

    Returns:
      A dict from the weight's path to its `Pattern`: n:m along the axes that the product contracts. None is dense.

    Raises:
      ValueError: A weight is drawn again at every step, so it has no final form.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "s_ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> nm.nnx.patterns(model)
    {'kernel': 2:4 along axis 0}
    """
    by_path: dict[str, Pattern | None] = {}
    for layer in layers(model):
        pattern = layer.hardened
        if layer.state is not None and not pattern:
            pattern = _pattern(layer)
        if layer.has_weight:
            by_path[layer.kernel_path] = pattern
    return by_path


def violations(model: Any) -> dict[str, jax.Array | None]:
    """Return the number of groups of each weight that break the pattern which `harden` promises.

    Args:
      model: A sparse model, or what `harden` returned.

    Returns:
      A dict from the weight's path to a count. None: nothing was checked, because the final form is dense.

    Raises:
      ValueError: A weight has no final form.

    Warns:
      UserWarning: No weight has an n:m final form, so nothing was checked.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "s_ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> nm.nnx.violations(model), nm.nnx.violations(nm.nnx.harden(model))
    ({'kernel': Array(8, dtype=int32)}, {'kernel': Array(0, dtype=int32)})
    """
    promised = patterns(model)
    kernels = {layer.kernel_path: layer.kernel[...] for layer in layers(model)}
    return checked({p: None if q is None else groups_that_break(kernels[p], q) for p, q in promised.items()})


def masks(model: Any) -> nnx.State[Any, Any]:
    """Return the masks of the weights at this step.

    To see the masks that a dense model would have, make a copy of it sparse: ``masks(sparsify(nnx.clone(model),
    recipe))``.

    Args:
      model: A sparse model.

    Returns:
      A state like ``nnx.state(model, nnx.Param)``. A parameter without a mask has True.

    Raises:
      TypeError: A pruner has no mask, because it does not only keep or drop.

    >>> import nmjax as nm
    >>> recipe = nm.Recipe({".*": "ste(2,4)"})
    >>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    >>> masks = nm.nnx.masks(model)
    >>> masks["kernel"].shape, int(masks["kernel"][...].sum()), bool(masks["bias"][...])
    ((8, 4), 16, True)
    """
    sparse = [layer for layer in layers(model) if layer.sparsity.y_w != identity]
    by_kernel = {id(layer.kernel): back(layer, read(layer).mask(value(layer))) for layer in sparse}
    by_path = {user.path: by_kernel[i] for i, users in users_of(model).items() if i in by_kernel for user in users}
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return nnx.from_flat_state([(path, v.replace(by_path.get(path, jnp.array(True)))) for path, v in flat])


def scales(model: Any) -> dict[str, Float[Array, "*stack"]]:
    """Return the frozen scales of S-STE.

    Args:
      model: A sparse model.

    Returns:
      A dict from the layer's path to its scale; a stack has one scale for every layer. Layers without a scale are
      left out.

    >>> import nmjax as nm
    >>> model = nnx.Linear(8, 4, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> model.kernel[...] = jnp.tile(jnp.array([1., 2., 3., 4.]), 2)[:, None] * jnp.ones((1, 4))
    >>> nm.nnx.scales(nm.nnx.sparsify(model, nm.Recipe(((".*", "s_ste(2,4)"),))))
    {'': Array(2.2, dtype=float32)}
    """
    by_path = {layer.path: read(layer).scale for layer in layers(model) if layer.state is not None}
    return {path: scale for path, scale in by_path.items() if scale is not None}
