"""What none of the papers has: every product of training sparse, by mixes of their methods.

    python launch.py --config=experiments/studies/composed.py:vit_cpu --sweep --results=experiments/results/composed_vit_cpu.jsonl

Weights by S-STE or MdGf, gradients in dw by MVUE, and in dx by SDGP or MVUE: which mix keeps dense accuracy, at which effective
FLOPs? Beside them plain STE and transposable weights, a shorter fading, and gradients that are whole in the end. Variants vit_cpu,
vit_gpu, gpt_cpu and gpt_gpu: the networks of the studies pgf and s_ste, every layer of their blocks sparse.
"""

from experiments.studies import pgf, s_ste, seeds

WEIGHTS = {
    "S-STE": "fwd_rhs=ste(soft(2,4))",
    "MdGf to 70 %": "mdgf(2,4,linear(1,0,70%))",
    "MdGf to 30 %": "mdgf(2,4,linear(1,0,30%))",
    "STE": "ste(2,4)",
    "transposable": "fwd_rhs=ste(hold(transposable(2,4),every=40))",  # its dx is sparse by its weights
}
GRADIENTS = {
    "weights": "",
    "dw": "; drhs_g=mvue(2,4)",
    "dw, SDGP dx": "; drhs_g=mvue(2,4); dlhs_g=rescale(mse(2,4),'group')",
    "dw, dx": "; drhs_g=mvue(2,4); dlhs_g=mvue(2,4)",
    "dw, dx to 80 %": "; drhs_g=stages(((0,mvue(2,4)),(80%,identity))); dlhs_g=stages(((0,mvue(2,4)),(80%,identity)))",
}
MIXES = {
    "S-STE": ("weights", "dw", "dw, SDGP dx", "dw, dx", "dw, dx to 80 %"),
    "MdGf to 70 %": ("weights", "dw", "dw, SDGP dx", "dw, dx"),
    "MdGf to 30 %": ("dw", "dw, dx"),
    "STE": ("dw, dx",),
    "transposable": ("weights", "dw"),
}
NAMES = {(of, by): WEIGHTS[of] + GRADIENTS[by] for of, each in MIXES.items() for by in each}  # of methods, in a picture


def pairs(variant=""):
    """What is asked: what gradients in dx are worth, of MVUE and of SDGP; MdGf's dense beginning; whole gradients in the end."""
    asked = {f"MVUE over SDGP in dx, {of}": ((of, "dw, dx"), (of, "dw, SDGP dx")) for of in ("S-STE", "MdGf to 70 %")}
    asked |= {
        "MdGf over S-STE, every product sparse": (("MdGf to 70 %", "dw, dx"), ("S-STE", "dw, dx")),
        "MdGf to 70 % over to 30 %, MVUE in dw": (("MdGf to 70 %", "dw"), ("MdGf to 30 %", "dw")),
        "MdGf to 70 % over to 30 %, every product sparse": (("MdGf to 70 %", "dw, dx"), ("MdGf to 30 %", "dw, dx")),
        "S-STE over STE, every product sparse": (("S-STE", "dw, dx"), ("STE", "dw, dx")),
        "S-STE over transposable, every product sparse": (("S-STE", "dw, dx"), ("transposable", "dw")),
        "S-STE, whole gradients from 80 % on over never": (("S-STE", "dw, dx to 80 %"), ("S-STE", "dw, dx")),
    }
    return {label: {"difference": [(NAMES[a], NAMES[b])]} for label, (a, b) in asked.items()}


def against(variant=""):
    """The results of dense runs that cost as much."""
    return f"shorter_{variant or 'vit_cpu'}"


def get_config(variant=""):
    model, _, of = (variant or "vit_cpu").partition("_")
    if model not in ("vit", "gpt"):
        raise ValueError(f"there is no variant {variant!r}: vit or gpt, with _cpu or _gpu, as vit_cpu")
    c = {"vit": pgf, "gpt": s_ste}[model].get_config(of)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant=""):
    return seeds("sparsity.blocks", ["dense", *NAMES.values()])
