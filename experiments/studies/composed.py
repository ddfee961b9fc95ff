"""What none of the papers has: every product of training sparse, by mixes of their methods.

    python launch.py --config=experiments/studies/composed.py:vit_cpu --sweep --results=experiments/results/composed_vit_cpu.jsonl

Weights by S-STE or MdGf, gradients in dw by MVUE, and in dx by SDGP or MVUE: which mix keeps dense accuracy, at which effective
FLOPs? Variants vit_cpu, vit_gpu, gpt_cpu and gpt_gpu: the networks of the studies pgf and s_ste, every layer of their blocks sparse.
"""

from experiments.studies import pgf, s_ste, seeds

WEIGHTS = ("fwd_rhs=ste(soft(2,4))", "mdgf(2,4,linear(1,0,70%))", "fwd_rhs=ste(hold(transposable(2,4),every=40))")
METHODS = (
    "dense",
    *WEIGHTS,
    *(f"{w}; drhs_g=mvue(2,4)" for w in WEIGHTS),
    *(f"{w}; drhs_g=mvue(2,4); dlhs_g=rescale(mse(2,4),'group')" for w in WEIGHTS[:2]),
    *(f"{w}; drhs_g=mvue(2,4); dlhs_g=mvue(2,4)" for w in WEIGHTS[:2]),
)


def get_config(variant=""):
    model, _, of = (variant or "vit_cpu").partition("_")
    if model not in ("vit", "gpt"):
        raise ValueError(f"there is no variant {variant!r}: vit or gpt, with _cpu or _gpu, as vit_cpu")
    c = {"vit": pgf, "gpt": s_ste}[model].get_config(of)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant=""):
    return seeds("sparsity.blocks", METHODS)
