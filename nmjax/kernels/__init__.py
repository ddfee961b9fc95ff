"""Sparse tensor cores: packed 2:4 arrays, and the kernels that make and multiply them.

XLA's products define what kernels compute. A kernel that does not serve a product says why, and XLA computes it.
"""

from nmjax.kernels.ampere import AmpereConfig as AmpereConfig
from nmjax.kernels.blackwell import BlackwellConfig as BlackwellConfig
from nmjax.kernels.family import Blocks as Blocks, Target as Target
from nmjax.kernels.hopper import HopperConfig as HopperConfig
from nmjax.kernels.multiply import spmm as spmm
from nmjax.kernels.targets import on as on, target as target
