r"""Mixes of the papers' methods that make every product of training sparse. None of the papers has them.

    python launch.py --config=experiments/studies/composed.py:vit_cpu --sweep \
        --results=experiments/results/composed_vit_cpu.jsonl

Which mix keeps dense accuracy, and at which effective FLOPs? Weights are pruned by S-STE or MdGf, gradients in dw by
MVUE, and gradients in dx by SDGP or MVUE. For comparison there are plain STE, transposable weights, an MdGf that fades
earlier, and gradients that are whole at the end. The variants vit_cpu, vit_gpu, gpt_cpu and gpt_gpu are the networks
of the studies pgf and s_ste. Every layer of their blocks is sparse.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.studies import network, pgf, s_ste, seeds

WEIGHTS = {
    "S-STE": "fwd_rhs=ste(soft(2,4))",
    "MdGf to 70 %": "mdgf(2,4,linear(1,0,70%))",
    "MdGf to 30 %": "mdgf(2,4,linear(1,0,30%))",
    "STE": "ste(2,4)",
    "transposable": "fwd_rhs=ste(hold(transposable(2,4),every=40))",  # the pruned weight makes dx sparse too
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
# the methods by their names in a picture: kind of weights, kind of gradients
NAMES = {
    (weights, gradients): WEIGHTS[weights] + GRADIENTS[gradients]
    for weights, each in MIXES.items()
    for gradients in each
}


def pairs(variant: str = "") -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Return the pairs of methods that are compared: by question, and by the table's column."""
    questions: dict[str, Any] = {
        f"MVUE over SDGP in dx, {weights}": ((weights, "dw, dx"), (weights, "dw, SDGP dx"))
        for weights in ("S-STE", "MdGf to 70 %")
    }
    questions |= {
        "MdGf over S-STE, every product sparse": (("MdGf to 70 %", "dw, dx"), ("S-STE", "dw, dx")),
        "MdGf to 70 % over MdGf to 30 %, MVUE in dw": (("MdGf to 70 %", "dw"), ("MdGf to 30 %", "dw")),
        "MdGf to 70 % over MdGf to 30 %, every product sparse": (
            ("MdGf to 70 %", "dw, dx"),
            ("MdGf to 30 %", "dw, dx"),
        ),
        "S-STE over STE, every product sparse": (("S-STE", "dw, dx"), ("STE", "dw, dx")),
        "S-STE over transposable, every product sparse": (("S-STE", "dw, dx"), ("transposable", "dw")),
        "S-STE, gradients pruned for 80 % of the run over for all of it": (
            ("S-STE", "dw, dx to 80 %"),
            ("S-STE", "dw, dx"),
        ),
    }
    return {label: {"difference": [(NAMES[a], NAMES[b])]} for label, (a, b) in questions.items()}


def against(variant: str = "") -> str:
    """Return the name of the results of dense runs that cost as much."""
    return f"shorter_{variant or 'vit_cpu'}"


def get_config(variant: str = "") -> ConfigDict:
    """Return the config of a variant."""
    model, of_size = network(variant, ("vit", "gpt"))
    c = {"vit": pgf, "gpt": s_ste}[model].get_config(of_size)
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant: str = "") -> list[dict[str, Any]]:
    """Return the runs: dense and every mix, with three seeds each."""
    return seeds("sparsity.blocks", ["dense", *NAMES.values()])
