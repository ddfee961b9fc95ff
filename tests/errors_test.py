"""Bad input: each error says what was wrong, where, and what to write instead."""

import jax
import jax.numpy as jnp
import pytest

import nmjax as nm

X = jnp.arange(1.0, 33).reshape(4, 8)
TWO_D = (((1,), (0,)), ((), ()))


def dot(sparsity, x=X, w=None, **ctx):
    w = jnp.ones((x.shape[-1], 8)) if w is None else w
    return nm.dot_general(x, w, TWO_D, sparsity=sparsity, ctx=nm.Ctx(**ctx))


def gradient(sparsity, x=X, w=None, **ctx):
    return jax.grad(lambda x: dot(sparsity, x, w, **ctx).sum())(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nm.mse(3, 2), r"mse\(3,2\): n must lie between 1 and m.*Did you mean 2 of 3, as in \(2,3\)\?"),
        (lambda: nm.mse(0, 4), r"mse\(0,4\): n must lie between 1 and m"),
        (lambda: nm.mse(-1, 4), "n must lie between"),
        (lambda: nm.mse(2, 4.5), "mse: m must be a whole number, got 4.5"),
        (lambda: nm.mse("2", 4), "mse: n must be a whole number, got '2'"),
        (lambda: nm.mse(True, 4), "mse: n must be a whole number, got True"),
        (lambda: nm.mse(jnp.int32(2), 4), r"mse: n must be a plain Python value, got an array of shape \(\).*Ctx\(key, step, state\)"),
        (lambda: nm.mvue_approx(3, 4), r"would need 3 draws.*Write mvue\(3,4\)"),
        (lambda: nm.sr_ste(nm.soft(2, 4)), "does not only keep or drop"),
        (lambda: nm.sr_ste(nm.mse(2, 4), lam=jnp.float32(1)), "sr_ste: lam must be a plain Python value"),
        (lambda: nm.hold(nm.mvue(2, 4)), r"mvue\(2,4\) does not only keep or drop"),
        (lambda: nm.hold(nm.mse(2, 4), every=0), "every must be a number of steps, at least 1, or None"),
        (lambda: nm.decay(nm.mse(2, 4), 0.5), r"schedule must be a function of the step, such as linear\(1,0,1000\) or constant\(0.5\)"),
        (lambda: nm.decay(nm.mse(2, 4), nm.constant(1), gradient="st"), "gradient must be 'ste' or 'autodiff'"),
        (lambda: nm.rescale(nm.mse(2, 4), over="row"), "over must be 'auto', 'spatial' or 'group'"),
        (lambda: nm.fp8("e3m4"), "format must be 'e4m3' or 'e5m2'"),
        (lambda: nm.fp4("even"), "rounding must be 'nearest' or 'random'"),
        (lambda: nm.fp4(block=8), "block must be 16 or 32"),
        (lambda: nm.pairs(nm.transposable(2, 4)), r"prunes along two axes"),
        (lambda: nm.chain(nm.ste(nm.mse(2, 4))), r"must be the outermost pruner of its slot: write ste\(chain\(...\)\)"),
        (lambda: nm.ste(nm.ste(nm.mse(2, 4))), "must be the outermost"),
        (lambda: nm.ste(nm.stages(((0, nm.ste(nm.mse(2, 4))),))), "must be the outermost"),
        (lambda: nm.hold(nm.raw(nm.mse(2, 4))), "must be the outermost"),
        (lambda: nm.stages(((0, nm.raw(nm.mse(2, 4))),)), "must be the outermost"),
        (lambda: nm.stages(((5, nm.mse(2, 4)),)), "must start at step 0"),
        (lambda: nm.stages(nm.mse(2, 4)), r"takes rows \(\(0, first\)"),
        (lambda: nm.ste("mse(2,4)"), r"ste takes pruners, got str: pass nm.parse_pruner\('mse\(2,4\)'\)"),
        (lambda: nm.chain(0.5), "chain takes pruners, got float: pass a pruner, such as mse"),
        (lambda: nm.permute(nm.mvue(2, 4)), "takes a pruner without noise or state"),
        (lambda: nm.permute(nm.soft(2, 4)), "takes a pruner without noise or state"),
        (lambda: nm.methods.sdgf(1, 8, steps=3), "3 steps are too few .*, 4 stages and .* Give at least 4 steps"),
        (lambda: nm.methods.sdgf(1, 8, steps=9, dense=4, finetune=2), "Give at least 10 steps"),
        (lambda: nm.methods.sdgf(1, 8, dense=-1), "dense and finetune are at least 0, got dense=-1 and finetune=0"),
        (lambda: nm.methods.sdgf(1, 8, kind="geometrical"), "kind is 'stepwise' or 'geometric'"),
        (lambda: nm.methods.sdgf(1, 8, kind="geometric", k=6), "k is a power of two"),
        (lambda: nm.methods.sdgp(select="largest"), "select is 'top' or 'random'"),
        (lambda: nm.methods.activation(layer="middle"), "layer is 'down' or 'up'"),
        (lambda: nm.methods.s_ste(3, 2), r"n must lie between 1 and m.*Did you mean 2 of 3, as in \(2,3\)\?"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"dx_g": nm.ste(nm.mse(2, 4))}, r"dx_g=ste\(mse\(2,4\)\): a gradient rule has no meaning in a backward slot.*Write dx_g=mse\(2,4\)"),
        ({"dw_x": nm.sr_ste(nm.mse(2, 4))}, "no meaning in a backward slot"),
        ({"dx_w": nm.stages(((0, nm.ste(nm.mse(2, 4))),))}, "no meaning in a backward slot"),
        ({"y_w": nm.raw(nm.mse(2, 4))}, r"raw is only for dx_w and dw_x. Here write y_w=mse\(2,4\)"),
        ({"dw_g": nm.raw(nm.mse(2, 4))}, "raw is only for dx_w and dw_x"),
        ({"y_w": nm.mvue(2, 4)}, r"random choice no useful gradient. Write y_w=ste\(mvue\(2,4\)\)"),
        ({"y_x": nm.stages(((0, nm.identity), (5, nm.mvue(2, 4))))}, "random choice"),
        ({"y_x": nm.ste(nm.hold(nm.mse(2, 4)))}, "only the slots of the weight can"),
        ({"dw_g": nm.hold(nm.mse(2, 4))}, "only the slots of the weight can"),
        ({"dw_g": "mvue(2,4)"}, r"dw_g takes a pruner, such as mse\(2,4\), got str: parse it first, .*nm.parse_pruner"),
        ({"y_w": nm.mse}, r"got mse itself: call it first, as in mse\(2,4\)"),
        ({"y_w": nm.methods.ste}, r"got ste itself: call it first, as in ste\(2,4\)"),
        ({"y_w": nm.methods.ste(2, 4)}, r"got y_w=ste\(mse\(2,4\)\): pass the pruner of one of its slots, such as sparsity.y_w"),
        ({"y_w": None}, r"y_w takes a pruner, such as mse\(2,4\), got None"),
    ],
)  # fmt: skip
def test_slots_where_a_pruner_has_no_meaning(slots, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nm.Sparsity(**slots)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nm.prune(nm.mse(2, 4), jnp.ones((3, 6))), r"mse\(2,4\) prunes an array of shape \(3, 6\) along its contraction axis 1, whose 6 values do not divide into groups of 4\. .*, or leave it dense\.$"),
        (lambda: nm.prune(nm.mse(2, 4), jnp.ones((8, 6))), "do not divide"),  # 48 values would divide, across rows
        (lambda: nm.mse(2, 4)(jnp.ones((8, 6))), "axis 1 of an array of shape .* 6 values"),
        (lambda: nm.prune(nm.mse(2, 4), jnp.ones((3, 8)), axis=2), "axis 2 does not exist in an array of 2 dimensions"),
        (lambda: nm.prune(nm.mse(2, 4), jnp.ones(8, jnp.int32)), "dtype int32: only floating-point values are pruned. Cast it"),
        (lambda: nm.prune(nm.mse(2, 4), jnp.ones(8, bool)), "only floating-point"),
        (lambda: nm.prune(nm.mse(2, 4), jnp.float32(1)), "a 0-d array has none"),
        (lambda: nm.prune(nm.mse(2, 4), jnp.ones((0, 8))), "an empty array has no groups"),
        (lambda: nm.prune(nm.mse(2, 4), jnp.ones((8, 0))), "an empty array has no groups"),
        (lambda: nm.prune(nm.mvue(2, 4), X), r"draws random numbers: pass a key, as Ctx\(key=jax.random.key\(0\), step=step\) or prune\(..., key=...\)"),
        (lambda: nm.prune(nm.mvue(2, 4), X, key=0.5), "key must be a jax.random.key, an int seed or two uint32 words, got 0.5"),
        (lambda: jax.jit(lambda s: nm.prune(nm.mvue(2, 4), X, key=s))(1), r"got int32\[\]. If the seed is .* traced, pass jax.random.key\(seed\)"),
        (lambda: nm.prune(nm.mvue(2, 4), X, key=jax.random.split(jax.random.key(0), 3)), r"must be one key, got an array of keys of shape \(3,\)"),
        (lambda: nm.prune(nm.methods.ste(2, 4), X), r"prune takes a pruner .* got y_w=ste\(mse\(2,4\)\): pass the pruner of one of its slots"),
        (lambda: nm.prune(nm.mse, X), "prune takes a pruner .* got mse itself: call it first"),
        (lambda: nm.prune("mse(2,4)", X), r"prune takes a pruner such as mse\(2,4\), got str: parse it first"),
        (lambda: nm.prune(nm.hold(nm.mse(2, 4)), X), "keeps state between steps and was given none"),
        (lambda: nm.prune(nm.hold(nm.mse(2, 4)), X, state=jnp.ones((4, 4), bool)), r"holds a mask of shape \(4, 4\).* \(4, 8\)"),
        (lambda: nm.prune(nm.permute(nm.mse(2, 4)), X, state=jnp.arange(16)), r"holds an order of shape \(16,\)"),
        (lambda: nm.prune(nm.wanda(2, 4), X, state=jnp.ones(4)), r"holds norms of shape \(4,\), but axis 1 of"),
        (lambda: nm.prune(nm.soft(2, 4), X, state=jnp.ones((3, 4, 8))), "has one scale for a whole tensor"),
        (lambda: nm.mse(2, 4)(jnp.array([1, -2, 3, -4])), "dtype int32, but only floating-point values can be pruned"),
        (lambda: nm.mvue(2, 4)(jnp.array([1, -2, 3, -4]), ctx=nm.Ctx(key=0)), "dtype int32, but only floating-point values can be pruned"),
        (lambda: nm.prune(nm.rescale(nm.mse(2, 4), "spatial"), X), "needs spatial axes, but the array has none .* Write over='group', or leave over out"),
        (lambda: nm.prune(nm.transposable(2, 4), jnp.ones((6, 8))), "the 6 values of the other axis do not divide by 4"),
        (lambda: nm.prune(nm.transposable(2, 4), jnp.ones(8)), r"has no other axis. Write mse\(2,4\)"),
        (lambda: nm.prune(nm.chain(nm.hold(nm.mse(2, 4)), nm.hold(nm.mse(2, 4))), X, state=jnp.ones((4, 8), bool)), "its state is a tuple of their states"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_pruned(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def slot(**slots):
    return nm.Sparsity(**slots)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dot(nm.methods.ste(), jnp.ones((4, 6))), r"y_w=ste\(mse\(2,4\)\) prunes an array of shape \(6, 8\) along its contraction axis 0, whose 6 values"),
        (lambda: gradient(nm.methods.mvue(), jnp.ones((6, 8)), key=0), r"dw_g=mvue\(2,4\) prunes an array of shape \(6, 8\) along its contraction axis 0"),
        (lambda: gradient(nm.methods.mvue()), r"dw_g=mvue\(2,4\) .* draws random numbers"),
        (lambda: gradient(nm.methods.sdgp(over="spatial")), "dx_g=rescale.* Write over='group'"),
        (lambda: dot(nm.methods.fst()), r"y_w=sr_ste\(hold.*keeps state between steps and was given none"),
        (lambda: dot(nm.methods.fst(), state=jnp.ones(3)), "ctx.state of a product is a dict from slot to state"),
        (lambda: dot(nm.methods.s_ste(), state={"rhs": 1.5}), "ctx.state has rhs: only y_w and dx_w keep state"),
        (lambda: dot("s_ste()"), r"a product takes sparsity=nm.parse\('s_ste\(2,4\)'\)"),
        (lambda: nm.methods.s_ste().refresh(X, contract=1, out=0), "keeps its scale between steps and was given none"),
        (lambda: dot(slot(y_x=nm.fp8("e4m3")), jnp.ones((4, 8), jnp.int32), jnp.ones((8, 8), jnp.int32)), "only floating-point"),
        (
            lambda: jax.grad(
                lambda x: nm.conv_general_dilated(
                    x, jnp.ones((3, 3, 4, 8)), (1, 1), "SAME", feature_group_count=2, sparsity=slot(dx_w=nm.permute(nm.mse(2, 4))),
                    dimension_numbers=("NHWC", "HWIO", "NHWC"), ctx=nm.Ctx(state={"dx_w": jnp.arange(8)}),
                ).sum()
            )(jnp.ones((1, 4, 4, 8))),
            "its order would mix the 2 feature groups",
        ),
        (lambda: nm.einsum("b,o->bo", jnp.ones(4), jnp.ones(8), sparsity=nm.methods.ste()), "contracts no axis"),
        (lambda: nm.einsum("ii,io->io", X, X, sparsity=nm.Sparsity()), "does not fit|repeats"),
        (lambda: nm.einsum("ij,ko->jo", X, X, sparsity=nm.Sparsity()), "sums 'i' over one operand alone"),
        (lambda: nm.einsum("ij,jk,kl->il", X, X, sparsity=nm.Sparsity()), "has 3 operands"),
        (lambda: nm.einsum("ij,jk->iz", X, X.T, sparsity=nm.Sparsity()), "is in neither operand"),
        (lambda: nm.einsum("ijk,jk->i", X, X, sparsity=nm.Sparsity()), "'ijk' does not fit an operand of 2 dimensions"),
        (
            lambda: nm.conv_general_dilated(
                jnp.ones((1, 8, 4, 4)), jnp.ones((8, 1, 3, 3)), (1, 1), "SAME", feature_group_count=8, sparsity=nm.methods.ste()
            ),
            r"y_w=ste\(mse\(2,4\)\) prunes an array of shape \(8, 1, 3, 3\) along its contraction axis 1, where it has one value, and a group has 4",
        ),
        (
            lambda: nm.conv_general_dilated(
                jnp.ones((1, 8, 4, 4)), jnp.ones((8, 2, 3, 3)), (1, 1), "SAME", feature_group_count=4, sparsity=slot(y_x=nm.mse(2, 4))
            ),
            "in each of 4 feature groups",
        ),
    ],
)  # fmt: skip
def test_products_that_cannot_be_pruned(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_product_that_nobody_differentiates_needs_no_key_and_any_number_of_tokens():
    assert dot(nm.methods.mvue(), jnp.ones((3, 8))).shape == (3, 8)


def test_integer_products_are_refused_where_pruned_and_pass_where_dense():
    ints = jnp.ones((4, 8), jnp.int32)
    assert dot(nm.methods.dense(), ints, jnp.ones((8, 8), jnp.int32)).dtype == jnp.int32
    with pytest.raises(TypeError, match="only floating-point values"):
        dot(nm.methods.ste(), ints, jnp.ones((8, 8), jnp.int32))


@pytest.mark.parametrize("p", [nm.mvue(2, 4), nm.ste(nm.mvue(2, 4)), nm.uniform(1, 4)], ids=str)
def test_noise_has_no_final_form(p):
    with pytest.raises(ValueError, match="draws new values at every step"):
        p.final  # noqa: B018


@pytest.mark.parametrize("p", [nm.mvue(2, 4), nm.mvue_approx(2, 4)], ids=str)
def test_what_does_not_select_has_no_mask(p):
    with pytest.raises(TypeError, match="has no mask"):
        p.mask(X)
