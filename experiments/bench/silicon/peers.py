"""The speed of cuSPARSELt, through torch, beside XLA's products and ours."""

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax

from experiments.bench import tune
from experiments.bench.measure import in_short, in_turn, over, ratio
from nmjax.kernels import tuning
from nmjax.kernels.limits import Shape, product_refusal
from nmjax.kernels.targets import Target


def peer(shape: Shape, device: Target) -> str:
    """Time the products of cuSPARSELt and torch, of squares in bfloat16 or FP8, beside XLA's and ours."""
    if device.interpret:
        return "not run: the kernels are interpreted"
    torch = import_module("torch") if importlib.util.find_spec("torch") else None
    if torch is not None and torch.cuda.is_available():
        calls, note = _by_torch(torch, shape.m, "bf16" if shape.itemsize == 2 else "FP8")
        synchronize = torch.cuda.synchronize
    else:
        calls, note, synchronize = {}, "PyTorch sees no GPU" if torch else "PyTorch is not installed", lambda: None
    pool = tune.Pool([shape])
    calls["XLA dense"] = partial(tune.dense(shape, device), [pool.pair(shape, False)])
    refusal, tiling = product_refusal(shape, device), tuning.chosen(shape, device)
    if refusal is None and tiling is not None:
        calls["ours"] = partial(tune.packed(shape, device, tiling.config), [pool.pair(shape)])
    wait = lambda result: (jax.block_until_ready(result), synchronize())
    times = in_turn(calls, 9, wait=wait)
    said = ", ".join(f"{name} {statistics.median(each) * 1e3:.3f} ms" for name, each in times.items())
    if "ours" in times:
        said += f"; ours {over(times['XLA dense'], times['ours'])} times as fast as XLA's"
    if times.keys() >= {"ours", "cuSPARSELt"}:
        said += f", and {ratio(times['cuSPARSELt'], times['ours']):.2f} times as fast as cuSPARSELt"
    return f"right: {said}; cuSPARSELt: {note}" + (f"; ours: {refusal}" if refusal else "")


def _by_torch(torch: Any, n: int, kind: str) -> tuple[dict[str, Callable[[], Any]], str]:
    """Return torch's dense and sparse product of random values, and a note on the sparse one, which may be missing.

    torch plans cuSPARSELt's product again at each call. This may take longer than the product, so only its kernels are
    recorded, and run again.
    """
    draw = torch.Generator("cuda").manual_seed(n)
    dense, w, x = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16, generator=draw) for _ in range(3))
    kept = torch.rand(n, n // 4, 4, device="cuda", generator=draw).argsort(-1).argsort(-1) < 2
    w, out = w * kept.view(n, n), None
    times = lambda a: a @ x.t()
    if kind == "FP8":
        dense, w, x = (v.to(torch.float8_e4m3fn) for v in (dense, w, x))
        one, out = torch.ones((), device="cuda"), torch.bfloat16
        times = lambda a: torch._scaled_mm(a, x.t(), scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=True)
    calls = {"torch dense": partial(times, dense)}
    try:
        compressed, graph = torch._cslt_compress(w), torch.cuda.CUDAGraph()
        algorithm = torch._C._cusparselt.mm_search(compressed, x.t(), None, None, out, False)[:3]
        sparse = partial(torch._cslt_sparse_mm, compressed, x.t(), None, None, out, False, *algorithm)
        y, wanted = sparse().float(), times(w).float()
        with torch.cuda.graph(graph):
            recorded = sparse()
    except Exception as error:  # the other products are still wanted
        return calls, in_short(error)
    calls["cuSPARSELt"] = lambda: (graph.replay(), recorded)[1]
    error = ((y - wanted).abs().max() / wanted.abs().max()).item()
    return calls, f"algorithm, split and its mode: {', '.join(map(str, algorithm))}; off by {error:.2g}; kernels only"
