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
LEVEL = 0.05  # the chance that a table without any effect shows one


class Effect(NamedTuple):
    """The difference between two methods, the first minus the second.

    Attributes:
      difference: The estimate.
      standard_error: Its standard error.
      degrees_of_freedom: Those of the standard error.
      p: The p-value of the hypothesis that the difference is 0, or another value that is asked for. `effects` corrects
        it for the number of effects in the table, by Holm's method.
    """

    difference: float
    standard_error: float
    degrees_of_freedom: int
    p: float

    def interval(self) -> tuple[float, float]:
        """Return the limits of the 95 % confidence interval.

        >>> low, high = Effect(1.0, 0.5, 10, 0.1).interval()
        >>> round(low, 3), round(high, 3)
        (-0.114, 2.114)
        """
        from scipy.special import stdtrit  # here because it is slow, and a launch does not need it

        half = float(stdtrit(self.degrees_of_freedom, 0.975)) * self.standard_error
        return self.difference - half, self.difference + half


class Unknown(ValueError):
    """An error: the runs do not determine an effect."""


def effects(
    values: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    tested: Sequence[float] = (),
    count: int = 0,
) -> list[Effect]:
    """Return the effects of pairs of methods.

    Args:
      values: The results by method and seed. Seeds may be missing.
      pairs: Pairs of methods: the effect is that of the first over the second.
      tested: For each pair the difference that its p-value tests; without it, 0.
      count: The number of effects for which p-values are corrected, if it is larger than that of the pairs.

    Raises:
      Unknown: If a method has no results, if each method has one run, or if two methods share no seed, directly or
        through others.

    >>> values = {"dense": {0: 1.0, 1: 2.0, 2: 3.5}, "sparse": {0: 0.5, 1: 1.7, 2: 2.9}}
    >>> (effect,) = effects(values, [("sparse", "dense")])
    >>> round(effect.difference, 3), round(effect.standard_error, 3), effect.degrees_of_freedom
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
        if one.degrees_of_freedom < 1:
            raise Unknown("each method has one run, or no two methods share a seed: the noise is not known")
        found.append(_effect(one, first, second))
    ps = [_p(effect, at) for effect, at in zip(found, tested or [0.0] * len(found), strict=True)]
    corrected = holm([*ps, *[1.0] * (count - len(ps))])
    return [effect._replace(p=p) for effect, p in zip(found, corrected, strict=False)]


def crossing(
    along: Sequence[float], curve: Sequence[Sequence[float]], own: Sequence[float]
) -> tuple[float, float, float]:  # fmt: skip
    """Return where a curve has the mean of some results, and the limits of the 95 % interval.

    The curve is a line between neighbouring points. The interval has all places where a paired t test over the seeds
    does not tell the curve from the results. It is looked for between the first point and the last.

    Args:
      along: The places of the points of the curve, in ascending order.
      curve: The results at each place, by seed.
      own: The results that are looked for, with the same seeds.

    >>> where, low, high = crossing((0.0, 1.0), ((4.0, 4.2, 4.1), (2.0, 2.2, 2.1)), (3.0, 3.1, 3.2))
    >>> round(where, 3), round(low, 2), round(high, 2)
    (0.5, 0.38, 0.62)
    """
    from scipy.special import stdtrit  # here because it is slow, and a launch does not need it

    places = np.linspace(along[0], along[-1], 4001)
    lines = np.array([np.interp(places, along, by_place) for by_place in np.transpose(curve)])
    off = lines - np.array(own)[:, None]
    mean, error = off.mean(axis=0), off.std(axis=0, ddof=1) / math.sqrt(len(own))
    alike = places[np.abs(mean) <= stdtrit(len(own) - 1, 1 - LEVEL / 2) * error]
    where = float(places[np.argmin(np.abs(mean))])
    return where, float(min(alike, default=where)), float(max(alike, default=where))


def scattered(values: Mapping[str, Mapping[int, float]]) -> set[str]:
    """Return the methods whose runs scatter much more than those of the others, so that they cannot share a variance.

    The variance of their residuals is more than `UNEVEN` times that of the others, and not by chance: the p-value of
    such a ratio among equals is below `LEVEL`, divided by the number of methods.

    >>> draw = np.random.default_rng(0)
    >>> runs = lambda spread: {seed: spread * draw.standard_normal() for seed in range(10)}
    >>> scattered({"a": runs(1), "b": runs(1), "c": runs(1), "wild": runs(9)})
    {'wild'}
    """
    found: set[str] = set()
    while True:
        left = {method: by_seed for method, by_seed in values.items() if method not in found}
        ratios = {method: _ratio(left, method) for method in left} if len(left) > 2 else {}
        wild = {method: ratio for method, (ratio, significant) in ratios.items() if significant}
        if not wild:
            return found
        found.add(max(wild, key=wild.__getitem__))


def _ratio(values: Mapping[str, Mapping[int, float]], method: str) -> tuple[float, bool]:
    """Return the variance of a method over that of the others, and whether it is too large for chance.

    The method's own variance is that of its differences to the fit of the others, which have none of its noise.
    """
    from scipy.special import fdtrc  # here because it is slow, and a launch does not need it

    others = _fit({name: by_seed for name, by_seed in values.items() if name != method})
    shared = [seed for seed in values[method] if seed in others.of_seed]
    if len(shared) < 3 or others.degrees_of_freedom < 1 or others.variance == 0.0:
        return 0.0, False
    own = float(np.var([values[method][seed] - others.of_seed[seed] for seed in shared], ddof=1))
    expected = others.variance * (1 + 1 / len(others.estimates))  # a seed's effect is a mean over the other methods
    ratio = own / expected
    by_chance = float(fdtrc(len(shared) - 1, others.degrees_of_freedom, ratio)) * len(values)
    return ratio, ratio > UNEVEN and by_chance < LEVEL


class _Fit(NamedTuple):
    """The model, fitted to results: its estimates of methods and seeds, and the variance of the noise."""

    estimates: dict[str, float]
    of_seed: dict[int, float]
    inverse: np.ndarray
    design: np.ndarray
    variance: float
    degrees_of_freedom: int


def _fit(values: Mapping[str, Mapping[int, float]]) -> _Fit:
    methods = [method for method, by_seed in values.items() if by_seed]
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    runs = [(method, seed, result) for method in methods for seed, result in values[method].items()]
    if not runs:
        return _Fit({}, {}, np.zeros((0, 0)), np.zeros((0, 0)), math.nan, 0)
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
    return _Fit(by_method, by_seed, inverse, design, variance, freedom)


def _effect(fit: _Fit, first: str, second: str) -> Effect:
    """Return the difference between two methods of a fit, without its p-value."""
    methods = list(fit.estimates)
    contrast = np.zeros(fit.design.shape[1])
    contrast[methods.index(first)], contrast[methods.index(second)] = 1.0, -1.0
    weights = contrast @ fit.inverse
    if first == second or not np.allclose(weights @ fit.design, contrast, atol=1e-6):
        raise Unknown(f"{first} and {second} share no seed, directly or through other methods")
    difference = fit.estimates[first] - fit.estimates[second]
    return Effect(difference, math.sqrt(fit.variance * float(weights @ weights)), fit.degrees_of_freedom, math.nan)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for their number by Holm's method.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(ps, kind="stable")
    factors = len(ps) - np.arange(len(ps))
    adjusted = np.empty(len(ps))
    adjusted[order] = np.maximum.accumulate(np.minimum(factors * np.asarray(ps, float)[order], 1.0))
    return adjusted.tolist()


# ---- verdicts ----

HOLDS, SMALL = "holds", "holds: better by less than the margin"
SLIGHTLY = "holds: worse by less than the margin"
WORSE, NO_DIFFERENCE = "does not hold: worse", "no difference that matters"
SLIGHTLY_WORSE = "does not hold: worse by less than the margin"
OPEN = "undecided"
KINDS = {"holds": HOLDS, NO_DIFFERENCE: NO_DIFFERENCE, "worse": "does not hold", OPEN: OPEN}  # how verdicts begin


def plain(verdict: str) -> str:
    """Return a verdict without the words that its kind adds.

    >>> plain("does not hold: worse"), plain("holds: better by less than the margin"), plain("holds")
    ('worse', 'better by less than the margin', 'holds')
    """
    return verdict.removeprefix("does not hold: ").removeprefix("holds: ")


def kind(verdict: str) -> str:
    """Return the kind of a verdict, a key of `KINDS`; "" for a text that is no verdict.

    >>> kind("does not hold: worse by less than the margin"), kind("not run")
    ('worse', '')
    """
    return next((name for name, start in KINDS.items() if verdict.startswith(start)), "")


def verdict(claim: str, effect: Effect, margin: float) -> str:
    """Return the verdict on a claim. Larger results are better.

    Args:
      claim: "better than": the first method is better. "as good as": it is not worse by the margin or more.
      effect: The difference. Its p-value tests 0 for "better than", and minus the margin for "as good as".
      margin: The largest difference that does not matter.

    >>> verdict("better than", Effect(1.0, 0.2, 20, 0.001), 0.5), verdict("as good as", Effect(-1.5, 0.2, 20, 0.0), 0.5)
    ('holds', 'does not hold: worse')
    """
    low, high = effect.interval()
    within = -margin < low and high < margin
    if effect.p >= LEVEL:
        return NO_DIFFERENCE if claim == "better than" and within and low <= 0 <= high else OPEN
    if claim == "as good as":
        return WORSE if effect.difference < -margin else SLIGHTLY if high < 0 else HOLDS
    if effect.difference < 0:
        return SLIGHTLY_WORSE if within else WORSE
    return SMALL if within else HOLDS


def _p(effect: Effect, at: float) -> float:
    """Return the p-value of the hypothesis that the difference has a value."""
    from scipy.special import stdtr  # here because it is slow, and a launch does not need it

    off = abs(effect.difference - at)
    if effect.standard_error == 0.0:
        return 1.0 if off == 0.0 else 0.0
    return float(2 * stdtr(effect.degrees_of_freedom, -off / effect.standard_error))
