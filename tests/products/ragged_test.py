"""Grouped products against a loop over experts, and against plain lax where nothing is pruned."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nmjax as nm
from nmjax.products.fit import slot_refusals
from nmjax.products.operations import RaggedDot
from nmjax.products.ragged import places, room
from nmjax.products.routes import explain
from nmjax.products.slot import SLOTS, slot_context
from tests.products.common import MATMUL, fast_jit, products, whole as whole_numbers

pytestmark = pytest.mark.sampled

TOKENS, IN, OUT = 22, 8, 12
SIZES = {
    "uneven": (5, 3, 8, 6),
    "multiples of m": (4, 8, 0, 8),
    "tokens without an expert": (3, 0, 6, 2),
    "one expert has all": (0, 0, 22, 0),
    "no tokens at all": (0, 0, 0, 0),
}
whole = functools.partial(whole_numbers, most=9)


def operands(dtype=jnp.float32, factor=1):
    """x, w and g."""
    return [factor * whole(i, *v, dtype=dtype) for i, v in enumerate(((TOKENS, IN), (4, IN, OUT), (TOKENS, OUT)))]


def grouped(x, w, g, sizes, sparsity, ctx=nm.Ctx()):
    """The three products of nm.ragged_dot."""

    @fast_jit
    def run(x, w, g, sizes, ctx):
        return products(lambda x, w: nm.ragged_dot(x, w, sizes, sparsity=sparsity, ctx=ctx), x, w, g)

    return run(x, w, g, jnp.asarray(sizes), ctx)


def slices(sizes):
    """The tokens of each expert."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def by_loop(x, w, g, sizes, sparsity, ctx=nm.Ctx()):
    """One nm.dot_general for each expert. Its tokens are filled up with zeros to a multiple of m.

    A mask that is kept as state is the expert's own; a scale is one of all experts.
    """
    m = math.lcm(*(getattr(sparsity, name).facts.block for name in SLOTS))
    y, dx, dw = np.zeros((len(x), OUT), x.dtype), np.zeros_like(x), []

    @fast_jit
    def f(x, w, g, ctx):
        return products(lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=sparsity, ctx=ctx), x, w, g)

    for expert, own in enumerate(slices(sizes)):
        count = own.stop - own.start
        filled = lambda v, own=own, more=max(m, -(-count // m) * m) - count: jnp.pad(v[own], ((0, more), (0, 0)))
        state = jax.tree.map(lambda v, expert=expert: v[expert] if v.ndim == w.ndim else v, ctx.state)
        of_y, of_x, of_w = f(filled(x), w[expert], filled(g), ctx.replace(state=state))
        y[own], dx[own] = of_y[:count], of_x[:count]
        dw.append(of_w)
    return y, dx, np.stack(dw)


def same(ours, wanted):
    """Bit for bit the same, but for the sign of zero."""
    for name, a, b in zip(("y", "dx", "dw"), ours, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, name)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["wanda(2,4)", "ria(2,4)"])
def test_pruners_with_norms_look_at_one_expert_at_a_time(text):
    """Also if the weights of one expert are much larger than those of the others."""
    x, w, g = operands()
    w = w * jnp.array([1.0, 100.0, 1.0, 1.0])[:, None, None] + whole(3, *w.shape)
    sparsity, ctx = nm.parse(f"y_w=ste({text})"), nm.Ctx(state={"y_w": whole(4, IN) ** 2 + 1})
    same(grouped(x, w, g, SIZES["uneven"], sparsity, ctx), by_loop(x, w, g, SIZES["uneven"], sparsity, ctx))


# ---- where the tokens are laid ----


@pytest.mark.parametrize("m", [1, 2, 4, 5])
def test_the_layout_of_all_sizes(m):
    """Groups have tokens of one expert, in order, for every way to share up to five tokens among three experts."""
    tokens = 5
    space = room(tokens, 3, m)
    assert space % m == 0
    found = jax.jit(jax.vmap(lambda sizes: places(sizes, tokens, m)))
    every = [s for s in itertools.product(range(tokens + 1), repeat=3) if sum(s) <= tokens]
    fullest = 0
    for sizes, at in zip(every, np.asarray(found(jnp.array(every))), strict=True):
        assert (np.diff(at) > 0).all()
        owners = np.repeat(np.arange(4), (*sizes, tokens - sum(sizes)))
        mine = {}
        for place, owner in zip(at.tolist(), owners.tolist(), strict=True):
            assert (place >= space) == (owner == 3)
            if owner < 3:
                assert mine.setdefault(place // m, owner) == owner
        for owner in range(3):
            inside = at[owners == owner]
            if len(inside):
                assert inside[0] % m == 0
                np.testing.assert_array_equal(inside, inside[0] + np.arange(len(inside)))
                fullest = max(fullest, inside[-1] + 1)
    assert space == -(-fullest // m) * m  # not a group more than is needed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32, jnp.int32])
def test_sizes_of_any_integers_and_too_large_ones(dtype):
    x, w, g = operands()
    sizes = jnp.array([5, 3, 8, 6], dtype)
    sparsity = nm.parse("dw_g=mse(2,4)")
    same(grouped(x, w, g, sizes, sparsity), by_loop(x, w, g, (5, 3, 8, 6), sparsity))
    too_many = jnp.array([5, 30, 8, 6], dtype)  # jax.lax.ragged_dot gives the second expert all that is left
    same(grouped(x, w, g, too_many, nm.Sparsity()), by_loop(x, w, g, (5, 17, 0, 0), nm.Sparsity()))
    same(grouped(x, w, g, too_many, sparsity), by_loop(x, w, g, (5, 17, 0, 0), sparsity))


# ---- nothing pruned: lax, bit for bit ----


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_empty_sparsity_is_lax(sizes, dtype):
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.standard_normal(v.shape), dtype) for v in operands())
    plain = fast_jit(lambda x, w, g, sizes: products(lambda x, w: lax.ragged_dot(x, w, sizes), x, w, g))
    ours, wanted = grouped(x, w, g, sizes, nm.Sparsity()), plain(x, w, g, jnp.array(sizes))
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == b.dtype == dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    keeping = nm.parse("dx_g=mse(4,4); dx_w=raw(mse(4,4)); dw_g=mse(4,4); dw_x=raw(mse(4,4))")
    by_rule = grouped(x, w, g, sizes, keeping)  # the rule runs, and keeps all
    for a, b in zip(by_rule, wanted, strict=True):
        assert np.asarray(a + 0.0).tobytes() == np.asarray(b + 0.0).tobytes()


# ---- pruned: a loop over experts ----

DETERMINISTIC = [
    *(f"{slot}={p}" for slot, p in itertools.product(SLOTS, ("mse(2,4)", "mse(1,2)"))),
    "ste(2,4)", "sr_ste(2,4,lam=0.5)", "bdwp(2,4)", "bi_mask(2,4,lam=0.5)", "fst(2,4,lam=0.5); dw_g=mse(2,4)",
    "mdgf(2,4,constant(0.5))", "top_gradient(2,4)", "activation(2,4,'down')", "activation(2,4,'up')",
    "s_ste(2,4); dw_g=mse(2,4)", "ste(2,4); dx_w=raw(mse(2,4)); dw_x=raw(mse(1,4)); y_x=mse(2,4)",
    "sdgf(2,4,steps=9); dw_g=mse(1,4); dw_x=mse(3,4)",
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "dtype"), [("uneven", jnp.bfloat16), ("tokens without an expert", jnp.float32)])
@pytest.mark.parametrize("text", DETERMINISTIC)
def test_a_loop_over_experts_gives_the_same_bits(text, sizes, dtype):
    sparsity = nm.parse(text)
    x, w, g = operands(dtype)
    ctx = nm.Ctx(jax.random.key(3), step=4)
    state = sparsity.init(w, contract=1, out=2, ctx=ctx) or None
    if "s_ste" in text:
        state = {"y_w": jnp.full_like(state["y_w"], 0.5)}  # so that sums are exact
    ctx = ctx.replace(state=state)
    same(grouped(x, w, g, SIZES[sizes], sparsity, ctx), by_loop(x, w, g, SIZES[sizes], sparsity, ctx))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_pruned_tokens_are_those_of_one_expert(sizes):
    """Against NumPy alone: of every four tokens of an expert the two largest are left, column by column."""
    x, w, g = operands()
    dw = grouped(x, w, g, sizes, nm.parse("dw_g=mse(2,4); dw_x=mse(2,4)"))[2]
    for expert, own in enumerate(slices(sizes)):
        parts = [np.zeros((IN, OUT))]
        for first in range(own.start, own.stop, 4):
            group = slice(first, min(first + 4, own.stop))
            kept = []
            for v in (np.asarray(x[group]), np.asarray(g[group])):
                rank = np.argsort(np.argsort(-np.abs(v), axis=0, kind="stable"), axis=0)
                kept.append(np.where(rank < 2, v, 0))
            parts.append(kept[0].T @ kept[1])
        np.testing.assert_array_equal(dw[expert], sum(parts))


STOCHASTIC = {"mvue(2,4)": 2, "uniform(2,4,rescale=True)": 1, "mvue(1,4)": 1, "mvue(1,2)": 1}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["uneven", "tokens without an expert"])
@pytest.mark.parametrize("p", STOCHASTIC)
def test_the_noise_of_a_group(p, sizes):
    """It is a function of the slot's key and of the group's place: among all tokens, or in the layout along tokens."""
    factor = STOCHASTIC[p]  # so that the values are whole numbers
    x, w, g = operands(factor=factor)
    pruner, ctx = nm.parse_pruner(p), nm.Ctx(jax.random.key(5), step=7)
    draw = lambda slot, v, axis: np.asarray(jax.jit(pruner, static_argnums=1)(v, axis, slot_context(ctx, slot)))
    of_in_y = grouped(x, w, g, SIZES[sizes], nm.parse(f"y_w=ste({p}); dx_g={p}; dw_x={p}; dw_g={p}"), ctx)
    hard, gx = draw("y_w", w, 1), draw("dx_g", g, 1)
    m = pruner.facts.block
    laid = {}
    for slot, v in (("dw_g", g), ("dw_x", x)):
        array, at = np.zeros((room(TOKENS, 4, m), v.shape[1]), np.float32), 0
        starts = []
        for own in slices(SIZES[sizes]):
            array[at : at + own.stop - own.start] = v[own]
            starts.append(at)
            at += -(-(own.stop - own.start) // m) * m
        laid[slot] = draw(slot, jnp.asarray(array), 0)
    y, dx, dw = np.zeros((TOKENS, OUT), np.float32), np.zeros((TOKENS, IN), np.float32), []
    for expert, own in enumerate(slices(SIZES[sizes])):
        count = own.stop - own.start
        y[own], dx[own] = x[own] @ hard[expert], gx[own] @ hard[expert].T
        tokens = slice(starts[expert], starts[expert] + count)
        dw.append(laid["dw_x"][tokens].T @ laid["dw_g"][tokens])
    same(of_in_y, (y, dx, np.stack(dw)))
    other = grouped(x, w, g, SIZES[sizes], nm.parse(f"dw_g={p}"), ctx.replace(step=8))
    assert (other[2] != np.stack(dw)).any()


def test_a_slot_changes_its_own_product_only():
    """Also where the other slot draws random numbers: the layout is the slot's own."""
    x, w, g = operands()
    ctx = nm.Ctx(jax.random.key(1))
    alone = grouped(x, w, g, SIZES["uneven"], nm.parse("dx_g=mvue(2,4)"), ctx)
    both = grouped(x, w, g, SIZES["uneven"], nm.parse("dx_g=mvue(2,4); dw_g=mvue(2,4)"), ctx)
    np.testing.assert_array_equal(alone[1], both[1])
    assert (alone[2] != both[2]).any()


@pytest.mark.parametrize("text", ["dw_g=mvue(2,4)", "dw_g=mvue_approx(2,4)", "dw_x=uniform(1,4,rescale=True)"])
def test_zeros_that_fill_a_group_add_no_bias(text):
    """The mean over many keys is the dense gradient, within five standard errors, and the draws differ."""
    sizes, draws = jnp.array([5, 0, 7, 2]), 3000
    x, w, g = operands()
    f = lambda key: products(
        lambda x, w: nm.ragged_dot(x, w, sizes, sparsity=nm.parse(text), ctx=nm.Ctx(key)), x, w, g
    )[2]
    drawn = jax.jit(lambda keys: lax.map(f, keys))(jax.random.split(jax.random.key(0), draws))
    dense = grouped(x, w, g, sizes, nm.Sparsity())[2]
    error = np.asarray(drawn, np.float64).std(0) / draws**0.5
    away = np.abs(np.asarray(drawn, np.float64).mean(0) - dense)
    assert (error[0] > 0).any()
    assert (error[1] == 0).all()  # it has no tokens
    assert (away <= 5 * error + 1e-4).all()


@pytest.mark.slow
def test_norms_are_those_of_groups():
    """Sorted tokens have no spatial axes, so SDGP takes the norm of each group. Its products are not whole numbers."""
    x, w, g = operands()
    for name in ("uneven", "tokens without an expert"):
        ours = grouped(x, w, g, SIZES[name], nm.parse("sdgp(2,4); dw_g=rescale(mse(2,4))"))
        wanted = by_loop(
            x, w, g, SIZES[name], nm.parse("dx_g=rescale(mse(2,4),'group'); dw_g=rescale(mse(2,4),'group')")
        )
        for a, b in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_scales_of_a_whole_tensor_are_shared_by_experts():
    """A scale of a whole tensor is of all experts: the scale of soft, and that of fp8."""
    x, w, g = operands()
    soft = nm.parse("s_ste(2,4); dw_g=mse(4,4)")
    state = soft.init(w, contract=1, out=2)
    assert state["y_w"].shape == ()
    fp8 = nm.parse("y_x=fp8('e4m3'); y_w=ste(fp8('e4m3')); dw_g=chain(mse(2,4),fp8('e5m2'))")
    y, _, dw = grouped(x, w, g, SIZES["uneven"], fp8)
    rounded = lambda v: nm.prune(nm.fp8("e4m3"), v)
    wanted = grouped(rounded(x), rounded(w), g, SIZES["uneven"], nm.Sparsity())
    np.testing.assert_allclose(y, wanted[0], rtol=0, atol=1e-6 * float(jnp.abs(wanted[0]).max()))
    assert jnp.isfinite(dw).all()


# ---- transformations ----


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "s_ste(2,4); dx_g=mvue(2,4); dw_x=mse(2,4)"])
def test_jit_vmap_scan_and_remat(text):
    """All give what single calls give. vmap needs all operands mapped, as jax.lax.ragged_dot does."""
    sparsity = nm.parse(text) if text else nm.Sparsity()
    xs = jnp.stack([whole(i, TOKENS, IN) for i in range(3)])
    ws = jnp.stack([whole(i + 3, 4, IN, IN) for i in range(3)])
    sizes = jnp.array([SIZES["uneven"], SIZES["one expert has all"], SIZES["tokens without an expert"]])
    ctx = nm.Ctx(key=2, state=sparsity.init(ws[0], contract=1, out=2) or None)
    layer = lambda x, w, sizes: nm.ragged_dot(x, w, sizes, sparsity=sparsity, ctx=ctx)
    loss = lambda f: lambda x, w, sizes: (f(x, w, sizes) ** 2).sum() / 64
    single = jax.grad(loss(layer), (0, 1))
    with jax.disable_jit():
        eager = [single(*one) for one in zip(xs, ws, sizes, strict=True)]
    for way in (jax.vmap(single), lambda *all_: lax.map(lambda one: single(*one), all_)):
        found = jax.jit(way)(xs, ws, sizes)
        for i, wanted in enumerate(eager):
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a[i], b, rtol=0, atol=1e-6 * float(jnp.abs(b).max()))

    def through(body, x, ws):
        return lax.scan(lambda x, w_and_s: (jnp.tanh(body(x, *w_and_s) / 64), None), x, (ws, sizes))[0].sum()

    unrolled = lambda x, ws: functools.reduce(
        lambda x, i: jnp.tanh(layer(x, ws[i], sizes[i]) / 64), range(3), x
    ).sum()  # fmt: skip
    wanted = jax.jit(jax.grad(unrolled, (0, 1)))(xs[0], ws)
    for body in (layer, jax.checkpoint(layer)):
        found = jax.jit(jax.grad(functools.partial(through, body), (0, 1)))(xs[0], ws)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)
    with pytest.raises(
        NotImplementedError, match=r"must map the tokens, the weights and the group sizes.*jax\.lax\.map"
    ):
        jax.vmap(layer, (0, None, 0))(xs, ws[0], sizes)
    with pytest.raises(NotImplementedError, match="NYI"):
        jax.vmap(lax.ragged_dot, (0, None, 0))(xs, ws[0], sizes)


@pytest.mark.parametrize("text", ["ste(2,4)", "mdgf(2,4,linear(1,0,10))", "dw_g=mvue(2,4)"])
def test_steps_are_mapped_by_lax_map_and_not_by_vmap(text):
    x, w, _ = operands()
    layer = lambda w, step: nm.ragged_dot(
        x, w, jnp.array(SIZES["uneven"]), sparsity=nm.parse(text), ctx=nm.Ctx(key=2, step=step)
    )
    of_step = lambda step: jax.grad(lambda w: (layer(w, step) ** 2).sum())(w)
    with pytest.raises(NotImplementedError, match="A step or a key that vmap maps also maps what is pruned"):
        jax.vmap(of_step)(jnp.arange(3))
    wanted = [jax.jit(of_step)(step) for step in range(3)]
    np.testing.assert_allclose(lax.map(of_step, jnp.arange(3)), jnp.stack(wanted), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives():
    """Without backward slots the rule is autodiff. With one, derivatives beyond the first are refused."""
    x, w, g = operands()
    sizes = jnp.array(SIZES["uneven"])
    f = lambda sparsity: lambda x, w: nm.ragged_dot(x, w, sizes, sparsity=sparsity, ctx=nm.Ctx(key=0))
    tangents = whole(7, *x.shape), whole(8, *w.shape)
    y, dy = jax.jvp(f(nm.parse("ste(2,4)")), (x, w), tangents)
    back = grouped(x, w, g, sizes, nm.parse("ste(2,4)"))
    np.testing.assert_array_equal(y, back[0])
    assert float((dy * g).sum()) == float((tangents[0] * back[1]).sum() + (tangents[1] * back[2]).sum())
    square = lambda sparsity: lambda x: (f(sparsity)(x, w) ** 2).sum()
    hessian = jax.jvp(jax.grad(square(nm.parse("ste(2,4)"))), (x,), (tangents[0],))[1]
    hard = nm.prune(nm.mse(2, 4), w, axis=1)
    of_lax = jax.jvp(jax.grad(lambda x: (lax.ragged_dot(x, hard, sizes) ** 2).sum()), (x,), (tangents[0],))[1]
    np.testing.assert_array_equal(hessian, of_lax)
    with pytest.raises(TypeError):
        jax.jvp(f(nm.parse("dw_g=mse(2,4)")), (x, w), tangents)
    with pytest.raises(TypeError, match="dw_g=mse"):
        jax.grad(lambda x: jax.grad(square(nm.parse("dw_g=mse(2,4)")))(x).sum())(x)


def test_a_wider_result_and_precision():
    x, w, _ = operands(jnp.bfloat16)
    y = nm.ragged_dot(
        x, w, jnp.array(SIZES["uneven"]), lax.Precision.HIGHEST, jnp.float32, sparsity=nm.parse("ste(2,4)")
    )
    assert y.dtype == jnp.float32
    hard = nm.prune(nm.mse(2, 4), w, axis=1)
    np.testing.assert_array_equal(y, lax.ragged_dot(x, hard, jnp.array(SIZES["uneven"]), None, jnp.float32))


# ---- what is said ----


@pytest.mark.slow
def test_shapes_that_do_not_fit_are_refused():
    x, w, _ = operands()
    sizes = jnp.array(SIZES["uneven"])
    for given in ((x[None], w, sizes), (x, w[0], sizes), (x, w, sizes[:3]), (x[:, :4], w, sizes), (x, w, sizes[None])):
        with pytest.raises(ValueError, match=r"ragged_dot takes tokens .* got shapes"):
            nm.ragged_dot(*given, sparsity=nm.parse("ste(2,4)"))
    with pytest.raises(ValueError, match=re.escape("up: y_w=ste(mse(3,5)) prunes an array of shape (4, 8, 12)")):
        nm.ragged_dot(x, w, sizes, sparsity=nm.parse("ste(3,5)"), name="up")
    with pytest.raises(ValueError, match="dw_g=mvue.* pass a key"):
        jax.grad(lambda x: nm.ragged_dot(x, w, sizes, sparsity=nm.parse("mvue(2,4)")).sum())(x)
    with pytest.raises(ValueError, match="needs spatial axes.*over='group'"):
        jax.grad(lambda x: nm.ragged_dot(x, w, sizes, sparsity=nm.parse("dx_g=rescale(mse(2,4),'spatial')")).sum())(x)


def test_refusals_and_routes_know_the_layout():
    """Any number of tokens is fine along tokens; other axes are checked as ever. No kernel computes it."""
    lhs, rhs = jax.ShapeDtypeStruct((TOKENS, IN), "bfloat16"), jax.ShapeDtypeStruct((4, IN, OUT), "bfloat16")
    op = RaggedDot(None, None)
    assert slot_refusals(op, lhs, rhs, nm.parse("ste(2,4); dw_g=mvue(2,4); dw_x=mse(3,5)")) == ()
    refused = dict(slot_refusals(op, lhs, rhs, nm.parse("dw_g=mvue(2,4); y_x=mse(2,5); dx_g=mse(1,5)")))
    assert set(refused) == {"y_x", "dx_g"}
    routes = explain(op, lhs, rhs, nm.parse("ste(2,4); dw_g=mvue(2,4)"), "interpret")
    assert {name: route.how for name, route in routes.items()} == {
        "y": "emulated",
        "dx": "dense",
        "dw": "emulated",
    }
    assert "grouped product" in routes["y"].why
    x, w, _ = operands(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"up: backend='pallas', but y cannot be packed"):
        nm.ragged_dot(x, w, jnp.array(SIZES["uneven"]), sparsity=nm.parse("ste(2,4)"), backend="pallas", name="up")


def test_flops():
    op = RaggedDot(None, None)
    assert nm.flops.flops(op, (TOKENS, IN), (4, IN, OUT)) == 2 * TOKENS * IN * OUT
    x, w, _ = operands()
    f = lambda x, w: nm.ragged_dot(
        x, w, jnp.array(SIZES["uneven"]), sparsity=nm.parse("ste(2,4); dw_g=mvue(2,4)"), ctx=nm.Ctx(0)
    ).sum()
    counted = nm.flops.counted(jax.make_jaxpr(jax.grad(f, (0, 1)))(x, w).jaxpr, "layer_")
    assert sum(cost for _, cost in counted) == 3 * 2 * TOKENS * IN * OUT
