r"""MVUE (arXiv 2203.10991): unbiased pruning of the gradients in dw, against top-N and random pruning.

    python launch.py --config=experiments/studies/mvue.py:vit_cpu --sweep \
        --results=experiments/results/mvue_vit_cpu.jsonl

The variants are resnet, vit and gpt, each with _cpu or _gpu: the networks of the other studies. None of the paper's
tables could be verified, so there is no published column.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.studies import network, pgf, s_ste, sdgp, seeds

METHODS = (
    "dense",
    "mvue(2,4)",
    "drhs_g=mvue_approx(2,4)",
    "mvue(1,2)",
    "mvue(1,4)",
    "mvue(1,8)",
    "top_gradient(2,4)",
    "top_gradient(1,4)",
    "top_gradient(1,8)",
    "drhs_g=uniform(2,4)",
    "fwd_rhs=ste(hold(transposable(4,8),every=40)); drhs_g=mvue(2,4)",  # every product has a sparse operand
)


def pairs(variant: str = "") -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Return the pairs of methods that are compared: by question, and by the table's column."""
    questions = {
        f"unbiased over least squares, {n}:{m}": [(f"mvue({n},{m})", f"top_gradient({n},{m})")]
        for n, m in ((2, 4), (1, 4), (1, 8))
    }
    questions["exact over approximate, 2:4"] = [("mvue(2,4)", "drhs_g=mvue_approx(2,4)")]
    questions["least variance over uniform, 2:4"] = [("mvue(2,4)", "drhs_g=uniform(2,4)")]
    return {label: {"difference": compared} for label, compared in questions.items()}


def against(variant: str = "") -> str:
    """Return the name of the results of dense runs that cost as much. Residual networks have none."""
    return "" if variant.startswith("resnet") else f"shorter_{variant or 'vit_cpu'}"


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    model, of_size = network(variant, ("resnet", "vit", "gpt"))
    c = {"resnet": sdgp, "vit": pgf, "gpt": s_ste}[model].get_config(of_size)
    inner = {"resnet": r"stages/.*", "vit": r"blocks/.*", "gpt": r"blocks/.*"}[model]
    c.rules = ((inner, "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: every method with three seeds."""
    return seeds("sparsity.blocks", METHODS)
