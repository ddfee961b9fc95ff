r"""Whole rows in dw against single values, on the ViT of methods.py.

    python launch.py --config=experiments/studies/whole_rows.py:vit_cpu --sweep \
        --results=experiments/results/whole_rows_vit_cpu.jsonl

dw = xᵀ·g sums over tokens, where g is the gradient of the output. If n of m tokens are kept whole, the product is
smaller on any device. If they are chosen by x, only their rows of x are kept in memory. Single values at the same n:m
cost as many FLOPs, and usually have less variance than rows that are chosen by one norm. Rows are chosen by the norms
of g, of x, or of both.
"""

from experiments.studies import as_good, better, launched, methods

METHODS = {
    "MVUE(dw) 2:4, single values": "dw_g=mvue(2,4)",
    "MVUE(dw) 1:4, single values": "dw_g=mvue(1,4)",
    "rows by g 2:4": "dw_g=rows(mvue(2,4))",
    "rows by g 1:4": "dw_g=rows(mvue(1,4))",
    "rows by x 2:4": "dw_x=rows(mvue(2,4))",
    "rows by x 1:4": "dw_x=rows(mvue(1,4))",
    "rows by both 1:4": "dw_g=rows(mvue(1,4),by='both')",
}
BASELINE, BOTH = "rows by g 1:4", "rows by both 1:4"  # the dense baselines have the FLOPs of the first
CLAIMS = []
for pattern in ("2:4", "1:4"):
    for by in ("g", "x"):
        rows, values = f"rows by {by} {pattern}", f"MVUE(dw) {pattern}, single values"
        text = f"Whole rows in dw ({pattern}, chosen by {by}) are as good as"
        CLAIMS.append(as_good(rows, values, f"{text} single values at the same FLOPs"))
        CLAIMS.append(as_good(rows, text=f"{text} dense"))
text = "Whole rows in dw (1:4) that are chosen by g and x are better than those chosen by g"
CLAIMS.append(better(BOTH, BASELINE, text))
text = "Whole rows in dw (1:4, chosen by g and x) are as good as single values at the same FLOPs"
CLAIMS.append(as_good(BOTH, "MVUE(dw) 1:4, single values", text))

SUBJECT = "Training with whole rows in dw (1:4, chosen by g) is"
design = methods.on_vit(METHODS, BASELINE, methods.DenseBaseline(0.7645, 56, 221), CLAIMS, SUBJECT)
get_config, get_sweep = launched(design)
