"""FLOPs of products, against closed forms and a paper's table."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

import nmjax as nm
from nmjax.analysis.flops import counted, effective, flops, over, reading_data
from nmjax.products.operations import as_conv, as_dot
from nmjax.recipes.text import METHODS
from tests.networks import GPT, Block


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def of(f, *shapes, mark="layer_"):
    """Return the FLOPs of a function, by name."""
    costs = {}
    for name, cost in counted(jax.make_jaxpr(f)(*shapes).jaxpr, mark):
        costs[name] = costs.get(name, 0) + cost
    return costs


# ---- a paper's table ----


class Encoder(nnx.Module):
    """ViT's blocks (Dosovitskiy et al. 2021), in a list or in a stack; by default the Base of 12."""

    def __init__(self, width=768, hidden=3072, heads=12, depth=12, *, stacked=False, rngs):
        make = lambda rngs: Block(width, hidden, heads, rngs=rngs)
        self.blocks = nnx.vmap(make)(rngs.split(depth)) if stacked else nnx.List([make(rngs) for _ in range(depth)])

    def __call__(self, x):
        if isinstance(self.blocks, Block):
            return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        for block in self.blocks:
            x = block(x)
        return x


def planned(text, **options):
    model = nnx.eval_shape(lambda: Encoder(rngs=nnx.Rngs(0), **options))
    nm.nnx.sparsify(model, nm.Recipe(((r"blocks/.*mlp/.*", text),)))
    return nm.nnx.plan(model, shape(1, 196, 768))


# GFLOPs of ViT-B, 196 tokens, n:m in the feed-forward layers: Bambhaniya et al. (arXiv 2402.04744). For 1:32 the paper
# prints 13.20; 2 * 196 * 768 * 12 * (4 * 768 + 2 * 196 + 2 * 3072 / 32) is 13.208 G.
VIT = {
    "ste(2,4)": 23.61,
    "ste(1,4)": 18.06,
    "ste(1,8)": 15.29,
    "ste(1,16)": 13.90,
    "ste(1,32)": 13.21,
    "ste(1,128)": 12.69,
}


@pytest.mark.parametrize("text", ["dense", *VIT])
def test_vit_costs_what_the_paper_says(text):
    plan = planned(text, stacked=True)
    dense, left = plan.forward
    assert round(dense / 1e9, 2) == 34.71
    assert round(left / 1e9, 2) == VIT.get(text, 34.71)
    share = nm.parse(text).y_w.kept()
    assert left == 2 * 196 * 768 * 12 * (4 * 768 + 2 * 196 + 2 * 3072 * share)
    assert plan.elsewhere == 2 * 196 * 768 * 12 * 2 * 196  # logits and what attends
    assert plan.training == (3 * dense, 3 * dense - (dense - left))  # a mask along inputs saves nothing in dx and dw


@pytest.mark.slow
def test_a_list_of_blocks_costs_what_their_stack_does():
    listed, stacked = planned("ste(2,4)"), planned("ste(2,4)", stacked=True)
    assert (listed.forward, listed.elsewhere) == (stacked.forward, stacked.elsewhere)
    assert (len(listed.layers), len(stacked.layers)) == (72, 6)
    for layer in stacked.layers:
        own = [of.flops for of in listed.layers if of.path.endswith(layer.path.removeprefix("blocks"))]
        assert layer.flops == sum(own)
        assert len(own) == 12


def test_gpt_scanned_and_rematted():
    """The model has width 32, hidden 64, vocabulary 64 and three blocks; the batch has two texts of 16 tokens."""
    model = nnx.eval_shape(lambda: GPT(rngs=nnx.Rngs(0)))
    plan = nm.nnx.plan(model, shape(2, 16, dtype=jnp.int32))
    tokens = 2 * 16
    assert plan.elsewhere == 2 * tokens * 3 * 2 * 16 * 32
    assert plan.forward[0] - plan.elsewhere == 2 * tokens * (3 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 64)


# ---- closed forms ----


@pytest.mark.parametrize(
    ("dims", "lhs", "rhs", "expected"),
    [
        ((((1,), (0,)), ((), ())), (5, 7), (7, 3), 2 * 5 * 7 * 3),
        ((((2,), (1,)), ((0,), (0,))), (2, 5, 7), (2, 7, 3), 2 * 2 * 5 * 7 * 3),
        ((((0, 2), (1, 0)), ((3,), (3,))), (5, 2, 7, 3), (7, 5, 4, 3), 2 * (5 * 7) * 3 * 2 * 4),
        (((( -1,), (-2,)), ((), ())), (2, 5, 7), (7, 3), 2 * 2 * 5 * 7 * 3),
        ((((), ()), ((), ())), (5,), (3,), 2 * 5 * 3),
        ((((0,), (0,)), ((), ())), (7,), (7,), 2 * 7),
        ((((1,), (0,)), ((), ())), (5, 0), (0, 3), 0),
        ((((2,), (1,)), ((0,), (0,))), (0, 5, 7), (0, 7, 3), 0),
    ],
)  # fmt: skip
def test_a_dot(dims, lhs, rhs, expected):
    lhs, rhs = shape(*lhs), shape(*rhs)
    op = as_dot(lhs, rhs, dims)
    assert flops(op, lhs.shape, rhs.shape) == expected
    assert of(op, lhs, rhs) == {None: expected}


CONVS = [
    ({"window_strides": (1, 1), "padding": "SAME"}, (2, 9, 9, 8), (3, 3, 8, 6), 2 * (2 * 9 * 9 * 6) * (3 * 3 * 8)),
    ({"window_strides": (2, 2), "padding": "SAME"}, (2, 9, 9, 8), (3, 3, 8, 6), 2 * (2 * 5 * 5 * 6) * (3 * 3 * 8)),
    ({"window_strides": (1, 2), "padding": "VALID"}, (2, 9, 9, 8), (3, 3, 8, 6), 2 * (2 * 7 * 4 * 6) * (3 * 3 * 8)),
    ({"window_strides": (1, 1), "padding": ((0, 0), (2, 1))}, (2, 9, 9, 8), (3, 3, 8, 6),
     2 * (2 * 7 * 10 * 6) * (3 * 3 * 8)),
    ({"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4}, (2, 9, 9, 8), (3, 3, 2, 12),
     2 * (2 * 9 * 9 * 12) * (3 * 3 * 2)),
    ({"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 8}, (2, 9, 9, 8), (3, 3, 1, 8),
     2 * (2 * 9 * 9 * 8) * (3 * 3)),
    ({"window_strides": (1, 1), "padding": "SAME", "batch_group_count": 2}, (4, 9, 9, 8), (3, 3, 8, 6),
     2 * (2 * 9 * 9 * 6) * (3 * 3 * 8)),
    ({"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 2)}, (2, 9, 9, 8), (3, 3, 8, 6),
     2 * (2 * 5 * 5 * 6) * (3 * 3 * 8)),
    ({"window_strides": (1, 1), "padding": "VALID"}, (2, 9, 9, 8), (9, 9, 8, 0), 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "lhs", "rhs", "expected"), CONVS, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NHWC")])
def test_a_convolution(options, lhs, rhs, expected, layout):
    moved = lambda sizes, here, there: shape(*(sizes[here.index(c)] for c in there))
    lhs, rhs = moved(lhs, "NHWC", layout[0]), moved(rhs, "HWIO", layout[1])
    op = as_conv(lhs, rhs, **options, dimension_numbers=layout)
    assert flops(op, lhs.shape, rhs.shape) == expected
    assert of(op, lhs, rhs) == {None: expected}


def test_all_three_products_of_a_layer_cost_the_same():
    loss = lambda x, w: jnp.square(jnp.einsum("bti,ihd->bthd", x, w)).sum()
    x, w = shape(2, 5, 7), shape(7, 3, 4)
    one = 2 * (2 * 5) * 7 * (3 * 4)
    assert of(loss, x, w) == {None: one}
    assert of(jax.grad(loss), x, w) == {None: 2 * one}
    assert of(jax.grad(loss, (0, 1)), x, w) == {None: 3 * one}


ONE = 2 * 4 * 4 * 4  # of a 4 x 4 product


def dot(x):
    return x @ x


@pytest.mark.parametrize(
    ("f", "times"),
    [
        (lambda x: dot(dot(x)), 2),
        (jax.jit(lambda x: jax.jit(dot)(dot(x))), 2),
        (lambda x: lax.scan(lambda c, _: (dot(c), None), x, None, length=7)[0], 7),
        (lambda x: lax.scan(lambda c, _: (dot(c), None), x, None, length=7, unroll=3)[0], 7),
        (lambda x: lax.scan(lambda c, _: (lax.fori_loop(0, 3, lambda _, c: dot(c), c), None), x, None, length=5)[0],
         15),
        (lambda x: lax.map(dot, jnp.stack([x] * 3)), 3),
        (lambda x: jax.vmap(dot)(jnp.stack([x] * 3)), 3),
        (lambda x: jax.vmap(lambda y: y @ x)(jnp.stack([x] * 3)), 3),
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: dot(dot(x)), dot, x), 2),
        (lambda x: lax.switch(jnp.int32(x[0, 0]), [jnp.sin, dot, lambda x: dot(dot(dot(x)))], x), 3),
        (lambda x: lax.scan(lambda c, _: (lax.cond(c[0, 0] > 0, dot, jnp.sin, c), None), x, None, length=5)[0], 5),
        (lambda x: lax.while_loop(lambda c: dot(c)[0, 0] > 0, dot, x), 2),  # one turn, and its condition
        (jax.checkpoint(lambda x: dot(dot(x))), 2),
        (lambda x: jax.checkpoint(dot, policy=jax.checkpoint_policies.nothing_saveable)(x), 1),
        (lambda x: nm.einsum("ti,io->to", x, x, sparsity=nm.parse("s_ste(2,4); dx_g=mse(2,4)"),
                             ctx=nm.Ctx(key=0, state={"y_w": jnp.float32(1)})), 1),
        (lambda x: lax.ragged_dot(x, jnp.ones((3, 4, 4)), jnp.array([1, 0, 3])), 1),
        (jnp.sin, 0),
    ],
)  # fmt: skip
def test_how_often_a_program_runs_a_product(f, times):
    assert of(f, shape(4, 4)).get(None, 0) == times * ONE


def test_gradients_of_ragged_dots():
    """In all three products each token meets the matrix of its group only."""
    x, w, sizes = shape(12, 4), shape(3, 4, 5), jnp.array([2, 4, 6])
    forward = lambda x, w: lax.ragged_dot(x, w, sizes).sum()
    assert of(forward, x, w) == {None: 2 * 12 * 4 * 5}
    assert of(jax.grad(forward, (0, 1)), x, w) == {None: 3 * 2 * 12 * 4 * 5}


def test_shards_and_kernels():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    by_rows = jax.shard_map(lambda x, y: x @ y, mesh=mesh, in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")))
    assert of(by_rows, shape(8, 4), shape(4, 4)) == {None: 2 * 8 * 4 * 4}
    some = jax.shard_map(
        lambda x, y: x @ y, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names=frozenset({"a"})
    )
    assert of(some, shape(8, 4), shape(4, 4)) == {None: 2 * 8 * 4 * 4}

    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    tiles = [pl.BlockSpec((2, 4), lambda i, j: (i, 0)), pl.BlockSpec((4, 4), lambda i, j: (0, j))]
    tiled = pl.pallas_call(
        kernel, shape(8, 8), grid=(4, 2), in_specs=tiles, out_specs=pl.BlockSpec((2, 4), lambda i, j: (i, j))
    )
    assert of(tiled, shape(8, 4), shape(4, 8)) == {None: 2 * 8 * 4 * 8}


def test_products_have_the_name_of_the_scope_around_them():
    inner = jax.jit(dot)

    @jax.custom_vjp
    def ruled(x):
        return dot(x)

    ruled.defvjp(lambda x: (dot(x), x), lambda x, g: (g,))

    def f(x):
        x = inner(x)  # traced once, in a scope or not
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = inner(x)
        with jax.named_scope("outer"), jax.named_scope("layer_10"), jax.named_scope("layer_11"):
            x = ruled(x)
        with jax.named_scope("player"):
            x = dot(x)

        def body(x, _):
            with jax.named_scope("layer_1"):
                return jax.vmap(lambda row: row @ x)(x), None

        with jax.named_scope("layer_20"):
            x = lax.scan(lambda x, _: body(dot(x), None), x, None, length=2)[0]
        return inner(lax.scan(jax.checkpoint(body), x, None, length=5)[0])

    named = {"layer_0": 1, "layer_1": 6, "layer_2": 1, "layer_10": 1, "layer_20": 4, None: 3}
    assert of(f, shape(4, 4)) == {name: times * ONE for name, times in named.items()}


def test_a_layer_used_twice_costs_twice():
    linear = nnx.eval_shape(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    model = nm.nnx.sparsify(nnx.Sequential(linear, jnp.sign, linear), nm.Recipe(((".*", "ste(2,4)"),)))
    plan = nm.nnx.plan(model, shape(8, 16))
    assert [layer.flops for layer in plan.layers] == [2 * 2 * 8 * 16 * 16]
    assert plan.forward == (2 * 2 * 8 * 16 * 16, 2 * 8 * 16 * 16)


# ---- what is left ----


@dataclass(frozen=True, repr=False)
class above(nm.Pruner):
    """Unstructured: it has no n:m pattern."""

    def describe(self):
        return super().describe()._replace(keeps_zeros=True)

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return jnp.where(jnp.abs(x) > 1, x, 0.0)


@dataclass(frozen=True, repr=False)
class half(nm.Pruner):
    """A pruner that says nothing of itself."""

    def __call__(self, x, axis=-1, ctx=nm.Ctx()):
        return x * 0.5


@pytest.mark.parametrize(
    ("p", "share"),
    [
        (nm.identity, 1),
        (nm.chain(), 1),
        (half(), 1),
        (nm.chain(half()), 1),
        (nm.chain(half(), nm.mse(2, 4)), 1 / 2),
        (above(), 1),
        (nm.ste(above()), 1),
        (nm.chain(above(), nm.fp8("e4m3")), 1),
        (nm.chain(nm.mse(3, 4), above()), 3 / 4),  # 3:4 is a pattern that its other zeros leave
        (nm.stages(((0, nm.identity), (10, above()))), 1),
        (nm.stages(((0, above()), (10, nm.mse(2, 4)))), 1 / 2),
    ],
    ids=str,
)
def test_zeros_without_a_pattern_save_nothing(p, share):
    assert p.kept() == share
    assert nm.flops.effective(nm.Sparsity(dw_g=p) if not p.facts.gradient_rule else nm.Sparsity(y_w=p)).count(share)
    assert p.kept(step=9) in (share, 1)


LEFT = {
    "dense()": (1, 1, 1),
    "ste(1,8)": (1 / 8, 1, 1),
    "random_mask(1,4)": (1 / 4, 1, 1),
    "sr_ste(2,4)": (1 / 2, 1, 1),
    "s_ste(2,4)": (1 / 2, 1, 1 / 2),
    "s_ste(2,4,gradient='mvue_approx')": (1 / 2, 1, 1 / 2),
    "s_ste(2,4,gradient='dense')": (1 / 2, 1, 1),
    "s_ste(2,4,fp8=True)": (1 / 2, 1, 1 / 2),
    "sdgp(2,4)": (1, 1 / 2, 1),
    "sdgp(1,4,over='group')": (1, 1 / 4, 1),
    "sdgp(1,4,rescale=False)": (1, 1 / 4, 1),
    "sdgp(1,4,rescale=False,select='random')": (1, 1 / 4, 1),
    "mvue(1,2)": (1, 1, 1 / 2),
    "mdgf(1,8,exponential(1e-3,end=900))": (1 / 8, 1, 1),
    # weights that never fade to zero are not n:m at any step
    "mdgf(1,8,exponential(1e-4))": (1, 1, 1),
    "mdgf(2,4,linear(1,0.1,300))": (1, 1, 1),
    "mdgf(2,4,constant(0.5))": (1, 1, 1),
    "mdgf(2,4,optax_schedule('cosine_decay_schedule',1.0,100))": (1 / 2, 1, 1),
    "mdgf(2,4,optax_schedule('cosine_decay_schedule',1.0,100,0.1))": (1, 1, 1),
    "mdgf(1,8,linear(1,0,9),'autodiff')": (1 / 8, 1, 1),
    "sdgf(1,8)": (1 / 8, 1, 1),
    "sdgf(1,8,kind='geometric',dense=10)": (1 / 8, 1, 1),
    "fst()": (1 / 2, 1 / 2, 1 / 2),
    "fst(2,8,lam=0,dense_from=9)": (1 / 4, 1 / 4, 1 / 4),
    "bi_mask(2,4)": (1 / 2, 1 / 2, 1),
    "bdwp(1,4)": (1 / 4, 1 / 4, 1),
    "slope(1,4)": (1 / 4, 1 / 4, 1),
    "activation(2,4)": (1 / 2, 1, 1 / 2),
    "activation(2,4,'up')": (1, 1 / 2, 1 / 2),
    "vnm()": (1 / 4, 1, 1),
    "vnm(2,1,16)": (1 / 16, 1, 1),
    "vnm(dense_from=9)": (1 / 4, 1, 1),
    "top_gradient(2,4)": (1, 1, 1 / 2),
    # of two operands the sparser counts, of a chain the sparsest
    "y_x=mse(2,8); y_w=ste(mse(2,4))": (1 / 4, 1, 1),
    "dw_g=mse(2,4); dw_x=mse(1,4); dx_g=mse(3,4); dx_w=mse(2,4)": (1, 1 / 2, 1 / 4),
    "y_w=ste(chain(mse(2,4),mse(1,8),fp8('e4m3')))": (1 / 8, 1, 1),
    # dx is left with less where it has a weight that is n:m along both of its axes
    "y_w=ste(transposable(2,4)); dx_w=fp8('e5m2')": (1 / 2, 1 / 2, 1),
    "y_w=ste(chain(transposable(2,4),fp8('e4m3'))); dx_w=mse(1,4)": (1 / 2, 1 / 4, 1),
    "y_w=ste(transposable(2,4)); dx_w=raw(fp8('e5m2'))": (1 / 2, 1, 1),
    "y_w=ste(chain(transposable(2,4),mse(1,8)))": (1 / 8, 1 / 2, 1),
    "y_w=decay(hold(transposable(1,4)),linear(1,0,9)); dx_g=mse(2,4)": (1 / 4, 1 / 4, 1),
    "y_w=ste(mse(4,4)); dw_g=fp8('e5m2')": (1, 1, 1),
    "y_w=ste(stages(((0,mse(1,8)),(9,transposable(2,4)))))": (1 / 8, 1 / 2, 1),
}


@pytest.mark.parametrize("text", LEFT)
def test_what_a_method_leaves_of_its_products(text):
    assert effective(nm.parse(text)) == LEFT[text]


def test_of_every_method_it_is_known_what_it_leaves():
    assert {text.split("(")[0] for text in LEFT if "=" not in text.split("(")[0]} == set(METHODS)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("mdgf(1,8,linear(1,0,100,begin=10))", {0: (1, 1, 1), 109: (1, 1, 1), 110: (1 / 8, 1, 1), 999: (1 / 8, 1, 1)}),
        ("mdgf(1,8,exponential(1e-3,end=500))", {499: (1, 1, 1), 500: (1 / 8, 1, 1)}),
        ("sdgf(1,8,steps=400)",
         {0: (7 / 8, 1, 1), 99: (7 / 8, 1, 1), 100: (1 / 2, 1, 1), 200: (1 / 4, 1, 1), 300: (1 / 8, 1, 1)}),
        ("sdgf(2,4,steps=100,dense=20)", {19: (1, 1, 1), 20: (3 / 4, 1, 1), 60: (1 / 2, 1, 1)}),
        ("sdgf(1,4,kind='geometric',steps=100,k=4)", {0: (1 / 4, 1, 1), 50: (1 / 4, 1, 1)}),
        ("fst(dense_from=250)", {0: (1 / 2,) * 3, 249: (1 / 2,) * 3, 250: (1, 1, 1)}),
        ("y_w=ste(stages(((0,mse(2,4)),(9,transposable(2,4)))))", {8: (1 / 2, 1, 1), 9: (1 / 2, 1 / 2, 1)}),
        ("y_w=stages(((0,decay(mse(2,4),linear(1,0,4))),(9,ste(mse(1,4)))))",
         {3: (1, 1, 1), 4: (1 / 2, 1, 1), 9: (1 / 4, 1, 1)}),
        ("s_ste(2,4)", {0: (1 / 2, 1, 1 / 2)}),
    ],
)  # fmt: skip
def test_what_a_schedule_leaves_at_a_step(text, at):
    sparsity = nm.parse(text)
    assert {step: effective(sparsity, step) for step in at} == at
    assert effective(sparsity) == tuple(map(min, zip(*at.values(), strict=True)))


def test_over_a_run_what_changes_is_averaged():
    """Dense for 300 steps, half for 100, an eighth for 100. With 200 samples the mean is within 1/200."""
    sparsity = nm.parse("y_w=stages(((0,ste(mse(4,4))),(300,ste(mse(2,4))),(400,ste(mse(1,8)))))")
    left = (300 + 50 + 12.5) / 500
    assert over(sparsity, 500) == pytest.approx((left, 1, 1), abs=1 / 200)
    assert over(nm.parse("fst(dense_from=3)"), 4) == (5 / 8,) * 3
    assert over(nm.parse("s_ste(2,4)"), 1) == effective(nm.parse("s_ste(2,4)"))


def test_flops_are_whole_numbers():
    plan = planned("ste(1,8)", stacked=True, depth=2)
    assert all(type(layer.flops) is int for layer in plan.layers)
    assert type(plan.elsewhere) is int
    assert math.isclose(plan.forward[1], plan.elsewhere + sum(of.flops * of.shares[0] for of in plan.layers), rel_tol=0)


# ---- layers that read data ----


@pytest.mark.parametrize("scan", [False, True])
def test_only_the_patches_of_a_vit_read_data(scan):
    size = {"width": 8, "depth": 2, "heads": 2, "hidden": 16}
    make = lambda: nm.models.ViT(**size, image=8, channels=1, patch=4, classes=10, scan=scan, rngs=nnx.Rngs(0))
    plan = nm.nnx.plan(nnx.eval_shape(make), shape(3, 8, 8, 1))
    (reading,) = (layer for layer in plan.layers if layer.reads_data)
    assert reading.path == "patches"
    dense, effective = plan.over(10)
    assert plan.over(10, data_gradients=False) == (dense - reading.flops, effective - reading.flops)


def test_a_pruned_dx_that_is_not_computed_counts_nothing():
    """By hand: a product of 2 * 16 * 8 * 4 FLOPs. dx would be 2:4."""
    model = nm.nnx.sparsify(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "dx_g=mvue(2,4)"}))
    plan = nm.nnx.plan(model, shape(16, 8))
    assert plan.over(1) == (3 * 1024, 2.5 * 1024)
    assert plan.over(1, data_gradients=False) == (2 * 1024, 2 * 1024)


@pytest.mark.parametrize("steps", [0, -1])
def test_a_run_of_no_steps_is_refused(steps):
    plan = nm.nnx.plan(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nm.Recipe({".*": "ste(2,4)"}), shape(16, 8))
    for call in (plan.over, lambda steps: over(nm.parse("ste(2,4)"), steps)):
        with pytest.raises(ValueError, match=f"^over: steps is the number of steps of a run, at least 1, got {steps}"):
            call(steps)


def test_no_layer_of_a_gpt_reads_data():
    """Its tokens are looked up in a table, which is a parameter."""
    size = {"width": 8, "depth": 1, "heads": 2, "hidden": 16}
    make = lambda: nm.models.GPT(**size, vocabulary=16, length=8, rngs=nnx.Rngs(0))
    plan = nm.nnx.plan(nnx.eval_shape(make), shape(2, 8, dtype=jnp.int32))
    assert not any(layer.reads_data for layer in plan.layers)


def named(x, w, name):
    with jax.named_scope(name):
        return x @ w


SQUARE = shape(4, 4)


@pytest.mark.parametrize(
    ("f", "reading"),
    [
        (lambda w, x: named(named(x, w, "layer_0"), w, "layer_1"), {"layer_0"}),
        (lambda w, x: named(named(x, w, "layer_0"), w, "layer_0"), set()),  # one layer, called with both
        (lambda w, x: jax.jit(lambda y: named(y, w, "layer_0"))(2 * x), {"layer_0"}),
        (lambda w, x: jax.jit(lambda y: named(y, w, "layer_0"))(w @ x), set()),
        (lambda w, x: jax.checkpoint(lambda y: named(y, w, "layer_0"))(x), {"layer_0"}),
        (lambda w, x: lax.cond(x[0, 0] > 0, lambda y: named(y, w, "layer_0"), lambda y: y, x), {"layer_0"}),
        (lambda w, x: lax.scan(lambda y, _: (named(y, w, "layer_0"), None), x, None, length=3)[0], set()),
        (lambda w, x: lax.while_loop(lambda y: y[0, 0] > 0, lambda y: named(y, w, "layer_0"), x), set()),
        (lambda w, x: named(jnp.where(w > 0, 1.0, 0.0) + x, w, "layer_0"), set()),
        (lambda w, x: named(jnp.ones((4, 4)), w, "layer_0"), {"layer_0"}),
        (lambda w, x: named(lax.stop_gradient(w @ x), w, "layer_0"), {"layer_0"}),
        (lambda w, x: jax.vmap(lambda row: named(row[None], w, "layer_0"))(x), {"layer_0"}),
    ],
)
def test_layers_that_read_data_alone(f, reading):
    assert reading_data(jax.make_jaxpr(f)(SQUARE, SQUARE).jaxpr, [True, False], "layer_") == reading


def test_noise_and_statistics_of_data_are_no_parameters():
    """A first layer behind dropout, and behind a batch norm without parameters, reads data alone."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(8, use_bias=False, use_scale=False, rngs=rngs)
            self.dropout, self.first = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.second = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(self.dropout(self.norm(x))))

    plan = nm.nnx.plan(Net(nnx.Rngs(0)), shape(4, 8))
    assert [layer.path for layer in plan.layers if layer.reads_data] == ["first"]
