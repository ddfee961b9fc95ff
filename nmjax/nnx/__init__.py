"""Any flax.nnx model made sparse, through the doors that Flax's layers have.

`sparsify` puts a site where a layer keeps its product (`dot_general`, `einsum_op`, `conv_general_dilated`) and touches
nothing else: parameters, their paths and the model's code stay. A site holds what its method needs as Variables of type
`NM`: words for noise, the time, state such as held masks. A dense layer gets no site, and a method without noise, schedule
or memory adds no arrays.

Time is data. `set_step` is the only writer of time and state. The noise of a step is a function of (seed, layer, place in
the stack, step, micro-step, slot), whatever came before.
"""

from nmjax.nnx.delivery import (
    reseed as reseed,
    reset_state as reset_state,
    set_step as set_step,
    sparsify as sparsify,
)
from nmjax.nnx.hardening import harden as harden, masks as masks, patterns as patterns, scales as scales
from nmjax.nnx.measures import gradient_errors as gradient_errors, weights as weights
from nmjax.nnx.packing import pack as pack, packed as packed
from nmjax.nnx.planning import plan as plan
from nmjax.nnx.variables import NM as NM, Site as Site
