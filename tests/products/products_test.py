"""Products against plain lax where nothing is pruned, and against plain numpy where something is."""

import collections
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nmjax as nm
from nmjax.recipes.text import METHODS
from tests.products.common import MATMUL, TOKENS, fast_jit, normal, products, whole

pytestmark = pytest.mark.sampled

F32, BF16 = jnp.float32, jnp.bfloat16
BACKWARD = ("dx_g", "dx_w", "dw_g", "dw_x")


@functools.partial(fast_jit, static_argnames="sparsity")
def of_matmul(x, w, g, sparsity, key=None, step=0, state=None):
    """The same, of a plain matrix product; compiled, for op by op a first call takes ten times as long."""
    f = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=sparsity, ctx=nm.Ctx(key, step, state))
    return products(f, x, w, g)


@functools.partial(fast_jit, static_argnames=("sparsity", "contract", "out"))
def first_state(sparsity, w, contract=0, out=-1):
    return sparsity.init(w, contract=contract, out=out, ctx=nm.Ctx(nm.random.words(0)))


def of_name(name):
    """Return a method with its defaults. MdGf has none for its schedule, and here are fewer tokens than V:N:M's."""
    return METHODS[name](*{"mdgf": (2, 4, nm.exponential(1e-4)), "vnm": (2,)}.get(name, ()))


def bits(tree):
    """Return dtypes, shapes and bytes. Equality of floats would hide the dtype and the sign of zero."""
    return [(a.dtype, a.shape, np.asarray(a).tobytes()) for a in jax.tree.leaves(tree)]


def numpy_pruned(x, axis, n=2, m=4):
    """The n largest magnitudes of every m along one axis, or along several flattened in order; the first of equals."""
    x = np.asarray(x)
    axes = [a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
    rest = [a for a in range(x.ndim) if a not in axes]
    lines = x.transpose(*rest, *axes)
    blocks = lines.reshape(-1, m)
    order = np.argsort(-np.abs(blocks), axis=1, kind="stable")
    kept = np.zeros_like(blocks)
    np.put_along_axis(kept, order[:, :n], np.take_along_axis(blocks, order[:, :n], 1), 1)
    return kept.reshape(lines.shape).transpose(np.argsort([*rest, *axes]))


# ---- nothing pruned: lax, bit for bit ----

DOTS = {
    "plain": ((8, 12), (12, 16), MATMUL),
    "tokens": ((2, 4, 12), (12, 16), TOKENS),
    "first axis of lhs": ((12, 8), (12, 16), (((0,), (0,)), ((), ()))),
    "last axis of rhs": ((8, 12), (16, 12), (((1,), (1,)), ((), ()))),
    "first and last": ((12, 8), (16, 12), (((0,), (1,)), ((), ()))),
    "batch": ((3, 8, 12), (3, 12, 16), (((2,), (1,)), ((0,), (0,)))),
    "batch last": ((8, 12, 3), (12, 16, 3), (((1,), (0,)), ((2,), (2,)))),
    "two batch axes": ((2, 3, 4, 8), (2, 3, 8, 4), (((3,), (2,)), ((0, 1), (0, 1)))),
    "permuted batch": ((2, 8, 3, 12), (3, 12, 2, 4), (((3,), (1,)), ((0, 2), (2, 0)))),
    "two contracted": ((8, 3, 4), (3, 4, 16), (((1, 2), (0, 1)), ((), ()))),
    "two contracted, permuted": ((8, 3, 4), (4, 3, 16), (((1, 2), (1, 0)), ((), ()))),
    "two free on both sides": ((3, 4, 12), (12, 2, 4), (((2,), (0,)), ((), ()))),
    "vector and matrix": ((12,), (12, 16), (((0,), (0,)), ((), ()))),
    "matrix and vector": ((8, 12), (12,), (((1,), (0,)), ((), ()))),
    "outer product": ((8,), (16,), (((), ()), ((), ()))),
    "inner product": ((12,), (12,), (((0,), (0,)), ((), ()))),
}
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def conv(strides=(1, 1), padding="SAME", dimension_numbers=NHWC, **options):
    return {"window_strides": strides, "padding": padding, "dimension_numbers": dimension_numbers, **options}


CONVS = {
    "same": ((2, 6, 6, 4), (3, 3, 4, 8), conv()),
    "valid": ((2, 6, 6, 4), (3, 3, 4, 8), conv(padding="VALID")),
    "stride": ((2, 8, 8, 4), (3, 3, 4, 8), conv((2, 2))),
    "uneven stride": ((4, 7, 8, 4), (3, 2, 4, 8), conv((2, 3), "VALID")),
    "asymmetric padding": ((4, 6, 5, 4), (3, 3, 4, 8), conv((1, 2), ((0, 2), (3, 1)))),
    "lhs dilation": ((4, 4, 4, 4), (3, 3, 4, 8), conv(padding=((1, 1), (1, 2)), lhs_dilation=(2, 2))),
    "rhs dilation": ((4, 7, 7, 4), (3, 3, 4, 8), conv(rhs_dilation=(2, 1))),
    "feature groups": ((4, 5, 5, 8), (3, 3, 4, 8), conv(feature_group_count=2)),
    "depthwise": ((4, 5, 5, 8), (3, 3, 1, 32), conv(feature_group_count=8)),
    "batch groups": ((8, 5, 5, 4), (3, 3, 4, 8), conv(batch_group_count=2)),
    "nchw": ((4, 4, 6, 5), (8, 4, 3, 3), conv((1, 2), dimension_numbers=NCHW)),
    "lists, and the default layout": ((4, 4, 6, 5), (8, 4, 3, 3), conv([1, 1], [[1, 1], [0, 2]], None)),
    "one axis": ((4, 9, 4), (3, 4, 8), conv((2,), dimension_numbers=("NWC", "WIO", "NWC"))),
}
NUMERICS = {
    "f32": (F32, F32, {}),
    "f32 highest": (F32, F32, {"precision": lax.Precision.HIGHEST}),
    "bf16": (BF16, BF16, {}),
    "bf16 to f32": (BF16, BF16, {"preferred_element_type": F32}),
    "bf16 x f32": (BF16, F32, {}),
    "f32 x bf16 to f32": (
        F32, BF16, {"preferred_element_type": F32, "precision": (lax.Precision.DEFAULT, lax.Precision.HIGHEST)},
    ),
}  # fmt: skip


def keeping_all(dims, lhs, rhs):
    """Backward slots that prune nothing away, where a product has something to contract: the rule itself runs."""
    (lc, rc), (lb, rb) = dims
    slots = {}
    if len(rhs) > len(rc) + len(rb):
        slots |= {"dx_g": nm.mse(4, 4), "dx_w": nm.mse(4, 4)}
    if len(lhs) > len(lc) + len(lb):
        slots |= {"dw_g": nm.mse(4, 4), "dw_x": nm.raw(nm.mse(4, 4))}
    return slots


def unpruned_cases():
    """All shapes in f32 and all numerics on three shapes, compiled; op by op, what does not take minutes."""
    for case, numerics in itertools.product((*DOTS, *CONVS), NUMERICS):
        many = case in ("plain", "permuted batch", "two contracted") or (case == "same" and " x " not in numerics)
        if many or numerics == "f32" or (case, numerics) == ("depthwise", "bf16"):
            yield case, numerics, True
        if case == "plain" or (numerics == "f32" and (case in DOTS or case == "stride")):
            yield case, numerics, False


@pytest.mark.parametrize(("case", "numerics", "jit"), list(unpruned_cases()))
def test_what_prunes_nothing_is_lax(case, numerics, jit):
    lhs, rhs, how = (DOTS | CONVS)[case]
    if case in DOTS:
        ours, plain, how = nm.dot_general, lax.dot_general, {"dimension_numbers": how}
        keeping = keeping_all(how["dimension_numbers"], lhs, rhs)
        assert nm.Sparsity(**keeping).backward == (case != "inner product")
    else:
        ours, plain = nm.conv_general_dilated, lax.conv_general_dilated
        keeping = {slot: nm.mse(4, 4) for slot in BACKWARD}
    left, right, options = NUMERICS[numerics]
    x, w = normal(0, *lhs, dtype=left), normal(1, *rhs, dtype=right)
    plain = functools.partial(plain, **how, **options)
    g = normal(2, *jax.eval_shape(plain, x, w).shape)

    def run(f):
        f = functools.partial(products, f)
        return bits((jax.jit(f) if jit else f)(x, w, g))

    expected = run(plain)
    for slots in ({}, keeping) if jit or case in ("plain", "stride") else ({},):
        assert run(functools.partial(ours, **how, **options, sparsity=nm.Sparsity(**slots))) == expected


def test_dense_is_the_empty_sparsity():
    assert nm.methods.dense() == nm.Sparsity()
    assert hash(nm.methods.dense()) == hash(nm.Sparsity())
    x, w = normal(0, 8, 12), normal(1, 12, 16)
    program = lambda f: str(jax.make_jaxpr(f)(x, w))
    empty = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=nm.Sparsity())
    assert program(empty) == program(lambda x, w: lax.dot_general(x, w, MATMUL))


ONES = [  # axes of length one are repeated, as by `jnp.einsum`; gradients have the shape of the operands
    ("bi,io->bo", (8, 1), (8, 4)),
    ("bi,io->bo", (4, 8), (1, 4)),
    ("bli,bio->blo", (1, 4, 8), (5, 8, 4)),
    ("bli,bio->blo", (5, 4, 8), (1, 8, 4)),
    ("...i,...io->...o", (4, 1, 8), (5, 8, 4)),
    ("...i,...io->...o", (1, 8), (5, 1, 4)),
]
EINSUMS = [
    ("bi,io->bo", (8, 12), (12, 16)),
    ("...i,io->...o", (2, 4, 12), (12, 16)),
    ("...i,oi->o...", (2, 4, 12), (16, 12)),
    ("bqhd,hdo->bqo", (2, 4, 3, 4), (3, 4, 16)),
    ("bqhd,dho->bqo", (2, 4, 3, 4), (4, 3, 16)),
    ("bqe,ehd->bqhd", (2, 4, 12), (12, 3, 4)),
    ("bhqd,bhkd->bhqk", (2, 3, 8, 4), (2, 3, 8, 4)),
    ("bqhd,bkhd->bhqk", (2, 8, 3, 4), (2, 8, 3, 4)),
    ("...qd,...kd->...qk", (2, 3, 8, 4), (2, 3, 8, 4)),
    ("bi,ih->hb", (8, 12), (12, 16)),
    ("bik,kjb->jbi", (2, 4, 12), (12, 16, 2)),
    ("bi,io", (8, 12), (12, 16)),
    ("zi,ia", (8, 12), (12, 16)),
    ("...i,io", (2, 4, 12), (12, 16)),
    (" b i , i o -> b o ", (8, 12), (12, 16)),
    ("bi,bi->", (8, 12), (8, 12)),
    ("i,o->io", (8,), (16,)),
    ("bi,bo->bio", (4, 8), (4, 8)),
    *ONES,
]


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "dtype"), [*((*case, F32) for case in EINSUMS), (*EINSUMS[1], BF16), (*EINSUMS[6], BF16)]
)
def test_einsum_that_prunes_nothing_is_jnp_einsum(spec, lhs, rhs, dtype):
    x, w = whole(0, *lhs, most=2, dtype=dtype), whole(1, *rhs, most=2, dtype=dtype)
    theirs = lambda x, w: jnp.einsum(spec, x, w)
    ours = lambda x, w: nm.einsum(spec, x, w, sparsity=nm.Sparsity())
    g = whole(2, *jax.eval_shape(theirs, x, w).shape, most=2)
    expected = fast_jit(lambda *a: products(theirs, *a))(x, w, g)
    chex.assert_trees_all_equal(fast_jit(lambda *a: products(ours, *a))(x, w, g), expected, strict=True)


@pytest.mark.parametrize(("spec", "lhs", "rhs"), [EINSUMS[0], EINSUMS[1], EINSUMS[6]])
def test_einsum_in_lax_order_is_jnp_einsum_bit_for_bit(spec, lhs, rhs):
    """If neither side swaps operands, rounding agrees too."""
    x, w = normal(0, *lhs), normal(1, *rhs)
    ours = lambda x, w: nm.einsum(spec, x, w, precision="highest", sparsity=nm.Sparsity())
    theirs = lambda x, w: jnp.einsum(spec, x, w, precision="highest")
    assert bits(jax.jit(ours)(x, w)) == bits(jax.jit(theirs)(x, w))


@pytest.mark.parametrize(("spec", "lhs", "rhs"), [one for one in ONES if one[1][-1] == one[2][-2]])
def test_einsum_prunes_repeated_operands(spec, lhs, rhs):
    """The weights grow along the contraction, so the last two of each group of four stay."""
    x = whole(0, *lhs, most=2)
    w = jnp.broadcast_to(jnp.arange(1.0, 9)[:, None], rhs)
    hard = jnp.where((jnp.arange(8) % 4 >= 2)[:, None], w, 0)
    theirs = lambda x, w: jnp.einsum(spec, x, w)
    ours = lambda x, w: nm.einsum(spec, x, w, sparsity=nm.parse("ste(2,4)"))
    g = whole(2, *jax.eval_shape(theirs, x, w).shape, most=2)
    chex.assert_trees_all_equal(products(ours, x, w, g), products(theirs, x, hard, g), strict=True)


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "words"),
    [
        ("bi->b", (8, 12), (12, 16), "1 operands"),
        ("bi,ij,jo->bo", (8, 12), (12, 16), "3 operands"),
        ("bib,io->bo", (8, 12, 8), (12, 16), "repeats"),
        ("bi,io->bb", (8, 12), (12, 16), "repeats"),
        ("bi,io->b", (8, 12), (12, 16), "sums 'o' over one operand"),
        ("bid,io->bo", (8, 12, 2), (12, 16), "sums 'd' over one operand"),
        ("bi,io->boz", (8, 12), (12, 16), "'z'.* in neither operand"),
        ("bi,io->bo", (2, 8, 12), (12, 16), "does not fit"),
        ("abi...,io->abo", (8, 12), (12, 16), "does not fit"),
    ],
)
def test_einsum_refuses_what_is_no_product(spec, lhs, rhs, words):
    with pytest.raises(ValueError, match=words):
        nm.einsum(spec, jnp.ones(lhs), jnp.ones(rhs), sparsity=nm.Sparsity())


# ---- every slot, against numpy ----

P24 = nm.mse(2, 4)
SLOT_CASES = {
    "dense": {},
    "y_x": {"y_x": nm.ste(P24)},
    "y_w": {"y_w": nm.ste(P24)},
    "dx_g": {"dx_g": P24},
    "dx_w": {"dx_w": P24},
    "dw_g": {"dw_g": P24},
    "dw_x": {"dw_x": P24},
    "raw dx_w": {"dx_w": nm.raw(P24)},
    "raw dw_x": {"dw_x": nm.raw(P24)},
    "y_w, dx_w": {"y_w": nm.ste(P24), "dx_w": P24},
    "y_w, raw dx_w": {"y_w": nm.ste(P24), "dx_w": nm.raw(P24)},
    "y_x, dw_x": {"y_x": nm.ste(P24), "dw_x": P24},
    "y_x, raw dw_x": {"y_x": nm.ste(P24), "dw_x": nm.raw(P24)},
    "y_w, raw nothing": {"y_w": nm.ste(P24), "dx_w": nm.raw(nm.identity)},
    "both gradients": {"dx_g": P24, "dw_g": P24},
    "all six": {"y_x": nm.ste(P24), "y_w": nm.ste(P24), "dx_g": P24, "dx_w": P24, "dw_g": P24, "dw_x": nm.raw(P24)},
}
Axes = collections.namedtuple("Axes", "y_x y_w dx_g dx_w dw_g dw_x")


def operands_used(slots, x, w, g, axes):
    """By the words of the docs alone: (x, w) of y, (g, w) of dx, (x, g) of dw, each pruned along its own axes."""
    x, w, g = (np.asarray(v) for v in (x, w, g))
    drop = lambda slot, v: numpy_pruned(v, getattr(axes, slot)) if slot in slots else v
    xf, wf = drop("y_x", x), drop("y_w", w)
    behind = lambda slot, used, given: (
        used
        if slot not in slots
        else given
        if slots[slot] == nm.raw(nm.identity)
        else drop(slot, given if isinstance(slots[slot], nm.raw) else used)
    )
    return (xf, wf), (drop("dx_g", g), behind("dx_w", wf, w)), (behind("dw_x", xf, x), drop("dw_g", g))


def by_lax_vjp(f, used, x, w):
    """The three products out of their operands by the transposes of plain lax."""
    (xf, wf), (g_dx, w_dx), (x_dw, g_dw) = (tuple(jnp.asarray(v) for v in pair) for pair in used)
    return f(xf, wf), jax.vjp(lambda a: f(a, w_dx), x)[1](g_dx)[0], jax.vjp(lambda b: f(x_dw, b), w)[1](g_dw)[0]


# Each returns a product, the same without pruning, the shapes of its operands, and the axes of the groups of each slot.


def of_dot(*tokens):
    """Tokens are grouped in order of memory, whether the last of their axes divides by m or only the product does."""
    dims, at = (((len(tokens),), (0,)), ((), ())), tuple(range(len(tokens)))
    calls = (functools.partial(f, dimension_numbers=dims) for f in (nm.dot_general, lax.dot_general))
    return *calls, (*tokens, 16), (16, 12), Axes(-1, 0, -1, 1, at, at)


def of_conv(lhs, rhs, **options):
    """In-channels, out-channels, and batch with space: positions in the order of memory."""
    options = conv(**options)
    spec, weight, _ = options["dimension_numbers"]
    channel, at = spec.index("C"), tuple(a for a in range(4) if spec[a] != "C")
    calls = (functools.partial(f, **options) for f in (nm.conv_general_dilated, lax.conv_general_dilated))
    return *calls, lhs, rhs, Axes(channel, weight.index("I"), channel, weight.index("O"), at, at)


def of_einsum(spec, **sizes):
    """Groups lie along the weight's contracted axes in the weight's order, whatever the order in the activations."""
    left, right, out = spec.replace("->", ",").split(",")
    at = lambda inside, of, other: tuple(inside.index(c) for c in of if c in inside and c not in other)
    axes = Axes(
        y_x=at(left, right, out),
        y_w=at(right, right, out),
        dx_g=at(out, right, left),
        dx_w=at(right, right, left),
        dw_g=at(out, left, right),
        dw_x=at(left, left, right),
    )
    lhs, rhs = (tuple(sizes[c] for c in labels) for labels in (left, right))
    return functools.partial(nm.einsum, spec), functools.partial(jnp.einsum, spec), lhs, rhs, axes


# of (heads, dim) the last contracted axis divides by 4, or only the product does; of dho the last is h
IN_PLACE, FLAT = {"b": 2, "q": 4, "h": 3, "d": 4, "o": 8}, {"b": 2, "q": 4, "h": 6, "d": 2, "o": 8}
turned = lambda sizes: sizes | {"h": sizes["d"], "d": sizes["h"]}
GRADIENTS, FEW = ("dx_g", "dx_w", "both gradients"), ("y_x", "y_w", "raw dx_w", "both gradients", "all six")
SLOT_SHAPES = {
    "dot": (of_dot(8), SLOT_CASES),
    "tokens": (of_dot(2, 4), SLOT_CASES),
    "flattened tokens": (of_dot(4, 3), FEW),
    "three flattened axes": (of_dot(2, 2, 3), FEW),
    "bqhd,hdo->bqo": (of_einsum("bqhd,hdo->bqo", **IN_PLACE), FEW),
    "bqhd,hdo->bqo, flattened": (of_einsum("bqhd,hdo->bqo", **FLAT), FEW),
    "bqhd,dho->bqo": (of_einsum("bqhd,dho->bqo", **turned(IN_PLACE)), FEW),
    "bqhd,dho->bqo, flattened": (of_einsum("bqhd,dho->bqo", **turned(FLAT)), FEW),
    "bqdh,hdo->bqo": (of_einsum("bqdh,hdo->bqo", **IN_PLACE), FEW),
    "bqdh,hdo->bqo, flattened": (of_einsum("bqdh,hdo->bqo", **FLAT), FEW),
    "to heads": (of_einsum("bqe,ehd->bqhd", b=2, q=4, e=8, h=6, d=2), GRADIENTS),  # dx contracts both of them
    "nhwc": (of_conv((2, 4, 4, 8), (3, 3, 8, 12)), SLOT_CASES),
    "flattened space": (of_conv((1, 4, 3, 8), (3, 3, 8, 12)), FEW[2:]),
    "flattened batch": (of_conv((4, 3, 3, 8), (1, 1, 8, 12)), FEW[2:]),
    "nchw, stride": (of_conv((2, 8, 8, 8), (12, 8, 3, 3), strides=(2, 2), dimension_numbers=NCHW), FEW[2:]),
    "feature groups": (of_conv((2, 4, 4, 16), (3, 3, 8, 24), feature_group_count=2), FEW[2:]),
    "kernel turned": (of_conv((2, 8, 3, 8), (3, 3, 8, 12), dimension_numbers=("NHWC", "WHIO", "NHWC")), FEW[2:]),
}


@pytest.mark.parametrize(
    ("shape", "case"), [(shape, case) for shape, (_, cases) in SLOT_SHAPES.items() for case in cases]
)
def test_slots_are_numpy(shape, case):
    ours, plain, lhs, rhs, axes = SLOT_SHAPES[shape][0]
    x, w = whole(0, *lhs), whole(1, *rhs)
    g = whole(2, *jax.eval_shape(plain, x, w).shape)
    ours = functools.partial(ours, sparsity=nm.Sparsity(**SLOT_CASES[case]))
    used = operands_used(SLOT_CASES[case], x, w, g, axes)
    chex.assert_trees_all_equal(fast_jit(functools.partial(products, ours))(x, w, g), by_lax_vjp(plain, used, x, w))


TWO, HEADS_OUT = {"feature_group_count": 2}, functools.partial(nm.einsum, "bqhd,hdo->bqo")


@pytest.mark.parametrize(
    ("slot", "f", "lhs", "rhs"),
    [
        # the axis as a whole divides by 4, or nearly: what a convolution contracts at once does not
        ("y_x", TWO, (4, 4, 4, 12), (3, 3, 6, 8)),
        ("y_w", TWO, (4, 4, 4, 12), (3, 3, 6, 8)),
        ("dx_g", TWO, (4, 4, 4, 8), (3, 3, 4, 12)),
        ("dx_w", TWO, (4, 4, 4, 8), (3, 3, 4, 12)),
        ("dx_g", {"batch_group_count": 2}, (4, 4, 4, 8), (3, 3, 8, 12)),
        ("dw_g", {}, (2, 3, 3, 8), (3, 3, 8, 12)),
        ("dw_x", {}, (2, 3, 3, 8), (3, 3, 8, 12)),
        ("y_x", HEADS_OUT, (2, 4, 3, 2), (3, 2, 8)),
        ("y_w", HEADS_OUT, (2, 4, 3, 2), (3, 2, 8)),
        ("dx_g", HEADS_OUT, (2, 4, 3, 4), (3, 4, 6)),
        ("dx_w", HEADS_OUT, (2, 4, 3, 4), (3, 4, 6)),
        ("dw_g", HEADS_OUT, (2, 3, 3, 4), (3, 4, 8)),
        ("dw_x", HEADS_OUT, (2, 3, 3, 4), (3, 4, 8)),
    ],
)
def test_groups_that_nothing_divides_into_are_refused_by_slot(slot, f, lhs, rhs):
    f = functools.partial(nm.conv_general_dilated, **conv(**f)) if isinstance(f, dict) else f
    f = functools.partial(f, sparsity=nm.Sparsity(**{slot: nm.ste(P24) if slot.startswith("y_") else P24}))
    x, w = jnp.ones(lhs), jnp.ones(rhs)
    with pytest.raises(ValueError, match=f"{slot}=.* do not divide into groups of 4"):
        jax.grad(lambda x: f(x, w).sum())(x)
    if not slot.startswith("y_"):  # a product that nobody differentiates may have any shape
        f(x, w)


def test_a_product_that_contracts_nothing_has_no_groups():
    f = lambda x, w: nm.dot_general(x, w, (((0,), (0,)), ((), ())), sparsity=nm.Sparsity(dw_g=P24)).sum()
    with pytest.raises(ValueError, match="dw_g=mse.* contracts no axis"):
        jax.grad(f)(jnp.ones(8), jnp.ones((8, 4)))


# ---- noise ----

BOTH = nm.Sparsity(dx_g=nm.mvue(2, 4), dw_g=nm.mvue(2, 4))


@pytest.mark.slow
def test_the_same_key_and_step_draw_the_same_noise():
    x, w, g = normal(0, 16, 16), normal(1, 16, 16), normal(2, 16, 16)
    first = of_matmul(x, w, g, BOTH, jax.random.key(5), 3)
    for key in (5, np.int64(5), np.array([0, 5], np.uint32)):
        fixed = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=BOTH, ctx=nm.Ctx(key, 3))  # noqa: B023
        assert bits(fast_jit(lambda *a: products(fixed, *a))(x, w, g)) == bits(first)  # noqa: B023
    for step in (jnp.int32(3), np.int64(3), jnp.uint32(3)):
        assert bits(of_matmul(x, w, g, BOTH, jax.random.key(5), step)) == bits(first)
    for key, step in ((6, 3), (5, 4), (5, 0)):
        y, dx, dw = of_matmul(x, w, g, BOTH, jax.random.key(key), step)
        assert bits(y) == bits(first[0])
        assert np.any(dx != first[1])
        assert np.any(dw != first[2])


def test_slots_draw_noise_of_their_own():
    """With g all ones a group shows its uniform: 2:4 keeps members i and i + 2. Both slots have as many groups."""
    size = 32
    _, dx, dw = of_matmul(jnp.eye(size), jnp.eye(size), jnp.ones((size, size)), BOTH, jax.random.key(0))
    first_kept = lambda kept: kept.reshape(-1, 4)[:, 0] != 0  # groups in the order in which uniforms are drawn
    of_in_dx, of_in_dw = first_kept(np.asarray(dx)), first_kept(np.moveaxis(np.asarray(dw).reshape(-1, 4, size), 1, 2))
    assert 0.3 < of_in_dx.mean() < 0.7
    assert 0.3 < of_in_dw.mean() < 0.7
    assert 0.3 < np.mean(of_in_dx == of_in_dw) < 0.7


@pytest.mark.parametrize("slot", BACKWARD)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_backward_noise_wants_a_key_of_the_gradient_alone(slot, jit):
    f = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=nm.Sparsity(**{slot: nm.mvue(2, 4)})).sum()
    grad = jax.grad(f, (0, 1))
    if jit:
        f, grad = jax.jit(f), jax.jit(grad)
    x, w = jnp.ones((8, 8)), jnp.ones((8, 8))
    assert f(x, w) == 8 * 8 * 8
    with pytest.raises(ValueError, match=rf"{slot}=mvue\(2,4\) .* pass a key"):
        grad(x, w)


def test_forward_noise_wants_a_key_of_every_call():
    sparsity = nm.Sparsity(y_w=nm.ste(nm.mvue(2, 4)))
    with pytest.raises(ValueError, match=r"y_w=ste\(mvue\(2,4\)\) .* pass a key"):
        nm.dot_general(jnp.ones((8, 8)), jnp.ones((8, 8)), MATMUL, sparsity=sparsity)


@pytest.mark.parametrize(
    ("slot", "p"),
    [
        *(("dw_g", p) for p in ("mvue(2,4)", "mvue(1,4)", "mvue(3,8)", "mvue_approx(2,4)", "uniform(2,4)")),
        ("dw_g", "chain(mvue(2,4),fp8('e5m2','random'))"),
        ("dw_g", "chain(mvue(2,4),fp4('random'))"),
        *((slot, "mvue(2,4)") for slot in ("dw_x", "dx_g", "dx_w")),
    ],
)
def test_noise_is_unbiased_in_its_product(p, slot):
    """Keys are fixed, so a pass is a pass; 5 standard errors for each of some hundred entries."""
    x, w, g = normal(0, 16, 8), normal(1, 8, 8), normal(2, 16, 8)
    which = 2 if slot.startswith("dw_") else 1
    plain = (None, g @ w.T, x.T @ g)[which]
    run = lambda key: of_matmul(x, w, g, nm.Sparsity(**{slot: nm.parse_pruner(p)}), key)[which]
    noisy = np.asarray(jax.vmap(run)(jax.vmap(jax.random.key)(np.arange(4096))), np.float64)
    spread = noisy.std(0)
    bound = 5 * spread / np.sqrt(4096) + 1e-5
    assert np.all(np.abs(noisy.mean(0) - plain) <= bound)
    assert np.mean(spread > 1e-3) > 0.9
    biased = of_matmul(x, w, g, nm.Sparsity(**{slot: nm.mse(2, 4)}))[which]
    assert np.mean(np.abs(biased - plain) > bound) > 0.5  # the bound is one that bias breaks


# ---- gradient rules ----


@pytest.mark.parametrize("method", ["dense()", "ste(2,4)", "s_ste(2,4,gradient='dense')", "bdwp(2,4); dx_w=identity"])
def test_jvp_where_no_backward_slot_prunes(method):
    sparsity = nm.parse(method)
    x, w, u, v = whole(0, 8, 16), whole(1, 16, 12), whole(2, 8, 16), whole(3, 16, 12)
    ctx = nm.Ctx(state={"y_w": jnp.float32(1)} if sparsity.y_w.facts.has_state else None)
    f = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=sparsity, ctx=ctx)
    y, tangent = jax.jit(lambda *a: jax.jvp(f, a[:2], a[2:]))(x, w, u, v)
    used = np.asarray(w)
    if sparsity.y_w != nm.identity:
        used = numpy_soft(w) if "s_ste" in method else numpy_pruned(w, 0)
    np.testing.assert_array_equal(y, x @ used)
    np.testing.assert_array_equal(tangent, u @ used + x @ v)


def numpy_soft(w, axis=0):
    """2:4 soft threshold by sorting: magnitudes less their group's second smallest."""
    lines = np.moveaxis(np.asarray(w, np.float64), axis, -1)
    blocks = lines.reshape(*lines.shape[:-1], -1, 4)
    t = np.sort(np.abs(blocks), -1)[..., 1:2]
    return np.moveaxis((np.sign(blocks) * np.maximum(np.abs(blocks) - t, 0)).reshape(lines.shape), -1, axis)


@pytest.mark.parametrize(
    ("method", "lam"), [("dense()", 0), ("ste(2,4)", 0), ("sr_ste(2,4,lam=0)", 0), ("sr_ste(2,4,lam=0.25)", 0.25)]
)
@pytest.mark.parametrize("mode", ["forward over reverse", "reverse over reverse"])
def test_hessian_vector_products(method, lam, mode):
    """The Hessian of sum(y**2) times v is 2 x^T x v. SR-STE adds lam v where w is dropped."""
    x, w, v = whole(0, 8, 16), whole(1, 16, 4), whole(2, 16, 4)
    loss = lambda w: (nm.dot_general(x, w, MATMUL, sparsity=nm.parse(method)) ** 2).sum()
    if mode == "forward over reverse":
        second = lambda w: jax.jvp(jax.grad(loss), (w,), (v,))[1]
    else:
        second = jax.grad(lambda w: (jax.grad(loss)(w) * v).sum())
    dropped = np.zeros_like(w) if lam == 0 else np.where(numpy_pruned(w, 0) == w, 0, v)
    np.testing.assert_array_equal(jax.jit(second)(w), 2 * x.T @ (x @ v) + lam * dropped)


def test_a_backward_slot_rules_out_forward_mode():
    f = lambda w: nm.dot_general(jnp.ones((8, 8)), w, MATMUL, sparsity=nm.Sparsity(dx_g=P24))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(f, (jnp.ones((8, 8)),), (jnp.ones((8, 8)),))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bdwp(2,4)", "mvue(2,4)", "s_ste(2,4)", "dx_w=raw(identity)", "dw_x=mse(2,4)"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_backward_slot_rules_out_second_derivatives(method, jit):
    """A penalty on dx would have the gradient 0 by bdwp, and a Hessian-vector product by mvue would be 80 % off."""
    sparsity = nm.parse(method)
    x, w, v = whole(0, 8, 16), whole(1, 16, 8), whole(2, 16, 8)
    ctx = nm.Ctx(0, state={"y_w": jnp.float32(1)} if sparsity.y_w.facts.has_state else None)
    y = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=sparsity, ctx=ctx)
    compiled = jax.jit if jit else lambda f: f
    dx = compiled(jax.grad(lambda x, w: y(x, w).sum()))
    dw = compiled(jax.grad(lambda w: (y(x, w) ** 2).sum()))
    both = compiled(jax.value_and_grad(lambda w: (y(x, w) ** 2).sum()))
    seconds = (
        lambda: jax.grad(lambda w: (dx(x, w) ** 2).sum())(w),
        lambda: jax.grad(lambda w: (dw(w) * v).sum())(w),
        lambda: jax.jvp(dw, (w,), (v,)),
        lambda: jax.linearize(dw, w),
        lambda: jax.hessian(lambda w: (y(x, w) ** 2).sum())(w),
        lambda: jax.grad(lambda w: both(w)[0])(w),
        lambda: jax.grad(lambda w: jax.vmap(lambda x: dx(x, w).sum())(jnp.stack([x, x])).sum())(w),
        lambda: jax.grad(lambda w: jax.lax.scan(lambda w, _: (w - dw(w), None), w, None, 2)[0].sum())(w),
        lambda: jax.grad(lambda w: (jax.checkpoint(dw)(w) * v).sum())(w),
    )
    for second in seconds:
        with pytest.raises(
            TypeError, match=r"gradient is pruned \(d[xw]_.*has no derivative beyond .* as ste\(2,4\) does"
        ):
            second()
    constant = lambda w: (y(x, w) ** 2).sum() + (jax.grad(lambda x: y(x, lax.stop_gradient(w)).sum())(x) ** 2).sum()
    np.testing.assert_array_equal(jax.grad(constant)(w), dw(w))  # only the inner gradient's inputs matter


def test_the_gradient_of_s_ste_is_without_beta():
    """The loss is linear in y, so g is the same for every beta."""
    x, w, g = whole(0, 8, 16), whole(1, 16, 12), whole(2, 8, 12)

    def run(beta, sparsity):
        return of_matmul(x, w, g, sparsity, jax.random.key(0), 0, {"y_w": jnp.float32(beta)})

    shrunk = numpy_soft(w)
    for beta in (0.5, 1.0, 2.0):  # powers of two scale without rounding
        y, dx, dw = run(beta, nm.methods.s_ste(gradient="dense"))
        np.testing.assert_array_equal(y, beta * (x @ shrunk))
        np.testing.assert_array_equal(dx, beta * (g @ shrunk.T))
        np.testing.assert_array_equal(dw, np.asarray(x).T @ np.asarray(g))
    for sparsity in (nm.methods.s_ste(), nm.methods.s_ste(gradient="dense")):
        one, more = run(1.0, sparsity), run(1.7, sparsity)
        np.testing.assert_allclose(more[0], 1.7 * one[0], rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(more[1], 1.7 * one[1], rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(more[2], one[2])


@pytest.mark.parametrize("lam", [0.25, 2.0**-12])
def test_sr_ste_adds_lambda_times_the_dropped(lam):
    """Values are multiples of 1/8 and lam a power of two: every sum is exact, and so is equality."""
    x, w, g = whole(0, 8, 16), whole(1, 16, 12, most=20) / 8, whole(2, 8, 12)
    y, dx, dw = of_matmul(x, w, g, nm.methods.sr_ste(2, 4, lam))
    kept = numpy_pruned(w, 0)
    np.testing.assert_array_equal(y, x @ kept)
    np.testing.assert_array_equal(dx, g @ kept.T)
    np.testing.assert_array_equal(dw, np.asarray(x).T @ np.asarray(g) + np.float32(lam) * (w - kept))
    assert np.any(w != kept)


def test_sr_ste_adds_once_for_every_use():
    x, w = whole(0, 8, 16), whole(1, 16, 16, most=20) / 8
    use = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=nm.methods.sr_ste(2, 4, 0.25))
    zero = jnp.zeros_like(x)
    dw = jax.jit(jax.grad(lambda w: (zero * use(x, w)).sum() + (zero * use(x + 1, w)).sum()))(w)
    np.testing.assert_array_equal(dw, 0.5 * (w - numpy_pruned(w, 0)))


@pytest.mark.parametrize("gradient", ["ste", "autodiff"])
@pytest.mark.parametrize(("step", "d"), [(0, 1.0), (2, 0.5), (4, 0.0), (9, 0.0)])
def test_both_gradients_of_mask_decay(gradient, step, d):
    x, w, g = whole(0, 8, 16), whole(1, 16, 12, most=20) / 8, whole(2, 8, 12)
    sparsity = nm.methods.mdgf(2, 4, nm.linear(1, 0, 4), gradient)
    y, dx, dw = of_matmul(x, w, g, sparsity, step=step)
    factor = np.where(numpy_pruned(w, 0) != 0, 1.0, d)  # where w is 0 it is 0 in y and dx whatever its factor
    np.testing.assert_array_equal(y, x @ (w * factor))
    np.testing.assert_array_equal(dx, g @ (w * factor).T)
    full, drawn = np.asarray(x).T @ np.asarray(g), np.asarray(w) != 0
    np.testing.assert_array_equal(dw[drawn], (full * (1.0 if gradient == "ste" else factor))[drawn])


def test_mask_decay_ends_as_magnitude_pruning():
    """To the bit: what was dropped is 0, not -0 and not something small."""
    x, w, g = normal(0, 8, 16), normal(1, 16, 12), normal(2, 8, 12)
    fading = nm.methods.mdgf(2, 4, nm.linear(1, 0, 4))
    assert bits(of_matmul(x, w, g, fading, step=4)[:2]) == bits(of_matmul(x, w, g, nm.methods.ste())[:2])
    assert bits(of_matmul(x, w, g, fading, step=0)) == bits(of_matmul(x, w, g, nm.methods.dense()))
    decayed = jax.jit(lambda w, step: nm.prune(fading.y_w, w, axis=0, step=step))
    assert bits(decayed(w, 4)) == bits(jnp.asarray(numpy_pruned(w, 0)))


# ---- the same numbers however a program is written ----

CHANGING = "stages(((0,mse(2,4)),(1,mse(1,2)),(2,mse(1,8))))"
LAYERED = {  # lam and rescaling by powers of two, so that nothing rounds; exact mvue of whole numbers is dyadic
    "s_ste(2,4)": "s_ste(2,4)",
    "sdgp": "sdgp(2,4,rescale=False)",
    "sdgp, random": "sdgp(2,4,select='random')",
    "changing m": f"y_w=ste({CHANGING}); dx_g={CHANGING}; dw_g=stages(((0,identity),(2,mvue(2,4))))",
    "held": "fst(2,4,lam=0.125,every=2); dw_g=mvue(2,4)",
    "sdgp, of norms": "sdgp(over='group')",  # which round
}


def stacked_layers(sparsity):
    """Two layers of whole numbers, a state for each, and a key for each."""
    x, w, g = whole(0, 8, 8, most=1), whole(1, 2, 8, 8, most=1), whole(2, 8, 8, most=1)
    states = [first_state(sparsity, v) for v in whole(3, 2, 8, 8, most=9)]
    keys = jax.random.split(jax.random.key(0), 2)
    return x, w, g, jax.tree.map(lambda *s: jnp.stack(s), *states), keys


WAYS = (("unrolled", False), ("scan", False), ("scan", True))


def layered(sparsity, loop, remat):
    def layer(h, w, state, key, step):
        return nm.dot_general(h, w, MATMUL, sparsity=sparsity, ctx=nm.Ctx(key, step, state))

    layer = jax.checkpoint(layer) if remat else layer

    def loss(x, w, g, states, keys, step):
        if loop == "scan":
            y = lax.scan(lambda h, each: (layer(h, *each, step), None), x, (w, states, keys))[0]
        else:
            y = x
            for i in range(w.shape[0]):
                y = layer(y, w[i], jax.tree.map(lambda s: s[i], states), keys[i], step)  # noqa: B023
        return (y * g).sum(), y

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", LAYERED)
def test_scan_is_unrolled_and_remat_is_not(method):
    sparsity = nm.parse(LAYERED[method])
    data = stacked_layers(sparsity)
    runs = {how: fast_jit(layered(sparsity, *how)) for how in WAYS}
    seen = []
    for step in range(3):
        expected = runs["unrolled", False](*data, jnp.int32(step))
        for run in runs.values():
            found = run(*data, jnp.int32(step))
            if "norms" in method:
                chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
            else:
                chex.assert_trees_all_equal(found, expected)
        seen.append(expected)
    if method not in ("sdgp", "sdgp, of norms", "held"):  # which know no step, or show it through noise alone
        assert bits(seen[0]) != bits(seen[2])
    for dw in seen[0][1][1]:
        assert np.any(dw)


@pytest.mark.parametrize("method", [method for method in LAYERED if "norms" not in method])
@pytest.mark.slow
def test_jit_is_eager(method):
    sparsity = nm.parse(LAYERED[method])
    data = stacked_layers(sparsity)
    run = layered(sparsity, "unrolled", False)
    chex.assert_trees_all_equal(run(*data, 1), jax.jit(run)(*data, 1))


def test_layers_of_a_scan_draw_by_their_own_keys():
    x, w, g = jnp.eye(16), jnp.broadcast_to(jnp.eye(16), (3, 16, 16)), jnp.ones((16, 16))
    run = jax.jit(layered(nm.methods.mvue(2, 4), "scan", False))
    dw = run(x, w, g, {}, jax.random.split(jax.random.key(0), 3), 0)[1][1]
    for a, b in itertools.combinations(dw, 2):
        assert np.any(a != b)
    same = run(x, w, g, {}, jnp.stack([jax.random.key(0)] * 3), 0)[1][1]
    chex.assert_trees_all_equal(*same)


# ---- one compilation ----


def counted(n):
    """A gradient of both operands, jitted, that may be traced n times, and the list of its traces."""
    traces = []

    def run(x, w, key, step, state, *, sparsity):
        traces.append(sparsity)
        f = lambda x, w: nm.dot_general(x, w, MATMUL, sparsity=sparsity, ctx=nm.Ctx(key, step, state))
        return products(f, x, w, jnp.ones((x.shape[0], w.shape[1])))

    chex.clear_trace_counter()
    return jax.jit(chex.assert_max_traces(run, n=n), static_argnames="sparsity"), traces


@pytest.mark.parametrize(
    "method",
    [
        "s_ste(2,4)",
        "sdgf(1,8,steps=40)",
        "mdgf(2,4,linear(1,0,30,begin=5))",
        "mdgf(2,4,optax_schedule('cosine_decay_schedule',1.0,40))",
        "fst(2,4,every=7,dense_from=40)",
        f"y_w=ste({CHANGING}); dx_g={CHANGING}",
    ],
)
def test_one_trace_for_all_steps_and_for_equal_values(method):
    x, w = normal(0, 8, 8), normal(1, 8, 8)
    run, traces = counted(1)
    results, state = [], first_state(nm.parse(method), w)
    for step in range(50):
        sparsity = nm.parse(method)  # a new value, equal to the others
        results.append(bits(run(x, w, jax.random.key(0), jnp.int32(step), state, sparsity=sparsity)))
    assert len(traces) == 1
    assert any(r != results[0] for r in results)


def test_values_that_differ_are_traced_apart():
    run, traces = counted(2)
    x = jnp.ones((8, 8))
    for method in ("ste(2,4)", "ste(1,4)", "ste(2,4)"):
        run(x, x, None, 0, {}, sparsity=nm.parse(method))
    assert [str(s) for s in traces] == ["y_w=ste(mse(2,4))", "y_w=ste(mse(1,4))"]


# ---- state ----


@pytest.mark.slow
def test_fst_holds_its_mask_and_renews_it():
    transposable_of = lambda w: np.asarray(nm.transposable(2, 4).mask(w, 0))
    sparsity, every = nm.methods.fst(2, 4, every=3), 3
    state = first_state(sparsity, normal(100, 8, 12))
    assert set(state) == {"y_w"}
    np.testing.assert_array_equal(state["y_w"], transposable_of(normal(100, 8, 12)))
    refresh = jax.jit(lambda w, step, state: sparsity.refresh(w, contract=0, out=1, ctx=nm.Ctx(step=step, state=state)))
    for step in range(8):
        w = normal(step, 8, 12)
        state = refresh(w, step, state)
        expected = transposable_of(normal(step - step % every, 8, 12))
        np.testing.assert_array_equal(state["y_w"], expected)
        y, _, _ = of_matmul(jnp.eye(8), w, jnp.ones((8, 12)), sparsity, jax.random.key(0), step, state)
        np.testing.assert_array_equal(y, np.where(expected, w, 0))


def test_bi_mask_orders_the_pruned_weight_for_dx():
    sparsity = nm.methods.bi_mask(2, 4, every=2)
    x, w, g = normal(0, 8, 16), normal(1, 16, 32), normal(2, 8, 32)
    state = first_state(sparsity, w)
    assert set(state) == {"dx_w"}
    order = np.asarray(state["dx_w"])
    np.testing.assert_array_equal(np.sort(order), np.arange(32))

    pruned = numpy_pruned(w, 0)
    in_order = lambda order: numpy_pruned(pruned[:, order], 1)
    y, dx, _ = of_matmul(x, w, g, sparsity, state=state)
    np.testing.assert_allclose(y, x @ pruned, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, g @ in_order(order)[:, np.argsort(order)].T, rtol=1e-5, atol=1e-5)

    kept = lambda order: np.count_nonzero(in_order(order))
    one = np.asarray(first_state(nm.methods.bi_mask(2, 4, draws=1), w)["dx_w"])  # the first of the hundred
    some = [kept(np.random.default_rng(i).permutation(32)) for i in range(20)]
    assert kept(order) > max(kept(one), np.mean(some))

    refresh = jax.jit(lambda step: sparsity.refresh(w, contract=0, out=1, ctx=nm.Ctx(step=step, state=state))["dx_w"])
    np.testing.assert_array_equal(refresh(1), order)
    assert np.any(refresh(2) != order)
    np.testing.assert_array_equal(np.sort(refresh(2)), np.arange(32))


@pytest.mark.parametrize("sizes", [IN_PLACE, FLAT])
def test_state_of_a_kernel_with_two_input_axes(sizes):
    h, d = sizes["h"], sizes["d"]
    w, x = normal(0, h, d, 8), normal(1, 2, 4, h, d)
    flat = w.reshape(h * d, 8)
    s = numpy_soft(flat)
    beta = first_state(nm.methods.s_ste(), w, contract=(0, 1), out=2)["y_w"]
    np.testing.assert_allclose(beta, (flat * s).sum() / (s * s).sum(), rtol=1e-6)

    held = nm.Sparsity(y_w=nm.ste(nm.hold(P24)))
    state = first_state(held, w, contract=(-3, -2), out=-1)
    moved = w[::-1] + 1  # whose own mask is another
    y = nm.einsum("bqhd,hdo->bqo", x, moved, sparsity=held, ctx=nm.Ctx(state=state))
    kept = np.where(numpy_pruned(flat, 0) != 0, moved.reshape(h * d, 8), 0).reshape(h, d, 8)
    np.testing.assert_allclose(y, np.einsum("bqhd,hdo->bqo", x, kept), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in ("s_ste", "fst", "bi_mask", "slope", "random_mask")]
)
def test_methods_that_remember_nothing_have_no_state(name):
    assert first_state(of_name(name), normal(0, 8, 8)) == {}


@pytest.mark.parametrize(("method", "slot"), [("s_ste()", "y_w"), ("fst()", "y_w"), ("bi_mask()", "dx_w")])
def test_state_that_is_missing_is_asked_for(method, slot):
    """Without its scale the product of S-STE would be another method's, and nobody would see."""
    f = lambda w: nm.dot_general(jnp.ones((8, 8)), w, MATMUL, sparsity=nm.parse(method), ctx=nm.Ctx(key=0)).sum()
    with pytest.raises(ValueError, match=f"{slot}=.*keeps state .*sparsity.init\\(w, contract="):
        jax.grad(f)(jnp.ones((8, 8)))


# ---- all methods, all products ----

KINDS = {  # how a product is called, its shapes, and which axes of the weight it contracts and leaves
    "dot": (functools.partial(nm.dot_general, dimension_numbers=MATMUL), (8, 16), (16, 8), 0, 1),
    "tokens": (functools.partial(nm.dot_general, dimension_numbers=TOKENS), (2, 4, 16), (16, 8), 0, 1),
    "einsum": (lambda *a, **k: nm.einsum("bqhd,hdo->bqo", *a, **k), (2, 4, 2, 8), (2, 8, 8), (0, 1), 2),
    "conv": (
        functools.partial(nm.conv_general_dilated, **conv()),
        (2, 4, 4, 8),
        (3, 3, 8, 8),
        2,
        3,
    ),
}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, F32) for kind in KINDS), ("tokens", BF16), ("conv", BF16)])
@pytest.mark.parametrize("name", METHODS)
def test_methods_times_products(name, kind, dtype):
    call, lhs, rhs, contract, out = KINDS[kind]
    sparsity = of_name(name)
    x, w = normal(0, *lhs, dtype=dtype), normal(1, *rhs, dtype=dtype)
    f = lambda x, w, ctx: call(x, w, sparsity=sparsity, ctx=ctx)
    g = normal(2, *jax.eval_shape(lambda x, w: call(x, w, sparsity=nm.Sparsity()), x, w).shape)
    ctx = nm.Ctx(jax.random.key(0), 1, first_state(sparsity, w, contract, out))
    run = lambda x, w, g, ctx: products(lambda x, w: f(x, w, ctx), x, w, g)
    results = fast_jit(run)(x, w, g, ctx)
    for result, like in zip(results, (g, x, w), strict=True):
        chex.assert_shape(result, like.shape)
        chex.assert_type(result, dtype)
        chex.assert_tree_all_finite(result)
        assert np.mean(np.asarray(result, np.float32) != 0) >= (0.25 if name == "vnm" else 0.5)
    if kind == "tokens" and name in ("activation", "bdwp", "dense", "mdgf", "sr_ste", "ste"):  # others: see layers
        near = 1e-5 if dtype == F32 else 0.03
        eager = run(x, w, g, ctx)
        chex.assert_trees_all_equal_dtypes(eager, results)
        widened = jax.tree.map(lambda a: np.asarray(a, np.float32), (eager, results))
        chex.assert_trees_all_close(*widened, rtol=near, atol=near)


def most_kept(x, axis, m):
    """The fullest group along an axis."""
    return np.count_nonzero(np.moveaxis(np.asarray(x), axis, -1).reshape(-1, m), axis=1).max()


@pytest.mark.parametrize(
    "method",
    [
        *(name for name in METHODS if name not in ("random_mask", "slope")),  # which drop entries of an identity
        "bdwp(1,4)",
        "y_w=ste(transposable(2,4)); dx_w=fp8('e5m2')",
        "y_w=ste(chain(transposable(2,4),fp8('e4m3'))); dx_w=mse(1,4)",
        "y_w=ste(transposable(2,4)); dx_w=raw(fp8('e5m2'))",
        "y_w=ste(chain(transposable(2,4),mse(1,8)))",
    ],
)
def test_each_product_has_as_few_terms_as_is_counted_and_no_fewer(method):
    """An identity matrix for one operand of a product shows the other; of itself, pruning leaves an identity as it is."""
    sparsity = of_name(method) if method in METHODS else nm.parse(method)
    size, eye = 16, jnp.eye(16)
    x, w, g = normal(0, size, size), normal(1, size, size), normal(2, size, size)
    state = first_state(sparsity, w)
    run = lambda x, w, g: of_matmul(x, w, g, sparsity, jax.random.key(0), 1, state)
    w_in_y, _, g_in_dw = run(eye, w, g)
    x_in_y, g_in_dx, _ = run(x, eye, g)
    _, w_in_dx, x_in_dw = run(x, w, eye)
    w_in_dx, x_in_dw = np.asarray(w_in_dx).T, np.asarray(x_in_dw).T
    if method == "bi_mask":
        w_in_dx = w_in_dx[:, state["dx_w"]]
    if hasattr(sparsity.y_w, "lam"):  # whose dw holds the decay too, where the weight is dropped
        g_in_dw = g_in_dw - sparsity.y_w.lam * (w - w_in_y)
        g_in_dw = np.where(np.abs(g_in_dw) < 1e-6, 0, g_in_dw)
    left = nm.flops.effective(sparsity, 1)
    if method in ("activation", "vnm"):  # dx, by autodiff, only of what was kept
        left = left[0], left[0], left[2]
    seen = ((x_in_y, 1), (w_in_y, 0)), ((g_in_dx, 1), (w_in_dx, 1)), ((g_in_dw, 0), (x_in_dw, 0))
    for share, operands in zip(left, seen, strict=True):
        m = 8 if share == 1 / 8 or method == "vnm" else 4
        assert min(most_kept(value, axis, m) for value, axis in operands) == share * m


@pytest.mark.parametrize("method", ["mvue(2,4)", "sdgp(2,4)", "ste(2,4); dx_g=mvue(2,4); dw_g=mvue(2,4)"])
def test_an_operand_of_integers_has_no_gradient(method):
    x, w, sparsity = jnp.arange(64).reshape(8, 8) % 5, normal(1, 8, 4), nm.parse(method)

    def loss(w, x):
        return (nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=nm.Ctx(key=jax.random.key(0))) ** 2).sum()

    chex.assert_trees_all_close(jax.grad(loss)(w, x), jax.grad(loss)(w, x.astype(F32)), rtol=1e-6)


@pytest.mark.slow
def test_the_norms_of_sdgp_do_not_mix_the_matrices_of_a_batch():
    """A product with two batch axes is that of each of its parts along the second one."""
    x, w = normal(0, 2, 3, 4, 8), normal(1, 2, 3, 8, 4)
    g = normal(2, 2, 3, 4, 4) * np.array([1.0, 10.0, 100.0], np.float32)[None, :, None, None]
    sdgp = nm.methods.sdgp(2, 4)

    def dx(spec, x, w, g):
        return jax.vjp(lambda x: nm.einsum(spec, x, w, sparsity=sdgp), x)[1](g)[0]

    whole = dx("bhqk,bhkd->bhqd", x, w, g)
    parts = [dx("bqk,bkd->bqd", x[:, h], w[:, h], g[:, h]) for h in range(3)]
    np.testing.assert_allclose(whole, np.stack(parts, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_tiles_do_not_lie_in_two_feature_groups():
    def call(outputs):
        x, w = jnp.ones((1, 5, 8)), normal(0, 1, 4, outputs)
        transposable = nm.Sparsity(y_w=nm.ste(nm.transposable(2, 4)))
        return nm.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2, sparsity=transposable
        )

    assert call(8).shape == (1, 5, 8)
    with pytest.raises(ValueError, match="tiles of 4 x 4 values would lie in two of the 2 feature groups"):
        call(4)
