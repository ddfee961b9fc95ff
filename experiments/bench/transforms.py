"""The cost of pruning arrays, in copies, beside other ways to do it; and the cost of a feed-forward block."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import nmjax as nm
from experiments.bench.measure import best_times, in_copies, markdown
from nmjax.core import groups
from nmjax.pruners.unbiased import _unrolled, _whole

# ---- other libraries' ways ----


def double_argsort(x: jax.Array, axis: int, n: int, m: int) -> jax.Array:
    """Prune by ranks from two sorts of the last axis, as jaxpruner does."""
    moved = jnp.moveaxis(x, axis, -1)
    g = jnp.abs(moved.reshape(*moved.shape[:-1], -1, m))
    kept = jnp.argsort(jnp.argsort(-g, axis=-1), axis=-1) < n
    return jnp.moveaxis(jnp.where(kept.reshape(moved.shape), moved, jnp.zeros((), x.dtype)), -1, axis)


def top_k(x: jax.Array, axis: int, n: int, m: int) -> jax.Array:
    """Prune by the indices of top_k, turned into a mask by one-hot, as praxis does."""
    moved = jnp.moveaxis(x, axis, -1)
    g = jnp.abs(moved.reshape(*moved.shape[:-1], -1, m))
    kept = jax.nn.one_hot(lax.top_k(g, n)[1], m, dtype=bool).any(-2)
    return jnp.moveaxis(jnp.where(kept.reshape(moved.shape), moved, jnp.zeros((), x.dtype)), -1, axis)


def qwix(x: jax.Array, axis: int, n: int, m: int) -> jax.Array | None:
    """Prune the rows or columns of a matrix by qwix's mask. Return None for other arrays."""
    from qwix._src.core.sparsity import get_sparsity_mask  # pyrefly: ignore[missing-import]

    if x.ndim != 2:
        return None
    kept = get_sparsity_mask(x, n_sparsity=n, m_sparsity=m, order="R" if axis == 1 else "C")
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


def sorted_mvue(x: jax.Array, axis: int, n: int, m: int, key: jax.Array) -> jax.Array:
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
    reached = jnp.cumsum(jnp.minimum(a / tau, 1), -1) - jax.random.uniform(key, (*g.shape[:-1], 1))
    points = jnp.ceil(reached)
    hit = points > jnp.concatenate([jnp.zeros_like(points[..., :1]), points[..., :-1]], -1)
    y = jnp.where(hit, jnp.sign(g) * jnp.maximum(a, tau), 0).astype(x.dtype)
    return jnp.moveaxis(y.reshape(moved.shape), -1, axis)


# ---- tables ----


def arrays(size: int, dtype: Any) -> dict[str, tuple[jax.Array, int]]:
    """Return the array and the axis of each column: the first, the last and a middle axis."""
    key = jax.random.key(0)
    square = jax.random.normal(key, (size, size), dtype)
    middle = jax.random.normal(key, (64, size, size // 64), dtype)
    return {"first": (square, 0), "last": (square, 1), "middle": (middle, 1)}


COLUMNS = [(dtype, where) for dtype in (jnp.float32, jnp.bfloat16) for where in ("first", "last", "middle")]


def sweep(rows: dict[str, Callable], size: int, rounds: int) -> dict[str, list]:
    """Return the cost of every row on every column, in copies. It is None if the row cannot serve the column."""
    table = {name: [] for name in rows}
    for dtype, where in COLUMNS:
        x, axis = arrays(size, dtype)[where]
        served = {name: partial(row, axis=axis) for name, row in rows.items() if _serves(row, x, axis)}
        costs = in_copies(served, x, rounds)
        for name in rows:
            table[name].append(costs.get(name))
        print(f"  {dtype.__name__} {where}: " + ", ".join(f"{k} {v:.2f}" for k, v in costs.items()), file=sys.stderr)
    return table


def _serves(row, x, axis):
    return jax.eval_shape(partial(row, axis=axis), x) is not None


def pruning(p: nm.Pruner) -> Callable:
    """Return a pruner as a function of an array and an axis."""
    return lambda x, axis: p(x, axis, nm.Ctx(key=1))


def transforms(size: int, rounds: int) -> str:
    """Return the tables of ``bench transforms``."""
    head = [f"{dtype.__name__} {where}" for dtype, where in COLUMNS]
    have_qwix = importlib.util.find_spec("qwix") is not None
    others = {"double argsort": double_argsort, "top_k": top_k} | ({"qwix": qwix} if have_qwix else {})
    goals = {"mse(2,4)": "2", "mvue(2,4)": "3, bf16 4", "soft(2,4)": "3", "transposable(2,4)": "2.5"}

    ours = {t: pruning(nm.parse_pruner(t)) for t in (*goals, "mvue_approx(2,4)", "uniform(2,4)")}
    rivals = {f"mse by {k}": partial(f, n=2, m=4) for k, f in others.items()}
    rivals["mvue by sorting"] = partial(sorted_mvue, n=2, m=4, key=jax.random.key(1))
    table = sweep(ours | rivals, size, rounds)
    first = markdown(
        "2:4", f"Copies of a {size} x {size} array (middle: 64 x {size} x {size // 64}); aim at most.",
        {name: [goals.get(name, ""), *values] for name, values in table.items()}, ["", "aim", *head],
    )  # fmt: skip

    ways = {}
    for n, m in ((1, 8), (4, 8), (1, 32), (1, 128)):
        ways[f"mse({n},{m})"] = pruning(nm.mse(n, m))
        for name, way in {"ranks": groups._by_rank, "bisection": groups._by_bisection}.items():
            if m <= 32 or name != "ranks":
                ways[f"mse({n},{m}) by {name}"] = partial(mask_by, way=way, n=n, m=m)
        if n == 1:
            ways[f"mse({n},{m}) by first largest"] = partial(
                mask_by, way=lambda s, a, n: groups._first_largest(s, a), n=n, m=m
            )
        for name, f in others.items():
            ways[f"mse({n},{m}) by {name}"] = partial(f, n=n, m=m)
        ways[f"mvue({n},{m})"] = pruning(nm.mvue(n, m))
        if m <= 16:
            ways[f"mvue({n},{m}) member by member"] = partial(mvue_by, way=_unrolled, n=n, m=m)
        ways[f"mvue({n},{m}) by running sums"] = partial(mvue_by, way=_whole, n=n, m=m)
        ways[f"mvue({n},{m}) by sorting"] = partial(sorted_mvue, n=n, m=m, key=jax.random.key(1))
    second = markdown(
        "Other n:m",
        "In copies, as above: the way that nmjax uses, and other ways that were tried.",
        sweep(ways, size, rounds),
        ["", *head],
    )
    return "\n".join((first, second, feed_forward(rounds)))


def mask_by(x: jax.Array, axis: int, way: Callable, n: int, m: int) -> jax.Array:
    """Keep the n largest of m, chosen in one of our own ways."""
    kept = way(groups.magnitude(groups.split(x, axis, m)), axis + 1, n).reshape(x.shape)
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


def mvue_by(x: jax.Array, axis: int, way: Callable, n: int, m: int) -> jax.Array:
    """Prune by MVUE, computed in one of our own ways."""
    u = jnp.expand_dims(nm.mvue(n, m).draw(x, axis, nm.Ctx(key=1)), axis + 1)
    return way(groups.split(x, axis, m), u, axis + 1, n).reshape(x.shape)


def feed_forward(rounds: int, tokens: int = 2048, width: int = 384, hidden: int = 1536) -> str:
    """Return the table of a feed-forward block, forward and backward, against the dense one: time and memory."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        shapes = ((tokens, width), (width, hidden), (hidden, width))
        x, up, down = (jax.random.normal(k, s, dtype) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True))

        compiled = {
            name: jax.jit(jax.grad(partial(_block_loss, sparsity=nm.parse(name)), (0, 1)))
            .lower((up, down), x, 0)
            .compile()
            for name in ("dense", "ste()", "s_ste()", "s_ste(gradient='mvue_approx')")
        }
        times = best_times({n: partial(f, (up, down), x, 0) for n, f in compiled.items()}, 5 * rounds)
        memory = {n: f.memory_analysis().temp_size_in_bytes for n, f in compiled.items()}
        for name in compiled:
            ratios = [times[name] / times["dense"], memory[name] / memory["dense"]]
            rows[f"{name}, {dtype.__name__}"] = [*ratios, f"{times[name] * 1e3:.1f} ms, {memory[name] / 2**20:.1f} MiB"]
    note = f"Forward and backward of {tokens} tokens, {width} -> {hidden} -> {width}, over the dense one; "
    note += "aim for s_ste: time 1.1, memory 1.2."
    return markdown("Feed-forward block", note, rows, ["", "time", "temporary memory", "absolute"])


def _block_loss(weights, x, step, sparsity):
    """Return the loss of a feed-forward block. The soft threshold's scale is a constant, that of N(0, 1) weights."""
    up, down = (nm.Ctx(key=i, step=step, state={"fwd_rhs": jnp.float32(1.483)}) for i in (0, 1))
    product = partial(nm.einsum, "ti,io->to", sparsity=sparsity)
    y = product(jax.nn.gelu(product(x, weights[0], ctx=up)), weights[1], ctx=down)
    return jnp.sum(jnp.square(y.astype(jnp.float32)))
