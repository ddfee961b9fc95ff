"""What every pruner promises, over one table of them all."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm
from nmjax.typing import Axes

LATE = 10**6  # later than every schedule of the table ends


@dataclass(frozen=True)
class Case:
    p: nm.Pruner
    nm: tuple[int, int] | None  # at most n of m are kept, at this step
    step: int = 0
    commutes: bool = False  # with permutations inside a group
    chooses_blindly: bool = False  # so that NaN may be dropped
    local: bool = True  # a group's result is a function of that group
    final: str | None = None  # the final form's text; None where there is none

    def __str__(self):
        return f"{self.p}@{self.step}" if self.step else f"{self.p}"


def selector(p, n, m, **more):
    return Case(p, (n, m), commutes=True, final=f"{p}", **more)


mse, mvue, uniform, soft, transposable = nm.mse, nm.mvue, nm.uniform, nm.soft, nm.transposable
_rows = ((0, nm.identity), (10, mse(3, 4)), (20, mse(2, 4)))
_geometric = ((0, mse(8, 32)), (10, mse(2, 8)), (20, mse(1, 4)))
_fading = nm.linear(1, 0, 10)

CASES = [
    *(selector(mse(n, m), n, m) for n, m in ((1, 2), (1, 4), (2, 4), (4, 4), (4, 8), (3, 8), (8, 16), (1, 32), (8, 32), (1, 128))),
    *(Case(mvue(n, m), (n, m)) for n, m in ((1, 2), (1, 4), (2, 4), (3, 8), (8, 32), (1, 128))),
    *(Case(nm.mvue_approx(2, m), (2, m)) for m in (4, 8)),
    *(Case(uniform(n, m), (n, m), chooses_blindly=True) for n, m in ((2, 4), (1, 128))),
    Case(uniform(3, 8, rescale=False), (3, 8), chooses_blindly=True),
    *(Case(soft(n, m), (n, m), final=f"soft({n},{m})") for n, m in ((1, 2), (2, 4), (3, 8), (8, 32))),
    selector(transposable(2, 4), 2, 4, local=False),
    Case(transposable(4, 8), (4, 8), local=False, final="transposable(4,8)"),
    Case(nm.identity, None, commutes=True, final="identity"),
    selector(nm.chain(mse(4, 8), mse(2, 4)), 2, 4),
    Case(nm.chain(soft(2, 4), nm.fp8("e4m3")), (2, 4), local=False, final="chain(soft(2,4),fp8('e4m3'))"),
    Case(nm.chain(mvue(2, 4), nm.fp8("e5m2")), (2, 4), local=False),
    Case(nm.chain(uniform(2, 4, rescale=False), mvue(1, 4)), (1, 4), chooses_blindly=True),
    Case(nm.chain(nm.hold(mse(2, 4), 5), soft(1, 4)), (1, 4), final="chain(hold(mse(2,4)),soft(1,4))"),
    Case(nm.rescale(mse(2, 4), "group"), (2, 4), final="rescale(mse(2,4),over='group')"),
    Case(nm.rescale(mse(2, 4)), (2, 4), local=False, final="rescale(mse(2,4))"),
    Case(nm.decay(mse(2, 4), _fading), None, step=5, final="mse(2,4)"),
    Case(nm.decay(mse(2, 4), _fading, "autodiff"), (2, 4), step=10, final="mse(2,4)"),
    Case(nm.decay(transposable(2, 4), nm.exponential(1e-3, end=100)), None, step=50, local=False, final="transposable(2,4)"),
    Case(nm.stages(_rows), None, step=9, commutes=True, final="mse(2,4)"),
    Case(nm.stages(_rows), (3, 4), step=10, commutes=True, final="mse(2,4)"),
    Case(nm.stages(_rows), (2, 4), step=99, commutes=True, final="mse(2,4)"),
    Case(nm.stages(_geometric), (8, 32), step=9, commutes=True, final="mse(1,4)"),
    Case(nm.stages(_geometric), (2, 8), step=19, final="mse(1,4)"),
    Case(nm.stages(((0, mvue(2, 4)), (10, nm.hold(mse(2, 4))))), (2, 4), final="hold(mse(2,4))"),
    Case(nm.stages(((0, nm.ste(mse(2, 4))), (10, soft(2, 4)))), (2, 4), step=15, final="soft(2,4)"),
    Case(nm.hold(mse(2, 4), 40), (2, 4), final="hold(mse(2,4))"),
    Case(nm.hold(transposable(2, 4)), (2, 4), local=False, final="hold(transposable(2,4))"),
    Case(nm.hold(uniform(2, 4, rescale=False), 7), (2, 4), chooses_blindly=True, final="hold(uniform(2,4,rescale=False))"),
    Case(nm.permute(mse(2, 4), 3, 4), (2, 4), final="permute(mse(2,4),every=None,draws=4)"),
    Case(nm.fp8("e4m3"), None, local=False, final="fp8('e4m3')"),
    Case(nm.fp8("e5m2"), None, local=False, final="fp8('e5m2')"),
    Case(nm.ste(mse(1, 4)), (1, 4), commutes=True, final="mse(1,4)"),
    Case(nm.ste(mvue(2, 4)), (2, 4)),
    Case(nm.sr_ste(mse(2, 4), 6e-5), (2, 4), commutes=True, final="mse(2,4)"),
    Case(nm.raw(mse(1, 2)), (1, 2), final="raw(mse(1,2))"),
    Case(nm.raw(mvue(1, 2)), (1, 2)),
]  # fmt: skip

LAYOUTS = [(jnp.float32, 0), (jnp.bfloat16, 1), (jnp.float32, 3), (jnp.bfloat16, 3)]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_layout = pytest.mark.parametrize(("dtype", "axis"), LAYOUTS, ids=lambda v: v if isinstance(v, int) else v.__name__)


# ---- calling them ----


def call(p, x, axis, axes, key, step, state):
    return p(x, axis, nm.Ctx(key, step, state, axes))


def mask(p, x, axis, axes, key, step, state):
    return p.mask(x, axis, nm.Ctx(key, step, state, axes))


def init(p, x, axis, axes, key, step, state):
    return p.init(x, axis, nm.Ctx(key, step, None, axes))


@cache
def compiled(function):
    return jax.jit(function, static_argnums=(0, 2, 3))


def run(function, case, x, axis, state=None, *, axes=None, step=None, jit=True, p=None):
    made = compiled(function) if jit else function
    return made(p or case.p, x, axis, axes, nm.random.words(7), case.step if step is None else step, state)


def begun(case, x, axis, axes=None):
    return run(init, case, x, axis, axes=axes)


def shape_of(case, axis):
    """Four dimensions of which one is pruned; for tiles every one divides by m."""
    tiled = "transposable" in f"{case.p}"
    shape = [case.p.block if tiled else d for d in (3, 2, 2, 3)]
    shape[axis] = case.p.block * (2 if case.p.block > 4 else 3)
    return tuple(shape)


def normal(case, dtype, axis, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape_of(case, axis)), dtype)


def distinct(case, dtype, axis):
    """Random orders of 1 to m, with signs: no ties, in bfloat16 either."""
    if "transposable" in f"{case.p}":  # whole sums must differ
        return normal(case, dtype, axis)
    m = case.p.block
    rng = np.random.default_rng(1)
    shape = np.moveaxis(np.empty(shape_of(case, axis)), axis, -1).shape
    ranks = rng.permuted(np.broadcast_to(np.arange(1.0, m + 1), (*shape[:-1], shape[-1] // m, m)), axis=-1)
    return jnp.asarray(np.moveaxis((ranks * rng.choice([-1, 1], ranks.shape)).reshape(shape), -1, axis), dtype)


def numpy(x):
    return np.asarray(x.astype(jnp.float32)) if x.dtype == jnp.bfloat16 else np.asarray(x)


def grouped(case, x, axis, state):
    """(..., m): the groups that the case promises something of, in their permuted order if there is one."""
    if isinstance(case.p, nm.permute):
        x = np.take(x, np.asarray(state), axis)
    return np.moveaxis(x, axis, -1).reshape(-1, case.nm[1])


def same(a, b):
    np.testing.assert_array_equal(numpy(a), numpy(b))


# ---- the laws ----


def check_shape_dtype_and_counts(case, dtype, axis, jit):
    for seed, spoil in enumerate((lambda x: x, np.round, lambda x: np.where(np.abs(x) < 0.7, 0, x), np.ones_like)):
        x = jnp.asarray(spoil(numpy(normal(case, dtype, axis, seed))), dtype)
        state = begun(case, x, axis)
        y = run(call, case, x, axis, state, jit=jit)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert np.isfinite(numpy(y)).all()
        assert (numpy(y)[numpy(x) == 0] == 0).all()
        if case.nm:
            assert (grouped(case, numpy(y) != 0, axis, state).sum(1) <= case.nm[0]).all()
        if seed == 0:
            assert (numpy(y) != 0).any()
            assert case.p.block == 1 or case.nm is None or case.nm[0] == case.nm[1] or (numpy(y) == 0).any()


@each_case
@each_layout
def test_shape_dtype_and_counts(case, dtype, axis):
    check_shape_dtype_and_counts(case, dtype, axis, jit=True)


@each_case
@each_layout
def test_selectors_only_keep_or_drop(case, dtype, axis):
    if not case.p.selects:
        pytest.skip("rescales, shrinks or rounds")
    x = normal(case, dtype, axis)
    state = begun(case, x, axis)
    y = run(call, case, x, axis, state)
    kept = run(mask, case, x, axis, state)
    assert kept.dtype == bool
    assert kept.shape == x.shape
    np.testing.assert_array_equal(numpy(y), np.where(np.asarray(kept), numpy(x), 0))
    same(run(call, case, y, axis, state), y)
    if case.nm:
        assert (grouped(case, np.asarray(kept), axis, state).sum(1) == case.nm[0]).all()


@each_case
@each_layout
def test_selectors_commute_with_permutations_inside_a_group(case, dtype, axis):
    if not case.commutes or (dtype == jnp.bfloat16 and not case.local):
        pytest.skip("order matters, or ties cannot be avoided")
    x = distinct(case, dtype, axis)
    block = case.nm[1] if case.nm else case.p.block
    if isinstance(case.p, nm.chain):
        block = 2  # a permutation inside the groups of both
        order = np.arange(x.shape[axis]).reshape(-1, 2)[:, ::-1].ravel()
    else:
        rng = np.random.default_rng(2)
        order = (np.arange(0, x.shape[axis], block)[:, None] + rng.permutation(block)).ravel()
    permuted = jnp.take(x, order, axis)
    same(run(call, case, permuted, axis), jnp.take(run(call, case, x, axis), order, axis))


@each_case
@each_layout
def test_signs_and_powers_of_two_pass_through(case, dtype, axis):
    x = normal(case, dtype, axis)
    state = begun(case, x, axis)
    y = run(call, case, x, axis, state)
    same(run(call, case, -x, axis, state), -y)
    for power in (-20, 30):
        scale = jnp.asarray(2.0**power, dtype)
        same(run(call, case, x * scale, axis, state), y * scale)


@each_case
@each_layout
def test_groups_of_zeros_give_plain_zeros(case, dtype, axis):
    x = np.moveaxis(numpy(normal(case, dtype, axis)).copy(), axis, -1)
    x[..., : case.p.block] = 0
    for zeros in (np.moveaxis(x, -1, axis), np.zeros(shape_of(case, axis))):
        zeros = jnp.asarray(zeros, dtype)
        y = numpy(run(call, case, zeros, axis, begun(case, zeros, axis)))
        assert np.isfinite(y).all()
        here = np.moveaxis(y, axis, -1)[..., : case.p.block]
        assert (here == 0).all()
        assert not np.signbit(here).any()


@each_case
@each_layout
def test_along_any_axis_as_along_the_last(case, dtype, axis):
    if case.p.stochastic or "uniform" in f"{case.p}":
        pytest.skip("the noise is that of a position")
    x = normal(case, dtype, axis)
    moved = jnp.moveaxis(x, axis, -1)
    others = [a for a in range(4) if a != axis]  # in order, before the pruned one: where moveaxis puts them
    by_convention = Axes(others[-1], tuple(a for a in others if 0 < a < 3))
    after = Axes(others.index(by_convention.other), tuple(map(others.index, by_convention.space)))
    state = begun(case, x, axis)
    moved_state = begun(case, moved, -1, after)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(jnp.moveaxis(a, axis, -1) if a.ndim == 4 else a), np.asarray(b), rtol=1e-6
        ),
        state, moved_state,
    )  # fmt: skip
    got = run(call, case, moved, -1, jax.tree.map(lambda a: jnp.moveaxis(a, axis, -1) if a.ndim == 4 else a, state), axes=after)
    np.testing.assert_allclose(
        numpy(got), numpy(jnp.moveaxis(run(call, case, x, axis, state), axis, -1)),
        rtol=(1e-6 if dtype == jnp.float32 else 2**-7) if isinstance(case.p, nm.rescale) else 0,  # sums in another order
    )  # fmt: skip


def broken(case, dtype, axis):
    """A third of the groups holds one or more of NaN and both infinities; for tiles, each tile at most one."""
    rng = np.random.default_rng(3)
    x = np.moveaxis(numpy(normal(case, dtype, axis)).copy(), axis, -1)
    block = case.nm[1] if case.nm else 4
    if isinstance(case.p, nm.permute):
        block = 4
    tiled = "transposable" in f"{case.p}"
    groups = x.reshape(-1, block)
    bad = rng.random(groups.shape) < rng.choice([0.1, 0.5, 1.0], (len(groups), 1))
    bad &= rng.random((len(groups), 1)) < 0.4
    bad[0, 0] = True
    if tiled:
        bad[:] = False
        bad[0, 1] = True
    bad = np.moveaxis(bad.reshape(x.shape), -1, axis)
    values = rng.choice([np.nan, np.inf, -np.inf], bad.shape)
    return jnp.asarray(np.where(bad, values, np.moveaxis(x, -1, axis)), dtype), bad


@each_case
@each_layout
def test_what_is_not_finite_stays_visible(case, dtype, axis):
    x, bad = broken(case, dtype, axis)
    state = begun(case, x, axis)
    y = numpy(run(call, case, x, axis, state))
    if case.nm is None:
        assert (~np.isfinite(y[bad])).all()
        assert np.isfinite(y[~bad]).all()
        return
    n = case.nm[0]
    kept, gone, there = (grouped(case, v, axis, state) for v in (y != 0, ~np.isfinite(y), bad))
    assert (kept.sum(1) <= n).all()
    if not case.chooses_blindly:
        assert (gone.sum(1) >= np.minimum(n, there.sum(1))).all()
    if case.local:
        assert not gone[~there.any(1)].any()


# What is computed the same way in either mode is the same to the last bit; XLA may fuse a multiplication and an addition.
@each_case
@pytest.mark.parametrize(("dtype", "axis"), [(jnp.float32, 3), (jnp.bfloat16, 1)], ids=["float32-3", "bfloat16-1"])
def test_compiled_as_run_at_once(case, dtype, axis):
    x = normal(case, dtype, axis)
    state = begun(case, x, axis)
    a, b = (numpy(run(call, case, x, axis, state, jit=jit)) for jit in (True, False))
    np.testing.assert_array_equal(a != 0, b != 0)
    np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == jnp.float32 else 2**-7)
    if case.p.selects:
        np.testing.assert_array_equal(a, b)
    if dtype == jnp.float32:
        check_shape_dtype_and_counts(case, dtype, axis, jit=False)


@each_case
def test_prints_what_parses_back(case):
    text = str(case.p)
    again = nm.parse_pruner(text)
    assert again == case.p
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
        assert p.stochastic
        with pytest.raises(ValueError, match="no final form"):
            p.final  # noqa: B018
        return
    final = p.final
    assert str(final) == case.final
    assert final.final == final
    assert not final.ruled
    assert not final.stochastic
    x = normal(case, jnp.float32, 3)
    state = begun(case, x, 3)
    kept = p.final_state(state)
    at = [run(partial(call), case, x, 3, kept, step=s, p=final, jit=False) for s in (0, case.step, LATE)]
    same(at[0], at[1])
    same(at[0], at[2])
    np.testing.assert_allclose(numpy(run(call, case, x, 3, state, step=LATE)), numpy(at[0]), rtol=1e-6)


@each_case
def test_needs_are_declared(case):
    """A key where random, state where stateful, and neither elsewhere."""
    p, x = case.p, normal(case, jnp.float32, 3)
    without_key = lambda state: p(x, 3, nm.Ctx(None, case.step, state))
    if p.stochastic:
        with pytest.raises(TypeError, match="key"):
            jax.eval_shape(without_key, begun(case, x, 3))
    else:
        jax.eval_shape(without_key, begun(case, x, 3))
    if p.stateful:
        with pytest.raises(ValueError, match="state"):
            jax.eval_shape(lambda: run(call, case, x, 3, None, jit=False))
    else:
        jax.eval_shape(lambda: run(call, case, x, 3, None, jit=False))


@pytest.mark.parametrize("p", [nm.hold(mse(2, 4)), nm.permute(mse(2, 4)), soft(2, 4), nm.ste(soft(2, 4))], ids=str)
def test_state_outlives_the_final_form(p):
    state = p.init(jnp.arange(8.0))
    assert state is not None
    assert p.final_state(state) is state


@pytest.mark.parametrize("every", [1, 5])
def test_held_masks_are_renewed_on_time(every):
    p = nm.hold(mse(2, 4), every)
    x, later = jnp.array([1.0, 2, 3, 4]), jnp.array([4.0, 3, 2, 1])
    state = p.init(x)
    for step in range(1, 11):
        new = p.refresh(later, -1, nm.Ctx(step=step, state=state))
        due = step % every == 0
        assert new.tolist() == ([True, True, False, False] if due else [False, False, True, True])


def test_structure_decay_of_identity_mse_and_others_follows_its_rows():
    p = nm.stages(_geometric)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(4, 64)), jnp.float32)
    for step, q in ((0, mse(8, 32)), (9, mse(8, 32)), (10, mse(2, 8)), (19, mse(2, 8)), (20, mse(1, 4)), (LATE, mse(1, 4))):
        same(p(x, -1, nm.Ctx(step=step)), q(x))
    p = nm.stages(_rows)
    for step, q in ((0, nm.identity), (9, nm.identity), (10, mse(3, 4)), (20, mse(2, 4))):
        same(p(x, -1, nm.Ctx(step=jnp.int32(step))), q(x))
