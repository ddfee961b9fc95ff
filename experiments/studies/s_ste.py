"""S-STE (arXiv 2409.09099): 2:4 feed-forward weights of a GPT, pruned continuously or not, and evaluated hardened.

    python launch.py --config=experiments/studies/s_ste.py:cpu --sweep --results=experiments/results/s_ste_cpu.jsonl
    python launch.py --config=experiments/studies/s_ste.py:gpu --sweep --results=experiments/results/s_ste_gpu.jsonl

cpu is a GPT of two blocks, trained on the bytes of tinyshakespeare. gpu is a GPT of twelve blocks, trained on books in
bfloat16, where part of SR-STE's term is lost to rounding. The paper's tables were not available, so there is no
published column. `fst` ends dense and is evaluated dense, as in its paper.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from experiments.studies import INTERVALS, VALIDATION, seeds, size

METHODS = (
    "dense",
    "ste(2,4)",
    "sr_ste(2,4,lam=2e-4)",
    "sr_ste(2,4,lam=6e-5)",
    "sr_ste(2,4,lam=6e-6)",
    "fst(dense_from=83%)",
    "s_ste(gradient='dense')",
    "fwd_rhs=ste(soft(2,4,scale='one'))",
    "fwd_rhs=ste(soft(2,4,scale='now'))",
    "ste(2,4); drhs_g=mvue_approx(2,4)",
    "s_ste(gradient='mvue_approx')",
    "s_ste(2,4)",
    "s_ste(fp8=True)",
    "s_ste(gradient='dense',fp8=True)",
)


PAIRS = {
    "SR-STE with λ = 2e-4 over STE": ("sr_ste(2,4,lam=2e-4)", "ste(2,4)"),
    "S-STE over STE": ("s_ste(gradient='dense')", "ste(2,4)"),
    "S-STE, frozen β over β = 1": ("s_ste(gradient='dense')", "fwd_rhs=ste(soft(2,4,scale='one'))"),
    "S-STE, frozen β over β of each step": ("s_ste(gradient='dense')", "fwd_rhs=ste(soft(2,4,scale='now'))"),
    "S-STE, with MVUE over without MVUE": ("s_ste(2,4)", "s_ste(gradient='dense')"),
    "S-STE, exact MVUE over approximate MVUE": ("s_ste(2,4)", "s_ste(gradient='mvue_approx')"),
    "S-STE, FP8 over float32, without MVUE": ("s_ste(gradient='dense',fp8=True)", "s_ste(gradient='dense')"),
    "S-STE, FP8 over float32, with MVUE": ("s_ste(fp8=True)", "s_ste(2,4)"),
}


def pairs(variant: str = "") -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Return the pairs of methods that are compared: by question, and by the table's column."""
    return {label: {"loss": [pair]} for label, pair in PAIRS.items()}


def against(variant: str = "") -> str:
    """Return the name of the results of dense runs that cost as much."""
    return f"shorter_gpt_{size(variant)}"


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a size."""
    c = common.gpt("")
    c.data.validation = VALIDATION
    if size(variant) == "gpu":
        c.model.size, c.data.name, c.data.test = "small", "books_train.txt.xz", "books_val.txt.xz"
        c.data.tokenizer, c.data.length, c.dtype = "books_bpe16k.json", 512, "bfloat16"
        c.steps, c.batch, c.learning_rate.peak, c.learning_rate.end = 3000, 64, 6e-4, 6e-5
    else:
        c.data.name, c.data.windows = "tinyshakespeare.txt", 256
        c.unlock()
        c.model.depth, c.steps, c.batch = 2, 400, 8
        c.update(INTERVALS)
        c.lock()
    c.rules = ((r"blocks/.*/mlp/.*", "mlp"), (r".*", "dense"))
    c.sparsity = dict(mlp="dense")
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every method with three seeds."""
    return seeds("sparsity.mlp", METHODS)
