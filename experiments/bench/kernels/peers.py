"""The speed of cuSPARSELt, through torch."""

import importlib.util
from functools import partial
from importlib import import_module
from itertools import product

import jax

from experiments.bench import tune
from experiments.bench.kernels.report import Report, Setting
from experiments.bench.kernels.times import Program, built, repeated, timed
from experiments.bench.measure import in_short
from nmjax.kernels import tuning
from nmjax.kernels.limits import Shape, product_refusal


def cusparselt(setting: Setting, report: Report) -> None:
    """Report the speed of cuSPARSELt's products, beside torch's, XLA's and ours."""
    torch = import_module("torch") if importlib.util.find_spec("torch") else None
    if torch is None or not torch.cuda.is_available():
        reason = "PyTorch sees no GPU." if torch else "PyTorch is not installed."
        report.table("cuSPARSELt", f"Not run: {reason}", ["product"])
        return
    report.table(
        "cuSPARSELt",
        f"Through torch {torch.__version__}, by the algorithm that its search finds. Beside it are torch's dense "
        "products, XLA's and ours, timed in turn: n x n x n, both operands k-major, a plain result in bf16.",
        ["product", "ms", "TFLOP/s", "over torch's dense", "over cuSPARSELt", "note"],
    )
    device, pool = setting.target, tune.Pool(max(setting.sizes) ** 2)
    for n, kind in product(setting.sizes, ("bf16", "FP8")):
        shape = Shape(n, n, n, "bfloat16" if kind == "bf16" else "float8_e4m3fn")
        programs = {"XLA dense": repeated(tune.dense(shape, device), partial(pool.dense_pair, shape), 1)}
        theirs, notes = _by_torch(torch, n, kind)
        refusal = product_refusal(shape, device)
        if refusal is not None:
            notes["ours"] = refusal.reason
        else:
            config = tuning.chosen(shape, device).config
            programs["ours"] = repeated(tune.packed(shape, device, config), partial(pool.pair, shape), 1)
            notes["ours"] = f"{config}"
        wait = lambda result: (jax.block_until_ready(result), torch.cuda.synchronize())
        times = timed(built(programs) | theirs, setting.rounds, wait=wait)
        for name in ("torch dense", "cuSPARSELt", "XLA dense", "ours"):
            over = [times.over(name, base) for base in ("torch dense", "cuSPARSELt")]
            note = times.note(name, notes.get(name, ""))
            report.row(f"{n}, {kind}, {name}", times.ms(name), times.rate(name, shape.flops), *over, note)
        del theirs, programs
        torch.cuda.empty_cache()


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
        programs["cuSPARSELt"] = Program(sparse)
    except Exception as error:  # the other products are still wanted
        notes["cuSPARSELt"] = in_short(error)
    return programs, notes
