"""A weight that a model uses outside of its layer too is not hardened, in nnx and linen."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from jax import lax

import nmjax as nm
from nmjax.analysis import scopes
from nmjax.programs.uses import other_uses

RECIPE = nm.Recipe({".*": "ste(2,4)"})
X = jnp.ones((4, 8))
SAID = "up: .*dot_general"


class Tied(nnx.Module):
    """Up by a layer, and down by its kernel: the second product is not pruned."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.up(x)) @ self.up.kernel[...].T


class Inside(Tied):
    """The same, in programs inside of the program."""

    def __call__(self, x):
        head = lambda w, h: lax.cond(h.sum() > 0, lambda w, h: h @ w.T, lambda w, h: h @ w.T, w, h)
        hidden = jnp.tanh(self.up(x))
        return jax.jit(jax.checkpoint(head))(self.up.kernel[...], hidden)


class Looped(Tied):
    def __call__(self, x):
        w, hidden = self.up.kernel[...], jnp.tanh(self.up(x))
        return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] + hidden @ w.T), (0, x))[1]


class Untied(nnx.Module):
    """Every weight is used by its layer alone: twice, in a jitted method, and in attention."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)

    @nnx.jit
    def block(self, x):
        return self.down(jnp.tanh(self.up(x)))

    def __call__(self, x):
        return self.attention(self.block(self.block(x))[None])[0]


@pytest.mark.parametrize("kind", [Tied, Inside, Looped])
def test_a_tied_head_of_nnx_is_refused(kind):
    for call in (
        lambda: nm.nnx.sparsify(kind(nnx.Rngs(0)), RECIPE, X),
        lambda: nm.nnx.harden(nm.nnx.sparsify(kind(nnx.Rngs(0)), RECIPE), X),
        lambda: nm.nnx.harden(nm.nnx.sparsify(kind(nnx.Rngs(0)), RECIPE), jax.ShapeDtypeStruct(X.shape, X.dtype)),
    ):
        with pytest.raises(ValueError, match=SAID):
            call()
    refused = nm.nnx.plan(kind(nnx.Rngs(0)), RECIPE, X).refused
    assert len(refused) == 1
    assert "up: dot_general takes kernel" in refused[0][1]


def test_what_prunes_no_weight_may_be_tied():
    for recipe in (nm.Recipe({".*": "mvue(2,4)"}), nm.Recipe((("up", "dense"),))):
        nm.nnx.harden(nm.nnx.sparsify(Tied(nnx.Rngs(0)), recipe, X), X)


@pytest.mark.slow
def test_weights_of_layers_alone_are_hardened():
    model = nm.nnx.sparsify(Untied(nnx.Rngs(0)), RECIPE, X)
    model(X)  # its methods are compiled now
    hard = nm.nnx.harden(model, X)
    assert nm.nnx.violations(hard)["up/kernel"] == 0


class Table(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.embed(tokens))


class Head(Table):
    def __call__(self, x):
        return self.embed.attend(x)


def test_a_tied_table_of_a_registered_layer_is_refused(monkeypatch):
    from nmjax.nnx import registry

    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    nm.nnx.register_layer(nnx.Embed, weight="embedding", method="attend", input=lambda layer: (-1, 8))
    tokens = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="embed: gather takes embedding of shape"):
        nm.nnx.sparsify(Table(nnx.Rngs(0)), RECIPE, tokens)
    with pytest.raises(ValueError, match="embed: gather takes embedding of shape"):
        nm.nnx.harden(nm.nnx.sparsify(Table(nnx.Rngs(0)), RECIPE), tokens)
    with pytest.raises(ValueError, match=r"embed: .* which \w*Embed.__call__ uses too, .* pass examples"):
        nm.nnx.harden(nm.nnx.sparsify(Table(nnx.Rngs(0)), RECIPE))
    head = Head(nnx.Rngs(0))  # it looks nothing up, so its table may be hardened if a call shows it
    assert nm.nnx.violations(nm.nnx.harden(nm.nnx.sparsify(head, RECIPE, X), X))["embed/embedding"] == 0


class TiedLinen(nn.Module):
    def setup(self):
        self.up = nn.Dense(16)

    def __call__(self, x):
        return jnp.tanh(self.up(x)) @ self.up.variables["params"]["kernel"].T


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(8)(x)), None


class StackedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "nm": 0}
        return nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)()(x, None)[0]


@pytest.mark.slow
def test_a_tied_head_of_linen_is_refused():
    with nm.linen.sparsify(RECIPE):
        variables = TiedLinen().init(jax.random.key(0), X)
        stacked = StackedLinen().init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=SAID):
        nm.linen.harden(variables, TiedLinen(), X)
    ((where, why),) = nm.linen.plan(TiedLinen(), RECIPE, X).refused
    assert where == "up"
    assert "also uses it elsewhere, in dot_general" in why
    hard = nm.linen.harden(stacked, StackedLinen(), X)
    assert all(int(count) == 0 for count in nm.linen.violations(hard).values())


@jax.custom_jvp
def turned(w):
    return w.T


turned.defjvp(lambda primals, tangents: (primals[0].T, tangents[0].T))

HEADS = {  # how a head of width 8 is made of the kernel, (8, 16)
    "jit": lambda w, h: h @ jax.jit(lambda w: w.T)(w),
    "checkpoint": lambda w, h: h @ jax.checkpoint(lambda w: w.T)(w),
    "custom_jvp": lambda w, h: h @ turned(w),
    "cond": lambda w, h: h @ lax.cond(h.sum() > 0, lambda: w.T, lambda: w.T),
    "one branch": lambda w, h: h @ lax.cond(h.sum() > 0, lambda: w.T, lambda: jnp.ones((16, 8))),
    "scatter-add": lambda w, h: h @ w.at[0].add(1.0).T,
    "scatter-mul": lambda w, h: h @ w.at[0].multiply(2.0).T,
    "carry": lambda w, h: lax.fori_loop(0, 2, lambda i, c: (w, h @ c[0].T), (jnp.zeros_like(w), h[:, :8]))[1],
    "scanned": lambda w, h: lax.scan(lambda c, _: (w, h @ c.T), jnp.zeros_like(w), None, length=2)[1][1],
    "through a scan": lambda w, h: h @ lax.scan(lambda c, x: (c, x), h, w[None])[1][0].T,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_weight_is_followed_through_inner_programs(head):
    class Model(Tied):
        def __call__(self, x):
            return head(self.up.kernel[...], jnp.tanh(self.up(x)))

    with pytest.raises(ValueError, match="up: .* takes kernel"):
        nm.nnx.sparsify(Model(nnx.Rngs(0)), RECIPE, X)
    with pytest.raises(ValueError, match="up: .* takes kernel"):
        nm.nnx.harden(nm.nnx.sparsify(Model(nnx.Rngs(0)), RECIPE), X)


class MethodHead(Tied):
    @nnx.jit
    def head(self):
        return self.up.kernel[...].T

    def __call__(self, x):
        return jnp.tanh(self.up(x)) @ self.head()


def test_a_head_that_a_compiled_method_returns_is_refused():
    with pytest.raises(ValueError, match="up: dot_general takes kernel"):
        nm.nnx.sparsify(MethodHead(nnx.Rngs(0)), RECIPE, X)


class Stack(nnx.Module):
    """Layers that a scan slices: Flax returns their parameters from the scan, which is no use of them."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = make(rngs.split(3))

    def __call__(self, x):
        return nnx.scan(nnx.remat(lambda x, layer: jnp.tanh(layer(x))), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


@pytest.mark.slow
def test_a_stack_of_layers_is_hardened():
    model = nm.nnx.sparsify(Stack(nnx.Rngs(0)), RECIPE, X)
    assert nm.nnx.violations(nm.nnx.harden(model, X))["layers/kernel"] == 0


def test_uses_are_of_the_parameter_that_they_take():
    """Constants of a while loop's condition and body, a stack and a carry are told apart by their places."""

    def f(a, b, c, d, x):
        with scopes.of_layer(0):
            y = x @ a
        y = lax.while_loop(lambda v: (v[0] @ b).sum() < 1, lambda v: (v[0] * jnp.sin(c),), (y,))[0]
        return lax.scan(lambda y, w: (y + jnp.cos(w.T), None), y, d)[0] + jnp.tan(a.T)

    w = jnp.ones((2, 2))
    program = jax.make_jaxpr(f)(w, w, w, jnp.ones((3, 2, 2)), w).jaxpr
    found = other_uses(program, ["a", "b", "c", "d", None])
    assert found == {"a": ["tan"], "b": ["dot_general"], "c": ["sin"], "d": ["cos"]}
