"""What none of the papers has: every product of training sparse, by mixes of their methods.

    python launch.py --config=experiments/studies/composed.py:vit_cpu --sweep --results=experiments/results/composed_vit_cpu.jsonl

Weights by S-STE or MdGf, gradients in dw by MVUE, and in dx by SDGP or MVUE: which mix keeps dense accuracy, at which effective
FLOPs? Variants vit_cpu, vit_gpu, gpt_cpu and gpt_gpu: the networks of the studies pgf and s_ste, every layer of their blocks sparse.
"""

from experiments.studies import pgf, s_ste, seeds

WEIGHTS = {
    "S-STE": "fwd_rhs=ste(soft(2,4))",
    "MdGf": "mdgf(2,4,linear(1,0,70%))",
    "transposable": "fwd_rhs=ste(hold(transposable(2,4),every=40))",
}
SUMMED, BACK = "drhs_g=mvue(2,4)", {"SDGP": "dlhs_g=rescale(mse(2,4),'group')", "MVUE": "dlhs_g=mvue(2,4)"}
LABELS = {"dense": "dense"}  # of methods, as a picture names them
LABELS |= {w: of for of, w in WEIGHTS.items()}
LABELS |= {f"{w}; {SUMMED}": f"{of} + MVUE dw" for of, w in WEIGHTS.items()}
LABELS |= {
    f"{w}; {SUMMED}; {dx}": f"{of} + MVUE dw + {by} dx"
    for by, dx in BACK.items()
    for of, w in WEIGHTS.items()
    if of != "transposable"  # whose dx is sparse already
}


def pairs(variant=""):
    """What is asked: what gradients in dx are worth, of MVUE and of SDGP, and MdGf's dense beginning."""
    method = {label: text for text, label in LABELS.items()}
    each = {
        f"MVUE over SDGP in dx, {of}": (f"{of} + MVUE dw + MVUE dx", f"{of} + MVUE dw + SDGP dx")
        for of in list(WEIGHTS)[:2]
    }
    each["MdGf over S-STE, every product sparse"] = tuple(f"{of} + MVUE dw + MVUE dx" for of in ("MdGf", "S-STE"))
    each["S-STE over transposable, every product sparse"] = ("S-STE + MVUE dw + MVUE dx", "transposable + MVUE dw")
    return {label: {"difference": [(method[a], method[b])]} for label, (a, b) in each.items()}


def get_config(variant=""):
    model, _, of = (variant or "vit_cpu").partition("_")
    if model not in ("vit", "gpt"):
        raise ValueError(f"there is no variant {variant!r}: vit or gpt, with _cpu or _gpu, as vit_cpu")
    c = {"vit": pgf, "gpt": s_ste}[model].get_config(of)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant=""):
    return seeds("sparsity.blocks", LABELS)
