"""In every phase of training, a pruner and its `at` are the same function with the same state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nmjax as nm

FADING = "linear(1,0,4,begin=3)"
PHASES = {  # a forward slot's text: its phases, and what it is from then on
    "mse(2,4)": {},
    "hold(mse(2,4),every=2)": {},
    f"decay(mse(2,4),{FADING})": {0: "identity", 4: "decay(mse(2,4),linear(1.0,0.0,4,begin=3))", 7: "ste(mse(2,4))"},
    f"decay(mse(2,4),{FADING},gradient='autodiff')": {
        0: "identity", 4: "decay(mse(2,4),linear(1.0,0.0,4,begin=3),gradient='autodiff')", 7: "mse(2,4)",
    },
    "decay(mse(2,4),linear(1,0,4))": {0: "decay(mse(2,4),linear(1.0,0.0,4))", 4: "ste(mse(2,4))"},
    "decay(mse(2,4),exponential(0.1,end=5))": {0: "decay(mse(2,4),exponential(0.1,end=5))", 5: "ste(mse(2,4))"},
    "decay(mse(2,4),exponential(0.1))": {},  # it never ends
    "decay(mse(2,4),linear(1,0.5,4))": {},  # it does not end at 0
    "decay(mse(2,4),stairs(((0,1.0),(3,0.5),(6,0.0))))": {
        0: "identity", 3: "decay(mse(2,4),stairs(((0,1.0),(3,0.5),(6,0.0))))", 6: "ste(mse(2,4))",
    },
    f"decay(hold(mse(2,4),every=2),{FADING})": {
        0: "decay(hold(mse(2,4),every=2),linear(1.0,0.0,4,begin=3))", 7: "ste(hold(mse(2,4),every=2))",
    },
    "ste(stages(((0,identity),(3,mse(3,4)),(6,mse(2,4)))))": {
        0: "ste(identity)", 3: "ste(mse(3,4))", 6: "ste(mse(2,4))",
    },
    "ste(chain(stages(((0,identity),(4,mse(2,4)))),mse(1,4)))": {
        0: "ste(chain(identity,mse(1,4)))", 4: "ste(chain(mse(2,4),mse(1,4)))",
    },
    "stages(((0,sr_ste(hold(transposable(2,4),every=2))),(5,identity)))": {0: None, 5: None},
    "ste(stages(((0,chain(hold(mse(3,4)),mse(2,4))),(5,hold(mse(2,4),every=3)))))": {0: None, 5: None},
    "ste(hold(stages(((0,identity),(3,mse(2,4)))),every=2))": {},  # a mask of another phase may be in use
    "ste(permute(stages(((0,identity),(4,mse(2,4)))),every=2))": {},
    "decay(mse(2,4),linear(1,0,5,begin=-10))": {},
    "decay(mse(2,4),linear(1,0,5,begin=-2))": {0: "decay(mse(2,4),linear(1.0,0.0,5,begin=-2))", 3: "ste(mse(2,4))"},
    "chain(decay(mse(2,4),linear(1,0,4)),mse(1,4))": {  # a gradient rule cannot stand inside
        0: "chain(decay(mse(2,4),linear(1.0,0.0,4)),mse(1,4))", 4: "chain(decay(mse(2,4),linear(1.0,0.0,4)),mse(1,4))",
    },
    "rescale(stages(((0,mse(4,8)),(5,mse(2,4)))),over='group')": {  # groups of another size have other norms
        0: "rescale(mse(4,8),over='group')", 5: "rescale(stages(((0,mse(4,8)),(5,mse(2,4)))),over='group')",
    },
    "ste(stages(((0,uniform(2,4)),(4,stages(((0,mse(3,4)),(6,mse(2,4))))))))": {
        0: "ste(uniform(2,4))", 4: "ste(mse(3,4))", 6: "ste(mse(2,4))",
    },
    "ste(rows(stages(((0,identity),(4,mse(2,4))))))": {0: "ste(identity)", 4: "ste(rows(mse(2,4)))"},
    "ste(rescale(stages(((0,mse(3,4)),(4,mse(2,4))))))": {0: "ste(rescale(mse(3,4)))", 4: "ste(rescale(mse(2,4)))"},
}  # fmt: skip


W = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)


@pytest.mark.parametrize("text", PHASES)
def test_what_a_pruner_is_in_each_phase(text):
    p, wanted = nm.parse_pruner(text), PHASES[text]
    assert p.phases == tuple(wanted)[1:]
    for start, form in wanted.items():
        if form is not None:
            assert p.at(start) == nm.parse_pruner(form)
            assert nm.Sparsity(y_w=p).at(start).y_w == p.at(start)


@pytest.mark.parametrize("text", PHASES)
def test_values_gradients_and_state_are_the_same(text):
    """Bit for bit, at every step of the first ten."""
    whole, w, state = nm.parse_pruner(text), W, nm.parse_pruner(text).init(W, 0, nm.Ctx(nm.random.words(1)))

    def step(p, w, state, step):
        ctx = nm.Ctx(nm.random.words(1), step, state)
        ctx = ctx.replace(state=p.refresh(w, 0, ctx))
        y, back = jax.vjp(lambda w: p(w, 0, ctx), w)
        return ctx.state, y, back(jnp.sin(9 * w))[0]

    run = jax.jit(step, static_argnums=0)
    for now in range(10):
        start = max(s for s in (0, *whole.phases) if s <= now)
        own, same = run(whole.at(start), w, state, now), run(whole, w, state, now)
        jax.tree.map(np.testing.assert_array_equal, own, same)
        assert jax.tree.structure(own[0]) == jax.tree.structure(state)
        state, w = same[0], w - 0.1 * same[2]


def test_methods():
    assert nm.parse("fst(dense_from=250)").phases == (250,)
    assert nm.parse("sdgf(1,8,steps=400)").at(399) == nm.parse("ste(1,8)")
    assert nm.parse("s_ste(2,4)").phases == ()
    assert nm.parse("s_ste(2,4)").at(7) == nm.parse("s_ste(2,4)")
    tail = nm.parse("fst(dense_from=250)").at(250)
    assert tail.slots["y_w"].core == nm.identity
    assert tail.dw_g == nm.identity
    assert nm.parse("fst(dense_from=250)").y_w.final == nm.identity
    assert nm.parse_pruner(repr(tail.y_w)) == tail.y_w
    with pytest.raises(ValueError, match="at: step must be at least 0, got -1"):
        tail.at(-1)
    with pytest.raises(ValueError, match="stage takes a stages and then a step of at least 0"):
        nm.stage(nm.mse(2, 4), 3)


def test_a_slot_that_may_be_dense_keeps_its_groups():
    """Groups of four do not fit six tokens, so the slot is empty at all steps, also where it has groups of two."""
    text = "dw_g=stages(((0,mse(1,2)),(5,mse(2,4)))){}"
    for more in (" else dense", "; else dense"):
        assert nm.parse(text.format(more)).at(0).dw_g == nm.parse(text.format("")).dw_g
        assert nm.parse(text.format(more)).at(5).dw_g == nm.mse(2, 4)
    assert nm.parse(text.format("")).at(0).dw_g == nm.mse(1, 2)


KEPT = {  # methods with a slot that keeps its pruner in the last phase: its first step; None if it is the only one
    "dx_w=decay(mse(2,4),linear(1.0,0.0,4))": None,  # a gradient rule has no meaning here
    "dx_w=raw(decay(mse(2,4),linear(1.0,0.0,4)))": None,
    "y_w=chain(decay(mse(2,4),linear(1,0,4)),fp8('e4m3'))": None,  # nor inside another pruner
    "y_w=ste(decay(mse(2,4),linear(1,0,4)))": None,
    "dw_g=stages(((0,identity),(5,fp8('e5m2')))) else dense": 5,  # it would be the slot's storage
    "y_w=ste(stages(((0,mse(2,4)),(5,chain(mse(2,4),fp8('e4m3'))))))": 5,
    "y_w=ste(stages(((0,identity),(5,fp8('e4m3','random')))))": 5,  # refused in a forward slot
    "y_w=ste(rows(hold(stages(((0,identity),(4,mse(2,4)))),every=2)))": None,
    "dw_g=stages(((0,mvue(2,4)),(5,mvue(1,2))))": 5,  # groups of another size draw other numbers
}
CHANGED = {
    "dx_g=stages(((0,identity),(5,decay(mse(2,4),linear(1,0,4,begin=5)))))": (
        6, "dx_g=decay(mse(2,4),linear(1.0,0.0,4,begin=5))",
    ),
    "dw_g=stages(((0,mse(1,2)),(5,identity))) else dense": (5, "dense"),
    "dw_g=stages(((0,mvue(1,2)),(5,mvue(2,4))))": (5, "dw_g=mvue(2,4)"),
}  # fmt: skip


@pytest.mark.parametrize("text", KEPT)
def test_slots_that_keep_their_pruner(text):
    method = nm.parse(text)
    assert method.phases == (() if KEPT[text] is None else (KEPT[text],))
    assert method.at(100) == method
    assert (method.at(0) == method) == (KEPT[text] is None)


@pytest.mark.parametrize("text", CHANGED)
def test_slots_that_change_theirs(text):
    first, last = CHANGED[text]
    assert nm.parse(text).phases == (first,)
    assert nm.parse(text).at(100) == nm.parse(last)


def test_subclasses_of_schedules_have_no_known_steps():
    class sawtooth(nm.linear):
        def __call__(self, step):
            return super().__call__(step % 10)

    p = nm.decay(nm.mse(2, 4), sawtooth(1, 0, 5))
    assert p.phases == ()
    assert p.at(7) == p


def test_a_subclass_of_rows_stays_one():
    class doubled(nm.rows):
        def scales(self, x, axis=-1, ctx=nm.Ctx()):
            return 2 * super().scales(x, axis, ctx)

    assert type(doubled(nm.mse(2, 4)).at(3)) is doubled
