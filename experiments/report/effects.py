"""Effects of methods, estimated from runs of several seeds: differences, their intervals, and the verdicts on claims.

The model: a result is the sum of an effect of the method, an effect of the seed, and noise. The noise has the same
variance for all methods, so it is estimated from all runs together. This needs fewer seeds than a variance for each
pair of methods. If the runs of a method scatter much more than the others, its effects are estimated from its own runs
and those of the method that it is compared with.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

UNEVEN = 3.0  # a method whose variance is so many times that of the others does not share theirs
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
    uneven = scattered(values)
    fit = _fit({method: by_seed for method, by_seed in values.items() if method not in uneven})
    found = []
    for first, second in pairs:
        alone = uneven & {first, second}
        one = _fit({method: values[method] for method in (first, second)}) if alone else fit
        if one.freedom < 1:
            raise Unknown("each method has one run, or no two methods share a seed: the noise is not known")
        found.append(_effect(one, first, second))
    adjusted = holm([_p(effect) for effect in found])
    return Table([e._replace(p=p) for e, p in zip(found, adjusted, strict=True)], math.sqrt(fit.variance), fit.freedom)


def scattered(values: Mapping[str, Mapping[int, float]]) -> set[str]:
    """Return the methods whose runs scatter much more than those of the others, so that they cannot share a variance.

    The variance of their residuals is more than `UNEVEN` times that of the others, and not by chance: the probability
    of such a ratio among equals is below `LEVEL`, divided by the number of methods.

    >>> draw = np.random.default_rng(0)
    >>> runs = lambda spread: {seed: spread * draw.standard_normal() for seed in range(10)}
    >>> scattered({"a": runs(1), "b": runs(1), "c": runs(1), "wild": runs(9)})
    {'wild'}
    """
    found: set[str] = set()
    while True:
        left = {method: by_seed for method, by_seed in values.items() if method not in found}
        worst = max(left, key=lambda method: _ratio(left, method)[0], default="")
        if len(left) < 3 or not _ratio(left, worst)[1]:
            return found
        found.add(worst)


def _ratio(values: Mapping[str, Mapping[int, float]], method: str) -> tuple[float, bool]:
    """Return the variance of a method over that of the others, and whether it is too large for chance.

    The method's own variance is that of its differences to the fit of the others, which have none of its noise.
    """
    from scipy.special import fdtrc  # here because it is slow, and a launch does not need it

    others = _fit({name: by_seed for name, by_seed in values.items() if name != method})
    shared = [seed for seed in values[method] if seed in others.of_seed]
    if len(shared) < 3 or others.freedom < 1 or others.variance == 0.0:
        return 0.0, False
    own = float(np.var([values[method][seed] - others.of_seed[seed] for seed in shared], ddof=1))
    expected = others.variance * (1 + 1 / others.methods)  # a seed's effect is a mean over the other methods
    ratio = own / expected
    by_chance = float(fdtrc(len(shared) - 1, others.freedom, ratio)) * len(values)
    return ratio, ratio > UNEVEN and by_chance < LEVEL


class _Fit(NamedTuple):
    """The two-way model, fitted to results."""

    estimates: dict[str, float]
    of_seed: dict[int, float]
    inverse: np.ndarray
    design: np.ndarray
    variance: float
    freedom: int
    methods: int


def _fit(values: Mapping[str, Mapping[int, float]]) -> _Fit:
    methods = [method for method, by_seed in values.items() if by_seed]
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    runs = [(method, seed, result) for method in methods for seed, result in values[method].items()]
    design = np.zeros((len(runs), len(methods) + len(seeds)))
    for row, (method, seed, _) in enumerate(runs):
        design[row, methods.index(method)] = design[row, len(methods) + seeds.index(seed)] = 1.0
    results = np.array([result for *_, result in runs])
    inverse = np.linalg.pinv(design)
    found = inverse @ results
    freedom = len(runs) - int(np.linalg.matrix_rank(design))
    variance = float(np.sum((results - design @ found) ** 2)) / freedom if freedom else math.nan
    by_method = dict(zip(methods, found.tolist(), strict=False))
    by_seed = dict(zip(seeds, found[len(methods) :].tolist(), strict=True))
    return _Fit(by_method, by_seed, inverse, design, variance, freedom, len(methods))


def _effect(fit: _Fit, first: str, second: str) -> Effect:
    """Return the difference between two methods of a fit. Its probability is not yet adjusted, and set to 1."""
    methods = list(fit.estimates)
    contrast = np.zeros(fit.design.shape[1])
    contrast[methods.index(first)], contrast[methods.index(second)] = 1.0, -1.0
    weights = contrast @ fit.inverse
    if first == second or not np.allclose(weights @ fit.design, contrast, atol=1e-6):
        raise Unknown(f"{first} and {second} share no seed, directly or through other methods")
    difference = fit.estimates[first] - fit.estimates[second]
    return Effect(difference, math.sqrt(fit.variance * float(weights @ weights)), fit.freedom, 1.0)


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
SMALL = "holds here, by less than the margin"


def is_better(effect: Effect, margin: float) -> str:
    """Return the verdict on the claim that the first method is better. Larger results are better.

    It holds if the difference is positive with `LEVEL`; if its 90 % interval lies within the margin, the verdict says
    so. It does not hold if the difference is negative with `LEVEL`, or if there is no difference with `LEVEL` and the
    90 % interval lies within the margin.

    >>> is_better(Effect(1.0, 0.2, 20, 0.001), 0.5), is_better(Effect(0.1, 0.1, 20, 0.3), 0.5)
    ('holds here', 'does not hold here')
    >>> is_better(Effect(0.4, 0.5, 20, 0.4), 0.5), is_better(Effect(0.2, 0.05, 20, 0.001), 0.5)
    ('cannot be told', 'holds here, by less than the margin')
    """
    low, high = effect.interval(0.9)
    within = -margin < low and high < margin
    if effect.p < LEVEL and effect.difference > 0:
        return SMALL if within else HOLDS
    return FAILS if effect.p < LEVEL or within else OPEN


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
