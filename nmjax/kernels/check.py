"""The check before use: kernels are run on small arrays with known results before a program uses them.

If positions are in a wrong order, a network trains on wrong values, and no error appears. The check reports each kind
of kernel separately: products in FP8 may be wrong where those of 16 bits are right. It runs in a process of its own,
because a kernel that crashes makes the device unusable for its process. A file in the cache folder keeps what it
finds, so that later processes do not check again.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from nmjax.core.context import Ctx
from nmjax.core.pruner import Pruner
from nmjax.core.refusal import Refusal
from nmjax.kernels import calls, measured, tuning
from nmjax.kernels.family import Config, Shape, Target
from nmjax.kernels.format import pack
from nmjax.kernels.limits import FAMILIES, Copy, family_of
from nmjax.kernels.targets import target as target_of
from nmjax.pruners import identity, mse, mvue, transposable

LAST, BEFORE, NOISE, BOTH, ACTIVATED, FP8_FORMS, FP8 = (
    "packing along the last axis", "packing along the axis before the last", "packing with noise",
    "packing along both axes", "packing with an activation's derivative", "packing in FP8", "multiplying in FP8",
)  # fmt: skip


def fault(target: Target, kinds: Iterable[str]) -> Refusal | None:
    """Return what is wrong with kernels of some kinds on a device, or None if nothing is.

    It is also None for simulated kernels, and for a device that this machine does not have.

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
    wrong = findings(replace(target, devices=1), device)
    said = [f"{kind} {wrong[kind]}" for kind in kinds if kind in wrong]
    if not said:
        return None
    refusal = Refusal(f"on {target.kind}, {'; '.join(said)}. Please report it")
    if jax.process_count() > 1:
        hint = "Until it is fixed, run all processes with backend='xla'."
        raise RuntimeError(f"process {jax.process_index()}: {refusal}. {hint}")
    return refusal


def product_fault(target: Target, shape: Shape, pruner: Pruner) -> Refusal | None:
    """Return what is wrong with the kernels of a product, or None if nothing is.

    Args:
      target: The device.
      shape: The product.
      pruner: The pruner of the packed operand.
    """
    tiling = tuning.chosen(shape, target)
    return fault(target, kinds_of(shape, pruner, None if tiling is None else tiling.config))


def kinds_of(shape: Shape | None, pruner: Pruner = identity, config: Config | None = None) -> tuple[str, ...]:
    """Return the kinds of kernels that a product uses.

    >>> kinds_of(Shape(128, 128, 128, m_major=True), mvue(2, 4))
    ('multiplying (A along M)', 'packing along the axis before the last', 'packing with noise')

    Args:
      shape: The product, with one operand packed. None for dense FP8 operands.
      pruner: The pruner of the packed operand.
      config: The tiles of the product.
    """
    if shape is None:
        return (FP8_FORMS,)
    own = () if config is None else family_of(config).own_kinds(config)
    if shape.itemsize == 1:
        return (FP8, FP8_FORMS, *own)
    kinds = layout_kind(shape), BEFORE if shape.m_major else LAST
    return kinds + (NOISE,) * pruner.facts.stochastic + (BOTH,) * (pruner.kernel_form.tile is not None) + own


def layout_kind(shape: Shape) -> str:
    """Return the kind of kernel that multiplies 16-bit operands of this layout."""
    said = {"A along M": shape.m_major, "B along N": shape.n_major, "transposed": shape.transpose}
    return f"multiplying ({', '.join(name for name, so in said.items() if so) or 'along K'})"


@lru_cache
def findings(target: Target, device: jax.Device) -> Mapping[str, str]:
    """Return what is wrong with the kernels on a device of this machine, by kind."""
    path = _kept(device)
    with contextlib.suppress(OSError, ValueError):  # there is no file, or it is cut off
        return json.loads(path.read_text())
    wrong = check_apart(target, "pallas", device.local_hardware_id or 0)
    if not any(text.startswith(NOT_CHECKED) for text in wrong.values()):
        with contextlib.suppress(OSError):  # a cache folder that cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}.part")  # several processes may end at the same time
            draft.write_text(json.dumps(wrong))
            draft.replace(path)
    return wrong


def _kept(device: jax.Device) -> Path:
    """Return the file that keeps the findings for a kind of device, CUDA, the version of JAX, and this code."""
    seen = [device.device_kind, device.client.platform_version, jax.__version__, jaxlib.__version__, code()]
    digest = hashlib.sha256("\0".join(seen).encode()).hexdigest()[:16]
    return measured.own_tables().parent / "checked" / f"{measured.slug(device.device_kind)}_{digest}.json"


@lru_cache
def code() -> str:
    """Return a digest of the Python files of nmjax."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


# ---- in processes of their own ----

NOT_CHECKED = "could not be checked: its process"
_STARTED = "started"  # the first line of a process, once the device works


def check_apart(target: Target, backend: str, hardware: int) -> dict[str, str]:
    """Check all kinds in a process of its own, and return what is wrong, by kind.

    A kind that is wrong there, or that the process does not reach, is checked in a process without the others: a kernel
    that writes where it should not may spoil their results.
    """
    kinds = list(cases(target))
    found, ended = _in_a_process(backend, hardware, kinds, 300)
    if _STARTED not in found:
        return dict.fromkeys(kinds, f"{NOT_CHECKED} {ended}")
    for kind in kinds:
        if found.get(kind) != "":
            alone, ended = _in_a_process(backend, hardware, [kind], 60)
            found[kind] = alone.get(kind, ended)
    return {kind: found[kind] for kind in kinds if found[kind]}


def _in_a_process(backend: str, hardware: int, kinds: Sequence[str], seconds: float) -> tuple[dict[str, str], str]:
    """Check kinds in one process. Return what is wrong by kind, empty if nothing is, and how the process ended."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process may hold most of the memory
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    environment |= {"CUDA_VISIBLE_DEVICES": visible.split(",")[hardware] if visible else f"{hardware}"}
    platforms = jax.config.jax_platforms  # pyrefly: ignore[missing-attribute]
    environment |= {"JAX_PLATFORMS": f"{platforms}"} if platforms else {}
    command = [sys.executable, "-c", "from nmjax.kernels import check; check.main()", backend, *kinds]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as run:
        try:
            out, errors = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.kill()
            out, ended = run.communicate()[0], f"did not end within {seconds:.0f} s"
        else:
            last = (errors.strip().splitlines() or [""])[-1][:200]
            how = f"signal {-run.returncode}" if run.returncode < 0 else f"exit code {run.returncode}"
            ended = f"failed with {how}: {last}" if last else f"failed with {how}"
    lines = [line for line in out.splitlines(keepends=True) if line.startswith("[") and line.endswith("\n")]
    return dict(json.loads(line) for line in lines), ended


def main() -> None:
    """Check the kinds that the command line names, and print each with what is wrong as soon as it is known."""
    backend, *kinds = sys.argv[1:]
    jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
    print(json.dumps([_STARTED, ""]), flush=True)
    target = target_of(backend)
    assert isinstance(target, Target), target
    found = cases(replace(target, devices=1))
    with ThreadPoolExecutor(4) as threads:  # most of their time is compilation
        for kind, right in zip(kinds, threads.map(lambda kind: found[kind](), kinds), strict=True):
            print(json.dumps([kind, "" if right else "gives wrong numbers"]), flush=True)


# ---- the cases ----


def cases(target: Target) -> dict[str, Callable[[], bool]]:
    """Return for each kind a function that returns whether its kernels are right."""
    packing = partial(_packs, target=target)
    found: dict[str, Callable[[], bool]] = {
        LAST: partial(packing, mse(2, 4), -1),
        BEFORE: partial(packing, mse(2, 4), -2),
    }
    found |= {NOISE: partial(packing, mvue(2, 4), -2), BOTH: partial(_packs_both, target)}
    found |= {ACTIVATED: partial(_packs_activated, target)}
    m, n, k = 128 * (target.cores + 2), 512, 640  # more tiles than cores, and more steps along K than a ring has slots
    for m_major, n_major, transpose in product((False, True), repeat=3):
        shape = Shape(m, n, k, "bfloat16", m_major, n_major, transpose)
        found[layout_kind(shape)] = partial(_multiplies, shape, target)
    family = FAMILIES[target.family]
    found |= {kind: partial(_multiplies, of, target, config) for kind, (of, config) in family.own_cases().items()}
    if family.fp8:
        found |= {FP8_FORMS: partial(_packs_in_fp8, target), FP8: partial(_multiplies_in_fp8, target)}
    return found


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.bfloat16)


def _packs(p: Pruner, axis: int, target: Target) -> bool:
    x = _normal(256, 512)
    return _same(calls.compress(x, axis, p, key=3, target=target), pack(p(x, axis, Ctx(key=3)), axis))


def _packs_activated(target: Target) -> bool:
    h, g = _normal(256, 512), _normal(512, 256).T
    made, packed = calls.compress_activated(jax.nn.gelu, h, g, mse(2, 4), target=target)
    wanted = _exact(jax.vjp(jax.nn.gelu, h.astype(jnp.float32))[1](g.astype(jnp.float32))[0])
    close = np.abs(_exact(made) - wanted).max() < 0.01 * np.abs(wanted).max()
    return bool(close) and _same(packed, pack(mse(2, 4)(made, -2), -2))


def _packs_both(target: Target) -> bool:
    x = _normal(256, 512)
    for p in (transposable(2, 4), mvue(2, 4)):
        wanted = tuple(Copy(None, packed=True, pruner=p, axis=axis) for axis in (-1, -2))
        made = calls.copies(x, wanted, keys=[(3, None), (4, None)], target=target)
        if not _same(made, [calls.copy_by_xla(x, copy, key) for copy, key in zip(wanted, (3, 4), strict=True)]):
            return False
    return True


def _same(a: object, b: object) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((np.asarray(p) == np.asarray(q)).all() for p, q in pairs)


def _multiplies(shape: Shape, target: Target, config: Config | None = None) -> bool:
    a, b = mse(2, 4)(_normal(shape.m, shape.k)), _normal(shape.n, shape.k)
    packed = pack(a.T, -2) if shape.m_major else pack(a)
    b = b.T if shape.n_major else b
    y = calls.run(packed, b, None, shape=shape, target=target, config=config)
    axis = -2 if shape.n_major else -1
    wanted = _exact(calls.reference(packed, b, axis=axis, transpose=shape.transpose, dtype=jnp.float32))
    return bool(np.abs(_exact(y) - wanted).max() < 0.01 * np.abs(wanted).max())


def _packs_in_fp8(target: Target) -> bool:
    x = _normal(256, 512)
    wanted = (
        Copy("e4m3", packed=True, pruner=mse(2, 4)),
        Copy("e5m2", turned=True, packed=True, pruner=mvue(2, 4), axis=-2, rounding="random"),
        Copy("e5m2", turned=True),
    )
    keys = [(3 + i, 7 + i) for i in range(len(wanted))]
    made = calls.copies(x, wanted, keys=keys, target=target)
    return _same(made, [calls.copy_by_xla(x, copy, *own) for copy, own in zip(wanted, keys, strict=True)])


def _multiplies_in_fp8(target: Target) -> bool:
    """Multiply values of both formats. XLA packs them, and the sums are those of more tiles than a device has cores."""
    m, n, k = 128 * (target.cores + 2), 512, 1280
    a, b = mse(2, 4)(_normal(m, k)).astype("float8_e4m3fn"), _normal(n, k).astype("float8_e5m2")
    shape = Shape(m, n, k, "float8_e4m3fn", transpose=True)
    packed = pack(a)
    y = calls.run(packed, b, None, shape=shape, target=target)
    wanted = _exact(calls.reference(packed, b, axis=-1, transpose=True, dtype=jnp.float32))
    return bool(np.abs(_exact(y) - wanted).max() < 0.01 * np.abs(wanted).max())


def _exact(v: jax.Array) -> np.ndarray:
    return np.asarray(v, np.float64)
