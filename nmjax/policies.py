"""Rematerialisation: the values of a forward pass that `jax.checkpoint` keeps for the backward pass."""

from typing import Any

from jax import checkpoint_policies

from nmjax.products.keeping import KEPT

_kept = checkpoint_policies.save_only_these_names(KEPT)
_PRODUCTS = ("ragged_dot_general", "conv_general_dilated")


def keep_sparse(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """Keep the results of products without batch axes, and what ``dw_x`` keeps of the inputs of products.

    Products of layers with weights have no batch axes; convolutions and grouped products are kept too. The rest is
    computed again: norms, activation functions, and the products of attention, whose batch axes are texts and heads;
    also a product of weights with a batch axis, such as one of experts that is written as an einsum. So a block
    keeps no input of an activation function or of a norm beside these results. It is a policy for `jax.checkpoint` and
    `nnx.remat`, and that of models with ``lean=True``.

    Args:
      primitive, inputs, parameters: As `jax.checkpoint` calls a policy.

    >>> block = lambda x, w: jax.nn.gelu(x @ w) * 2
    >>> lean = jax.checkpoint(block, policy=keep_sparse)
    >>> jax.grad(lambda w: lean(jnp.ones((2, 3)), w).sum())(jnp.ones((3, 4))).shape
    (3, 4)
    """
    if getattr(primitive, "name", "") in _PRODUCTS:
        return True
    by_name = _kept(primitive, *inputs, **parameters)
    return by_name or checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *inputs, **parameters)
