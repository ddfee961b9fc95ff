"""N:M structured-sparse training in JAX.

A *pruner* keeps at most n of every m consecutive values. A *sparsity* says which pruner acts in each of the six slots
of a layer's three products. A *recipe* gives each layer of a model its sparsity. All three are values.

>>> import nmjax as nm
>>> nm.prune(nm.mse(2, 4), jnp.array([1., -2., 3., -4.]))
Array([ 0.,  0.,  3., -4.], dtype=float32)
>>> nm.parse("s_ste(2,4)")
y_w=ste(soft(2,4)); dw_g=mvue(2,4)
>>> recipe = nm.Recipe({r".*/mlp/.*": "s_ste(2,4)", r".*": "dense"})  # for nm.nnx.sparsify
"""

from nmjax import (
    checkpoints as checkpoints,
    kernels as kernels,
    linen as linen,
    models as models,
    nnx as nnx,
    oneshot as oneshot,
    optim as optim,
    policies as policies,
)
from nmjax.analysis import flops as flops, metrics as metrics
from nmjax.analysis.picture import Picture as Picture, show as show
from nmjax.core import groups as groups, random as random
from nmjax.core.bases import Grouped as Grouped, Remembering as Remembering, Selector as Selector
from nmjax.core.context import Ctx as Ctx
from nmjax.core.pruner import Facts as Facts, KernelForm as KernelForm, Pruner as Pruner
from nmjax.fusing import fused as fused
from nmjax.kernels.activations import exact_gelu as exact_gelu, squared_relu as squared_relu
from nmjax.kernels.format import Packed as Packed, pack as pack, unpack as unpack
from nmjax.products.functions import (
    conv_general_dilated as conv_general_dilated,
    dot_general as dot_general,
    einsum as einsum,
    ragged_dot as ragged_dot,
)
from nmjax.products.pruning import prune as prune
from nmjax.products.sparsity import Sparsity as Sparsity
from nmjax.programs.transform import transform as transform
from nmjax.pruners import *  # all pruners, as __all__ lists them
from nmjax.pruners.schedules import (
    constant as constant,
    cosine as cosine,
    exponential as exponential,
    linear as linear,
    optax_schedule as optax_schedule,
    stairs as stairs,
)
from nmjax.recipes import methods as methods
from nmjax.recipes.table import Recipe as Recipe
from nmjax.recipes.text import parse as parse, parse_pruner as parse_pruner

__version__ = "0.2.0"

_PARTS = (
    "analysis",
    "core",
    "fusing",
    "products",
    "programs",
    "pruners",
    "recipes",
    "tutorials",
)  # where the names come from


def __dir__() -> list[str]:
    """Return the names that completion shows: the public ones."""
    return [name for name in globals() if name not in _PARTS]
