"""Pruners: one idea a file, each to be read beside its paper."""

from nmjax.pruners.magnitude import mse as mse
from nmjax.pruners.nothing import identity as identity
from nmjax.pruners.random_choice import uniform as uniform
from nmjax.pruners.soft_threshold import soft as soft
from nmjax.pruners.transposable_mask import transposable as transposable
from nmjax.pruners.two_draws import mvue_approx as mvue_approx
from nmjax.pruners.unbiased import mvue as mvue
