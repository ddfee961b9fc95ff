"""Sparsity for any flax.nnx model.

>>> from flax import nnx
>>> import jax.numpy as jnp, nmjax as nm
>>> up, down = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))
>>> model = nnx.Sequential(up, nnx.relu, down)
>>> model = nm.nnx.sparsify(model, nm.Recipe({r".*": "s_ste(2,4)"}))
>>> x = jnp.ones((32, 8))
>>> for step in range(2):
...     nm.nnx.set_step(model, step)  # once a step, outside the loss
...     gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
>>> hard = nm.nnx.harden(model)  # for inference
>>> hard(x).shape, nm.nnx.patterns(hard)
((32, 4), {'layers/0/kernel': 2:4 along axis 0, 'layers/2/kernel': 2:4 along axis 0})

`sparsify` changes the model in place: parameters, their paths and the model's code stay. One compiled program serves
all steps, because the step is data of the model.

Each pruned layer has a `SparsityState` in its attribute ``nm_state``. It holds what the method needs, in variables of
type `SparsityVariable`: noise words, the time, and arrays such as held masks. Only `set_step`, `observe`,
`reset_state`, `reseed` and `set_norms` write them. The noise of a step is a function of seed, layer, place in the
stack, step, micro-step and slot, and of nothing else.
"""

import nmjax.nnx.others  # noqa: F401  registers the layers of other libraries
from nmjax.analysis.plan import LayerPlan as LayerPlan, Plan as Plan, SlotPlan as SlotPlan
from nmjax.nnx.calibration import (
    Inputs as Inputs,
    calibrate as calibrate,
    set_norms as set_norms,
)
from nmjax.nnx.delivery import (
    observe as observe,
    reseed as reseed,
    reset_state as reset_state,
    set_step as set_step,
    sparsify as sparsify,
)
from nmjax.nnx.factors import LowRank as LowRank, changed as changed, low_rank as low_rank
from nmjax.nnx.hardening import (
    harden as harden,
    masks as masks,
    patterns as patterns,
    scales as scales,
    violations as violations,
)
from nmjax.nnx.learned_masks import mask_scores as mask_scores, masked as masked
from nmjax.nnx.measures import gradient_errors as gradient_errors, weights as weights
from nmjax.nnx.one_shot import Pruned as Pruned, prune as prune
from nmjax.nnx.packing import pack as pack, packed as packed
from nmjax.nnx.phases import phase as phase
from nmjax.nnx.planning import plan as plan
from nmjax.nnx.registry import register_layer as register_layer
from nmjax.nnx.variables import SparsityState as SparsityState, SparsityVariable as SparsityVariable
from nmjax.products.routes import Route as Route
