"""Effects against closed forms, other programs' tests, and their own promises on simulated runs."""

import numpy as np
import pytest
from scipy import stats

from experiments.report import effects
from experiments.report.effects import FAILS, HOLDS, OPEN, Effect, Unknown


def simulated(draw, methods, seeds, noise=1.0):
    of_method, of_seed = draw.standard_normal(methods), draw.standard_normal(seeds)
    return {
        f"m{m}": {s: float(of_method[m] + of_seed[s] + noise * draw.standard_normal()) for s in range(seeds)}
        for m in range(methods)
    }, of_method


def test_two_methods_are_a_paired_t_test():
    values, _ = simulated(np.random.default_rng(0), 2, 7)
    a, b = (np.array(list(values[name].values())) for name in ("m0", "m1"))
    effect = effects.effects(values, [("m0", "m1")]).effects[0]
    other = stats.ttest_rel(a, b)
    assert effect.p == pytest.approx(other.pvalue, rel=1e-9)
    assert effect.interval() == pytest.approx(other.confidence_interval(0.95), rel=1e-9)
    assert (effect.freedom, effect.difference) == (6, pytest.approx((a - b).mean()))


def test_more_methods_share_one_variance():
    """The closed form of a full table: residuals of row and column means, and sqrt(2 / seeds)."""
    values, _ = simulated(np.random.default_rng(4), 5, 4)
    table = np.array([list(by_seed.values()) for by_seed in values.values()])
    residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    deviation = np.sqrt((residuals**2).sum() / (4 * 3))
    found = effects.effects(values, [("m2", "m4")])
    assert found.deviation == pytest.approx(deviation)
    assert found.effects[0].error == pytest.approx(deviation * np.sqrt(2 / 4))
    assert found.effects[0].difference == pytest.approx(table[2].mean() - table[4].mean())
    assert found.freedom == 12


def test_missing_seeds_are_no_bias():
    """Without noise the effects are exact, whichever runs are there."""
    draw = np.random.default_rng(2)
    values, of_method = simulated(draw, 4, 6, noise=0.0)
    del values["m0"][0], values["m0"][1], values["m1"][5], values["m3"][2]
    for effect, (a, b) in zip(
        effects.effects(values, [("m0", "m1"), ("m3", "m0")]).effects, ((0, 1), (3, 0)), strict=True
    ):
        assert effect.difference == pytest.approx(of_method[a] - of_method[b])


@pytest.mark.sampled
def test_intervals_cover_as_often_as_they_say():
    """Simulate 2,000 tables with missing runs. The tolerance is three standard errors of 2,000 draws, 1.5 points."""
    draw, covered, wrong = np.random.default_rng(3), 0, 0
    for _ in range(2000):
        values, of_method = simulated(draw, 4, 5)
        del values["m1"][3]
        effect = effects.effects(values, [("m1", "m2")]).effects[0]
        low, high = effect.interval()
        covered += low < of_method[1] - of_method[2] < high
        same = {name: {s: v - of_method[int(name[1])] for s, v in by_seed.items()} for name, by_seed in values.items()}
        pairs = [("m0", "m1"), ("m0", "m2"), ("m0", "m3")]
        wrong += any(effect.p < 0.05 for effect in effects.effects(same, pairs).effects)
    assert abs(covered / 2000 - 0.95) < 0.015
    assert wrong / 2000 < 0.05 + 0.015


def test_holm_against_its_definition():
    """The largest of the products up to each rank, for all orders of small tables."""
    draw = np.random.default_rng(4)
    for count in range(1, 7):
        ps = draw.random(count) ** 3
        order = np.argsort(ps)
        for rank, at in enumerate(order):
            wanted = max(min(1.0, (count - r) * ps[order[r]]) for r in range(rank + 1))
            assert effects.holm(list(ps))[at] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("values", "pair", "why"),
    [
        ({"a": {0: 1.0}, "b": {}}, ("a", "b"), "b has no results"),
        ({"a": {0: 1.0, 1: 2.0}}, ("a", "c"), "c has no results"),
        ({"a": {0: 1.0}, "b": {0: 2.0}}, ("a", "b"), "the noise is not known"),
        ({"a": {0: 1.0, 1: 2.0}, "b": {2: 2.0, 3: 1.0}, "c": {0: 1.0, 1: 2.5}}, ("a", "b"), "share no seed"),
    ],
)
def test_what_the_runs_do_not_tell_is_said(values, pair, why):
    with pytest.raises(Unknown, match=why):
        effects.effects(values, [pair])


@pytest.mark.parametrize(
    ("effect", "better", "as_good"),
    [
        (Effect(1.0, 0.1, 30, 0.0), HOLDS, HOLDS),
        (Effect(-1.0, 0.1, 30, 0.0), FAILS, FAILS),
        (Effect(0.1, 0.1, 30, 0.3), FAILS, HOLDS),  # less than the margin of 0.5
        (Effect(-0.3, 0.05, 30, 0.0), FAILS, HOLDS),  # worse, and by less than the margin
        (Effect(0.3, 1.0, 30, 0.8), OPEN, OPEN),
        (Effect(-0.6, 0.4, 30, 0.2), OPEN, OPEN),
    ],
)
def test_verdicts(effect, better, as_good):
    assert (effects.is_better(effect, 0.5), effects.is_as_good(effect, 0.5)) == (better, as_good)


def test_a_noisy_method_does_not_share_the_variance():
    """Its effects are those of a paired t test. The others' intervals are not wider because of it."""
    values, _ = simulated(np.random.default_rng(6), 5, 12)
    wild = np.random.default_rng(7).standard_normal(12) * 8
    noisy = values | {"wild": dict(enumerate(wild.tolist()))}
    assert effects.scattered(noisy) == {"wild"}
    assert effects.scattered(values) == set()
    found = effects.effects(noisy, [("wild", "m0"), ("m1", "m0")])
    other = stats.ttest_rel(wild, list(values["m0"].values()))
    assert found.effects[0].interval() == pytest.approx(other.confidence_interval(0.95), rel=1e-9)
    assert found.effects[1].error == pytest.approx(effects.effects(values, [("m1", "m0")]).effects[0].error)


@pytest.mark.sampled
def test_equal_methods_are_rarely_called_noisy():
    """At most 5 % of 1,000 tables, and three standard errors of so many draws, 2.1 points."""
    draw = np.random.default_rng(8)
    tables = (simulated(draw, 6, 8)[0] for _ in range(1000))
    assert sum(bool(effects.scattered(values)) for values in tables) / 1000 < 0.071
