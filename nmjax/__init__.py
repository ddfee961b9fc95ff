"""N:M structured-sparse training in JAX: pruners, products and methods as values.

>>> import nmjax as nm
>>> nm.prune(nm.mse(2, 4), jnp.array([1., -2., 3., -4.]))
Array([ 0.,  0.,  3., -4.], dtype=float32)
"""

from nmjax import (
    flops as flops,
    groups as groups,
    kernels as kernels,
    linen as linen,
    methods as methods,
    metrics as metrics,
    models as models,
    nnx as nnx,
    optim as optim,
    random as random,
)
from nmjax.combinators import (
    chain as chain,
    hold as hold,
    permute as permute,
    raw as raw,
    rescale as rescale,
    stages as stages,
)
from nmjax.estimators import decay as decay, sr_ste as sr_ste, ste as ste
from nmjax.float8 import fp8 as fp8
from nmjax.packing import Packed as Packed, pack as pack, unpack as unpack
from nmjax.products import (
    conv_general_dilated as conv_general_dilated,
    dot_general as dot_general,
    einsum as einsum,
)
from nmjax.pruners import (
    identity as identity,
    mse as mse,
    mvue as mvue,
    mvue_approx as mvue_approx,
    soft as soft,
    transposable as transposable,
    uniform as uniform,
)
from nmjax.recipes import Recipe as Recipe
from nmjax.schedules import (
    constant as constant,
    cosine as cosine,
    exponential as exponential,
    linear as linear,
    optax_schedule as optax_schedule,
    stairs as stairs,
)
from nmjax.sparsity import Sparsity as Sparsity, prune as prune
from nmjax.spec import parse as parse, parse_pruner as parse_pruner
from nmjax.typing import Ctx as Ctx, Grouped as Grouped, Pruner as Pruner

__version__ = "0.1.0"
