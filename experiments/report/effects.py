"""Effects of methods, estimated from runs of several seeds: differences, their intervals, and the verdicts on claims.

The model: a result is the sum of an effect of the method, an effect of the seed, and noise. The noise has the same
variance for all methods, so it is estimated from all runs together. This needs fewer seeds than a variance for each
pair of methods, and it is wrong if one method is much noisier than the others: leave such a method out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05  # the probability that a table without effects calls any difference an effect


class Effect(NamedTuple):
    """The difference between two methods, the first minus the second.

    Attributes:
      difference: The estimate.
      error: Its standard error.
      freedom: The degrees of freedom of the error.
      p: The probability of so large a difference if there is no effect. `effects` adjusts it for the number of effects
        in the table, by Holm's method.
    """

    difference: float
    error: float
    freedom: int
    p: float

    def interval(self, share: float = 0.95) -> tuple[float, float]:
        """Return the limits of the confidence interval that covers this share.

        >>> low, high = Effect(1.0, 0.5, 10, 0.1).interval()
        >>> round(low, 3), round(high, 3)
        (-0.114, 2.114)
        """
        half = _quantile(self.freedom, (1 + share) / 2) * self.error
        return self.difference - half, self.difference + half


class Table(NamedTuple):
    """The effects of a table.

    Attributes:
      effects: One for each pair.
      deviation: The standard deviation of a single run.
      freedom: Its degrees of freedom.
    """

    effects: list[Effect]
    deviation: float
    freedom: int


class Unknown(ValueError):
    """An error: the runs do not determine an effect."""


def effects(values: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]]) -> Table:
    """Return the effects of pairs of methods.

    Args:
      values: The results by method and seed. Seeds may be missing.
      pairs: Pairs of methods: the effect is that of the first over the second.

    Raises:
      Unknown: If a method has no results, if each method has one run, or if two methods share no seed, directly or
        through others.

    >>> values = {"dense": {0: 1.0, 1: 2.0, 2: 3.5}, "sparse": {0: 0.5, 1: 1.7, 2: 2.9}}
    >>> effect = effects(values, [("sparse", "dense")]).effects[0]
    >>> round(effect.difference, 3), round(effect.error, 3), effect.freedom
    (-0.467, 0.088, 2)
    """
    for method in dict.fromkeys(method for pair in pairs for method in pair):
        if not values.get(method):
            raise Unknown(f"{method} has no results")
    methods = [method for method, by_seed in values.items() if by_seed]
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    runs = [(method, seed, result) for method in methods for seed, result in values[method].items()]
    design = np.zeros((len(runs), len(methods) + len(seeds)))
    for row, (method, seed, _) in enumerate(runs):
        design[row, methods.index(method)] = design[row, len(methods) + seeds.index(seed)] = 1.0
    results = np.array([result for *_, result in runs])
    inverse = np.linalg.pinv(design)
    estimates = inverse @ results
    freedom = len(runs) - int(np.linalg.matrix_rank(design))
    if freedom < 1:
        raise Unknown("each method has one run, or no two methods share a seed: the noise is not known")
    variance = float(np.sum((results - design @ estimates) ** 2)) / freedom
    found = []
    for first, second in pairs:
        contrast = np.zeros(design.shape[1])
        contrast[methods.index(first)], contrast[methods.index(second)] = 1.0, -1.0
        weights = contrast @ inverse
        if first == second or not np.allclose(weights @ design, contrast, atol=1e-6):
            raise Unknown(f"{first} and {second} share no seed, directly or through other methods")
        error = math.sqrt(variance * float(weights @ weights))
        found.append(Effect(float(contrast @ estimates), error, freedom, 1.0))
    adjusted = holm([_p(effect) for effect in found])
    return Table([e._replace(p=p) for e, p in zip(found, adjusted, strict=True)], math.sqrt(variance), freedom)


def holm(ps: Sequence[float]) -> list[float]:
    """Return probabilities that are adjusted for their number by Holm's method.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(ps)), key=ps.__getitem__)
    adjusted, largest = [1.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[at]))
        adjusted[at] = largest
    return adjusted


# ---- verdicts ----

HOLDS, FAILS, OPEN = "holds here", "does not hold here", "cannot be told"


def is_better(effect: Effect, margin: float) -> str:
    """Return the verdict on the claim that the first method is better. Larger results are better.

    It holds if the difference is positive with `LEVEL`. It does not hold if the difference is negative with `LEVEL`, or
    if the 90 % interval lies within the margin: then there is no difference that matters.

    >>> is_better(Effect(1.0, 0.2, 20, 0.001), 0.5), is_better(Effect(0.1, 0.1, 20, 0.3), 0.5)
    ('holds here', 'does not hold here')
    >>> is_better(Effect(0.4, 0.5, 20, 0.4), 0.5)
    'cannot be told'
    """
    if effect.p < LEVEL:
        return HOLDS if effect.difference > 0 else FAILS
    low, high = effect.interval(0.9)
    return FAILS if -margin < low and high < margin else OPEN


def is_as_good(effect: Effect, margin: float) -> str:
    """Return the verdict on the claim that the first method is not worse by the margin. Larger results are better.

    It holds if the 90 % interval lies above minus the margin, and does not hold if it lies below.

    >>> is_as_good(Effect(-0.1, 0.1, 20, 0.3), 0.5), is_as_good(Effect(-1.5, 0.2, 20, 0.0), 0.5)
    ('holds here', 'does not hold here')
    """
    low, high = effect.interval(0.9)
    return HOLDS if low > -margin else FAILS if high < -margin else OPEN


def _p(effect: Effect) -> float:
    """Return the probability of so large a difference if there is no effect."""
    from scipy.special import stdtr  # here because it is slow, and a launch does not need it

    if effect.error == 0.0:
        return 1.0 if effect.difference == 0.0 else 0.0
    return float(2 * stdtr(effect.freedom, -abs(effect.difference) / effect.error))


def _quantile(freedom: int, share: float) -> float:
    from scipy.special import stdtrit  # for the same reason

    return float(stdtrit(freedom, share))
