"""Pruners, one idea per file, with the paper of each; combinators, gradient rules and schedules.

A new pruner is one file here, and its name in this file: ``nmjax`` exports what is in ``__all__``, and `nmjax.parse`
knows it. A pruner outside this repository needs none of these: a text has it as ``module:name``.
"""

from nmjax.pruners.by_gradient import fisher, movement, regrow, saliency
from nmjax.pruners.combinators import chain, raw, rescale
from nmjax.pruners.estimators import decay, sr_ste, ste
from nmjax.pruners.float4 import fp4
from nmjax.pruners.float8 import fp8
from nmjax.pruners.in_stages import stage, stages
from nmjax.pruners.input_norms import ria, wanda
from nmjax.pruners.joint_choices import pairs, shared
from nmjax.pruners.magnitude import mse, nonzeros
from nmjax.pruners.nothing import identity
from nmjax.pruners.random_choice import uniform
from nmjax.pruners.remembering import hold, permute
from nmjax.pruners.soft_threshold import soft
from nmjax.pruners.transposable_mask import transposable
from nmjax.pruners.two_draws import mvue_approx
from nmjax.pruners.unbiased import mvue
from nmjax.pruners.whole_rows import rows

__all__ = [
    "chain",
    "decay",
    "fisher",
    "fp4",
    "fp8",
    "hold",
    "identity",
    "movement",
    "mse",
    "mvue",
    "mvue_approx",
    "nonzeros",
    "pairs",
    "permute",
    "raw",
    "regrow",
    "rescale",
    "ria",
    "rows",
    "saliency",
    "shared",
    "soft",
    "sr_ste",
    "stage",
    "stages",
    "ste",
    "transposable",
    "uniform",
    "wanda",
]
