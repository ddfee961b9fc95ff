"""Sparse tensor cores: packed 2:4 arrays, and the kernels that make and multiply them.

XLA's products define what kernels compute. A kernel that does not serve a product says why, and XLA computes it.
"""

from nmjax.kernels.limits import (
    AmpereConfig as AmpereConfig,
    BlackwellConfig as BlackwellConfig,
    HopperConfig as HopperConfig,
)
from nmjax.kernels.multiply import spmm as spmm
from nmjax.kernels.targets import Target as Target, on as on, target as target
