"""Laws of every delivery: layers of nnx and linen, declared layers, and functions of a tree of parameters.

A `Way` puts one product, by one method, into a model and gives it the verbs that all deliveries share. The weight has
the same path in all of them, so it has the same noise. A test compares what the model does with the product by hand.
"""

import functools
import warnings
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import nmjax as nm
from nmjax import linen

pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:harden at step")]  # in the midst of schedules

EVERY = "y_x=ste(mse(2,4)); y_w=ste(mse(2,4)); dx_g=mvue(2,4); dx_w=raw(mse(2,4)); dw_g=mvue(2,4); dw_x=mse(2,4)"
HELD = "y_w=ste(hold(transposable(2,4),every=3)); dw_g=mvue(2,4)"
DRAWN = "y_w=ste(hold(uniform(2,4,rescale=False)))"
METHODS = (
    "ste(2,4)", "sr_ste(2,4)", "s_ste(2,4)", "s_ste(2,4,fp8=True)", "sdgp(2,4,over='group')", "mvue(2,4)",
    "fst(every=3)", "bi_mask(every=2,draws=4)", "bdwp()", "mdgf(2,4,linear(1,0,9))", "sdgf(1,4,steps=8)",
    "top_gradient(2,4)", "y_x=ste(mse(2,4))", "dw_x=mvue(2,4)", "vnm(2)", "slope()", DRAWN, EVERY,
)  # fmt: skip
STEP, MICRO, SEED = 3, 1, 5


def whole(seed, *shape):
    """Return whole numbers. Their sums are exact in any order, so results can be compared for equality."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def recipe(text):
    return nm.Recipe({".*": text})


# ---- layers ----


class NnxEinsum(nnx.Module):
    """A layer of a class that Flax does not have."""

    def __init__(self, spec, shape, *, rngs):
        self.spec, self.kernel = spec, nnx.Param(jnp.ones(shape))

    def __call__(self, x):
        return jnp.einsum(self.spec, x.astype(self.kernel.dtype), self.kernel[...])


class LinenEinsum(nn.Module):
    spec: str
    shape: tuple

    @nn.compact
    def __call__(self, x):
        return jnp.einsum(self.spec, x, self.param("kernel", nn.initializers.lecun_normal(), self.shape))


nm.nnx.register_layer(NnxEinsum, weight="kernel")
linen.register_layer(LinenEinsum, weight="kernel")


@dataclass(frozen=True)
class Layer:
    """A product, and the layers of Flax that compute it."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    contract: tuple[int, ...]
    out: tuple[int, ...]
    spec: str | None  # of an einsum; None for a convolution
    nnx: functools.partial
    linen: functools.partial | None = None

    def product(self, x, w, **pruned):
        """Return the product of two arrays, pruned if told how."""
        if pruned and self.spec == IN_FRONT:
            return jnp.moveaxis(nm.einsum("bi,nio->bno", x, w, **pruned), 1, 0)
        if self.spec is not None:
            return (nm.einsum if pruned else jnp.einsum)(self.spec, x, w, **pruned)
        return (nm.conv_general_dilated if pruned else lax.conv_general_dilated)(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2, **pruned
        )


IN_FRONT = "bi,nio->nbo"  # an axis of the weight comes before those of x, which no product of two arrays gives
part, CONV = functools.partial, {"kernel_size": (3, 3), "strides": 2, "feature_group_count": 2, "padding": "SAME"}
LAYERS = {
    "dense": Layer((8, 16), (16, 8), (0,), (1,), "ti,io->to", part(nnx.Linear, 16, 8), part(nn.Dense, 8)),
    "two axes": Layer(
        (8, 4, 8), (4, 8, 2, 12), (0, 1), (2, 3), "tab,abcd->tcd",
        part(nnx.LinearGeneral, (4, 8), (2, 12), axis=(-2, -1)), part(nn.DenseGeneral, (2, 12), (-2, -1)),
    ),
    "batched": Layer(
        (3, 8, 16), (3, 16, 8), (1,), (2,), "eti,eio->eto",
        part(nnx.LinearGeneral, 16, 8, axis=-1, batch_axis={0: 3}), part(nn.DenseGeneral, 8, batch_dims=0),
    ),
    "heads": Layer(
        (2, 4, 16), (2, 16, 8), (1,), (0, 2), "bti,hio->btho", part(nnx.Einsum, "...i,hio->...ho", (2, 16, 8), (2, 8)),
    ),
    "experts": Layer((3, 8, 16), (3, 16, 8), (1,), (2,), "eti,eio->eto", part(nnx.Einsum, "eti,eio->eto", (3, 16, 8))),
    "turned": Layer((8, 16), (8, 16), (1,), (0,), "bi,oi->bo", part(nnx.Einsum, "bi,oi->bo", (8, 16))),
    "in front": Layer((8, 16), (2, 16, 4), (1,), (0, 2), IN_FRONT, part(nnx.Einsum, IN_FRONT, (2, 16, 4))),
    "conv": Layer(
        (4, 8, 8, 16), (3, 3, 8, 8), (2,), (3,), None, part(nnx.Conv, 16, 8, **CONV), part(nn.Conv, 8, **CONV)
    ),
}  # fmt: skip


# ---- ways of delivery ----


class Way:
    """A model with one product. ``state`` is all that it keeps beside its weight."""

    def __init__(self, layer: Layer, text: str, seed=SEED, dtype=None):
        self.layer, self.recipe, self.seed, self.dtype = layer, recipe(text), seed, dtype

    def plain(self, x, w):
        return self.layer.product(*(v if self.dtype is None else v.astype(self.dtype) for v in (x, w)))


class Nnx(Way):
    declared = False

    def dense(self):
        """Return a model, and its layer."""
        if self.declared:
            layer = NnxEinsum(self.layer.spec, self.layer.w, rngs=nnx.Rngs(0))
        else:
            layer = self.layer.nnx(rngs=nnx.Rngs(0), **({} if self.dtype is None else {"dtype": self.dtype}))
        return Holder(layer)

    def of(self, model):
        """Return the layer of a model."""
        return model.layer

    def init(self, w, x):
        model = self.dense()
        self.of(model).kernel.set_value(w)
        nm.nnx.sparsify(model, self.recipe, x, seed=self.seed)
        self.graph, self.params, state = nnx.split(model, nnx.Param, ...)
        return state

    def model(self, w, state):
        model = nnx.merge(self.graph, self.params, state, copy=True)
        self.of(model).kernel.set_value(w)
        return model

    def changed(self, verb, w, state, *args):
        model = self.model(w, state)
        verb(model, *args)
        return nnx.split(model, nnx.Param, ...)[2]

    set_step = functools.partialmethod(changed, nm.nnx.set_step)
    reset_state = functools.partialmethod(changed, nm.nnx.reset_state)

    def call(self, w, state, x):
        return self.model(w, state)(x)

    def words_and_state(self, state):
        held = self.model(jnp.ones(self.layer.w), state).layer.nm_state
        return held.words, {name: v[...] for name, v in held.state.items()} if held.state else None

    def harden(self, w, state):
        hard = nm.nnx.harden(self.model(w, state))
        again = nm.nnx.harden(hard).layer.kernel[...]
        return hard.layer.kernel[...], again, hard, nm.nnx.violations(hard)["layer/kernel"]

    def measures(self, w, state):
        model = self.model(w, state)
        mask = nnx.to_pure_dict(nm.nnx.masks(model))["layer"]["kernel"]
        return mask, nm.nnx.scales(model), nm.nnx.weights(model)

    def pattern(self, w, state):
        return nm.nnx.patterns(self.model(w, state))["layer/kernel"]


class NnxDeclared(Nnx):
    declared = True


class Holder(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class Named(nn.Module):
    make: functools.partial

    @nn.compact
    def __call__(self, x):
        return self.make(name="layer")(x)


class Linen(Way):
    declared = False

    def dense(self):
        if self.declared:
            return Named(part(LinenEinsum, self.layer.spec, self.layer.w))
        return Named(part(self.layer.linen, **({} if self.dtype is None else {"dtype": self.dtype})))

    def init(self, w, x):
        self.net = self.dense()
        with linen.sparsify(self.recipe, seed=self.seed, strict=True):
            variables = self.net.init(jax.random.key(2), x)
        self.params = variables["params"]
        return linen.reset_state(self.variables(w, variables["nm"]))["nm"]

    def variables(self, w, state):
        return {"params": {"layer": {**self.params["layer"], "kernel": w}}, "nm": state}

    def set_step(self, w, state, *time):
        return linen.set_step(self.variables(w, state), *time)["nm"]

    def reset_state(self, w, state):
        return linen.reset_state(self.variables(w, state))["nm"]

    def apply(self, variables, x):
        with linen.sparsify(self.recipe, seed=self.seed, strict=True):
            return self.net.apply(variables, x)

    def call(self, w, state, x):
        return self.apply(self.variables(w, state), x)

    def words_and_state(self, state):
        variable = nn.unbox(state)["layer"]["kernel"]
        return variable.words, variable.state

    def harden(self, w, state):
        hard = linen.harden(self.variables(w, state))
        again = linen.harden(hard)["params"]["layer"]["kernel"]
        return hard["params"]["layer"]["kernel"], again, part(self.apply, hard), linen.violations(hard)["layer/kernel"]

    def measures(self, w, state):
        variables = self.variables(w, state)
        return linen.masks(variables)["layer"]["kernel"], linen.scales(variables), linen.weights(variables)

    def pattern(self, w, state):
        return linen.patterns(self.variables(w, state))["layer/kernel"]


class LinenDeclared(Linen):
    declared = True


class Tree(Way):
    """A function of a tree of parameters."""

    def init(self, w, x):
        self.sparse = nm.transform(lambda p, x: self.plain(x, p["layer"]), self.recipe, self.seed)
        return self.sparse.init({"layer": w}, x)

    def set_step(self, w, state, *time):
        return self.sparse.set_step({"layer": w}, state, *time)

    def call(self, w, state, x):
        return self.sparse({"layer": w}, x, state=state)

    def words_and_state(self, state):
        return state["layer"].words, state["layer"].state

    def harden(self, w, state):
        hard, left = self.sparse.harden({"layer": w}, state)
        again = self.sparse.harden(hard, left)[0]["layer"]
        call = lambda x: self.sparse(hard, x, state=left)
        return hard["layer"], again, call, self.sparse.violations(hard, state)["layer"]


WAYS = {"nnx": Nnx, "linen": Linen, "tree": Tree, "registered nnx": NnxDeclared, "registered linen": LinenDeclared}
REGISTERED = ("tree", "registered nnx", "registered linen")
MODELS = ("nnx", "linen", "registered nnx", "registered linen")
WORDS = (634120496, 2065500201)
"""The noise words of the path "layer" and the seed 5, in all ways and versions."""


# ---- the laws of one product ----


SOME = ("s_ste(2,4)", "fst(every=3)", EVERY)
CASES = [(way, "dense", m) for way in ("nnx", "linen", "tree") for m in METHODS]
CASES += [("registered nnx", "dense", m) for m in SOME] + [("registered linen", "dense", m) for m in SOME]
CASES += [(way, layer, m) for way in ("nnx", "linen", "tree") for layer in ("two axes", "batched") for m in SOME]
CASES += [(way, "conv", m) for way in ("nnx", "linen", "tree") for m in METHODS[::3] + SOME if "bi_mask" not in m]
CASES += [("nnx", layer, m) for layer in ("heads", "experts", "turned") for m in SOME]
CASES += [(way, layer, m) for way in REGISTERED for layer in ("heads", "turned") for m in SOME]
CASES += [(way, "in front", m) for way in ("tree", "registered linen", "nnx") for m in SOME]
CASES = list(dict.fromkeys(CASES))  # "conv" refuses bi_mask, for its feature groups


@functools.cache
def by_hand(name, text):
    """Return y, dx and dw of the bare product at the step, and the hardened weight if there is one."""
    layer, sparsity = LAYERS[name], nm.parse(text)
    x, w, g = operands(layer)

    @jax.jit
    def found(x, w, g):
        words, axes = jnp.array(WORDS, jnp.uint32), {"contract": layer.contract, "out": layer.out}
        state = sparsity.init(w, **axes, ctx=nm.Ctx(words))
        state = sparsity.refresh(w, **axes, ctx=nm.Ctx(words, STEP, state, since=0))
        ctx = nm.Ctx(nm.random.fold(words, MICRO), STEP, jax.lax.stop_gradient(state))
        y, back = jax.vjp(lambda x, w: layer.product(x, w, sparsity=sparsity, ctx=ctx), x, w)
        return y, *back(g)

    return found(x, w, g)


def operands(layer):
    x, w = whole(5, *layer.x), whole(6, *layer.w)
    return x, w, whole(9, *jax.eval_shape(layer.product, x, w).shape)


@pytest.mark.parametrize(("way", "name", "text"), CASES)
def test_a_layer_is_its_product(way, name, text):
    """Value, dx and dw are those of the bare product with the same words, time and state."""
    layer = LAYERS[name]
    x, w, g = operands(layer)
    made = WAYS[way](layer, text)
    state = made.init(w, x)

    @jax.jit
    def delivered(state, x, w, g):
        state = made.set_step(w, state, STEP, MICRO)
        y, back = jax.vjp(lambda x, w: made.call(w, state, x), x, w)
        return y, *back(g)

    for what, found, wanted in zip(("y", "dx", "dw"), delivered(state, x, w, g), by_hand(name, text), strict=True):
        np.testing.assert_array_equal(found, wanted, err_msg=what)


# ---- noise, time and state ----


@pytest.mark.parametrize("way", WAYS)
def test_the_noise_words_are_of_seed_and_path(way):
    """They do not change between versions: a checkpoint's noise goes on after an upgrade."""
    layer = LAYERS["dense"]
    x, w, _ = operands(layer)
    words = []
    for seed in (SEED, SEED + 1):
        made = WAYS[way](layer, "mvue(2,4)", seed)
        words.append(tuple(np.ravel(made.words_and_state(made.init(w, x))[0][...]).tolist()))
    assert words[0] == WORDS != words[1]


@pytest.mark.parametrize("way", ["nnx", "linen", "tree"])
def test_noise_and_schedules_are_functions_of_seed_step_and_micro_step(way):
    """Whatever came before. One program serves all steps."""
    layer, traces = LAYERS["dense"], []
    x, w, g = operands(layer)

    def at(seed, *times):
        made = WAYS[way](layer, "mdgf(2,4,linear(1,0,10)); dw_g=mvue(2,4)", seed)
        state, found = made.init(w, x), []

        @jax.jit
        def step(state, *time):
            traces.append(time)
            state = made.set_step(w, state, *time)
            y, back = jax.vjp(lambda w: made.call(w, state, x), w)
            return state, (y, *back(g))

        for time in times:
            state, results = step(state, *time)
            found.append([np.asarray(v) for v in results])
        return found

    times = [(0, 0), (1, 0), (0, 1), (1, 1), (9, 3)]
    found = at(SEED, *times, *times[1:3])
    assert len({dw.tobytes() for _, dw in found[:5]} | {dw.tobytes() for _, dw in at(SEED + 1, (0, 0))}) == 6
    assert len({y.tobytes() for y, _ in found}) == 3  # the schedule counts steps alone
    chex.assert_trees_all_equal(found[5:], found[1:3])
    assert len(traces) == 2  # one for each seed


@pytest.mark.parametrize("text", ["fst(every=3)", HELD, DRAWN.replace("False)", "False),every=3")])
@pytest.mark.parametrize("way", ["nnx", "linen", "tree"])
def test_held_masks_change_at_their_steps_and_not_by_accumulation(way, text):
    layer, changes, masks = LAYERS["dense"], [], []
    made = WAYS[way](layer, text)
    state, set_step = made.init(normal(0, *layer.w), normal(1, *layer.x)), jax.jit(made.set_step)
    for step in range(8):
        w = normal(100 + step, *layer.w)
        for micro in range(2):
            state = set_step(w, state, step, micro)
            masks.append(np.asarray(made.words_and_state(state)[1]["y_w"]))
        assert np.array_equal(masks[-1], masks[-2])
        if step and not np.array_equal(masks[-1], masks[-3]):
            changes.append(step)
        if text == HELD and step % 3 == 0:
            np.testing.assert_array_equal(masks[-1], nm.transposable(2, 4).mask(w, 0))
    assert changes == [3, 6]


@pytest.mark.parametrize("way", MODELS)
def test_state_is_made_anew_of_loaded_weights(way):
    layer = LAYERS["dense"]
    made, w = WAYS[way](layer, "s_ste(2,4)"), normal(0, *layer.w)
    state, loaded = made.init(w, normal(1, *layer.x)), w**3
    scale = lambda state: made.measures(loaded, state)[1]["layer"]
    np.testing.assert_allclose(scale(state), nm.soft(2, 4).init(w, 0), rtol=1e-6)
    np.testing.assert_allclose(scale(made.reset_state(loaded, state)), nm.soft(2, 4).init(loaded, 0), rtol=1e-6)


# ---- stacks ----


class Cell(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


class Cells(nnx.Module):
    def __init__(self, axis, remat):
        self.axis, self.remat = axis, remat
        self.blocks = nnx.vmap(Cell, in_axes=0, out_axes=axis)(nnx.Rngs(0).split(3))

    def __call__(self, x):
        body = nnx.remat(Cell.__call__) if self.remat else Cell.__call__
        return nnx.scan(body, in_axes=(self.axis, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


class LinenCell(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x, _=None):
        kind = nn.jit(nn.remat(nn.Dense)) if self.remat else nn.Dense
        return kind(16, use_bias=False, name="up")(x), None


class LinenCells(nn.Module):
    axis: int
    remat: bool

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis, "nm": self.axis}
        block = nn.remat(LinenCell) if self.remat else LinenCell
        return nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)(self.remat, name="blocks")(x)[
            0
        ]


class Stack(Way):
    """Three layers that a scan calls one after another. Their weights are stacked along an axis."""

    def __init__(self, axis, text, remat):
        super().__init__(LAYERS["dense"], text)
        self.axis, self.remat = axis, remat


class NnxStack(Stack, Nnx):
    def dense(self):
        return Cells(self.axis, self.remat)

    def of(self, model):
        return model.blocks.up


class LinenStack(Stack, Linen):
    def dense(self):
        return LinenCells(self.axis, self.remat)

    def variables(self, w, state):
        return {"params": {"blocks": {"up": {"kernel": w}}}, "nm": state}


class TreeStack(Stack):
    def init(self, w, x):
        body = lambda h, w: (h @ w, None)
        body = jax.checkpoint(body) if self.remat else body
        self.sparse = nm.transform(lambda p, x: lax.scan(body, x, p["blocks"]["up"])[0], self.recipe, self.seed)
        return self.sparse.init(self.tree(w), x)

    def tree(self, w):
        return {"blocks": {"up": w}}

    def set_step(self, w, state, *time):
        return self.sparse.set_step(self.tree(w), state, *time)

    def call(self, w, state, x):
        return self.sparse(self.tree(w), x, state=state)


UP = (3386242053, 4096807448)
"""The noise words of the path "blocks/up" and the seed 5. A layer's place in the stack is folded in."""
STACKS = [
    (NnxStack, 0, "s_ste(2,4)", True), (LinenStack, 1, "bi_mask(every=3,draws=4,lam=0)", True),
    (TreeStack, 0, "s_ste(2,4)", False), (NnxStack, 1, "s_ste(2,4)", False), (LinenStack, 0, HELD, False),
    (TreeStack, 0, HELD, True), (NnxStack, 2, EVERY, False), (NnxStack, -1, "fst(every=2)", True),
    (LinenStack, -1, "s_ste(2,4)", False), (LinenStack, 0, "sdgf(1,4,steps=8)", True), (LinenStack, 1, EVERY, True),
    (TreeStack, 0, EVERY, False), (NnxStack, 0, "fst(every=2)", False), (LinenStack, 2, EVERY, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "axis", "text", "remat"), STACKS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_stack_is_its_layers_one_after_another(kind, axis, text, remat):
    """Each with noise and state of its own, whatever axis stacks them."""
    made, sparsity = kind(axis, text, remat), nm.parse(text)
    small = lambda seed, *shape: jnp.sign(whole(seed, *shape))
    weights, x, g = small(0, 3, 16, 16), small(1, 8, 16), small(2, 8, 16)
    state = made.init(jnp.moveaxis(weights, 0, axis), x)

    @jax.jit
    def delivered(state, weights, x, g):
        now = made.set_step(jnp.moveaxis(weights, 0, axis), state, STEP, MICRO)
        y, back = jax.vjp(lambda weights, x: made.call(jnp.moveaxis(weights, 0, axis), now, x), weights, x)
        return y, *back(g)

    @jax.jit
    def one(w, words, x):
        axes, plain = {"contract": 0, "out": 1}, lax.stop_gradient(w)
        state = sparsity.init(plain, **axes, ctx=nm.Ctx(words))
        state = sparsity.refresh(plain, **axes, ctx=nm.Ctx(words, STEP, state, since=0))
        return nm.einsum("ti,io->to", x, w, sparsity=sparsity, ctx=nm.Ctx(nm.random.fold(words, MICRO), STEP, state))

    def by_hand(weights, x):
        for i, w in enumerate(weights):
            x = one(w, nm.random.fold(jnp.array(UP, jnp.uint32), i), x)
        return x

    y, back = jax.vjp(by_hand, weights, x)
    for found, wanted in zip(delivered(state, weights, x, g), (y, *back(g)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5 * ("fst" in text))  # fst computes one scale by a sum


# ---- final forms and measures ----

FINAL = (
    "ste(2,4)", "sr_ste(2,4)", "s_ste(2,4)", "s_ste(2,4,fp8=True)", "fst(2,4,every=5)", "mdgf(1,4,linear(1,0,4))",
    "sdgf(1,4,steps=8)", "bdwp()", "y_x=mse(2,4); y_w=ste(mse(2,4))", "activation(2,4)", "bi_mask(draws=4)",
)  # fmt: skip
HARDENED = [(w, "two axes", t, d) for t in FINAL for w in ("nnx", "linen", "tree") for d in (None, jnp.bfloat16)]
HARDENED += [(w, "conv", t, None) for t in ("s_ste(2,4)", "ste(1,4)") for w in ("nnx", "linen", "tree")]
HARDENED += [(w, "turned", t, None) for t in ("s_ste(2,4)", "fst(every=3)") for w in REGISTERED]


@pytest.mark.filterwarnings("ignore:violations")
@pytest.mark.parametrize(("way", "name", "text", "dtype"), HARDENED)
def test_hardened_is_the_training_form_bit_for_bit(way, name, text, dtype):
    layer = LAYERS[name]
    made, x, w = WAYS[way](layer, text, dtype=dtype), normal(1, *layer.x), normal(2, *layer.w)
    x = x if dtype is None else x.astype(dtype)
    state = made.init(w + 0.1 * normal(3, *layer.w), x)  # the weight has changed since then
    state = made.set_step(w, state, 10)
    y, (hard, again, call, broken) = jax.jit(made.call)(w, state, x), made.harden(w, state)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x))(x), y)
    assert np.array_equal(jax.jit(made.plain)(x, hard), y) != ("fp8" in text or "activation" in text or "y_x" in text)
    np.testing.assert_array_equal(again, hard)
    assert (hard.shape, hard.dtype) == (w.shape, w.dtype)
    if "activation" in text:
        np.testing.assert_array_equal(hard, w)
        assert broken is None
        return
    n, axis = 1 if "1,4" in text else 2, layer.contract[-1]
    assert bool(nm.groups.is_nm(hard, n, 4, axis=axis))
    assert not nm.groups.is_nm(w, n, 4, axis=axis)
    assert int(broken) == 0
    if way in MODELS:
        assert made.pattern(w, state) == nm.metrics.Pattern(n, 4, layer.contract)
    if not any(method in text for method in ("s_ste", "fst")):  # those shrink what they keep
        rounded = w if dtype is None else w.astype(dtype).astype(w.dtype)
        np.testing.assert_array_equal(hard[hard != 0], rounded[hard != 0])


@pytest.mark.parametrize("way", ["nnx", "linen", "tree"])
def test_masks_are_ranked_in_the_dtype_of_the_product(way):
    """1 and 1.001 differ in float32. In bfloat16 they tie, and the first is kept."""
    layer = Layer((8, 4), (4, 1), (0,), (1,), "ti,io->to", part(nnx.Linear, 4, 1), part(nn.Dense, 1))
    w, x = jnp.array([[1.0], [1.001], [0.5], [2.0]]), jnp.ones((8, 4))
    for dtype, kept in ((jnp.bfloat16, [1, 0, 0, 2]), (None, [0, 1.001, 0, 2])):
        made = WAYS[way](layer, "ste(2,4)", dtype=dtype)
        hard = made.harden(w, made.init(w, x if dtype is None else x.astype(dtype)))[0]
        np.testing.assert_array_equal(hard, np.float32(kept)[:, None])


@pytest.mark.parametrize(
    "text", ["ste(2,4)", "s_ste(2,4)", "y_w=ste(hold(mse(2,4),every=9))", "y_w=ste(uniform(2,4))", "ste(1,4)"]
)
@pytest.mark.parametrize("way", MODELS)
def test_masks_scales_and_measures_are_of_the_weight_in_use(way, text):
    """At this step and micro-step."""
    layer = LAYERS["dense"]
    made, eye = WAYS[way](layer, text), jnp.eye(16)
    w = normal(2, *layer.w)
    state = made.set_step(w, made.init(normal(3, *layer.w), eye), STEP, 2)
    used = made.call(w, state, eye)
    mask, scales, measured = made.measures(w, state)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, used != 0)
    assert list(scales) == (["layer"] if "s_ste" in text else [])
    for scale in scales.values():
        np.testing.assert_allclose(used, nm.prune(nm.soft(2, 4), w, axis=0, state=scale), rtol=1e-6)
    norm, seen = jnp.linalg.norm, measured["layer"]
    wanted = (jnp.mean(used != 0), norm(used - w) / norm(w), jnp.sum(used * w) / norm(used) / norm(w))
    np.testing.assert_allclose((seen.density, seen.error, seen.cosine), wanted, rtol=1e-5)


STAGES, RANDOM = "y_x=ste(stages(((0,identity),(8,mse(2,4)))))", "y_w=ste(stages(((0,uniform(2,4)),(100,mse(2,4)))))"
NOT_YET, OTHERS = "the schedules of layer have not ended", "have ended at values that are not those of the final form"
EARLY = [
    ("mdgf(2,4,linear(1,0,8))", 4, NOT_YET), (STAGES, 4, "the schedules of the inputs of layer have not ended"),
    ("mdgf(2,4,linear(1,0,8))", 8, None), ("sdgf(1,4,steps=8)", 2, NOT_YET), ("sdgf(1,4,steps=8)", 800, None),
    ("mdgf(2,4,exponential(0.5))", 2, NOT_YET), ("mdgf(2,4,exponential(0.5))", 30, None),  # less than 1% is left
    ("s_ste(2,4)", 0, None), ("fst(every=3)", 4, None), (STAGES, 8, None), (RANDOM, 5, NOT_YET), (RANDOM, 100, None),
    ("mdgf(2,4,linear(0,1,300))", 100, NOT_YET), ("mdgf(2,4,linear(0,1,300))", 300, OTHERS),
    (DRAWN.replace("False)", "False),every=4"), 5, None),
]  # fmt: skip


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("text", "step", "said"), EARLY)
@pytest.mark.parametrize("way", ["nnx", "linen", "tree"])
def test_a_harden_before_the_schedule_has_ended_says_so(way, text, step, said):
    layer = LAYERS["dense"]
    made, w = WAYS[way](layer, text), normal(0, *layer.w)
    state = made.set_step(w, made.init(w, normal(1, *layer.x)), step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broken = made.harden(w, state)[-1]
    told = {str(one.message): one.filename for one in caught if str(one.message).startswith("harden")}
    assert [*told.values()] == [__file__] * (said is not None)
    assert all(message.startswith(f"harden at step {step}: ") and said in message for message in told)
    assert broken is None if "y_x" in text else int(broken) == 0  # without a pruned weight there is no pattern


@pytest.mark.parametrize("way", ["nnx", "linen", "tree"])
def test_violations_that_check_nothing_say_so(way):
    layer = LAYERS["dense"]
    made, w = WAYS[way](layer, "mvue(2,4)"), normal(0, *layer.w)
    state = made.init(w, normal(1, *layer.x))
    with pytest.warns(UserWarning, match="^violations: no weight has an n:m final form, so nothing was checked.$"):
        assert made.harden(w, state)[-1] is None
