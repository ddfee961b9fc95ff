"""What the library costs on this machine.

    python -m experiments.bench transforms [--size 4096] [--rounds 9] [--save NAME]    # of arrays, in copies
    python -m experiments.bench delivery [--rounds 9] [--save NAME]                    # of models, against the dense one

Machines are noisy, so every figure is a ratio taken in one run: the functions are timed in turn, round after round, and
the best time of each is divided by the best of a *copy*, ``x * 1.0001`` of the same array, or by the dense model's.
``--save`` writes the tables to experiments/results/NAME.md, with the machine, the versions and the command.
"""

import argparse
import datetime
import importlib.util
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import nmjax as nm
from nmjax import groups
from nmjax.pruners.mvue import _unrolled, _whole

RESULTS = Path(__file__).parent / "results"


# ---- how other libraries do it ----


def double_argsort(x, axis, n, m):
    """Ranks by sorting twice, on the last axis, as jaxpruner does."""
    moved = jnp.moveaxis(x, axis, -1)
    g = jnp.abs(moved.reshape(*moved.shape[:-1], -1, m))
    kept = jnp.argsort(jnp.argsort(-g, axis=-1), axis=-1) < n
    return jnp.moveaxis(jnp.where(kept.reshape(moved.shape), moved, jnp.zeros((), x.dtype)), -1, axis)


def top_k(x, axis, n, m):
    """Indices by top_k, made a mask by one-hot, as praxis does."""
    moved = jnp.moveaxis(x, axis, -1)
    g = jnp.abs(moved.reshape(*moved.shape[:-1], -1, m))
    kept = jax.nn.one_hot(lax.top_k(g, n)[1], m, dtype=bool).any(-2)
    return jnp.moveaxis(jnp.where(kept.reshape(moved.shape), moved, jnp.zeros((), x.dtype)), -1, axis)


def qwix(x, axis, n, m):
    """qwix's mask, of rows or columns of a matrix."""
    from qwix._src.core.sparsity import get_sparsity_mask

    if x.ndim != 2:
        return None
    kept = get_sparsity_mask(x, n_sparsity=n, m_sparsity=m, order="R" if axis == 1 else "C")
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


def sorted_mvue(x, axis, n, m, key):
    """MVUE as its papers write it: sort, cumulative sums, JAX's uniforms, on the last axis."""
    moved = jnp.moveaxis(x, axis, -1)
    g = moved.reshape(*moved.shape[:-1], -1, m).astype(jnp.float32)
    a = jnp.abs(g)
    falling = -jnp.sort(-a, axis=-1)
    rest = jnp.cumsum(falling[..., ::-1], -1)[..., ::-1]  # of the k-th largest and all below it
    left = n - jnp.arange(m, dtype=jnp.float32)
    sat = falling * left.reshape((1,) * (g.ndim - 1) + (m,)) >= rest
    k = jnp.minimum(jnp.sum(sat & (left > 0).reshape((1,) * (g.ndim - 1) + (m,)), -1, keepdims=True), n - 1)
    tau = jnp.take_along_axis(rest, k, -1) / (n - k).astype(jnp.float32)
    reached = jnp.cumsum(jnp.minimum(a / tau, 1), -1) - jax.random.uniform(key, (*g.shape[:-1], 1))
    points = jnp.ceil(reached)
    hit = points > jnp.concatenate([jnp.zeros_like(points[..., :1]), points[..., :-1]], -1)
    y = jnp.where(hit, jnp.sign(g) * jnp.maximum(a, tau), 0).astype(x.dtype)
    return jnp.moveaxis(y.reshape(moved.shape), -1, axis)


# ---- timing ----


def best_times(calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """The best time of each, all of them timed in turn. What takes half a second is timed once."""
    for call in calls.values():
        jax.block_until_ready(call())
    best = dict.fromkeys(calls, float("inf"))
    for i in range(rounds):
        for name, call in calls.items():
            if i and best[name] > 0.5:
                continue
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def in_copies(functions: dict[str, Callable], x, rounds: int) -> dict[str, float]:
    """What each function of x costs, in copies of x."""
    calls = {name: partial(jax.jit(f), x) for name, f in {"copy": lambda x: x * 1.0001, **functions}.items()}
    times = best_times(calls, rounds)
    return {name: times[name] / times["copy"] for name in functions}


def arrays(size: int, dtype):
    """The array and axis of every column: first, last and a middle axis."""
    key = jax.random.key(0)
    square = jax.random.normal(key, (size, size), dtype)
    middle = jax.random.normal(key, (64, size, size // 64), dtype)
    return {"first": (square, 0), "last": (square, 1), "middle": (middle, 1)}


COLUMNS = [(dtype, where) for dtype in (jnp.float32, jnp.bfloat16) for where in ("first", "last", "middle")]


def sweep(rows: dict[str, Callable], size: int, rounds: int) -> dict[str, list]:
    """Every row on every column, in copies. A row gives None where it cannot serve a column."""
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


# ---- tables ----


def markdown(title: str, note: str, rows: dict[str, list], head: list[str]) -> str:
    show = lambda v: "" if v is None else v if isinstance(v, str) else f"{v:.2f}"
    lines = [f"## {title}", "", note, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join([name, *map(show, values)]) + " |" for name, values in rows.items()]
    return "\n".join([*lines, ""])


def pruning(p: nm.Pruner) -> Callable:
    return lambda x, axis: p(x, axis, nm.Ctx(key=1))


def transforms(size: int, rounds: int) -> str:
    """All tables of ``bench transforms``."""
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
        "Copies, as above: what is used, and the ways that were measured beside it.",
        sweep(ways, size, rounds),
        ["", *head],
    )
    return "\n".join((first, second, feed_forward(rounds)))


def mask_by(x, axis, way, n, m):
    kept = way(groups.magnitude(groups.split(x, axis, m)), axis + 1, n).reshape(x.shape)
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


def mvue_by(x, axis, way, n, m):
    u = jnp.expand_dims(nm.mvue(n, m).draw(x, axis, nm.Ctx(key=1)), axis + 1)
    return way(groups.split(x, axis, m), u, axis + 1, n).reshape(x.shape)


def feed_forward(rounds: int, tokens: int = 2048, width: int = 384, hidden: int = 1536) -> str:
    """Forward and backward of a feed-forward block against the dense one: time, and XLA's temporary memory."""
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
    note = f"Forward and backward of {tokens} tokens, {width} -> {hidden} -> {width}, over the dense one; aim for s_ste: time 1.1, memory 1.2."
    return markdown("Feed-forward block", note, rows, ["", "time", "temporary memory", "absolute"])


def _block_loss(weights, x, step, sparsity):
    """Of a feed-forward block whose scales are those of N(0, 1) weights: the state is a constant."""
    up, down = (nm.Ctx(key=i, step=step, state={"fwd_rhs": jnp.float32(1.483)}) for i in (0, 1))
    product = partial(nm.einsum, "ti,io->to", sparsity=sparsity)
    y = product(jax.nn.gelu(product(x, weights[0], ctx=up)), weights[1], ctx=down)
    return jnp.sum(jnp.square(y.astype(jnp.float32)))


# ---- models ----


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, width, heads, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    """Vision transformer (Dosovitskiy et al. 2020), a mean over positions at its end."""

    def __init__(self, width, depth, heads, image, patch, classes, *, rngs):
        self.patch = nnx.Conv(3, width, (patch, patch), strides=patch, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, (image // patch) ** 2, width)))
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(depth)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        x = self.patch(x).reshape(x.shape[0], -1, self.positions.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


DENSE_PATCH = (r"patch", nm.methods.dense())  # 3 colours are no groups of 4


def delivery(rounds: int) -> str:
    """All tables of ``bench delivery``."""
    recipes = {
        "untouched": None,
        "every rule dense": nm.Recipe(((r".*", "dense"),)),
        **{
            f"{text} on every linear": nm.Recipe((DENSE_PATCH, (r".*", text)))
            for text in ("ste()", "mvue()", "s_ste()")
        },
        "s_ste() on feed-forward": nm.Recipe(((r".*/(up|down)", "s_ste()"), (r".*", "dense"))),
    }
    x = jax.random.normal(jax.random.key(0), (32, 32, 32, 3))
    steps, tracing = {}, dict.fromkeys(recipes, float("inf"))
    for name, recipe in recipes.items():
        model = ViT(192, 4, 3, 32, 4, 10, rngs=nnx.Rngs(0))
        if recipe is not None:
            nm.nnx.sparsify(model, recipe)
        steps[name] = _training(model, x)
    lowered = {}
    for _ in range(3):
        for name, (step, arguments) in steps.items():
            jax.clear_caches()
            start = time.perf_counter()
            lowered[name] = jax.jit(lambda *a, step=step: step(*a)).trace(*arguments).lower()
            tracing[name] = min(tracing[name], time.perf_counter() - start)
    compiled = {name: low.compile() for name, low in lowered.items()}
    times = best_times({name: partial(f, *steps[name][1]) for name, f in compiled.items()}, rounds)
    memory = {name: f.memory_analysis().temp_size_in_bytes for name, f in compiled.items()}
    rows = {
        name: [v[name] / v["untouched"] for v in (times, memory, tracing)]
        + [f"{times[name] * 1e3:.0f} ms, {memory[name] / 2**20:.0f} MiB, {tracing[name] * 1e3:.0f} ms"]
        for name in recipes
    }
    first = markdown(
        "A training step",
        "ViT of 4 blocks, 192 wide, 32 images of 64 patches, AdamW: over the model that knows nothing of nmjax. Aim: every rule "
        "dense 1.01, 1 and 1.6; s_ste on every linear 1.25 in time.",
        rows, ["", "time", "temporary memory", "trace and lower", "absolute"],
    )  # fmt: skip
    start = time.perf_counter()
    make = lambda: nm.nnx.sparsify(
        ViT(768, 12, 12, 224, 16, 1000, rngs=nnx.Rngs(0)), recipes["s_ste() on feed-forward"]
    )
    model = nnx.eval_shape(make)
    made = time.perf_counter()
    plan = nm.nnx.plan(model, jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32))
    planned = time.perf_counter()
    note = f"Made abstractly and sparsified in {made - start:.1f} s, planned in {planned - made:.1f} s (aim: 5 s)."
    return "\n".join((first, f"## The plan of ViT-B/16\n\n{note}\n\n```\n{plan}\n```\n"))


def _training(model, x):
    """A step of AdamW as a function of arrays, and its arguments."""
    labels, optimizer = jnp.arange(x.shape[0]) % 10, optax.adamw(1e-3)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, state, x, now):
        model = nnx.merge(graph, params, rest)
        nm.nnx.set_step(model, now)
        rest = nnx.split(model, nnx.Param, ...)[2]

        def loss(params):
            logits = nnx.merge(graph, params, rest, copy=True)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    return step, (params, rest, optimizer.init(params), x, jnp.int32(0))


def machine() -> str:
    """Where and when, for the head of a results file."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    device = jax.devices()[0]
    return (
        f"{datetime.date.today()} · {device.device_kind if device.platform != 'cpu' else cpu}, {len(jax.devices())} device(s), "
        f"{os.cpu_count()} cores · Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}"
    )


def _lines(path):
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["transforms", "delivery"])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the arrays (default 4096)")
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is timed (default 9)")
    parser.add_argument("--save", metavar="NAME", help="also write experiments/results/NAME.md")
    args = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "experiments.bench", *argv])
    tables = transforms(args.size, args.rounds) if args.what == "transforms" else delivery(args.rounds)
    text = f"# {args.what}\n\n{machine()}  \n`{command}`\n\n" + tables
    print(text)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.save}.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
