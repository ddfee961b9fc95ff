"""MVUE (arXiv 2203.10991): gradients of weights pruned unbiased, beside those that keep the largest or any.

    python launch.py --config=experiments/studies/mvue.py:vit_cpu --sweep --results=experiments/results/mvue_vit_cpu.jsonl

Variants are resnet, vit and gpt, each with _cpu or _gpu: the networks of the other studies. Of the paper's tables none could be
verified: there is no column beside ours.
"""

from experiments.studies import pgf, s_ste, sdgp, seeds

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


def pairs(variant=""):
    """What is asked: what no bias is worth, and the exact form over the approximation."""
    asked = {
        f"unbiased over least squares, {n}:{m}": [(f"mvue({n},{m})", f"top_gradient({n},{m})")]
        for n, m in ((2, 4), (1, 4), (1, 8))
    }
    asked["exact over approximate, 2:4"] = [("mvue(2,4)", "drhs_g=mvue_approx(2,4)")]
    asked["least variance over uniform, 2:4"] = [("mvue(2,4)", "drhs_g=uniform(2,4)")]
    return {label: {"difference": found} for label, found in asked.items()}


def against(variant=""):
    """The results of dense runs that cost as much, of the networks that have some."""
    return "" if variant.startswith("resnet") else f"shorter_{variant or 'vit_cpu'}"


def get_config(variant=""):
    model, _, of = (variant or "vit_cpu").partition("_")
    if model not in ("resnet", "vit", "gpt"):
        raise ValueError(f"there is no variant {variant!r}: resnet, vit or gpt, with _cpu or _gpu, as vit_cpu")
    c = {"resnet": sdgp, "vit": pgf, "gpt": s_ste}[model].get_config(of)
    inner = {"resnet": r"stages/.*", "vit": r"blocks/.*", "gpt": r"blocks/.*"}[model]
    c.rules = ((inner, "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant=""):
    return seeds("sparsity.blocks", METHODS)
