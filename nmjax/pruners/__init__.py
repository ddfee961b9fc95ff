"""Pruners, one idea per file, with the paper of each; combinators, gradient rules and schedules.

A new pruner is one file here, and its name in this file and in ``nmjax/__init__.py``. `nmjax.parse` knows the
names that this file exports. A pruner outside this repository needs none of these: a text has it as ``module:name``.
"""

from nmjax.pruners.combinators import chain as chain, raw as raw, rescale as rescale
from nmjax.pruners.estimators import decay as decay, sr_ste as sr_ste, ste as ste
from nmjax.pruners.float8 import fp8 as fp8
from nmjax.pruners.in_stages import stage as stage, stages as stages
from nmjax.pruners.input_norms import ria as ria, wanda as wanda
from nmjax.pruners.magnitude import mse as mse
from nmjax.pruners.nothing import identity as identity
from nmjax.pruners.random_choice import uniform as uniform
from nmjax.pruners.remembering import hold as hold, permute as permute
from nmjax.pruners.soft_threshold import soft as soft
from nmjax.pruners.transposable_mask import transposable as transposable
from nmjax.pruners.two_draws import mvue_approx as mvue_approx
from nmjax.pruners.unbiased import mvue as mvue
from nmjax.pruners.whole_rows import rows as rows
