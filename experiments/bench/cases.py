"""The programs that `experiments.bench.compiled` and `experiments.bench.tpu` compile for devices that are not there."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import nmjax as nm

PRUNERS = (
    "mse(2,4)", "mvue(2,4)", "soft(2,4)", "transposable(2,4)", "mvue_approx(2,4)", "uniform(2,4)", "mse(8,16)",
)  # fmt: skip
METHODS = (
    "dense", "ste(2,4)", "dw_g=mvue(2,4)", "ste(2,4); dw_g=mvue(2,4)", "y_w=ste(transposable(2,4))", "s_ste(2,4)",
    "dw_g=rows(mvue(1,4))", "mdgf(2,4,linear(1,0,100))", "sr_ste(2,4)",
)  # fmt: skip
SIDES = (4096, 8192)  # of a pruned array
TOKENS, WIDTH = 4096, 2048  # of a feed-forward step
COLUMNS = [(dtype, axis) for dtype in (jnp.bfloat16, jnp.float32) for axis in (-2, -1)]

Case = tuple[Callable, tuple[Any, ...]]
"""A function, and the shapes of its arguments."""


def arrays() -> Iterator[tuple[str, list[Case]]]:
    """Yield for every pruner a case for each of `COLUMNS`: an array is the first argument, and a key the second."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    for text in PRUNERS:
        prune = lambda x, key, axis, p: p(x, axis, nm.Ctx(key=key))
        p = nm.parse_pruner(text)
        yield text, [(partial(prune, axis=axis, p=p), (jax.ShapeDtypeStruct(SIDES, d), key)) for d, axis in COLUMNS]


def step(text: str, backend: str = "xla", mesh: Mesh | None = None) -> Case:
    """Return the gradients of a feed-forward block in bfloat16, 2048 -> 8192 -> 2048, and their arguments.

    It has 4096 tokens, and 4096 for each part of the batch on a mesh ("fsdp", "tensor"). There both weights are cut
    along both axes, and are gathered along "fsdp" before they are used.
    """
    sparsity = nm.parse(text)
    spec = lambda *axes: {} if mesh is None else {"sharding": NamedSharding(mesh, P(*axes))}
    gathered = (lambda w, *axes: w) if mesh is None else (lambda w, *axes: jax.reshard(w, P(*axes)))
    out = lambda *axes: {} if mesh is None else {"out_sharding": P(*axes)}
    tokens = TOKENS * (1 if mesh is None else mesh.shape["fsdp"])

    def loss(up: jax.Array, down: jax.Array, x: jax.Array, keys: jax.Array, states: Any, step: jax.Array) -> jax.Array:
        ctx = [nm.Ctx(key, step, state) for key, state in zip(keys, states, strict=True)]
        how = {"sparsity": sparsity, "backend": backend}
        up, down = gathered(up, None, "tensor"), gathered(down, "tensor", None)
        h = jax.nn.gelu(nm.einsum("td,df->tf", x, up, ctx=ctx[0], **how, **out("fsdp", "tensor")))
        y = nm.einsum("tf,fd->td", h, down, ctx=ctx[1], **how, **out("fsdp", None))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    up = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.bfloat16, **spec("fsdp", "tensor"))
    down = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.bfloat16, **spec("tensor", "fsdp"))
    plain = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in (up, down)]
    states = [jax.eval_shape(lambda w: sparsity.init(w, contract=0, out=1), w) for w in plain]
    x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16, **spec("fsdp", None))
    keys, now = jax.ShapeDtypeStruct((2, 2), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    return jax.grad(loss, (0, 1, 2)), (up, down, x, keys, states, now)
