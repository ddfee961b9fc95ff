"""Laws that every pruner obeys, checked over one table of pruners.

The message of a failure names the law, the pruner, the input, and what was found and wanted.
"""

from dataclasses import dataclass
from functools import cache, wraps

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import nmjax as nm
from nmjax.core.context import Axes

pytestmark = pytest.mark.sampled

LATE = 10**6  # every schedule of the table has ended by then


@dataclass(frozen=True)
class Case:
    p: nm.Pruner
    nm: tuple[int, int] | None  # at most n of m values are kept at this step
    step: int = 0
    commutes: bool = False  # True: it commutes with permutations inside a group
    chooses_blindly: bool = False  # True: the choice ignores values, so NaN may be dropped
    local: bool = True  # True: the result of a group depends on that group only
    final: str | None = None  # the text of the final form, or None if there is none

    def __str__(self):
        return f"{self.p}@{self.step}" if self.step else f"{self.p}"


def selector(p, n, m, **more):
    return Case(p, (n, m), commutes=True, final=f"{p}", **more)


mse, mvue, uniform, soft, transposable = nm.mse, nm.mvue, nm.uniform, nm.soft, nm.transposable
_rows = ((0, nm.identity), (10, mse(3, 4)), (20, mse(2, 4)))
_geometric = ((0, mse(8, 32)), (10, mse(2, 8)), (20, mse(1, 4)))
_fading = nm.linear(1, 0, 10)

CASES = [
    *(selector(mse(n, m), n, m) for n, m in ((1, 2), (1, 4), (2, 4), (4, 4), (3, 8), (8, 16), (8, 32), (1, 128))),
    *(Case(mvue(n, m), (n, m)) for n, m in ((1, 2), (2, 4), (3, 8), (8, 32), (1, 128))),
    *(Case(nm.mvue_approx(2, m), (2, m)) for m in (4,)),
    *(Case(uniform(n, m), (n, m), chooses_blindly=True) for n, m in ((2, 4), (1, 128))),
    Case(uniform(3, 8, rescale=False), (3, 8), chooses_blindly=True),
    *(Case(soft(n, m), (n, m), final=f"soft({n},{m})") for n, m in ((1, 2), (2, 4), (8, 32))),
    selector(transposable(2, 4), 2, 4, local=False),
    Case(transposable(4, 8), (4, 8), local=False, final="transposable(4,8)"),
    Case(nm.identity, None, commutes=True, final="identity"),
    selector(nm.chain(mse(2, 4), mse(1, 4)), 1, 4),
    Case(soft(2, 4, scale="one"), (2, 4), final="soft(2,4,scale='one')"),
    Case(soft(2, 4, scale="now"), (2, 4), local=False, final="soft(2,4,scale='now')"),
    Case(nm.chain(soft(2, 4), nm.fp8("e4m3")), (2, 4), local=False, final="chain(soft(2,4),fp8('e4m3'))"),
    Case(nm.chain(mvue(2, 4), nm.fp8("e5m2")), (2, 4), local=False),
    Case(nm.chain(uniform(2, 4, rescale=False), mvue(1, 4)), (1, 4), chooses_blindly=True),
    Case(nm.chain(nm.hold(mse(2, 4), 5), soft(1, 4)), (1, 4), final="chain(hold(mse(2,4)),soft(1,4))"),
    Case(nm.rescale(mse(2, 4), "group"), (2, 4), final="rescale(mse(2,4),over='group')"),
    Case(nm.rescale(mse(2, 4)), (2, 4), local=False, final="rescale(mse(2,4))"),
    Case(nm.rescale(mse(2, 4), "spatial"), (2, 4), local=False, final="rescale(mse(2,4),over='spatial')"),
    Case(nm.decay(mse(2, 4), _fading), None, step=5, final="mse(2,4)"),
    Case(nm.decay(mse(2, 4), _fading, "autodiff"), (2, 4), step=10, final="mse(2,4)"),
    Case(nm.decay(mse(4, 8), nm.exponential(1e-3, end=100)), None, step=50, final="mse(4,8)"),
    Case(nm.stages(_rows), (3, 4), step=10, commutes=True, final="mse(2,4)"),
    Case(nm.stages(_geometric), (2, 8), step=19, final="mse(1,4)"),
    Case(nm.stages(((0, mvue(2, 4)), (10, nm.hold(mse(2, 4))))), (2, 4), final="hold(mse(2,4))"),
    Case(nm.stages(((0, nm.ste(mse(2, 4))), (10, soft(2, 4)))), (2, 4), step=15, final="soft(2,4)"),
    Case(nm.hold(mse(2, 4), 40), (2, 4), final="hold(mse(2,4))"),
    Case(nm.hold(transposable(2, 4)), (2, 4), local=False, final="hold(transposable(2,4))"),
    Case(
        nm.hold(uniform(2, 4, rescale=False), 7), (2, 4), chooses_blindly=True,
        final="hold(uniform(2,4,rescale=False))",
    ),
    Case(nm.wanda(2, 4), (2, 4), final="wanda(2,4)"),
    Case(nm.ria(2, 4), (2, 4), final="ria(2,4)"),
    Case(nm.saliency(2, 4), (2, 4), final="saliency(2,4)"),
    Case(nm.movement(1, 8), (1, 8), final="movement(1,8)"),
    Case(nm.regrow(2, 4, every=3), (2, 4), final="regrow(2,4,every=3)"),
    Case(nm.hold(nm.fisher(2, 4), 3), (2, 4), final="hold(fisher(2,4))"),
    Case(nm.permute(mse(2, 4), 3, 4), (2, 4), final="permute(mse(2,4),every=None,draws=4)"),
    Case(nm.fp8("e4m3"), None, local=False, final="fp8('e4m3')"),
    Case(nm.fp4(), None, local=False, final="fp4()"),
    Case(nm.chain(mvue(2, 4), nm.fp4("random")), (2, 4), local=False),
    Case(nm.pairs(mse(2, 4)), (4, 8), chooses_blindly=True, final="pairs(mse(2,4))"),
    Case(nm.pairs(mvue(2, 4)), (4, 8), chooses_blindly=True),
    Case(nm.shared(mse(2, 4), 2), (2, 4), local=False, chooses_blindly=True, final="shared(mse(2,4),v=2)"),
    Case(nm.chain(nm.shared(mvue(4, 8), 2), mvue(2, 8)), (2, 8), local=False, chooses_blindly=True),
    Case(nm.ste(mse(1, 4)), (1, 4), commutes=True, final="mse(1,4)"),
    Case(nm.ste(mvue(2, 4)), (2, 4)),
    Case(nm.sr_ste(mse(2, 4), 6e-5), (2, 4), commutes=True, final="mse(2,4)"),
    Case(nm.raw(mse(1, 2)), (1, 2), final="raw(mse(1,2))"),
    *(  # NaN in one column decides for all columns
        Case(nm.rows(p), (2, 4), local=False, chooses_blindly=True, final=final)
        for p, final in (
            (mse(2, 4), "rows(mse(2,4))"), (mvue(2, 4), None), (soft(2, 4), "rows(soft(2,4))"),
            (nm.hold(mse(2, 4)), "rows(hold(mse(2,4)))"), (uniform(2, 4), None),
        )
    ),
    Case(nm.raw(mvue(1, 2)), (1, 2)),
]  # fmt: skip

FIRST, MIDDLE, LAST = (np.float32, 0), (ml_dtypes.bfloat16, 1), (np.float32, 3)


def law(*cases, layouts=(FIRST, MIDDLE, LAST)):
    """Parametrize a test with every case in every layout. Wide groups skip the first axis: they compile slowly."""
    table = [
        pytest.param(c, *layout, id=f"{c}-{np.dtype(layout[0]).name}-{layout[1]}")
        for c in cases
        for layout in layouts
        if c.p.facts.block < 32 or layout != FIRST
    ]
    return lambda test: pytest.mark.parametrize(("case", "dtype", "axis"), table)(_named(test))


def each_case(test):
    """Parametrize a test with every case."""
    return pytest.mark.parametrize("case", CASES, ids=str)(_named(test))


def _named(test):
    """Start the message of a failure with the law, the pruner and the input that broke it."""

    @wraps(test)
    def named(case, *layout, **more):
        DRAWN.clear()
        try:
            test(case, *layout, **more)
        except AssertionError as error:
            broken_law = test.__name__.removeprefix("test_").replace("_", " ")
            drawn = f" for {DRAWN[-1]}" if DRAWN else ""
            raise AssertionError(f"the law '{broken_law}' fails for {case}{drawn}: {error}") from error

    return named


def holds(ok, law, found, wanted):
    """Fail if something does not hold everywhere. The message has the first place, and the values found and wanted."""
    ok, found, wanted = np.broadcast_arrays(ok, found, wanted)
    if not ok.all():
        at = tuple(map(int, np.argwhere(~ok)[0]))
        raise AssertionError(
            f"{law}: found {found[at]}, wanted {wanted[at]}, at {at} and {(~ok).sum() - 1} more places"
        )


DRAWN: list[str] = []
"""The inputs of the law that is being checked, in words."""


# ---- calls ----


def call(p, x, axis, axes, key, step, state):
    """Return the pruned array, and the mask if the pruner only keeps or drops."""
    ctx = nm.Ctx(key, step, state, axes)
    return p(x, axis, ctx), p.mask(x, axis, ctx) if p.facts.selects else None


def init(p, x, axis, axes, key, step, state):
    return p.init(x, axis, nm.Ctx(key, step, None, axes))


COMPILED = {f: jax.jit(f, static_argnums=(0, 2, 3)) for f in (call, init)}
KEY = nm.random.words(7)


def run(case, x, axis, state=None, *, axes=None, step=None, jit=True, p=None, mask=False):
    function = COMPILED[call] if jit else call
    x = x if jit else jnp.asarray(x)
    y = function(p or case.p, x, axis, axes, KEY, case.step if step is None else step, state)
    return tuple(map(np.asarray, y)) if mask else np.asarray(y[0])


@cache
def has_state(case):
    x = np.ones(shape_of(case, 3), np.float32)
    return jax.eval_shape(lambda: init(case.p, x, 3, None, KEY, 0, None)) is not None


def begun(case, x, axis, axes=None):
    return COMPILED[init](case.p, x, axis, axes, KEY, case.step, None) if has_state(case) else None


def shape_of(case, axis):
    """Return a shape of four dimensions whose pruned one divides by m; for tiles the others do too."""
    block = case.p.facts.block
    shape = [block] * 3 if "transposable" in f"{case.p}" else [3, 2, 4]
    shape.insert(axis, block * (2 if block > 4 else 3))
    return tuple(shape)


def drawn(kind, shape, dtype, axis, seed):
    """Note an input for the message of a failure, and return the generator that makes it."""
    DRAWN.append(f"{kind}, {np.dtype(dtype).name} {shape} pruned along axis {axis}, seed {seed}")
    return np.random.default_rng(seed)


def normal(case, dtype, axis, seed=0, kind="normal numbers"):
    shape = shape_of(case, axis)
    return drawn(kind, shape, dtype, axis, seed).normal(size=shape).astype(dtype)


def distinct(case, dtype, axis):
    """Return groups of 1 to m in random order and with random signs. They have no ties, not even in bfloat16."""
    if "transposable" in f"{case.p}":  # sums of whole masks must differ
        return normal(case, dtype, axis)
    m, shape = case.p.facts.block, shape_of(case, 3)
    rng = drawn("numbers of different magnitudes", shape_of(case, axis), dtype, axis, 1)
    ranks = rng.permuted(np.broadcast_to(np.arange(1.0, m + 1), (*shape[:-1], shape[-1] // m, m)), axis=-1)
    return np.moveaxis((ranks * rng.choice([-1, 1], ranks.shape)).reshape(shape), -1, axis).astype(dtype)


def grouped(case, x, axis, state):
    """Return the groups whose counts the case promises, as (..., m), in permuted order if the pruner permutes."""
    if isinstance(case.p, nm.permute):
        x = np.take(x, np.asarray(state), axis)
    return np.moveaxis(x, axis, -1).reshape(-1, case.nm[1])


def wide(x):
    return x.astype(np.float32)


def same(found, wanted, law="the result"):
    found, wanted = wide(found), wide(wanted)
    assert found.shape == wanted.shape
    holds((found == wanted) | (np.isnan(found) & np.isnan(wanted)), law, found, wanted)


# ---- the laws ----


@law(*CASES)
def test_shape_dtype_and_counts(case, dtype, axis):
    for seed, (kind, spoil) in enumerate(
        (
            ("normal numbers", lambda x: x),
            ("rounded normal numbers", np.round),
            ("normal numbers, zero below 0.7", lambda x: np.where(np.abs(x) < 0.7, 0, x)),
            ("ones", np.ones_like),
        )
    ):
        x = spoil(wide(normal(case, dtype, axis, seed, kind))).astype(dtype)
        state = begun(case, x, axis)
        y = run(case, x, axis, state)
        assert (y.shape, y.dtype) == (x.shape, x.dtype), (
            f"found {y.dtype} {y.shape}, wanted the input's dtype and shape"
        )
        holds(np.isfinite(wide(y)), "finite values stay finite", wide(y), "a finite value")
        holds((x != 0) | (y == 0), "zeros stay zeros", wide(y), 0)
        assert case.p.facts.keeps_zeros, "found keeps_zeros=False, wanted True"
        if case.nm:
            counts = grouped(case, y != 0, axis, state).sum(1)
            holds(counts <= case.nm[0], "values kept in a group", counts, f"at most {case.nm[0]} of {case.nm[1]}")
        if seed == 0:
            assert (y != 0).any(), "found zeros only, wanted some of the values"
            assert case.nm in (None, (4, 4)) or (y == 0).any(), "found no zero, wanted some"


@law(*(c for c in CASES if c.p.facts.selects))
def test_selectors_only_keep_or_drop(case, dtype, axis):
    x = normal(case, dtype, axis)
    state = begun(case, x, axis)
    y, kept = run(case, x, axis, state, mask=True)
    assert (kept.dtype, kept.shape) == (bool, x.shape), f"found a mask {kept.dtype} {kept.shape}, wanted bool {x.shape}"
    same(y, np.where(kept, x, np.zeros((), dtype)), "what the mask keeps")
    same(run(case, y, axis, state), y, "pruned again, it stays the same")
    if case.nm:
        counts = grouped(case, kept, axis, state).sum(1)
        holds(counts == case.nm[0], "ones of the mask in a group", counts, case.nm[0])


def test_which_of_the_table_select():
    plain = {c.p for c in CASES if c.p.facts.selects}
    assert {nm.identity, mse(2, 4), transposable(2, 4), uniform(3, 8, rescale=False), nm.hold(mse(2, 4), 40)} <= plain
    assert not plain & {mvue(2, 4), soft(2, 4), uniform(2, 4), nm.fp8("e4m3"), nm.rescale(mse(2, 4))}


@law(*(c for c in CASES if c.commutes))
def test_selectors_commute_with_permutations_inside_a_group(case, dtype, axis):
    if not case.local:
        dtype = np.float32  # sums of eight bfloat16 values may tie
    x = distinct(case, dtype, axis)
    block = case.nm[1] if case.nm else case.p.facts.block
    order = np.random.default_rng(2).permutation(block)
    order = (np.arange(0, x.shape[axis], block)[:, None] + order).ravel()
    same(run(case, np.take(x, order, axis), axis), np.take(run(case, x, axis), order, axis))


@law(*CASES)
def test_signs_and_powers_of_two_pass_through(case, dtype, axis):
    x = normal(case, dtype, axis)
    state = begun(case, x, axis)
    y = run(case, x, axis, state)
    same(run(case, -x, axis, state), -y, "of the negative input")
    for power in (-20, 30) if "now" in f"{case.p}" else (-60, 60):  # whose scale is a ratio of sums of squares
        scale = np.array(2.0**power, dtype)
        same(run(case, x * scale, axis, state), y * scale, f"of the input times 2**{power}")


@law(*CASES)
def test_groups_of_zeros_give_plain_zeros(case, dtype, axis):
    x = np.moveaxis(normal(case, dtype, axis), axis, -1).copy()
    x[..., : case.p.facts.block] = 0
    for zeros in (np.moveaxis(x, -1, axis), np.zeros(shape_of(case, axis), dtype)):
        y = wide(run(case, zeros, axis, begun(case, zeros, axis)))
        holds(np.isfinite(y), "finite values stay finite", y, "a finite value")
        zero_groups = np.moveaxis(y, axis, -1)[..., : case.p.facts.block]
        holds((zero_groups == 0) & ~np.signbit(zero_groups), "of a group of zeros", zero_groups, 0.0)


# Noise depends on the position, so pruners that draw are left out.
@law(*(c for c in CASES if not c.p.facts.stochastic and "uniform" not in f"{c.p}"), layouts=[FIRST])
def test_along_any_axis_as_along_the_last(case, dtype, axis):
    x = normal(case, dtype, axis)
    moved = np.moveaxis(x, axis, -1)
    others = [a for a in range(4) if a != axis]  # moveaxis puts them in this order, before the pruned one
    axes = Axes(others.index(others[-1]), tuple(others.index(a) for a in others if 0 < a < 3))
    if not isinstance(case.p, nm.rescale):
        axes = None  # the convention finds the other axis, and only `rescale` reads space
    state, moved_state = begun(case, x, axis), begun(case, moved, 3, axes)
    move = lambda a: np.moveaxis(np.asarray(a), axis, -1) if a.ndim == 4 else np.asarray(a)
    state_after = jax.tree.map(move, state)
    # the order of summation differs
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6), state_after, moved_state)
    got, expected = run(case, moved, 3, state_after, axes=axes), move(run(case, x, axis, state))
    if isinstance(case.p, nm.rescale) or getattr(case.p, "scale", "") == "now":  # these sum over more than one group
        np.testing.assert_allclose(wide(got), wide(expected), rtol=1e-6 if dtype == np.float32 else 2**-7)
    else:
        same(got, expected)


def broken(case, dtype, axis):
    """Return values of which some are NaN or infinite, up to whole groups, and where; for tiles only one of them."""
    x = np.moveaxis(normal(case, dtype, axis), axis, -1)
    rng = drawn("normal numbers, NaN and infinities", shape_of(case, axis), dtype, axis, 3)
    groups = x.reshape(-1, case.nm[1] if case.nm else case.p.facts.block)
    bad = rng.random(groups.shape) < rng.choice([0.1, 0.5, 1.0], (len(groups), 1))
    bad &= rng.random((len(groups), 1)) < 0.4
    bad[0, 0] = True
    if "transposable" in f"{case.p}":
        bad[:] = False
        bad[0, 1] = True
    bad = np.moveaxis(bad.reshape(x.shape), -1, axis)
    return np.where(
        bad, rng.choice(np.array([np.nan, np.inf, -np.inf], dtype), bad.shape), np.moveaxis(x, -1, axis)
    ), bad


@law(*CASES)
def test_what_is_not_finite_stays_visible(case, dtype, axis):
    x, bad = broken(case, dtype, axis)
    state = begun(case, x, axis)
    y = wide(run(case, x, axis, state))
    if case.nm is None:
        holds(
            np.isfinite(y) != bad,
            "NaN and infinities stay, and no others come",
            y,
            np.where(bad, "NaN or inf", "finite"),
        )
        return
    n = case.nm[0]
    kept, broken_after, broken_before = (grouped(case, v, axis, state) for v in (y != 0, ~np.isfinite(y), bad))
    holds(kept.sum(1) <= n, "values kept in a group", kept.sum(1), f"at most {n}")
    after, before = broken_after.sum(1), np.minimum(n, broken_before.sum(1))
    if not case.chooses_blindly:
        holds(after >= before, "NaN and infinities kept in a group", after, before)
    if case.local:
        holds((before > 0) | (after == 0), "NaN and infinities in a group that had none", after, 0)


@law(*{type(c.p): c for c in CASES if c.p.facts.block <= 8}.values(), *CASES[2:4], layouts=[LAST])
def test_run_at_once_as_compiled(case, dtype, axis):
    """Eager calls choose as compiled ones do. Values agree up to the rounding of fused multiply-adds."""
    x = normal(case, dtype, axis)
    x[:, :, ::2] = np.round(x[:, :, ::2])
    state = begun(case, x, axis)
    a, b = (run(case, x, axis, state, jit=jit) for jit in (True, False))
    assert b.dtype == dtype, f"found {b.dtype}"
    same(b != 0, a != 0, "kept by an eager call")
    np.testing.assert_allclose(a, b, rtol=1e-6)
    if case.p.facts.selects:
        same(a, b)


@each_case
def test_prints_what_parses_back(case):
    text = str(case.p)
    again = nm.parse_pruner(text)
    assert again == case.p, f"the text {text} parses to {again}"
    assert hash(again) == hash(case.p)
    assert str(again) == repr(again) == text
    assert type(again) is type(case.p)
    assert " " not in text


def test_values_of_the_table_differ():
    assert len({str(c) for c in CASES}) == len(CASES)
    assert len({c.p for c in CASES}) == len({str(c.p) for c in CASES})


@each_case
def test_final_form(case):
    p = case.p
    if case.final is None:
        assert p.facts.stochastic
        with pytest.raises(ValueError, match="no final form"):
            p.final  # noqa: B018
        return
    final = p.final
    assert str(final) == case.final, f"found the final form {final}, wanted {case.final}"
    assert final.final == final, f"found {final.final} as the final form of {final}, wanted {final}"
    assert not final.facts.gradient_rule, f"found a gradient rule in the final form {final}, wanted none"
    assert not final.facts.stochastic, f"found the random final form {final}, wanted one that draws nothing"
    x = normal(case, np.float32, 3)
    state = begun(case, x, 3)
    at = [run(case, x, 3, p.final_state(state), step=s, p=final) for s in (0, case.step, LATE)]
    same(at[1], at[0], f"the final form {final} at step {case.step}")
    same(at[2], at[0], f"the final form {final} at step {LATE}")
    np.testing.assert_allclose(run(case, x, 3, state, step=LATE), at[0], rtol=1e-6)


@each_case
def test_needs_are_declared(case):
    """A call needs a key only if the pruner is stochastic, and state only if it needs state."""
    p, x = case.p, normal(case, np.float32, 3)
    state = begun(case, x, 3)
    trace = lambda key, state: jax.eval_shape(lambda x: p(x, 3, nm.Ctx(key, case.step, state)), x)
    assert trace(KEY if p.facts.stochastic else None, state if p.facts.needs_state else None).shape == x.shape
    if p.facts.stochastic:
        with pytest.raises(TypeError, match="key"):
            trace(None, state)
    if p.facts.needs_state:
        with pytest.raises(ValueError, match="state"):
            trace(KEY, None)


@dataclass(frozen=True, repr=False)
class faulty(nm.Grouped):
    """A pruner that breaks one law."""

    fault: str = ""
    reads_step = False

    def describe(self):
        return super().describe()._replace(selects=True)

    def mask(self, x, axis=-1, ctx=nm.Ctx()):
        return nm.groups.top(x, axis, self.n + (self.fault == "count"), self.m)

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        kept = x + jnp.ones((), x.dtype) if self.fault == "shift" else x
        kept = jnp.where(self.mask(x, axis), kept, jnp.zeros((), x.dtype))
        kept = jnp.abs(kept) if self.fault == "sign" else kept
        kept = jnp.nan_to_num(kept) if self.fault == "nan" else kept
        return kept.astype(jnp.float32) if self.fault == "dtype" else kept


@pytest.mark.parametrize(
    ("fault", "law", "said"),
    [
        ("count", test_shape_dtype_and_counts, r"values kept in a group: found 3, wanted at most 2 of 4, at \(0,\)"),
        ("dtype", test_shape_dtype_and_counts, "found float32 .*, wanted the input's dtype and shape"),
        ("shift", test_selectors_only_keep_or_drop, r"what the mask keeps: found -?\d.*, wanted -?\d"),
        ("sign", test_signs_and_powers_of_two_pass_through, r"of the negative input: found -?\d.*, wanted -?\d"),
        ("nan", test_what_is_not_finite_stays_visible, "NaN and infinities kept in a group: found 0, wanted [12]"),
        ("final", test_final_form, r"found the final form faulty\(2,4,fault='final'\), wanted mse\(2,4\)"),
    ],
)
def test_a_failure_names_the_law_the_pruner_and_the_input(fault, law, said):
    case = Case(faulty(2, 4, fault), (2, 4), final="mse(2,4)")
    words = law.__name__.removeprefix("test_").replace("_", " ")
    where = " for normal numbers.*, bfloat16 (3, 2, 4, 12) pruned along axis 3, seed \\d"
    where = where.replace("(", r"\(").replace(")", r"\)") if fault != "final" else ""
    layout = () if fault == "final" else (ml_dtypes.bfloat16, 3)
    with pytest.raises(
        AssertionError, match=rf"^the law '{words}' fails for faulty\(2,4,fault='{fault}'\){where}: {said}"
    ):
        law(case, *layout)


@pytest.mark.parametrize("p", [nm.hold(mse(2, 4)), nm.permute(mse(2, 4)), soft(2, 4), nm.ste(soft(2, 4))], ids=str)
def test_state_outlives_the_final_form(p):
    state = jax.jit(p.init)(jnp.arange(8.0))
    assert state is not None
    assert p.final_state(state) is state
