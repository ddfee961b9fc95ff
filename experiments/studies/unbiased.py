r"""The two halves of MVUE's claim (arXiv 2203.10991), on the ViT of methods.py.

    python launch.py --config=experiments/studies/unbiased.py:vit_cpu --sweep \
        --results=experiments/results/unbiased_vit_cpu.jsonl

The paper says that weights and activations should be pruned by least squares, and g in the product for dw without
bias. Each arm prunes one of the three operands, in one of the two ways. STE is least-squares pruning of weights.
"""

from typing import Any

from experiments.studies import RANDOM, WORSE, Claim, five_seeds, methods, runs

LARGEST = "least-squares g in dw"
METHODS = {
    "STE": "y_w=ste(mse(2,4))",
    "unbiased weights": "y_w=ste(mvue(2,4))",
    "least-squares activations": "y_x=ste(mse(2,4))",
    "unbiased activations": "y_x=ste(mvue(2,4))",
    LARGEST: "dw_g=mse(2,4)",
    "MVUE(dw)": "dw_g=mvue(2,4)",
}

gate, seeds, get_config = methods.gate, five_seeds, methods.vit_config


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    found |= {name: {"sparsity.blocks": text} for name, text in METHODS.items()}
    found |= methods.rivals(get_config(variant), "STE", methods.Rival(0.843, 60, 223))
    found[WORSE] = {"sparsity.blocks": RANDOM}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    found = []
    for operand, arm in (("weights", "STE"), ("activations", "least-squares activations")):
        text, other = f"Least-squares pruning of {operand} is", "unbiased pruning, which is random in the test too"
        found.append(Claim(f"{text} better than {other}", arm, "better than", f"unbiased {operand}"))
        found.append(Claim(f"{text} as good as dense", arm, "as good as", "dense"))
    text = "MVUE(dw) is better than keeping the largest values of g in dw"
    found.append(Claim(text, "MVUE(dw)", "better than", LARGEST, "MVUE"))
    found.append(Claim("MVUE(dw) is as good as dense", "MVUE(dw)", "as good as", "dense"))
    found.append(Claim("Keeping the largest values of g in dw is as good as dense", LARGEST, "as good as", "dense"))
    return [*found, *methods.over_rivals("STE", subject="Training with least-squares 2:4 weights is")]


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
