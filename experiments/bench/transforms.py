"""The cost of pruning arrays, in copies, beside other ways to do it; and the cost of a feed-forward block."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

import nmjax as nm
from experiments.bench.measure import Table, copy, in_turn, ratio
from nmjax.core import groups
from nmjax.pruners.unbiased import _unrolled, _whole

GOALS = {"mse(2,4)": "2", "mvue(2,4)": "3, bf16 4", "soft(2,4)": "3", "transposable(2,4)": "2.5"}
GOALS |= {"chain(shared(mse(4,8),16),mse(2,8))": "3", "transposable(16,32)": "10"}
FEED_FORWARD = ("dense", "ste()", "s_ste()", "s_ste(gradient='mvue_approx')")
COLUMNS = [(dtype, where) for dtype in (jnp.float32, jnp.bfloat16) for where in ("first", "last", "middle")]

# ---- other libraries' ways ----


def _kept_by(choose: Callable[[jax.Array, int], jax.Array], x: jax.Array, axis: int, n: int, m: int) -> jax.Array:
    """Prune by a function that chooses the n largest of the last axis."""
    moved = jnp.moveaxis(x, axis, -1)
    kept = choose(jnp.abs(moved.reshape(*moved.shape[:-1], -1, m)), n)
    return jnp.moveaxis(jnp.where(kept.reshape(moved.shape), moved, jnp.zeros((), x.dtype)), -1, axis)


def _qwix(x: jax.Array, axis: int, n: int, m: int) -> jax.Array | None:
    """Prune the rows or columns of a matrix by qwix's mask. Return None for other arrays."""
    from qwix._src.core.sparsity import get_sparsity_mask  # pyrefly: ignore[missing-import]

    if x.ndim != 2:
        return None
    kept = get_sparsity_mask(x, n_sparsity=n, m_sparsity=m, order="R" if axis == 1 else "C")
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


OTHERS = {
    # ranks from two sorts, as in jaxpruner
    "double argsort": partial(_kept_by, lambda g, n: jnp.argsort(jnp.argsort(-g, axis=-1), axis=-1) < n),
    # the indices of top_k, turned into a mask by one-hot, as in praxis
    "top_k": partial(_kept_by, lambda g, n: jax.nn.one_hot(lax.top_k(g, n)[1], g.shape[-1], dtype=bool).any(-2)),
} | ({"qwix": _qwix} if importlib.util.find_spec("qwix") else {})


def sorted_mvue(x: jax.Array, axis: int, n: int, m: int) -> jax.Array:
    """Prune by MVUE as its papers write it: sort the last axis, cumulative sums, JAX's uniforms."""
    moved = jnp.moveaxis(x, axis, -1)
    g = moved.reshape(*moved.shape[:-1], -1, m).astype(jnp.float32)
    a = jnp.abs(g)
    falling = -jnp.sort(-a, axis=-1)
    rest = jnp.cumsum(falling[..., ::-1], -1)[..., ::-1]  # the sum of the k-th largest and all smaller ones
    left = n - jnp.arange(m, dtype=jnp.float32)
    sat = falling * left.reshape((1,) * (g.ndim - 1) + (m,)) >= rest
    k = jnp.minimum(jnp.sum(sat & (left > 0).reshape((1,) * (g.ndim - 1) + (m,)), -1, keepdims=True), n - 1)
    tau = jnp.take_along_axis(rest, k, -1) / (n - k).astype(jnp.float32)
    uniforms = jax.random.uniform(jax.random.key(1), (*g.shape[:-1], 1))
    points = jnp.ceil(jnp.cumsum(jnp.minimum(a / tau, 1), -1) - uniforms)
    hit = points > jnp.concatenate([jnp.zeros_like(points[..., :1]), points[..., :-1]], -1)
    y = jnp.where(hit, jnp.sign(g) * jnp.maximum(a, tau), 0).astype(x.dtype)
    return jnp.moveaxis(y.reshape(moved.shape), -1, axis)


# ---- our ways ----


def _pruning(text: str) -> Callable:
    """Return a pruner as a function of an array and an axis."""
    return lambda x, axis: nm.parse_pruner(text)(x, axis, nm.Ctx(key=1))


def _mask_by(way: Callable, x: jax.Array, axis: int, n: int, m: int) -> jax.Array:
    """Keep the n largest of m, chosen in one of our own ways."""
    kept = way(groups.magnitude(groups.split(x, axis, m)), axis + 1, n).reshape(x.shape)
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


def _mvue_by(way: Callable, x: jax.Array, axis: int, n: int, m: int) -> jax.Array:
    """Prune by MVUE, computed in one of our own ways."""
    u = jnp.expand_dims(nm.mvue(n, m).draw(x, axis, nm.Ctx(key=1)), axis + 1)
    return way(groups.split(x, axis, m), u, axis + 1, n).reshape(x.shape)


def _ways(n: int, m: int) -> dict[str, Callable]:
    """Return all ways to prune n:m."""
    mse = {"ranks": groups._by_rank} if m <= 32 else {}
    mse |= {"bisection": groups._by_bisection}
    mse |= {"first largest": lambda s, a, n: groups._first_largest(s, a)} if n == 1 else {}
    found = {"mse({},{})": _pruning(f"mse({n},{m})")}
    found |= {f"mse({{}},{{}}) by {name}": partial(_mask_by, way) for name, way in mse.items()}
    found |= {f"mse({{}},{{}}) by {name}": way for name, way in OTHERS.items()}
    found |= {"mvue({},{})": _pruning(f"mvue({n},{m})")}
    found |= {"mvue({},{}) member by member": partial(_mvue_by, _unrolled)} if m <= 16 else {}
    found |= {"mvue({},{}) by running sums": partial(_mvue_by, _whole), "mvue({},{}) by sorting": sorted_mvue}
    return {name.format(n, m): way if name.endswith(")") else partial(way, n=n, m=m) for name, way in found.items()}


# ---- tables ----


def transforms(size: int, rounds: int) -> Iterator[Table]:
    """Return the tables of ``bench transforms``."""
    head = [f"{dtype.__name__} {where}" for dtype, where in COLUMNS]
    ways = {text: _pruning(text) for text in (*GOALS, "mvue_approx(2,4)", "uniform(2,4)")}
    ways |= {f"mse by {name}": partial(way, n=2, m=4) for name, way in OTHERS.items()}
    ways["mvue by sorting"] = partial(sorted_mvue, n=2, m=4)
    costs = in_copies(ways, size, rounds)
    yield Table(
        "Pruners", f"Copies of a {size} x {size} array (middle: 64 x {size} x {size // 64}); aim at most.",
        ["", "aim", *head], {name: [GOALS.get(name, ""), *costs[name]] for name in ways},
    )  # fmt: skip
    others = {name: way for n, m in ((1, 8), (4, 8), (1, 32), (1, 128)) for name, way in _ways(n, m).items()}
    note = "In copies, as above: the way that nmjax uses, and other ways that were tried."
    yield Table("Other n:m", note, ["", *head], in_copies(others, size, rounds))
    rows = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        sides = ((2048, 384), (384, 1536), (1536, 384))
        x, up, down = (jax.random.normal(jax.random.key(i), s, dtype) / s[0] ** 0.5 for i, s in enumerate(sides))
        gradients = {text: jax.jit(jax.grad(partial(_loss, sparsity=nm.parse(text)), (0, 1))) for text in FEED_FORWARD}
        made = {text: f.lower((up, down), x, 0).compile() for text, f in gradients.items()}
        times = in_turn({text: partial(f, (up, down), x, 0) for text, f in made.items()}, rounds)
        memory = {text: f.memory_analysis().temp_size_in_bytes for text, f in made.items()}
        for text in made:
            over = [ratio(times[text], times["dense"]), memory[text] / memory["dense"]]
            absolute = f"{min(times[text]) * 1e3:.1f} ms, {memory[text] / 2**20:.1f} MiB"
            rows[f"{text}, {dtype.__name__}"] = [*over, absolute]
    yield Table(
        "Feed-forward block",
        "Forward and backward of 2048 tokens, 384 -> 1536 -> 384, over the dense one; aim for s_ste: time 1.1, memory "
        "1.2.",
        ["", "time", "temporary memory", "absolute"], rows,
    )  # fmt: skip


def _loss(weights: tuple[jax.Array, jax.Array], x: jax.Array, step: jax.Array, sparsity: nm.Sparsity) -> jax.Array:
    """Return the loss of a feed-forward block. The soft threshold's scale is a constant, that of N(0, 1) weights."""
    up, down = (nm.Ctx(key=i, step=step, state={"y_w": jnp.float32(1.483)}) for i in (0, 1))
    product = partial(nm.einsum, "ti,io->to", sparsity=sparsity)
    y = product(jax.nn.gelu(product(x, weights[0], ctx=up)), weights[1], ctx=down)
    return jnp.sum(jnp.square(y.astype(jnp.float32)))


def in_copies(ways: Mapping[str, Callable], size: int, rounds: int) -> dict[str, list[float | None]]:
    """Return the time of every way on every column, over a copy's. It is None if a way cannot serve the column."""
    table = {name: [] for name in ways}
    for dtype, where in COLUMNS:
        sides, axis = {"first": ((size, size), 0), "last": ((size, size), 1)}.get(where, ((64, size, size // 64), 1))
        x = jax.random.normal(jax.random.key(0), sides, dtype)
        served = {name: partial(way, axis=axis) for name, way in ways.items()}
        served = {name: way for name, way in served.items() if jax.eval_shape(way, x) is not None}
        calls = {name: partial(jax.jit(way), x) for name, way in {"copy": copy, **served}.items()}
        times = in_turn(calls, rounds, once=0.5)
        for name in ways:
            table[name].append(ratio(times[name], times["copy"]) if name in times else None)
    return table
