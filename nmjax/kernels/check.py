"""The check before use: kernels work on small known arrays on a device before anything else runs there.

A wrong order of positions would train a network on garbage without a word. The check tells kind by kind what is wrong:
products in FP8 may be wrong where those of 16 bits are right. It runs in a process of its own, because a kernel that
crashes makes the device unusable for its process. It takes some seconds, when a product is about to be packed for the
first time. If all is right, a file in the cache folder says so, and later processes do not check again.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.refusal import Refusal
from nmjax.kernels import calls, measured
from nmjax.kernels.format import Packed, pack
from nmjax.kernels.limits import Copy, Shape
from nmjax.kernels.targets import Target, target as target_of
from nmjax.pruners import identity, mse, mvue, transposable

LAST, BEFORE, NOISE, BOTH, FP8 = (
    "packing along the last axis", "packing along the axis before", "packing with noise", "packing along both axes",
    "FP8",
)  # fmt: skip


def fault(target: Target, kinds: Iterable[str]) -> Refusal | None:
    """Return what is wrong with kernels of some kinds on a device, or None if nothing is.

    It is None also for simulated kernels, and for a device that is absent, which kernels are only compiled for.

    Args:
      target: The device.
      kinds: The kinds, as `kinds_of` gives them.

    Raises:
      RuntimeError: If something is wrong and several processes work together: the others would wait for this one.
    """
    if target.interpret:
        return None
    device = next((d for d in jax.local_devices() if d.device_kind == target.kind), None)
    if device is None:
        return None
    wrong = findings(target, device)
    said = [f"{kind} {wrong[kind]}" for kind in kinds if kind in wrong]
    if not said:
        return None
    refusal = Refusal(f"on {target.kind}, {'; '.join(said)}: please report it")
    if jax.process_count() > 1:
        raise RuntimeError(f"process {jax.process_index()}: {refusal}. Or run all processes with backend='xla'.")
    return refusal


def kinds_of(shape: Shape | None, pruner: Pruner = identity) -> tuple[str, ...]:
    """Return the kinds of kernels that a product uses.

    >>> kinds_of(Shape(128, 128, 128, m_major=True), mvue(2, 4))
    ('products (A along M)', 'packing along the axis before', 'packing with noise')

    Args:
      shape: The product, with one operand packed. None for dense FP8 operands.
      pruner: The pruner of the packed operand.
    """
    if shape is None or shape.itemsize == 1:
        return (FP8,)
    kinds = _layout(shape), BEFORE if shape.m_major else LAST
    return kinds + (NOISE,) * pruner.stochastic + (BOTH,) * pruner.has_prune_tile


def _layout(shape: Shape) -> str:
    said = {"A along M": shape.m_major, "B along N": shape.n_major, "transposed": shape.transpose}
    return f"products ({', '.join(name for name, so in said.items() if so) or 'along K'})"


@lru_cache
def findings(target: Target, device: jax.Device) -> Mapping[str, str]:
    """Return what is wrong with the kernels on a device of this machine, by kind."""
    mark = _mark(device)
    if mark.exists():
        return {}
    wrong = check_apart(target, "pallas", device.local_hardware_id or 0)
    if not wrong:
        with contextlib.suppress(OSError):  # a cache folder that cannot be written
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return wrong


def _mark(device: jax.Device) -> Path:
    """Return the file that says that all is right with a kind of device, its driver, JAX and this code."""
    package = Path(__file__).parent.parent
    seen = [device.device_kind, device.client.platform_version, jax.__version__]
    seen += [path.read_text() for path in sorted(package.rglob("*.py"))]
    digest = hashlib.sha256("\0".join(seen).encode()).hexdigest()[:16]
    return measured.own_tables().parent / "checked" / f"{measured.slug(device.device_kind)}_{digest}"


# ---- in processes of their own ----


def check_apart(target: Target, backend: str, hardware: int) -> dict[str, str]:
    """Check all kinds in a process of its own, and return what is wrong, by kind.

    If the process fails, each kind that it did not come to is checked again, alone.
    """
    kinds = list(cases(target))
    found, _ = _in_a_process(backend, hardware, kinds, 300)
    for kind in kinds:
        if kind not in found:
            alone, ended = _in_a_process(backend, hardware, [kind], 60)
            found[kind] = alone.get(kind, f"{ended}")
    return {kind: found[kind] for kind in kinds if found[kind]}


def _in_a_process(backend: str, hardware: int, kinds: Sequence[str], seconds: float) -> tuple[dict[str, str], str]:
    """Check kinds in one process. Return what is wrong by kind, empty if nothing is, and how the process ended."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process may hold most of the memory
    platforms = jax.config.jax_platforms  # pyrefly: ignore[missing-attribute]
    environment |= {"JAX_PLATFORMS": f"{platforms}"} if platforms else {}
    command = [sys.executable, "-c", "from nmjax.kernels import check; check.main()", backend, str(hardware), *kinds]
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds, check=False)
        out, failed = run.stdout, f"failed with exit code {run.returncode}"
        if run.returncode < 0:
            failed = f"failed with signal {-run.returncode}"
        last = (run.stderr.strip().splitlines() or [""])[-1][:200]
        ended = f"{failed}: {last}" if last else failed
    except subprocess.TimeoutExpired as late:
        out, ended = (late.stdout or b"").decode(), f"did not end within {seconds:.0f} s"
    lines = [line for line in out.splitlines(keepends=True) if line.startswith("[") and line.endswith("\n")]
    return dict(json.loads(line) for line in lines), ended


def main() -> None:
    """Check the kinds that the command line names, and print each with what is wrong as soon as it is known."""
    backend, hardware, *kinds = sys.argv[1:]
    target = target_of(backend)
    assert isinstance(target, Target), target
    device = next((d for d in jax.local_devices() if str(d.local_hardware_id) == hardware), None)
    jax.config.update("jax_default_device", device)  # for all threads
    with ThreadPoolExecutor(4) as threads:  # of which most of the time compile
        for kind, right in zip(kinds, threads.map(lambda kind: cases(target)[kind](), kinds), strict=True):
            print(json.dumps([kind, "" if right else "gives wrong numbers"]), flush=True)


# ---- the cases ----


def cases(target: Target) -> dict[str, Callable[[], bool]]:
    """Return for each kind a function that returns whether its kernels are right."""
    packing = partial(_packs, target=target)
    found = {LAST: partial(packing, mse(2, 4), -1), BEFORE: partial(packing, mse(2, 4), -2)}
    found |= {NOISE: partial(packing, mvue(2, 4), -2), BOTH: partial(_packs_both, target)}
    m, n, k = 128 * (target.cores + 2), 512, 640  # more tiles than cores, and more steps along K than a ring has slots
    for m_major, n_major, transpose in product((False, True), repeat=3):
        shape = Shape(m, n, k, "bfloat16", m_major, n_major, transpose)
        found[_layout(shape)] = partial(_multiplies, shape, target)
    return found | ({FP8: partial(_multiplies_in_fp8, target)} if target.family != "ampere" else {})


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.bfloat16)


def _packs(p: Pruner, axis: int, target: Target) -> bool:
    x = _normal(256, 512)
    return _same(calls.compress(x, axis, p, key=3, target=target), pack(p(x, axis, Ctx(key=3)), axis))


def _packs_both(target: Target) -> bool:
    x, p = _normal(256, 512), transposable(2, 4)
    return _same(calls.compress_both(x, p, target=target), (pack(p(x), -1), pack(p(x), -2)))


def _same(a: object, b: object) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((np.asarray(p) == np.asarray(q)).all() for p, q in pairs)


def _multiplies(shape: Shape, target: Target) -> bool:
    a, b = mse(2, 4)(_normal(shape.m, shape.k)), _normal(shape.n, shape.k)
    packed = pack(a.T, -2) if shape.m_major else pack(a)
    b = b.T if shape.n_major else b
    y = calls.run(packed, b, None, shape=shape, target=target)
    axis = -2 if shape.n_major else -1
    wanted = _exact(calls.reference(packed, b, axis=axis, transpose=shape.transpose, dtype=jnp.float32))
    return bool(np.abs(_exact(y) - wanted).max() < 0.01 * np.abs(wanted).max())


def _multiplies_in_fp8(target: Target) -> bool:
    x, b = _normal(256, 512), _normal(512, 256)
    ((a, undo_a),) = calls.copies(x, (Copy("e4m3", packed=True, pruner=mse(2, 4)),), target=target)
    ((c, undo_c),) = calls.copies(b, (Copy("e5m2", turned=True),), target=target)
    assert isinstance(a, Packed)
    assert isinstance(c, jax.Array)
    shape = Shape(256, 256, 512, "float8_e4m3fn", transpose=True)
    y = calls.run(a, c, undo_a * undo_c, shape=shape, target=target)
    wanted = _exact(mse(2, 4)(x)) @ _exact(b)
    return bool(np.abs(_exact(y).T - wanted).max() < 0.1 * np.abs(wanted).max())


def _exact(v: jax.Array) -> np.ndarray:
    return np.asarray(v, np.float64)
