"""One-shot pruning: make a trained weight n:m without training, from statistics of its inputs.

A solver takes the weight of one layer, [inputs, outputs], and the second moments X'X of its inputs. It returns the
pruned weight, its mask, and the error of the layer's output.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x, w = rng.normal(size=(100, 8)) @ rng.normal(size=(8, 8)), rng.normal(size=(8, 4))
>>> for solve in (magnitude, wanda, sparsegpt, admm): print(f"{solve.__name__:<10}{solve(w, x.T @ x).error:.2f}")
magnitude 0.24
wanda     0.17
sparsegpt 0.08
admm      0.03
"""

from nmjax.oneshot.orders import FreeInputs as FreeInputs
from nmjax.oneshot.solvers import (
    Solved as Solved,
    admm as admm,
    magnitude as magnitude,
    ria as ria,
    sparsegpt as sparsegpt,
    wanda as wanda,
)
