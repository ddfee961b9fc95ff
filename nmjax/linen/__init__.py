"""Sparsity for any flax.linen model.

>>> import jax, jax.numpy as jnp
>>> from flax import linen as nn
>>> import nmjax as nm
>>> recipe, layer, x = nm.Recipe({r".*": "s_ste(2,4)"}), nn.Dense(8), jnp.ones((4, 16))
>>> with nm.linen.sparsify(recipe):
...     variables = layer.init(jax.random.key(0), x)
...     variables = nm.linen.set_step(variables, step=3)  # once a step, outside the loss
...     print(layer.apply(variables, x).shape)
(4, 8)
>>> hard = nm.linen.harden(variables)  # for inference, outside the context
>>> nm.linen.patterns(hard)
{'kernel': 2:4 along axis 0}

Inside the context `sparsify`, the layers of a model are pruned as a recipe says for their paths. The model does not
change. One compiled program serves all steps, because the step is data.

A layer keeps what its method needs in the collection ``nm``, at the path of its weight in ``params``: noise words, the
time, and arrays such as held masks. Pass the collection wherever ``params`` goes: into ``apply``, and through
``nn.scan`` and ``nn.vmap`` along the same axis, ``variable_axes={"params": 0, "nm": 0}``. Only `set_step` and
`reset_state` write it. The noise of a step is a function of seed, path, place in the stack, step, micro-step and slot;
the path is that of the parameters in the model that ran ``init``. Models that train together need different seeds.
"""

from nmjax.linen.delivery import sparsify as sparsify
from nmjax.linen.hardening import (
    harden as harden,
    masks as masks,
    observe as observe,
    paths as paths,
    patterns as patterns,
    reset_state as reset_state,
    scales as scales,
    set_step as set_step,
    violations as violations,
)
from nmjax.linen.measures import gradient_errors as gradient_errors, weights as weights
from nmjax.linen.planning import plan as plan
from nmjax.linen.registry import register_layer as register_layer

__all__ = (
    "gradient_errors", "harden", "masks", "observe", "paths", "patterns", "plan", "register_layer", "reset_state",
    "scales", "set_step", "sparsify", "violations", "weights",
)  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
