"""Sparsity for any flax.nnx model.

`sparsify` gives each pruned layer a `SparsityState`, in the attribute ``nm_state``. Parameters, their paths and the
model's code stay. The state holds what the method needs, in variables of type `SparsityVariable`: noise words, the
time, and arrays such as held masks. A method without noise, schedule or memory adds no arrays.

Time is data: one compiled program serves all steps. Only `set_step`, `reset_state`, `reseed` and `set_norms` write
these variables. The noise of a step is a function of seed, layer, place in the stack, step, micro-step and slot, and of
nothing else.

>>> from flax import nnx
>>> import nmjax as nm
>>> model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe(((".*", "s_ste(2,4)"),)))
>>> nm.nnx.set_step(model, 1)  # once a step, outside the loss
>>> gradients = nnx.grad(lambda model: (model(jnp.ones((4, 8))) ** 2).mean())(model)
>>> hard = nm.nnx.harden(model)  # for inference
"""

import nmjax.nnx.others  # noqa: F401  registers the layers of other libraries
from nmjax.analysis.plan import LayerPlan as LayerPlan, Plan as Plan, SlotPlan as SlotPlan
from nmjax.nnx.calibration import (
    Inputs as Inputs,
    calibrate as calibrate,
    set_norms as set_norms,
)
from nmjax.nnx.delivery import (
    reseed as reseed,
    reset_state as reset_state,
    set_step as set_step,
    sparsify as sparsify,
)
from nmjax.nnx.hardening import (
    harden as harden,
    masks as masks,
    patterns as patterns,
    scales as scales,
    violations as violations,
)
from nmjax.nnx.measures import gradient_errors as gradient_errors, weights as weights
from nmjax.nnx.one_shot import Pruned as Pruned, prune as prune
from nmjax.nnx.packing import pack as pack, packed as packed
from nmjax.nnx.phases import phase as phase
from nmjax.nnx.planning import plan as plan
from nmjax.nnx.registry import register_layer as register_layer
from nmjax.nnx.variables import SparsityState as SparsityState, SparsityVariable as SparsityVariable
from nmjax.products.routes import Route as Route
