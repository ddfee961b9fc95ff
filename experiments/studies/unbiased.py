r"""The two halves of MVUE's claim (arXiv 2203.10991), on a network that passes its gate.

    python launch.py --config=experiments/studies/unbiased.py:vit_cpu --sweep \
        --results=experiments/results/unbiased_vit_cpu.jsonl

The paper says that weights and activations should be pruned with the least squared error, and gradients in dw without
bias. Each of the three operands is pruned both ways here, alone.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.studies import FASHION, Claim, Gate, methods, runs

SEEDS = range(5)
SLOTS = {"weights": "fwd_rhs=ste({})", "activations": "fwd_lhs=ste({})", "gradients in dw": "drhs_g={}"}
HOW = {"least squares": "mse(2,4)", "unbiased": "mvue(2,4)"}


def arms(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return what each arm of the study changes, by its name."""
    found: dict[str, dict[str, Any]] = {"dense": {"sparsity.blocks": "dense"}}
    for operand, slot in SLOTS.items():
        found |= {f"{operand}, {how}": {"sparsity.blocks": slot.format(pruner)} for how, pruner in HOW.items()}
    found |= methods.rivals(get_config(variant), "weights, least squares", methods.Rival(0.843, 60, 223))
    found["dense, feed-forward of 8"] = {"model.hidden": 8}
    return found


def claims(variant: str = "") -> list[Claim]:
    """Return the claims that the study judges."""
    found = []
    for operand in SLOTS:
        first, second = ("least squares", "unbiased") if operand != "gradients in dw" else ("unbiased", "least squares")
        text = f"For {operand}, {first} is better than {second}"
        found.append(Claim(text, f"{operand}, {first}", "better than", f"{operand}, {second}", first_screen=True))
    for operand in SLOTS:
        first = "unbiased" if operand == "gradients in dw" else "least squares"
        text = f"{operand.capitalize()} pruned by {first} are as good as dense"
        found.append(Claim(text, f"{operand}, {first}", "as good as", "dense"))
    return found


def seeds(variant: str = "") -> list[int]:
    """Return the seeds of every arm."""
    return list(SEEDS)


def gate(variant: str = "") -> Gate:
    """Return what the dense network has to reach."""
    return FASHION


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    return methods.get_config(variant)


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every arm with every seed."""
    return runs(arms(variant), SEEDS)
