r"""The two halves of MVUE's claim (arXiv 2203.10991), on the ViT of methods.py.

    python launch.py --config=experiments/studies/unbiased.py:vit_cpu --sweep \
        --results=experiments/results/unbiased_vit_cpu.jsonl

The paper says that weights and activations should be pruned with the least squared error, and gradients in dw without
bias. Each arm prunes one of the three operands, in one of the two ways.
"""

from typing import Any

from experiments.studies import RANDOM, WORSE, Claim, five_seeds, methods, runs

SLOTS = {"weights": "fwd_rhs=ste({})", "activations": "fwd_lhs=ste({})", "gradients in dw": "drhs_g={}"}
HOW = {"least squares": "mse(2,4)", "unbiased": "mvue(2,4)"}

gate, seeds, get_config = methods.gate, five_seeds, methods.vit_config


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    for operand, slot in SLOTS.items():
        found |= {f"{operand}, {how}": {"sparsity.blocks": slot.format(pruner)} for how, pruner in HOW.items()}
    found |= methods.rivals(get_config(variant), "weights, least squares", methods.Rival(0.843, 60, 223))
    found[WORSE] = {"sparsity.blocks": RANDOM}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    biased, unbiased = (f"{how} pruning of" for how in ("Least-squares", "Unbiased"))
    found = []
    for operand in SLOTS:
        better, other = ("unbiased", "least squares") if operand == "gradients in dw" else ("least squares", "unbiased")
        words, others = (unbiased, biased) if better == "unbiased" else (biased, unbiased)
        arm = f"{operand}, {better}"
        text = f"{words} {operand} is better than {others.lower().removesuffix(' of')}"
        if better == "least squares":
            text += ", which is random in the test too"
        found.append(Claim(text, arm, "better than", f"{operand}, {other}", operand == "gradients in dw"))
        found.append(Claim(f"{words} {operand} is as good as dense", arm, "as good as", "dense"))
    arm = "gradients in dw, least squares"
    found.append(Claim(f"{biased} gradients in dw is as good as dense", arm, "as good as", "dense"))
    subject = "Training with least-squares 2:4 weights is"
    return [*found, *methods.over_rivals("weights, least squares", subject=subject)]


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), seeds(variant))
