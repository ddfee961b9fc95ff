r"""Whole rows in dw against single values, on the ViT of methods.py.

    python launch.py --config=experiments/studies/whole_rows.py:vit_cpu --sweep \
        --results=experiments/results/whole_rows_vit_cpu.jsonl

dw = xᵀ·g sums over tokens, where g is the gradient of the output. If n of m tokens are kept whole, the product is
smaller on any device. If they are chosen by x, only their rows of x are kept in memory. Single values at the same n:m
cost as many FLOPs, and usually have less variance than rows that are chosen by one norm. Rows are chosen by the norms
of g, of x, or of both.
"""

from typing import Any

from experiments.studies import RANDOM, WORSE, Claim, five_seeds, methods, runs

METHODS = {
    "MVUE(dw) 2:4, single values": "dw_g=mvue(2,4)",
    "MVUE(dw) 1:4, single values": "dw_g=mvue(1,4)",
    "rows by g 2:4": "dw_g=rows(mvue(2,4))",
    "rows by g 1:4": "dw_g=rows(mvue(1,4))",
    "rows by x 2:4": "dw_x=rows(mvue(2,4))",
    "rows by x 1:4": "dw_x=rows(mvue(1,4))",
    "rows by both 1:4": "dw_g=rows(mvue(1,4),by='both')",
}
RIVAL = "rows by g 1:4"  # the dense rivals have its FLOPs

gate, seeds, get_config = methods.gate, five_seeds, methods.vit_config


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    found |= {name: {"sparsity.blocks": text} for name, text in METHODS.items()}
    found |= methods.rivals(get_config(variant), RIVAL, methods.Rival(0.7645, 56, 221))
    found[WORSE] = {"sparsity.blocks": RANDOM}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    found = []
    for pattern in ("2:4", "1:4"):
        for by in ("g", "x"):
            rows, values = f"rows by {by} {pattern}", f"MVUE(dw) {pattern}, single values"
            text = f"Whole rows in dw ({pattern}, chosen by {by}) are as good as"
            found.append(Claim(f"{text} single values at the same FLOPs", rows, "as good as", values))
            found.append(Claim(f"{text} dense", rows, "as good as", "dense"))
    both = "rows by both 1:4"
    text = "Whole rows in dw (1:4) that are chosen by g and x are better than those chosen by g"
    found.append(Claim(text, both, "better than", RIVAL))
    text = "Whole rows in dw (1:4, chosen by g and x) are as good as single values at the same FLOPs"
    found.append(Claim(text, both, "as good as", "MVUE(dw) 1:4, single values"))
    subject = "Training with whole rows in dw (1:4, chosen by g) is"
    return [*found, *methods.over_rivals(RIVAL, subject=subject)]


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
