"""What none of the papers has: every product of training sparse, by mixes of their methods.

    python launch.py --config=experiments/studies/composed.py:cpu --sweep --results=experiments/results/composed_cpu.jsonl

Weights by S-STE or MdGf, gradients in dw by MVUE, and in dx by SDGP or MVUE: which mix keeps dense accuracy, at which effective
FLOPs? A ViT, as in configs/vit_24.py.
"""

from configs import common
from experiments.studies import SMALL_VIT, seeds, size

WEIGHTS = ("fwd_rhs=ste(soft(2,4))", "mdgf(2,4,linear(1,0,70%))", "fwd_rhs=ste(hold(transposable(2,4),every=40))")
METHODS = (
    "dense",
    *WEIGHTS,
    *(f"{w}; drhs_g=mvue(2,4)" for w in WEIGHTS),
    *(f"{w}; drhs_g=mvue(2,4); dlhs_g=rescale(mse(2,4),'group')" for w in WEIGHTS[:2]),
    *(f"{w}; drhs_g=mvue(2,4); dlhs_g=mvue(2,4)" for w in WEIGHTS[:2]),
)


def get_config(variant=""):
    gpu = size(variant) == "gpu"
    c = common.vit("cifar10" if gpu else "fashion_mnist")
    if not gpu:
        c.unlock()
        c.model = dict(SMALL_VIT)
        c.epochs, c.batch = 1.0, 64
        c.lock()
    c.rules = ((r"blocks/.*", "blocks"), (r".*", "dense"))
    c.sparsity = dict(blocks="dense")
    return c


def get_sweep(variant=""):
    return seeds("sparsity.blocks", METHODS)
