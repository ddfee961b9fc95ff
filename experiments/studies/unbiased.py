r"""The two halves of MVUE's claim (arXiv 2203.10991), on the ViT of methods.py.

    python launch.py --config=experiments/studies/unbiased.py:vit_cpu --sweep \
        --results=experiments/results/unbiased_vit_cpu.jsonl

The paper says that weights and activations should be pruned by least squares, and g in the product for dw without
bias. Each config prunes one of the three operands, in one of the two ways. STE is least-squares pruning of weights.
"""

from experiments.studies import as_good, better, launched, methods

LARGEST, MVUE = "least-squares g in dw", "MVUE(dw)"
METHODS = {
    "STE": "y_w=ste(mse(2,4))",
    "unbiased weights": "y_w=ste(mvue(2,4))",
    "least-squares activations": "y_x=ste(mse(2,4))",
    "unbiased activations": "y_x=ste(mvue(2,4))",
    LARGEST: "dw_g=mse(2,4)",
    MVUE: "dw_g=mvue(2,4)",
}
CLAIMS = []
for operand, group in (("weights", "STE"), ("activations", "least-squares activations")):
    text, other = f"Least-squares pruning of {operand} is", "unbiased pruning, which is random in the test too"
    CLAIMS.append(better(group, f"unbiased {operand}", f"{text} better than {other}"))
    CLAIMS.append(as_good(group, text=f"{text} as good as dense"))
CLAIMS += [
    better(MVUE, LARGEST, "MVUE(dw) is better than keeping the largest values of g in dw", "MVUE"),
    as_good(MVUE),
    as_good(LARGEST, text="Keeping the largest values of g in dw is as good as dense"),
]

SUBJECT = "Training with least-squares 2:4 weights is"
design = methods.on_vit(METHODS, "STE", methods.DenseBaseline(0.843, 60, 223), CLAIMS, SUBJECT)
get_config, get_sweep = launched(design)
