"""The check before use: kernels multiply small known arrays on a device before anything else is multiplied there.

A wrong order of positions would train a network on garbage without a word. The check takes some seconds of compilation,
once per process, when a product is about to be packed for the first time.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.core.context import Ctx
from nmjax.core.refusal import Refusal
from nmjax.kernels import calls
from nmjax.kernels.format import Packed, pack
from nmjax.kernels.limits import Copy, shape_of
from nmjax.kernels.targets import Target
from nmjax.pruners import mse, mvue


@lru_cache
def fault(target: Target) -> Refusal | None:
    """Return what is wrong with the kernels on a device, or None if nothing is.

    It is None also for simulated kernels, and for a device that is absent, which kernels are only compiled for.

    Raises:
      RuntimeError: If something is wrong and several processes work together: the others would wait for this one.
    """
    if target.interpret:
        return None
    device = next((d for d in jax.local_devices() if d.device_kind == target.kind), None)
    refusal = None if device is None else broken(target, device)
    if refusal is not None and jax.process_count() > 1:
        raise RuntimeError(f"process {jax.process_index()}: {refusal}. Or run all processes with backend='xla'.")
    return refusal


def broken(target: Target, device: jax.Device | None = None) -> Refusal | None:
    """Run the kernels on a device and return what is wrong with them, or None if nothing is."""

    def wrong_cases() -> list[str]:
        with jax.default_device(device):
            return [name for name, right in _cases(target) if not right]

    try:
        with ThreadPoolExecutor(1) as thread:  # which knows nothing of a trace that this one may be in
            wrong = thread.submit(wrong_cases).result()
    except Exception as error:  # whatever compilers and drivers raise: without kernels everything still runs
        return Refusal(f"its kernels do not run on {target.kind}: {type(error).__name__}: {str(error)[:200]}")
    if wrong:
        return Refusal(f"its kernels give wrong numbers on {target.kind} ({', '.join(wrong)}): please report it")
    return None


def _cases(target: Target) -> Iterator[tuple[str, bool]]:
    """Check pruning, packing and products against plain arithmetic, each with a name."""
    draw = np.random.default_rng(0)
    x, b = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in ((256, 512), (512, 256)))
    for axis, p in ((-1, mse(2, 4)), (-2, mvue(2, 4))):
        packed = calls.compress(x, axis, p, key=3, target=target)
        wanted = pack(p(x, axis, Ctx(key=3)), axis)
        yield f"packing by {p}", _same(packed, wanted)
        yield f"a product along axis {axis}", _close(wanted, b if axis == -1 else x, axis, target)
    m, n, k = 128 * (target.cores + 2), 512, 320  # more tiles than cores, of five steps: a ring of four starts over
    a, c = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in ((m, k), (n, k)))
    yield "a product of many tiles", _close(pack(mse(2, 4)(a)), c.T, -1, target)
    if target.family == "hopper":
        yield "a product in FP8", _close_in_fp8(x, b, target)


def _same(a: Packed, b: Packed) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((np.asarray(p) == np.asarray(q)).all() for p, q in pairs)


def _close(a: Packed, b: jax.Array, axis: int, target: Target) -> bool:
    """Check a product: along axis -1 with both operands along k, along -2 with neither and a transposed result."""
    turned = axis == -2
    b = b if turned else b.T
    shape = shape_of(a, b, axis, turned, jnp.bfloat16)
    y = calls.run(a, b, None, shape=shape, target=target)
    wanted = _exact(calls.reference(a, b, axis=axis, transpose=turned, dtype=jnp.float32))
    return bool(np.abs(_exact(y) - wanted).max() < 0.01 * np.abs(wanted).max())


def _close_in_fp8(x: jax.Array, b: jax.Array, target: Target) -> bool:
    ((a, undo_a),) = calls.copies(x, (Copy("e4m3", packed=True, pruner=mse(2, 4)),), target=target)
    ((c, undo_c),) = calls.copies(b, (Copy("e5m2", turned=True),), target=target)
    assert isinstance(a, Packed)
    assert isinstance(c, jax.Array)
    y = calls.run(a, c, undo_a * undo_c, shape=shape_of(a, c, -1, True, jnp.bfloat16), target=target)
    wanted = _exact(mse(2, 4)(x)) @ _exact(b)
    return bool(np.abs(_exact(y).T - wanted).max() < 0.1 * np.abs(wanted).max())


def _exact(v: jax.Array) -> np.ndarray:
    return np.asarray(v, np.float64)
