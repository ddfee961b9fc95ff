"""Effects against closed forms, other programs' tests, and their own promises on simulated runs."""

import numpy as np
import pytest
from scipy import stats

from experiments.report import effects
from experiments.report.effects import (
    HOLDS,
    NO_DIFFERENCE,
    OPEN,
    SLIGHTLY,
    SLIGHTLY_WORSE,
    SMALL,
    WORSE,
    Effect,
    Unknown,
)


def simulated(draw, methods, seeds, noise=1.0):
    of_method, of_seed = draw.standard_normal(methods), draw.standard_normal(seeds)
    return {
        f"m{m}": {s: float(of_method[m] + of_seed[s] + noise * draw.standard_normal()) for s in range(seeds)}
        for m in range(methods)
    }, of_method


def test_two_methods_are_a_paired_t_test():
    values, _ = simulated(np.random.default_rng(0), 2, 7)
    a, b = (np.array(list(values[name].values())) for name in ("m0", "m1"))
    effect = effects.effects(values, [("m0", "m1")])[0]
    other = stats.ttest_rel(a, b)
    assert effect.p == pytest.approx(other.pvalue, rel=1e-9)
    assert effect.interval() == pytest.approx(other.confidence_interval(0.95), rel=1e-9)
    assert (effect.degrees_of_freedom, effect.difference) == (6, pytest.approx((a - b).mean()))


def test_more_methods_share_one_variance():
    """The closed form of a full table in which no method scatters more: residuals of row and column means."""
    values, _ = simulated(np.random.default_rng(4), 5, 4)
    assert effects.scattered(values) == set()
    table = np.array([list(by_seed.values()) for by_seed in values.values()])
    residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    deviation = np.sqrt((residuals**2).sum() / (4 * 3))
    found = effects.effects(values, [("m2", "m4")])
    assert found[0].standard_error == pytest.approx(deviation * np.sqrt(2 / 4))
    assert found[0].difference == pytest.approx(table[2].mean() - table[4].mean())
    assert found[0].degrees_of_freedom == 12


def test_missing_seeds_are_no_bias():
    """Without noise the effects are exact, whichever runs are there."""
    draw = np.random.default_rng(2)
    values, of_method = simulated(draw, 4, 6, noise=0.0)
    del values["m0"][0], values["m0"][1], values["m1"][5], values["m3"][2]
    for effect, (a, b) in zip(effects.effects(values, [("m0", "m1"), ("m3", "m0")]), ((0, 1), (3, 0)), strict=True):
        assert effect.difference == pytest.approx(of_method[a] - of_method[b])


@pytest.mark.slow
@pytest.mark.sampled
def test_intervals_cover_as_often_as_they_say():
    """Simulate 2,000 tables with missing runs. The tolerance is three standard errors of 2,000 draws, 1.5 points."""
    draw, covered, wrong = np.random.default_rng(3), 0, 0
    for _ in range(2000):
        values, of_method = simulated(draw, 4, 5)
        del values["m1"][3]
        effect = effects.effects(values, [("m1", "m2")])[0]
        low, high = effect.interval()
        covered += low < of_method[1] - of_method[2] < high
        same = {name: {s: v - of_method[int(name[1])] for s, v in by_seed.items()} for name, by_seed in values.items()}
        pairs = [("m0", "m1"), ("m0", "m2"), ("m0", "m3")]
        wrong += any(effect.p < 0.05 for effect in effects.effects(same, pairs))
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


def test_the_correction_of_a_table_counts_and_not_the_interval_alone():
    effect = Effect(0.2, 0.08, 30, 0.06)
    assert effect.interval()[0] > 0
    assert effects.verdict("better than", effect, 0.5) == OPEN


def judged(draw, margin):
    """Return a random effect, tested against 0 and against minus the margin."""
    spread, shift = draw.choice([0.1, 1.0, 3.0]), draw.normal()
    values = {
        "a": {s: float(shift + spread * draw.standard_normal()) for s in range(6)},
        "b": {s: float(spread * draw.standard_normal()) for s in range(6)},
    }
    pairs = [("a", "b")]
    return effects.effects(values, pairs)[0], effects.effects(values, pairs, [-margin])[0]


@pytest.mark.slow
def test_no_verdict_is_stronger_than_its_interval():
    """Over 3,000 random tables of one claim, where each verdict occurs."""
    draw, seen, margin = np.random.default_rng(11), set(), 0.5
    for _ in range(3000):
        of_zero, of_margin = judged(draw, margin)
        low, high = of_zero.interval()
        better, as_good = (
            effects.verdict(claim, of, margin) for claim, of in (("better than", of_zero), ("as good as", of_margin))
        )
        seen |= {better, f"as good: {as_good}"}
        assert (better in (HOLDS, SMALL)) == (low > 0)
        assert (better in (WORSE, SLIGHTLY_WORSE)) == (high < 0)
        assert (better == SLIGHTLY_WORSE) == (-margin < low and high < 0)
        assert (better == SMALL) == (low > 0 and high < margin)
        assert (better == NO_DIFFERENCE) == (low <= 0 <= high and -margin < low and high < margin)
        assert (as_good in (HOLDS, SLIGHTLY)) == (low > -margin)
        assert (as_good == SLIGHTLY) == (low > -margin and high < 0)
        assert (as_good == WORSE) == (high < -margin)
    assert len(seen) == 6 + 4


def test_holm_corrects_what_was_asked():
    """The p-values of claims that test minus the margin are those of one-sample t tests, corrected."""
    values, _ = simulated(np.random.default_rng(12), 2, 9)
    a, b = (np.array(list(values[name].values())) for name in ("m0", "m1"))
    found = effects.effects(values, [("m0", "m1"), ("m1", "m0")], [-0.5, -0.5])
    ps = [stats.ttest_1samp(difference, -0.5).pvalue for difference in (a - b, b - a)]
    assert [effect.p for effect in found] == pytest.approx(effects.holm(ps))


@pytest.mark.slow
@pytest.mark.sampled
def test_intervals_of_a_method_of_twice_the_noise():
    """docs/evidence/method.md says how far the intervals fall short of 95 %: 11 methods with 5 seeds, 1,000 tables."""
    draw, covered, called = np.random.default_rng(13), 0, 0
    for _ in range(1000):
        values, of_method = simulated(draw, 11, 5)
        values["m1"] = {s: float(v + np.sqrt(3) * draw.standard_normal()) for s, v in values["m1"].items()}
        called += "m1" in effects.scattered(values)
        low, high = effects.effects(values, [("m1", "m2")])[0].interval()
        covered += low < of_method[1] - of_method[2] < high
    assert 0.87 < covered / 1000 < 0.92
    assert 0.28 < called / 1000 < 0.42


def test_a_noisy_method_does_not_share_the_variance():
    """Its effects are those of a paired t test. The others' intervals are not wider because of it."""
    values, _ = simulated(np.random.default_rng(6), 5, 12)
    wild = np.random.default_rng(7).standard_normal(12) * 8
    noisy = values | {"wild": dict(enumerate(wild.tolist()))}
    assert effects.scattered(noisy) == {"wild"}
    assert effects.scattered(values) == set()
    found = effects.effects(noisy, [("wild", "m0"), ("m1", "m0")])
    other = stats.ttest_rel(wild, list(values["m0"].values()))
    assert found[0].interval() == pytest.approx(other.confidence_interval(0.95), rel=1e-9)
    assert found[1].standard_error == pytest.approx(effects.effects(values, [("m1", "m0")])[0].standard_error)


def test_a_method_with_few_seeds_does_not_hide_a_noisy_one():
    """With three seeds, a larger ratio of variances may be chance. The rule goes on to the next method."""
    values, _ = simulated(np.random.default_rng(14), 8, 20)
    values["wild"] = dict(enumerate((1.7 * np.random.default_rng(15).standard_normal(20)).tolist()))
    for spread in np.linspace(0.1, 3, 400):
        values["few"] = {0: 0.0, 1: float(spread), 2: float(-spread)}
        of_few, of_wild = effects._ratio(values, "few"), effects._ratio(values, "wild")
        if of_few[0] > of_wild[0]:
            break
    assert of_few[0] > of_wild[0]
    assert (of_few[1], of_wild[1]) == (False, True)
    assert effects.scattered(values) == {"wild"}


@pytest.mark.slow
@pytest.mark.sampled
def test_equal_methods_are_rarely_called_noisy():
    """At most 5 % of 1,000 tables, and three standard errors of so many draws, 2.1 points."""
    draw = np.random.default_rng(8)
    tables = (simulated(draw, 6, 8)[0] for _ in range(1000))
    assert sum(bool(effects.scattered(values)) for values in tables) / 1000 < 0.071
