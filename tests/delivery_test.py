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
    "top_gradient(2,4)", "y_x=ste(mse(2,4))", "dw_x=mvue(2,4)", DRAWN, EVERY,
)  # fmt: skip
STEP, MICRO, SEED = 3, 1, 5


def whole(seed, *shape, dtype=jnp.float32):
    """Return whole numbers. Their sums are exact in any order, so results can be compared for equality."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def recipe(text):
    return nm.Recipe({".*": text})


# ---- layers ----


class NnxEinsum(nnx.Module):
    """A layer of a class that Flax does not have."""

    def __init__(self, spec, shape, *, rngs):
        self.spec, self.kernel = spec, nnx.Param(jnp.ones(shape))
        self.rank = len(spec.split(",")[0])

    def __call__(self, x):
        return jnp.einsum(self.spec, x.astype(self.kernel.dtype), self.kernel[...])


class LinenEinsum(nn.Module):
    spec: str
    shape: tuple

    @nn.compact
    def __call__(self, x):
        return jnp.einsum(self.spec, x, self.param("kernel", nn.initializers.lecun_normal(), self.shape))


nm.nnx.door(NnxEinsum, weight="kernel")
linen.door(LinenEinsum, weight="kernel")


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
        if self.spec is not None:
            return (nm.einsum if pruned else jnp.einsum)(self.spec, x, w, **pruned)
        return (nm.conv_general_dilated if pruned else lax.conv_general_dilated)(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2, **pruned
        )


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

    def init(self, w, x):
        if self.declared:
            layer = NnxEinsum(self.layer.spec, self.layer.w, rngs=nnx.Rngs(0))
        else:
            layer = self.layer.nnx(rngs=nnx.Rngs(0), **({} if self.dtype is None else {"dtype": self.dtype}))
        layer.kernel.set_value(w)
        model = nm.nnx.sparsify(Holder(layer), self.recipe, x, seed=self.seed)
        self.graph, self.params, state = nnx.split(model, nnx.Param, ...)
        return state

    def model(self, w, state):
        model = nnx.merge(self.graph, self.params, state, copy=True)
        model.layer.kernel.set_value(w)
        return model

    def changed(self, verb, w, state, *args):
        model = self.model(w, state)
        verb(model, *args)
        return nnx.split(model, nnx.Param, ...)[2]

    set_step = functools.partialmethod(changed, nm.nnx.set_step)
    reset_state = functools.partialmethod(changed, nm.nnx.reset_state)

    def call(self, w, state, x):
        return self.model(w, state)(x)

    def site(self, state):
        site = self.model(jnp.ones(self.layer.w), state).layer.nm_site
        return site.words, site.state

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

    def init(self, w, x):
        if self.declared:
            make = part(LinenEinsum, self.layer.spec, self.layer.w)
        else:
            make = part(self.layer.linen, **({} if self.dtype is None else {"dtype": self.dtype}))
        self.net = Named(make)
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

    def site(self, state):
        site = nn.unbox(state)["layer"]["kernel"]
        return site.words, site.state

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
        return self.sparse({"layer": w}, x, sites=state)

    def site(self, state):
        return state["layer"].words, state["layer"].state

    def harden(self, w, state):
        hard, left = self.sparse.harden({"layer": w}, state)
        again = self.sparse.harden(hard, left)[0]["layer"]
        call = lambda x: self.sparse(hard, x, sites=left)
        return hard["layer"], again, call, self.sparse.violations(hard, state)["layer"]


WAYS = {"nnx": Nnx, "linen": Linen, "tree": Tree, "nnx door": NnxDeclared, "linen door": LinenDeclared}
MODELS = ("nnx", "linen", "nnx door", "linen door")
WORDS = (634120496, 2065500201)
"""The noise words of the path "layer" and the seed 5, in all ways and versions."""


# ---- the laws of one product ----


SOME = ("s_ste(2,4)", "fst(every=3)", EVERY)
CASES = [(way, "dense", m) for way in ("nnx", "linen", "tree") for m in METHODS]
CASES += [("nnx door", "dense", m) for m in SOME] + [("linen door", "dense", m) for m in SOME]
CASES += [(way, layer, m) for way in ("nnx", "linen", "tree") for layer in ("two axes", "batched") for m in SOME]
CASES += [(way, "conv", m) for way in ("nnx", "linen", "tree") for m in METHODS[::3] + SOME if "bi_mask" not in m]
CASES += [("nnx", layer, m) for layer in ("heads", "experts", "turned") for m in SOME]
CASES += [(way, layer, m) for way in ("tree", "nnx door", "linen door") for layer in ("heads", "turned") for m in SOME]
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

    for what, found, wanted in zip("y dx dw".split(), delivered(state, x, w, g), by_hand(name, text), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-4 * ("s_ste" in text), err_msg=what)


@pytest.mark.parametrize("way", WAYS)
def test_the_noise_words_are_of_seed_and_path(way):
    """They do not change between versions: a checkpoint's noise goes on after an upgrade."""
    layer = LAYERS["dense"]
    x, w, _ = operands(layer)
    words = []
    for seed in (SEED, SEED + 1, jax.random.key(SEED)) if way == "nnx" else (SEED, SEED + 1):
        made = WAYS[way](layer, "mvue(2,4)", seed)
        words.append(tuple(np.ravel(made.site(made.init(w, x))[0][...]).tolist()))
    assert words[0] == words[-1 if way == "nnx" else 0] == WORDS != words[1]
