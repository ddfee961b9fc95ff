"""The programs that `experiments.bench.compiled` compiles for devices that need not be there.

They prune by XLA alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

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


def step(text: str, dtype: Any = jnp.bfloat16) -> Case:
    """Return the forward and backward pass of a feed-forward block with a method: the gradients of w1, w2 and x."""
    sparsity = nm.parse(text)
    shape = partial(jax.ShapeDtypeStruct, dtype=dtype)
    up, down = shape((WIDTH, 4 * WIDTH)), shape((4 * WIDTH, WIDTH))
    state = lambda w: jax.eval_shape(partial(sparsity.init, contract=0, out=1), w)

    def loss(w1: Any, w2: Any, x: Any, keys: Any, now: Any, states: Any) -> jax.Array:
        first, second = (nm.Ctx(key=keys[i], step=now, state=states[i]) for i in (0, 1))
        product = partial(nm.einsum, "ti,io->to", sparsity=sparsity, backend="xla")
        y = product(jax.nn.gelu(product(x, w1, ctx=first)), w2, ctx=second)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    keys, now = jax.ShapeDtypeStruct((2, 2), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    return jax.grad(loss, (0, 1, 2)), (up, down, shape((TOKENS, WIDTH)), keys, now, (state(up), state(down)))
