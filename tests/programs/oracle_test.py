"""Random programs against pruning by hand: a program is refused, or its value and its gradients are right.

A program is a chain of products with weights. Each product has a form, such as a transposed weight or the weight on the
left, and stands inside something: `jax.jit`, `jax.checkpoint`, `lax.scan`, `lax.cond`, or a derivative that the program
takes itself. The same program runs with products that are pruned here, by sorting.
"""

import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import nmjax as nm

WIDTH, TOKENS, LAYERS, STEP, LAM = 8, 8, 3, 5, 0.1


# ---- pruning by hand ----


def kept(v, axis, n=2, m=4):
    """True for the n largest magnitudes of m along an axis. No values are equal."""
    lines = jnp.moveaxis(jnp.abs(v), axis, -1)
    groups = lines.reshape(*lines.shape[:-1], -1, m)
    largest = jnp.argsort(jnp.argsort(-groups, -1), -1) < n
    return jnp.moveaxis(largest.reshape(lines.shape), -1, axis)


def straight(v, pruned):
    """The pruned value, with the gradient of v."""
    return v + lax.stop_gradient(pruned - v)


@jax.custom_vjp
def decayed(w):
    return jnp.where(kept(w, 0), w, 0)


decayed.defvjp(lambda w: (decayed(w), w), lambda w, g: (g + LAM * jnp.where(kept(w, 0), 0, w),))


@jax.custom_vjp
def pruned_gradient(x, w):
    return x @ w


pruned_gradient.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, g: (g @ xw[1].T, xw[0].T @ jnp.where(kept(g, 0), g, 0)))

ste = lambda v, axis: straight(v, jnp.where(kept(v, axis), v, 0))
BY_HAND = {
    "ste(2,4)": lambda x, w: x @ ste(w, 0),
    "mdgf(2,4,linear(1,0,10))": lambda x, w: x @ straight(w, jnp.where(kept(w, 0), w, (1 - STEP / 10) * w)),
    f"sr_ste(2,4,lam={LAM})": lambda x, w: x @ decayed(w),
    "y_x=ste(mse(2,4))": lambda x, w: ste(x, 1) @ w,
    "ste(2,4); dw_g=mse(2,4)": lambda x, w: pruned_gradient(x, ste(w, 0)),
}
"""What a method computes for x of shape [tokens, in] and w of shape [in, out]."""


def test_pruning_by_hand_is_that_of_a_loop():
    v = np.random.default_rng(0).normal(size=(8, 3))
    wanted = np.zeros(v.shape, bool)
    for column in range(3):
        for start in (0, 4):
            group = abs(v[start : start + 4, column])
            for i in range(4):
                wanted[start + i, column] = sum(group > group[i]) < 2
    np.testing.assert_array_equal(kept(jnp.asarray(v), 0), wanted)


# ---- programs ----

FORMS = {
    "plain": (0, lambda x, w: x @ w),
    "left": (0, lambda x, w: jnp.einsum("io,bi->ob", w, x).T),
    "twice transposed": (0, lambda x, w: x @ jnp.swapaxes(w, 0, 1).T),
    "with axes of one": (0, lambda x, w: x @ w[:, None].reshape(w.shape)),
    "transposed": (1, lambda x, w: x @ w.T),
    "left and transposed": (1, lambda x, w: jnp.einsum("oi,bi->bo", w, x)),
}
"""The axis of the weight that a product contracts, and the product."""


def loop(f, x):
    return lax.scan(lambda h, _: (jnp.tanh(f(h)), None), x, None, length=2)[0]


AROUND = {
    "nothing": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: jnp.sin(f(x)))(x),
    "scan": loop,
    "cond": lambda f, x: lax.cond(x.sum() > 0, f, lambda x: 2 * f(x), x),
    "jit of checkpoint of scan": lambda f, x: jax.jit(jax.checkpoint(lambda x: loop(f, x)))(x),
    "scope": lambda f, x: jax.named_call(f, name="transpose(jvp())")(x),
}
energy = lambda f: lambda x: jnp.tanh(f(x)).sum()
INSIDE = {
    "grad": lambda f, x: jax.grad(energy(f))(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(energy(f)))(x),
    "checkpoint of grad": lambda f, x: jax.checkpoint(jax.grad(energy(f)))(x),
    "grad in scan": lambda f, x: loop(jax.grad(energy(f)), x),
    "grad in cond": lambda f, x: lax.cond(x.sum() > 0, jax.grad(energy(f)), lambda x: x, x),
    "value of value_and_grad": lambda f, x: x + jax.value_and_grad(energy(f))(x)[0],
    "vjp": lambda f, x: jax.vjp(f, x)[1](jnp.sin(x))[0],
    "jvp": lambda f, x: jax.jvp(f, (x,), (jnp.sin(x),))[1],
    "linearize": lambda f, x: jax.linearize(f, x)[1](jnp.sin(x)),
    "jacfwd": lambda f, x: jax.jacfwd(energy(f))(x),
    "jacrev": lambda f, x: jax.jacrev(f)(x).sum((0, 1)),
    "grad of grad": lambda f, x: jax.grad(lambda x: (jax.grad(energy(f))(x) ** 2).sum())(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(energy(f)), (x,), (jnp.sin(x),))[1],
}
"""Derivatives that a program takes itself."""


class Drawn:
    """A program, drawn from a seed.

    Attributes:
      parts: (name of the weight, form, what is around it) of each product; the name is None if it has no weight.
      derived: True if the program takes a derivative of a product with a weight.
      several: True if products contract different axes of a weight.
    """

    def __init__(self, seed, simple):
        draw = random.Random(seed)
        of_axis = lambda axis: [name for name, (own, _) in FORMS.items() if own == axis]
        axes = {name: draw.choice((0, 1)) for name in "ab"}
        self.parts, taken = [], {name: set() for name in ("a", "b", "stack")}
        for _ in range(draw.choice((2, 3))):
            name = draw.choice(("a", "b", "a", "b", None) if simple else ("a", "b", "a", "b", "stack", None))
            axis = axes.get(name, 0) ^ (draw.random() < 0.1 and name != "stack")
            form = "plain" if simple or name in ("stack", None) else draw.choice(of_axis(axis))
            derives = draw.random() < (0.2 if name else 0.5)
            self.parts.append((name, form, draw.choice(sorted(INSIDE if derives else AROUND))))
            if name:
                taken[name].add(FORMS[form][0])
        self.derived = any(name and around in INSIDE for name, _, around in self.parts)
        self.several = any(len(axes) > 1 for axes in taken.values())

    def __call__(self, multiply, x):
        """Run the program with a function (x, name of a weight, form)."""
        for i, (name, form, around) in enumerate(self.parts):
            constant = jnp.asarray(np.random.default_rng(i).normal(size=(WIDTH, WIDTH)), x.dtype) / 3
            f = lambda x, name=name, form=form, c=constant: multiply(x, name, form) if name else jnp.sin(x @ c)
            x = jnp.tanh((INSIDE | AROUND)[around](f, x)) + x / 2
        return x


def arrays():
    draw = lambda i, *shape: jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)
    params = {"a": draw(1, WIDTH, WIDTH), "b": draw(2, WIDTH, WIDTH), "stack": draw(3, LAYERS, WIDTH, WIDTH)}
    return {name: w / 2 for name, w in params.items()}, draw(4, TOKENS, WIDTH)


def product(params, by_hand=None):
    """Return the products of a program: as it is written, or pruned by hand."""

    def one(x, w, form):
        axis, plain = FORMS[form]
        return plain(x, w) if by_hand is None else by_hand(x, w if axis == 0 else w.T)

    def multiply(x, name, form):
        if name != "stack":
            return one(x, params[name], form)
        return lax.scan(lambda h, w: (jnp.tanh(one(h, w, form)), None), x, params["stack"])[0]

    return multiply


def both(loss, params, x):
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)


def loss_by_hand(program, method):
    return lambda params, x: (program(product(params, BY_HAND[method]), x) ** 2).sum()


def assert_equal(found, wanted, what):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        atol = 1e-4 * max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=str(what))


REFUSALS = r"takes itself, such as jax.grad|contract different axes|no derivative beyond|forward-mode autodiff \(jvp\)"


def used(program):
    return {name for name, _, _ in program.parts if name}


# ---- three ways to prune ----


def by_transform(program, method, params, x):
    """Return the loss and its gradients; None if the program is refused."""
    used_here = used(program)
    f = lambda params, x: program(product(params), x)
    params = {name: params[name] for name in used_here}
    sparse = nm.transform(f, nm.Recipe({".*": method}))
    refused = program.derived or (program.several and method != "y_x=ste(mse(2,4))")
    assert bool(sparse.plan(params, x).refused) == refused, program.parts
    if refused:
        calls = [lambda: sparse.init(params, x), lambda: sparse(params, x)]
        for call in calls[: 2 if "mdgf" not in method else 1]:
            with pytest.raises(ValueError, match=REFUSALS):
                call()
        return None
    state = sparse.set_step(params, sparse.init(params, x, strict=True), STEP)
    return both(lambda params, x: (sparse(params, x, state=state) ** 2).sum(), params, x)


class Model(nnx.Module):
    def __init__(self, program, params):
        self.program = nnx.static(program)
        for name in used(program):
            layer = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
            layer.kernel.set_value(params[name])
            setattr(self, name, layer)

    def __call__(self, x):
        return self.program(lambda x, name, form: getattr(self, name)(x), x)


def by_nnx(program, method, params, x):
    model = nm.nnx.sparsify(Model(program, params), nm.Recipe({".*": method}))
    nm.nnx.set_step(model, STEP)
    graph, learned, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda learned, x: (nnx.merge(graph, learned, rest)(x) ** 2).sum()
    value, (grads, dx) = both(loss, learned, x)
    return value, ({name: grads[name]["kernel"][...] for name in used(program)}, dx)


def by_linen(program, method, params, x):
    layer, recipe = linen.Dense(WIDTH, use_bias=False), nm.Recipe({".*": method})
    with nm.linen.sparsify(recipe):
        made = layer.init(jax.random.key(0), x)
    variables = {name: {"params": {"kernel": params[name]}} for name in used(program)}
    rest = {name: v for name, v in nm.linen.set_step(made, STEP).items() if name != "params"}
    loss = lambda variables, x: (
        program(lambda x, name, form: layer.apply(variables[name] | rest, x), x) ** 2
    ).sum()  # fmt: skip
    with nm.linen.sparsify(recipe):
        value, (grads, dx) = both(loss, variables, x)
    return value, ({name: grads[name]["params"]["kernel"] for name in used(program)}, dx)


WAYS = {"transform": by_transform, "nnx": by_nnx, "linen": by_linen}


def check(way, seeds):
    """Check programs of some seeds with every method. Return how many were right, and how many refused."""
    counts, (params, x) = Counter(), arrays()
    for seed in seeds:
        program = Drawn(seed, simple=way != "transform")
        if not used(program):
            continue
        method = sorted(BY_HAND)[seed % len(BY_HAND)]
        try:
            found = WAYS[way](program, method, params, x)
        except TypeError as error:
            assert way != "transform", program.parts
            assert program.derived, program.parts
            with pytest.raises(TypeError, match=REFUSALS):
                raise error
            found = None
        counts["refused" if found is None else "right"] += 1
        if found is not None:
            counts["right with a derivative inside"] += any(around in INSIDE for _, _, around in program.parts)
            own = {name: params[name] for name in used(program)}
            assert_equal(found, both(loss_by_hand(program, method), own, x), (seed, method, program.parts))
    print(way, dict(counts))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_few_programs_are_right_or_refused(way):
    counts = check(way, range(8))
    assert counts["right"] >= 3, counts


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("way", WAYS)
def test_many_programs_are_right_or_refused(way):
    counts = check(way, range(100, 300))
    assert counts["right"] >= 80, counts
    assert counts["refused"] >= 10, counts
    assert counts["right with a derivative inside"] >= 15, counts
