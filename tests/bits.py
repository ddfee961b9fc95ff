"""Record what is computed, and compare a tree with a record, bit for bit.

    python -m tests.bits record FILE.json [--only PREFIX]     # in the tree whose results are the reference
    python -m tests.bits compare FILE.json [--only PREFIX]    # in another tree: names that differ, and exit code 1

The file maps a name to the sha256 of (dtype, shape, bytes) of an array, or to a number or a text. If a call is refused,
the type of the exception is recorded and not its words. Only public names of nmjax and launch.py are used, so this file
runs in a tree of any layout. A record holds for one machine, one jax and one Python. A PREFIX is one of SECTIONS, runs,
or a longer one such as products/mvue. Small runs go on in processes beside the rest.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (  # most of the time is compilation; several devices are for the interpreter of kernels
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_emitter_verification_level=0 "
    "--xla_force_host_platform_device_count=4"
)

import argparse
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import nmjax as nm

ROOT = Path(__file__).resolve().parent.parent
REFUSED = (ValueError, TypeError)
DTYPES = ("float32", "bfloat16", "float16")
STEPS = (0, 3, 50)  # the last is after the end of every schedule below

jax.config.update("jax_enable_compilation_cache", False)
if jax.__version_info__[:2] == (0, 10):  # its interpreter of kernels compiles each block of threads anew
    from jax._src.pallas.mosaic.interpret import thread_map

    def _run(jaxpr, consts, *args):
        jax.core.eval_jaxpr(jaxpr, consts, *args)

    thread_map._run_jaxpr = lambda jaxpr, consts, *args: (
        jax.jit(_run, static_argnums=0).trace(jaxpr, consts, *args).lower().compile()(consts, *args)
    )


class Found(dict):
    """The names that begin with ``only``, and what they are."""

    def __init__(self, only: str = ""):
        self.only = only

    def wants(self, name: str) -> bool:
        """Return True if names that begin with this one are asked for."""
        return name.startswith(self.only) or self.only.startswith(name)

    def put(self, name: str, value) -> None:
        """Add the leaves of a pytree, or of a state of Flax, under a name."""
        if isinstance(value, nnx.State):
            value = {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(value)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            inner = jax.tree_util.keystr(path, simple=True, separator="/")
            self[f"{name}/{inner}" if inner else name] = self._told(leaf)

    def call(self, name: str, f, *args, **options):
        """Add what a function returns, or the type of its refusal."""
        try:
            self.put(name, f(*args, **options))
        except REFUSED as error:
            self[name] = f"raises {type(error).__name__}"

    @staticmethod
    def _told(leaf) -> str:
        if isinstance(leaf, (str, bool, int, float)):
            return leaf if isinstance(leaf, str) else repr(leaf)
        leaf = np.asarray(leaf)
        return hashlib.sha256(f"{leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes()).hexdigest()


def normal(seed: int, *shape: int, dtype="float32") -> jax.Array:
    """Return fixed random numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def awkward(*shape: int, dtype="float32") -> jax.Array:
    """Return numbers with NaN, infinities, zeros, ties and the tiniest ones among them."""
    x = np.random.default_rng(9).standard_normal(shape).astype(np.float32).ravel()
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-40, 1e-7, 6e4]
    where = np.random.default_rng(8).permutation(x.size)[: 3 * x.size // 4]
    x[where] = np.resize(special, where.size)
    x = x.reshape(shape)
    x[:1] = 0.0
    return jnp.asarray(x, dtype)


# ---- the texts ----


def _texts(block: str) -> tuple[str, ...]:
    return tuple(text.strip() for text in block.split("|"))


MIX = "y_x=ste(mse(2,4)); y_w=ste(mse(2,4)); dx_g=mvue(2,4); dx_w=raw(mse(2,4)); "
MIX += "dw_g=mvue(2,4); dw_x=mse(2,4)"
METHODS = _texts("""
    dense() | ste(2,4) | sr_ste(2,4,lam=0.1) | s_ste(2,4) | s_ste(2,4,gradient='mvue_approx') |
    s_ste(2,4,gradient='dense') | s_ste(2,4,fp8=True) | s_ste(fp8=True,gradient='mvue_approx') | sdgp(2,4) |
    sdgp(1,4,over='group') | sdgp(rescale=False) | sdgp(rescale=False,select='random') | mvue(2,4) | mvue(1,2) |
    mvue(4,8) | mdgf(1,4,linear(1,0,20,begin=2)) | mdgf(1,4,linear(1,0,20),'autodiff') |
    mdgf(2,4,exponential(0.1,2,40)) | sdgf(1,8,'stepwise',steps=20,dense=2) | sdgf(1,4,'geometric',steps=20,k=4) |
    fst(every=2) | fst(every=2,dense_from=20) | fst(1,4,lam=0,every=40) | bi_mask(every=2,draws=4) | bdwp(2,4) |
    activation(2,4,'down') | activation(2,4,'up') | top_gradient(2,4) | s_ste(2,4); dx_g=rescale(mse(2,4),'group') |
    y_w=ste(chain(mse(2,4),fp8('e4m3'))); dw_g=chain(mvue(2,4),fp8('e5m2','random')) |
    y_w=mse(2,4); dx_g=mvue(2,4); dw_x=raw(mse(2,4)) |
    y_w=ste(chain(hold(mse(2,4),every=2),fp8('e4m3'))); dx_w=raw(hold(mse(1,4))) |
    y_w=decay(hold(mse(2,4),every=2),linear(1,0,20),'autodiff'); dx_w=fp8('e5m2') |
    y_w=ste(transposable(2,4)); dw_g=uniform(2,4) |
    y_w=ste(soft(2,4,scale='now')); dw_g=stages(((0,mvue(2,4)),(20,identity)))
""")
METHODS += (MIX,)
REFUSALS = _texts("""
    y_w=mvue(2,4) | dw_g=ste(mse(2,4)) | dw_g=hold(mse(2,4)) | dw_g=mvue_approx(1,4) | y_w=raw(mse(2,4)) |
    nothing(2,4) | ste(5,4) | ste(2,4 | mse(2,4) | y=mse(2,4) | s_ste(gradient='no') | y_x=fp8('e4m3','random') |
    mdgf(1,4,3) | sdgf(1,4,k=3,kind='geometric')
""")
PRUNERS = _texts("""
    identity | mse(2,4) | mse(1,2) | mse(4,4) | mse(1,8) | mse(3,16) | mse(5,32) | mvue(2,4) | mvue(1,2) | mvue(1,4) |
    mvue(4,8) | mvue(6,16) | mvue(7,32) | mvue_approx(2,4) | soft(2,4) | soft(2,4,scale='now') | soft(2,4,scale='one') |
    soft(3,8) | soft(4,4) | transposable(2,4) | transposable(1,4) | transposable(4,8) | uniform(2,4) |
    uniform(2,4,rescale=False) | uniform(3,8) | fp8('e4m3') | fp8('e5m2') | fp8('e4m3','random') |
    fp8('e5m2',rounding='random') | chain(mse(4,8),mse(2,4)) | chain(mvue(2,4),fp8('e5m2','random')) |
    chain(soft(2,4),fp8('e4m3')) | chain(mvue(2,4),mvue(1,2)) | chain(hold(mse(2,4),every=2),fp8('e4m3')) |
    stages(((0,identity),(2,mse(3,4)),(20,mse(2,4)))) | stages(((0,mvue(2,4)),(20,identity))) |
    stages(((0,mse(4,16)),(3,mse(2,8)),(20,mse(1,4)))) |
    stages(((0,hold(mse(3,4),every=2)),(3,hold(mse(2,4),every=5)))) | rescale(mse(2,4)) | rescale(mse(1,4),'group') |
    rescale(uniform(2,4,rescale=False),over='group') | hold(mse(2,4),every=2) | hold(transposable(2,4)) |
    hold(uniform(2,4,rescale=False),every=3) | permute(mse(2,4),every=2,draws=4) |
    permute(chain(mse(4,8),mse(2,4)),None,3) | raw(mse(2,4)) | ste(soft(2,4)) | ste(mvue(2,4)) |
    sr_ste(mse(2,4),lam=0.1) | sr_ste(hold(mse(1,4)),lam=6e-05) | decay(mse(1,4),linear(1,0,20,begin=2)) |
    decay(mse(1,4),exponential(0.1,2,40),'autodiff') | decay(mse(2,4),cosine(1,0.5,20),gradient='autodiff') |
    decay(mse(2,4),stairs(((0,1),(3,0.5)))) | decay(mse(2,4),constant(0.25)) |
    decay(mse(2,4),optax_schedule('cosine_decay_schedule',1.0,20))
""")
SCHEDULES = (nm.linear(1, 0, 20, begin=2), nm.cosine(1, 0.5, 20), nm.exponential(0.1, 2, 40), nm.constant(0.25))
SCHEDULES += (nm.stairs(((0, 1), (3, 0.5))), nm.optax_schedule("cosine_decay_schedule", 1.0, 20))


# ---- pruners ----


def pruners(found: Found) -> None:
    """Record every pruner along several axes, its mask, its gradient and its state."""
    for schedule, step in itertools.product(SCHEDULES, STEPS):
        found.put(f"pruners/schedule {schedule}/{step}", schedule(step))
    for text in REFUSALS:
        found.call(f"pruners/refused/{text}", lambda text=text: str(nm.parse(text)))
    for text in METHODS:
        s = nm.parse(text)
        found.put(f"pruners/text of {text}", [str(s), nm.parse(str(s)) == s, str(nm.Recipe(((r"a/.*", text),)))])
    cases = [((16, 32), -1), ((16, 32), 0), ((2, 32, 16), 1)]
    for text in PRUNERS:
        p = nm.parse_pruner(text)
        found.put(f"pruners/text of {text}", [str(p), nm.parse_pruner(str(p)) == p])
        for dtype, (shape, axis) in itertools.product(DTYPES, cases):
            name = f"pruners/{text}/{dtype} {'x'.join(map(str, shape))} along {axis}"
            if found.wants(name) and (dtype == "float32" or axis == -1 or (axis, dtype) == (1, "bfloat16")):
                _pruned(found, name, p, shape, axis, dtype)


def _pruned(found, name, p, shape, axis, dtype):
    """Record one pruner on ordinary and on awkward values."""
    refused = {}

    def run(first, x, g, step):
        state = _state(p, first, axis, step)
        pruned = lambda x: nm.prune(p, x, axis=axis, key=5, step=step, state=state)
        out = {"y": pruned(x), "state": state}
        if not p.facts.stochastic:
            out["dx"] = jax.vjp(pruned, x)[1](g)[0]
        try:
            key = nm.random.fold(nm.random.words(5), step)
            out["mask"] = p.mask(x, axis, nm.Ctx(key, step, state))
        except REFUSED as error:
            refused["mask"] = f"raises {type(error).__name__}"
        return out

    run, first, g = jax.jit(run), normal(0, *shape, dtype=dtype), normal(1, *shape, dtype=dtype)
    for kind, x in (("normal", normal(2, *shape, dtype=dtype)), ("awkward", awkward(*shape, dtype=dtype))):
        for step in STEPS:
            found.call(f"{name}/{kind} {step}", run, first, x, g, jnp.int32(step))
    found.put(name, refused)


def _state(p, x, axis, step):
    """Make the state of a pruner, as that of a weight slot."""
    axis = axis % x.ndim
    others = tuple(a for a in range(x.ndim) if a != axis)
    try:
        s, contract, out = nm.Sparsity(y_w=p), axis, others
    except ValueError:
        s, contract, out = nm.Sparsity(dx_w=p if "raw(" in str(p) else nm.raw(p)), others, axis
    made = s.init(x, contract=contract, out=out, ctx=nm.Ctx(5))
    made = s.refresh(x[::-1], contract=contract, out=out, ctx=nm.Ctx(5, step, made))
    return next(iter(made.values()), None)


def random(found: Found) -> None:
    """Record the random bits."""
    r = nm.random
    for seed in (0, 5, 2**40 + 3, -7, jax.random.key(11), jax.random.key(3, impl="rbg")):
        name = f"random/{seed if isinstance(seed, int) else jax.random.key_data(seed).tolist()}"
        words = r.words(seed)
        found.put(f"{name}/words", words)
        found.put(f"{name}/bits", r.bits(words, jnp.arange(100, dtype=jnp.uint32) * np.uint32(40_000_003)))
        for number in (0, 1, 2**31 - 1):
            found.put(f"{name}/fold {number}", r.fold(words, number))
        for path in ("", "mlp/up", "blocks/0/attention/query"):
            found.put(f"{name}/named {path}", r.named(words, path))
        found.put(f"{name}/uniform", [r.uniform(words, shape) for shape in ((), (7,), (3, 1, 5))])


# ---- products ----

MATMUL = (((1,), (0,)), ((), ()))
CHANNELS = ("NHWC", "HWIO", "NHWC")


def _conv(x, w, **options):
    return nm.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=CHANNELS, **options)


def _conv_cut(x, w, **options):
    numbers = {"dimension_numbers": CHANNELS, "feature_group_count": 2}
    return nm.conv_general_dilated(x, w, (2, 2), ((1, 1), (1, 1)), **numbers, **options)


def _dot_wide(x, w, **options):
    return nm.dot_general(x, w, MATMUL, preferred_element_type=jnp.float32, **options)


def _dot(x, w, contract=MATMUL, **options):
    return nm.dot_general(x, w, contract, **options)


OPS = {  # the call, the shapes of x, w and y, and the axes of w that it contracts and leaves
    "dot": (_dot, (16, 32), (32, 32), (16, 32), 0, 1),
    "einsum": (functools.partial(nm.einsum, "bti,io->bto"), (2, 16, 32), (32, 16), (2, 16, 16), 0, 1),
    "conv": (_conv, (2, 4, 4, 16), (3, 3, 16, 16), (2, 4, 4, 16), 2, 3),
    "two axes": (functools.partial(nm.einsum, "bthd,hdo->bto"), (2, 8, 4, 8), (4, 8, 16), (2, 8, 16), (0, 1), 2),
}
FIRST, BATCH = (((0,), (1,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
MORE = {
    "dot, first axes": (functools.partial(_dot, contract=FIRST), (32, 16), (16, 32), (16, 16), 1, 0),
    "dot, batch": (functools.partial(_dot, contract=BATCH), (3, 8, 16), (3, 16, 8), (3, 8, 8), 1, 2),
    "dot, float32 out": (_dot_wide, (16, 32), (32, 16), (16, 16), 0, 1),
    "conv, strides and groups": (_conv_cut, (2, 8, 8, 16), (3, 3, 8, 32), (2, 4, 4, 32), 2, 3),
}


def products(found: Found) -> None:
    """Record y, dx, dw and the states of every method in every operation."""
    for text, (op, case), dtype in itertools.product(METHODS, OPS.items(), DTYPES):
        if dtype != "float16" or op == "dot":  # for the sake of time
            _product(found, f"products/{text}/{op} {dtype}", nm.parse(text), case, dtype)
    for text, (op, case), dtype in itertools.product(("dense()", "s_ste()", MIX), MORE.items(), ("bfloat16",)):
        _product(found, f"products/{text}/{op} {dtype}", nm.parse(text), case, dtype)


def _product(found, name, s, case, dtype, steps=STEPS, **options):
    """Record one method in one operation."""
    call, left, right, result, contract, out = case
    if not found.wants(name):
        return

    def run(x, w, later, g, step):
        sides = {"contract": contract, "out": out}
        state = s.init(w, **sides, ctx=nm.Ctx(7))
        renewed = s.refresh(later, **sides, ctx=nm.Ctx(7, step, state))
        product = lambda x, w: call(x, w, sparsity=s, ctx=nm.Ctx(7, step, renewed), **options)
        y, vjp = jax.vjp(product, x, w)
        dx, dw = vjp(g.astype(y.dtype))
        return {"y": y, "dx": dx, "dw": dw, "init": state, "refresh": renewed}

    run = jax.jit(run)
    arrays = [normal(i, *shape, dtype=dtype) for i, shape in enumerate((left, right, right, result))]
    for step in steps:
        found.call(f"{name}/{step}", run, *arrays, jnp.int32(step))


def kernels(found: Found) -> None:
    """Record packed products in the interpreter, and packed arrays."""
    case = (_dot, (128, 128), (128, 128), (128, 128), 0, 1)
    for text, dtype in itertools.product(("s_ste(2,4)", "s_ste(fp8=True)"), DTYPES[1:]):
        _product(found, f"kernels/{text} {dtype}", nm.parse(text), case, dtype, steps=(3,), backend="interpret")
    for dtype, axis in itertools.product((*DTYPES, "float8_e4m3fn", "float8_e5m2"), (-1, -2)):
        x = nm.prune(nm.mse(2, 4), normal(0, 2, 128, 128), axis=axis).astype(dtype)
        packed = nm.pack(x, axis)
        found.put(f"kernels/pack {dtype} {axis}", [packed.values, packed.indices, packed.order, nm.unpack(packed)])
        b, scale = normal(1, 2, 128, 64).astype(dtype), jnp.array([1.0, -2.0])
        known = dtype not in ("float32", "float8_e5m2") and (dtype, axis) != ("float8_e4m3fn", -2)
        for backend in ("xla", "interpret") if known else ("xla",):
            spmm = functools.partial(nm.kernels.spmm, packed, backend=backend)
            found.call(f"kernels/spmm {backend} {dtype} {axis}", lambda b=b, spmm=spmm: spmm(b.mT, axis=-1))
            if (dtype, backend) == ("bfloat16", "interpret"):
                found.call(f"kernels/spmm scaled {dtype} {axis}", spmm, b, scale, transpose=True, dtype=jnp.float32)
    for n, m in ((1, 5), (3, 8)):
        packed = nm.pack(nm.prune(nm.mse(n, m), normal(2, 6, 40)), n=n, m=m)
        found.put(f"kernels/pack {n}:{m}", [packed.values, packed.indices, packed.order, nm.unpack(packed)])
    found.call("kernels/pack refused", nm.pack, normal(0, 4, 8))
    found.call("kernels/spmm refused", nm.kernels.spmm, normal(0, 4, 8), normal(0, 8, 4))


# ---- models ----


class Net(nnx.Module):
    """A convolution, attention, a scanned stack and a head."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 16, (3, 3), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs), in_axes=0, out_axes=0)(rngs.split(2))
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.conv(x)).reshape(x.shape[0], -1, 16)
        x = x + self.attention(x)
        layer = nnx.scan(lambda layer, x: jax.nn.relu(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(layer(self.stack, x))


def loss(model, x):
    """Return a scalar of what a model makes of x."""
    return jnp.square(model(x) - 1).mean()


RECIPES = {
    "s_ste": ((r".*", "s_ste(2,4)"),),
    "fst": ((r".*", "fst(every=2,dense_from=20)"),),
    "everything": ((r".*", MIX),),
    "several": (
        (r"conv", "sr_ste(1,4)"),
        (r"attention/(query|key)", "mdgf(2,4,linear(1,0,20)); dw_g=mvue(2,4)"),
        (r"attention/.*", "sdgf(1,4,steps=20); dx_g=rescale(mse(2,4),'group')"),
        (r"stack", "bi_mask(every=2,draws=4)"),
        (r".*", "s_ste(fp8=True)"),
    ),
}


def delivery(found: Found) -> None:
    """Record small models of flax.nnx under several recipes and seeds."""
    x = normal(0, 2, 4, 4, 4)
    for name, rules in RECIPES.items():
        recipe = nm.Recipe(rules)
        model = nm.nnx.sparsify(Net(nnx.Rngs(0)), recipe, seed=0)
        step = _step_of(model)
        for seed in (0, 5):
            nm.nnx.reseed(model, seed)
            nm.nnx.reset_state(model)
            for now, micro in ((0, 0), (3, 0), (3, 1), (4, 1), (50, 2)):
                found.put(f"nnx/{name}/seed {seed} at {now}.{micro}", step(model, x, now, micro))
        hard = nm.nnx.harden(model)
        found.put(f"nnx/{name}/hard", nnx.jit(lambda model, x: model(x))(hard, x))
        found.put(f"nnx/{name}/hard weights", nnx.state(hard, nnx.Param))
        found.put(f"nnx/{name}/scales", nm.nnx.scales(model))
        found.put(f"nnx/{name}/patterns", {path: str(pattern) for path, pattern in nm.nnx.patterns(model).items()})
        broken = nm.metrics.violations(nnx.state(hard, nnx.Param), nm.nnx.patterns(model))
        found.put(f"nnx/{name}/violations", broken)
        _planned(found, f"nnx/{name}", model, x)
    found.put("nnx/masks of a dense model", nm.nnx.masks(nm.nnx.sparsify(Net(nnx.Rngs(1)), recipe)))
    errors = jax.jit(lambda x: nm.nnx.gradient_errors(model, loss, x))
    found.put("nnx/several/gradient errors", errors(x))
    bert = lambda: nm.models.BERT(**nm.models.bert.SIZES["tiny"], vocabulary=50, length=8, classes=4, rngs=nnx.Rngs(0))
    model = nm.nnx.sparsify(bert(), nm.Recipe(((r"blocks/.*", "s_ste(2,4)"),)))
    found.put("nnx/bert", nnx.jit(lambda model, x: model(x))(model, jnp.arange(16).reshape(2, 8)))
    found.call("nnx/refused rule", lambda: nm.nnx.sparsify(bert(), nm.Recipe(((r"no/.*", "ste(2,4)"),))))
    found.call("nnx/refused m", lambda: nm.nnx.sparsify(bert(), nm.Recipe(((r".*", "ste(2,7)"),))))


def _step_of(model):
    """Return a compiled step that gives all that a model tells. What its states hold is recorded without names."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, x, now, micro):
        model = nnx.merge(graph, state, copy=True)
        nm.nnx.set_step(model, now, micro)
        value, grads = nnx.value_and_grad(loss)(nnx.clone(model), x)
        weights = {path: tuple(w) for path, w in nm.nnx.weights(model).items()}
        return nnx.split(model)[1], {"loss": value}, grads, nm.nnx.masks(model), weights

    def step(model, x, now, micro):
        after, value, grads, masks, weights = run(nnx.split(model)[1], x, jnp.int32(now), jnp.int32(micro))
        nnx.update(model, after)
        held = sorted(Found._told(v) for v in jax.tree.leaves(nnx.state(model, nm.nnx.SparsityVariable)))
        flat = lambda state: {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(state)}
        return {"grads": flat(grads), "masks": flat(masks), "weights": weights, "held": " ".join(held)} | value

    return step


def _planned(found, name, model, x):
    """Record the numbers of plans, here and as if on a GPU with sparse tensor cores."""
    small = jax.ShapeDtypeStruct(x.shape, x.dtype)
    for where in ("cpu", "NVIDIA H200"):
        if where == "cpu":
            plan = nm.nnx.plan(model, small)
        else:
            with nm.kernels.on(where):
                plan = nm.nnx.plan(model, small)
        numbers = [*plan.forward, *plan.training, *plan.over(100), plan.parameters, plan.elsewhere, len(plan.refused)]
        found.put(f"{name}/plan {where}", " ".join(map(repr, numbers)))
        found.put(f"{name}/plan {where}/runs", dict(sorted(plan.runs.items())))


def plans(found: Found) -> None:
    """Record how the products of a wide 16-bit layer would run on a GPU that is not here."""
    make = lambda: nnx.Linear(1024, 2048, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    where = "NVIDIA H200"
    for text in METHODS:
        sparse = lambda text=text: nm.nnx.sparsify(make(), nm.Recipe(((r".*", text),)))
        with nm.kernels.on(where):
            runs = lambda sparse=sparse: nm.nnx.plan(nnx.eval_shape(sparse), x).runs
            found.call(f"nnx/plan on {where}/{text}", lambda runs=runs: dict(sorted(runs().items())))


def in_linen(found: Found) -> None:
    """Record a small model of flax.linen."""
    x = normal(0, 2, 4, 4, 4)
    for name in ("s_ste", "fst", "everything"):
        recipe = nm.Recipe(RECIPES[name])

        class Model(linen.Module):
            @linen.compact
            def __call__(self, x):
                x = linen.relu(linen.Conv(16, (3, 3))(x)).reshape(2, -1, 16)
                x = linen.relu(linen.Dense(16)(x))
                return linen.Dense(8)(x)

        model, within = Model(), functools.partial(nm.linen.sparsify, recipe, seed=5)
        with within():
            variables = jax.jit(model.init)(jax.random.key(2), x)
        found.put(f"linen/{name}/paths", list(nm.linen.paths(variables)))

        @jax.jit
        def run(variables, x, now, micro, model=model, within=within):
            variables = nm.linen.set_step(variables, now, micro)
            f = lambda params: jnp.square(model.apply(variables | {"params": params}, x) - 1).mean()
            with within():
                return variables, jax.value_and_grad(f)(variables["params"])

        for now, micro in ((0, 0), (3, 0), (3, 1), (50, 2)):
            variables, made = run(variables, x, jnp.int32(now), jnp.int32(micro))
            held = sorted(Found._told(v) for v in jax.tree.leaves(variables["nm"]))
            found.put(f"linen/{name}/at {now}.{micro}", [*made, " ".join(held)])
        hard = nm.linen.harden(variables)
        with within():
            found.put(f"linen/{name}/hard", [hard["params"], model.apply(hard, x)])


# ---- optimizers, metrics, counts ----


def optim(found: Found) -> None:
    """Record transforms of optimizers, metrics, counts of FLOPs and the arithmetic of groups."""
    w = {"a": normal(0, 8, 8), "b": normal(1, 8)}
    masks = {"a": nm.groups.top(w["a"], 0, 2, 4), "b": jnp.array(True)}
    for name, tx in {
        "masked decay": optax.chain(optax.clip_by_global_norm(1.0), nm.optim.masked_decay(0.1), optax.adam(0.1)),
        "scheduled decay": nm.optim.masked_decay(nm.linear(1, 0, 3)),
        "step adam": nm.optim.step_adam(0.1, after=1, before=3),
        "step adam, geometric": nm.optim.step_adam(0.1, b2=0.9, after=1, before=3, mean="geometric", weight_decay=0.01),
    }.items():
        params, state = w, tx.init(w)
        for step in range(5):
            grads = jax.tree.map(lambda v, step=step: jnp.sin(v * (step + 1)), params)
            updates, state = tx.update(grads, state, params, masks=masks)
            params = optax.apply_updates(params, updates)
            found.put(f"optim/{name}/{step}", [updates, state])
            if name.startswith("step"):
                found.put(f"optim/{name}/{step}/since", nm.optim.since(state))
    m, x, v, g = nm.metrics, normal(2, 16, 8), normal(3, 8, 8), normal(4, 16, 8)
    later = {"a": nm.groups.top(-w["a"] + w["b"], 0, 2, 4), "b": jnp.array(True)}
    found.put("optim/density", m.density(jax.tree.map(jnp.trunc, w)))
    found.put("optim/flips", [m.sad(masks["a"], later["a"]), m.flip_rate(masks, later), m.flip_rates(masks, later)])
    found.put("optim/ties", m.ties(jnp.round(w["a"]), 2, 4, 0))
    found.put("optim/violations", [m.violations(w["a"], m.Pattern(2, 4, (0, 1))), m.gradient_variance(w)])
    found.put("optim/error", tuple(m.error(normal(5, 4, 8), w["b"])))
    for text in ("mvue(2,4)", "mse(2,4)", "uniform(2,4)"):
        p, s = nm.parse_pruner(text), nm.parse(f"dw_g={text}")
        errors = jax.jit(lambda p=p, s=s: (m.pruned_error(p, x, step=3), m.gradient_error(s, x, v, g, key=3)))
        found.put(f"optim/error of {text}", jax.tree.leaves(errors()))
    for text in METHODS:
        s = nm.parse(text)
        shares = [nm.flops.over(s, 100), nm.flops.effective(s), *(nm.flops.effective(s, step) for step in STEPS)]
        found.put(f"optim/flops of {text}", " ".join(map(repr, shares)))
    for text in PRUNERS:
        p = nm.parse_pruner(text)
        found.put(f"optim/kept by {text}", " ".join(repr(p.kept(step)) for step in (None, *STEPS)))
    for n, m in ((1, 2), (2, 4), (1, 8), (5, 16), (9, 32)):
        y = awkward(32, 32)
        mask = nm.groups.top(y, 0, n, m)
        found.put(f"optim/groups {n}:{m}", [mask, nm.groups.split(y, 1, m), nm.groups.counts(y, m, 0)])
        found.put(f"optim/groups {n}:{m}/is", nm.groups.is_nm(jnp.where(mask, 1.0, 0.0), n, m, 0))


# ---- runs and config files ----

SMOKE = ("vit_24", "vit_sste", "vit_dense", "vit_pgf", "resnet_24", "resnet_sdgp", "resnet_mvue", "gpt_24", "gpt_sste")
SMOKE += ("gpt_dense", "resnet50_imagenet", "vitb_imagenet", "gpt2_124m")
MEASURED = ("vit_24", "resnet_sdgp", "gpt_sste")  # in the others nothing is measured: it takes as long as the rest
SPECIAL = [
    f"--config.{change}" for change in (
        "sparsity.blocks=fst(2,4,every=2,dense_from=5)", "optimizer=step_adam(after=10%, before=50%)", "ema=0.9",
        "accumulate=2", "dtype=bfloat16", "masked_decay=0.0001", "measure=0",
    )
]  # fmt: skip
CLOCK = ("seconds", "per_second", "flops_per_second", "process_memory")


def runs(found: Found) -> None:
    """Record what small runs write, and the digests of their configs. Each run is a process."""
    with tempfile.TemporaryDirectory() as place:
        for name in SMOKE:
            changes = [] if name in MEASURED else ["--config.measure=0"]
            if found.wants(f"runs/{name}"):
                _ran(found, name, f"configs/{name}.py:smoke", changes, Path(place))
        _ran(found, "special", "configs/vit_24.py:smoke", SPECIAL, Path(place))


def _ran(found, name, config_file, changes, place):
    words = [
        sys.executable,
        "launch.py",
        f"--config={config_file}",
        f"--workdir={place / name}",
        "--config.steps=6",
        *changes,
    ]
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1")
    env = {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(place / "compiled")}
    done = subprocess.run(words, cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    found[f"runs/{name}/exit"] = repr(done.returncode)
    if done.returncode:
        print(f"runs/{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return
    for text in (place / name / "metrics.jsonl").read_text().splitlines():
        line = {key: value for key, value in json.loads(text).items() if key not in CLOCK}
        found[f"runs/{name}/{line['kind']} {line['step']}"] = json.dumps(line, sort_keys=True)
    config = json.loads((place / name / "config.json").read_text())
    found[f"runs/{name}/config"] = digest(config)


def digest(config: dict) -> str:
    """Return the digest of a config by which results are known to be of it."""
    fields = {name: value for name, value in _flat(config).items() if not name.startswith("mesh.")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def _flat(tree: dict, before: str = "") -> dict:
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat


CONFIG_FILES = {  # folders and the variants to try; a config file without one refuses it
    "configs": ("", "smoke", "digits", "mnist", "fashion_mnist", "cifar10", "folder"),
    "experiments/studies": ("", "cpu", "gpu", "qk_cpu", "vit_cpu", "vit_gpu", "gpt_cpu", "gpt_gpu", "sst2_cpu"),
}
LOOKING = ("descent", "dw", "noise")  # these studies have cases in the place of a config file


def configs(found: Found) -> None:
    """Record the digests of every config file and variant, and of every run of their sweeps."""
    for folder, variants in CONFIG_FILES.items():
        for file in sorted((ROOT / folder).glob("[a-z]*.py")):
            if any(made in file.read_text() for made in ("def get_config", "get_config, get_sweep")):
                for variant in variants:
                    found.call(f"configs/{folder}/{file.stem}:{variant}", _config_file, file, variant)
    for name in LOOKING:
        study = importlib.import_module(f"experiments.studies.{name}")
        for case in study.CASES:
            found.put(f"configs/looking/{name}/{json.dumps(case)}", _of(study.config(**case)))


def _config_file(file: Path, variant: str) -> dict:
    spec = importlib.util.spec_from_file_location("config_file", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(variant)
    made = {"": _of(config)}
    for change in module.get_sweep(variant) if hasattr(module, "get_sweep") else ():
        other = config.copy_and_resolve_references()
        with other.unlocked():
            other.update_from_flattened_dict(change)
        made[json.dumps(change)] = _of(other)
    return made


def _of(config) -> str:
    return digest(json.loads(json.dumps(config.to_dict())))


# ---- the command ----

SECTIONS = {
    "random": (random,), "configs": (configs,), "optim": (optim,), "linen": (in_linen,), "nnx": (delivery, plans),
    "kernels": (kernels,), "pruners": (pruners,), "products": (products,),
}  # fmt: skip


def made(only: str) -> dict[str, str]:
    """Compute all whose names begin with ``only``."""
    found, ran = Found(only), Found(only)
    with ThreadPoolExecutor(1) as beside:  # runs wait on processes of their own
        later = beside.submit(runs, ran) if found.wants("runs") else None
        for section, parts in SECTIONS.items():
            if found.wants(section):
                began, before = time.monotonic(), len(found)
                for part in parts:
                    part(found)
                print(f"{section}: {len(found) - before} names, {time.monotonic() - began:.0f} s", flush=True)
                jax.clear_caches()
        if later is not None:
            later.result()
            print(f"runs: {len(ran)} names", flush=True)
    return {name: value for name, value in (found | ran).items() if name.startswith(only)}


def main() -> int:
    """Carry out the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", metavar="PREFIX")
    asked = parser.parse_args()
    print(f"nmjax is {nm.__file__}", flush=True)
    if not Path(nm.__file__).is_relative_to(ROOT):
        sys.exit(f"nmjax is not of this tree, {ROOT}: set PYTHONPATH to it.")
    began = time.monotonic()
    if asked.command == "record":
        found = made(asked.only)
        asked.file.write_text(json.dumps(found, indent=0, sort_keys=True))
        print(f"{len(found)} names in {time.monotonic() - began:.0f} s")
        return 0
    there = {k: v for k, v in json.loads(asked.file.read_text()).items() if k.startswith(asked.only)}
    here = made(asked.only)
    bad = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    for name in bad:
        how = "missing here" if name not in here else "new here" if name not in there else "differs"
        print(f"{how}: {name}\n    there {there.get(name, '')[:200]}\n    here  {here.get(name, '')[:200]}")
    print(f"{len(bad)} of {len(there | here)} names differ, in {time.monotonic() - began:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
