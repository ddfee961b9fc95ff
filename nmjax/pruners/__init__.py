"""Pruners: one idea a file, each to be read beside its paper."""

from nmjax.pruners.identity import identity as identity
from nmjax.pruners.mse import mse as mse
from nmjax.pruners.mvue import mvue as mvue
from nmjax.pruners.mvue_approx import mvue_approx as mvue_approx
from nmjax.pruners.soft import soft as soft
from nmjax.pruners.transposable import transposable as transposable
from nmjax.pruners.uniform import uniform as uniform
