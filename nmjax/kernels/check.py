"""Trust, but verify: kernels multiply small known arrays on a device before anything else is multiplied by them there.

A wrong order of positions would train a network on garbage without a word. The check takes some seconds of compilation,
once a process, when first a product is to be packed.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.core.context import Ctx
from nmjax.kernels import api
from nmjax.kernels.copies import Copy
from nmjax.kernels.format import Packed, pack
from nmjax.kernels.targets import Target
from nmjax.pruners import mse, mvue


@lru_cache
def fault(here: Target) -> str | None:
    """What is wrong with the kernels on this device; None if nothing is, or the device is not there and they are only
    compiled for it. Where several processes work together, what is wrong with one of them ends them all."""
    device = next((d for d in jax.local_devices() if d.device_kind == here.kind), None)
    found = None if device is None else broken(here, device)
    if found and jax.process_count() > 1:
        raise RuntimeError(f"process {jax.process_index()}: {found}. Or run all processes with backend='xla'.")
    return found


def broken(here: Target, device=None) -> str | None:
    """What is wrong with the kernels, as far as they tell it themselves."""

    def wrong_ones():
        with jax.default_device(device):
            return [name for name, right in _cases(here) if not right]

    try:
        with ThreadPoolExecutor(1) as thread:  # which knows nothing of a trace that this one may be in
            wrong = thread.submit(wrong_ones).result()
    except Exception as error:  # whatever compilers and drivers raise: without kernels all of it still runs
        return f"its kernels do not run on {here.kind}: {type(error).__name__}: {str(error)[:200]}"
    return f"its kernels give wrong numbers on {here.kind} ({', '.join(wrong)}): please report it" if wrong else None


def _cases(here: Target):
    """(what, whether it is right) of pruning, packing and products, each against plain arithmetic."""
    draw = np.random.default_rng(0)
    x, b = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in ((256, 512), (512, 256)))
    for axis, p in ((-1, mse(2, 4)), (-2, mvue(2, 4))):
        made = api.compress(x, axis, p, key=3, here=here)
        wanted = pack(p(x, axis, Ctx(key=3)), axis)
        yield f"packing by {p}", _same(made, wanted)
        yield f"a product along axis {axis}", _close(wanted, b if axis == -1 else x, axis, here)
    m, n, k = 128 * (here.cores + 2), 512, 320  # tiles more than one a core, of five steps: a ring of four begins anew
    a, c = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in ((m, k), (n, k)))
    yield "a product of many tiles", _close(pack(mse(2, 4)(a)), c.T, -1, here)
    if here.family == "hopper":
        ((a, undo_a),) = api.copies(x, (Copy("e4m3", packed=True, pruner=mse(2, 4)),), here=here)
        ((c, undo_c),) = api.copies(b, (Copy("e5m2", turned=True),), here=here)
        shape = api.shape_of(a, c, -1, True, jnp.dtype(jnp.bfloat16))
        y = api.run(a, c, undo_a * undo_c, shape=shape, here=here)
        wanted = _exact(mse(2, 4)(x)) @ _exact(b)
        yield "a product in FP8", np.abs(_exact(y).T - wanted).max() < 0.1 * np.abs(wanted).max()


def _exact(v):
    return np.asarray(v, np.float64)


def _same(a: Packed, b: Packed) -> bool:
    return all(
        (np.asarray(p) == np.asarray(q)).all() for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _close(a: Packed, b, axis, here) -> bool:
    """Of one with both operands along k and a plain result, and of one with neither and a transposed result."""
    turned = axis == -2
    b = b if turned else b.T
    shape = api.shape_of(a, b, axis, turned, jnp.dtype(jnp.bfloat16))
    y = api.run(a, b, None, shape=shape, here=here)
    wanted = _exact(api.reference(a, b, axis=axis, transpose=turned, dtype=jnp.float32))
    return bool(np.abs(_exact(y) - wanted).max() < 0.01 * np.abs(wanted).max())
