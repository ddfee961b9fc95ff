"""The speed of cuSPARSELt, through torch."""

import importlib.util
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import jax

from experiments.bench import tune
from experiments.bench.kernels.report import Report, Setting
from experiments.bench.kernels.times import Program, Times, built, repeated, timed
from experiments.bench.measure import in_short
from nmjax.core.refusal import Refusal
from nmjax.kernels import tuning
from nmjax.kernels.limits import Shape, product_refusal
from nmjax.kernels.targets import Target

PRODUCTS = ("torch dense", "cuSPARSELt", "XLA dense", "ours")


def cusparselt(setting: Setting, report: Report) -> None:
    """Report the speed of cuSPARSELt's products, beside torch's, XLA's and ours."""
    torch = torch_on_a_gpu()
    if isinstance(torch, Refusal):
        report.table("cuSPARSELt", f"Not run: {torch}.", ["product"])
        return
    report.table(
        "cuSPARSELt",
        f"Through torch {torch.__version__}, by the algorithm that its search finds. Beside it are torch's dense "
        "products, XLA's and ours, timed in turn: n x n x n, both operands k-major, a plain result in bf16.",
        ["product", "ms", "TFLOP/s", "over torch's dense", "over cuSPARSELt", "note"],
    )
    device, pool = setting.target, tune.Pool(max(setting.sizes) ** 2)
    for n, kind in product(setting.sizes, ("bf16", "FP8")):
        times, notes = beside(torch, n, kind, device, pool, setting.rounds)
        for name in PRODUCTS:
            over = [times.over(name, base) for base in PRODUCTS[:2]]
            note = times.note(name, notes.get(name, ""))
            report.row(f"{n}, {kind}, {name}", times.ms(name), times.rate(name, 2 * n**3), *over, note)
        torch.cuda.empty_cache()


def torch_on_a_gpu() -> Any:
    """Return torch, or a refusal if it is not installed or sees no GPU."""
    torch = import_module("torch") if importlib.util.find_spec("torch") else None
    if torch is None or not torch.cuda.is_available():
        return Refusal("PyTorch sees no GPU" if torch else "PyTorch is not installed")
    return torch


def beside(
    torch: Any, n: int, kind: str, device: Target, pool: tune.Pool, rounds: int
) -> tuple[Times, dict[str, str]]:  # fmt: skip
    """Return the times of `PRODUCTS` of n x n x n, taken in turn, and notes on them.

    Args:
      torch: The module.
      n: The size.
      kind: "bf16" or "FP8".
      device: Where ours runs.
      pool: Operands of ours.
      rounds: How often each is timed.
    """
    shape = Shape(n, n, n, "bfloat16" if kind == "bf16" else "float8_e4m3fn")
    programs = {"XLA dense": repeated(tune.dense(shape, device), partial(pool.dense_pair, shape), 1)}
    theirs, notes = _by_torch(torch, n, kind)
    refusal, tiling = product_refusal(shape, device), tuning.chosen(shape, device)
    if refusal is not None or tiling is None:
        notes["ours"] = f"{refusal}"
    else:
        programs["ours"] = repeated(tune.packed(shape, device, tiling.config), partial(pool.pair, shape), 1)
        notes["ours"] = f"{tiling.config}"
    wait = lambda result: (jax.block_until_ready(result), torch.cuda.synchronize())
    return timed(built(programs) | theirs, rounds, wait=wait), notes


def _by_torch(torch, n: int, kind: str) -> tuple[dict[str, Program], dict[str, str]]:
    """Return torch's dense and sparse product of random values, and notes on them."""
    draw = torch.Generator("cuda").manual_seed(n)
    dense, w, x = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16, generator=draw) for _ in range(3))
    kept = torch.rand(n, n // 4, 4, device="cuda", generator=draw).argsort(-1).argsort(-1) < 2
    w, out = w * kept.view(n, n), None
    times = lambda a: a @ x.t()
    if kind == "FP8":
        dense, w, x = (v.to(torch.float8_e4m3fn) for v in (dense, w, x))
        one, out = torch.ones((), device="cuda"), torch.bfloat16
        times = lambda a: torch._scaled_mm(a, x.t(), scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=True)
    programs, notes = {"torch dense": Program(partial(times, dense))}, {}
    try:
        compressed, algorithm = torch._cslt_compress(w), (0, 1, -1)
        try:
            algorithm = torch._C._cusparselt.mm_search(compressed, x.t(), None, None, out, False)[:3]
            notes["cuSPARSELt"] = f"algorithm, split and its mode: {', '.join(map(str, algorithm))}"
        except Exception as error:  # torch has another name for it, or cannot search
            notes["cuSPARSELt"] = f"its default algorithm, because the search failed: {in_short(error)}"
        sparse = lambda: torch._cslt_sparse_mm(compressed, x.t(), None, None, out, False, *algorithm)
        y, wanted = sparse().float(), times(w).float()
        notes["cuSPARSELt"] += f"; off by {((y - wanted).abs().max() / wanted.abs().max()).item():.2g}"
        programs["cuSPARSELt"], note = _replayed(torch, sparse)
        notes["cuSPARSELt"] += note
    except Exception as error:  # the other products are still wanted
        notes["cuSPARSELt"] = in_short(error)
    return programs, notes


def _replayed(torch: Any, call: Callable[[], Any]) -> tuple[Program, str]:
    """Return a program that replays the kernels of a call, and a note.

    torch plans cuSPARSELt's product again at each call. This may take longer than the product.
    """
    graph = torch.cuda.CUDAGraph()

    def replay() -> Any:
        graph.replay()
        return y

    try:
        with torch.cuda.graph(graph):
            y = call()
    except Exception as error:  # its kernels cannot be recorded
        return Program(call), f"; planned again at each call, because its kernels cannot be recorded: {in_short(error)}"
    return Program(replay), "; kernels only: the time in which torch plans the product is left out"
